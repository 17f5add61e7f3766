"""The loss that a model returns by itself, of each example: that of the example alone, at the price of a batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cases import relative_error
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers_cases import MODELS, collate, examples, gradients, made, own_loss

from ggda_ext import GroupGradients, Groups
from ggda_ext.losses.model_loss import OwnLoss
from ggda_ext.losses.row_reductions import RowReductions

LABELS = [0, 1, 0, 2, 2, 1, 0, 2, 2, 1, 1]


@pytest.mark.parametrize("name", MODELS)
def test_the_losses_of_a_batch_are_those_of_the_examples_alone(name):
    model, rows = made(name), examples(name, 7)
    loss = OwnLoss()
    with torch.no_grad():
        alone = torch.stack([own_loss(model, collate([row])) for row in rows])
        losses = loss.each(model, collate(rows))
    assert relative_error(losses, alone) <= 1e-6  # language models take it in float32
    assert loss._found()[model]


@pytest.mark.parametrize("name", MODELS)
def test_groups_of_sequences_have_the_sum_of_one_backward_pass_each(name):
    model, rows = made(name), examples(name, len(LABELS))
    truth = Groups(LABELS).sum(gradients(model, own_loss, rows), 0)
    found = GroupGradients(model, None, DataLoader(rows, batch_size=4, collate_fn=collate), LABELS)
    directions = torch.randn(1, found.p, dtype=torch.float64)
    bound = 1e-6 if name == "t5" else 1e-10  # T5 has a softmax in float32 until transformers 5
    assert found.plan(1).strategy == "directional"
    assert relative_error(found.scores(directions), directions @ truth.T) <= bound
    assert relative_error(found.rows(), truth) <= bound


@pytest.mark.parametrize("strategy", ["forward", "segmented", "backward"])
def test_every_strategy_sees_a_bias_that_all_examples_share(strategy):
    model, rows = made("t5"), examples("t5", len(LABELS))
    truth = Groups(LABELS).sum(gradients(model, own_loss, rows), 0)
    loader = DataLoader(rows, batch_size=4, collate_fn=collate)
    found = GroupGradients(model, None, loader, LABELS, strategy=strategy)
    directions = torch.randn(1, found.p, dtype=torch.float64)
    assert relative_error(found.scores(directions), directions @ truth.T) <= 1e-6  # forward mode: other float32 steps
    assert "compute_bias" not in vars(model.encoder.block[0].layer[0].SelfAttention)


@pytest.mark.parametrize("name", ["gpt2", "bert_tokens", "t5"])
def test_tokens_can_be_summed(name):
    model, rows = made(name), examples(name, 6)
    first = 1 if name == "gpt2" else 0  # it predicts the next token, so the first is no target
    counts = torch.tensor([sum(label != -100 for label in row["labels"][first:]) for row in rows])
    with torch.no_grad():
        mean, total = (OwnLoss(tokens).each(model, collate(rows)) for tokens in ("mean", "sum"))
    assert relative_error(total, mean * counts) <= 1e-6


def test_probabilities_can_be_taken_of_tokens_and_of_examples():
    model, rows = made("bert"), examples("bert", 6)
    batch = collate(rows)
    probabilities = model(**batch).logits.softmax(1).gather(1, batch["labels"][:, None])[:, 0]
    for loss in (OwnLoss(of_token=lambda loss: (-loss).exp()), OwnLoss(of_example=lambda loss: (-loss).exp())):
        assert relative_error(loss.each(model, batch), probabilities) <= 1e-12


def test_an_example_with_no_targets_has_the_loss_zero():
    model, rows = made("gpt2"), examples("gpt2", 4)
    rows[2]["labels"] = [-100] * len(rows[2]["labels"])
    losses = OwnLoss().each(model, collate(rows))
    assert losses[2] == 0
    assert OwnLoss().each(model, collate(rows[2:3])).tolist() == [0]
    assert bool((losses[[0, 1, 3]] > 0).all())


class Odd(nn.Module):
    """A model whose loss of a batch is made in a way of its own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(3, 2, dtype=torch.float64), kind

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.inner(x)
        if self.kind == "by hand":
            loss = -outputs.log_softmax(1).gather(1, labels[:, None]).mean()
        elif self.kind == "contrastive":
            loss = F.cross_entropy(outputs @ outputs.T, torch.arange(len(x)))
        elif self.kind == "contrastive, by hand":
            loss = -(outputs @ outputs.T).log_softmax(1).diagonal().mean()
        elif self.kind == "contrastive, added":
            loss = F.cross_entropy(outputs, labels) + F.cross_entropy(0 * outputs @ outputs.T, torch.arange(len(x)))
        elif self.kind == "added to":
            loss = F.cross_entropy(outputs, labels) + 0.1 * outputs.square().mean()
        else:
            loss = F.cross_entropy(outputs, labels, weight=torch.tensor([1.0, 3.0], dtype=torch.float64))
        return {"loss": loss}


