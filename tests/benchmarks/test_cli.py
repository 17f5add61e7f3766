"""The command line: what it offers, its exit codes, and that a stopped run goes on."""

from __future__ import annotations

import builtins
import errno
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from children import end, start
from torch import Tensor

from benchmarks import check, data, experiments, label_issues, names, tour
from benchmarks.__main__ import main
from benchmarks.check.case import Case, Method
from benchmarks.names import DATTRI_TASKS
from benchmarks.results import ResultFolder, read_config, read_rows
from benchmarks.scales import SCALES
from benchmarks.sizes import CellScale
from benchmarks.tasks import PAPER, TASKS

CHECK = ["check", "--scale", "smoke", "--tasks", "heloc-lr"]


def ones(case: Case) -> Tensor:
    return torch.ones(len(case.test[0]), len(case.train[0]))


def right(case: Case) -> Tensor:
    return case.groups.sum(ones(case), 1)


def wrong(case: Case) -> Tensor:
    return right(case) + torch.tensor([1.0] + [0.0] * (len(case.groups) - 1))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that puts others in the place of the toolkits' methods."""

    def put(*grouped: Any) -> None:
        found = tuple(Method("Captum", f"method {i}", ones, one, lambda case: "") for i, one in enumerate(grouped))
        monkeypatch.setattr(check, "methods", lambda: found)

    return put


def raises(error: BaseException) -> Any:
    def run(case: Case) -> Tensor:
        raise error

    return run


def only_folder() -> Path:
    (path,) = Path("results").iterdir()
    return path


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    for command in ("tour", "check", "compare", "run", "report", "data", "speed", "fidelity"):
        assert f"\n    {command} " in printed
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for word in ("--scale", "--data-dir", "--resume", "--methods", "--tasks", "stand-in", "Exit code 1"):
        assert word in printed


