"""Training: many models at once are the models trained one by one, with PyTorch's own Adam and schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import OneCycleLR

from ggda_ext.training import Recipe, TrainedModels, initial_model, train_many, train_one
from ggda_ext.training.denormals import flushes_denormals
from ggda_ext.training.many_models import layout_of
from ggda_ext.training.recipe import checked_subset
from ggda_ext.training.stacked import StackedLayers
from ggda_ext.training.vmapped import MappedModel

N, CLASSES = 90, 3
LOSS = nn.CrossEntropyLoss()
SEEDS = [5, 1, 2, 3, 5, 0]
SUBSETS = [None, range(40), range(16), torch.arange(N) % 3 != 0, np.arange(20, 89), [7, 3, 5]]
"""All points; 2.5, 1 and 3.75 batches of 16; a whole number of batches less one; fewer points than a batch."""


class Normed(nn.Module):
    """Layers that stacks of matrices do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.last(nn.functional.gelu(self.norm(self.first(x))))


class Scaled(nn.Module):
    """A model that is another function in training than in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * (2 if self.training else 1)


class ReadsValues(Scaled):
    """A model that reads values, in eval mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * (1 if self.training else float(self.last.bias.sum()))


class Unused(Scaled):
    """A model with a parameter that it does not use: Adam leaves it as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(2))


def reused_activation() -> nn.Module:
    tanh = nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), tanh, nn.Linear(8, 8), tanh, nn.Linear(8, CLASSES))


def reused_layer() -> nn.Module:
    middle = nn.Linear(8, 8)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), middle, nn.Tanh(), middle, nn.Linear(8, CLASSES))


def tied() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, CLASSES)
    )
    model[4].weight = model[2].weight
    return model


def small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def hooked(where: str) -> Callable[[], nn.Module]:
    """Models with a hook that changes what they compute."""

    def made() -> nn.Module:
        model = small()
        if where == "forward":
            model[0].register_forward_hook(lambda module, given, output: 3 * output)
        elif where == "before":
            model[2].register_forward_pre_hook(lambda module, given: (given[0] + 1,))
        elif where == "backward":
            model[2].register_full_backward_hook(lambda module, inward, outward: (4 * inward[0],))
        elif where == "gradient":
            model[0].weight.register_hook(lambda gradient: gradient * (torch.arange(6) < 3))
        else:
            model[2].forward = lambda x: nn.Linear.forward(model[2], 2 * x)  # type: ignore[method-assign]
        return model

    return made


def weight_normed() -> nn.Module:
    model = small()
    nn.utils.weight_norm(model[0])
    return model


def convolution() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, CLASSES))


MODELS: dict[str, tuple[Callable[[], nn.Module], type | None]] = {
    "logistic": (lambda: nn.Linear(6, CLASSES), StackedLayers),
    "mlp": (
        lambda: nn.Sequential(
            nn.Linear(6, 7), nn.ReLU(), nn.Sequential(nn.Linear(7, 9), nn.Tanh()), nn.Linear(9, CLASSES)
        ),
        StackedLayers,
    ),
    "no bias": (
        lambda: nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.Sigmoid(), nn.Identity(), nn.Linear(8, CLASSES, bias=False)
        ),
        StackedLayers,
    ),
    "reused activation": (reused_activation, StackedLayers),
    "two linear": (lambda: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, CLASSES)), StackedLayers),
    "normed": (Normed, MappedModel),
    "convolution": (convolution, MappedModel),
    "training mode": (Scaled, MappedModel),
    "reused layer": (reused_layer, None),
    "tied": (tied, None),
    "forward hook": (hooked("forward"), MappedModel),
    "hook before": (hooked("before"), MappedModel),
    "backward hook": (hooked("backward"), None),
    "gradient hook": (hooked("gradient"), None),
    "own forward": (hooked("own forward"), MappedModel),
    "weight norm": (weight_normed, MappedModel),
    "values read": (ReadsValues, None),
    "unused": (Unused, None),
    "batch norm": (lambda: nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)), None),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.3), nn.Linear(5, CLASSES)), None),
    "large": (lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Flatten(), nn.Linear(6, 20_000)), None),
}


def points(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, CLASSES, (N,), generator=generator)


def of(name: str, dtype: torch.dtype = torch.float64) -> Callable[[], nn.Module]:
    return lambda: MODELS[name][0]().to(dtype)


def largest_difference(
    many: TrainedModels, make_model: Callable[[], nn.Module], loss_fn: Any, data: tuple[Tensor, Tensor], recipe: Recipe
) -> float:
    """Between models trained at once and one by one: their parameters and their outputs."""
    found = 0.0
    outputs = many.outputs(data[0], batch_size=32)
    for j, (seed, subset) in enumerate(zip(SEEDS, SUBSETS, strict=True)):
        alone = train_one(initial_model(make_model, seed), loss_fn, data, recipe, seed=seed, subset=subset).model
        pairs = [(value, many.state(j)[name]) for name, value in alone.state_dict().items()]
        pairs.append((alone(data[0]).detach(), outputs[j]))
        assert set(many.state(j)) == set(alone.state_dict())
        found = max(found, *(float((a - b).abs().max()) for a, b in pairs))
    return found


@pytest.mark.parametrize(
    ("name", "schedule"),
    [(name, "onecycle") for name in MODELS if name not in ("batch norm", "large")]
    + [("mlp", "linear"), ("mlp", "constant")],
)
def test_many_at_once_are_the_models_trained_one_by_one(name: str, schedule: Any) -> None:
    data, recipe = points(), Recipe(4, 0.02, 16, 1e-3, schedule)
    kind = type(layout_of(of(name), LOSS, data))
    assert kind is (MODELS[name][1] or type(None))
    for at_once in (None, 2):
        many = train_many(of(name), LOSS, data, recipe, seeds=SEEDS, subsets=SUBSETS, at_once=at_once)
        assert largest_difference(many, of(name), LOSS, data, recipe) < 1e-12


def test_float32_is_equal_up_to_rounding() -> None:
    data, recipe = points(torch.float32), Recipe(5, 0.01, 16, 1e-3)
    many = train_many(of("mlp", torch.float32), LOSS, data, recipe, seeds=SEEDS, subsets=SUBSETS)
    assert largest_difference(many, of("mlp", torch.float32), LOSS, data, recipe) < 2e-5


@pytest.mark.parametrize(
    ("loss_fn", "floats"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)), False),
        (nn.CrossEntropyLoss(label_smoothing=0.1), False),
        (lambda output, y: nn.functional.mse_loss(output, y), True),
    ],
    ids=["class weights", "label smoothing", "squares"],
)
def test_other_losses_too(loss_fn: Any, floats: bool) -> None:
    x, y = points()
    data = (x, nn.functional.one_hot(y, CLASSES).double() if floats else y)
    recipe = Recipe(3, 0.02, 16)
    assert type(layout_of(of("mlp"), loss_fn, data)) is MappedModel
    many = train_many(of("mlp"), loss_fn, data, recipe, seeds=SEEDS, subsets=SUBSETS)
    assert largest_difference(many, of("mlp"), loss_fn, data, recipe) < 1e-12


def test_labels_may_be_bytes() -> None:
    (x, y), recipe = points(), Recipe(2, 0.02, 16)
    assert type(layout_of(of("mlp"), LOSS, (x, y.byte()))) is StackedLayers
    many = train_many(of("mlp"), LOSS, (x, y.byte()), recipe, seeds=SEEDS, subsets=SUBSETS)
    assert largest_difference(many, of("mlp"), LOSS, (x, y.byte()), recipe) < 1e-12


@pytest.mark.parametrize("name", ["batch norm", "large"])
def test_models_that_do_not_fit_in_a_stack_take_turns(name: str) -> None:
    data, recipe = points(), Recipe(1, 0.01, 30)
    assert layout_of(of(name), LOSS, data) is None
    many = train_many(of(name), LOSS, data, recipe, seeds=[3, 4], subsets=[None, range(60)])
    alone = train_one(initial_model(of(name), 4), LOSS, data, recipe, seed=4, subset=range(60)).model
    for key, value in alone.state_dict().items():
        assert torch.equal(many.state(1)[key], value)
    assert torch.equal(many.model(1)(data[0]), alone(data[0]))


class Clamps(Scaled):
    """A model that keeps a weight positive by a write, which autograd may know of."""

    def __init__(self, known: bool) -> None:
        super().__init__()
        self.first, self.known = nn.Linear(6, 6), known

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight.detach() if self.known else self.first.weight.data
        weight.clamp_(min=0)
        return self.last(self.first(x).tanh())


class Renorms(Scaled):
    """An embedding that shortens rows when they are looked up."""

    def __init__(self, longest: float) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 6, max_norm=longest)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rows((3 * x[:, 0]).long().clamp(-3, 3) + 3))


@pytest.mark.parametrize(("kind", "option"), [(Clamps, True), (Clamps, False), (Renorms, 0.5), (Renorms, 4.0)])
def test_models_that_write_to_their_parameters_take_turns(kind: Any, option: Any) -> None:
    def made() -> nn.Module:
        return kind(option).double()

    data, recipe = points(), Recipe(4, 0.1, 16)
    assert layout_of(made, LOSS, data) is None
    many = train_many(made, LOSS, data, recipe, seeds=SEEDS, subsets=SUBSETS)
    for j, (seed, subset) in enumerate(zip(SEEDS, SUBSETS, strict=True)):
        alone = train_one(initial_model(made, seed), LOSS, data, recipe, seed=seed, subset=subset).model
        for name, value in alone.state_dict().items():
            assert torch.equal(many.state(j)[name], value)


def test_train_one_is_plain_pytorch() -> None:
    x, y = points()
    recipe, subset = Recipe(3, 0.05, 16, 1e-2), torch.arange(10, 75)
    found = train_one(initial_model(of("mlp"), 7), LOSS, (x, y), recipe, seed=7, subset=subset).model
    torch.manual_seed(7)
    model = MODELS["mlp"][0]().double()
    optimizer = Adam(model.parameters(), 0.05, weight_decay=1e-2)
    scheduler = OneCycleLR(optimizer, 0.05, epochs=3, steps_per_epoch=5)
    order = torch.Generator().manual_seed(7)
    for _ in range(3):
        for at in subset[torch.randperm(65, generator=order)].split(16):
            optimizer.zero_grad()
            LOSS(model(x[at]), y[at]).backward()
            optimizer.step()
            scheduler.step()
    for expected, value in zip(model.parameters(), found.parameters(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    assert not found.training


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10, 61, 200])
def test_rates_are_those_of_onecycle(steps: int) -> None:
    optimizer = Adam([nn.Parameter(torch.zeros(1))], 0.3)
    scheduler = OneCycleLR(optimizer, 0.3, total_steps=steps)
    rates, betas = Recipe(1, 0.3, 1).rates(steps)
    for rate, beta in zip(rates, betas, strict=True):
        group = optimizer.param_groups[0]
        assert (rate, beta) == pytest.approx((group["lr"], group["betas"][0]), rel=1e-12)
        optimizer.step()
        scheduler.step()


def test_checkpoints_come_with_the_mean_rate_that_led_to_them() -> None:
    data, recipe = points(), Recipe(4, 0.1, 30, schedule="linear")
    found = train_one(initial_model(of("logistic"), 0), LOSS, data, recipe, seed=0, checkpoint_epochs=(1, 4))
    rates, _ = recipe.rates(12)
    assert found.rates == pytest.approx((rates[:3].mean(), rates[3:].mean()))
    for name, value in found.model.state_dict().items():
        assert torch.equal(found.checkpoints[1][name], value)
        assert not torch.equal(found.checkpoints[0][name], value)


def test_the_global_random_state_stays_as_it_was() -> None:
    data, recipe = points(), Recipe(1, 0.1, 30)
    torch.manual_seed(11)
    expected = torch.rand(3)
    for name in ("logistic", "normed", "dropout"):
        torch.manual_seed(11)
        train_many(of(name), LOSS, data, recipe, seeds=[0, 1])
        assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ["mlp", "normed", "batch norm"])
def test_no_grad_around_the_call_changes_nothing(name: str, around: Callable[[], Any]) -> None:
    recipe = Recipe(2, 0.02, 30)
    expected = train_many(of(name), LOSS, points(), recipe, seeds=[3]).outputs(points()[0])
    with around():
        data = points()
        many = train_many(of(name), LOSS, data, recipe, seeds=[3]).outputs(data[0])
        alone = train_one(initial_model(of(name), 3), LOSS, data, recipe, seed=3).model(data[0])
    assert torch.equal(many, expected)
    torch.testing.assert_close(alone, expected[0])


@pytest.mark.parametrize("at_once", [None, 1])
@pytest.mark.parametrize("name", ["mlp", "batch norm"])
def test_a_model_that_is_handed_out_twice_is_refused(name: str, at_once: int | None) -> None:
    data, recipe, base = points(), Recipe(1, 0.1, 30), of(name)()
    one_layer = base[0]
    before = copy.deepcopy(base.state_dict())
    for shared in (lambda: base, lambda: nn.Sequential(one_layer, nn.Linear(one_layer.out_features, CLASSES).double())):
        with pytest.raises(ValueError, match=r"make_model .* makes a new model at every call"):
            train_many(shared, LOSS, data, recipe, seeds=[0], at_once=at_once)
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())
    train_many(lambda: copy.deepcopy(base), LOSS, data, recipe, seeds=[0], at_once=at_once)
    one_layer.requires_grad_(False)  # features that are not trained may be shared
    train_many(shared, LOSS, data, recipe, seeds=[0], at_once=at_once)


def test_models_are_a_sequence() -> None:
    data, recipe = points(), Recipe(1, 0.1, 30)
    many = train_many(of("mlp"), LOSS, data, recipe, seeds=range(3))
    assert len(many) == len(list(many)) == 3
    torch.testing.assert_close(many.model(2)(data[0]), many.outputs(data[0])[2])
    with pytest.raises(IndexError, match="model 3 is out of range"):
        many.state(3)


@pytest.mark.parametrize(
    "given",
    [
        pd.Series([7, 3, 5], index=[10, 11, 12]),
        pd.Series(np.isin(np.arange(N), [3, 5, 7]), index=np.arange(N) + 1),
        pd.Index([7, 3, 5]),
        np.array([7, 3, 5], np.uint16),
        (7, 3, 5),
    ],
    ids=["column", "mask", "index", "short", "tuple"],
)
def test_a_subset_may_be_a_column_of_a_table(given: Any) -> None:
    assert sorted(checked_subset(given, N).tolist()) == [3, 5, 7]


def test_bad_input() -> None:
    x, y = points()
    recipe = Recipe(1, 0.1, 30)

    def run(subset: Any, data: Any = (x, y)) -> None:
        train_one(of("logistic")(), LOSS, data, recipe, seed=0, subset=subset)

    for subset, message in (
        ([], "subset is empty"),
        ([0, N], f"outside 0 … {N - 1}, first {N}"),
        (np.ones(4, bool), f"mask of 4 entries for {N}"),
        (np.zeros(N, bool), "a mask of no point"),
        (np.ones((2, 2)), "one-dimensional"),
    ):
        with pytest.raises(ValueError, match=message):
            run(subset)
    for strange in ([0.5], ["a"], {3, 4}):
        with pytest.raises(TypeError, match="whole numbers or a mask"):
            run(strange)
    with pytest.raises(TypeError, match=r"pair of tensors \(x, y\)"):
        run(None, x)
    with pytest.raises(ValueError, match="90 inputs and 89 targets"):
        run(None, (x, y[1:]))
    with torch.inference_mode():
        fixed = of("logistic")()
        with pytest.raises(ValueError, match=r"'weight' was made in torch\.inference_mode and cannot be trained"):
            train_one(fixed, LOSS, (x, y), recipe, seed=0)
    with pytest.raises(ValueError, match="checkpoint_epochs holds 2"):
        train_one(of("logistic")(), LOSS, (x, y), recipe, seed=0, checkpoint_epochs=[2])
    with pytest.raises(ValueError, match="subsets has 1 entries, seeds 2"):
        train_many(of("logistic"), LOSS, (x, y), recipe, seeds=[0, 1], subsets=[None])
    with pytest.raises(ValueError, match=r"subsets\[1\] is empty"):
        train_many(of("logistic"), LOSS, (x, y), recipe, seeds=[0, 1], subsets=[None, []])
    for options, message in (
        ({"epochs": 0}, "epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"schedule": "cosine"}, "schedule='cosine' is not one of 'onecycle'"),
    ):
        with pytest.raises(ValueError, match=message):
            Recipe(**{"epochs": 1, "learning_rate": 0.1, "batch_size": 4, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [1, 2], ids=["one by one", "stacked"])
@pytest.mark.parametrize("before", [False, True])
def test_denormal_numbers_are_flushed_in_training_only(at_once, before):
    """Dead units decay to denormals, which are slow; where a processor cannot flush, nothing changes."""
    supported = torch.set_flush_denormal(before)
    assert flushes_denormals() is (before and supported)
    seen = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(flushes_denormals())
        return nn.functional.cross_entropy(output, target)

    try:
        train_many(of("logistic"), loss, points(), Recipe(1, 0.1, 64), seeds=[0, 1], at_once=at_once)
        assert flushes_denormals() is (before and supported)
        assert seen[-1] is supported
    finally:
        torch.set_flush_denormal(False)


# ---- data and recipes that do not fit


NETWORKS = {"stacked": "mlp", "mapped": "normed", "one by one": "batch norm"}


@pytest.mark.parametrize("columns", [5, 7])
@pytest.mark.parametrize("name", NETWORKS.values(), ids=NETWORKS)
def test_inputs_with_other_columns_than_the_models_were_trained_on_are_refused(name: str, columns: int) -> None:
    models = train_many(of(name), LOSS, points(), Recipe(1, 0.1, 30), seeds=[0, 1])
    with pytest.raises(ValueError if name != "normed" else RuntimeError, match=f"{columns}"):
        models.outputs(torch.randn(4, columns, dtype=torch.float64))


def test_inputs_of_another_dtype_than_a_stack_are_refused() -> None:
    models = train_many(of("mlp"), LOSS, points(), Recipe(1, 0.1, 30), seeds=[0])
    with pytest.raises(TypeError, match=r"the models are torch\.float64, and the inputs are torch\.float32"):
        models.outputs(points()[0].float())


def number(form: str) -> Any:
    return {
        "vmapped": lambda: nn.Linear(6, 1),
        "batch norm": lambda: nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1)),
    }[form]


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.L1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("form", ["vmapped", "batch norm"])
def test_targets_of_one_dimension_are_those_of_outputs_with_one_column(form: str, loss_fn: Any) -> None:
    x = points()[0].float()
    y, recipe = (x[:, 0] > 0).float(), Recipe(2, 0.1, 30)
    flat, column = (
        train_many(number(form), loss_fn, (x, targets), recipe, seeds=[0, 1]).outputs(x) for targets in (y, y[:, None])
    )
    assert torch.equal(flat, column)
    one, other = (
        train_one(initial_model(number(form), 0), loss_fn, (x, targets), recipe, seed=0).model(x)
        for targets in (y, y[:, None])
    )
    assert torch.equal(one, other)


@pytest.mark.parametrize("form", ["vmapped", "batch norm"])
def test_a_loss_of_ones_own_that_compares_every_output_with_every_target_is_refused(form: str) -> None:
    x = points()[0].float()
    y, recipe = x[:, 0], Recipe(1, 0.1, 30)
    for wrong in (nn.functional.mse_loss, lambda output, target: (output - target).abs().mean()):
        with pytest.raises(ValueError, match=r"every output with every target.*y\[\.\.\., None\]"):
            train_many(number(form), wrong, (x, y), recipe, seeds=[0])
    for right in (
        lambda output, target: (output[:, 0] - target).square().mean(),
        lambda output, target: (output[:, 0] - output[:, 0].mean() - target).square().sum(),  # compares examples
    ):
        train_many(number(form), right, (x, y), recipe, seeds=[0])


@pytest.mark.parametrize("what", ["inputs", "targets", "recipe"])
@pytest.mark.parametrize("name", NETWORKS.values(), ids=NETWORKS)
def test_a_training_that_ends_with_nan_is_refused(name: str, what: str) -> None:
    x, y = points()
    loss: Any = LOSS
    if what == "inputs":
        x[3, 1] = torch.nan
    if what == "targets":
        loss = lambda output, target: (output[:, 0] - target).square().mean()  # noqa: E731
        y = y.double()
        y[4] = torch.nan
    recipe = Recipe(3, 1e200 if what == "recipe" else 0.1, 30, weight_decay=0.1, schedule="constant")
    said = {"inputs": "the inputs hold such numbers", "targets": "the targets", "recipe": "lower learning_rate=1e"}
    with pytest.raises(ValueError, match=f"training of seed 7 on 90 points ended with NaN.*{said[what]}"):
        train_many(of(name), loss, (x, y), recipe, seeds=[7])
    with pytest.raises(ValueError, match=f"training of seed 7 on 90 points ended with NaN.*{said[what]}"):
        train_one(initial_model(of(name), 7), loss, (x, y), recipe, seed=7)


def test_what_is_no_recipe_no_model_or_no_class_is_named() -> None:
    x, y = points()
    recipe, given = Recipe(1, 0.1, 30), {"epochs": 1, "learning_rate": 0.1, "batch_size": 30}
    for run in (
        lambda: train_one(of("mlp")(), LOSS, (x, y), given, seed=0),  # type: ignore[arg-type]
        lambda: train_many(of("mlp"), LOSS, (x, y), given, seeds=[0]),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="recipe is a dict"):
            run()
    with pytest.raises(TypeError, match="model is a function"):
        train_one(of("mlp"), LOSS, (x, y), recipe, seed=0)
    with pytest.raises(TypeError, match="seed='a': pass a whole number"):
        initial_model(of("mlp"), "a")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="x is a tuple: pass a tensor"):
        train_many(of("mlp"), LOSS, (x, y), recipe, seeds=[0]).outputs((x, y))  # type: ignore[arg-type]
    outside = y.clone()
    outside[80] = CLASSES
    for name in NETWORKS.values():
        with pytest.raises(ValueError, match=f"hold class {CLASSES}, and the model has outputs for {CLASSES}"):
            train_many(of(name), LOSS, (x, outside), recipe, seeds=[0])
        with pytest.raises(ValueError, match=r"pass y\[:, 0\]"):
            train_many(of(name), LOSS, (x, y[:, None]), recipe, seeds=[0])
        with pytest.raises(ValueError, match="inputs of shape"):
            train_many(of(name), LOSS, (x[:, :3], y), recipe, seeds=[0])
