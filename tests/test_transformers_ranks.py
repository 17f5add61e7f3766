"""A tracker with the environment of `torchrun`: every rank ends with the sums of one process."""

from __future__ import annotations

import torch
import tracker_script
from cases import relative_error
from children import ranks


def test_two_ranks_add_up_what_one_process_adds_up(tmp_path):
    (tmp_path / "two").mkdir()
    ranks(2, lambda: tracker_script.main(tmp_path / "two"))
    first, second = (torch.load(tmp_path / "two" / f"rank{j}.pt", weights_only=True) for j in range(2))
    alone = tracker_script.everything(tmp_path / "one", 1)
    for name, scores in alone.items():
        assert torch.equal(first[name], second[name])
        # Adam divides by the square root of tiny second moments, which makes rounding grow from step to step
        assert relative_error(first[name], scores) <= (1e-3 if "adam" in name else 1e-8), name
    if tracker_script.RESUMES:
        assert relative_error(first["resumed"], first["plain"]) <= 1e-6
