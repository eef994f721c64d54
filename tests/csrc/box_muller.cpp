// The Box-Muller step of the sample stream on given bits, for test_extension.py.
#include "philox.h"

extern "C" void box_muller_pairs(const uint32_t* words, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) ck::box_muller(words[2 * i], words[2 * i + 1], out[2 * i], out[2 * i + 1]);
}
