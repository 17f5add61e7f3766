"""Laws of `method=`: influence is what retraining to the optimum does, to first order, and nothing else changes it."""

from functools import partial

import numpy as np
import pytest
import torch
from cases import gradient_rows, point_rows
from torch import nn
from torch.func import functional_call
from torch.utils.data import IterableDataset
from unusual_cases import constant_where_masked

from ggda_ext import BatchLoss, GroupGradients, attribute, properties
from ggda_ext.curvature import sampled
from ggda_ext.curvature.damping import ADAM, TrainingSteps
from ggda_ext.curvature.kronecker import Kronecker
from ggda_ext.methods import EKFAC, METHODS, Influence, TracIn
from ggda_ext.training import Recipe

CE = nn.CrossEntropyLoss()
N, K = 60, 6
GROUPS = np.arange(N) % K


def data(seed=0, features=4, n=N):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, features, generator=generator, dtype=torch.float64)
    noisy = x[:, 0] + 0.7 * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, (noisy > 0).long()


def linear(seed=0):
    torch.manual_seed(seed)
    return nn.Linear(4, 2).double()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def members(j):
    return torch.from_numpy(np.equal(GROUPS, j))


def flat(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def outputs_at(model, vector, x):
    pieces, at = {}, 0
    for name, p in model.named_parameters():
        pieces[name] = vector[at : at + p.numel()].reshape(p.shape)
        at += p.numel()
    return functional_call(model, pieces, (x,))


def hessian_of(model, x, y):
    return torch.autograd.functional.hessian(lambda v: CE(outputs_at(model, v, x), y), flat(model))


def expected(model, x, y, test, matrix, damping):
    """1/n ⟨(H + λ)⁻¹ ∇g, Σ ∇ℓ⟩ by a dense solve."""
    goal = gradient_rows([CE(model(test[0]), test[1])], model.parameters())[0]
    solved = torch.linalg.solve(matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype), goal)
    each = point_rows(model, CE, (x, y)) @ solved / len(x)
    return torch.stack([each[members(j)].sum() for j in range(K)])


EXACT = {"damping": 0.1, "steps": 100, "tolerance": 1e-12}


