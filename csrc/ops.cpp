// The ops of this package on torch's stable ABI: argument checks, the choice of dtype and device, registration.
// Loaded by torch.ops.load_library; it needs no Python and any torch from 2.10 on. conditioned_kernels/_ops.py has
// the fake implementations and the vmap rules.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <string>
#include <tuple>

#include "cpu_kernels.h"
#if defined(CK_HAS_CUDA)
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include "cuda_kernels.h"
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

bool has_avx2() {
#if defined(CK_HAS_AVX2)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

#if defined(CK_HAS_AVX2)
const bool fast = has_avx2();
const ck::MatrixKernels& matrices() { return fast ? ck::matrices_avx2 : ck::matrices_baseline; }
ck::SampleKernel samples() { return fast ? ck::samples_avx2 : ck::samples_baseline; }
#else
const ck::MatrixKernels& matrices() { return ck::matrices_baseline; }
ck::SampleKernel samples() { return ck::samples_baseline; }
#endif

void check_gram(const Tensor& gram) {
  STD_TORCH_CHECK(gram.dim() == 3 && gram.size(1) == gram.size(2), "gram must be (batch, n, n), got a tensor with ",
                  gram.dim(), " dimensions");
  STD_TORCH_CHECK(gram.scalar_type() == ScalarType::Float || gram.scalar_type() == ScalarType::Double,
                  "gram must be float32 or float64; convert it first");
  STD_TORCH_CHECK(gram.size(1) < 46341, "gram must have n < 46341, got ", gram.size(1));
}

Tensor fresh(const Tensor& like, std::initializer_list<int64_t> sizes, ScalarType dtype) {
  return torch::stable::new_empty(like, {sizes.begin(), sizes.size()}, dtype);
}

struct Factor {
  Tensor factor, residual, status;
  ck::FactorCall call;
};

Factor prepare_factor(const Tensor& gram, const std::string& method) {
  check_gram(gram);
  STD_TORCH_CHECK(method == "polar" || method == "qr", "method must be 'polar' or 'qr', got '", method, "'");
  const int64_t b = gram.size(0), n = gram.size(1);
  Factor out{fresh(gram, {b, n, n}, gram.scalar_type()), fresh(gram, {b}, gram.scalar_type()),
             fresh(gram, {b}, ScalarType::Char), {}};
  out.call = {gram.const_data_ptr(),
              {gram.stride(0), gram.stride(1), gram.stride(2)},
              static_cast<int>(n),
              method == "polar",
              out.factor.mutable_data_ptr(),
              out.residual.mutable_data_ptr(),
              static_cast<int8_t*>(out.status.mutable_data_ptr())};
  return out;
}

struct Spectrum {
  Tensor bounds, vectors, steps, status;
  ck::SpectrumCall call;
};

Spectrum prepare_spectrum(const Tensor& gram, const Tensor& error, double rtol, int64_t max_steps,
                          const std::optional<Tensor>& start, bool give_up) {
  check_gram(gram);
  const int64_t b = gram.size(0), n = gram.size(1);
  STD_TORCH_CHECK(error.scalar_type() == ScalarType::Double && error.dim() == 1 && error.size(0) == b &&
                      error.is_contiguous() && error.get_device_index() == gram.get_device_index(),
                  "error must be a contiguous float64 tensor (batch,) on the device of gram");
  STD_TORCH_CHECK(max_steps >= 1 && max_steps <= (n < 1 ? 1 : n), "max_steps must be in [1, n], got ", max_steps);
  STD_TORCH_CHECK(rtol > 0, "rtol must be positive, got ", rtol);
  if (start)
    STD_TORCH_CHECK(start->scalar_type() == gram.scalar_type() && start->dim() == 3 && start->size(0) == b &&
                        start->size(1) == 2 && start->size(2) == n && start->is_contiguous() &&
                        start->get_device_index() == gram.get_device_index(),
                    "start must be contiguous, (batch, 2, n), of the dtype and on the device of gram");
  Spectrum out{fresh(gram, {b, 6}, ScalarType::Double), fresh(gram, {b, 2, n}, gram.scalar_type()),
               fresh(gram, {b}, ScalarType::Int), fresh(gram, {b}, ScalarType::Char), {}};
  out.call = {gram.const_data_ptr(),
              {gram.stride(0), gram.stride(1), gram.stride(2)},
              static_cast<int>(n),
              static_cast<int>(max_steps),
              rtol,
              give_up,
              static_cast<const double*>(error.const_data_ptr()),
              start ? start->const_data_ptr() : nullptr,
              static_cast<double*>(out.bounds.mutable_data_ptr()),
              out.vectors.mutable_data_ptr(),
              static_cast<int32_t*>(out.steps.mutable_data_ptr()),
              static_cast<int8_t*>(out.status.mutable_data_ptr())};
  return out;
}

ck::SampleCall prepare_samples(const Tensor& out, int64_t key, int64_t head, int64_t element) {
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float && out.dim() == 2 && out.is_contiguous(),
                  "out must be a contiguous float32 tensor (heads, elements)");
  STD_TORCH_CHECK(head >= 0 && element >= 0 && head + out.size(0) <= (int64_t{1} << 32),
                  "head and element must be >= 0 and heads below 2^32, got head ", head, " and element ", element);
  return {static_cast<uint64_t>(key), head, element, out.size(1), static_cast<float*>(out.mutable_data_ptr())};
}

