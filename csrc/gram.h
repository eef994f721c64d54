// G = W W^T on one CPU thread: half the multiplications of a general product, because G is symmetric.
//
// Products are summed in T, `run` at a time, the runs of `depth` columns in T or in double, and those sums in double. So
// a product w_ik w_jk is rounded a bounded number of times by T, whatever the number of columns: the bound is
// _ops.gram_terms. The order of the sums depends on the shape of one matrix only.
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
  static constexpr int64_t pitch = depth + 2;  // of the panels, which would compete for the same cache lines without the 2

  int64_t rows, panels, padded;
  bool fine;  // the width of a bracket goes with rows times terms: for many rows, short runs that are added in double

  Gram(int64_t rows_, bool wide_gram)
      : rows(rows_),
        panels(P::count(rows_)),
        padded(panels * lanes),
        fine(wide_gram && rows_ > 128 && sizeof(T) == sizeof(float)) {}

  // Bytes.
  int64_t workspace() const {
    return padded * pitch * static_cast<int64_t>(sizeof(T)) + padded * padded * static_cast<int64_t>(sizeof(double));
  }

  template <class S, class Out>
  void form(const View<S>& w, int64_t cols, void* work, Out* out) const {
    double* sum = static_cast<double*>(work);
    T* packed = reinterpret_cast<T*>(sum + padded * padded);
    for (int64_t l = 0; l < padded * padded; ++l) sum[l] = 0;
    for (int64_t k = 0; k < cols; k += depth) {
      const int64_t count = cols - k < depth ? cols - k : depth;
      P::pack(View<S>{w.at(0, k), w.row_stride, w.col_stride}, rows, count, pitch, packed);
      fine ? add<Wide, 16>(packed, count, sum) : add<Plain, 32>(packed, count, sum);
    }
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j <= i; ++j)
        out[i * rows + j] = out[j * rows + i] = static_cast<Out>(sum[j * padded + i]);
  }

 private:
  using Double = typename Native<double>::type;

  // `lanes` doubles.
  struct Wide {
    static constexpr int parts = sizeof(double) / sizeof(T);
    Double part[parts];
    void add(typename P::V v) {
      typedef T Narrow __attribute__((vector_size(sizeof(v) / parts)));
      Narrow narrow[parts];
      __builtin_memcpy(narrow, &v, sizeof v);
      for (int p = 0; p < parts; ++p) part[p] += __builtin_convertvector(narrow[p], Double);
    }
    const Wide& wide() const { return *this; }
  };

  // `lanes` T.
  struct Plain {
    typename P::V v;
    void add(typename P::V more) { v += more; }
    Wide wide() const {
      Wide out{};
      out.add(v);
      return out;
    }
  };

  // sum += the products of the packed columns, in the panels from the diagonal on.
  template <class Sum, int64_t run>
  void add(const T* packed, int64_t count, double* sum) const {
    for (int64_t p = 0; p < panels; ++p) {
      const T* left = packed + p * pitch * lanes;
      int64_t q = p;
      for (; q + 3 <= panels && panels - q != 4; q += 3) rows_of<Sum, run, 3>(left, packed, count, p, q, sum);
      for (; q + 2 <= panels; q += 2) rows_of<Sum, run, 2>(left, packed, count, p, q, sum);
      if (q < panels) tile<Sum, run, lanes, 1>(left, packed, count, p * lanes, q, sum);
    }
  }

  template <class Sum, int64_t run, int across>
  void rows_of(const T* left, const T* packed, int64_t count, int64_t p, int64_t q, double* sum) const {
    for (int64_t i = 0; i < lanes; i += height)
      tile<Sum, run, height, across>(left + i, packed, count, p * lanes + i, q, sum);
  }

  template <class Sum, int64_t run, int tall, int across>
  void tile(const T* left, const T* packed, int64_t count, int64_t i, int64_t q, double* sum) const {
    Sum total[tall][across];
    for (int a = 0; a < tall; ++a)
      for (int b = 0; b < across; ++b) total[a][b] = Sum{};
    P::template multiply<tall, across>(left, 1, lanes, packed + q * pitch * lanes, pitch, count, run, total);
    for (int a = 0; a < tall; ++a)
      for (int b = 0; b < across; ++b) {
        double* to = sum + (i + a) * padded + (q + b) * lanes;
        const Wide wide = total[a][b].wide();
        for (int part = 0; part < Wide::parts; ++part) {
          Double each;
          __builtin_memcpy(&each, to + part * Native<double>::lanes, sizeof each);
          each += wide.part[part];
          __builtin_memcpy(to + part * Native<double>::lanes, &each, sizeof each);
        }
      }
  }
};

}  // namespace CK_ISA
}  // namespace ck
