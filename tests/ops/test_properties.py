"""Random shapes, dtypes, strides, offsets and values: every implementation against the reference."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layout_kernels.numerics.cases import LAYOUTS, VALUES, Case
from layout_kernels.ops.gated_activation import ACTIVATIONS
from layout_kernels.ops.gated_rms_norm import ACTIVATIONS as GATE_ACTIVATIONS
from layout_kernels.ops.gated_rms_norm import FLAVOURS as GATED_FLAVOURS
from layout_kernels.ops.gated_rms_norm import ORDERS
from layout_kernels.ops.rms_norm import FLAVOURS
from layout_kernels.ops.rms_norm_mlp import FLAVOURS as MLP_FLAVOURS

from .catalog import BACKWARD_OF, OPERATIONS, Subject, implementations

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Around every power of two, where vectors and tiles end, and anywhere else.
WIDTHS = st.one_of(
    st.integers(1, 70),
    st.sampled_from([2**k + d for k in range(6, 13) for d in (-1, 0, 1)] + [3584, 5120, 8192]),
    st.integers(1, 8192),
)
_LIMIT = 40_000  # elements; wide rows come alone, so that a run takes seconds


@st.composite
def shapes(draw, multiple=1, widest=8192):
    width = multiple * max(1, min(draw(WIDTHS), widest) // multiple)
    leading = draw(st.lists(st.integers(0, 5), max_size=4))
    rows = 1
    for position, size in enumerate(leading):
        if rows * size * width > _LIMIT:
            leading[position] = size = 1
        rows *= max(size, 1)
    return (*leading, width)


@st.composite
def cases(draw, operation):
    multiple = {"gated_activation": 2, "gated_rms_norm": 3}.get(operation, 1)
    shape = draw(shapes(multiple, 130 if operation == "rms_norm_mlp" else 8192))
    possible = [name for name in LAYOUTS if len(shape) >= {"transposed": 2, "heads": 3, "expanded": 2}.get(name, 1)]
    if len(shape) > 1 and shape[0] == 0:
        possible.remove("expanded")
    dtype = draw(st.sampled_from(DTYPES))
    other = draw(st.sampled_from([dtype, dtype, None, "float32", "bfloat16"]))
    named = {
        "rms_norm": {"flavour": st.sampled_from(FLAVOURS), "weight_dtype": st.just(other)},
        "gated_activation": {"activation": st.sampled_from(ACTIVATIONS)},
        "rms_norm_mlp": {
            "flavour": st.sampled_from(MLP_FLAVOURS),
            "activation": st.sampled_from(ACTIVATIONS),
            "bias": st.booleans(),
            "size": st.integers(1, 70),
            "out": st.integers(1, 70),
        },
        "gated_rms_norm": {
            "flavour": st.sampled_from(GATED_FLAVOURS),
            "order": st.sampled_from(ORDERS),
            "activation": st.sampled_from(GATE_ACTIVATIONS),
            "group_size": st.sampled_from([None, shape[-1] // 3, 1]),
            "weight_dtype": st.just(other),
        },
        "linear": {"bias": st.booleans(), "out": st.integers(1, 70)},
    }[operation]
    if operation != "gated_activation":
        named["eps"] = st.sampled_from([1e-6, 1e-5, 1e-2])
    chosen = {key: draw(strategy) for key, strategy in named.items()}
    layout, values = draw(st.sampled_from(possible)), draw(st.sampled_from(list(VALUES)))
    return Case(shape, dtype, layout, values, chosen, seed=draw(st.integers(0, 1000)))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_implementation_agrees_with_the_reference(operation, backward):
    if backward and operation not in BACKWARD_OF:
        assert operation in ("rms_norm_mlp", "linear")  # composed, and PyTorch's own, when a gradient is recorded
        return

    @settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(cases(operation))
    def check(case):
        subject = Subject(operation, case, backward)
        arguments = subject.arguments()
        for kernel in implementations(subject.name):
            reason = subject.compare(kernel.function(*arguments), arguments)
            assert reason is None, f"{kernel.spec.name}: {reason}"

    check()
