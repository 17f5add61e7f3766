"""The examples run, and come to the conclusion they are told for."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def clinics(tmp_path, monkeypatch):
    pytest.importorskip("pandas")
    pytest.importorskip("jinja2")
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    found = runpy.run_path(str(EXAMPLES / "clinics.py"))
    yield found, tmp_path
    matplotlib.pyplot.close("all")


def test_the_clinic_with_flipped_labels_is_named_drawn_written_about_and_verified(clinics):
    found, folder = clinics
    result, truth = found["result"], found["truth"].attribution()
    assert set(result.names) == set(found["clinics"])
    assert dict(zip(result.names, result.sizes, strict=True)) == found["df"].clinic.value_counts().to_dict()
    assert result.harmful().names[0] == "Northside"
    page = (folder / "clinics.html").read_text(encoding="utf-8")
    assert "<strong>Northside</strong> hurts most: without it, validation loss is predicted to fall" in page
    assert truth.names == ("Northside",)
    assert truth.effects() == ("hurts",)
    assert float(truth.high) < 0


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_what_if_sees_that_two_sources_stand_in_for_each_other_and_drops_a_better_three(seed):
    found = runpy.run_path(str(EXAMPLES / "redundant_sources.py"))["answers"](seed)
    *alone, both = (("blog",), ("mirror",), ("blog", "mirror"))
    for name in ("rise of the loss, what-if", "rise of the loss, retrained"):
        rises = found[name]
        assert rises[both] > 0.03, name
        assert sum(rises[one] for one in alone) < 0.5 * rises[both], name
    added = found["rise of the loss, added scores"]
    assert abs(added[both]) < 0.5 * found["rise of the loss, retrained"][both]  # the sum of two that seem dispensable
    chosen, ranked, losses = found["what-if drops"], found["a ranking drops"], found["loss, retrained"]
    assert "spam" in chosen
    assert not {"blog", "mirror"} <= set(chosen)
    assert losses[chosen] < losses[()]
    assert losses[chosen] < losses[ranked]


def test_a_user_needs_fewer_than_fifteen_lines():
    text = (EXAMPLES / "clinics.py").read_text(encoding="utf-8")
    story = text[text.index("# From the model to names") :].splitlines()
    assert sum(bool(line.strip()) and not line.startswith("#") for line in story) < 15
