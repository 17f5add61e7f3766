"""`GroupTracker` computes group scores while a Trainer trains, at the parameters of each step, without checkpoints.

At step t, the tracker scores the points of the step's batches against the property's gradient. It uses the parameters
θ_t before the step and the learning rate of the step, and adds the scores up by group:

    τ_G = Σ_t Σ_{i ∈ G, in the batches of t} ⟨d_t, ∇ℓ_i(θ_t)⟩    with d_t = η_t ∇g(θ_t)

With ``preconditioner="adam"`` the gradient is divided as Adam divides, and d_t is a mean over the steps so far
(`Momentum`).
Dropout is off while scores are computed. The tracker is a monitor, not a verdict. It uses no curvature, so it shows the
direction in which each source pulls while the model learns, not how the model would be without the source.
"""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, set_seed

from ggda_ext.attribution import property_directions
from ggda_ext.data import IndexedData, to_device
from ggda_ext.gradients import GroupGradients, PointGradients
from ggda_ext.groups import Groups
from ggda_ext.losses.row_reductions import Tokens
from ggda_ext.properties.classes import data_of
from ggda_ext.results import Attribution, MethodFacts
from ggda_ext.results.named_scores import names_of
from ggda_ext.sharing import alone
from ggda_ext.storage.content import Content
from ggda_ext.storage.data_content import some_points
from ggda_ext.storage.fingerprint import of_groups
from ggda_ext.words import check_counts, without
from ggda_transformers.adam import Momentum, live_divisors, steady
from ggda_transformers.attribution import evaluated
from ggda_transformers.columns import groups_of
from ggda_transformers.indexed_batches import Carried, number_rows, take_at_the_step
from ggda_transformers.peft_models import counted_parameters
from ggda_transformers.properties import property_of
from ggda_transformers.setup import TrainerSetup
from ggda_transformers.tracked_sums import TrackedSums

UNKNOWN_ORDER = (
    "The Trainer's rows have no column in common with train_dataset: that they are in the same order was not checked."
)
INTERVAL = "95 %, over the draw of batches"
_logger = logging.getLogger(__name__)


