"""What a family is fed: token ids, and pixels or sound where the family shows by its own methods how much it wants.

Candidates are tried on the stock model, richest first. Pixels count as given only when other pixels give another
result, so that a tower which runs but is not used cannot pass for a test of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .overrides import INPUTS

Inputs = dict[str, Any]
TOKENS = 12


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(rows: int = 2, length: int = 9) -> torch.Tensor:
    """Ids of ordinary tokens: above the special ones at the start, below those that the shrinker gave out."""
    return torch.randint(3, 90, (rows, length), generator=_generator(5))


def _accepts(model: Any) -> set[str]:
    return set(inspect.signature(type(model).forward).parameters)


def _attribute(config: Any, *names: str) -> Any:
    return next((getattr(config, n) for n in names if getattr(config, n, None) is not None), None)


def _text(model: Any, rows: int = 2) -> Inputs:
    accepted = _accepts(model)
    found: Inputs = {"input_ids": tokens(rows)}
    if "decoder_input_ids" in accepted:
        found["decoder_input_ids"] = tokens(rows, 6)
    if "mm_token_type_ids" in accepted:
        found["mm_token_type_ids"] = torch.zeros_like(found["input_ids"])
    return found


def _square(model: Any, seed: int) -> Inputs:
    """One square image of the vision config's size, NCHW."""
    config = _attribute(model.config, "vision_config", "vision_tower_config", "vq_config") or model.config
    size = _attribute(config, "image_size") or 16
    height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    channels = _attribute(config, "num_channels", "in_channels") or 3
    return {"pixel_values": torch.randn(1, channels, height, width, generator=_generator(seed))}


def _sized(model: Any, seed: int) -> Inputs:
    found = _square(model, seed)
    return {**found, "image_sizes": torch.tensor([list(found["pixel_values"].shape[-2:])])}


def _crops(model: Any, seed: int) -> Inputs:
    """Several images of one row, [rows, images, channels, height, width]."""
    found = _square(model, seed)["pixel_values"]
    return {"pixel_values": found[:, None]}


def _patches(model: Any, seed: int) -> Inputs:
    """A grid of flattened patches, as Qwen2-VL and its relatives take them."""
    config = model.config.vision_config
    patch = _attribute(config, "patch_size", "spatial_patch_size")
    channels = _attribute(config, "in_channels", "in_chans", "num_channels") or 3
    size = channels * (_attribute(config, "temporal_patch_size", "patch_temporal") or 1) * patch**2
    pixels = torch.randn(16, size, generator=_generator(seed))
    return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}


def _square_patches(model: Any, seed: int) -> Inputs:
    """As :func:`_patches`, each patch a small image."""
    found, config = _patches(model, seed), model.config.vision_config
    patch = config.patch_size
    return {**found, "pixel_values": found["pixel_values"].reshape(16, -1, patch, patch)}


def _sized_crops(model: Any, seed: int) -> Inputs:
    """An image whole and in one crop, with its size."""
    found = _sized(model, seed)
    return {**found, "pixel_values": found["pixel_values"][:, None].repeat(1, 2, 1, 1, 1)}


def _placed_patches(model: Any, seed: int) -> Inputs:
    """Six by six flattened patches with their places, as Gemma 4 takes them."""
    patch = model.config.vision_config.patch_size
    pixels = torch.rand(1, 36, 3 * patch**2, generator=_generator(seed))
    places = torch.stack(torch.meshgrid(torch.arange(6), torch.arange(6), indexing="xy"), dim=-1)
    return {"pixel_values": pixels, "image_position_ids": places.reshape(1, 36, 2)}


def _rows_of(features: Any) -> int:
    """How many tokens the features of one image stand for."""
    value = _attribute(features, "pooler_output", "last_hidden_state")
    value = features if value is None else value
    value = value if isinstance(value, torch.Tensor) else torch.cat([part.flatten(0, -2) for part in value])
    return value.flatten(0, -2).shape[0]


