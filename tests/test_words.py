"""One language for users: a word of `attribute` reaches an entry point, or is refused by name, with what to pass."""

from __future__ import annotations

import inspect

import ggda_captum
import ggda_dattri
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ggda_ext import GroupGradients, WhatIf, attribute, find_label_issues
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.groups import Groups

WORDS = {"parameters", "strategy", "batch_size", "memory_budget", "save_dir", "tag", "show_progress"}
KEEPING = {"save_dir", "tag"}
CAPTUM = [getattr(ggda_captum, name) for name in ggda_captum.__all__ if name.startswith("TracInCP") or "Func" in name]
CAPTUM = [entry for entry in CAPTUM if hasattr(entry, "_asked")]
DATTRI = [getattr(ggda_dattri, name) for name in ggda_dattri.__all__]
TAKES = {
    attribute: WORDS,
    GroupGradients: WORDS - KEEPING,
    Groups.summary: WORDS - KEEPING,
    find_label_issues: {"parameters", "batch_size", "memory_budget", "show_progress"},
    WhatIf: {"parameters", "batch_size", "memory_budget"},
    leave_group_out: {"save_dir", "tag", "show_progress"},
}
"""What each entry point takes at least; it trains or scores what the other words do not apply to."""


@pytest.mark.parametrize("entry", TAKES, ids=lambda entry: entry.__qualname__)
def test_a_word_reaches_an_entry_point_or_is_refused_by_name(entry) -> None:
    known = set(inspect.signature(entry).parameters)
    assert TAKES[entry] <= known
    for word in WORDS - known:
        with pytest.raises(TypeError, match=word):
            entry(**{word: 1})


@pytest.mark.parametrize("entry", [*CAPTUM, *DATTRI], ids=lambda entry: entry.__name__)
def test_a_toolkit_that_has_another_word_says_which(entry) -> None:
    own = {"parameters": "layers=" if entry in CAPTUM else "layer_name="}
    own |= {"show_progress": "to influence"} if entry in CAPTUM else {}
    toolkit = next(base for base in entry.__mro__ if base.__module__.split(".")[0] in ("captum", "dattri"))
    for word, instead in own.items():
        if word in inspect.signature(toolkit).parameters:  # a word of its own
            continue
        with pytest.raises(TypeError, match=f"{entry.__name__} takes no {word}=: .*{instead}"):
            entry(**{word: 1})


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
