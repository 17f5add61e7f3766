"""Result folders: rows are on disk when `append` returns, and a killed run goes on after its last whole row."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from children import end, start

from benchmarks import results
from benchmarks.results import ResultFolder, read_config, read_rows

CONFIG = {"command": "check", "scale": "smoke"}


def opened(base: Path, resume: Path | None = None) -> ResultFolder:
    return ResultFolder.open("check", CONFIG, resume, base)


def test_a_killed_run_goes_on_after_its_last_whole_row(tmp_path: Path) -> None:
    folder = opened(tmp_path)

    def append_many() -> None:
        for number in range(100_000):
            folder.append({"key": str(number), "text": "x" * 1000})

    child = start(append_many)
    deadline = time.monotonic() + 60
    while len(read_rows(folder.path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    assert end(child) == -signal.SIGKILL
    again = opened(tmp_path, folder.path)
    done = len(again.rows)
    assert done >= 3
    assert [row["key"] for row in again.rows] == [str(number) for number in range(done)]
    again.append({"key": str(done)})
    assert [row["key"] for row in read_rows(folder.path)] == [str(number) for number in range(done + 1)]


def test_half_a_last_line_is_dropped(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append({"key": "a"})
    with (folder.path / "rows.jsonl").open("a") as file:
        file.write('{"key": "b", "err')
    assert [row["key"] for row in read_rows(folder.path)] == ["a"]
    again = opened(tmp_path, folder.path)
    assert again.done("a")
    assert not again.done("b")
    again.append({"key": "b"})
    assert [row["key"] for row in read_rows(folder.path)] == ["a", "b"]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    (folder.path / "rows.jsonl").write_text('{"key": "a"}\nnonsense\n{"key": "b"}\n')
    with pytest.raises(ValueError, match="line 2, is not JSON"):
        opened(tmp_path, folder.path)


def test_a_key_comes_once(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append({"key": "a"})
    with pytest.raises(ValueError, match="'a' is in"):
        folder.append({"key": "a"})


def test_numbers_of_numpy_and_torch_are_plain(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.append({"key": "a", "x": np.float32(0.5), "y": torch.arange(2), "z": Path("p")})
    assert folder.rows == read_rows(folder.path) == [{"key": "a", "x": 0.5, "y": [0, 1], "z": "p"}]
    with pytest.raises(TypeError, match="does not fit into a row"):
        folder.append({"key": "b", "x": object()})


def test_another_scale_is_refused(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    with pytest.raises(ValueError, match="scale='smoke', not 'quick'"):
        ResultFolder.open("check", CONFIG | {"scale": "quick"}, folder.path)
    with pytest.raises(FileNotFoundError, match="no result folder"):
        opened(tmp_path, tmp_path / "elsewhere")


def test_the_latest_unfinished_run_is_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nothing to resume"):
        ResultFolder.latest_unfinished("check", tmp_path)
    paths = []
    for _ in range(3):  # within one second
        folder = opened(tmp_path)
        paths.append(folder.path)
    ResultFolder.open("run", CONFIG, None, tmp_path)
    assert len(set(paths)) == 3
    folder.finish()
    found = ResultFolder.latest_unfinished("check", tmp_path)
    assert found in paths[:2]
    opened(tmp_path, folder.path)  # goes on, so it is unfinished again
    assert read_config(folder.path)["finished"] is None


def test_the_config_says_how_rows_were_made(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    folder.add_source("HELOC", "made", stand_in=True)
    config = json.loads((folder.path / "config.json").read_text())
    assert config["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert config["data"] == {"HELOC": {"source": "made", "stand_in": True}}
    assert {"command", "scale", "machine", "started", "finished", "commit"} <= set(config)
    opened(tmp_path, folder.path).add_source("MNIST", "folder", stand_in=False)
    assert set(read_config(folder.path)["data"]) == {"HELOC", "MNIST"}


def test_a_run_that_goes_on_at_another_commit_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path
    for commit, told in (
        ("a1", "a1"),
        ("a1", "a1"),
        ("b2", "a1, then b2"),
        ("b2", "a1, then b2"),
        (None, "a1, then b2"),
    ):
        monkeypatch.setattr(results, "_commit", lambda commit=commit: commit)
        path = (opened(tmp_path) if path == tmp_path else opened(tmp_path, path)).path
        assert read_config(path)["commit"] == told


@pytest.mark.parametrize("content", ["{}", "[]", '{"finished": null}', "{"])
def test_a_config_that_says_nothing_is_named(tmp_path: Path, content: str) -> None:
    folder = opened(tmp_path)
    (folder.path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        read_config(folder.path)
