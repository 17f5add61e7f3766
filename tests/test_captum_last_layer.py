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
from torch.nn.functional import linear, relu_
from torch.utils.data import TensorDataset

from ggda_ext import Groups, properties
from ggda_ext.gradients.proof.findings import Compared
from tests.captum_cases import CLASSES, LAST_LAYER, UNEVEN, Net, captums, ours, problem, relative_error, score
from tests.unusual_rare import FullExperts

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


def made(toolkit: Any, name: str, model: nn.Module, train: TensorDataset | None = None, **options: Any) -> Any:
    train = train or data()[0]
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
    assert Counted.examples == N + M + 8  # none of them alone, and eight of the large batch in a small one
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


class Divided(Net):
    """Overwrites the output of the last layer."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out /= 0.1
        return out


class Positive(Net):
    """Overwrites the output of the last layer by a function that is not linear."""

    def forward(self, x: Tensor) -> Tensor:
        return relu_(super().forward(x))


class Residual(Net):
    """Adds its input to the output of the last layer, in place."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out += x[:, :3]
        return out


class Tied(Net):
    """Uses the weight of the last layer before that layer, too."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(linear(self.first(x).tanh(), self.last.weight.t()).tanh())


class HookBefore(Net):
    """Has a hook that changes the input of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_pre_hook(lambda module, args: (2 * args[0] + 1,))


class HookAfter(Net):
    """Has a hook that changes the output of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.last.register_forward_hook(lambda module, args, output: 3 * output.tanh())


class Halved(Net):
    """Runs in another precision than its weights have."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("net", [Divided, Positive, Residual, Tied, HookBefore, HookAfter])
@pytest.mark.parametrize("name", CLASSES)
def test_a_last_layer_that_is_not_the_whole_rest_gives_captums_scores(name: str, net: type[Net]) -> None:
    given = problem(net=net)
    options: dict[str, Any] = {"layers": ["last"], "reduction": "sum" if name in LAST_LAYER else "none"}
    torch.manual_seed(2)  # Arnoldi iterations begin at random
    theirs = score(captums(name, given, **options), given.test)
    expected = torch.stack([theirs[:, members].sum(1) for members in UNEVEN], 1)
    torch.manual_seed(2)
    influence = ours(name, given, groups=UNEVEN, **options)
    assert relative_error(score(influence, given.test), expected) < 1e-9
    goal = properties.mean_loss(given.test, nn.CrossEntropyLoss())
    of_goal = score(influence, property=goal)
    if name not in LAST_LAYER:  # these have their own idea of a gradient, which a property does not share
        assert relative_error(of_goal, expected.mean(0, keepdim=True)) < 1e-9


@pytest.mark.parametrize("name", ["TracInCP", "TracInCPFast"])
def test_a_last_layer_in_another_precision_is_asked_as_a_part_of_the_model(name: str) -> None:
    given = problem(torch.float32, Halved)
    options: dict[str, Any] = {"layers": ["last"], "reduction": "sum" if name in LAST_LAYER else "none"}
    theirs = score(captums(name, given, **options), given.test).float()
    expected = torch.stack([theirs[:, members].sum(1) for members in UNEVEN], 1)
    assert relative_error(score(ours(name, given, groups=UNEVEN, **options), given.test), expected) < 0.05


def test_examples_that_mix_are_seen_and_refused() -> None:
    _, test = data()
    model = model_of(Counted(mixes=True))
    assert features(model, test) is None
    with pytest.raises(ValueError, match="batch"):
        made(ggda_captum, "TracInCPFast", model, groups=GROUPS).influence(test)


@pytest.mark.parametrize("name", ["TracInCPFast", "NaiveInfluenceFunction"])
@pytest.mark.parametrize("known", [False, True])
def test_examples_that_mix_in_large_batches_only_are_seen_there(name: str, known: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(FullExperts(), nn.Identity(), nn.Linear(3, 3)).double().eval()
    model[0].ROOM = 20
    x, y = torch.randn(60, 6).double(), torch.arange(60) % 3
    if known:
        with torch.no_grad(), last_layer.LastLayerInputs(model, model[2], (4096, Compared())) as seeing:
            assert last_layer.features(seeing, points_of((x[:30], y[:30]))) is not None
            assert last_layer.features(seeing, points_of((x, y))) is None
    assert features(model, (x[:30], y[:30])) is not None
    assert features(model, (x, y)) is None
    train, groups = TensorDataset(x, y), Groups(torch.arange(60) % 5)
    influence = made(ggda_captum, name, model, train, groups=groups)
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        influence.influence((x[:3], y[:3]))


def test_a_shared_weight_has_no_layer_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].weight = model[1].weight
    assert last_layer.owner_of([model[1].weight], model) is None
    assert last_layer.owner_of([model[1].bias], model) is model[1]
    assert last_layer.owner_of(list(model.parameters()), model) is None
    assert last_layer.owner_of(list(model[0].parameters()), model[0]) is None


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_a_layer_with_hooks_is_not_run_alone(kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hook = getattr(model[1], f"register_{kind}_hook")(lambda *given: None)
    assert last_layer.owner_of([model[1].weight], model) is None
    hook.remove()
    assert last_layer.owner_of([model[1].weight], model) is model[1]


def test_too_many_points_for_memory_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, test = data()
    model = model_of(Counted())
    monkeypatch.setattr(last_layer, "MOST_BYTES", 100)
    assert features(model, test) is None
    few = made(ggda_captum, "TracInCPFast", model, groups=GROUPS).influence(test)
    monkeypatch.undo()
    torch.testing.assert_close(few, made(ggda_captum, "TracInCPFast", model, groups=GROUPS).influence(test))
