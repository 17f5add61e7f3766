"""The report: made rows become tables, figures and one page; what is missing is said, never drawn empty."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from benchmarks import report
from benchmarks.compare.table import times
from benchmarks.names import GROUPINGS, NO_REMOVAL, RANDOM_REMOVAL
from benchmarks.report import paper
from benchmarks.report.advice import advice
from benchmarks.report.charts import charts
from benchmarks.report.check_tables import check_tables, source_table
from benchmarks.report.cost_tables import cost
from benchmarks.report.formats import Table, three_digits
from benchmarks.report.headlines import headlines
from benchmarks.report.lds_figures import lds_figures
from benchmarks.report.page import runs_text
from benchmarks.report.rows import Run, merged, of_sums, read, slug
from benchmarks.report.tables import all_tables
from benchmarks.report.takeaways import OF_SECTION
from benchmarks.results import ResultFolder
from benchmarks.speed import write as write_timings
from benchmarks.speed.timing import Row

METHODS = ("TracIn", "Inf. (Fisher)", "Inf. (LiSSA)", "TRAK")
SIZES = (1, 4, 16, 64, 256, 1024)


class MadeRows:
    """Rows as a run would write them, with made numbers."""

    def __init__(
        self, data: str = "HELOC", model: str = "ANN-S", stand_in: bool = False,
        methods: tuple[str, ...] = METHODS, groupings: tuple[str, ...] = GROUPINGS, sizes: tuple[int, ...] = SIZES,
    ) -> None:  # fmt: skip
        self.draw = np.random.default_rng(0)
        self.methods, self.groupings, self.sizes = methods, groupings, sizes
        self.common = {
            "data": data, "model": model, "source": f"{data} from a file", "stand_in": stand_in, "scale": "laptop",
            "train_points": 7896, "test_points": 1975,
        }  # fmt: skip

    def check(self) -> list[dict[str, Any]]:
        rows = []
        methods = [("Captum", "TracInCP"), ("Captum", "SimilarityInfluence"), ("dattri", "IFAttributorLiSSA")]
        for toolkit, method in [*methods, ("TRAK", "TRAKer"), ("core", "batched Fisher")]:
            row = self.common | {
                "experiment": "check", "key": f"{self.common['model']}/{toolkit}/{method}", "toolkit": toolkit,
                "method": method, "group_size": 64, "groups": 124, "tolerance": 1e-4, "settings": "one checkpoint",
            }  # fmt: skip
            if method == "SimilarityInfluence":
                rows.append(row | {"status": "skipped", "reason": "no gradients <to> group & sum"})
                continue
            rows.append(row | {"status": "equal", "error": 3.1e-7, "peak_original": 2**28, "peak_groups": 2**25})
        return rows

    def speed(self) -> list[dict[str, Any]]:
        rows = []
        for toolkit, method in (("Captum", "TracInCP"), ("TRAK", "TRAKer")):
            for question in ("one property", "test points"):
                cells = []
                for size in (1, 64, 1024):
                    for mode in ("exact", "default") if toolkit == "TRAK" else ("exact",):
                        faster = float(10 ** self.draw.uniform(0.1, 2.5))
                        cells.append(
                            {
                                "group_size": size, "mode": mode, "seconds": 2.0 / faster, "speed_up": faster,
                                "speed_up_with_hessian": faster, "speed_up_first": faster / 2,
                                "agreement": 0.9 if mode == "default" else None,
                            }
                        )  # fmt: skip
                rows.append(
                    self.common | {
                        "experiment": "speed", "key": f"speed/{self.common['model']}/{method}/{question}",
                        "toolkit": toolkit, "method": method, "question": question, "status": "measured",
                        "original_points": 512, "original_seconds": 2.0, "hessian_seconds": 0.0, "linearity": 1.02,
                        "grouping_seconds": {"1": 0.0, "64": 0.1, "1024": 0.02}, "cells": cells, "own_code": [],
                    }
                )  # fmt: skip
        return rows

    def removal(self, experiment: str, fractions: tuple[float, ...], seeds: int = 10) -> list[dict[str, Any]]:
        rows = [self._accuracy(experiment, NO_REMOVAL, "none", 1, 0.0, seeds, 0.74)]
        for fraction in fractions:
            rows.append(self._accuracy(experiment, RANDOM_REMOVAL, "none", 1, fraction, seeds, 0.74 - fraction / 30))
            for method, grouping, size in self._attributed():
                drop = fraction * (0.6 if grouping != "Random" else 0.2) / (1 + np.log2(size) / 8)
                rows.append(self._accuracy(experiment, method, grouping, size, fraction, seeds, 0.74 - drop))
        return rows

    def noisy(self) -> list[dict[str, Any]]:
        rows = []
        every = self._attributed()
        rates = [("TracIn (learning rates)", *rest) for method, *rest in every if method == "TracIn"]
        attributed = [*every, ("Per-point, directional", "none", 1), *rates]
        for method, grouping, size in attributed:
            values = self.draw.normal(0.6 - 0.005 * np.log2(size), 0.01, 10)
            checked = np.linspace(0, 1, 21)
            row = self._attribution("noisy", method, grouping, size) | {
                "noise": 0.2, "values": list(values), "mean": values.mean(), "roc_values": list(values + 0.05),
                "roc_mean": values.mean() + 0.05, "curve": np.stack([checked, checked**0.6], 1).tolist(),
                "stderr": 0.003, "seconds_per_seed": [0.1] * 10,
            }  # fmt: skip
            if method == "TracIn":
                row |= {"default_mode_seconds": 20.0} if size == 1 else {}
                other = {"key": f"{row['key']}/1", "grouping_seed": 1, "values": list(values + 0.02)}
                rows += [row | other] if size > 1 else []
            by_mean = {"key": f"{row['key']}/mean", "aggregation": "mean", "values": list(values - 0.1)}
            rows += [row, row | by_mean] if size > 1 else [row]
        return rows

    def lds(self) -> list[dict[str, Any]]:
        rows = []
        for method, grouping, size in self._attributed():
            mean = 0.7 - 0.03 * np.log2(size) + self.draw.normal(0, 0.02)
            row = self._attribution("lds", method, grouping, size) | {
                "protocol": "halves", "values": [mean, mean + 0.01], "mean": mean, "ceiling": 0.95,
                "interval": [mean - 0.08, mean + 0.07], "additive_ceiling": 0.8,
            }  # fmt: skip
            left_out = {"pearson": mean - 0.1, "pearson_interval": [mean - 0.25, mean + 0.02], "mean": 0.1}
            rows += [row, row | {"key": f"{row['key']}/left out", "protocol": "leave one out", **left_out}]
        return rows

    def every(self) -> list[dict[str, Any]]:
        removed = self.removal("retraining", (0.01, 0.05, 0.1, 0.2))
        pruned = self.removal("pruning", (0.25, 0.5, 0.75))
        return [*self.check(), *self.speed(), *removed, *pruned, *self.noisy(), *self.lds()]

    def _attributed(self) -> list[tuple[str, str, int]]:
        return [
            (method, grouping, size)
            for method in self.methods
            for size in self.sizes
            for grouping in (("none",) if size == 1 else self.groupings)
        ]

    def _attribution(self, experiment: str, method: str, grouping: str, size: int) -> dict[str, Any]:
        lissa = method == "Inf. (LiSSA)"
        seconds = {
            "grouping": 0.0 if size == 1 else 0.02 if grouping == "Random" else 0.2,
            "gradients": 0.1 + 4 / size,
            "curvature": 6.0 if lissa else 0.0 if method == "TracIn" else 0.05 + 1 / size,
            "scoring": 0.02,
        }
        return self.common | {
            "experiment": experiment, "key": f"{self.common['model']}/{experiment}/{method}/{grouping}/{size}",
            "method": method, "grouping": grouping, "group_size": size, "groups": 7896 // size, "grouping_seed": 0,
            "aggregation": "sum", "seconds": seconds, "model_seeds": list(range(10)),
        }  # fmt: skip

    def _accuracy(self, experiment: str, method: str, grouping: str, size: int, fraction: float, seeds: int,
                  expected: float) -> dict[str, Any]:  # fmt: skip
        values = self.draw.normal(expected, 0.004, seeds)
        row = self._attribution(experiment, method, grouping, size)
        if method in (NO_REMOVAL, RANDOM_REMOVAL):
            del row["seconds"]
        stderr = values.std(ddof=1) / seeds**0.5 if seeds > 1 else None
        return row | {
            "key": f"{row['key']}/{fraction}", "fraction": fraction, "values": list(values), "mean": values.mean(),
            "stderr": stderr,
        }  # fmt: skip


def folder_of(path: Path, rows: list[dict[str, Any]], **config: Any) -> Path:
    path.mkdir(parents=True)
    machine = {"processor": "a <fast> one", "cores": 2}
    about = {"command": "run all", "scale": "laptop", "machine": machine, "versions": {"torch": "2.13"}} | config
    (path / "config.json").write_text(json.dumps(about))
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def small() -> list[dict[str, Any]]:
    """One method, two groupings, three sizes: every kind of row there is."""
    return MadeRows(methods=("TracIn",), groupings=("Random", "Grad-K-Means"), sizes=(1, 16, 256)).every()


@pytest.fixture(scope="module")
def written(small: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole report of made rows."""
    base = tmp_path_factory.mktemp("report")
    document = base / "RESULTS.md"
    document.write_text("By hand.\n<!-- table noisy -->\nold\n<!-- end -->\n![speed](figures/speed-up.svg)\n")
    report.write([folder_of(base / "run", small)], base / "out", [document], show_progress=False)
    return base


