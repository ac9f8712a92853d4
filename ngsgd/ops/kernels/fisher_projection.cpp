// Project the rows of a minibatch onto a Fisher estimate in one pass over them; see fisher_projection.py.
//
// A group of rows at a time, which are in the cache from one product to the next: H = X W^T, X - H W, and the squares of both.
// Letters: N rows, D columns, R the rank.  W, onto which all rows are projected, is copied first, once so that H and once so that X - H W
// is formed from short stretches of memory, a part of it at a time where it is large; it is left as it lies where that is quicker.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <type_traits>

#define UNROLLED _Pragma("GCC unroll 32")

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kTall = 6, kRows = 8, kMost = 5;
#else
constexpr int kLanes = 8, kTall = 3, kRows = 4, kMost = 3;
#endif
// Tiles, with as many sums as there are registers: kTall x kWide sums along D for H; or, by fours, rows x kMost vectors, of which
// each has the sums of kFew rows of W by column modulo 4; kRows x kCols vectors along D of X - H W
constexpr int kWide = 4, kFew = kLanes / 4, kCols = 3;
constexpr int kPanel = kCols * kLanes;            // columns of a panel
constexpr int kGroup = 24, kLarge = 40;           // rows that stay in the cache: of W as it lies, and of W copied
constexpr int kNear = 16;                         // of those, rows that are multiplied by one panel of W after the other
constexpr int64_t kDeep = 192;                    // columns that stay in the first cache when H is formed by fours
constexpr int64_t kSmall = 1 << 15, kCached = 3 << 16, kPart = 40000;   // floats of W: copied whole; else as it lies; else in parts
constexpr int64_t kAhead = 3;                     // tiles of Y that are asked for before they are written

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float Loose __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef float Quad __attribute__((vector_size(16)));
typedef float LooseQuad __attribute__((vector_size(16), aligned(4), may_alias));
typedef float Few __attribute__((vector_size(4 * kFew)));
typedef float LooseFew __attribute__((vector_size(4 * kFew), aligned(4), may_alias));

inline Vec load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
inline void store(float* to, Vec v) { *reinterpret_cast<Loose*>(to) = v; }

