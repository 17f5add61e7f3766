"""
Several processes
=================

Attribution is a sum over the data, so it can be split like data-parallel training. Start the script with ``torchrun``,
open the process group, and call `attribute` as before. Every rank computes its share, and all ranks end with the same
scores.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

# %%
# The script
# ----------
# Only two places know about ranks: the lines that open and close the process group, and the line that saves the result.

SCRIPT = """
import os, sys, torch
import torch.distributed as dist
from torch import nn
from ggda_ext import attribute, grouping, properties

if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

torch.manual_seed(0)
x, y = torch.randn(2000, 20), torch.randint(0, 2, (2000,))
model, loss = nn.Sequential(nn.Linear(20, 16), nn.ReLU(), nn.Linear(16, 2)), nn.CrossEntropyLoss()
groups = grouping.random_groups(2000, group_size=100, random_state=0)
result = attribute(model, loss, (x, y), groups, properties.mean_loss((x[:100], y[:100]), loss))

if int(os.environ.get("RANK", 0)) == 0:
    torch.save(result.tensor.clone(), sys.argv[1])
if dist.is_initialized():
    dist.destroy_process_group()
"""

# %%
# One process and two
# -------------------

import matplotlib.pyplot as plt
import torch

home = Path(tempfile.mkdtemp())
script = home / "script.py"
script.write_text(SCRIPT)
quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
subprocess.run([sys.executable, str(script), str(home / "one.pt")], check=True, env=quiet)
subprocess.run([*torchrun, str(script), str(home / "two.pt")], check=True, env=quiet, capture_output=True)

one, two = torch.load(home / "one.pt"), torch.load(home / "two.pt")
print(f"{one.shape[1]} groups; largest difference {(one - two).abs().max() / one.abs().max():.0e} of the largest score")

figure, ax = plt.subplots(figsize=(3.5, 3.5))
ax.scatter(one[0], two[0], color="#4a85c5", edgecolor="black")
ax.axline((0, 0), slope=1, color="black", linewidth=0.8)
ax.set_xlabel("scores of one process")
ax.set_ylabel("scores of two processes")
