"""A tracker under `torchrun`: every rank ends with the sums of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import tracker_script
from cases import relative_error


def test_two_ranks_add_up_what_one_process_adds_up(tmp_path):
    script = Path(tracker_script.__file__)
    (tmp_path / "two").mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([*command, tmp_path / "two"], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / "two" / f"rank{j}.pt", weights_only=True) for j in range(2))
    alone = tracker_script.everything(tmp_path / "one", 1)
    for name, scores in alone.items():
        assert torch.equal(first[name], second[name])
        assert relative_error(first[name], scores) <= (1e-4 if "adam" in name else 1e-8), name
    if tracker_script.RESUMES:
        assert relative_error(first["resumed"], first["plain"]) <= 1e-6