@pytest.mark.parametrize("curvature", ["gauss-newton", "hessian", "fisher", "auto"])
def test_influence_of_logistic_regression_is_the_closed_form(curvature):
    (x, y), test, model = data(), data(1), linear()
    found = attribute(model, CE, (x, y), GROUPS, properties.mean_loss(test, CE), method=Influence(curvature, **EXACT))
    rows = point_rows(model, CE, (x, y))
    matrix = rows.T @ rows / N if curvature == "fisher" else hessian_of(model, x, y)
    torch.testing.assert_close(found.scores[0], expected(model, x, y, test, matrix, 0.1), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("kept", [True, False])
def test_the_fisher_takes_the_points_whose_gradients_it_can_keep_and_no_pass_for_a_step(kept, monkeypatch):
    (x, y), test, model = data(), data(1), network()
    few, size = 20, sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(sampled, "FEWEST", 1 if kept else few)
    monkeypatch.setattr(sampled, "KEPT_BYTES", few * size * 8 if kept else 0)
    monkeypatch.setattr(sampled.SampledCurvature, "_no_gauss_newton", lambda _: "of this test.")
    points = np.sort(np.random.default_rng(0).permutation(N)[:few])
    rows = point_rows(model, CE, (x[points], y[points]))
    matrix, seen, passes = rows.T @ rows / few, [], []
    handle = model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    for steps in (1, 3, 12):  # the first call finds out about the model
        seen.clear()
        method = Influence(damping=0.1, steps=steps, tolerance=1e-13)
        found = attribute(model, CE, (x, y), GROUPS, properties.mean_loss(test, CE), method=method)
        assert found.method.settings["points for the curvature"] == few
        passes.append((sum(seen), found.method.passes))
    handle.remove()
    torch.testing.assert_close(found.scores[0], expected(model, x, y, test, matrix, 0.1), rtol=1e-8, atol=1e-12)
    for one, other in zip(*passes[1:], strict=True):
        assert other == one if kept else other > one


def test_influence_of_a_network_by_the_hessian_is_the_closed_form():
    (x, y), test, model = data(), data(1), network()
    matrix = hessian_of(model, x, y)
    damping = 2 * float(-torch.linalg.eigvalsh(matrix)[0].clamp(max=-0.01))
    method = Influence("hessian", damping=damping, steps=100, tolerance=1e-12)
    found = attribute(model, CE, (x, y), GROUPS, properties.mean_loss(test, CE), method=method)
    torch.testing.assert_close(found.scores[0], expected(model, x, y, test, matrix, damping), rtol=1e-7, atol=1e-11)


def test_gauss_newton_of_a_network_is_that_of_its_linearisation():
    (x, y), test, model = data(), data(1), network()
    start = flat(model)
    slopes = torch.func.jacrev(lambda v: outputs_at(model, v, x))(start)

    def linearised(v):
        return CE(outputs_at(model, start, x) + slopes @ (v - start), y)

    matrix = torch.autograd.functional.hessian(linearised, start)
    found = attribute(model, CE, (x, y), GROUPS, properties.mean_loss(test, CE), method=Influence(**EXACT))
    torch.testing.assert_close(found.scores[0], expected(model, x, y, test, matrix, 0.1), rtol=1e-7, atol=1e-11)


@pytest.mark.parametrize("method", ["influence", "ekfac"])
@pytest.mark.parametrize("ignored", [-100, 1])
def test_log_probabilities_with_their_loss_are_outputs_with_cross_entropy(method, ignored):
    (x, y), test, model = data(), data(1), network()
    with_log = nn.Sequential(model, nn.LogSoftmax(1))
    pairs = ((model, nn.CrossEntropyLoss(ignore_index=ignored)), (with_log, nn.NLLLoss(ignore_index=ignored)))
    found = [
        attribute(net, loss, (x, y), GROUPS, properties.mean_loss(test, loss), method=method) for net, loss in pairs
    ]
    torch.testing.assert_close(*(one.scores for one in found), rtol=1e-6, atol=1e-12)
    assert not any("Fisher" in note for one in found for note in one.notes)


@pytest.mark.parametrize(
    ("last", "loss"),
    [
        (nn.Identity(), nn.L1Loss()),
        (nn.Identity(), nn.NLLLoss()),  # of outputs that are no log-probabilities
        (nn.LogSoftmax(1), lambda z, y: nn.functional.nll_loss(z, y)),
    ],
)
def test_a_loss_without_curvature_in_the_outputs_takes_the_fisher_and_says_so(last, loss):
    (x, y), test, model = data(), data(1), nn.Sequential(network(), last)
    y, tested = (y, test) if not isinstance(loss, nn.L1Loss) else ((y[:, None] * 1.0).expand(-1, 2), None)
    tested = (x, y) if tested is None else tested
    found = attribute(model, loss, (x, y), GROUPS, properties.mean_loss(tested, loss))
    same = attribute(model, loss, (x, y), GROUPS, properties.mean_loss(tested, loss), method=Influence("fisher"))
    torch.testing.assert_close(found.scores, same.scores)
    assert any("because the loss" in note and "output" in note for note in found.notes)


def optimum(model, x, y, weights, penalty):
    """Newton's method on the weighted mean loss with an L2 penalty, to the end."""
    vector = flat(model)

    def total(v):
        each = nn.functional.cross_entropy(outputs_at(model, v, x), y, reduction="none")
        return (weights * each).sum() / len(x) + penalty / 2 * v.square().sum()

    for _ in range(30):
        slope = torch.autograd.functional.jacobian(total, vector)
        vector = vector - torch.linalg.solve(torch.autograd.functional.hessian(total, vector), slope)
    return vector


def test_influence_is_the_slope_of_retraining_to_the_optimum():
    (x, y), test, model, penalty, little = data(), data(1), linear(), 0.05, 1e-4
    best = optimum(model, x, y, torch.ones(N, dtype=torch.float64), penalty)
    torch.nn.utils.vector_to_parameters(best, model.parameters())
    method = Influence(damping=penalty, steps=100, tolerance=1e-12)
    found = attribute(model, CE, (x, y), GROUPS, properties.mean_loss(test, CE), method=method)
    before = CE(outputs_at(model, best, test[0]), test[1])
    for j in range(K):
        weights = 1 - little * members(j).double()
        moved = optimum(model, x, y, weights, penalty)
        rise = (CE(outputs_at(model, moved, test[0]), test[1]) - before) / little
        torch.testing.assert_close(found.scores[0, j], rise, rtol=1e-2, atol=1e-6)


METHOD_NAMES = sorted(METHODS)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_merging_groups_adds_their_scores_and_order_changes_nothing(name):
    (x, y), model = data(), network()
    goal = properties.mean_loss(data(1), CE)
    fine = attribute(model, CE, (x, y), GROUPS, goal, method=name).scores
    coarse = attribute(model, CE, (x, y), GROUPS // 2, goal, method=name).scores
    torch.testing.assert_close(coarse[0], fine[0].reshape(-1, 2).sum(1), rtol=1e-6, atol=1e-12)
    turned = attribute(model, CE, (x, y), K - 1 - GROUPS, goal, method=name).scores
    torch.testing.assert_close(turned.flip(1), fine, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_batch_size_and_strategy_do_not_change_scores(name):
    (x, y), model = data(), network()
    goal = properties.mean_loss(data(1), CE)
    scores = [
        attribute(model, CE, (x, y), GROUPS, goal, method=name, **options).scores
        for options in ({}, {"batch_size": 7}, {"strategy": "backward"}, {"strategy": "persample"})
    ]
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("name", ["tracin", "influence", "fisher"])  # the bases of EK-FAC are also of inputs
def test_points_whose_loss_is_a_constant_count_as_ignored_ones(name):
    (x, y), model = data(), network()
    y[:20] = -100
    goal = properties.mean_loss(data(1), CE)
    by_hand = partial(nn.functional.cross_entropy, reduction="none")
    ignored = attribute(model, by_hand, (x, y), GROUPS, goal, method=name).scores
    for batch_size in (1, N):
        options = {"method": name, "batch_size": batch_size}
        found = attribute(model, constant_where_masked, (x, y), GROUPS, goal, **options).scores
        torch.testing.assert_close(found, ignored, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("curvature", [Influence(damping=0.1), EKFAC(damping=0.1)], ids=["influence", "ekfac"])
def test_ignored_points_have_no_curvature(curvature):
    (x, y), model = data(), linear()
    outliers = 100 * torch.randn(40, 4, dtype=torch.float64)
    more = torch.cat([x, outliers]), torch.cat([y, torch.full((40,), -100)])
    goal = properties.mean_loss(data(1), CE)
    alone = attribute(model, CE, (x, y), np.zeros(N), goal, method=curvature).scores
    scaled = type(curvature)(damping=0.1 * N / (N + 40))  # a mean over more points is that much smaller
    beside = attribute(model, CE, more, np.r_[np.zeros(N), np.ones(40)], goal, method=scaled).scores
    assert float(beside[0, 1]) == 0
    torch.testing.assert_close(beside[:, :1], alone, rtol=0.1, atol=0)


@pytest.mark.parametrize("name", METHOD_NAMES)
def test_a_property_of_points_gives_each_points_scores_and_their_mean(name):
    (x, y), model, test = data(), network(), data(1, n=5)
    settings = {} if name == "tracin" else {"damping": 0.2}
    if name in ("influence", "fisher"):
        settings |= {"steps": 60, "tolerance": 1e-12}
    method = METHODS[name](**settings)
    each = attribute(model, CE, (x, y), GROUPS, properties.point_losses(test, CE), method=method).scores
    whole = attribute(model, CE, (x, y), GROUPS, properties.mean_loss(test, CE), method=method).scores
    torch.testing.assert_close(each.mean(0), whole[0], rtol=1e-7, atol=1e-12)
    alone = properties.mean_loss((test[0][2:3], test[1][2:3]), CE)
    torch.testing.assert_close(
        attribute(model, CE, (x, y), GROUPS, alone, method=method).scores[0], each[2], rtol=1e-7, atol=1e-12
    )


def test_ekfac_names_a_damping_it_cannot_use():
    x, y = torch.randn(40, 4), torch.arange(40) % 2
    model, loss = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), nn.CrossEntropyLoss()
    with torch.no_grad():
        model[0].bias[0] = -100.0  # a unit that is never active has no curvature
    goal = properties.mean_loss((x, y), loss)
    with pytest.raises(ValueError, match="damping=0: the curvature is 0"):
        attribute(model, loss, (x, y), np.arange(40) % 4, goal, method=EKFAC(damping=0.0))
    with pytest.raises(ValueError, match="damping and recipe are both given"):
        attribute(model, loss, (x, y), np.arange(40) % 4, goal, method="ekfac", damping=0.1, recipe=Recipe(1, 0.1, 4))


def test_ekfac_of_linear_regression_is_the_closed_form():
    torch.manual_seed(0)
    x, model, loss = torch.randn(N, 4).double(), nn.Linear(4, 1).double(), nn.MSELoss()
    y, test = x @ torch.randn(4, 1).double() + 1, (torch.randn(9, 4).double(), torch.randn(9, 1).double())
    found = attribute(model, loss, (x, y), GROUPS, properties.mean_loss(test, loss), method=EKFAC(damping=0.1))
    exact = attribute(model, loss, (x, y), GROUPS, properties.mean_loss(test, loss), method=Influence(**EXACT))
    torch.testing.assert_close(found.scores, exact.scores, rtol=1e-8, atol=1e-12)


class Steps(nn.Module):
    """Layers for each of some tokens, called for all tokens at once or token by token."""

    def __init__(self, token_by_token):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Embedding(7, 4, padding_idx=1), nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh())
        self.head, self.token_by_token = nn.Linear(4, 2), token_by_token

    def forward(self, x):
        parts = x.split(1, 1) if self.token_by_token else [x]
        return self.head(torch.cat([self.layers(part) for part in parts], 1).mean(1))


def test_ekfac_counts_all_calls_of_a_layer_together():
    generator = torch.Generator().manual_seed(0)
    points = torch.randint(0, 7, (N, 5), generator=generator), torch.arange(N) % 2
    goal = properties.mean_loss(tuple(part[:9] for part in points), CE)
    once, often = (
        attribute(Steps(way).double(), CE, points, GROUPS, goal, method=EKFAC(damping=0.01), batch_size=25).scores
        for way in (False, True)
    )
    torch.testing.assert_close(once, often, rtol=1e-8, atol=1e-12)


def test_ekfac_of_layers_that_share_parameters_is_the_mean_square_of_their_gradients():
    """The first and second layer share a weight, the second and third a bias; the last has its own basis."""
    (x, y), model = data(), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Tanh(), nn.Linear(4, 3)).double()
    model[1].weight, model[2].bias = model[0].weight, model[1].bias
    each = nn.CrossEntropyLoss(reduction="none")
    provider = GroupGradients(model, BatchLoss(lambda model, batch: each(model(batch[0]), batch[1])), (x, y))
    vectors = torch.randn(2, provider.p, dtype=torch.float64)
    found = Kronecker(provider, provider.data, 0).solve(vectors, 0.1)
    parameters = list(model[:3].parameters())
    rows = [torch.autograd.grad(CE(model(x[i : i + 1]), y[i : i + 1]), parameters) for i in range(N)]
    for parameter, gradients in zip(parameters, zip(*rows, strict=True), strict=True):
        square = torch.stack(gradients).square().mean(0)
        expected = provider.space.part(vectors, parameter) / (square + 0.1)
        torch.testing.assert_close(provider.space.part(found, parameter), expected, rtol=1e-9, atol=1e-12)


def test_ekfac_names_layers_it_cannot_see_and_what_helps():
    (x, y), model = data(), nn.Sequential(nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 2)).double()
    goal = properties.mean_loss((x, y), CE)
    with pytest.raises(ValueError, match=r"method='ekfac' .*'1\.weight'.*method='influence'"):
        attribute(model, CE, (x, y), GROUPS, goal, method="ekfac")
    assert attribute(model, CE, (x, y), GROUPS, goal, method="ekfac", parameters=["0", "2"]).shape == (1, K)


