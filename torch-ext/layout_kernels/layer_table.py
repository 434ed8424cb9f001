"""The layers, one row each: what plan, report, loading, the tools and the checks of a build read about them.

A layer is added here and as a pair in ``layers.py``; nothing else lists them. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerRow:
    """One layer.

    Attributes:
        name: what a ``KernelConfig`` calls it.
        operation: which it runs; its implementation is what a report names.
        stands_for: module and class of one that it is put in place of, for the check that `kernels` accepts it; empty
            for a layer of several modules.
        flavour: of a norm that holds the checkpoint's weight in a layout; else empty.
        children: kinds of the modules that it is made of, in the order in which they run.
    """

    name: str
    operation: str
    stands_for: str = ""
    flavour: str = ""
    children: tuple[str, ...] = ()


_MODELS = "transformers.models"
ROWS = (
    LayerRow("CustomRMSNorm", "rms_norm", f"{_MODELS}.llama.modeling_llama:LlamaRMSNorm", "cast_then_scale"),
    LayerRow("FP32RMSNorm", "rms_norm", f"{_MODELS}.olmo2.modeling_olmo2:Olmo2RMSNorm", "scale_then_cast"),
    LayerRow("ZeroCenteredRMSNorm", "rms_norm", f"{_MODELS}.gemma2.modeling_gemma2:Gemma2RMSNorm", "one_plus_scale"),
    LayerRow("RMSNorm", "rms_norm", f"{_MODELS}.llama.modeling_llama:LlamaRMSNorm"),
    LayerRow("RMSNormGated", "gated_rms_norm", f"{_MODELS}.qwen3_next.modeling_qwen3_next:Qwen3NextRMSNormGated"),
    LayerRow("GatedMLP", "rms_norm_mlp", f"{_MODELS}.llama.modeling_llama:LlamaMLP", children=("MLP",)),
    LayerRow("RMSNormMLP", "rms_norm_mlp", children=("RMSNorm", "MLP")),
    LayerRow("RMSNormMLPRMSNorm", "rms_norm_mlp", children=("RMSNorm", "MLP", "RMSNorm")),
    LayerRow("Linear", "linear", "torch.nn:Linear"),
)
OPERATION_OF = {row.name: row.operation for row in ROWS}
NORM_LAYER_OF = {row.flavour: row.name for row in ROWS if row.flavour}  # by flavour
MLP_LAYER_OF = {len(row.children): row.name for row in ROWS if row.children}  # by the number of modules in a row
