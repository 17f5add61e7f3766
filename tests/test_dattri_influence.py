"""ggda_dattri's influence functions: dattri's scores summed by group, one solve for all groups, clear errors."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import ggda_dattri
import numpy as np
import pytest
import torch
from dattri.metric import lds, loo_corr
from dattri_cases import GROUPS, INFLUENCE, TESTS, N, close, make_case, ours, theirs
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from ggda_ext import Groups
from ggda_ext.curvature import Hessian
from ggda_ext.properties import mean_loss, point_losses

LAYERS = {"all": None, "some": ["0.bias", "2.weight"], "other order": ["2.weight", "0.weight"]}
CONVERGED = {"CG": {"max_iter": 60, "tol": 1e-6}}  # a few steps of conjugate gradients are not linear in the vector
MODULES = {"all": None, "some": ["2"], "other order": ["2", "0"]}


@pytest.fixture
def float64() -> Iterator[None]:
    """Models and dattri's results in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def layers(name: str, which: str) -> list[str] | None:
    return MODULES[which] if name == "EKFAC" else LAYERS[which]


def check_sums(name: str, checkpoints: int, which: str) -> None:
    case = make_case()
    old = theirs(name, case.task(checkpoints, own_target=True), layers(name, which))
    task = case.task(checkpoints, own_target=True)
    new = ours(name, task, layers(name, which), groups=GROUPS, curvature="upstream")
    for attributor in (old, new):
        attributor.cache(case.full_loader(12))
    expected = old.attribute(case.train_loader(), case.test_loader())
    found = new.attribute(case.train_loader(), case.test_loader())
    close(found, GROUPS.sum(expected, 0))
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("name", "checkpoints", "which"),
    [case for case in product(INFLUENCE, (1, 2), LAYERS) if case[:2] != ("EKFAC", 2)],  # dattri refuses two
)
def test_additivity_groups_are_sums_of_dattri_scores(name, checkpoints, which):
    check_sums(name, checkpoints, which)


@pytest.mark.parametrize("name", [name for name in INFLUENCE if name != "LiSSA"])  # dattri casts its data to float32
def test_additivity_in_float64(name, float64):
    check_sums(name, 1 if name == "EKFAC" else 2, "other order")


@pytest.mark.parametrize("name", ["Explicit", "CG", "Arnoldi", "LiSSA", "DataInf"])
def test_whole_curvature_is_dattri_with_one_cached_batch(name):
    case = make_case()
    old, new = theirs(name, case.task()), ours(name, case.task(), groups=GROUPS)
    old.cache(case.full_loader())
    new.cache(case.full_loader(10))
    expected = old.attribute(case.train_loader(), case.test_loader())
    close(new.attribute(case.train_loader(), case.test_loader()), GROUPS.sum(expected, 0))


@pytest.mark.parametrize("name", ["Explicit", "CG"])
def test_whole_curvature_of_batches_is_that_of_the_data(name, monkeypatch):
    case = make_case()
    scores = []
    for batch_size in (N, 5):
        hessian = Hessian.__init__
        monkeypatch.setattr(
            Hessian, "__init__", lambda self, a, b, c, d, size=batch_size, init=hessian: init(self, a, b, c, size)
        )
        attributor = ours(name, case.task(), groups=GROUPS)
        attributor.cache(case.full_loader())
        scores.append(attributor.attribute(case.train_loader(), case.test_loader()))
        monkeypatch.undo()
    close(scores[1], scores[0])


