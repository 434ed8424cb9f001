"""Each instruction set computes what the operations mean: over the suites' cases, and around vector and tile sizes."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from layout_kernels.dispatch.catalog import discover
from layout_kernels.numerics.cases import Case

OPERATIONS = tuple(n for n, entry in discover().items() if entry.operation.follows is None)
HAS_BACKWARD = tuple(entry.operation.follows for entry in discover().values() if entry.operation.follows is not None)
FLAVOURS = ("cast_then_scale", "scale_then_cast", "one_plus_scale")
DTYPES = ("float32", "bfloat16", "float16")
# One below, at and above every multiple of a vector that a loop unrolls to: 4, 8 and 16 floats, four at a time.
WIDTHS = tuple(sorted({max(1, size + d) for size in (1, 4, 8, 16, 32, 64, 128, 192) for d in (-1, 0, 1)}))


def suite(package: Any, operation: str) -> Any:
    return import_module(f"{package.__name__}.numerics.{operation}")


def native_function(package: Any, operation: str) -> Any:
    kernel = package.initialize("cpu")[operation]
    assert kernel.spec.solution == "native"
    return kernel.function


def check(package: Any, operation: str, case: Case) -> None:
    module = suite(package, operation)
    arguments = module.arguments(case)
    reason = module.compare(native_function(package, operation)(*arguments), arguments)
    assert reason is None, f"{case.case_id}: {reason}"


def check_backward(package: Any, operation: str, case: Case) -> None:
    module = suite(package, operation)
    arguments = module.backward_arguments(case)
    reason = module.compare_backward(native_function(package, f"{operation}_backward")(*arguments), arguments)
    assert reason is None, f"{case.case_id}: {reason}"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_cases_of_the_suite_pass(package: Any, level: str, threads: int, operation: str) -> None:
    for case in suite(package, operation).CASES:
        check(package, operation, case)
        if operation in HAS_BACKWARD:
            check_backward(package, operation, case)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_every_width_around_a_vector(package: Any, level: str, dtype: str) -> None:
    for width in WIDTHS:
        case = Case((3, width), dtype, settings={"flavour": FLAVOURS[width % 3]}, seed=width)
        check(package, "rms_norm", case)
        check_backward(package, "rms_norm", case)
        check(package, "gated_activation", Case((3, 2 * width), dtype, seed=width))
        check_backward(package, "gated_activation", Case((3, 2 * width), dtype, seed=width))


# Squares are summed in blocks of 256 vectors of 4, 8 or 16 floats, four vectors at a time, or two of 32 halves: whole
# blocks, and parts of one that no vector fills. A gated row is kept up to 4096 elements.
BLOCKS = (1024, 2048, 4096, 8192)
TAILS = (-1, 1, 3, 5, 7, 9, 15, 17, 31, 33, 129)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tail", TAILS)
def test_norms_of_every_width_around_a_block_of_squares(package: Any, level: str, dtype: str, tail: int) -> None:
    for width in (block + tail for block in BLOCKS):
        check_spikes(package, "rms_norm", Case((1, width), dtype, settings={"flavour": FLAVOURS[tail % 3]}))
        for order in ("gate_then_norm", "norm_then_gate"):
            check_spikes(package, "gated_rms_norm", Case((1, width), dtype, settings={"order": order}))


def check_spikes(package: Any, operation: str, case: Case) -> None:
    """Rows of ones and one large value, with exact sums of squares: a place that is left out, or counted twice, is
    nearly all of its row's."""
    width, module = case.shape[-1], suite(package, operation)
    last = max(block for block in BLOCKS if block <= width + 1)
    places = sorted({0, 1023, 1024, *range(last - 2, last + 2), *range(last, width)} & set(range(width)))
    x = torch.randn(len(places), width).sign()
    x[range(len(places)), places] = 1024.0

    def spiked(arguments: tuple[Any, ...], at: int) -> tuple[Any, ...]:
        rows = [x.to(given.dtype) if i == at else given for i, given in enumerate(arguments)]
        if operation == "gated_rms_norm":
            rows[at + 1] = torch.full_like(rows[at], 32.0)  # silu(32) is 32
        if at:
            rows[0] = rows[0].expand(x.shape)
        return tuple(rows)

    arguments = spiked(module.arguments(case), 0)
    reason = module.compare(native_function(package, operation)(*arguments), arguments)
    assert reason is None, f"{case.case_id}: {reason}"
    arguments = spiked(module.backward_arguments(case), 1)
    reason = module.compare_backward(native_function(package, f"{operation}_backward")(*arguments), arguments)
    assert reason is None, f"{case.case_id}, backward: {reason}"


