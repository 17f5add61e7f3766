"""The check cannot pass by accident: wrong scores, errors and silence are all seen."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import check
from benchmarks.check import measure, table
from benchmarks.check.case import Case, Method, count_parameters
from benchmarks.data.errors import DataError
from benchmarks.names import METHODS
from benchmarks.results import ResultFolder
from benchmarks.scales import SCALES
from benchmarks.side_by_side import Workers, at_once
from benchmarks.sizes import CheckScale
from tests.benchmarks.side_case import SIDE

SIZE = CheckScale(points=24, dattri_points=12, tests=2, group_size=6, batch=8, curvature_points=8, depth=2)


@pytest.fixture
def case() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    x, y = torch.randn(26, 5), torch.arange(26) % 3
    return Case(model, (x[:24], y[:24]), (x[24:], y[24:]), SIZE, 16)


def points(case: Case) -> Tensor:
    return torch.arange(2 * 24.0).reshape(2, 24)


def method(grouped: Any, original: Any = points) -> Method:
    return Method("Captum", "TracInCP", original, grouped, lambda case: "")


def raising(error: Exception) -> Any:
    def run(case: Case) -> Tensor:
        raise error

    return run


def test_equal_scores_are_equal(case: Case) -> None:
    row = measure.row_of(method(lambda case: case.groups.sum(points(case), 1)), case)
    assert row["status"] == "equal"
    assert row["error"] == 0
    assert row["seconds_original"] >= 0


@pytest.mark.parametrize("side", ["original", "grouped"])
def test_a_wrong_score_differs(case: Case, side: str) -> None:
    def off_by_a_little(scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[1, 0] += 5e-3 * case.groups.sum(points(case), 1).max()
        return scores

    right = method(lambda case: case.groups.sum(points(case), 1))
    wrong = {
        "grouped": replace(right, grouped=lambda case: off_by_a_little(right.grouped(case))),
        "original": replace(right, original=lambda case: off_by_a_little(right.original(case))),
    }[side]
    row = measure.row_of(wrong, case)
    assert row["status"] == "differs"
    assert row["error"] == pytest.approx(5e-3, rel=0.1)
    assert not table.passed([row])


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (lambda case: points(case), r"scores \[2, 24\]"),
        (lambda case: case.groups.sum(points(case), 1) * torch.nan, "group version are not finite"),
        (raising(RuntimeError("no such layer")), "RuntimeError: no such layer"),
        (raising(AssertionError()), "AssertionError"),
    ],
)
def test_what_cannot_be_compared_fails_and_says_why(case: Case, found: Any, reason: str) -> None:
    row = measure.row_of(method(found), case) | {"data": "HELOC", "model": "LR"}
    assert row["status"] == "failed"
    assert "Traceback" in row["traceback"]
    assert not table.passed([row])
    assert re.search(reason, row["reason"])
    assert row["reason"] in table.line(row)
    assert any(row["reason"] in line for line in table.verdict([row]))


def test_scores_of_zero_are_no_proof(case: Case) -> None:
    row = measure.row_of(method(lambda case: torch.zeros(2, len(case.groups)), lambda case: torch.zeros(2, 24)), case)
    assert row["status"] == "failed"


def test_a_full_disk_is_not_the_methods_fault(case: Case) -> None:
    with pytest.raises(OSError, match="full"):
        measure.row_of(method(raising(OSError(errno.ENOSPC, "full"))), case)


def test_nothing_checked_is_not_passed() -> None:
    assert not table.passed([])
    assert not table.passed([{"status": "skipped"}])
    assert table.passed([{"status": "skipped"}, {"status": "equal"}])


def test_a_part_of_the_model_is_the_same_model(case: Case) -> None:
    part = replace(case, size=replace(SIZE, last_parameters=15)).part
    assert [name for name, _ in part.named_parameters()] == ["2.weight", "2.bias"]
    assert torch.equal(part(case.test[0]), case.model(case.test[0]))
    assert count_parameters(case.part) == count_parameters(case.model)


def test_dattri_gets_the_first_points(case: Case) -> None:
    assert torch.equal(case.few.train[0], case.train[0][:12])
    assert case.few.groups.n == 12
    assert case.few.few is case.few


def test_names_of_methods_are_known_without_the_toolkits() -> None:
    assert tuple(method.name for method in check.methods()) == METHODS


def test_every_method_equals_its_original_on_stand_in_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ResultFolder.open("check", {"command": "check", "scale": "smoke"}, base=tmp_path)
    rows = check.run(["heloc-ann-s"], SCALES["smoke"], folder, show_progress=False)
    assert [row["method"] for row in rows] == list(METHODS)
    assert {row["status"] for row in rows} == {"equal"}, list(table.problems(rows))
    assert all(row["stand_in"] for row in rows)
    assert all(row["experiment"] == "check" for row in rows)
    printed = capsys.readouterr().out
    assert "HELOC (stand-in) · ANN-S" in printed
    monkeypatch.setattr(measure, "row_of", raising(AssertionError("a finished row runs again")))
    assert check.run(["heloc-ann-s"], SCALES["smoke"], folder, show_progress=False) == rows


def test_tasks_run_at_once_as_one_after_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(workers: Workers, data_dir: Path | None = None) -> tuple[list[Any], str, Any]:
        folder = ResultFolder.open("check", {"command": "check", "scale": "smoke"}, base=tmp_path)
        rows = SIDE.run(
            ["one", "two", "three"], SCALES["smoke"], folder, data_dir, show_progress=False, workers=workers
        )
        return rows, capsys.readouterr().out, folder.config["data"]

    alone, printed, sources = run(())
    assert printed == "method\n" + "".join(f"\n{task}\nfirst\nsecond\n" for task in ("ONE", "TWO", "THREE"))
    with at_once(2) as workers:
        rows, there, known = run(workers)
        with pytest.raises(DataError, match="no data in"):  # what goes wrong in a process is raised here
            run(workers, tmp_path)
        again, _, _ = run(workers)
    assert [row["key"] for row in rows] == [row["key"] for row in alone] == [row["key"] for row in again]
    assert sorted(there.strip().split("\n\n")) == sorted(printed.strip().split("\n\n"))
    assert known == sources
    tasks = {(row["data"], row["process"], row["prepared"]) for row in rows}
    assert len(tasks) == 3  # each task in one process, made ready once for both methods
    assert len({process for _, process, _ in tasks}) == 2
    assert os.getpid() not in {process for _, process, _ in tasks}
    assert not multiprocessing.active_children()


def test_a_row_is_kept_before_the_next_one_is_made(tmp_path: Path) -> None:
    def rows(task: str, method: Any, common: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield common
        raise KeyboardInterrupt

    side = replace(SIDE, keys=lambda task, method: [f"{method.name}/1", f"{method.name}/2"], rows=rows)
    folder = ResultFolder.open("check", {"command": "check", "scale": "smoke"}, base=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        side.run(["one"], SCALES["smoke"], folder, show_progress=False)
    assert [row["key"] for row in folder.rows] == ["first/1"]


def test_a_process_does_not_outlive_the_one_that_started_it() -> None:
    code = """
import os, time
from benchmarks.side_by_side import at_once
with at_once(2) as workers:
    print(workers[0].submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""
    command, root = [sys.executable, "-c", code], Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    for _ in range(600):
        if not is_running(child):
            return
        time.sleep(0.05)
    pytest.fail("the process goes on alone")


def is_running(process: int) -> bool:
    """Whether a process is there and is not only waiting to be forgotten."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_is_left_out_is_in_the_table_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "SKIPPED", {("heloc-lr", "Captum", "TracInCP"): "it has no gradient there"})
    folder = ResultFolder.open("check", {"command": "check", "scale": "smoke"}, base=tmp_path)
    rows = check.run(["heloc-lr"], SCALES["smoke"], folder, chosen=["TracInCP", "TracInCPFast"], show_progress=False)
    assert [row["status"] for row in rows] == ["skipped", "equal"]
    assert "it has no gradient there" in capsys.readouterr().out
    assert next(iter(table.verdict(rows))) == "equal to the originals on 1 of 2 checks; 1 skipped"
