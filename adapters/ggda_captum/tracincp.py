"""TracIn for groups: Σ_c η_c ⟨∇g(θ_c), Σ_{i∈G} ∇ℓ_i(θ_c)⟩ over checkpoints θ_c with learning rates η_c."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import captum.influence
import numpy as np
from torch import Tensor

from ggda_captum.group_influence import CheckpointLoader, GroupInfluence
from ggda_ext import PointGradients
from ggda_ext.model import left_as_it_was
from ggda_ext.storage.scores import weighted_sum


class CheckpointInfluence(GroupInfluence):
    """Group scores summed over checkpoints; each is loaded once per call, and the last one stays, as in Captum."""

    checkpoints: list[Any]
    checkpoints_load_func: Callable[..., Any]

    def _at_checkpoints(self, part: Callable[[int], Any]) -> list[tuple[float, Any]]:
        """The learning rate and ``part(number)`` of every checkpoint; after a failure the model is as it was before."""
        load = CheckpointLoader(self.checkpoints_load_func)
        parts = []
        with left_as_it_was(self.model, only_on_failure=True):
            for number, checkpoint in enumerate(self.checkpoints):
                rate = load(self.model, checkpoint)
                if not isinstance(rate, int | float | Tensor):
                    raise TypeError(
                        f"checkpoints_load_func returned {rate!r}: return the checkpoint's learning rate, a number."
                    )
                parts.append((float(rate), part(number)))
        return parts

    def _group_influence(self, inputs: Any, show_progress: bool = False, aggregate: bool = False) -> Tensor:
        def scores(number: int) -> Any:
            provider = self._provider(show_progress, inputs)
            directions = self._directions(provider, inputs)
            if aggregate and isinstance(directions, PointGradients):
                directions = self._point_provider(directions, np.zeros(directions.n, np.int64)).rows()
            elif aggregate:
                directions = directions.sum(0, keepdim=True)  # type: ignore[union-attr]
            return kept.scores(provider, directions, number)

        with self._keep(inputs) as kept:
            return kept.total(self._at_checkpoints(scores))

    def _group_self_influence(self, show_progress: bool) -> Tensor:
        def norms(number: int) -> Tensor:
            provider = self._provider(show_progress)
            return kept.array(provider, number, "squared_norms", {}, provider.squared_norms)

        with self._keep() as kept:
            return weighted_sum(self._at_checkpoints(norms))


class TracInCP(CheckpointInfluence, captum.influence.TracInCP):
    """Captum's `TracInCP`, with `groups=` and `influence(property=…)`.

    Differences of the group path: with ``sample_wise_grads_per_batch=True`` Captum leaves out parameters outside
    Linear and Conv2d layers, groups count them (a warning says so); a weighted mean loss counts as the loss of
    each example alone, where Captum's depends on the batch; `test_loss_fn` may have another reduction than `loss_fn`.
    """
