"""The house: imports point one way, and `import ggda_ext` brings torch and little more."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ggda_ext

ROOT = Path(ggda_ext.__file__).parent
LAYERS = [
    {"distributed", "model", "groups", "tables", "row_reductions"},
    {"data", "losses", "own_loss", "checkpoints"},
    {"training", "gradients"},
    {"properties"},
    {"curvature", "estimation"},
    {"results"},
    {"methods"},
    {"attribution"},
    {"storage", "grouping", "evaluation", "label_issues", "drop_in"},
    {"counterfactual"},
]
"""Rooms from the ground up: a module imports from its own layer and those below, at its top level."""


def room(module: str) -> str:
    return module.split(".")[1]


def imported(path: Path) -> list[str]:
    """Modules of the package that a file imports when it is imported."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ggda_ext":
            names = [f"ggda_ext.{alias.name}" for alias in node.names]
            found += names if node.module == "ggda_ext" else [node.module]
    return found


FILES = [path for path in sorted(ROOT.rglob("*.py")) if path.parent != ROOT or path.name != "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    heights = {name: height for height, layer in enumerate(LAYERS) for name in layer}
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    above = [name for name in imported(path) if heights[room(name)] > heights[own]]
    assert not above, f"{own} imports from a room above it: {above}"


def test_nothing_below_the_front_door_imports_storage():
    users = {path.relative_to(ROOT).parts[0] for path in FILES if any(room(n) == "storage" for n in imported(path))}
    assert users <= {"storage", "counterfactual"}


def test_importing_the_package_brings_torch_and_little_more():
    code = "import sys, torch; before = set(sys.modules); import ggda_ext; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = {name.split(".")[0] for name in done.stdout.split()}
    assert not brought & {"sklearn", "pandas", "scipy", "matplotlib", "transformers", "captum", "dattri", "trak"}
