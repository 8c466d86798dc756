// One token of a Titans model on a CPU, in float32 and without gradients: everything between two linear layers of a
// decoding step. At batch 1 such a step is hundreds of tiny torch operations, whose calls take longer than their work.
//
// Each operator has a definition in torch, named at its end (`TORCH_LIBRARY`), and the tests compare the two. Letters
// as there: B batch, H heads, G = B H, D head width, C tokens of a chunk, t tokens in the open chunk. Matrices are
// stored so that M(x) = x W, [in, out] row by row.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace {

using at::Tensor;
using Numbers = std::vector<float>;

// Vectors and matrices

typedef float Lanes __attribute__((vector_size(64), aligned(4), may_alias));  // 16 numbers, wherever they lie
constexpr int64_t LANES = 16;

const Lanes& lanes(const float* x) { return *reinterpret_cast<const Lanes*>(x); }
Lanes& lanes(float* x) { return *reinterpret_cast<Lanes*>(x); }

float sum(const Lanes& x) {
  float total = 0;
  for (int64_t i = 0; i < LANES; ++i) total += x[i];
  return total;
}

float dot(const float* x, const float* y, int64_t n) {
  Lanes found{};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) found += lanes(x + i) * lanes(y + i);
  float rest = 0;
  for (; i < n; ++i) rest += x[i] * y[i];
  return sum(found) + rest;
}

float norm(const float* x, int64_t n) { return std::sqrt(dot(x, x, n)); }

// y += share x
void add(float share, const float* x, int64_t n, float* y) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) lanes(y + i) += share * lanes(x + i);
  for (; i < n; ++i) y[i] += share * x[i];
}

// y += share x W, for W [in, out]: four vectors of columns at a time stay in registers
void add_product(float share, const float* x, int64_t in, const float* W, int64_t out, float* y) {
  constexpr int64_t WIDE = 4 * LANES;
  int64_t j = 0;
  for (; j + WIDE <= out; j += WIDE) {
    Lanes a{}, b{}, c{}, d{};
    const float* row = W + j;
    for (int64_t r = 0; r < in; ++r, row += out) {
      a += x[r] * lanes(row);
      b += x[r] * lanes(row + LANES);
      c += x[r] * lanes(row + 2 * LANES);
      d += x[r] * lanes(row + 3 * LANES);
    }
    lanes(y + j) += share * a;
    lanes(y + j + LANES) += share * b;
    lanes(y + j + 2 * LANES) += share * c;
    lanes(y + j + 3 * LANES) += share * d;
  }
  if (j == out) return;
  for (int64_t r = 0; r < in; ++r) add(share * x[r], W + r * out + j, out - j, y + j);
}

// x += share y W^T, for W [in, out]
void add_product_transposed(float share, const float* y, int64_t out, const float* W, int64_t in, float* x) {
  for (int64_t r = 0; r < in; ++r) x[r] += share * dot(y, W + r * out, out);
}

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
float silu(float x) { return x * sigmoid(x); }

Numbers silu(const Numbers& z) {
  Numbers a(z.size());
  for (size_t i = 0; i < z.size(); ++i) a[i] = silu(z[i]);
  return a;
}

// The memory of one head

struct Rule {
  double max_surprise, hidden_step;
  bool normalised, delta;
};

// What the memory after a token is made of: M_t = of_M[0] M_0 + of_M[1] S_0 + sum_j of_M[2 + j] u_j, and where
// forgetting leads to a start, (1 - of_M[0]) start besides.
struct Layer {
  const float* states;  // M_0, S_0 and, with `starts`, the start: [in, out] each
  float* errors;        // [C, out], of u_j = input_j^T error_j
  float* inputs;        // [C, `stride`], of which this layer's are the first `in`
  int64_t in, out, stride;
  bool starts;

  // x M_0
  Numbers at_start(const float* x) const {
    Numbers y(out, 0.f);
    add_product(1, x, in, states, out, y.data());
    return y;
  }

  // x M_t
  Numbers through(const float* x, const float* of_M, int64_t t) const {
    Numbers y(out, 0.f), used(t);
    add_product(of_M[0], x, in, states, out, y.data());
    if (of_M[1] != 0) add_product(of_M[1], x, in, states + in * out, out, y.data());
    if (starts) add_product(1 - of_M[0], x, in, states + 2 * in * out, out, y.data());
    for (int64_t j = 0; j < t; ++j) used[j] = of_M[2 + j] * dot(x, inputs + j * stride, in);
    add_product(1, used.data(), t, errors, out, y.data());
    return y;
  }

