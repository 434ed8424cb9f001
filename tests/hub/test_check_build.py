"""Each rule of a Hub kernel is kept by this build, and each notices a build that breaks it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from kernels._rust import Digest, DigestAlgorithm

from tools import check_build
from tools.build_variants import build
from tools.publishing import names


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check")
    build(folder, backends=["cpu"])
    return folder


def renew_digest(variant: Path) -> None:
    """Metadata that agrees with the files, so that only the rule in question is broken."""
    metadata = json.loads((variant / "metadata.json").read_text())
    metadata["digest"]["files"] = dict(sorted(Digest.hash_variant(DigestAlgorithm.SHA256, variant).files.items()))
    (variant / "metadata.json").write_text(json.dumps(metadata))


def append(name: str, text: str) -> Callable[[Path], None]:
    def change(variant: Path) -> None:
        with (variant / name).open("a") as file:
            file.write(text)

    return change


def replace(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(variant: Path) -> None:
        text = (variant / name).read_text()
        assert old in text
        (variant / name).write_text(text.replace(old, new))

    return change


def bytecode(variant: Path) -> None:
    (variant / "__pycache__").mkdir()
    (variant / "__pycache__" / "layers.cpython-311.pyc").write_bytes(b"x")


def foreign_library(variant: Path) -> None:
    (variant / "helper.so").write_bytes(b"\x7fELF")


def hidden_library(variant: Path) -> None:
    (variant / "numerics" / "data.bin").write_bytes(b"\x7fELF")


def linked_folder(variant: Path) -> None:
    (variant / "helpers").symlink_to("/usr")


def latin(variant: Path) -> None:
    (variant / "plugin.py").write_bytes('text = "\u00e4"\n'.encode("latin-1"))


def rename(name: str) -> Callable[[Path], None]:
    def change(variant: Path) -> None:
        variant.rename(variant.with_name(name))

    return change


IMPURE = """

class Heavy(nn.Module):
    def __init__(self):
        super().__init__()

    def forward(self, x):
        return x


class HeavyLayout(NormLayout):
    forward = Heavy.forward
