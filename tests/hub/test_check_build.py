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
from tools.publishing import rules


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
    ("metadata and digest valid", replace("metadata.json", '"layout-kernels"', '"other"'), "names other"),
    ("no bytecode", bytecode, "is bytecode"),
    ("relative imports only", append("plugin.py", "\nfrom layout_kernels import layers\n"), "write a relative import"),
    ("allowed dependencies", append("plugin.py", "\nimport transformers\n"), "imports transformers"),
    ("allowed dependencies", append("plugin.py", "\ndef f():\n    import pandas\n"), "imports pandas"),
    ("literal __all__", replace("__init__.py", "__all__ = [", "__all__ = [] + ["), "no literal __all__"),
    ("layers exposed", replace("__init__.py", '    "layers",\n', ""), "does not expose layers"),
    ("operator names from _ops", append("layers.py", GLOBAL_OPERATOR), "'shared_by_all'"),
    ("abi3 and manylinux limits", foreign_library, "holds 1 extensions"),
    ("public names only added", replace("layers.py", "class GatedMLP(", "class Renamed("), "layers.GatedMLP"),
    ("loads without GPU, Triton, torch_npu, transformers", append("layers.py", "\nimport triton\n"), "triton"),
    ("operators lie under the id", append("layers.py", GLOBAL_OPERATOR), "shared_by_all::f"),
    ("layers accepted by kernels' validator", append("layers.py", IMPURE), "Heavy"),
]


def test_this_build_keeps_every_rule(original: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = check_build.check(original)
    assert [verdict.rule for verdict in verdicts] == list(check_build.RULES)
    assert check_build.print_verdicts(verdicts), capsys.readouterr().out
    printed = capsys.readouterr().out
    assert all(f"{rule} " in printed for rule in check_build.RULES)
    assert printed.strip().endswith(f"{len(verdicts)} rules kept, 0 broken")


def test_every_rule_is_broken_below() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(check_build.RULES)


@pytest.mark.parametrize(("rule", "change", "message"), BROKEN, ids=[f"{rule}-{text}" for rule, _, text in BROKEN])
def test_a_rule_notices_the_build_that_breaks_it(
    rule: str, change: Callable[[Path], None], message: str, original: Path, tmp_path: Path
) -> None:
    variant = Path(shutil.copytree(original / "torch-cpu", tmp_path / "build" / "torch-cpu"))
    change(variant)
    renew_digest(variant)
    (verdict,) = check_build.check(variant.parent, [rule])
    assert any(message in problem for problem in verdict.problems), verdict
    assert not check_build.print_verdicts([verdict])


def test_a_changed_file_a_strange_folder_and_an_empty_one_are_noticed(original: Path, tmp_path: Path) -> None:
    rule = ["metadata and digest valid"]
    variant = Path(shutil.copytree(original / "torch-cpu", tmp_path / "a" / "torch-cpu"))
    append("layers.py", "\n")(variant)
    strange = Path(shutil.copytree(original / "torch-cpu", tmp_path / "a" / "torch_strange"))
    (verdict,) = check_build.check(tmp_path / "a", rule)
    text = "\n".join(verdict.problems)
    assert "torch-cpu: the digest does not agree" in text
    assert f"{strange.name}: `kernels` does not know a folder of this name" in text
    (verdict,) = check_build.check(tmp_path / "nothing", rule)
    assert "holds no variant" in verdict.problems[0]


def test_the_record_of_names_only_grows(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "names.json"
    record.write_text(json.dumps({"1": {"layers": ["AnOlderOne"], "package": []}, "0": {}}))
    monkeypatch.setattr(rules, "RECORD", record)
    rules.record_names(rules.BuildUnderTest(check_build.read_project(), original))
    written = json.loads(record.read_text())
    assert {"AnOlderOne", "CustomRMSNorm"} <= set(written["1"]["layers"])
    assert "layers" in written["1"]["package"]
    assert written["0"] == {}
