// The small-matrix algorithms for a team of one CPU thread. Compiled with -ffp-contract=fast: a product and a sum
// may be fused where the hardware can, which only tightens the error bounds.
#include "cpu_kernels.h"

#include <new>

#include "gram.h"
#include "product.h"
#include "small_matrix.cuh"

namespace ck {
inline namespace CK_ISA {
namespace {

// Elements of T at a 64-byte boundary, freed at the end of the scope. Not std::vector: its inline functions would
// exist once for all instruction sets.
template <class T>
class Workspace {
 public:
  explicit Workspace(int64_t count)
      : data_(static_cast<T*>(::operator new(static_cast<std::size_t>(count) * sizeof(T), std::align_val_t(64)))) {}
  ~Workspace() { ::operator delete(data_, std::align_val_t(64)); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  T* data() const { return data_; }

 private:
  T* data_;
};

template <class S, class T>
void gram_of(const GramCall& call, int64_t begin, int64_t end) {
  const Gram<T> product(call.rows, call.wide_gram);
  const Workspace<char> work(product.workspace());
  const int64_t size = call.rows * call.rows;
  for (int64_t b = begin; b < end; ++b) {
    const View<S> w{static_cast<const S*>(call.weights) + b * call.stride[0], call.stride[1], call.stride[2]};
    if (call.wide_gram)
      product.form(w, call.cols, work.data(), static_cast<double*>(call.gram) + b * size);
    else
      product.form(w, call.cols, work.data(), static_cast<float*>(call.gram) + b * size);
  }
}

void gram(const GramCall& call, int64_t begin, int64_t end) {
  if (call.type == Number::float64)
    gram_of<double, double>(call, begin, end);
  else if (call.type == Number::float32)
    (call.wide_products ? gram_of<float, double> : gram_of<float, float>)(call, begin, end);
  else
    (call.wide_products ? gram_of<Bfloat16, double> : gram_of<Bfloat16, float>)(call, begin, end);
}

template <class S, class T, class Out>
void product_of(const ProductCall& call, int64_t begin, int64_t end) {
  const Product<T> algorithm(call.rows);
  const Workspace<T> work(algorithm.workspace());
  for (int64_t b = begin; b < end; ++b)
    algorithm.form(static_cast<const T*>(call.factor) + b * call.rows * call.rows,
                   View<S>{static_cast<const S*>(call.weights) + b * call.stride[0], call.stride[1], call.stride[2]},
                   call.cols, work.data(), static_cast<Out*>(call.out) + b * call.out_stride[0], call.out_stride[1],
                   call.out_stride[2]);
}

template <class S>
void product_from(const ProductCall& call, int64_t begin, int64_t end) {
  if (!call.wide)
    product_of<S, float, float>(call, begin, end);
  else
    (call.wide_out ? product_of<S, double, double> : product_of<S, double, float>)(call, begin, end);
}

void product(const ProductCall& call, int64_t begin, int64_t end) {
  if (call.type == Number::float64)
    product_of<double, double, double>(call, begin, end);
  else
    (call.type == Number::float32 ? product_from<float> : product_from<Bfloat16>)(call, begin, end);
}

template <class T>
Source<T> matrix(const void* gram, const int64_t* stride, int64_t index) {
  return {static_cast<const T*>(gram) + index * stride[0], stride[1], stride[2]};
}

template <class T>
void factor(const FactorCall& call, int64_t begin, int64_t end) {
  using Matrix = SmallMatrix<T, Solo>;
  const Matrix algorithms(Solo{}, call.n);
  const Workspace<T> work(Matrix::factor_workspace(call.n));
  const int64_t size = static_cast<int64_t>(call.n) * call.n;
  for (int64_t b = begin; b < end; ++b) {
    const Source<T> source = matrix<T>(call.gram, call.stride, b);
    T* out = static_cast<T*>(call.factor) + b * size;
    T& residual = static_cast<T*>(call.residual)[b];
    call.status[b] = call.polar ? algorithms.inverse_sqrt(source, work.data(), out, residual)
                                : algorithms.inverse_cholesky(source, work.data(), out, residual);
  }
}

template <class T>
void spectrum(const SpectrumCall& call, int64_t begin, int64_t end) {
  using Matrix = SmallMatrix<T, Solo>;
  const Matrix algorithms(Solo{}, call.n);
  const Workspace<T> work(Matrix::spectrum_workspace(call.n, call.max_steps));
  const int64_t pair = 2 * static_cast<int64_t>(call.n);
  for (int64_t b = begin; b < end; ++b) {
    const T* start = call.start ? static_cast<const T*>(call.start) + b * pair : nullptr;
    const auto found = algorithms.spectrum_bracket(matrix<T>(call.gram, call.stride, b), call.error[b], call.rtol,
                                                   call.give_up, call.max_steps, start,
                                                   static_cast<T*>(call.vectors) + b * pair, work.data());
    found.store(call.bounds + 6 * b);
    call.steps[b] = found.steps;
    call.status[b] = found.status;
  }
}

}  // namespace
}  // namespace CK_ISA

const MatrixKernels CK_TABLE{gram, product, factor<float>, factor<double>, spectrum<float>, spectrum<double>};

}  // namespace ck
