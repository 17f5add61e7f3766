"""One language for users: a word of `attribute` reaches an entry point, or is refused by name, with what to pass."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import ggda_captum
import ggda_dattri
import pytest
import torch
from ggda_trak import FisherInfluence, TRAKer
from ggda_trak.options import GroupOptions
from ggda_transformers import GroupTracker, attribute_trainer
from torch import nn
from torch.utils.data import TensorDataset

from ggda_ext import GradientStore, GroupGradients, WhatIf, attribute, estimate, find_label_issues, properties
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.drop_in import DropIn
from ggda_ext.groups import Groups
from ggda_ext.words import WORDS

GROUP_OPTIONS = {field.name for field in fields(GroupOptions)}

KEEPING = {"save_dir", "tag"}
CAPTUM = [getattr(ggda_captum, name) for name in ggda_captum.__all__ if name.startswith("TracInCP") or "Func" in name]
CAPTUM = [entry for entry in CAPTUM if hasattr(entry, "_asked")]
DATTRI = [getattr(ggda_dattri, name) for name in ggda_dattri.__all__]
OWN = {
    attribute: set(WORDS),
    FisherInfluence: set(WORDS),
    TRAKer: set(WORDS),
    attribute_trainer: set(WORDS),
    GroupTracker: {"parameters"},
    Groups.summary: set(WORDS) - KEEPING,
    find_label_issues: set(WORDS) - KEEPING,
    WhatIf: set(WORDS) - KEEPING - {"strategy"},
    leave_group_out: {"save_dir", "tag", "show_progress"},
    GradientStore: KEEPING,
    estimate: set(),
}
"""What each entry point takes; the other words it refuses, and says why."""


def words_of(entry) -> set[str]:
    """The words that a call can pass, to our class or to the toolkit's below it."""
    kinds = entry.__mro__[:-1] if isinstance(entry, type) else [entry]
    return {word for kind in kinds for word in WORDS if word in inspect.signature(kind).parameters}


@pytest.mark.parametrize("entry", [*CAPTUM, *DATTRI, TRAKer], ids=lambda entry: entry.__qualname__)
def test_a_drop_in_shows_the_arguments_of_its_toolkit_and_then_its_own(entry) -> None:
    toolkit = next(base for base in entry.__mro__ if not base.__module__.startswith("ggda"))
    shown, theirs = inspect.signature(entry).parameters, inspect.signature(toolkit).parameters
    assert list(shown.values())[: len(theirs)] == list(theirs.values())
    own = [shown[name] for name in list(shown)[len(theirs) :]]
    assert {"groups", "strategy", "tag", "memory_budget"} <= {one.name for one in own}
    assert {one.kind for one in own} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("entry", [*OWN, *CAPTUM, *DATTRI], ids=lambda entry: entry.__qualname__)
def test_a_word_reaches_an_entry_point_or_is_refused_by_name_with_what_to_do(entry, word) -> None:
    if entry in OWN:
        assert (word in words_of(entry)) == (word in OWN[entry]) or entry is TRAKer
    if word not in words_of(entry) and not (entry is TRAKer and word in GROUP_OPTIONS):
        name = entry.__qualname__.split(".<")[0]
        with pytest.raises(TypeError, match=rf"^{re.escape(name)} takes no {word}=: .{{20,}}\.$"):
            entry(**{word: 1})


@pytest.mark.parametrize("word", sorted(KEEPING))
def test_gradients_alone_are_not_kept(word) -> None:
    assert set(WORDS) - words_of(GroupGradients) == KEEPING
    with pytest.raises(TypeError, match=word):
        GroupGradients(nn.Linear(2, 2), nn.CrossEntropyLoss(), (torch.zeros(2, 2), torch.zeros(2).long()), **{word: 1})


def test_what_if_shows_its_progress_when_asked_and_not_otherwise(capsys) -> None:
    x, y = torch.randn(20, 3), torch.arange(20) % 2
    for show in (True, False, None):
        WhatIf(nn.Linear(3, 2), nn.CrossEntropyLoss(), (x, y), y, weight_decay=0.1, show_progress=show)
        assert ("directions" in capsys.readouterr().err) == (show is True)


@pytest.mark.parametrize("strategy", ["segmented", "backward", "persample"])
def test_label_issues_are_the_same_under_every_strategy_that_forms_rows(strategy) -> None:
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), nn.CrossEntropyLoss()
    x, y = torch.randn(12, 3).double(), torch.arange(12) % 2
    found, expected = (
        find_label_issues(model, loss, (x, y), validation=(x[:4] + 0.1, y[:4]), strategy=by)
        for by in (strategy, "auto")
    )
    assert found.self_influence == pytest.approx(expected.self_influence, rel=1e-9)
    assert found.influence == pytest.approx(expected.influence, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "given", [{"strategy": "sideways"}, {"memory_budget": 0}, {"tag": "v1"}, {"save_dir": "there"}]
)
def test_a_wrong_value_is_refused_by_the_name_of_its_word(given) -> None:
    data, model = TensorDataset(torch.randn(4, 3), torch.zeros(4).long()), nn.Linear(3, 2)
    with pytest.raises(ValueError, match=next(iter(given))):
        ggda_captum.TracInCP(model, data, ["none"], lambda *_: 1.0, **given)


def test_memory_budget_reaches_the_provider_of_a_drop_in(monkeypatch) -> None:
    seen = []
    before = GroupGradients.__init__

    def watched(self, *args, **kwargs) -> None:
        seen.append(kwargs["memory_budget"])
        before(self, *args, **kwargs)

    monkeypatch.setattr(GroupGradients, "__init__", watched)
    torch.manual_seed(0)
    data, model = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2), nn.Linear(3, 2)
    tracin = ggda_captum.TracInCP(
        model, data, [model.state_dict()], lambda *_: 1.0, loss_fn=nn.CrossEntropyLoss(reduction="none"),
        groups=torch.arange(8) % 2, memory_budget=54_321,
    )  # fmt: skip
    tracin.influence(data[:2])
    assert set(seen) == {54_321}


def test_a_memory_budget_may_be_written_as_1e9(tmp_path) -> None:
    """As a float it means the same, in memory, in a folder, in a drop-in and in what-if."""
    torch.manual_seed(0)
    data, model, loss = (torch.randn(12, 3), torch.arange(12) % 2), nn.Linear(3, 2), nn.CrossEntropyLoss()
    groups, points = torch.arange(12) % 3, properties.point_losses((data[0][:5], data[1][:5]), loss)
    for where in ({}, {"save_dir": tmp_path / "kept"}):
        scores = [
            attribute(model, loss, data, groups, points, method="tracin", memory_budget=budget, **where).scores
            for budget in (64, 64.0)
        ]
        torch.testing.assert_close(*scores, rtol=0, atol=0)
    assert DropIn(groups, n=12, memory_budget=1e9).memory_budget == 10**9
    WhatIf(model, loss, data, groups, weight_decay=0.1, memory_budget=1e9)
    with pytest.raises(ValueError, match=r"memory_budget=0\.5"):
        WhatIf(model, loss, data, groups, weight_decay=0.1, memory_budget=0.5)