ck::Number number(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::BFloat16:
      return ck::Number::bfloat16;
    case ScalarType::Float:
      return ck::Number::float32;
    case ScalarType::Double:
      return ck::Number::float64;
    default:
      STD_TORCH_CHECK(false, name, " must be bfloat16, float32 or float64; convert it first");
  }
}

Tensor gram_cpu(Tensor weights, bool wide_products, bool wide_gram) {
  STD_TORCH_CHECK(weights.dim() == 3, "weights must be (batch, rows, cols), got a tensor with ", weights.dim(),
                  " dimensions");
  const ck::Number type = number(weights, "weights");
  const bool is_double = type == ck::Number::float64;
  const int64_t b = weights.size(0), r = weights.size(1);
  Tensor out = fresh(weights, {b, r, r}, wide_gram || is_double ? ScalarType::Double : ScalarType::Float);
  const ck::GramCall call{weights.const_data_ptr(),
                          type,
                          {weights.stride(0), weights.stride(1), weights.stride(2)},
                          r,
                          weights.size(2),
                          wide_products || is_double,
                          wide_gram || is_double,
                          out.mutable_data_ptr()};
  const auto kernel = matrices().gram;
  if (r > 0) torch::stable::parallel_for(0, b, 1, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
  return out;
}

void product_cpu(Tensor out, Tensor factor, Tensor weights) {
  STD_TORCH_CHECK(weights.dim() == 3, "weights must be (batch, rows, cols), got a tensor with ", weights.dim(),
                  " dimensions");
  const int64_t b = weights.size(0), r = weights.size(1), c = weights.size(2);
  const ck::Number type = number(weights, "weights"), given = number(factor, "factor"), wanted = number(out, "out");
  STD_TORCH_CHECK(factor.dim() == 3 && factor.size(0) == b && factor.size(1) == r && factor.size(2) == r &&
                      factor.is_contiguous() && given != ck::Number::bfloat16 &&
                      (given == ck::Number::float64 || type != ck::Number::float64),
                  "factor must be contiguous, (batch, rows, rows) of weights, float32 or float64 and no narrower");
  STD_TORCH_CHECK(out.dim() == 3 && out.size(0) == b && out.size(1) == r && out.size(2) == c &&
                      wanted != ck::Number::bfloat16 && wanted <= given && (wanted >= type),
                  "out must be of the shape of weights, float32 or float64, no wider than factor and no narrower than "
                  "weights");
  const ck::ProductCall call{factor.const_data_ptr(),
                             given == ck::Number::float64,
                             weights.const_data_ptr(),
                             type,
                             {weights.stride(0), weights.stride(1), weights.stride(2)},
                             r,
                             c,
                             out.mutable_data_ptr(),
                             wanted == ck::Number::float64,
                             {out.stride(0), out.stride(1), out.stride(2)}};
  const auto kernel = matrices().product;
  if (r > 0) torch::stable::parallel_for(0, b, 1, [&](int64_t begin, int64_t end) { kernel(call, begin, end); });
}

std::tuple<Tensor, Tensor, Tensor> gram_factor_cpu(Tensor gram, std::string method) {
  const Factor out = prepare_factor(gram, method);
  const auto kernel =
      gram.scalar_type() == ScalarType::Float ? matrices().factor_float : matrices().factor_double;
  if (out.call.n > 0)
    torch::stable::parallel_for(0, gram.size(0), 1, [&](int64_t begin, int64_t end) { kernel(out.call, begin, end); });
  return {out.factor, out.residual, out.status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> spectrum_bracket_cpu(Tensor gram, Tensor error, double rtol,
                                                                int64_t max_steps, std::optional<Tensor> start,
                                                                bool give_up) {
  const Spectrum out = prepare_spectrum(gram, error, rtol, max_steps, start, give_up);
  const auto kernel =
      gram.scalar_type() == ScalarType::Float ? matrices().spectrum_float : matrices().spectrum_double;
  if (out.call.n > 0)
    torch::stable::parallel_for(0, gram.size(0), 1, [&](int64_t begin, int64_t end) { kernel(out.call, begin, end); });
  return {out.bounds, out.vectors, out.steps, out.status};
}

void philox_normal_cpu(Tensor out, int64_t key, int64_t head, int64_t element) {
  const ck::SampleCall call = prepare_samples(out, key, head, element);
  torch::stable::parallel_for(0, out.size(0) * ck::sample_pieces(call), 1,
                              [&](int64_t begin, int64_t end) { samples()(call, begin, end); });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(conditioned_kernels, m) {
  m.def("gram(Tensor weights, bool wide_products=False, bool wide_gram=False) -> Tensor");
  m.def("product_(Tensor(a!) out, Tensor factor, Tensor weights) -> ()");
  m.def("gram_factor(Tensor gram, str method) -> (Tensor factor, Tensor residual, Tensor status)");
  m.def(
      "spectrum_bracket(Tensor gram, Tensor error, float rtol, int max_steps, Tensor? start=None, "
      "bool give_up=False) -> "
      "(Tensor bounds, Tensor vectors, Tensor steps, Tensor status)");
  m.def("philox_normal_(Tensor(a!) out, int key, int head, int element) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(conditioned_kernels, CPU, m) {
  m.impl("gram", TORCH_BOX(&gram_cpu));
  m.impl("product_", TORCH_BOX(&product_cpu));
  m.impl("gram_factor", TORCH_BOX(&gram_factor_cpu));
  m.impl("spectrum_bracket", TORCH_BOX(&spectrum_bracket_cpu));
  m.impl("philox_normal_", TORCH_BOX(&philox_normal_cpu));
}

#if defined(CK_HAS_CUDA)
namespace {

// The device of a tensor made current for the scope, and torch's current stream on it.
class Place {
 public:
  explicit Place(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    // Only torch's CUDA library has this function. Looked up when called, so that CPU-only torch loads the extension.
    using CurrentStream = int32_t (*)(int32_t, void**);
    static const auto current = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      return library ? reinterpret_cast<CurrentStream>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
    }();
    STD_TORCH_CHECK(current != nullptr, "torch's CUDA library is not loaded; pass backend='torch'");
    STD_TORCH_CHECK(current(tensor.get_device_index(), &stream_) == 0, "torch gave no current CUDA stream");
  }
  void* stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

std::tuple<Tensor, Tensor, Tensor> gram_factor_cuda(Tensor gram, std::string method) {
  const Place place(gram);
  const Factor out = prepare_factor(gram, method);
  ck::launch_factor(out.call, gram.scalar_type() == ScalarType::Double, gram.size(0), place.stream());
  return {out.factor, out.residual, out.status};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> spectrum_bracket_cuda(Tensor gram, Tensor error, double rtol,
                                                                 int64_t max_steps, std::optional<Tensor> start,
                                                                 bool give_up) {
  const Place place(gram);
  const Spectrum out = prepare_spectrum(gram, error, rtol, max_steps, start, give_up);
  ck::launch_spectrum(out.call, gram.scalar_type() == ScalarType::Double, gram.size(0), place.stream());
  return {out.bounds, out.vectors, out.steps, out.status};
}

void philox_normal_cuda(Tensor out, int64_t key, int64_t head, int64_t element) {
  const Place place(out);
  ck::launch_samples(prepare_samples(out, key, head, element), out.size(0), place.stream());
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(conditioned_kernels, CUDA, m) {
  m.impl("gram_factor", TORCH_BOX(&gram_factor_cuda));
  m.impl("spectrum_bracket", TORCH_BOX(&spectrum_bracket_cuda));
  m.impl("philox_normal_", TORCH_BOX(&philox_normal_cuda));
}
#endif
