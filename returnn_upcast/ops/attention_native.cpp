// Attention on the CPU in float32, see attention_native.py.
//
// A worker takes one entry (of batch and heads) after another, and of it a block of queries with all their keys.
// Energies, weights and their gradients are transposed, [keys, queries]: then no product wants a transposed copy of
// them, and the softmax, which reduces over the keys, runs along the queries in vector registers.

#include "attention_native.h"
#include "native.h"

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <limits>

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr float INF = std::numeric_limits<float>::infinity();

template <typename T>
class Worker {
 public:
  Worker(const Problem& p, float scale, float keep_scale, int64_t index, bool backward)
      : p(p), scale(scale), keep_scale(keep_scale), index(index) {
    const int64_t keys = padded(p.keys), panels = padded(p.keys, PANEL), width = std::max(p.features, p.v_features);
    k.allocate(keys * p.features), v.allocate(keys * p.v_features), key_bias.allocate(keys);
    q.allocate(ROWS * p.features), q_columns.allocate(ROWS * p.features), block.allocate(ROWS * width);
    energies.allocate(keys * ROWS);
    if (has(POS)) {
      pos.allocate(pos_rows * p.features), pos_bias.allocate(pos_rows);
      by_position.allocate((padded(keys + ROWS) + PAD) * ROWS);
    }
    if (!backward) {
      v_panels.allocate(panels * p.v_features);
      return;
    }
    k_panels.allocate(panels * p.features);
    if (has(POS)) pos_panels.allocate(padded(pos_rows, PANEL) * p.features);
    grad.allocate(keys * ROWS), grad_keys.allocate(keys);
    grad_k.allocate(keys * p.features), grad_v.allocate(keys * p.v_features);
    grad_out.allocate(ROWS * p.v_features), out_columns.allocate(ROWS * p.v_features);
    if (has(POS)) grad_pos.allocate(pos_rows * p.features), grad_positions.allocate(pos_rows);
  }

  void forward(int64_t entry) {
    load_entry(entry);
    to_panels(v, padded(keys), p.v_features, v_panels);
    for (int64_t start = 0; start < p.queries; start += ROWS) {
      load_block(start);
      compute_energies();
      softmax();
      drop(energies);
      panel_product(p.v_features, n, 0, used, v_panels, energies, block, false);
      store_block(OUT, p.v_features);
    }
  }

  void backward(int64_t entry) {
    load_entry(entry);
    to_panels(k, padded(keys), p.features, k_panels);
    grad_k.zero(padded(keys) * p.features), grad_v.zero(padded(keys) * p.v_features), grad_keys.zero(padded(keys));
    if (has(POS)) {
      to_panels(pos, pos_rows, p.features, pos_panels);
      grad_pos.zero(pos_rows * p.features), grad_positions.zero(pos_rows);
    }
    for (int64_t start = 0; start < p.queries; start += ROWS) {
      load_block(start);
      load(GRAD_OUT, start, rows, n, p.v_features, grad_out);
      transpose(grad_out, p.v_features, out_columns);
      compute_energies();
      softmax();
      product(used, n, p.v_features, v, out_columns, grad, false);
      drop(grad);
      through_softmax();
      drop(energies);
      product(used, p.v_features, n, energies, grad_out, grad_v, true);
      product(used, p.features, n, grad, q, grad_k, true);
      panel_product(p.features, n, 0, used, k_panels, grad, block, false);
      if (has(BIAS_U)) add_row_sums(grad, used, n, grad_keys);
      if (has(POS)) through_positions();
      for (int64_t i = 0; i < p.features * n; ++i) block[i] *= scale;
      store_block(GRAD_Q, p.features);
    }
    finish(GRAD_BIAS_U, BIAS_U, grad_keys, k, grad_k, padded(keys));
    store_rows(GRAD_K, grad_k, keys, p.keys, p.features, scale);
    store_rows(GRAD_V, grad_v, keys, p.keys, p.v_features, 1.f);
    if (!has(POS)) return;
    finish(GRAD_BIAS_V, BIAS_V, grad_positions, pos, grad_pos, positions);
    store_rows(GRAD_POS, grad_pos, positions, positions, p.features, scale);
  }

 private:
  const Problem& p;
  const float scale, keep_scale;
  const int64_t index, positions = p.queries + p.keys - 1, pos_rows = padded(positions) + PAD;
  // Of an entry, in rows, and in panels what a direction needs so. Masked keys at its end don't count as keys.
  int64_t offsets[COUNT], keys = 0;
  Buffer k, k_panels, v, v_panels, key_bias, pos, pos_panels, pos_bias;
  Buffer grad_k, grad_v, grad_keys, grad_pos, grad_positions;
  // Of a block: queries from `first` on, keys from 0 on; n and `used` are `rows` and `attended` with padding
  int64_t first = 0, rows = 0, n = 0, attended = 0, used = 0;
  Buffer q, q_columns, grad_out, out_columns, energies, grad, by_position, block;

