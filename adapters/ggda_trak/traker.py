"""`TRAKer` with groups: TRAK's scores of groups of training points, from one row per group.

    S[G, t] = (1/M) Σ_m v_{m,G}ᵀ A_m φ_{m,t},    v_{m,G} = Σ_{i∈G} Q̄_i φ_{m,i},    A_m ∝ (F_m + λI)⁻¹

over checkpoints m, with φ the projected output gradients and Q̄_i TRAK's reweighting term, averaged over the
checkpoints. With the exact Fisher this is the sum of TRAK's own scores over the group.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import trak
from torch import Tensor
from trak.gradient_computers import IterativeGradientComputer
from trak.savers import ModelIDException

from ggda_ext import GroupGradients, Groups
from ggda_ext.checkpoints import Checkpoints, listed_checkpoints
from ggda_ext.curvature.fisher import Damping, EmpiricalFisher, FisherKind, check_damping, check_fisher, check_ridge
from ggda_ext.distributed import alone, from_first_rank, my_share, rank, together, world_size
from ggda_ext.groups import GroupsLike
from ggda_ext.model import ParameterSpace, inner_name, inner_names, unwrapped
from ggda_ext.properties import Property
from ggda_ext.storage.files import write_json
from ggda_ext.storage.fingerprint import of_groups, of_state, of_structure, of_value
from ggda_ext.storage.folder import StoreMismatch, check_folder
from ggda_trak.checked_parts import check_features, check_targets, read_damping, write_features, write_targets
from ggda_trak.checked_saver import CheckedSaver, refuse_links
from ggda_trak.inputs import check_batch, point_hashes, target_indices, training_indices
from ggda_trak.outputs import TaskOutputs
from ggda_trak.projection import Projection, check_dimension, describe, release
from ggda_trak.ranks import follow_first_rank, merge, own_folder, scores_of_first_rank
from ggda_trak.rows import all_point_rows, property_rows
from ggda_trak.store import (
    GroupStore,
    check_checkpoint,
    check_settings,
    mend,
    mend_experiment,
    refuse_foreign,
    write_settings,
)
from ggda_trak.sums import GroupSums
from ggda_trak.weights import MeanWeights

STRATEGIES = ("auto", "segmented", "backward", "persample")


class TRAKer(trak.TRAKer):
    """`trak.TRAKer`, with scores `[groups, targets]`: a positive one means that the group *raises* the target.

    The target of a test point is its output (the margin), so a positive score is a group that helps; of a property it
    is the property, so for a loss a positive score is a group that hurts. Scores have no unit; see docs/signs.md.

    Without groups, and with groups of one, TRAK's own code runs. With groups, `use_half_precision` is off unless
    asked for (sums overflow float16), and where TRAK crashes this does not: ``torch.device("cpu")``, `proj_dim` of
    100 or less, `finalize_features` twice, `inds` as a list, ``load_from_save_dir=False``, a batch partly done
    before. `score` before `finalize_features` is an error, where TRAK logs one and returns.

    Started by ``torchrun``, every rank makes the same calls with the same batches and takes a share of each; `save_dir`
    is one that all ranks see, and holds what one process would leave there (see `ggda_trak.ranks`).

    Args:
        *args: as for `trak.TRAKer`.
        groups: a `Groups` or anything it accepts, for `train_set_size` points.
        fisher: ``"batched"`` (of output gradients summed by group; TRAK's at size one), ``"paper"`` (of loss gradients
            summed by group) or ``"exact"`` (of single points: scores are the sums of TRAK's, but take as long), see
            `ggda_ext.curvature.fisher` for the formulas. The first two are approximations: they do not add up.
        damping: ridge of the Fisher relative to its mean diagonal, on top of TRAK's `lambda_reg`; ``"auto"`` is that of
            `ggda_ext.curvature.fisher` for a Fisher of groups, and none for the exact one.
        strategy: how gradients are computed, see `GroupGradients`; other than ``"auto"`` it is used for groups of
            one as well.
        checkpoints: all checkpoints that will be used, if several: state dicts, or paths to them. The weights Q
            are averaged over them.
        memory_budget: bytes for activations, gradient rows, and rows that wait for their projection.
        **kwargs: as for `trak.TRAKer`.

    Attributes:
        chosen_damping: model id → relative ridge in its Fisher, once its features are finalized.
    """

    def __init__(
        self,
        *args: Any,
        groups: GroupsLike | None = None,
        fisher: FisherKind = "batched",
        damping: Damping = "auto",
        strategy: str = "auto",
        checkpoints: Checkpoints | None = None,
        memory_budget: int = 512 * 2**20,
        **kwargs: Any,
    ) -> None:
        self.groups: Groups | None = None
        self._sums: GroupSums | None = None
        self._provider: GroupGradients | None = None
        self._grouped, self.chosen_damping = False, dict[int, float]()
        if groups is None:
            super().__init__(*args, **kwargs)
            return
        self.fisher = check_fisher(fisher)
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is not one of {', '.join(map(repr, STRATEGIES))}.")
        if memory_budget < 1:
            raise ValueError(f"memory_budget={memory_budget}: pass a positive number of bytes.")
        if checkpoints is not None:
            checkpoints = listed_checkpoints(checkpoints)
        given = inspect.signature(trak.TRAKer).bind(*args, **kwargs).arguments
        self.groups = Groups.of(groups, given["train_set_size"])
        self.strategy, self.memory_budget = strategy, memory_budget
        ridge = check_ridge(given.get("lambda_reg", 0.0), "lambda_reg")
        self.damping: Damping = "auto" if damping == "auto" else check_damping(damping)
        forced = strategy != "auto" or fisher == "paper" or damping != "auto"
        self._grouped = forced or not self.groups.are_singletons
        self._checkpoints = checkpoints
        self._load = given.get("load_from_save_dir", True)
        given["save_dir"] = self._save_dir = own_folder(given.get("save_dir", "./trak_results"), self._load)
        if given.get("grad_wrt") is not None:
            given["grad_wrt"] = [inner_name(name, given["model"]) for name in given["grad_wrt"]]
        given["model"] = unwrapped(given["model"])
        if isinstance(given.get("device"), torch.device):
            given["device"] = str(given["device"])
        if self._grouped:
            given = {"use_half_precision": False} | given | {"train_set_size": len(self.groups)}
            given["lambda_reg"] = 0.0  # it is in the Fisher that TRAK's code is given
        self._half = given.get("use_half_precision", True)
        given.setdefault("saver", CheckedSaver)
        self._made_with = self._describe(given)
        with together({"groups": of_groups(self.groups)}):
            check_folder(Path(self._save_dir))
            refuse_links(Path(self._save_dir))
            if self._load:
                refuse_foreign(Path(self._save_dir))
                mend(Path(self._save_dir))
            super().__init__(**given)
            if not self.saver.experiments_file.exists():
                write_json(self.saver.experiments_file, {})
        self.train_set_size = self.groups.n
        if self._grouped:
            follow_first_rank(self.saver.model_ids)
        for model_id in self.saver.model_ids:
            chosen = read_damping(self._folder(model_id))
            if chosen is not None:
                self.chosen_damping[model_id] = chosen
        if self._grouped:
            self.lambda_reg = ridge
            self._weights = MeanWeights(
                self.model, self.gradient_computer, checkpoints, self._folder(""), self.groups.n, reset=not self._load
            )

    def init_projector(self, *args: Any, **kwargs: Any) -> None:
        """As TRAK's; with groups, a projector or a store that does not fit is refused before anything is written."""
        super().init_projector(*args, **kwargs)
        if self.groups is None:
            return
        check_dimension(self.projector, self.num_params_for_grad)
        settings = {
            "groups": of_groups(self.groups),
            "fisher": self.fisher if self._grouped else "TRAK's",
            "checkpoints": self._models if self._grouped else None,
            "half_precision": self._half, "parameters": sorted(self.grad_wrt) if self.grad_wrt else "all",
        } | self._made_with  # fmt: skip
        folder = Path(self._save_dir).resolve()
        check_settings(folder, settings | describe(self.projector), compare=self._load)
        write_settings(folder, settings | describe(self.projector))

    def _describe(self, given: dict[str, Any]) -> dict[str, Any]:
        """The task, the model but for its values, and the checkpoints whose weights Q are averaged."""
        states = [] if self._checkpoints is None or len(self._checkpoints) == 1 else self._checkpoints
        loaded = (
            state if isinstance(state, dict) else torch.load(state, map_location="cpu", weights_only=True)
            for state in states
        )
        return {
            "task": of_value(given["task"], "task", None),
            "model": of_structure(given["model"], None),
            "values of the checkpoints": [of_state(inner_names(state, given["model"])) for state in loaded],
        }

    @property
    def _models(self) -> int:
        return 1 if self._checkpoints is None else len(self._checkpoints)

    def _folder(self, model_id: int | str) -> Path:
        return Path(self._save_dir).resolve() / str(model_id)

    @property
    def _names(self) -> list[str]:
        return list(self.grad_wrt or dict(self.model.named_parameters()))

    def load_checkpoint(self, checkpoint: Any, model_id: int, *args: Any, **kwargs: Any) -> None:
        """As TRAK's."""
        if not self._grouped:
            super().load_checkpoint(self._state(checkpoint), model_id, *args, **kwargs)
            return
        with together({"model_id": model_id}):
            store = self._loaded(self._state(checkpoint), model_id, *args, **kwargs)
        self._sums = None
        if store is not None:  # not deleted by finalize_features
            assert self.groups is not None
            budget = self.memory_budget // 2
            self._sums = GroupSums(store, self.groups, self.fisher, self._projection(), model_id, budget)
            self.saver.serialize_current_model_id_metadata()

    def _loaded(self, checkpoint: dict[str, Tensor], model_id: int, *args: Any, **kwargs: Any) -> GroupStore | None:
        """Load a checkpoint; its store, or None if that is finalized and deleted."""
        self._commit()
        new = self.saver.model_ids.get(model_id) is None
        if new and len(self.saver.model_ids) >= self._models:
            raise ValueError(
                f"model_id={model_id} is checkpoint {len(self.saver.model_ids) + 1}, but this TRAKer was made for "
                f"{self._models}: pass checkpoints=[…], all state dicts or their paths, to average Q over them."
            )
        super().load_checkpoint(checkpoint, model_id, *args, **kwargs)
        if self.saver.current_store["grads"] is None:
            return None
        check_checkpoint(self._folder(model_id), self.model, new=new)
        return self._store(model_id, reset=new)

    def _state(self, checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
        return checkpoint if self.groups is None else inner_names(checkpoint, self.model)

    def _store(self, model_id: int, reset: bool = False) -> GroupStore:
        assert self.groups is not None
        return GroupStore(self._folder(model_id), self.saver.current_store, self.groups, self.fisher, reset)

    def featurize(self, batch: Iterable[Tensor], inds: Any = None, num_samples: int | None = None) -> None:
        """Add a batch to the sums of its groups; groups may be cut across batches in any way.

        Points that were done before this checkpoint was loaded are left out, so a loop can be run again after it was
        interrupted. `groups.batch_sampler` gives whole groups, which is fastest.
        """
        loaded = self.ckpt_loaded == self.saver.current_model_id
        if self.groups is None or not (self._grouped or loaded):
            super().featurize(batch, inds, num_samples)
            return
        if not loaded or (self._grouped and self._sums is None):
            raise ValueError("no checkpoint is loaded for featurizing: call load_checkpoint first.")
        batch = check_batch(batch)
        indices = training_indices(inds, num_samples, self._last_ind, len(batch[0]), self.groups.n)
        with together({"the points of a batch": indices.tolist()}):
            self._featurize(batch, indices)
        self._last_ind += 0 if num_samples is None else num_samples

    def _featurize(self, batch: tuple[Tensor, ...], indices: np.ndarray) -> None:
        """Add this rank's share of the points of a batch that were not done before."""
        done = self._done(indices)
        mine = np.flatnonzero(~done)
        if self._grouped:
            hashes = point_hashes(batch)
            self._refuse_other_points(indices[done], hashes[done])
            mine = mine[my_share(len(mine)).start : my_share(len(mine)).stop]
        own = batch if len(mine) == len(indices) else tuple(tensor[torch.from_numpy(mine)] for tensor in batch)
        if not self._grouped:
            super().featurize(own, indices[mine])
            return
        assert self._sums is not None
        if len(mine):
            with alone():
                weights = self._weights(own, indices[mine])
                self._sums.add(self._gradients(own), own, indices[mine], weights, hashes[mine])
            self.saver.serialize_current_model_id_metadata()
        self._sums.now[indices] = True

    def _done(self, indices: np.ndarray) -> np.ndarray:
        if self._sums is None:
            return self.saver.current_store["is_featurized"][indices].reshape(-1) == 1
        twice = indices[self._sums.now[indices]]
        if len(twice):
            raise ValueError(
                f"inds holds {len(twice)} points that are featurized already, first {twice[:5].tolist()}: give every "
                "point once per checkpoint."
            )
        return self._sums.before[indices]

    def _refuse_other_points(self, indices: np.ndarray, hashes: np.ndarray) -> None:
        """Refuse points in the place of others that are in the sums already."""
        assert self._sums is not None
        before = np.asarray(self._sums.store.hashes)[indices]
        other = indices[(before != hashes) & (before != 0)]  # 0: another rank's
        if len(other):
            raise StoreMismatch(
                f"save_dir={str(self._save_dir)!r} was made with other data than now at {len(other)} points of this "
                f"batch, first {other[:5].tolist()}: pass what it was made with, or another save_dir."
            )

    def _commit(self) -> None:
        if self._sums is not None:
            self._sums.commit()
            if self.ckpt_loaded == self.saver.current_model_id:
                self.saver.serialize_current_model_id_metadata()

    def _gradients(self, batch: tuple[Tensor, ...]) -> GroupGradients:
        """The provider of output gradients, looked into once."""
        if self._provider is None:
            batched = isinstance(self.gradient_computer, IterativeGradientComputer)
            outputs = TaskOutputs(self.task, batched, self.model, batch)
            weights = torch.ones(len(batch[0]), device=batch[0].device)
            self._provider = GroupGradients(
                self.model, outputs, (*batch, weights), parameters=self._names, strategy=self.strategy,
                memory_budget=max(1, self.memory_budget // 2),
            )  # fmt: skip
        return self._provider

    def _projection(self) -> Projection:
        return Projection(self.projector, ParameterSpace(self.model, self._names), float(self.normalize_factor))

    def finalize_features(self, model_ids: Iterable[int] | None = None, del_grads: bool = False) -> None:
        """As TRAK's; an incomplete group, or a Fisher that cannot be inverted, is an error."""
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
            with together({"model_id": model_id}):
                self.saver.load_current_store(model_id)
                store = self._store(model_id)
            merge(store)
            self.chosen_damping[model_id] = from_first_rank(partial(self._finalize, model_id, store))
            self.saver.model_ids[model_id]["is_finalized"] = 1
            self.saver.serialize_current_model_id_metadata()
            if del_grads and rank() == 0:
                self.saver.del_grads(model_id)
                store.delete_rows()

    def _finalize(self, model_id: int, store: GroupStore) -> float:
        """Make the features of a checkpoint; the relative ridge in its Fisher."""
        missing = store.missing
        if missing.any():
            assert self.groups is not None
            absent = np.flatnonzero((np.asarray(store.points) == 0) & (self.groups.labels >= 0))
            raise ModelIDException(
                f"model id {model_id}: {(missing > 0).sum()} of {len(missing)} groups are incomplete, {len(absent)} "
                f"training points are missing, first {absent[:5].tolist()}: featurize them first."
            )
        numerators = torch.as_tensor(np.array(self.saver.current_store["grads"]), device=self.device)
        fisher, damping = self._fisher(store, numerators)
        features = self.score_computer.get_x_xtx_inv(numerators, fisher)
        current = self.saver.current_store
        current["features"][:] = features.to(self.dtype).cpu().numpy()
        current["out_to_loss"][:] = 1  # Q is in the numerators
        write_features(self._folder(model_id), damping, current["features"])
        return damping

    def _fisher(self, store: GroupStore, numerators: Tensor) -> tuple[Tensor, float]:
        """The Fisher `[p, p]` for TRAK's score computer, and the relative ridge in it."""
        assert self.groups is not None
        fisher = EmpiricalFisher(numerators.shape[1], numerators.device)
        if store.fisher is not None:
            fisher.matrix = torch.as_tensor(np.array(store.fisher), device=self.device)
            fisher.rows = int(self.groups.sizes.sum())
            return fisher.damped(0.0 if self.damping == "auto" else self.damping, self.lambda_reg)
        sums = numerators  # loss gradients, but for their sign
        if self.fisher == "batched":
            sums = torch.as_tensor(np.array(store.sums["fisher_rows"]), device=self.device)
        return fisher.add_groups(self.fisher, sums, self.groups.sizes).damped(self.damping, self.lambda_reg)

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
            if rank():
                self._folder(given["model_id"]).mkdir(exist_ok=True)
            mend_experiment(self._folder(""), given["model_id"], given["exp_name"])
            super().start_scoring_checkpoint(**given)
            if self._grouped:
                check_checkpoint(self._folder(given["model_id"]), self.model, new=False)

    def score(
        self,
        batch: Iterable[Tensor] | None = None,
        inds: Any = None,
        num_samples: int | None = None,
        *,
        property: Property | None = None,
    ) -> None:
        """Add targets: a batch of points, or the components of a property of the model (give one of the two).

        A positive score means that training on the group raises the target: the output (margin) of a point, or the
        property, even if that is a loss.
        """
        if (batch is None) == (property is None):
            raise ValueError("pass either a batch of targets or property=, a function of the model.")
        if self.groups is None and property is None:
            super().score(batch, inds, num_samples)
            return
        model_id, experiment = self.saver.current_model_id, self.saver.current_experiment_name
        if self.saver.model_ids[model_id]["is_finalized"] == 0:
            raise ModelIDException(f"model id {model_id} is not finalized: call finalize_features before score.")
        if batch is not None and not self._grouped:
            super().score(batch, None if inds is None else np.asarray(inds), num_samples)
            return
        rows = self._target_rows(None if batch is None else check_batch(batch), property, model_id)
        store = self.saver.current_store[f"{experiment}_grads"]
        count = len(rows) if num_samples is None and property is not None and inds is None else num_samples
        indices = target_indices(inds, count, self._last_ind_target, len(rows), len(store))
        self._last_ind_target += 0 if count is None else count
        if rank() == 0:
            store[indices] = rows.to(self.dtype).cpu().numpy()
            if self._grouped:
                write_targets(self._folder(model_id), experiment, store, indices)

    def _target_rows(self, batch: tuple[Tensor, ...] | None, property: Property | None, model_id: int) -> Tensor:
        """Projected gradients of targets `[m, proj_dim]`."""
        projection = self._projection()
        if batch is None:
            assert property is not None
            return property_rows(self.model, property, projection, model_id)
        ones = torch.ones(len(batch[0]), device=batch[0].device)
        return all_point_rows(self._gradients(batch).on((*batch, ones)), projection, model_id)

    def _check_parts(self, experiment: str, model_ids: Iterable[int]) -> None:
        """Refuse features and targets that are not what was written."""
        known = self.saver.experiments.get(experiment)
        for model_id in model_ids if known is not None else ():
            self.saver.load_current_store(model_id)
            self.saver.load_current_store(model_id, experiment, known["num_targets"])
            check_features(self._folder(model_id), self.saver.current_store["features"])
            targets = self.saver.current_store[f"{experiment}_grads"]
            if targets is not None:
                check_targets(self._folder(model_id), experiment, targets)

    def finalize_scores(self, exp_name: str, model_ids: Iterable[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """TRAK's scores, `[groups, targets]` with groups; positive where the group raises the target."""
        if self.groups is None:
            return super().finalize_scores(exp_name, model_ids, *args, **kwargs)
        used = list(self.saver.model_ids) if model_ids is None else list(model_ids)
        if self._grouped and len(used) != self._models:
            raise ValueError(
                f"model_ids holds {len(used)} checkpoints, but the weights Q of this store were averaged over "
                f"{self._models}: score all of them, or make a store for those."
            )
        if self._grouped and rank() == 0:
            self._check_parts(exp_name, used)
        if self._grouped and world_size() > 1:
            with together():
                own = super().finalize_scores(exp_name, used, *args, **kwargs) if rank() == 0 else None
            self.scores = scores_of_first_rank(own)
            return self.scores
        scores = super().finalize_scores(exp_name, used, *args, **kwargs)
        if not self._grouped and (self.groups.order != np.arange(self.groups.n)).any():
            scores[:] = scores[self.groups.order]
            scores.flush()
        return scores
