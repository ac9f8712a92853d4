// Rows of a minibatch meet a Fisher estimate, in one pass over them; see rows.py.
//
// 24 rows at a time, which are in the cache from one product to the next: their squares, H = X W^T, X - H W and its squares.
// Letters: N rows, D columns, R the rank; vectors run along D, and what D leaves over is in vectors of its own, filled up with
// the appended column and zeros.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#define UNROLLED _Pragma("GCC unroll 16")

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTall = 6, kRows = 8;  // rows of a tile of H and of X - H W: as many sums as there are registers
#else
constexpr int kLanes = 8, kTall = 3, kRows = 4;
#endif
constexpr int kWide = 4, kCols = 3;               // rows of W, and vectors along D, of those tiles
constexpr int kPanel = kCols * kLanes;            // columns of a panel of Y
constexpr int kAhead = 3;                         // tiles of Y that are asked for before they are written
constexpr int kGroup = 24;                        // rows that stay in the cache
constexpr int64_t kCached = 1 << 18;              // floats of W that do beside them

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float Loose __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16)));
typedef float LooseQuad __attribute__((vector_size(16), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
inline void store(float* to, Vec v) { *reinterpret_cast<Loose*>(to) = v; }

#if defined(__AVX512F__)
inline Vec all(float x) { return (Vec)_mm512_set1_ps(x); }
inline Vec interleaved(Vec a, Vec b) {
  return (Vec)_mm512_unpacklo_ps((__m512)a, (__m512)b) + (Vec)_mm512_unpackhi_ps((__m512)a, (__m512)b);
}
inline Vec paired(Vec a, Vec b) {
  return (Vec)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x44) + (Vec)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xEE);
}
inline __m256 folded(Vec v) { return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1)); }
#else
inline Vec all(float x) { return (Vec)_mm256_set1_ps(x); }
inline Vec interleaved(Vec a, Vec b) {
  return (Vec)_mm256_unpacklo_ps((__m256)a, (__m256)b) + (Vec)_mm256_unpackhi_ps((__m256)a, (__m256)b);
}
inline Vec paired(Vec a, Vec b) {
  return (Vec)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x44) + (Vec)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xEE);
}
inline __m256 folded(Vec v) { return (__m256)v; }
#endif

