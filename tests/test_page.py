"""The page about a result: the right sentences, everything from data escaped, one file that needs nothing else."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser

import numpy as np
import pytest
import torch

from ggda_ext import Attribution, Groups
from ggda_ext.results import sentences
from ggda_ext.results.thumbnails import pixels, png_address
from tests.result_cases import result

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

HOSTILE = "<script>alert('x')</script>\"'&amp;{{ 7*7 }}"


class Page(HTMLParser):
    """Tags, attributes and text of a page, as a browser sees them."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def page_of(found, tmp_path, **about):
    path = found.to_html(tmp_path / "report.html", **about)
    return Page(path.read_text(encoding="utf-8"))


def pictures(page):
    found = [value for name, value in page.attributes if name == "src"]
    assert all(value.startswith("data:image/") for value in found)
    return [base64.b64decode(value.partition(",")[2]) for value in found]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"scores": [0.3, -0.012]},
            [
                "forum hurts most: without it, test loss is predicted to fall by 0.012 (0.0108–0.0132).",
                "web helps most: without it, test loss is predicted to rise by 0.3 (0.27–0.33).",
            ],
        ),
        (
            {"scores": [0.3, -0.012], "directions": [True]},
            [
                "web hurts most: without it, test loss is predicted to rise by 0.3 (0.27–0.33).",
                "forum helps most: without it, test loss is predicted to fall by 0.012 (0.0108–0.0132).",
            ],
        ),
        (
            {"scores": [0.3, -0.012], "interval": False},
            [
                "forum hurts most: without it, test loss is predicted to fall by 0.012.",
                "web helps most: without it, test loss is predicted to rise by 0.3.",
            ],
        ),
        (
            {"scores": [0.3, -0.012], "unit": "rank"},
            [
                "forum hurts most: without it, test loss is predicted to fall.",
                "web helps most: without it, test loss is predicted to rise.",
            ],
        ),
        (
            {"scores": [0.3, 0.1], "interval": False},
            ["No group hurts.", "web helps most: without it, test loss is predicted to rise by 0.3."],
        ),
        (
            {"scores": [0.3, -0.1], "directions": [None], "interval": False},
            [
                "web matters most in this direction: without it, test loss is predicted to rise by 0.3.",
                "forum matters most in this direction: without it, test loss is predicted to fall by 0.1.",
            ],
        ),
        ({"scores": [0.0, 0.0], "interval": False}, ["No group hurts.", "No group helps."]),
    ],
)
def test_the_answer_in_a_sentence(options, says):
    assert [str(one) for one in sentences.answers(result(2, names=["web", "forum"], **options), 0)] == says


def test_an_interval_that_holds_zero_is_said_to_be_unclear():
    found = result(1, names=["web"], scores=[0.3])
    found = found.replace(low=found.scores - 0.5, high=found.scores + 0.5)
    (_, said) = sentences.answers(found, 0)
    assert "anything from a fall by 0.2 to a rise by 0.8" in str(said)
    assert "even the direction is unclear" in str(said)


def test_a_warning_about_the_group_that_is_named_is_mentioned(tmp_path):
    found = result(2, names=["web", "forum"], scores=[0.3, -0.1], warnings={"forum": ("too large",)})
    page = page_of(found, tmp_path)
    assert "There is a warning about this group." in page.text
    assert page.text.count("⚠ too large") == 2  # in the table and on its card


@pytest.mark.parametrize("unit", ["rank", "property"])
def test_magnitudes_are_promised_only_where_there_are_some(unit, tmp_path):
    text = page_of(result(3, unit=unit), tmp_path).text
    assert ("their size has no unit" in text) == (unit == "rank")
    assert bool(re.search(r"predicted to (rise|fall) by \d", text)) == (unit == "property")


