"""The two ways in which getting data fails: a source is not there, or what it holds is not the data set."""

from __future__ import annotations


class DataError(RuntimeError):
    """What was found is not the published data set, or cannot be read; the message names the file and the fix."""


class Unreachable(RuntimeError):
    """A source that cannot be used now: no network, a missing tool, no room on the disk. The next one is tried."""
