"""Diagnostics of groups: exact against one backward pass per point, in bounded memory, naming groups to distrust."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import CLASSES, MODELS, Case, N, make_case
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext import GroupGradients, Groups, properties
from ggda_ext.gradients.strategies import ghost
from ggda_ext.grouping import GradKMeansGroups, KMeansGroups, by_label, random_groups

LOSS = nn.CrossEntropyLoss()
PARTITIONS = {
    "uneven": np.repeat([2, 0, 3, 1], [1, 5, 15, 2]),
    "scattered": np.arange(N) % 5,
    "one": np.zeros(N, int),
    "singletons": np.arange(N)[::-1].copy(),
}


def goal(case: Case) -> properties.Property:
    return properties.mean_loss((case.x[:7], case.y[:7]), LOSS)


def truth(case: Case, groups: Groups, direction: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Share of members with the group's sign, and alignment, from a gradient per point."""
    rows = case.gradients()
    scores = rows @ direction
    share, alignment = [], []
    for members in groups:
        members = members.tolist()
        own = rows[members]
        share.append(float((scores[members].sign() == scores[members].sum().sign()).double().mean()))
        assert min(scores[members].abs().min(), scores[members].sum().abs()) > 1e-9 * scores.abs().max()  # no doubt
        alignment.append(float(own.sum(0).square().sum() / own.square().sum()))
    return np.array(share), np.array(alignment)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("name", MODELS)
