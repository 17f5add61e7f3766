"""Per-example losses: the loss of an example is what the loss function gives for that example alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from ggda_ext.losses import BatchLoss, FunctionalLoss, OutputLoss, as_example_loss, example_losses

OUT, CLASSES = torch.randn(5, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 0, 2])
TARGET = torch.randn(5, 3, dtype=torch.float64)
TOKENS, TOKEN_CLASSES = torch.randn(4, 3, 6, dtype=torch.float64), torch.randint(0, 3, (4, 6))
TOKEN_CLASSES[0, :4] = -100
WEIGHT = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)

REPLACED = nn.CrossEntropyLoss()
REPLACED.forward = lambda o, t: F.cross_entropy(o, t) * 2
LOSSES = {
    "cross entropy mean": (nn.CrossEntropyLoss(), OUT, CLASSES),
    "cross entropy sum": (nn.CrossEntropyLoss(reduction="sum"), OUT, CLASSES),
    "cross entropy none": (nn.CrossEntropyLoss(reduction="none"), OUT, CLASSES),
    "class weights, sum": (nn.CrossEntropyLoss(weight=WEIGHT, reduction="sum"), OUT, CLASSES),
    "class weights, probabilities": (nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1), OUT, TARGET.softmax(1)),
    "hinge of distances": (nn.HingeEmbeddingLoss(), OUT[:, :1], torch.tensor([[1], [-1], [1], [1], [-1]])),
    "ignored tokens": (nn.CrossEntropyLoss(), TOKENS, TOKEN_CLASSES),
    "ignored tokens, sum": (nn.CrossEntropyLoss(reduction="sum"), TOKENS, TOKEN_CLASSES),
    "forward replaced": (REPLACED, OUT, CLASSES),
    "mse mean": (nn.MSELoss(), OUT, TARGET),
    "mse sum": (nn.MSELoss(reduction="sum"), OUT, TARGET),
    "function, mean": (lambda o, t: F.cross_entropy(o, t), OUT, CLASSES),
    "function, sum": (lambda o, t: F.mse_loss(o, t, reduction="sum"), OUT, TARGET),
    "function, per example": (lambda o, t: F.cross_entropy(o, t, reduction="none"), OUT, CLASSES),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_an_example_is_its_loss_alone(name):
    loss_fn, output, target = LOSSES[name]
    alone = [loss_fn(output[i : i + 1], target[i : i + 1]).sum() for i in range(len(output))]
    torch.testing.assert_close(example_losses(loss_fn, output, target), torch.stack(alone), rtol=1e-12, atol=0)


def test_targets_without_a_dimension_are_not_broadcast_against_outputs():
    for loss, target in ((nn.MSELoss(), TARGET), (nn.HingeEmbeddingLoss(), TARGET.sign())):
        found = example_losses(loss, OUT[:, :1], target[:, 0])
        torch.testing.assert_close(found, example_losses(loss, OUT[:, :1], target[:, :1]))


def test_trailing_dimensions_of_unreduced_losses_are_summed():
    loss = nn.MSELoss(reduction="none")
    torch.testing.assert_close(example_losses(loss, OUT, TARGET), loss(OUT, TARGET).sum(1))


def test_the_users_loss_module_is_not_changed():
    loss = nn.CrossEntropyLoss()
    example_losses(loss, OUT, CLASSES)
    assert loss.reduction == "mean"


def test_no_loss_means_the_summed_outputs():
    assert torch.equal(example_losses(None, OUT, None), OUT.sum(1))


MODEL = nn.Linear(3, 3).double()


@pytest.mark.parametrize(
    "batch",
    [(OUT, CLASSES), [OUT, CLASSES], {"input": OUT, "labels": CLASSES}, {"input": OUT, "y": CLASSES}],
    ids=["tuple", "list", "dict", "dict with another key"],
)
def test_batches_may_be_tuples_lists_or_dicts(batch):
    expected = F.cross_entropy(MODEL(OUT), CLASSES, reduction="none")
    torch.testing.assert_close(OutputLoss(nn.CrossEntropyLoss()).each(MODEL, batch), expected)


def test_a_single_tensor_is_a_batch_without_a_target():
    reconstruction = OutputLoss(lambda output: output.square().sum(1))
    expected = MODEL(OUT).square().sum(1)
    torch.testing.assert_close(reconstruction.each(MODEL, OUT), expected)
    torch.testing.assert_close(reconstruction.each(MODEL, (OUT,)), expected)


@pytest.mark.parametrize("batch_of_one", [False, True])
def test_a_loss_written_for_one_example_is_vectorised(batch_of_one):
    def loss(parameters, example):
        x, y = example
        output = functional_call(MODEL, parameters, (x if batch_of_one else x.unsqueeze(0),))
        return F.cross_entropy(output, y if batch_of_one else y.unsqueeze(0))

    found = FunctionalLoss(loss, batch_of_one=batch_of_one).each(MODEL, (OUT, CLASSES))
    torch.testing.assert_close(found, F.cross_entropy(MODEL(OUT), CLASSES, reduction="none"))


@pytest.mark.parametrize(
    ("loss", "batch", "error", "message"),
    [
        (OutputLoss(lambda o, t: o.sum(0)[:2]), (OUT, CLASSES), ValueError, r"shape \[2\] for a batch of 5 examples"),
        (OutputLoss(lambda o, t: 1.0), (OUT, CLASSES), TypeError, "the loss returned a float"),
        (
            BatchLoss(lambda m, b: m(b[0]).sum()),
            (OUT, CLASSES),
            ValueError,
            r"shape \[\] for a batch of 5.*of shape \[5\]",
        ),
        (OutputLoss(nn.MSELoss()), "text", TypeError, "a batch is a str"),
        (
            OutputLoss(nn.CrossEntropyLoss(weight=WEIGHT)),
            (OUT, CLASSES),
            ValueError,
            r"CrossEntropyLoss\(weight=…, reduction='mean'\), which divides by the weights.*reduction='sum'",
        ),
    ],
)
def test_bad_losses_are_named(loss, batch, error, message):
    with pytest.raises(error, match=message):
        loss.each(MODEL, batch)


def test_a_loss_that_cannot_be_called_is_refused():
    with pytest.raises(TypeError, match=r"loss_fn is a str: pass a callable loss_fn\(output, target\)"):
        as_example_loss("mse")


def test_a_model_that_returns_no_tensor_is_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match=r"the model returned a tuple.*BatchLoss"):
        OutputLoss(nn.MSELoss()).each(Pair(), (OUT, OUT))


@pytest.mark.parametrize("loss_fn", [nn.BCEWithLogitsLoss(), nn.MSELoss(reduction="sum")])
@pytest.mark.parametrize("kind", [torch.int64, torch.bool])
def test_zeros_and_ones_may_be_whole_numbers(loss_fn, kind):
    output, target = torch.randn(6, 1), torch.tensor([0, 1, 1, 0, 1, 0])
    expected = example_losses(loss_fn, output, target.float())
    torch.testing.assert_close(example_losses(loss_fn, output, target.to(kind)), expected)
