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