@pytest.mark.parametrize("given", [[], ["--scale", "smoke"], ["tour"]])
@pytest.mark.parametrize("passed", [True, False])
def test_no_command_is_the_tour(given: list[str], passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scales = []
    monkeypatch.setattr(tour, "run", lambda tasks, scale, *_, **__: scales.append(scale.name) or passed)
    assert main(given) == (0 if passed else 1)
    assert scales == ["smoke" if given[1:] else "quick"]


def test_the_tour_ends_with_the_headlines(
    methods: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    methods(right)
    monkeypatch.setattr(tour, "EXPERIMENT_TASKS", ())
    assert main(["tour", "--scale", "smoke", "--tasks", "heloc-lr"]) == 0
    first, *rest, equal, speed, fidelity, method, page = capsys.readouterr().out.splitlines()[2:]
    assert first.startswith("Expected time: about ")
    assert rest[:2] == ["Data:", "  HELOC: MADE UP (stand-in), because no source could be reached"]
    assert equal.endswith("are equal to the originals on 1 of 1 checks.")
    assert speed.startswith("Faster: ")
    assert fidelity.startswith("Faithful? Not measured here")
    assert method.startswith("Which method")
    assert Path(page.removeprefix("The page: ")).exists()


def test_tasks_of_dattri_are_for_lds_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check", "--tasks", "dattri-mnist-lr"])
    assert stopped.value.code == 2
    assert "run lds --tasks dattri-mnist-lr" in capsys.readouterr().err


def test_names_are_known_without_importing_what_they_name() -> None:
    assert set(names.EXPERIMENTS) == set(experiments.EXPERIMENTS)
    assert (*data.TITLES, "bert", "all") == names.FETCHABLE
    assert {task: task.partition("-")[0] for task in TASKS} == {task: PAPER[task].data for task in TASKS}


def test_help_imports_no_torch() -> None:
    code = "import sys; from benchmarks.__main__ import _parser; _parser(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_equal_scores_are_exit_code_0(methods: Any, capsys: pytest.CaptureFixture[str]) -> None:
    methods(right)
    assert main(CHECK) == 0
    assert "equal to the originals on 1 of 1 checks" in capsys.readouterr().out
    assert read_config(only_folder())["finished"]


@pytest.mark.parametrize(("broken", "status"), [(wrong, "differs"), (raises(KeyError("x")), "failed")])
def test_one_wrong_or_broken_method_is_exit_code_1(
    broken: Any, status: str, methods: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    methods(right, broken, right)
    assert main(CHECK) == 1
    printed = capsys.readouterr().out
    assert f"equal to the originals on 2 of 3 checks; 1 {status}" in printed
    assert [row["status"] for row in read_rows(only_folder())] == ["equal", status, "equal"]


def test_ctrl_c_keeps_rows_and_says_how_to_go_on(methods: Any, capsys: pytest.CaptureFixture[str]) -> None:
    methods(right, raises(KeyboardInterrupt()))
    assert main(CHECK) == 130
    folder = only_folder()
    said = capsys.readouterr().err
    assert "1 finished rows are kept" in said
    assert f"python -m benchmarks check --resume {folder}" in said
    methods(raises(AssertionError("a finished row runs again")), right)
    assert main(["check", "--resume", str(folder)]) == 0
    assert [row["status"] for row in read_rows(folder)] == ["equal", "equal"]


def test_a_killed_check_goes_on_with_the_row_it_was_in(methods: Any) -> None:
    def killed(case: Case) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    methods(right, killed, right)
    assert end(start(lambda: main(CHECK))) == -signal.SIGKILL
    assert len(read_rows(only_folder())) == 1
    methods(raises(AssertionError("a finished row runs again")), right, right)
    assert main(["check", "--resume"]) == 0
    assert len(read_rows(only_folder())) == 3
    assert _exits(["check", "--resume"]) == 2  # it is finished now


def _exits(arguments: list[str]) -> Any:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code


def test_what_cannot_be_resumed_is_said(methods: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exits(["check", "--resume"]) == 2
    assert "nothing to resume" in capsys.readouterr().err
    assert _exits(["check", "--resume", "elsewhere"]) == 2
    assert "no config.json" in capsys.readouterr().err
    methods(raises(KeyboardInterrupt()))
    main(CHECK)
    assert _exits(["check", "--scale", "quick", "--resume"]) == 2
    assert "scale='smoke', not 'quick'" in capsys.readouterr().err


def test_a_run_that_is_still_going_is_not_resumed(methods: Any, tmp_path: Path) -> None:
    said = tmp_path / "said"

    def resumed_by_another(case: Case) -> Tensor:
        def another() -> None:
            with said.open("w") as file, redirect_stderr(file):
                assert _exits(["check", "--resume"]) == 2

        assert end(start(another)) == 0
        return right(case)

    methods(right, resumed_by_another)
    assert main(CHECK) == 0
    assert "belongs to a run that is still going" in said.read_text()
    assert len(read_rows(only_folder())) == 2


def test_a_full_disk_is_said(methods: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    methods(right)

    def full(self: ResultFolder, row: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ResultFolder, "append", full)
        assert main(CHECK) == 1
    assert "the disk is full" in capsys.readouterr().err
    assert main(["check", "--resume"]) == 0


def test_a_folder_with_wrong_data_is_said(methods: Any, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    methods(right)
    (here / "heloc.npz").write_bytes(b"not a data set")
    assert main([*CHECK, "--data-dir", str(here)]) == 1
    assert "heloc.npz" in capsys.readouterr().err
    (here / "heloc.npz").unlink()
    assert main(["check", "--resume"]) == 0


def test_sizes_of_lds_may_be_given_and_are_kept_for_a_run_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(experiments, "run", lambda names, tasks, scale, *rest: seen.append(scale))
    given = [
        "run", "lds", "--scale", "smoke", "--tasks", "heloc-lr", "--methods", "What-if", "--groups", "Random:8",
        "Random:16", "--protocols", "leave one out", "--grouping-seeds", "4", "5", "--subsets", "9", "--seeds", "3",
        "--points", "99", "--epochs", "2", "--trios", "2", "--settled-checkpoints",
    ]  # fmt: skip
    assert main(given) == 0
    folder = only_folder()
    assert main(["run", "--resume", str(folder), "--subsets", "7"]) == 0
    for scale, subsets in zip(seen, (9, 7), strict=True):
        size = scale.experiments["heloc-lr"]
        assert size.lds.cells == CellScale(["What-if"], {"Random": [8, 16]}, [4, 5])
        assert (size.lds.subsets, size.lds.seeds, size.lds.protocols) == (subsets, 3, ["leave one out"])
        assert (size.data.train, size.epochs, size.lds.left_out_groups) == (99, 2, sys.maxsize)
        assert (size.lds.trios, size.lds.settled_checkpoints) == (2, True)
        assert scale.experiments["heloc-ann-s"] == SCALES["smoke"].experiments["heloc-ann-s"]


@pytest.mark.parametrize(
    "bad",
    [
        ["check", "--threads", "0"],
        ["run", "nothing"],
        ["check", "--tasks", "iris"],
        ["fly"],
        ["check", "--data"],
        ["check", "--processes", "0"],
        ["run", "lds", "--groups", "Random"],
        ["run", "lds", "--groups", "Clusters:8"],
        ["run", "lds", "--methods", "Guess"],
        ["run", "lds", "--tasks", DATTRI_TASKS[0], "--subsets", "5"],
        ["run", "noisy", "--subsets", "5"],
    ],
)
def test_bad_arguments_are_exit_code_2(bad: list[str]) -> None:
    assert _exits(bad) == 2


def test_data_sets_stand_for_their_tasks(methods: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(check, "run", lambda tasks, *_, **__: seen.append(tasks) or [])
    assert main(["check", "--data", "heloc", "qnli"]) == 1  # nothing checked is not passed
    assert seen == [["heloc-lr", "heloc-ann-s", "heloc-ann-m", "qnli-bert"]]


@pytest.mark.parametrize(
    "given", [CHECK, ["report", "run", "--out", "results"], ["fidelity", "--quick", "--json", "results/f"]]
)
def test_a_file_in_place_of_a_folder_is_one_line(
    given: list[str], methods: Any, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods(right)
    if given[0] == "report":
        main(CHECK)
        only_folder().rename("run")
        (here / "results").rmdir()
    (here / "results").write_text("a file")
    assert main(given) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("results")
    assert said.endswith("name a folder that can be written to, or run in one.")


def test_a_folder_of_another_version_is_named(methods: Any, capsys: pytest.CaptureFixture[str]) -> None:
    methods(raises(KeyboardInterrupt()))
    main(CHECK)
    folder = ResultFolder.open("check", {"command": "check"}, only_folder())
    for name, value, one in (("scale", "huge", "huge"), ("tasks", ["iris"], "iris"), ("methods", ["Guess"], "Guess")):
        before = folder.config[name]
        folder.config[name] = value
        folder._write_config()
        assert _exits(["check", "--resume", str(folder.path)]) == 2
        assert f"its {name} has {one!r}, which is none of" in capsys.readouterr().err
        folder.config[name] = before


def test_data_that_are_not_there_leave_no_result_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CHECK, "--data-dir", "nowhere"]) == 1
    assert "the data folder nowhere does not exist" in capsys.readouterr().err
    assert not (here / "results").exists()


def test_ctrl_c_during_the_imports_is_held_back_and_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, here: Path
) -> None:
    """In the middle of torch's import it would end in a traceback, or in an abort."""
    real, reached = builtins.__import__, []

    def interrupted(name: str, *rest: Any, **more: Any) -> Any:
        if name == "benchmarks.data.errors" and not reached:
            signal.raise_signal(signal.SIGINT)
            reached.append(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert main(CHECK) == 130
    assert reached
    assert "stopped. " in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--only", "nope"], ["--flipped", "2"], ["--flipped", "nan"]])
def test_label_issues_refuse_what_they_cannot_measure(bad: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["label_issues", *bad])
    with pytest.raises(SystemExit) as stopped:
        label_issues.main()
    assert stopped.value.code == 2
