"""Faults in the kernels for devices: Triton, torch_npu, C++."""

from __future__ import annotations

from tools.mutation.fault import Fault

PACKAGE = "torch-ext/layout_kernels/**/*.py"
OPS = "torch-ext/layout_kernels/ops"
TRITON = ("**/interpreted/test_kernels.py", "**/interpreted/test_cases.py")
LEVELS = ("native/test_every_level.py",)

DEVICES = (
    Fault(
        "Triton: one_plus_scale forgets the one",
        f"{OPS}/rms_norm/triton.py",
        "return normalised * (1.0 + scale)",
        "return normalised * scale",
        TRITON,
    ),
    Fault(
        "Triton: a loop over a wide row reads one element too many",
        f"{OPS}/rms_norm/triton.py",
        "            mask=column < width,\n            other=0.0,\n",
        "            mask=column <= width,\n            other=0.0,\n",
        TRITON,
    ),
    Fault(
        "Triton: the rows that a tile lacks are not masked",
        f"{OPS}/rms_norm/triton.py",
        "mask &= (row < rows)[:, None]",
        "mask &= (row <= rows)[:, None]",
        TRITON,
    ),
    Fault(
        "Triton: the order of gate and norm is inverted",
        f"{OPS}/gated_rms_norm/triton.py",
        "    if not GATE_FIRST:\n        out *= opened",
        "    if GATE_FIRST:\n        out *= opened",
        TRITON,
    ),
    Fault(
        "Triton: up's bias is gate's",
        f"{OPS}/rms_norm_mlp/triton.py",
        "place = (size + output).to(tl.int64) * stride_bias",
        "place = output.to(tl.int64) * stride_bias",
        TRITON,
    ),
    Fault(
        "Triton: the offset of a row has 32 bits",
        PACKAGE,
        "(row % inner).to(tl.int64) * stride_inner",
        "(row % inner) * stride_inner",
        ("**/interpreted/test_offsets.py",),
    ),
    Fault(
        "Triton: a row's place is one off along its middle dimension",
        PACKAGE,
        "(rest % middle).to(tl.int64) * stride_middle",
        "((rest + 1) % middle).to(tl.int64) * stride_middle",
        ("**/interpreted/test_offsets.py", *TRITON),
    ),
    Fault(
        "NPU: a float32 weight beside half precision is rounded first",
        f"{OPS}/rms_norm/npu.py",
        "elif weight.dtype is x.dtype or x.dtype is torch.float32:",
        'elif weight.dtype is x.dtype or x.dtype is torch.float32 or flavour == "scale_then_cast":',
        ("**/simulated/test_operations.py",),
    ),
)

CPP = (
    Fault(
        "C++: the last element of a row's tail is left out",
        "kernel-src/norm.inl",
        "if (i < width) body(i, width - i);",
        "if (i + 1 < width) body(i, width - i);",
        LEVELS,
    ),
    Fault(
        "C++: a norm's eps is dropped",
        "kernel-src/norm.inl",
        "squares / (double)width + (double)eps",
        "squares / (double)width",
        LEVELS,
    ),
    Fault(
        "C++: the tail of a sum of squares is left out",
        "kernel-src/norm.inl",
        "  for (; i < width; i += W) {\n    VF v = get(x + i, width - i < W ? width - i : W);",
        "  for (; i + W <= width; i += W) {\n    VF v = get(x + i, width - i < W ? width - i : W);",
        LEVELS,
    ),
    Fault(
        "C++: the last element of k is left out of a product",
        "kernel-src/product.inl",
        "if (i < k) register_step<E, MR, NR>",
        "if (i + 1 < k) register_step<E, MR, NR>",
        LEVELS,
    ),
    Fault(
        "C++: the last bias of an MLP is dropped",
        "kernel-src/products.cpp",
        "down.bias = a.down_bias",
        "down.bias = nullptr",
        LEVELS,
    ),
    Fault(
        "C++: an activation is not rounded before its product",
        "kernel-src/activation.inl",
        "round_to<T>(activate<act>(get(gate + i, n)))",
        "activate<act>(get(gate + i, n))",
        ("native/test_roundings.py",),
    ),
    Fault(
        "C++: a packed panel lacks its eighth row",
        "kernel-src/packed.inl",
        "r < 8 && r < rows",
        "r < 7 && r < rows",
        LEVELS,
    ),
    Fault(
        "C++: a bias of another length is read",
        "torch-ext/torch_binding.cpp",
        "b->dim() == 1 && b->sizes()[0] == size &&",
        "b->dim() == 1 &&",
        ("native/test_extension.py",),
    ),
)

FAULTS = (*DEVICES, *CPP)
