// What one op call hands to the code that runs it, on the CPU (cpu_kernels.h) or on a GPU (kernels.cu).
#pragma once

#include <cstdint>

namespace ck {

enum class Number { bfloat16, float32, float64 };

struct GramCall {
  const void* weights;  // batch x rows x cols, any strides (in elements)
  Number type;          // of weights
  int64_t stride[3];
  int64_t rows;
  int64_t cols;
  bool wide_products;  // multiply in double
  bool wide_gram;      // gram is double, else float
  void* gram;          // batch x rows x rows, contiguous
};

struct ProductCall {
  const void* factor;   // batch x rows x rows, contiguous
  bool wide;            // factor is double, and so are products
  const void* weights;  // batch x rows x cols, any strides
  Number type;          // of weights
  int64_t stride[3];
  int64_t rows;
  int64_t cols;
  void* out;  // batch x rows x cols, any strides
  bool wide_out;
  int64_t out_stride[3];
};

struct FactorCall {
  const void* gram;  // batch x n x n, any strides (in elements)
  int64_t stride[3];
  int n;
  bool polar;
  void* factor;    // batch x n x n, contiguous, the type of gram
  void* residual;  // batch
  int8_t* status;  // batch
};

struct SpectrumCall {
  const void* gram;
  int64_t stride[3];
  int n;
  int max_steps;
  double rtol;
  bool give_up;  // as soon as rtol is out of reach
  const double* error;  // batch: |lambda_i(gram) - lambda_i(exact)| <= error
  const void* start;    // batch x 2 x n, contiguous, the type of gram; or null
  double* bounds;       // batch x 6
  void* vectors;        // batch x 2 x n
  int32_t* steps;       // batch
  int8_t* status;       // batch
};

struct SampleCall {
  uint64_t key;
  int64_t head;   // of row 0 of out
  int64_t first;  // element of column 0 of out
  int64_t count;  // columns of out
  float* out;     // heads x count, contiguous
};

// A row of samples is made in pieces of this many elements, which are also what threads share out.
constexpr int64_t sample_piece = 1 << 14;
inline int64_t sample_pieces(const SampleCall& call) { return (call.count + sample_piece - 1) / sample_piece; }

}  // namespace ck