class Page(HTMLParser):
    """What a page loads, which tags it opens and closes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources, self.open, self.words = list[str](), list[str](), list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        self.sources += [value or "" for name, value in attrs if name == "srcset"]
        if tag not in ("meta", "img", "br", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_loads_nothing_and_is_well_formed(written: Path) -> None:
    page = Page((written / "out" / "report.html").read_text())
    assert page.open == []
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    pictures = [source for source in page.sources if source.startswith("data:image/svg+xml")]
    assert len(pictures) == len(list((written / "out" / "figures").rglob("*.svg"))) >= 16  # each wide and narrow
    anchors = {source for source in page.sources if source.startswith("#")}
    assert {"#data", "#noisy-labels", "#pruning", "#cost", "#advice", "#runs"} <= anchors


def test_the_page_opens_with_the_headlines_and_escapes_what_rows_say(written: Path) -> None:
    text = (written / "out" / "report.html").read_text()
    words = "".join(Page(text).words)
    lead = ["Same scores: ", "equal to the originals on 4 of 5 checks", "Faster: ", "Faithful: ", "How it was run"]
    places = [words.index(sentence) for sentence in lead]
    assert places == sorted(places)
    assert "no gradients <to> group & sum" in words
    assert "<to>" not in text
    assert "a <fast> one" in words


def test_every_figure_comes_as_svg_and_png(written: Path) -> None:
    names = {path.name for path in (written / "out" / "figures").iterdir()}
    kinds = ("speed-up", "runtime-groupings", "runtime-removals", "retraining-curves", "pruning-curves", "detection",
             "lds", "leave-group-out", "cost")  # fmt: skip
    expected = {kind if kind == "speed-up" else f"{kind}-heloc-ann-s" for kind in kinds}
    assert names == {f"{name}.{end}" for name in expected for end in ("svg", "png")} | {"narrow"}
    assert {path.stem for path in (written / "out" / "figures" / "narrow").iterdir()} == expected
    texts = [path.read_text() for path in (written / "out" / "figures").glob("*.svg")]
    assert all("<text" in text for text in texts)
    assert any("attribution time (CPU s, grouping included)" in text for text in texts)


def test_markdown_and_latex_hold_the_same_numbers(written: Path) -> None:
    markdown = (written / "out" / "report.md").read_text()
    latex = (written / "out" / "tables" / "noisy.tex").read_text()
    row = next(line for line in markdown.splitlines() if line.startswith("| HELOC / ANN-S | TracIn | ours |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert " & ".join(cells).replace("±", "$\\pm$") in latex
    assert "\\toprule" in latex
    assert latex.count("{") == latex.count("}")


def test_the_document_keeps_its_words_and_gets_new_tables(written: Path) -> None:
    text = (written / "RESULTS.md").read_text()
    assert text.startswith("By hand.\n<!-- table noisy -->\n**Noisy labels")
    assert "old" not in text
    assert (written / "figures" / "speed-up.svg").read_bytes() == (
        written / "out" / "figures" / "speed-up.svg"
    ).read_bytes()


def test_several_documents_are_written_at_once(small: list[dict[str, Any]], tmp_path: Path) -> None:
    documents = [tmp_path / "one.md", tmp_path / "deep.md"]
    for document, table in zip(documents, ("noisy", "lds"), strict=True):
        document.write_text(f"<!-- table {table} -->\n<!-- end -->\n<!-- runs -->\n<!-- end -->\n")
    folders = [folder_of(tmp_path / name, small, arguments=f"run {name}") for name in ("first", "second")]
    report.write(folders, tmp_path / "out", documents, show_progress=False)
    for document, title in zip(documents, ("Noisy labels", "Fidelity, halves"), strict=True):
        text = document.read_text()
        assert f"**{title}" in text
        assert text.count("torch 2.13") == 1  # what all runs share is said once
        assert "**first**: arguments: run first." in text


def test_what_if_has_a_table_for_each_protocol_with_every_grouping_seed(tmp_path: Path) -> None:
    made, rows = MadeRows(), []
    for protocol in ("halves", "keep 80 %"):
        for method, values in (("What-if", (0.86, -0.05, 0.999)), ("What-if, 3 models", (0.9, 0.9, 0.9)),
                               ("Influence", (0.1, 0.2, 0.3))):  # fmt: skip
            if protocol != "halves" and method == "What-if, 3 models":
                continue
            for seed, value in enumerate(values):
                row = made._attribution("lds", method, "Random", 64) | {"protocol": protocol, "mean": value}
                rows.append(row | {"key": f"{method}/{protocol}/{seed}", "grouping_seed": seed, "subsets": 64})
    rows = [
        row | {"model_seeds": [1, 2], "values": [row["mean"]], "ceiling": 0.95, "slope": 1.5, "interval": [0, 1]}
        for row in rows
    ]
    tables = {table.name: table for table in all_tables(read([folder_of(tmp_path / "run", rows[::-1])]))}
    assert "what-if-leave-one-out" not in tables
    assert tables["what-if"].frame.to_dict("records") == [
        {
            "Data / model": "HELOC / ANN-S", "Groups": "Random 64", "Models": "64 × 2",
            "What-if": ".86 -.05 1.00 / .90 .90 .90", "Influence": ".20", "Ceiling": ".95",
        }
    ]  # fmt: skip
    assert tables["what-if-keep-80"].frame["What-if"].tolist() == [".86 -.05 1.00"]
    assert list(tables["what-if-levels"].frame["Slope"]) == ["1.50 1.50 1.50"] * 3


def test_a_document_that_asks_for_too_much_stays_as_it_is(tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text("<!-- table lds -->\nold\n<!-- end -->\n")
    folder = folder_of(tmp_path / "run", MadeRows().check())
    with pytest.raises(ValueError, match=r"doc\.md shows lds"):
        report.write([folder], tmp_path / "out", [document], show_progress=False)
    assert "old" in document.read_text()
    with pytest.raises(SystemExit, match=r"--document .*other\.md is no file"):
        report.command([folder], tmp_path / "out", [tmp_path / "other.md"])


def test_tables_of_speed_and_of_rows_are_filled_without_touching_each_other(tmp_path: Path) -> None:
    timing = Row("core", "LR", "auto, one property", 64, 0.5, "pass", 1.2, "passes", 1.3, "made data")
    slow = replace(timing, group_size=1, ratio=1.4)
    (tmp_path / "speed").mkdir()
    write_timings([timing, slow], tmp_path / "speed" / "speed.json", 1, True)
    document = tmp_path / "performance.md"
    marked = "<!-- table {} -->\nold\n<!-- end -->\n"
    document.write_text("By hand.\n" + "".join(map(marked.format, ("timing-core", "timing-trak", "speed"))))
    report.command([tmp_path / "speed"], documents=[document])
    text = document.read_text()
    assert "| LR | auto, one property | 64 | 0.500 | 1.20 passes | ≤ 1.3 | one pass |" in text
    assert "| 1 | 0.500 | 1.40 passes | ≤ 1.3, missed | one pass |" in text
    assert text.count("\nold\n") == 2
    report.command([folder_of(tmp_path / "run", MadeRows().speed())], tmp_path / "out", [document])
    text = document.read_text()
    assert "1.20 passes" in text
    assert "Captum · TracInCP" in text
    assert text.count("\nold\n") == 1  # no row of TRAK's part was timed
    with pytest.raises(SystemExit, match="name one by --document"):
        report.command([tmp_path / "speed"])


def test_kinds_without_rows_are_left_out_with_a_line_saying_what_to_run(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", [*MadeRows().check(), *MadeRows().speed()])
    found = report.write([folder], tmp_path / "out", show_progress=False)
    page = (tmp_path / "out" / "report.html").read_text()
    assert [path.name for path in (tmp_path / "out" / "figures").glob("*.svg")] == ["speed-up.svg"]
    for command in ("run retraining", "run noisy", "run lds"):
        assert f"python -m benchmarks {command}" in page
    assert found.fidelity == "Faithful? Not measured here; run `python -m benchmarks run lds`."


def test_a_run_that_has_just_begun_can_be_reported(tmp_path: Path, small: list[dict[str, Any]]) -> None:
    first = list({row["experiment"]: row for row in reversed(small)}.values())
    report.write([folder_of(tmp_path / "run", first)], tmp_path / "out", show_progress=False)
    names = {path.stem for path in (tmp_path / "out" / "figures").glob("*.svg")}
    assert names == {"speed-up", "detection-heloc-ann-s"}  # no curve of one point


def test_stand_in_data_is_named_on_the_figure_and_in_the_table(tmp_path: Path) -> None:
    rows = MadeRows("QNLI", "BERT", stand_in=True, methods=("TracIn",), sizes=(1, 16)).lds()
    report.write([folder_of(tmp_path / "run", rows)], tmp_path / "out", show_progress=False)
    figure = (tmp_path / "out" / "figures" / "lds-qnli-bert-stand-in-data.svg").read_text()
    assert "QNLI / BERT (stand-in data): linear" in figure
    assert "QNLI / BERT (stand-in data)" in (tmp_path / "out" / "tables" / "lds.tex").read_text()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: [], "folders is empty"),
        (lambda path: [path / "nowhere"], "nowhere is no result folder"),
        (lambda path: [folder_of(path / "bare", [])], "bare has no rows"),
    ],
)
def test_empty_input_is_an_error_that_names_the_folder(tmp_path: Path, make: Any, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        report.write(make(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_later_folder_counts_where_two_hold_the_same_row(tmp_path: Path) -> None:
    rows = MadeRows().lds()
    later = [row | {"mean": 0.5} for row in rows[:1]]
    results = read([folder_of(tmp_path / "a", rows), folder_of(tmp_path / "b", later)])
    assert len(results.rows) == len(rows)
    assert results.rows.set_index("key").loc[rows[0]["key"], "mean"] == 0.5


def test_the_same_model_at_two_sizes_is_two_settings(tmp_path: Path) -> None:
    rows = MadeRows().lds()
    smaller = [row | {"train_points": 500, "scale": "quick"} for row in rows]
    results = read([folder_of(tmp_path / "a", rows), folder_of(tmp_path / "b", smaller)])
    assert results.settings == ["HELOC / ANN-S (7,896 points)", "HELOC / ANN-S (500 points)"]


def test_rows_of_unlike_training_are_never_put_into_one_table(tmp_path: Path) -> None:
    rows = [row | {"recipe": {"epochs": 300}} for row in MadeRows().lds()]
    fewer = [row | {"recipe": {"epochs": 30}} for row in rows[:1]]
    results = read([folder_of(tmp_path / "a", rows), folder_of(tmp_path / "b", fewer)])
    assert results.settings == ["HELOC / ANN-S (300 epochs)", "HELOC / ANN-S (30 epochs)"]
    assert source_table(results).frame["Epochs"].tolist() == ["300", "30"]


def test_more_groupings_of_the_same_models_do_not_shrink_the_standard_error(tmp_path: Path) -> None:
    row = next(row for row in MadeRows().noisy() if row["group_size"] == 16)
    twins = [row | {"key": f"{row['key']}/{seed}", "grouping_seed": seed} for seed in range(3)]
    keys = ("setting", "method")
    one, three = (
        merged(of_sums(read([folder_of(tmp_path / name, rows)]).rows), keys).iloc[0]
        for name, rows in (("one", twins[:1]), ("three", twins))
    )
    assert three["stderr"] == pytest.approx(one["stderr"]) == pytest.approx(np.std(row["values"], ddof=1) / 10**0.5)
    assert (three["seeds"], three["grouping_seeds"], three["spread"]) == (10, 3, pytest.approx(0))
    shorter = twins[1] | {"model_seeds": [8, 9], "values": row["values"][8:]}
    mixed = merged(of_sums(read([folder_of(tmp_path / "mixed", [twins[0], shorter])]).rows), keys).iloc[0]
    assert (mixed["seeds"], mixed["mean"]) == (10, pytest.approx(one["mean"]))


def test_headlines_count_what_was_skipped_and_what_differs(tmp_path: Path) -> None:
    rows = MadeRows().check()
    rows[0] |= {"status": "differs", "error": 0.2}
    speed = MadeRows().speed()
    found = headlines(read([folder_of(tmp_path / "run", [*rows, *speed, *MadeRows().lds()])]))
    assert found.equality.endswith("are equal to the originals on 3 of 5 checks; 1 differs, 1 skipped.")
    counted = [cell for row in speed if row["question"] == "one property" for cell in row["cells"]]
    middle = np.median(
        [one["speed_up"] for one in counted if one["group_size"] == 64 and one is not counted[-4]]  # TRAK: by default
    )
    assert found.speed.startswith(f"Faster: scores of groups of 64 training points come {times(middle)} faster in the")
    assert found.speed.endswith("none of 18 measurements is slower than the original.")
    assert re.fullmatch(
        r"Faithful: scores of Random groups of 64 on HELOC / ANN-S predict what real retraining without groups does "
        r"with a rank correlation \(LDS\) of 0\.\d\d \(.+, the best method\); retraining itself, .* reaches 0\.95\.",
        found.fidelity,
    )
    assert str(found).splitlines() == list(found.lines)


def test_advice_comes_from_the_rows(tmp_path: Path) -> None:
    rows = MadeRows().lds()
    ours = [
        row | {"method": "Inf. (CG)", "key": f"{row['key']}/CG", "mean": 0.9} for row in rows if row["method"] == "TRAK"
    ]
    cheap = [row | {"mean": 0.85} if row["method"] == "TracIn" else row for row in rows]
    needs = advice(read([folder_of(tmp_path / "all", [*cheap, *ours, *MadeRows().check(), *MadeRows().speed()])]))
    assert [need.use for need in needs[:2]] == ["Inf. (CG)", "TracIn"]
    assert needs[0].because.startswith("LDS 0.90 in ")
    captum, trak = needs[2:]
    assert (captum.use, trak.use) == ("ggda_captum in its place", "ggda_trak in its place")
    assert "TracInCP" in captum.because
    assert 'fisher="exact"' in trak.because
    assert 'fisher="exact"' not in captum.because
    assert advice(read([folder_of(tmp_path / "none", MadeRows().check())])) == []


def test_every_section_with_rows_has_a_takeaway(tmp_path: Path) -> None:
    results = read([folder_of(tmp_path / "run", MadeRows().every())])
    assert all(say(results) for say in OF_SECTION.values())
    nothing = read([folder_of(tmp_path / "check", MadeRows().check())])
    assert {name for name, say in OF_SECTION.items() if say(nothing)} == {"check"}


def test_the_three_charts_have_bars_within_their_tracks(tmp_path: Path) -> None:
    found = charts(read([folder_of(tmp_path / "run", MadeRows().every())]))
    assert [chart.question for chart in found] == ["Same scores?", "How much faster?", "How faithful?"]
    assert all(0 <= bar.share <= 1 for chart in found for bar in chart.bars)
    assert found[0].answer == "4 of 5 equal"
    assert {bar.mark for bar in found[2].bars} == {0.95}


def test_every_table_of_an_experiment_has_the_papers_number_or_says_there_is_none(tmp_path: Path) -> None:
    tables = list(all_tables(read([folder_of(tmp_path / "run", MadeRows().every())])))
    names = {table.name.removesuffix("-heloc-ann-s") for table in tables}
    assert names == {"noisy", "noisy-groupings", "pruning-paper", "pruning", "retraining-sizes", "retraining", "lds",
                     "leave-group-out", "cost", "cost-256", "check", "check-skipped", "speed", "speed-tests",
                     "speed-grouping", "review-per-point",
                     "review-learning-rates", "review-aggregation", "review-grouping-seeds"}  # fmt: skip
    for table in tables[5:]:
        assert "paper" in table.markdown().lower(), table.name
    by_name = {table.name: table.markdown() for table in tables}
    assert "| paper | 0.580 / 10.6 | 0.572 / 2.95 | 0.568 / 0.9 |" in by_name["noisy"]
    pruning = by_name["pruning-paper-heloc-ann-s"]
    assert "random groups of 256" in pruning
    assert "53.6 ± 0.0" in pruning
    assert "7.81 ± 0.53" in pruning


def test_cost_adds_up_and_names_the_speed_up_over_single_points(tmp_path: Path) -> None:
    found = cost(read([folder_of(tmp_path / "run", MadeRows().noisy())])).set_index(
        ["method", "grouping", "group_size"]
    )
    row = found.loc[("TracIn", "Grad-K-Means", 256)]
    assert row["seconds_total"] == pytest.approx(0.2 + 0.1 + 4 / 256 + 0.02)
    assert row["faster"] == pytest.approx(4.12 / row["seconds_total"])
    assert row["faster_ungrouped"] == pytest.approx(4.12 / (row["seconds_total"] - 0.2))
    assert row["default_mode"] == 20
    assert found.loc[("TRAK", "Random", 4), ["default_mode"]].isna().all()


def test_reviewers_tables_hold_both_variants(tmp_path: Path) -> None:
    rows = MadeRows(methods=("TracIn",), sizes=(1, 16)).noisy()
    tables = {table.name: table.frame for table in all_tables(read([folder_of(tmp_path / "run", rows)]))}
    aggregation = tables["review-aggregation"].set_index(["Attributor", "Grouping"])["16"]
    assert ("TracIn", "Random") not in aggregation.index
    by_sum, by_mean = (float(part) for part in aggregation["TracIn", "Grad-K-Means"].split(" / "))
    assert by_sum - by_mean == pytest.approx(0.11, abs=0.002)
    assert tables["review-grouping-seeds"].set_index("Grouping")["16"]["Random"].endswith(" ± 0.014")
    per_point = tables["review-per-point"]
    assert list(per_point["TracIn of"]) == [
        "single points, per-sample gradients", "single points, directional", "Grad-K-Means groups of 16",
    ]  # fmt: skip
    rates = tables["review-learning-rates"]
    assert list(rates["Grouping"]) == ["single points", *GROUPINGS]
    assert all(" / " in cell for cell in rates["16"][1:])


def test_the_ceiling_of_lds_has_a_line_for_every_grouping(tmp_path: Path) -> None:
    table = next(all_tables(read([folder_of(tmp_path / "run", MadeRows().lds())])))
    for name, value in (("Ceiling", "0.95"), ("Best additive score", "0.80")):
        single, *grouped = table.frame[table.frame["Attributor"] == name].to_numpy().tolist()
        assert single == ["HELOC / ANN-S", name, "single points", value, *["–"] * (len(SIZES) - 1)]
        assert grouped == [["HELOC / ANN-S", name, one, "–", *[value] * (len(SIZES) - 1)] for one in GROUPINGS]


def test_lds_of_one_seed_has_no_ceiling(tmp_path: Path) -> None:
    made = MadeRows(methods=("TracIn",), groupings=("Random", "Grad-K-Means"), sizes=(1, 16, 256))
    rows = [row | {"ceiling": None} for row in made.lds()]
    results = read([folder_of(tmp_path / "run", rows)])
    assert "Ceiling" not in set(next(all_tables(results)).frame["Attributor"])
    assert all("Ceiling" not in picture.caption for picture in lds_figures(results, tmp_path))


def test_checks_that_compared_nothing_are_listed_with_their_reason(tmp_path: Path) -> None:
    results = read([folder_of(tmp_path / "run", MadeRows(stand_in=True).check())])
    compared, skipped = check_tables(results)
    assert len(compared.frame) == 4
    assert skipped.frame.iloc[0].tolist()[2:] == ["SimilarityInfluence", "skipped", "no gradients <to> group & sum"]
    assert source_table(results).frame.iloc[0, -1] == "stand-in"


def test_a_single_seed_has_no_standard_error(tmp_path: Path) -> None:
    rows = MadeRows(methods=("TracIn",), sizes=(1, 16)).removal("retraining", (0.2,), seeds=1)
    tables = all_tables(read([folder_of(tmp_path / "run", rows)]))
    cells = next(table for table in tables if table.name.startswith("retraining")).frame.iloc[:, 2:]
    assert not cells.apply(lambda column: column.str.contains("±|nan")).any(axis=None)


def test_the_papers_numbers() -> None:
    assert paper.noisy("HELOC", "ANN-S", "TRAK")[1] == (0.504, 46.4)
    assert paper.noisy("QNLI", "BERT", "Inf. (Fisher)")[256] == (0.508, 135)
    assert paper.noisy("CIFAR-10", "ResNet-18", "TracIn") == paper.noisy("CIFAR-10", "ResNet18", "TracIn")
    assert paper.noisy("HELOC", "LR", "TRAK") == {}
    assert paper.pruning("HELOC", "LR", "TracIn")[50] == ((56.3, 0.0), (72.6, 0.0))
    assert paper.pruning("MNIST", "ANN-L", "Inf. (LiSSA)")[75] == ((92.6, 0.6), (95.9, 0.1))
    assert paper.pruning_runtime("QNLI", "BERT", "TracIn") == ((1043, 14.3), (100.2, 0.11))
    assert paper.pruning_runtime("QNLI", "BERT", "TRAK") is None


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (4.5678, "4.57"), (123.4, "123"), (99.96, "100"), (12345, "12300"), (0, "0"),
     (0.0004, "4.0e-04"), (float("nan"), "–")],
)  # fmt: skip
def test_three_digits(value: float, text: str) -> None:
    assert three_digits(value) == text


def test_signs_survive_every_format() -> None:
    frame = pd.DataFrame({"name": ["a_b & 50 %"] * 2, "value": ["1.0 ± 0.1", "x|y <z>"]})
    table = Table("signs", "Share in %", frame, keys=1)
    assert "a\\_b \\& 50 \\% & 1.0 $\\pm$ 0.1" in table.latex()
    assert "\\caption{\\small Share in \\%." in table.latex()
    assert "x\\|y &lt;z>" in table.markdown()
    assert [cell.text for cell in table.rows[1]] == ["a_b & 50 %", "x|y <z>"]
    assert [cell.again for cell in table.rows[1]] == [False, False]


def test_a_long_latex_table_runs_over_pages() -> None:
    frame = pd.DataFrame({"name": ["a"] * 50, "value": ["1"] * 50})
    long, short = (Table("many", "Many", some, keys=1).latex() for some in (frame, frame.head()))
    assert "\\begin{longtable}" in long
    assert "\\caption{\\small Many.}" in long
    assert "\\begin{tabular}{lr}" in short
    assert long.count("{") == long.count("}")


@pytest.mark.parametrize(("columns", "size"), [(3, "\\small\n"), (10, "\\scriptsize"), (20, "\\tiny")])
def test_a_wide_latex_table_is_set_smaller(columns: int, size: str) -> None:
    frame = pd.DataFrame({f"{column}": ["12.3 ± 0.1"] for column in range(columns)})
    assert size in Table("wide", "Wide", frame).latex()


def test_slugs_are_file_names() -> None:
    assert slug("CIFAR-10 / ResNet-18 (2,000 points)") == "cifar-10-resnet-18-2-000-points"


HOSTILE = "a_b*c* [x](http://y) ![p](q) <script>alert(1)</script> `code` | & \\input{/etc/passwd} ~^ {}%$#\n# heading"


def test_titles_and_notes_are_escaped_in_markdown_and_latex() -> None:
    table = Table("made", HOSTILE, pd.DataFrame({"a": ["1"]}), notes=[HOSTILE])
    title, *_, note = table.markdown().strip().split("\n\n")
    for text in (title.strip("*"), note):
        assert "\n" not in text
        assert "<" not in text
        assert not re.search(r"(?<!\\)[\[\]`_*!|]", text)
    caption = table.latex().partition("\\caption")[2].partition("\\label")[0]
    assert "\\input" not in caption
    assert "\\textbackslash{}input" in caption
    assert not re.search(r"(?<!\\)[%$#&_]", caption)


def test_a_run_that_says_what_it_likes_is_escaped(tmp_path: Path) -> None:
    lines = runs_text([Run(tmp_path / "<b>", {"command": HOSTILE})])
    assert "<" not in lines
    assert not re.search(r"(?<!\\)[\[\]]", lines)
    assert lines.count("\n") == 0


def test_a_smoke_run_says_that_its_numbers_mean_nothing(
    small: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "at the smoke scale, which shows that everything runs: its numbers mean nothing."
    for scale in ("quick", "smoke"):
        folder = ResultFolder.open(scale, {"command": "run", "scale": scale}, base=tmp_path)
        for row in small:
            folder.append(row)
        assert report.command([folder.path], tmp_path / scale) == 0
        printed, page = capsys.readouterr().out, (tmp_path / scale / "report.html").read_text()
        assert (said in printed, said in page) == (scale == "smoke", scale == "smoke")
    assert page.index(said) < page.index("Same scores")
