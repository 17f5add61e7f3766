"""Pictures of a result: what is drawn is what is in it, few groups or many, in black and white, names as plain text."""

from __future__ import annotations

import datetime
import subprocess
import sys
import warnings
from itertools import pairwise, product

import numpy as np
import pandas as pd
import pytest
import torch

from ggda_ext import Groups
from ggda_ext.counterfactual.interactions import Interactions
from ggda_ext.evaluation import RemovalCurve
from ggda_ext.results import Attribution
from tests.result_cases import result

pytest.importorskip("matplotlib")
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

KINDS = ("bars", "members", "heatmap")


@pytest.fixture(autouse=True)
def closed_figures():
    yield
    plt.close("all")


def ticks(axis):
    return [label.get_text() for label in axis.get_ticklabels()]


def texts(ax):
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 2, 3, 7, 300])
@pytest.mark.parametrize("m", [1, 3])
def test_every_picture_is_drawn_for_few_groups_and_for_many(kind, k, m):
    ax = getattr(result(k, m, directions=[False, True, None][:m]).plot, kind)()
    ax.figure.canvas.draw()
    assert len(ticks(ax.yaxis)) <= 31


def test_bars_have_the_scores_as_lengths_with_those_that_hurt_at_the_top():
    found = result(3, names=["web", "books", "forum"], scores=[0.5, -0.2, 0.1])
    ax = found.plot.bars()
    assert ticks(ax.yaxis) == ["books (6)", "forum (6)", "web (6)"]
    np.testing.assert_allclose([bar.get_width() for bar in ax.patches], [-0.2, 0.1, 0.5])
    assert "predicted change of test loss" in ax.get_xlabel()
    assert "← hurts" in ax.get_xlabel()
    higher = result(3, names=["web", "books", "forum"], scores=[0.5, -0.2, 0.1], directions=[True]).plot.bars()
    assert ticks(higher.yaxis) == ["web (6)", "forum (6)", "books (6)"]
    assert "hurts →" in higher.get_xlabel()


def test_ranks_are_not_called_changes():
    label = result(unit="rank").plot.bars().get_xlabel()
    assert "ranks only" in label
    assert "change" not in label


def test_whiskers_are_the_intervals():
    found = result(2, scores=[1.0, -2.0])
    ax = found.plot.bars()
    (lines,) = (container[2][0] for container in ax.containers if type(container).__name__ == "ErrorbarContainer")
    ends = sorted(tuple(sorted(segment[:, 0])) for segment in lines.get_segments())
    np.testing.assert_allclose(ends, [(-2.2, -1.8), (0.9, 1.1)])
    assert len(result(2, interval=False).plot.bars().containers) == 2


def test_of_many_groups_both_ends_are_shown_and_the_rest_is_summed_up_in_words():
    scores = np.arange(300) - 100.5
    ax = result(300, scores=scores).plot.bars(most=10)
    shown = [name.split(" ")[0] for name in ticks(ax.yaxis)]
    assert shown == ["0", "1", "2", "3", "4", "⋮", "295", "296", "297", "298", "299"]
    rest = scores[5:295]
    assert f"… 290 more groups: {rest.min():+.3g} to {rest.max():+.3g}, sum {rest.sum():+.3g}" in texts(ax)


def test_effects_can_be_told_apart_without_colour():
    ax = result(3, scores=[0.5, -0.2, 0.1]).plot.bars()
    assert {bar.get_hatch() for bar in ax.patches} == {"", "////"}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["helps", "hurts"]


def test_an_interval_that_holds_zero_is_drawn_as_unclear():
    found = result(2, scores=[1.0, -2.0])
    ax = found.replace(low=found.scores - 1.5, high=found.scores + 1.5).plot.bars()
    assert {bar.get_hatch() for bar in ax.patches} == {"////", "...."}


@pytest.mark.parametrize("kind", KINDS)
def test_names_from_data_are_plain_text(kind):
    names = ["$\\frac{", "a_b^c $x$", "two\nlines " + "x" * 100]
    ax = getattr(result(3, names=names, scores=[3.0, 2.0, 1.0]).plot, kind)()
    ax.figure.canvas.draw()
    found = ticks(ax.yaxis)
    assert any(name.startswith("$\\frac{") for name in found)
    assert all("\n" not in name and len(name) < 60 for name in found)