def test_everything_that_comes_from_data_is_escaped(tmp_path):
    found = result(3, 2, names=[HOSTILE, "b", "c"], scores=[[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    found = found.replace(
        properties=[HOSTILE, "loss"], notes=[HOSTILE], warnings={HOSTILE: (HOSTILE,)}, interval=HOSTILE
    )
    rows = [{HOSTILE: HOSTILE}] * 18
    page = page_of(found, tmp_path, rows=rows, labels=[HOSTILE] * 18, title=HOSTILE)
    assert "script" not in page.tags
    assert not any(name.startswith("on") for name, _ in page.attributes)
    assert page.text.count(HOSTILE) > 20  # as it was written, in all of these places
    for svg in pictures(page):
        assert b"<script" not in svg
        assert b"&lt;script&gt;" in svg


def test_the_page_needs_nothing_from_elsewhere(tmp_path):
    path = result(5, 3).to_html(tmp_path / "report.html", images=np.zeros((30, 4, 4)))
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?:|//|url\(|@import", re.sub(r"base64,[A-Za-z0-9+/=]*", "", text))
    assert set(Page(text).tags) & {"script", "link", "iframe", "object", "embed", "form"} == set()
    assert "default-src 'none'" in text
    for svg in pictures(Page(text)):
        assert not re.search(rb"(href|src)=\"(?!#|data:)", svg)


def test_a_card_tells_size_labels_and_the_members_that_carry_the_group(tmp_path):
    found = result(2, names=["web", "forum"], scores=[6.0, -1.0])
    own = found.member_scores.clone()
    own[0, :6] = torch.tensor([0.1, 0.1, 5.6, 0.1, 0.1, 0.0])
    rows = [{"text": f"row {i}", "age": i / 3} for i in range(12)]
    page = page_of(found.replace(member_scores=own), tmp_path, rows=rows, labels=["a"] * 3 + ["b"] * 9)
    assert "6 points, 50.0% of all." in page.text
    assert "One of 6 members carries half of what pulls the group’s way, the largest 93% of it." in page.text
    assert "50 % (25 %)" in page.text  # label a in web, and everywhere
    web = page.text[page.text.index("One of 6 members") :]
    assert re.findall(r"point (\d+)", web)[:2] == ["2", "0"]
    assert "text row 2 · age 0.6667" in web


def test_one_label_more_than_fit_is_named_and_not_summed_up(tmp_path):
    many = Attribution(torch.ones(1, 1), Groups(np.zeros(60, int), names=["all"]), ["loss"], [False])
    assert "others" not in page_of(many, tmp_path, labels=np.arange(60) % 7).text
    assert "2 others" in page_of(many, tmp_path, labels=np.arange(60) % 8).text


def test_rows_may_be_a_frame_texts_or_dicts(tmp_path):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"text": [f"row {i}" for i in range(18)]}, index=range(100, 118))
    for rows in (frame, list(frame.text), frame.to_dict("records"), frame.text, tuple(frame.text)):
        assert "row 0" in page_of(result(members=False), tmp_path, rows=rows).text
    found = page_of(result(members=False), tmp_path, rows=frame).text
    assert "point 0 (index 100)" in found
    assert "(index" not in page_of(result(members=False), tmp_path, rows=frame.reset_index(drop=True)).text
    wide = pandas.DataFrame(np.zeros((18, 20)), columns=[f"c{i}" for i in range(20)])
    assert "8 more columns" in page_of(result(), tmp_path, rows=wide).text
    days = page_of(result(), tmp_path, rows=pandas.DataFrame({"day": pandas.date_range("2024-05-01", periods=18)})).text
    assert "2024-05-0" in days
    assert "00:00:00" not in days


def test_long_and_odd_texts_are_cut_and_written(tmp_path):
    rows = ["x" * 10_000, "\ud800 lone", "nul \x00", "‮ turned"] + ["日本語"] * 14
    path = result().to_html(tmp_path / "report.html", rows=rows)
    assert "x" * 500 not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("shape", [(18, 5, 6), (18, 1, 5, 6), (18, 3, 5, 6), (18, 5, 6, 3), (18, 5, 6, 4)])
@pytest.mark.parametrize("kind", ["uint8", "float", "torch"])
def test_images_become_thumbnails(shape, kind, tmp_path):
    images = np.random.default_rng(0).integers(0, 255, shape).astype(np.uint8 if kind == "uint8" else float)
    page = page_of(result(), tmp_path, images=torch.from_numpy(images) if kind == "torch" else images)
    found = [picture for picture in pictures(page) if picture.startswith(b"\x89PNG")]
    assert len(found) == 18  # six members of each of three groups


def test_pixels_keep_bytes_and_the_unit_interval_and_stretch_the_rest():
    np.testing.assert_array_equal(pixels(np.array([[0, 128]], np.uint8)), [[0, 128]])
    np.testing.assert_array_equal(pixels(torch.tensor([[0.0, 0.2]])), [[0, 51]])
    np.testing.assert_array_equal(pixels([[-1.0, 1.0]]), [[0, 255]])
    assert png_address(np.zeros((900, 300), np.uint8)).startswith("data:image/png;base64,")
    with pytest.raises(ValueError, match=r"images holds one of shape \[784\]: pass \[H, W\]"):
        pixels(np.zeros(784))


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"rows": ["one"]}, "rows has 1 entries for 18 training points"),
        ({"rows": "text"}, "rows is a str: pass one entry for each of 18 training points"),
        ({"images": np.zeros((3, 2, 2))}, "images has 3 entries for 18"),
        ({"labels": {"a": 1}}, "labels is a dict"),
        ({"member_scores": np.zeros(3)}, r"member_scores has shape \[1, 3\]"),
    ],
)
def test_what_does_not_fit_the_training_points_is_refused_and_nothing_is_written(about, says, tmp_path):
    with pytest.raises((ValueError, TypeError), match=says):
        result().to_html(tmp_path / "report.html", **about)
    assert list(tmp_path.iterdir()) == []


