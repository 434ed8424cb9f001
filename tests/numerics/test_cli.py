"""The command line: what it reads, what it prints, what it returns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layout_kernels
from layout_kernels.numerics import main
from layout_kernels.numerics.checks import digest
from layout_kernels.numerics.modes import CaptureError, ModePlugin
from layout_kernels.numerics.preparation import compatible_names, select_kernel
from layout_kernels.numerics.progress import Progress

from . import toy
from .graphs import BrokenGraph

ROOT = Path(layout_kernels.__file__).parents[1]
TOY = ["--operation", "toy"]


def run(arguments, function=toy.correct, **options):
    return main([*TOY, *arguments], {"toy": toy.make_suite(function, **options)})


def test_an_operation_with_other_arguments_that_returns_a_mapping_is_proven(tmp_path, capsys):
    path = tmp_path / "deep" / "report.json"
    output = ["--output", str(path), str(path.with_suffix(".md"))]
    assert run(["--sizes", "3", "13", "7", "--scale", "1.5", "--revision", "abc", *output]) == 0
    report = json.loads(path.read_text())
    assert report["coverage"] == {"passed": 2, "failed": 0, "not_applicable": 1, "not_run": 0}
    assert [row["parameters"]["size"] for row in report["cases"]] == [3, 13, 7]
    assert report["cases"][1]["reason"] == "size 13 is not taken"
    assert report["selection"][0]["excluded"] == {"toy.gone": "absent"}
    assert (report["schema_version"], report["kind"], report["revision"]) == (3, "numerics", "abc")
    assert report["environment"]["processor"]
    text = path.with_suffix(".md").read_text()
    assert "toy.gone: absent" in text
    assert "numerics passed: 2 passed, 0 failed, 1 not applicable, 0 not run" in text
    assert "2 passed" in capsys.readouterr().out


def test_a_failure_and_a_run_without_a_passing_case_end_with_1(capsys):
    assert run([], lambda x, scale: toy.correct(x, scale + 1)) == 1
    assert "Failed" in capsys.readouterr().out
    assert run(["--sizes", "13"]) == 1
    assert "no case passed" in capsys.readouterr().out


def test_a_failure_does_not_hide_the_cases_after_it(tmp_path):
    def wrong_at_three(x, scale):
        return toy.correct(x, scale + (x.numel() == 3))

    path = tmp_path / "r.json"
    assert run(["--sizes", "3", "4", "--output", str(path)], wrong_at_three) == 1
    assert [row["status"] for row in json.loads(path.read_text())["cases"]] == ["failed", "passed"]


def test_a_capture_failure_is_written_and_raised_and_the_rest_is_not_run(tmp_path, monkeypatch):
    monkeypatch.setitem(ModePlugin._registry, "cudagraph", BrokenGraph)
    path = tmp_path / "r.json"
    with pytest.raises(CaptureError, match="while capturing"):
        run(["--sizes", "3", "4", "5", "--mode", "cudagraph", "--output", str(path)])
    report = json.loads(path.read_text())
    assert report["coverage"] == {"passed": 0, "failed": 1, "not_applicable": 0, "not_run": 2}
    assert "while capturing" in report["error"]


@pytest.mark.parametrize("module", ["numerics", "benchmark"])
@pytest.mark.parametrize("words", [["--help"], ["--operation", "rms_norm", "--help"]])
def test_help_loads_no_torch(module, words):
    code = (
        f"import sys\nfrom layout_kernels.{module} import main\n"
        f"try:\n    main({words!r})\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "loaded = {'torch', 'triton', 'torch_npu', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {sorted(loaded)}' if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--implementation" in result.stdout
    assert ("--rows" in result.stdout) == ("--operation" in words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--operation", "nothing"], "unknown operation 'nothing'; there are rms_norm"),
        (["--implementation", "nothing"], "'nothing' does not end in an operation"),
        (["--operation", "rms_norm", "--implementation", "reference.linear"], "reference.linear implements linear"),
        (["--mode", "fast"], "invalid choice: 'fast'"),
        (["--warmup", "-1"], "at least 0"),
        (["--output", "report.txt"], "there are .json, .md"),
        (["--operation", "rms_norm", "--activations", "silu"], "unrecognized arguments: --activations silu"),
    ],
)
def test_options_that_say_nothing_sensible_end_with_2_and_the_way_out(words, message, capsys):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--operation", "rms_norm", "--mode", "cudagraph"], "mode cudagraph runs on cuda, not on cpu"),
        (["--operation", "rms_norm", "--mode", "aclgraph"], "mode aclgraph runs on npu, not on cpu"),
        (["--operation", "rms_norm", "--implementation", "nothing"], "choices: "),
        (["--operation", "rms_norm", "--device", "nothing"], "unknown device 'nothing'"),
        (["--operation", "rms_norm", "--device", "mps"], "device mps is not there"),
        (["--operation", "rms_norm", "--cases", "listed", "--rows", "3"], "--rows ask for a grid"),
        (["--operation", "rms_norm", "--rows", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_done_ends_with_2_before_anything_runs(words, message, capsys):
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_an_override_in_the_environment_that_changes_what_was_asked_for_is_an_error(monkeypatch, capsys):
    monkeypatch.setenv("LAYOUT_KERNELS_OVERRIDE_RMS_NORM", "nothing")
    words = ["--implementation", "reference.rms_norm", "--rows", "2", "--widths", "8"]
    assert main(words) == 2
    assert "override 'nothing'" in capsys.readouterr().err
    monkeypatch.setenv("LAYOUT_KERNELS_OVERRIDE_RMS_NORM", "reference")
    assert main(words) == 0


def test_an_override_that_selects_another_implementation_names_both(monkeypatch, capsys):
    from layout_kernels.dispatch import KernelSpec
    from layout_kernels.dispatch.registry import REGISTRIES
    from layout_kernels.ops.rms_norm import CONTRACT
    from layout_kernels.ops.rms_norm.reference import rms_norm

    registry = REGISTRIES.of("cpu")
    monkeypatch.setattr(registry, "_kernels", dict(registry._kernels))
    monkeypatch.setattr(registry, "frozen", False)
    registry.register(
        KernelSpec("cpu.other.rms_norm", CONTRACT, "cpu", ("eager",), "all", "other"), rms_norm, __name__
    )
    monkeypatch.setenv("LAYOUT_KERNELS_OVERRIDE_RMS_NORM", "other")
    assert main(["--implementation", "reference.rms_norm", "--rows", "2", "--widths", "8"]) == 2
    message = capsys.readouterr().err
    assert "cpu.other.rms_norm" in message
    assert "reference.rms_norm was asked for" in message


def test_the_operation_is_inferred_from_the_implementation(capsys):
    assert main(["--implementation", "reference.gated_activation", "--rows", "2", "--widths", "8"]) == 0
    assert "reference.gated_activation" in capsys.readouterr().out


class _Terminal:
    def __init__(self, is_terminal):
        self.text, self._is_terminal = "", is_terminal

    def isatty(self):
        return self._is_terminal

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def test_progress_is_drawn_on_a_terminal_and_in_a_pipe_not_at_all():
    for is_terminal in (True, False):
        stream = _Terminal(is_terminal)
        with Progress(2, stream) as progress:
            progress.say("one")
            progress.step()
        assert ("0/2" in stream.text) is is_terminal
        assert bool(stream.text) is is_terminal


def test_progress_fits_the_terminal_so_that_it_can_be_drawn_over(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    stream = _Terminal(True)
    with Progress(2, stream) as progress:
        progress.say("a name " * 20)
    assert max(len(line) for line in stream.text.replace("\x1b[K", "").split("\r")) == 49


def test_an_interrupt_leaves_a_report_of_what_was_done(tmp_path):
    def interrupted(x, scale):
        if x.numel() == 4:
            raise KeyboardInterrupt
        return toy.correct(x, scale)

    path = tmp_path / "r.json"
    with pytest.raises(KeyboardInterrupt):
        run(["--sizes", "3", "4", "5", "--output", str(path)], interrupted)
    report = json.loads(path.read_text())
    assert report["coverage"] == {"passed": 1, "failed": 0, "not_applicable": 0, "not_run": 2}
    assert report["error"].endswith("interrupted")
    assert not report["success"]


def test_a_place_where_no_report_can_be_is_refused_before_anything_runs(tmp_path, capsys):
    def never(x, scale):
        raise AssertionError

    (tmp_path / "folder.json").mkdir()
    (tmp_path / "file").write_text("")
    for place, reason in (("folder.json", "is a folder"), ("file/r.json", "is no folder")):
        with pytest.raises(SystemExit) as end:
            run(["--output", str(tmp_path / place)], never)
        assert end.value.code == 2
        assert reason in capsys.readouterr().err


def test_what_json_cannot_hold_does_not_take_the_other_reports_with_it(tmp_path, capsys):
    class Odd(toy.ToyCase):
        @property
        def parameters(self):
            return {"size": {1, 2}}

    paths = [str(tmp_path / name) for name in ("r.json", "r.md")]
    assert run(["--output", *paths], case=Odd) == 1
    assert "r.json not written" in capsys.readouterr().err
    assert (tmp_path / "r.md").exists()


def test_npu_without_its_package_says_which(capsys):
    assert main(["--operation", "rms_norm", "--device", "npu"]) == 2
    assert "device npu needs torch_npu, which is not installed" in capsys.readouterr().err


def test_nothing_here_needs_numpy(monkeypatch):
    tensor = torch.arange(6.0).view(2, 3)
    expected = digest(tensor)
    monkeypatch.setattr(torch.Tensor, "numpy", None)
    assert digest(tensor) == expected
    assert digest(tensor.T) != expected
    assert digest(torch.ones(0)) != digest(torch.ones(0, 1))


def test_an_override_in_the_environment_is_held_against_the_candidate_alone(monkeypatch):
    """Baselines and peers are what it is compared with, whatever the environment selects."""
    monkeypatch.setenv("LAYOUT_KERNELS_OVERRIDE_RMS_NORM", "reference.rms_norm")
    for name in compatible_names("rms_norm", "cpu", "eager"):
        assert select_kernel("rms_norm", "cpu", "eager", name).spec.name == name
    assert select_kernel("rms_norm", "cpu", "eager", None).spec.name == "reference.rms_norm"
