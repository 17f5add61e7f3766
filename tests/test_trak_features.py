"""`ggda_trak.TRAKer` beyond parity: laws, properties, models that fail under vmap, damping, projectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import gradient_rows
from ggda_trak import FactoredProjector, SketchProjector, TRAKer
from ggda_trak.projectors import BasicProjector, NoOpProjector
from ggda_trak.task_outputs import TaskOutputs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from trak.modelout_functions import AbstractModelOutput, TextClassificationModelOutput
from trak.savers import ModelIDException
from trak_cases import TARGETS, N, batches, case, error, featurize, scored, scores, summed, take, uneven_labels

from ggda_ext import Groups, properties

TASK = "image_classification"


def size_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("fisher", ["exact", "batched", "paper"])
def test_batch_size_and_order_of_batches_do_not_change_a_score(fisher: str, tmp_path: Path) -> None:
    options = {"groups": uneven_labels(), "fisher": fisher, "damping": 0.1}
    found = [scores(TRAKer, case(TASK), tmp_path / str(size), size=size, **options) for size in (N, 17)]
    assert error(found[1], found[0]) < 1e-4


@pytest.mark.parametrize("fisher", ["exact", "batched", "paper"])
def test_strategy_every_provider_gives_the_same_scores(fisher: str, tmp_path: Path) -> None:
    found = [
        scores(TRAKer, case(TASK), tmp_path / name, groups=uneven_labels(), fisher=fisher, strategy=name, damping=0.1)
        for name in ("segmented", "backward", "persample")
    ]
    assert error(found[1], found[0]) < 1e-4
    assert error(found[2], found[0]) < 1e-4


def test_memory_budget_rows_projected_in_pieces_give_the_same_scores(tmp_path: Path) -> None:
    options = {"groups": uneven_labels(), "damping": 0.1}
    expected = scores(TRAKer, case(TASK), tmp_path / "a", **options)
    row = 4 * size_of(case(TASK).model)
    found = scores(TRAKer, case(TASK), tmp_path / "b", memory_budget=2 * 5 * row, **options)
    assert error(found, expected) < 1e-5


@pytest.mark.parametrize(("options", "most"), [({"batch_size": 7}, 7), ({"memory_budget": 1}, 1)])
def test_weights_are_computed_in_batches_of_the_asked_size(options: Any, most: int, tmp_path: Path) -> None:
    given, sizes = case(TASK), list[int]()
    handle = given.model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path, groups=uneven_labels(), **given.options, **options)
    computed = traker.gradient_computer.compute_loss_grad

    def counted(batch: Any) -> Tensor:
        assert len(batch[0]) <= most
        return computed(batch)

    traker.gradient_computer.compute_loss_grad = counted
    featurize(traker, given, given.checkpoints(1)[:1])
    handle.remove()
    found = scored(traker, given, given.checkpoints(1))
    expected = scores(TRAKer, case(TASK), tmp_path / "expected", groups=uneven_labels())
    assert error(found, expected) < 1e-4


def test_whole_groups_from_a_batch_sampler_give_the_same_scores(tmp_path: Path) -> None:
    given, groups = case(TASK), Groups(uneven_labels())
    expected = scores(TRAKer, given, tmp_path / "a", groups=groups)
    checkpoint = given.checkpoints(1)[0]
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path / "b", groups=groups, **given.options)
    traker.load_checkpoint(checkpoint, model_id=0)
    data = TensorDataset(*given.train, torch.arange(N))
    for *batch, inds in DataLoader(data, batch_sampler=groups.batch_sampler(50)):
        traker.featurize(batch, inds=inds)
    assert error(scored(traker, given, [checkpoint]), expected) < 2e-5


def test_order_permuting_groups_permutes_scores(tmp_path: Path) -> None:
    labels = uneven_labels()
    turn = np.random.default_rng(1).permutation(labels.max() + 1)
    expected = scores(TRAKer, case(TASK), tmp_path / "a", groups=labels)
    found = scores(TRAKer, case(TASK), tmp_path / "b", groups=turn[labels])
    assert error(found[turn], expected) < 1e-5


def test_determinism_same_seed_same_scores(tmp_path: Path) -> None:
    found = [scores(TRAKer, case(TASK), tmp_path / name, groups=uneven_labels()) for name in "ab"]
    assert np.array_equal(*found)


def test_points_left_out_are_in_no_group(tmp_path: Path) -> None:
    labels = uneven_labels()
    kept = np.where(np.arange(N) % 3 == 0, -1, labels)
    groups = Groups(kept, rest="drop")
    found = scores(TRAKer, case(TASK), tmp_path / "a", groups=groups, fisher="paper", damping=0.2)
    given = case(TASK)
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path / "b", groups=groups, fisher="paper", damping=0.2,
                    **given.options)  # fmt: skip
    checkpoint = given.checkpoints(1)[0]
    traker.load_checkpoint(checkpoint, 0)
    inside = np.flatnonzero(kept >= 0)
    traker.featurize(take(given.train, inside), inds=inside)
    assert error(scored(traker, given, [checkpoint]), found) < 2e-5


@pytest.mark.parametrize("groups", [uneven_labels(), np.arange(N), None])
def test_property_of_a_target_gives_the_scores_of_that_target(groups: Any, tmp_path: Path) -> None:
    given = case(TASK)
    options = {} if groups is None else {"groups": groups}
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path, **options, **given.options)
    checkpoint = given.checkpoints(1)[0]
    featurize(traker, given, [checkpoint])
    expected = scored(traker, given, [checkpoint])
    margins = properties.margins(given.targets)
    traker.start_scoring_checkpoint("property", checkpoint, 0, num_targets=TARGETS + 1)
    traker.score(property=margins)
    traker.score(property=lambda model: margins(model).sum())
    found = np.array(traker.finalize_scores("property"))
    assert error(found[:, :TARGETS], expected) < 2e-5
    assert error(found[:, TARGETS], expected.sum(1)) < 2e-5


def test_score_refuses_neither_and_both(tmp_path: Path) -> None:
    given = case(TASK)
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path, groups=uneven_labels(), **given.options)
    for arguments in ({}, {"batch": given.targets, "property": properties.margins(given.targets)}):
        with pytest.raises(ValueError, match="either a batch of targets or property="):
            traker.score(**arguments)


def test_score_before_finalize_features_is_an_error(tmp_path: Path) -> None:
    given = case(TASK)
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path, groups=uneven_labels(), **given.options)
    traker.load_checkpoint(given.checkpoints(1)[0], 0)
    traker.start_scoring_checkpoint("test", given.checkpoints(1)[0], 0, num_targets=TARGETS)
    with pytest.raises(ModelIDException, match="call finalize_features before score"):
        traker.score(given.targets, num_samples=TARGETS)


def test_score_before_an_experiment_and_no_dimension_are_named(tmp_path: Path) -> None:
    given = case(TASK)
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path / "a", groups=uneven_labels(), **given.options)
    with pytest.raises(ValueError, match="call start_scoring_checkpoint"):
        traker.score(given.targets, num_samples=TARGETS)
    for dimension in (0, -4):
        with pytest.raises(ValueError, match=f"proj_dim={dimension}: pass at least 1"):
            TRAKer(
                given.model, TASK, N, save_dir=tmp_path / "b", groups=uneven_labels(),
                **{**given.options, "proj_dim": dimension},
            )  # fmt: skip


class Classifier(nn.Module):
    """A Hugging Face BERT that returns logits, as TRAK's text task expects."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        self.bert = BertForSequenceClassification(BertConfig(vocab_size=30, max_position_embeddings=8, **sizes))

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.bert(**inputs).logits


