"""Sphinx: the pages of this folder, the reference from docstrings, and a gallery that runs the examples.

Why these: PyTorch and scikit-learn document themselves with Sphinx, so our users know their way around. MyST reads the
Markdown that a code host shows. sphinx-gallery runs every example and shows what it printed and drew. furo reads well
on a phone. All four are kept up.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "adapters"), str(ROOT / "docs")]
os.environ.setdefault("MPLBACKEND", "Agg")

from ggda_ext import __version__  # noqa: E402

project = "ggda-ext"
author = copyright = "the ggda-ext authors"
version = release = __version__

extensions = [
    "myst_parser",  # pages in Markdown
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",  # Google-style docstrings
    "sphinx.ext.viewcode",
    "sphinx_gallery.gen_gallery",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build", "sg_execution_times.rst", "gallery/sg_execution_times.rst"]  # its scripts are not ours
nitpicky = False
suppress_warnings = ["config.cache"]

html_theme = "furo"
html_title = f"ggda-ext {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "py:obj"  # `Groups` in a docstring is a link
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_inherit_docstrings = False
autosummary_generate = True
napoleon_google_docstring = True
napoleon_use_rtype = False

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "within_subsection_order": "conf.PlaceInGallery",  # by name, so that Sphinx can keep the settings
    "download_all_examples": False,
    "show_memory": False,
    "capture_repr": (),  # what is printed, not what the last line returns
    "abort_on_example_error": True,
    "only_warn_on_example_error": False,
    "remove_config_comments": True,
}


GALLERY = [
    "clinics.py", "tabular_sources.py", "fairness_by_region.py", "redundant_sources.py", "image_clusters.py",
    "fine_tuning.py", "text_sources.py", "long_runs.py", "several_processes.py",
]  # fmt: skip


class PlaceInGallery:
    """Where an example stands: stories first, machinery last, then those that have no place yet."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __call__(self, example: str) -> int:
        return GALLERY.index(example) if example in GALLERY else len(GALLERY)


def skip(app: object, kind: str, name: str, thing: object, skipped: bool, options: object) -> bool | None:
    """Leave out what scikit-learn adds to every estimator for its own routing, and the methods of PyTorch's tensors."""
    routing = name == "get_metadata_routing" or (name.startswith("set_") and name.endswith("_request"))
    of_tensors = getattr(thing, "__objclass__", type).__module__.startswith("torch")
    return True if routing or of_tensors else None


def to_gallery(app: object, page: str, source: list[str]) -> None:
    """Let links to examples, which a code host shows, lead to their pages in the gallery."""
    links = r"\]\(((?:\.\./)*)\.\./examples(?:/(\w+)\.py)?\)"
    source[0] = re.sub(links, lambda link: f"]({link[1]}gallery/{link[2] or 'index'}.rst)", source[0])


def setup(app: object) -> None:
    """Connect `skip` and `to_gallery`."""
    app.connect("autodoc-skip-member", skip)  # type: ignore[attr-defined]
    app.connect("source-read", to_gallery)  # type: ignore[attr-defined]