def test_scores_in_the_propertys_unit_are_averaged_over_checkpoints_and_tracin_is_summed():
    (x, y), model, goal = data(), network(), properties.mean_loss(data(1), CE)
    states = [network(seed).state_dict() for seed in (1, 2)]
    for name, share in (("influence", 0.5), ("ekfac", 0.5), ("tracin", 1.0)):
        together = attribute(model, CE, (x, y), GROUPS, goal, method=name, checkpoints=states).scores
        each = [attribute(model, CE, (x, y), GROUPS, goal, method=name, checkpoints=s).scores for s in states]
        torch.testing.assert_close(together, share * (each[0] + each[1]))
    weighted = attribute(model, CE, (x, y), GROUPS, goal, method="influence", checkpoints=states, weights=[1, 3])
    first, second = (attribute(model, CE, (x, y), GROUPS, goal, method="influence", checkpoints=s) for s in states)
    torch.testing.assert_close(weighted.scores, first.scores / 4 + second.scores * 3 / 4)


def test_more_models_are_averaged_like_checkpoints_and_all_stay_as_they_were():
    (x, y), goal = data(), properties.mean_loss(data(1), CE)
    models = [network(seed) for seed in (1, 2, 3)]
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    together = attribute(models[0], CE, (x, y), GROUPS, goal, models=models[1:]).scores
    each = [attribute(model, CE, (x, y), GROUPS, goal).scores for model in models]
    torch.testing.assert_close(together, sum(each) / 3)
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_checkpoints_in_the_memory_of_the_model_are_not_overwritten():
    (x, y), goal, model, other = data(), properties.mean_loss(data(1), CE), network(1), network(2)
    tracin = partial(attribute, model, CE, (x, y), GROUPS, goal, method="tracin")
    apart = [{name: value.clone() for name, value in one.state_dict().items()} for one in (model, other)]
    expected = tracin(checkpoints=apart).scores
    torch.testing.assert_close(tracin(checkpoints=[apart[1], model.state_dict()]).scores, expected)
    nested = [{"model": apart[1]}, {"model": model.state_dict()}]
    found = tracin(checkpoints=nested, load_checkpoint=lambda own, state: own.load_state_dict(state["model"])).scores
    torch.testing.assert_close(found, expected)
    twice = tracin(checkpoints=[*apart, apart[0]]).scores
    torch.testing.assert_close(tracin(models=[other, model]).scores, twice)


