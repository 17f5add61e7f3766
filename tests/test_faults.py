"""Killed with -9 at random moments, twenty times in all: every resumed result is the undisturbed one, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import ggda_trak
import ggda_trak.featurize
import numpy as np
import pytest
import restart_script
import torch
from children import end, start, tree_under_test
from torch import nn

import ggda_ext
from ggda_ext import GradientStore, GroupGradients, Groups, attribute, properties
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.sharing import ProgressBar
from ggda_ext.training import Recipe

KILLS = 5
LOSS = nn.CrossEntropyLoss()
N, K = 2_000, 100
Result = np.ndarray


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N, 10, generator=generator), torch.randint(0, 3, (N,), generator=generator)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 3))


def groups() -> Groups:
    return Groups(np.random.default_rng(2).permutation(N) % K)


def scoring(folder: Path) -> Result:
    """Scores of test points at two checkpoints."""
    x, y = data()
    states = [model().state_dict(), {name: 0.5 * value for name, value in model().state_dict().items()}]
    goal = properties.point_losses((x[:7], y[:7]), LOSS)
    scores = attribute(
        model(), LOSS, (x, y), groups(), goal, checkpoints=states, save_dir=folder, batch_size=8, method="tracin"
    )
    return scores.numpy()


def featurizing(folder: Path) -> Result:
    """Projected group gradients, and the scores they give."""
    x, y = data()
    provider = GroupGradients(model(), LOSS, (x, y), groups(), batch_size=8)
    store = GradientStore(provider, folder, projection_dim=64)
    return store.scores(properties.mean_loss((x[:7], y[:7]), LOSS)).numpy()


def featurizing_for_trak(folder: Path) -> Result:
    """TRAK's loop with groups cut across batches, and the scores it ends with."""
    x, y = data()
    ggda_trak.featurize.LEAST_POINTS, ggda_trak.featurize.ROWS_PER_DIMENSION = 200, 1
    net = model().eval()
    traker = ggda_trak.TRAKer(
        net, "image_classification", train_set_size=N, save_dir=folder, device="cpu", proj_dim=64, groups=groups(),
        logging_level=40,
    )  # fmt: skip
    traker.load_checkpoint(net.state_dict(), 0)
    for low in range(0, N, 50):
        traker.featurize((x[low : low + 50], y[low : low + 50]), inds=np.arange(low, low + 50))
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", net.state_dict(), 0, num_targets=7)
    traker.score((x[:7], y[:7]), num_samples=7)
    return np.array(traker.finalize_scores("test"))


def retraining(folder: Path) -> Result:
    """Models trained without each group, several at once."""
    x, y = (part[:120] for part in data())
    recipe = Recipe(epochs=3, learning_rate=0.1, batch_size=20)
    found = leave_group_out(
        lambda: nn.Linear(10, 3), LOSS, (x, y), np.arange(120) % 24, (x[:9], y[:9]), recipe,
        seeds=[0, 1], at_once=2, save_dir=folder,
    )  # fmt: skip
    return found.per_seed.numpy()


def finished(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*.npy")}  # TRAK's are not written once and for all


def test_a_child_killed_while_it_draws_a_bar_leaves_no_lock_behind() -> None:
    def die_with_the_lock() -> None:
        ProgressBar.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    assert end(start(die_with_the_lock)) == -signal.SIGKILL
    assert ProgressBar.get_lock().acquire(timeout=5)
    ProgressBar.get_lock().release()


def run_in_child(work: Callable[[Path], Result], folder: Path, out: Path, kill_after: float | None) -> bool:
    """Run `work` in a forked child, killed after some seconds; whether it came to its end."""
    child = start(lambda: np.save(out, work(folder)))
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    code = end(child)
    assert code in (0, -signal.SIGKILL)
    return code == 0


@pytest.mark.parametrize("work", [scoring, featurizing, featurizing_for_trak, retraining])
def test_a_killed_run_goes_on_and_ends_as_if_undisturbed(work: Callable[[Path], Result], tmp_path: Path) -> None:
    start = time.monotonic()
    assert run_in_child(work, tmp_path / "undisturbed", tmp_path / "expected.npy", None)
    whole = time.monotonic() - start
    expected = np.load(tmp_path / "expected.npy", allow_pickle=False)
    moments = random.Random(work.__name__)
    kills = rounds = 0
    while kills < KILLS:
        rounds += 1
        before = kills
        folder, out = tmp_path / f"killed-{rounds}", tmp_path / "found.npy"
        done: set[str] = set()
        while not run_in_child(work, folder, out, moments.uniform(0.1, 0.6) * whole if kills < KILLS else None):
            kills += 1
            assert done <= finished(folder)
            done = finished(folder)
        if kills == before:
            whole /= 2  # faster than the first time: a kill that comes early enough does land
        found = np.load(out, allow_pickle=False)
        assert found.dtype == expected.dtype
        assert found.tobytes() == expected.tobytes()


def test_ranks_import_the_code_under_test(tmp_path: Path) -> None:
    (tmp_path / "ggda_ext").mkdir()
    (tmp_path / "ggda_ext" / "__init__.py").write_text("raise RuntimeError('another tree')")
    command = [sys.executable, "-c", "import ggda_ext, ggda_trak; print(ggda_ext.__file__, ggda_trak.__file__)"]
    environment = os.environ | {"PYTHONPATH": tree_under_test(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd="/", timeout=120)
    assert done.stdout.split() == [ggda_ext.__file__, ggda_trak.__file__], done.stderr


def test_a_killed_rank_comes_back_with_torchrun(tmp_path: Path) -> None:
    script = Path(restart_script.__file__)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--max-restarts=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": tree_under_test()}
    done = subprocess.run([*command, script, tmp_path], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Signal 9 (SIGKILL)" in done.stderr or "exitcode: -9" in done.stderr
    assert int((tmp_path / "finished_before").read_text()) > 0
    expected = restart_script.work(tmp_path / "one process")
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        for resumed, undisturbed, one in zip(found["resumed"], found["undisturbed"], expected, strict=True):
            assert torch.equal(resumed, undisturbed)
            torch.testing.assert_close(resumed, one)
