// Gated activation, forward and backward, for one level. Included by level.inl.

namespace {

constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kInverseSqrtTwoPi = 0.39894228040143268f;
constexpr float kSqrtTwoOverPi = 0.79788456080286536f;
constexpr float kGeluCubic = 0.044715f;

template <Activation act>
LK_INLINE VF activate(VF x) {
  if (act == Activation::silu) return x / (1.0f + vexp(-x));
  if (act == Activation::gelu) return 0.5f * x * one_plus_erf(x * kSqrtHalf);
  // 0.5 (1 + tanh u) = sigmoid(2u)
  VF u = kSqrtTwoOverPi * (x + kGeluCubic * x * x * x);
  return x * sigmoid(2.0f * u);
}

template <Activation act>
LK_INLINE VF activate_derivative(VF x) {
  if (act == Activation::silu) {
    VF s = sigmoid(x);
    return s * (1.0f + x * (1.0f - s));
  }
  if (act == Activation::gelu) {
    return 0.5f * one_plus_erf(x * kSqrtHalf) + x * kInverseSqrtTwoPi * vexp(-0.5f * x * x);
  }
  VF s = sigmoid(2.0f * kSqrtTwoOverPi * (x + kGeluCubic * x * x * x));
  VF du = kSqrtTwoOverPi * (1.0f + 3.0f * kGeluCubic * x * x);
  return s + x * 2.0f * s * (1.0f - s) * du;
}

template <class T, Activation act>
void gated_rows(const GatedActivationArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* gate = static_cast<const T*>(a.gate_up) + offset_of_row(a.gate_up_rows, r);
    const T* up = gate + a.width;
    T* y = static_cast<T*>(a.y) + r * a.width;
    each_vector(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      put(y + i, round_to<T>(activate<act>(get(gate + i, n))) * get(up + i, n), n);
    });
  }
}

template <class T, Activation act>
void gated_backward_rows(const GatedActivationArgs& a, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    const T* gate = static_cast<const T*>(a.gate_up) + offset_of_row(a.gate_up_rows, r);
    const T* up = gate + a.width;
    const T* dy = static_cast<const T*>(a.dy) + offset_of_row(a.dy_rows, r);
    T* dgate = static_cast<T*>(a.y) + r * 2 * a.width;
    T* dup = dgate + a.width;
    each_vector(a.width, [&](int64_t i, int64_t n) __attribute__((always_inline)) {
      VF g = get(gate + i, n), d = get(dy + i, n);
      put(dgate + i, d * get(up + i, n) * activate_derivative<act>(g), n);
      put(dup + i, d * round_to<T>(activate<act>(g)), n);
    });
  }
}

template <class T>
void gated_activation_from(const GatedActivationArgs& a, int64_t begin, int64_t end) {
  if (a.activation == Activation::silu) return gated_rows<T, Activation::silu>(a, begin, end);
  if (a.activation == Activation::gelu) return gated_rows<T, Activation::gelu>(a, begin, end);
  gated_rows<T, Activation::gelu_tanh>(a, begin, end);
}

template <class T>
void gated_activation_backward_from(const GatedActivationArgs& a, int64_t begin, int64_t end) {
  if (a.activation == Activation::silu) return gated_backward_rows<T, Activation::silu>(a, begin, end);
  if (a.activation == Activation::gelu) return gated_backward_rows<T, Activation::gelu>(a, begin, end);
  gated_backward_rows<T, Activation::gelu_tanh>(a, begin, end);
}

void gated_activation_level(const GatedActivationArgs& a, int64_t begin, int64_t end) {
  if (a.type == DType::bf16) return gated_activation_from<BF16>(a, begin, end);
  if (a.type == DType::f16) return gated_activation_from<F16>(a, begin, end);
  gated_activation_from<float>(a, begin, end);
}

void gated_activation_backward_level(const GatedActivationArgs& a, int64_t begin, int64_t end) {
  if (a.type == DType::bf16) return gated_activation_backward_from<BF16>(a, begin, end);
  if (a.type == DType::f16) return gated_activation_backward_from<F16>(a, begin, end);
  gated_activation_backward_from<float>(a, begin, end);
}

}  // namespace