@pytest.mark.parametrize(("kind", "by_rows"), [("by hand", False), ("added to", False), ("weighted", True)])
def test_a_loss_that_a_batch_does_not_tell_is_computed_alone(kind, by_rows):
    model, data = Odd(kind), {"x": torch.randn(6, 3, dtype=torch.float64), "labels": torch.randint(0, 2, (6,))}
    loss = OwnLoss()
    with torch.no_grad():
        losses = loss.each(model, data)
    alone = torch.stack([model(data["x"][i : i + 1], data["labels"][i : i + 1])["loss"] for i in range(6)])
    assert relative_error(losses, alone.detach()) <= 1e-12
    assert loss._found()[model] == by_rows


class OfKept(nn.Module):
    """A model whose loss takes the targets that are not ignored out of the batch, as many a `compute_loss` does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(9, 2, dtype=torch.float64)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        kept = labels != -100
        return {"loss": F.cross_entropy(self.inner(input_ids)[kept], labels[kept])}


def test_examples_of_one_length_in_the_first_batch_do_not_hide_that_a_loss_leaves_padding_out():
    torch.manual_seed(0)
    model, loss = OfKept(), OwnLoss()
    ids, labels = torch.randint(0, 9, (2, 5)), torch.randint(0, 2, (2, 5))
    labels[:, 0] = -100  # of a first token that is no target
    uneven = labels.clone()
    uneven[0, 3:] = -100  # six targets are left, which two examples could share equally
    with torch.no_grad():
        for targets in (labels, uneven):
            alone = [model(ids[i : i + 1], targets[i : i + 1])["loss"] for i in range(2)]
            assert relative_error(loss.each(model, {"input_ids": ids, "labels": targets}), torch.stack(alone)) <= 1e-12


def test_a_comparison_that_is_added_to_a_loss_of_each_example_is_refused():
    """Alone, only the other term is left: the scores would be those of another loss."""
    torch.manual_seed(0)
    data = {"x": 0.1 * torch.randn(6, 3, dtype=torch.float64), "labels": torch.arange(6) % 2}
    with pytest.raises(ValueError, match="compares the examples of a batch"):
        OwnLoss().each(Odd("contrastive, added"), data)


def test_only_losses_of_rows_are_touched():
    x, y = torch.randn(6, 4), torch.randint(0, 4, (6,))
    with RowReductions(3) as rows:
        assert F.cross_entropy(x, y).shape == (3,)
        assert F.mse_loss(x, x).shape == (3,)
        assert F.cross_entropy(x, y, reduction="none").shape == (6,)
        assert F.cross_entropy(x[:5], y[:5]).dim() == 0  # five rows are not those of three examples
        assert rows.calls == 2
    assert F.cross_entropy(x, y).dim() == 0


def test_tokens_of_a_loss_made_by_hand_are_refused():
    data = {"x": torch.randn(4, 3, dtype=torch.float64), "labels": torch.randint(0, 2, (4,))}
    with pytest.raises(ValueError, match="without the losses of torch"):
        OwnLoss("sum").each(Odd("by hand"), data)
    with pytest.raises(ValueError, match="tokens='total' is not one of"):
        OwnLoss("total")


@pytest.mark.parametrize("kind", ["contrastive", "contrastive, by hand"])
def test_a_loss_of_comparisons_is_refused(kind):
    """It is 0 for an example alone, and so would be every score."""
    data = {"x": torch.randn(6, 3, dtype=torch.float64), "labels": torch.zeros(6, dtype=torch.long)}
    with pytest.raises(ValueError, match=r"compares the examples of a batch.* together and 0 for each alone"):
        OwnLoss().each(Odd(kind), data)