  // e M_t^T
  Numbers back_through(const float* e, const float* of_M, int64_t t) const {
    Numbers x(in, 0.f);
    add_product_transposed(of_M[0], e, out, states, in, x.data());
    if (of_M[1] != 0) add_product_transposed(of_M[1], e, out, states + in * out, in, x.data());
    if (starts) add_product_transposed(1 - of_M[0], e, out, states + 2 * in * out, in, x.data());
    for (int64_t j = 0; j < t; ++j) add(of_M[2 + j] * dot(e, errors + j * out, out), inputs + j * stride, in, x.data());
    return x;
  }

  // e M_0^T
  Numbers back_through_start(const float* e) const {
    Numbers x(in, 0.f);
    add_product_transposed(1, e, out, states, in, x.data());
    return x;
  }
};

using Memory = std::vector<Layer>;

// What the rule leaves of an error (`Rule.scale`): the step's share, and the cap on the gradient's norm.
float scale(const Rule& rule, bool first, bool last, float input, float error) {
  float step = last ? 1 : rule.hidden_step;
  if (rule.normalised && !first) step /= std::max(input * input, 1.f);
  if (std::isinf(rule.max_surprise)) return step;
  const float cap = rule.max_surprise;
  return step * cap / std::max(input * error * step, cap);
}

// Write key and value into slot t: the layers' inputs and errors of the gradient u_t (Eq. 12).
void write(const Memory& memory, const Rule& rule, const float* k, const float* v, const float* of_M, int64_t t) {
  const int64_t depth = memory.size(), last = depth - 1;
  std::vector<Numbers> X{Numbers(k, k + memory[0].in)}, Z;
  for (int64_t i = 0; i < last; ++i) {
    Z.push_back(memory[i].at_start(X[i].data()));
    X.push_back(silu(Z[i]));
  }
  const Layer& end = memory[last];  // `DeltaRule` takes the last layer as it is now, `Rule` as at the chunk's start
  Numbers error = rule.delta ? end.through(X[last].data(), of_M, t) : end.at_start(X[last].data());
  for (int64_t j = 0; j < end.out; ++j) error[j] = 2 * (error[j] - v[j]);  // of |M(k) - v|^2
  for (int64_t i = last; i >= 0; --i) {
    const Layer& layer = memory[i];
    Numbers below;
    if (i > 0) {
      const bool present = rule.delta && i == last;
      below = present ? layer.back_through(error.data(), of_M, t) : layer.back_through_start(error.data());
      for (int64_t j = 0; j < layer.in; ++j) {
        const float s = sigmoid(Z[i - 1][j]);
        below[j] *= s * (1 + Z[i - 1][j] * (1 - s));
      }
    }
    const float kept = scale(rule, i == 0, i == last, norm(X[i].data(), layer.in), norm(error.data(), layer.out));
    for (int64_t j = 0; j < layer.out; ++j) layer.errors[t * layer.out + j] = kept * error[j];
    std::copy(X[i].begin(), X[i].end(), layer.inputs + t * layer.stride);
    error = std::move(below);
  }
}

constexpr float NEGLIGIBLE = 1e-16;  // shares below this do not matter, and subnormal ones are slow

// Eqs. 14 and 13 for the shares of M_0, S_0 and the chunk's gradients, [2 + C], after token t.
void advance(float theta, float eta, float alpha, int64_t t, int64_t C, const float* M, const float* S, float* of_M,
             float* of_S) {
  for (int64_t i = 0; i < 2 + C; ++i) {
    const float s = i == 2 + t ? -theta : eta * S[i];
    const float m = s + (1 - alpha) * M[i];
    of_M[i] = std::abs(m) <= NEGLIGIBLE ? 0 : m;
    of_S[i] = std::abs(s) <= NEGLIGIBLE ? 0 : s;
  }
}

// A query through the memory after token t (Eq. 15).
Numbers read(const Memory& memory, const float* q, const float* of_M, int64_t t) {
  Numbers x(q, q + memory[0].in);
  for (size_t i = 0; i < memory.size(); ++i) x = memory[i].through((i ? silu(x) : x).data(), of_M, t + 1);
  return x;
}

// The operators

void without_gradients(at::TensorList inputs) {
  if (!at::GradMode::is_enabled()) return;
  for (const Tensor& x : inputs)
    TORCH_CHECK(!x.requires_grad(), "titans_cpu has no gradients: use torch.no_grad(), or the form in torch");
}

float* numbers(const Tensor& x) { return x.data_ptr<float>(); }

