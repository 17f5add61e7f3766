"""`python -m benchmarks results`: makes missing runs, goes on with stopped ones, and writes the document."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import experiments, published
from benchmarks.__main__ import main
from benchmarks.names import HALVES, LDS_METHODS, LDS_TASKS, RANDOM, TRACIN, WHAT_IF
from benchmarks.published import RUNS, Published, folder_of
from benchmarks.results import FolderInUse, ResultFolder, read_config, read_rows
from benchmarks.scales import SCALES
from benchmarks.sizes import narrowed

SMALL: dict[str, Any] = {"methods": [TRACIN, WHAT_IF], "groups": {RANDOM: [16]}, "protocols": [HALVES], "subsets": 4}
OUT = Path("results/published")


@pytest.fixture
def two_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Replace the runs by two small ones and return the document, which shows a table of both."""
    monkeypatch.chdir(tmp_path)
    few = {
        name: Published(("heloc-lr",), scale="smoke", lds=SMALL | {"grouping_seeds": [seed]})
        for name, seed in (("first", 7), ("second", 8))
    }
    monkeypatch.setattr("benchmarks.__main__.RUNS", few)
    monkeypatch.setattr(published, "RUNS", few)
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- table lds -->\n<!-- end -->\n")
    return document


@pytest.mark.parametrize("name", RUNS)
def test_every_run_names_what_there_is(name: str) -> None:
    one, scale = RUNS[name], SCALES[RUNS[name].scale]
    assert set(one.experiments) <= set(experiments.EXPERIMENTS)
    assert set(one.tasks) <= {*scale.experiments, *LDS_TASKS}
    if one.lds:
        assert set(one.lds["methods"]) <= set(LDS_METHODS)
        size = narrowed(scale, one.tasks, one.lds).experiments[one.tasks[0]].lds
        assert size is not None
        assert size.subsets >= 32
        assert size.cells.methods == one.lds["methods"]


def test_only_missing_runs_are_made_and_the_document_is_written_once_all_are_there(
    two_runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["results", "--document", str(two_runs)]
    assert main([*asked, "second"]) == 0
    assert "1 of 2 runs are finished" in capsys.readouterr().out
    assert "TracIn" not in two_runs.read_text()
    before = read_rows(folder_of("second", OUT))
    assert main(asked) == 0
    assert "TracIn" in two_runs.read_text()
    assert read_rows(folder_of("second", OUT)) == before
    assert len(list(OUT.glob("*-second"))) == 1
    assert {row["grouping_seed"] for name in ("first", "second") for row in read_rows(folder_of(name, OUT))} == {7, 8}


def test_a_stopped_run_goes_on_where_it_was(two_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = ResultFolder.append

    def stopped(folder: ResultFolder, row: dict[str, Any]) -> None:
        append(folder, row)
        if len(folder.rows) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ResultFolder, "append", stopped)
        assert main(["results", "first"]) == 130
    folder = folder_of("first", OUT)
    assert len(read_rows(folder)) == 2
    assert read_config(folder)["finished"] is None
    assert main(["results", "first"]) == 0
    assert folder_of("first", OUT) == folder
    assert read_config(folder)["finished"]
    assert len(read_rows(folder)) == 4


def test_a_run_of_another_process_is_left_to_it(
    two_runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = ResultFolder.open

    def in_use(name: str, *given: Any) -> ResultFolder:
        if name == "first":
            raise FolderInUse("first belongs to a run that is still going")
        return opened(name, *given)

    monkeypatch.setattr(ResultFolder, "open", in_use)
    assert main(["results"]) == 0
    printed = capsys.readouterr().out
    assert "first belongs to a run that is still going" in printed
    assert "1 of 2 runs are finished" in printed


def test_an_unknown_run_is_named(two_runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["results", "third"])
    assert "'third': choose from first, second" in capsys.readouterr().err
