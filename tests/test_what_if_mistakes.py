"""What-if names bad input, questions and settings, and what cannot be refitted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from unusual_rare import FullExperts
from what_if_cases import LOSS, NAMES, SOURCES, network, points

from ggda_ext import BatchLoss, properties
from ggda_ext.counterfactual import WhatIf
from ggda_ext.counterfactual.newton import SingularRefit
from ggda_ext.evaluation import Retrainer
from ggda_ext.training import Recipe


def test_removed_is_the_share_of_points_left_out(asked):
    weights = torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0], [0.5, 3.0, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0]])
    assert asked.removed(weights).tolist() == [0, 0.25, 0.125, 0]


def test_bad_input_is_named():
    data, model = points(), network()
    what_if = WhatIf(model, LOSS, data, SOURCES, rank=10)
    measure = properties.mean_loss(data, LOSS)
    with pytest.raises(ValueError, match=r"no group 'forums'; did you mean 'forum'"):
        what_if.without("forums")
    with pytest.raises(ValueError, match="leave nothing to train on"):
        what_if.without(NAMES)
    with pytest.raises(TypeError, match="start is a function: pass a model"):
        WhatIf(model, LOSS, data, SOURCES, recipe=Recipe(1, 0.1, 8), start=network)
    recipe = Recipe(epochs=1, learning_rate=0.1, batch_size=60)
    with pytest.raises(ValueError, match="retrain measures measure='accuracy', and the property is mean_loss"):
        what_if.verify(Retrainer(network, LOSS, data, data, recipe), measure)
    with pytest.raises(ValueError, match="a weight is a finite number, 0 or more"):
        what_if.with_weights({"web": -1.0})
    with pytest.raises(ValueError, match=r"kept has shape \[2, 3\]"):
        what_if.subsets(np.ones((2, 3)), measure)
    with pytest.raises(ValueError, match="is not convex in the outputs"):
        WhatIf(model, lambda z, y: z.sin().sum(), data, SOURCES)
    with pytest.raises(TypeError, match="does not say how the loss depends on the outputs"):
        WhatIf(model, BatchLoss(lambda model, batch: model(batch[0]).sum(1)), data, SOURCES)
    with pytest.raises(ValueError, match="of_outputs"):
        what_if.without("web").value(lambda model: (model(data[0]).argmax(1) == data[1]).double().mean())
    with pytest.raises(ValueError, match="of_outputs"):
        what_if.shapley(lambda model: model[0].weight.sum())
    with pytest.raises(ValueError, match="directions='some'"):
        WhatIf(model, LOSS, data, SOURCES, directions="some")
    with pytest.raises(ValueError, match="pass one of them"):
        WhatIf(model, LOSS, data, SOURCES, weight_decay=0.1, recipe=Recipe(1, 0.1, 8))
    with pytest.raises(ValueError, match="point_weights has shape"):
        WhatIf(model, LOSS, data, SOURCES, point_weights=torch.ones(3))
    for bad, named in ((-1.0, r"point_weights\[2\] is -1"), (float("nan"), r"point_weights\[2\] is nan")):
        with pytest.raises(ValueError, match=named):
            WhatIf(model, LOSS, data, SOURCES, point_weights=torch.ones(120).index_fill(0, torch.tensor([2]), bad))
    with pytest.raises(ValueError, match="point_weights are all 0"):
        WhatIf(model, LOSS, data, SOURCES, point_weights=torch.zeros(120))
    with pytest.raises(TypeError, match="point_weights holds what is no number"):
        WhatIf(model, LOSS, data, SOURCES, point_weights=["heavy"] * 120)
    for options in ({}, {"remove": 4}, {"remove": 1, "goal": "best"}):
        with pytest.raises(ValueError, match=r"pass remove|remove=4|goal='best'"):
            what_if.search(measure, **options)
    broken = (data[0].clone(), data[1])
    broken[0][7] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite outputs for 1 of 120 examples, first 7"):
        WhatIf(model, LOSS, broken, SOURCES)
    x, counts = points()[0], points()[1].double()
    with torch.no_grad():
        below = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
        below[0].bias.fill_(-9)
    with pytest.raises(ValueError, match="NaN or infinite losses for 120 of 120 examples"):
        WhatIf(below, nn.PoissonNLLLoss(log_input=False), (x, counts), SOURCES)
    with pytest.raises(ValueError, match="NaN or infinite outputs"):
        what_if.without("web").value(properties.mean_loss(broken, LOSS))


BAD_QUESTIONS: dict[str, tuple[Callable[[WhatIf, Any, Any], Any], str]] = {
    "weights without names": (lambda w, m, e: w.with_weights(["web"]), "weights is a list: pass a dict"),
    "a weight that is a word": (lambda w, m, e: w.with_weights({"web": "half"}), r"weights\['web'\]='half'"),
    "weights of groups left out": (lambda w, m, e: w.without({"web": 0.5}), "names is a dict: .* with_weights"),
    "no subset": (lambda w, m, e: w.subsets(np.ones((0, 4)), m), r"kept has shape \[0, 4\]"),
    "names as subsets": (lambda w, m, e: w.subsets([["web"]], m), "kept holds what is no number"),
    "no property": (lambda w, m, e: w.without("web").value(None), "property is a NoneType"),
    "data as property": (lambda w, m, e: w.subsets(np.eye(4), points()), "property is a tuple"),
    "many numbers, search": (lambda w, m, e: w.search(e, remove=1), "gives 120 numbers"),
    "many numbers, held out": (lambda w, m, e: w.search(m, remove=1, holdout=e), "gives 120 numbers"),
    "many numbers, shapley": (lambda w, m, e: w.shapley(e, samples=2), "gives 120 numbers"),
    "many numbers, pairs": (lambda w, m, e: w.interactions(e), "gives 120 numbers"),
    "many numbers, verify": (lambda w, m, e: w.verify(len, e), "gives 120 numbers"),
    "half a group": (lambda w, m, e: w.search(m, remove=1.5), "remove=1.5: pass a whole number"),
    "a budget below all groups": (lambda w, m, e: w.search(m, budget=29), "the smallest group has 30"),
    "half a sample": (lambda w, m, e: w.shapley(m, samples=2.5), "samples=2.5"),
    "nothing to retrain with": (lambda w, m, e: w.verify([1.0], m), "retrain is a list"),
    "one value too many": (
        lambda w, m, e: w.verify(lambda s: np.zeros(len(s) + 1), m, 4),
        r"shape \[5\]: return \[4, ",
    ),
    "no values": (lambda w, m, e: w.verify(lambda s: None, m, 4), r"shape \[\]"),
    "values that are not finite": (lambda w, m, e: w.verify(lambda s: np.full(4, np.nan), m, 4), "NaN or infinite"),
    "half a retraining": (lambda w, m, e: w.verify(len, m, np.full((4, 4), 0.5)), "other than 0 and 1"),
    "a pair of a group and itself": (
        lambda w, m, e: w.interactions(m, ["web", "web", "news"]),
        "names holds 'web' twice",
    ),
    "bytes": (lambda w, m, e: w.without(b"web"), "no group b'web'"),
    "few retrainings, by NumPy": (lambda w, m, e: w.verify(len, m, np.int64(3)), "subsets=.*3.*at least 4"),
    "few retrainings": (lambda w, m, e: w.verify(len, m, 3), "subsets=3: pass a whole number, at least 4"),
}


@pytest.fixture(scope="module")
def asked() -> WhatIf:
    return WhatIf(network(), LOSS, points(), SOURCES, rank=10)


@pytest.mark.parametrize("name", BAD_QUESTIONS)
def test_bad_questions_are_named(asked, name):
    ask, message = BAD_QUESTIONS[name]
    with pytest.raises((TypeError, ValueError), match=message):
        ask(asked, properties.mean_loss(points(), LOSS), properties.point_losses(points(), LOSS))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2.5}, "rank=2.5: pass a whole number"),
        ({"weight_decay": "1e-3"}, "weight_decay='1e-3': pass a number"),
        ({"ridge": float("inf")}, "ridge=inf"),
        ({"folder": "no/such/folder"}, "folder='no/such/folder' is no folder"),
        ({"recipe": {"lr": 0.1}}, "recipe is a dict"),
        ({"start": network()}, "start is given without a recipe"),
        ({"start": nn.Linear(5, 3), "recipe": Recipe(1, 0.1, 8)}, "start has no parameter 0.weight"),
        ({"settle": True}, "settle=True needs a recipe"),
        ({"settle": True, "start": network(), "recipe": Recipe(1, 0.1, 8)}, "settle and start are both given"),
        ({"nearby": 2}, "nearby=2 needs a recipe"),
        ({"nearby": 2, "start": network(), "recipe": Recipe(1, 0.1, 8)}, "nearby and start are both given"),
        ({"nearby": -1}, "nearby=-1: pass a whole number, at least 0"),
        ({"seed": "a"}, "seed='a': pass a whole number"),
        ({"batch_size": 0}, "batch_size=0: pass a whole number, at least 1"),
        ({"models": [3]}, r"models\[0\] is a int"),
        ({"models": network()}, "models is a Sequential: pass a list"),
        ({"models": [nn.Linear(5, 4).double()]}, r"models\[0\] gives outputs \[4\] for a point, the model \[3\]"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        WhatIf(network(), LOSS, points(), SOURCES, **{"rank": 10, **options})


def test_columns_of_a_table_of_subsets_are_found_by_name(asked):
    """In any order; a name that no group has, and a group without a column, are refused."""
    pandas = pytest.importorskip("pandas")
    kept = np.array([[True, False, True, True], [False, True, True, True]])
    table, measure = pandas.DataFrame(kept, columns=asked.names), properties.mean_loss(points(), LOSS)
    expected = asked.subsets(kept, measure)
    assert expected[0] != expected[1]
    assert torch.equal(asked.subsets(table[asked.names[::-1]], measure), expected)
    assert torch.equal(asked.subsets(pandas.DataFrame(kept), measure), expected), "without names as they stand"
    with pytest.raises(ValueError, match="kept has a column 'wbe': there is no group 'wbe'; did you mean 'web'"):
        asked.subsets(table.rename(columns={"web": "wbe"}), measure)
    with pytest.raises(ValueError, match="kept has 3 columns: pass one for each of the 4 groups"):
        asked.subsets(table[asked.names[:3]], measure)


def test_names_that_are_numbers_are_told_from_their_text():
    years = WhatIf(network(), LOSS, points(), [2019, 2020] * 60, rank=10)
    with pytest.raises(ValueError, match=r"no group '2019'; did you mean 2019, 2020\?"):
        years.without("2019")


def test_groups_whose_points_weigh_nothing_leave_nothing():
    own = [0.0 if source == "web" else 1.0 for source in SOURCES]
    what_if = WhatIf(network(), LOSS, points(), SOURCES, point_weights=own, rank=10)
    with pytest.raises(ValueError, match="leave nothing to train on"):
        what_if.only("web")


def test_a_model_that_has_changed_since_the_set_up_is_named():
    """What is known already is still answered; what needs the model again would be of another model."""
    (x, y), model = points(), nn.Sequential(network(), nn.Dropout(0.5)).eval()
    what_if = WhatIf(model, LOSS, (x, y), SOURCES, rank=10)
    known, new = properties.mean_loss((x, y), LOSS), properties.mean_loss((x[:50], y[:50]), LOSS)
    answer = what_if.without("web")
    before = answer.value(known)

    def size(model: nn.Module) -> Tensor:
        return model[0][0].weight.square().sum()  # type: ignore[index]

    def check(message: str) -> None:
        assert torch.equal(answer.value(known), before)
        for ask in (lambda: answer.value(new), lambda: answer.value(size), what_if.explain):
            with pytest.raises(ValueError, match=message):
                ask()

    model.train()
    check("between train and eval mode since WhatIf was set up")
    model.eval()
    with torch.no_grad():
        model[0][0].weight[0, 0] += 0.1
    check("other parameters or buffers than when WhatIf was set up.*make a new WhatIf")
    with torch.no_grad():
        model[0][0].weight[0, 0] -= 0.1


@pytest.mark.parametrize("loss_fn", [nn.MSELoss(), nn.HuberLoss()])
def test_targets_of_points_without_weight_may_be_missing(loss_fn):
    (x, _), found = points(), []
    model, weights = nn.Linear(5, 1).double(), torch.ones(len(x))
    weights[::5] = 0
    for missing in (0.0, float("nan")):
        y = x[:, :1].sin()
        y[::5] = missing
        what_if = WhatIf(model, loss_fn, (x, y), SOURCES, weight_decay=0.1, point_weights=weights)
        found.append(what_if.without("web").outputs(x))
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)
    assert (found[0] - model(x)).abs().max() > 1e-4


def test_test_data_are_told_apart_by_their_names_and_by_what_is_written_to_them():
    class Difference(nn.Linear):
        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return super().forward(left - 2 * right)

    left, right, labels = points()[0], points()[0].flip(0), points()[1]
    model = Difference(5, 3).double()
    what_if = WhatIf(model, LOSS, {"left": left, "right": right, "labels": labels}, SOURCES, weight_decay=0.1)
    rest = what_if.with_weights({})
    for names in (("left", "right"), ("right", "left")):
        data = dict(zip(names, (left, right), strict=True)) | {"labels": labels}
        measure = properties.mean_loss(data, LOSS)
        assert float(rest.value(measure)) == pytest.approx(float(measure(model)), rel=1e-9)
    left.add_(1)
    assert float(rest.value(measure)) == pytest.approx(float(measure(model)), rel=1e-9)


def test_a_model_that_mixes_examples_in_large_batches_is_named():
    torch.manual_seed(0)
    model, data = FullExperts().double(), (torch.randn(300, 6).double(), torch.arange(300) % 3)
    model.ROOM = 50
    with pytest.raises(ValueError, match=r"the training data has an example with a value of .* in one of 8"):
        WhatIf(model, LOSS, data, np.arange(300) % 4, weight_decay=0.1)
    what_if = WhatIf(model, LOSS, data, np.arange(300) % 4, weight_decay=0.1, rank=4, batch_size=20)
    assert what_if.without(0).outputs(data).shape == (300, 3)


def test_random_test_data_are_named():
    """Each reading would give another value, and a change would be mixed with the noise."""
    x, y = points()

    class Augmented(Dataset[Any]):
        def __len__(self) -> int:
            return len(x)

        def __getitem__(self, at: int) -> Any:
            return x[at] + 0.1 * torch.randn(5), y[at]

    answer = WhatIf(nn.Linear(5, 3).double(), LOSS, (x, y), SOURCES, weight_decay=0.1).without("web")
    with pytest.raises(ValueError, match="another first example each time it is read"):
        answer.value(properties.mean_loss(Augmented(), LOSS))


def test_targets_of_a_test_set_may_be_of_several_types():
    """As they come from JSON, where 3.0 is written as 3."""
    x = points()[0]
    rows = [(one, j if j % 3 == 0 else j + 0.5) for j, one in enumerate(x)]
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)).double()
    what_if = WhatIf(model, nn.MSELoss(), (x, x[:, 0]), SOURCES, weight_decay=0.1, batch_size=1)
    measure = properties.mean_loss(DataLoader(rows, batch_size=30), nn.MSELoss())  # type: ignore[arg-type]
    assert float(what_if.with_weights({}).value(measure)) == pytest.approx(float(measure(model)), rel=1e-6)


def test_point_weights_of_a_table_are_its_values():
    """Whatever their index; in the order of the training data, if it has one."""
    pandas = pytest.importorskip("pandas")
    (x, y), own = points(), np.linspace(0.5, 2, 120)
    expected = WhatIf(network(), LOSS, (x, y), SOURCES, rank=10, point_weights=own).linearized[0].point_weights
    index = np.arange(120)[::-1] + 7
    weights = pandas.Series(own, index=index)
    found = WhatIf(network(), LOSS, (x, y), SOURCES, rank=10, point_weights=weights).linearized[0].point_weights
    assert torch.equal(found, expected)
    table = (pandas.DataFrame(x.numpy(), index=index), pandas.Series(y.numpy(), index=index))
    what_if = WhatIf(network(), LOSS, table, SOURCES, rank=10, point_weights=weights.sort_index())
    assert torch.equal(what_if.linearized[0].point_weights, expected)


def test_a_singular_small_problem_is_named():
    """A loss that rises without bound in one direction only, and no weight decay: no optimum."""
    data = (torch.ones(4, 1).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double())
    model = nn.Linear(1, 1, bias=False).double()

    def falling(z: Tensor, y: Tensor) -> Tensor:
        return ((1 - y) * z[:, 0].exp() - z[:, 0]).sum()

    with torch.no_grad():
        model.weight.fill_(float(np.log(4)))
    what_if = WhatIf(model, falling, data, [0, 0, 0, 1], ridge=0.0)
    with pytest.raises(ValueError, match="the small problem is singular"):
        what_if.without(1)


@pytest.mark.parametrize("directions", ["all", "auto"])
@pytest.mark.parametrize("ridge", [0.0, 1e-9])
def test_features_of_any_units_are_answered_or_the_problem_is_called_singular(directions, ridge):
    """In single precision, and with next to nothing that bounds a refit."""
    torch.manual_seed(1)
    x, y = torch.randn(200, 6) * torch.logspace(-4, 5, 6), torch.arange(200) % 2
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    goal = properties.mean_loss((x, y), LOSS)
    with suppress(SingularRefit):
        what_if = WhatIf(model, LOSS, (x, y), torch.arange(200) % 5, ridge=ridge, directions=directions)
        assert bool(what_if.without(1).change(goal).isfinite().all())
