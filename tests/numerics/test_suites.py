"""The package's own suites: complete, independent of what they judge, and strict."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import layout_kernels
from layout_kernels.dispatch.catalog import discover
from layout_kernels.numerics import catalog, main
from layout_kernels.numerics.preparation import in_use, select_kernel
from layout_kernels.numerics.suite import OperationSuite
from layout_kernels.numerics.tolerance import explain_reference
from layout_kernels.numerics.verify import verify_case

PACKAGE = Path(layout_kernels.__file__).parent
SUITES = catalog.suites()
# Enough of the listed cases to tell a wrong formula, few enough for every run.
FEW = 3


def parsed(suite: OperationSuite, words=()):
    import argparse

    parser = argparse.ArgumentParser()
    parser.set_defaults(device="cpu")
    suite.add_arguments(parser)
    return parser.parse_args(words)


def registered_names() -> set[str]:
    """The full names in every `register_kernel(name=...)` of the package, those of other devices too."""
    found = set()
    for file in (PACKAGE / "ops").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "register_kernel":
                found |= {ast.literal_eval(word.value) for word in node.keywords if word.arg == "name"}
    return found


def test_every_operation_and_backward_has_a_suite():
    assert set(SUITES) == set(discover())


def test_the_last_part_of_every_implementation_s_name_is_its_operation():
    assert len(registered_names()) > 10
    assert {name.rpartition(".")[2] for name in registered_names()} == set(SUITES)


def test_shared_files_name_no_operation():
    suites = {f"{entry.operation.follows or name}.py" for name, entry in discover().items()}
    shared = [file for file in (PACKAGE / "numerics").glob("*.py") if file.name not in suites]
    for file in (*shared, *(PACKAGE / "benchmark").glob("*.py")):
        text = file.read_text(encoding="utf-8")
        # "linear" is also a word; the others are names and nothing else.
        assert not [name for name in SUITES if name in text and name != "linear"], file


@pytest.mark.parametrize("operation", SUITES)
def test_every_implementation_that_loads_here_passes_a_few_cases_in_eager(operation):
    suite = SUITES[operation]
    plan = suite.prepare("cpu", "eager", None)
    for case in suite.cases(parsed(suite))[:FEW]:
        outcome = verify_case(operation, case, plan, device="cpu", mode="eager", warmup=0)
        assert outcome.passed, outcome.row["reason"]


def test_all_cases_of_all_operations_pass_as_the_command_runs_them(capsys):
    assert main(["--device", "cpu"]) == 0
    assert "0 failed, 0 not applicable, 0 not run" in capsys.readouterr().out


def test_an_operation_passes_in_mode_compile_through_its_operator():
    words = ["--operation", "gated_activation", "gated_activation_backward", "--mode", "compile"]
    assert main([*words, "--rows", "3", "--widths", "8"]) == 0


@pytest.mark.parametrize("operation", SUITES)
def test_the_reference_is_judged_by_a_formula_of_its_own(operation, monkeypatch):
    """A reference that computes something else, consistently, is caught; a comparison with itself would pass."""
    from importlib import import_module

    from layout_kernels.numerics import tensor_suite

    suite, name = SUITES[operation], discover()[operation].operation.follows or operation
    module = import_module(f"layout_kernels.ops.{name}.reference")
    right = getattr(module, operation)

    def scaled(value):
        if isinstance(value, tuple):
            return tuple(map(scaled, value))
        return None if value is None else value * 1.25

    def wrong(*args):
        return scaled(right(*args))

    wrong.__signature__ = tensor_suite.inspect.signature(right)
    monkeypatch.setattr(module, operation, wrong)
    plan = suite.prepare("cpu", "eager", "reference")
    plan = type(plan)(plan.spec, wrong, plan.excluded)
    case = suite.cases(parsed(suite))[0]
    outcome = verify_case(operation, case, plan, device="cpu", mode="eager", warmup=0)
    assert "the formula gives" in outcome.row["reason"]


def test_the_judgement_of_a_reference_sees_one_wrong_element_and_a_nan():
    exact = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = exact.float()
    assert explain_reference(result, exact, (result,)) is None
    result[2, 3] *= 1 + 1e-4
    assert "result[2, 3]" in explain_reference(result, exact, (result,))
    result[2, 3] = float("nan")
    assert "nan" in explain_reference(result, exact, (torch.ones(4, 8),))


@pytest.mark.parametrize("operation", SUITES)
def test_changed_inputs_have_other_values_in_the_same_memory_and_come_back(operation):
    suite = SUITES[operation]
    seen = []
    plan = suite.prepare("cpu", "eager", None)
    spy = type(plan)(plan.spec, lambda *args: seen.append([a for a in args if isinstance(a, torch.Tensor)]), {})
    sliced = next(case for case in suite.cases(parsed(suite)) if case.case.layout == "sliced")
    prepared = sliced.prepare(spy)
    prepared.function()
    first = [tensor.clone() for tensor in seen[0]]
    places = [(tensor.data_ptr(), tensor.stride()) for tensor in seen[0]]
    prepared.change(1)
    prepared.function()
    assert [(tensor.data_ptr(), tensor.stride()) for tensor in seen[1]] == places
    assert all(not torch.equal(old, new) for old, new in zip(first, seen[1], strict=True))
    prepared.change(0)
    assert all(torch.equal(old, new) for old, new in zip(first, seen[1], strict=True))


def test_the_grid_is_every_combination_of_what_was_asked_for():
    suite = SUITES["rms_norm"]
    words = ["--rows", "1", "4", "--widths", "8", "--dtypes", "float32", "float16", "--flavours", "one_plus_scale"]
    cases = suite.cases(parsed(suite, words))
    assert {(tuple(c.case.shape), c.case.dtype) for c in cases} == {
        ((rows, 8), dtype) for rows in (1, 4) for dtype in ("float32", "float16")
    }
    assert {c.parameters["flavour"] for c in cases} == {"one_plus_scale"}
    assert len({c.case_id for c in cases}) == 4


def test_selecting_binds_nothing_and_an_operator_is_lent_only_for_a_while():
    from layout_kernels.dispatch.runtime import RUNTIME

    plan = select_kernel("rms_norm", "cpu", "compile", "reference")
    table = RUNTIME.functions("rms_norm")
    before = dict(table)
    marker = object()
    table["cpu"] = marker
    try:
        with in_use(plan, "cpu"):
            assert table["cpu"] is not marker
        assert table["cpu"] is marker
    finally:
        table.clear()
        table.update(before)
    with in_use(plan, "cpu"):
        pass
    assert dict(table) == before


@pytest.mark.parametrize("change", [torch.Tensor.double, lambda tensor: tensor[None]], ids=["dtype", "shape"])
@pytest.mark.parametrize("operation", SUITES)
def test_a_reference_of_another_dtype_or_shape_is_caught_though_it_agrees_with_itself(operation, change, monkeypatch):
    from importlib import import_module

    from layout_kernels.numerics import tensor_suite

    suite, name = SUITES[operation], discover()[operation].operation.follows or operation
    module = import_module(f"layout_kernels.ops.{name}.reference")
    right = getattr(module, operation)

    def wrong(*args):
        result = right(*args)
        if isinstance(result, tuple):
            return tuple(None if item is None else change(item) for item in result)
        return change(result)

    wrong.__signature__ = tensor_suite.inspect.signature(right)
    monkeypatch.setattr(module, operation, wrong)
    plan = suite.prepare("cpu", "eager", "reference")
    plan = type(plan)(plan.spec, wrong, plan.excluded)
    case = suite.cases(parsed(suite))[0]
    outcome = verify_case(operation, case, plan, device="cpu", mode="eager", warmup=0)
    assert "as the operator describes it" in outcome.row["reason"]


def test_a_size_that_is_no_size_is_refused_and_one_given_twice_is_one_case(capsys):
    suite = SUITES["linear"]
    # 0 would be taken for what is not given, under the name of a case that says 0.
    for value in ("0", "-1"):
        with pytest.raises(SystemExit):
            parsed(suite, ["--factors", value])
        assert f"at least 1, not '{value}'" in capsys.readouterr().err
    assert len(suite.cases(parsed(suite, ["--rows", "2", "2", "--widths", "8", "--factors", "1", "1"]))) == 1
