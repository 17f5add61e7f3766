"""Influence functions for groups: the score of group G for test point or property j is

    τ[G, j] = mean over checkpoints of ⟨Σ_{i∈G} ∇ℓ_i, H⁻¹ ∇g_j⟩

The solve H⁻¹∇g is done once for all groups, and the core computes the inner products. Under ``torchrun`` the ranks
share both; dattri's own curvature (``"upstream"``) and dattri's caches are computed in full on every rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ggda_dattri.checkpoint import Checkpoint
from ggda_dattri.grouping import Grouped, check_one_of
from ggda_ext.attribution import KeptScores, sum_scores
from ggda_ext.curvature import Hessian
from ggda_ext.data import IndexedData
from ggda_ext.gradients import GroupGradients
from ggda_ext.properties import Property
from ggda_ext.storage.fingerprint import name_of, of_data
from ggda_ext.storage.folder import digest

Solve = Callable[[Tensor], Tensor]
"""A function that returns H⁻¹ v for rows v `[m, p]` in dattri's layout."""
Curvature = Literal["whole", "gauss-newton", "upstream"]
_NOT_OF_THE_SOLVER = ("device", "layer_name")


class GroupedInnerProduct(Grouped):
    """A mixin that stands before a dattri influence function.

    Args:
        *args: dattri's own arguments.
        groups: a partition of the training points of `attribute`. With None, dattri's own code runs.
        strategy: the core's gradient strategy.
        save_dir: a folder that keeps finished results, see `Grouped`.
        curvature: ``"whole"`` is the curvature of all cached data. ``"gauss-newton"`` is the same with the Gauss–Newton
            matrix instead of the Hessian (Explicit, CG and LiSSA); use it for models that are not trained to the end,
            because their Hessian has negative curvature. ``"upstream"`` is dattri's own, which adds up the inverse
            Hessians of the batches of the cached loader; each class says what differs. The default is ``"whole"`` with
            groups, and dattri's own without groups and for groups of one.
        **kwargs: dattri's own arguments, and the arguments `memory_budget` and `show_progress` of `Grouped`.
    """

    batch_of_one = True
    _uses_hessian = False
    """Whether the solve uses a Hessian, which the Gauss–Newton matrix can replace."""
    full_train_dataloader: Any
    transform_test_rep: Any
    generate_test_rep: Any
    _compute_denom: Any

    def __init__(self, *args: Any, curvature: Curvature | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        known = ("whole", "gauss-newton", "upstream") if self._uses_hessian else ("whole", "upstream")
        if curvature is not None and curvature not in known:
            raise ValueError(
                f"curvature={curvature!r} is not one of {', '.join(map(repr, known))} of {type(self).__name__}."
            )
        self._curvature = curvature

    @property
    def curvature(self) -> Curvature:
        """The curvature in use: "whole", "gauss-newton" or "upstream"."""
        return self._curvature or ("upstream" if self._is_dattri else "whole")

    @property
    def _is_dattri(self) -> bool:
        return super()._is_dattri and self._curvature in (None, "upstream")

    def attribute(
        self,
        train_dataloader: DataLoader,
        test_dataloader: DataLoader | None = None,
        relatif_method: str | None = None,
        *,
        property: Property | None = None,
    ) -> Tensor:
        """Influence of groups on test points `(groups, tests)` or on a property `(groups, properties)`.

        A positive score means that the target is predicted to rise if the group is removed; if the target is a loss,
        the group helps. If the loss is a mean over its batch, the score is n times the rise, with n the number of
        cached points.

        Args:
            train_dataloader: the training points that the groups partition; not shuffled.
            test_dataloader: test points; not shuffled.
            relatif_method: "l" or "theta" divides a group's row by ``sqrt(Gᵀ H⁻¹ G)`` or ``‖H⁻¹ G‖``, with G the
                gradient of the group.
            property: a callable ``g(model) -> Tensor`` to explain instead of test points.
        """
        check_one_of(test_dataloader, property)
        if self._is_dattri and property is None:
            own = super().attribute  # type: ignore[misc]
            return self._in_group_order(
                train_dataloader, lambda: own(train_dataloader, test_dataloader, relatif_method)
            )
        _check_relatif(relatif_method)
        data, groups = self._prepared(train_dataloader)
        tests = None if test_dataloader is None else IndexedData(test_dataloader, "test_dataloader")
        with self._drop_in.keep() as kept:

            def parts() -> Iterator[tuple[float | Tensor, Any]]:
                for index in self._checkpoints:
                    checkpoint = self._checkpoint(index)
                    provider, solve = checkpoint.groups(data, groups), self._solver(checkpoint)
                    if self.curvature == "upstream":
                        iter(train_dataloader)  # draws from the global random state, as dattri's loop does
                    weight: float | Tensor = 1 / len(self._checkpoints)
                    if relatif_method is not None:
                        weight = weight / self._factors(checkpoint, provider, solve, relatif_method)
                    columns = []
                    for ids, rows in self._test_blocks(checkpoint, tests, test_dataloader, property):
                        solved = self._kept_solution(kept, provider, checkpoint, rows, solve)
                        columns.append((ids, kept.scores(provider, checkpoint.to_core(solved), index)))
                    yield weight, kept.stacked(columns)

            return self._result(kept.total(parts()).T)

    def _kept_solution(
        self,
        kept: KeptScores,
        provider: GroupGradients,
        checkpoint: Checkpoint,
        rows: Tensor,
        solve: Solve,
    ) -> Tensor:
        """``solve(rows)``, read from `save_dir` if it was solved before with the same settings and cached data."""
        if self._drop_in.save_dir is None:
            return solve(rows)
        own = {name: value for name, value in vars(self).items() if not (name in _NOT_OF_THE_SOLVER or callable(value))}
        settings = {
            "solver": name_of(SimpleNamespace(**own)).replace("SimpleNamespace", type(self).__name__),
            "curvature": self.curvature,
            "cached points": of_data(self._curvature_data(), self._drop_in.tag),
        }
        if self.curvature == "upstream" or not self._uses_hessian:
            loader = self.full_train_dataloader
            settings["batches of cached points"] = f"{len(loader)}, of {loader.batch_size} points"
        name = f"solved-{digest(rows.detach().cpu().numpy())}"
        return kept.array(provider, checkpoint.index, name, settings, lambda: solve(rows))

    def self_attribute(self, train_dataloader: DataLoader, relatif_method: str | None = None) -> Tensor:
        """Influence of every group on its own target, ``⟨G, H⁻¹ ∇g_G⟩`` `(groups,)`.

        With several batches or a `relatif_method`, dattri itself fails or mixes up the points; here both work.
        """
        if self._is_dattri and len(train_dataloader) == 1 and relatif_method is None:
            own = super().self_attribute  # type: ignore[misc]
            return self._in_group_order(train_dataloader, lambda: own(train_dataloader))
        _check_relatif(relatif_method)
        data, groups = self._prepared(train_dataloader)

        def of_blocks(index: int) -> Tensor:
            checkpoint = self._checkpoint(index)
            solve = self._solver(checkpoint)

            def own_scores(rows: Tensor, targets: Tensor) -> Tensor:
                own = (rows * solve(targets)).sum(1)
                if relatif_method is None:
                    return own
                return own / self._denominators(checkpoint, rows, targets, solve, relatif_method)

            return checkpoint.by_group(checkpoint.groups(data, groups), own_scores)

        share = 1 / len(self._checkpoints)
        return self._result(sum_scores((share, of_blocks(index)) for index in self._checkpoints))

    def _solver(self, checkpoint: Checkpoint) -> Solve:
        """The solve with H⁻¹ at a checkpoint, set up once and used for all vectors."""
        solve = self._dattri_solver(checkpoint) if self.curvature == "upstream" else self._whole_solver(checkpoint)

        def checked(rows: Tensor) -> Tensor:
            solved = solve(rows)
            if not bool(torch.isfinite(solved).all()):
                raise ValueError(
                    f"{type(self).__name__} gave a solution that is not finite: the curvature is singular or not "
                    f"positive. {self._remedy}"
                )
            return solved

        return checked

    _remedy = "Pass a positive regularization, or raise it."

    def _whole_solver(self, checkpoint: Checkpoint) -> Solve:
        """The solve with H⁻¹ of the whole cached data."""
        raise NotImplementedError

    def _dattri_solver(self, checkpoint: Checkpoint) -> Solve:
        """The solve with H⁻¹ as dattri computes it."""

        def solve(rows: Tensor) -> Tensor:
            with torch.no_grad():
                return self.transform_test_rep(checkpoint.index, rows)

        return solve

    def _test_blocks(
        self, checkpoint: Checkpoint, tests: IndexedData | None, loader: DataLoader | None, property: Property | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`(positions, rows)` of the test side. With dattri's curvature, dattri's batches and random draws are used."""
        if self.curvature != "upstream" or loader is None:
            yield from checkpoint.test_rows(checkpoint.explained(tests, property), shared=False)
            return
        seen = 0
        for batch in loader:
            with torch.no_grad():
                rows = self.generate_test_rep(checkpoint.index, tuple(x.to(self.device).unsqueeze(0) for x in batch))
            yield torch.arange(seen, seen + len(rows)), rows
            seen += len(rows)

    def _factors(self, checkpoint: Checkpoint, provider: GroupGradients, solve: Solve, method: str) -> Tensor:
        """RelatIF's denominator of every group `[k]`."""
        return checkpoint.by_group(
            provider, lambda rows, targets: self._denominators(checkpoint, rows, targets, solve, method)
        )

    def _denominators(self, checkpoint: Checkpoint, rows: Tensor, targets: Tensor, solve: Solve, method: str) -> Tensor:
        if self.curvature == "upstream":
            with torch.no_grad():
                return self._compute_denom(checkpoint.index, rows, targets, relatif_method=method)
        solved = solve(rows)
        if method == "theta":
            return solved.norm(dim=1).clamp_min(1e-12)
        return (targets * solved).sum(1).clamp_min(1e-12).sqrt()

    def _prepared(self, train_dataloader: DataLoader) -> tuple[IndexedData, Any]:
        data, groups = self._train_data(train_dataloader)
        if self.full_train_dataloader is None:
            self._without_cache(train_dataloader)
        return data, groups

    def _without_cache(self, train_dataloader: DataLoader) -> None:
        """Warn that `cache` was not called, and use the training points as the full data, as dattri does."""
        warnings.warn(
            f"{type(self).__name__}.cache was not called: train_dataloader is taken for the full training data.",
            stacklevel=4,
        )
        self.full_train_dataloader = train_dataloader

    def _hessian(self, checkpoint: Checkpoint) -> Hessian:
        """The Hessian of all cached data, or its Gauss–Newton matrix."""
        return checkpoint.hessian(self._curvature_data(), gauss_newton=self.curvature == "gauss-newton")

    def _curvature_data(self) -> IndexedData:
        return IndexedData(self.full_train_dataloader, "the cached full_train_dataloader")

    def _result(self, scores: Tensor) -> Tensor:
        """Convert scores to the form dattri returns: default dtype, on the attributor's device, without a graph."""
        return scores.detach().to(self.device, torch.get_default_dtype())


def _check_relatif(method: str | None) -> None:
    if method not in (None, "l", "theta"):
        raise ValueError(f"relatif_method={method!r} is not one of None, 'l', 'theta'.")