void check(const Tensor& x, at::IntArrayRef sizes, const char* name) {
  TORCH_CHECK_VALUE(x.is_contiguous() && x.scalar_type() == at::kFloat && x.sizes() == sizes, "`", name,
                    "` must be contiguous float32 of sizes ", sizes, ", got ", x.scalar_type(), " ", x.sizes());
}

constexpr int64_t WORTHWHILE = 1 << 16;  // numbers to read, for a thread of its own

// Heads of a step are shared out among the threads, where there is enough to do for each.
template <typename F>
void for_each(int64_t count, int64_t numbers_read, const F& f) {
  at::parallel_for(0, count, std::max<int64_t>(1, WORTHWHILE / std::max<int64_t>(1, numbers_read)),
                   [&](int64_t from, int64_t to) {
                     for (int64_t i = from; i < to; ++i) f(i);
                   });
}

std::tuple<Tensor, Tensor, Tensor> step(const Tensor& q_, const Tensor& k_, const Tensor& v_, const Tensor& theta_,
                                        const Tensor& eta_, const Tensor& alpha_, at::TensorList layers,
                                        const Tensor& slots, const Tensor& old_M, const Tensor& old_S, int64_t t,
                                        double max_surprise, bool normalised, double hidden_step, bool delta) {
  without_gradients({q_, k_, v_, theta_, eta_, alpha_, slots, old_M, old_S});
  without_gradients(layers);
  const Rule rule{max_surprise, hidden_step, normalised, delta};
  const Tensor q = q_.contiguous(), k = k_.contiguous(), v = v_.contiguous();
  const Tensor theta = theta_.contiguous(), eta = eta_.contiguous(), alpha = alpha_.contiguous();
  const int64_t G = slots.size(0), C = slots.size(1), stride = slots.size(2), D = k.size(-1), depth = layers.size();
  TORCH_CHECK_VALUE(t >= 0 && t < C, "the chunk of ", C, " tokens has no slot ", t);
  for (const Tensor& x : {q, k, v}) check(x, q_.sizes(), "q, k, v");
  for (const Tensor& x : {theta, eta, alpha}) check(x, theta_.sizes(), "theta, eta, alpha");
  TORCH_CHECK_VALUE(q.numel() == G * D && theta.numel() == G, "q, k, v and the gates must be of one token for each of ",
                    G, " heads");
  check(slots, {G, C, stride}, "slots");
  check(old_M, {G, 2 + C}, "of_M");
  check(old_S, {G, 2 + C}, "of_S");

  std::vector<int64_t> widths{D};
  int64_t inputs = 0, total = 0;
  for (const Tensor& layer : layers) {
    check(layer, {G, layer.size(1), layer.size(2)}, "layers");
    const int64_t rows = layer.size(1) - C, in = widths.back();
    TORCH_CHECK_VALUE(rows == 2 * in || rows == 3 * in, "a layer of ", in, " inputs cannot have ", rows, " rows");
    inputs += in;
    total += layer.size(1) * layer.size(2);
    widths.push_back(layer.size(2));
  }
  TORCH_CHECK_VALUE(depth > 0 && widths.back() == D && stride == inputs + 3, "`slots` must hold ", inputs,
                    " inputs and 3 gates, and the last layer lead to ", D, " outputs");

  Tensor y = at::empty(q.sizes(), q.options()), of_M = at::empty_like(old_M), of_S = at::empty_like(old_S);
  for_each(G, total, [&](int64_t g) {
    Memory memory;
    float* place = numbers(slots) + g * C * stride;
    for (int64_t i = 0; i < depth; ++i) {
      const int64_t in = widths[i], out = widths[i + 1], rows = layers[i].size(1);
      float* states = numbers(layers[i]) + g * rows * out;
      memory.push_back({states, states + (rows - C) * out, place, in, out, stride, rows - C == 3 * in});
      place += in;
    }
    const float gates[] = {numbers(theta)[g], numbers(eta)[g], numbers(alpha)[g]};
    const int64_t row = g * (2 + C);
    write(memory, rule, numbers(k) + g * D, numbers(v) + g * D, numbers(old_M) + row, t);
    std::copy(gates, gates + 3, place + t * stride);
    advance(gates[0], gates[1], gates[2], t, C, numbers(old_M) + row, numbers(old_S) + row, numbers(of_M) + row,
            numbers(of_S) + row);
    const Numbers found = read(memory, numbers(q) + g * D, numbers(of_M) + row, t);
    std::copy(found.begin(), found.end(), numbers(y) + g * D);
  });
  return {y, of_M, of_S};
}

