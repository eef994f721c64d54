// One block per matrix, the matrix in shared memory; one thread per Philox counter.
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "cuda_kernels.h"
#include "philox.h"
#include "small_matrix.cuh"

namespace ck {
namespace {

// Threads per block. ptxas -v at these bounds: tests/compile/test_nvcc.py prints and checks the table.
constexpr int factor_threads = 256;
constexpr int spectrum_threads = 128;
constexpr int sample_threads = 256;

template <class T>
__device__ Source<T> matrix(const void* gram, const int64_t* stride, int64_t index) {
  return {static_cast<const T*>(gram) + index * stride[0], stride[1], stride[2]};
}

template <class T>
__global__ void __launch_bounds__(factor_threads, 1) factor_kernel(FactorCall call) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Block team{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  const int64_t b = blockIdx.x;
  const SmallMatrix<T, Block> algorithms(team, call.n);
  const Source<T> source = matrix<T>(call.gram, call.stride, b);
  T* out = static_cast<T*>(call.factor) + b * call.n * call.n;
  T* work = reinterpret_cast<T*>(memory);
  T residual;
  const Status status = call.polar ? algorithms.inverse_sqrt(source, work, out, residual)
                                   : algorithms.inverse_cholesky(source, work, out, residual);
  if (threadIdx.x == 0) {
    static_cast<T*>(call.residual)[b] = residual;
    call.status[b] = status;
  }
}

template <class T>
__global__ void __launch_bounds__(spectrum_threads, 1) spectrum_kernel(SpectrumCall call) {
  extern __shared__ __align__(16) unsigned char memory[];
  const Block team{static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)};
  const int64_t b = blockIdx.x;
  const int64_t pair = 2 * static_cast<int64_t>(call.n);
  const SmallMatrix<T, Block> algorithms(team, call.n);
  const T* start = call.start ? static_cast<const T*>(call.start) + b * pair : nullptr;
  const auto found = algorithms.spectrum_bracket(matrix<T>(call.gram, call.stride, b), call.error[b], call.rtol,
                                                 call.give_up, call.max_steps, start,
                                                 static_cast<T*>(call.vectors) + b * pair, reinterpret_cast<T*>(memory));
  if (threadIdx.x == 0) {
    found.store(call.bounds + 6 * b);
    call.steps[b] = found.steps;
    call.status[b] = found.status;
  }
}

__global__ void __launch_bounds__(sample_threads) sample_kernel(SampleCall call, int64_t heads, int64_t per_row) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= heads * per_row) return;
  const int64_t row = index / per_row;
  const int64_t block = call.first / 4 + index % per_row;
  float z[4];
  philox_normal4(call.key, static_cast<uint32_t>(call.head + row), static_cast<uint64_t>(block), z);
  float* out = call.out + row * call.count;
  for (int i = 0; i < 4; ++i) {
    const int64_t column = 4 * block + i - call.first;
    if (column >= 0 && column < call.count) out[column] = z[i];
  }
}

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::string message = std::string(what) + ": " + cudaGetErrorString(error);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
    message +=
        "; the extension has no code for this GPU. Set TORCH_CUDA_ARCH_LIST to its compute capability and run "
        "python -m conditioned_kernels.build, or pass backend='torch'";
  throw std::runtime_error(message);
}

int64_t shared_limit() {
  int device = 0, bytes = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  check(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  return bytes;
}

void need(int64_t bytes, int64_t limit, int n) {
  if (bytes <= limit) return;
  throw std::runtime_error("a matrix with n = " + std::to_string(n) + " needs " + std::to_string(bytes) +
                           " bytes of shared memory and this GPU has " + std::to_string(limit) +
                           "; pass backend='torch'");
}

void grid_fits(int64_t blocks) {
  if (blocks > INT32_MAX) throw std::runtime_error("more than 2^31 - 1 blocks in one launch; split the batch");
}

template <class Call>
void launch(void (*kernel)(Call), const Call& call, int64_t batch, int threads, int64_t bytes, void* stream) {
  grid_fits(batch);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
        "cudaFuncSetAttribute");
  kernel<<<static_cast<unsigned>(batch), threads, static_cast<size_t>(bytes), static_cast<cudaStream_t>(stream)>>>(call);
  check(cudaGetLastError(), "kernel launch");
}

template <class T>
void factor(const FactorCall& call, int64_t batch, void* stream) {
  const int64_t bytes = SmallMatrix<T, Block>::factor_workspace(call.n) * static_cast<int64_t>(sizeof(T));
  need(bytes, shared_limit(), call.n);
  launch(factor_kernel<T>, call, batch, factor_threads, bytes, stream);
}

template <class T>
void spectrum(SpectrumCall call, int64_t batch, void* stream) {
  using Matrix = SmallMatrix<T, Block>;
  const int64_t limit = shared_limit();
  const auto bytes = [&] { return Matrix::spectrum_workspace(call.n, call.max_steps) * int64_t{sizeof(T)}; };
  // The basis takes what the matrix leaves; fewer steps only mean a bracket that may end wider.
  while (call.max_steps > 8 && bytes() > limit) --call.max_steps;
  need(bytes(), limit, call.n);
  launch(spectrum_kernel<T>, call, batch, spectrum_threads, bytes(), stream);
}

}  // namespace

void launch_factor(const FactorCall& call, bool is_double, int64_t batch, void* stream) {
  if (batch == 0 || call.n == 0) return;
  is_double ? factor<double>(call, batch, stream) : factor<float>(call, batch, stream);
}

void launch_spectrum(const SpectrumCall& call, bool is_double, int64_t batch, void* stream) {
  if (batch == 0 || call.n == 0) return;
  is_double ? spectrum<double>(call, batch, stream) : spectrum<float>(call, batch, stream);
}

void launch_samples(const SampleCall& call, int64_t heads, void* stream) {
  const int64_t per_row = (call.first + call.count + 3) / 4 - call.first / 4;
  const int64_t blocks = (heads * per_row + sample_threads - 1) / sample_threads;
  if (heads * call.count == 0) return;
  grid_fits(blocks);
  sample_kernel<<<static_cast<unsigned>(blocks), sample_threads, 0, static_cast<cudaStream_t>(stream)>>>(call, heads,
                                                                                                      per_row);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace ck
