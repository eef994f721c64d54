// Samples of stream version 1 on the CPU. Compiled with -ffp-contract=off, which its bits depend on.
#include "cpu_kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "philox.h"

namespace ck {
inline namespace CK_ISA {
namespace {

constexpr int block = 64;  // counters at a time: the words stay in the first-level cache, and every loop is fixed

// Words of the counters (first ... first + block - 1) of one head.
#if defined(__AVX2__)
// Even and odd counters in the 64-bit lanes of two vectors. A product's high half moves down by a shift and its low
// half stays where it is, so nothing is permuted until the end; what is above bit 31 is never looked at. gcc 12
// vectorizes the plain loop below at half this speed.
void philox_words(uint64_t key, uint32_t head, uint64_t first, uint32_t (*words)[block]) {
  const __m256i m0 = _mm256_set1_epi64x(0xD2511F53), m1 = _mm256_set1_epi64x(0xCD9E8D57);
  for (int i = 0; i < block; i += 8) {
    __m256i c[2][4];
    for (int odd = 0; odd < 2; ++odd) {
      c[odd][0] = _mm256_add_epi64(_mm256_set1_epi64x(static_cast<int64_t>(first + static_cast<uint64_t>(i + odd))),
                                   _mm256_setr_epi64x(0, 2, 4, 6));
      c[odd][1] = _mm256_srli_epi64(c[odd][0], 32);
      c[odd][2] = _mm256_set1_epi64x(head);
      c[odd][3] = _mm256_setzero_si256();
    }
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < philox_rounds; ++round, k0 += weyl0, k1 += weyl1) {
      const __m256i key0 = _mm256_set1_epi64x(k0), key1 = _mm256_set1_epi64x(k1);
      for (int odd = 0; odd < 2; ++odd) {
        const __m256i p0 = _mm256_mul_epu32(c[odd][0], m0), p1 = _mm256_mul_epu32(c[odd][2], m1);
        c[odd][0] = _mm256_xor_si256(_mm256_srli_epi64(p1, 32), _mm256_xor_si256(c[odd][1], key0));
        c[odd][2] = _mm256_xor_si256(_mm256_srli_epi64(p0, 32), _mm256_xor_si256(c[odd][3], key1));
        c[odd][1] = p1;
        c[odd][3] = p0;
      }
    }
    for (int word = 0; word < 4; ++word)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(&words[word][i]),
                          _mm256_blend_epi32(c[0][word], _mm256_slli_epi64(c[1][word], 32), 0xAA));
  }
}
#else
void philox_words(uint64_t key, uint32_t head, uint64_t first, uint32_t (*words)[block]) {
  for (int i = 0; i < block; ++i) {
    words[0][i] = static_cast<uint32_t>(first + static_cast<uint64_t>(i));
    words[1][i] = static_cast<uint32_t>((first + static_cast<uint64_t>(i)) >> 32);
    words[2][i] = head;
    words[3][i] = 0;
  }
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < philox_rounds; ++round, k0 += weyl0, k1 += weyl1)
    for (int i = 0; i < block; ++i) philox_round(words[0][i], words[1][i], words[2][i], words[3][i], k0, k1);
}
#endif

// The 4 * block samples of those counters.
void philox_block(uint64_t key, uint32_t head, uint64_t first, float* out) {
  alignas(64) uint32_t words[4][block];
  philox_words(key, head, first, words);
  for (int i = 0; i < block; ++i) {
    box_muller(words[0][i], words[1][i], out[4 * i], out[4 * i + 1]);
    box_muller(words[2][i], words[3][i], out[4 * i + 2], out[4 * i + 3]);
  }
}

void sample(const SampleCall& call, int64_t begin, int64_t end) {
  constexpr int64_t per_block = 4 * block;
  const int64_t pieces = sample_pieces(call);
  for (int64_t index = begin; index < end; ++index) {
    const int64_t row = index / pieces;
    const int64_t from = call.first + index % pieces * sample_piece;
    const int64_t row_end = call.first + call.count;
    const int64_t to = from + sample_piece < row_end ? from + sample_piece : row_end;
    const uint32_t head = static_cast<uint32_t>(call.head + row);
    float* out = call.out + row * call.count - call.first;  // out[e] is element e
    int64_t e = from;
    while (e < to) {
      const uint64_t first = static_cast<uint64_t>(e) / 4;
      const int64_t start = static_cast<int64_t>(4 * first);
      if (start == e && e + per_block <= to) {
        philox_block(call.key, head, first, out + e);
        e += per_block;
        continue;
      }
      // The first or last block of a part of a head.
      alignas(64) float spare[per_block];
      philox_block(call.key, head, first, spare);
      for (; e < to && e < start + per_block; ++e) out[e] = spare[e - start];
    }
  }
}

}  // namespace
}  // namespace CK_ISA

const SampleKernel CK_TABLE = sample;

}  // namespace ck