def _with_text(model: Any, image: Inputs) -> Inputs:
    """``image``, and token ids with as many image tokens as the model makes of it."""
    token = _attribute(model.config, "image_token_id", "image_token_index", "im_patch_id")
    method = getattr(model, "get_image_features", None) or model.model.get_image_features
    accepted = inspect.signature(method).parameters
    given = {name: value for name, value in image.items() if name in accepted or name == "pixel_values"}
    with torch.no_grad():
        count = _rows_of(method(**given))
    ids = tokens(1, TOKENS + count)
    ids[0, 3 : 3 + count] = token
    start = _attribute(model.config, "vision_start_token_id")
    if start is not None:
        ids[0, 2] = start
    found: Inputs = {**image, "input_ids": ids}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in _accepts(model):
            found[name] = (ids == token).long()
    if "decoder_input_ids" in _accepts(model):
        found["decoder_input_ids"] = tokens(1, 6)
    return found


def _image_forms(accepted: set[str]) -> tuple[Callable[[Any, int], Inputs], ...]:
    """Ways to write an image down, for a forward with these parameters."""
    if "image_position_ids" in accepted:
        return (_placed_patches,)
    if "image_grid_thw" in accepted:
        return (_patches, _square_patches)
    return (_square, _sized, _crops, _sized_crops)


def _candidates(model: Any, family: str, seed: int) -> Iterator[tuple[str, Callable[[], Inputs]]]:
    accepted = _accepts(model)
    if family in INPUTS:
        yield "pixels and text", lambda: INPUTS[family](model, seed)
    if "pixel_values" in accepted and "input_ids" in accepted:
        for make in _image_forms(accepted):
            yield "pixels and text", lambda make=make: _with_text(model, make(model, seed))  # type: ignore[misc]
    if "input_ids" in accepted:
        yield "text", lambda: _text(model)
        yield "text", lambda: {**_text(model), "use_cache": False}
    if "pixel_values" in accepted:
        yield "pixels", lambda: _square(model, seed)
        yield "pixels and text", lambda: {**_square(model, seed), **_text(model, 1)}


def tensors_of(output: Any) -> dict[str, torch.Tensor]:
    """The floating-point tensors of a model's output, caches left out."""
    found: dict[str, torch.Tensor] = {}
    items = (
        output.items()
        if hasattr(output, "items")
        else enumerate(output if isinstance(output, tuple | list) else [output])
    )
    for name, value in items:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            found[str(name)] = value
        elif isinstance(value, tuple | list) or (hasattr(value, "items") and "past" not in str(name)):
            found |= {f"{name}.{key}": part for key, part in tensors_of(value).items()}
    return found


def run(model: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """The model's results on a copy of ``inputs``, with the random numbers of a fixed seed."""
    torch.manual_seed(3)
    copied = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
    return tensors_of(model(**copied))


def _why_not(model: Any, family: str, index: int, inputs: Inputs) -> str | None:
    """Why ``inputs`` are no good for a comparison, or None."""
    with torch.no_grad():
        results = run(model, inputs)
        if not results:
            return "no floating-point result"
        bad = [name for name, value in results.items() if not value.isfinite().all()]
        if bad:
            return f"results {bad} are not finite"
        if "pixel_values" in inputs:
            other = list(_candidates(model, family, 8))[index][1]()
            if all(torch.equal(value, results[name]) for name, value in run(model, other).items()):
                return "other pixels give the same result"
    return None


def make_inputs(model: Any, family: str) -> tuple[Inputs, str]:
    """Inputs that the stock ``model`` takes, and in words what they are.

    Raises:
        RuntimeError: no candidate runs; the message has each one's reason.
    """
    reasons = []
    for index, (name, make) in enumerate(_candidates(model, family, 7)):
        try:
            inputs = make()
            reason = _why_not(model, family, index, inputs)
        except Exception as error:  # noqa: BLE001 whatever a model raises on inputs that are not for it
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            return inputs, name
        reasons.append(f"{name}: {reason[:160]}")
    raise RuntimeError("no inputs run: " + "; ".join(reasons))
