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

from benchmarks.check.case import Case, Method, count_parameters


def trak_scores(
    case: Case, toolkit: ModuleType, batches: Iterable[Sequence[int]] | None = None, **options: Any
) -> Tensor:
    """Run the loop that a user writes, from the constructor to the scores, and return the scores.

    It goes over the given batches of training indices, or over all points in order.
    """
    state, count = case.part.state_dict(), len(case.test[0])
    with tempfile.TemporaryDirectory() as folder:
        traker = toolkit.TRAKer(
            case.part, "image_classification", len(case.train_set), save_dir=folder, device="cpu",
            projector=projector(case.part, case.projection_dim), use_half_precision=False, logging_level=100, **options,
        )  # fmt: skip
        traker.load_checkpoint(state, model_id=0)
        for indices in batches or torch.arange(len(case.train_set)).split(case.size.batch):
            at = torch.as_tensor(indices)
            traker.featurize([tensor[at] for tensor in case.train], inds=at.numpy())
        traker.finalize_features()
        if case.one_property and "groups" in options:
            traker.start_scoring_checkpoint("test", state, 0, num_targets=1)
            traker.score(property=case.mean_loss)
        else:
            traker.start_scoring_checkpoint("test", state, 0, num_targets=count)
            for at in torch.arange(count).split(case.size.batch):
                traker.score([tensor[at] for tensor in case.test], inds=at.numpy())
        scores = torch.tensor(traker.finalize_scores("test")).T
        return scores.mean(0, keepdim=True) if case.one_property else scores


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
        lambda case: trak_scores(case, ggda_trak, case.groups.batch_sampler(case.size.batch), groups=case.groups),
        row_per_point=True,
    ),
)  # fmt: skip
