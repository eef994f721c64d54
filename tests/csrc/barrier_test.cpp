// One inverse_cholesky by a team of threads. With -DCK_SKIP_BARRIER=k every k-th barrier is left out, by all members
// alike, so that nobody waits for ever: ThreadSanitizer must then report a race. The matrix is well conditioned and
// a failed pivot only ends the loop, so that a race cannot send members down paths of different length unnoticed.
#include <barrier>
#include <thread>
#include <vector>

#include "small_matrix.cuh"

namespace {

struct Threads {
  int rank;
  int size;
  std::barrier<>* barrier;
  int* calls;
  static constexpr int strip_bytes = 32;
  void sync() const {
#if defined(CK_SKIP_BARRIER)
    if (++*calls % CK_SKIP_BARRIER == 0) return;
#endif
    barrier->arrive_and_wait();
  }
};

}  // namespace

int main() {
  constexpr int n = 32, members = 4;
  std::vector<float> gram(n * n, 0.01f), work(ck::SmallMatrix<float, Threads>::factor_workspace(n));
  for (int i = 0; i < n; ++i) gram[i * n + i] = 1;
  std::barrier barrier(members);
  std::vector<int> calls(members, 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < members; ++rank)
    threads.emplace_back([&, rank] {
      const ck::SmallMatrix<float, Threads> algorithms(Threads{rank, members, &barrier, &calls[rank]}, n);
      algorithms.load({gram.data(), n, 1}, 1, 0, false, work.data());
      // A member that sees a bad pivot leaves early; dropping out keeps the others from waiting for it.
      algorithms.cholesky(work.data());
      barrier.arrive_and_drop();
    });
  for (auto& thread : threads) thread.join();
  return 0;
}
