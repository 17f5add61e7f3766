"""TracIn for groups: Σ_c η_c ⟨∇g(θ_c), Σ_{i∈G} ∇ℓ_i(θ_c)⟩ over checkpoints θ_c with learning rates η_c."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import captum.influence
import numpy as np
from torch import Tensor

from ggda_captum.arguments import CheckpointLoader
from ggda_captum.group_influence import GroupInfluence
from ggda_captum.last_layer import Asked, asked_of, layer_for
from ggda_ext import PointGradients
from ggda_ext.attribution import property_directions, sum_scores
from ggda_ext.gradients import Directions


class CheckpointInfluence(GroupInfluence):
    """Group scores summed over checkpoints. Each call loads every checkpoint once; the last one stays, as in Captum."""

    checkpoints: list[Any]
    checkpoints_load_func: Callable[..., Any]

    def _loaded_checkpoints(self) -> Generator[tuple[int, float], None, None]:
        """Load one checkpoint after the other and yield its number and learning rate.

        After a failure the model is as it was before. Use it with `contextlib.closing`, so that the model is restored
        at once.
        """
        load = CheckpointLoader(self.checkpoints_load_func)
        with load.undone_on_failure(self.model):
            for number, checkpoint in enumerate(self.checkpoints):
                rate = load(self.model, checkpoint)
                if not isinstance(rate, int | float | Tensor):
                    raise TypeError(
                        f"checkpoints_load_func returned {rate!r}: return the checkpoint's learning rate, a number."
                    )
                yield number, float(rate)

    def _group_scores(self, asked: Asked, aggregate: bool = False) -> Tensor:
        by_layer = self._of_last_layer(asked, aggregate)
        if by_layer is not None:
            return by_layer
        provider, explained, kept = asked
        together = None
        if aggregate and isinstance(explained, PointGradients):
            together = provider.tests(explained, np.zeros(explained.n, np.int64))

        def directions() -> Directions:
            if together is not None:
                return together.rows()
            found = property_directions(provider, explained)
            return found.sum(0, keepdim=True) if aggregate else found

        with kept, closing(self._loaded_checkpoints()) as loaded:
            return kept.total([(rate, kept.scores(provider, directions(), number)) for number, rate in loaded])

    def _of_last_layer(self, asked: Asked, aggregate: bool) -> Tensor | None:
        """Scores from the last layer alone, with its inputs at every checkpoint; None if that is not possible."""
        layer, parts = layer_for(asked, self.model), []
        if layer is None:
            return None
        with closing(self._loaded_checkpoints()) as loaded:
            for _, rate in loaded:
                now = asked_of(layer, asked, self.model)
                if now is None:
                    return None
                directions = now.explained
                if aggregate and isinstance(directions, PointGradients):
                    directions = now.provider.tests(directions, np.zeros(directions.n, np.int64)).rows()
                elif aggregate:
                    directions = directions.sum(0, keepdim=True)
                parts.append((rate, now.provider.scores(directions)))
        return sum_scores(parts)

    def _group_self_influence(self, asked: Asked) -> Tensor:
        provider, _, kept = asked
        with kept, closing(self._loaded_checkpoints()) as loaded:
            return sum_scores(
                (rate, kept.array(provider, number, "squared_norms", {}, provider.squared_norms))
                for number, rate in loaded
            )


class TracInCP(CheckpointInfluence, captum.influence.TracInCP):
    """Captum's `TracInCP`, with `groups=` and `influence(property=…)`.

    The group path differs from Captum in four ways. With ``sample_wise_grads_per_batch=True`` Captum leaves out
    parameters outside Linear and Conv2d layers; the group path includes them and warns. In this mode Captum also takes
    a mean loss without a `reduction` attribute (a lambda) for a sum, so its scores are divided by batch sizes. With a
    weighted mean loss, the group path takes the loss of each example alone, while Captum's loss depends on the batch.
    `test_loss_fn` may have another reduction than `loss_fn`.
    """
