"""Loads in which something goes by the stock names before the weights are there: layouts settle before it does.

Sources: transformers 5.22.2, ``modeling_utils.py`` and ``distributed/mixin.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch

from ..checkpoints import converter
from ..layouts.base import settle_all
from ..running.adopted import adoption_of


@contextmanager
def settling() -> Iterator[None]:
    """Let layouts settle before the weights are loaded where something else goes by the stock names meanwhile.

    A quantiser exchanges products by name, a parallel plan shards them by name, and files for weights on disk are
    written by name. A model that is built from a config has no load to wait for.
    """
    from transformers import PreTrainedModel, modeling_utils

    models: Any = PreTrainedModel
    record, load, build = modeling_utils.patch_output_recorders, models._load_pretrained_model, models._from_config
    read: Any = models.from_pretrained
    distribute: Any = getattr(models, "maybe_distribute_model", None)  # earlier releases have another one

    def settle(model: Any) -> None:
        converter.verify_all(model)
        settle_all(model)

    def recording(model: Any) -> None:
        record(model)
        if getattr(model.config, "quantization_config", None) is not None:
            settle(model)

    def distributing(cls: Any, model: Any, distributed_config: Any, mesh_manager: Any) -> Any:
        if mesh_manager is not None:
            settle(model)
        return distribute.__func__(cls, model, distributed_config, mesh_manager)

    def loading(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **named: Any) -> Any:
        if "disk" in (load_config.device_map or {}).values():
            settle(model)
        return load(model, state_dict, checkpoint_files, load_config, *rest, **named)

    def reading(cls: Any, *args: Any, **kwargs: Any) -> Any:
        found = read.__func__(cls, *args, **kwargs)
        _arrange_all(found[0] if isinstance(found, tuple) else found)
        return found

    def building(cls: Any, config: Any, **kwargs: Any) -> Any:
        model = build.__func__(cls, config, **kwargs)
        if not torch.empty(0).is_meta:  # else a part of a model that is being loaded
            settle(model)
        return model

    wrapped: dict[str, Any] = {
        "_load_pretrained_model": staticmethod(loading),
        "_from_config": classmethod(building),
        "from_pretrained": classmethod(wraps(read.__func__)(reading)),
    } | ({} if distribute is None else {"maybe_distribute_model": classmethod(distributing)})
    with ExitStack() as stack:
        for name, wrapper in wrapped.items():
            stack.enter_context(exchanged(models, name, wrapper))
        stack.enter_context(exchanged(modeling_utils, "patch_output_recorders", recording))
        yield


def _arrange_all(model: torch.nn.Module) -> None:
    """Of layouts that have settled early: their weights have come, and the load holds them no longer."""
    for module in model.modules():
        if (adoption := adoption_of(module)) is not None:
            adoption.arrange(module)


@contextmanager
def exchanged(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute, and the one that was there before, or none, afterwards."""
    before = vars(holder).get(name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(holder, name)
        else:
            setattr(holder, name, before)
