"""Sign, shape and scale of every entry point against models really trained again, as `docs/signs.md` states them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ggda_captum
import ggda_dattri
import ggda_trak
import ggda_transformers
import numpy as np
import pytest
import torch
from dattri.task import AttributionTask
from sign_cases import DECAY, TESTS, K, N, Truth, margins_of, retrained_losses, truth
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from trak.projectors import NoOpProjector

from ggda_ext import Attribution, GroupGradients, PointGradients, attribute, evaluation, properties, property_scores
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.curvature.fisher import FISHERS
from ggda_ext.methods import MethodName
from ggda_ext.training import Recipe

PAGE = Path(__file__).parents[1] / "docs" / "signs.md"
LOSS = nn.CrossEntropyLoss()
RIDGE = DECAY / N  # of the mean loss
Score = Callable[[Truth, Any], Tensor]
"""Scores as the entry point returns them: of the test points, or (with a property) of that."""


def attribute_(name: MethodName) -> Score:
    def scores(case: Truth, property: Any) -> Tensor:
        goal = property or properties.point_losses(case.test, LOSS)
        damping = None if name == "tracin" else RIDGE
        return attribute(case.model, LOSS, case.train, case.groups, goal, method=name, damping=damping)

    return scores


def provider_scores(case: Truth, property: Any) -> Tensor:
    provider = GroupGradients(case.model, LOSS, case.train, case.groups)
    return property_scores(provider, property) if property else provider.scores(PointGradients(LOSS, case.test))


def captum(name: str) -> Score:
    def scores(case: Truth, property: Any) -> Tensor:
        state = case.model.state_dict()
        last = [case.model[0]] if "Fast" in name else []
        own = [state] if "Function" in name else [[state]]
        attributor = getattr(ggda_captum, name)(
            case.model, *last, TensorDataset(*case.train), *own, lambda model, state: 0.1,
            loss_fn=nn.CrossEntropyLoss(reduction="sum" if last else "none"), batch_size=50, groups=case.groups,
        )  # fmt: skip
        return attributor.influence(*([] if property else [case.test]), k=None, property=property)

    return scores


def loss(model: nn.Module, parameters: dict[str, Tensor], data: Any) -> Tensor:
    return cross_entropy(functional_call(model, parameters, (data[0],)), data[1].long())


def loss_of_one(model: nn.Module, parameters: dict[str, Tensor], data: Any) -> Tensor:
    return loss(model, parameters, (data[0][None], data[1][None]))


def margin_of_one(model: nn.Module, parameters: dict[str, Tensor], data: Any) -> Tensor:
    return margins_of(functional_call(model, parameters, (data[0][None],)), data[1][None]).sum()


def dattri(name: str, function: Any, caches: bool = True, **options: Any) -> Score:
    def scores(case: Truth, property: Any) -> Tensor:
        def of_model(parameters: dict[str, Tensor], data: Any) -> Tensor:
            return function(case.model, parameters, data)

        def probability(parameters: dict[str, Tensor], data: Any) -> Tensor:
            return margin_of_one(case.model, parameters, data).sigmoid()

        given = {"correct_probability_func": probability} if name == "TRAKAttributor" else {}
        task = AttributionTask(of_model, case.model, case.model.state_dict())
        attributor = getattr(ggda_dattri, name)(task, groups=case.groups, **given, **options)
        train, test = (DataLoader(TensorDataset(*data), batch_size=60) for data in (case.train, case.test))
        if caches:
            attributor.cache(DataLoader(TensorDataset(*case.train), batch_size=N))
        asked = {"property": property} if property else {"test_dataloader": test}
        return attributor.attribute(**asked, **({} if name == "TRAKAttributor" else {"train_dataloader": train}))

    return scores


def traker(fisher: str) -> Score:
    def scores(case: Truth, property: Any) -> Tensor:
        ridge = {"lambda_reg": 1e-3} if fisher == "exact" else {}
        state = case.model.state_dict()
        with tempfile.TemporaryDirectory() as folder:
            made = ggda_trak.TRAKer(
                case.model, "image_classification", N, save_dir=folder, device="cpu", groups=case.groups,
                fisher=fisher, projector=NoOpProjector(device="cpu"), logging_level=100, **ridge,
            )  # fmt: skip
            made.load_checkpoint(state, model_id=0)
            made.featurize(case.train, num_samples=N)
            made.finalize_features()
            made.start_scoring_checkpoint("test", state, model_id=0, num_targets=TESTS)
            if property is None:
                made.score(case.test, num_samples=TESTS)
            else:
                made.score(property=property)
            return torch.from_numpy(np.array(made.finalize_scores("test")))

    return scores


def fisher_influence(fisher: Any) -> Score:
    def scores(case: Truth, property: Any) -> Tensor:
        found = ggda_trak.FisherInfluence(case.model, case.train, LOSS, case.groups, fisher=fisher)
        return found.influence(property=property) if property else found.influence(case.test)

    return scores


class OwnLoss(nn.Module):
    """A model as Hugging Face's are: with labels it returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.inner(x)
        return logits if labels is None else {"loss": cross_entropy(logits, labels), "logits": logits}


