"""dattri's TracIn for groups: with w_c the weight of checkpoint c and P its random projection,

    τ[G, j] = Σ_c w_c ⟨P Σ_{i∈G} ∇ℓ_i(θ_c), P ∇g_j(θ_c)⟩.

If `normalized_grad` is set, both vectors are normalised first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from dattri.algorithm import tracin as dattri_tracin
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from ggda_dattri.checkpoint import Checkpoint
from ggda_dattri.grouping import check_one_of
from ggda_dattri.projection import GroupedProjection
from ggda_ext.attribution import KeptScores, property_directions, sum_scores
from ggda_ext.data import IndexedData
from ggda_ext.gradients import GroupGradients, PointGradients
from ggda_ext.properties import Property


class TracInAttributor(GroupedProjection, dattri_tracin.TracInAttributor):
    """dattri's TracIn (also CosIn, Grad-Dot, Grad-Cos). The gradients of a group are summed, then projected.

    With `normalized_grad` the sum of a group is normalised, not the gradients of its members. dattri uses the projector
    arguments of one instance for all later instances, too; with groups, each instance has its own. NaN gradients, which
    dattri replaces with 0, raise an error.

    Args:
        *args: dattri's own arguments.
        groups: a partition of the training points. With None, dattri's own code runs.
        strategy: the core's gradient strategy.
        save_dir: a folder that keeps finished results, see `Grouped`: blocks of scores, or the projected gradients of
            the groups. Projected gradients can be used for other test points without another pass.
        **kwargs: dattri's own arguments.
    """

    batch_of_one = False
    _shared_kwargs = getattr(dattri_tracin, "DEFAULT_PROJECTOR_KWARGS", {})
    weight_list: Any
    normalized_grad: bool

    def attribute(
        self,
        train_dataloader: DataLoader,
        test_dataloader: DataLoader | None = None,
        *,
        property: Property | None = None,
    ) -> Tensor:
        """Influence of groups on test points `(groups, tests)` or on a property `(groups, properties)`.

        A positive score means that the target is predicted to rise if the group is removed; if the target is a loss,
        the group helps.

        Args:
            train_dataloader: the training points that the groups partition; not shuffled.
            test_dataloader: test points; not shuffled.
            property: a callable ``g(model) -> Tensor`` to explain instead of test points.
        """
        check_one_of(test_dataloader, property)
        if self._is_dattri and property is None:
            own = super().attribute
            return self._in_group_order(train_dataloader, lambda: own(train_dataloader, test_dataloader))
        data, groups = self._train_data(train_dataloader)
        tests = None if test_dataloader is None else IndexedData(test_dataloader, "test_dataloader")
        with self._drop_in.keep() as kept:

            def parts() -> Iterator[tuple[float, Any]]:
                for index, weight in self._weighted_checkpoints():
                    checkpoint = self._checkpoint(index)
                    provider = checkpoint.groups(data, groups)
                    if in_memory:
                        explained = checkpoint.explained(tests, property)
                        yield float(weight), self._in_memory(kept, checkpoint, provider, explained)
                    else:
                        directions = property_directions(provider, checkpoint.explained(tests, property))
                        yield float(weight), kept.scores(provider, directions, index)

            in_memory = self._projects or self.normalized_grad
            return _result((sum_scores if in_memory else kept.total)(parts()).T)

    def self_attribute(self, train_dataloader: DataLoader) -> Tensor:
        """Squared norm of every group's gradient `(groups,)`, or the sum of the weights if gradients are normalised."""
        if self._is_dattri:
            own = super().self_attribute
            return self._in_group_order(train_dataloader, lambda: own(train_dataloader))
        data, groups = self._train_data(train_dataloader)

        def parts() -> Iterator[tuple[float, Tensor]]:
            for index, weight in self._weighted_checkpoints():
                norms = self._norms(self._checkpoint(index), data, groups)
                yield float(weight), torch.ones_like(norms) if self.normalized_grad else norms.square()

        return _result(sum_scores(parts()))

    def _in_memory(
        self, kept: KeptScores, checkpoint: Checkpoint, provider: GroupGradients, explained: Property | PointGradients
    ) -> Tensor:
        """Scores `[m, k]` of gradients that are projected, normalised, or both."""
        if not self._projects:
            directions = property_directions(provider, explained)
            scores = provider.scores(directions) / _row_norms(provider)
            if isinstance(directions, PointGradients):
                return scores / _row_norms(provider.tests(directions))[:, None]
            return scores / directions.norm(dim=1, keepdim=True).clamp_min(1e-12)
        if self._drop_in.save_dir is None:
            right, left = self._project(checkpoint, checkpoint.test_rows(explained, shared=True), provider)
        else:
            (right,) = self._project(checkpoint, checkpoint.test_rows(explained, shared=True))
            left = kept.array(
                provider, checkpoint.index, "projected", self._projected_with,
                lambda: self._project(checkpoint, provider)[0],
            )  # fmt: skip
        return normalize(right) @ normalize(left).T if self.normalized_grad else right @ left.T

    def _norms(self, checkpoint: Checkpoint, data: IndexedData, groups: Any) -> Tensor:
        """Norms of the groups' gradients `[k]`, after the projection if there is one."""
        provider = checkpoint.groups(data, groups)
        if self._projects:
            return self._project(checkpoint, provider)[0].norm(dim=1)
        return _row_norms(provider)

    def _weighted_checkpoints(self) -> zip[tuple[int, Any]]:
        given, needed = len(self.weight_list), len(self._checkpoints)
        if given != needed:
            raise ValueError(f"weight_list has {given} entries for {needed} checkpoints: pass one for each.")
        return zip(self._checkpoints, self.weight_list, strict=True)


def _row_norms(provider: GroupGradients) -> Tensor:
    """Norms of a provider's rows `[k]`, at least 1e-12."""
    return provider.map_rows(lambda rows: rows.norm(dim=1)).clamp_min(1e-12)


def _result(scores: Tensor) -> Tensor:
    """Convert scores to the form dattri returns: default dtype, on the CPU, without a graph."""
    return scores.detach().cpu().to(torch.get_default_dtype())
