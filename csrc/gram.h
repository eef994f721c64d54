// G = W W^T on one CPU thread: about half the multiplications of a general product, because G is symmetric.
//
// A product w_ik w_jk is rounded at most 32 + 8 + ceil(cols / block) times on its way into g_ij, so G has the error
// bound of _ops.gram_terms. The order of the sums depends on the shape and strides of one matrix only.
#pragma once

#include <cstdint>

#include "team.h"

namespace ck {
inline namespace CK_ISA {

template <class T>
struct Gram {
  using V = typename Native<T>::type;
  static constexpr int lanes = Native<T>::lanes;
  static constexpr int run = 32;              // products one accumulator sums before it is emptied
  static constexpr int block = run * lanes;   // columns that fill every lane's run
  static constexpr int tile_i = 4, tile_j = 3;  // dots: 12 accumulators and a step's 4 rows fill 16 registers
  static constexpr int strip = 2 * lanes;     // columns of G in a tile of the outer products
  static constexpr int64_t cache = 1 << 18;   // bytes of W to stay in the second-level cache while tiles pass over it

  int64_t rows, cols, row_stride, col_stride;
  int64_t padded;
  bool by_dots;  // cols are contiguous
  bool packs;

  Gram(int64_t rows_, int64_t cols_, int64_t row_stride_, int64_t col_stride_)
      : rows(rows_),
        cols(cols_),
        row_stride(row_stride_),
        col_stride(col_stride_),
        padded((rows_ + strip - 1) / strip * strip),
        by_dots(col_stride_ == 1 || cols_ == 1),
        packs(row_stride_ != 1 || padded != rows_) {}

  // Elements of T.
  int64_t workspace() const { return by_dots ? 0 : 2 * padded * padded + (packs ? run * padded : 0); }

  void form(const T* w, T* work, T* out) const {
    if (by_dots)
      dots(w, out);
    else
      outer_products(w, work, out);
    for (int64_t i = 1; i < rows; ++i)
      for (int64_t j = 0; j < i; ++j) out[i * rows + j] = out[j * rows + i];
  }

 private:
  static V load(const T* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  static void store(V v, T* to) { __builtin_memcpy(to, &v, sizeof v); }

  // Rows of W against rows of W, `lanes` products at a time: run products in a lane, then the runs of a lane, then the
  // lanes as a tree of 2 or 3 levels, then the spans.
  void dots(const T* w, T* out) const {
    int64_t span = cache / (rows * static_cast<int64_t>(sizeof(T))) / block * block;
    if (span < block) span = block;
    for (int64_t k = 0; k == 0 || k < cols; k += span) {
      const int64_t count = cols - k < span ? cols - k : span;
      for (int64_t i = 0; i < rows; i += tile_i)
        for (int64_t j = i; j < rows; j += tile_j) {
          V total[tile_i][tile_j];
          dot_tile(w + k, i, j, count, total);
          for (int a = 0; a < tile_i && i + a < rows; ++a)
            for (int b = 0; b < tile_j && j + b < rows; ++b) {
              T* g = out + (i + a) * rows + j + b;
              const T sum = add_lanes(total[a][b]);
              if (j + b >= i + a) *g = k == 0 ? sum : *g + sum;
            }
        }
    }
  }

  void dot_tile(const T* w, int64_t i, int64_t j, int64_t count, V (&total)[tile_i][tile_j]) const {
    // Rows past the end are the last row once more; nobody reads their products.
    const T* left[tile_i];
    const T* right[tile_j];
    for (int a = 0; a < tile_i; ++a) left[a] = w + (i + a < rows ? i + a : rows - 1) * row_stride;
    for (int b = 0; b < tile_j; ++b) right[b] = w + (j + b < rows ? j + b : rows - 1) * row_stride;
    const int64_t whole = count / lanes * lanes;
    for (int64_t start = 0; start == 0 || start < count; start += block) {
      const int64_t end = start + block < whole ? start + block : whole;
      V sum[tile_i][tile_j];
      for (int a = 0; a < tile_i; ++a)
        for (int b = 0; b < tile_j; ++b) sum[a][b] = V{};
      for (int64_t k = start; k < end; k += lanes) {
        V x[tile_j];
        for (int b = 0; b < tile_j; ++b) x[b] = load(right[b] + k);
        for (int a = 0; a < tile_i; ++a) {
          const V y = load(left[a] + k);
          for (int b = 0; b < tile_j; ++b) sum[a][b] += y * x[b];
        }
      }
      if (end < start + block && whole < count) {
        V x[tile_j];
        for (int b = 0; b < tile_j; ++b) x[b] = load_some(right[b] + whole, count - whole);
        for (int a = 0; a < tile_i; ++a) {
          const V y = load_some(left[a] + whole, count - whole);
          for (int b = 0; b < tile_j; ++b) sum[a][b] += y * x[b];
        }
      }
      for (int a = 0; a < tile_i; ++a)
        for (int b = 0; b < tile_j; ++b) total[a][b] = start == 0 ? sum[a][b] : total[a][b] + sum[a][b];
    }
  }

  static V load_some(const T* from, int64_t count) {
    T each[lanes] = {};
    for (int64_t l = 0; l < count; ++l) each[l] = from[l];
    return load(each);
  }

  static T add_lanes(V v) {
    T each[lanes];
    store(v, each);
    for (int half = lanes / 2; half > 0; half /= 2)
      for (int l = 0; l < half; ++l) each[l] += each[l + half];
    return each[0];
  }

  // Columns of W times their own transposes, for rows of W that are contiguous: run products in a register, then
  // the runs of a block, then the blocks. W of other strides, or of ragged size, is copied run by run.
  void outer_products(const T* w, T* work, T* out) const {
    const int64_t size = padded * padded;
    T *part = work, *sum = work + size, *copy = sum + size;
    for (int64_t l = 0; l < 2 * size; ++l) work[l] = 0;
    for (int64_t start = 0; start < cols; start += run) {
      const int64_t count = cols - start < run ? cols - start : run;
      const T* from = w + start * col_stride;
      int64_t stride = col_stride;
      if (packs) {
        for (int64_t k = 0; k < count; ++k)
          for (int64_t i = 0; i < padded; ++i)
            copy[k * padded + i] = i < rows ? from[k * col_stride + i * row_stride] : T(0);
        from = copy;
        stride = padded;
      }
      int64_t i = 0;
      for (; i + 6 <= padded; i += 6) panel<6>(from, stride, count, i, part);
      for (; i < padded; i += 2) panel<2>(from, stride, count, i, part);
      if ((start + run) % block == 0 || start + run >= cols)
        for (int64_t l = 0; l < size; l += lanes) {
          store(load(sum + l) + load(part + l), sum + l);
          store(V{}, part + l);
        }
    }
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = i; j < rows; ++j) out[i * rows + j] = sum[i * padded + j];
  }

  // Rows i ... i + height - 1 of part, from the diagonal on, plus the products of count columns.
  template <int height>
  void panel(const T* w, int64_t stride, int64_t count, int64_t i, T* part) const {
    for (int64_t j = i / strip * strip; j < padded; j += strip) {
      V sum[height][2];
      for (int a = 0; a < height; ++a) sum[a][0] = sum[a][1] = V{};
      const T *left = w + i, *right = w + j;
      for (int64_t k = 0; k < count; ++k, left += stride, right += stride) {
        const V x = load(right), y = load(right + lanes);
        for (int a = 0; a < height; ++a) {
          const V z = left[a] - V{};
          sum[a][0] += z * x;
          sum[a][1] += z * y;
        }
      }
      for (int a = 0; a < height; ++a) {
        T* to = part + (i + a) * padded + j;
        store(load(to) + sum[a][0], to);
        store(load(to + lanes) + sum[a][1], to + lanes);
      }
    }
  }
};

}  // namespace CK_ISA
}  // namespace ck