@pytest.mark.parametrize("strategy", ["segmented", "backward"])
def test_bert_works_though_it_fails_under_vmap(strategy: str, tmp_path: Path) -> None:
    given = case("text_classification")
    given.model = Classifier().eval()
    given.train = tuple(tensor % 2 if j == 3 else tensor for j, tensor in enumerate(given.train))
    given.targets = tuple(tensor % 2 if j == 3 else tensor for j, tensor in enumerate(given.targets))
    options = {"groups": uneven_labels(), "strategy": strategy, "fisher": "paper", "damping": 0.5}
    found = scores(TRAKer, given, tmp_path, **options)
    parameters = dict(given.model.named_parameters())
    task = TextClassificationModelOutput()

    def row(sample: tuple[Tensor, ...], weights: Tensor) -> Tensor:
        outputs = [w * task.get_output(given.model, parameters, {}, *z) for w, *z in zip(weights, *sample, strict=True)]
        return gradient_rows([torch.stack(outputs).sum()], parameters.values())[0]

    weights = task.get_out_to_loss_grad(given.model, parameters, {}, given.train).detach().flatten()
    members = list(Groups(uneven_labels()))
    sums = torch.stack([row(tuple(take(given.train, at)), weights[torch.from_numpy(at)]) for at in members])
    ones = torch.ones(1)
    targets = torch.stack([row(tuple(take(given.targets, np.array([i]))), ones) for i in range(TARGETS)])
    projector = BasicProjector(size_of(given.model), 104, 0, "normal", "cpu")
    sums, targets = (projector.project(rows, model_id=0) / size_of(given.model) ** 0.5 for rows in (sums, targets))
    fisher = sums.T @ sums
    inverse = torch.linalg.inv(fisher + 0.5 * fisher.diagonal().mean() * torch.eye(104))
    expected = sums @ (inverse / inverse.abs().mean()) @ targets.T
    assert error(found, expected.numpy()) < 1e-4


