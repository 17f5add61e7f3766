"""Killed with -9 at its own operations on files: every kind of run, resumed, ends as if it had not been disturbed.

A moment is the j-th time that the process opens, renames or deletes a file, or changes a memory map: the first of them
is inside the first write. `test_faults.py` kills by the clock; here every kill lands.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ggda_trak.featurize
import ggda_trak.store
import numpy as np
import pytest
import torch
import torch.distributed as dist
from children import end, start
from test_intrusion import gradients_in, scores_in, traker
from trak_cases import batches, case, scored, take

from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.training import Recipe

MOMENTS, RESUMES = 20, 2


def retraining(folder: Path) -> np.ndarray:
    torch.manual_seed(0)
    x, y = torch.randn(24, 3), torch.randint(0, 2, (24,))
    recipe = Recipe(epochs=1, learning_rate=0.1, batch_size=8)
    found = leave_group_out(
        lambda: torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), (x, y), np.arange(24) % 6, (x[:5], y[:5]), recipe,
        seeds=[0], at_once=2, save_dir=folder,
    )  # fmt: skip
    return found.per_seed.numpy()


def featurizing_for_trak(folder: Path) -> np.ndarray:
    ggda_trak.featurize.LEAST_POINTS, ggda_trak.featurize.ROWS_PER_DIMENSION = 100, 0
    given, made = case("image_classification"), traker(folder, proj_dim=16)
    made.load_checkpoint(given.checkpoints(1)[0], 0)
    for at in batches(size=100, seed=None):
        made.featurize(take(given.train, at), inds=at)
    return scored(made, given, given.checkpoints(1))


def scoring(folder: Path) -> np.ndarray:
    return scores_in(folder).numpy()


def keeping_gradients(folder: Path) -> np.ndarray:
    return gradients_in(folder).numpy()


def watch(act: Callable[[], None]) -> None:
    """Call `act` before every operation on files of this process."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            act()
            return function(*args, **kwargs)

        return call

    for name in ("open", "replace", "unlink", "mkdir", "ftruncate"):
        setattr(os, name, watched(getattr(os, name)))
    ggda_trak.store.GroupStore._carry_out = watched(ggda_trak.store.GroupStore._carry_out)  # type: ignore[method-assign]
    ggda_trak.store.row_hashes = watched(ggda_trak.store.row_hashes)  # half of the rows are written when it is called


def in_child(work: Callable[[], Any], arrange: Callable[[], None], out: Path) -> int:
    """The number of the signal that ended the child, 0 if it came to its end."""

    def run() -> None:
        arrange()
        np.save(out, work())

    code = end(start(run))
    assert code <= 0
    return -code


def killed_at(moment: int) -> Callable[[], None]:
    left = [moment]

    def act() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return lambda: watch(act)


@pytest.mark.parametrize("work", [scoring, keeping_gradients, featurizing_for_trak, retraining])
def test_a_run_killed_at_any_operation_ends_as_if_undisturbed(work: Callable[[Path], Any], tmp_path: Path) -> None:
    counter, out = tmp_path / "operations", tmp_path / "found.npy"

    def counted() -> None:
        counter.touch()
        handle = os.open(counter, os.O_WRONLY | os.O_APPEND)
        watch(lambda: os.write(handle, b".") and None)

    assert in_child(lambda: work(tmp_path / "undisturbed"), counted, tmp_path / "expected.npy") == 0
    expected, operations = np.load(tmp_path / "expected.npy"), counter.stat().st_size
    drawn = random.Random(work.__name__).sample(range(2, operations), min(MOMENTS - 1, operations - 2))
    for moment in [1, *drawn]:
        folder = tmp_path / f"killed-{moment}"
        assert in_child(lambda: work(folder), killed_at(moment), out) == signal.SIGKILL  # noqa: B023
        for again in range(RESUMES):  # killed while it resumes, too; in the end it is left alone
            arrange = killed_at(moment // 2 + 1) if again + 1 < RESUMES else (lambda: None)
            if in_child(lambda: work(folder), arrange, out) == 0:  # noqa: B023
                break
        found = np.load(out)
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes(), f"killed at operation {moment} of {operations}"


def as_rank(rank: int, folder: Path, meeting: str) -> np.ndarray:
    dist.init_process_group("gloo", f"file://{folder}/{meeting}", rank=rank, world_size=2)
    return featurizing_for_trak(folder / "trak")


def run_ranks(folder: Path, meeting: str, moment: int | None) -> list[int]:
    """Two ranks, the first killed at an operation inside the merge; the signals that ended them."""

    def run(rank: int) -> None:
        if rank == 0:
            in_merge(folder / "operations", moment)
        np.save(folder / f"rank{rank}.npy", as_rank(rank, folder, meeting))

    children = [start(partial(run, rank)) for rank in range(2)]
    first = end(children[0])
    if first < 0:
        os.kill(children[1], signal.SIGKILL)  # it waits for the dead
    return [-first, -end(children[1])]


def in_merge(counter: Path, moment: int | None) -> None:
    """Count the operations that take over the sums of the other ranks, or kill this process at one of them."""
    from ggda_trak import ranks as module

    merge, seen = module.merge, [0]

    def act() -> None:
        seen[0] += 1
        if seen[0] == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(store: Any) -> None:
        watch(act)
        merge(store)
        counter.write_text(str(seen[0]))

    module.merge = watched


def test_ranks_killed_at_every_operation_of_the_merge_end_as_if_undisturbed(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    assert run_ranks(tmp_path / "whole", "start", None) == [0, 0]
    expected = (tmp_path / "whole" / "rank0.npy").read_bytes()
    operations = int((tmp_path / "whole" / "operations").read_text())
    assert 5 < operations < 30
    for moment in range(1, operations + 1):
        folder = tmp_path / str(moment)
        folder.mkdir()
        assert run_ranks(folder, "first", moment)[0] == signal.SIGKILL
        assert run_ranks(folder, "again", None) == [0, 0]
        for rank in range(2):
            assert (folder / f"rank{rank}.npy").read_bytes() == expected, (
                f"killed at operation {moment} of {operations}"
            )
