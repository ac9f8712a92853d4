// C = scale A^T B for rows A and B of one minibatch, as a weight gradient is made; see panels.py.
//
// Letters: N rows, which are summed over; C is O x I.  B, and A if it likes, lie in panels of 48 columns, so that a tile of C, 8 x 48,
// reads two short stretches of memory per row.  Every sum runs in one order whatever the number of threads.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>

#define UNROLLED _Pragma("GCC unroll 16")

namespace {

constexpr int kLanes = 16, kVectors = 3, kTall = 8;   // a tile: as many sums as there are registers
constexpr int kWide = kVectors * kLanes;              // columns of a panel
constexpr int64_t kDeep = 768;                        // rows at a time: what stays in the second cache
constexpr int64_t kChunk = 5;                         // panels of A at a time, likewise
constexpr int64_t kAhead = 8;                         // rows that are asked for before they are needed

typedef float Vec __attribute__((vector_size(4 * kLanes)));

inline Vec load(const float* from, __mmask16 which) { return (Vec)_mm512_maskz_loadu_ps(which, from); }
inline void store(float* to, __mmask16 which, Vec v) { _mm512_mask_storeu_ps(to, which, (__m512)v); }
inline Vec all(float x) { return (Vec)_mm512_set1_ps(x); }
inline __mmask16 first(int64_t n) { return n >= kLanes ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }
inline int64_t panels(int64_t columns) { return (columns + kWide - 1) / kWide; }

struct Rows {
  const float* at;
  int64_t pitch, count;

  const float* row(int64_t n) const { return at + n * pitch; }
};

// rows [n, end), times `factor`, of the `columns` that begin at `column`, filled up with zeros
float* copy(const Rows& x, int64_t column, int64_t columns, int64_t n, int64_t end, float factor, float* to) {
  __mmask16 there[kVectors];
  for (int v = 0; v < kVectors; ++v) there[v] = first(columns - v * kLanes);
  for (; n < end; ++n, to += kWide) {
    const float* const from = x.row(n) + column;
    UNROLLED for (int v = 0; v < kVectors; ++v) {
      __builtin_prefetch(from + kAhead * x.pitch + v * kLanes);
      store(to + v * kLanes, 0xffff, all(factor) * load(from + v * kLanes, there[v]));
    }
  }
  return to;
}

// one tile of C: V vectors, of which `columns` numbers are there, in `rows` rows
template <int V>
__attribute__((noinline)) void tile(const float* a, const float* b, int64_t depth, float scale, bool adds, float* c, int64_t pitch,
                                    int64_t rows, int64_t columns) {
  Vec total[kTall][V];
  UNROLLED for (int m = 0; m < kTall; ++m) UNROLLED for (int v = 0; v < V; ++v) total[m][v] = Vec{};
  for (int64_t m = 0; m < rows; ++m)
    for (int v = 0; v < V; ++v) __builtin_prefetch(c + m * pitch + v * kLanes, 1);
  for (int64_t k = 0; k < depth; ++k, a += kWide, b += kWide) {
    Vec y[V];
    __builtin_prefetch(a + kAhead * kWide);
    UNROLLED for (int v = 0; v < V; ++v) {
      y[v] = load(b + v * kLanes, 0xffff);
      __builtin_prefetch(b + kAhead * kWide + v * kLanes);
    }
    UNROLLED for (int m = 0; m < kTall; ++m) {
      const Vec x = all(a[m]);
      UNROLLED for (int v = 0; v < V; ++v) total[m][v] += x * y[v];
    }
  }
  UNROLLED for (int m = 0; m < kTall; ++m) {
    if (m >= rows) break;
    UNROLLED for (int v = 0; v < V; ++v) {
      const __mmask16 there = first(columns - v * kLanes);
      float* const to = c + m * pitch + v * kLanes;
      const Vec found = total[m][v] * all(scale);
      store(to, there, adds ? found + load(to, there) : found);
    }
  }
}

// of_one (+)= scale A^T one for the columns of one panel
void sum_with(const float* a, const float* one, int64_t depth, float scale, bool adds, float* of_one, int64_t columns) {
  Vec total[kVectors] = {};
  for (int64_t k = 0; k < depth; ++k)
    UNROLLED for (int v = 0; v < kVectors; ++v) total[v] += all(one[k]) * load(a + k * kWide + v * kLanes, 0xffff);
  for (int v = 0; v < kVectors; ++v) {
    const __mmask16 there = first(columns - v * kLanes);
    const Vec found = total[v] * all(scale);
    store(of_one + v * kLanes, there, adds ? found + load(of_one + v * kLanes, there) : found);
  }
}

struct Problem {
  Rows a, more;                 // rows of A, and others that follow them
  int64_t a_panel;              // > 0: the first lie in panels of so many rows
  const float* b;
  int64_t b_panel, O, I;
  float scale;
  float* c;                     // without gaps
  const float* one;             // or null
  float* of_one;

