"""The package: light to import, complete as a wheel, usable from anywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ggda_ext

ROOT = Path(__file__).parents[1]
HEAVY = ("captum", "dattri", "trak", "matplotlib", "transformers")


def python(code: str, *, cwd: Path, path: Path | None = None) -> str:
    environment = {"PYTHONPATH": str(path)} if path is not None else {}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


def loaded_by(module: str, tmp_path: Path) -> set[str]:
    code = f"import sys, {module}; print(*([m for m in {HEAVY} if m in sys.modules]))"
    return set(python(code, cwd=tmp_path).split())


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("ggda_ext", set()),
        ("ggda_captum", {"captum", "matplotlib"}),  # captum imports matplotlib itself
        ("ggda_dattri", {"dattri", "matplotlib"}),
        ("ggda_trak", {"trak", "matplotlib"}),
        ("ggda_transformers", {"transformers"}),
    ],
)
def test_importing_brings_only_the_packages_own_toolkit(module, allowed, tmp_path):
    assert loaded_by(module, tmp_path) <= allowed


@pytest.mark.parametrize(
    ("module", "toolkit"),
    [
        ("ggda_captum", "captum"),
        ("ggda_dattri", "dattri"),
        ("ggda_trak", "trak"),
        ("ggda_transformers", "transformers"),
    ],
)
def test_a_missing_toolkit_names_the_extra_to_install(module, toolkit, tmp_path):
    code = f"""
import sys
sys.modules[{toolkit!r}] = None
try:
    import {module}
except ImportError as error:
    print(error)
"""
    assert f"pip install 'ggda-ext[{toolkit}]'" in python(code, cwd=tmp_path)


def test_a_built_wheel_imports_from_outside_the_checkout(tmp_path):
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("ggda_ext-*.whl")
    place = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(place), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    code = "import ggda_ext, ggda_captum, ggda_dattri, ggda_trak, ggda_transformers; print(ggda_ext.__file__)"
    assert python(code, cwd=tmp_path, path=place).startswith(str(place))
    assert (place / "ggda_ext" / "py.typed").exists()
    (metadata,) = place.glob("ggda_ext-*.dist-info/METADATA")
    links = re.findall(r"\]\(([^)]+)\)", metadata.read_text(encoding="utf-8"))
    assert links
    assert all(link.startswith("https://") for link in links), (
        "a package index cannot follow links into the source tree"
    )


def test_version_and_pythons_are_the_same_wherever_they_are_said():
    def read(name):
        return (ROOT / name).read_text(encoding="utf-8")

    project = read("pyproject.toml")
    assert re.search(r"^version: (.*)$", read("CITATION.cff"), re.MULTILINE)[1] == ggda_ext.__version__
    assert re.search(r"^## (\S+)", read("CHANGELOG.md"), re.MULTILINE)[1] == ggda_ext.__version__
    pythons = re.findall(r"Python :: (3\.\d+)", project)
    assert re.search(r'requires-python = ">=(.*?)"', project)[1] == pythons[0]
    workflow = read(".github/workflows/tests.yml")
    assert re.findall(r'"(3\.\d+)"', re.search(r"python: \[(.*)\]", workflow)[1]) == pythons
    torch = re.search(r'"torch>=([\d.]+)"', project)[1]
    assert f"Python {pythons[0]} and PyTorch {torch}, or newer" in read("CHANGELOG.md")
