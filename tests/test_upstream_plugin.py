"""The plugin that runs a toolkit's own tests against its drop-in, tried on a checkout of one test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CAPTUM_TEST = """
from captum.influence import DataInfluence, SimilarityInfluence, TracInCP
from captum.influence._core.arnoldi_influence_function import ArnoldiInfluenceFunction
from captum.influence._core.influence_function import NaiveInfluenceFunction
from captum.influence._core.tracincp_fast_rand_proj import TracInCPFast, TracInCPFastRandProj
from captum.testing.helpers.influence import common

import torch

def test_imports():
    for cls in (TracInCP, TracInCPFast, TracInCPFastRandProj, NaiveInfluenceFunction, ArnoldiInfluenceFunction):
        assert cls.__module__.startswith("{package}."), cls
        assert cls.get_name() == cls.__name__
    assert common.TracInCPFast is TracInCPFast
    assert SimilarityInfluence.__module__.startswith("captum.") and DataInfluence.__module__.startswith("captum.")
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(3, 2), torch.ones(3, 1))
    influence = TracInCP(model, data, [model.state_dict()], lambda *_: 1.0, loss_fn=torch.nn.MSELoss(reduction="none"))
    assert str(getattr(influence, "groups", "absent")) == "{groups}"
    assert influence.influence((torch.ones(1, 2), torch.ones(1, 1))).shape == (1, 3)
"""
SINGLETONS = "Groups(k=3, n=3, sizes 1…1)"


@pytest.mark.parametrize(
    ("options", "package", "groups"),
    [
        ([], "captum", "absent"),
        (["--ggda=captum"], "ggda_captum", "None"),
        (["--ggda=captum", "--ggda-singletons"], "ggda_captum", SINGLETONS),
    ],
)
def test_captums_imports_are_redirected(options: list[str], package: str, groups: str, tmp_path: Path) -> None:
    pytest.importorskip("captum.testing", reason="not shipped before Captum 0.9")
    checkout = tmp_path / "tests"
    checkout.mkdir()
    (checkout / "__init__.py").touch()
    (checkout / "test_imports.py").write_text(CAPTUM_TEST.replace("{package}", package).replace("{groups}", groups))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.upstream_plugin", *options]
    run = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(checkout)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in run.stdout, run.stdout + run.stderr
