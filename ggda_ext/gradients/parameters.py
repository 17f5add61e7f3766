"""Which parameters count, and where each of them stands in a flat row of length p."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ggda_ext.distributed import inner_name, unwrapped
from ggda_ext.model_state import Place, training_kernels

ParameterChoice = Iterable[str | nn.Module | nn.Parameter] | None


class ParameterSpace:
    """The chosen parameters of a model as one flat vector, in the model's own order.

    Args:
        model: the model; one in a DistributedDataParallel is unwrapped, so its names have no ``module.`` in front.
        chosen: names of parameters or modules, modules, or parameters; by default every parameter that
            requires a gradient. Chosen by name, a frozen parameter counts too.
    """

    def __init__(self, model: nn.Module, chosen: ParameterChoice = None) -> None:
        self.model = unwrapped(model)
        self.parameters = _chosen(self.model, chosen)
        self.spans: dict[int, tuple[int, int]] = {}
        end = 0
        for parameter in self.parameters.values():
            self.spans[id(parameter)] = (end, end + parameter.numel())
            end += parameter.numel()
        self.size = end
        first = next(iter(self.parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self.changing: list[Place] = []
        """Buffers that the model's `forward` changes; `gradients` puts them back."""

    def __len__(self) -> int:
        return self.size

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self.spans

    def part(self, rows: Tensor, parameter: nn.Parameter) -> Tensor:
        """The columns of rows `[m, p]` that belong to one parameter, `[m, *shape]`, as a view."""
        low, high = self.spans[id(parameter)]
        return rows[:, low:high].unflatten(1, parameter.shape) if parameter.dim() else rows[:, low]

    def split(self, row: Tensor) -> dict[str, Tensor]:
        """A flat row `[p]` as one tensor per parameter."""
        return {name: self.part(row[None], value)[0] for name, value in self.parameters.items()}

    def flatten(self, tensors: Sequence[Tensor | None], row: Tensor) -> Tensor:
        """Write one tensor per parameter (None for zeros) into a flat row `[p]`."""
        for tensor, (low, high) in zip(tensors, self.spans.values(), strict=True):
            if tensor is not None and tensor.is_sparse:  # of an Embedding(sparse=True)
                tensor = tensor.to_dense()
            row[low:high] = 0 if tensor is None else tensor.reshape(-1)
        return row

    @contextmanager
    def gradients(self, enabled: bool, also: Iterable[nn.Parameter] = ()) -> Iterator[None]:
        """Let only the chosen parameters require gradients, or (``enabled=False``) none at all but `also`."""
        before = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        wanted = {id(parameter) for parameter in also} if not enabled else self.spans.keys()
        buffers = [(place, place.read()) for place in self.changing]
        try:
            for parameter, _ in before:
                parameter.requires_grad_(id(parameter) in wanted)
            with training_kernels(), torch.enable_grad():
                yield
        finally:
            for parameter, required in before:
                parameter.requires_grad_(required)
            for place, content in buffers:
                place.write(content)


def _chosen(model: nn.Module, chosen: ParameterChoice) -> dict[str, nn.Parameter]:
    named = dict(model.named_parameters())
    if chosen is None:
        parameters = {name: value for name, value in named.items() if value.requires_grad}
        if not parameters:
            raise ValueError(
                f"the model has {len(named)} parameters, none of which requires a gradient: "
                "choose some with parameters=, or unfreeze the model."
            )
    else:
        wanted = {id(value) for item in _as_list(chosen) for value in _members(model, item)}
        parameters = {name: value for name, value in named.items() if id(value) in wanted}
        if not parameters:
            raise ValueError("parameters= chooses no parameter of the model.")
    for name, value in parameters.items():
        if value.is_complex():
            raise TypeError(
                f"parameter {name!r} is complex ({value.dtype}), so an inner product of gradients has no order: leave "
                "it out with parameters=, or store its real and imaginary part (torch.view_as_real)."
            )
        if value.is_meta:
            raise ValueError(f"parameter {name!r} is on the meta device and holds no numbers: load the model first.")
        if value.is_inference():
            raise ValueError(
                f"parameter {name!r} was made in torch.inference_mode and cannot have a gradient: make the model "
                "outside of it."
            )
    kinds = {(value.dtype, value.device) for value in parameters.values()}
    if len(kinds) > 1:
        raise ValueError(f"the chosen parameters differ in dtype or device: {sorted(map(str, kinds))}.")
    return parameters


def _as_list(chosen: ParameterChoice) -> list[str | nn.Module | nn.Parameter]:
    return [chosen] if isinstance(chosen, str | nn.Module | nn.Parameter) else list(chosen or [])


def _members(model: nn.Module, item: str | nn.Module | nn.Parameter) -> list[nn.Parameter]:
    if isinstance(item, nn.Parameter):
        return [item]
    if isinstance(item, nn.Module):
        return list(item.parameters())
    every = dict(model.named_parameters(remove_duplicate=False))
    item = inner_name(item, model)
    if item in every:
        return [every[item]]
    modules = dict(model.named_modules())
    if item in modules:
        return list(modules[item].parameters())
    known = ", ".join(list(every)[:8]) + (", …" if len(every) > 8 else "")
    raise ValueError(f"parameters= names {item!r}, which is no parameter or module of the model; it has {known}.")
