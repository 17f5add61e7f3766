"""`FisherInfluence`: influence functions with the empirical Fisher of projected gradients, for groups.

    τ_G(g) = ∇gᵀP (F + λ · mean diag(F) · I)⁻¹ Pᵀ Σ_{i∈G} ∇ℓ_i

averaged over checkpoints. P is one of TRAK's projectors, and F a Fisher of the projected loss gradients, see
`ggda_ext.curvature.fisher`. With ``fisher="exact"``, the score of a group is the sum of its members' scores.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from trak.projectors import BasicProjector, NoOpProjector, ProjectionType

from ggda_ext import GroupGradients
from ggda_ext.attribution import keep_scores, sum_scores
from ggda_ext.checkpoints import Checkpoints, LoadCheckpoint, at_checkpoints, listed_checkpoints
from ggda_ext.curvature.fisher import Damping, EmpiricalFisher, FisherKind, check_damping, check_fisher
from ggda_ext.data import DataLike
from ggda_ext.groups import GroupsLike
from ggda_ext.model import ParameterChoice
from ggda_ext.properties import PointProperty, Property
from ggda_ext.sharing import adding_up
from ggda_trak.projection import Projection, check_dimension, describe
from ggda_trak.task_gradients import property_rows


class FisherInfluence:
    """Influence of groups of training points on test losses or properties: the paper's Inf. (Fisher).

    A positive score means that the loss or property is predicted to rise if the group is removed. This is the core's
    sign, not TRAK's. With ``fisher="exact"`` the score approximates this rise, see docs/signs.md.

    Args:
        model: the trained model, in eval mode if it has dropout or BatchNorm.
        data: the training set.
        loss_fn: the training loss, ``loss_fn(output, target)`` of any reduction, or an `ExampleLoss`.
        groups: a `Groups` or anything that `Groups` accepts; None for groups of one.
        checkpoints: a state dict or its path, or several of them; scores are averaged over them. By default the current
            parameters are used.
        load_checkpoint: ``load_checkpoint(model, checkpoint)``, for checkpoints that are neither state dicts nor paths.
        proj_dim: length of projected gradients. If the model has at most this many parameters, nothing is projected.
        projector: a projector of TRAK or of `ggda_trak.projectors`; by default a BasicProjector of `proj_dim`.
        projector_seed: seed of the default projector.
        fisher: ``"paper"`` and ``"batched"`` are made of group sums and are approximations; ``"exact"`` is made of
            single points. See `ggda_ext.curvature.fisher` for the formulas.
        damping: ridge λ relative to the mean diagonal of the Fisher, or ``"auto"``.
        save_dir: a folder that keeps the finished projected sums of every checkpoint. They can be used for other test
            points, properties and dampings, and in another process, without another pass.
        tag: with `save_dir`, a name for the version of the data and of anything else that cannot be checked. A folder
            with another tag raises an error.
        parameters: the parameters that gradients are taken for: names of parameters or modules, modules, or
            parameters; by default all that require a gradient.
        strategy: how gradients are computed, ``"auto"`` or one of `ggda_ext.STRATEGIES`; all give the same numbers.
        batch_size: points per batch; by default the DataLoader's, else as many as fit the budget, at most 1024.
        memory_budget: bytes for the activations of one batch and for one block of rows.
        show_progress: whether to show a progress bar on passes over the data; by default if they take over 5 seconds.

    Attributes:
        chosen_damping: maps each checkpoint to the relative ridge in its Fisher, after the first call of `influence`.
    """

    def __init__(
        self,
        model: nn.Module,
        data: DataLike,
        loss_fn: Any,
        groups: GroupsLike | None = None,
        *,
        checkpoints: Checkpoints | None = None,
        load_checkpoint: LoadCheckpoint | None = None,
        proj_dim: int = 512,
        projector: Any = None,
        projector_seed: int = 0,
        fisher: FisherKind = "paper",
        damping: Damping = "auto",
        save_dir: str | Path | None = None,
        tag: str | None = None,
        parameters: ParameterChoice = None,
        strategy: str = "auto",
        batch_size: int | None = None,
        memory_budget: int = 256 * 2**20,
        show_progress: bool | None = None,
    ) -> None:
        self.fisher = check_fisher(fisher)
        if proj_dim < 1:
            raise ValueError(f"proj_dim={proj_dim}: pass at least 1.")
        self.damping = check_damping(damping)
        self.provider = GroupGradients(
            model, loss_fn, data, groups, parameters=parameters, strategy=strategy, batch_size=batch_size,
            memory_budget=memory_budget, show_progress=show_progress,
        )  # fmt: skip
        self.model, self.groups = self.provider.model, self.provider.groups
        space = self.provider.space
        if projector is None and space.size > proj_dim:
            projector = BasicProjector(
                space.size, proj_dim, projector_seed, ProjectionType.normal, space.device, dtype=space.dtype
            )
        check_dimension(projector, space.size)
        self.projection = Projection(projector or NoOpProjector(device=space.device), space, space.size**0.5)
        self._checkpoints = None if checkpoints is None else listed_checkpoints(checkpoints)
        self._load, self.save_dir, self.tag = load_checkpoint, save_dir, tag
        self._features: list[Tensor] = []
        self.chosen_damping: dict[int, float] = {}

    def influence(self, inputs: DataLike | None = None, *, property: Property | None = None) -> Tensor:
        """The predicted rise of the loss of test points, or of a property of the model, if a group is removed.

        Args:
            inputs: test points, in the same form as the training data.
            property: a callable ``g(model) -> Tensor`` to explain instead of test points.

        Returns:
            Scores `[m, k]`, one row per test point or component of the property.
        """
        if (inputs is None) == (property is None):
            raise ValueError("pass either inputs, test points, or property=, a function of the model.")
        if inputs is not None:
            property = PointProperty(inputs, self.provider.loss, source="inputs")
        assert property is not None
        share = 1 / len(self._checkpoints or [None])
        with closing(at_checkpoints(self.model, self._checkpoints, self._load)) as numbers:
            return sum_scores((share, self._scores(property, number)) for number in numbers)

    def _scores(self, property: Property, model_id: int) -> Tensor:
        """Scores `[m, k]` at the loaded checkpoint."""
        if model_id == len(self._features):
            self._features.append(self._made_features(model_id))
        rows = property_rows(self.model, property, self.projection, model_id, self.provider)
        return rows @ self._features[model_id].T

    def _made_features(self, model_id: int) -> Tensor:
        """Group sums times the damped inverse Fisher `[k, proj_dim]`."""
        made_with = {"fisher": self.fisher} | describe(self.projection.projector)
        with keep_scores(self.save_dir, self.tag) as kept:
            found = kept.array(self.provider, model_id, "sums", made_with, lambda: self._made_sums(model_id))
        sums, matrix = found[: len(self.groups)], found[len(self.groups) :]
        if self.fisher == "exact":
            fisher = EmpiricalFisher.of_matrix(matrix, int(self.groups.sizes.sum()))
        else:
            fisher = EmpiricalFisher(self.projection.dim, found.device)
            fisher.add_groups(self.fisher, sums, self.groups.sizes)
        damped, self.chosen_damping[model_id] = fisher.damped(self.damping)
        return torch.linalg.solve(damped, sums.T).T

    def _made_sums(self, model_id: int) -> Tensor:
        """Projected group sums `[k, proj_dim]`; with ``fisher="exact"``, the Fisher of the points below them."""
        space, exact = self.provider.space, self.fisher == "exact"
        sums = torch.zeros(len(self.groups), self.projection.dim, dtype=space.dtype, device=space.device)
        fisher = EmpiricalFisher(self.projection.dim, space.device)
        labels = torch.from_numpy(self.groups.labels.astype("int64")).to(space.device)
        gradients = self.provider.on(self.provider.data) if exact else self.provider
        with adding_up(sums):
            for at, rows in self.projection.blocks(gradients, model_id):
                ids = at.to(space.device)
                if exact:
                    inside = labels[ids] >= 0
                    ids, rows = labels[ids[inside]], rows[inside]
                    fisher.add(rows)
                sums.index_add_(0, ids, rows)
        return torch.cat([sums, fisher.add_up().matrix.to(sums)]) if exact else sums