@pytest.mark.parametrize("name", INFLUENCE)
def test_without_groups_bitwise_equal_with_the_same_random_state(name):
    results, states = [], []
    for make in (theirs, ours):
        case = make_case()
        attributor = make(name, case.task())
        torch.manual_seed(3)
        attributor.cache(case.full_loader())
        scores = attributor.attribute(case.train_loader(), case.test_loader())
        results.append([scores, attributor.self_attribute(case.train_loader(N))])
        states.append(torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(*states)


@pytest.mark.parametrize("name", INFLUENCE)
def test_singletons_are_dattri_in_group_order(name):
    order = np.random.default_rng(0).permutation(N)
    results = []
    for make in (theirs, lambda *args: ours(*args, groups=[[i] for i in order])):
        case = make_case()
        attributor = make(name, case.task())
        torch.manual_seed(3)
        attributor.cache(case.full_loader())
        results.append(attributor.attribute(case.train_loader(), case.test_loader()))
    assert torch.equal(results[1], results[0][order])
    assert not results[1].requires_grad


@pytest.mark.parametrize("name", INFLUENCE)
def test_singletons_group_path_forced(name):
    case = make_case()
    old, new = (
        theirs(name, case.task()),
        ours(name, case.task(), groups=np.arange(N), strategy="segmented", curvature="upstream"),
    )
    for attributor in (old, new):
        attributor.cache(case.full_loader())
    expected = old.attribute(case.train_loader(), case.test_loader())
    close(new.attribute(case.train_loader(), case.test_loader()), expected, 1e-6)


@pytest.mark.parametrize("relatif", ["l", "theta"])
@pytest.mark.parametrize("name", ["Explicit", "CG", "LiSSA"])
def test_relatif_divides_by_the_groups_own_denominator(name, relatif):
    case = make_case()
    task = case.task(own_target=True)
    new = ours(name, task, groups=GROUPS)
    new.cache(case.full_loader())
    old = theirs(name, task)
    old.cache(case.full_loader())
    rows = GROUPS.sum(old.generate_train_rep(0, tuple(x.unsqueeze(0) for x in case.train.tensors)), 0)
    targets = GROUPS.sum(old.generate_test_rep(0, tuple(x.unsqueeze(0) for x in case.train.tensors)), 0)
    denominators = old._compute_denom(0, rows, targets, relatif)
    plain = new.attribute(case.train_loader(), case.test_loader())
    close(new.attribute(case.train_loader(), case.test_loader(), relatif), plain / denominators[:, None])
    upstream = ours(name, task, groups=GROUPS, curvature="upstream")
    upstream.cache(case.full_loader())
    close(upstream.attribute(case.train_loader(), case.test_loader(), relatif), plain / denominators[:, None])


def test_relatif_of_singletons_is_dattri():
    case = make_case()
    old, new = theirs("CG", case.task()), ours("CG", case.task(), groups=np.arange(N), strategy="backward")
    for attributor in (old, new):
        attributor.cache(case.full_loader())
    expected = old.attribute(case.train_loader(), case.test_loader(), "l")
    close(new.attribute(case.train_loader(), case.test_loader(), "l"), expected)


@pytest.mark.parametrize("relatif", ["l", "theta"])
@pytest.mark.parametrize("name", ["Arnoldi", "DataInf", "EKFAC"])
def test_relatif_works_where_dattri_ignores_it(name, relatif):
    case = make_case()
    new = ours(name, case.task(), groups=GROUPS)
    new.cache(case.full_loader())
    plain, divided = (new.attribute(case.train_loader(), case.test_loader(), method) for method in (None, relatif))
    ratios = plain / divided
    close(ratios, ratios[:, :1].expand(-1, TESTS), 1e-4)
    own = new.self_attribute(case.train_loader())
    if relatif == "l":
        close(ratios[:, 0], own.sqrt(), 1e-4)
    else:
        assert bool((ratios[:, 0] > 0).all())


@pytest.mark.parametrize("name", INFLUENCE)
def test_self_attribute_is_the_diagonal(name):
    case = make_case()
    new = ours(name, case.task(), groups=GROUPS, strategy="backward", **CONVERGED.get(name, {}))
    new.cache(case.full_loader())
    found = new.self_attribute(case.train_loader())
    every = new.attribute(case.train_loader(), case.train_loader())
    close(found, GROUPS.sum(every, 1).diagonal())


@pytest.mark.parametrize("groups", [None, GROUPS])
def test_self_attribute_with_another_target_and_two_checkpoints(groups):
    case = make_case()
    task = case.task(2, own_target=True)
    new = ours("Explicit", task, groups=groups)
    new.cache(case.full_loader())
    every = new.attribute(case.train_loader(), case.train_loader()).detach()
    expected = every.diagonal() if groups is None else GROUPS.sum(every, 1).diagonal()
    for batch_size in (1, 5):  # dattri mixes points up with batches of one, and fails with several larger ones
        close(new.self_attribute(case.train_loader(batch_size)), expected)


@pytest.mark.parametrize("name", INFLUENCE)
def test_string_layer_name_works(name):
    case = make_case()
    scores = []
    for layer in (["2"], "2") if name == "EKFAC" else (["2.weight"], "2.weight"):
        attributor = ours(name, case.task(), layer)
        torch.manual_seed(3)
        attributor.cache(case.full_loader())
        scores.append(attributor.attribute(case.train_loader(), case.test_loader()))
    assert torch.equal(*scores)


@pytest.mark.parametrize("name", INFLUENCE)
def test_property_of_points_is_the_test_points(name):
    case = make_case()
    new = ours(name, case.task(), groups=GROUPS, **CONVERGED.get(name, {}))
    new.cache(case.full_loader())
    scores = new.attribute(case.train_loader(), case.test_loader())
    losses, mean = (make(case.test.tensors, cross_entropy) for make in (point_losses, mean_loss))
    close(new.attribute(case.train_loader(), property=losses), scores)
    close(new.attribute(case.train_loader(), property=mean), scores.mean(1, keepdim=True))


@pytest.mark.parametrize("name", ["Explicit", "DataInf"])
def test_property_without_groups_has_a_row_for_each_point(name):
    case = make_case()
    new = ours(name, case.task())
    new.cache(case.full_loader(10))
    expected = new.attribute(case.train_loader(), case.test_loader())
    close(new.attribute(case.train_loader(), property=point_losses(case.test.tensors, cross_entropy)), expected)


def test_datainf_splits_the_chosen_layers():
    case = make_case()
    names = ["0.weight", "2.weight", "2.bias"]
    new = ours("DataInf", case.task(), names, groups=GROUPS)
    new.cache(case.full_loader(6))
    found = new.attribute(case.train_loader(), case.test_loader())
    assert not hasattr(new, "_cached_train_reps")  # gradients of points are streamed, not held
    reference = theirs("Explicit", case.task(), names)

    def gradients(data: tuple[Tensor, ...]) -> Tensor:
        return reference.generate_train_rep(0, tuple(x.unsqueeze(0) for x in data)).detach()

    train, test = gradients(case.train.tensors), gradients(case.test.tensors)
    expected = torch.zeros(N, TESTS)
    for low, high in ((0, 20), (20, 38)):
        g, v = train[:, low:high], test[:, low:high]
        inverses = [torch.linalg.inv(0.2 * torch.eye(high - low) + torch.outer(row, row)) for row in g]
        expected += g @ torch.stack(inverses).mean(0) @ v.T
    close(found, GROUPS.sum(expected, 0))


def test_datainf_the_order_of_layer_name_changes_no_score():
    case = make_case()
    scores = []
    for names in (["0.weight", "0.bias", "2.weight", "2.bias"], ["0.weight", "2.weight", "0.bias", "2.bias"]):
        new = ours("DataInf", case.task(own_target=True), names, groups=GROUPS)
        new.cache(case.full_loader(6))
        scores.append(new.attribute(case.train_loader(), case.test_loader()))
    close(*scores)


def test_datainf_uses_the_asked_share_of_the_data():
    case = make_case()
    scores = []
    for make in (theirs, lambda *args, **extra: ours(*args, groups=GROUPS, **extra)):
        attributor = make("DataInf", case.task())
        attributor.fim_estimate_data_ratio = 0.4
        attributor.cache(case.full_loader(6))
        scores.append(attributor.attribute(case.train_loader(), case.test_loader()))
    close(scores[1], GROUPS.sum(scores[0], 0))


def test_ekfac_keeps_the_bias_in_its_column():
    case = make_case()
    new = ours("EKFAC", case.task(), groups=GROUPS)
    new.cache(case.full_loader())
    found = new.attribute(case.train_loader(), case.test_loader())
    losses = theirs("Explicit", case.task())

    def matrices(data: tuple[Tensor, ...]) -> list[Tensor]:
        rows = losses.generate_train_rep(0, tuple(x.unsqueeze(0) for x in data)).detach()
        first, second = rows[:, :25], rows[:, 25:]
        return [
            torch.cat([part[:, : out * into].view(-1, out, into), part[:, out * into :, None]], 2)
            for part, out, into in ((first, 5, 4), (second, 3, 5))
        ]

    expected = torch.zeros(N, TESTS)
    for name, train, test in zip("02", matrices(case.train.tensors), matrices(case.test.tensors), strict=True):
        q_a, q_s = new.cached_q[name]
        turned = [q_s @ matrix @ q_a.T for matrix in (train, test)]
        expected += (turned[0] / (new.cached_lambdas[name] + 0.2)).flatten(1) @ turned[1].flatten(1).T
    close(found, GROUPS.sum(expected.detach(), 0))


def test_metrics_of_dattri_take_group_rows():
    case = make_case()
    new = ours("Explicit", case.task(), groups=GROUPS)
    new.cache(case.full_loader())
    scores = new.attribute(case.train_loader(), case.test_loader())
    subsets = torch.tensor([[0, 1], [2, 3], [1, 4], [0, 4], [3, 4], [0, 2]])
    truth = scores[subsets].sum(1)
    assert torch.allclose(lds(scores, (truth, subsets))[0], torch.ones(TESTS), atol=1e-5)
    assert torch.allclose(loo_corr(scores, (2 * scores, torch.arange(5)))[0], torch.ones(TESTS), atol=1e-5)


def attribute(attributor: Any, **changes: Any) -> Tensor:
    case = make_case()
    arguments = {"train_dataloader": case.train_loader(), "test_dataloader": case.test_loader()} | changes
    return attributor.attribute(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"property": lambda model: model(torch.ones(1, 4)).sum()}, "both test_dataloader and property"),
        ({"test_dataloader": None}, "neither test_dataloader nor property"),
        ({"test_dataloader": None, "property": 3}, "property is a int"),
        ({"relatif_method": "x"}, "relatif_method='x'"),
        ({"train_dataloader": DataLoader(make_case().train, shuffle=True)}, "train_dataloader.*shuffles"),
        ({"test_dataloader": DataLoader(make_case().test, shuffle=True)}, "test_dataloader.*shuffles"),
        ({"train_dataloader": DataLoader(make_case().test)}, "built for 23 training points.*has 7"),
    ],
)
def test_bad_input_is_named(changes, message):
    attributor = ours("Explicit", make_case().task(), groups=GROUPS)
    attributor.cache(make_case().full_loader())
    with pytest.raises((ValueError, TypeError), match=message):
        attribute(attributor, **changes)


