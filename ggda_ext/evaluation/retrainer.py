"""Train models again on parts of the data, to compare scores of groups with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from ggda_ext.losses import example_losses
from ggda_ext.properties.class_outputs import class_labels, class_logits
from ggda_ext.sharing import in_shares
from ggda_ext.training import Recipe, TrainedModels, initial_model, train_many
from ggda_ext.training.recipe import check_recipe, checked_data


@dataclass(frozen=True)
class Retrainer:
    """Trains models on subsets of the data, several seeds each, all at once, and measures them on test points.

    Args:
        make_model: builds a new model; its weights come from torch's global random state.
        loss_fn: the training loss, ``loss_fn(output, target)``.
        train: inputs and targets of all training points.
        test: inputs and targets of the test points.
        recipe: how to train.
        seeds: seeds of initial weights and batches; every subset is trained once for each seed.
        measure: ``"accuracy"`` (as in `properties.accuracy`), ``"loss"`` (the mean of the test points' losses, for any
            reduction of `loss_fn`), or a function of outputs `[n, …]` and targets `[n]`.
        show_progress: whether to show a progress bar.
    """

    make_model: Callable[[], nn.Module]
    loss_fn: Callable[[Tensor, Tensor], Tensor]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    recipe: Recipe
    seeds: Sequence[int] = (0,)
    measure: Literal["accuracy", "loss"] | Callable[[Tensor, Tensor], Any] = "accuracy"
    show_progress: bool = False

    def __post_init__(self) -> None:
        if self.measure not in ("accuracy", "loss") and not callable(self.measure):
            raise ValueError(f"measure={self.measure!r} is not one of 'accuracy', 'loss', and no function either.")
        check_recipe(self.recipe)
        checked_data(self.train, "train")
        checked_data(self.test, "test")

    def __call__(self, subsets: Sequence[np.ndarray]) -> np.ndarray:
        """Train models on every subset and return their values `[subsets, seeds]`; ranks share the trainings."""
        if not isinstance(subsets, Iterable):
            raise TypeError(f"subsets={subsets!r}: pass a list of arrays of training indices.")
        subsets = list(subsets)
        if not subsets:
            raise ValueError("subsets is empty: pass at least one array of training indices.")
        self._check_measure()
        jobs = [(subset, seed) for subset in subsets for seed in self.seeds]

        def values(some: list[int]) -> Tensor:
            models = train_many(
                self.make_model, self.loss_fn, self.train, self.recipe, subsets=[jobs[j][0] for j in some],
                seeds=[jobs[j][1] for j in some], show_progress=self.show_progress and some[:1] == [0],
            )  # fmt: skip
            found = [float(self._value(outputs)) for outputs in models.outputs(self.test[0])]
            return torch.tensor(found, dtype=torch.float64)

        return in_shares(len(jobs), values).numpy().reshape(len(subsets), len(self.seeds))

    def _check_measure(self) -> None:
        """Raise an error before anything is trained if accuracy or loss cannot be taken of the test points."""
        if callable(self.measure):
            return
        untrained = TrainedModels(self.make_model, [initial_model(self.make_model, 0).state_dict()])
        try:
            value = self._value(untrained.outputs(self.test[0])[0])
        except ValueError as error:
            raise ValueError(
                f"measure={self.measure!r} cannot be taken of test: {error} Or pass another measure, e.g. a function "
                "measure(outputs, targets)."
            ) from error
        if not bool(untrained.outputs(self.test[0]).isfinite().all() & value.isfinite()):
            raise ValueError(
                f"measure={self.measure!r} cannot be taken of test: the outputs or losses of its points are not finite "
                "even before training, so fill or drop the points with NaN or infinity."
            )

    def _value(self, outputs: Tensor) -> Any:
        targets = self.test[1]
        if callable(self.measure):
            return self.measure(outputs, targets)
        if self.measure == "loss":
            return example_losses(self.loss_fn, outputs, targets).mean()
        if outputs.dim() > 2 and targets.shape == outputs[:, 0].shape:  # [n, C, …], e.g. a class for every pixel
            outputs, targets = outputs.movedim(1, -1).flatten(0, -2), targets.flatten()
        of_probabilities = isinstance(self.loss_fn, nn.BCELoss) or self.loss_fn is nn.functional.binary_cross_entropy
        logits = class_logits(outputs.logit() if of_probabilities else outputs, ranks=True)
        return (logits.argmax(1) == class_labels(targets, logits)).double().mean()