Tensor recall(at::TensorList weights, const Tensor& q_) {
  without_gradients({q_});
  without_gradients(weights);
  const Tensor q = q_.contiguous();  // [B, 1, H, D], as good as [B, H, D]
  const int64_t B = q.size(0), H = q.size(2), D = q.size(3), G = B * H;
  int64_t total = 0;
  check(q, {B, 1, H, D}, "q");
  for (size_t i = 0, in = D; i < weights.size(); in = weights[i++].size(3)) {
    const Tensor& W = weights[i];
    TORCH_CHECK_VALUE(W.dim() == 4 && W.size(0) == B && W.size(1) == H && W.size(2) == int64_t(in) &&
                          W.scalar_type() == at::kFloat && W.stride(3) == 1 && W.stride(2) == W.size(3),
                      "`weights` must be matrices in float32, [", B, ", ", H, ", ", in, ", out], got ", W.sizes());
    total += in * W.size(3);
  }
  TORCH_CHECK_VALUE(!weights.empty() && weights.back().size(3) == D, "the last of `weights` must lead to ", D);
  Tensor y = at::empty(q.sizes(), q.options());
  for_each(G, total, [&](int64_t g) {
    Numbers x(numbers(q) + g * D, numbers(q) + (g + 1) * D);
    for (size_t i = 0; i < weights.size(); ++i) {
      const Tensor& W = weights[i];
      Numbers z(W.size(3), 0.f);
      const float* own = numbers(W) + g / H * W.stride(0) + g % H * W.stride(1);
      add_product(1, (i ? silu(x) : x).data(), W.size(2), own, W.size(3), z.data());
      x = std::move(z);
    }
    std::copy(x.begin(), x.end(), numbers(y) + g * D);
  });
  return y;
}

Tensor heads(const Tensor& extended, const Tensor& taps, int64_t streams, int64_t H, double least_value) {
  without_gradients({extended, taps});
  const int64_t B = extended.size(0), reach = taps.size(0), channels = extended.size(2), D = channels / (streams * H);
  TORCH_CHECK_VALUE(extended.scalar_type() == at::kFloat && taps.scalar_type() == at::kFloat &&
                        extended.stride(2) == 1 && extended.size(1) == reach && taps.size(1) == channels,
                    "`extended` must be float32 [B, ", reach, ", ", taps.size(1), "], got ", extended.sizes());
  Tensor y = at::empty({B, 1, streams * H, D}, extended.options());
  for (int64_t b = 0; b < B; ++b) {
    float* row = numbers(y) + b * channels;
    std::fill(row, row + channels, 0.f);
    for (int64_t tap = 0; tap < reach; ++tap) {
      const float* x = numbers(extended) + b * extended.stride(0) + tap * extended.stride(1);
      const float* weight = numbers(taps) + tap * taps.stride(0);
      for (int64_t c = 0; c < channels; ++c) row[c] += x[c] * weight[c * taps.stride(1)];
    }
    for (int64_t h = 0; h < streams * H; ++h) {
      float* head = row + h * D;
      for (int64_t i = 0; i < D; ++i) head[i] = silu(head[i]);
      const float least = h < 2 * H ? 1e-6 : least_value;  // queries and keys have length 1, values at most
      if (std::isinf(least)) continue;
      const float length = std::max(norm(head, D), least);
      for (int64_t i = 0; i < D; ++i) head[i] /= length;
    }
  }
  return y;
}

Tensor gates(const Tensor& logits_, double theta_max, double eta_max, bool forget) {
  without_gradients({logits_});
  const Tensor logits = logits_.contiguous();
  const int64_t B = logits.size(0), H = logits.size(2) / 3;
  check(logits, {B, 1, 3 * H}, "logits");
  Tensor found = at::empty({B, 1, 3, H}, logits.options());
  for (int64_t b = 0; b < B; ++b) {
    const float* x = numbers(logits) + b * 3 * H;
    float *theta = numbers(found) + b * 3 * H, *eta = theta + H, *alpha = eta + H;
    for (int64_t h = 0; h < H; ++h) {
      eta[h] = float(eta_max) * sigmoid(x[H + h]);
      theta[h] = float(theta_max) * sigmoid(x[h]) * (1 - eta[h]);
      alpha[h] = forget ? sigmoid(x[2 * H + h]) : 0;
    }
  }
  return found;
}