  int64_t rows() const { return a.count + more.count; }

  // rows [n, n + depth) of one panel of A, copied unless they lie so
  const float* panel_of_a(int64_t o, int64_t n, int64_t depth, float* to) const {
    const int64_t columns = O - o, end = std::min(n + depth, a.count);
    if (a_panel && n + depth <= a.count) return a.at + (o / kWide * a_panel + n) * kWide;
    const float* const start = to;
    if (n < end) to = a_panel ? copy({a.at + o / kWide * a_panel * kWide, kWide, a.count}, 0, kWide, n, end, 1.0f, to)
                              : copy(a, o, columns, n, end, 1.0f, to);
    copy(more, o, columns, std::max<int64_t>(n, a.count) - a.count, n + depth - a.count, 1.0f, to);
    return start;
  }

  // outputs [o, end), at most kChunk panels of them
  void chunk(int64_t o, int64_t end, int64_t n, int64_t depth, float* work) const {
    const float* from[kChunk];
    for (int64_t p = 0; o + p * kWide < end; ++p) {
      from[p] = panel_of_a(o + p * kWide, n, depth, work + p * depth * kWide);
      if (one) sum_with(from[p], one + n, depth, scale, n > 0, of_one + o + p * kWide, end - o - p * kWide);
    }
    for (int64_t i = 0; i < I; i += kWide)
      for (int64_t row = o; row < end; row += kTall)
        one_tile(from[(row - o) / kWide] + (row - o) % kWide, row, std::min<int64_t>(kTall, end - row), i, n, depth);
  }

  void one_tile(const float* from, int64_t o, int64_t count, int64_t i, int64_t n, int64_t depth) const {
    const float* const with = b + (i / kWide * b_panel + n) * kWide;
    float* const to = c + o * I + i;
    const int64_t columns = I - i;
    if (columns > 2 * kLanes) tile<3>(from, with, depth, scale, n > 0, to, I, count, columns);
    else if (columns > kLanes) tile<2>(from, with, depth, scale, n > 0, to, I, count, columns);
    else tile<1>(from, with, depth, scale, n > 0, to, I, count, columns);
  }
};

}  // namespace

// floats that `product` works in
extern "C" int64_t work_size(int64_t rows, int threads) { return threads * kChunk * std::min(rows, kDeep) * kWide; }

// rows into panels of `panel` rows each, from row `n` on
extern "C" void fill(const float* x, int64_t pitch, int64_t count, int64_t columns, float factor, float* to, int64_t panel, int64_t n,
                     int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t p = 0; p < panels(columns); ++p)
    copy({x, pitch, count}, p * kWide, columns - p * kWide, 0, count, factor, to + (p * panel + n) * kWide);
}

extern "C" void product(const float* a, int64_t a_pitch, int64_t a_panel, int64_t count, const float* more, int64_t more_pitch,
                        int64_t more_count, const float* b, int64_t b_panel, int64_t O, int64_t I, float scale, float* c,
                        const float* one, float* of_one, float* work, int threads) {
  const Problem p{{a, a_pitch, count}, {more, more_pitch, more_count}, a_panel, b, b_panel, O, I, scale, c, one, of_one};
  // smaller chunks where there would be too few of them for all threads
  const int64_t size = std::max<int64_t>(1, std::min(kChunk, panels(O) / threads)) * kWide, chunks = (O + size - 1) / size;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int t = 0; t < threads; ++t)
    for (int64_t k = chunks * t / threads; k < chunks * (t + 1) / threads; ++k)
      for (int64_t n = 0; n < p.rows(); n += kDeep) {
        const int64_t depth = std::min(kDeep, p.rows() - n);
        p.chunk(k * size, std::min(O, (k + 1) * size), n, depth, work + t * work_size(p.rows(), 1));
      }
}
