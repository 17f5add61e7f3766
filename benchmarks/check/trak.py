"""TRAK with its official projector, per sample and with groups."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import ggda_trak
import torch
import trak
from torch import Tensor, nn
from trak.projectors import BasicProjector, ProjectionType

from benchmarks.check.case import Case, Method, Pair, count_parameters


def trak_scores(case: Case, toolkit: ModuleType, **options: Any) -> Tensor:
    """Return the scores for the test points, or for their mean loss: with groups as a property, else as an average."""
    asked = case.mean_loss if case.one_property and "groups" in options else None
    with tempfile.TemporaryDirectory() as folder:
        scores = user_loop(
            toolkit, case.part, case.train, case.test, case.size.batch, folder, asked=asked,
            projector=projector(case.part, case.projection_dim), **options,
        )  # fmt: skip
    return scores.mean(0, keepdim=True) if case.one_property else scores


def user_loop(
    toolkit: ModuleType, model: nn.Module, train: Pair, test: Pair, batch: int, folder: str,
    batches: Iterable[Sequence[int]] | None = None, asked: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Run the loop that a user writes, from the constructor to the scores, and return the scores `[tests, points]`.

    Args:
        toolkit: TRAK or the drop-in.
        model: the model, at its only checkpoint.
        train: training points.
        test: test points.
        batch: number of points in a batch.
        folder: an empty folder for the toolkit's store.
        batches: training indices of every batch; all points in order if left out.
        asked: a property that is explained instead of the test points.
        options: further arguments of the constructor.
    """
    state, count = model.state_dict(), len(test[0])
    traker = toolkit.TRAKer(
        model, "image_classification", len(train[0]), save_dir=folder, device="cpu", use_half_precision=False,
        logging_level=100, **options,
    )  # fmt: skip
    traker.load_checkpoint(state, model_id=0)
    for indices in batches or torch.arange(len(train[0])).split(batch):
        at = torch.as_tensor(indices)
        traker.featurize([tensor[at] for tensor in train], inds=at.numpy())
    traker.finalize_features()
    traker.start_scoring_checkpoint("test", state, 0, num_targets=count if asked is None else 1)
    if asked is not None:
        traker.score(property=asked)
    else:
        for at in torch.arange(count).split(batch):
            traker.score([tensor[at] for tensor in test], inds=at.numpy())
    return torch.tensor(traker.finalize_scores("test")).T


def projector(model: nn.Module, dim: int) -> BasicProjector:
    """Return TRAK's projector on a CPU, in two blocks: with one block, TRAK 0.3.2 frees its matrix before scoring."""
    return BasicProjector(count_parameters(model), dim, 0, ProjectionType.normal, "cpu", -(-dim // 2))


METHODS = (
    Method(
        "TRAK", "TRAKer",
        lambda case: trak_scores(case, trak, lambda_reg=case.margin_ridge),
        lambda case: trak_scores(case, ggda_trak, groups=case.groups, fisher="exact", lambda_reg=case.margin_ridge),
        lambda case: f"BasicProjector, {case.scope} projected to {case.projection_dim}, exact Fisher, "
        f"lambda_reg {case.margin_ridge:g}, {case.batches}",
        lambda case: trak_scores(
            case, ggda_trak, batches=case.groups.batch_sampler(case.size.batch), groups=case.groups
        ),
        row_per_point=True,
    ),
)  # fmt: skip
