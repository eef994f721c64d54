// Runs the small-matrix algorithms with one thread, and with a team of threads that meet at a std::barrier, and
// compares. Built under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer by test_extension_teams.py;
// barrier_test.cpp is the negative control.
#include <barrier>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "small_matrix.cuh"

namespace {

constexpr int members = 4;

struct Threads {
  int rank;
  int size;
  std::barrier<>* barrier;
  static constexpr int strip_bytes = 32;

  void sync() const { barrier->arrive_and_wait(); }
};

struct OneThread : ck::Solo {
  static constexpr int strip_bytes = 32;
};

template <class Run>
void as_team(Run run) {
  std::barrier barrier(members);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < members; ++rank)
    threads.emplace_back([&, rank] { run(Threads{rank, members, &barrier}); });
  for (auto& thread : threads) thread.join();
}

int failures = 0;

void expect(bool good, const char* what, int n) {
  if (good) return;
  std::printf("FAILED: %s at n = %d\n", what, n);
  ++failures;
}

template <class T>
std::vector<T> aligned_buffer(int64_t count) {
  return std::vector<T>(static_cast<size_t>(count));
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(a[i] == b[i] || (a[i] != a[i] && b[i] != b[i]))) return false;
  return true;
}

template <class T>
void run(int n, int rank, bool padded_source) {
  // G = W W^T of a random n x 3n matrix, of which `rank` rows are independent.
  std::mt19937 engine(static_cast<unsigned>(n));
  std::normal_distribution<double> normal;
  const int m = 3 * n, stride = padded_source ? n + 3 : n;
  std::vector<double> w(static_cast<size_t>(n * m));
  for (auto& x : w) x = normal(engine);
  for (int i = rank; i < n; ++i)
    for (int k = 0; k < m; ++k) w[static_cast<size_t>(i * m + k)] = rank ? w[static_cast<size_t>(k)] : 0.0;
  std::vector<T> gram(static_cast<size_t>(n * stride));
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = 0;
      for (int k = 0; k < m; ++k) sum += w[static_cast<size_t>(i * m + k)] * w[static_cast<size_t>(j * m + k)];
      gram[static_cast<size_t>(i * stride + j)] = static_cast<T>(sum);
    }
  const ck::Source<T> source{gram.data(), stride, 1};
  const auto size = static_cast<size_t>(n * n);

  using Solo = ck::SmallMatrix<T, OneThread>;
  using Team = ck::SmallMatrix<T, Threads>;
  const Solo solo(OneThread{}, n);

  for (const bool polar : {true, false}) {
    std::vector<T> one(size), many(size);
    T residual_one = 0;
    std::vector<T> residual_many(members);
    std::vector<ck::Status> status_many(members);
    auto work = aligned_buffer<T>(Solo::factor_workspace(n));
    const auto status = polar ? solo.inverse_sqrt(source, work.data(), one.data(), residual_one)
                              : solo.inverse_cholesky(source, work.data(), one.data(), residual_one);
    auto shared = aligned_buffer<T>(Team::factor_workspace(n));
    as_team([&](const Threads& team) {
      const Team algorithms(team, n);
      const auto at = static_cast<size_t>(team.rank);
      status_many[at] = polar ? algorithms.inverse_sqrt(source, shared.data(), many.data(), residual_many[at])
                              : algorithms.inverse_cholesky(source, shared.data(), many.data(), residual_many[at]);
    });
    for (const auto each : status_many) expect(each == status, "factor status", n);
    expect(same(one, many), polar ? "inverse_sqrt of a team" : "inverse_cholesky of a team", n);
    if (rank == n) expect(status == ck::converged && residual_one < 1e-4, "factor", n);
    if (rank == 0) expect(status == ck::zero_matrix, "zero matrix", n);
  }

  const int steps = n < 24 ? n : 24;
  std::vector<T> vectors(2 * static_cast<size_t>(n)), warm(vectors), again(vectors);
  auto work = aligned_buffer<T>(Solo::spectrum_workspace(n, steps));
  auto shared = aligned_buffer<T>(Team::spectrum_workspace(n, steps));
  for (int pass = 0; pass < 2; ++pass) {
    const T* start = pass ? warm.data() : nullptr;
    const auto one = solo.spectrum_bracket(source, 1e-6, 1e-3, false, steps, start, vectors.data(), work.data());
    std::vector<double> bounds(6), found(6 * members);
    one.store(bounds.data());
    as_team([&](const Threads& team) {
      const Team algorithms(team, n);
      algorithms.spectrum_bracket(source, 1e-6, 1e-3, false, steps, start, again.data(), shared.data())
          .store(found.data() + 6 * team.rank);
    });
    for (int i = 0; i < 6 * members; ++i) {
      const double a = bounds[static_cast<size_t>(i % 6)], b = found[static_cast<size_t>(i)];
      expect(a == b || (std::isnan(a) && std::isnan(b)), "spectrum of a team", n);
    }
    expect(same(vectors, again), "vectors of a team", n);
    warm = vectors;
  }
}

}  // namespace

int main() {
  for (const int n : {1, 3, 8, 17, 33}) {
    run<float>(n, n, false);
    run<double>(n, n, true);
  }
  run<float>(12, 5, true);
  run<double>(12, 0, false);
  std::printf("%d failures\n", failures);
  return failures != 0;
}
