"""The store of `ggda_trak.TRAKer`: killed and resumed, refused if made otherwise, intact after bad input."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggda_trak.batches
import ggda_trak.featurize
import ggda_trak.store
import numpy as np
import pytest
import torch
from ggda_trak import FactoredProjector, SketchProjector, TRAKer
from ggda_trak.hashes import row_hashes
from ggda_trak.projectors import BasicProjector
from trak_cases import TARGETS, N, batches, case, error, featurize, scored, scores, take, uneven_labels

from ggda_ext import Groups

TASK = "image_classification"


def made(folder: Path, **options: Any) -> Any:
    given = case(TASK)
    return TRAKer(given.model, TASK, N, save_dir=folder, **{"groups": uneven_labels()} | given.options | options)


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_between_batches(traker: Any) -> None:
    done, add = [0], traker._sums.add

    def some(*args: Any) -> None:
        add(*args)
        done[0] += 1
        if done[0] == 3:
            die()

    traker._sums.add = some


def kill_before_journal(traker: Any) -> None:
    _second_call(os, "replace", die)


def kill_after_journal(traker: Any) -> None:
    replace = os.replace
    _second_call(os, "replace", lambda *paths: (replace(*paths), die()))


def kill_half_applied(traker: Any) -> None:
    sums = traker._sums.store.sums

    class Half:
        shape, dtype, count = sums["numerators"].shape, sums["numerators"].dtype, 0

        def __getitem__(self, ids: Any) -> Any:
            return sums_of[ids]

        def __setitem__(self, ids: Any, values: Any) -> None:
            Half.count += 1
            half = len(ids) // 2
            sums_of[ids[:half]] = values[:half]
            if Half.count == 2:
                die()
            sums_of[ids] = values

    sums_of = sums["numerators"]
    sums["numerators"] = Half()  # type: ignore[assignment]


def kill_before_journal_is_deleted(traker: Any) -> None:
    _second_call(Path, "unlink", die)


def _second_call(owner: Any, name: str, then: Callable[..., Any]) -> None:
    original, calls = getattr(owner, name), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return (then if calls[0] == 2 else original)(*args, **kwargs)

    setattr(owner, name, counted)


POINTS = [
    kill_between_batches,
    kill_before_journal,
    kill_after_journal,
    kill_half_applied,
    kill_before_journal_is_deleted,
]


@pytest.mark.parametrize("fisher", ["batched", "exact"])
@pytest.mark.parametrize("arrange", POINTS)
def test_killed_and_started_again_the_result_is_the_same(
    arrange: Callable[[Any], None], fisher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = case(TASK)
    monkeypatch.setattr(ggda_trak.featurize, "LEAST_POINTS", 1)  # every batch is written at once
    monkeypatch.setattr(ggda_trak.featurize, "ROWS_PER_DIMENSION", 0)
    row = 4 * sum(parameter.numel() for parameter in given.model.parameters())
    options = {"fisher": fisher, "damping": 0.2, "memory_budget": 2 * 6 * row}  # few rows wait at a time
    checkpoint = given.checkpoints(1)[0]

    def first_run() -> None:
        traker = made(tmp_path, **options)
        traker.load_checkpoint(checkpoint, 0)
        arrange(traker)
        for at in batches():
            traker.featurize(take(given.train, at), inds=at)

    child = multiprocessing.get_context("fork").Process(target=first_run)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    traker = made(tmp_path, **options)
    traker.load_checkpoint(checkpoint, 0)
    done = int(traker._sums.before.sum())
    assert 0 < done < N
    for at in batches(size=70, seed=1):  # every batch is done in part
        traker.featurize(take(given.train, at), inds=at)
    expected = scores(TRAKer, given, tmp_path / "whole", **options, groups=uneven_labels())
    assert error(scored(traker, given, [checkpoint]), expected) < 2e-5


def test_partly_done_batch_of_singletons_is_resumed(tmp_path: Path) -> None:
    given, checkpoint = case(TASK), case(TASK).checkpoints(1)[0]
    options = {"groups": np.arange(N), "lambda_reg": 1.0}  # without a ridge single precision loses a digit more
    expected = scores(TRAKer, given, tmp_path / "whole", **options)
    traker = made(tmp_path / "parts", **options)
    traker.load_checkpoint(checkpoint, 0)
    traker.featurize(take(given.train, np.arange(30)), inds=list(range(30)))
    featurize(traker, given, [checkpoint], size=100, seed=None)
    assert error(scored(traker, given, [checkpoint]), expected) < 1e-5


def test_store_opened_again_after_a_clean_end_gives_the_same_scores(tmp_path: Path) -> None:
    given, checkpoint = case(TASK), case(TASK).checkpoints(1)[0]
    traker = made(tmp_path)
    featurize(traker, given, [checkpoint])
    expected = scored(traker, given, [checkpoint])
    for _ in range(3):  # each writes its records again
        again = made(tmp_path)
        assert again.chosen_damping == traker.chosen_damping
        again.load_checkpoint(checkpoint, 0)
        assert again.saver.model_ids[0] == {"is_featurized": 1, "is_finalized": 1}
        assert np.array_equal(scored(again, given, [checkpoint]), expected)


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"groups": np.roll(uneven_labels(), 1)}, "made with groups"),
        ({"groups": np.arange(N) // 2}, "made with groups"),
        ({"fisher": "exact"}, "made with fisher = 'batched', now it is 'exact'"),
        ({"proj_dim": 32}, "made with proj_dim = '104', now it is '32'"),
        ({"projector_seed": 5}, "made with seed = '0', now it is '5'"),
        ({"use_half_precision": True}, "made with half_precision"),
        ({"grad_wrt": ["5.weight"]}, "made with parameters"),
        ({"checkpoints": [{}, {}]}, "made with checkpoints = 1, now it is 2"),
        ({"groups": np.arange(N)}, "made with groups"),
    ],
)
def test_store_made_otherwise_is_refused_with_the_difference_named(
    options: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    made(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=difference):
        made(tmp_path, **options)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_store_with_another_projector_is_refused(tmp_path: Path) -> None:
    given = case(TASK)
    size = sum(parameter.numel() for parameter in given.model.parameters())
    made(tmp_path, projector=SketchProjector(size, 104))
    for projector in (FactoredProjector(given.model, 104), None):
        with pytest.raises(ValueError, match="made with projector = 'SketchProjector'"):
            made(tmp_path, projector=projector)


def test_store_of_plain_trak_is_refused(tmp_path: Path) -> None:
    made(tmp_path, groups=None)
    with pytest.raises(ValueError, match="made without groups"):
        made(tmp_path)


@pytest.mark.parametrize("left", ["ggda.json.part", "store.lock"])
def test_what_a_kill_inside_the_first_write_leaves_is_no_foreign_folder(tmp_path: Path, left: str) -> None:
    (tmp_path / left).touch()
    assert made(tmp_path) is not None
    assert (tmp_path / "ggda.json").stat().st_size > 0


def test_bad_input_is_refused_and_the_store_left_intact(tmp_path: Path) -> None:
    given, checkpoint = case(TASK), case(TASK).checkpoints(1)[0]
    expected = scores(TRAKer, given, tmp_path / "a", groups=uneven_labels())
    traker = made(tmp_path / "b")
    with pytest.raises(ValueError, match="call load_checkpoint first"):
        traker.featurize(given.train, num_samples=N)
    traker.load_checkpoint(checkpoint, 0)
    first, *rest = list(batches())
    traker.featurize(take(given.train, first), inds=first)
    spoilt = take(given.train, rest[0])
    spoilt[0] = spoilt[0].clone()
    spoilt[0][3] = float("nan")
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (take(given.train, first), {"inds": first}, "50 points that are featurized already"),
        (take(given.train, rest[0]), {"inds": rest[0][:7]}, "7 training points, but the batch has 50"),
        (take(given.train, rest[0]), {"inds": np.full(50, 399)}, "twice"),
        (take(given.train, rest[0]), {"inds": np.arange(380, 430)}, r"outside the 400 training points: \[400"),
        (take(given.train, rest[0]), {"inds": rest[0], "num_samples": 50}, "exactly one"),
        (take(given.train, rest[0]), {}, "exactly one"),
        (spoilt, {"inds": rest[0]}, "weight Q of 1 points is not finite"),
        ([given.train[0][:4], given.train[1][:5]], {"num_samples": 4}, "different lengths"),
    ]
    for batch, arguments, message in wrong:
        with pytest.raises(ValueError, match=message):
            traker.featurize(batch, **arguments)
    for at in rest:
        traker.featurize(take(given.train, at), inds=torch.from_numpy(at))
    assert error(scored(traker, given, [checkpoint]), expected) < 2e-5


def test_interrupted_batch_leaves_its_points_to_be_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, checkpoint = case(TASK), case(TASK).checkpoints(1)[0]
    expected = scores(TRAKer, given, tmp_path / "a", groups=uneven_labels())
    row = 4 * sum(parameter.numel() for parameter in given.model.parameters())
    traker = made(tmp_path / "b", memory_budget=2 * 6 * row)  # rows of few groups wait at a time
    monkeypatch.setattr(ggda_trak.batches, "ENOUGH_NUMBERS", 1)  # and no points
    traker.load_checkpoint(checkpoint, 0)
    every = list(batches())
    traker.featurize(take(given.train, every[0]), inds=every[0])
    calls, add_rows = [0], traker._sums._add_rows

    def interrupted(*args: Any) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise KeyboardInterrupt
        add_rows(*args)

    monkeypatch.setattr(traker._sums, "_add_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        traker.featurize(take(given.train, every[1]), inds=every[1])
    monkeypatch.undo()
    for at in every:
        traker.featurize(take(given.train, at), inds=at)
    assert error(scored(traker, given, [checkpoint]), expected) < 2e-5


@pytest.mark.parametrize("size", [1, 8, 11, 1024, 1025])
def test_no_changed_bit_of_a_row_goes_unseen(size: int) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (32, size), np.uint8)
    rows[:2] = 0
    before = row_hashes(rows)
    assert (before[:2] == 0).all()
    assert (row_hashes(rows[::-1]) == before[::-1]).all()
    changed = rows.copy()
    changed[np.arange(32), np.arange(32) % size] ^= 1 << (np.arange(32) % 8).astype(np.uint8)
    assert (row_hashes(changed) != before).all()
    swapped = np.roll(rows[2:], 1, 1)
    same = (swapped == rows[2:]).all(1)
    assert ((row_hashes(swapped) == before[2:]) == same).all()


def test_points_that_wait_are_those_that_were_given_at_the_parameters_of_then(tmp_path: Path) -> None:
    """The user fills the same memory with every batch, and does something else with the model before the last one."""
    given, checkpoint = case(TASK), case(TASK).checkpoints(1)[0]
    expected = scores(TRAKer, given, tmp_path / "a", groups=uneven_labels())
    traker = made(tmp_path / "b")
    traker.load_checkpoint(checkpoint, 0)
    *every, last = batches()
    memory = [tensor.clone() for tensor in take(given.train, every[0])]
    for at in every:
        for here, tensor in zip(memory, take(given.train, at), strict=True):
            here.copy_(tensor)
        traker.featurize(memory, inds=at)
    assert traker._sums._points._batches, "the points did not wait"
    with torch.no_grad():
        for parameter in traker.model.parameters():
            parameter.mul_(2)
    traker.load_checkpoint(checkpoint, 0)
    traker.featurize(take(given.train, last), inds=last)
    assert error(scored(traker, given, [checkpoint]), expected) < 2e-5


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    size = sum(parameter.numel() for parameter in case(TASK).model.parameters())
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"groups": np.zeros(N - 1)}, "labels for 399 points, but the training set has 400"),
        ({"groups": Groups(np.arange(9))}, "built for 9 training points"),
        ({"fisher": "none"}, "fisher='none' is not one of"),
        ({"strategy": "ghost"}, "strategy='ghost' is not one of"),
        ({"lambda_reg": -1.0}, "lambda_reg=-1.0"),
        ({"fisher": "exact", "lambda_reg": "auto"}, "lambda_reg='auto'"),
        ({"memory_budget": 0}, "memory_budget=0"),
        ({"checkpoints": []}, "checkpoints is empty"),
        ({"projector": BasicProjector(size - 1, 104, 0, "normal", "cpu")}, f"{size} parameters count here"),
        ({"projector": SketchProjector(7, 104)}, "SketchProjector for gradients of length 7"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            made(tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_second_checkpoint_asks_for_all_checkpoints(tmp_path: Path) -> None:
    one, two = case(TASK).checkpoints(2)
    traker = made(tmp_path)
    traker.load_checkpoint(one, 0)
    with pytest.raises(ValueError, match=r"pass checkpoints=\[…\]"):
        traker.load_checkpoint(two, 1)


def test_checkpoints_may_be_files_and_the_model_keeps_its_parameters(tmp_path: Path) -> None:
    given = case(TASK)
    checkpoints = given.checkpoints(2)
    expected = scores(TRAKer, case(TASK), tmp_path / "a", models=2, groups=uneven_labels())
    paths = [tmp_path / f"{j}.pt" for j in range(2)]
    for path, state in zip(paths, checkpoints, strict=True):
        torch.save(state, path)
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path / "b", groups=uneven_labels(), checkpoints=paths,
                    **given.options)  # fmt: skip
    featurize(traker, given, checkpoints)
    assert all(torch.equal(value, checkpoints[1][name]) for name, value in given.model.state_dict().items())
    assert np.array_equal(scored(traker, given, checkpoints), expected)
    with pytest.raises(ValueError, match="averaged over 2"):
        traker.finalize_scores("test", model_ids=[0])


@pytest.mark.parametrize("groups", [uneven_labels(), np.arange(N)])
@pytest.mark.parametrize("proj_dim", [16, 104])
def test_defects_of_trak_are_not_met_with_groups(groups: np.ndarray, proj_dim: int, tmp_path: Path) -> None:
    given, checkpoint = case(TASK), case(TASK).checkpoints(1)[0]
    options = {"device": torch.device("cpu"), "proj_dim": proj_dim, "groups": groups}
    expected = scores(TRAKer, case(TASK), tmp_path / "a", **options)
    traker = made(tmp_path / "b", load_from_save_dir=False, **options)
    traker.load_checkpoint(checkpoint, 0)
    traker.featurize(given.train, inds=list(range(N)))
    traker.finalize_features()
    assert error(scored(traker, given, [checkpoint]), expected) < 2e-5  # finalizes again
    traker.start_scoring_checkpoint("list", checkpoint, 0, num_targets=TARGETS)
    traker.score(given.targets, inds=list(range(TARGETS)))
    assert error(np.array(traker.finalize_scores("list")), expected) < 2e-5


def test_gradients_can_be_deleted_once_features_are_made(tmp_path: Path) -> None:
    given, checkpoint = case(TASK), case(TASK).checkpoints(1)[0]
    expected = scores(TRAKer, given, tmp_path / "a", groups=uneven_labels())
    traker = made(tmp_path / "b")
    featurize(traker, given, [checkpoint])
    traker.finalize_features(del_grads=True)
    assert not list((tmp_path / "b" / "0").glob("*rows*"))
    assert not (tmp_path / "b" / "0" / "grads.mmap").exists()
    again = made(tmp_path / "b")
    again.load_checkpoint(checkpoint, 0)
    assert np.array_equal(scored(again, given, [checkpoint]), expected)


def test_half_precision_is_off_with_groups_and_overflow_is_an_error(tmp_path: Path) -> None:
    assert made(tmp_path / "a", **{"use_half_precision": False}).dtype == torch.float32
    given = case(TASK)
    options = {name: value for name, value in given.options.items() if name != "use_half_precision"}
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path / "b", groups=uneven_labels(), **options)
    assert traker.dtype == torch.float32
    store = ggda_trak.store.GroupStore(
        tmp_path,
        {"grads": np.zeros((2, 3), np.float16), "is_featurized": np.zeros((2, 1), np.int32)},
        Groups([0, 0, 1]), "paper", True,
    )  # fmt: skip
    with pytest.raises(ValueError, match="do not fit float16"):
        store.add(np.array([0]), np.array([1]), {"numerators": np.full((1, 3), 1e6, np.float32)})
    assert not store.points.any()
    assert not store.sums["numerators"].any()


def test_store_size_goes_by_groups(tmp_path: Path) -> None:
    def size(labels: np.ndarray, name: str) -> int:
        traker = made(tmp_path / name, groups=labels)
        traker.load_checkpoint(case(TASK).checkpoints(1)[0], 0)
        return sum(path.stat().st_size for path in (tmp_path / name / "0").iterdir())

    few, many = size(np.arange(N) // 100, "few"), size(np.arange(N) // 4, "many")
    assert few < 12_000
    assert 10 * few < many


def test_another_model_under_the_same_id_is_refused(tmp_path: Path) -> None:
    given = case(TASK)
    first, second = given.checkpoints(2)
    traker = made(tmp_path)
    traker.load_checkpoint(first, 0)
    with pytest.raises(ValueError, match="made with values of the parameters"):
        made(tmp_path).load_checkpoint(second, 0)
    featurize(traker, given, [first])
    with pytest.raises(ValueError, match="made with values of the parameters"):
        traker.start_scoring_checkpoint("test", second, 0, num_targets=TARGETS)


def test_a_second_process_is_refused_the_same_checkpoint(tmp_path: Path) -> None:
    given, checkpoint = case(TASK), case(TASK).checkpoints(1)[0]
    traker = made(tmp_path)
    traker.load_checkpoint(checkpoint, 0)

    def visit() -> None:
        try:
            made(tmp_path).load_checkpoint(checkpoint, 0)
        except RuntimeError as error:
            os._exit(3 if f"is in use by process {os.getppid()}" in str(error) else 4)

    child = multiprocessing.get_context("fork").Process(target=visit)
    child.start()
    child.join()
    assert child.exitcode == 3
    featurize(traker, given, [checkpoint])