Tensor gated_norm(const Tensor& x_, const Tensor& weight, double eps, const std::optional<Tensor>& gate_) {
  without_gradients({x_, weight});
  const Tensor x = x_.contiguous(), gate = gate_ ? gate_->contiguous() : x;
  const int64_t D = weight.numel(), rows = x.numel() / D;
  check(x, x_.sizes(), "x");
  check(weight, {D}, "weight");
  TORCH_CHECK_VALUE(gate.numel() == x.numel() && gate.scalar_type() == at::kFloat, "`gate` must be like `x`");
  Tensor y = at::empty(gate.sizes(), x.options());
  for (int64_t r = 0; r < rows; ++r) {
    const float *in = numbers(x) + r * D, *open = numbers(gate) + r * D, *w = numbers(weight);
    float* out = numbers(y) + r * D;
    const float inverse = 1 / std::sqrt(dot(in, in, D) / D + float(eps));
    for (int64_t i = 0; i < D; ++i) out[i] = in[i] * inverse * w[i];
    if (!gate_) continue;
    for (int64_t i = 0; i < D; ++i) out[i] *= silu(open[i]);
  }
  return y;
}

// One query over its keys: the scores' softmax, then the values' mean by it.
struct Attention {
  const float *cos, *sin;  // of each key's angle, [K, D], or null where keys are turned already
  int64_t D;

  // q k^T for key j, which is turned here: pairs of channels i and i + D / 2 by one angle
  float score(const float* q, const float* k, int64_t j) const {
    if (cos == nullptr) return dot(q, k, D);
    const int64_t half = D / 2;
    const float *c = cos + j * D, *s = sin + j * D;
    Lanes along{};
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
      const Lanes &q1 = lanes(q + i), &q2 = lanes(q + half + i), &k1 = lanes(k + i), &k2 = lanes(k + half + i);
      along += lanes(c + i) * (k1 * q1 + k2 * q2) + lanes(s + i) * (k1 * q2 - k2 * q1);
    }
    float rest = 0;
    for (; i < half; ++i)
      rest += c[i] * (k[i] * q[i] + k[half + i] * q[half + i]) + s[i] * (k[i] * q[half + i] - k[half + i] * q[i]);
    return sum(along) + rest;
  }
};

void softmax(float* x, int64_t n) {
  const float most = *std::max_element(x, x + n);
  float total = 0;
  for (int64_t i = 0; i < n; ++i) total += x[i] = std::exp(x[i] - most);
  for (int64_t i = 0; i < n; ++i) x[i] /= total;
}

