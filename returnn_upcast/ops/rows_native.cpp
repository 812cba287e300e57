// Norms and log_softmax over the rows of low-precision tensors in float32, see rows_native.py.
//
// A row mostly fits into the first cache: another look at it costs little, and the memory is read and written once.

#include "native.h"

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t STEP = 2 * Vec::size();  // floats that make a vector of low precision
constexpr int64_t BLOCK = 64;  // rows or steps that are added up by themselves: a long sum loses digits
constexpr float INF = std::numeric_limits<float>::infinity();

// [outer, inner, columns] of the caller, strides in elements. The columns are contiguous.
struct Rows {
  char* data;
  int64_t outer, inner;
};

// As rows_native.py fills it. Parameters have `columns` floats, statistics one per row, the sums of their gradients are
// [workers, columns].
struct Problem {
  int64_t op, half, wide, rows, inner, columns, workers, flag;
  Rows x, grad, out;
  float *scale, *bias, *mean, *var, *rstd;
  double *grad_scale, *grad_bias;

  template <typename T>
  T* row(const Rows& x, int64_t i) const {
    return reinterpret_cast<T*>(x.data) + i / inner * x.outer + i % inner * x.inner;
  }
};

struct Pair {
  Vec a, b;
  Pair(float x) : a(x), b(x) {}
  Pair(const Vec& a, const Vec& b) : a(a), b(b) {}
};

Pair operator+(const Pair& x, const Pair& y) { return {x.a + y.a, x.b + y.b}; }
Pair operator-(const Pair& x, const Pair& y) { return {x.a - y.a, x.b - y.b}; }
Pair operator*(const Pair& x, const Pair& y) { return {x.a * y.a, x.b * y.b}; }
Pair exp(const Pair& x) { return {exp_nonpositive(x.a), exp_nonpositive(x.b)}; }
Pair maximum(const Pair& x, const Pair& y) { return {at::vec::maximum(x.a, y.a), at::vec::maximum(x.b, y.b)}; }
Pair is_equal(const Pair& x, const Pair& y) { return {x.a.eq(y.a), x.b.eq(y.b)}; }  // 1 or 0
Pair where_equal(const Pair& x, const Pair& y, const Pair& value, const Pair& other) {
  return {Vec::blendv(other.a, value.a, x.a == y.a), Vec::blendv(other.b, value.b, x.b == y.b)};
}

Pair load(const float* x) { return {Vec::loadu(x), Vec::loadu(x + Vec::size())}; }
void store(float* x, const Pair& v) { v.a.store(x), v.b.store(x + Vec::size()); }

// The first n of STEP values, the rest is 0.
template <typename T>
Pair load(const T* x, int64_t n) {
  using Low = at::vec::Vectorized<T>;
  const auto [a, b] = at::vec::convert_to_float<T>(n >= STEP ? Low::loadu(x) : Low::loadu(x, n));
  return {a, b};
}

Pair load(const float* x, int64_t n) {
  if (n >= STEP) return load(x);
  float full[STEP] = {};
  std::copy_n(x, n, full);
  return load(full);
}

template <typename T>
void store(T* x, const Pair& v, int64_t n) {
  const auto low = at::vec::convert_from_float<T>(v.a, v.b);
  n >= STEP ? low.store(x) : low.store(x, n);
}

void store(float* x, const Pair& v, int64_t n) {
  if (n >= STEP) return store(x, v);
  float full[STEP];
  store(full, v);
  std::copy_n(full, n, x);
}

float total(const Pair& x) {
  return at::vec::vec_reduce_all<float>([](const Vec& a, const Vec& b) { return a + b; }, x.a + x.b);
}

float peak(const Pair& x) {
  return at::vec::vec_reduce_all<float>(
      [](const Vec& a, const Vec& b) { return at::vec::maximum(a, b); }, at::vec::maximum(x.a, x.b));
}

