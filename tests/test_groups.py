"""Groups: whatever users have as groups becomes one checked, immutable partition."""

from __future__ import annotations

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext import Attribution, Groups

SAME = {
    "list": ["b", "a", "b", "c"],
    "tuple": ("b", "a", "b", "c"),
    "strings": np.array(["b", "a", "b", "c"]),
    "objects": np.array(["b", "a", "b", "c"], dtype=object),
    "pandas": pd.Series(["b", "a", "b", "c"], index=[7, 8, 9, 10]),
    "categories": pd.Series(["b", "a", "b", "c"], dtype="category"),
    "integers": [4, 2, 4, 9],
    "unsigned": np.array([4, 2, 4, 9], dtype=np.uint8),
    "huge": np.array([10**15, 5, 10**15, 10**17]),
    "floats": np.array([4.0, 2.0, 4.0, 9.0]),
    "torch": torch.tensor([4, 2, 4, 9]),
    "lists": [[1], [0, 2], [3]],
    "arrays": [np.array([1]), np.array([0, 2]), np.array([3])],
    "tensors": [torch.tensor([1]), torch.tensor([2, 0]), torch.tensor([3])],
    "dict": {"a": [1], "b": [0, 2], "c": [3]},
    "groups": Groups([1, 0, 1, 2]),
}


def test_categories_of_pandas_come_in_their_own_order():
    sizes = pd.Categorical(["big", "small", "big", "medium"], ["small", "medium", "never", "big"], ordered=True)
    for labels in (sizes, pd.Series(sizes), pd.CategoricalIndex(sizes)):
        groups = Groups(labels)
        assert groups.names == ("small", "medium", "big")
        assert groups.labels.tolist() == [2, 0, 2, 1]
    assert Groups(pd.Categorical(["a", None], ["b", "a"]), rest="drop").names == ("a",)
    with pytest.raises(ValueError, match="every point is marked"):
        Groups(pd.Categorical([None, None], ["a"]), rest="drop")


def test_periods_and_intervals_are_named_as_they_are_printed():
    days = pd.Series(pd.to_datetime(["2024-11-03", "2023-02-01", "2024-11-30"]))
    assert Groups(days.dt.to_period("M")).names == ("2023-02", "2024-11")
    groups = Groups(pd.cut(pd.Series([11.0, 1.0, 9.0]), [0, 5, 10, 100]))
    assert groups.names == ("(0, 5]", "(5, 10]", "(10, 100]")
    assert groups.labels.tolist() == [2, 0, 1]


def test_categories_of_dates_have_the_names_of_the_dates():
    days = pd.Series(pd.to_datetime(["2024-01-01", "2024-02-01"]))
    for column in (days.astype("datetime64[ns]"), days.astype("datetime64[s]"), days - days[0]):
        assert Groups(column.astype("category")).names == Groups(column).names


def test_names_in_a_column_are_those_in_a_list():
    days = pd.Series(pd.to_datetime(["2024-01-01", "2024-02-01"]))
    for names in (np.array(["a", "b"]), pd.Series(["a", "b"]), torch.tensor([2023, 2024]), days, days.to_numpy()):
        groups = Groups([0, 1], names=names)
        listed = pd.Series(np.asarray(names)).tolist()
        assert groups.names == tuple(listed)
        assert not any(isinstance(name, np.generic | torch.Tensor) for name in groups.names)


def test_arrays_of_pandas_are_read_only_and_give_no_warning():
    groups, scores = Groups(["a", "b"]), np.array([[1.0, 2.0]])
    scores.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(groups.spread(scores), Attribution(scores, groups).scores)


def test_an_array_of_arrow_is_the_list_of_its_values():
    arrow = pytest.importorskip("pyarrow")
    column = arrow.array(["b", None, "b", "c"])
    assert Groups(column, rest="drop") == Groups(column.to_pylist(), rest="drop")


@pytest.mark.parametrize("form", SAME)
def test_every_form_of_the_same_groups_is_the_same_partition(form):
    groups = Groups(SAME[form])
    assert groups.labels.tolist() == [1, 0, 1, 2]
    assert groups.sizes.tolist() == [1, 2, 1]
    assert (len(groups), groups.n) == (3, 4)
    assert [members.tolist() for members in groups] == [[1], [0, 2], [3]]
    assert groups[-1].tolist() == [3]


