"""Turn a classifier's outputs into probabilities and its targets into classes, and compute rates of sensitive groups.

Every function checks its input.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ggda_ext.model import product
from ggda_ext.properties.classes import OutputsFn


def class_probabilities(outputs: Tensor, temperature: float = 1.0, *, ranks: bool = False) -> Tensor:
    """Return probabilities `[N, C]` for outputs that are C logits, or one logit for class 1 (`[N]` or `[N, 1]`)."""
    return (class_logits(outputs, ranks=ranks) / temperature).softmax(1)


def class_logits(outputs: Tensor, *, ranks: bool = False) -> Tensor:
    """Return logits `[N, C]`; one logit z of class 1 becomes ``(-z/2, z/2)``, whose softmax is the sigmoid of z.

    Raise an error if outputs are probabilities, as far as their numbers and their graph tell. With `ranks`, only the
    order of the C logits matters, which probabilities of C classes have too.
    """
    if outputs.dim() not in (1, 2):
        raise ValueError(
            f"the model returned shape {list(outputs.shape)}: properties of classes need outputs [N, C], "
            "[N, 1] or [N]; for others use of_outputs."
        )
    logits = outputs.reshape(len(outputs), -1)
    refuse_sigmoid(outputs, ranks=ranks)
    if not ranks and _add_up_to_one(logits.detach()):
        raise ValueError(_PROBABILITIES)
    return torch.cat([-logits / 2, logits / 2], 1) if logits.shape[1] == 1 else logits


def refuse_sigmoid(outputs: Tensor, *, ranks: bool = False) -> None:
    """Raise an error if outputs come out of a sigmoid, as far as their graph tells; for `ranks` see `class_logits`."""
    if not (ranks and outputs.numel() > len(outputs)) and _ends_in_sigmoid(outputs):
        raise ValueError(_PROBABILITIES)


_PROBABILITIES = (
    "the model returns probabilities, where properties of classes need logits: let it return what it gives to its last "
    "Sigmoid or Softmax (nn.BCEWithLogitsLoss and nn.CrossEntropyLoss are losses for that), or use of_outputs(data, "
    "fn)."
)
_MOVES = ("Squeeze", "Unsqueeze", "View", "Reshape", "UnsafeView", "Select", "Slice", "Clone", "ToCopy")
"""Beginnings of autograd's names for functions that only arrange numbers."""


def _ends_in_sigmoid(outputs: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # a pass watches what the model does; this is no hook of it
        step = outputs.grad_fn
    while step is not None and step.name().startswith(_MOVES):
        step = step.next_functions[0][0]
    return step is not None and step.name().startswith("Sigmoid")


def _add_up_to_one(rows: Tensor) -> bool:
    """Whether all rows `[N, C]` are probabilities of several classes; False if their numbers cannot be read."""
    allowed = 8 * rows.shape[1] * torch.finfo(rows.dtype).eps
    if rows.shape[1] == 1 or allowed > 1e-3:  # half precision could add up to 1 by chance
        return False
    try:
        with torch._C.DisableTorchFunction():  # as above: these numbers are not read by the model
            return bool(((rows >= 0).all(1) & ((rows.sum(1) - 1).abs() <= allowed)).all())
    except RuntimeError:  # values cannot be read under vmap
        return False


def class_labels(targets: Any, logits: Tensor) -> Tensor:
    """Return class indices `[N]` from targets `[N]` or `[N, 1]`; raise an error if they do not fit `logits [N, C]`."""
    if targets is None:
        raise ValueError("data gives no targets: pass (x, y), with a class for each example.")
    if not isinstance(targets, Tensor) or targets.numel() != len(logits):
        got = f"shape {list(targets.shape)}" if isinstance(targets, Tensor) else f"a {type(targets).__name__}"
        raise ValueError(
            f"data has targets of {got} for {len(logits)} examples: properties of classes need one class "
            "index per example, [N]."
        )
    classes = logits.shape[1]
    labels = targets.reshape(-1)
    wrong = (labels < 0) | (labels >= classes) | (labels != labels.long())
    try:
        found = bool(wrong.any())
    except RuntimeError:  # values cannot be read under vmap
        found = False
    if found:
        raise ValueError(
            f"data has {int(wrong.sum())} labels that are no class of the model, first "
            f"{labels[wrong][0].item()}: it has {classes} classes, so pass whole numbers 0 … {classes - 1}."
        )
    return labels.long()


def on_probabilities(fn: OutputsFn, *, ranks: bool = False) -> OutputsFn:
    """Turn ``fn(probabilities [N, C], labels [N])`` into a function of outputs and targets; for `ranks` see above."""

    def of(outputs: Tensor, targets: Any) -> Tensor:
        probabilities = class_probabilities(outputs, ranks=ranks)
        return fn(probabilities, class_labels(targets, probabilities))

    return of


class Rates:
    """Mean probabilities of each sensitive group, and the gap between them."""

    def __init__(self, sensitive: Any) -> None:
        values = np.asarray(sensitive.cpu() if isinstance(sensitive, Tensor) else sensitive)
        if values.ndim != 1:
            raise ValueError(f"sensitive has shape {list(values.shape)}: pass one value per test point, [N].")
        missing = [j for j, value in enumerate(values.tolist()) if value is None or value != value]
        if missing:
            raise ValueError(
                f"sensitive has {len(missing)} missing values, first at {missing[0]}: leave these points "
                "out of the test data, or give them a group."
            )
        try:
            names, ids = np.unique(values, return_inverse=True)
        except TypeError:
            kinds = sorted({type(value).__name__ for value in values.tolist()})
            raise TypeError(f"sensitive mixes values of types {', '.join(kinds)}: pass one type, e.g. text.") from None
        if len(names) < 2:
            raise ValueError(f"sensitive holds {len(names)} group(s) {names.tolist()}: a gap needs at least 2.")
        self.names, self.ids = names.tolist(), torch.from_numpy(ids)

    def of_points(self, points: np.ndarray) -> Rates:
        """Return the rates for some of the test points only."""
        found = copy.copy(self)
        found.ids = self.ids[torch.from_numpy(points.astype(np.int64))]
        return found

    def check_length(self, n: int) -> None:
        """Raise an error if the number of test points is not the number of values in `sensitive`."""
        if len(self.ids) != n:
            raise ValueError(
                f"sensitive has {len(self.ids)} values for {n} test points: pass one per point, in the "
                "order of the data."
            )

    def gap(self, chosen: Tensor, kind: str, mask: Tensor | None = None) -> Tensor:
        """Return the largest minus the smallest group mean of `chosen [N]`, over the points in `mask`.

        Errors call these points `kind`.
        """
        self.check_length(len(chosen))
        members = self.ids.to(chosen.device)[:, None] == torch.arange(len(self.names), device=chosen.device)
        if mask is not None:
            members = members & mask[:, None]
        sizes = members.sum(0)
        if not bool(sizes.all()):
            name = self.names[int(sizes.argmin())]
            raise ValueError(
                f"sensitive group {name!r} has no {kind}, so its rate is undefined: "
                "add some, or merge or leave out the group."
            )
        means = product(chosen, members.to(chosen)) / sizes
        return means.amax() - means.amin()
