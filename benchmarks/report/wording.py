"""Sentences that more than one table says."""

STDERR = "± is the standard error over model seeds"
RUNTIME = "runtime in CPU seconds, grouping included; the paper's is on its GPU"
