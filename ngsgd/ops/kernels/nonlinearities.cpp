// P-norms and row norms, each direction in one pass over memory; see nonlinearities.py.
//
// Letters: N rows of D numbers; a p-norm has groups of G.  Every sum runs in one order whatever the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>

namespace {

// calls part(first, end) on as many stretches of [0, count) as there are threads
template <typename Part>
void in_parts(int64_t count, int threads, const Part& part) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int t = 0; t < threads; ++t) part(count * t / threads, count * (t + 1) / threads);
}

// G = 0: `size` says how many there are in a group
template <int64_t G>
void norms(const float* x, int64_t size, int64_t first, int64_t end, float* y) {
  const int64_t group = G ? G : size;
  for (int64_t j = first; j < end; ++j) {
    float total = 0.0f;
    for (int64_t k = 0; k < group; ++k) total += x[j * group + k] * x[j * group + k];
    y[j] = std::sqrt(total);
  }
}

template <int64_t G>
void norm_gradients(const float* x, const float* y, const float* dy, int64_t size, int64_t first, int64_t end, float* dx) {
  const int64_t group = G ? G : size;
  for (int64_t j = first; j < end; ++j) {
    const float share = y[j] > 0.0f ? dy[j] / y[j] : 0.0f;
    for (int64_t k = 0; k < group; ++k) dx[j * group + k] = x[j * group + k] * share;
  }
}

// sum of a_d b_d and of a_d a_d
struct Sums {
  float of_products, of_squares;

  Sums(const float* a, const float* b, int64_t D) {
    float products = 0.0f, squares = 0.0f;
#pragma omp simd reduction(+ : products, squares)
    for (int64_t d = 0; d < D; ++d) products += a[d] * b[d], squares += a[d] * a[d];
    of_products = products, of_squares = squares;
  }
};

float inverse_rms(float sum_sq, float size, float least) { return 1.0f / std::sqrt(std::max(sum_sq / size, least)); }

}  // namespace

// y_j = |x_j| for `count` groups
extern "C" void p_norm(const float* x, int64_t count, int64_t G, float* y, int threads) {
  in_parts(count, threads, [=](int64_t first, int64_t end) { (G == 10 ? norms<10> : norms<0>)(x, G, first, end, y); });
}

extern "C" void p_norm_gradient(const float* x, const float* y, const float* dy, int64_t count, int64_t G, float* dx, int threads) {
  in_parts(count, threads, [=](int64_t first, int64_t end) {
    (G == 10 ? norm_gradients<10> : norm_gradients<0>)(x, y, dy, G, first, end, dx);
  });
}

// y = r x for each row, r = max(sum of squares / size, least)^(-1/2)
extern "C" void renormalize(const float* x, int64_t N, int64_t D, float size, float least, float* y, int threads) {
  in_parts(N, threads, [=](int64_t first, int64_t end) {
    for (int64_t n = first; n < end; ++n) {
      const float* const from = x + n * D;
      const float r = inverse_rms(Sums(from, from, D).of_squares, size, least);
      for (int64_t d = 0; d < D; ++d) y[n * D + d] = from[d] * r;
    }
  });
}

extern "C" void renormalize_gradient(const float* x, const float* dy, int64_t N, int64_t D, float size, float least, float* dx, int threads) {
  in_parts(N, threads, [=](int64_t first, int64_t end) {
    for (int64_t n = first; n < end; ++n) {
      const float *const from = x + n * D, *const with = dy + n * D;
      const Sums sums(from, with, D);
      const float r = inverse_rms(sums.of_squares, size, least);
      const float along = sums.of_squares / size > least ? r * r * r * sums.of_products / size : 0.0f;
      for (int64_t d = 0; d < D; ++d) dx[n * D + d] = with[d] * r - from[d] * along;
    }
  });
}