# Register tiles have up to 6 rows and 4 columns, with one or two rows 8; tiles have 32 columns and 256 rows; k is cut
# at 1024, and at 2048 where pairs of bf16 are multiplied. AVX2 turns the weight from 12 rows on: strips of 6 rows,
# panels of 16 columns and of a k of 256, and from 100 rows and 512 columns on tiles have up to 128 columns; or x,
# where the rows fill one or two strips of 16 and k and the columns are 128 or more: tiles of 6 columns.
ROWS = [*range(1, 9), 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 32, 63, 64, 65, 255, 256, 257]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
def test_products_of_every_number_of_rows_around_a_tile(package: Any, level: str, dtype: str, rows: int) -> None:
    for width, out in ((33, 31), (64, 33), (7, 5)):
        check_product(package, rows, width, out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1023, 1024, 1025, 1039, 2047, 2048, 2049, 2081])
def test_products_of_every_depth_around_a_pass(package: Any, level: str, dtype: str, width: int) -> None:
    for rows in (2, 20):
        check_product(package, rows, width, 6, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [15, 16, 17, 31, 32, 33, 255, 256, 257, 288, 289, 511, 512, 513])
def test_products_of_every_depth_around_a_panel(package: Any, level: str, dtype: str, width: int) -> None:
    for rows, out in ((12, 17), (23, 40)):
        check_product(package, rows, width, out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "out"), [(99, 600), (100, 511), (101, 1029), (260, 1030)])
def test_products_of_wide_tiles(package: Any, level: str, dtype: str, rows: int, out: int) -> None:
    check_product(package, rows, 35, out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 32, 33, 63, 64, 65])
def test_products_of_every_number_of_columns_around_a_tile(package: Any, level: str, dtype: str, out: int) -> None:
    for rows in (1, 7, 20):
        check_product(package, rows, 40, out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [14, 15, 16, 17, 29, 30, 31, 32, 33])
def test_products_of_turned_rows(package: Any, level: str, dtype: str, rows: int) -> None:
    for width, out in ((127, 128), (128, 127), (128, 128), (129, 131), (256, 160), (271, 133), (289, 192), (560, 257)):
        check_product(package, rows, width, out, dtype)


def check_product(package: Any, rows: int, width: int, out: int, dtype: str) -> None:
    """The operator itself: the implementation leaves products to PyTorch where that is the faster one."""
    module = suite(package, "linear")
    case = Case((rows, width), dtype, settings={"out": out, "bias": bool(rows % 2)}, seed=rows * width + out)
    arguments = module.arguments(case)
    operators = import_module(f"{package.__name__}.ops.native").operators
    reason = module.compare(operators.cpu_linear(*arguments), arguments)
    assert reason is None, f"{case.case_id}: {reason}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 15), (3, 16), (5, 17), (20, 33), (70, 47), (300, 8)])
def test_the_fused_mlp_around_a_tile(package: Any, level: str, dtype: str, rows: int, size: int) -> None:
    module = suite(package, "rms_norm_mlp")
    settings = {"size": size, "out": 37, "bias": bool(rows % 2), "activation": ("silu", "gelu", "gelu_tanh")[size % 3]}
    arguments = module.arguments(Case((rows, 52), dtype, settings=settings, seed=size))
    x, weight, gate_up, down, eps, _, activation, gate_up_bias, down_bias = arguments
    operators = import_module(f"{package.__name__}.ops.native").operators
    code = ("silu", "gelu", "gelu_tanh").index(activation)
    result = operators.cpu_rms_norm_mlp(x, weight, gate_up, down, eps, 0, code, gate_up_bias, down_bias)
    assert module.compare(result, arguments) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "out"), [(1, 15, 33), (3, 16, 8), (5, 37, 41), (16, 160, 129), (70, 47, 8)])
