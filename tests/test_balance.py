"""Groups whose scores do not add up are told from those whose scores do, by the classes they hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ggda_ext import Groups, attribute, properties
from ggda_ext.methods.cautions import ClassCounts, why_not_additive


def test_the_shift_is_that_of_random_halves():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 600)
    groups = np.where(draw.random(600) < 0.5, labels * 4, 0) + draw.integers(0, 4, 600)
    groups = np.unique(groups, return_inverse=True)[1]
    k = groups.max() + 1
    shares = []
    for _ in range(2000):
        kept = draw.random(k) < 0.5
        if kept.any():
            inside = kept[groups]
            shares.append([(labels[inside] == c).mean() for c in range(3)])
    assert ClassCounts.of(Groups.of(groups), labels).shift()[0] == pytest.approx(np.std(shares, 0).max(), rel=0.35)


@pytest.mark.parametrize("only_class", [False, True])
def test_points_in_no_group_stay_when_groups_go(only_class):
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 600)
    outside = draw.random(600) < 0.5
    outside |= (labels != 0) & only_class
    groups = Groups(np.where(outside, -1, labels * 4 + draw.integers(0, 4, 600)), rest="drop")
    moved = []
    for _ in range(2000):
        stays = outside | (draw.random(len(groups)) < 0.5)[groups.labels]
        moved.append(np.bincount(labels[stays], minlength=3) / stays.sum() - np.bincount(labels) / 600)
    table = ClassCounts.of(groups, labels)
    assert table.shift()[0] == pytest.approx(np.sqrt(np.square(moved).mean(0)).max(), rel=0.2)
    shares = [max((labels[members] == c).sum() / (labels == c).sum() for c in range(3)) for members in groups]
    np.testing.assert_allclose(table.largest_share(), shares)


def test_tiny_groups_are_not_large_because_other_points_are_in_no_group():
    torch.manual_seed(0)
    x = torch.randn(2000, 4)
    y = (x[:, 0] > 0).long()
    loss, model = nn.CrossEntropyLoss(), nn.Linear(4, 2)
    members = {"p": np.flatnonzero(y == 1)[:50], "q": np.flatnonzero(y == 0)[:50]}
    groups = Groups(members, 2000, rest="drop")
    assert groups.summary(targets=y).untrustworthy == {}
    found = attribute(model, loss, (x, y), groups, properties.mean_loss((x, y), loss))
    assert dict(found.warnings) == {}


def test_random_groups_add_up_and_classes_do_not():
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 2, 4000)
    assert why_not_additive(draw.integers(0, 20, 4000), labels) is None
    assert "WhatIf" in str(why_not_additive(labels * 10 + draw.integers(0, 10, 4000), labels))
    assert why_not_additive(draw.integers(0, 20, 4000), draw.random(4000)) is None  # a regression has no classes


def test_wrong_numbers_of_labels_are_named():
    with pytest.raises(ValueError, match="labels has 3 entries for 4 training points"):
        ClassCounts.of(Groups([0, 0, 1, 1]), [0, 1, 0])


def test_a_result_says_that_scores_of_coherent_groups_do_not_add_up():
    torch.manual_seed(0)
    x, y = torch.randn(4000, 3), torch.arange(4000) % 2
    goal = properties.mean_loss((x[:50], y[:50]), nn.CrossEntropyLoss())
    mixed, coherent = torch.arange(4000) // 200, y * 10 + torch.arange(4000) // 400
    told = [
        any(
            "Ask ggda_ext.WhatIf" in note
            for note in attribute(nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), g, goal).notes
        )
        for g in (mixed, coherent)
    ]
    assert told == [False, True]
