"""Inputs that went wrong in other libraries' kernels, each with the right answer.

Not here: gradients of views, of many rows and of one tensor used twice (test_gradients), flavours and result dtypes
(test_equals_transformers), strides, offsets and odd widths (the cases and properties, over every implementation).
"""

from __future__ import annotations

import pytest
import torch

from layout_kernels import gated_activation, rms_norm, rms_norm_mlp
from layout_kernels.ops.rms_norm.operator import FORWARD

# Two roundings of bfloat16 or one of float32, whichever the test uses.
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}


def test_addresses_beyond_two_to_the_31_elements():
    # The pages between the two rows are never touched, so this takes no memory: 4 GB of address space only.
    far = 2**31
    room = torch.empty(far + 8, dtype=torch.bfloat16)
    x = room.as_strided((2, 8), (far, 1))
    x.copy_(torch.randn(2, 8))
    small = x.clone()
    torch.testing.assert_close(rms_norm(x, None), rms_norm(small, None), rtol=0, atol=0)
    torch.testing.assert_close(gated_activation(x), gated_activation(small), rtol=0, atol=0)


def test_sizes_beyond_two_to_the_31_elements_have_a_shape():
    x = torch.empty(1, 1_000_000, 4096, dtype=torch.bfloat16, device="meta")
    assert FORWARD(x, None, 1e-6, "cast_then_scale").shape == x.shape
    assert gated_activation(torch.empty(80_000, 36_864, device="meta")).shape == (80_000, 18_432)


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 4, 8), (2, 1, 3, 2, 8), (1, 1, 1, 1, 1, 8)])
def test_any_number_of_dimensions_equals_the_flattened_problem(shape):
    x, weight = torch.randn(shape, dtype=torch.bfloat16), torch.randn(8, dtype=torch.bfloat16)
    flat = rms_norm(x.reshape(-1, 8), weight)
    torch.testing.assert_close(rms_norm(x, weight), flat.view(shape), rtol=0, atol=0)
    gate_up, down = torch.randn(6, 8, dtype=torch.bfloat16), torch.randn(8, 3, dtype=torch.bfloat16)
    found = rms_norm_mlp(x, weight, gate_up, down)
    assert found.shape == shape
    size = found.abs().max().item()
    torch.testing.assert_close(
        found, rms_norm_mlp(x.reshape(-1, 8), weight, gate_up, down).view(shape), rtol=0, atol=2**-7 * size
    )


@pytest.mark.parametrize("start", range(8))
def test_a_slice_whose_address_is_not_aligned(start):
    wide = torch.randn(5, 300, dtype=torch.bfloat16)
    part, weight = wide[:, 64 + start : 192 + start], torch.randn(300, dtype=torch.bfloat16)[start : start + 128]
    expected = rms_norm(part.clone(), weight.clone())
    torch.testing.assert_close(rms_norm(part, weight), expected, rtol=CLOSE[torch.bfloat16], atol=0)


def test_a_weight_that_is_strided_or_expanded():
    x = torch.randn(3, 8)
    for weight in (torch.randn(16)[::2], torch.randn(1).expand(8), torch.randn(8, 2)[:, 1]):
        expected = rms_norm(x, weight.clone())
        torch.testing.assert_close(rms_norm(x, weight), expected, rtol=CLOSE[torch.float32], atol=1e-7)


def test_a_row_of_zeros_with_an_eps_of_zero_gives_what_eager_gives():
    x = torch.zeros(2, 8)
    x[1] = 1
    assert rms_norm(x, None, eps=0.0)[0].isnan().all()
    torch.testing.assert_close(rms_norm(x, None, eps=0.0)[1], torch.ones(8))
    assert (rms_norm(x, None, eps=1e-6)[0] == 0).all()


def test_an_eps_of_zero_is_zero_and_no_default():
    x = torch.full((1, 8), 1e-5)
    torch.testing.assert_close(rms_norm(x, None, 0.0), torch.ones(1, 8))
    # mean(x^2) is 1e-10, so that an eps of 1e-6 is all there is.
    torch.testing.assert_close(rms_norm(x, None, 1e-6), torch.full((1, 8), 1e-2), rtol=1e-4, atol=0)


def test_half_precision_is_infinite_only_where_eager_is():
    gate, up = torch.tensor([[40.0, 500.0]]).half(), torch.tensor([[1600.0, 500.0]]).half()
    found = gated_activation(torch.cat([gate, up], -1))
    assert found[0, 0].item() == 64_000
    assert found[0, 1].item() == float("inf")


def test_float16_rows_whose_squares_overflow_are_normalised():
    # 300^2 is above 65504; sums are in float32.
    torch.testing.assert_close(rms_norm(torch.full((1, 64), 300.0).half(), None), torch.ones(1, 64).half())


def test_tensors_that_a_caller_holds_are_not_written_to():
    x, weight = torch.randn(4, 8), torch.randn(8)
    gate_up, down = torch.randn(6, 8), torch.randn(8, 3)
    kept = [tensor.clone() for tensor in (x, weight, gate_up, down)]
    result = rms_norm(x, weight)
    result.fill_(7)
    rms_norm_mlp(x, weight, gate_up, down).fill_(7)
    gated_activation(x).fill_(7)
    for tensor, before in zip((x, weight, gate_up, down), kept, strict=True):
        torch.testing.assert_close(tensor, before, rtol=0, atol=0)


def test_results_of_one_call_are_not_the_memory_of_the_next():
    x = torch.randn(4, 8)
    first = rms_norm(x, None)
    before = first.clone()
    rms_norm(x * 2 + 1, None)
    torch.testing.assert_close(first, before, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_calls_from_several_threads_give_the_same(threads):
    from concurrent.futures import ThreadPoolExecutor

    inputs = [torch.randn(33, 65) for _ in range(8)]
    expected = [rms_norm(x, None) for x in inputs]
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda x: rms_norm(x, None), inputs))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
