// F W on one CPU thread, for a small square F and a W with many columns.
//
// The vectors of the inner loop run along the contiguous direction of the result: its columns, with panels of W, or its
// rows, with panels of F. An element is one sum of n products in T, in an order that depends on nothing else.
#pragma once

#include "panels.h"

namespace ck {
inline namespace CK_ISA {

template <class T>
struct Product {
  using P = Panels<T>;
  using V = typename P::V;
  static constexpr int lanes = P::lanes;
  static constexpr int height = 4, across = 3;   // of a tile
  static constexpr int64_t block = 12 * lanes;   // columns of W at a time: they stay in the first-level cache

  int64_t n, panels;

  explicit Product(int64_t n_) : n(n_), panels(P::count(n_)) {}

  // Elements of T: F, and a block of W.
  int64_t workspace() const { return panels * lanes * n + block * n; }

  // out (n x cols, strided) = f (n x n, contiguous) w.
  template <class S, class Out>
  void form(const T* f, const View<S>& w, int64_t cols, T* work, Out* out, int64_t row_stride,
            int64_t col_stride) const {
    T* part = work + panels * lanes * n;
    const bool by_columns = col_stride == 1;
    if (by_columns)
      copy(View<T>{f, n, 1}, n, panels * lanes, work);
    else
      P::pack(View<T>{f, n, 1}, n, n, n, work);
    for (int64_t j = 0; j < cols; j += block) {
      const int64_t count = cols - j < block ? cols - j : block;
      const View<S> transposed{w.at(0, j), w.col_stride, w.row_stride};
      if (by_columns) {
        P::pack(transposed, count, n, n, part);
        tiles(work, n, part, count, Target<Out>{out + j, row_stride, 1});
      } else {
        copy(transposed, count, (count + height - 1) / height * height, part);
        tiles(part, count, work, n, Target<Out>{out + j * col_stride, col_stride, row_stride});
      }
    }
  }

 private:
  struct Sum {
    V v;
    void add(V more) { v += more; }
  };
  template <class Out>
  struct Target {
    Out* data;
    int64_t stride;  // between the rows of a tile
    int64_t beside;  // between a vector's elements
  };

  // `rows` rows of n elements each, side by side, and zeros up to `padded` rows.
  template <class S>
  void copy(const View<S>& from, int64_t rows, int64_t padded, T* to) const {
    for (int64_t i = 0; i < padded; ++i) {
      int64_t k = 0;
      if (i < rows && from.col_stride == 1)
        for (; k + lanes <= n; k += lanes) P::store(P::widened(from.at(i, k)), to + i * n + k);
      for (; k < n; ++k) to[i * n + k] = i < rows ? static_cast<T>(*from.at(i, k)) : T(0);
    }
  }

  // target = A B^T of an A with `rows` rows and of `width` rows of B in panels.
  template <class Out>
  void tiles(const T* a, int64_t rows, const T* packed, int64_t width, const Target<Out>& target) const {
    for (int64_t q = 0; q * lanes < width; q += across)
      for (int64_t i = 0; i < rows; i += height) {
        const T* left = a + i * n;
        const T* right = packed + q * lanes * n;
        const int64_t left_over = P::count(width) - q;
        if (left_over >= 3)
          tile<3>(left, right, i, rows, q, width, target);
        else if (left_over == 2)
          tile<2>(left, right, i, rows, q, width, target);
        else
          tile<1>(left, right, i, rows, q, width, target);
      }
  }

  template <int wide, class Out>
  void tile(const T* left, const T* right, int64_t i, int64_t rows, int64_t q, int64_t width,
            const Target<Out>& to) const {
    Sum sum[height][wide];
    for (int a = 0; a < height; ++a)
      for (int b = 0; b < wide; ++b) sum[a][b] = Sum{};
    P::template multiply<height, wide>(left, n, 1, right, n, n, n, sum);
    for (int a = 0; a < height && i + a < rows; ++a)
      for (int b = 0; b < wide; ++b) {
        const int64_t j = (q + b) * lanes;
        Out* at = to.data + (i + a) * to.stride + j * to.beside;
        const auto value = __builtin_convertvector(sum[a][b].v, typename P::template Side<Out>::type);
        Out each[lanes];
        __builtin_memcpy(each, &value, sizeof value);
        if (to.beside == 1 && j + lanes <= width)
          __builtin_memcpy(at, each, sizeof each);
        else
          for (int l = 0; l < lanes && j + l < width; ++l) at[l * to.beside] = each[l];
      }
  }
};

}  // namespace CK_ISA
}  // namespace ck
