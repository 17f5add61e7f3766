"""Conversions between names and ids of groups, and from groups to points."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Share = Literal["share", "copy"]


def id_of(name: Hashable, names: Sequence[Hashable]) -> int:
    """Return the id of the group with this name.

    Raises:
        KeyError: no group has this name. The message lists similar names.
    """
    found = [at for at, one in enumerate(names) if one == name] if isinstance(names, tuple) else _at(name, names)
    if found:
        return found[0]
    raise UnknownName(no_group(name, names))


def no_group(name: Hashable, names: Sequence[Hashable]) -> str:
    """Return the error message for a name that no group has. It lists similar names, or the first ones."""
    asked = name.item() if isinstance(name, np.generic) else name
    near = {str(one): one for one in names} if isinstance(asked, str) else {}
    close = [near[one] for one in difflib.get_close_matches(str(asked), near, n=3, cutoff=0.4)]
    some = ", ".join(repr(one.item() if isinstance(one, np.generic) else one) for one in close or names[:5])
    return f"there is no group {asked!r}; " + (f"did you mean {some}?" if close else f"the first ones are {some}.")


def _at(name: Hashable, ids: Sequence[Hashable]) -> list[int]:
    """Return the position of an id in the range 0 … k - 1 as a list, without a loop; empty if the id is not in it."""
    try:
        return [ids.index(name)]
    except ValueError:
        return []


class UnknownName(KeyError):
    """Error for an unknown name: a KeyError that prints as a sentence."""

    def __str__(self) -> str:
        return str(self.args[0])


def names_at(ids: Any, names: Sequence[Hashable]) -> np.ndarray:
    """Return the names of the groups with these ids, as an array of objects in the shape of `ids`."""
    array = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if array.dtype.kind not in "iu":
        raise TypeError(f"ids holds {array.dtype}: pass whole numbers, such as the indices that a k= result gives.")
    outside = array[(array < 0) | (array >= len(names))]
    if outside.size:
        raise IndexError(f"ids holds {outside.flat[0]}: there are {len(names)} groups, 0 … {len(names) - 1}.")
    found = np.empty(array.shape, dtype=object)
    for at, number in np.ndenumerate(array):
        found[at] = names[int(number)]
    return found


def listed_ids(ids: Any, k: int) -> list[int]:
    """Return ids of groups as a list; a mask `[k]` of True and False stands for the ids where it is True."""
    array = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if array.dtype.kind != "b":
        if array.ndim != 1 or (len(array) and array.dtype.kind not in "iu"):
            raise TypeError(
                f"ids={ids!r}: pass a list of group ids, 0 … {k - 1}, or a mask; groups.id_of(name) gives an id."
            )
        return array.astype(np.int64).tolist()
    if array.shape != (k,):
        raise ValueError(f"ids is a mask of shape {list(array.shape)}: pass one of [{k}], an entry for each group.")
    return np.flatnonzero(array).tolist()


def spread_over(scores: Any, labels: np.ndarray, sizes: np.ndarray, how: Share, left_out: float) -> Tensor:
    """Turn scores `[…, k]` of groups into scores `[…, n]` of points; see `Groups.spread`."""
    if how not in ("share", "copy"):
        raise ValueError(f"how={how!r} is not one of 'share', 'copy'.")
    if isinstance(scores, str):
        raise TypeError(f"scores={scores!r}: pass numbers, scores [m, {len(sizes)}] of the groups.")
    copied = np.array(scores) if isinstance(scores, np.ndarray) else scores  # arrays of pandas are read-only
    scores = torch.as_tensor(copied)
    if scores.shape[-1:] != (len(sizes),):
        turned = " Pass its transpose, scores.T." if scores.shape[:1] == (len(sizes),) else ""
        raise ValueError(
            f"scores has shape {list(scores.shape)}: the last of them must be the {len(sizes)} groups.{turned}"
        )
    wide = scores if scores.is_floating_point() else scores.float()
    if how == "share":
        wide = wide / torch.from_numpy(np.array(sizes)).to(wide)
    column = torch.full((*wide.shape[:-1], 1), left_out, dtype=wide.dtype, device=wide.device)
    at = torch.from_numpy(np.where(labels < 0, len(sizes), labels).astype(np.int64))
    return torch.cat([wide, column], -1).index_select(-1, at.to(wide.device))


def labels_of_some(labels: np.ndarray, ids: Sequence[int], k: int) -> np.ndarray:
    """Return labels `[n]` where the groups `ids` have the ids 0, 1, 2, … and all other points are left out."""
    new_id = np.full(k + 1, -1, np.int64)
    for place, number in enumerate(ids):
        if new_id[number] >= 0:
            raise ValueError(f"ids holds {number} more than once: pass each group once.")
        new_id[number] = place
    return new_id[labels]
