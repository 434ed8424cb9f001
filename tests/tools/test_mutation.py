"""The table of planted faults fits today's tree, and the tool tells what a test notices from what none does."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.mutation.__main__ import attempt, chosen, failing_without, failures, report
from tools.mutation.fault import Fault, files_of_tests, place_of, planted
from tools.mutation.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]


def test_each_planted_text_occurs_once_and_each_fault_has_tests():
    wrong = []
    for fault in FAULTS:
        try:
            place_of(fault, ROOT)
            files_of_tests(fault, ROOT)
        except ValueError as error:
            wrong.append(str(error))
    assert not wrong, "\n".join(wrong)


def test_a_planted_fault_is_another_program_and_not_a_broken_one():
    for fault in FAULTS:
        place = place_of(fault, ROOT)
        text = place.read_text(encoding="utf-8")
        assert planted(fault, text) != text, fault.name
        if place.suffix == ".py":
            assert ast.dump(ast.parse(planted(fault, text))) != ast.dump(ast.parse(text)), fault.name


def test_there_are_enough_faults_of_every_folder_and_no_name_twice():
    assert len(FAULTS) >= 40
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    places = {place_of(fault, ROOT).relative_to(ROOT).as_posix() for fault in FAULTS}
    folders = ("ops", "dispatch", "layouts", "models", "kernel_plugins", "numerics", "benchmark")
    wanted = [*(f"torch-ext/layout_kernels/{name}/" for name in folders), "kernel-src/", "tools/publishing/"]
    assert [folder for folder in wanted if not any(place.startswith(folder) for place in places)] == []
    assert chosen(["gate and up are swapped"]) != chosen([]) == list(FAULTS)


def test_what_a_test_notices_is_told_from_what_none_does_and_from_a_test_that_always_fails(tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    module, before = tmp_path / "some.py", "def one():\n    return 1\n\n\ndef two():\n    return 2\n"
    module.write_text(before)
    text = "import sys\nsys.path.insert(0, '.')\nimport some\n\n\ndef test_one():\n    assert some.one() == 1\n"
    (tmp_path / "tests" / "test_some.py").write_text(text)
    (tmp_path / "tests" / "test_red.py").write_text("def test_red():\n    assert False\n")
    noticed = Fault("one", "**/some.py", "return 1", "return 3", ("test_some.py",))
    unseen = Fault("two", "**/some.py", "return 2", "return 3", ("test_some.py",))
    red = Fault("red", "**/some.py", "return 2", "return 3", ("test_red.py",))
    found = {fault.name: attempt(fault, tmp_path) for fault in (noticed, unseen, red)}
    assert module.read_text() == before
    test, always = "tests/test_some.py::test_one", "tests/test_red.py::test_red"
    assert found == {"one": test, "two": None, "red": always}
    unproven = failing_without(tmp_path, [test, always])
    assert unproven == {always}
    assert report(found, unproven) == 1
    assert "1 of 3 faults were caught, 33.3%" in capsys.readouterr().out
    assert report({"one": test}, set()) == 0


def test_a_summary_is_read_as_pytest_writes_it():
    text = (
        "FAILED tests/a.py::test_b[1-x y] - assert 1 == 2\nERROR tests/c.py\nERROR tests/d.py::test_e - ValueError\n"
    )
    assert failures(text) == ["tests/a.py::test_b[1-x y]", "tests/c.py", "tests/d.py::test_e"]
