"""Device functions that the Triton kernels share: where a row lies, precise roots, activations and their slopes."""

# Device functions: Triton reads no annotations but constexpr, names its constants in capitals, takes `else` after a
# return of another type only.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: N803, RET505

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offsets(row, middle, inner, stride_outer, stride_middle, stride_inner):
    """Offsets, in 64 bits, of rows that three dimensions number. Sizes and strides of 1 fold away."""
    rest = row // inner
    outer = (rest // middle).to(tl.int64) * stride_outer
    return outer + (rest % middle).to(tl.int64) * stride_middle + (row % inner).to(tl.int64) * stride_inner


@triton.jit
def column_offsets(column, stride, UNIT: tl.constexpr):
    """Offsets along a row: 32 bits where its elements are neighbours, which loads as vectors; else 64."""
    if UNIT:
        return column
    else:
        return column.to(tl.int64) * stride


@triton.jit
def reciprocal_rms(squares, width, eps):
    """1 / sqrt(squares / width + eps), for a sum of squares, nearly always correctly rounded; and what that leaves.

    The approximate instruction is off by more than one ulp and takes values below the normal range for zero. So these
    are lifted by 2^64, and a step of Newton's corrects it, which also brings in what the quotient and the sum with eps
    round off. Divisions and roots that are rounded correctly would call slow paths, which costs registers.
    """
    count = tl.zeros_like(squares) + width
    inverse = 1.0 / count
    mean = squares * inverse
    rest = tl.fma(-mean, count, squares) * inverse
    value = mean + eps
    added = value - mean
    rest += (mean - (value - added)) + (eps - added)
    lift = tl.where(value < 1e-30, 18446744073709551616.0, 1.0)
    value *= lift
    root = tl.rsqrt(value)
    product = value * root
    left = tl.fma(-product, root, 1.0) - tl.fma(value, root, -product) * root - rest * lift * root * root
    step = 0.5 * left * root
    regular = (value > 0.0) & (value < float("inf"))
    back = tl.where(lift == 1.0, 1.0, 4294967296.0)
    result = tl.where(regular, root + step, root)
    return result * back, tl.where(regular, step - (result - root), 0.0) * back


@triton.jit
def normalise(x, rstd, low, dtype: tl.constexpr):
    """x / rms in float32, with what rounding left of 1 / rms where the result shows it."""
    if dtype == tl.float32:
        return tl.fma(x, rstd, x * low)
    else:
        return x * rstd


@triton.jit
def sigmoid(value):
    """1 / (1 + exp(-value)); 0 where exp overflows."""
    return 1.0 / (1.0 + tl.exp(-value))


@triton.jit
def tanh(value):
    """By an exponential that cannot overflow: exact limits at both ends, and odd around 0."""
    size = tl.exp(-2.0 * tl.abs(value))
    part = (1.0 - size) / (1.0 + size)
    return tl.where(value < 0, -part, part)


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """silu, gelu (exact, by erf), gelu_tanh or sigmoid, of float32."""
    if ACTIVATION == "silu":
        return gate * sigmoid(gate)
    elif ACTIVATION == "sigmoid":
        return sigmoid(gate)
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1.0 + tanh(inner))


@triton.jit
def slope(gate, ACTIVATION: tl.constexpr):
    """The derivative of `activate`."""
    if ACTIVATION == "silu":
        part = sigmoid(gate)
        return part + gate * part * (1.0 - part)
    elif ACTIVATION == "sigmoid":
        part = sigmoid(gate)
        return part * (1.0 - part)
    elif ACTIVATION == "gelu":
        density = tl.exp(-0.5 * gate * gate) * 0.3989422804014327
        return 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) + gate * density
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        part = tanh(inner)
        growth = 0.7978845608028654 * (1.0 + 0.134145 * gate * gate)
        return 0.5 * (1.0 + part) + 0.5 * gate * (1.0 - part * part) * growth
