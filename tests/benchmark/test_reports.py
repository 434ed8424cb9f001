"""What is written, and that its description says what is in it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from layout_kernels.benchmark import main, plot
from layout_kernels.benchmark.limits import last_level_cache, machine_limits
from layout_kernels.benchmark.report import seconds
from layout_kernels.numerics import main as numerics
from layout_kernels.numerics.report import Report, Table, markdown_table, write_json
from tests.numerics import toy

SCHEMA = Path(__file__).parents[2] / "docs" / "report-schema.md"


def paths_of(value, place=""):
    """The dotted path of every field; `[]` for the items of a list. What keys hold by choice is not described."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield f"{place}.{key}".lstrip(".")
            yield from paths_of(item, f"{place}.{key}")
    elif isinstance(value, list):
        for item in value[:3]:
            yield from paths_of(item, f"{place}[]")


# Their keys are a suite's own, a package's, a variable's, or a dtype's.
OPEN = (
    "cases[].parameters",
    "cases[].metadata",
    "environment.packages",
    "environment.variables",
    "selection[].excluded",
)


@pytest.mark.usefixtures("clock", "load")
def test_every_field_of_a_report_is_described(tmp_path):
    described = set(re.findall(r"^\| `([^`]+)`", SCHEMA.read_text(encoding="utf-8"), flags=re.MULTILINE))
    path = tmp_path / "r.json"
    suites = {"toy": toy.make_suite(toy.correct)}
    words = ["--operation", "toy", "--sizes", "3", "13", "--output", str(path)]
    for command in (main, numerics):
        assert command(words, suites) == 0
        found = {
            re.sub(r"\.(warm|cold)\b", ".<cache>", field)
            for field in paths_of(json.loads(path.read_text()))
            if not any(field.startswith(f"{name}.") for name in OPEN)
        }
        fields = {
            re.sub(r"\.(enqueue|device|wall)\b", ".<clock>", field) if "timing" in field else field for field in found
        }
        assert not fields - described, "say in docs/report-schema.md what these are"


def test_json_has_no_nan(tmp_path):
    path = tmp_path / "r.json"
    write_json(Report({"a": [math.nan, math.inf], "b": 1.5}), path)
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {"a": ["nan", "inf"], "b": 1.5}


def test_a_table_survives_what_a_reason_may_hold():
    text = markdown_table(Table("t", ("a",), [("x | y\nz",)]))
    assert text.splitlines()[-1] == "| x \\| y z |"


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2 s"), (1.5e-3, "1.5 ms"), (2.5e-5, "25 us"), (4e-8, "40 ns"), (0.0, "0 ns")]
)
def test_times_have_a_fitting_unit(value, text):
    assert seconds(value) == text


def example(valid=True, flops=None):
    def row(size):
        work = {"bytes": 4 * size, "size": size} | ({"flops": flops * size, "dtype": "float32"} if flops else {})
        rates = {"bytes_per_second": {"cold": 1e9}, "flops_per_second": {"cold": 2e9}}
        beside = [{"implementation": name, "rates": rates} for name in ("ours.toy", "peer.toy")]
        return {
            "operation": "toy",
            "implementation": "ours.toy",
            "metadata": work,
            "comparison": {"valid": valid},
            "beside": beside,
        }

    limits = {"copy_bytes_per_second": 1e10, "flops_per_second": {"float32": 3e10}}
    surroundings = {"accelerator": None, "processor": "a processor", "threads": 2}
    payload = {"kind": "benchmark", "cases": [row(2**n) for n in (4, 9, 14)], "limits": limits}
    return Report(payload | {"environment": surroundings, "created": "2026-01-02T03:04:05+00:00"})


def test_a_plot_is_written_as_wide_as_a_readme_with_every_implementation_and_the_limit(tmp_path):
    from PIL import Image

    plot.write_plot(example(), tmp_path / "p.png")
    assert Image.open(tmp_path / "p.png").width == 900
    plot.write_plot(example(), tmp_path / "p.svg")
    drawn = (tmp_path / "p.svg").read_text()
    for text in ("ours", "peer", "limit: copy in memory", "a processor"):
        assert f">{text}" in drawn, text


def test_the_limit_is_the_lower_of_memory_and_products():
    rows = example(flops=1).payload["cases"]
    limits = example().payload["limits"]
    # One operation for four bytes: memory is the limit. A hundred for four: the products are.
    assert plot.limit(rows, "flops", limits)[0] == (16, 1e10 / 4)
    assert plot.limit(example(flops=100).payload["cases"], "flops", limits)[0] == (16, 3e10)
    assert plot.limit(rows, "bytes", limits)[0] == (16, 1e10)


def test_a_plot_of_nothing_valid_or_of_no_benchmark_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no measurement counts"):
        plot.write_plot(example(valid=False), tmp_path / "p.png")
    with pytest.raises(ValueError, match="a plot shows a benchmark"):
        plot.write_plot(Report({"kind": "numerics"}), tmp_path / "p.png")


@pytest.mark.usefixtures("clock")
def test_a_report_that_cannot_be_written_does_not_take_the_others_with_it(tmp_path, capsys, load):
    load(1.0, None, 1.0)
    quick = ["--attempts", "1", "--seconds", "0"]
    words = ["--operation", "toy", *quick, "--output", str(tmp_path / "p.png"), str(tmp_path / "r.json")]
    assert main(words, {"toy": toy.make_suite()}) == 1
    assert (tmp_path / "r.json").exists()
    assert "nothing to plot" in capsys.readouterr().err


def test_the_limits_of_this_machine_are_measured(monkeypatch):
    from layout_kernels.benchmark import limits

    monkeypatch.setattr(limits, "_ATTEMPTS", 1)
    assert last_level_cache("cpu") >= 2**18
    found = machine_limits("cpu", ["float32", "float32"])
    # No machine that runs this copies slower than a tape, or multiplies slower than by hand.
    assert found["copy_bytes_per_second"] > 1e7
    assert found["flops_per_second"]["float32"] > 1e7


def test_a_dtype_that_cannot_be_multiplied_has_no_limit(monkeypatch):
    from layout_kernels.benchmark import limits

    monkeypatch.setattr(limits, "_ATTEMPTS", 1)
    assert machine_limits("cpu", ["no_such_dtype", "float32"])["flops_per_second"].keys() == {"float32"}


def test_an_operation_that_counts_operations_and_no_bytes_is_plotted(tmp_path):
    report = example(flops=1)
    for row in report.payload["cases"]:
        del row["metadata"]["bytes"]
        for entry in row["beside"]:
            entry["rates"].pop("bytes_per_second", None)
    plot.write_plot(report, tmp_path / "p.svg")
    assert ">GFLOP/s<" in (tmp_path / "p.svg").read_text()
