"""The numbers that C++ knows settings by are the places of their names in Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from layout_kernels.ops import gated_activation, gated_rms_norm, rms_norm, rms_norm_mlp

ROOT = Path(__file__).resolve().parents[2]
HEADER = (ROOT / "kernel-src" / "kernels.h").read_text(encoding="utf-8")
BINDING = (ROOT / "torch-ext" / "torch_binding.cpp").read_text(encoding="utf-8")


def names(enumeration: str) -> tuple[str, ...]:
    (body,) = re.findall(rf"enum class {enumeration} : int32_t {{(.*?)}}", HEADER)
    codes = {name: int(code) for name, code in re.findall(r"(\w+) = (\d+)", body)}
    assert sorted(codes.values()) == list(range(len(codes)))
    return tuple(sorted(codes, key=codes.__getitem__))


@pytest.mark.parametrize(
    ("enumeration", "expected"), [("Flavour", rms_norm.FLAVOURS), ("Activation", gated_activation.ACTIVATIONS)]
)
def test_an_enumeration_has_the_names_in_their_order(enumeration: str, expected: tuple[str, ...]) -> None:
    assert names(enumeration) == tuple(expected)


def test_what_a_gated_norm_takes_has_the_codes_of_a_norm() -> None:
    assert rms_norm.FLAVOURS[: len(gated_rms_norm.FLAVOURS)] == gated_rms_norm.FLAVOURS


def test_no_norm_is_one_beyond_the_norms() -> None:
    assert (*rms_norm.FLAVOURS, "none") == rms_norm_mlp.FLAVOURS
    (code,) = re.findall(r"kNoNorm = (\d+)", BINDING)
    assert int(code) == len(rms_norm.FLAVOURS)