@pytest.mark.parametrize("name", ["influence", "ekfac", "fisher"])
def test_a_folder_keeps_the_solve_and_its_facts(tmp_path, name, monkeypatch):
    (x, y), model, goal = data(), network(), properties.mean_loss(data(1), CE)
    plain = attribute(model, CE, (x, y), GROUPS, goal, method=name)
    kept = attribute(model, CE, (x, y), GROUPS, goal, method=name, save_dir=tmp_path)
    assert torch.equal(kept.scores, plain.scores)

    def again(*_):
        raise AssertionError("solved a second time")

    monkeypatch.setattr(METHODS[name], "precondition", again)
    found = attribute(model, CE, (x, y), GROUPS, goal, method=name, save_dir=tmp_path)
    assert torch.equal(found.scores, kept.scores)
    assert found.method.settings == kept.method.settings == plain.method.settings


def test_facts_say_what_was_done():
    (x, y), model, goal = data(), network(), properties.mean_loss(data(1), CE)
    facts = attribute(model, CE, (x, y), GROUPS, goal, method=Influence(points=20)).method
    assert (facts.name, facts.unit) == ("influence", "property")
    assert facts.settings["curvature"] == "gauss-newton"
    assert facts.settings["points for the curvature"] == 20
    assert 0 <= facts.settings["residual"] <= 1e-3
    assert min(facts.settings["damping"], facts.settings["error from taking some points"], facts.seconds) > 0
    assert facts.passes > 1
    assert attribute(model, CE, (x, y), GROUPS, goal, method="fisher").method.unit == "rank"
    assert attribute(model, CE, (x, y), GROUPS, goal, method="tracin").method.unit == "rank"