def trainer_rows(case: Truth) -> list[dict[str, Any]]:
    return [{"x": x, "labels": int(y)} for x, y in zip(*case.train, strict=True)]


def after_training(case: Truth, property: Any) -> Tensor:
    goal = property or properties.point_losses(case.test, LOSS)
    return ggda_transformers.attribute_trainer(
        OwnLoss(case.model), trainer_rows(case), case.groups, goal, damping=RIDGE
    )


def while_training(case: Truth, property: Any) -> Tensor:
    from transformers import Trainer, TrainingArguments

    goal, rows = property or properties.point_losses(case.test, LOSS), trainer_rows(case)
    tracker = ggda_transformers.GroupTracker(rows, case.groups, goal, show=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, num_train_epochs=4, per_device_train_batch_size=60, learning_rate=0.3, optim="sgd", report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        torch.manual_seed(0)
        Trainer(OwnLoss(nn.Linear(4, 2)), arguments, train_dataset=rows, callbacks=[tracker]).train()
    return tracker.result


IDENTITY = {"projector_kwargs": {"proj_type": "identity"}}
RAISES_ON_REMOVAL: dict[str, Score] = {
    "attribute": attribute_("influence"),
    "attribute tracin": attribute_("tracin"),
    "attribute ekfac": attribute_("ekfac"),
    "attribute fisher": attribute_("fisher"),
    "GroupGradients.scores": provider_scores,
    "attribute_trainer": after_training,
    "GroupTracker": while_training,
    **{
        name: captum(name)
        for name in (
            "TracInCP", "TracInCPFast", "TracInCPFastRandProj", "NaiveInfluenceFunction", "ArnoldiInfluenceFunction"
        )
    },
    **{f"FisherInfluence {kind}": fisher_influence(kind) for kind in FISHERS},
}  # fmt: skip
RAISES_ON_REMOVAL_GROUPS_FIRST: dict[str, Score] = {
    "IFAttributorExplicit": dattri("IFAttributorExplicit", loss, regularization=RIDGE),
    "IFAttributorCG": dattri("IFAttributorCG", loss, regularization=RIDGE, max_iter=20),
    "IFAttributorLiSSA": dattri(
        "IFAttributorLiSSA",
        loss,
        batch_size=N,
        recursion_depth=300,
        scaling=2.0,
        damping=RIDGE / 2,
        show_progress=False,
    ),
    "IFAttributorArnoldi": dattri("IFAttributorArnoldi", loss, regularization=RIDGE, proj_dim=4, max_iter=8),
    "IFAttributorDataInf": dattri("IFAttributorDataInf", loss, regularization=0.1),
    "IFAttributorEKFAC": dattri("IFAttributorEKFAC", loss, damping=RIDGE),
    "TracInAttributor": dattri(
        "TracInAttributor", loss_of_one, False, weight_list=torch.ones(1), normalized_grad=False, **IDENTITY
    ),
}
LOWERS_ON_REMOVAL_GROUPS_FIRST: dict[str, Score] = {
    **{f"TRAKer {kind}": traker(kind) for kind in FISHERS},
    **{
        f"TRAKAttributor {kind}": dattri("TRAKAttributor", margin_of_one, fisher=kind, regularization=1e-3, **IDENTITY)
        for kind in FISHERS
    },
}


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.double().flatten(), b.double().flatten()]))[0, 1])


def slope(real: Tensor, scores: Tensor) -> float:
    """How many times the scores the real changes are."""
    return float((real * scores).sum() / scores.double().square().sum())


@pytest.mark.parametrize("given", ["test points", "property"])
@pytest.mark.parametrize("name", RAISES_ON_REMOVAL)
def test_positive_if_the_loss_rises_without_the_group(name: str, given: str) -> None:
    case = truth()
    goal = properties.point_losses(case.test, LOSS) if given == "property" else None
    found = RAISES_ON_REMOVAL[name](case, goal)
    assert found.shape == (TESTS, K)
    assert correlation(found, case.losses) > 0.5


@pytest.mark.parametrize("given", ["test points", "property"])
@pytest.mark.parametrize("name", RAISES_ON_REMOVAL_GROUPS_FIRST)
def test_dattri_positive_if_the_loss_rises_without_the_group(name: str, given: str) -> None:
    case = truth()
    goal = properties.point_losses(case.test, LOSS) if given == "property" else None
    found = RAISES_ON_REMOVAL_GROUPS_FIRST[name](case, goal)
    assert found.shape == (K, TESTS)
    assert correlation(found.T, case.losses) > 0.5


