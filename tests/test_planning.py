"""Estimates: what is asked about is what is estimated, costs add up, and a calibration run is near the truth."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ggda_ext import GroupGradients, Groups, attribute, estimate, properties
from ggda_ext.estimation import Estimate

LOSS = nn.CrossEntropyLoss()


def provider(n: int = 4_000, **options: Any) -> GroupGradients:
    x, y = torch.randn(n, 20), torch.randint(0, 3, (n,))
    model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3))
    return GroupGradients(model, LOSS, (x, y), np.arange(n) // 8, batch_size=256, **options)


def test_what_is_asked_about_is_estimated() -> None:
    found = estimate(provider(), n=10**9, k=10**6, m=3, p=10**8, ranks=64, calibration_seconds=0.05)
    assert (found.points, found.groups, found.properties, found.parameters, found.ranks) == (10**9, 10**6, 3, 10**8, 64)
    assert found.score_bytes == 3 * 10**6 * 4
    assert found.group_bytes >= 10**9 * 4
    assert found.sent_bytes == pytest.approx(2 * 63 / 64 * found.score_bytes)
    work = found.points * found.seconds_per_point / 64
    assert found.seconds == pytest.approx(found.fixed_seconds + work + found.send_seconds)
    assert "n=1,000,000,000 points" in found.explain()
    assert "64 ranks" in found.explain()


def test_time_is_proportional_to_points_and_shared_by_ranks() -> None:
    base: dict[str, Any] = {
        "strategy": "directional", "parameters": 1, "groups": 1, "properties": 1, "fixed_seconds": 1.0,
        "seconds_per_point": 2.0, "sent_bytes": 0.0, "send_seconds": 0.5, "working_bytes": 1, "score_bytes": 2,
        "group_bytes": 3, "timed_points": 1,
    }  # fmt: skip
    assert Estimate(points=10, ranks=1, **base).seconds == 21.5
    assert Estimate(points=20, ranks=4, **base).seconds == 11.5
    assert Estimate(points=20, ranks=4, **base).memory_bytes == 6


class Slow(Dataset):
    """Points that take a millisecond each, by a clock that nothing else moves."""

    def __init__(self, n: int) -> None:
        self.x, self.y, self.fetched = torch.randn(n, 20), torch.randint(0, 3, (n,)), 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.fetched += 1
        return self.x[index], self.y[index]

    def clock(self) -> float:
        return self.fetched / 1000


@pytest.mark.parametrize("m", [1, 40])
def test_the_estimate_is_the_measured_time_where_time_is_that_of_the_points(m: int) -> None:
    data = Slow(4_000)
    model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3))
    given = GroupGradients(model, LOSS, data, np.arange(4_000) // 8, batch_size=64)
    found = estimate(given, m=m, clock=data.clock, calibration_seconds=0.5)
    assert found.strategy == given.plan(m).strategy
    assert found.timed_points < 4_000
    start = data.clock()
    given.scores(torch.randn(m, given.p))
    assert found.seconds == pytest.approx(data.clock() - start, rel=0.1)


def test_a_stream_is_estimated_from_its_first_points() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter([(torch.zeros(4), 0)] * 50)

    for data in (Stream(), DataLoader(Stream(), batch_size=3)):  # several batches of a loader are one calibration run
        given = GroupGradients(nn.Linear(4, 2), LOSS, data, np.arange(50) // 5, batch_size=4)
        assert estimate(given, n=10**6, k=10**3, calibration_seconds=0.01).seconds > 0


@pytest.mark.parametrize(
    ("options", "named"), [({"k": 10**9}, "k=1000000000 groups"), ({"ranks": 0}, "ranks=0"), ({"m": 0}, "m=0")]
)
def test_impossible_questions_are_refused(options: dict[str, int], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        estimate(provider(100), **options)


# groups that no one writes down


def test_groups_by_rule_are_groups() -> None:
    rule, labels = Groups.by_rule(1_000, 7, lambda indices: indices % 7), Groups(np.arange(1_000) % 7)
    assert rule == labels
    assert len(rule) == 7
    assert np.array_equal(Groups.by_rule(1_000, 7, lambda indices: indices % 7)[3], labels[3])
    given = provider(1_000)
    goal = properties.mean_loss((torch.randn(5, 20), torch.zeros(5, dtype=torch.long)), LOSS)
    unseen = Groups.by_rule(1_000, 7, lambda indices: indices % 7)
    found = attribute(given.model, LOSS, given.data, unseen, goal, method="tracin")
    torch.testing.assert_close(found, attribute(given.model, LOSS, given.data, labels, goal, method="tracin"))
    assert unseen._labels is None  # one property needs the labels of a batch at a time only


@pytest.mark.parametrize(
    ("k", "rule", "named"),
    [
        (3, lambda indices: indices % 4, "point 3 the group id 3: give 0 to 2"),
        (3, lambda indices: indices % 3 - 1, "point 0 the group id -1"),
        (4, lambda indices: indices % 3, r"1 of 4 groups are empty, first 3"),
    ],
)
def test_a_rule_that_is_no_partition_is_refused(k: int, rule: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Groups.by_rule(10, k, rule)


def test_many_directions_are_read_for_many_groups_at_once_within_the_budget_and_the_users_batch():
    model, data = nn.Linear(4, 2), (torch.randn(4_000, 4), torch.zeros(4_000, dtype=torch.long))

    def batches(**options):
        provider = GroupGradients(model, LOSS, data, np.arange(4_000) // 8, strategy="segmented", **options)
        request = provider._request(provider.plan(100))
        return request.batch_size, request.of_groups(100).batch_size, request.room

    usual, larger, room = batches(memory_budget=2**14)
    assert usual < larger <= room
    assert batches(batch_size=64)[:2] == (64, 64)


def test_memory_that_a_module_returns_as_it_was_given_is_counted_once():
    def batch_size(*layers):
        model = nn.Sequential(nn.Linear(4, 64), *layers, nn.Linear(64, 2))
        data = torch.randn(4_000, 4), torch.zeros(4_000, dtype=torch.long)
        return GroupGradients(model, LOSS, data, np.arange(4_000) // 8, memory_budget=2**19).batch_size

    assert batch_size(nn.Dropout().eval(), nn.ReLU(inplace=True)) == batch_size() > batch_size(nn.ReLU())
