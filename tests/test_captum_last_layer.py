"""Where only the last layer counts, it stands for the model: same scores, each point run once, only where it may."""

from __future__ import annotations

from typing import Any

import ggda_captum
import pytest
import torch
from captum.influence import NaiveInfluenceFunction, TracInCPFast
from ggda_captum import last_layer
from ggda_captum.arguments import points_of
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ggda_ext import Groups, properties

N, M = 30, 4
GROUPS = Groups(torch.arange(N) % 7)


class Counted(nn.Module):
    """A body that counts the examples it is given, not in itself: a model that changes is looked at anew."""

    examples = 0

    def __init__(self, mixes: bool = False) -> None:
        super().__init__()
        self.inner, self.mixes = nn.Linear(5, 6), mixes

    def forward(self, x: Tensor) -> Tensor:
        Counted.examples += len(x)
        out = torch.tanh(self.inner(x))
        return out - out.mean(0) if self.mixes else out


def model_of(body: nn.Module, *after: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(body, nn.Dropout(0.3), nn.Linear(6, 3), *after).double().eval()


def data() -> tuple[TensorDataset, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x, y = torch.randn(N + M, 5).double(), torch.arange(N + M) % 3
    return TensorDataset(x[:N], y[:N]), (x[N:], y[N:])


def load(model: nn.Module, state: Any) -> float:
    model.load_state_dict(state)
    return 0.5


def made(toolkit: Any, name: str, model: nn.Module, **options: Any) -> Any:
    train, _ = data()
    loss = nn.CrossEntropyLoss(reduction="sum")
    if name == "TracInCPFast":
        return toolkit.TracInCPFast(model, model[2], train, [model.state_dict()], load, loss_fn=loss, **options)
    return toolkit.NaiveInfluenceFunction(
        model, train, model.state_dict(), load, layers=["2"], loss_fn=loss, sample_wise_grads_per_batch=True,
        batch_size=8, **options,
    )  # fmt: skip


def features(model: nn.Module, test: tuple[Tensor, Tensor]) -> last_layer.Features | None:
    with torch.no_grad(), last_layer.LastLayerInputs(model, model[2]) as seeing:
        return last_layer.features(seeing, points_of(test))


@pytest.mark.parametrize("name", ["TracInCPFast", "NaiveInfluenceFunction"])
def test_the_last_layer_gives_the_scores_of_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, test = data()
    model = model_of(Counted())
    goal = properties.mean_loss(test, nn.CrossEntropyLoss())
    short = made(ggda_captum, name, model, groups=GROUPS)
    scores, of_property, of_itself = short.influence(test), short.influence(property=goal), short.self_influence()
    long = made(ggda_captum, name, model, groups=GROUPS, strategy="segmented")  # asked for by name: the whole model
    torch.testing.assert_close(scores, long.influence(test), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(of_property, long.influence(property=goal), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(of_itself, long.self_influence(), rtol=1e-10, atol=1e-12)
    upstream = {"TracInCPFast": TracInCPFast, "NaiveInfluenceFunction": NaiveInfluenceFunction}
    theirs = made(type("captum", (), upstream), name, model).influence(test)
    torch.testing.assert_close(scores, GROUPS.sum(theirs, 1), rtol=1e-10, atol=1e-12)


def test_every_point_runs_once() -> None:
    _, test = data()
    influence = made(ggda_captum, "TracInCPFast", model_of(Counted()), groups=GROUPS)
    Counted.examples = 0
    influence.influence(test)
    assert Counted.examples == N + M + 2  # the first batch's first and last example alone, to compare


def test_what_was_seen_of_a_model_and_its_data_is_known_to_the_next_call() -> None:
    train, test = data()
    model, loss = model_of(Counted()), nn.CrossEntropyLoss(reduction="sum")

    def scores(train: TensorDataset) -> Tensor:
        Counted.examples = 0
        options = {"loss_fn": loss, "groups": GROUPS}
        return ggda_captum.TracInCPFast(model, model[2], train, [model.state_dict()], load, **options).influence(test)

    first = scores(train)
    torch.testing.assert_close(scores(train), first)
    assert Counted.examples == N + M  # none of them alone
    scores(TensorDataset(*train.tensors))
    assert Counted.examples == N + M + 2  # other data is looked at
    hook = model[0].register_forward_hook(lambda module, args, output: output - output.mean(0))
    with pytest.raises(ValueError, match="batch"):
        scores(train)
    hook.remove()
    model[0].mixes = True
    with pytest.raises(ValueError, match="batch"):
        scores(train)


def test_a_model_that_goes_on_after_the_layer_is_asked_as_a_whole() -> None:
    _, test = data()
    model = model_of(Counted(), nn.Softmax(1))
    assert features(model, test) is None
    scores = made(ggda_captum, "TracInCPFast", model, groups=GROUPS).influence(test)
    theirs = made(type("captum", (), {"TracInCPFast": TracInCPFast}), "TracInCPFast", model).influence(test)
    torch.testing.assert_close(scores, GROUPS.sum(theirs, 1), rtol=1e-10, atol=1e-12)


def test_examples_that_mix_are_seen_and_refused() -> None:
    _, test = data()
    model = model_of(Counted(mixes=True))
    assert features(model, test) is None
    with pytest.raises(ValueError, match="batch"):
        made(ggda_captum, "TracInCPFast", model, groups=GROUPS).influence(test)


def test_a_shared_weight_has_no_layer_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = model[1].weight
    assert last_layer.owner_of([model[1].weight], model) is None
    assert last_layer.owner_of([model[1].bias], model) is model[1]
    assert last_layer.owner_of(list(model.parameters()), model) is None
    assert last_layer.owner_of(list(model[0].parameters()), model[0]) is None


def test_too_many_points_for_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, test = data()
    model = model_of(Counted())
    monkeypatch.setattr(last_layer, "MOST_BYTES", 100)
    assert features(model, test) is None
    few = made(ggda_captum, "TracInCPFast", model, groups=GROUPS).influence(test)
    monkeypatch.undo()
    torch.testing.assert_close(few, made(ggda_captum, "TracInCPFast", model, groups=GROUPS).influence(test))
