"""Folders from a stranger: links are not followed, damage is found and named, other people's folders are left alone."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from children import end, start
from ggda_trak import TRAKer
from torch import nn
from trak_cases import N, batches, case, error, featurize, scored, scores, take, uneven_labels

from benchmarks.data import cache
from benchmarks.model_files import ModelFiles
from benchmarks.results import ResultFolder
from ggda_ext import GradientStore, GroupGradients, attribute, properties
from ggda_ext.storage.files import (
    DamagedFile,
    create_array,
    open_array,
    read_made_with,
    replaced,
    write_sealed_array,
)
from ggda_ext.storage.folder import Store, StoreDamaged, StoreMismatch

TASK, SECRET = "image_classification", "thesis: do not touch"
LOSS = nn.CrossEntropyLoss()
Damage = Callable[[Path], Any]


def cut(path: Path) -> None:
    os.truncate(path, max(path.stat().st_size - 9, 0))


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x10
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_text(SECRET)
    return path


def is_untouched(secret: Path) -> bool:
    return secret.read_text() == SECRET


def scores_in(folder: Path) -> torch.Tensor:
    torch.manual_seed(0)
    x, y, network = torch.randn(40, 3), torch.randint(0, 2, (40,)), nn.Linear(3, 2)
    goal = properties.mean_loss((x[:5], y[:5]), LOSS)
    return attribute(
        network, LOSS, (x, y), torch.arange(40) % 8, goal, save_dir=folder, batch_size=2, method="tracin"
    ).clone()


def gradients_in(folder: Path) -> torch.Tensor:
    torch.manual_seed(0)
    x, y, network = torch.randn(40, 3), torch.randint(0, 2, (40,)), nn.Linear(3, 2)
    provider = GroupGradients(network, LOSS, (x, y), torch.arange(40) % 8, batch_size=2)
    return GradientStore(provider, folder).scores(properties.mean_loss((x[:5], y[:5]), LOSS)).clone()


# links


def save_again(folder: Path) -> None:
    with Store(folder, {}) as store:
        if "a" not in store:
            store.save("a", np.ones(3))
        store.save("b", store.load("a"))


@pytest.mark.parametrize("name", ["store.lock", "a.npy", "a.npy.part"])
def test_a_store_never_writes_through_a_link(name: str, tmp_path: Path, secret: Path) -> None:
    folder = tmp_path / "store"
    with Store(folder, {}) as store:
        store.save("a", np.zeros(3))
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    refused = name == "store.lock"
    with pytest.raises(StoreMismatch, match=rf"{name}.*symbolic link") if refused else nullcontext():
        save_again(folder)
    assert is_untouched(secret)


@pytest.mark.parametrize("run", [scores_in, gradients_in])
def test_no_file_of_a_folder_is_written_or_read_through_a_link(
    run: Callable[[Path], torch.Tensor], tmp_path: Path, secret: Path
) -> None:
    folder = tmp_path / "store"
    expected = run(folder)
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            continue
        for place in (path, path.with_name(path.name + ".part")):
            kept = place.read_bytes() if place.exists() else None
            place.unlink(missing_ok=True)
            place.symlink_to(secret)
            refused = place.name == "store.lock"
            with pytest.raises(StoreMismatch, match="symbolic link") if refused else nullcontext():
                assert torch.equal(run(folder), expected)
            assert is_untouched(secret)
            place.unlink(missing_ok=True)
            if kept is not None:
                place.write_bytes(kept)


def test_a_hard_link_in_the_place_of_the_lock_keeps_its_content(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "store").mkdir()
    os.link(secret, tmp_path / "store" / "store.lock")
    Store(tmp_path / "store", {}).close()
    assert is_untouched(secret)


def traker(folder: Path, **options: Any) -> Any:
    given = case(TASK)
    return TRAKer(given.model, TASK, N, save_dir=folder, **{"groups": uneven_labels()} | given.options | options)


def half_done(folder: Path) -> Any:
    """A TRAK folder with half of its points in the sums."""
    given, made = case(TASK), traker(folder)
    made.load_checkpoint(given.checkpoints(1)[0], 0)
    for at in list(batches())[:4]:
        made.featurize(take(given.train, at), inds=at)
    made._commit()
    made._sums.store.close()
    return given


@pytest.mark.parametrize(
    "name",
    ["ggda.json", "ggda.json.part", "metadata.json", "experiments.json", "id_0.json", "0/store.lock", "0/grads.mmap",
     "0/_points.mmap", "0/_journal.npz.part", "0/_checksums.npz", "0/fisher_rows.mmap", "scores"],
)  # fmt: skip
def test_a_trak_folder_is_never_written_through_a_link(name: str, tmp_path: Path, secret: Path) -> None:
    given, folder = half_done(tmp_path / "trak"), tmp_path / "trak"
    if (folder / name).is_dir():
        (folder / name).rmdir()
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with pytest.raises(StoreDamaged, match=rf"{Path(name).name}.*symbolic link"):
        featurize(traker(folder), given, given.checkpoints(1))
    assert is_untouched(secret)


def test_results_and_caches_are_never_written_through_a_link(
    tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "cache"))
    folder = ResultFolder.open("check", {"command": "check"}, base=tmp_path)
    for name in ("config.json.part", "rows.jsonl"):
        (folder.path / name).symlink_to(secret)
    with pytest.raises(DamagedFile, match=r"rows\.jsonl is a symbolic link"):
        folder.append({"key": "a"})
    folder.finish()
    (tmp_path / "cache").mkdir()
    for name in ("mnist.npz", f"mnist.npz{cache.PART}{os.getpid()}", f"mnist.npz.json{cache.PART}{os.getpid()}"):
        (tmp_path / "cache" / name).symlink_to(secret)
    pixels = {part: np.zeros((2, 28, 28), np.uint8) for part in ("x_train", "x_test")}
    cache.write("mnist", {**pixels, "y_train": np.zeros(2, np.int64), "y_test": np.zeros(2, np.int64)}, "here")
    assert cache.read("mnist") is not None
    (tmp_path / "cache" / "mnist.npz").rename(tmp_path / "moved.npz")
    (tmp_path / "cache" / "mnist.npz").symlink_to(tmp_path / "moved.npz")
    assert cache.read("mnist") is None
    assert (tmp_path / "moved.npz").exists()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "key.pt").symlink_to(secret)
    assert ModelFiles(tmp_path / "models").load("key") is None
    assert is_untouched(secret)


# damage


@pytest.mark.parametrize(
    "told",
    ["{", "[]", '{"format": 7}', '{"format": 7, "fingerprint": [], "part": null}', "[" * 100_000,
     '{"format": 7, "fingerprint": {}, "part": {}}', '{"format": 7, "fingerprint": {}, "part": 1}'],
)  # fmt: skip
def test_an_array_that_does_not_say_what_it_was_made_with_is_not_of_a_store(told: str, tmp_path: Path) -> None:
    write_sealed_array(tmp_path / "a.npy", told, (3,), np.dtype(float), [np.zeros(3)])
    kept = (tmp_path / "a.npy").read_bytes()
    with pytest.raises(StoreMismatch, match=r"not a store.*a\.npy"):
        Store(tmp_path, {})
    assert (tmp_path / "a.npy").read_bytes() == kept
    (tmp_path / "store.lock").touch()  # where a store was, it is a damaged array of it
    with Store(tmp_path, {}) as store:
        assert "a" not in store


@pytest.mark.parametrize("content", ["{", '{"format": 1}', "[" * 100_000, "\udcff"])
def test_a_file_that_is_not_of_a_store_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "store.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(StoreMismatch, match=r"not a store.*store\.json"):
        Store(tmp_path, {})


def test_what_an_array_was_made_with_cannot_be_changed_unseen(tmp_path: Path) -> None:
    expected = scores_in(tmp_path)
    for path in tmp_path.glob("*.npy"):
        path.write_bytes(path.read_bytes().replace(b"groups of", b"groups or"))
    assert torch.equal(scores_in(tmp_path), expected)
    for path in tmp_path.glob("*.npy"):  # by a forger
        told = {**read_made_with(path), "fingerprint": {"groups": "others"}}
        values = open_array(path, sealed=True)
        write_sealed_array(path, json.dumps(told), values.shape, values.dtype, [np.array(values)])
    with pytest.raises(StoreMismatch, match="was made with groups = 'others'"):
        scores_in(tmp_path)


@pytest.mark.parametrize("cut", [1, 16, 40, 500])
def test_a_store_whose_only_array_was_cut_makes_it_again(cut: int, tmp_path: Path) -> None:
    expected = scores_in(tmp_path)
    for path in tmp_path.glob("*.npy"):
        os.truncate(path, path.stat().st_size - cut)
    assert torch.equal(scores_in(tmp_path), expected)


@pytest.mark.parametrize("shape", ["(1000000000000,)", "(-1,)", "(2, 2)", "(99999999999999999999999,)", "((", "'"])
def test_an_array_that_declares_more_than_it_has_is_named(shape: str, tmp_path: Path) -> None:
    header = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00" + header.encode() + bytes(8))
    with pytest.raises(DamagedFile, match=r"a\.npy is damaged"):
        open_array(tmp_path / "a.npy")


@pytest.mark.parametrize("damage", [cut, flipped, emptied])
@pytest.mark.parametrize(
    "name", ["grads.mmap", "fisher_rows.mmap", "_points.mmap", "_hashes.mmap", "_checksums.npz", "ggda_checkpoint.json"]
)
def test_a_half_done_trak_folder_that_was_damaged_is_refused(name: str, damage: Damage, tmp_path: Path) -> None:
    given = half_done(tmp_path)
    damage(tmp_path / "0" / name)
    with pytest.raises(StoreDamaged, match=rf"{name} is damaged"):
        featurize(traker(tmp_path), given, given.checkpoints(1))


@pytest.mark.parametrize("damage", [cut, flipped, emptied])
@pytest.mark.parametrize(
    "name", ["ggda.json", "0/features.mmap", "0/out_to_loss.mmap", "0/test_grads.mmap", "scores/test.mmap"]
)
def test_a_finished_trak_folder_that_was_damaged_is_refused(name: str, damage: Damage, tmp_path: Path) -> None:
    scores(TRAKer, case(TASK), tmp_path, groups=uneven_labels())
    damage(tmp_path / name)
    with pytest.raises(StoreDamaged, match=rf"{Path(name).name} is damaged"):
        traker(tmp_path).finalize_scores("test", model_ids=[0])


@pytest.mark.parametrize("damage", [cut, flipped, emptied])
@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("0/grads.mmap", "grads"), ("0/out_to_loss.mmap", "out_to_loss"), ("0/features.mmap", "features"),
        ("0/_row_hashes.mmap", "_row_hashes"), ("0/test_grads.mmap", "test_grads"), ("scores/test.mmap", "test"),
    ],
)  # fmt: skip
def test_a_damaged_trak_folder_of_groups_of_one_is_refused(
    name: str, named: str, damage: Damage, tmp_path: Path
) -> None:
    scores(TRAKer, case(TASK), tmp_path, groups=np.arange(N))
    damage(tmp_path / name)
    with pytest.raises(StoreDamaged, match=rf"{named}.mmap is( damaged|\))"):
        traker(tmp_path, groups=np.arange(N)).finalize_scores("test", model_ids=[0])


def test_a_point_of_a_killed_run_without_a_checksum_is_done_again(tmp_path: Path) -> None:
    given, options = case(TASK), {"groups": np.arange(N)}
    expected = scores(TRAKer, given, tmp_path / "whole", **options)
    made = traker(tmp_path / "killed", **options)
    made.load_checkpoint(given.checkpoints(1)[0], 0)
    first = next(batches())
    made.featurize(take(given.train, first), inds=first)
    store = made.saver.current_store
    store["row_hashes"][first[:5]] = 0  # as if killed before they were written
    store["grads"][first[:5]] = 7
    again = traker(tmp_path / "killed", **options)
    featurize(again, given, given.checkpoints(1))
    assert error(scored(again, given, given.checkpoints(1)), expected) < 2e-5


def ends_as_if_undisturbed(given: Any, folder: Path) -> None:
    made = traker(folder / "a")
    featurize(made, given, given.checkpoints(1))
    expected = scores(TRAKer, given, folder / "b", groups=uneven_labels())
    assert error(scored(made, given, given.checkpoints(1)), expected) < 2e-5


@pytest.mark.parametrize("name", ["id_0.json", "experiments.json", "metadata.json"])
def test_a_record_of_traks_with_another_number_is_not_believed(name: str, tmp_path: Path) -> None:
    given = half_done(tmp_path / "a")
    path = tmp_path / "a" / name
    text = path.read_text()
    other = text.replace('"is_finalized": 0', '"is_finalized": 1').replace('"train set size": 8', '"train set size": 9')
    path.write_text(json.dumps(json.loads(text) | {"x": 1}) if other == text else other)
    ends_as_if_undisturbed(given, tmp_path)


@pytest.mark.parametrize("name", ["_is_featurized.mmap", "features.mmap", "out_to_loss.mmap"])
def test_a_half_done_trak_folder_without_a_file_that_is_made_of_its_sums_goes_on(name: str, tmp_path: Path) -> None:
    given = half_done(tmp_path / "a")
    (tmp_path / "a" / "0" / name).unlink()
    ends_as_if_undisturbed(given, tmp_path)


@pytest.mark.parametrize("name", ["features.mmap", "out_to_loss.mmap"])
def test_a_finished_trak_folder_without_a_file_is_refused(name: str, tmp_path: Path) -> None:
    scores(TRAKer, case(TASK), tmp_path, groups=uneven_labels())
    (tmp_path / "0" / name).unlink()
    for _ in range(2):
        with pytest.raises(StoreDamaged, match=rf"{name} is damaged"):
            traker(tmp_path).finalize_scores("test", model_ids=[0])


@pytest.mark.parametrize("groups", [uneven_labels(), np.arange(N)])
def test_a_trak_folder_without_the_flags_of_its_points_has_them_again(groups: np.ndarray, tmp_path: Path) -> None:
    given = case(TASK)
    expected = scores(TRAKer, given, tmp_path, groups=groups)
    (tmp_path / "0" / "_is_featurized.mmap").unlink()
    made = traker(tmp_path, groups=groups)
    featurize(made, given, given.checkpoints(1))
    assert error(scored(made, given, given.checkpoints(1)), expected) < 2e-5


def test_what_stands_in_the_way_of_a_trak_folder_is_named(tmp_path: Path) -> None:
    given = case(TASK)
    scores(TRAKer, given, tmp_path, groups=uneven_labels())
    rows = tmp_path / "0" / "test_grads.mmap"
    rows.unlink()
    rows.mkdir()
    made = traker(tmp_path)
    with pytest.raises(OSError, match=r"test_grads\.mmap cannot be written to save_dir"):
        scored(made, given, given.checkpoints(1))
    (tmp_path / "0" / "grads.mmap").unlink()
    made = traker(tmp_path)
    with pytest.raises(ValueError, match=r"grads\.mmap, are not in save_dir"):
        featurize(made, given, given.checkpoints(1))


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    given = half_done(tmp_path)
    (tmp_path / "0" / "_journal.npz").write_bytes(b"PK nonsense")
    with pytest.raises(StoreDamaged, match=r"_journal\.npz is damaged"):
        featurize(traker(tmp_path), given, given.checkpoints(1))


@pytest.mark.parametrize("content", ["{", "[]", '{"0": 5}', '{"x": {}}', "[" * 50_000])
@pytest.mark.parametrize("name", ["id_0.json", "experiments.json", "metadata.json"])
def test_traks_own_records_are_mended(name: str, content: str, tmp_path: Path) -> None:
    given = half_done(tmp_path / "a")
    (tmp_path / "a" / name).write_text(content)
    ends_as_if_undisturbed(given, tmp_path)


def test_other_data_in_a_half_done_trak_folder_are_refused(tmp_path: Path) -> None:
    given = half_done(tmp_path)
    given.train[0][list(batches())[1][7]] += 1
    with pytest.raises(StoreMismatch, match=r"other data than now at 1 points"):
        featurize(traker(tmp_path), given, given.checkpoints(1))


@pytest.mark.parametrize("what", ["model", "task"])
def test_another_model_or_task_in_a_trak_folder_is_refused(what: str, tmp_path: Path) -> None:
    half_done(tmp_path)
    given = case(TASK)
    task: Any = TASK
    if what == "model":
        given.model[1] = nn.Tanh()
    else:
        from trak.modelout_functions import ImageClassificationModelOutput

        task = ImageClassificationModelOutput(temperature=2.0)
    with pytest.raises(StoreMismatch, match=f"was made with {what} = "):
        TRAKer(given.model, task, N, save_dir=tmp_path, groups=uneven_labels(), **given.options)


# other people's folders, and disks


def test_a_file_or_a_folder_of_another_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(SECRET)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text(SECRET)
    for run in (scores_in, gradients_in, traker):
        with pytest.raises(StoreMismatch, match="is a file: pass a new or empty folder"):
            run(tmp_path / "file")
        with pytest.raises(StoreMismatch, match="lies below a file: pass a new or empty folder"):
            run(tmp_path / "file" / "store")
        with pytest.raises(StoreMismatch, match=r"is not empty and not a store.*thesis\.tex"):
            run(tmp_path / "other")
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("room", [0, 100, 500, 3_000])
def test_a_disk_without_room_is_an_error_and_not_the_end_of_the_process(room: int, tmp_path: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        with pytest.raises(OSError, match="cannot be written to save_dir"):
            traker(tmp_path).load_checkpoint(case(TASK).checkpoints(1)[0], 0)

    assert end(start(work)) == 0


def test_space_is_reserved_before_it_is_used(tmp_path: Path) -> None:
    made = create_array(tmp_path / "a.mmap", (1_000, 1_000), np.float32)
    assert (tmp_path / "a.mmap").stat().st_blocks * 512 >= made.nbytes


def test_what_is_not_finished_leaves_nothing(tmp_path: Path) -> None:
    def stopped() -> None:
        with replaced(tmp_path / "a") as file:
            file.write(b"half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    assert list(tmp_path.iterdir()) == []