def test_names_are_the_users_own_labels():
    assert Groups(["b", "a", "b"]).names == ("a", "b")
    assert Groups([4, 2, 4]).names == (2, 4)
    assert Groups([True, False]).names == (False, True)
    assert Groups([True, True]).names == (True,)
    assert Groups({"x": [0], "y": [1]}).names == ("x", "y")
    assert Groups([0, 1]).names is None
    assert Groups([0, 1]).name(1) == 1
    assert Groups([[0], [1]], names=["u", "v"]).name(1) == "v"
    assert Groups([1, "b", 0, "a"]).names == (1, "b", 0, "a")  # not sortable: as they appear


@pytest.mark.parametrize(
    "labels",
    [
        [0, -1, 1],
        [0, None, 1],
        [0.0, np.nan, 1.0],
        pd.Series(["a", None, "b"]),
        pd.Series([0, pd.NA, 1], dtype="Int64"),
        pd.Series([0, -1, 1], dtype=object),
        np.array([0, -2.0, 1], dtype=object),
        ["a", -1, "b"],
    ],
)
def test_rest_says_what_becomes_of_points_in_no_group(labels):
    with pytest.raises(ValueError, match=r"1 of 3 points are in no group, first 1.*rest='drop'.*rest='group'"):
        Groups(labels)
    dropped = Groups(labels, rest="drop")
    assert dropped.labels.tolist() == [0, -1, 1]
    assert dropped.sizes.tolist() == [1, 1]
    assert not dropped.are_singletons
    own = Groups(labels, rest="group")
    assert own.labels.tolist() == [0, 2, 1]
    assert own.names is not None
    assert own.names[-1] == "rest"


def test_no_two_groups_are_called_rest():
    with pytest.raises(ValueError, match=r"a group is called 'rest'.*rename it, or pass names= .* 3 groups"):
        Groups(["rest", "a", None], rest="group")
    assert Groups(["rest", "a", None], rest="group", names=["a", "rest", "none"]).labels.tolist() == [1, 0, 2]
    assert Groups(["rest", "a", None], rest="drop").names == ("a", "rest")
    assert Groups(["rest", "a"], rest="group").names == ("a", "rest")


def test_rest_of_index_lists_is_what_they_do_not_name():
    with pytest.raises(ValueError, match="2 of 5 points are in no group, first 1, 4"):
        Groups([[0, 2], [3]], n=5)
    assert Groups([[0, 2], [3]], n=5, rest="drop").labels.tolist() == [0, -1, 0, 1, -1]
    assert Groups([[0, 2], [3]], n=5, rest="group")[2].tolist() == [1, 4]


@pytest.mark.parametrize(
    ("groups", "n", "message"),
    [
        ([0, 1, 0], 4, "labels for 3 points, but the training set has 4"),
        (Groups([0, 1, 0]), 4, "built for 3 training points, but the training set has 4"),
        ([[0, 1], [1, 2]], None, "1 points stand in a group more than once, first 1"),
        ([[0], [7], [-1]], 3, r"2 indices are outside 0 … 2, first 7, -1"),
        ([[0], [], [1]], None, "1 of 3 groups are empty, first 1"),
        ({"a": [0], "b": []}, None, "1 of 2 groups are empty"),
        ([], None, "groups is empty"),
        ([-1, -1], None, "2 of 2 points are in no group"),
        (np.zeros((2, 2), int), None, r"one-dimensional, not of shape \(2, 2\)"),
        ([0.5, 1.0], None, "fractional numbers: bin them"),
        ([0.0, np.inf], None, "groups holds inf at point 1: .* NaN or None for a point in no group"),
        ([0.0, -np.inf], None, "groups holds -inf at point 1"),
        ([1e30, 0.0], None, "groups holds 1e.30 at point 0"),
        ([[0.5], [1.0]], None, "must hold whole numbers"),
    ],
)
def test_not_a_partition_is_one_error_that_names_the_offenders(groups, n, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Groups.of(groups, n)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="rest='keep' is not one of"):
        Groups([0], rest="keep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names has 1 entries for 2 groups"):
        Groups([0, 1], names=["a"])
    with pytest.raises(ValueError, match="no group"):
        Groups([-1], rest="drop")
    with pytest.raises(IndexError, match="group id 2 is out of range: there are 2 groups"):
        Groups([0, 1])[2]
    with pytest.raises(ValueError, match="batch_size=0"):
        next(Groups([0, 1]).batches(0))
    with pytest.raises(ValueError, match="3 entries along dim 0; groups has 2 points"):
        Groups([0, 1]).sum(torch.ones(3), 0)


