"""
A run that is killed, and goes on
=================================

``save_dir=`` keeps finished work on disk. Here we stop a run in the middle, as a power cut or a scheduler would do, and
start it again. The second run computes only the missing part and ends with exactly the same scores, bit for bit.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import torch

# %%
# The script
# ----------
# We start the script three times: undisturbed, with a stop after a third of the batches, and again on the folder of the
# stopped run.

SCRIPT = """
import os, sys, torch
from torch import nn
from ggda_ext import attribute, properties

folder, result, stop_after = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.manual_seed(0)
x, y = torch.randn(20_000, 20), torch.randint(0, 3, (20_000,))
model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
loss = nn.CrossEntropyLoss()
goal = properties.mean_loss((x[:500], y[:500]), loss)


class Counted(torch.utils.data.Dataset):  # a data set that is read from somewhere
    reads = 0

    def __len__(self):
        return len(x)

    def __getitems__(self, indices):
        Counted.reads += len(indices)
        if Counted.reads > stop_after:
            os._exit(9)  # at once, as kill -9: nothing is tidied up
        return [(x[i], y[i]) for i in indices]


scores = attribute(
    model, loss, Counted(), torch.arange(20_000) // 200, goal, save_dir=folder, tag="example",
    batch_size=500, show_progress=False,
)
torch.save(scores.tensor.clone(), result)
print(f"read {Counted.reads} points")
"""


def run(folder, result, stop_after=10**9):
    """Run the script in a new process and return how many points it read."""
    script = Path(folder).with_suffix(".py")
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), str(folder), str(result), str(stop_after)],
        capture_output=True,
        text=True,
    )
    print(f"exit code {done.returncode}: {done.stdout.strip() or 'stopped'}")
    assert done.returncode in (0, 9), done.stderr
    return int(done.stdout.split()[1]) if done.stdout else stop_after


# %%
# Undisturbed, stopped, and again
# -------------------------------

home = Path(tempfile.mkdtemp())
reads = [
    run(home / "undisturbed", home / "a.pt"),
    run(home / "stopped", home / "b.pt", stop_after=18_000),
    run(home / "stopped", home / "b.pt"),
]
print("same bits:", torch.equal(torch.load(home / "a.pt"), torch.load(home / "b.pt")))

figure, ax = plt.subplots(figsize=(6, 2))
ax.barh(["again", "stopped", "undisturbed"], reads[::-1], color="#4a85c5", edgecolor="black")
ax.set_xlabel("training points read")