// The sum of term(i) over all steps i, in parts, and these in float64.
template <typename F>
double sum(int64_t n, F term) {
  double result = 0;
  for (int64_t start = 0; start < n; start += BLOCK * STEP) {
    Pair part(0.f);
    for (int64_t i = start; i < std::min(n, start + BLOCK * STEP); i += STEP) part = part + term(i);
    result += total(part);
  }
  return result;
}

int64_t padded(int64_t n) { return (n + STEP - 1) / STEP * STEP; }

// A buffer of floats for each of some vectors of n, each padded to whole steps.
struct Buffers {
  int64_t size;
  std::vector<float> data;
  Buffers(int64_t n, int64_t count) : size(padded(n)), data(count * size, 0.f) {}
  float* operator[](int64_t i) { return data.data() + i * size; }
};

void copy_or_fill(const float* x, int64_t n, float value, float* out) {
  x != nullptr ? std::copy_n(x, n, out) : std::fill_n(out, n, value);
}

template <typename F>
void for_rows(const Problem& p, F func) {
  at::parallel_for(0, p.rows, (p.rows + p.workers - 1) / p.workers, func);
}

// flag: subtract the mean
template <typename T, typename Out>
void norm_forward(const Problem& p, double eps) {
  const int64_t n = p.columns;
  for_rows(p, [&](int64_t begin, int64_t end) {
    Buffers buffers(n, 3);
    float *x = buffers[0], *scale = buffers[1], *bias = buffers[2];
    copy_or_fill(p.scale, n, 1.f, scale), copy_or_fill(p.bias, n, 0.f, bias);
    for (int64_t row = begin; row < end; ++row) {
      const T* in = p.row<T>(p.x, row);
      const double first = sum(n, [&](int64_t i) {
        const Pair value = load(in + i, n - i);
        store(x + i, value);
        return value;
      });
      const float mean = p.flag ? static_cast<float>(first / n) : 0.f;
      std::fill_n(x + n, buffers.size - n, mean);  // so that the padding adds nothing
      const double squares = sum(n, [&](int64_t i) {
        const Pair value = load(x + i) - mean;
        return value * value;
      });
      const float var = static_cast<float>(squares / n), rstd = static_cast<float>(1 / std::sqrt(squares / n + eps));
      if (p.flag) p.mean[row] = mean;
      p.var[row] = var, p.rstd[row] = rstd;
      Out* out = p.row<Out>(p.out, row);
      for (int64_t i = 0; i < n; i += STEP)
        store(out + i, (load(x + i) - mean) * rstd * load(scale + i) + load(bias + i), n - i);
    }
  });
}

template <typename T, typename Grad>
void norm_backward_row(const Problem& p, int64_t row, const float* scale, float* grad_scale, float* grad_bias) {
  const int64_t n = p.columns;
  const T* x = p.row<T>(p.x, row);
  const Grad* grad = p.row<Grad>(p.grad, row);
  const Pair mean(p.flag ? p.mean[row] : 0.f), rstd(p.rstd[row]);
  // rstd first: what it is for may be too large to be added up
  const auto normalized = [=](int64_t i) { return (load(x + i, n - i) - mean) * rstd; };
  Pair dots(0.f), sums(0.f);
  for (int64_t i = 0; i < n; i += STEP) {
    const Pair g = load(grad + i, n - i), product = g * normalized(i), s = load(scale + i);
    store(grad_scale + i, load(grad_scale + i) + product);
    store(grad_bias + i, load(grad_bias + i) + g);
    dots = dots + product * s;
    sums = sums + g * s;
  }
  const Pair dot(total(dots) / n), mean_grad(p.flag ? total(sums) / n : 0.f);
  T* out = p.row<T>(p.out, row);
  for (int64_t i = 0; i < n; i += STEP)
    store(out + i, (load(grad + i, n - i) * load(scale + i) - mean_grad - normalized(i) * dot) * rstd, n - i);
}

