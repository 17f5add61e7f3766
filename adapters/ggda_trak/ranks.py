"""A TRAK store with several ranks: each rank sums its share of every batch, and rank 0 ends up with all sums.

Rank 0 works in `save_dir`, which ends up with the same content as with one process. Rank r > 0 works in a folder beside
it, ``<save_dir>.rank<r>``. So no two processes write the same file, and each continues with its own sums after a kill.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ggda_ext.sharing import add_up, gathered, my_share, once, rank, together, world_size
from ggda_ext.storage.files import open_array
from ggda_trak.save_dir import SETTINGS
from ggda_trak.store import GroupStore


def is_first() -> bool:
    """Whether this is rank 0, which writes the results of all ranks."""
    return rank() == 0


def own_folder(save_dir: str | Path, load: bool) -> Path:
    """The folder that this rank works in; on ranks above 0, deleted first if rank 0 has nothing to continue with."""
    folder = Path(save_dir).resolve()
    begin_anew = once(lambda: not load or not (folder / SETTINGS).exists())
    if rank() == 0:
        return folder
    own = folder.with_name(f"{folder.name}.rank{rank()}")
    if begin_anew and own.exists():
        shutil.rmtree(own)
    return own


def follow_first_rank(model_ids: dict[int, dict[str, int]]) -> None:
    """Take the states of the checkpoints from rank 0, the only rank that knows which are finalized."""
    for model_id, state in once(lambda: dict(model_ids)).items():
        if rank() and (state["is_finalized"] or model_id in model_ids):
            model_ids[model_id] = dict(state)


def own_share(positions: np.ndarray) -> np.ndarray:
    """This rank's share of the points of a batch."""
    share = my_share(len(positions))
    return positions[share.start : share.stop]


def points_before(store: GroupStore) -> np.ndarray:
    """Mask `[n]` of the points in any rank's sums. Clear this rank's sums if they share points with a lower rank's."""
    own: np.ndarray = np.asarray(store.points) == 1
    if world_size() == 1:
        return own
    reset, taken = is_to_reset(own)
    if reset:
        store.clear()
    return taken


def is_to_reset(points: np.ndarray) -> tuple[bool, np.ndarray]:
    """Whether this rank's sums share points with a lower rank's, and the mask `[n]` of the points in any rank's sums.

    This happens after a kill while rank 0 was adding up all sums, or if runs had different numbers of ranks.
    """
    taken, resets = np.zeros(len(points), bool), []
    for number, held in enumerate(gathered(torch.from_numpy(points[None].astype(np.uint8))).numpy().astype(bool)):
        if (held & taken).any():
            resets.append(number)
        else:
            taken |= held
    return rank() in resets, taken


def merge(store: GroupStore) -> None:
    """Add the sums of all other ranks to rank 0's store, and clear the stores of the other ranks."""
    if world_size() == 1:
        return
    others = rank() > 0
    sums = {name: _from_others(np.asarray(values, dtype=np.float32)) for name, values in store.sums.items()}
    fisher = None if store.fisher is None else _from_others(np.asarray(store.fisher))
    points = _from_others(np.asarray(store.points, dtype=np.int32))
    hashes = _from_others(np.asarray(store.hashes).view(np.int64)).view(np.uint64)  # each point is on one rank
    with together():
        if not others and points.any():
            held = np.flatnonzero(points)
            store.add(held, np.arange(len(store.groups)), sums, fisher, hashes[held])
    if others:
        store.clear()


def _from_others(values: np.ndarray) -> np.ndarray:
    """The sum over all ranks except rank 0."""
    mine = torch.from_numpy(np.array(values) if rank() else np.zeros_like(values))
    return add_up(mine).numpy()


def seen_by_all(scores: Any) -> Any:
    """Return on every rank the scores that rank 0 wrote to a file."""
    if world_size() == 1:
        return scores
    path = once(lambda: str(scores.filename))
    with together():
        if rank() and not Path(path).exists():
            raise ValueError(f"save_dir: rank {rank()} does not see {path!r}: pass a folder that all ranks share.")
        return scores if rank() == 0 else open_array(Path(path), "r")