def test_immutable():
    labels = np.array([0, 1, 0])
    groups = Groups(labels)
    labels[:] = 0
    assert groups.labels.tolist() == [0, 1, 0]
    for array in (groups.labels, groups.sizes, groups.order, groups[0]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_the_array_of_the_caller_stays_as_it_was():
    labels = np.array([0, 1, 0], np.int32)
    groups = Groups.with_labels(labels, 2)
    labels[0] = 1
    assert groups.labels.tolist() == [0, 1, 0]


def test_singletons():
    assert Groups.singletons(3).are_singletons
    assert Groups.singletons(3).labels.tolist() == [0, 1, 2]
    assert not Groups([0, 0, 1]).are_singletons
    assert Groups([2, 0, 1]).are_singletons
    with pytest.raises(ValueError, match="n=0"):
        Groups.singletons(0)


@given(
    labels=st.lists(st.integers(0, 6), min_size=1, max_size=40),
    batch_size=st.integers(1, 12),
    most=st.none() | st.integers(1, 3),
)
def test_batches_hold_every_point_once_group_by_group(labels, batch_size, most):
    groups = Groups(labels)
    seen: list[int] = []
    for batch in groups.batches(batch_size, most):
        assert 1 <= len(batch) <= batch_size
        assert len(batch.ids) <= (most or len(groups))
        assert batch.starts[0] == 0
        assert batch.starts[-1] == len(batch)
        for j, low, high in zip(batch.ids, batch.starts, batch.starts[1:], strict=False):
            assert high > low
            assert (groups.labels[batch.indices[low:high]] == j).all()
        whole = sum(groups.sizes[batch.ids])
        assert whole == len(batch) or len(batch.ids) == 1  # only a lone group comes in pieces
        if not batch.complete:
            assert whole > len(batch)
        seen += batch.indices.tolist()
    assert seen == groups.order.tolist()
    assert sum(batch.complete for batch in groups.batches(batch_size, 1)) == len(groups)


@given(labels=st.lists(st.integers(-1, 4), min_size=1, max_size=30).filter(lambda labels: max(labels) >= 0))
def test_sum_adds_up_members(labels):
    groups = Groups(labels, rest="drop")
    values = torch.arange(2 * len(labels), dtype=torch.float64).view(2, -1)
    expected = torch.stack([values[:, members.tolist()].sum(1) for members in groups], 1)
    assert torch.equal(groups.sum(values), expected)
    assert torch.equal(groups.sum(values.T, 0), expected.T)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16])
def test_sum_has_the_type_of_a_sum(dtype):
    values = torch.ones(300, dtype=dtype)
    found = Groups(np.zeros(300, int)).sum(values)
    assert found.dtype == values.sum().dtype
    assert torch.equal(found[0], values.sum())


def test_sum_takes_arrays_and_lists():
    groups = Groups([0, 1, 0])
    fixed = np.arange(6.0).reshape(2, 3)
    fixed.flags.writeable = False
    assert groups.sum(fixed).tolist() == [[2.0, 1.0], [8.0, 4.0]]
    assert groups.sum([True, True, True]).tolist() == [2, 1]


def test_batch_sampler_feeds_a_data_loader():
    groups = Groups([0, 1, 0, 1, 1])
    sampler = groups.batch_sampler(3)
    batches = [batch[0].tolist() for batch in DataLoader(TensorDataset(torch.arange(5)), batch_sampler=sampler)]
    assert batches == [[0, 2], [1, 3, 4]]
    assert len(sampler) == 2


def test_equality_and_repr():
    assert Groups([0, 1]) == Groups([[0], [1]])
    assert Groups([0, 1]) != Groups([1, 0])
    assert Groups(["a", "b"]) != Groups([0, 1])
    assert repr(Groups([0, 0, 1])) == "Groups(k=2, n=3, sizes 1…2)"


def test_a_million_labels_take_little_more_memory_than_themselves():
    labels = np.random.default_rng(0).integers(0, 10_000, 1_000_000)
    groups = Groups(labels)
    held = groups.labels.nbytes + groups.order.nbytes + groups.sizes.nbytes + groups.offsets.nbytes
    assert held <= 1.1 * labels.nbytes


def test_a_name_is_in_the_groups_that_have_it() -> None:
    assert "web" in Groups(["web", "forum", "web"])
    assert "news" not in Groups(["web", "forum", "web"])
    assert 1 in Groups([0, 1, 1])
    assert 2 not in Groups([0, 1, 1])
