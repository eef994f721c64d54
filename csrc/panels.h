// Products A B^T on one CPU thread, the way fast matrix products are made: B is packed into panels of `lanes` rows, a
// panel by columns, so that the inner loop reads it straight through; a tile of the product stays in registers.
#pragma once

#include <cstdint>

#include "team.h"

namespace ck {
inline namespace CK_ISA {

struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    __builtin_memcpy(&value, &wide, sizeof value);
    return value;
  }
};

// A strided matrix that is only read; strides in elements.
template <class S>
struct View {
  const S* data;
  int64_t row_stride;
  int64_t col_stride;
  const S* at(int64_t i, int64_t j) const { return data + i * row_stride + j * col_stride; }
};

template <class T>
struct Panels {
  using V = typename Native<T>::type;
  static constexpr int lanes = Native<T>::lanes;

  static int64_t count(int64_t rows) { return (rows + lanes - 1) / lanes; }

  static V load(const T* from) {
    V v;
    __builtin_memcpy(&v, from, sizeof v);
    return v;
  }
  static void store(V v, T* to) { __builtin_memcpy(to, &v, sizeof v); }

  template <class E>
  struct Side {
    typedef E type __attribute__((vector_size(sizeof(E) * lanes)));
  };

  // `lanes` neighbors, converted.
  template <class S>
  static V widened(const S* from) {
    typename Side<S>::type narrow;
    __builtin_memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(narrow, V);
  }
  static V widened(const Bfloat16* from) {
    typename Side<uint16_t>::type narrow;
    __builtin_memcpy(&narrow, from, sizeof narrow);
    const auto bits = __builtin_convertvector(narrow, typename Side<uint32_t>::type) << 16;
    typename Side<float>::type single;
    __builtin_memcpy(&single, &bits, sizeof single);
    return __builtin_convertvector(single, V);
  }

  // Rows [0, rows) and columns [0, cols) of `from`; element (i, k) goes to to[i / lanes * depth * lanes + k * lanes +
  // i % lanes]. The rows that fill the last panel are zero.
  template <class S>
  static void pack(const View<S>& from, int64_t rows, int64_t cols, int64_t depth, T* to) {
    int64_t first = 0;
    if (from.row_stride == 1) {
      // Column by column, so that memory is read straight through.
      const int64_t whole = rows / lanes * lanes;
      for (int64_t k = 0; k < cols; ++k)
        for (int64_t i = 0; i < whole; i += lanes) store(widened(from.at(i, k)), to + i * depth + k * lanes);
      first = whole;
      to += whole * depth;
    }
    for (; first < rows; first += lanes, to += depth * lanes) {
      const View<S> rest{from.at(first, 0), from.row_stride, from.col_stride};
      const int64_t height = rows - first < lanes ? rows - first : lanes;
      int64_t k = 0;
      if (height == lanes && from.col_stride == 1)
        for (; k + lanes <= cols; k += lanes) transposed(rest.at(0, k), from.row_stride, to + k * lanes);
      for (; k < cols; ++k)
        for (int64_t i = 0; i < lanes; ++i) to[k * lanes + i] = i < height ? static_cast<T>(*rest.at(i, k)) : T(0);
    }
  }

  // tile[a][b] += sum over k of A(a, k) times panel b's lanes at k, for `count` k; A(a, k) is left[a * stride + k *
  // step]. The sums start from zero every `run` k, and Sum says how they are added up.
  // Inlined by force: the loop is a third slower where the strides are not known to it.
  template <int height, int across, class Sum>
  [[gnu::always_inline]] static void multiply(const T* left, int64_t stride, int64_t step, const T* right, int64_t depth, int64_t count,
                       int64_t run, Sum (&tile)[height][across]) {
    for (int64_t first = 0; first < count; first += run) {
      const int64_t last = first + run < count ? first + run : count;
      V sum[height][across];
      for (int a = 0; a < height; ++a)
        for (int b = 0; b < across; ++b) sum[a][b] = V{};
      for (int64_t k = first; k < last; ++k) {
        V x[across];
        for (int b = 0; b < across; ++b) x[b] = load(right + b * depth * lanes + k * lanes);
        for (int a = 0; a < height; ++a) {
          const V y = left[a * stride + k * step] - V{};
          for (int b = 0; b < across; ++b) sum[a][b] += y * x[b];
        }
      }
      for (int a = 0; a < height; ++a)
        for (int b = 0; b < across; ++b) tile[a][b].add(sum[a][b]);
    }
  }

 private:
  // A block of lanes x lanes, its rows `stride` apart, by columns.
  template <class S>
  static void transposed(const S* from, int64_t stride, T* to) {
    V row[lanes];
    for (int i = 0; i < lanes; ++i) row[i] = widened(from + i * stride);
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
    if constexpr (lanes == 8) {
      V pair[8], four[8];
      for (int i = 0; i < 8; i += 2) {
        pair[i] = __builtin_shufflevector(row[i], row[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        pair[i + 1] = __builtin_shufflevector(row[i], row[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
      }
      for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; ++half) {
          four[i + 2 * half] = __builtin_shufflevector(pair[i + half], pair[i + half + 2], 0, 1, 8, 9, 4, 5, 12, 13);
          four[i + 2 * half + 1] = __builtin_shufflevector(pair[i + half], pair[i + half + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
      for (int k = 0; k < 4; ++k) {
        store(__builtin_shufflevector(four[k], four[k + 4], 0, 1, 2, 3, 8, 9, 10, 11), to + k * lanes);
        store(__builtin_shufflevector(four[k], four[k + 4], 4, 5, 6, 7, 12, 13, 14, 15), to + (k + 4) * lanes);
      }
      return;
    }
    if constexpr (lanes == 4) {
      V pair[4];
      for (int i = 0; i < 4; i += 2) {
        pair[i] = __builtin_shufflevector(row[i], row[i + 1], 0, 4, 2, 6);
        pair[i + 1] = __builtin_shufflevector(row[i], row[i + 1], 1, 5, 3, 7);
      }
      for (int k = 0; k < 2; ++k) {
        store(__builtin_shufflevector(pair[k], pair[k + 2], 0, 1, 4, 5), to + k * lanes);
        store(__builtin_shufflevector(pair[k], pair[k + 2], 2, 3, 6, 7), to + (k + 2) * lanes);
      }
      return;
    }
#endif
#endif
    for (int i = 0; i < lanes; ++i) {
      T each[lanes];
      store(row[i], each);
      for (int k = 0; k < lanes; ++k) to[k * lanes + i] = each[k];
    }
  }
};

}  // namespace CK_ISA
}  // namespace ck