def test_an_mlp_without_a_norm_is_a_plain_mlp(
    package: Any, level: str, dtype: str, rows: int, size: int, out: int
) -> None:
    """The parts of it, one operator after the other; and x is read wherever it lies."""
    module, operators = suite(package, "rms_norm_mlp"), import_module(f"{package.__name__}.ops.native").operators
    settings = {"size": size, "out": out, "bias": bool(rows % 2), "flavour": "none"}
    arguments = module.arguments(Case((rows, 132), dtype, settings=settings, seed=size))
    x, _, gate_up, down, _, _, _, gate_up_bias, down_bias = arguments
    result = operators.cpu_rms_norm_mlp(x, None, gate_up, down, 0.0, 3, 0, gate_up_bias, down_bias)
    assert module.compare(result, arguments) is None
    wide = torch.randn(rows, 2 * x.shape[1]).to(x.dtype)
    wide[:, ::2] = x
    for same in (wide[:, ::2], wide.new_zeros(rows, 200)[:, 7:139].copy_(x)):
        again = operators.cpu_rms_norm_mlp(same, None, gate_up, down, 1e-6, 3, 0, gate_up_bias, down_bias)
        assert torch.equal(again, result)
    product = operators.cpu_gated_activation(operators.cpu_linear(x, gate_up, gate_up_bias), 0)
    plain = operators.cpu_linear(product, down, down_bias)
    # A tile of pairs may cut the sums of a single row elsewhere than a tile of one matrix: a few roundings.
    bound = 8 * torch.finfo(x.dtype).eps * plain.abs().max().item()
    torch.testing.assert_close(result, plain, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "hidden", "size", "out"),
    [
        (12, 256, 290, 37),
        (130, 520, 600, 37),
        (32, 520, 600, 37),  # x is turned for the first product only
        (16, 96, 150, 129),  # for the second only
        (31, 256, 290, 160),
    ],
)
def test_the_fused_mlp_of_several_panels(
    package: Any, level: str, dtype: str, rows: int, hidden: int, size: int, out: int
) -> None:
    module = suite(package, "rms_norm_mlp")
    arguments = module.arguments(Case((rows, hidden), dtype, settings={"size": size, "out": out}, seed=size))
    x, weight, gate_up, down, eps, *_ = arguments
    operators = import_module(f"{package.__name__}.ops.native").operators
    result = operators.cpu_rms_norm_mlp(x, weight, gate_up, down, eps, 0, 0, None, None)
    assert module.compare(result, arguments) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 14, 16])
def test_what_is_not_finite_stays_so_and_in_its_row(package: Any, level: str, dtype: str, rows: int) -> None:
    """NaN of every bit pattern that bf16 has room for; scratch memory that held it gives nothing to the next call."""
    operators = import_module(f"{package.__name__}.ops.native").operators
    half = getattr(torch, dtype)
    width, size, out = (180, 140, 164) if rows == 16 else (45, 35, 41)  # large enough for x to be turned
    shapes = ((rows, width), (width,), (2 * size, width), (out, size))
    x, norm, gate_up, down = (torch.rand(shape).add(0.5).div(8).to(half) for shape in shapes)
    quiet = torch.full((), 0x7FFF, dtype=torch.int16).view(torch.bfloat16).to(half)
    for bad in (quiet, -quiet, torch.full_like(quiet, torch.inf)):
        wrong = x.clone()
        wrong[rows // 2, width - 1] = bad
        for result in (
            operators.cpu_linear(wrong, gate_up, None),
            operators.cpu_rms_norm_mlp(wrong, norm, gate_up, down, 1e-6, 0, 0, None, None),
        ):
            assert [bool(row.isfinite().any()) for row in result] == [row != rows // 2 for row in range(rows)]
            assert int((~result.isfinite()).sum()) == result.shape[1]
        assert operators.cpu_linear(x, gate_up, None).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_every_batch(package: Any, level: str, dtype: str) -> None:
    """A sum runs over k in an order that the number of rows does not change, but for AVX2's one row, few and many."""
    operators = import_module(f"{package.__name__}.ops.native").operators
    # Rounding to a half hides most of a difference, so there are many columns.
    x, weight = (torch.randn(size, 1100).to(getattr(torch, dtype)) for size in (260, 4000))
    few, many = (operators.cpu_linear(x[:rows], weight, None) for rows in (11, 256))
    for rows in (1, 2, 5):
        same = torch.equal(operators.cpu_linear(x[:rows], weight, None), few[:rows])
        assert same or (level == "avx2" and rows == 1)
    last = operators.cpu_linear(x[[0] * 257], weight, None)
    assert torch.equal(last[0], last[-1])  # more than a pass
    for rows in (12, 16, 20, 32, 64, 70, 130):
        assert torch.equal(operators.cpu_linear(x[:rows], weight, None), many[:rows])
    assert level == "avx2" or torch.equal(few, many[:11])
