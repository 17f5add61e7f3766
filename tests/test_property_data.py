"""Properties of any kind of data give the same gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ggda_ext.data import IndexedData
from ggda_ext.properties import (
    attacked_loss,
    equalized_odds_gap,
    margins,
    mean_loss,
    of_outputs,
    point_losses,
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
