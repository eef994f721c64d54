// Algorithms on one symmetric positive definite n x n matrix, written once for a team (team.h).
//
// A matrix is stored by rows with leading dimension N = padded(n), a multiple of the strip width, and its padding
// is that of the identity (or zero for vectors), so that strips need no edge cases. A member owns strips of `width`
// columns and never writes another's. u is the unit roundoff of T. References: Higham, Accuracy and Stability of
// Numerical Algorithms (2002) [ASNA]; Higham, Functions of Matrices (2008) [FM]; Parlett, The Symmetric
// Eigenvalue Problem (1998) [SEP].
#pragma once

#include <cstdint>

#include "philox.h"
#include "team.h"

namespace ck {
inline namespace CK_ISA {

// The codes of conditioned_kernels/_status.py.
enum Status : int8_t { converged = 0, tolerance_not_met = 1, rank_deficient = 2, zero_matrix = 3, non_finite = 4 };

template <class T>
struct Unit;
template <>
struct Unit<float> {
  static constexpr double roundoff = 5.9604644775390625e-8;
};
template <>
struct Unit<double> {
  static constexpr double roundoff = 1.1102230246251565e-16;
};

CK_FN float root(float a) { return __builtin_sqrtf(a); }
CK_FN double root(double a) { return __builtin_sqrt(a); }
template <class T>
CK_FN T magnitude(T a) {
  return a < 0 ? -a : a;
}
// max that keeps NaN, so that a lost matrix cannot look converged.
template <class T>
CK_FN T larger(T a, T b) {
  return a >= b || a != a ? a : b;
}
template <class T>
CK_FN bool finite(T a) {
  return a - a == 0;
}
// The even power of two 2^-e that brings `value` near 1, or 1 for what has no logarithm. Exact to multiply with.
CK_FN double even_scale(double value) {
  if (!(value > 0) || !finite(value)) return 1;
  double scale = 1;
  while (value * scale >= 4) scale *= value * scale >= 0x1p64 ? 0x1p-64 : 0.25;
  while (value * scale < 1) scale *= value * scale < 0x1p-64 ? 0x1p64 : 4;
  return scale;
}

// A strided n x n matrix in memory the team only reads.
template <class T>
struct Source {
  const T* data;
  int64_t row_stride;
  int64_t col_stride;
  CK_FN T operator()(int i, int j) const { return data[i * row_stride + j * col_stride]; }
};

template <class T, class Team>
struct SmallMatrix {
  static constexpr int width = Team::strip_bytes / static_cast<int>(sizeof(T));
  static constexpr int tile_rows = 4;
  using Strip = Lanes<T, width>;
  static constexpr int ends = 2;  // top and bottom of the spectrum
  static constexpr double unit = Unit<T>::roundoff;

  Team team;
  int n;
  int N;

  CK_FN static int padded(int n) { return (n + width - 1) / width * width; }

  CK_FN SmallMatrix(const Team& team_, int n_) : team(team_), n(n_), N(padded(n_)) {}

  // ---- building blocks ------------------------------------------------------------------------------------

  // out = sign * scale * source + shift * I, identity in the padding. The upper triangle of the source defines the
  // matrix; with `upper` the other is zero.
  CK_FN void load(const Source<T>& source, double factor, double shift, bool upper, T* out) const {
    const T scale = static_cast<T>(factor);
    for (int i = team.rank; i < N; i += team.size) {
      if (i < n) {
        for (int j = i; j < n; ++j) out[i * N + j] = source(i, j) * scale;
        out[i * N + i] += static_cast<T>(shift);
        if (upper)
          for (int j = 0; j < i; ++j) out[i * N + j] = 0;
        else
          for (int j = i + 1; j < n; ++j) out[j * N + i] = source(i, j) * scale;
      }
      for (int j = i > n ? i : n; j < N; ++j) {
        out[i * N + j] = i == j ? T(1) : T(0);
        out[j * N + i] = i == j ? T(1) : T(0);
      }
    }
    team.sync();
  }

  CK_FN void copy(const T* from, T* to, T factor = 1) const {
    for (int j = team.rank * width; j < N; j += team.size * width)
      for (int i = 0; i < N; ++i) {
        Strip row = Strip::load(from + i * N + j);
        row.scale(factor);
        row.store(to + i * N + j);
      }
    team.sync();
  }

  CK_FN void add(const T* from, T* to) const {
    const Strip one = Strip::splat(1);
    for (int j = team.rank * width; j < N; j += team.size * width)
      for (int i = 0; i < N; ++i) {
        Strip sum = Strip::load(to + i * N + j);
        sum.add_product(one, Strip::load(from + i * N + j));
        sum.store(to + i * N + j);
      }
    team.sync();
  }

  CK_FN void add_identity(T* a, T factor = 1) const {
    for (int i = team.rank; i < N; i += team.size) a[i * N + i] += factor;
    team.sync();
  }

  // Every member computes the whole sum in one order, so all agree without a further barrier.
  CK_FN T dot(const T* x, const T* y) const {
    Strip sum = Strip::splat(0);
    for (int j = 0; j < N; j += width) sum.add_product(Strip::load(x + j), Strip::load(y + j));
    return sum.sum();
  }

  // c = alpha a b + beta I, accumulated in Acc. With `symmetric` only tiles that touch the upper triangle are
  // formed, and mirrored: right when a and b are symmetric and commute. c must not be a or b.
  template <class Acc, bool symmetric, class B, class C>
  CK_FN void multiply(const T* a, const B* b, C* c, double alpha, double beta) const {
    constexpr int columns = Team::strip_bytes / static_cast<int>(sizeof(Acc));
    const int strips = N / columns, tiles = N / tile_rows;
    if constexpr (IsAlone<Team>::value) {
      // Rows of b are a power of two apart, as often as not, and would push each other out of the first-level cache.
      constexpr int packed_rows = 256;
      alignas(64) Acc packed[packed_rows * columns];
      for (int strip = 0; strip < strips; ++strip) {
        if (N <= packed_rows)
          for (int k = 0; k < N; ++k) Lanes<Acc, columns>::load(b + k * N + strip * columns).store(packed + k * columns);
        for (int tile = 0; tile < tiles; ++tile) {
          if (N <= packed_rows)
            multiply_tile<Acc, symmetric>(a, packed, columns, c, alpha, beta, tile * tile_rows, strip * columns);
          else
            multiply_tile<Acc, symmetric>(a, b + strip * columns, N, c, alpha, beta, tile * tile_rows, strip * columns);
        }
      }
    } else {
      for (int tile = team.rank; tile < strips * tiles; tile += team.size) {
        const int j0 = tile % strips * columns;
        multiply_tile<Acc, symmetric>(a, b + j0, N, c, alpha, beta, tile / strips * tile_rows, j0);
      }
    }
    team.sync();
  }

  // The tile of c at (i0, j0); right has the rows of b from column j0 on, `stride` apart.
  template <class Acc, bool symmetric, class B, class C>
  CK_FN void multiply_tile(const T* a, const B* right, int stride, C* c, double alpha, double beta, int i0,
                           int j0) const {
    constexpr int columns = Team::strip_bytes / static_cast<int>(sizeof(Acc));
    using Wide = Lanes<Acc, columns>;
    if (symmetric && j0 + columns <= i0) return;
    Wide sum[tile_rows];
    for (int i = 0; i < tile_rows; ++i) sum[i] = Wide::splat(0);
    for (int k = 0; k < N; ++k) {
      const Wide row = Wide::load(right + k * stride);
      for (int i = 0; i < tile_rows; ++i) sum[i].add_product(Wide::splat(static_cast<Acc>(a[(i0 + i) * N + k])), row);
    }
    const bool on_diagonal = i0 < j0 + columns && j0 < i0 + tile_rows;
    for (int i = 0; i < tile_rows; ++i) {
      Acc each[columns];
      sum[i].scale(static_cast<Acc>(alpha));
      sum[i].store(each);
      C* row = c + (i0 + i) * N + j0;
      C* column = c + j0 * N + i0 + i;
      for (int w = 0; w < columns; ++w) {
        if (on_diagonal) {
          if (symmetric && i0 + i > j0 + w) continue;
          if (i0 + i == j0 + w) each[w] += static_cast<Acc>(beta);
        }
        row[w] = static_cast<C>(each[w]);
        if (symmetric) column[w * N] = static_cast<C>(each[w]);
      }
    }
  }

  // max |a|; scratch holds N values.
  CK_FN T largest(const T* a, T* scratch) const {
    for (int j = team.rank * width; j < N; j += team.size * width) {
      Strip most = Strip::splat(0);
      for (int i = 0; i < N; ++i) most.absorb(Strip::load(a + i * N + j));
      most.store(scratch + j);
    }
    team.sync();
    T worst = 0;
    for (int j = 0; j < N; ++j) worst = larger(worst, scratch[j]);
    team.sync();
    return worst;
  }

  // a, of which the upper triangle counts, becomes R (zeros below) with a = R^T R. Returns the number of positive
  // pivots: n on success. Right-looking, a block of rows at a time, so that the rest is read and written n / 4 times;
  // [ASNA, theorem 10.3], which holds for any order: R^T R = a + E with |E| <= gamma(n+1) |R^T||R|.
  CK_FN int cholesky(T* a) const {
    for (int top = 0; top < n; top += tile_rows) {
      const int end = top + tile_rows < n ? top + tile_rows : n;
      for (int k = top; k < end; ++k) {
        const T pivot = a[k * N + k];
        if (!(pivot > 0) || !finite(pivot)) {
          team.sync();
          return k;
        }
        const T diagonal = root(pivot);
        const T inverse = 1 / diagonal;
        const int first = k / width * width;
        T left[tile_rows];
        for (int i = k + 1; i < end; ++i) left[i - top] = -a[k * N + i] * inverse;
        team.sync();
        for (int j = first + team.rank * width; j < N; j += team.size * width) {
          Strip row = Strip::load(a + k * N + j);
          row.scale(inverse);
          row.store(a + k * N + j);
          for (int i = k + 1; i < end; ++i) {
            if (j + width <= i) continue;
            Strip below = Strip::load(a + i * N + j);
            below.add_product(Strip::splat(left[i - top]), row);
            below.store(a + i * N + j);
          }
          if (j == first) {
            for (int before = first; before < k; ++before) a[k * N + before] = 0;
            a[k * N + k] = diagonal;
          }
        }
        team.sync();
      }
      if (end == n) break;
      const int first = end / width * width;
      const int strips = (N - first) / width;
      const int across = team.size < strips ? team.size : strips;
      const int down = team.size / across;
      for (int i = end + team.rank / across; i < n && team.rank < across * down; i += down) {
        Strip left[tile_rows];
        for (int p = 0; p < tile_rows; ++p) left[p] = Strip::splat(-a[(top + p) * N + i]);
        // Strips that end before the diagonal are zero already.
        for (int j = first + team.rank % across * width; j < N; j += across * width) {
          if (j + width <= i) continue;
          Strip row = Strip::load(a + i * N + j);
          for (int p = 0; p < tile_rows; ++p) row.add_product(left[p], Strip::load(a + (top + p) * N + j));
          row.store(a + i * N + j);
        }
      }
      team.sync();
    }
    return n;
  }

  // ||E||_2 of the factorization above: gamma(n+1) || |R^T||R| ||_inf, with |R| 1 and then |R^T| (|R| 1) in scratch
  // (2N values). 1.02 covers the rounding of these sums themselves.
  CK_FN double cholesky_error(const T* r, T* scratch) const {
    for (int i = team.rank; i < N; i += team.size) {
      Strip sum = Strip::splat(0);
      const Strip one = Strip::splat(1);
      for (int j = i / width * width; j < N; j += width) sum.add_product(one, Strip::load(r + i * N + j).absolute());
      scratch[i] = sum.sum();
    }
    team.sync();
    T* columns = scratch + N;
    for (int j = team.rank * width; j < N; j += team.size * width) {
      Strip sum = Strip::splat(0);
      for (int i = 0; i < n && i < j + width; ++i)
        sum.add_product(Strip::splat(scratch[i]), Strip::load(r + i * N + j).absolute());
      sum.store(columns + j);
    }
    team.sync();
    T worst = 0;
    for (int j = 0; j < n; ++j) worst = larger(worst, columns[j]);
    team.sync();
    return 1.02 * (n + 2) * unit * static_cast<double>(worst);
  }

  // x = L^-1 (lower triangle, zeros above) from the R = L^T of cholesky(). A member owns whole columns: no barrier
  // but the last. Forward substitution; each column solves (L + dL) x = e, |dL| <= gamma(n) |L| [ASNA, 8.5].
  CK_FN void triangular_inverse(const T* r, T* x) const {
    for (int j = team.rank * width; j < N; j += team.size * width) {
      for (int i = 0; i < N; ++i) {
        Strip row = Strip::splat(0);
        if (i >= j && i < n)
          for (int k = j; k < i; ++k) row.add_product(Strip::splat(-r[k * N + i]), Strip::load(x + k * N + j));
        T each[width];
        row.store(each);
        if (i >= j && i < j + width) each[i - j] += 1;
        const T inverse = i < n ? 1 / r[i * N + i] : T(1);
        for (int w = 0; w < width; ++w) x[i * N + j + w] = each[w] * inverse;
      }
    }
    team.sync();
  }

  // out (n x n, contiguous) = factor * a.
  CK_FN void store(const T* a, double factor, T* out) const {
    const T scale = static_cast<T>(factor);
    for (int64_t i = team.rank; i < n; i += team.size)
      for (int j = 0; j < n; ++j) out[i * n + j] = a[i * N + j] * scale;
    team.sync();
  }

  // ||source||_inf, which bounds every eigenvalue; scratch holds N values.
  CK_FN double norm(const Source<T>& source, T* scratch) const {
    for (int i = team.rank; i < n; i += team.size) {
      T sum = 0;
      for (int j = 0; j < i; ++j) sum += magnitude(source(j, i));
      for (int j = i; j < n; ++j) sum += magnitude(source(i, j));
      scratch[i] = sum;
    }
    team.sync();
    T worst = 0;
    for (int i = 0; i < n; ++i) worst = larger(worst, scratch[i]);
    team.sync();
    return static_cast<double>(worst);
  }

  // ---- factors of a Gram matrix -----------------------------------------------------------------------------

  // Elements of T in the workspace of the two factors: z, y and c, d (which may be `out` when it needs no padding,
  // and then is not counted), two vectors.
  CK_FN static int64_t factor_workspace(int n) {
    const int64_t N = padded(n);
    return (N == n ? 3 : 4) * N * N + 2 * N;
  }

  // out = L^-1, source = L L^T, so that L^-1 W is the Q of Householder QR of W^T with a positive diagonal.
  CK_FN Status inverse_cholesky(const Source<T>& source, T* work, T* out, T& residual) const {
    T* z = work;
    T* y = z + N * N;
    T* c = y + N * N;
    T* scratch = c + N * N;
    T* d = N == n ? out : scratch + 2 * N;
    const double size = norm(source, scratch);
    const double scale = even_scale(size);
    load(source, scale, 0, true, y);
    if (cholesky(y) < n) return lost(size, out, residual);
    triangular_inverse(y, z);
    load(source, scale, 0, false, d);
    multiply<T, false>(z, d, y, 1, 0);
    transpose(z, c);
    multiply<T, false>(y, c, d, -1, 1);
    residual = largest(d, scratch);
    store(z, root(scale), out);
    return judge(residual);
  }

  // out = source^(-1/2) by the coupled Newton-Schulz iteration [FM, eq. 6.35], as _torch._inverse_sqrt_newton: in T
  // until ||I - z y|| <= sqrt(u) / 5, then uncoupled steps whose residual I - z G z is accumulated in double. For
  // kappa(G) up to about 30; beyond, rounding keeps the iterates from commuting, and the residual says so.
  CK_FN Status inverse_sqrt(const Source<T>& source, T* work, T* out, T& residual) const {
    T* z = work;
    T* y = z + N * N;
    T* c = y + N * N;
    T* scratch = c + N * N;
    T* d = N == n ? out : scratch + 2 * N;
    double* product = reinterpret_cast<double*>(y);  // y and c together hold N * N doubles
    const double size = norm(source, scratch);
    double trace = 0;
    for (int i = 0; i < n; ++i) trace += static_cast<double>(source(i, i));
    // The iteration wants eigenvalues in (0, 3). Their mean is 1 after division by trace / n; where the largest may
    // exceed 2.9 of that, ||G||_inf takes the place of the mean.
    const double mean = size < 2.9 * trace / n ? trace / n : size / 2;
    if (!(mean > 0) || !finite(mean)) return lost(size, out, residual);
    load(source, 1 / mean, 0, false, y);
    const T wanted = static_cast<T>(root(unit) / 5);
    T error = 0;
    for (int step = 0; step < newton_steps; ++step) {
      // z begins as I, so that the first step needs no product with it.
      if (step == 0) {
        copy(y, c, T(-0.5));
        add_identity(c, T(0.5));
      } else {
        multiply<T, true>(z, y, c, -0.5, 0.5);
      }
      error = 2 * largest(c, scratch);
      if (!(error < 1e3)) return lost(size, out, residual);
      if (step > 0 && error <= wanted) break;
      add_identity(c);
      if (step == 0) {
        copy(c, z);
      } else {
        multiply<T, true>(c, z, d, 1, 0);
        copy(d, z);
      }
      if (error * error <= wanted) break;
      multiply<T, true>(y, c, d, 1, 0);
      copy(d, y);
    }
    if (!(error * error <= 4 * wanted)) return lost(size, out, residual);
    T before = 1;
    for (int step = 0;; ++step) {
      load(source, 1 / mean, 0, false, d);
      multiply<double, false>(d, z, product, 1, 0);
      multiply<double, true>(z, product, d, -1, 1);
      residual = largest(d, scratch);
      // After a correction the residual is 3/4 of its square, plus what rounding z to T costs: at most two are useful,
      // and one where n residual, which bounds the norm, squares to less than u.
      if (step == 2 || residual <= 2 * static_cast<T>(unit)) break;
      if (step == 1 && n * before * n * before <= static_cast<T>(unit)) break;
      before = residual;
      multiply<T, true>(z, d, y, 0.5, 0);
      add(y, z);
    }
    store(z, 1 / root(mean), out);
    return judge(residual);
  }

  // The tolerance of _torch.residual_tolerance: 8 eps.
  CK_FN static Status judge(T residual) { return residual <= 16 * static_cast<T>(unit) ? converged : tolerance_not_met; }

  CK_FN Status lost(double size, T* out, T& residual) const {
    const T nan = static_cast<T>(__builtin_nan(""));
    for (int64_t i = team.rank; i < int64_t(n) * n; i += team.size) out[i] = nan;
    residual = nan;
    return size == 0 ? zero_matrix : finite(size) ? tolerance_not_met : non_finite;
  }

  CK_FN void transpose(const T* from, T* to) const {
    for (int j = team.rank; j < N; j += team.size)
      for (int i = 0; i < N; ++i) to[i * N + j] = from[j * N + i];
    team.sync();
  }

  static constexpr int newton_steps = 24;

  // ---- both ends of the spectrum ----------------------------------------------------------------------------
  //
  // Lanczos with full reorthogonalization [SEP, section 13.8] gives vectors whose Rayleigh quotients bound
  // lambda_max from below and lambda_min from above. The other two ends are proved by inertia: Cholesky of
  // nu I - G succeeds => lambda_max <= nu + e, Cholesky of G - mu I succeeds => lambda_min >= mu - e, with e from
  // cholesky_error(). So a wrong guess costs a failed factorization and more steps, never a wrong bracket.

  static constexpr int points = 8;  // Sturm counts per end and round
  static constexpr int check_every = 4;
  static constexpr double fine_change = 1e-6;
  static constexpr double first_margin = 0.35;  // of what rtol leaves, per end; the rest is for cholesky_error

  // Elements of T in the workspace of spectrum_bracket: the matrix, the basis, and vectors.
  CK_FN static int64_t spectrum_workspace(int n, int max_steps) {
    const int64_t N = padded(n), K = padded(max_steps);
    return N * N + max_steps * N + 5 * N + 5 * K + 2 * points + 2 * width + 2 * N;
  }

  struct Spectrum {
    double top, top_low, top_high;           // lambda_max of the exact Gram matrix: estimate, bracket
    double bottom, bottom_low, bottom_high;  // lambda_min
    int steps;
    Status status;

    CK_FN void store(double* to) const {
      const double all[6] = {top, top_low, top_high, bottom, bottom_low, bottom_high};
      for (int i = 0; i < 6; ++i) to[i] = all[i];
    }
  };

  struct Tridiagonal {
    T* diagonal;
    T* beside;  // beside[i] couples i and i + 1
    int size;
  };

  // delta: |lambda_i(source) - lambda_i(exact Gram)| <= delta. start: 2 x n warm vectors or null. ritz: 2 x n out.
  // With give_up, the estimates are left as they are once no bracket can be as narrow as rtol.
  CK_FN Spectrum spectrum_bracket(const Source<T>& source, double delta, double rtol, bool give_up, int max_steps,
                                  const T* start, T* ritz, T* work) const {
    const int K = padded(max_steps);
    T* a = work;
    T* basis = a + N * N;
    T* w = basis + static_cast<int64_t>(max_steps) * N;
    T* x[ends] = {w + N, w + 2 * N};
    T* scratch = w + 3 * N;  // 2 N
    T* diagonal = scratch + 2 * N;
    T* beside = diagonal + K;
    T* coefficient = beside + K;  // K, projections; then the pivots of ritz_vector
    T* ritz_coefficient = coefficient + K;  // 2 K
    T* counts = ritz_coefficient + 2 * K;
    double* partial = reinterpret_cast<double*>(scratch);  // N doubles where T is float: scratch has 2 N

    Spectrum out{};
    const double size = norm(source, scratch);
    const double nan = __builtin_nan("");
    if (!(size > 0) || !finite(size)) {
      const double value = size == 0 ? 0.0 : nan;
      out.top = out.top_low = out.bottom = out.bottom_low = value;
      out.top_high = out.bottom_high = size == 0 ? delta : nan;
      out.status = size == 0 ? zero_matrix : non_finite;
      for (int i = team.rank; i < ends * n; i += team.size) ritz[i] = 0;
      team.sync();
      return out;
    }
    const double scale = even_scale(size);
    const double bound = size * scale * (1 + 2 * n * unit);  // >= every eigenvalue of the scaled matrix, < 4.1
    delta *= scale;
    const double floor_margin = 4 * n * unit * bound;

    load(source, scale, 0, false, a);
    bool warm = start != nullptr;
    if (warm) {
      for (int i = team.rank; i < N; i += team.size) basis[i] = i < n ? start[i] + start[n + i] : T(0);
      team.sync();
      const T length = root(dot(basis, basis));
      warm = length > 0 && finite(length) && finite(1 / length);
      if (warm) scaled(basis, 1 / length, basis);
    }
    if (!warm) random_direction(basis, 0, 0, w, coefficient);

    int steps = 0;
    double theta[ends] = {nan, nan}, inner[ends] = {nan, nan}, outer[ends] = {bound, 0};
    double margin[ends] = {floor_margin, floor_margin};
    bool proved[ends] = {false, false};
    double widen = 1;
    bool fresh = true;  // a holds the matrix, not a factor
    bool hopeless = false;
    for (;;) {
      if (steps < max_steps) {
        if (!fresh) load(source, scale, 0, false, a);
        fresh = true;
        const int must = steps + check_every < max_steps ? steps + check_every : max_steps;
        bool settled = false;
        while (steps < max_steps && !settled) {
          lanczos_step(a, basis, w, diagonal, beside, coefficient, steps, max_steps, bound);
          ++steps;
          const bool early = warm && steps <= 8 && steps % 2 == 0;
          if (steps < max_steps && !early && steps % check_every != 0) continue;
          double now[ends];
          const double tolerance = (margin[0] < margin[1] ? margin[0] : margin[1]) / 32;
          extremes({diagonal, beside, steps}, bound, tolerance, counts, now);
          choose_margins(now[0], now[1], delta, rtol, floor_margin, margin);
          // No Ritz value is below lambda_min, so delta alone takes at least this much of rtol.
          hopeless = give_up && !(left_of(rtol, delta, bound, now[1]) > 0);
          settled = steps == max_steps || hopeless;
          if (steps >= must || (early && steps >= 4)) {
            bool still = true;
            for (int end = 0; end < ends; ++end) {
              // The estimate is held to a relative 1e-6 or so, even where rtol asks for less.
              const double fine = fine_change * now[end] > floor_margin ? fine_change * now[end] : floor_margin;
              const double most = margin[end] / 4 < fine ? margin[end] / 4 : fine;
              still = still && magnitude(now[end] - theta[end]) <= most;
            }
            settled = settled || still;
          }
          theta[0] = now[0];
          theta[1] = now[1];
        }
        for (int end = 0; end < ends; ++end) {
          ritz_vector({diagonal, beside, steps}, theta[end], end, bound, coefficient, ritz_coefficient + end * K);
          combine(basis, ritz_coefficient + end * K, steps, x[end]);
          inner[end] = rayleigh(a, x[end], partial);
        }
      }
      if (hopeless) break;
      for (int end = 0; end < ends; ++end) {
        if (proved[end]) continue;
        const double guess = end == 0 ? inner[0] + widen * margin[0] : inner[1] - widen * margin[1];
        if (end == 1 && !(guess > 0)) continue;
        load(source, end == 0 ? -scale : scale, end == 0 ? guess : -guess, true, a);
        fresh = false;
        if (cholesky(a) < n) continue;
        // The shift is rounded once per diagonal element, each to at most u times itself.
        const double error = cholesky_error(a, scratch) + 2 * unit * (bound + guess);
        outer[end] = end == 0 ? guess + error : guess - error;
        proved[end] = true;
      }
      if (proved[0] && proved[1]) break;
      if (steps >= max_steps) {
        widen *= 8;
        if (widen > 1e5) break;
      }
    }
    // Rayleigh quotients are summed in double: |error| <= (2 n + 2) 2^-53 ||G||_inf.
    const double slack = (2 * n + 4) * Unit<double>::roundoff * bound;
    out.top = inner[0] / scale;
    out.top_low = positive(inner[0] - slack - delta) / scale;
    out.top_high = (outer[0] + delta) / scale;
    out.bottom = inner[1] / scale;
    out.bottom_low = positive(outer[1] - delta) / scale;
    out.bottom_high = (inner[1] + slack + delta) / scale;
    out.steps = steps;
    const double stretch = (1 + rtol) * (1 + rtol);
    const bool met = out.bottom_low > 0 && out.top_high * out.bottom_high <= stretch * out.top_low * out.bottom_low;
    out.status = met ? converged : tolerance_not_met;
    for (int i = team.rank; i < ends * n; i += team.size) ritz[i] = x[i / n][i % n];
    team.sync();
    return out;
  }

  CK_FN static double positive(double value) { return value > 0 ? value : value != value ? value : 0; }

  // What delta leaves of the width that rtol allows, as a sum over the two ends relative to the eigenvalues.
  CK_FN static double left_of(double rtol, double delta, double top, double bottom) {
    if (!(bottom > delta)) return -1;
    return 2 * rtol - rtol * rtol - 2 * delta / (top - delta) - 2 * delta / (bottom - delta);
  }

  // How far outside the Ritz values the two proofs are tried: equal relative shares of what rtol leaves after delta,
  // or the floor that rounding sets where that is nothing.
  CK_FN static void choose_margins(double top, double bottom, double delta, double rtol, double floor_margin,
                                   double* margin) {
    margin[0] = margin[1] = floor_margin;
    const double share = first_margin * left_of(rtol, delta, top, bottom);
    if (share * top > floor_margin) margin[0] = share * top;
    if (share * (bottom - delta) > floor_margin) margin[1] = share * (bottom - delta);
  }

  // to = factor * from, both of N values.
  CK_FN void scaled(const T* from, T factor, T* to) const {
    team.sync();
    for (int i = team.rank; i < N; i += team.size) to[i] = from[i] * factor;
    team.sync();
  }

  // w -= V V^T w over the first `count` basis vectors; coefficient gets V^T w (for the first `count` places).
  CK_FN void project_out(const T* basis, int count, T* w, T* coefficient) const {
    for (int i = team.rank; i < count; i += team.size) coefficient[i] = dot(basis + static_cast<int64_t>(i) * N, w);
    team.sync();
    for (int j = team.rank * width; j < N; j += team.size * width) {
      Strip rest = Strip::load(w + j);
      for (int i = 0; i < count; ++i)
        rest.add_product(Strip::splat(-coefficient[i]), Strip::load(basis + static_cast<int64_t>(i) * N + j));
      rest.store(w + j);
    }
    team.sync();
  }

  // A unit vector from a fixed stream, orthogonal to the first `count` basis vectors: the same in every run. With
  // normal entries, the chance that it misses an eigenvector is nil, and a miss would only cost steps.
  CK_FN void random_direction(T* target, int count, const T* basis, T* w, T* coefficient) const {
    team.sync();  // someone may still be reading w
    for (int i = team.rank; i < N; i += team.size) {
      float z[4];
      philox_normal4(0x636f6e646974696full, static_cast<uint32_t>(count), static_cast<uint64_t>(i / 4), z);
      w[i] = i < n ? static_cast<T>(z[i % 4]) : T(0);
    }
    team.sync();
    project_out(basis, count, w, coefficient);
    project_out(basis, count, w, coefficient);
    scaled(w, 1 / root(dot(w, w)), target);
  }

  // One step: basis vector k gives diagonal[k], beside[k] and basis vector k + 1.
  CK_FN void lanczos_step(const T* a, T* basis, T* w, T* diagonal, T* beside, T* coefficient, int k, int max_steps,
                          double bound) const {
    const T* v = basis + static_cast<int64_t>(k) * N;
    product(a, v, w);
    const T along = dot(v, w);
    team.sync();
    // "Twice is enough" (Kahan and Parlett, in [SEP, section 6.9]).
    project_out(basis, k + 1, w, coefficient);
    project_out(basis, k + 1, w, coefficient);
    const T length = root(dot(w, w));
    // An invariant subspace: go on from a fresh direction, uncoupled, for eigenvalues the start had no part in.
    const bool closed = !(length > static_cast<T>(4 * n * unit * bound));
    if (team.rank == 0) {
      diagonal[k] = along;
      beside[k] = closed ? T(0) : length;
    }
    if (k + 1 < max_steps) {
      T* next = basis + static_cast<int64_t>(k + 1) * N;
      if (!closed)
        scaled(w, 1 / length, next);
      else if (k + 1 < n)
        random_direction(next, k + 1, basis, w, coefficient);
    }
    team.sync();
  }

  // y = a x for symmetric a: strip by strip, reading a by rows.
  CK_FN void product(const T* a, const T* x, T* y) const {
    for (int j = team.rank * width; j < N; j += team.size * width) {
      Strip even = Strip::splat(0), odd = Strip::splat(0);
      int i = 0;
      for (; i + 1 < n; i += 2) {
        even.add_product(Strip::splat(x[i]), Strip::load(a + i * N + j));
        odd.add_product(Strip::splat(x[i + 1]), Strip::load(a + (i + 1) * N + j));
      }
      if (i < n) even.add_product(Strip::splat(x[i]), Strip::load(a + i * N + j));
      even.add_product(Strip::splat(1), odd);
      even.store(y + j);
    }
    team.sync();
  }

  // Largest and smallest eigenvalue of the tridiagonal matrix to `tolerance`, by counting negative pivots of
  // T - x I at `points` places per end and round (Sturm; [SEP, section 3.3]).
  CK_FN void extremes(const Tridiagonal& t, double bound, double tolerance, T* counts, double* theta) const {
    const double least = 2 * unit * bound;
    const double wanted = tolerance > least ? tolerance : least;
    double low[ends] = {-0.01 * bound, -0.01 * bound}, high[ends] = {1.01 * bound, 1.01 * bound};
    while (high[0] - low[0] > wanted || high[1] - low[1] > wanted) {
      double step[ends];
      for (int end = 0; end < ends; ++end) step[end] = (high[end] - low[end]) / (points + 1);
      for (int first = team.rank * lanes; first < ends * points; first += team.size * lanes) {
        T each[lanes];
        for (int w = 0; w < lanes; ++w) {
          const int end = (first + w) / points;
          each[w] = static_cast<T>(low[end] + step[end] * ((first + w) % points + 1));
        }
        using Points = Lanes<T, lanes>;
        using V = typename Points::V;
        const Points x = Points::load(each);
        Points pivot = Points::splat(1), negative = Points::splat(0);
        const V zero{}, one = T(1) - V{}, below = T(-1e-30) - V{};
        T square = 0;
        for (int i = 0; i < t.size; ++i) {
          const T d = t.diagonal[i];
          for (int w = 0; w < Points::count; ++w) {
            const V next = d - x.v[w] - square / pivot.v[w];
            // A zero pivot becomes a tiny negative one, so that the next is finite.
            pivot.v[w] = next == 0 ? below : next;
            negative.v[w] += pivot.v[w] < 0 ? one : zero;
          }
          square = t.beside[i] * t.beside[i];
        }
        negative.store(counts + first);
      }
      team.sync();
      for (int end = 0; end < ends; ++end) {
        const T limit = end == 0 ? static_cast<T>(t.size) : T(1);
        int inside = 0;
        while (inside < points && counts[end * points + inside] < limit) ++inside;
        const double base = low[end];
        low[end] = base + step[end] * inside;
        high[end] = base + step[end] * (inside + 1);
      }
      team.sync();
    }
    theta[0] = high[0];
    theta[1] = low[1];
  }

  // Eigenvector of the tridiagonal matrix by two steps of inverse iteration from just outside its spectrum, where
  // elimination needs no pivoting. It starts with signs that the eigenvector shares: all equal at the top,
  // alternating at the bottom, since the couplings are >= 0. Serial: one member works.
  CK_FN void ritz_vector(const Tridiagonal& t, double theta, int end, double bound, T* pivots, T* s) const {
    if (team.rank == 0) {
      const T sign = end == 0 ? T(-1) : T(1);
      const T shift = static_cast<T>(theta - static_cast<double>(sign) * 8 * unit * bound);
      const T tiny = static_cast<T>(unit * bound);
      for (int i = 0; i < t.size; ++i) s[i] = end == 0 || i % 2 == 0 ? T(1) : T(-1);
      for (int i = 0; i < t.size; ++i) {
        // sign * (T - shift I) is positive definite; rounding may not agree.
        T pivot = sign * (t.diagonal[i] - shift);
        if (i > 0) pivot -= t.beside[i - 1] * (t.beside[i - 1] / pivots[i - 1]);
        pivots[i] = pivot > tiny ? pivot : tiny;
      }
      for (int pass = 0; pass < 2; ++pass) {
        for (int i = 1; i < t.size; ++i) s[i] -= sign * t.beside[i - 1] / pivots[i - 1] * s[i - 1];
        T most = 0;
        for (int i = t.size - 1; i >= 0; --i) {
          T value = s[i];
          if (i + 1 < t.size) value -= sign * t.beside[i] * s[i + 1];
          s[i] = value / pivots[i];
          most = larger(most, magnitude(s[i]));
        }
        for (int i = 0; i < t.size; ++i) s[i] /= most;
      }
    }
    team.sync();
  }

  // x = the unit vector along sum s_i basis_i.
  CK_FN void combine(const T* basis, const T* s, int count, T* x) const {
    for (int j = team.rank * width; j < N; j += team.size * width) {
      Strip sum = Strip::splat(0);
      for (int i = 0; i < count; ++i) sum.add_product(Strip::splat(s[i]), Strip::load(basis + static_cast<int64_t>(i) * N + j));
      sum.store(x + j);
    }
    team.sync();
    scaled(x, 1 / root(dot(x, x)), x);
  }

  // x^T a x / x^T x with products and sums in double; partial holds N / columns doubles, twice.
  CK_FN double rayleigh(const T* a, const T* x, double* partial) const {
    constexpr int columns = Team::strip_bytes / static_cast<int>(sizeof(double));
    using Wide = Lanes<double, columns>;
    const int strips = N / columns;
    for (int strip = team.rank; strip < strips; strip += team.size) {
      const int j = strip * columns;
      Wide sum = Wide::splat(0), own = Wide::load(x + j), top = Wide::splat(0), square = Wide::splat(0);
      for (int i = 0; i < n; ++i) sum.add_product(Wide::splat(static_cast<double>(x[i])), Wide::load(a + i * N + j));
      top.add_product(own, sum);
      square.add_product(own, own);
      partial[2 * strip] = top.sum();
      partial[2 * strip + 1] = square.sum();
    }
    team.sync();
    double top = 0, square = 0;
    for (int strip = 0; strip < strips; ++strip) {
      top += partial[2 * strip];
      square += partial[2 * strip + 1];
    }
    team.sync();
    return top / square;
  }

  static constexpr int lanes = width < ends * points ? width : ends * points;
};

}  // namespace CK_ISA
}  // namespace ck
