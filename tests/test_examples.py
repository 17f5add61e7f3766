"""The examples run, and come to the conclusion they are told for."""

from __future__ import annotations

import importlib
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def clinics(found: dict[str, Any], folder: Path) -> None:
    """The clinic with flipped labels is named, drawn, written about and verified."""
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


def redundant_sources(found: dict[str, Any], folder: Path) -> None:
    """What-if sees that two sources stand in for each other, added scores do not; it drops a better three."""
    for story in (found["story"], *map(found["answers"], (1, 2))):
        *alone, both = found["COPIES"]
        for name in ("rise of the loss, what-if", "rise of the loss, retrained"):
            rises = story[name]
            assert rises[both] > 0.03, name
            assert sum(rises[one] for one in alone) < 0.5 * rises[both], name
        real = story["rise of the loss, retrained"][both]
        assert abs(story["rise of the loss, added scores"][both]) < 0.5 * real
        chosen, ranked, losses = story["what-if drops"], story["a ranking drops"], story["loss, retrained"]
        assert "spam" in chosen
        assert not {"blog", "mirror"} <= set(chosen)
        assert losses[chosen] < min(losses[()], losses[ranked])
        pairs = story["interactions"]
        assert pairs.matrix[pairs.names.index("blog"), pairs.names.index("mirror")] > 0.03
        assert set(pairs.strongest(1)[0][:2]) == {"news", "spam"}


def tabular_sources(found: dict[str, Any], folder: Path) -> None:
    """The noisy source hurts both properties; a good one with few customers counts most per member."""
    assert found["result"].harmful(by="mean_loss").names[0] == "broker"
    assert found["result"].harmful(by="soft_f1").names[0] == "broker"


def fairness_by_region(found: dict[str, Any], folder: Path) -> None:
    """The biased region is found, and retraining agrees."""
    assert found["result"].harmful().names[0] == "south"
    assert found["truth"].harmful(sure=True).names[0] == "south"


def image_clusters(found: dict[str, Any], folder: Path) -> None:
    """Wrong labels gather in groups that hurt."""
    assert found["found"].roc_auc > 0.65


def long_runs(found: dict[str, Any], folder: Path) -> None:
    """A stopped run goes on with what is missing and ends with the same bits."""
    torch, home, reads = found["torch"], found["home"], found["reads"]
    assert torch.equal(torch.load(home / "a.pt"), torch.load(home / "b.pt"))
    assert reads[2] < 0.8 * reads[0]


def several_processes(found: dict[str, Any], folder: Path) -> None:
    """Two processes give the scores of one."""
    found["torch"].testing.assert_close(found["two"], found["one"])


def text_sources(found: dict[str, Any], folder: Path) -> None:
    """Every domain is helped most by its own part of the training data; the tracker says the same of one."""
    matrix = found["matrix"]
    for domain in found["STEPS"]:
        assert matrix.of_property(f"eval_loss of {domain}").helpful().names[0] == domain
    assert found["tracker"].result.helpful().names[0] == "law"


def fine_tuning(found: dict[str, Any], folder: Path) -> None:
    """The flipped source is named while training and after it, and the model is better without it."""
    for result in (found["tracker"].result, found["result"]):
        assert result.harmful().names[0] == "flipped"
    assert found["without"]["flipped"][0] < found["with_all"][0]
    assert found["without"]["flipped"][1] > found["with_all"][1]


CHECKS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    check.__name__: check
    for check in (
        clinics,
        redundant_sources,
        tabular_sources,
        fairness_by_region,
        image_clusters,
        long_runs,
        several_processes,
        text_sources,
        fine_tuning,
    )
}


def test_every_example_has_a_conclusion_that_is_checked():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_an_example_comes_to_its_conclusion(name, tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    CHECKS[name](runpy.run_path(str(EXAMPLES / f"{name}.py")), tmp_path)
    importlib.import_module("matplotlib.pyplot").close("all")


def test_a_user_needs_fewer_than_fifteen_lines():
    text = (EXAMPLES / "clinics.py").read_text(encoding="utf-8")
    story = text[text.index("# From the model to names") :].splitlines()
    assert sum(bool(line.strip()) and not line.startswith("#") for line in story) < 15
