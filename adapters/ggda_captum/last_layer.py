"""A shortcut for parameters of the last layer: run the model once without gradients, then use the layer in its place.

With a_i the input of the last layer, the gradient of point i is the gradient of the layer alone at (a_i, y_i). So the
modules before the layer need not be probed, differentiated or run twice. Three conditions must hold: the model's output
is the layer's own output, the a_i of an example does not depend on the other examples of its batch, and it does not
depend on the chosen parameters. The code here checks the first condition in every batch, the second in every batch that
is larger than those before, and the third once for a model and its data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext import GroupGradients, PointGradients
from ggda_ext.attribution import KeptScores, ScoresInMemory
from ggda_ext.data import IndexedData, to_device
from ggda_ext.gradients.proof.findings import Apart, Compared, recall, remember
from ggda_ext.losses import ExampleLoss, OutputLoss, model_output
from ggda_ext.model import ParameterSpace, check_deterministic_modules, named_modules, only_thread, training_kernels
from ggda_ext.properties import property_gradient
from ggda_ext.sharing import world_size

MOST_BYTES = 256 * 2**20
"""Limit on the memory for the last layer's inputs of all points. If they need more, the shortcut is not used."""
_BATCH_BYTES, _LARGEST_BATCH, _FIRST = 4 * 2**20, 4096, 16  # bytes of the largest activation: about the cache's size
_SHARE_OF_WEIGHTS = 4  # weights are read once per batch, so its largest activation may have a quarter of their bytes
_CLOSE = 1e-3
_ANY_LOSS, _FOUND_AS = OutputLoss(None), "inputs of the last layer"  # these inputs do not depend on the loss

Features = tuple[Tensor, Tensor]
"""Inputs of the last layer `[n, d]` and targets `[n, …]`."""


class Asked(NamedTuple):
    """A question to the core: the training side, the points or property to explain, and the place that keeps scores."""

    provider: GroupGradients
    explained: Any
    """The `PointGradients` of test points, a property or its gradient; None to ask about the groups themselves."""
    kept: KeptScores


def layer_for(asked: Asked, model: nn.Module) -> nn.Linear | None:
    """The layer that holds all chosen parameters, or None if the shortcut cannot be used.

    It is None if there is no such layer, if a loss depends on more than outputs, or if a setting needs the whole model:
    a named strategy, a `save_dir`, several processes.
    """
    provider, explained, kept = asked
    losses = [provider.loss, *([explained.loss] if isinstance(explained, PointGradients) else [])]
    alone = provider.strategy == "auto" and isinstance(kept, ScoresInMemory) and world_size() == 1
    if not alone or not all(map(_of_outputs, losses)):
        return None
    return owner_of(list(provider.space.parameters.values()), model)


def asked_of(layer: nn.Linear | None, asked: Asked, model: nn.Module) -> Asked | None:
    """The same question, asked of the layer at the model's current parameters; None if the layer cannot replace it."""
    if layer is None:
        return None
    provider, explained, kept = asked
    check_deterministic_modules(model)
    space = None if hasattr(provider.loss, "layer") else provider.space  # that loss takes the inputs as constant
    about = provider.space, _ANY_LOSS, provider.data, (_FOUND_AS, space is None)
    before: Any = recall(*about)
    tests = None
    with (
        only_thread(model),
        training_kernels(),
        torch.no_grad(),
        LastLayerInputs(model, layer, before, space) as seeing,
    ):
        known = features(seeing, provider.data)
        if known is not None and isinstance(explained, PointGradients):
            tests = features(seeing, explained.data)
    if known is None:
        return None
    if before is None:
        found: Any = seeing.size, seeing.apart.compared
        remember(found, *about)
    if isinstance(explained, PointGradients):
        if tests is None:
            return None
        explained = PointGradients(_of_layer(explained.loss), _in_place_of(explained.data, tests))
    elif explained is not None:
        explained = property_gradient(explained, model, provider.space.parameters)
    by_layer = GroupGradients(
        layer, _of_layer(provider.loss), _in_place_of(provider.data, known), provider.groups,
        parameters=list(provider.space.parameters.values()), memory_budget=provider.memory_budget,
        show_progress=provider.show_progress,
    )  # fmt: skip
    return Asked(by_layer, explained, kept)


def _of_outputs(loss: ExampleLoss) -> bool:
    """Whether a loss depends on the model's output alone."""
    return getattr(loss, "loss_fn", None) is not None and (type(loss) is OutputLoss or hasattr(loss, "layer"))


def _of_layer(loss: Any) -> OutputLoss:
    """Turn a loss for which `_of_outputs` is true into a loss of the layer alone."""
    return OutputLoss(loss.loss_fn)


def _in_place_of(data: IndexedData, known: Features) -> IndexedData:
    """The layer's inputs and targets as data, with the anchors of the original data.

    Findings about the layer are kept by these anchors, because they hold for other values of its inputs, too.
    """
    inputs = IndexedData(known, data.name)
    inputs.anchors = data.anchors
    return inputs


def owner_of(parameters: Sequence[nn.Parameter], model: nn.Module) -> nn.Linear | None:
    """The linear layer inside the model that holds all of these parameters; None if there is none, or if it has hooks.

    Hooks may change the layer's input, output or gradients, and those of its input would run twice.
    """
    chosen = {id(parameter) for parameter in parameters}
    owners = [one for _, one in named_modules(model) if any(id(own) in chosen for own in one._parameters.values())]
    (owner,) = owners if len(owners) == 1 else (None,)
    if type(owner) is not nn.Linear or owner is model:
        return None
    hooks = owner._forward_pre_hooks, owner._forward_hooks, owner._backward_pre_hooks, owner._backward_hooks
    return None if any(hooks) else owner