def test_the_page_is_written_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = result().to_html(tmp_path / "report.html", title="first")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("no room")))
    with pytest.raises(OSError, match="no room"):
        result().to_html(path, title="second")
    assert "first" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("k", [1, 3, 300])
def test_few_groups_and_many(k, tmp_path):
    page = page_of(result(k, each=2), tmp_path)
    assert page.tags.count("tr") == k + 1 + (k > 20)
    assert ("280 more" in page.text) == (k == 300)
    assert page.tags.count("section") == min(k, 6) or k < 300


def test_scores_that_are_no_numbers_do_not_stop_the_page(tmp_path):
    found = result(3, interval=False, members=False, scores=[1.0, float("nan"), -1.0])
    assert "unknown" in page_of(found, tmp_path).text


def test_scores_of_half_precision_are_drawn(tmp_path):
    found = result(3)
    half = found.replace(
        **{name: getattr(found, name).bfloat16() for name in ("scores", "low", "high", "member_scores")}
    )
    assert "Does one point carry a group?" in page_of(half, tmp_path).text


def test_groups_by_date_have_a_line_over_time(tmp_path):
    assert "Over time" in page_of(result(3, names=["2024-01", "2024-02", "2024-03"]), tmp_path).text
    assert "Over time" not in page_of(result(3, names=["web", "books", "forum"]), tmp_path).text


@pytest.mark.parametrize(
    "names",
    [
        ["90210", "10001", "60601"], ["1001", "1002", "1003"], ["0001", "0002", "0003"],
        ["20240301", "20240401", "20240501"], ["1900", "1950", "2000"],
    ],
)  # fmt: skip
def test_digits_alone_are_not_taken_for_dates(names, tmp_path):
    assert "Over time" not in page_of(result(3, names=names), tmp_path).text


def test_method_cost_and_versions_are_told(tmp_path):
    text = page_of(result(), tmp_path).text
    for said in (
        "influence",
        "damping",
        "6 passes over the training data",
        "95 %, over test points",
        torch.__version__,
    ):
        assert said in text


def test_no_figure_is_left_open(tmp_path):
    import matplotlib.pyplot as plt

    before = plt.get_fignums()
    result(3, 2).to_html(tmp_path / "report.html")
    assert plt.get_fignums() == before
