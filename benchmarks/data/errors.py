"""Errors when getting data: a source cannot be used, or it does not hold the data set."""

from __future__ import annotations


class DataError(RuntimeError):
    """The data found is not the published data set, or cannot be read. The message names the file and the fix."""


class UnreachableError(RuntimeError):
    """A source cannot be used now: no network, a missing tool, no room on the disk. The next source is tried."""


class NoAnswerError(UnreachableError):
    """A hub or registry does not answer; it is not asked again in the same run."""


class NoRoomError(UnreachableError):
    """The disk has no room for a download."""
