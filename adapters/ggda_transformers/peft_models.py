"""PEFT models: default parameters, merged adapters, adapters in checkpoint folders, quantized models.

PEFT is imported only if a model is a PEFT model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn


def is_peft(model: nn.Module) -> bool:
    """Whether a model is a PEFT model."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def base_of(model: nn.Module) -> nn.Module:
    """The model inside a PEFT model, or the model itself."""
    return model.get_base_model() if is_peft(model) else model  # type: ignore[operator]


def counted_parameters(model: nn.Module) -> list[str] | None:
    """Names of the parameters that gradients are taken for by default; None means all that require a gradient.

    If an adapter was loaded for inference, the adapter and its base are frozen. Then the adapter's parameters are used.
    """
    if not is_peft(model) or any(parameter.requires_grad for parameter in model.parameters()):
        return None
    saved = {id(value) for value in _adapter_parameters(model)}
    return [name for name, value in model.named_parameters() if id(value) in saved]


def _adapter_parameters(model: Any) -> list[nn.Parameter]:
    """Parameters of the active adapters."""
    names = tuple(model.active_adapters)
    prefix = getattr(model.base_model, "prefix", "")
    found = []
    for name, value in model.named_parameters():
        parts = name.split(".")
        of_adapter = any(adapter in parts for adapter in names)
        if of_adapter and (not prefix or prefix in name or "modules_to_save" in parts or "prompt_encoder" in parts):
            found.append(value)
    return found


def check_not_quantized(model: nn.Module) -> None:
    """Raise an error if a model is loaded in 4 or 8 bits."""
    flags = ("is_loaded_in_4bit", "is_loaded_in_8bit")
    bits = next((flag for flag in flags if getattr(base_of(model), flag, False)), None)
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    if bits is None and not kinds & {"Params4bit", "Int8Params"}:
        return
    raise ValueError(
        f"the model is loaded in {'8' if bits == flags[1] or 'Int8Params' in kinds else '4'} bits, whose gradients are "
        "those of a rounded model and were not compared with autograd: load the base model with dtype=torch.bfloat16 "
        "or float32, and its adapter with peft.PeftModel.from_pretrained(base, folder)."
    )


@contextmanager
def unmerged(model: nn.Module) -> Iterator[None]:
    """Take merged adapters out of the weights inside this context; a merged adapter has no gradient of its own."""
    layers = (
        [module for module in model.modules() if getattr(module, "merged", False) is True] if is_peft(model) else []
    )
    kept = []
    for layer in layers:
        weight = layer.get_base_layer().weight  # type: ignore[operator]
        kept.append((layer, list(layer.merged_adapters), weight, weight.detach().clone()))  # type: ignore[arg-type]
    try:
        for layer, *_ in kept:
            layer.unmerge()  # type: ignore[operator]
        yield
    finally:
        for layer, adapters, weight, before in kept:
            layer.merge(adapter_names=adapters)  # type: ignore[operator]
            weight.data.copy_(before)  # merging again may round differently


def check_fits(own: Mapping[str, Tensor], saved: Mapping[str, Tensor], wrong: str) -> None:
    """Raise an error if tensors were saved from another model; tensors that share memory need to be saved only once.

    Args:
        own: the model's tensors by name.
        saved: the checkpoint's tensors by name.
        wrong: the beginning of the error message.
    """
    known = {own[name].data_ptr() for name in own if name in saved}
    absent = [name for name in own if name not in saved and own[name].data_ptr() not in known]
    strange = [name for name in saved if name not in own]
    other = [name for name in own if name in saved and own[name].shape != saved[name].shape]
    if not (absent or strange or other):
        return
    if other:
        why = f"{other[0]!r} is {list(saved[other[0]].shape)} there and {list(own[other[0]].shape)} in the model"
    else:
        why = f"it lacks {absent[0]!r}" if absent else f"it has {strange[0]!r}"
    raise ValueError(
        f"{wrong}: {why} ({len(absent)} missing, {len(strange)} unexpected, {len(other)} of another shape). Pass "
        "checkpoints of this model's training."
    )


def load_adapter(model: nn.Module, folder: Path, state: Mapping[str, Tensor]) -> None:
    """Load the adapter of a checkpoint folder into a PEFT model that has an adapter of the same kind."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    if not is_peft(model):
        raise ValueError(
            f"{folder} holds a PEFT adapter, and the model is a {type(model).__name__} without one: pass the "
            "PeftModel, e.g. peft.get_peft_model(model, PeftConfig.from_pretrained(folder))."
        )
    (name,) = model.active_adapters[:1]  # type: ignore[index]
    expected = get_peft_model_state_dict(model, adapter_name=name)
    check_fits(expected, state, f"{folder} is the checkpoint of another adapter")
    set_peft_model_state_dict(model, dict(state), adapter_name=name)
