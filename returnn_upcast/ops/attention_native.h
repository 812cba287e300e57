// For attention_native.cpp: the problem as the caller describes it, and products whose kernels don't depend on lengths.

#pragma once

#include <ATen/native/CPUBlas.h>
#include <c10/core/impl/alloc_cpu.h>
#include <algorithm>

namespace {

constexpr int64_t ROWS = 64;  // queries of a block
constexpr int64_t PAD = 16;   // sizes are padded to a multiple
constexpr int64_t PANEL = 256;
constexpr int64_t MAX_LEAD = 8;

int64_t padded(int64_t n, int64_t step = PAD) { return (n + step - 1) / step * step; }

// A tensor [lead..., row, column] of the caller, strides in elements. `worker` is 0 for a tensor of the inputs' dtype.
// Gradients that several entries add to are float32 sums, one for each worker, with `worker` as their stride.
struct Operand {
  char* data;
  int64_t worker, row, column, lead[MAX_LEAD];
};

enum {
  Q, K, V, POS, BIAS_U, BIAS_V, MASK, KEEP, OUT, GRAD_OUT,
  GRAD_Q, GRAD_K, GRAD_V, GRAD_POS, GRAD_BIAS_U, GRAD_BIAS_V, COUNT
};

// as attention_native.py fills it
struct Problem {
  int64_t workers, queries, keys, features, v_features, causal, lead_ndim, lead[MAX_LEAD];
  Operand operands[COUNT];
};

struct Buffer {
  float* data = nullptr;
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { c10::free_cpu(data); }
  void allocate(int64_t n) { data = static_cast<float*>(c10::alloc_cpu(std::max<int64_t>(n, 1) * sizeof(float))); }
  void zero(int64_t n) { std::fill_n(data, n, 0.f); }
  operator float*() const { return data; }
};

// The sizes that products are made of: oneDNN makes a kernel for each, so they must not depend on the lengths.
int64_t piece(int64_t n) { return n >= PANEL ? PANEL : n >= 64 ? 64 : std::min(n, PAD); }

// c [m, n] (+)= a [m, k] · b [k, n]
void product(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c, bool add) {
  for (int64_t i = 0, size; i < m; i += size) {
    size = piece(m - i);
    at::native::cpublas::brgemm(size, n, k, k, n, n, add, a + i * k, b, c + i * n);
  }
}

// c [m, n] (+)= a [m, k] · b [k, n], where a is made by to_panels, and taken from column `start` on
void panel_product(int64_t m, int64_t n, int64_t start, int64_t k, const float* a, const float* b, float* c, bool add) {
  if (k == 0 && !add) std::fill_n(c, m * n, 0.f);
  for (int64_t i = 0, size; i < k; i += size) {
    const int64_t column = start + i, inside = column % PANEL;
    size = piece(std::min(k - i, PANEL - inside));
    const float* part = a + (column - inside) * m + inside;
    at::native::cpublas::brgemm(m, n, size, PANEL, n, n, add || i > 0, part, b + i * n, c);
  }
}

// [columns, rows] of x [rows, columns], PANEL rows together: strides that depend on lengths would make kernels, too
void to_panels(const float* x, int64_t rows, int64_t columns, float* out) {
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) out[i / PANEL * PANEL * columns + j * PANEL + i % PANEL] = x[i * columns + j];
}

void add_row_sums(const float* x, int64_t rows, int64_t columns, float* sums) {
  for (int64_t j = 0; j < rows; ++j)
    for (int64_t i = 0; i < columns; ++i) sums[j] += x[j * columns + i];
}

}  // namespace