def test_axes_of_the_caller_are_drawn_into_and_given_back():
    found = result(4, 2)
    for draw in (found.plot.bars, found.plot.members, found.plot.heatmap, found.plot):
        _, ax = plt.subplots()
        assert draw(ax=ax) is ax
    assert found.plot.timeline(dates=range(4), ax=ax) is ax
    with pytest.raises(TypeError, match="ax is a Figure: pass matplotlib axes"):
        found.plot.bars(ax=plt.figure())


def test_members_say_how_much_the_largest_of_them_carries():
    found = result(2, names=["web", "books"], scores=[6.0, 1.0])
    own = found.member_scores.clone()
    own[0, :6] = torch.tensor([5.0, 0.2, 0.2, 0.2, 0.2, 0.2])
    ax = found.replace(member_scores=own).plot.members()
    assert ticks(ax.yaxis) == ["web (6)", "books (6)"]
    assert texts(ax)[:2] == ["83%", "17%"]
    drawn = np.concatenate([points.get_offsets()[:, 0] for points in ax.collections])
    np.testing.assert_allclose(sorted(drawn), sorted(own[0].tolist()))


def test_large_groups_are_violins_with_their_largest_members():
    ax = result(2, each=500).plot.members()
    assert [len(points.get_offsets()) for points in ax.collections if hasattr(points, "get_sizes")][1::2] == [5, 5]


def test_members_need_their_scores():
    bare = result(members=False)
    with pytest.raises(ValueError, match="pass member_scores="):
        bare.plot.members()
    with pytest.raises(ValueError, match=r"member_scores has shape \[1, 5\]: pass \[1, 18\]"):
        bare.plot.members(member_scores=torch.zeros(1, 5))
    assert bare.plot.members(member_scores=torch.randn(18)).has_data()


def test_a_heat_map_has_a_number_for_every_group_and_property():
    found = result(3, 2, scores=[[3.0, -2.0, 1.0], [0.1, 0.2, -0.4]])
    ax = found.plot.heatmap()
    assert sorted(texts(ax)) == sorted(["+3", "-2", "+1", "+0.1", "+0.2", "-0.4"])
    assert ticks(ax.xaxis) == ["property 0", "property 1"]
    turned = found.plot.heatmap(rows="properties")
    assert ticks(turned.yaxis) == ["property 0", "property 1"]
    assert ticks(turned.xaxis) == [str(name) for name in found.names]
    assert texts(turned) == ["+3", "-2", "+1", "+0.1", "+0.2", "-0.4"]  # row by row, as the scores
    many = result(300, 12).plot.heatmap()
    assert set(texts(many)) <= {"+", "−"}
    for ax in (many, result(300, 12).plot.heatmap(rows="properties")):
        assert "not shown: 270 groups" in ax.get_title(loc="left")


@pytest.mark.parametrize(
    "names",
    [
        ["2024-03", "2024-01", "2024-02"],
        [datetime.date(2024, 3, 1), datetime.date(2024, 1, 1), datetime.date(2024, 2, 1)],
        [2024, 2022, 2023],
        ["2024", "2022", "2023"],
        ["2024Q4", "2022Q3", "2024Q1"],
        ["2024-02-26/2024-03-03", "2023-12-25/2023-12-31", "2024-01-01/2024-01-07"],
        ["20240301", "20240101", "20240201"],
        ["2024-01-01T14", "2024-01-01 12:30", "2024-01-01T13:00:00.5+01:00"],
        [datetime.date(1066, 10, 14), datetime.date(800, 12, 25), datetime.date(911, 1, 1)],
        ["2024-03-01T12:00:00", "2024-01-01T00:00:00", "2024-02-01T00:00:00"],
    ],
)
def test_a_timeline_goes_from_the_first_date_to_the_last(names):
    ax = result(3, names=names, scores=[3.0, 1.0, 2.0]).plot.timeline()
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [1, 2, 3])
    times = np.asarray(ax.lines[0].get_xdata())
    assert (np.diff(times).astype(float) > 0).all()


def test_names_that_are_no_dates_are_refused_by_name():
    with pytest.raises(ValueError, match="'books', which is no date"):
        result(2, names=["2024-01", "books"]).plot.timeline()
    with pytest.raises(ValueError, match="dates has 3 entries for 2 groups"):
        result(2).plot.timeline(dates=[1, 2, 3])


