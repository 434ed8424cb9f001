"""Each promise of the compiled variant about other systems is broken once, and `check_abi` says which."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from elftools.elf.elffile import ELFFile

from tools.native import check_abi
from tools.native.compile import LINK, torch_folder
from tools.native.elf import is_elf, read_shared_object
from tools.native.torch_names import SHIMS, stable_names
from tools.project import read_project

EXTENSION = """
extern "C" {{
{declarations}
__attribute__((visibility("default"))) void *PyInit_planted(void) {{ {body} return 0; }}
}}
"""


def compiled(folder: Path, *flags: str, body: str = "", declarations: str = "") -> Path:
    """A small extension that keeps every promise but for what the arguments plant."""
    source = folder / "planted.cpp"
    source.write_text(EXTENSION.format(body=body, declarations=declarations))
    target = folder / "planted.abi3.so"
    command = ["g++", "-fPIC", "-fvisibility=hidden", *LINK, *flags, str(source), "-o", str(target)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def calling(name: str) -> dict[str, str]:
    return {"declarations": f"int {name}();", "body": f"{name}();"}


def test_an_extension_without_a_fault_keeps_every_promise(tmp_path: Path) -> None:
    assert check_abi.problems(compiled(tmp_path, **calling("torch_get_num_threads"))) == []


def patched(file: Path, position: Callable[[ELFFile], int], data: bytes) -> Path:
    with file.open("rb") as opened:
        where = position(ELFFile(opened))
    content = bytearray(file.read_bytes())
    content[where : where + len(data)] = data
    file.write_bytes(content)
    return file


def flags_of(kind: str, value: int) -> Callable[[ELFFile], int]:
    """Where the flags of the first segment of a kind stand whose flags are `value`."""

    def position(elf: ELFFile) -> int:
        index = next(
            i for i, part in enumerate(elf.iter_segments()) if part["p_type"] == kind and part["p_flags"] == value
        )
        return int(elf["e_phoff"] + index * elf["e_phentsize"] + 4)

    return position


FAULTS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "an executable stack": (
        lambda folder: compiled(folder, "-Wl,-z,execstack"),
        "asks for an executable stack; link it with -z noexecstack",
    ),
    "no word about the stack": (
        lambda folder: patched(compiled(folder), lambda elf: flags_of("PT_GNU_STACK", 6)(elf) - 4, b"\0" * 4),
        "asks for an executable stack; link it with -z noexecstack",
    ),
    "a segment that is writable and executable": (
        lambda folder: patched(compiled(folder), flags_of("PT_LOAD", 6), struct.pack("<I", 7)),
        "has a segment that is writable and executable; link it with -z separate-code",
    ),
    "rpath": (
        lambda folder: compiled(folder, "-Wl,-rpath,/opt/torch/lib", "-Wl,--disable-new-dtags"),
        "searches libraries in /opt/torch/lib; link it without rpath",
    ),
    "runpath": (
        lambda folder: compiled(folder, "-Wl,-rpath,$ORIGIN", "-Wl,--enable-new-dtags"),
        "searches libraries in $ORIGIN; link it without rpath",
    ),
    "another processor": (
        lambda folder: patched(compiled(folder), lambda elf: 18, struct.pack("<H", 183)),
        "is compiled for EM_AARCH64, its folder says x86_64",
    ),
    "a function that torch got later": (
        lambda folder: compiled(folder, **calling("torch_new_generator_handle")),
        "uses torch_new_generator_handle, which the stable interface of torch 2.10 has not; do without it",
    ),
    "a function that torch generates for AOTInductor": (
        lambda folder: compiled(folder, **calling("aoti_torch_cpu_randn_like")),
        "uses aoti_torch_cpu_randn_like, which the stable interface of torch 2.10 has not; do without it",
    ),
    "a foreign function": (
        lambda folder: compiled(folder, **calling("cblas_sgemm")),
        "uses cblas_sgemm, which neither torch's stable interface nor Python has",
    ),
    "a second export": (
        lambda folder: compiled(
            folder, declarations='__attribute__((visibility("default"))) void helper(void) {}', body="helper();"
        ),
        "exports PyInit_planted, helper; it must export PyInit_planted alone",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_promise_that_is_broken_is_named_with_the_way_out(fault: str, tmp_path: Path) -> None:
    make, message = FAULTS[fault]
    file = make(tmp_path)
    assert message in check_abi.problems(file, "x86_64")
    assert [found for found in check_abi.problems(file, "x86_64") if "abi3audit" not in found] == [message]


def test_code_that_the_loader_writes_into_is_found(tmp_path: Path) -> None:
    declarations = "extern int value; int value = 1; int *place = &value;"
    file = compiled(
        tmp_path, "-mcmodel=large", "-fno-pic", "-Wl,-z,notext", declarations=declarations, body="value++;"
    )
    assert "is relocated in its code; compile it with -fPIC" in check_abi.problems(file)


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF" + b"\0" * 200, b"no library at all"])
def test_a_file_that_is_no_library_is_a_problem_and_no_traceback(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "planted.abi3.so"
    file.write_bytes(data)
    (found,) = check_abi.problems(file)
    assert found.startswith("is no whole shared object: ")
    assert is_elf(file) == data.startswith(b"\x7fELF")


def test_a_library_that_was_cut_is_a_problem_at_every_length(tmp_path: Path) -> None:
    whole = compiled(tmp_path).read_bytes()
    file = tmp_path / "cut.abi3.so"
    for size in range(0, len(whole), 97):
        file.write_bytes(whole[:size])
        assert check_abi.problems(file), size


def test_the_list_of_names_is_of_the_oldest_torch_that_build_toml_names() -> None:
    assert read_project().table["torch"]["stable-abi"]["cpu"] == check_abi.TORCH_LIMIT
    assert check_abi.TORCH_NAMES.read_text().startswith(f"# torch {check_abi.TORCH_LIMIT}.")


def test_the_names_of_the_oldest_torch_are_still_there_and_later_ones_are_not_among_them() -> None:
    folder = torch_folder()
    exported = set(read_shared_object(folder / "lib" / "libtorch_cpu.so").exported)
    headers = [(folder / "include" / name).read_text() for name in SHIMS]
    now = set(stable_names(headers, exported))
    assert check_abi.torch_names() <= now
    if not torch.__version__.startswith(check_abi.TORCH_LIMIT):
        assert {"torch_new_generator_handle", "torch_from_blob"} <= now - check_abi.torch_names()