def test_sign_share_and_alignment_are_those_of_single_gradients(name: str, partition: str) -> None:
    case, groups = make_case(name), Groups(PARTITIONS[partition])
    found = groups.summary(case.model, LOSS, case.data, property=goal(case))
    direction = case.gradients(case.x[:7], case.y[:7]).mean(0)
    share, alignment = truth(case, groups, direction)
    np.testing.assert_allclose(found.same_sign, share, rtol=1e-12)
    np.testing.assert_allclose(found.alignment, alignment, rtol=1e-12)
    np.testing.assert_allclose(found.scores, groups.sum(case.gradients() @ direction).numpy(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_single_points_agree_with_themselves(name: str) -> None:
    case = make_case(name)
    found = Groups.singletons(N).summary(case.model, LOSS, case.data, property=goal(case))
    assert (found.same_sign == 1).all()
    np.testing.assert_allclose(found.alignment, 1, rtol=1e-12)


def test_alignment_of_equal_points_is_the_size_of_their_group() -> None:
    case = make_case("mlp")
    x, y = case.x[:4].repeat_interleave(5, 0), case.y[:4].repeat_interleave(5)
    found = Groups(np.arange(20) // 5).summary(case.model, LOSS, (x, y), property=goal(case))
    np.testing.assert_allclose(found.alignment, 5, rtol=1e-12)
    assert (found.same_sign == 1).all()


def test_points_without_gradients_count_as_aligned() -> None:
    case = make_case("mlp")
    found = Groups(np.arange(N) % 2).summary(case.model, lambda output, target: 0 * output.sum(1), case.data)
    assert found.alignment.tolist() == [1, 1]
    assert found.curvature.tolist() == [0, 0]


@settings(max_examples=25, deadline=None)
@given(labels=st.lists(st.integers(0, 6), min_size=N, max_size=N), paired=st.integers(1, 30))
@pytest.mark.parametrize("name", ["mlp", "shared"])
def test_squared_norms_are_those_of_the_summed_gradients(name: str, labels: list[int], paired: int) -> None:
    case, groups = make_case(name), Groups(labels)
    rows = case.gradients()
    expected = torch.stack([rows[members].sum(0).square().sum() for members in groups])
    before = ghost.PAIRED
    try:
        ghost.PAIRED = paired
        found = GroupGradients(case.model, LOSS, case.data, groups).squared_norms()
    finally:
        ghost.PAIRED = before
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("chosen", [["0.weight"], ["2.bias"], ["0.bias", "2.weight"]])
def test_squared_norms_count_chosen_parameters_only(chosen: list[str]) -> None:
    case = make_case("mlp")
    for groups in (Groups.singletons(N), Groups(PARTITIONS["uneven"])):
        provider = GroupGradients(case.model, LOSS, case.data, groups, parameters=chosen)
        torch.testing.assert_close(provider.squared_norms(), provider.rows().square().sum(1), rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_batch_size_and_loaders_do_not_change_the_diagnostics(name: str) -> None:
    case, groups = make_case(name), Groups(PARTITIONS["uneven"])
    expected = groups.summary(case.model, LOSS, case.data, property=goal(case))
    loader = DataLoader(TensorDataset(*case.data), batch_size=3)
    for data, batch_size in ((case.data, 4), (loader, 4), (loader, None)):
        found = groups.summary(case.model, LOSS, data, property=goal(case), batch_size=batch_size)
        np.testing.assert_allclose(found.same_sign, expected.same_sign, rtol=1e-12)
        np.testing.assert_allclose(found.alignment, expected.alignment, rtol=1e-12)
        np.testing.assert_array_equal(found.class_share, expected.class_share)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_points_left_out_change_nothing(name: str) -> None:
    case = make_case(name)
    labels = np.where(np.arange(N) < 17, np.arange(N) % 3, -1)
    found = Groups(labels, rest="drop").summary(case.model, LOSS, case.data, property=goal(case), features=case.x)
    inside = (case.x[:17], case.y[:17])
    alone = Groups(labels[:17]).summary(case.model, LOSS, inside, property=goal(case), features=inside[0])
    np.testing.assert_allclose(found.same_sign, alone.same_sign, rtol=1e-12)
    np.testing.assert_allclose(found.alignment, alone.alignment, rtol=1e-12)
    np.testing.assert_allclose(found.spread, alone.spread, rtol=1e-12)
    assert found.total_spread == pytest.approx(alone.total_spread, rel=1e-12)
    assert "6 points are in no group" in str(found)


def test_rows_in_memory_stay_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    case, largest = make_case("cnn"), []
    whole = GroupGradients.blocks

    def watched(self: GroupGradients, max_rows: int | None = None):
        for ids, rows in whole(self, max_rows):
            largest.append(rows.numel() * rows.element_size())
            yield ids, rows

    monkeypatch.setattr(GroupGradients, "blocks", watched)
    row = 8 * sum(parameter.numel() for parameter in case.model.parameters())
    Groups(np.arange(N) % 4).summary(case.model, LOSS, case.data, memory_budget=3 * row)
    assert len(largest) >= N // 3
    assert max(largest) <= 3 * row


def test_linear_layers_form_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("mlp")
    monkeypatch.setattr(GroupGradients, "blocks", None)
    found = Groups(np.arange(N) % 4).summary(case.model, LOSS, case.data, property=goal(case))
    assert found.alignment.shape == (4,)


# ---- spread


@pytest.mark.parametrize("of", [np.asarray, torch.from_numpy])
def test_spread_is_the_mean_squared_distance_to_the_group_mean(of: type) -> None:
    rows, groups = np.random.default_rng(0).normal(size=(N, 3)), Groups(PARTITIONS["uneven"])
    found = groups.summary(features=of(rows))
    expected = [np.square(rows[members] - rows[members].mean(0)).sum(1).mean() for members in groups]
    np.testing.assert_allclose(found.spread, expected, rtol=1e-12)
    assert found.total_spread == pytest.approx(rows.var(0).sum())


def test_spread_of_a_builder_is_its_inertia() -> None:
    case = make_case("mlp")
    for builder in (KMeansGroups(n_groups=4, random_state=0), GradKMeansGroups(case.model, LOSS, n_groups=4)):
        groups = builder.fit_groups(case.data)
        found = groups.summary(data=case.data, features=builder)
        assert float(found.spread @ groups.sizes) == pytest.approx(builder.inertia_, rel=1e-9)
        assert groups.summary(case.model, LOSS, case.data, features=builder).spread.tolist() == found.spread.tolist()


# ---- what is printed, and warned about


def test_sizes_alone_need_no_model() -> None:
    text = str(Groups({"web": [0, 1, 2], "books": [3]}).summary())
    assert "2 groups of 4 points: sizes 1 … 3, median 2, mean 2.0; the largest holds 75.0%" in text
    assert text.index("web") < text.index("books")
    assert "same sign" not in text


def test_the_table_is_cut_and_starts_with_the_groups_that_matter_most() -> None:
    case, groups = make_case("mlp"), random_groups(N, n_groups=12, random_state=0)
    found = groups.summary(case.model, LOSS, case.data, property=goal(case))
    first = str(found).splitlines()[5].split()[0]
    assert int(first) == np.abs(found.scores).argmax()
    assert "… and 4 more, by absolute score" in str(found)
    assert repr(found) == str(found)
    assert set(found.columns) >= {"group", "size", "scores", "same_sign", "alignment"}
    assert {len(column) for column in found.columns.values()} == {12}


def test_large_groups_are_named() -> None:
    found = Groups(np.repeat(["a", "b", "c", "d", "e", "f"], [25, 21, 20, 12, 12, 10])).summary()
    assert {reason: ids.tolist() for reason, ids in found.untrustworthy.items()} == {
        "more than 20% of all points": [0, 1]
    }
    assert "2 groups, a, b, are each more than 20% of all points" in str(found)
    assert "Warning" not in str(random_groups(100, 10).summary())


def test_a_whole_class_is_named() -> None:
    targets = np.arange(100) % 10
    groups = Groups(np.where(targets == 3, 10, np.arange(100) // 10 % 10))
    text = str(groups.summary(targets=targets))
    assert "group 10 is nearly a whole class" in text
    assert "Warning" not in str(Groups(np.arange(100) // 10).summary(targets=targets))
    case = make_case("mlp")
    assert f"{CLASSES} groups, 0, 1, 2, are each nearly a whole class" in str(
        by_label(case.y).summary(case.model, LOSS, case.data)
    )


def test_a_group_that_owns_the_curvature_is_named_however_small() -> None:
    case = make_case("logistic")
    x = case.x.clone()
    x[:2] *= 100
    groups = Groups(np.repeat([0, 1, 2, 3, 4, 5, 6, 7], [2, 3, 3, 3, 3, 3, 3, 3]))
    y = torch.where(torch.arange(N) < 2, case.model(x).argmin(1), case.y)
    x[1], y[1] = x[0], y[0]
    found = groups.summary(case.model, LOSS, (x, y))
    assert "group 0 is so coherent that more than 20% of the curvature is its own" in str(found)
    rows = Case(case.model, x, y).gradients()
    along = rows[:2].sum(0) / rows[:2].sum(0).norm()
    assert found.curvature[0] <= float((rows[:2] @ along).square().sum() / rows.square().sum()) * (1 + 1e-12)


def test_curvature_of_a_group_is_a_lower_bound_of_its_share_of_the_fisher() -> None:
    case, groups = make_case("mlp"), Groups(PARTITIONS["scattered"])
    rows = case.gradients()
    found = groups.summary(case.model, LOSS, case.data).curvature
    for j, members in enumerate(groups):
        along = rows[members].sum(0) / rows[members].sum(0).norm()
        assert 0 < found[j] <= float((rows[members] @ along).square().sum() / rows.square().sum())


def test_effects_are_larger_than_estimated_by_the_share_that_leaves() -> None:
    """Least squares in one dimension, where both are known: without a share s, θ moves 1 / (1 - s) times as far."""
    x, y = torch.ones(100, 1, dtype=torch.float64), torch.randn(100, 1, dtype=torch.float64)
    residual = y - y.mean()
    for share in (5, 20, 50):
        estimate = -residual[:share].sum() / 100
        effect = y[share:].mean() - y.mean()
        assert float(effect / estimate) == pytest.approx(100 / (100 - share))
    model = nn.Linear(1, 1, bias=False).double()
    found = Groups(np.repeat([0, 1, 2], [20, 50, 30])).summary(model, nn.MSELoss(), (x, torch.zeros_like(y)))
    np.testing.assert_allclose(found.curvature, [0.2, 0.5, 0.3], rtol=1e-12)


# ---- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": True}, "model is given without data"),
        ({"data": True}, "data is given without a model"),
        ({"property": True}, "property= is given without a model"),
        ({"batch_size": 3}, "batch_size= is given without a model"),
        ({"features": np.zeros((5, 2))}, f"features has 5 rows for {N} training points"),
        ({"features": np.full((N, 2), np.nan)}, f"features of {N} of {N} points hold NaN"),
        ({"features": KMeansGroups(n_groups=2)}, "features is a builder: pass the data"),
        ({"targets": [0, 1]}, f"targets has 2 labels for {N} training points"),
    ],
)
def test_bad_input_is_named(options: dict, message: str) -> None:
    case = make_case("mlp")
    given_true = {"model": case.model, "data": case.data, "property": goal(case)}
    options = {name: given_true.get(name, value) for name, value in options.items()}
    with pytest.raises(ValueError, match=message):
        Groups(np.arange(N) % 4).summary(**options)


def test_properties_of_many_numbers_and_other_data_are_refused() -> None:
    case, groups = make_case("mlp"), Groups(np.arange(N) % 4)
    with pytest.raises(ValueError, match=f"property has {N} components"):
        groups.summary(case.model, LOSS, case.data, property=properties.point_losses(case.data, LOSS))
    with pytest.raises(ValueError, match="property has 2 components"):
        groups.summary(case.model, LOSS, case.data, property=lambda model: model[0].bias[:2])
    with pytest.raises(ValueError, match=f"groups was built for {N} training points"):
        groups.summary(case.model, LOSS, (case.x[:5], case.y[:5]))
    found = groups.summary(
        case.model, LOSS, case.data, property=properties.point_losses((case.x[:1], case.y[:1]), LOSS)
    )
    assert found.same_sign.shape == (4,)


def test_the_model_is_left_as_it_was() -> None:
    case, groups = make_case("mlp"), Groups(np.arange(N) % 4)
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    groups.summary(case.model, LOSS, case.data, property=goal(case))
    with pytest.raises(ZeroDivisionError):
        groups.summary(case.model, lambda output, target: 1 / 0, case.data)
    assert all(torch.equal(before[name], value) for name, value in case.model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in case.model.parameters())
    assert not any(module._forward_hooks for module in case.model.modules())


def test_names_of_a_summary_stay_on_their_line_and_are_cut():
    text = str(Groups(["line\nbreak", "long " * 30, "x"]).summary())
    assert "line break" in text
    assert max(map(len, text.splitlines()[3:6])) < 60