@pytest.mark.parametrize(
    "name", ["90210", "1001", "0001", "3000", "20241301", "202403", "2024-3", "2024-03-01x", "2024-W05", "NaT", pd.NaT]
)
def test_numbers_in_the_form_of_text_are_no_dates_unless_they_could_be(name):
    with pytest.raises(ValueError, match=r"which is no date.* from 1500 to 2200.* 2024, 2024-03"):
        result(2).plot.timeline(dates=["2024-01", name])


def test_every_curve_of_a_removal_is_drawn():
    curves = {f"method {j}": RemovalCurve(np.array([0.1, 0.2]), np.full((2, 3), float(j))) for j in range(8)}
    ax = result(6).plot.removal_curve(curves)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(curves)


@pytest.mark.parametrize("most", [0, -1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_of_no_groups_is_refused(kind, most):
    with pytest.raises(ValueError, match=f"most={most}: show at least"):
        getattr(result(6).plot, kind)(most=most)


def test_a_removal_curve_removes_what_hurts_first_what_helps_first_and_at_random():
    asked = []

    def retrain(subsets):
        asked.append([set(kept.tolist()) for kept in subsets])
        return np.array([[len(kept), len(kept) + 1] for kept in subsets], float)

    found = result(2, names=["web", "forum"], scores=[2.0, -1.0])  # of a loss: web helps, forum hurts
    ax = found.plot.removal_curve(retrain, fractions=(0.0, 0.5))
    assert asked[0][1] == set(range(6))
    assert asked[1][1] == set(range(6, 12))
    assert [t.get_text() for t in ax.get_legend().get_texts()] == [
        "hurts most first", "helps most first", "random order"
    ]  # fmt: skip
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [12.5, 6.5])
    asked.clear()
    result(2, scores=[2.0, -1.0], directions=[True]).plot.removal_curve(retrain, fractions=(0.5,))
    assert asked[0][0] == set(range(6, 12))  # of an accuracy: the first group hurts


def test_a_removal_curve_ends_where_nothing_is_left_to_remove():
    found = Attribution(torch.tensor([[0.5, -0.25, -0.1]]), Groups([0] * 80 + [1] * 10 + [2] * 10), ["loss"], [False])
    ax = found.harmful().plot.removal_curve(lambda subsets: [len(kept) for kept in subsets])
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [0, 5, 10, 20])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [100, 95, 90, 80])
    with pytest.raises(TypeError, match=r"fractions=0.3: pass a list"):
        found.plot.removal_curve(len, fractions=0.3)


def test_a_removal_curve_takes_what_was_measured_before():
    curve = RemovalCurve(np.array([0.0, 0.1]), np.array([[0.9], [0.8]]))
    ax = result().plot.removal_curve({"ours": curve}, label="accuracy")
    np.testing.assert_allclose(ax.lines[0].get_ydata(), [0.9, 0.8])
    assert ax.get_ylabel() == "accuracy"
    with pytest.raises(TypeError, match=r"measured is a list: pass a function retrain\(subsets\)"):
        result().plot.removal_curve([1, 2])


def test_scores_that_are_no_numbers_are_drawn_last_and_break_nothing():
    scores = result(3, interval=False, members=False, scores=[1.0, float("nan"), -1.0])
    assert [name[0] for name in ticks(scores.plot.bars().yaxis)] == ["2", "0", "1"]
    endless = result(3, interval=False, members=False, scores=[1.0, float("inf"), -1.0])
    for one, kind in product((scores, endless), ("bars", "heatmap")):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            getattr(one.plot, kind)().figure.canvas.draw()
    zero = result(3, scores=[0.0, 0.0, 0.0])
    for kind in KINDS:
        getattr(zero.plot, kind)().figure.canvas.draw()


def test_without_matplotlib_the_error_names_the_extra():
    code = (
        "import sys; sys.modules['matplotlib'] = sys.modules['jinja2'] = None\n"
        "from tests.result_cases import result\n"
        "for call in (lambda: result().plot.bars(), lambda: result().to_html('page.html')):\n"
        "    try: call()\n"
        "    except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'ggda-ext[plot]'") == 2


def test_a_result_that_is_drawn_is_still_a_tensor():
    found = result(3)
    found.plot.bars()
    assert torch.equal(torch.as_tensor(found), found.scores)
    assert type(found + 1) is torch.Tensor