void turn(const float* x, const float* cos, const float* sin, int64_t D, float* y) {
  const int64_t half = D / 2;
  for (int64_t i = 0; i < half; ++i) {
    y[i] = x[i] * cos[i] - x[half + i] * sin[i];
    y[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
  }
}

Tensor rotate(const Tensor& x_, const Tensor& cos, const Tensor& sin) {
  without_gradients({x_, cos, sin});
  const Tensor x = x_.contiguous();
  const int64_t B = x.size(0), H = x.size(2), D = x.size(3), own = cos.numel() == D ? 0 : D;
  check(x, {B, 1, H, D}, "x");
  TORCH_CHECK_VALUE(D % 2 == 0 && (own == 0 || cos.numel() == B * D), "`cos` must be of one token for each row");
  check(cos, cos.sizes(), "cos");
  check(sin, cos.sizes(), "sin");
  Tensor y = at::empty(x.sizes(), x.options());
  for (int64_t g = 0; g < B * H; ++g)
    turn(numbers(x) + g * D, numbers(cos) + g / H * own, numbers(sin) + g / H * own, D, numbers(y) + g * D);
  return y;
}

Tensor attend(const Tensor& q_, const Tensor& k, const Tensor& v, const Tensor& first, double scaling,
              const std::optional<Tensor>& prefix_k_, const std::optional<Tensor>& prefix_v_,
              const std::optional<Tensor>& cos, const std::optional<Tensor>& sin) {
  without_gradients({q_, k, v});
  const Tensor q = q_.contiguous();
  const int64_t B = q.size(0), H = q.size(2), D = q.size(3), K = k.size(1), shared = H / k.size(2);
  const Tensor prefix_k = prefix_k_.value_or(k.narrow(1, 0, 0)), prefix_v = prefix_v_.value_or(v.narrow(1, 0, 0));
  const int64_t P = prefix_k.size(1);
  check(q, {B, 1, H, D}, "q");
  for (const Tensor& x : {k, v, prefix_k, prefix_v})
    TORCH_CHECK_VALUE(x.scalar_type() == at::kFloat && x.dim() == 4 && x.size(0) == B && x.size(2) * shared == H &&
                          x.size(3) == D && x.stride(3) == 1, "keys and values must be float32 [", B, ", keys, heads, ",
                      D, "], got ", x.sizes());
  TORCH_CHECK_VALUE(v.size(1) == K && prefix_v.size(1) == P, "there must be as many values as keys");
  TORCH_CHECK_VALUE(first.scalar_type() == at::kLong && first.is_contiguous() && first.numel() == B,
                    "`first` must be int64 [", B, "]");
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "`cos` and `sin` come together");
  if (cos) {
    TORCH_CHECK_VALUE(D % 2 == 0 && cos->numel() == K * D, "`cos` must have a row for each of ", K, " keys");
    check(*cos, cos->sizes(), "cos");
    check(*sin, cos->sizes(), "sin");
  }
  const Attention attention{cos ? numbers(*cos) : nullptr, sin ? numbers(*sin) : nullptr, D};
  Tensor y = at::zeros({B, 1, H * D}, q.options());
  const int64_t threads = K * H * D < WORTHWHILE ? 1 : std::min<int64_t>(at::get_num_threads(), H);
  for_each(B * threads, K * H * D / threads, [&](int64_t part) {
    const int64_t b = part / threads, start = part % threads * H / threads, end = (part % threads + 1) * H / threads;
    const int64_t from = std::clamp<int64_t>(first.data_ptr<int64_t>()[b], 0, K), all = P + K;
    const auto at = [&](const Tensor& x, int64_t j, int64_t h) {
      return numbers(x) + b * x.stride(0) + j * x.stride(1) + h / shared * x.stride(2);
    };
    Numbers turned(H * D), scores(H * all, -INFINITY);
    for (int64_t h = start; h < end; ++h) {
      const float* query = numbers(q) + (b * H + h) * D;
      if (cos) turn(query, attention.cos + (K - 1) * D, attention.sin + (K - 1) * D, D, &turned[h * D]);
      else std::copy_n(query, D, &turned[h * D]);
      for (int64_t j = 0; j < P; ++j) scores[h * all + j] = float(scaling) * dot(query, at(prefix_k, j, h), D);
    }
    for (int64_t j = from; j < K; ++j)  // heads inside: a token's keys lie side by side
      for (int64_t h = start; h < end; ++h)
        scores[h * all + P + j] = float(scaling) * attention.score(&turned[h * D], at(k, j, h), j);
    for (int64_t h = start; h < end; ++h) softmax(&scores[h * all], all);
    const auto add_value = [&](int64_t h, int64_t j, const float* value) {
      add(scores[h * all + j], value, D, numbers(y) + (b * H + h) * D);
    };
    for (int64_t j = 0; j < P; ++j)
      for (int64_t h = start; h < end; ++h) add_value(h, j, at(prefix_v, j, h));
    for (int64_t j = from; j < K; ++j)
      for (int64_t h = start; h < end; ++h) add_value(h, P + j, at(v, j, h));
  });
  return y;
}

// Whole modules: the operators above between their linear layers

// The products of x with four rows of W, [4, in]: one reading of x for all
void four_products(const float* x, const float* W, int64_t in, float* y) {
  Lanes a{}, b{}, c{}, d{};
  int64_t i = 0;
  for (; i + LANES <= in; i += LANES) {
    const Lanes& v = lanes(x + i);
    a += v * lanes(W + i);
    b += v * lanes(W + in + i);
    c += v * lanes(W + 2 * in + i);
    d += v * lanes(W + 3 * in + i);
  }
  const float found[] = {sum(a), sum(b), sum(c), sum(d)};
  for (int64_t r = 0; r < 4; ++r) y[r] = found[r] + dot(x + i, W + r * in + i, in - i);
}

// x W^T + b. For one row torch's product takes up to twice as long; from a few rows on it is the faster one.
Tensor project(const Tensor& x_, const Tensor& W, const std::optional<Tensor>& bias = std::nullopt) {
  constexpr int64_t FEW = 4, BLOCK = 4;
  const Tensor x = x_.contiguous();
  const int64_t in = W.size(1), out = W.size(0), rows = x.numel() / in;
  if (rows > FEW || !W.is_contiguous()) return at::linear(x, W, bias);
  auto sizes = x.sizes().vec();
  TORCH_CHECK_VALUE(sizes.back() == in, "a linear layer of ", in, " inputs got ", sizes.back());
  sizes.back() = out;
  check(W, {out, in}, "weight");
  if (bias) check(*bias, {out}, "bias");
  Tensor y = at::empty(sizes, x.options());
  for_each((out + BLOCK - 1) / BLOCK, BLOCK * in, [&](int64_t block) {
    const int64_t start = block * BLOCK, end = std::min(out, start + BLOCK);
    for (int64_t row = 0; row < rows; ++row) {
      const float* from = numbers(x) + row * in;
      float* to = numbers(y) + row * out;
      if (end - start == BLOCK) four_products(from, numbers(W) + start * in, in, to + start);
      else for (int64_t r = start; r < end; ++r) to[r] = dot(from, numbers(W) + r * in, in);
      for (int64_t r = start; bias && r < end; ++r) to[r] += numbers(*bias)[r];
    }
  });
  return y;
}

