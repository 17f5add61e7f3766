"""The sums of a `GroupTracker`: three numbers for each group and property, kept in checkpoints, added up over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from ggda_ext.groups import Groups
from ggda_ext.sharing import add_up, of_all, rank, world_size
from ggda_ext.storage.files import (
    DamagedFile,
    as_text,
    is_sealed_array,
    open_array,
    read_sealed_json,
    write_sealed_array,
    write_sealed_json,
)
from ggda_transformers.adam import Momentum


@dataclass
class TrackedSums:
    """Scores so far, by group.

    Attributes:
        groups: groups of the training rows.
        totals: the sums, the sums of squares and the number of the scored batches' scores `[3, m, k]`: of this rank
            during training, of all ranks after it; None before the first scored step.
        steps: number of scored steps.
        seconds: time spent on scoring.
        training_seconds: time that the training took until the last checkpoint, with the time spent on scoring.
        history: the step and the scores `[m, k]` of all ranks at every entry of the log.
        settings: settings that the sums depend on; sums with other settings cannot be resumed.
        number: number of the tracker among the Trainer's trackers, from 0.
        momentum: the mean of directions that points are scored against; None if the step's own directions are used.
    """

    groups: Groups
    totals: Tensor | None = None
    steps: int = 0
    seconds: float = 0.0
    training_seconds: float = 0.0
    history: list[tuple[int, list[list[float]]]] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    number: int = 0
    momentum: Momentum | None = None

    @property
    def suffix(self) -> str:
        """Suffix for the files and logs of a Trainer's second and later trackers; empty for its first tracker."""
        return f"-{self.number + 1}" if self.number else ""

    @property
    def scores(self) -> Tensor | None:
        """The scores so far `[m, k]`."""
        return None if self.totals is None else self.totals[0]

    def interval(self) -> tuple[Tensor, Tensor] | None:
        """The ends of a 95 % interval around the scores, from the spread of the batches; None with a single batch."""
        if self.totals is None or (n := float(self.totals[2].max())) < 2:
            return None
        sums, squares, _ = self.totals
        deviation = ((squares - sums**2 / n).clamp(min=0) * n / (n - 1)).sqrt()
        half = float(student.ppf(0.975, n - 1)) * deviation
        return sums - half, sums + half

    def add(self, scores: Tensor, rows: list[int]) -> None:
        """Add the scores `[m, b]` of a batch's rows to their groups; rows without a group are left out."""
        labels = torch.from_numpy(self.groups.labels[rows].astype("int64"))
        inside = labels >= 0
        batch = torch.zeros(len(scores), len(self.groups), dtype=torch.float64)
        batch.index_add_(1, labels[inside], scores[:, inside].double().cpu())
        known = torch.stack([batch, batch**2, torch.ones_like(batch)])
        self.totals = known if self.totals is None else self.totals + known

    def of_all_ranks(self) -> Tensor | None:
        """The totals of all ranks `[3, m, k]`; all ranks score the same steps."""
        return None if self.totals is None else add_up(self.totals.clone())

    def save(self, args: Any, state: Any, pending: Sequence[list[int]] = ()) -> None:
        """Write the sums of all ranks into the folder of the checkpoint that was saved.

        Args:
            args: the Trainer's arguments.
            state: the Trainer's state.
            pending: numbers of the rows of each batch of this rank that is not scored yet.
        """
        totals, waiting = self.of_all_ranks(), [batch for batches in of_all(pending) for batch in batches]
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and folder.is_dir():
            known = {"groups": self._names, "settings": self.settings, "scored_steps": self.steps,
                     "seconds": self.seconds, "training_seconds": self.training_seconds, "history": self.history,
                     "pending": waiting, "totals": None if totals is None else totals.tolist()}  # fmt: skip
            if self.momentum is not None and self.momentum.total is not None:
                total = self.momentum.total.detach().cpu()
                array = (total.float() if total.dtype.itemsize < 4 else total).numpy()  # NumPy has no bfloat16
                write_sealed_array(folder / f"{self._file}.npy", self._made_with, array.shape, array.dtype, [array])
                known |= {"momentum": [self.momentum.weight, self.momentum.step]}
            write_sealed_json(folder / f"{self._file}.json", known)

    def resume(self, folder: Path, state: Any) -> list[list[int]]:
        """Load the sums from the checkpoint that a run resumes from.

        Returns:
            Numbers of the rows of each batch that this rank has still to score.
        """
        path = folder / f"{self._file}.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"training goes on from step {state.global_step}, and {path} is not there: the scores of the steps "
                "before are lost. Resume from a checkpoint that a GroupTracker was part of, or leave it out."
            )
        kept = read_sealed_json(path)
        if kept["groups"] != self._names:
            raise ValueError(f"{path} is of other groups: {kept['groups'][:5]}. Pass the same groups, or start again.")
        for name, value in self.settings.items():
            before = kept["settings"].get(name)
            if before != value:
                raise ValueError(f"{path} is of {name}={before!r}, not {value!r}. Pass what it was, or start again.")
        self.steps, self.seconds = kept["scored_steps"], kept["seconds"]
        self.training_seconds = kept["training_seconds"]
        self.history = [(step, scores) for step, scores in kept["history"]]
        if kept["totals"] is not None:
            totals = torch.tensor(kept["totals"], dtype=torch.float64)
            self.totals = totals if state.is_world_process_zero else torch.zeros_like(totals)
        if self.momentum is not None and "momentum" in kept:
            array = folder / f"{self._file}.npy"
            if not array.exists() or not is_sealed_array(array, self._made_with):
                raise DamagedFile(f"{array} is damaged, missing, or of another step: resume from another checkpoint.")
            self.momentum = Momentum(torch.from_numpy(np.array(open_array(array, sealed=True))), *kept["momentum"])
        return kept["pending"][rank() :: world_size()]  # whichever rank scores a batch, the sums are the same

    @property
    def _made_with(self) -> str:
        """Text in the file of the directions, so that they are used only with sums of the same number of steps."""
        return as_text({"scored_steps": self.steps})

    @property
    def _file(self) -> str:
        return f"ggda_tracker{self.suffix}"

    @property
    def _names(self) -> list[str]:
        return [str(name) for name in self.groups.all_names]
