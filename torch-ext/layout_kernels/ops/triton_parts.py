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
def reciprocal_root(value):
    """1 / sqrt(value) to half an ulp: correctly rounded steps, and one step of Newton's with what they left over.

    The approximate instruction is off by more than one ulp, and takes a value below the normal range for zero.
    """
    root = tl.div_rn(1.0, tl.sqrt_rn(value))
    product = value * root
    left = tl.fma(-product, root, 1.0) - tl.fma(value, root, -product) * root
    return tl.where((value > 0.0) & (value < float("inf")), tl.fma(0.5 * left, root, root), root)


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