@pytest.mark.parametrize("kind", ["bars", "members"])
def test_nothing_is_cut_off_or_runs_together_in_a_narrow_picture(kind):
    """As on the page: long names leave the picture little room, and the label below is wider than it."""
    names = [f"a very long name of a group {j}" for j in range(3)]
    found = result(3, names=names, scores=[-0.00249, 0.00147, 0.00131]).replace(properties=["demographic_parity_gap"])
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    ax = getattr(found.plot, kind)(ax=figure.add_subplot())
    FigureCanvasAgg(figure).draw()
    label = ax.xaxis.label.get_window_extent()
    assert label.x0 >= 0
    assert label.x1 <= figure.bbox.x1
    check_apart(ax)


@pytest.mark.parametrize("months", [4, 30, 300])
def test_dates_of_a_timeline_do_not_run_together(months):
    dates = [f"{2000 + j // 12}-{j % 12 + 1:02d}" for j in range(months)]
    ax = result(months, names=dates).plot.timeline()
    ax.figure.canvas.draw()
    assert len(ax.get_xticks()) >= 2
    check_apart(ax)


@pytest.mark.parametrize("kind", ["bars", "timeline"])
def test_a_long_name_of_a_property_is_not_cut_off(kind):
    named = result(3, names=["2023", "2024", "2025"]).replace(properties=["loss of the customers of the third shop"])
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    ax = getattr(named.plot, kind)(ax=figure.add_subplot())
    FigureCanvasAgg(figure).draw()
    box = (ax.xaxis if kind == "bars" else ax.yaxis).label.get_window_extent()
    assert min(box.x0, box.y0) >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1


@pytest.mark.parametrize("k", [8, 25, 30])
def test_numbers_of_a_wide_heat_map_do_not_run_together(k):
    ax = result(k, scores=-0.0123 * np.arange(1, k + 1)).plot.heatmap(rows="properties")
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


@pytest.mark.parametrize(("m", "numbers"), [(2, True), (5, False)])
def test_a_narrow_heat_map_has_numbers_only_where_they_fit(m, numbers):
    figure = Figure(figsize=(4.2, 3.2), layout="constrained")
    found = result(4, m).replace(properties=[f"a property with a long name {j}" for j in range(m)])
    ax = found.plot.heatmap(ax=figure.add_subplot())
    FigureCanvasAgg(figure).draw()
    boxes = [text.get_window_extent() for text in ax.texts if text.get_position()[1] == 0]
    assert len(boxes) == m
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))
    assert any(text.get_text()[-1].isdigit() for text in ax.texts) == numbers
    labels = [label.get_window_extent() for label in ax.get_xticklabels()]
    assert min(box.x0 for box in labels) >= 0
    assert min(box.y0 for box in labels) >= 0


def check_apart(ax):
    """The texts below a picture do not touch."""
    low, high = ax.get_xlim()
    ticks = [tick for tick in ax.xaxis.get_major_ticks() if low <= tick.get_loc() <= high and tick.label1.get_text()]
    boxes = [tick.label1.get_window_extent() for tick in ticks]
    assert all(one.x1 < other.x0 for one, other in pairwise(boxes))


@pytest.mark.parametrize("k", [2, 8, 60])
def test_interactions_are_a_picture_of_their_strongest_pairs_with_names_as_plain_text(k):
    matrix = np.zeros((k, k))
    matrix[0, 1] = matrix[1, 0] = -0.5
    names = ("$x$", *(f"group {j}" for j in range(1, k)))
    ax = Interactions("test loss", matrix, np.zeros(k), names).plot()
    ax.figure.canvas.draw()
    assert ticks(ax.xaxis)[:2] == ticks(ax.yaxis)[:2] == ["$x$", "group 1"]
    assert len(ticks(ax.yaxis)) == min(k, 20)
    assert ("-0.5" in texts(ax)) == (k < 20)
    assert ("+0" in texts(ax)) == (2 < k < 20), "no number where a group would be paired with itself"
    assert ax.get_title(loc="left") == ("not shown: 40 groups of weaker pairs" if k > 20 else "")
    own = Figure().subplots()
    assert Interactions("test loss", matrix, np.zeros(k), names).plot(ax=own) is own
