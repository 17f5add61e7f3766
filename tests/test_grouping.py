"""Builders of groups: partitions by law, the paper's clusterings, sizes, and bad input."""

from __future__ import annotations

import datetime
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.cluster import DBSCAN, KMeans
from sklearn.metrics import adjusted_rand_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext.grouping import (
    GradKMeansGroups,
    KMeansGroups,
    ReprKMeansGroups,
    by_column,
    by_label,
    from_clusters,
    gradients,
    random_groups,
    representations,
)
from ggda_ext.grouping import kmeans as engine
from ggda_ext.grouping.kmeans import inertia, kmeans
from ggda_ext.groups import Groups

N, D, C = 120, 6, 3


def blobs(n: int = N, d: int = D, seed: int = 0) -> np.ndarray:
    """Points around a few centres, with the heavy tails that gradients have."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(8, d))[rng.integers(8, size=n)] * 3 + rng.standard_t(3, size=(n, d)) * 0.3


def spread(points: np.ndarray, groups: Groups) -> float:
    return sum(float(((points[members] - points[members].mean(0)) ** 2).sum()) for members in groups)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, C)).double()


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(blobs()), torch.from_numpy(np.random.default_rng(1).integers(C, size=N))


class TokenModel(nn.Module):
    """A linear head that runs on every token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 7).double(), nn.Linear(7, C).double()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens))).mean(1)


# ---- groups at random, or ones the user has


