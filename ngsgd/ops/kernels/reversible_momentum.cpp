// The inner loops of ngsgd.hypergrad.exact, one pass over memory each; see fused.py, whose eager form gives the same bits.
#include <cmath>
#include <cstdint>

namespace {

constexpr int64_t kLimit = int64_t{1} << 62;
constexpr double kWord = 9223372036854775808.0;  // 2^63
constexpr double kUnit = 1.0 / 281474976710656.0;  // 2^-48

// whole += sign * rint(values * factor); false when a number is not finite or leaves its range
template <typename T>
inline bool add(int64_t* __restrict whole, const T* __restrict values, int64_t n, double factor, int64_t sign, int64_t* total) {
  uint64_t sum = 0;
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double real = std::rint(static_cast<double>(values[i]) * factor);
    const bool fits = std::fabs(real) < kWord;  // false for NaN
    const uint64_t step = static_cast<uint64_t>(static_cast<int64_t>(fits ? real : 0.0));
    // unsigned, so that it may wrap around: what was within the range is out of it then
    const int64_t next = static_cast<int64_t>(static_cast<uint64_t>(whole[i]) + static_cast<uint64_t>(sign) * step);
    bad |= static_cast<int64_t>(!fits) | static_cast<int64_t>(next >= kLimit) | static_cast<int64_t>(next <= -kLimit);
    whole[i] = next;
    sum += static_cast<uint64_t>(next);
  }
  *total = static_cast<int64_t>(sum);
  return bad == 0;
}

constexpr int64_t kChunk = 4096;

// a chunk at a time, so that the second loop finds x in the cache
template <typename T>
inline bool move(int64_t* x, const int64_t* u, T* w, int64_t n, double factor, int64_t sign, int64_t* total) {
  uint64_t sum = 0;
  bool fits = true;
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t size = n - first < kChunk ? n - first : kChunk;
    int64_t part = 0;
    fits &= add(x + first, u + first, size, factor, sign, &part);
    sum += static_cast<uint64_t>(part);
    for (int64_t i = first; i < first + size; ++i) w[i] = static_cast<T>(x[i]) * static_cast<T>(kUnit);
  }
  *total = static_cast<int64_t>(sum);
  return fits;
}

}  // namespace

extern "C" {
int add_scaled_f32(int64_t* u, const float* g, int64_t n, double f, int64_t s, int64_t* t) { return add(u, g, n, f, s, t); }
int add_scaled_f64(int64_t* u, const double* g, int64_t n, double f, int64_t s, int64_t* t) { return add(u, g, n, f, s, t); }
int move_f32(int64_t* x, const int64_t* u, float* w, int64_t n, double f, int64_t s, int64_t* t) { return move(x, u, w, n, f, s, t); }
int move_f64(int64_t* x, const int64_t* u, double* w, int64_t n, double f, int64_t s, int64_t* t) { return move(x, u, w, n, f, s, t); }
}