// the sum of the lanes of each of four
inline Quad sums(Vec a, Vec b, Vec c, Vec d) {
  const __m256 half = folded(paired(interleaved(a, b), interleaved(c, d)));
  return (Quad)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline float sum(Vec v) { return sums(v, Vec{}, Vec{}, Vec{})[0]; }

struct Problem {
  const float *x, *one, *w;             // N x D; N or null; R x (D, or D + 1 with `one`) in rows of `pitch`
  int64_t N, D, pitch, R;
  float *h, *y, *one_hat;               // N x R; N x D and N, or null
  int64_t panel;                        // > 0: Y lies in panels of so many rows
  const float* w_rest;                  // R x kLanes

  int64_t whole() const { return D / kLanes * kLanes; }
  int64_t rest() const { return D - whole(); }
  bool has_rest() const { return rest() > 0 || one; }
  int64_t y_pitch() const { return panel ? kPanel : D; }
  int64_t y_ahead() const { return kAhead * kPanel * (panel ? panel : 1); }
  float* y_at(int64_t n, int64_t d) const { return panel ? y + (d / kPanel * panel + n) * kPanel + d % kPanel : y + n * D + d; }
};

void fill_rest(float* to, const float* row, int64_t rest, const float* last) {
  std::fill_n(to, kLanes, 0.0f);
  std::memcpy(to, row, 4 * rest);
  if (last) to[rest] = *last;
}

// h[m][k] (+)= x_m . w_k over `depth` columns; x_rest and w_rest: one more vector of each, or null
template <int M, int K>
inline __attribute__((always_inline)) void dots(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t depth,
                                                const float* x_rest, const float* w_rest, float* h, int64_t ldh,
                                                bool fresh) {
  Vec total[M][kWide];
  UNROLLED for (int m = 0; m < M; ++m) UNROLLED for (int k = 0; k < kWide; ++k) total[m][k] = Vec{};
  for (int64_t d = 0; d < depth; d += kLanes) {
    Vec b[K];
    UNROLLED for (int k = 0; k < K; ++k) b[k] = load(w + k * ldw + d);
    UNROLLED for (int m = 0; m < M; ++m) {
      const Vec a = load(x + m * ldx + d);
      UNROLLED for (int k = 0; k < K; ++k) total[m][k] += a * b[k];
    }
  }
  if (x_rest) {
    UNROLLED for (int m = 0; m < M; ++m) {
      const Vec a = load(x_rest + m * kLanes);
      UNROLLED for (int k = 0; k < K; ++k) total[m][k] += a * load(w_rest + k * kLanes);
    }
  }
  UNROLLED for (int m = 0; m < M; ++m) {
    const Quad found = sums(total[m][0], total[m][1], total[m][2], total[m][3]);
    if (K == kWide) {
      LooseQuad* const to = reinterpret_cast<LooseQuad*>(h + m * ldh);
      *to = fresh ? found : *to + found;
    } else {
      UNROLLED for (int k = 0; k < K; ++k) h[m * ldh + k] = fresh ? found[k] : h[m * ldh + k] + found[k];
    }
  }
}

// H of M rows, and the sum of their squares
template <int M>
__attribute__((noinline)) float project(const Problem& p, const float* x, const float* w, int64_t depth, const float* x_rest,
                                        float* h, bool fresh) {
  Vec odd{}, even{};
  for (int m = 0; m < M; ++m) {
    int64_t d = 0;
    for (; d + 2 * kLanes <= depth; d += 2 * kLanes) {
      const Vec a = load(x + m * p.D + d), b = load(x + m * p.D + d + kLanes);
      even += a * a;
      odd += b * b;
    }
    if (d < depth) {
      const Vec a = load(x + m * p.D + d);
      even += a * a;
    }
    if (x_rest) {
      const Vec a = load(x_rest + m * kLanes);
      odd += a * a;
    }
  }
  int64_t r = 0;
  for (; r + kWide <= p.R; r += kWide)
    dots<M, kWide>(x, p.D, w + r * p.pitch, p.pitch, depth, x_rest, p.w_rest + r * kLanes, h + r, p.R, fresh);
  for (; r < p.R; ++r)
    dots<M, 1>(x, p.D, w + r * p.pitch, p.pitch, depth, x_rest, p.w_rest + r * kLanes, h + r, p.R, fresh);
  return sum(odd + even);
}

// y = x - H w on M rows and C vectors
template <int M, int C>
inline __attribute__((always_inline)) void less(const float* x, int64_t ldx, const float* h, const float* w, int64_t ldw,
                                                int64_t R, float* y, int64_t ldy, int64_t ahead, Vec& squares) {
  Vec left[M][C];
  UNROLLED for (int m = 0; m < M; ++m) UNROLLED for (int c = 0; c < C; ++c) {
    left[m][c] = load(x + m * ldx + c * kLanes);
    __builtin_prefetch(x + (m + kGroup) * ldx + c * kLanes, 0, 2);     // the next group's: one part in eight of the time
    __builtin_prefetch(y + m * ldy + c * kLanes + ahead, 1, 3);
  }
  for (int64_t r = 0; r < R; ++r) {
    Vec b[C];
    UNROLLED for (int c = 0; c < C; ++c) b[c] = load(w + r * ldw + c * kLanes);
    UNROLLED for (int m = 0; m < M; ++m) {
      const Vec a = all(h[m * R + r]);
      UNROLLED for (int c = 0; c < C; ++c) left[m][c] -= a * b[c];
    }
  }
  UNROLLED for (int m = 0; m < M; ++m) UNROLLED for (int c = 0; c < C; ++c) {
    store(y + m * ldy + c * kLanes, left[m][c]);
    squares += left[m][c] * left[m][c];
  }
}

// rows [n, n + M), columns [d, end)
template <int M>
__attribute__((noinline)) float correct(const Problem& p, int64_t n, const float* h, int64_t d, int64_t end) {
  Vec squares{};
  const float* const x = p.x + n * p.D;
  for (; d + kPanel <= end; d += kPanel)
    less<M, kCols>(x + d, p.D, h, p.w + d, p.pitch, p.R, p.y_at(n, d), p.y_pitch(), p.y_ahead(), squares);
  for (; d < end; d += kLanes) less<M, 1>(x + d, p.D, h, p.w + d, p.pitch, p.R, p.y_at(n, d), p.y_pitch(), p.y_ahead(), squares);
  return sum(squares);
}

template <int M>
__attribute__((noinline)) float correct_rest(const Problem& p, int64_t n, const float* x_rest, const float* h) {
  Vec squares{};
  float y[M * kLanes];
  less<M, 1>(x_rest, kLanes, h, p.w_rest, kLanes, p.R, y, kLanes, 0, squares);
  for (int m = 0; m < M; ++m) {
    std::memcpy(p.y_at(n + m, p.whole()), y + m * kLanes, 4 * p.rest());
    if (p.one) p.one_hat[n + m] = y[m * kLanes + p.rest()];
  }
  return sum(squares);
}

struct Group {
  const Problem& p;
  int64_t first, size;
  float* h;                             // size x R
  float x_rest[kGroup * kLanes];

  Group(const Problem& problem, int64_t number)
      : p(problem), first(number * kGroup), size(std::min<int64_t>(kGroup, problem.N - number * kGroup)),
        h(problem.h + number * kGroup * problem.R) {
    if (p.has_rest())
      for (int64_t n = 0; n < size; ++n)
        fill_rest(x_rest + n * kLanes, p.x + (first + n) * p.D + p.whole(), p.rest(), p.one ? p.one + first + n : nullptr);
  }

  // columns [d, d + depth)
  double projected(int64_t d, int64_t depth) {
    const bool last = d + depth == p.whole() && p.has_rest();
    const float* x = p.x + first * p.D + d;
    double squares = 0.0;
    int64_t n = 0;
    for (; n + kTall <= size; n += kTall)
      squares += project<kTall>(p, x + n * p.D, p.w + d, depth, last ? x_rest + n * kLanes : nullptr, h + n * p.R, d == 0);
    for (; n < size; ++n)
      squares += project<1>(p, x + n * p.D, p.w + d, depth, last ? x_rest + n * kLanes : nullptr, h + n * p.R, d == 0);
    return squares;
  }

  double corrected(int64_t d, int64_t depth) {
    double squares = 0.0;
    int64_t n = 0;
    for (; n + kRows <= size; n += kRows) squares += correct<kRows>(p, first + n, h + n * p.R, d, d + depth);
    for (; n < size; ++n) squares += correct<1>(p, first + n, h + n * p.R, d, d + depth);
    if (d + depth < p.whole() || !p.has_rest()) return squares;
    n = 0;
    for (; n + kRows <= size; n += kRows) squares += correct_rest<kRows>(p, first + n, x_rest + n * kLanes, h + n * p.R);
    for (; n < size; ++n) squares += correct_rest<1>(p, first + n, x_rest + n * kLanes, h + n * p.R);
    return squares;
  }
};

}  // namespace

