"""What a shared object asks of the system that loads it, read with pyelftools for whichever processor it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSegment, DynamicTag
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection, GNUVerSymSection
from elftools.elf.sections import SymbolTableSection

EXECUTABLE, WRITABLE = 1, 2  # bits of a segment's flags
TEXTREL = 4  # bit of DT_FLAGS
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}


@dataclass(frozen=True)
class Symbol:
    """A name that a shared object takes from others.

    Attributes:
        name: without its version.
        version: for example "GLIBC_2.28"; empty where it has none.
        weak: resolves to nothing where it is absent.
    """

    name: str
    version: str
    weak: bool


@dataclass(frozen=True)
class SharedObject:
    """The parts of a shared object that decide where it loads.

    Attributes:
        machine: processor, as ELF names it, for example "EM_X86_64".
        needed: libraries that it is linked to.
        search_paths: folders that it adds to the search for libraries (rpath, runpath).
        changes_code: the loader writes into its code (text relocations).
        executable_stack: it asks for a stack that can be executed, by saying so or by saying nothing.
        open_segments: number of segments that are writable and executable at once.
        undefined: names that it takes from others.
        exported: names that it gives to others.
    """

    machine: str
    needed: tuple[str, ...]
    search_paths: tuple[str, ...]
    changes_code: bool
    executable_stack: bool
    open_segments: int
    undefined: tuple[Symbol, ...]
    exported: tuple[str, ...]


def is_elf(path: Path) -> bool:
    """Whether a file is compiled code, whatever its name."""
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def read_shared_object(path: Path) -> SharedObject:
    """Read a file.

    Raises:
        ValueError: it is no whole shared object.
    """
    try:
        with path.open("rb") as file:
            return _read(ELFFile(file))
    except (ELFError, ValueError, KeyError, AttributeError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"is no whole shared object: {type(error).__name__} {error}".rstrip()) from error


def _read(elf: ELFFile) -> SharedObject:
    segments = [(segment["p_type"], segment["p_flags"]) for segment in elf.iter_segments()]
    stack = [flags for kind, flags in segments if kind == "PT_GNU_STACK"]
    (dynamic,) = [segment for segment in elf.iter_segments() if isinstance(segment, DynamicSegment)]
    tags = list(dynamic.iter_tags())
    undefined, exported = _symbols(elf)
    return SharedObject(
        machine=elf["e_machine"],
        needed=_strings(tags, "needed"),
        search_paths=(*_strings(tags, "rpath"), *_strings(tags, "runpath")),
        changes_code=any(
            tag.entry.d_tag == "DT_TEXTREL" or (tag.entry.d_tag == "DT_FLAGS" and tag.entry.d_val & TEXTREL)
            for tag in tags
        ),
        executable_stack=not stack or any(flags & EXECUTABLE for flags in stack),
        open_segments=sum(
            kind == "PT_LOAD" and flags & EXECUTABLE != 0 and flags & WRITABLE != 0 for kind, flags in segments
        ),
        undefined=tuple(undefined),
        exported=tuple(sorted(exported)),
    )


def _strings(tags: list[DynamicTag], name: str) -> tuple[str, ...]:
    """What pyelftools reads as the attribute `name` of tags of that kind."""
    return tuple(getattr(tag, name) for tag in tags if tag.entry.d_tag == f"DT_{name.upper()}")


def _symbols(elf: ELFFile) -> tuple[list[Symbol], list[str]]:
    table = elf.get_section_by_name(".dynsym")
    if not isinstance(table, SymbolTableSection):
        raise ValueError("it has no table of dynamic symbols")
    versions = elf.get_section_by_name(".gnu.version")
    needs = elf.get_section_by_name(".gnu.version_r")
    undefined, exported = [], []
    for index, symbol in enumerate(table.iter_symbols()):
        if not symbol.name:
            continue
        if symbol["st_shndx"] != "SHN_UNDEF":
            exported.append(symbol.name)
            continue
        version = ""
        if isinstance(versions, GNUVerSymSection) and isinstance(needs, GNUVerNeedSection):
            number = versions.get_symbol(index)["ndx"]
            found = needs.get_version(number) if isinstance(number, int) else None
            version = found[1].name if found else ""
        undefined.append(Symbol(symbol.name, version, symbol["st_info"]["bind"] == "STB_WEAK"))
    return undefined, exported
