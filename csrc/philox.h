// Normal samples of stream version 1, bit for bit as conditioned_kernels/sampling.py defines them.
//
// Every float operation is one correctly rounded float32 multiply, add or square root, in the order written
// there. nvcc is told so by the _rn intrinsics, the host compiler by -ffp-contract=off.
#pragma once

#include <cstdint>

#include "team.h"

namespace ck {
inline namespace CK_ISA {

struct Counter {
  uint32_t word[4];
};

CK_FN float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

CK_FN float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

CK_FN float square_root(float a) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(a);
#else
  return __builtin_sqrtf(a);
#endif
}

CK_FN uint32_t float_bits(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
#endif
}

CK_FN float bits_float(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
#endif
}

// One round of Philox4x32 (Salmon et al., SC 2011).
CK_FN void philox_round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3, uint32_t k0, uint32_t k1) {
  const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0;
  const uint64_t p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
  c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
  c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
  c1 = static_cast<uint32_t>(p1);
  c3 = static_cast<uint32_t>(p0);
}

constexpr int philox_rounds = 10;
constexpr uint32_t weyl0 = 0x9E3779B9u;
constexpr uint32_t weyl1 = 0xBB67AE85u;

// log(1 + f), sin(pi/2 t) / t and cos(pi/2 t) - 1 over t^2: the numbers of coefficients.py.
constexpr uint32_t sqrt_half_bits = 0x3F3504F3u;
constexpr float ln2_high = 0.693359375f;
constexpr float ln2_low = -2.12194440e-4f;

CK_FN float log1p_polynomial(float f) {
  float sum = multiply(f, -0.07634501904249191f);
  sum = multiply(add(sum, 0.1276157945394516f), f);
  sum = multiply(add(sum, -0.13160181045532227f), f);
  sum = multiply(add(sum, 0.14201757311820984f), f);
  sum = multiply(add(sum, -0.16623356938362122f), f);
  sum = multiply(add(sum, 0.20001226663589478f), f);
  sum = multiply(add(sum, -0.2500081956386566f), f);
  return add(sum, 0.3333333134651184f);
}

CK_FN float sine_polynomial(float s) {
  float sum = multiply(s, -0.00460165785625577f);
  sum = multiply(add(sum, 0.07968003302812576f), s);
  sum = multiply(add(sum, -0.6459634900093079f), s);
  return add(sum, 1.5707963705062866f);
}

CK_FN float cosine_polynomial(float s) {
  float sum = multiply(s, 0.0009037665440700948f);
  sum = multiply(add(sum, -0.02086016535758972f), s);
  sum = multiply(add(sum, 0.25366923213005066f), s);
  return add(sum, -1.2337005138397217f);
}

CK_FN void box_muller(uint32_t radius_bits, uint32_t angle_bits, float& z0, float& z1) {
  // radius_bits + 1 in (0, 2^32]: both halves and the shift are exact, so the sum is the one rounding.
  const float high = multiply(static_cast<float>(static_cast<int32_t>(radius_bits >> 16)), 65536.0f);
  const float low = static_cast<float>(static_cast<int32_t>((radius_bits & 0xFFFFu) + 1u));
  const uint32_t bits = float_bits(multiply(add(high, low), 2.3283064365386963e-10f));
  const int32_t whole = static_cast<int32_t>(bits - sqrt_half_bits) >> 23;
  const float f = add(bits_float(bits - (static_cast<uint32_t>(whole) << 23)), -1.0f);
  const float exponent = static_cast<float>(whole);
  const float square = multiply(f, f);
  float log = multiply(log1p_polynomial(f), multiply(f, square));
  log = add(log, multiply(exponent, ln2_low));
  log = add(log, -multiply(square, 0.5f));
  log = add(log, f);
  log = add(log, multiply(exponent, ln2_high));
  const float radius = square_root(multiply(log, -2.0f));

  // Unsigned wrap-around makes quarter 4 into 0, which is the same turn, and leaves the same remainder.
  const uint32_t quarter = (angle_bits + (1u << 29)) >> 30;
  const float t = multiply(static_cast<float>(static_cast<int32_t>(angle_bits - (quarter << 30))), 9.313225746154785e-10f);
  const float turn = multiply(t, t);
  const float sine = multiply(multiply(sine_polynomial(turn), t), radius);
  const float cosine = multiply(add(multiply(cosine_polynomial(turn), turn), 1.0f), radius);
  const bool odd = (quarter & 1u) != 0;
  // Rotation by quarter turns: (c, s), (-s, c), (-c, -s), (s, -c). Multiplying by -1 is exact.
  z0 = bits_float(float_bits(odd ? sine : cosine) ^ (((quarter + 1u) & 2u) << 30));
  z1 = bits_float(float_bits(odd ? cosine : sine) ^ ((quarter & 2u) << 30));
}

// The four samples of one counter: elements 4 block ... 4 block + 3 of a head.
CK_FN void philox_normal4(uint64_t key, uint32_t head, uint64_t block, float* z) {
  uint32_t c0 = static_cast<uint32_t>(block), c1 = static_cast<uint32_t>(block >> 32), c2 = head, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < philox_rounds; ++round) {
    philox_round(c0, c1, c2, c3, k0, k1);
    k0 += weyl0;
    k1 += weyl1;
  }
  box_muller(c0, c1, z[0], z[1]);
  box_muller(c2, c3, z[2], z[3]);
}

}  // namespace CK_ISA
}  // namespace ck