"""
GLOBAL_OPERATOR = (
    "\nimport torch as _t\n_LIB = _t.library.Library('shared_by_all', 'DEF')\n_LIB.define('f(int x) -> int')\n"
)
BROKEN: list[tuple[str, Callable[[Path], None], str]] = [
    ("folders of build.toml", rename("torch-xpu"), "torch-xpu is no folder of this build"),
    ("metadata and digest valid", replace("metadata.json", '"layout-kernels"', '"other"'), "has name other"),
    ("nothing beside the digest", bytecode, "is bytecode"),
    ("nothing beside the digest", linked_folder, "helpers is a link"),
    ("readable Python", append("plugin.py", "\ndef broken(:\n"), "plugin.py is no Python: SyntaxError"),
    ("readable Python", append("plugin.py", "\0"), "plugin.py is no Python: "),
    ("readable Python", latin, "plugin.py is no Python: SyntaxError"),
    ("relative imports only", append("plugin.py", "\nfrom layout_kernels import layers\n"), "write a relative import"),
    ("allowed dependencies", append("plugin.py", "\nimport transformers\n"), "imports transformers"),
    ("allowed dependencies", append("plugin.py", "\n__import__('einops')\n"), "imports einops"),
    ("allowed dependencies", append("plugin.py", "\ndef f():\n    import pandas\n"), "imports pandas"),
    ("literal __all__", replace("__init__.py", "__all__ = [", "__all__ = [] + ["), "no literal __all__"),
    ("layers exposed", replace("__init__.py", '    "layers",\n', ""), "does not expose layers"),
    ("operator names from _ops", append("layers.py", GLOBAL_OPERATOR), "'shared_by_all'"),
    ("abi3 and manylinux limits", foreign_library, "holds 1 compiled files (helper.so)"),
    ("abi3 and manylinux limits", hidden_library, "holds 1 compiled files (numerics/data.bin)"),
    ("public names only added", replace("layers.py", "class GatedMLP(", "class Renamed("), "layers.GatedMLP"),
    ("loads without GPU, Triton, torch_npu, transformers", append("layers.py", "\nimport triton\n"), "triton"),
    ("operators lie under the id", append("layers.py", GLOBAL_OPERATOR), "shared_by_all::f"),
]
# What one look at one build finds: a copy, and the start of a process, take longer.
BROKEN_TOGETHER: list[tuple[str, Callable[[Path], None], str]] = [
    *[
        ("relative imports only", append("plugin.py", f"\n{line}\n"), message)
        for line, message in (
            ("import importlib; importlib.import_module('layout_kernels.layers')", "names layout_kernels.layers;"),
            (
                "def f():\n    from importlib import import_module as m\n    m('layout_kernels')",
                "names layout_kernels;",
            ),
            ("__import__(name='layout_kernels')", "names layout_kernels;"),
            ("import pkgutil; pkgutil.resolve_name('layout_kernels.layers:Linear')", "names layout_kernels.layers:"),
            ("import runpy; runpy.run_module('layout_kernels.benchmark')", "names layout_kernels.benchmark;"),
            ("part = 'layers'; __import__(f'layout_kernels.{part}')", "names layout_kernels.;"),
            ("import sys; sys.modules['layout_kernels']", "names layout_kernels;"),
            ("import _layout_kernels_cpu_0123abcd", "imports _layout_kernels_cpu_0123abcd by name"),
            ("__import__('_layout_kernels_cpu_0123abcd')", "imports _layout_kernels_cpu_0123abcd by name"),
        )
    ],
    ("layers accepted by kernels' validator", append("layers.py", IMPURE), "Heavy"),
    (
        "names of __all__ resolve",
        replace("__init__.py", '    "layers",\n', '    "layers",\n    "nothing",\n'),
        "__all__ of the package names nothing: AttributeError",
    ),
    (
        "names of __all__ resolve",
        replace("__init__.py", '"verify": ".verification"', '"verify": ".gone"'),
        "__all__ of the package names verify: ModuleNotFoundError",
    ),
    (
        "names of __all__ resolve",
        replace("kernel_plugins/__init__.py", "__all__ = [", '__all__ = ["nothing", '),
        "__all__ of .kernel_plugins names nothing: AttributeError",
    ),
]


def test_this_build_keeps_every_rule(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = check_build.check(original)
    assert [verdict.rule for verdict in verdicts] == list(check_build.RULES)
    assert check_build.print_verdicts(verdicts), capsys.readouterr().out
    printed = capsys.readouterr().out
    assert all(f"{rule} " in printed for rule in check_build.RULES)
    assert printed.strip().endswith(f"{len(verdicts)} rules kept, 0 broken")


def test_every_rule_is_broken_below() -> None:
    assert {rule for rule, _, _ in (*BROKEN, *BROKEN_TOGETHER)} == set(check_build.RULES)


@pytest.mark.parametrize(("rule", "change", "message"), BROKEN, ids=[f"{rule}-{text}" for rule, _, text in BROKEN])
def test_a_rule_notices_the_build_that_breaks_it(
    rule: str, change: Callable[[Path], None], message: str, original: Path, tmp_path: Path
) -> None:
    build_folder = tmp_path / "build"
    change(Path(shutil.copytree(original / "torch-cpu", build_folder / "torch-cpu")))
    (variant,) = build_folder.iterdir()
    renew_digest(variant)
    (verdict,) = check_build.check(build_folder, [rule])
    assert any(message in problem for problem in verdict.problems), verdict
    assert not check_build.print_verdicts([verdict])


def test_a_rule_notices_all_that_is_broken_in_one_build(original: Path, tmp_path: Path) -> None:
    variant = Path(shutil.copytree(original / "torch-cpu", tmp_path / "torch-cpu"))
    for _, change, _ in BROKEN_TOGETHER:
        change(variant)
    renew_digest(variant)
    rules = list(dict.fromkeys(rule for rule, _, _ in BROKEN_TOGETHER))
    verdicts = {verdict.rule: verdict.problems for verdict in check_build.check(tmp_path, rules)}
    for rule, _, message in BROKEN_TOGETHER:
        assert any(message in problem for problem in verdicts[rule]), (message, verdicts)


def no_metadata(variant: Path) -> None:
    (variant / "metadata.json").unlink()


def no_package(variant: Path) -> None:
    (variant / "__init__.py").unlink()


def nothing_left(variant: Path) -> None:
    shutil.rmtree(variant)
    variant.mkdir()


def dangling_link(variant: Path) -> None:
    (variant / "plugin.py").unlink()
    (variant / "plugin.py").symlink_to("gone.py")


RUINED: dict[str, list[Callable[[Path], object]]] = {
    "in one process": [
        no_metadata,
        no_package,
        nothing_left,
        dangling_link,
        append("__init__.py", "\n)\n"),
        append("layers.py", "\n)\n"),
        lambda variant: (variant / "metadata.json").write_bytes(b"\xff"),
    ],
    # Each of these ends the process that loads the variants.
    "an exit": [append("__init__.py", "\nimport os; os._exit(7)\n")],
    "a last word": [append("__init__.py", "\nimport atexit; atexit.register(print, 'good bye')\n")],
    "SystemExit": [append("__init__.py", "\nraise SystemExit\n")],
}


@pytest.mark.parametrize("ruins", RUINED.values(), ids=RUINED)
def test_a_build_in_ruins_has_broken_rules_and_no_traceback(
    ruins: list[Callable[[Path], object]], original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each rule has its verdict, and the command its exit status."""
    for number, ruin in enumerate(ruins):
        ruin(Path(shutil.copytree(original / "torch-cpu", tmp_path / f"torch-cpu{number or ''}")))
    assert check_build.main([str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert all(f"{rule} " in printed for rule in check_build.RULES)
    assert "cannot be applied" not in printed, printed


def test_a_rule_that_cannot_be_applied_is_not_kept(original: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(build: names.BuildUnderTest) -> list[str]:
        raise KeyError("x")

    monkeypatch.setitem(check_build.RULES, "a rule", rule)
    (verdict,) = check_build.check(original, ["a rule"])
    assert verdict.problems == ("cannot be applied to this build: KeyError: 'x'",)


def test_a_changed_file_and_an_empty_folder_are_noticed(original: Path, tmp_path: Path) -> None:
    rule = ["metadata and digest valid"]
    variant = Path(shutil.copytree(original / "torch-cpu", tmp_path / "a" / "torch-cpu"))
    append("layers.py", "\n")(variant)
    (verdict,) = check_build.check(tmp_path / "a", rule)
    assert verdict.problems[0].startswith("torch-cpu: the digest does not agree")
    (verdict,) = check_build.check(tmp_path / "nothing", rule)
    assert "holds no variant" in verdict.problems[0]


def test_names_of_no_build_are_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_build.main([str(tmp_path), "--record"]) == 1
    assert "holds no variant; run make build" in capsys.readouterr().err


def test_the_record_of_names_only_grows(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "names.json"
    record.write_text(json.dumps({"1": {"layers": ["AnOlderOne"], "package": []}, "0": {}}))
    monkeypatch.setattr(names, "RECORD", record)
    names.record_names(names.BuildUnderTest(check_build.read_project(), original))
    written = json.loads(record.read_text())
    assert {"AnOlderOne", "CustomRMSNorm"} <= set(written["1"]["layers"])
    assert "layers" in written["1"]["package"]
    assert written["0"] == {}
