"""What can go wrong when getting data: a source cannot be used, or what it holds is not the data set."""

from __future__ import annotations


class DataError(RuntimeError):
    """What was found is not the published data set, or cannot be read; the message names the file and the fix."""


class UnreachableError(RuntimeError):
    """A source that cannot be used now: no network, a missing tool, no room on the disk. The next one is tried."""


class NoAnswerError(UnreachableError):
    """A hub or registry does not answer; it is not asked again in the same run."""


class NoRoomError(UnreachableError):
    """The disk has no room for a download."""
