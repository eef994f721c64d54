// One instruction set's sampling code on its own, for test_extension.py.
#include "cpu_samples.cpp"

extern "C" __attribute__((visibility("default"))) void draw(uint64_t key, int64_t first, float* out, int64_t count) {
  const ck::SampleCall call{key, 0, first, count, out};
  ck::CK_TABLE(call, 0, ck::sample_pieces(call));
}
