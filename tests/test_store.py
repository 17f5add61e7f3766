"""Stores: what is finished stays, what is damaged is redone, what does not belong is refused with the reason."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import CLASSES, Case, make_case, relative_error
from children import end, said, start
from torch import nn
from torch.utils.data import Dataset, IterableDataset

import ggda_ext.storage.fingerprint
from ggda_ext import GradientStore, GroupGradients, Groups, PointGradients, attribute, properties
from ggda_ext.data import IndexedData
from ggda_ext.losses import as_example_loss
from ggda_ext.storage.files import read_made_with, write_sealed_array
from ggda_ext.storage.folder import Store, StoreMismatch

LOSS = nn.CrossEntropyLoss()


def in_child(work: Callable[[], Any]) -> str:
    """What `work` returns or raises in a forked child, as text."""

    def text() -> str:
        try:
            return repr(work())
        except BaseException as error:
            return f"{type(error).__name__}: {error}"

    return said(text)[0]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.npy")}


def made(folder: Path, fingerprint: dict[str, Any]) -> None:
    with Store(folder, fingerprint) as store:
        store.save("a", np.zeros(1))


# the folder itself


def test_a_finished_array_is_found_again(tmp_path: Path) -> None:
    with Store(tmp_path, {"seed": 0}) as store:
        assert "a" not in store
        store.save("a", np.arange(6.0).reshape(2, 3))
    with Store(tmp_path, {"seed": 0}) as store:
        assert "a" in store
        found = store.load("a")
    assert isinstance(found, np.memmap)
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("shape", [(0,), (), (3, 0, 2), (2, 3)])
@pytest.mark.parametrize("dtype", [np.float32, np.int8, bool])
def test_any_plain_array_comes_back(tmp_path: Path, shape: tuple[int, ...], dtype: Any) -> None:
    array = np.ones(shape, dtype)
    with Store(tmp_path, {}) as store:
        store.save("a", array)
    with Store(tmp_path, {}) as store:
        found = store.load("a") if array.size else None
    assert "a" in Store(tmp_path, {})
    if found is not None:
        np.testing.assert_array_equal(found, array)
        assert found.dtype == array.dtype


def test_changing_what_was_read_does_not_change_the_store(tmp_path: Path) -> None:
    with Store(tmp_path, {}) as store:
        store.save("a", np.zeros(3))
        store.load("a")[:] = 1
        assert store.load("a").tolist() == [0, 0, 0]


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def bit_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncated, bit_flipped, Path.unlink])
def test_a_damaged_array_is_found_and_made_again(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    with Store(tmp_path, {}) as store:
        store.save("a", np.arange(5.0))
        store.save("b", np.arange(5.0))
    damage(tmp_path / "a.npy")
    with Store(tmp_path, {}) as store:
        assert "a" not in store
        assert "b" in store
        store.save("a", np.arange(5.0))
        assert store.load("a").tolist() == [0, 1, 2, 3, 4]


def test_a_file_without_its_checksum_does_not_count(tmp_path: Path) -> None:
    with Store(tmp_path, {}) as store:
        store.save("b", np.zeros(3))
    np.save(tmp_path / "a.npy", np.zeros(3))
    with Store(tmp_path, {}) as store:
        assert "a" not in store


def test_an_array_of_another_place_does_not_count(tmp_path: Path) -> None:
    for seed in range(2):
        with Store(tmp_path / str(seed), {"seed": seed}) as store:
            for arrays in (store, store.part("one", {"lr": 1}), store.part("two", {"lr": 2})):
                for name in "ab":
                    arrays.save(name, np.full(3, seed))
                assert arrays.names == ["a", "b"]
    target = tmp_path / "0" / "one+a.npy"
    for other in ("0/a.npy", "0/one+b.npy", "0/two+a.npy", "1/one+a.npy"):
        shutil.copy(tmp_path / other, target)
        with Store(tmp_path / "0", {"seed": 0}) as store:
            assert "a" not in store.part("one", {"lr": 1})


def test_another_fingerprint_is_refused_and_named(tmp_path: Path) -> None:
    made(tmp_path, {"groups": "a", "seed": 0})
    for other, named in [
        ({"groups": "a", "seed": 1}, "seed = 0, now it is 1"),
        ({"groups": "a"}, "seed = 0, now it is None"),
        ({"groups": "a", "seed": 0, "tag": "x"}, "tag = None, now it is 'x'"),
    ]:
        with pytest.raises(StoreMismatch, match=f"was made with {named}.*another save_dir"):
            Store(tmp_path, other)
    Store(tmp_path, {"groups": "a", "seed": 0}).close()


def test_sketches_may_differ_by_rounding_only(tmp_path: Path) -> None:
    made(tmp_path, {"sums": [1.0, -2.0]})
    with Store(tmp_path, {"sums": [1.0 + 1e-7, -2.0]}) as store:
        assert "a" in store
    for other in ([1.0 + 1e-5, -2.0], [1.0], [float("nan"), -2.0]):
        with pytest.raises(StoreMismatch, match="sums"):
            Store(tmp_path, {"sums": other})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.npy").write_text("mine")
    with pytest.raises(StoreMismatch, match=r"not empty and not a store.*thesis\.npy"):
        Store(tmp_path, {})
    assert {path.name for path in tmp_path.iterdir()} <= {"thesis.npy", "store.lock"}


def test_a_store_of_another_format_is_refused(tmp_path: Path) -> None:
    write_sealed_array(tmp_path / "a.npy", '{"format": 99}', (1,), np.dtype(float), [np.zeros(1)])
    with pytest.raises(StoreMismatch, match=r"a\.npy of another format"):
        Store(tmp_path, {})
    (tmp_path / "a.npy").unlink()
    (tmp_path / "store.json").write_text('{"format": 6, "fingerprint": {}, "parts": {}}')  # as it was once written
    with pytest.raises(StoreMismatch, match=r"not a store.*store\.json"):
        Store(tmp_path, {})


def test_names_are_file_names(tmp_path: Path) -> None:
    with Store(tmp_path, {}) as store:
        for name in ("../a", "a/b", "", ".a"):
            with pytest.raises(ValueError, match="letters, digits"):
                store.save(name, np.zeros(1))


def test_pickled_arrays_are_neither_written_nor_read(tmp_path: Path) -> None:
    with Store(tmp_path, {}) as store:
        with pytest.raises(TypeError, match="only plain numbers"):
            store.save("a", np.array([object()]))
        store.save("a", np.zeros(1))
        np.save(tmp_path / "a.npy", np.array([{}]), allow_pickle=True)
        assert "a" in store  # it was checked, and changed since
        with pytest.raises(ValueError, match=r"[Pp]ickle|memory-mapped"):
            store.load("a")


# one writer


def test_a_second_process_is_refused_until_the_first_has_finished(tmp_path: Path) -> None:
    with Store(tmp_path, {}) as store:
        found = in_child(lambda: Store(tmp_path, {}))
        assert f"RuntimeError: save_dir='{tmp_path}' is in use by process {os.getpid()}: wait" in found
        with pytest.raises(RuntimeError, match="in use by this process"):
            Store(tmp_path, {})
        store.save("a", np.zeros(1))
    assert in_child(lambda: "a" in Store(tmp_path, {})) == "True"


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    kept = []
    child = start(lambda: kept.append(Store(tmp_path, {})))  # never closed
    assert end(child) == 0
    assert (tmp_path / "store.lock").exists()
    Store(tmp_path, {}).close()


# a disk that does not take it


def test_disk_full_is_a_clear_error_and_finished_arrays_are_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: Any) -> int:
        return os.open("/dev/full", os.O_WRONLY)

    with Store(tmp_path, {}) as store:
        store.save("a", np.zeros(3))
        before = files(tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr("ggda_ext.storage.files._new", full)
            with pytest.raises(
                OSError, match=r"b cannot be written.*No space left.*free space.*1 arrays.*intact"
            ) as found:
                store.save("b", np.zeros(3))
        assert found.value.errno == errno.ENOSPC
    assert files(tmp_path) == before
    with Store(tmp_path, {}) as store:
        assert "a" in store
        assert "b" not in store
        store.save("b", np.zeros(3))  # there is space again


def test_a_read_only_folder_gives_what_it_holds_and_takes_nothing() -> None:
    def visit() -> str:
        if os.geteuid() == 0:
            os.setuid(65534)  # root may write anywhere
        with Store(folder, {}) as store:
            kept = store.load("a").tolist()
            try:
                store.save("b", np.zeros(3))
            except PermissionError as error:
                return f"{kept} {error}"
        return "written"

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Store(folder, {}) as store:
            store.save("a", np.zeros(2))
        folder.chmod(0o555)
        (folder / "store.lock").chmod(0o444)
        found = in_child(visit)
        new = in_child(lambda: (os.geteuid() or os.setuid(65534), Store(folder / "new", {})))
        folder.chmod(0o755)
    assert "[0.0, 0.0]" in found
    assert "b cannot be written" in found
    assert "Permission denied" in found
    assert "intact" in found
    assert "PermissionError" in new
    assert "cannot be written to save_dir" in new


# scores


class Counted(Dataset):
    """Points that count how often they are fetched."""

    def __init__(self, case: Case) -> None:
        self.case, self.fetched = case, 0

    def __len__(self) -> int:
        return len(self.case.x)

    def __getitem__(self, i: int) -> Any:
        self.fetched += 1
        return self.case.x[i], self.case.y[i]


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr("ggda_ext.storage.jobs.BATCHES_PER_BLOCK", 2)  # blocks of 4 points, in batches of 2
    return make_case("mlp")


def labels(case: Case, k: int = 9) -> np.ndarray:
    return np.arange(len(case.x)) * 7 % k


def asked(case: Case, kind: str) -> Any:
    test = (case.x[:6], case.y[:6])
    return properties.mean_loss(test, LOSS) if kind == "property" else properties.point_losses(test, LOSS)


def stored(case: Case, folder: Path, kind: str = "property", data: Any = None) -> torch.Tensor:
    data = case.data if data is None else data
    return attribute(
        case.model, LOSS, data, labels(case), asked(case, kind), save_dir=folder, batch_size=2, method="tracin"
    )


@pytest.mark.parametrize("strategy", ["auto", "directional", "forward", "ghost", "segmented", "backward", "persample"])
@pytest.mark.parametrize("kind", ["property", "points"])
def test_stored_scores_are_the_scores(case: Case, tmp_path: Path, kind: str, strategy: str) -> None:
    if strategy == "ghost" and kind == "property":
        strategy = "auto"
    goal = asked(case, kind)
    for groups in (labels(case), np.where(labels(case) == 3, -1, labels(case) - (labels(case) > 3))):
        given = (case.model, LOSS, case.data, Groups(groups, rest="drop"), goal)
        folder = tmp_path / str(groups[3])
        found = attribute(*given, save_dir=folder, strategy=strategy, batch_size=2, memory_budget=300, method="tracin")
        plain = attribute(*given, method="tracin")
        assert found.shape == plain.shape
        assert found.dtype == plain.dtype
        assert relative_error(found, plain) < 1e-12
        assert len(list(folder.glob("*block-*.npy"))) > 1
        assert torch.equal(
            attribute(*given, save_dir=folder, strategy=strategy, batch_size=2, memory_budget=300, method="tracin"),
            found,
        )


def test_scores_over_checkpoints_are_weighted_and_the_model_comes_back(case: Case, tmp_path: Path) -> None:
    states = [{name: value * scale for name, value in case.model.state_dict().items()} for scale in (0.5, 1.5)]
    given = (case.model, LOSS, case.data, labels(case), asked(case, "property"))
    before = ggda_ext.storage.fingerprint.of_parameters(case.model)
    plain = attribute(*given, checkpoints=states, weights=[0.3, 2], method="tracin")
    found = attribute(*given, checkpoints=states, weights=[0.3, 2], save_dir=tmp_path, batch_size=2, method="tracin")
    assert relative_error(found, plain) < 1e-12
    with pytest.raises(StoreMismatch, match="values of the parameters"):
        attribute(*given, checkpoints=states[::-1], weights=[0.3, 2], save_dir=tmp_path, batch_size=2, method="tracin")
    assert ggda_ext.storage.fingerprint.of_parameters(case.model) == before


def test_a_second_call_reads_no_training_data_and_another_property_is_another_question(
    case: Case, tmp_path: Path
) -> None:
    data = Counted(case)

    def run(kind: str) -> torch.Tensor:
        return stored(case, tmp_path, kind, data)

    first = run("property")
    data.fetched = 0
    assert torch.equal(run("property"), first)
    assert data.fetched <= 2 * 2 + len(case.x)  # the checks look at a few points, here at most all
    assert run("points").shape == (6, 9)
    assert torch.equal(run("property"), first)


@pytest.mark.parametrize("damage", [truncated, bit_flipped, Path.unlink])
def test_a_damaged_block_of_scores_is_redone(case: Case, tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    expected, before = stored(case, tmp_path, "points").clone(), files(tmp_path)
    for name in before:
        damage(tmp_path / name)
        assert torch.equal(stored(case, tmp_path, "points"), expected)
        assert files(tmp_path) == before


@pytest.mark.parametrize("damage", [truncated, Path.unlink])
@pytest.mark.parametrize("checkpoints", [1, 2])
def test_a_question_in_the_place_of_a_lost_one_gets_its_own_scores(
    case: Case, tmp_path: Path, checkpoints: int, damage: Callable[[Path], Any]
) -> None:
    states = [{name: value * (at + 1) for name, value in case.model.state_dict().items()} for at in range(checkpoints)]

    def ask(low: int, folder: str = "one") -> torch.Tensor:
        return attribute(
            case.model, LOSS, case.data, labels(case), properties.mean_loss((case.x[low:], case.y[low:]), LOSS),
            checkpoints=states, save_dir=tmp_path / folder, batch_size=2, method="tracin",
        ).scores.clone()  # fmt: skip

    first, second = ask(3), ask(9)
    for path in (tmp_path / "one").glob("*-scores-000+*.npy"):
        damage(path)
    before = files(tmp_path / "one")
    assert torch.equal(ask(9), second)
    assert files(tmp_path / "one") == before  # found, not made again in the place of the first
    assert torch.equal(ask(0), ask(0, "other"))
    assert torch.equal(ask(3), first)


def test_scores_are_memory_maps_that_outlive_the_call(case: Case, tmp_path: Path) -> None:
    found = stored(case, tmp_path)
    copied = found.clone()
    found += 1  # copy on write: the file stays as it is
    assert torch.equal(stored(case, tmp_path), copied)


def other_model(case: Case) -> dict[str, Any]:
    torch.nn.init.normal_(case.model[0].weight)
    return {}


def scaled_loss(factor: float) -> Callable[..., torch.Tensor]:
    return lambda output, target: factor * LOSS(output, target)


OTHERS: dict[str, tuple[Callable[[Case], dict[str, Any]], str]] = {
    "model": (other_model, "values of the parameters"),
    "groups": (lambda case: {"groups": labels(case, 8)}, "groups = '9 groups"),
    "loss": (lambda case: {"loss_fn": nn.CrossEntropyLoss(label_smoothing=0.1)}, "label_smoothing"),
    "loss that looks alike": (lambda case: {"loss_fn": scaled_loss(2)}, "made with loss"),
    "data": (lambda case: {"data": (case.x + 1, case.y)}, "made with data"),
    "layers": (lambda case: {"parameters": ["0"]}, "parameters"),
    "strategy": (lambda case: {"strategy": "segmented"}, "strategy"),
    "batch size": (lambda case: {"batch_size": 3}, "batch_size"),
    "tag": (lambda case: {"tag": "v2"}, "tag"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_inputs_are_refused_with_the_difference_named(case: Case, tmp_path: Path, what: str) -> None:
    same = {
        "model": case.model, "data": case.data, "groups": labels(case), "property": asked(case, "property"),
        "loss_fn": scaled_loss(1) if "alike" in what else LOSS, "save_dir": tmp_path, "batch_size": 2,
        "method": "tracin",
    }  # fmt: skip
    attribute(**same)
    before = files(tmp_path)
    change, named = OTHERS[what]
    with pytest.raises(StoreMismatch, match=named):
        attribute(**same | change(case))
    assert files(tmp_path) == before


def test_a_group_that_is_not_finite_is_named_as_the_user_knows_it(case: Case, tmp_path: Path) -> None:
    case.x[17] = float("nan")
    groups = Groups([f"source {j}" for j in labels(case)])
    with pytest.raises(ValueError, match=rf"1 of 9 groups .*'source {17 * 7 % 9}' \(training points \[8, 17\]\)"):
        attribute(
            case.model,
            LOSS,
            case.data,
            groups,
            asked(case, "property"),
            save_dir=tmp_path,
            batch_size=2,
            method="tracin",
        )


def test_a_stream_is_one_block(case: Case, tmp_path: Path) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            yield from zip(case.x, case.y, strict=True)

    found = stored(case, tmp_path, data=Stream())
    assert (
        relative_error(
            found, attribute(case.model, LOSS, case.data, labels(case), asked(case, "property"), method="tracin")
        )
        < 1e-12
    )
    assert torch.equal(stored(case, tmp_path, data=Stream()), found)


def test_a_tag_needs_a_folder(case: Case) -> None:
    with pytest.raises(ValueError, match="tag='a' is given without save_dir"):
        attribute(case.model, LOSS, case.data, labels(case), asked(case, "property"), tag="a")


def wide_case(dtype: torch.dtype) -> tuple[nn.Module, Any, np.ndarray]:
    """Model, data and groups of half precision, with scores beyond 65,504, the largest float16."""
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(600, size, generator=draw).mul(5).to(dtype) for size in (50, 1))
    model = nn.Linear(50, 1)
    nn.init.zeros_(model.weight)
    return model.to(dtype), (x, y), np.arange(600) // 60


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scores_of_half_precision_are_float32_in_a_folder_too(tmp_path: Path, dtype: torch.dtype) -> None:
    model, data, groups = wide_case(dtype)
    goal = properties.mean_loss((data[0][:9], data[1][:9]), nn.MSELoss())
    given = (model, nn.MSELoss(), data, groups, goal)
    plain = attribute(*given, method="tracin")
    for budget in (100, 2**20):
        found = attribute(*given, method="tracin", save_dir=tmp_path / str(budget), memory_budget=budget)
        assert found.dtype == plain.dtype == torch.float32
        assert found.scores.abs().max() > torch.finfo(torch.float16).max
        assert relative_error(found, plain) < 1e-2
    for budget in (100, 2**20):
        for dim in (None, 40):
            provider = GroupGradients(model, nn.MSELoss(), data, groups, memory_budget=budget)
            stored = GradientStore(provider, tmp_path / f"gradients {budget} {dim}", dim).scores(goal)
            assert stored.dtype == torch.float32
            assert stored.isfinite().all()
            assert dim is not None or relative_error(stored, plain) < 1e-2


def test_scores_under_autocast_are_other_scores(case: Case, tmp_path: Path) -> None:
    model, data = case.model.float(), (case.x.float(), case.y)
    goal = properties.point_losses((data[0][:6], data[1][:6]), LOSS)
    given = (model, LOSS, data, labels(case), goal)

    def ask() -> torch.Tensor:
        return attribute(*given, save_dir=tmp_path, method="tracin").scores.clone()

    first = ask()
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(StoreMismatch, match=r"made with autocast = None, now it is 'torch\.bfloat16'"),
    ):
        ask()
    assert torch.equal(ask(), first)


def test_numbers_may_be_numpys(case: Case, tmp_path: Path) -> None:
    given = (case.model, LOSS, case.data, labels(case), asked(case, "property"))
    found = attribute(*given, save_dir=tmp_path / "a", batch_size=np.int64(2), method="tracin").scores.clone()
    assert torch.equal(attribute(*given, save_dir=tmp_path / "a", batch_size=2, method="tracin"), found)
    provider = GroupGradients(case.model, LOSS, case.data, labels(case))
    for number in (np.int64, int):
        assert GradientStore(provider, tmp_path / "b", number(4), seed=number(1)).dim == 4
    with pytest.raises(StoreMismatch, match="seed = 1, now it is 2"):
        GradientStore(provider, tmp_path / "b", np.int64(4), seed=np.int64(2))


# gradients


def test_stored_gradients_answer_new_questions_without_the_training_data(case: Case, tmp_path: Path) -> None:
    data = Counted(case)
    provider = GroupGradients(case.model, LOSS, data, labels(case), batch_size=2)
    gradients = GradientStore(provider, tmp_path)
    data.fetched = 0
    test = (case.x[:4] + 1, case.y[:4])
    for goal in (properties.mean_loss(test, LOSS), properties.soft_f1(test), properties.point_losses(test, LOSS)):
        found, fetched = gradients.scores(goal), data.fetched
        assert fetched == 0
        assert (
            relative_error(found, attribute(case.model, LOSS, case.data, labels(case), goal, method="tracin")) < 1e-12
        )
    points = PointGradients(as_example_loss(LOSS), IndexedData(test))
    assert relative_error(gradients.scores(points), provider.scores(points)) < 1e-12
    directions = torch.randn(2, provider.p, dtype=torch.float64)
    assert relative_error(gradients.scores(directions), provider.scores(directions)) < 1e-12


def test_projected_gradients_approximate_and_are_smaller(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(400, 30), torch.randint(0, CLASSES, (400,))
    model = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, CLASSES))
    provider = GroupGradients(model, LOSS, (x, y), np.arange(400) // 4)
    goal = properties.point_losses((x[:20], y[:20]), LOSS)
    exact = attribute(model, LOSS, (x, y), np.arange(400) // 4, goal, method="tracin")
    errors = []
    for dim in (64, 1024):
        store = GradientStore(provider, tmp_path / str(dim), dim)
        assert store.dim == dim
        assert sum(rows.numel() for _, rows in store.blocks()) == 100 * dim
        scale = provider.rows().norm(dim=1) * GroupGradients(model, LOSS, (x[:20], y[:20])).rows().norm(dim=1)[:, None]
        errors.append(float(((store.scores(goal) - exact) / scale).square().mean() ** 0.5))
        assert errors[-1] < (2 / dim) ** 0.5
    assert errors[1] < errors[0] / 2


def test_gradients_of_another_model_or_projection_are_refused(case: Case, tmp_path: Path) -> None:
    provider = GroupGradients(case.model, LOSS, case.data, labels(case), batch_size=2)
    gradients = GradientStore(provider, tmp_path, 8)
    with pytest.raises(StoreMismatch, match="projection_dim = 8, now it is 9"):
        GradientStore(provider, tmp_path, 9)
    with pytest.raises(StoreMismatch, match="seed = 0, now it is 1"):
        GradientStore(provider, tmp_path, 8, seed=1)
    with pytest.raises(ValueError, match="projection_dim=0"):
        GradientStore(provider, tmp_path, 0)
    other_model(case)
    with pytest.raises(ValueError, match="parameters are not those of the stored gradients"):
        gradients.scores(asked(case, "property"))
    with pytest.raises(StoreMismatch, match="values of the parameters"):
        GradientStore(provider, tmp_path, 8)


def test_scores_of_stored_gradients_larger_than_the_budget_are_memory_maps(case: Case, tmp_path: Path) -> None:
    small = GroupGradients(case.model, LOSS, case.data, labels(case), batch_size=2, memory_budget=300)
    goal = asked(case, "points")
    gradients = GradientStore(small, tmp_path)
    found = gradients.scores(goal)
    assert relative_error(found, attribute(case.model, LOSS, case.data, labels(case), goal, method="tracin")) < 1e-12
    assert len(list(tmp_path.glob("scores-*.npy"))) == 1
    assert torch.equal(gradients.scores(goal), found)


@pytest.mark.parametrize("budget", [100, 2**20])
def test_stored_gradients_of_another_are_not_read(case: Case, tmp_path: Path, budget: int) -> None:
    folder, goal = tmp_path / "store", asked(case, "points")

    def provider(groups: np.ndarray) -> GroupGradients:
        return GroupGradients(case.model, LOSS, case.data, groups, batch_size=2, memory_budget=budget)

    first = GradientStore(provider(labels(case)), folder)
    found = first.scores(goal).clone()
    shutil.rmtree(folder)
    with pytest.raises(StoreMismatch, match="no longer holds the gradients of this store"):
        first.scores(goal)
    shutil.rmtree(folder, ignore_errors=True)
    GradientStore(provider(labels(case)[::-1].copy()), folder)
    with pytest.raises(StoreMismatch, match=r"no longer holds the gradients of this store|was made with groups"):
        first.scores(goal)
    shutil.rmtree(folder)
    GradientStore(provider(labels(case)), folder)
    assert torch.equal(first.scores(goal), found)


@pytest.mark.parametrize("budget", [100, 2**20])
def test_stored_gradients_are_found_from_another_folder_and_under_autocast(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    monkeypatch.chdir(tmp_path)
    provider = GroupGradients(case.model, LOSS, case.data, labels(case), memory_budget=budget)
    store, directions = GradientStore(provider, "store"), torch.randn(3, provider.p, dtype=torch.float64)
    found = store.scores(directions).clone()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(store.scores(directions), found)
    assert not os.listdir()


def test_every_array_says_what_it_was_made_with(case: Case, tmp_path: Path) -> None:
    stored(case, tmp_path)
    found = read_made_with(min(tmp_path.glob("checkpoint-000-scores-000+*.npy")))
    assert found["fingerprint"]["groups"].startswith("9 groups of 23 points")
    assert found["fingerprint"]["loss"].startswith("CrossEntropyLoss")
    assert found["part"]["asked for"].startswith("MeanProperty")
