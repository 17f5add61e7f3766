"""The house: imports point one way, and `import ggda_ext` brings torch and little more."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import ggda_transformers
import pytest
import torch
from torch import nn

import ggda_ext

ROOT = Path(ggda_ext.__file__).parent
LAYERS = [
    {"distributed", "sharing", "model", "groups", "tables", "words"},
    {"data", "losses", "checkpoints"},
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

HEIGHTS = {name: height for height, layer in enumerate(LAYERS) for name in layer}


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
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    above = [name for name in imported(path) if HEIGHTS[room(name)] > HEIGHTS[own]]
    assert not above, f"{own} imports from a room above it: {above}"


FLOORS = ["layers", "observation", "proof", "plan", "strategies", "provider"]
"""The gradients from the ground up: what proves a strategy knows no strategy, and no strategy knows the provider."""


@pytest.mark.parametrize("path", sorted((ROOT / "gradients").rglob("*.py")), ids=lambda path: path.stem)
def test_imports_between_gradients_point_one_way(path):
    own = path.relative_to(ROOT / "gradients").parts[0].removesuffix(".py")
    top = len(FLOORS) if own == "__init__" else FLOORS.index(own) if own in FLOORS else 0
    found = {name.split(".")[2] for name in imported(path) if name.startswith("ggda_ext.gradients.")}
    assert not found & set(FLOORS[top + 1 :]), f"{own} imports from a floor above it"


def test_nothing_below_the_front_door_imports_storage():
    users = {path.relative_to(ROOT).parts[0] for path in FILES if any(room(n) == "storage" for n in imported(path))}
    assert users <= {"storage", "counterfactual"}


def test_importing_the_package_brings_torch_and_little_more():
    code = "import sys, torch; before = set(sys.modules); import ggda_ext; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = {name.split(".")[0] for name in done.stdout.split()}
    assert not brought & {"sklearn", "pandas", "scipy", "matplotlib", "transformers", "captum", "dattri", "trak"}
    assert not brought & {"jinja2", "tokenizers", "datasets", "PIL", "IPython"}
    assert {name for name in done.stdout.split() if name.startswith("ggda_ext")} == {"ggda_ext"}


def test_a_first_call_leaves_alone_what_it_does_not_need():
    code = """
import sys, torch
import ggda_ext
data = torch.randn(20, 4), torch.randint(0, 3, (20,))
loss = torch.nn.CrossEntropyLoss()
explained = ggda_ext.properties.mean_loss(data, loss)
ggda_ext.attribute(torch.nn.Linear(4, 3), loss, data, ggda_ext.Groups(torch.arange(20) % 4), explained)
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    brought = set(done.stdout.split())
    rooms = {name.split(".")[1] for name in brought if name.startswith("ggda_ext.")}
    assert not rooms & {"storage", "training", "counterfactual", "grouping", "evaluation", "label_issues"}
    drawing = {"plots", "drawing", "page", "thumbnails", "verifying"}
    assert not {f"ggda_ext.results.{name}" for name in drawing} & brought
    assert not {name.split(".")[0] for name in brought} & {"pandas", "sklearn", "matplotlib", "jinja2"}


def test_every_name_of_the_package_is_found_when_it_is_used():
    for name in ggda_ext.__all__:
        assert getattr(ggda_ext, name) is not None
    assert ggda_ext.curvature is sys.modules["ggda_ext.curvature"]  # modules, too
    with pytest.raises(AttributeError, match="has no attribute 'atribute'"):
        ggda_ext.atribute  # noqa: B018


def test_what_not_every_trainer_needs_is_imported_where_it_is_used():
    for path in Path(ggda_transformers.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in found}
            assert not roots & {"peft", "trl", "datasets", "accelerate", "safetensors", "matplotlib"}, path.name


def walk(call) -> tuple[list[str], set[tuple[str, str]]]:
    """Files of the package that a call enters, in order, and which of them calls which (hooks come through torch)."""
    files: list[str] = []
    calls: set[tuple[str, str]] = set()

    def name(frame) -> str | None:
        path = Path(frame.f_code.co_filename)
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else None

    def watch(frame, event, _):
        here = name(frame) if event == "call" else None
        if here is None:
            return
        if here not in files:
            files.append(here)
        resumed = frame.f_code.co_flags & inspect.CO_GENERATOR  # by whoever iterates over it
        by_torch = frame.f_code.co_name == "__torch_function__"  # whoever calls a function of PyTorch
        caller = None if resumed or by_torch or frame.f_back is None else name(frame.f_back)
        if caller is not None and caller != here:
            calls.add((caller, here))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files, calls


def plain_call(method):
    """A call of `attribute` on a small model of its own, with nothing asked for."""
    torch.manual_seed(0)
    model, loss = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), nn.CrossEntropyLoss()
    data = torch.randn(20, 4), torch.randint(0, 3, (20,))
    groups, explained = ggda_ext.Groups(torch.arange(20) % 4), ggda_ext.properties.mean_loss(data, loss)
    attribute = ggda_ext.attribute
    return lambda: attribute(model, loss, data, groups, explained, method=method)


@pytest.mark.parametrize(("method", "most"), [("tracin", 21), ("influence", 26)])
def test_attribute_in_memory_crosses_few_files_and_goes_one_way(method, most):
    files, calls = walk(plain_call(method))
    assert not [name for name in files if name.startswith("storage")]
    assert len(files) <= most, f"attribute crosses {len(files)} files: {files}"
    crossed = {Path(name).parts[0] for name in files}
    assert len(crossed) <= 12, f"attribute crosses {len(crossed)} rooms: {crossed}"
    rooms = {(Path(a).parts[0].removesuffix(".py"), Path(b).parts[0].removesuffix(".py")) for a, b in calls}
    up = [(a, b) for a, b in rooms if HEIGHTS[a] < HEIGHTS[b]]
    assert not up, f"calls go from a room to one above it: {up}"


@pytest.mark.parametrize(("method", "most"), [("tracin", 17), ("influence", 22)])
def test_what_was_proven_of_a_model_is_not_proven_again(method, most):
    call = plain_call(method)
    call(), call()
    files, _ = walk(call)
    assert {Path(name).stem for name in files if "proof" in name} == {"findings", "captured_layers"}
    assert len(files) <= most, f"attribute crosses {len(files)} files: {files}"