  bool has(int i) const { return p.operands[i].data != nullptr; }

  template <typename X>
  X* element(int i, int64_t row, int64_t column) const {
    const Operand& x = p.operands[i];
    return reinterpret_cast<X*>(x.data) + offsets[i] + index * x.worker + row * x.row + column * x.column;
  }

  // rows from `start` on, and zeros up to `size`
  void load(int i, int64_t start, int64_t count, int64_t size, int64_t features, float* out) {
    const int64_t step = p.operands[i].column;
    for (int64_t row = 0; row < count; ++row) {
      const T* x = element<T>(i, start + row, 0);
      for (int64_t j = 0; j < features; ++j) out[row * features + j] = static_cast<float>(x[j * step]);
    }
    std::fill_n(out + count * features, (size - count) * features, 0.f);
  }

  void load_entry(int64_t entry) {
    for (int i = 0; i < COUNT; ++i) {
      offsets[i] = 0;
      int64_t rest = entry;
      for (int64_t d = p.lead_ndim; d-- > 0; rest /= p.lead[d]) offsets[i] += rest % p.lead[d] * p.operands[i].lead[d];
    }
    keys = p.keys;
    if (has(MASK) && p.operands[MASK].row == 0)
      while (keys > 0 && !*element<bool>(MASK, 0, keys - 1)) --keys;
    load(K, 0, keys, padded(keys), p.features, k);
    load(V, 0, keys, padded(keys), p.v_features, v);
    load_bias(BIAS_U, k, padded(keys), key_bias);
    if (!has(POS)) return;
    load(POS, 0, positions, pos_rows, p.features, pos);
    load_bias(BIAS_V, pos, pos_rows, pos_bias);
  }

  // scale * bias·x for all rows of x
  void load_bias(int i, const float* x, int64_t count, float* out) {
    std::fill_n(out, count, 0.f);
    for (int64_t j = 0; has(i) && j < p.features; ++j) {
      const float bias = scale * *element<float>(i, 0, j);
      for (int64_t row = 0; row < count; ++row) out[row] += bias * x[row * p.features + j];
    }
  }

  void load_block(int64_t start) {
    first = start, rows = std::min(ROWS, p.queries - start), n = padded(rows);
    attended = p.causal ? std::min(keys, start + rows) : keys, used = padded(attended);
    load(Q, start, rows, n, p.features, q);
    transpose(q, p.features, q_columns);
  }

  void transpose(const float* x, int64_t columns, float* out) {
    for (int64_t j = 0; j < columns; ++j)
      for (int64_t i = 0; i < n; ++i) out[j * n + i] = x[i * columns + j];
  }

  // Query i and key j of the block have the position j - i + last_position(). by_position starts at a multiple of PAD.
  int64_t last_position() const { return p.queries - 1 - first; }
  int64_t start_position() const { return (last_position() - rows + 1) / PAD * PAD; }
  int64_t used_positions() const { return padded(last_position() + attended - start_position()); }
  float* relative(int64_t j) const { return by_position + (j + last_position() - start_position()) * n; }  // of query 0

  void compute_energies() {
    product(used, n, p.features, k, q_columns, energies, false);
    for (int64_t j = 0; j < used; ++j)
      for (int64_t i = 0; i < n; ++i) energies[j * n + i] = energies[j * n + i] * scale + key_bias[j];
    if (has(POS)) {
      product(used_positions(), n, p.features, pos + start_position() * p.features, q_columns, by_position, false);
      const float* bias = pos_bias + last_position();
      for (int64_t j = 0; j < attended; ++j)
        for (int64_t i = 0; i < rows; ++i) energies[j * n + i] += scale * relative(j)[i - i * n] + bias[j - i];
    }
    fill_masked(energies, -INF);
  }

  void through_positions() {
    by_position.zero(used_positions() * n);
    for (int64_t j = 0; j < attended; ++j)
      for (int64_t i = 0; i < rows; ++i) relative(j)[i - i * n] = grad[j * n + i];
    panel_product(p.features, n, start_position(), used_positions(), pos_panels, by_position, block, true);
    product(used_positions(), p.features, n, by_position, q, grad_pos + start_position() * p.features, true);
    if (has(BIAS_V)) add_row_sums(by_position, used_positions(), n, grad_positions + start_position());
  }