@pytest.mark.parametrize("name", ["Arnoldi", "DataInf", "EKFAC"])
def test_a_needed_cache_is_asked_for(name):
    with pytest.raises(ValueError, match="before cache"):
        attribute(ours(name, make_case().task(), groups=GROUPS))


def test_without_cache_the_training_points_stand_for_all_data():
    case = make_case()
    cached, bare = (ours("CG", case.task(), groups=GROUPS) for _ in range(2))
    cached.cache(case.train_loader())
    with pytest.warns(UserWarning, match="cache was not called"):
        scores = bare.attribute(case.train_loader(), case.test_loader())
    assert torch.equal(scores, cached.attribute(case.train_loader(), case.test_loader()))


def test_singular_hessian_names_regularization():
    case = make_case()
    attributor = ggda_dattri.IFAttributorArnoldi(case.task(), groups=GROUPS, proj_dim=30, max_iter=40)
    attributor.cache(case.full_loader())
    with pytest.warns(UserWarning, match="negative eigenvalues"), pytest.raises(ValueError, match="regularization"):
        attributor.attribute(case.train_loader(), case.test_loader())


def test_unknown_names_are_refused():
    case = make_case()
    with pytest.raises(ValueError, match="layer_name has 'nope'"):
        attribute(ours("Explicit", case.task(), ["nope"], groups=GROUPS))
    with pytest.raises(ValueError, match="curvature='half'"):
        ours("Explicit", case.task(), groups=GROUPS, curvature="half")
    with pytest.raises(ValueError, match="strategy='quick'"):
        attribute(ours("Explicit", case.task(), groups=GROUPS, strategy="quick"))


@pytest.mark.parametrize("strategy", ["directional", "forward", "segmented", "backward", "persample"])
def test_strategies_give_the_same_scores(strategy):
    case = make_case()
    scores = []
    for chosen in ("auto", strategy):
        attributor = ours("CG", case.task(2), groups=GROUPS, strategy=chosen)
        attributor.cache(case.full_loader())
        scores.append(attributor.attribute(case.train_loader(), case.test_loader()))
    close(scores[1], scores[0])


def test_refinement_and_order():
    case = make_case()

    def scores(groups: Any) -> Tensor:
        attributor = ours("LiSSA", case.task(), groups=groups)
        attributor.cache(case.full_loader())
        return attributor.attribute(case.train_loader(), case.test_loader())

    apart = scores(GROUPS)
    together = scores(Groups(np.where(GROUPS.labels == 4, 1, GROUPS.labels)))
    close(together[1], apart[1] + apart[4])
    close(scores([GROUPS[j] for j in (3, 1, 0, 4, 2)]), apart[[3, 1, 0, 4, 2]])