class GroupTracker(TrainerCallback):
    """A callback that adds up group scores during training; it keeps three numbers for each group and property.

    Pass it as ``Trainer(callbacks=[tracker])``. The tracker adds its scores to the Trainer's log as ``ggda/<group>``; a
    second tracker logs ``ggda-2/<group>``. `attach` puts the tracker before reporters such as TensorBoard, so that they
    see the scores, too. At the end it prints a table and saves a picture to the output folder. `result` is the
    `Attribution`; its unit is ``"rank"``.

    Args:
        train_dataset: the rows given to the Trainer, with the column that `groups` names.
        groups: as in `attribute_trainer`.
        property: as in `attribute_trainer`. Its gradient is computed at every scored step, so a small evaluation set
            keeps the tracker cheap.
        eval_dataset: the rows that a property given by name is computed on.
        every: score every n-th step, for ``every=n``.
        batches: the batches that a scored step scores: its ``"own"``, or ``"all"`` since the last scored step. With
            ``"all"`` each row is scored once an epoch, at the price of a pass over the rows, and only the property's
            gradient is computed less often; batches that are left over at the end are scored in the last step. Rows
            that are not scored make scores noisy, so use ``"all"`` if the property has more rows than a batch.
        share: the probability to score each of these steps. All ranks score the same steps.
        preconditioner: ``"adam"`` divides the property's gradient as Adam does in the scored step, and takes its mean
            over the steps so far as Adam does. This needs the memory of one more gradient for each property. With
            None, the default, the gradient itself is used.
        tokens: as in `attribute_trainer`.
        data_collator: for the rows of a property given by name; by default the Trainer's.
        parameters: the parameters that gradients are taken for; by default those that require a gradient.
        seed: seed for the random choice of steps, and for what the property's rows draw (masks of tokens, say).
        show: whether to print the table and save the picture at the end.
    """

    @without(
        strategy="each step's batch is scored as it comes, by the strategy that suits it; leave it out",
        batch_size="the batches are the Trainer's own; set per_device_train_batch_size there",
        memory_budget="the batches are the Trainer's own; choose their size there",
        show_progress="the Trainer shows the progress; show=False leaves out the table at its end",
        keeping="the scores are saved with the Trainer's checkpoints, and go on from there",
    )
    def __init__(
        self,
        train_dataset: Any,
        groups: Any,
        property: Any = "eval_loss",
        *,
        eval_dataset: Any = None,
        every: int = 1,
        batches: Literal["own", "all"] = "own",
        share: float = 1.0,
        preconditioner: Literal["adam"] | None = None,
        tokens: Tokens = "mean",
        data_collator: Callable[[list[Any]], Any] | None = None,
        parameters: Any = None,
        seed: int = 0,
        show: bool = True,
    ) -> None:
        self._rows = train_dataset
        self.groups: Groups = groups_of(train_dataset, groups)
        check_counts(every=every)
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise ValueError(f"share={share!r}: pass a number above 0, up to 1.")
        for name, value, words in (
            ("batches", batches, ("own", "all")),
            ("preconditioner", preconditioner, (None, "adam")),
            ("tokens", tokens, ("mean", "sum")),
        ):
            if value not in words:
                raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, words))}.")
        self.every, self.share, self.preconditioner, self.tokens, self.seed = every, share, preconditioner, tokens, seed
        self.batches, self.show = batches, show
        self._property, self._eval_dataset, self._parameters = property, eval_dataset, parameters
        self._collator = data_collator
        self._undo: list[Callable[[], None]] = []
        self._reset()

    def _reset(self) -> None:
        self.sums = TrackedSums(self.groups)
        self.training_seconds = 0.0
        self._pending: list[Carried] = []
        self._provider: GroupGradients | None = None
        self._setup: TrainerSetup | None = None
        self._goal: Any = None
        self._compared = True

    def attach(self, trainer: Any) -> GroupTracker:
        """Put the tracker before the Trainer's other callbacks, so that reporters among them see its scores."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)
        return self

    # ---- methods that the Trainer calls

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make batches carry the numbers of their rows; load the sums of the checkpoint if the run is resumed."""
        self._close()
        self._reset()
        trainer, resumed = self._calling_trainer()
        self._setup = TrainerSetup.of(trainer, data_collator=self._collator)
        self._goal = property_of(self._setup, self._property, self._eval_dataset)
        if self.preconditioner == "adam":
            self.sums.momentum = Momentum()
        trackers = [one for one in trainer.callback_handler.callbacks if isinstance(one, GroupTracker)]
        self.sums.number, self.sums.settings = trackers.index(self), self._settings()
        with self._own_randomness():
            numbered = number_rows(kwargs["train_dataloader"], self._rows)
            self._compared = numbered.compared
            self._undo = [numbered.undo, take_at_the_step(trainer, self._pending.append)]
            if state.global_step:
                pending = self.sums.resume(Path(resumed or f"{args.output_dir}/checkpoint-{state.global_step}"), state)
                self._pending += map(numbered.batch_of, pending)
        self._started = perf_counter() - self.sums.training_seconds

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Score the batches of the step, before the step changes the parameters."""
        every, step, gather = self.every, state.global_step, self.batches == "all"
        drawn = self.share == 1 or random.Random(f"{self.seed}-{step}").random() < self.share
        due = drawn and step % every == (every - 1 if gather else 0)
        due = due or (gather and step + 1 == state.max_steps)
        batches = self._pending.copy()
        if due or not gather:
            self._pending.clear()
        if not due:
            return
        if not batches:
            raise RuntimeError(
                "the Trainer takes a step, and GroupTracker has seen none of its batches: training_step was replaced "
                "during the training, or inputs were made anew before it. Leave them as they are, or leave it out."
            )
        self._score(batches, kwargs["optimizer"], step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the scores so far to the Trainer's log."""
        if logs is None or "loss" not in logs:
            return
        totals = self.sums.of_all_ranks()
        if totals is None:
            return
        self.sums.history.append((int(state.global_step), totals[0].tolist()))
        logged = self._logged(totals[0])
        logs.update(logged)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(logged)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the sums in the checkpoint's folder, so that a run can resume from it."""
        self.sums.training_seconds = perf_counter() - self._started
        self.sums.save(args, state, [carried.rows for carried in self._pending])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Score batches that are left over, undo the changes to the Trainer, print the table, save the picture.

        Batches are left over if the training stopped before its last step; they are scored at the parameters it ends
        with.
        """
        if self._pending:
            self._score(self._pending, kwargs["optimizer"], state.global_step)
        self.training_seconds = perf_counter() - self._started
        self._close()
        self.sums.totals = self.sums.of_all_ranks()
        if self.sums.scores is None:
            _logger.warning("GroupTracker scored no step: every=%s, share=%s.", self.every, self.share)
        elif self.show and state.is_world_process_zero:
            print(self.result)
            _save_picture(self, Path(args.output_dir) / f"group_tracker{self.sums.suffix}.png")

    # ---- results

    @property
    def result(self) -> Attribution:
        """The scores so far, with the names of the groups; after training, they are the scores of all ranks."""
        if self.sums.scores is None:
            raise ValueError("GroupTracker has scored no step yet: pass it to Trainer(callbacks=[…]), and train.")
        settings: dict[str, Any] = {"every": self.every, "scored steps": self.sums.steps}
        if self.batches == "all":
            settings["batches"] = "all"
        if self.share < 1:
            settings["share"] = self.share
        if self.sums.momentum is not None:
            settings["preconditioner"] = "adam"
        method = MethodFacts("tracin during training", "rank", settings, seconds=self.sums.seconds)
        notes = ["Added up while training, without curvature: a monitor, not what removing the group would do."]
        if not self._compared:
            notes.append(UNKNOWN_ORDER)
        if self.training_seconds:
            notes.append(f"It took {self.overhead:.0%} on top of the training.")
        ends = self.sums.interval()
        around: dict[str, Any] = {} if ends is None else {"low": ends[0], "high": ends[1], "interval": INTERVAL}
        return Attribution.of(self.sums.scores.clone(), self.groups, self._goal, method=method, test_axis=0,
                              notes=notes, **around)  # fmt: skip

    @property
    def overhead(self) -> float:
        """Time spent on scores, divided by the time that training takes without them."""
        return self.sums.seconds / max(self.training_seconds - self.sums.seconds, 1e-9)

    def plot(self, ax: Any = None) -> Any:
        """Plot the scores of the first property by step, with one line for each group; needs the extra ``[plot]``."""
        from matplotlib import pyplot

        ax = pyplot.subplots(figsize=(7, 4), layout="constrained")[1] if ax is None else ax
        steps = [0, *(step for step, _ in self.sums.history)]
        for j, name in enumerate(self.groups.all_names):
            ax.plot(steps, [0.0, *(scores[0][j] for _, scores in self.sums.history)], label=str(name))
        ax.axhline(0, color="0.7", linewidth=0.8, zorder=0)
        ax.set(xlabel="step", ylabel="score so far", title=self.result.properties[0])
        ax.legend(frameon=False)
        return ax

    # ---- internal methods

    def _calling_trainer(self) -> tuple[Trainer, Any]:
        """The Trainer that calls this callback, and the checkpoint it resumes from.

        A Trainer passes neither of them to its callbacks, so they are looked up in the call stack.
        """
        frame = sys._getframe(1)
        while frame is not None:
            one = frame.f_locals.get("self")
            if isinstance(one, Trainer) and self in one.callback_handler.callbacks:
                return one, frame.f_locals.get("resume_from_checkpoint")
            frame = frame.f_back  # type: ignore[assignment]
        raise RuntimeError("GroupTracker is called by no transformers.Trainer: pass it to one, in callbacks=[…].")

    def _score(self, batches: list[Carried], optimizer: Any, step: int) -> None:
        """Add the scores of a step's batches, at the model's current parameters."""
        assert self._setup is not None
        start, model = perf_counter(), self._setup.model
        with evaluated(model), self._own_randomness():
            device = next(model.parameters()).device
            sent = [to_device(carried.batch, device) for carried in batches]
            provider = self._provider_of(sent[0])
            directions = property_directions(provider, self._goal)
            if isinstance(directions, PointGradients):
                directions = self._goal.gradient(model, provider.space.parameters)
            directions = directions * _learning_rates(optimizer, provider)
            if self.sums.momentum is not None:
                divisors = steady(live_divisors(optimizer, provider.space.parameters, coming=True), step + 1)
                row = provider.space.flatten(list(divisors.values()), directions.new_empty(provider.p))
                directions = self.sums.momentum.mean(directions / row, step, optimizer)
            with alone():  # each rank has different batches
                for carried, batch in zip(batches, sent, strict=True):
                    self.sums.add(provider.on(batch).scores(directions), carried.rows)
        self.sums.steps += 1
        self.sums.seconds += perf_counter() - start

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Draw from `seed` inside this context, so that the training's own draws stay as they are without a tracker.

        A data set or a collator may draw: masks of tokens, crops of images. So the property is the same in each step.
        """
        assert self._setup is not None
        device = next(self._setup.model.parameters()).device
        before = random.getstate(), np.random.get_state()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            set_seed(self.seed)
            try:
                yield
            finally:
                random.setstate(before[0])
                np.random.set_state(before[1])

    def _provider_of(self, batch: dict[str, Any]) -> GroupGradients:
        """The provider of gradients, made and planned once with the first batch."""
        assert self._setup is not None
        if self._provider is None:
            model = self._setup.model
            chosen = counted_parameters(model) if self._parameters is None else self._parameters
            with alone():
                self._provider = GroupGradients(
                    model, self._setup.loss(self.tokens), batch, parameters=chosen, show_progress=False,
                    batch_size=self._setup.batch_size,
                )  # fmt: skip
                self._provider.plan(1)
        return self._provider

    def _logged(self, scores: Tensor) -> dict[str, float]:
        names, top = self.result.properties, f"ggda{self.sums.suffix}"
        return {
            f"{top}/{name}" if len(scores) == 1 else f"{top}/{names[row]}/{name}": float(scores[row, j])
            for row in range(len(scores))
            for j, name in enumerate(self.groups.all_names)
        }

    def _settings(self) -> dict[str, Any]:
        """The settings that the sums depend on."""
        property = names_of(self._goal, getattr(self._goal, "components", None) or 1)
        tested = Content(lenient=True).text([_some_rows(data) for data in data_of(self._goal)], "eval_dataset")
        return {"groups": of_groups(self.groups), "property": property, "test rows": tested, "every": self.every,
                "batches": self.batches, "share": self.share, "seed": self.seed,
                "preconditioner": self.preconditioner, "tokens": self.tokens}  # fmt: skip

    def _close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo, self._provider = [], None
        self._pending.clear()


def _some_rows(data: IndexedData) -> Any:
    """Some rows as the data set holds them, without the collator, whose batches may be random."""
    source: Any = getattr(data, "_source", None)  # a selection of other data has none
    if data._tensors is not None or data.is_stream or not hasattr(source, "__len__"):
        return data._tensors
    return [source[int(at)] for at in some_points(len(source))]


def _learning_rates(optimizer: Any, provider: GroupGradients) -> Tensor | float:
    """The learning rate of the step: one number, or one for each parameter `[p]` if they differ."""
    rates = {id(value): float(group["lr"]) for group in optimizer.param_groups for value in group["params"]}
    each = [rates.get(id(value), 0.0) for value in provider.space.parameters.values()]
    if len(set(each)) == 1:
        return each[0]
    space = provider.space
    parts = [torch.full_like(value, rate) for value, rate in zip(space.parameters.values(), each, strict=True)]
    return space.flatten(parts, torch.empty(space.size, dtype=space.dtype, device=space.device))


def _save_picture(tracker: GroupTracker, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        _logger.info("GroupTracker saves no picture: pip install 'ggda-ext[plot]'.")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    tracker.plot(figure.subplots())
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
