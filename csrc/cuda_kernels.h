// What kernels.cu offers to ops.cpp. Every launch goes to the given stream of the current device, reads nothing back
// and allocates nothing, so a CUDA graph can capture it. Failures throw std::runtime_error.
#pragma once

#include "calls.h"

namespace ck {

void launch_factor(const FactorCall& call, bool is_double, int64_t batch, void* stream);
void launch_spectrum(const SpectrumCall& call, bool is_double, int64_t batch, void* stream);
void launch_samples(const SampleCall& call, int64_t heads, void* stream);

}  // namespace ck
