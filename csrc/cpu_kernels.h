// The CPU code, compiled once per instruction set: cpu_matrices.cpp and cpu_samples.cpp with CK_ISA set.
#pragma once

#include "calls.h"

namespace ck {

// Each works through [begin, end) of its call: matrices, or pieces of all rows of samples.
struct MatrixKernels {
  void (*gram)(const GramCall&, int64_t begin, int64_t end);
  void (*product)(const ProductCall&, int64_t begin, int64_t end);
  void (*factor_float)(const FactorCall&, int64_t begin, int64_t end);
  void (*factor_double)(const FactorCall&, int64_t begin, int64_t end);
  void (*spectrum_float)(const SpectrumCall&, int64_t begin, int64_t end);
  void (*spectrum_double)(const SpectrumCall&, int64_t begin, int64_t end);
};
using SampleKernel = void (*)(const SampleCall&, int64_t begin, int64_t end);

extern const MatrixKernels matrices_baseline;
extern const SampleKernel samples_baseline;
#if defined(CK_HAS_AVX2)
extern const MatrixKernels matrices_avx2;
extern const SampleKernel samples_avx2;
#endif

}  // namespace ck