  // and the padding, whose values must not be NaN: they meet zeros
  void fill_masked(float* x, float value) {
    std::fill_n(x + attended * n, (used - attended) * n, value);
    for (int64_t j = 0; rows < n && j < attended; ++j) std::fill_n(x + j * n + rows, n - rows, value);
    for (int64_t j = first + 1; p.causal && j < attended; ++j) std::fill_n(x + j * n, j - first, value);
    const int64_t step = p.operands[MASK].row;
    for (int64_t j = 0; has(MASK) && j < attended; ++j) {
      const bool* mask = element<bool>(MASK, first, j);
      if (step == 0 && !*mask) std::fill_n(x + j * n, n, value);
      for (int64_t i = 0; step != 0 && i < rows; ++i) x[j * n + i] = mask[i * step] ? x[j * n + i] : value;
    }
  }

  void drop(float* x) {
    const int64_t step = p.operands[KEEP].row;
    for (int64_t j = 0; has(KEEP) && j < attended; ++j) {
      const bool* keep = element<bool>(KEEP, first, j);
      for (int64_t i = 0; i < rows; ++i) x[j * n + i] *= keep[i * step] ? keep_scale : 0.f;
    }
  }

  // Energies become weights. They are NaN where a query has no key, or one of NaN: not in the masked keys, though.
  // The backward does the same again: weights by a kept log-sum-exp would be less exact where energies are large.
  void softmax() {
    for (int64_t i = 0; i < n; i += Vec::size()) {
      Vec max(-INF), sum(0.f);
      for (int64_t j = 0; j < used; ++j) max = at::vec::maximum(max, Vec::loadu(energies + j * n + i));
      for (int64_t j = 0; j < used; ++j) {
        const Vec weight = exp_nonpositive(Vec::loadu(energies + j * n + i) - max);
        weight.store(energies + j * n + i);
        sum = sum + weight;
      }
      const Vec factor = Vec(1.f) / sum;
      for (int64_t j = 0; j < used; ++j) (Vec::loadu(energies + j * n + i) * factor).store(energies + j * n + i);
    }
    fill_masked(energies, 0.f);
  }

  // `energies` are weights. `grad` of the weights becomes that of the energies.
  void through_softmax() {
    for (int64_t i = 0; i < n; i += Vec::size()) {
      Vec sum(0.f);
      for (int64_t j = 0; j < used; ++j)
        sum = at::vec::fmadd(Vec::loadu(energies + j * n + i), Vec::loadu(grad + j * n + i), sum);
      for (int64_t j = 0; j < used; ++j)
        (Vec::loadu(energies + j * n + i) * (Vec::loadu(grad + j * n + i) - sum)).store(grad + j * n + i);
    }
    fill_masked(grad, 0.f);
  }

  void store(int i, int64_t row, int64_t column, float value) {
    if (p.operands[i].worker != 0)
      *element<float>(i, row, column) += value;
    else
      *element<T>(i, row, column) = static_cast<T>(value);
  }

  // `block` is [features, n]
  void store_block(int target, int64_t features) {
    for (int64_t i = 0; has(target) && i < rows; ++i)
      for (int64_t j = 0; j < features; ++j) store(target, first + i, j, block[j * n + i]);
  }

  void store_rows(int target, const float* x, int64_t count, int64_t size, int64_t features, float factor) {
    for (int64_t row = 0; has(target) && row < size; ++row)
      for (int64_t j = 0; j < features; ++j) store(target, row, j, row < count ? factor * x[row * features + j] : 0.f);
  }

  // bias·x is part of the energies, whose gradients have the sums `sums` over the queries.
  void finish(int target, int source, const float* sums, const float* x, float* grad_x, int64_t count) {
    for (int64_t j = 0; has(source) && j < p.features; ++j) {
      const float bias = *element<float>(source, 0, j);
      float total = 0.f;
      for (int64_t row = 0; row < count; ++row) {
        total += sums[row] * x[row * p.features + j];
        grad_x[row * p.features + j] += sums[row] * bias;
      }
      if (has(target)) store(target, 0, j, scale * total);
    }
  }
};

template <typename T>
void run(const Problem& p, float scale, float keep_scale, bool backward) {
  int64_t entries = 1;
  for (int64_t d = 0; d < p.lead_ndim; ++d) entries *= p.lead[d];
  at::parallel_for(0, p.workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t index = begin; index < end; ++index) {
      Worker<T> worker(p, scale, keep_scale, index, backward);
      for (int64_t entry = index; entry < entries; entry += p.workers)  // neighbours are heads, of the same lengths
        backward ? worker.backward(entry) : worker.forward(entry);
    }
  });
}

}  // namespace

extern "C" int attention(
    const Problem* p, double scale, double keep_scale, bool half, bool backward, char* message, size_t size) {
  return guarded(message, size, [&] { (half ? run<at::Half> : run<at::BFloat16>)(*p, scale, keep_scale, backward); });
}
