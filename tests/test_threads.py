"""Several threads on one model: each gets the right scores, and the model is as it was."""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ggda_ext import GroupGradients, WhatIf, attribute, properties
from ggda_ext.model import only_thread

LOSS = nn.CrossEntropyLoss()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def data(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(60, 6, generator=generator), torch.randint(0, 3, (60,), generator=generator)


def ask_attribute(net: nn.Module, seed: int) -> torch.Tensor:
    return attribute(net, LOSS, data(), torch.arange(60) % 7, properties.mean_loss(data(seed), LOSS), method="tracin")


def ask_at_checkpoints(net: nn.Module, seed: int) -> torch.Tensor:
    states = [{name: scale * value for name, value in model().state_dict().items()} for scale in (0.5, 1.0 + seed)]
    goal = properties.point_losses(data(seed), LOSS)
    return attribute(net, LOSS, data(), torch.arange(60) % 7, goal, checkpoints=states, method="tracin")


def ask_part_of_the_parameters(net: nn.Module, seed: int) -> torch.Tensor:
    goal = properties.soft_f1(data(seed))
    return attribute(
        net, LOSS, data(), torch.arange(60) % 7, goal, parameters=["2"], strategy="backward", method="tracin"
    )


def ask_rows(net: nn.Module, seed: int) -> torch.Tensor:
    provider = GroupGradients(net, LOSS, data(seed), torch.arange(60) % 7)
    return torch.cat([rows.clone() for _, rows in provider.blocks()])


def ask_what_if(net: nn.Module, seed: int) -> torch.Tensor:
    what_if = WhatIf(net, LOSS, data(), torch.arange(60) % 7, weight_decay=0.1, rank=8)
    goals = properties.mean_loss(data(seed), LOSS), lambda model: model(data(seed)[0]).square().mean()
    return torch.stack([what_if.without([1, 2]).change(goal) for goal in goals])


def ask_in_a_folder(net: nn.Module, seed: int) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder:
        goal = properties.point_losses(data(seed), LOSS)
        found = attribute(net, LOSS, data(), torch.arange(60) % 7, goal, method="tracin", save_dir=Path(folder) / "a")
        return found.scores.clone()


@pytest.mark.parametrize(
    "others",
    [
        [ask_attribute],
        [ask_at_checkpoints, ask_part_of_the_parameters, ask_rows],
        [ask_what_if, ask_at_checkpoints, ask_in_a_folder],
    ],
)
def test_threads_on_one_model_get_the_right_scores_and_leave_it_as_it_was(
    others: list[Callable[[nn.Module, int], torch.Tensor]],
) -> None:
    net = model()
    net[0].bias.requires_grad_(False)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    questions: list[Any] = [(ask, seed) for seed in range(10) for ask in (ask_attribute, *others)]
    alone = [ask(net, seed) for ask, seed in questions]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda question: question[0](net, question[1]), questions))
    for one, expected in zip(found, alone, strict=True):
        torch.testing.assert_close(one, expected)
    assert {name: value.requires_grad for name, value in net.named_parameters()} == {
        "0.weight": True, "0.bias": False, "2.weight": True, "2.bias": True
    }  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_thread_that_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggda_ext.model._PATIENCE", 0.01)
    net, said = model(), threading.Event()
    monkeypatch.setattr(logging.getLogger("ggda_ext.model"), "warning", lambda *text: said.set())
    with ThreadPoolExecutor(1) as pool:
        with only_thread(net):
            waiting = pool.submit(ask_attribute, net, 1)
            assert said.wait(30)
            assert not waiting.done()
        assert waiting.result(30).shape == (1, 7)


def test_other_models_do_not_wait() -> None:
    with ThreadPoolExecutor(1) as pool, only_thread(model()):
        assert pool.submit(ask_attribute, model(), 1).result(30).shape == (1, 7)


def test_a_generator_that_is_left_in_the_middle_gives_the_model_back() -> None:
    net = model()
    rows = GroupGradients(net, LOSS, data(), torch.arange(60) % 7).blocks(1)
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(ask_attribute, net, 1).result(30).shape == (1, 7)
