// G = W W^T on one CPU thread: half the multiplications of a general product, because G is symmetric.
//
// Products are summed in T, `run` at a time, and the runs in double. So a product w_ik w_jk is rounded at most run
// times in T, whatever the number of columns, and G has the error bound of _ops.gram_terms. The order of the sums
// depends on the shape of one matrix only.
#pragma once

#include "panels.h"

namespace ck {
inline namespace CK_ISA {

template <class T>
struct Gram {
  using P = Panels<T>;
  static constexpr int lanes = P::lanes;
  static constexpr int height = 4;    // of a tile; with 3 panels, 12 accumulators and a step's 4 operands fill 16 registers
  static constexpr int64_t depth = 128;  // columns packed at a time, so that a tile's panels stay in the first-level cache

  int64_t rows, panels, padded;
  int64_t run;  // a bracket's width goes with rows * run

  explicit Gram(int64_t rows_)
      : rows(rows_), panels(P::count(rows_)), padded(panels * lanes), run(rows_ > 128 && sizeof(T) == 4 ? 16 : 32) {}

  // Bytes.
  int64_t workspace() const {
    return padded * depth * static_cast<int64_t>(sizeof(T)) + padded * padded * static_cast<int64_t>(sizeof(double));
  }

  template <class S, class Out>
  void form(const View<S>& w, int64_t cols, void* work, Out* out) const {
    double* sum = static_cast<double*>(work);
    T* packed = reinterpret_cast<T*>(sum + padded * padded);
    for (int64_t l = 0; l < padded * padded; ++l) sum[l] = 0;
    for (int64_t k = 0; k < cols; k += depth) {
      const int64_t count = cols - k < depth ? cols - k : depth;
      P::pack(View<S>{w.at(0, k), w.row_stride, w.col_stride}, rows, count, depth, packed);
      add(packed, count, sum);
    }
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j <= i; ++j)
        out[i * rows + j] = out[j * rows + i] = static_cast<Out>(sum[j * padded + i]);
  }

 private:
  // `lanes` doubles.
  struct Sum {
    static constexpr int parts = sizeof(double) / sizeof(T);
    typename Native<double>::type part[parts];
    void add(typename P::V v) {
      typedef T Narrow __attribute__((vector_size(sizeof(v) / parts)));
      Narrow narrow[parts];
      __builtin_memcpy(narrow, &v, sizeof v);
      for (int p = 0; p < parts; ++p) part[p] += __builtin_convertvector(narrow[p], typename Native<double>::type);
    }
  };

  // sum += the products of the packed columns, in the panels from the diagonal on.
  void add(const T* packed, int64_t count, double* sum) const {
    for (int64_t p = 0; p < panels; ++p) {
      const T* left = packed + p * depth * lanes;
      int64_t q = p;
      for (; q + 3 <= panels && panels - q != 4; q += 3) rows_of<3>(left, packed, count, p, q, sum);
      for (; q + 2 <= panels; q += 2) rows_of<2>(left, packed, count, p, q, sum);
      if (q < panels) tile<lanes, 1>(left, packed, count, p * lanes, q, sum);
    }
  }

  template <int across>
  void rows_of(const T* left, const T* packed, int64_t count, int64_t p, int64_t q, double* sum) const {
    for (int64_t i = 0; i < lanes; i += height) tile<height, across>(left + i, packed, count, p * lanes + i, q, sum);
  }

  template <int tall, int across>
  void tile(const T* left, const T* packed, int64_t count, int64_t i, int64_t q, double* sum) const {
    Sum total[tall][across];
    for (int a = 0; a < tall; ++a)
      for (int b = 0; b < across; ++b) total[a][b] = Sum{};
    P::template multiply<tall, across>(left, 1, lanes, packed + q * depth * lanes, depth, count, run, total);
    for (int a = 0; a < tall; ++a) {
      double* to = sum + (i + a) * padded + q * lanes;
      for (int b = 0; b < across; ++b) {
        double each[lanes];
        __builtin_memcpy(each, &total[a][b], sizeof each);
        for (int l = 0; l < lanes; ++l) to[b * lanes + l] += each[l];
      }
    }
  }
};

}  // namespace CK_ISA
}  // namespace ck
