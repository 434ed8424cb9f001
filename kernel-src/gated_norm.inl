// The gated, grouped RMSNorm of Mamba's mixers, forward and backward, for one level. Included by level.inl.

namespace {

LK_INLINE VF open_gate(const GatedNormArgs& a, VF gate) {
  return a.sigmoid ? sigmoid(gate) : gate / (1.0f + vexp(-gate));
}

LK_INLINE VF open_gate_derivative(const GatedNormArgs& a, VF gate) {
  VF s = sigmoid(gate);
  return a.sigmoid ? s * (1.0f - s) : s * (1.0f + gate * (1.0f - s));
}

// What is normalised: x, or x * act(gate).
template <class X, class G>
LK_INLINE VF gated_input(const GatedNormArgs& a, const X* x, const G* gate, int64_t i, int64_t n) {
  VF v = get(x + i, n);
  return a.gate_first ? v * open_gate(a, get(gate + i, n)) : v;
}

template <class X, class G>
LK_INLINE float gated_inverse_rms(const GatedNormArgs& a, const X* x, const G* gate) {
  VF squares = {};
  each_vector(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    VF v = gated_input(a, x, gate, i, n);
    squares += v * v;
  });
  return inverse_rms(sum_in_double(squares), a.width, a.eps);
}

template <class X>
LK_INLINE VF scaled(const GatedNormArgs& a, VF norm, const float* scale, int64_t i, int64_t n) {
  if (a.round_first) norm = round_to<X>(norm);
  if (scale != nullptr) norm = norm * get(scale + i, n);
  return a.round_scaled ? round_to<X>(norm) : norm;
}

// A gated row up to this width is kept, so that the gate is opened once.
constexpr int64_t kGatedRow = 4096;

template <class X, class G, class Y>
void gated_norm_group(const GatedNormArgs& a, const X* x, const G* gate, const float* scale, Y* y) {
  if (a.gate_first && a.width <= kGatedRow) {
    alignas(64) float row[kGatedRow];
    VF squares = {};
    each_vector(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      VF v = gated_input(a, x, gate, i, n);
      squares += v * v;
      put(row + i, v, n);
    });
    float r = inverse_rms(sum_in_double(squares), a.width, a.eps);
    each_vector(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      put(y + i, scaled<X>(a, get(row + i, n) * r, scale, i, n), n);
    });
    return;
  }
  float r = gated_inverse_rms(a, x, gate);
  each_vector(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    VF v = scaled<X>(a, gated_input(a, x, gate, i, n) * r, scale, i, n);
    if (!a.gate_first) v = v * open_gate(a, get(gate + i, n));
    put(y + i, v, n);
  });
}

// With out = scaled(norm(x)) * act: dgate = dy * scaled * act', and dy * act goes into the norm. With out =
// scaled(norm(u)), u = x * act: the norm's gradient du gives dx = du * act and dgate = du * x * act'.
template <class X, class G, class Y>
void gated_norm_group_backward(const GatedNormArgs& a, const X* x, const G* gate, const Y* dy, const float* scale,
                               X* dx, G* dgate, float* dscale) {
  float r = gated_inverse_rms(a, x, gate);
  VF dot = {};
  each_vector(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    VF norm = gated_input(a, x, gate, i, n) * r, g = get(dy + i, n);
    if (!a.gate_first) g = g * open_gate(a, get(gate + i, n));
    if (dscale != nullptr) put(dscale + i, get(dscale + i, n) + g * (a.round_first ? round_to<X>(norm) : norm), n);
    if (scale != nullptr) g = g * get(scale + i, n);
    dot += g * norm;
  });
  float mean = sum(dot) / (float)a.width;
  each_vector(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
    VF z = get(gate + i, n), open = open_gate(a, z), slope = open_gate_derivative(a, z);
    VF norm = gated_input(a, x, gate, i, n) * r, d = get(dy + i, n), g = d;
    if (!a.gate_first) g = g * open;
    if (scale != nullptr) g = g * get(scale + i, n);
    VF du = (g - norm * mean) * r;
    VF dz = a.gate_first ? du * get(x + i, n) * slope : d * scaled<X>(a, norm, scale, i, n) * slope;
    put(dx + i, a.gate_first ? du * open : du, n);
    put(dgate + i, dz, n);
  });
}

template <class X, class G, class Y>
void gated_norm_rows(const GatedNormArgs& a, int64_t begin, int64_t end, float* dscale) {
  for (int64_t i = begin * a.groups; i < end * a.groups; ++i) {
    int64_t at = i * a.width, in_row = i % a.groups * a.width;
    const X* x = static_cast<const X*>(a.x) + at;
    const G* gate = static_cast<const G*>(a.gate) + at;
    const float* scale = a.scale ? a.scale + in_row : nullptr;
    if (a.dy == nullptr) {
      gated_norm_group<X, G, Y>(a, x, gate, scale, static_cast<Y*>(a.y) + at);
    } else {
      gated_norm_group_backward<X, G, Y>(a, x, gate, static_cast<const Y*>(a.dy) + at, scale,
                                         static_cast<X*>(a.dx) + at, static_cast<G*>(a.dgate) + at,
                                         dscale ? dscale + in_row : nullptr);
    }
  }
}

template <class X, class G>
void gated_norm_to(const GatedNormArgs& a, int64_t begin, int64_t end, float* dscale) {
  if (a.y_type == DType::f32) return gated_norm_rows<X, G, float>(a, begin, end, dscale);
  gated_norm_rows<X, G, X>(a, begin, end, dscale);
}

template <class X>
void gated_norm_from(const GatedNormArgs& a, int64_t begin, int64_t end, float* dscale) {
  if (a.gate_type == DType::bf16) return gated_norm_to<X, BF16>(a, begin, end, dscale);
  if (a.gate_type == DType::f16) return gated_norm_to<X, F16>(a, begin, end, dscale);
  gated_norm_to<X, float>(a, begin, end, dscale);
}

void gated_norm_backward_level(const GatedNormArgs& a, int64_t begin, int64_t end, float* dscale) {
  if (a.x_type == DType::bf16) return gated_norm_from<BF16>(a, begin, end, dscale);
  if (a.x_type == DType::f16) return gated_norm_from<F16>(a, begin, end, dscale);
  gated_norm_from<float>(a, begin, end, dscale);
}

void gated_norm_level(const GatedNormArgs& a, int64_t begin, int64_t end) {
  gated_norm_backward_level(a, begin, end, nullptr);
}

}  // namespace
