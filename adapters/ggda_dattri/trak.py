"""dattri's TRAK for groups: with x_i the projected gradients, Q_i one minus the correct probability, φ_j the test side,

    τ[G, j] = mean over checkpoints of φ_jᵀ F⁻¹ Σ_{i∈G} Q_i x_i

F is the Fisher of the points, Σ_i x_i x_iᵀ (exact: scores are sums of dattri's scores), or a Fisher of the groups, see
`ggda_ext.curvature.fisher`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from dattri.algorithm import trak as dattri_trak
from torch import Tensor
from torch.utils.data import DataLoader

from ggda_dattri.checkpoint import Checkpoint, by_outer_names
from ggda_dattri.grouping import check_one_of
from ggda_dattri.projection import GroupedProjection
from ggda_ext.attribution import KeptScores, sum_scores
from ggda_ext.curvature.fisher import Damping, EmpiricalFisher, FisherKind, check_damping, check_fisher
from ggda_ext.data import IndexedData, to_device
from ggda_ext.gradients import GroupGradients
from ggda_ext.groups import Groups
from ggda_ext.properties import Property
from ggda_ext.sharing import add_up, in_order, together
from ggda_ext.storage.fingerprint import sums_of


@dataclass(frozen=True)
class _Features:
    """The training side at one checkpoint: ``F⁻¹ Σ Q_i x_i`` `[proj_dim, k]` and ``Σ x_i`` `[k, proj_dim]`."""

    solved: Tensor
    sums: Tensor
    damping: float


class TRAKAttributor(GroupedProjection, dattri_trak.TRAKAttributor):
    """dattri's TRAK with scores `(groups, tests)`. A positive score means that the group *raises* the target.

    The target of a test point is the task's function (the margin, as TRAK wants it), so groups with a positive score
    help. A property is itself the target: if it is a loss, groups with a positive score hurt. Scores have no unit; see
    docs/signs.md.

    The gradients of a group are summed before they are projected. dattri uses the projector arguments of one instance
    for all later instances, too; with groups, each instance has its own. NaN gradients, which dattri replaces with 0,
    raise an error. `self_attribute` works after `cache`.

    Args:
        *args: dattri's own arguments.
        groups: a partition of the training points. With None, dattri's own code runs.
        strategy: the core's gradient strategy.
        save_dir: a folder that keeps the finished projected sums of the groups, for every checkpoint. They can be used
            for other test points, and in another process, without another pass.
        fisher: ``"batched"`` is made of output gradients summed by group, ``"paper"`` of loss gradients summed by
            group; both are approximations that cost about a pass over the data. ``"exact"`` is made of every point, and
            its scores are sums of dattri's scores. See `ggda_ext.curvature.fisher` for the formulas.
        damping: ridge of the Fisher relative to its mean diagonal, on top of dattri's `regularization`. ``"auto"`` is
            the rule of `ggda_ext.curvature.fisher` for a Fisher of groups, and no ridge for the exact Fisher.
            `chosen_damping` holds the ridge that was used, by checkpoint.
        **kwargs: dattri's own arguments.
    """

    batch_of_one = False
    _shared_kwargs = getattr(dattri_trak, "DEFAULT_PROJECTOR_KWARGS", {})
    full_train_dataloader: Any
    norm_scaler: float
    regularization: float

    def __init__(
        self,
        *args: Any,
        fisher: FisherKind = "batched",
        damping: Damping = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.fisher = check_fisher(fisher)
        self.damping = check_damping(damping)
        self._cached: list[_Features] | None = None

    def cache(self, full_train_dataloader: DataLoader) -> None:
        """Compute and keep the features of the groups, for the full training data."""
        self._cached = None
        if self._is_dattri:
            if self.groups is not None:
                self._train_data(full_train_dataloader, "full_train_dataloader")
            super().cache(full_train_dataloader)
            return
        self._cached = self._features(full_train_dataloader, "full_train_dataloader")
        self.full_train_dataloader = full_train_dataloader

    def attribute(
        self,
        test_dataloader: DataLoader | None = None,
        train_dataloader: DataLoader | None = None,
        *,
        property: Property | None = None,
    ) -> Tensor:
        """Influence of groups on test points `(groups, tests)` or on a property `(groups, properties)`.

        A positive score means that training on the group raises the target. This is the opposite of dattri's influence
        functions.

        Args:
            test_dataloader: test points; not shuffled.
            train_dataloader: the training points that the groups partition, unless `cache` was called; not shuffled.
            property: a callable ``g(model) -> Tensor`` to explain instead of test points.
        """
        check_one_of(test_dataloader, property)
        if self._is_dattri and property is None:
            own = super().attribute
            return self._in_group_order(train_dataloader, lambda: own(test_dataloader, train_dataloader))
        solved = self._solved(train_dataloader)
        tests = None if test_dataloader is None else IndexedData(test_dataloader, "test_dataloader")

        def parts() -> Iterator[tuple[float, Tensor]]:
            for index, by_group in zip(self._checkpoints, solved, strict=True):
                checkpoint = self._checkpoint(index)
                rows = checkpoint.test_rows(checkpoint.explained(tests, property), shared=True)
                (projected,) = self._project(checkpoint, rows)
                yield 1 / len(solved), (projected / self.norm_scaler) @ by_group

        return sum_scores(parts()).T.detach().to(self.device)

    def self_attribute(self, train_dataloader: DataLoader | None = None) -> Tensor:
        """Influence of every group on itself, ``(Σ x_i)ᵀ F⁻¹ Σ Q_i x_i``, as a column `(groups, 1)` like dattri's."""
        if self._is_dattri and train_dataloader is not None:
            own = super().self_attribute
            return self._in_group_order(train_dataloader, lambda: own(train_dataloader))
        features = self._training_side(train_dataloader)
        own = [(feature.sums * feature.solved.T).sum(1) for feature in features]
        return torch.stack(own).mean(0)[:, None].to(self.device)

    @property
    def chosen_damping(self) -> dict[int, float]:
        """Maps each checkpoint to the relative ridge in its cached Fisher."""
        if self._cached is None:
            raise ValueError("chosen_damping is known after cache: call cache(full_train_dataloader) first.")
        return {index: feature.damping for index, feature in enumerate(self._cached)}

    def _solved(self, train_dataloader: DataLoader | None) -> list[Tensor]:
        """``F⁻¹ Σ Q_i x_i`` of every group `[proj_dim, k]`, by checkpoint; for groups of one from dattri's cache."""
        if self._is_dattri and train_dataloader is None and self.full_train_dataloader is not None:
            weights = self.Q.flatten()
            return [self._drop_in.in_group_order(rows * weights) for rows in self.inv_XTX_XT_list]
        return [feature.solved for feature in self._training_side(train_dataloader)]

    def _training_side(self, train_dataloader: DataLoader | None) -> list[_Features]:
        if train_dataloader is not None and self.full_train_dataloader is not None:
            raise ValueError("train_dataloader was passed after cache, which fixed the training points: leave it out.")
        if train_dataloader is not None:
            return self._features(train_dataloader, "train_dataloader")
        if self.full_train_dataloader is None:
            raise ValueError(
                "there are no training points: call cache(full_train_dataloader), or pass train_dataloader."
            )
        if self._cached is None:  # `cache` ran dattri's own code, which does not keep the features
            self._cached = self._features(self.full_train_dataloader, "full_train_dataloader")
        return self._cached

    def _features(self, loader: DataLoader, name: str) -> list[_Features]:
        data, groups = self._train_data(loader, name)
        checkpoints = self._checkpoints
        weights = sum(self._one_minus_probability(index, data, groups) for index in checkpoints) / len(checkpoints)
        exact = self.fisher == "exact" or self._is_dattri
        with self._drop_in.keep() as kept:
            return [
                (self._exact if exact else self._of_groups)(kept, index, data, groups, weights) for index in checkpoints
            ]

    def _kept_sums(
        self,
        kept: KeptScores,
        provider: GroupGradients,
        index: int,
        weights: Tensor,
        make: Callable[[], Tensor],
    ) -> Tensor:
        """The sums that `make` computes, read from `save_dir` if they were finished before."""
        settings = {
            "fisher": self.fisher,
            "norm_scaler": self.norm_scaler,
            "weights": sums_of(weights[None]),
        }
        return kept.array(provider, index, "features", self._projected_with | settings, make)

    def _one_minus_probability(self, index: int, data: IndexedData, groups: Groups) -> Any:
        """The weight Q of every training point `[n]` at one checkpoint, in batches that fit a backward pass."""
        checkpoint = self._checkpoint(index)
        fitting = checkpoint.groups(data, groups).batch_size
        parameters = {name: value.detach() for name, value in checkpoint.model.named_parameters()}
        device = checkpoint.space.device
        probability = by_outer_names(self.correct_probability_func, self.task.get_model())

        def blocks() -> Iterator[tuple[Tensor, Tensor]]:
            for indices, batch in data.my_share(fitting):
                yield torch.from_numpy(indices), probability(parameters, to_device(batch, device)).flatten()

        with torch.no_grad():
            return 1 - in_order(blocks())

    def _exact(self, kept: KeptScores, index: int, data: IndexedData, groups: Groups, weights: Tensor) -> _Features:
        checkpoint = self._checkpoint(index)
        found = self._kept_sums(
            kept, checkpoint.groups(data, groups), index, weights,
            lambda: self._exact_sums(checkpoint, data, groups, weights),
        )  # fmt: skip
        sums, weighted, matrix = found.split([len(groups), len(groups), found.shape[1]])
        fisher = EmpiricalFisher.of_matrix(matrix, data.n or 0)
        damped, damping = fisher.damped(0.0 if self.damping == "auto" else self.damping, self.regularization)
        return _Features(torch.linalg.solve(damped, weighted.T), sums, damping)

    def _exact_sums(self, checkpoint: Checkpoint, data: IndexedData, groups: Groups, weights: Tensor) -> Tensor:
        """Σ x_i and Σ Q_i x_i of every group, then the Fisher, one below the other `[2k + proj_dim, proj_dim]`."""
        labels, k = torch.from_numpy(groups.labels.astype("int64")).to(weights.device), len(groups)
        parts: list[Tensor] = []
        with together():
            for _, ids, projected in self._projected_blocks(checkpoint, checkpoint.points(data)):
                rows = projected / self.norm_scaler
                parts = parts or [rows.new_zeros(size, rows.shape[1]) for size in (k, k, rows.shape[1])]
                sums, weighted, fisher = parts
                fisher += rows.T @ rows
                inside = labels[ids] >= 0
                sums.index_add_(0, labels[ids][inside], rows[inside])
                weighted.index_add_(0, labels[ids][inside], (rows * weights[ids, None])[inside])
        return add_up(torch.cat(parts) if parts else None)  # a rank may have no points

    def _of_groups(self, kept: KeptScores, index: int, data: IndexedData, groups: Groups, weights: Tensor) -> _Features:
        checkpoint = self._checkpoint(index)
        provider = checkpoint.groups(data, groups)

        def make() -> Tensor:
            both = torch.stack([torch.ones_like(weights), weights])
            (found,) = self._project(checkpoint, checkpoint.weighted_blocks(provider, both))
            return found.unflatten(0, (-1, 2)).transpose(0, 1) / self.norm_scaler

        sums, weighted_sums = self._kept_sums(kept, provider, index, weights, make)
        rows = sums if self.fisher == "batched" else weighted_sums
        fisher = EmpiricalFisher.of_groups(self.fisher, rows, groups.sizes)
        matrix, damping = fisher.damped(self.damping, self.regularization)
        return _Features(torch.linalg.solve(matrix, weighted_sums.T), sums, damping)
