"""Progress bars: on request, or by themselves once a pass over the data has taken a while."""

from __future__ import annotations

from tqdm.auto import tqdm

from ggda_ext.distributed import rank

PATIENCE = 5.0
"""Seconds after which a bar appears that was neither asked for nor turned off."""


def progress(total: int, title: str, show: bool | None, *, initial: int = 0) -> tqdm:
    """A progress bar over points, on the first rank.

    Args:
        total: points.
        title: what is done.
        show: True at once, False never, None after `PATIENCE` seconds.
        initial: points that are done already.
    """
    return tqdm(
        total=total, initial=initial, desc=title, unit="point", disable=show is False or rank() > 0,
        delay=0 if show else PATIENCE,
    )  # fmt: skip