def features(seeing: LastLayerInputs, data: IndexedData) -> Features | None:
    """Inputs of the last layer and targets for all examples.

    None if the layer cannot replace the model, or if the inputs need too much memory.
    """
    layer, device = seeing.layer, seeing.layer.weight.device
    if data.n is None or data.n * layer.in_features * layer.weight.dtype.itemsize > MOST_BYTES:
        return None
    inputs, targets = list[Tensor](), list[Tensor]()
    for run, batch in _batches(data, seeing, device):
        found = seeing.seen(batch)
        if found is None or len(found[0]) != len(run) or len(found[1]) != len(run):
            return None
        if not seeing.proven:
            if not _alone_as_in_a_batch(seeing, data, found[0], device):
                return None
            seeing.set_size(len(run))
        elif not seeing.apart.holds(batch, found[0]):
            return None
        inputs.append(found[0])
        targets.append(found[1])
    return torch.cat(inputs), torch.cat(targets)


def _batches(data: IndexedData, seeing: LastLayerInputs, device: torch.device) -> Iterator[tuple[np.ndarray, Any]]:
    """Yield indices and batches of `seeing.size` examples; `seeing` may change this size after the first batch."""
    start, end = 0, data.n or 0
    while start < end:
        run = np.arange(start, min(start + seeing.size, end))
        yield run, to_device(next(iter(data.batches([run]))), device)
        start += len(run)


def _alone_as_in_a_batch(seeing: LastLayerInputs, data: IndexedData, rows: Tensor, device: torch.device) -> bool:
    """Whether the first and last example of a batch give the same layer inputs when each runs alone."""
    for at in {0, len(rows) - 1}:
        found = seeing.seen(to_device(next(iter(data.batches([np.array([at])]))), device))
        if found is None or float((found[0][0] - rows[at]).abs().max()) > _CLOSE * float(rows.abs().max()):
            return False
    return True


class LastLayerInputs:
    """Runs a model and records its last layer's inputs. In the first batch it also measures the largest module output.

    Args:
        model: the model.
        layer: its last layer.
        before: what an earlier call found: how many examples to run at once, and the batches that were compared.
        space: the chosen parameters, which the layer's inputs must not depend on; None if such inputs count as
            constant.

    Attributes:
        size: examples to run at once.
        proven: whether an input is known not to depend on the other examples of a small batch, nor on the parameters.
        apart: compares larger batches with small ones.
    """

    def __init__(
        self,
        model: nn.Module,
        layer: nn.Linear,
        before: tuple[int, Compared] | None = None,
        space: ParameterSpace | None = None,
    ) -> None:
        self.size, compared = before or (_FIRST, None)
        self.model, self.layer, self.proven = model, layer, before is not None
        self.apart = Apart(model, lambda _, batch: self._inputs(batch), "the data", compared)
        self.space, self._largest = space, 0
        self._calls: list[tuple[Any, Any, list[int]]] = []

    def __enter__(self) -> LastLayerInputs:
        self._hooks, self._measuring = ExitStack(), ExitStack()
        self._hooks.callback(self.layer.register_forward_hook(self._look).remove)
        for module in () if self.proven else self.model.modules():
            self._measuring.callback(module.register_forward_hook(self._measure).remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._measuring.close()
        self._hooks.close()

    def set_size(self, first: int) -> None:
        """Set how many examples run at once, from the largest activation in the batch of the `first` examples."""
        self._measuring.close()
        weights = sum(value.numel() * value.element_size() for value in self.model.parameters())
        room = max(_BATCH_BYTES, weights // _SHARE_OF_WEIGHTS)
        self.size = int(min(_LARGEST_BATCH, max(_FIRST, room // max(1, self._largest // first))))
        self.proven, self.apart.compared.size = True, first

    def seen(self, batch: Any) -> Features | None:
        """Input of the layer and target of a batch; None if the model is not the layer applied to such inputs.

        It is None if the model's output is not the layer's output, also if one of the layer's tensors was overwritten
        after the layer ran, or if the layer ran in another precision (autocast in `forward`).
        """
        self._calls.clear()
        looking = self.space is not None and not self.proven
        with self.space.require_gradients(of_chosen=True) if self.space is not None and looking else nullcontext():
            output, target = model_output(self.model, batch)
        if len(self._calls) != 1 or not isinstance(target, Tensor):
            return None
        args, given, before = self._calls[0]
        if len(args) != 1 or given is not output or args[0].dim() != 2 or before != versions(*args, given):
            return None
        if not args[0].dtype == given.dtype == self.layer.weight.dtype or (looking and args[0].requires_grad):
            return None
        return args[0].detach(), target

    def _inputs(self, batch: Any) -> Tensor:
        found = self.seen(batch)
        return torch.empty(0) if found is None else found[0]

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        self._calls.append((args, output, versions(*args, output)))

    def _measure(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._largest = max(self._largest, output.numel() * output.element_size())


def versions(*values: Any) -> list[int]:
    """How often each tensor was overwritten so far, as far as autograd knows."""
    return [value._version for value in values if isinstance(value, Tensor) and not value.is_inference()]
