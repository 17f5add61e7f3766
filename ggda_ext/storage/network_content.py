"""The hash of a module: its class, settings, hooks and inner modules, with or without the values of its tensors."""

from __future__ import annotations

import io
import types
import zipfile
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from ggda_ext.storage.code import counters_of, library_of
from ggda_ext.storage.hashing import hash_of_bytes, joined

if TYPE_CHECKING:
    from ggda_ext.storage.content import Content

_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that torch itself keeps in a module
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def network(content: Content, value: nn.Module, *, values: bool) -> bytes:
    """The hash of a module and of the modules inside it.

    Args:
        content: hashes the values that the module holds.
        value: the module.
        values: whether to hash the values of parameters and buffers, or only their dtypes and shapes.
    """
    if isinstance(value, torch.jit.ScriptModule):
        return scripted(value, values=values)
    held = vars(value)
    inner = held.get("_orig_mod") or value._modules.get("_orig_mod")
    if inner is not None:  # compiled
        return network(content, inner, values=values)
    own = type(value)
    is_users = library_of(own) is None
    found: list[Any] = ["network", content.token(own), None if is_users else _replaced_forward(content, own)]
    if is_users or isinstance(value, nn.modules.batchnorm._NormBase):
        found.append(value.training)
    counters = counters_of(own) if is_users else ()
    for name in sorted(held.keys() - _OF_TORCH):
        if not (name in counters and type(held[name]) is int):
            found += (name, content.at(name, held[name]))
    for hooks in filter(None, map(held.get, _HOOKS)):
        found += map(content.token, hooks.values())
    for name, tensor in (*value._parameters.items(), *value._buffers.items()):
        found += (name, *_of_tensor(content, tensor, values))
    for name, part in value._modules.items():
        found.append(name)
        if part is not None:
            with content.inside(name):
                known = content.known.get(id(part)) if values else None
                found.append(known or network(content, part, values=values))
    return joined(*found)


def hooks_of_all(content: Content) -> list[Any]:
    """Hashes of the global hooks, which torch runs in every module."""
    return [content.token(hook) for name in _HOOKS for hook in getattr(of_all_modules, f"_global{name}", {}).values()]


def _replaced_forward(content: Content, own: type) -> Any:
    """The hash of a user's function that replaces the `forward` of a library's class; None if there is none."""
    forward = getattr(own, "forward", None)
    if not isinstance(forward, types.FunctionType) or library_of(forward) is not None:
        return None
    return content.at("forward", forward)


def _of_tensor(content: Content, tensor: Tensor | None, values: bool) -> tuple[Any, ...]:
    if tensor is None:
        return ("none",)
    hooks = [content.token(hook) for hook in (tensor._backward_hooks or {}).values()]
    return (content.token(tensor) if values else f"{tensor.dtype} {list(tensor.shape)}", *hooks)


def scripted(value: Any, *, values: bool) -> bytes:
    """The hash of what torch would save of a script: code, constants and attributes, and with `values` its tensors."""
    buffer = io.BytesIO()
    torch.jit.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        held = {name.partition("/")[2]: _in_order(archive.read(name)) for name in archive.namelist()}
    kept = sorted(name for name in held if not name.endswith((".debug_pkl", "serialization_id")))
    parts = [(name, hash_of_bytes(held[name])) for name in kept if values or not name.startswith("data/")]
    return joined("script", *parts)


def _in_order(code: bytes) -> bytes:
    """Saved code with the constants sorted at the beginning, because torch writes them in any order."""
    lines = code.split(b"\n")
    return b"\n".join(
        (
            *sorted(line for line in lines if b" : Final[" in line),
            b"",
            *(line for line in lines if b" : Final[" not in line),
        )
    )
