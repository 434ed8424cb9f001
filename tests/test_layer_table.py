"""The table of layers and the pairs in layers.py say the same."""

from __future__ import annotations

import layout_kernels
from layout_kernels import layers
from layout_kernels.layer_table import MLP_LAYER_OF, NORM_LAYER_OF, ROWS
from layout_kernels.ops.rms_norm import FLAVOURS
from layout_kernels.recognition.norms import DESCRIPTIONS


def test_every_layer_has_a_row_and_every_row_a_layer() -> None:
    own = {name for name, value in vars(layers).items() if getattr(value, "__module__", "") == layers.__name__}
    assert {row.name for row in ROWS} == {name for name in own if not name.startswith("_") and name[-6:] != "Layout"}
    for row in ROWS:
        assert callable(getattr(layout_kernels, row.operation))
        layout = getattr(layers, f"{row.name}Layout", None)
        assert getattr(layout, "flavour", "") == row.flavour
        assert getattr(layout, "kinds", row.children) == row.children
        assert (layout is None) == (not row.flavour and not row.children)


def test_every_flavour_has_a_layer_and_a_description() -> None:
    assert set(NORM_LAYER_OF) == set(FLAVOURS) == set(DESCRIPTIONS)
    assert MLP_LAYER_OF == {1: "GatedMLP", 2: "RMSNormMLP", 3: "RMSNormMLPRMSNorm"}
