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
    result, truth = found["result"], found["truth"]
    assert set(result.names) == set(found["clinics"])
    assert dict(zip(result.names, result.sizes, strict=True)) == found["df"].clinic.value_counts().to_dict()
    assert result.harmful().names[0] == "Northside"
    page = (folder / "clinics.html").read_text(encoding="utf-8")
    assert "<strong>Northside</strong> hurts most: without it, validation loss is predicted to fall" in page
    assert result.method.unit == "property"
    assert float(result["Northside"].high) < 0
    assert truth.names[0] == "Northside"
    assert (truth.real[0] < 0).all()
    assert truth.agrees[0]


def test_a_user_needs_fewer_than_fifteen_lines():
    text = (EXAMPLES / "clinics.py").read_text(encoding="utf-8")
    story = text[text.index("# From the model to names") :].splitlines()
    assert sum(bool(line.strip()) and not line.startswith("#") for line in story) < 15