// A token's streams [B, 1, channels] side by side into the last slot of [B, tokens, ...]
void fill_last(const Tensor& extended, std::initializer_list<Tensor> streams) {
  const int64_t B = extended.size(0), last = extended.size(1) - 1;
  TORCH_CHECK_VALUE(extended.scalar_type() == at::kFloat && extended[0][0].is_contiguous(),
                    "a tail's tokens must be contiguous float32");
  int64_t place = 0;
  for (const Tensor& x_ : streams) {
    const Tensor x = x_.contiguous();
    const int64_t channels = x.numel() / B;
    for (int64_t b = 0; b < B; ++b)
      std::copy_n(numbers(x) + b * channels, channels,
                  numbers(extended) + b * extended.stride(0) + last * extended.stride(1) + place);
    place += channels;
  }
  TORCH_CHECK_VALUE(place == extended[0][0].numel(), "a tail's tokens must have ", place, " channels");
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> remember(
    const Tensor& x, const Tensor& W_q, const std::optional<Tensor>& W_k, const Tensor& W_v, const Tensor& W_gates,
    const Tensor& b_gates, const Tensor& W_open, const Tensor& W_out, const Tensor& taps, const Tensor& norm_weight,
    const Tensor& extended, at::TensorList layers, const Tensor& slots, const Tensor& old_M, const Tensor& old_S,
    int64_t t, int64_t H, double least_value, double theta_max, double eta_max, bool forget, double eps,
    double max_surprise, bool normalised, double hidden_step, bool delta) {
  const Tensor q = project(x, W_q);
  fill_last(extended, {q, W_k ? project(x, *W_k) : q, project(x, W_v)});
  const Tensor qkv = heads(extended, taps, 3, H, least_value);
  const Tensor k = qkv.narrow(2, H, H), v = qkv.narrow(2, 2 * H, H);
  const Tensor found = gates(project(x, W_gates, b_gates), theta_max, eta_max, forget);
  const auto [y, of_M, of_S] =
      step(qkv.narrow(2, 0, H), k, v, found.select(2, 0), found.select(2, 1), found.select(2, 2), layers, slots, old_M,
           old_S, t, max_surprise, normalised, hidden_step, delta);
  const Tensor out = project(gated_norm(y, norm_weight, eps, project(x, W_open)), W_out);
  return {out, k, v, found, of_M, of_S};
}

Tensor retrieve(const Tensor& x, const Tensor& W_q, const Tensor& W_out, const Tensor& taps, const Tensor& norm_weight,
                const Tensor& extended, at::TensorList weights, int64_t H, double eps) {
  fill_last(extended, {project(x, W_q)});
  const Tensor y = gated_norm(recall(weights, heads(extended, taps, 1, H, INFINITY)), norm_weight, eps, std::nullopt);
  return project(y.flatten(2), W_out);
}

// Weights and biases of the projections to queries, keys, values and from heads
using Projections = const c10::List<std::optional<Tensor>>&;

Tensor projected(const Tensor& x, Projections weights, int64_t i) {
  return project(x, *weights.get(2 * i), weights.get(2 * i + 1));
}

Tensor in_heads(const Tensor& x, int64_t D) { return x.unflatten(-1, {-1, D}); }

Tensor slide(const Tensor& x, Projections weights, const Tensor& k, const Tensor& v, const Tensor& first,
             double scaling, const std::optional<Tensor>& prefix_k, const std::optional<Tensor>& prefix_v,
             const std::optional<Tensor>& cos, const std::optional<Tensor>& sin) {
  fill_last(k, {projected(x, weights, 1)});
  fill_last(v, {projected(x, weights, 2)});
  const Tensor q = in_heads(projected(x, weights, 0), k.size(3));
  return projected(attend(q, k, v, first, scaling, prefix_k, prefix_v, cos, sin), weights, 3);
}

Tensor segment(const Tensor& x, const Tensor& h, Projections weights, const Tensor& k, const Tensor& v,
               const Tensor& first, double scaling, const std::optional<Tensor>& prefix_k,
               const std::optional<Tensor>& prefix_v, const Tensor& cos_h, const Tensor& sin_h, const Tensor& cos,
               const Tensor& sin) {
  const auto turned = [&](const Tensor& y, int64_t i, const Tensor& c, const Tensor& s) {
    return rotate(in_heads(projected(y, weights, i), k.size(4)), c, s);
  };
  fill_last(k, {turned(h, 1, cos_h, sin_h), turned(x, 1, cos, sin)});
  fill_last(v, {projected(h, weights, 2), projected(x, weights, 2)});
  const Tensor y = attend(turned(x, 0, cos, sin), k.flatten(1, 2), v.flatten(1, 2), first, scaling, prefix_k, prefix_v,
                          std::nullopt, std::nullopt);
  return projected(y, weights, 3);
}

Tensor feed_forward(const Tensor& x, Projections weights) {
  const Tensor up = projected(x, weights, 1), y = projected(x, weights, 0).contiguous();
  check(y, up.sizes(), "gate_proj(x)");
  for (int64_t i = 0; i < y.numel(); ++i) numbers(y)[i] = silu(numbers(y)[i]) * numbers(up)[i];
  return projected(y, weights, 2);
}

TORCH_LIBRARY(titans_cpu, library) {
  // `memory_step.ChunkWriter.write` and `read`: fills slot t of `layers` and `slots`
  library.def(
      "step(Tensor q, Tensor k, Tensor v, Tensor theta, Tensor eta, Tensor alpha, Tensor(a!)[] layers, "
      "Tensor(b!) slots, Tensor of_M, Tensor of_S, int t, float max_surprise, bool normalised, float hidden_step, "
      "bool delta) -> (Tensor, Tensor, Tensor)",
      &step);
  // `memory_ops.recall`
  library.def("recall(Tensor[] weights, Tensor q) -> Tensor", &recall);
  // `NeuralMemory._heads`: convolution, SiLU and length
  library.def("heads(Tensor extended, Tensor taps, int streams, int heads, float least_value) -> Tensor", &heads);
  // `WriteGates.forward` behind its projection
  library.def("gates(Tensor logits, float theta_max, float eta_max, bool forget) -> Tensor", &gates);
  // `TitansRMSNorm.forward`, and with a gate `GatedNorm.forward`
  library.def("gated_norm(Tensor x, Tensor weight, float eps, Tensor? gate=None) -> Tensor", &gated_norm);
  // `attention_titans.rotate`
  library.def("rotate(Tensor x, Tensor cos, Tensor sin) -> Tensor", &rotate);
  // `SlidingAttention._one_token` and `SegmentAttention.forward`: a row sees the prefix and its keys from `first` on.
  // With cosines and sines, keys and query are turned here, but not against each other where the prefix is concerned.
  library.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor first, float scaling, Tensor? prefix_k=None, Tensor? prefix_v=None, "
      "Tensor? cos=None, Tensor? sin=None) -> Tensor",
      &attend);
  // `NeuralMemory.forward`: returns its output, the token as it was written (keys, values, gates), and the shares
  library.def(
      "remember(Tensor x, Tensor W_q, Tensor? W_k, Tensor W_v, Tensor W_gates, Tensor b_gates, Tensor W_open, Tensor "
      "W_out, Tensor taps, Tensor norm, Tensor(a!) extended, Tensor(b!)[] layers, Tensor(c!) slots, Tensor of_M, Tensor "
      "of_S, int t, int heads, float least_value, float theta_max, float eta_max, bool forget, float eps, float "
      "max_surprise, bool normalised, float hidden_step, bool delta) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
      "Tensor)",
      &remember);
  // `NeuralMemory.queries` and `retrieve` (Eq. 21)
  library.def(
      "retrieve(Tensor x, Tensor W_q, Tensor W_out, Tensor taps, Tensor norm, Tensor(a!) extended, Tensor[] weights, "
      "int heads, float eps) -> Tensor",
      &retrieve);
  // `SlidingAttention.forward`; weights and biases are those of the projections to queries, keys, values, and back
  library.def(
      "slide(Tensor x, Tensor?[] weights, Tensor(a!) k, Tensor(b!) v, Tensor first, float scaling, Tensor? prefix_k, "
      "Tensor? prefix_v, Tensor? cos, Tensor? sin) -> Tensor",
      &slide);
  // `MemoryAsContext._piece` up to what attention says (Eqs. 22 and 23), with h the retrieved token
  library.def(
      "segment(Tensor x, Tensor h, Tensor?[] weights, Tensor(a!) k, Tensor(b!) v, Tensor first, float scaling, Tensor? "
      "prefix_k, Tensor? prefix_v, Tensor cos_h, Tensor sin_h, Tensor cos, Tensor sin) -> Tensor",
      &segment);
  // `TitansMLP.forward` with SiLU
  library.def("feed_forward(Tensor x, Tensor?[] weights) -> Tensor", &feed_forward);
}

}  // namespace
