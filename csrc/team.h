// A team is what runs one matrix: the threads of one CUDA block, one CPU thread, or the threads of a test.
//
// It has a rank, a size, a barrier, and the width in bytes of the strip of columns that one member works on at a
// time: a few SIMD registers on the CPU, one 16-byte load on a GPU. The algorithms in small_matrix.cuh are
// written once against this.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define CK_FN __host__ __device__ inline
#else
#define CK_FN inline
#endif

// The CPU code is compiled once per instruction set into a namespace of its own, so that the linker cannot merge
// the copies.
#ifndef CK_ISA
#define CK_ISA baseline
#endif

namespace ck {
inline namespace CK_ISA {

// One CPU thread. rank and size are constants, so its loops over members disappear and the strips vectorize.
struct Solo {
  static constexpr int rank = 0;
  static constexpr int size = 1;
  static constexpr int strip_bytes = 64;
  CK_FN void sync() const {}
};

// Whether a team never has more than one member, which is free to order its work for its cache.
template <class Team>
struct IsAlone {
  static constexpr bool value = false;
};
template <>
struct IsAlone<Solo> {
  static constexpr bool value = true;
};

#if defined(__CUDACC__)
// The threads of one CUDA block, one-dimensional.
struct Block {
  int rank;
  int size;
  static constexpr int strip_bytes = 16;
  CK_FN void sync() const {
#if defined(__CUDA_ARCH__)
    __syncthreads();
#endif
  }
};
#endif

// W values of T side by side: native vectors on the CPU, an array that unrolls into registers on a GPU.
#if defined(__CUDACC__)
template <class T>
struct Native {
  using type = T;
  static constexpr int lanes = 1;
};
#else
template <class T>
struct Native {
  typedef T type __attribute__((vector_size(32)));
  static constexpr int lanes = 32 / sizeof(T);
};
#endif

template <class T, int W>
struct Lanes {
  using V = typename Native<T>::type;
  static constexpr int lanes = Native<T>::lanes;
  static constexpr int count = W / lanes;
  V v[count];

  CK_FN static Lanes splat(T value) {
    Lanes out;
    // value - 0 is value, so no instruction is left of it; 0 + value would be one, for the sake of -0.
    for (int i = 0; i < count; ++i) out.v[i] = value - V{};
    return out;
  }
  CK_FN static Lanes load(const T* from) {
    Lanes out;
#if defined(__CUDA_ARCH__)
    // Strips begin at multiples of their own size: one 16-byte access.
    from = static_cast<const T*>(__builtin_assume_aligned(from, sizeof(Lanes)));
#endif
    for (int i = 0; i < count; ++i) __builtin_memcpy(&out.v[i], from + i * lanes, sizeof(V));
    return out;
  }
  // Widening load; the same as above where T is S.
  template <class S>
  CK_FN static Lanes load(const S* from) {
    Lanes out;
    for (int i = 0; i < count; ++i)
#if defined(__CUDACC__)
      out.v[i] = static_cast<T>(from[i]);
#else
    {
      typedef S Narrow __attribute__((vector_size(sizeof(S) * lanes)));
      Narrow narrow;
      __builtin_memcpy(&narrow, from + i * lanes, sizeof narrow);
      out.v[i] = __builtin_convertvector(narrow, V);
    }
#endif
    return out;
  }
  CK_FN void store(T* to) const {
#if defined(__CUDA_ARCH__)
    to = static_cast<T*>(__builtin_assume_aligned(to, sizeof(Lanes)));
#endif
    for (int i = 0; i < count; ++i) __builtin_memcpy(to + i * lanes, &v[i], sizeof(V));
  }

  // this + a b; the compiler fuses it where the hardware can.
  CK_FN void add_product(const Lanes& a, const Lanes& b) {
    for (int i = 0; i < count; ++i) v[i] = a.v[i] * b.v[i] + v[i];
  }
  CK_FN void scale(T factor) {
    for (int i = 0; i < count; ++i) v[i] *= factor;
  }
  CK_FN Lanes absolute() const {
    Lanes out;
    for (int i = 0; i < count; ++i) out.v[i] = v[i] < 0 ? -v[i] : v[i];
    return out;
  }
  // Lane by lane the larger of itself and |a|. Keeps NaN, so that a lost matrix cannot look converged.
  CK_FN void absorb(const Lanes& a) {
    for (int i = 0; i < count; ++i) {
      const V size = a.v[i] < 0 ? -a.v[i] : a.v[i];
      v[i] = v[i] >= size ? v[i] : v[i] != v[i] ? v[i] : size;
    }
  }
  CK_FN T sum() const {
    T each[W];
    store(each);
    T total = 0;
    for (int w = 0; w < W; ++w) total += each[w];
    return total;
  }
};

}  // namespace CK_ISA
}  // namespace ck
