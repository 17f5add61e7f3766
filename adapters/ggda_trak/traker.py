"""`TRAKer` with groups: TRAK's scores of groups of training points, from one row per group.

    S[G, t] = (1/M) Σ_m v_{m,G}ᵀ A_m φ_{m,t},    v_{m,G} = Σ_{i∈G} Q̄_i φ_{m,i},    A_m ∝ (F_m + λI)⁻¹

The sum runs over checkpoints m. φ are the projected output gradients. Q̄_i is TRAK's reweighting term, averaged over
the checkpoints. With the exact Fisher, S is the sum of TRAK's own scores over the group.

The methods stand in the order in which a user calls them. If TRAK's own code gives the answer, a method calls it.
Otherwise `featurize` or `task_gradients` computes gradients, `projection` projects them, and `store` keeps the sums.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import trak
from torch import Tensor
from trak.savers import ModelIDException

from ggda_ext import Groups
from ggda_ext.checkpoints import Checkpoints
from ggda_ext.curvature.fisher import Damping, FisherKind, check_ridge
from ggda_ext.drop_in import FullSignature
from ggda_ext.groups import GroupsLike
from ggda_ext.model import ParameterChoice, inner_names
from ggda_ext.properties import Property
from ggda_ext.sharing import once, together
from ggda_trak import ranks
from ggda_trak.batches import check_batch, given_indices, part_of
from ggda_trak.featurize import GroupSums, group_features, points_between_writes
from ggda_trak.options import MEMORY_BUDGET, GroupOptions
from ggda_trak.projection import check_dimension, describe, release
from ggda_trak.save_dir import check_save_dir, check_targets, keep_checkpoint, keep_settings, keep_targets
from ggda_trak.savers import CheckedSaver
from ggda_trak.store import GroupStore, PointMeans
from ggda_trak.task_gradients import TaskGradients
from ggda_trak.task_outputs import MeanWeights


class TRAKer(FullSignature, trak.TRAKer):
    """`trak.TRAKer` with scores `[groups, targets]`. A positive score means that the group *raises* the target.

    The target of a test point is its output (the margin), so groups with a positive score help. A property is itself
    the target: if it is a loss, groups with a positive score hurt. Scores have no unit; see docs/signs.md.

    Without groups, and with groups of one, TRAK's own code runs. With groups, `use_half_precision` is off by default,
    because sums overflow float16. Some calls that crash TRAK work here: ``torch.device("cpu")``, `proj_dim` of 100 or
    less, `finalize_features` twice, `inds` as a list, ``load_from_save_dir=False``, a batch that is partly done before.
    `score` before `finalize_features` raises an error, while TRAK logs one and returns.

    Under ``torchrun``, every rank makes the same calls with the same batches and works on a share of each batch. All
    ranks must see `save_dir`. It ends up with the same content as with one process (see `ggda_trak.ranks`).

    Args:
        *args: as for `trak.TRAKer`.
        groups: a `Groups` or anything that `Groups` accepts, for `train_set_size` points.
        fisher: ``"batched"`` is made of output gradients summed by group, and is TRAK's for groups of one. ``"paper"``
            is made of loss gradients summed by group. ``"exact"`` is made of single points: its scores are sums of
            TRAK's scores, but take as long. The first two are approximations: their scores do not add up. Points in no
            group (``rest="drop"``) do not count in any Fisher, so the exact scores are then sums of TRAK's scores for
            the other points alone. See `ggda_ext.curvature.fisher` for the formulas.
        damping: ridge of the Fisher relative to its mean diagonal, on top of TRAK's `lambda_reg`. ``"auto"`` is the
            rule of `ggda_ext.curvature.fisher` for a Fisher of groups, and no ridge for the exact Fisher.
        strategy: how gradients are computed, see `GroupGradients`. A strategy other than ``"auto"`` is used for groups
            of one, too.
        checkpoints: if several checkpoints will be used, all of them: state dicts, or paths to them. The weights Q
            are averaged over them.
        parameters: the parameters that gradients are taken for: names of parameters or modules, modules, or
            parameters. It means the same as TRAK's `grad_wrt`.
        batch_size: number of points to run at once, if it should be less than the batches of `featurize` and `score`.
        memory_budget: bytes for activations, gradient rows, rows that wait for projection, and the projection matrix.
        show_progress: whether to show a progress bar for every batch; by default for those that take over 5 seconds.
        tag: a name for the version of the data and of anything else that cannot be checked. A folder with another tag
            raises an error.
        **kwargs: as for `trak.TRAKer`.

    Attributes:
        chosen_damping: maps each model id to the relative ridge in its Fisher, once its features are finalized.
    """

    def __init__(
        self,
        *args: Any,
        groups: GroupsLike | None = None,
        fisher: FisherKind = "batched",
        damping: Damping = "auto",
        strategy: str = "auto",
        checkpoints: Checkpoints | None = None,
        parameters: ParameterChoice = None,
        batch_size: int | None = None,
        memory_budget: int = MEMORY_BUDGET,
        show_progress: bool | None = None,
        tag: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.groups: Groups | None = None
        self._sums: GroupSums | None = None
        self._grouped, self.chosen_damping = False, dict[int, float]()
        self._last_ind_target = 0
        self._options = GroupOptions(
            fisher, damping, strategy, checkpoints, parameters, batch_size, memory_budget, show_progress, tag
        )
        if groups is None:
            self._options.refuse_without_groups()
            super().__init__(*args, **kwargs)
        else:
            self._begin_with(groups, inspect.signature(trak.TRAKer).bind(*args, **kwargs).arguments)

    def _begin_with(self, groups: GroupsLike, given: dict[str, Any]) -> None:
        """Set up with groups: decide whether TRAK's code runs, check the folder, and call TRAK's constructor."""
        drop_in = self._options.drop_in(groups, given["train_set_size"])
        assert drop_in.groups is not None
        self.groups, self._grouped = drop_in.groups, not drop_in.by_toolkit
        self._load = given.get("load_from_save_dir", True)
        ridge = check_ridge(given.get("lambda_reg", 0.0), "lambda_reg")
        if given.get("projector") is None and given.get("proj_dim", 1) < 1:
            raise ValueError(f"proj_dim={given['proj_dim']}: pass at least 1.")
        given["save_dir"] = self._save_dir = ranks.own_folder(given.get("save_dir", "./trak_results"), self._load)
        given = self._options.for_trak(given, self.groups if self._grouped else None)
        self._made_with = self._options.made_with(given, drop_in)
        with together({"groups": self._made_with["groups"]}):
            check_save_dir(Path(self._save_dir), load=self._load)
            super().__init__(**given)
            saver = self._checked_saver
            if saver is not None:
                saver.make_features_with({"lambda_reg": ridge, "damping": self._options.damping})
        self.train_set_size = self.groups.n
        if self._grouped:
            ranks.follow_first_rank(self.saver.model_ids)
            self.lambda_reg = ridge
        elif saver is not None:
            saver.sealed_at_once = points_between_writes(self.num_params_for_grad)
        notes = {} if saver is None else saver.notes
        self.chosen_damping |= {model_id: kept["damping"] for model_id, kept in notes.items() if "damping" in kept}

    def init_projector(self, *args: Any, **kwargs: Any) -> None:
        """As TRAK's. With groups, raise an error for a wrong projector or store before anything is written."""
        super().init_projector(*args, **kwargs)
        if self.groups is None:
            return
        check_dimension(self.projector, self.num_params_for_grad)
        keep_settings(self._folder(), self._made_with | describe(self.projector), load=self._load)

    def load_checkpoint(self, checkpoint: Any, model_id: int, *args: Any, **kwargs: Any) -> None:
        """As TRAK's."""
        if not self._grouped:
            super().load_checkpoint(self._state(checkpoint), model_id, *args, **kwargs)
            return
        with together({"model_id": model_id}):
            store = self._loaded(self._state(checkpoint), model_id, *args, **kwargs)
        self._sums = None
        if store is not None:  # finalize_features has not deleted it
            self._sums = GroupSums(store, self._task_gradients, model_id, self._weights)
            self.saver.serialize_current_model_id_metadata()

    def _loaded(self, checkpoint: dict[str, Tensor], model_id: int, *args: Any, **kwargs: Any) -> GroupStore | None:
        """Load a checkpoint and return its store, or None if the store was finalized and deleted."""
        self._commit()
        new = self.saver.model_ids.get(model_id) is None
        if new and len(self.saver.model_ids) >= self._options.models:
            raise ValueError(
                f"model_id={model_id} is checkpoint {len(self.saver.model_ids) + 1}, but this TRAKer was made for "
                f"{self._options.models}: pass checkpoints=[…], all state dicts or their paths, to average Q over them."
            )
        super().load_checkpoint(checkpoint, model_id, *args, **kwargs)
        if self.saver.current_store["grads"] is None:
            return None
        keep_checkpoint(self._folder(model_id), self.model, new=new)
        return self._store(model_id, reset=new)

    def featurize(self, batch: Iterable[Tensor], inds: Any = None, num_samples: int | None = None) -> None:
        """Add a batch to the sums of its groups. The points of a group may be spread over batches in any way.

        Points that were done before this checkpoint was loaded are skipped, so an interrupted loop can be run again.
        `groups.batch_sampler` gives batches of whole groups, which is fastest.
        """
        loaded = self.ckpt_loaded == self.saver.current_model_id
        if self.groups is None or not (self._grouped or loaded):
            super().featurize(batch, inds, num_samples)
            return
        if not loaded:
            raise ValueError("no checkpoint is loaded for featurizing: call load_checkpoint first.")
        if self._grouped and self._sums is None:
            raise ValueError(
                f"the sums of model id {self.saver.current_model_id}, grads.mmap, are not in save_dir="
                f"{str(self._save_dir)!r} any more: score with its features, or featurize in another save_dir."
            )
        batch = check_batch(batch)
        n = self.groups.n
        indices = given_indices(inds, num_samples, self._last_ind, len(batch[0]), n, "training points")
        if self._grouped:
            assert self._sums is not None
            with together({"the points of a batch": indices.tolist()}):
                if self._sums.add_share(batch, indices):
                    self.saver.serialize_current_model_id_metadata()
        else:
            left = np.flatnonzero(self.saver.current_store["is_featurized"][indices].reshape(-1) != 1)
            with self._task_gradients.projection.lent():
                super().featurize(part_of(batch, left), indices[left])
        self._last_ind += 0 if num_samples is None else num_samples

    def _commit(self) -> None:
        if self._sums is not None:
            self._sums.commit()
            if self.ckpt_loaded == self.saver.current_model_id:
                self.saver.serialize_current_model_id_metadata()

    def finalize_features(self, model_ids: Iterable[int] | None = None, del_grads: bool = False) -> None:
        """As TRAK's. Raise an error if a group is incomplete, or if a Fisher cannot be inverted."""
        if self.groups is not None:
            release(self.projector)
        if not self._grouped:
            super().finalize_features(model_ids, del_grads)
            return
        with together():
            self._commit()
        self._last_ind = 0
        for model_id in sorted(self.saver.model_ids) if model_ids is None else model_ids:
            if self.saver.model_ids.get(model_id) is None:
                raise ModelIDException(f"model id {model_id} is not registered: call load_checkpoint first.")
            if self.saver.model_ids[model_id]["is_finalized"] == 1:
                self.logger.warning(f"model id {model_id} is finalized already.")
                continue
            open_store = self._sums.store if self._sums is not None and self._sums.model_id == model_id else None
            with together({"model_id": model_id}):
                self.saver.load_current_store(model_id)
                store = self._store(model_id) if open_store is None else open_store
            ranks.merge(store)
            self.chosen_damping[model_id] = once(partial(self._finalize, model_id, store))
            self.saver.model_ids[model_id]["is_finalized"] = 1
            self.saver.serialize_current_model_id_metadata()
            if del_grads and ranks.is_first():
                self.saver.del_grads(model_id)
                store.delete_rows()

    def _finalize(self, model_id: int, store: GroupStore) -> float:
        """Compute the features of a checkpoint, and return the relative ridge in its Fisher."""
        store.check_complete(model_id)
        damping, current = self._options.damping, self.saver.current_store
        features, ridge = group_features(store, self.score_computer, self.device, damping, self.lambda_reg)
        current["features"][:] = features.to(self.dtype).cpu().numpy()
        current["out_to_loss"][:] = 1  # the numerators already contain Q
        if self._checked_saver is not None:
            self._checked_saver.notes[model_id]["damping"] = ridge
        return ridge

    def start_scoring_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As TRAK's."""
        if self.groups is None:
            super().start_scoring_checkpoint(*args, **kwargs)
            return
        given = inspect.signature(trak.TRAKer.start_scoring_checkpoint).bind(self, *args, **kwargs).arguments
        given["checkpoint"] = self._state(given["checkpoint"])
        del given["self"]
        with together({"exp_name and model_id": (given["exp_name"], given["model_id"])}):
            if self._grouped:
                self._commit()
            if not ranks.is_first():
                self._folder(given["model_id"]).mkdir(exist_ok=True)
            super().start_scoring_checkpoint(**given)
            if self._grouped:
                keep_checkpoint(self._folder(given["model_id"]), self.model, new=False)

    def score(
        self,
        batch: Iterable[Tensor] | None = None,
        inds: Any = None,
        num_samples: int | None = None,
        *,
        property: Property | None = None,
    ) -> None:
        """Add targets: a batch of points, or the components of a property of the model. Give exactly one of the two.

        A positive score means that training on the group raises the target: the output (margin) of a point, or the
        property, even if the property is a loss.
        """
        if (batch is None) == (property is None):
            raise ValueError("pass either a batch of targets or property=, a function of the model.")
        if self.groups is None and property is None:
            super().score(batch, inds, num_samples)
            return
        model_id, experiment = self.saver.current_model_id, getattr(self.saver, "current_experiment_name", None)
        if experiment is None:
            raise ValueError("no experiment to score for: call start_scoring_checkpoint(exp_name, …) before score.")
        if self.saver.model_ids[model_id]["is_finalized"] == 0:
            raise ModelIDException(f"model id {model_id} is not finalized: call finalize_features before score.")
        targets, start = self.saver.current_store[f"{experiment}_grads"], self._last_ind_target
        if batch is not None:
            batch = check_batch(batch)
            indices = given_indices(inds, num_samples, start, len(batch[0]), len(targets), "targets")
        if batch is not None and not self._grouped:
            with self._task_gradients.projection.lent():
                super().score(batch, indices)
        else:
            explained = property if batch is None else batch
            assert explained is not None
            rows = self._task_gradients.rows(explained, model_id)
            if batch is None:
                num_samples = len(rows) if num_samples is None and inds is None else num_samples
                indices = given_indices(inds, num_samples, start, len(rows), len(targets), "targets")
            if self._writes:
                targets[indices] = rows.to(self.dtype).cpu().numpy()
        self._last_ind_target = start + (num_samples or 0)
        if self.groups is not None and self._writes:
            keep_targets(self._folder(model_id), experiment, targets, indices)

    def finalize_scores(self, exp_name: str, model_ids: Iterable[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return TRAK's scores; with groups, `[groups, targets]`, positive if the group raises the target."""
        if self.groups is None:
            return super().finalize_scores(exp_name, model_ids, *args, **kwargs)
        used = list(self.saver.model_ids) if model_ids is None else list(model_ids)
        if self._grouped and len(used) != self._options.models:
            raise ValueError(
                f"model_ids holds {len(used)} checkpoints, but the weights Q of this store were averaged over "
                f"{self._options.models}: score all of them, or make a store for those."
            )
        finalize = partial(super().finalize_scores, exp_name, used, *args, **kwargs)
        if not self._grouped:
            self.scores = self._checked_scores(exp_name, used, finalize)
            return self.scores
        with together():
            scores = self._checked_scores(exp_name, used, finalize) if ranks.is_first() else None
        self.scores = ranks.seen_by_all(scores)
        return self.scores

    def _checked_scores(self, exp_name: str, model_ids: list[int], finalize: Any) -> np.ndarray:
        """Check the targets, compute TRAK's scores in the order of the groups, and record a checksum of the scores."""
        for model_id in model_ids if exp_name in self.saver.experiments else ():
            self.saver.load_current_store(model_id, exp_name, self.saver.experiments[exp_name]["num_targets"])
            check_targets(self._folder(model_id), exp_name, self.saver.current_store[f"{exp_name}_grads"])
        checked = self._checked_saver
        if checked is not None:
            checked.begin_scores(exp_name)
        scores = finalize()
        assert self.groups is not None
        if not self._grouped and (self.groups.order != np.arange(self.groups.n)).any():
            scores[:] = scores[self.groups.order]
            scores.flush()
        if checked is not None:
            checked.end_scores(exp_name)
        return scores

    # ---- helpers of the methods above

    @property
    def _checked_saver(self) -> CheckedSaver | None:
        """The saver if it is a `CheckedSaver`, else None: a user may pass another saver."""
        return self.saver if isinstance(self.saver, CheckedSaver) else None

    @property
    def _writes(self) -> bool:
        """Whether this process writes targets and scores; with groups, the first rank writes them for all ranks."""
        return ranks.is_first() or not self._grouped

    def _folder(self, model_id: int | str = "") -> Path:
        return Path(self._save_dir).resolve() / str(model_id)

    def _state(self, checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint if self.groups is None else inner_names(checkpoint, self.model)

    def _store(self, model_id: int, reset: bool = False) -> GroupStore:
        assert self.groups is not None
        return GroupStore(self._folder(model_id), self.saver.current_store, self.groups, self._options.fisher, reset)

    @cached_property
    def _task_gradients(self) -> TaskGradients:
        return TaskGradients(self, self._options)

    @cached_property
    def _weights(self) -> MeanWeights:
        assert self.groups is not None
        several = self._options.several
        means = PointMeans(self._folder(), self.groups.n, reset=not self._load) if several else None
        return MeanWeights(self.model, self.gradient_computer, several, means)