#if defined(__AVX512F__)
inline Vec all(float x) { return (Vec)_mm512_set1_ps(x); }
inline Vec four(const float* from) { return (Vec)_mm512_broadcast_f32x4(_mm_loadu_ps(from)); }
inline __mmask16 first(int64_t n) { return n >= kLanes ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
inline Vec load(const float* from, int64_t n) { return (Vec)_mm512_maskz_loadu_ps(first(n), from); }
inline void store(float* to, Vec v, int64_t n) { _mm512_mask_storeu_ps(to, first(n), (__m512)v); }
inline Vec interleaved(Vec a, Vec b) {
  return (Vec)_mm512_unpacklo_ps((__m512)a, (__m512)b) + (Vec)_mm512_unpackhi_ps((__m512)a, (__m512)b);
}
inline Vec paired(Vec a, Vec b) {
  return (Vec)_mm512_shuffle_ps((__m512)a, (__m512)b, 0x44) + (Vec)_mm512_shuffle_ps((__m512)a, (__m512)b, 0xEE);
}
inline __m256 folded(Vec v) { return _mm256_add_ps(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1)); }
inline Vec regrouped(Vec v) {
  return (Vec)_mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), (__m512)v);
}
inline Few begin_of(Vec v) { return (Few)_mm512_castps512_ps128((__m512)v); }
#else
inline Vec all(float x) { return (Vec)_mm256_set1_ps(x); }
inline Vec four(const float* from) { return (Vec)_mm256_broadcast_ps(reinterpret_cast<const __m128*>(from)); }
inline __m256i first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(std::max<int64_t>(n, 0))), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec load(const float* from, int64_t n) { return (Vec)_mm256_maskload_ps(from, first(n)); }
inline void store(float* to, Vec v, int64_t n) { _mm256_maskstore_ps(to, first(n), (__m256)v); }
inline Vec interleaved(Vec a, Vec b) {
  return (Vec)_mm256_unpacklo_ps((__m256)a, (__m256)b) + (Vec)_mm256_unpackhi_ps((__m256)a, (__m256)b);
}
inline Vec paired(Vec a, Vec b) {
  return (Vec)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x44) + (Vec)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xEE);
}
inline __m256 folded(Vec v) { return (__m256)v; }
inline Vec regrouped(Vec v) {
  return (Vec)_mm256_permutevar8x32_ps((__m256)v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
inline Few begin_of(Vec v) { return Few{v[0], v[1]}; }
#endif

// the sum of the lanes of each of four
inline Quad sums(Vec a, Vec b, Vec c, Vec d) {
  const __m256 half = folded(paired(interleaved(a, b), interleaved(c, d)));
  return (Quad)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
inline float sum(Vec v) { return sums(v, Vec{}, Vec{}, Vec{})[0]; }

// the sums by fours of lanes, of each of four in turn
inline Vec sums_of_fours(Vec a, Vec b, Vec c, Vec d) { return regrouped(paired(interleaved(a, b), interleaved(c, d))); }

// [n, end) in tiles of M, and then of fewer
template <int M, typename Tile>
inline void in_tiles(int64_t n, int64_t end, const Tile& tile) {
  for (; n + M <= end; n += M) tile(std::integral_constant<int, M>(), n);
  if constexpr (M > 1)
    if (n < end) in_tiles<(M + 1) / 2>(n, end, tile);
}

// of M rows
template <int M>
float squares_of(const float* x, int64_t ldx, int64_t depth) {
  Vec found[4] = {};
  for (int m = 0; m < M; ++m, x += ldx) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= depth; d += 4 * kLanes)
      UNROLLED for (int i = 0; i < 4; ++i) {
        const Vec a = load(x + d + i * kLanes);
        __builtin_prefetch(x + M * ldx + d + i * kLanes);   // of the next rows
        found[i] += a * a;
      }
    for (; d < depth; d += kLanes) {
      const Vec a = load(x + d, depth - d);
      found[0] += a * a;
    }
  }
  return sum(found[0] + found[1] + found[2] + found[3]);
}

// h[m][k] = x_m . w_k; `depth` is a multiple of kLanes
template <int M, int K>
__attribute__((noinline)) void dots(const float* x, int64_t ldx, const float* w, int64_t ldw, int64_t depth, float* h, int64_t ldh) {
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
  UNROLLED for (int m = 0; m < M; ++m) {
    const Quad found = sums(total[m][0], total[m][1], total[m][2], total[m][3]);
    if (K == kWide) *reinterpret_cast<LooseQuad*>(h + m * ldh) = found;
    else UNROLLED for (int k = 0; k < K; ++k) h[m * ldh + k] = found[k];
  }
}

// h[m][k] (+)= x_m . w_k for the rows of W in J vectors of `fours`, of which `there` are; x_rest: one four more of each row, or null
template <int M, int J>
__attribute__((noinline)) void dots_by_fours(const float* x, int64_t ldx, const float* fours, int64_t ldf, int64_t depth,
                                             const float* x_rest, float* h, int64_t ldh, int64_t there, bool fresh) {
  Vec total[M][J];
  UNROLLED for (int m = 0; m < M; ++m) UNROLLED for (int j = 0; j < J; ++j) total[m][j] = Vec{};
  for (int64_t d = 0; d < depth; d += 4, fours += ldf) {
    Vec b[J];
    UNROLLED for (int j = 0; j < J; ++j) b[j] = load(fours + j * kLanes);
    UNROLLED for (int m = 0; m < M; ++m) {
      const Vec a = four(x + m * ldx + d);
      UNROLLED for (int j = 0; j < J; ++j) total[m][j] += a * b[j];
    }
  }
  if (x_rest)
    UNROLLED for (int m = 0; m < M; ++m) UNROLLED for (int j = 0; j < J; ++j)
      total[m][j] += four(x_rest + m * 4) * load(fours + j * kLanes);
  UNROLLED for (int m = 0; m < M; ++m) {
    float* const to = h + m * ldh;
    UNROLLED for (int j = 0; j < J; j += 4) {
      const int more = J - j < 4 ? J - j : 4;   // of these vectors
      const Vec found = sums_of_fours(total[m][j], more > 1 ? total[m][j + 1] : Vec{}, more > 2 ? total[m][j + 2] : Vec{},
                                      more > 3 ? total[m][j + 3] : Vec{});
      float* const at = to + j * kFew;
      if (more == 4 && there >= J * kFew) store(at, fresh ? found : load(at) + found);
      else if (more == 1 && there >= J * kFew) {
        LooseFew* const few = reinterpret_cast<LooseFew*>(at);
        *few = fresh ? begin_of(found) : *few + begin_of(found);
      } else {
        const int64_t n = std::min<int64_t>(more * kFew, there - j * kFew);
        store(at, fresh ? found : load(at, n) + found, n);
      }
    }
  }
}

// y = x - H w on M rows and C vectors; x and y are asked for so far ahead
template <int M, int C>
__attribute__((noinline)) void less(const float* x, int64_t ldx, const float* h, const float* w, int64_t ldw, int64_t R, float* y,
                                    int64_t ldy, int64_t x_ahead, int64_t y_ahead, Vec* squares) {
  Vec left[M][C], found[C];
  UNROLLED for (int m = 0; m < M; ++m) UNROLLED for (int c = 0; c < C; ++c) left[m][c] = load(x + m * ldx + c * kLanes);
  if (x_ahead)
    UNROLLED for (int m = 0; m < M; ++m) UNROLLED for (int c = 0; c < C; ++c) {
      __builtin_prefetch(x + m * ldx + c * kLanes + x_ahead, 0, 2);
      __builtin_prefetch(y + m * ldy + c * kLanes + y_ahead, 1, 3);
    }
  for (int64_t r = 0; r < R; ++r, w += ldw) {
    Vec b[C];
    UNROLLED for (int c = 0; c < C; ++c) b[c] = load(w + c * kLanes);
    UNROLLED for (int m = 0; m < M; ++m) {
      const Vec a = all(h[m * R + r]);
      UNROLLED for (int c = 0; c < C; ++c) left[m][c] -= a * b[c];
    }
  }
  UNROLLED for (int c = 0; c < C; ++c) found[c] = squares[c];
  UNROLLED for (int m = 0; m < M; ++m) UNROLLED for (int c = 0; c < C; ++c) {
    store(y + m * ldy + c * kLanes, left[m][c]);
    found[c] += left[m][c] * left[m][c];
  }
  UNROLLED for (int c = 0; c < C; ++c) squares[c] = found[c];
}

inline int64_t panels_of(int64_t columns) { return (columns + kPanel - 1) / kPanel; }

struct Problem {
  const float *x, *one, *w;             // N x D; N or null; R x (D, or D + 1 with `one`) in rows of `pitch`
  int64_t N, D, pitch, R;
  float *h, *y, *one_hat;               // N x R; N x D and N, or null

  int64_t columns() const { return D + (one ? 1 : 0); }
  int64_t panels() const { return panels_of(columns()); }
  float* y_at(int64_t n, int64_t p) const { return y + n * D + p * kPanel; }
  const float* one_at(int64_t n) const { return one ? one + n : nullptr; }
};

// `there` numbers, then *last if that is given, then zeros: V vectors
template <int V>
inline void fill(float* to, const float* from, int64_t there, const float* last) {
  UNROLLED for (int v = 0; v < V; ++v) store(to + v * kLanes, load(from + v * kLanes, there - v * kLanes));
  if (last) to[there] = *last;
}

// panels of a part of W that is copied, and floats of one of its copies
inline int64_t deep_of(int64_t columns, int64_t R) {
  return R * columns <= kSmall ? panels_of(columns) : std::max<int64_t>(1, kPart / R / kPanel);
}
inline int64_t copy_size(int64_t columns, int64_t R) { return (R + kFew) * deep_of(columns, R) * kPanel; }

// How the work is cut up; by sizes alone, so that sums always run in one order
struct Plan {
  bool copies, is_whole;                // W; all of W at a time
  int64_t groups, size, deep;           // of rows, rows of one, panels of a part of W

  explicit Plan(const Problem& p) {
    const int64_t floats = p.R * p.columns();
    const bool lies_well = p.D % kLanes == 0 && p.pitch % kLanes == 0 && !p.one;
    copies = floats <= kSmall || floats > kCached || !lies_well;
    is_whole = !copies || floats <= kSmall;
    deep = copies ? deep_of(p.columns(), p.R) : p.panels();
    const int64_t most = copies ? kLarge : kGroup;
    groups = (p.N + most - 1) / most;
    size = ((p.N + groups - 1) / groups + kRows - 1) / kRows * kRows;
  }
};

// Panels [begin, end) of W
struct Part {
  const Problem& p;
  const Plan& plan;
  int64_t begin, end;
  float *fours, *panels;                // copies: by 4 columns and kFew rows, and by panels

  int64_t wide() const { return (p.R + kFew - 1) / kFew * kFew; }
  int64_t until() const { return std::min(end * kPanel, p.columns()); }

  void copy_fours() const {
    for (int64_t r = 0; r < p.R; r += kFew) {
      const int64_t rows = std::min<int64_t>(kFew, p.R - r);
      float* to = fours + r * 4;
      for (int64_t d = begin * kPanel; d < until(); d += kLanes) {
        float part[kFew][kLanes] = {};
        for (int64_t i = 0; i < rows; ++i) store(part[i], load(p.w + (r + i) * p.pitch + d, until() - d));
        for (int64_t q = 0; q < kFew && d + 4 * q < until(); ++q, to += wide() * 4)
          UNROLLED for (int i = 0; i < kFew; ++i) *reinterpret_cast<LooseQuad*>(to + 4 * i) = *reinterpret_cast<LooseQuad*>(part[i] + 4 * q);
      }
    }
  }

  void copy_panels() const {
    float* to = panels;
    for (int64_t q = begin; q < end; ++q)
      for (int64_t r = 0; r < p.R; ++r, to += kPanel)
        fill<kCols>(to, p.w + r * p.pitch + q * kPanel, p.columns() - q * kPanel, nullptr);
  }

  // rows [n, n + size) of H, or what these panels add to it; and the squares of theirs
  double project(int64_t n, int64_t size) const {
    return plan.copies ? by_fours(n, size) : as_it_lies(n, size);
  }

  double as_it_lies(int64_t n, int64_t size) const {
    double squares = 0.0;
    in_tiles<kTall>(n, n + size, [&](auto M, int64_t m) {
      const float* const x = p.x + m * p.D;
      squares += squares_of<M()>(x, p.D, p.D);
      in_tiles<kWide>(0, p.R, [&](auto K, int64_t r) { dots<M(), K()>(x, p.D, p.w + r * p.pitch, p.pitch, p.D, p.h + m * p.R + r, p.R); });
    });
    return squares;
  }

  double by_fours(int64_t n, int64_t size) const {
    const int64_t whole = p.D / 4 * 4, start = begin * kPanel, stop = std::min(end * kPanel, whole);
    const bool has_rest = until() > stop;
    float x_rest[4 * kLarge];
    double squares = 0.0;
    if (has_rest)
      for (int64_t m = 0; m < size; ++m)
        for (int64_t i = 0; i < 4; ++i) {
          const int64_t d = whole + i;
          const float a = d < p.D ? p.x[(n + m) * p.D + d] : d == p.D && p.one ? p.one[n + m] : 0.0f;
          x_rest[4 * m + i] = a;
          squares += double(a) * a;
        }
    int64_t d = start;
    do {
      const int64_t depth = std::min(kDeep, stop - d);
      const bool is_last = has_rest && d + depth == stop;
      in_tiles<kMost>(0, wide() / kFew, [&](auto J, int64_t j) {
        constexpr int M = J() == kMost ? kMost : J() == 3 ? 8 : 12;
        in_tiles<M>(0, size, [&](auto M, int64_t m) {
          const float* const x = p.x + (n + m) * p.D + d;
          dots_by_fours<M(), J()>(x, p.D, fours + (d - start) * wide() + j * kLanes, wide() * 4, depth, is_last ? x_rest + 4 * m : nullptr,
                                  p.h + (n + m) * p.R + j * kFew, p.R, p.R - j * kFew, d == 0);
          if (j == 0) squares += squares_of<M()>(x, p.D, depth);   // while they are in the first cache
        });
      });
      d += depth;
    } while (d < stop);
    return squares;
  }

  // rows [n, n + size) of these panels of Y, and their squares
  double correct(int64_t n, int64_t size) const {
    const float* const w = plan.copies ? panels : p.w + begin * kPanel;
    const int64_t pitch = plan.copies ? kPanel : p.pitch, next = plan.copies ? p.R * kPanel : kPanel;
    const int64_t near = plan.copies ? kNear : kRows, x_ahead = !plan.copies ? kGroup * p.D : plan.is_whole ? 0 : near * p.D;
    const int64_t y_ahead = kAhead * kPanel;
    Vec squares[kCols] = {};
    for (int64_t m = n; m < n + size; m += near) {
      const int64_t stop = std::min(n + size, m + near);
      for (int64_t q = begin; q < end; ++q) {
        const float* const of = w + (q - begin) * next;
        if ((q + 1) * kPanel > p.D) {
          correct_last(m, stop, q, of, pitch, squares);
          break;
        }
        in_tiles<kRows>(m, stop, [&](auto M, int64_t i) {
          less<M(), kCols>(p.x + i * p.D + q * kPanel, p.D, p.h + i * p.R, of, pitch, p.R, p.y_at(i, q), p.D, x_ahead, y_ahead,
                           squares);
        });
      }
    }
    return sum(squares[0] + squares[1] + squares[2]);
  }

  void correct_last(int64_t n, int64_t stop, int64_t q, const float* w, int64_t pitch, Vec* squares) const {
    const int64_t there = p.D - q * kPanel, vectors = (p.columns() - q * kPanel + kLanes - 1) / kLanes;
    if (vectors == 1) correct_last<1>(n, stop, q, there, w, pitch, squares);
    else if (vectors == 2) correct_last<2>(n, stop, q, there, w, pitch, squares);
    else correct_last<3>(n, stop, q, there, w, pitch, squares);
  }

  template <int C>
  void correct_last(int64_t n, int64_t stop, int64_t q, int64_t there, const float* w, int64_t pitch, Vec* squares) const {
    in_tiles<kRows * kCols / C>(n, stop, [&](auto M, int64_t m) {
      float y[M() * C * kLanes];
      for (int64_t i = 0; i < M(); ++i) fill<C>(y + i * C * kLanes, p.x + (m + i) * p.D + q * kPanel, there, p.one_at(m + i));
      less<M(), C>(y, C * kLanes, p.h + m * p.R, w, pitch, p.R, y, C * kLanes, 0, 0, squares);
      for (int64_t i = 0; i < M(); ++i) {
        const float* const from = y + i * C * kLanes;
        UNROLLED for (int c = 0; c < C; ++c) store(p.y_at(m + i, q) + c * kLanes, load(from + c * kLanes), there - c * kLanes);
        if (p.one) p.one_hat[m + i] = from[there];
      }
    });
  }
};

}  // namespace

