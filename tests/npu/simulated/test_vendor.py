"""The stand-in for torch_npu has the wheel's schemas and refuses what the vendor's pages say is refused."""

from __future__ import annotations

import pytest
import torch
import torch_npu

from tests.npu.simulated.inputs import fetch, normal, send
from tests.support.fake_torch_npu import RefusedError, newest_schemas

BF16, FP16, FP64 = torch.bfloat16, torch.float16, torch.float64


def x(*shape, dtype=torch.float32):
    return send(normal(*shape, dtype=dtype))


def test_every_operator_has_the_schema_that_the_newest_wheel_registers():
    _, schemas = newest_schemas()
    for name, schema in schemas.items():
        assert getattr(torch.ops.npu, name).default._schema == torch._C.parse_schema(f"npu::{schema}")


REFUSED = {
    "rms_norm without a gamma": (lambda: torch_npu.npu_rms_norm(x(2, 8), None), RuntimeError),
    "rms_norm in float64": (lambda: torch_npu.npu_rms_norm(x(2, 8, dtype=FP64), x(8, dtype=FP64)), RefusedError),
    "rms_norm of two dtypes": (lambda: torch_npu.npu_rms_norm(x(2, 8, dtype=BF16), x(8)), RefusedError),
    "rms_norm of one dimension": (lambda: torch_npu.npu_rms_norm(x(8), x(8)), RefusedError),
    "rms_norm of nine dimensions": (lambda: torch_npu.npu_rms_norm(x(*[1] * 8, 8), x(8)), RefusedError),
    "gemma of a strided tensor": (lambda: torch_npu.npu_gemma_rms_norm(x(2, 16)[:, ::2], x(8)), RefusedError),
    "gemma of an empty tensor": (lambda: torch_npu.npu_gemma_rms_norm(x(0, 8), x(8)), RefusedError),
    "gemma of two dtypes": (lambda: torch_npu.npu_gemma_rms_norm(x(2, 8, dtype=FP16), x(8)), RefusedError),
    "swiglu of a strided tensor": (lambda: torch_npu.npu_swiglu(x(4, 32)[:, ::2]), RefusedError),
    "swiglu of an empty tensor": (lambda: torch_npu.npu_swiglu(x(0, 32)), RefusedError),
    "swiglu of an odd width": (lambda: torch_npu.npu_swiglu(x(4, 7)), RefusedError),
    "swiglu backward of short rows": (lambda: torch_npu.npu_swiglu_backward(x(4, 7), x(4, 14)), RefusedError),
    "swiglu backward, strided": (
        lambda: torch_npu.npu_swiglu_backward(x(4, 32)[:, ::2], x(4, 32)),
        RefusedError,
    ),
    "geglu of another approximation": (lambda: torch_npu.npu_geglu(x(4, 32), -1, 2), RefusedError),
    "geglu by name of the approximation": (lambda: torch_npu.npu_geglu(x(4, 32), -1, "tanh"), RuntimeError),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    call, error = REFUSED[name]
    with pytest.raises(error):
        call()


def test_geglu_activates_the_right_half_unless_told_otherwise():
    pair = normal(3, 16)
    left, right = pair.chunk(2, -1)
    found = [fetch(torch_npu.npu_geglu(send(pair), -1, 0, *flag)[0]) for flag in ((), (True,))]
    gelu = torch.nn.functional.gelu
    # 2 ulp: torch's gelu rounds otherwise where the tensor is strided.
    torch.testing.assert_close(found, [left * gelu(right), gelu(left) * right], rtol=3e-7, atol=1e-7)


def test_the_gradient_of_gamma_is_float32_whatever_the_dtypes_are():
    rows, gamma = x(4, 8, dtype=BF16), x(8, dtype=BF16)
    _, rstd = torch_npu.npu_rms_norm(rows, gamma)
    dx, dgamma = torch_npu.npu_rms_norm_backward(x(4, 8, dtype=BF16), rows, gamma, rstd)
    assert (rstd.dtype, rstd.shape) == (torch.float32, (4, 1))
    assert (dx.dtype, dgamma.dtype) == (BF16, torch.float32)


def test_an_older_product_refuses_more(npu):
    npu.product = "Ascend310P3"
    calls = (
        lambda: torch_npu.npu_rms_norm(x(2, 64, dtype=BF16), x(64, dtype=BF16)),
        lambda: torch_npu.npu_rms_norm(x(2, 7), x(7)),
        lambda: torch_npu.npu_gemma_rms_norm(x(2, 64), x(64)),
        lambda: torch_npu.npu_swiglu(x(2, 14)),
    )
    for call in calls:
        with pytest.raises(RefusedError, match="310P3"):
            call()