def test_negative_curvature_is_refused_with_a_given_damping_and_told_otherwise():
    (x, y), model, goal = data(), network(3), properties.mean_loss(data(1), CE)
    lowest = float(torch.linalg.eigvalsh(hessian_of(model, x, y))[0])
    assert lowest < -1e-4  # an untrained network: the case in question
    with pytest.raises(ValueError, match=r"damping=0.*curvature='gauss-newton'"):
        attribute(model, CE, (x, y), GROUPS, goal, method=Influence("hessian", damping=0.0, steps=100))
    told = attribute(model, CE, (x, y), GROUPS, goal, method=Influence("hessian", recipe=TrainingSteps(1e9), steps=100))
    assert any("damping was raised" in note for note in told.notes)
    assert told.method.settings["damping"] > -lowest


def test_a_solve_that_ends_above_its_tolerance_says_so():
    model, (x, y) = network(), data()
    goal = properties.mean_loss(data(1), CE)
    whole, cut = (attribute(model, CE, (x, y), GROUPS, goal, method=Influence(steps=steps)) for steps in (50, 1))
    assert not whole.notes
    assert whole.method.settings["residual"] <= 1e-3 < cut.method.settings["residual"]
    assert any("above tolerance=0.001" in note and "more steps" in note for note in cut.notes)


def test_damping_of_a_recipe():
    (x, y), model, goal = data(), network(), properties.mean_loss(data(1), CE)
    sgd = TrainingSteps([0.1] * 50, momentum=0.5, weight_decay=0.01)
    found = attribute(model, CE, (x, y), GROUPS, goal, method="influence", recipe=sgd)
    assert found.method.settings["damping"] == pytest.approx(1 / (5 / 0.5) + 0.01)
    same = attribute(model, CE, (x, y), GROUPS, goal, method="influence", damping=0.11)
    torch.testing.assert_close(found.scores, same.scores)


