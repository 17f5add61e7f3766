"""Properties of any kind of data give the same gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from property_cases import (
    CE,
    DATA,
    GROUP,
    Dicts,
    N,
    Net,
    Stream,
    X,
    Y,
    build,
    gradient,
    plain,
    z,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext.data import IndexedData
from ggda_ext.properties import (
    attacked_loss,
    demographic_parity_gap,
    equalized_odds_gap,
    margins,
    mean_loss,
    of_outputs,
    point_losses,
    weighted_sum,
)
from ggda_ext.properties.attacks import fgsm


class HuggingFace(Net):
    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(logits=super().forward(x))


SOURCES = {
    "loader": lambda: DataLoader(TensorDataset(X, Y), batch_size=3),
    "dicts": lambda: Dicts(),
    "loader of dicts": lambda: DataLoader(Dicts(), batch_size=5),
    "stream": lambda: Stream(),
    "indexed": lambda: IndexedData(DATA),
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_kind_of_data_gives_the_same_gradients(source: str) -> None:
    model = HuggingFace(3).double()
    model.load_state_dict(build().state_dict())
    for make in (
        lambda data: point_losses(data, CE),
        lambda data: mean_loss(data, CE, batch_size=4),
        lambda data: equalized_odds_gap(data, GROUP, batch_size=4),
        lambda data: attacked_loss(data, CE, fgsm(0.2), batch_size=4),
    ):
        expected = gradient(make(DATA), build())
        torch.testing.assert_close(gradient(make(SOURCES[source]()), model), expected, rtol=1e-12, atol=1e-12)


def test_data_without_targets_reaches_fn_as_none() -> None:
    ready = of_outputs(X, lambda outputs, targets: outputs.std() if targets is None else outputs.sum())
    torch.testing.assert_close(gradient(ready, build()), plain(lambda m: z(m).std(), build()))


def test_point_properties_work_under_vmap_as_providers_use_them() -> None:
    model, ready = build(), margins(DATA)
    tensors = {name: q.detach() for name, q in model.named_parameters()}

    def of_one(tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        def run(*inputs: Tensor) -> Tensor:
            return torch.func.functional_call(model, tensors, inputs)

        return ready.loss.each(run, (x[None], y[None])).sum()  # type: ignore[arg-type]

    grads = torch.func.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))(tensors, X, Y)
    rows = torch.cat([grads[name].reshape(N, -1) for name in tensors], 1)
    torch.testing.assert_close(rows, gradient(ready, model), rtol=1e-12, atol=1e-12)


def test_a_sensitive_column_is_matched_with_the_test_table_by_its_index() -> None:
    pandas = pytest.importorskip("pandas")
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    model, table, labels = nn.Linear(3, 2), pandas.DataFrame(x.numpy()), pandas.Series(y.numpy())
    column = pandas.Series(["m"] * 20 + ["f"] * 20)
    shuffled = column.sample(frac=1, random_state=0)
    for gap in (demographic_parity_gap, equalized_odds_gap):
        expected = gap((x, y), column.tolist())(model)
        torch.testing.assert_close(gap((table, labels), shuffled)(model), expected)
    with pytest.raises(TypeError, match="sensitive mixes values of types int, str"):
        demographic_parity_gap((x, y), pandas.Series(["m", 1] * 20))


@pytest.mark.parametrize("kind", [point_losses, mean_loss])
def test_a_loss_that_mixes_test_points_is_refused_as_it_is_of_training_points(kind: Any) -> None:
    """A weighted mean, whose weights cancel for a point alone, and a comparison of points."""
    torch.manual_seed(0)
    data, model, weight = (torch.randn(20, 3), torch.arange(20) % 2), nn.Linear(3, 2), torch.tensor([1.0, 9.0])

    def weighted(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, weight=weight)

    def compared(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))

    for loss in (weighted, compared):
        with pytest.raises(ValueError, match="neither their mean nor their sum"):
            kind(data, loss)(model)
    for reduction in ("mean", "sum", "none"):
        kind(data, lambda output, target, how=reduction: nn.functional.cross_entropy(output, target, reduction=how))(
            model
        )


def test_weights_of_a_sum_may_be_an_array_or_a_tensor() -> None:
    data, model = (torch.randn(20, 3), torch.arange(20) % 2), nn.Linear(3, 2)
    loss = mean_loss(data, nn.CrossEntropyLoss())
    for weights in ([0.5, 1.5], np.array([0.5, 1.5]), torch.tensor([0.5, 1.5])):
        found = weighted_sum([loss, loss], weights)
        assert found.higher_is_better is False
        torch.testing.assert_close(found(model), 2 * loss(model))
    with pytest.raises(ValueError, match="pass finite numbers"):
        weighted_sum([loss], [float("nan")])