class TwoCalls(AbstractModelOutput):
    """A task that runs the model twice."""

    def __init__(self) -> None:
        super().__init__()

    @staticmethod
    def get_output(model: Any, weights: Any, buffers: Any, image: Tensor, label: Tensor) -> Tensor:
        def call(scale: float) -> Tensor:
            return torch.func.functional_call(model, (weights, buffers), scale * image.unsqueeze(0))

        return (call(1.0) - 0.5 * call(2.0))[0, 0]

    def get_out_to_loss_grad(self, model: Any, weights: Any, buffers: Any, batch: Any) -> Tensor:
        return torch.ones(len(batch[0]), 1)


class Stubborn(TwoCalls):
    """A task that nothing can vectorise."""

    @staticmethod
    def get_output(model: Any, weights: Any, buffers: Any, image: Tensor, label: Tensor) -> Tensor:
        output = torch.func.functional_call(model, (weights, buffers), image.unsqueeze(0))
        return output[0, int(label.item())]


@pytest.mark.parametrize(("task", "route"), [(TwoCalls(), "vmap"), (Stubborn(), "loop")])
def test_custom_tasks_of_any_kind_give_their_gradients(task: Any, route: str) -> None:
    given = case(TASK)
    outputs = TaskOutputs(task, False, given.model, given.train)
    assert outputs.route == route
    sample = tuple(tensor[:4] for tensor in given.train)
    parameters = dict(given.model.named_parameters())
    expected = [task.get_output(given.model, parameters, {}, *(tensor[i] for tensor in sample)) for i in range(4)]
    assert torch.allclose(outputs.each(given.model, sample), torch.stack(expected), atol=1e-6)


def test_damping_is_relative_visible_and_kept_in_the_store(tmp_path: Path) -> None:
    given = case(TASK)
    for name, options, expected in (("a", {"damping": 0.3}, 0.3), ("b", {}, None)):
        arguments = given.options | options | {"save_dir": tmp_path / name, "groups": uneven_labels()}
        traker = TRAKer(given.model, TASK, N, **arguments)
        featurize(traker, given, given.checkpoints(1))
        traker.finalize_features()
        assert traker.chosen_damping[0] == pytest.approx(expected) if expected else traker.chosen_damping[0] > 0.01
        assert TRAKer(given.model, TASK, N, **arguments).chosen_damping == traker.chosen_damping


def test_singular_fisher_without_ridge_is_an_error_with_the_fix(tmp_path: Path) -> None:
    given = case(TASK)
    for name, options, fix in (
        ("a", {"damping": 0.0}, "pass a damping such as 0.1, or 'auto'"),
        ("b", {"fisher": "exact", "proj_dim": 500}, "pass a damping such as 0.1"),
    ):
        arguments = given.options | options | {"save_dir": tmp_path / name, "groups": uneven_labels()}
        traker = TRAKer(given.model, TASK, N, **arguments)
        featurize(traker, given, given.checkpoints(1))
        with pytest.raises(ValueError, match="singular") as caught:
            traker.finalize_features()
        assert fix in str(caught.value)


@pytest.mark.parametrize("wrt", [["3.weight", "5.bias"], None])
@pytest.mark.parametrize("kind", ["noop", "sketch", "factored"])
def test_other_projectors_agree_on_what_they_project(kind: str, wrt: list[str] | None, tmp_path: Path) -> None:
    """The group path, straight from gradients or captured, equals summed per-point projections by TRAK's own path."""
    given = case(TASK)
    size = size_of(given.model) if wrt is None else 96 * 8 + 4
    make = {
        "noop": NoOpProjector,
        "sketch": lambda: SketchProjector(size, 60),
        "factored": lambda: FactoredProjector(given.model, 60, grad_wrt=wrt),
    }
    labels, options = uneven_labels(), {"grad_wrt": wrt, "lambda_reg": 30.0}
    single = NoOpProjector(device="cpu") if kind == "noop" else make[kind]()
    expected = summed(scores(TRAKer, given, tmp_path / "a", projector=single, **options), labels)
    options |= {"groups": labels, "fisher": "exact"}
    for name, other in (("own model", given), ("equal model", case(TASK))):  # the latter is not captured
        found = scores(TRAKer, other, tmp_path / name, projector=make[kind](), **options)
        assert error(found, expected) < 1e-5


def test_missing_batches_name_how_many_groups_are_incomplete(tmp_path: Path) -> None:
    given = case(TASK)
    traker = TRAKer(given.model, TASK, N, save_dir=tmp_path, groups=np.arange(N) // 10, **given.options)
    traker.load_checkpoint(given.checkpoints(1)[0], 0)
    first, *_, last = list(batches(50, None))
    traker.featurize(take(given.train, first), inds=first)
    with pytest.raises(ModelIDException, match=r"35 of 40 groups are incomplete, 350 training points .* \[50, 51"):
        traker.finalize_features()
    traker.load_checkpoint(given.checkpoints(1)[0], 0)
    rest = np.arange(50, N)
    traker.featurize(take(given.train, rest), inds=rest)
    traker.finalize_features()
    assert traker.saver.model_ids[0] == {"is_featurized": 1, "is_finalized": 1}
    assert len(last) == 50