// panel > 0: y lies in panels of so many rows and kPanel columns; work: R kLanes floats; squares: two numbers
extern "C" void meet(const float* x, int64_t N, int64_t D, const float* one, const float* w, int64_t pitch, int64_t R, float* h,
                     float* y, int64_t panel, float* one_hat, float* work, double* squares, int threads) {
  const Problem p{x, one, w, N, D, pitch, R, h, y, one_hat, panel, work};
  if (p.has_rest())
    for (int64_t r = 0; r < R; ++r)
      fill_rest(work + r * kLanes, w + r * pitch + p.whole(), p.rest(), one ? w + r * pitch + D : nullptr);
  // a group at a time where all of W stays in the cache; else a part of W at a time, which many groups meet
  const int64_t groups = (N + kGroup - 1) / kGroup;
  const bool is_cached = R * D <= kCached;
  const int64_t depth = is_cached ? p.whole() : std::min(p.whole(), std::max<int64_t>(1, kCached / 8 / R / kPanel) * kPanel);
  const int64_t each = is_cached ? 1 : (groups + threads - 1) / threads;
  const int64_t parts = (groups + each - 1) / each;
  std::unique_ptr<double[]> found(new double[2 * groups]());
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t end = std::min(groups, (part + 1) * each);
    int64_t d = 0;
    do {
      for (int64_t g = part * each; g < end; ++g) found[2 * g] += Group(p, g).projected(d, std::min(depth, p.whole() - d));
      d += depth;
    } while (d < p.whole());
    if (!y) continue;
    d = 0;
    do {
      for (int64_t g = part * each; g < end; ++g) found[2 * g + 1] += Group(p, g).corrected(d, std::min(depth, p.whole() - d));
      d += depth;
    } while (d < p.whole());
  }
  squares[0] = squares[1] = 0.0;
  for (int64_t g = 0; g < groups; ++g) {
    squares[0] += found[2 * g];
    squares[1] += found[2 * g + 1];
  }
}
