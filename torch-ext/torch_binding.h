// The operators of the native CPU backend, on torch's stable ABI (2.10). Defined in torch_binding.cpp.
//
// They trust their caller (ops/*/cpu.py) for shapes and dtypes that the operations' argument checks have passed, and
// check what they read memory by. All results are contiguous and new.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace layout_kernels {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

Tensor cpu_rms_norm(Tensor x, OptionalTensor weight, double eps, int64_t flavour);

// (dx, dweight in fp32); an empty tensor where `need_*` is false.
std::tuple<Tensor, Tensor> cpu_rms_norm_backward(Tensor grad, Tensor x, OptionalTensor weight, double eps,
                                                 int64_t flavour, bool need_x, bool need_weight);

Tensor cpu_gated_activation(Tensor gate_up, int64_t activation);

Tensor cpu_gated_activation_backward(Tensor grad, Tensor gate_up, int64_t activation);

// group_size 0: the whole width. order 0: gate_then_norm, 1: norm_then_gate. activation 0: silu, 1: sigmoid.
Tensor cpu_gated_rms_norm(Tensor x, Tensor gate, OptionalTensor weight, double eps, int64_t flavour, int64_t order,
                          int64_t group_size, int64_t activation);

// (dx, dgate, dweight in fp32); dweight is empty where not needed.
std::tuple<Tensor, Tensor, Tensor> cpu_gated_rms_norm_backward(Tensor grad, Tensor x, Tensor gate,
                                                               OptionalTensor weight, double eps, int64_t flavour,
                                                               int64_t order, int64_t group_size, int64_t activation,
                                                               bool need_weight);

Tensor cpu_linear(Tensor x, Tensor weight, OptionalTensor bias);

Tensor cpu_rms_norm_mlp(Tensor x, OptionalTensor norm_weight, Tensor gate_up, Tensor down, double eps, int64_t flavour,
                        int64_t activation, OptionalTensor gate_up_bias, OptionalTensor down_bias);

}  // namespace layout_kernels