def test_adams_damping_is_that_of_every_parameter():
    (x, y), test, model = data(), data(1), linear()
    recipe = Recipe(epochs=3, learning_rate=0.1, batch_size=10, weight_decay=0.02, schedule="constant")
    method = Influence(recipe=recipe, steps=100, tolerance=1e-12)
    found = attribute(model, CE, (x, y), GROUPS, properties.mean_loss(test, CE), method=method)
    rows = point_rows(model, CE, (x, y))
    moments = rows.square().mean(0) / 10 + rows.mean(0).square()
    own = ADAM * (moments.sqrt() + 1e-8) / (0.1 * 3 * 6) + 0.02
    matrix = hessian_of(model, x, y) + torch.diag(own)
    torch.testing.assert_close(found.scores[0], expected(model, x, y, test, matrix, 0.0), rtol=1e-8, atol=1e-12)


class Output(dict):
    """As the outputs of Hugging Face are: a mapping with attributes."""

    __getattr__ = dict.get


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network()

    def forward(self, x, labels=None):
        logits = self.inner(x)
        return Output(logits=logits) if labels is None else Output(loss=CE(logits, labels), logits=logits)


def test_dicts_batch_losses_and_few_parameters_are_the_same_model():
    (x, y), goal = data(), properties.mean_loss(data(1), CE)
    test = {"x": data(1)[0], "labels": data(1)[1]}
    options = {"method": Influence(damping=0.1), "parameters": None}
    for chosen in (None, ["2"]):
        options["parameters"] = chosen
        plain = attribute(network(), CE, (x, y), GROUPS, goal, **options)
        own = BatchLoss(lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"))
        batch = attribute(network(), own, (x, y), GROUPS, goal, **options)
        options["parameters"] = None if chosen is None else ["inner.2"]
        named = attribute(Wrapped(), CE, {"x": x, "labels": y}, GROUPS, properties.mean_loss(test, CE), **options)
        torch.testing.assert_close(batch.scores, plain.scores)
        torch.testing.assert_close(named.scores, plain.scores)
        assert named.method.settings["curvature"] == "gauss-newton"


def test_a_model_with_its_own_loss_gets_the_fisher_and_says_so():
    (x, y), (x_test, y_test) = data(), data(1)
    goal = properties.mean_loss({"x": x_test, "labels": y_test}, CE)
    found = attribute(Wrapped(), None, {"x": x, "labels": y}, GROUPS, goal, method=Influence(damping=0.1))
    assert any("empirical Fisher" in note for note in found.notes)
    plain = attribute(
        network(), CE, (x, y), GROUPS, properties.mean_loss(data(1), CE), method=Influence("fisher", damping=0.1)
    )
    torch.testing.assert_close(found.scores, plain.scores)


class Stream(IterableDataset):
    def __iter__(self):
        return zip(*data(), strict=True)


def test_a_stream_lends_its_beginning_to_the_curvature():
    (x, y), model, goal = data(), network(), properties.mean_loss(data(1), CE)
    found = attribute(model, CE, Stream(), GROUPS, goal, method=Influence(damping=0.1))
    known = attribute(model, CE, (x, y), GROUPS, goal, method=Influence(damping=0.1))
    torch.testing.assert_close(found.scores, known.scores)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "influense"}, "method='influense' is not one of"),
        ({"method": "tracin", "damping": 0.1}, "method='tracin' does not use"),
        ({"method": "influence", "damping": -1.0}, "damping=-1.0: pass a number"),
        ({"method": Influence(), "damping": 0.1}, "pass it there"),
        ({"method": "influence", "damping": 0.1, "recipe": TrainingSteps(1.0)}, "both given"),
        ({"method": "influence", "recipe": "adam"}, "recipe is a str"),
    ],
)
def test_wrong_methods_and_settings_are_refused(options, message):
    (x, y), model, goal = data(), network(), properties.mean_loss(data(1), CE)
    with pytest.raises((ValueError, TypeError), match=message):
        attribute(model, CE, (x, y), GROUPS, goal, **options)


def test_tracin_is_the_inner_product():
    (x, y), test, model = data(), data(1), network()
    found = attribute(model, CE, (x, y), GROUPS, properties.mean_loss(test, CE), method=TracIn())
    wanted = gradient_rows([CE(model(test[0]), test[1])], model.parameters())[0]
    each = point_rows(model, CE, (x, y)) @ wanted
    torch.testing.assert_close(found.scores[0], torch.stack([each[members(j)].sum() for j in range(K)]))
