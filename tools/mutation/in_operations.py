"""Faults in the operations: references, operators, and how rows lie in memory."""

from __future__ import annotations

from tools.mutation.fault import Fault

PACKAGE = "torch-ext/layout_kernels/**/*.py"
OPS = "torch-ext/layout_kernels/ops"
STOCK = ("**/test_equals_transformers.py",)

REFERENCES = (
    Fault(
        "one_plus_scale forgets the one",
        f"{OPS}/rms_norm/reference.py",
        "(1.0 + weight.to(normalised.dtype))",
        "weight.to(normalised.dtype)",
        STOCK,
    ),
    Fault(
        "scale_then_cast rounds before it scales",
        f"{OPS}/rms_norm/reference.py",
        "out = (weight * normalised).to(x.dtype)",
        "out = (weight * normalised.to(x.dtype)).to(x.dtype)",
        STOCK,
    ),
    Fault(
        "eps is added outside of the root",
        f"{OPS}/rms_norm/reference.py",
        "torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + eps)",
        "torch.rsqrt(rows.pow(2).mean(-1, keepdim=True)) + eps",
        STOCK,
    ),
    Fault(
        "a weight's gradient sums the norm as it was before it was rounded",
        f"{OPS}/rms_norm/reference.py",
        'factor = normalised.to(x.dtype) if flavour == "cast_then_scale" else normalised',
        "factor = normalised",
        ("**/test_gradients.py",),
    ),
    Fault(
        "a norm's gradient lacks its projection",
        f"{OPS}/rms_norm/reference.py",
        "grad_x = rstd * (grad - normalised * (grad * normalised).mean(-1, keepdim=True))",
        "grad_x = rstd * grad",
        ("**/test_gradients.py",),
    ),
    Fault(
        "gate and up are swapped",
        f"{OPS}/rms_norm_mlp/reference.py",
        "gate_weight, up_weight = gate_up.chunk(2, dim=0)",
        "up_weight, gate_weight = gate_up.chunk(2, dim=0)",
        STOCK,
    ),
    Fault(
        "the last product drops its bias",
        f"{OPS}/rms_norm_mlp/reference.py",
        "* up, down, down_bias).contiguous()",
        "* up, down).contiguous()",
        STOCK,
    ),
    Fault(
        "gelu takes the approximation of gelu_tanh",
        f"{OPS}/gated_activation/reference.py",
        'approximate="tanh" if activation == "gelu_tanh" else "none"',
        'approximate="tanh"',
        STOCK,
    ),
    Fault(
        "a gated norm rounds once too few",
        f"{OPS}/gated_rms_norm/reference.py",
        "        normalised = normalised.to(dtype)\n",
        "        pass\n",
        STOCK,
    ),
    Fault(
        "a gated norm is taken over the whole row instead of its groups",
        f"{OPS}/gated_rms_norm/reference.py",
        "rows.unflatten(-1, (-1, group_size or rows.shape[-1]))",
        "rows.unflatten(-1, (-1, rows.shape[-1]))",
        STOCK,
    ),
    Fault(
        "linear drops its bias",
        f"{OPS}/linear/reference.py",
        "functional.linear(x, weight, bias)",
        "functional.linear(x, weight)",
        ("numerics/test_suites.py",),
    ),
)

OPERATORS = (
    Fault(
        "a recorded MLP drops the bias of gate and up",
        f"{OPS}/rms_norm_mlp/operator.py",
        "functional.linear(normed, gate_up, gate_up_bias)",
        "functional.linear(normed, gate_up)",
        ("**/test_gradients.py",),
    ),
    Fault(
        "a fast path takes projections of two dtypes",
        f"{OPS}/rms_norm_mlp/operator.py",
        "        and down.dtype is dtype\n",
        "",
        ("ops/test_fits.py",),
    ),
    Fault(
        "autocast converts float64",
        f"{OPS}/rms_norm_mlp/operator.py",
        "if not isinstance(tensor, torch.Tensor) or tensor.dtype is torch.float64:",
        "if not isinstance(tensor, torch.Tensor):",
        ("ops/test_gradients.py", "ops/test_mlp_of_parts.py"),
    ),
    Fault(
        "a fast path takes an infinite eps",
        f"{OPS}/rms_norm/operator.py",
        "and 0.0 <= eps < math.inf",
        "and 0.0 <= eps",
        ("ops/test_fits.py",),
    ),
    Fault(
        "FLOPs of a product are counted by half",
        f"{OPS}/rms_norm_mlp/operator.py",
        "return 2 * math.prod(x[:-1])",
        "return math.prod(x[:-1])",
        ("ops/test_flops.py",),
    ),
    Fault(
        "FLOPs of a compiled MLP lack its last product",
        f"{OPS}/rms_norm_mlp/of_parts.py",
        "products(x, gate, up, down),",
        "products(x, gate, up),",
        ("ops/test_flops.py",),
    ),
    Fault(
        "a trained MLP in a graph drops up's bias",
        f"{OPS}/rms_norm_mlp/of_parts.py",
        "functional.linear(x.to(up.dtype), up, up_bias)",
        "functional.linear(x.to(up.dtype), up)",
        ("ops/test_mlp_of_parts.py",),
    ),
    Fault(
        "a stale block: the address of a part is not compared",
        PACKAGE,
        "if part.data_ptr() != address or part.shape != shape",
        "if part.shape != shape",
        ("ops/test_adjacent.py",),
    ),
    Fault(
        "a stale block: the shape of a part is not compared",
        PACKAGE,
        "or part.shape != shape or",
        "or",
        ("ops/test_adjacent.py",),
    ),
    Fault(
        "memory that something else holds is moved",
        PACKAGE,
        '"" if even_if_held or not any(map(is_held_elsewhere, parts)) else "held"',
        '""',
        ("**/test_stock_to_holders_of_memory.py",),
    ),
    Fault(
        "one more holder of memory goes unnoticed",
        PACKAGE,
        "return _holders(part) != _ALONE\n",
        "return _holders(part)[0] > _ALONE[0] + 1\n",
        ("ops/test_adjacent.py", "**/test_stock_to_holders_of_memory.py"),
    ),
    Fault(
        "a block outlives its parameters",
        PACKAGE,
        "_blocks.pop(self.address, None)",
        "pass",
        ("ops/test_adjacent.py",),
    ),
    Fault(
        "gradients of gate and up share their memory",
        PACKAGE,
        "[part.clone() for part in grad.split(sizes)]",
        "list(grad.split(sizes))",
        ("ops/test_joined.py", "**/test_stock_to_holders_of_memory.py"),
    ),
)

FAULTS = (*REFERENCES, *OPERATORS)