@given(n=st.integers(1, 200), size=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_random_group_sizes_differ_by_at_most_one_and_stay_within_the_size(n: int, size: int, seed: int) -> None:
    size = min(size, n)
    groups = random_groups(n, size, random_state=seed)
    assert groups.n == n
    assert np.ptp(groups.sizes) <= 1
    assert groups.sizes.max() <= size
    assert len(random_groups(n, n_groups=size, random_state=seed)) == size


def test_random_groups_are_random_and_repeat_with_the_seed() -> None:
    first, again, other = (random_groups(100, 5, random_state=seed) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert not np.array_equal(first.labels, np.arange(100) % 20)


def test_by_label_has_one_group_per_class() -> None:
    groups = by_label(torch.tensor([7, 3, 7, 3, 3]), n=5)
    assert groups.names == (3, 7)
    assert groups.sizes.tolist() == [3, 2]
    assert by_label(TensorDatasetWithTargets()).sizes.tolist() == [2, 1]


class TensorDatasetWithTargets:
    targets = ("cat", "dog", "cat")


@pytest.mark.parametrize("of", [list, np.array, pd.Series, torch.tensor])
def test_by_column_bins_numbers_alike_in_every_container(of: type) -> None:
    values = [5.0, 1.0, 20.0, 99.0, 100.0, 10.0]
    assert by_column(of(values), bins=[0, 10, 50, 100]).labels.tolist() == [0, 0, 1, 2, 2, 1]
    assert by_column(of(values), bins=3).sizes.tolist() == [2, 2, 2]


@given(values=st.lists(st.integers(-3, 3), min_size=1, max_size=30), bins=st.integers(1, 10))
def test_bins_are_in_order_and_keep_equal_values_together(values: list[int], bins: int) -> None:
    labels = by_column(values, bins=bins).labels
    order = np.argsort(values, kind="stable")
    assert (np.diff(labels[order]) >= 0).all()
    assert len(set(zip(values, labels.tolist(), strict=True))) == len(set(values))
    assert labels.max() < bins


def test_by_column_keeps_names_and_leaves_out_what_no_bin_holds() -> None:
    column = pd.Series([3.0, None, 12.0, -1.0])
    groups = by_column(column, bins=[0, 10, 11, 20], rest="group")
    assert groups.names == ("[0, 10)", "[11, 20]", "rest")
    assert groups.labels.tolist() == [0, 2, 1, 2]
    with pytest.raises(ValueError, match="2 of 4 points are in no group"):
        by_column(column, bins=[0, 10, 20])
    assert by_column(pd.Series(["b", "a", "b"])).names == ("a", "b")


@pytest.mark.parametrize("of", [pd.Series, lambda days: np.array(days, "datetime64[D]"), list])
def test_by_column_groups_dates_by_period(of: type) -> None:
    days = [datetime.date(2024, 5, 3), datetime.date(2023, 1, 1), datetime.date(2024, 5, 31), datetime.date(2024, 6, 1)]
    groups = by_column(of(days), freq="M")
    assert groups.names == ("2023-01", "2024-05", "2024-06")
    assert groups.labels.tolist() == [1, 0, 1, 2]


@pytest.mark.parametrize("dtype", ["date32[pyarrow]", "timestamp[us][pyarrow]", "datetime64[ns]"])
def test_dates_of_any_column_type_may_be_missing(dtype: str) -> None:
    pytest.importorskip("pyarrow")
    column = pd.Series([datetime.date(2024, 5, 3), None, datetime.date(2024, 6, 1)], dtype="object").astype(dtype)
    groups = by_column(column, freq="M", rest="drop")
    assert (groups.names, groups.labels.tolist()) == (("2024-05", "2024-06"), [0, -1, 1])


def test_names_of_bins_have_six_digits_unless_they_would_be_the_same() -> None:
    assert by_column([0.1 + 0.2, 1 / 3, 2 / 3], bins=2).names == ("[0.3, 0.333333)", "[0.333333, 0.666667]")
    near = [1.0, 1 + 1e-9, 1 + 2e-9]
    assert len(by_column(near, bins=near).names) == 2
    assert by_column(np.array([0.1, 0.7], "float32"), bins=1).names == ("[0.1, 0.7]",)


def test_weeks_go_from_monday_to_sunday() -> None:
    days = pd.Series(pd.date_range("2024-01-01", periods=8))
    groups = by_column(days, freq="W")
    assert groups.labels.tolist() == [0] * 7 + [1]
    assert groups.names == ("2024-01-01", "2024-01-08")
    before_the_epoch = by_column(np.array(["1969-12-28", "NaT", "1969-12-29"], "datetime64[D]"), freq="W", rest="drop")
    assert before_the_epoch.names == ("1969-12-22", "1969-12-29")
    assert before_the_epoch.labels.tolist() == [0, -1, 1]


def test_dates_with_a_time_zone_keep_the_time_that_the_clock_showed() -> None:
    there = pd.Series(pd.to_datetime(["2024-01-01 00:30", None, "2024-07-31 23:30"]).tz_localize("Europe/Berlin"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = by_column(there, freq="M", rest="drop")
    assert groups.names == ("2024-01", "2024-07")
    assert groups.labels.tolist() == [0, -1, 1]
    edges = [pd.Timestamp("2024-01-01", tz="Europe/Berlin"), pd.Timestamp("2024-06-30 22:00", tz="UTC")]
    for some in (edges, [edge.to_pydatetime() for edge in edges], np.array(edges, object)):
        binned = by_column(there, bins=[*some, pd.Timestamp("2024-08-01", tz="Europe/Berlin")], rest="drop")
        assert binned.names == ("[2024-01-01, 2024-07-01)", "[2024-07-01, 2024-08-01]")
        assert binned.labels.tolist() == [0, -1, 1]
    assert by_column(there, bins=["2024-01-01", "2024-02-01"], rest="drop").labels.tolist() == [0, -1, -1]
    offsets = [datetime.datetime.fromisoformat(text) for text in ("2024-01-01T00:30+01:00", "2024-07-31T23:30+02:00")]
    assert by_column(offsets, freq="D").names == ("2024-01-01", "2024-07-31")


def test_from_clusters_takes_any_clusterer_and_leaves_it_unfitted() -> None:
    points, clusterer = blobs(), KMeans(4, n_init=1, random_state=0)
    groups = from_clusters(clusterer, torch.from_numpy(points))
    assert np.array_equal(groups.labels, clone(clusterer).fit_predict(points))
    assert not hasattr(clusterer, "labels_")
    assert from_clusters(clone(clusterer).fit(points)) == groups
    assert len(from_clusters(KMeansGroups(n_groups=4, random_state=0), points)) == 4


def test_from_clusters_asks_what_to_do_with_noise() -> None:
    points = np.array([[0.0], [0.1], [50.0]])
    with pytest.raises(ValueError, match="rest='drop'"):
        from_clusters(DBSCAN(eps=1, min_samples=2), points)
    assert from_clusters(DBSCAN(eps=1, min_samples=2), points, rest="group").sizes.tolist() == [2, 1]


# ---- features


def test_gradient_feature_of_a_linear_head_is_softmax_minus_onehot_times_weight(model: nn.Module, data: tuple) -> None:
    with torch.no_grad():
        residual = model(data[0]).softmax(1) - nn.functional.one_hot(data[1], C)
    expected = (residual @ model[4].weight).detach().numpy()
    for reduction in ("mean", "sum", "none"):
        found = gradients(model, nn.CrossEntropyLoss(reduction=reduction), data, rotate=False, batch_size=32)
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-14)


def test_rotated_gradients_keep_all_pairwise_distances(model: nn.Module, data: tuple) -> None:
    full = gradients(model, nn.CrossEntropyLoss(), data, rotate=False)
    rotated = gradients(model, nn.CrossEntropyLoss(), data)
    assert full.shape == (N, 5)
    assert rotated.shape == (N, C)
    distances = [np.linalg.norm(rows[:, None] - rows[None], axis=2) for rows in (full, rotated)]
    assert distances[0].max() > 0.1
    np.testing.assert_allclose(distances[1], distances[0], rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("loss_fn", [nn.MultiMarginLoss(), lambda out, y: (out.sin() * out[:, :1]).mean(), None])
@pytest.mark.parametrize("rotate", [True, False])
def test_gradients_of_any_loss_match_autograd_point_by_point(
    model: nn.Module, data: tuple, loss_fn: object, rotate: bool
) -> None:
    found = gradients(model, loss_fn, data, rotate=rotate)
    rows = []
    for x, y in zip(data[0], data[1], strict=True):
        hidden = model[:4](x[None]).detach().requires_grad_()
        output = model[4](hidden)
        loss = output.sum() if loss_fn is None else loss_fn(output, y[None])
        rows.append(torch.autograd.grad(loss, hidden)[0][0])
    expected = torch.stack(rows).numpy()
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-9, atol=1e-13)


def test_features_of_a_sequence_are_summed_gradients_and_mean_representations() -> None:
    torch.manual_seed(0)
    model, tokens, y = TokenModel(), torch.randint(11, (20, 4)), torch.randint(C, (20,))
    hidden = torch.tanh(model.embed(tokens)).detach().requires_grad_()
    loss = nn.functional.cross_entropy(model.head(hidden).mean(1), y, reduction="sum")
    slope = torch.autograd.grad(loss, hidden)[0].sum(1).numpy()
    found = [gradients(model, nn.CrossEntropyLoss(), (tokens, y), rotate=rotate) for rotate in (False, True)]
    np.testing.assert_allclose(found[0], slope, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(found[1] @ found[1].T, slope @ slope.T, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(representations(model, tokens), hidden.detach().mean(1).numpy(), rtol=1e-12)


def test_representations_are_the_inputs_of_the_last_linear_layer_to_run(model: nn.Module, data: tuple) -> None:
    with torch.no_grad():
        last, first = model[:4](data[0]).numpy(), model[:2](data[0]).numpy()
    np.testing.assert_allclose(representations(model, data, batch_size=50), last, rtol=1e-12)
    np.testing.assert_allclose(representations(model, data, layer="2"), first, rtol=1e-12)
    np.testing.assert_allclose(representations(model, data, layer=model[2]), first, rtol=1e-12)
    reversed_order = ReversedOrder()
    with torch.no_grad():
        hidden = reversed_order.body(data[0]).numpy()
    np.testing.assert_allclose(representations(reversed_order, data), hidden, rtol=1e-12)


class ReversedOrder(nn.Module):
    """A head that is declared before the body, and goes on in place."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 2).double(), nn.Linear(D, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).relu_()


def test_gradients_survive_in_place_activations_after_the_layer(data: tuple) -> None:
    model = ReversedOrder()
    hidden = model.body(data[0]).detach().requires_grad_()
    expected = torch.autograd.grad(model.head(hidden).relu().sum(), hidden)[0].numpy()
    np.testing.assert_allclose(gradients(model, None, data, rotate=False), expected, rtol=1e-12)
    found = gradients(model, None, data)
    np.testing.assert_allclose(found @ found.T, expected @ expected.T, rtol=1e-9, atol=1e-13)


# ---- clusterings


def builders(model: nn.Module, **parameters: object) -> list[KMeansGroups]:
    return [
        KMeansGroups(**parameters),
        ReprKMeansGroups(model, **parameters),
        GradKMeansGroups(model, nn.CrossEntropyLoss(), **parameters),
        GradKMeansGroups(model, nn.CrossEntropyLoss(), whiten="scale", **parameters),
    ]


@pytest.mark.parametrize("k", [1, 2, 17, 60, N])
def test_there_are_as_many_groups_as_asked_for(model: nn.Module, data: tuple, k: int) -> None:
    for builder in builders(model, n_groups=k, random_state=0):
        assert len(builder.fit_groups(data)) == k


def test_same_random_state_gives_the_same_groups(model: nn.Module, data: tuple) -> None:
    for first, again, other in zip(*(builders(model, group_size=6, random_state=s) for s in (5, 5, 6)), strict=True):
        groups = first.fit_groups(data)
        assert groups == again.fit_groups(data)
        assert groups != other.fit_groups(data)


@pytest.mark.parametrize("random_state", [7, np.random.default_rng(7), np.random.RandomState(7)])
def test_global_random_states_do_not_change(model: nn.Module, data: tuple, random_state: object) -> None:
    before = np.random.get_state()[1].copy(), torch.get_rng_state()
    for builder in builders(model, group_size=6, random_state=random_state):
        builder.fit(data)
    random_groups(9, 2, random_state=random_state)
    assert np.array_equal(before[0], np.random.get_state()[1])
    assert torch.equal(before[1], torch.get_rng_state())


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(2, 30), whiten=st.sampled_from(["pca", "scale", None]))
def test_permuting_the_data_permutes_the_groups(seed: int, k: int, whiten: str | None) -> None:
    rng = np.random.default_rng(seed)
    points, order = blobs(60, 3, seed).round(1), rng.permutation(60)  # rounded: with equal values and rows
    builder = KMeansGroups(n_groups=k, whiten=whiten, random_state=0)
    labels, permuted = builder.fit_predict(points), builder.fit_predict(points[order])
    assert np.array_equal(permuted, labels[order])


def test_permuting_the_data_permutes_gradient_groups(model: nn.Module, data: tuple) -> None:
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    for builder in builders(model, group_size=5, random_state=0):
        labels = builder.fit_predict(data)
        assert np.array_equal(builder.fit_predict((data[0][order], data[1][order])), labels[order.numpy()])


@pytest.mark.parametrize("whiten", ["pca", None])
def test_low_dimensional_and_general_gradients_give_the_same_groups(
    model: nn.Module, data: tuple, whiten: str | None
) -> None:
    loss = nn.CrossEntropyLoss()
    builder = GradKMeansGroups(model, loss, group_size=6, whiten=whiten, random_state=0)
    general = FullGradients(model, loss, group_size=6, whiten=whiten, random_state=0)
    assert builder.fit_groups(data) == general.fit_groups(data)


def test_gradients_are_clustered_in_as_many_dimensions_as_there_are_classes(model: nn.Module, data: tuple) -> None:
    for whiten, width in (("pca", C), (None, C), ("scale", 5)):
        builder = GradKMeansGroups(model, nn.CrossEntropyLoss(), group_size=6, whiten=whiten)
        assert builder.features(data).shape == (N, width)


class FullGradients(GradKMeansGroups):
    """Grad-K-Means on the gradients themselves."""

    def features(self, data: object) -> np.ndarray:
        return gradients(self.model, self.loss_fn, data, rotate=False)


def test_whitening_makes_groups_independent_of_the_units_of_the_features() -> None:
    points = blobs()
    units = np.array([1e-9, 1.0, 1e3, 1e7, 2.0, 1e-4])
    mixed = points @ np.random.default_rng(0).normal(size=(D, D))
    for whiten, other in (("pca", points * units), ("scale", points * units), ("pca", mixed)):
        parameters = {"group_size": 6, "whiten": whiten, "random_state": 0}
        assert KMeansGroups(**parameters).fit_groups(points) == KMeansGroups(**parameters).fit_groups(other)


def rows_of(kind: str, d: int, seed: int) -> np.ndarray:
    return blobs(2000, d, seed) if kind == "blobs" else np.random.default_rng(seed).normal(size=(2000, d))


@pytest.mark.parametrize("kind", ["blobs", "normal"])
@pytest.mark.parametrize("d", [5, 24])  # nearest centres by k-d tree, and by matrix products
def test_groups_and_ids_do_not_depend_on_the_coordinates(kind: str, d: int) -> None:
    points, builder = rows_of(kind, d, 0), KMeansGroups(group_size=20, random_state=0)
    mirrored = points * np.where(np.arange(d) == 1, -1, 1)
    mixed = points @ np.random.default_rng(1).normal(size=(d, d))
    groups = builder.fit_groups(points)
    for other in (mixed, mirrored, points[:, ::-1]):
        found = builder.fit_groups(other)
        assert adjusted_rand_score(groups.labels, found.labels) == pytest.approx(1)
        assert found == groups


@pytest.mark.parametrize("options", [{}, {"max_size": 9}, {"balanced": True}])
def test_groups_and_ids_do_not_depend_on_the_last_bit(options: dict) -> None:
    for seed in range(10):
        rng, points = np.random.default_rng(seed), blobs(seed=seed)
        noisy = np.nextafter(points, np.where(rng.random(points.shape) < 0.5, -np.inf, np.inf))
        for whiten in ("pca", None):
            builder = KMeansGroups(group_size=6, whiten=whiten, random_state=0, **options)
            assert builder.fit_groups(noisy) == builder.fit_groups(points)


def test_groups_are_numbered_from_the_mean_outwards() -> None:
    points = blobs()
    distances = np.linalg.norm(points - points.mean(0), axis=1)
    for options in ({}, {"max_size": 5}, {"balanced": True}):
        groups = KMeansGroups(group_size=6, whiten=None, random_state=0, **options).fit_groups(points)
        assert (np.diff([distances[members].min() for members in groups]) > 0).all()


def test_ranks_are_shared_by_what_differs_by_rounding_only() -> None:
    values = np.array([0.1 + 0.2, 5.0, 0.3, 1e-9, 0.0, 0.3 * (1 + 1e-6)])
    assert engine.ranks(values).tolist() == [2, 4, 2, 1, 0, 3]
    assert engine.ranks(values, scale=100.0).tolist() == [1, 3, 1, 0, 0, 2]


def test_constant_and_repeated_features_do_not_change_the_groups() -> None:
    points = blobs()
    padded = np.hstack([points, np.full((N, 2), 3.7), points[:, :1]])
    builder = KMeansGroups(group_size=6, random_state=0)
    assert builder.fit_groups(points) == builder.fit_groups(padded)


@pytest.mark.parametrize("d", [2, 9, 20])  # k-d tree, and above it
@pytest.mark.parametrize("k", [8, 60])
def test_inertia_is_close_to_scikit_learn_or_better(d: int, k: int) -> None:
    points = blobs(400, d)
    ours = [inertia(points, kmeans(points, k, np.random.default_rng(seed), 60, 1e-3)) for seed in range(5)]
    theirs = [KMeans(k, n_init=1, max_iter=60, tol=1e-3, random_state=seed).fit(points).inertia_ for seed in range(5)]
    assert min(ours) < 1.05 * min(theirs)  # the best of five: one start of either may end badly


@pytest.mark.parametrize("d", [3, 24])  # nearest centres by k-d tree, and by matrix products
def test_inertia_is_close_to_scikit_learn_for_many_small_clusters(d: int) -> None:
    points = blobs(2400, d)
    ours = inertia(points, kmeans(points, 600, np.random.default_rng(0), 60, 1e-3))
    assert ours < 1.05 * KMeans(600, n_init=1, max_iter=60, tol=1e-3, random_state=0).fit(points).inertia_


def test_nearest_centres_in_many_dimensions_are_those_of_all_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_PRODUCTS", 100)  # several parts
    points = blobs(90, 24)
    centres = points[::9].copy()
    distances, nearest = engine._nearest(centres, points, 2)
    all_distances = np.linalg.norm(points[:, None] - centres, axis=-1)
    expected = np.sort(all_distances, 1)[:, :2]
    assert np.allclose(np.take_along_axis(all_distances, nearest, 1), expected)
    assert np.allclose(distances, expected)
    assert (distances[::9, 0] == 0).all()  # exactly: a point that is a centre is not drawn again


def test_builders_take_a_loader_in_batches(model: nn.Module, data: tuple) -> None:
    loader = DataLoader(TensorDataset(*data), batch_size=7)
    for builder in builders(model, group_size=6, random_state=0, batch_size=16):
        assert builder.fit_groups(loader) == builder.fit_groups(data)


def test_parameters_are_stored_as_given_and_cloned(model: nn.Module) -> None:
    for builder in builders(model, group_size=4, max_size=9, random_state=1):
        copy = clone(builder)
        assert copy.get_params()["group_size"] == 4
        assert copy.get_params().keys() == builder.get_params().keys()


# ---- sizes


@settings(max_examples=25, deadline=None)
@given(values=st.lists(st.integers(0, 3), min_size=2, max_size=40), k=st.integers(1, 40))
def test_repeated_points_never_leave_a_group_empty(values: list[int], k: int) -> None:
    points, k = np.array(values, float)[:, None], min(k, len(values))
    groups = KMeansGroups(n_groups=k, whiten=None, random_state=0).fit_groups(points)
    assert len(groups) == k
    if k >= len(set(values)):
        assert spread(points, groups) == 0


def test_a_point_at_the_mean_can_be_a_group_of_its_own() -> None:
    points = np.array([[1.0], [2.0], [2.0], [3.0]])
    for whiten in ("pca", None):
        for _ in range(100):  # whatever is drawn
            assert spread(points, KMeansGroups(n_groups=3, whiten=whiten).fit_groups(points)) == 0


def test_equal_points_are_shared_out_evenly() -> None:
    points = np.repeat([[0.1, 0.7], [0.3, 0.7], [0.7, 0.1]], [60, 25, 5], axis=0)
    groups = KMeansGroups(n_groups=18, whiten=None, random_state=0).fit_groups(points)
    assert groups.sizes.tolist() == [5] * 18


@pytest.mark.parametrize("distinct", [80, 600])  # Lloyd by scikit-learn, and by k-d tree
def test_as_many_groups_as_distinct_points_hold_one_of_them_each(distinct: int) -> None:
    points = np.repeat(blobs(distinct, 7).round(2), np.random.default_rng(0).integers(1, 9, size=distinct), axis=0)
    groups = KMeansGroups(n_groups=distinct, random_state=0).fit_groups(points)
    assert {len(np.unique(points[members], axis=0)) for members in groups} == {1}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), k=st.integers(1, 30), max_size=st.integers(1, 30))
def test_no_group_exceeds_the_maximum_size(seed: int, k: int, max_size: int) -> None:
    points = np.exp(2 * blobs(60, 2, seed))
    plain = KMeansGroups(n_groups=k, whiten=None, random_state=0).fit(points)
    capped = KMeansGroups(n_groups=k, whiten=None, random_state=0, max_size=max_size).fit(points)
    assert capped.groups_.sizes.max() <= max_size
    assert len(capped.groups_) == sum(-(-plain.groups_.sizes // max_size))
    assert capped.inertia_ <= plain.inertia_ * (1 + 1e-9)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), n=st.integers(1, 60), k=st.integers(1, 60))
def test_balanced_group_sizes_differ_by_at_most_one(seed: int, n: int, k: int) -> None:
    groups = KMeansGroups(n_groups=min(k, n), balanced=True, whiten=None).fit_groups(blobs(n, 2, seed))
    assert len(groups) == min(k, n)
    assert np.ptp(groups.sizes) <= 1


def test_balanced_groups_of_even_data_are_nearly_as_tight_as_plain_ones() -> None:
    points = np.random.default_rng(0).normal(size=(2000, 4))
    plain, balanced = (KMeansGroups(n_groups=40, balanced=b, random_state=0).fit(points) for b in (False, True))
    assert balanced.inertia_ < 1.25 * plain.inertia_


# ---- the model is left as it was


def test_the_model_is_left_as_it_was_also_after_an_error(model: nn.Module, data: tuple) -> None:
    model.eval()[2].train()
    model[0].weight.requires_grad_(False)
    model(data[0]).sum().backward()
    before = snapshot(model)
    for builder in builders(model, group_size=6):
        builder.fit(data)
    for bad_loss in (lambda output, target: 1 / 0, lambda output, target: output.detach().sum(1)):
        with pytest.raises((ZeroDivisionError, ValueError)):
            gradients(model, bad_loss, data)
    assert snapshot(model) == before
    assert torch.is_grad_enabled()


def snapshot(model: nn.Module) -> list[object]:
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    tensors = [(p.requires_grad, p.tolist(), None if p.grad is None else p.grad.tolist()) for p in model.parameters()]
    return [hooks, tensors]


# ---- bad input


def test_numbers_of_groups_are_checked() -> None:
    points = blobs()
    for parameters, error in (
        ({"group_size": N + 1}, "group_size=121 is more than the 120"),
        ({"n_groups": N + 1}, "n_groups=121 is more than the 120"),
        ({"group_size": 0}, "group_size=0: pass at least 1"),
        ({"n_groups": -2}, "n_groups=-2: pass at least 1"),
        ({}, "neither of group_size and n_groups"),
        ({"group_size": 2, "n_groups": 3}, "both of group_size and n_groups"),
    ):
        with pytest.raises(ValueError, match=error):
            random_groups(N, **parameters)
        with pytest.raises(ValueError, match=error):
            KMeansGroups(**parameters).fit(points)
    with pytest.raises(TypeError, match=r"group_size=2\.5"):
        random_groups(N, 2.5)


@pytest.mark.parametrize(
    ("parameters", "error"),
    [
        ({"whiten": "zca"}, "whiten='zca' is not one of"),
        ({"max_size": 0}, "max_size=0"),
        ({"max_iter": 0}, "max_iter=0"),
        ({"tol": -1.0}, "tol=-1.0"),
        ({"random_state": -1}, "random_state=-1"),
        ({"max_size": 3, "balanced": True}, "max_size=3 is below the size of 20 balanced groups"),
    ],
)
def test_parameters_are_checked_at_fit(parameters: dict, error: str) -> None:
    builder = KMeansGroups(group_size=6, **parameters)
    with pytest.raises(ValueError, match=error):
        builder.fit(blobs())


def test_features_that_are_not_finite_are_named() -> None:
    points = blobs()
    points[[4, 9], 1] = np.nan, np.inf
    with pytest.raises(ValueError, match="features of 2 of 120 points hold NaN or infinity, first 4, 9"):
        KMeansGroups(group_size=6).fit(points)


@pytest.mark.parametrize("whiten", ["pca", "scale"])
def test_features_that_are_all_constant_cannot_be_whitened(whiten: str) -> None:
    with pytest.raises(ValueError, match=r"same features, which cannot be whitened.*whiten=None"):
        KMeansGroups(group_size=2, whiten=whiten).fit(np.full((8, 3), 0.1))


def test_whitening_as_many_dimensions_as_points_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="equally far apart"):
        KMeansGroups(group_size=2).fit(np.random.default_rng(0).normal(size=(8, 30)))


def test_features_that_are_not_numbers_are_refused(data: tuple) -> None:
    with pytest.raises(TypeError, match=r"column 'source' of data is not made of numbers .* encode it"):
        KMeansGroups(group_size=2).fit(pd.DataFrame({"source": ["a", "b", "a"]}))
    with pytest.raises(TypeError, match="encode them as numbers"):
        KMeansGroups(group_size=2).fit(np.array([["a"], ["b"], ["a"]], dtype=object))
    with pytest.raises(TypeError, match=r"dict with keys \['x'\]"):
        KMeansGroups(group_size=2).fit({"x": data[0]})


def test_a_model_without_a_linear_head_is_refused(data: tuple) -> None:
    with pytest.raises(ValueError, match=r"no linear head: pass layer="):
        representations(nn.Sequential(nn.Tanh()), data)
    model = nn.Sequential(nn.Linear(D, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with pytest.raises(ValueError, match=r"layer='head' is not a module.*\['0', '2'\]"):
        gradients(model, None, data, layer="head")


def test_a_head_that_runs_twice_is_refused(data: tuple) -> None:
    shared = nn.Linear(D, D).double()
    for features in (representations, lambda model, data: gradients(model, None, data)):
        with pytest.raises(ValueError, match="ran 2 times in one forward pass"):
            features(nn.Sequential(shared, nn.Tanh(), shared), data)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(D).double()])
def test_a_model_in_train_mode_is_refused(data: tuple, layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Linear(D, C).double()).train()
    with pytest.raises(ValueError, match=rf"{type(layer).__name__} '0'.*model\.eval\(\)"):
        ReprKMeansGroups(model, group_size=4).fit(data)
    assert len(ReprKMeansGroups(model.eval(), group_size=4).fit_groups(data)) == 30


def test_tables_of_several_kinds_of_numbers_are_clustered_as_the_array_of_them() -> None:
    points = blobs().astype(np.float64)
    flag = np.arange(len(points)) % 2
    expected = KMeansGroups(n_groups=4, random_state=0).fit_groups(np.column_stack([points, flag]))
    for dtype in ("bool", "Int64"):
        table = pd.DataFrame(points).assign(flag=pd.Series(flag, dtype=dtype))
        assert KMeansGroups(n_groups=4, random_state=0).fit_groups(table) == expected


def test_labels_of_the_wrong_length_are_refused(model: nn.Module, data: tuple) -> None:
    for build in (by_label, by_column):
        with pytest.raises(ValueError, match="labels for 3 points, but the training set has 4"):
            build([0, 1, 0], n=4)
    with pytest.raises(ValueError, match="different lengths"):
        GradKMeansGroups(model, nn.CrossEntropyLoss(), group_size=4).fit((data[0], data[1][:-1]))


def test_bad_columns_and_clusterers_are_refused() -> None:
    with pytest.raises(ValueError, match="pass one of them"):
        by_column([1.0], bins=2, freq="M")
    with pytest.raises(ValueError, match="ascending order"):
        by_column([1.0], bins=[3, 1])
    with pytest.raises(TypeError, match="column of dates"):
        by_column([1.0], freq="M")
    with pytest.raises(TypeError, match="numbers or dates"):
        by_column(np.array(["a", "b"], object), bins=2)
    with pytest.raises(ValueError, match="not fitted and data is None"):
        from_clusters(KMeans(2))
    with pytest.raises(TypeError, match="no fit_predict"):
        from_clusters(object(), blobs())


@pytest.mark.parametrize("wrong", [nn.CrossEntropyLoss(), 3])
@pytest.mark.parametrize("kind", [ReprKMeansGroups, GradKMeansGroups])
def test_a_loss_or_a_number_in_place_of_the_model_is_named(kind, wrong):
    builder = kind(wrong, nn.CrossEntropyLoss(), n_groups=2)
    with pytest.raises(
        TypeError, match=f"model is a {type(wrong).__name__}: pass the trained model first, then loss_fn"
    ):
        builder.fit_groups((torch.randn(8, 3), torch.randint(0, 2, (8,))))
