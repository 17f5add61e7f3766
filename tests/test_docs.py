"""README and docs/: every code block runs, every output shown is what comes out, every link leads somewhere."""

from __future__ import annotations

import re
import runpy

import pages
import pytest

from ggda_ext import STRATEGIES, grouping, properties
from ggda_ext import __all__ as PUBLIC
from ggda_ext.methods import METHODS

NAMES = [page.relative_to(pages.ROOT).as_posix() for page in pages.PAGES]
WITH_CODE = [name for name in NAMES if pages.blocks((pages.ROOT / name).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("name", WITH_CODE)
def test_a_page_runs_from_top_to_bottom_and_prints_what_it_shows(name, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    for block, came in pages.printed(pages.ROOT / name):
        if block.shown is not None:
            found = pages.difference(block.shown, came)
            assert found is None, f"{name}, block at line {block.line}: {found}"
    pyplot.close("all")


@pytest.mark.parametrize(
    ("shown", "came", "same"),
    [
        ("loss 0.320", "loss 0.3190", True),
        ("loss 0.32", "loss 0.42", False),
        ("5 groups", "6 groups", False),
        ("22% of them", "23% of them", True),
        ("22% of them", "26% of them", False),
        ("web  +1.5  helps", "web +1.52 helps", True),
        ("web  +1.5  helps", "web  +1.5  hurts", False),
        ("a\n…\nb 1.0", "a\nx\ny\nb 1.0", True),
        ("a", "a\nmore", False),
    ],
)
def test_outputs_are_compared_by_words_and_rounded_numbers(shown, came, same):
    assert (pages.difference(shown, came) is None) == same


@pytest.mark.parametrize("name", NAMES)
def test_links_inside_the_project_lead_to_files(name):
    page = pages.ROOT / name
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, heading in re.findall(r"\]\(([^)\s#]*)(?:#([^)]*))?\)", text):
        if not re.match(r"[a-z]+:", target):
            there = page.parent / target if target else page
            assert there.exists(), f"{name} links to {target}, which is not there"
            assert not heading or heading in headings(there), f"{name} links to {target}#{heading}, which is not there"


@pytest.mark.parametrize(
    ("shown", "built"),
    [
        ("[a](../examples/clinics.py) and [b](../examples)", "[a](gallery/clinics.rst) and [b](gallery/index.rst)"),
        ("[a](../../examples/clinics.py)", "[a](../gallery/clinics.rst)"),
        ("[a](../README.md)", "[a](../README.md)"),
    ],
)
def test_links_to_examples_lead_to_the_gallery_of_the_site(shown, built):
    conf = runpy.run_path(str(pages.ROOT / "docs" / "conf.py"))
    source = [shown]
    conf["to_gallery"](None, "page", source)
    assert source == [built]


def headings(page):
    """What the headings of a page are called in links."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", one.strip().lower())) for one in found}


def test_every_public_name_is_in_the_reference():
    reference = "".join(page.read_text(encoding="utf-8") for page in (pages.ROOT / "docs" / "api").glob("*.md"))
    missing = [name for name in PUBLIC if not re.search(rf"\b{name}\b", reference)]
    assert not missing


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("howto/properties.md", [name for name in properties.__all__ if name.islower()]),
        ("howto/groups.md", [name for name in grouping.__all__ if name != "Summary"]),
        ("howto/methods.md", METHODS),
        ("concepts.md", STRATEGIES),
    ],
)
def test_what_can_be_chosen_is_named_on_its_page(page, names):
    text = (pages.ROOT / "docs" / page).read_text(encoding="utf-8")
    missing = [name for name in names if not re.search(rf"\b{name}\b", text)]
    assert not missing