template <typename T, typename Grad>
void norm_backward(const Problem& p) {
  const int64_t n = p.columns;
  at::parallel_for(0, p.workers, 1, [&](int64_t first, int64_t last) {
    for (int64_t worker = first; worker < last; ++worker) {
      Buffers buffers(n, 3);
      copy_or_fill(p.scale, n, 1.f, buffers[2]);
      const int64_t end = p.rows * (worker + 1) / p.workers;
      for (int64_t start = p.rows * worker / p.workers; start < end; start += BLOCK) {
        std::fill_n(buffers[0], 2 * buffers.size, 0.f);
        for (int64_t row = start; row < std::min(start + BLOCK, end); ++row)
          norm_backward_row<T, Grad>(p, row, buffers[2], buffers[0], buffers[1]);
        for (int64_t i = 0; i < n; ++i) {
          if (p.grad_scale != nullptr) p.grad_scale[worker * n + i] += buffers[0][i];
          if (p.grad_bias != nullptr) p.grad_bias[worker * n + i] += buffers[1][i];
        }
      }
    }
  });
}

template <typename T>
void log_softmax_forward(const Problem& p) {
  const int64_t n = p.columns;
  for_rows(p, [&](int64_t begin, int64_t end) {
    Buffers buffers(n, 1);
    float* x = buffers[0];
    for (int64_t row = begin; row < end; ++row) {
      const T* in = p.row<T>(p.x, row);
      for (int64_t i = 0; i < n; i += STEP) store(x + i, load(in + i, n - i));
      std::fill_n(x + n, buffers.size - n, -INF);
      Pair peaks(-INF);
      for (int64_t i = 0; i < n; i += STEP) peaks = maximum(peaks, load(x + i));
      const Pair max(peak(peaks));
      // log1p of the sum without the peak's own 1: a confident row has a loss far below the spacing of floats at 1
      const double at_peak = sum(n, [&](int64_t i) { return is_equal(load(x + i), max); });
      const double rest = sum(n, [&](int64_t i) { return exp(load(x + i) - max) - is_equal(load(x + i), max); });
      const Pair log_sum(static_cast<float>(std::log1p(rest + (at_peak - 1))));
      float* out = p.row<float>(p.out, row);
      for (int64_t i = 0; i < n; i += STEP) store(out + i, load(x + i) - max - log_sum, n - i);
    }
  });
}

// x are the log-probs. flag: what is -inf gets no gradient
template <typename T>
void log_softmax_backward(const Problem& p) {
  const int64_t n = p.columns;
  for_rows(p, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float *log_probs = p.row<float>(p.x, row), *grad = p.row<float>(p.grad, row);
      const auto gradient = [&](int64_t i) {
        const Pair g = load(grad + i, n - i);
        return p.flag ? where_equal(load(log_probs + i, n - i), -INF, 0.f, g) : g;
      };
      const Pair all(static_cast<float>(sum(n, gradient)));
      T* out = p.row<T>(p.out, row);
      for (int64_t i = 0; i < n; i += STEP)
        store(out + i, gradient(i) - exp(load(log_probs + i, n - i)) * all, n - i);
    }
  });
}

template <typename T, typename Other>
void run(const Problem& p, double eps) {
  switch (p.op) {
    case 0: return norm_forward<T, Other>(p, eps);
    case 1: return norm_backward<T, Other>(p);
    case 2: return log_softmax_forward<T>(p);
    case 3: return log_softmax_backward<T>(p);
  }
}

}  // namespace

extern "C" int rows(const Problem* p, double eps, char* message, size_t size) {
  return guarded(message, size, [&] {
    if (p->half)
      p->wide ? run<at::Half, float>(*p, eps) : run<at::Half, at::Half>(*p, eps);
    else
      p->wide ? run<at::BFloat16, float>(*p, eps) : run<at::BFloat16, at::BFloat16>(*p, eps);
  });
}
