"""The empirical Fisher, one formula for one word, its relative damping, and the refusal of what cannot be inverted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import gradient_rows
from dattri.task import AttributionTask
from ggda_dattri import TRAKAttributor
from ggda_trak import FisherInfluence, TRAKer
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset
from trak.modelout_functions import ImageClassificationModelOutput
from trak.projectors import NoOpProjector

from ggda_ext import Groups
from ggda_ext.curvature.fisher import EmpiricalFisher, FisherKind


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_added_in_blocks_give_the_sum_of_outer_products(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 7, dtype=dtype)
    fisher = EmpiricalFisher(7)
    for block in rows.split(13):
        fisher.add(block)
    assert fisher.rows == 50
    assert fisher.matrix.dtype == dtype
    torch.testing.assert_close(fisher.matrix, rows.T @ rows)


def test_auto_damping_goes_by_dimensions_per_row() -> None:
    found = [EmpiricalFisher(30).add(torch.randn(rows, 30)).damped("auto")[1] for rows in (10, 300)]
    assert found == pytest.approx([0.9, 0.03])


def test_damping_is_relative_scaled_rows_give_scaled_fishers() -> None:
    rows = torch.randn(20, 5, dtype=torch.float64)
    for damping in (0.3, "auto"):
        small, chosen = EmpiricalFisher(5).add(rows).damped(damping)
        large, again = EmpiricalFisher(5).add(10 * rows).damped(damping)
        assert chosen == pytest.approx(again)
        torch.testing.assert_close(large, 100 * small)


def test_singular_fisher_without_ridge_is_refused() -> None:
    fisher = EmpiricalFisher(40).add(torch.randn(10, 40))
    with pytest.raises(ValueError, match=r"10 rows in 40 dimensions is singular .* 'auto'"):
        fisher.damped(0)
    for damping in (0.1, "auto"):
        damped, _ = fisher.damped(damping)
        assert bool(torch.linalg.inv(damped).isfinite().all())


def test_fisher_of_zeros_is_refused_whatever_the_ridge() -> None:
    with pytest.raises(ValueError, match="singular"):
        EmpiricalFisher(3).add(torch.zeros(5, 3)).damped(0.5)


@pytest.mark.parametrize("damping", [-0.1, float("nan"), float("inf"), "much", True])
def test_damping_that_is_no_number_is_refused(damping: object) -> None:
    with pytest.raises(ValueError, match="damping="):
        EmpiricalFisher(2).add(torch.eye(2)).damped(damping)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["batched", "paper"])
def test_one_word_is_one_formula_in_every_toolkit(kind: FisherKind, tmp_path: Path) -> None:
    """TRAKer, dattri's TRAK and FisherInfluence, given the same gradients, have the same scores of uneven groups.

    TRAK's weights Q are set to one, so that the gradients of the output are those of the loss; its score computer
    multiplies by a positive constant of its own.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).eval()
    train, test = ((torch.randn(n, 4), torch.randint(0, 2, (n,))) for n in (60, 5))
    groups = Groups(torch.arange(60).sqrt().int())  # of 1, 3, 5, … points

    def margins(logits: Tensor, labels: Tensor) -> Tensor:
        right = logits.gather(1, labels[:, None])[:, 0]
        return right - logits.gather(1, 1 - labels[:, None])[:, 0]

    def rows(data: tuple[Tensor, Tensor]) -> Tensor:
        return gradient_rows(margins(model(data[0]), data[1]), model.parameters()).double()

    sums = groups.sum(rows(train), 0)
    weights = 1 / torch.from_numpy(groups.sizes.copy()).double() if kind == "batched" else torch.ones(len(groups))
    fisher = sum(weight * torch.outer(u, u) for weight, u in zip(weights, sums, strict=True))
    fisher = fisher + 0.3 * fisher.diagonal().mean() * torch.eye(len(fisher))
    expected = rows(test) @ torch.linalg.solve(fisher, sums.T)

    def close(found: Tensor) -> None:
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))

    close(FisherInfluence(model, train, margins, groups, fisher=kind, damping=0.3).influence(test))

    def margin(parameters: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        return margins(functional_call(model, parameters, (data[0][None],)), data[1][None]).sum()

    loaders = [DataLoader(TensorDataset(*data), batch_size=20) for data in (train, test)]
    attributor = TRAKAttributor(
        AttributionTask(margin, model, model.state_dict()), lambda parameters, data: torch.zeros(data[1].shape),
        projector_kwargs={"proj_type": "identity"}, groups=groups, fisher=kind, damping=0.3, regularization=0.0,
    )  # fmt: skip
    attributor.cache(loaders[0])
    close(attributor.attribute(loaders[1]).T)

    class Margins(ImageClassificationModelOutput):
        @staticmethod
        def get_out_to_loss_grad(model: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
            return torch.ones(len(batch[0]), 1)

    traker = TRAKer(
        model, Margins(), 60, save_dir=tmp_path, device="cpu", groups=groups, fisher=kind, damping=0.3,
        projector=NoOpProjector(device="cpu"),
        logging_level=100,
    )  # fmt: skip
    traker.load_checkpoint(model.state_dict(), model_id=0)
    traker.featurize(train, num_samples=60)
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", model.state_dict(), model_id=0, num_targets=5)
    traker.score(test, num_samples=5)
    found = torch.from_numpy(np.array(traker.finalize_scores("test"))).T.double()
    factor = float((found * expected).sum() / found.square().sum())
    assert factor > 0
    close(factor * found)


def test_the_exact_fisher_is_not_made_of_groups() -> None:
    with pytest.raises(ValueError, match="gradients of single points"):
        EmpiricalFisher(2).add_groups("exact", torch.eye(2), np.ones(2))
