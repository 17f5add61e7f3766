"""Captum's TracInCP, TracInCPFast and influence functions, per sample and with groups."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import captum.influence
import ggda_captum
from captum._utils.sample_gradient import SUPPORTED_MODULES
from captum.influence._core.arnoldi_influence_function import ArnoldiInfluenceFunction
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.check.case import Case, Method

CAPTUM = SimpleNamespace(
    TracInCP=captum.influence.TracInCP,
    TracInCPFast=captum.influence.TracInCPFast,
    NaiveInfluenceFunction=captum.influence.NaiveInfluenceFunction,
    ArnoldiInfluenceFunction=ArnoldiInfluenceFunction,  # not exported by captum.influence
)
ARNOLDI_TOLERANCE = 1e-6  # with Captum's default 0.1, nothing is left of a Hessian this flat
Toolkit = ModuleType | SimpleNamespace


def tracin(case: Case, toolkit: Toolkit, **groups: Any) -> Tensor:
    """TracIn over all parameters at the final checkpoint."""
    fast, size = sample_wise(case.model), _mode(case)["batch_size"]
    influence = tracin_cp(toolkit, case.model, case.train_set, size, fast, **groups)
    if case.one_property and not groups:  # Captum can sum over test points itself
        return influence.influence(_batched(case), aggregate=True) / len(case.test[0])
    return _asked(case, influence, **groups)


def tracin_cp(
    toolkit: Toolkit, model: nn.Module, data: TensorDataset, batch_size: int, sample_wise: bool, **options: Any
) -> Any:
    """Return a TracInCP at the parameters that the model has, with sample-wise gradients or in its default mode."""
    loss = nn.CrossEntropyLoss(reduction="sum" if sample_wise else "none")
    return toolkit.TracInCP(
        model, data, [model.state_dict()], load, loss_fn=loss, batch_size=batch_size,
        sample_wise_grads_per_batch=sample_wise, **options,
    )  # fmt: skip


def tracin_fast(case: Case, toolkit: Toolkit, **groups: Any) -> Tensor:
    """TracIn of the last layer's weights."""
    influence = toolkit.TracInCPFast(
        case.model, case.model.get_submodule(case.last_layer), case.train_set, [case.model.state_dict()], load,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"), batch_size=512, **groups,
    )  # fmt: skip
    return _asked(case, influence, **groups)


def arnoldi(case: Case, toolkit: Toolkit, **groups: Any) -> Tensor:
    """Influence functions over all parameters, with Arnoldi's approximation of the Hessian."""
    influence = toolkit.ArnoldiInfluenceFunction(
        case.model, case.train_set, case.model.state_dict(), load, hessian_dataset=case.curvature_set,
        arnoldi_dim=case.size.depth + 1, projection_dim=case.size.depth, arnoldi_tol=ARNOLDI_TOLERANCE,
        **_mode(case), **groups,
    )  # fmt: skip
    return _asked(case, influence, **groups)


def naive(case: Case, toolkit: Toolkit, **groups: Any) -> Tensor:
    """Influence functions of the last layer, with its whole Hessian."""
    influence = toolkit.NaiveInfluenceFunction(
        case.model, case.train_set, case.model.state_dict(), load, layers=[case.last_layer],
        hessian_dataset=case.curvature_set, **_mode(case), **groups,
    )  # fmt: skip
    return _asked(case, influence, **groups)


def _asked(case: Case, influence: Any, **groups: Any) -> Tensor:
    """Return scores for the test points, or for their mean loss: with groups as a property, else as an average."""
    if not case.one_property:
        return influence.influence(case.test)
    if groups:
        return influence.influence(property=case.mean_loss)
    # TracInCPFast takes no loader
    tests = case.test if isinstance(influence, captum.influence.TracInCPFast) else _batched(case)
    return influence.influence(tests).mean(0, keepdim=True)


def _batched(case: Case) -> DataLoader:
    return DataLoader(TensorDataset(*case.test), batch_size=_mode(case)["batch_size"])


def _mode(case: Case) -> dict[str, Any]:
    """Return Captum's fastest settings for the model: sample-wise gradients if all layers allow it, else one by one."""
    fast = sample_wise(case.model)
    return {
        "loss_fn": nn.CrossEntropyLoss(reduction="sum" if fast else "none"),
        "sample_wise_grads_per_batch": fast,
        "batch_size": min(case.size.batch, 64 if fast else 4),
    }


def sample_wise(model: nn.Module) -> bool:
    """Whether Captum supports sample-wise gradients for all layers of the model."""
    known = tuple(SUPPORTED_MODULES)
    return all(isinstance(module, known) for module in model.modules() if list(module.parameters(recurse=False)))


def load(model: nn.Module, state: dict[str, Tensor]) -> float:
    """Load a checkpoint and return its learning rate."""
    model.load_state_dict(state)
    return 1.0


def _described(case: Case) -> str:
    mode = _mode(case)
    return f"sample_wise_grads_per_batch={mode['sample_wise_grads_per_batch']}, batches of {mode['batch_size']}"


def _curved(case: Case) -> str:
    return f"{_described(case)}, Hessian of {len(case.curvature_set)} points"


def _method(name: str, run: Callable[..., Tensor], settings: Callable[[Case], str]) -> Method:
    """Return a method that `run` asks for with Captum itself, and with the drop-in and groups."""
    return Method(
        "Captum",
        name,
        lambda case: run(case, CAPTUM),
        lambda case: run(case, ggda_captum, groups=case.groups),
        settings,
    )


METHODS = (
    _method("TracInCP", tracin, _described),
    _method("TracInCPFast", tracin_fast, lambda case: "last layer, batches of 512"),
    _method("ArnoldiInfluenceFunction", arnoldi, lambda case: f"arnoldi_dim={case.size.depth + 1}, {_curved(case)}"),
    _method("NaiveInfluenceFunction", naive, lambda case: f"last layer, {_curved(case)}"),
)
