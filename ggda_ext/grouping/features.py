"""Features to cluster: raw inputs, representations, or gradients, as one array of rows `[n, d]`.

The representation of a point is the input h of the last linear layer; its gradient feature is ∂loss/∂h. It is
∂loss/∂h = δ·W, where δ is the gradient at the layer's C outputs (softmax − onehot for cross-entropy). With W = L·Qᵀ and
orthonormal columns in Q, the C numbers δ·L have the same distances and angles as the d numbers δ·W.

With several ranks, each rank runs a share of the batches. Every rank gets all rows, bit for bit as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.loss import _Loss
from torch.utils.hooks import RemovableHandle

from ggda_ext.data import DataLike, IndexedData, batch_length, to_device
from ggda_ext.losses import OutputLoss, as_example_loss
from ggda_ext.model import check_deterministic_modules, full_precision, inner_name, product, unwrapped
from ggda_ext.sharing import in_order
from ggda_ext.tables import is_table, tensor_of

Run = Callable[[Any], Tensor]
"""A function that runs the model on a batch and returns the losses `[b]`."""
LayerChoice = str | nn.Module | None
"""The name of a layer (as in `model.named_modules()`) or the layer itself; None for the last linear layer that runs."""


def input_features(data: Any, batch_size: int = 1024) -> np.ndarray:
    """Return raw features, flattened `[n, d]`, of an array, a DataFrame, or the first input of a data set or loader."""
    if is_table(data):
        data = tensor_of(data, "data")
    elif hasattr(data, "to_numpy"):
        data = data.to_numpy()
    if isinstance(data, np.ndarray | Tensor):
        rows = _on_cpu(data).numpy() if isinstance(data, Tensor) else data
        if rows.ndim < 1:
            raise ValueError("data is a single number: pass one row of features per point.")
        return rows.reshape(len(rows), -1)

    def rows_of(batch: Any) -> Tensor:
        inputs = batch[0] if isinstance(batch, tuple | list) else batch
        if not isinstance(inputs, Tensor):
            what = f"a dict with keys {list(inputs)}" if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
            raise TypeError(f"the inputs are {what}, not a tensor: pass the features to cluster as one array [n, d].")
        return inputs.flatten(1) if inputs.dim() > 1 else inputs[:, None]

    indexed = IndexedData(data)
    return _collect(indexed, ((at, rows_of(batch)) for at, batch in _my_batches(indexed, batch_size)))


def representations(
    model: nn.Module, data: DataLike, *, layer: LayerChoice = None, batch_size: int = 1024, loss_fn: Any = None
) -> np.ndarray:
    """Return the inputs `[n, d]` of the last linear layer, or of `layer`; for sequences, their mean over tokens.

    Args:
        model: any module in eval mode (or without dropout and BatchNorm); it is not changed.
        data: the inputs of the model, as in `GroupGradients`; a target in the data is not used.
        layer: the layer whose input is taken; None to find the last linear layer by running the first batch.
        batch_size: number of examples per forward pass. Only the features of each batch are kept.
        loss_fn: a `BatchLoss`, for a model with its own calling convention; the value of the loss is not used.
    """

    def rows_of(run: Run, batch: Any, module: nn.Module) -> Tensor:
        caught: list[Tensor] = []
        with (
            _hook(module.register_forward_pre_hook(lambda _, args: caught.append(_first_tensor(args)))),
            torch.no_grad(),
        ):
            run(batch)
        return _per_example(_only(caught, module), batch).mean(1)

    return _features(model, loss_fn, data, layer, batch_size, rows_of)


def gradients(
    model: nn.Module,
    loss_fn: Any,
    data: DataLike,
    *,
    layer: LayerChoice = None,
    batch_size: int = 1024,
    rotate: bool = True,
) -> np.ndarray:
    """Return the gradient of each point's loss with respect to the input of the last linear layer, or of `layer`.

    Only paths to the loss through that layer count. If the layer gets a sequence, the gradients of its tokens are added
    up. The sum is the gradient for a common shift of all tokens; padding adds nothing.

    Args:
        model: any module in eval mode (or without dropout and BatchNorm); it is not changed.
        loss_fn: ``loss_fn(output, target)`` with any reduction, or an `ExampleLoss`.
        data: inputs and targets, as in `GroupGradients`.
        layer: the layer whose input is taken; None to find the last linear layer by running the first batch.
        batch_size: number of examples per forward pass. The backward pass stops at the layer.
        rotate: whether to return the gradients of a linear layer with fewer outputs than inputs in the C coordinates
            that span them. They have the same distances in `[n, C]` as in `[n, d]`.

    Returns:
        Rows `[n, C]` or `[n, d]`.
    """
    rotations: dict[nn.Module, Tensor] = {}

    def rows_of(run: Run, batch: Any, module: nn.Module) -> Tensor:
        rotated = rotate and _narrows(module)
        if rotated and module not in rotations:  # L [C, C] with W = L·Qᵀ and orthonormal columns in Q
            rotations[module] = torch.linalg.qr(_wide(module.weight).T, mode="r").R.T
        leaves: list[Tensor] = []
        with _hook(_start_graph(module, leaves, at_output=rotated)), torch.no_grad():
            total = run(batch).sum()
            start = _only(leaves, module)
            if not total.requires_grad:
                raise ValueError(f"the loss does not depend on what {type(module).__name__} returns: pass layer=.")
            with full_precision(total):
                (slope,) = torch.autograd.grad(total, start)
        summed = _per_example(slope, batch).sum(1)
        return product(_wide(summed), rotations[module]).to(summed.dtype) if rotated else summed

    return _features(model, loss_fn, data, layer, batch_size, rows_of)


def _start_graph(module: nn.Module, leaves: list[Tensor], at_output: bool) -> RemovableHandle:
    """Add a hook that starts the autograd graph at the module's output or input, and appends the leaf to `leaves`."""

    def leaf(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise ValueError(f"{type(module).__name__} takes {tensor.dtype}, not real numbers: pass another layer=.")
        torch.set_grad_enabled(True)  # from here to the loss; the caller's no_grad restores it at its end
        leaves.append(tensor.detach().requires_grad_())
        return leaves[-1].clone()  # because the model may change it in place

    def output_leaf(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        # the last bit of a float32 product with a narrow matrix depends on where the row is; float64, rounded, does not
        weight, bias = _wide(module.weight), None if module.bias is None else _wide(module.bias)
        return leaf(nn.functional.linear(_wide(_first_tensor(arguments)), weight, bias).to(output.dtype))

    if at_output:
        return module.register_forward_hook(output_leaf)
    return module.register_forward_pre_hook(lambda _, args: (leaf(_first_tensor(args)), *args[1:]))


def last_linear(model: nn.Module, run: Callable[[], Any]) -> nn.Linear:
    """Return the `nn.Linear` that runs last when `run` calls the model."""
    ran: list[nn.Linear] = []
    modules = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [module.register_forward_pre_hook(lambda module, _: ran.append(module)) for module in modules]
    with _hook(*handles), torch.no_grad():
        run()
    if not ran:
        raise ValueError(
            f"{type(model).__name__} runs no nn.Linear layer, so it has no linear head: pass layer= with the name "
            "of the module whose input is to be clustered."
        )
    return ran[-1]


@torch.inference_mode(False)
def _features(
    model: nn.Module,
    loss_fn: Any,
    data: DataLike,
    layer: LayerChoice,
    batch_size: int,
    rows_of: Callable[[Run, Any, nn.Module], Tensor],
) -> np.ndarray:
    """Return the rows of all points `[n, d]`, computed batch by batch with ``rows_of(run, batch, layer)``."""
    if not isinstance(model, nn.Module) or isinstance(model, _Loss):
        raise TypeError(f"model is a {type(model).__name__}: pass the trained model first, then loss_fn.")
    model, loss = unwrapped(model), OutputLoss(None) if loss_fn is None else as_example_loss(loss_fn)
    check_deterministic_modules(model)
    found: list[nn.Module] = [] if layer is None else [_named_layer(model, layer)]
    device = next(chain(model.parameters(), model.buffers()), torch.empty(0)).device
    indexed = IndexedData(data)
    indexed.suit(model)

    def run(batch: Any) -> Tensor:
        return loss.each(model, batch)

    def rows(batch: Any) -> Tensor:
        batch = to_device(batch, device)
        if not found:
            found.append(last_linear(model, lambda: run(batch)))
        return rows_of(run, batch, found[0])

    return _collect(indexed, ((at, rows(batch)) for at, batch in _my_batches(indexed, batch_size)))


def _my_batches(data: IndexedData, batch_size: int) -> Iterator[tuple[np.ndarray, Any]]:
    """Return this rank's share, in whole batches, so that features do not depend on the number of ranks."""
    return data.my_share(batch_size, whole_batches=True)


def _named_layer(model: nn.Module, layer: str | nn.Module) -> nn.Module:
    modules = dict(model.named_modules())
    if isinstance(layer, str) and inner_name(layer, model) in modules:
        return modules[inner_name(layer, model)]
    if isinstance(layer, nn.Module) and any(layer is module for module in modules.values()):
        return layer
    linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    raise ValueError(f"layer={layer!r} is not a module of the model; its linear layers are {linear}.")


def _narrows(module: nn.Module) -> bool:
    """Whether a module is a plain linear layer with fewer outputs than inputs."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return False
    return module.out_features < module.in_features


def _wide(tensor: Any) -> Tensor:
    """Return a tensor in double precision, or in float32 if its device has no double precision."""
    assert isinstance(tensor, Tensor)
    return tensor.detach().to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _per_example(values: Tensor, batch: Any) -> Tensor:
    """Reshape the values `[b, …, d]` of a layer to `[b, tokens, d]`."""
    size = batch_length(batch)
    if values.shape[0] != size:
        raise ValueError(
            f"the layer runs on {values.shape[0]} rows for a batch of {size} examples: pass layer= with one that "
            "keeps the examples along its first dimension."
        )
    return values.reshape(size, -1, values.shape[-1]) if values.dim() > 1 else values.reshape(size, 1, 1)


def _first_tensor(arguments: tuple[Any, ...]) -> Tensor:
    if not arguments or not isinstance(arguments[0], Tensor):
        raise ValueError("the layer's first positional argument is not a tensor: pass another layer=.")
    return arguments[0]


def _only(caught: list[Tensor], module: nn.Module) -> Tensor:
    if len(caught) != 1:
        raise ValueError(
            f"{type(module).__name__} ran {len(caught)} times in one forward pass: pass layer= with one that runs once."
        )
    return caught[0]


@contextmanager
def _hook(*handles: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _collect(data: IndexedData, parts: Iterator[tuple[np.ndarray, Tensor]]) -> np.ndarray:
    """Return the rows of all points `[n, d]`, joined from the `(indices, rows)` of this rank and of the others."""
    rows = in_order((torch.from_numpy(indices), _on_cpu(part)) for indices, part in parts).numpy()
    if data.n is not None and len(rows) != data.n:
        raise ValueError(f"the data gave {len(rows)} examples, but says it has {data.n}.")
    return rows


def _on_cpu(rows: Tensor) -> Tensor:
    """Return the rows on the CPU, with 16-bit floats as float32."""
    rows = rows.detach().cpu()
    return rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
