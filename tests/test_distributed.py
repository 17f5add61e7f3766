"""Laws of ranks: every rank ends with the same bits, and with what one process gives, up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_script
import numpy as np
import pytest
import torch
from children import ranks

from ggda_ext import Groups
from ggda_ext.sharing import alone, my_share, rank, world_size

RANKS = (2, 3)


@pytest.fixture(scope="module")
def by_one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process finds."""
    return distributed_script.everything(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what the ranks found: started with the most of them."""
    folder = tmp_path_factory.mktemp("ranks")
    ranks(max(RANKS), lambda: distributed_script.main(folder))
    return folder


@pytest.fixture(scope="module", params=RANKS, ids=lambda count: f"{count} ranks")
def by_ranks(request: pytest.FixtureRequest, started: Path) -> list[dict[str, Any]]:
    """What every rank finds."""
    count = request.param
    found = [torch.load(started / f"{j}-of-{count}.pt", weights_only=True) for j in range(count)]
    return [result | {"files": sorted(path.name for path in (started / str(count)).iterdir())} for result in found]


def flat(value: Any) -> list[Any]:
    """Tensors, numbers and texts in a result, in order."""
    if isinstance(value, dict):
        return [part for key in value for part in flat(value[key])]
    if isinstance(value, tuple | list):
        return [part for item in value for part in flat(item)]
    return [torch.from_numpy(value) if isinstance(value, np.ndarray) else value]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def close(found: Any, expected: Any) -> bool:
    """Up to rounding of sums."""
    if not isinstance(expected, torch.Tensor):
        return found == expected
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    tolerance = 1e-10 if expected.dtype == torch.float64 else 2e-4
    size = float(expected.double().abs().max()) if expected.numel() else 0.0
    return bool(((found.double() - expected.double()).abs() <= tolerance * size).all())


def alike(test: Callable[[Any, Any], bool], found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(map(test, found, expected))


PARTS = (
    "scores:", "scores of test points:", "rows:", "squared norms:", "all blocks:", "gathered blocks:", "one point:",
    "stream:", "property:", "attribute:", "Hessian:", "conjugate gradients:", "LiSSA:", "Fisher", "features:",
    "groups:", "summary", "gather:", "sum", "Captum:", "dattri:", "TRAK:", "retraining:", "what if:", "wrapped:",
    "after errors",
)  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_ranks_end_with_the_same_bits_and_with_what_one_process_gives(
    part: str, by_ranks: list[dict[str, Any]], by_one: dict[str, Any]
) -> None:
    names = [name for name in by_one if name.startswith(part)]
    assert names
    for name in names:
        first = flat(by_ranks[0][name])
        for other in by_ranks[1:]:
            assert alike(equal, flat(other[name]), first), f"{name}: ranks differ"
        assert alike(close, first, flat(by_one[name])), f"{name}: differs from one process"


def test_nothing_is_left_out(by_one: dict[str, Any]) -> None:
    assert [name for name in by_one if not name.startswith((*PARTS, "error:"))] == []


@pytest.mark.parametrize("kind", ["groups:", "wrapped: names"])
def test_groups_and_names_do_not_depend_on_the_number_of_ranks(
    kind: str, by_ranks: list[dict[str, Any]], by_one: dict[str, Any]
) -> None:
    for name in (name for name in by_one if name.startswith(kind)):
        assert alike(equal, flat(by_ranks[0][name]), flat(by_one[name])), name


def test_a_wrapped_model_has_the_scores_of_the_model_inside(by_ranks: list[dict[str, Any]]) -> None:
    found = by_ranks[0]
    assert torch.equal(found["wrapped: core"], found["wrapped: none"])
    assert torch.equal(found["wrapped: outer name"], found["wrapped: none"])
    assert found["wrapped: names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.mark.parametrize("name", ["not finite", "not finite rows", "sampler", "short stream", "LiSSA diverges"])
def test_errors_are_those_of_one_process_on_every_rank(
    name: str, by_ranks: list[dict[str, Any]], by_one: dict[str, Any]
) -> None:
    assert by_one[f"error: {name}"][0] != "nothing"
    for found in by_ranks:
        assert found[f"error: {name}"] == by_one[f"error: {name}"]


@pytest.mark.parametrize(
    ("name", "own", "others", "message"),
    [
        ("one rank fails", "KeyError", "LookupError", "only here"),
        ("test data not finite", "ValueError", "ValueError", "nan at test point 22"),
    ],
)
def test_one_rank_that_fails_ends_all_of_them(
    name: str, own: str, others: str, message: str, by_ranks: list[dict[str, Any]]
) -> None:
    *found, last = (result[f"error: {name}"] for result in by_ranks)
    assert last[0] == own
    assert message in last[1]
    for kind, text in found:
        assert kind == others
        assert f"rank {len(found)} failed" in text
        assert message in text


@pytest.mark.parametrize("name", ["groups", "parameters"])
def test_ranks_that_differ_are_refused(name: str, by_ranks: list[dict[str, Any]]) -> None:
    for found in by_ranks:
        kind, text = found[f"error: other {name}"]
        assert kind == "ValueError"
        assert text.startswith(f"the ranks differ in the {name}")


def test_trak_leaves_one_store_whatever_the_number_of_ranks(by_ranks: list[dict[str, Any]]) -> None:
    for fisher in ("batched", "exact", "paper"):
        ranks = [f"trak-{fisher}.rank{j}" for j in range(1, len(by_ranks))]
        assert [name for name in by_ranks[0]["files"] if name.startswith(f"trak-{fisher}")] == [
            f"trak-{fisher}", *ranks
        ]  # fmt: skip


def test_one_process_has_everything_to_do() -> None:
    assert (world_size(), rank(), list(my_share(3))) == (1, 0, [0, 1, 2])
    with alone():
        assert list(my_share(2)) == [0, 1]


def test_a_group_can_be_cut_where_a_share_ends() -> None:
    groups = Groups([0, 1, 1, 0, 2, 2, 2, 1])
    for low, high in [(0, 8), (1, 7), (2, 2), (3, 5), (7, 8)]:
        found = list(groups.batches(2, within=(low, high)))
        assert np.concatenate([batch.indices for batch in found] or [[]]).tolist() == groups.order[low:high].tolist()
        for batch in found:
            assert len(batch) <= 2
            for group_id, start, end in zip(batch.ids, batch.starts, batch.starts[1:], strict=False):
                assert set(groups.labels[batch.indices[start:end]]) == {group_id}