@pytest.mark.parametrize("given", ["test points", "margins", "losses"])
@pytest.mark.parametrize("name", LOWERS_ON_REMOVAL_GROUPS_FIRST)
def test_trak_positive_if_the_target_falls_without_the_group(name: str, given: str) -> None:
    """Test points stand for their margins: what helps the margin is positive for it, and negative for the loss."""
    case = truth()
    goal = {"margins": properties.margins(case.test), "losses": properties.point_losses(case.test, LOSS)}.get(given)
    found = LOWERS_ON_REMOVAL_GROUPS_FIRST[name](case, goal)
    assert found.shape == (K, TESTS)
    assert correlation(found.T, case.losses if given == "losses" else case.margins) < -0.5


@pytest.mark.parametrize(
    ("name", "property", "better", "positive"),
    [
        ("attribute", "loss", False, None),
        ("TracInCP", "loss", False, None),
        ("FisherInfluence exact", "loss", False, None),
        ("IFAttributorExplicit", "loss", False, "rises"),
        ("TracInAttributor", "loss", False, "rises"),
        ("TRAKer exact", "margin", True, "falls"),
        ("TRAKAttributor exact", "margin", True, "falls"),
    ],
)
def test_as_an_attribution_all_say_alike_who_helps(name: str, property: str, better: bool, positive: Any) -> None:
    case = truth()
    scores = (RAISES_ON_REMOVAL | RAISES_ON_REMOVAL_GROUPS_FIRST | LOWERS_ON_REMOVAL_GROUPS_FIRST)[name](case, None)
    result = Attribution.of(scores, case.groups, property, better, positive=positive)
    assert correlation(result, case.margins if better else case.losses) > 0.5
    real = case.losses.mean(0)
    for found, sign in ((result.harmful(), -1), (result.helpful(), 1)):
        first = [case.groups.id_of(group) for group in found.names[:3]]
        assert bool((sign * real[first] > 0).all())


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("attribute", 1.0), ("attribute ekfac", 1.0), ("attribute_trainer", 1.0),
        ("NaiveInfluenceFunction", 1.0), ("FisherInfluence exact", 1.0),
        ("IFAttributorExplicit", N), ("IFAttributorCG", N), ("IFAttributorLiSSA", N), ("IFAttributorEKFAC", N),
    ],
)  # fmt: skip
def test_scale_in_units_of_the_property(name: str, unit: float) -> None:
    """The score is `unit` times the real change."""
    case = truth()
    by_name = RAISES_ON_REMOVAL | RAISES_ON_REMOVAL_GROUPS_FIRST
    found = by_name[name](case, None)
    assert 0.6 < unit * slope(case.losses, found if found.shape[0] == TESTS else found.T) < 1.6


def test_leave_group_out_is_the_rise_itself() -> None:
    case = truth()
    few = [0, 1, 2, 3, 4, 8]
    recipe = Recipe(epochs=60, learning_rate=0.05, batch_size=N)
    result = leave_group_out(
        lambda: nn.Linear(4, 2), LOSS, case.train, case.groups, case.test, recipe, seeds=[0], group_ids=few
    )
    assert result.scores.shape == (len(few),)
    real = case.losses.mean(0)[few]
    assert correlation(result.scores, real) > 0.8
    assert 0.5 < slope(real, result.scores) < 2
    assert evaluation.leave_group_out_correlation(real, result.scores).value > 0.8


def test_evaluation_wants_the_rise_of_the_loss() -> None:
    """Importance of the right sign does well in every metric, and its negative badly."""
    case = truth()
    goal = properties.mean_loss(case.test, LOSS)
    right = attribute(case.model, LOSS, case.train, case.groups, goal, method="tracin")[0]
    rises = case.losses.mean(0)
    assert evaluation.leave_group_out_correlation(right, rises).value > 0.5
    assert evaluation.noisy_label_detection(right, case.groups, case.noisy).roc_auc > 0.6
    kept = evaluation.random_subsets(case.groups, 20)
    losses = retrained_losses(evaluation.points_of(case.groups, kept))[:, 0]
    assert evaluation.group_lds(right, kept, losses).value > 0.4
    assert evaluation.group_lds(-right, kept, losses).value < -0.4
    helpful = evaluation.retraining_score(right, case.groups, retrained_losses, [0.3]).mean
    harmful = evaluation.pruning_score(right, case.groups, retrained_losses, [0.3]).mean
    full = retrained_losses([np.arange(N)])[0]
    assert harmful < full < helpful  # the loss without the harmful points, with all, without the helpful ones


@pytest.mark.parametrize(
    "name",
    ["attribute", "property_scores", "GroupGradients.scores", "leave_group_out", "TRAKer", "FisherInfluence"]
    + ["attribute_trainer", "GroupTracker"]
    + [name for name in ggda_captum.__all__ if name.startswith("TracInCP") or "Function" in name]
    + ggda_dattri.__all__,
)
def test_every_entry_point_is_in_the_table(name: str) -> None:
    if name != "TracInCPBase":
        rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
        assert any(f"`{name}`" in row for row in rows)