// floats that `project` works in, for rows of `columns` with an appended one
extern "C" int64_t work_size(int64_t columns, int64_t R, int threads) { return 2 * threads * copy_size(columns, R); }

// squares: two numbers
extern "C" void project(const float* x, int64_t N, int64_t D, const float* one, const float* w, int64_t pitch, int64_t R, float* h,
                     float* y, float* one_hat, float* work, double* squares, int threads) {
  const Problem p{x, one, w, N, D, pitch, R, h, y, one_hat};
  const Plan plan(p);
  const int64_t each = (plan.groups + threads - 1) / threads, panels = p.panels();
  std::unique_ptr<double[]> found(new double[2 * plan.groups]());
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int t = 0; t < threads; ++t) {
    float* const mine = work + 2 * t * copy_size(p.columns(), R);
    const auto for_groups = [&](const auto& act) {
      for (int64_t g = t * each; g < std::min(plan.groups, (t + 1) * each); ++g)
        if (g * plan.size < N) act(g, g * plan.size, std::min(plan.size, N - g * plan.size));
    };
    Part part{p, plan, 0, 0, mine, mine + copy_size(p.columns(), R)};
    for (part.begin = 0; part.begin < panels; part.begin += plan.deep) {
      part.end = std::min(panels, part.begin + plan.deep);
      if (plan.copies) part.copy_fours();
      if (plan.copies && plan.is_whole && y) part.copy_panels();
      for_groups([&](int64_t g, int64_t n, int64_t size) {
        found[2 * g] += part.project(n, size);
        if (plan.is_whole && y) found[2 * g + 1] += part.correct(n, size);
      });
    }
    if (plan.is_whole || !y) continue;
    for (part.begin = 0; part.begin < panels; part.begin += plan.deep) {
      part.end = std::min(panels, part.begin + plan.deep);
      part.copy_panels();
      for_groups([&](int64_t g, int64_t n, int64_t size) { found[2 * g + 1] += part.correct(n, size); });
    }
  }
  squares[0] = squares[1] = 0.0;
  for (int64_t g = 0; g < plan.groups; ++g) {
    squares[0] += found[2 * g];
    squares[1] += found[2 * g + 1];
  }
}
