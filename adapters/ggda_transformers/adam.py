"""TracIn with Adam's preconditioner: what a group's gradient would do in a step of Adam, not of gradient descent.

A step of Adam divides a gradient by √v̂ + ε, with v̂ = v / (1 − β₂ᵗ) the bias-corrected second moments. So the score of
group G for a property g is

    τ_G = Σ_c η_c ⟨∇g(θ_c) / (√v̂_c + ε), Σ_{i∈G} ∇ℓ_i(θ_c)⟩
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ggda_ext.gradients import GroupGradients
from ggda_ext.methods import Method, Preconditioned
from ggda_ext.results.method import Unit
from ggda_transformers.checkpoints import TrainerCheckpoint, damaged

_NO_WEIGHT_DECAY = ("bias", "layernorm", "rmsnorm", "layer_norm", "_norm", "norm.")


class AdamTracIn(Method):
    """TracIn whose directions are divided as Adam divides gradients.

    Args:
        optimizer: the live optimizer, for the current parameters; or None where checkpoints bring their own.
        trainer: tells the order of parameters in a saved optimizer, or None.
    """

    name: ClassVar[str] = "tracin"
    unit: ClassVar[Unit] = "rank"

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, trainer: Any = None) -> None:
        self._optimizer, self._trainer = optimizer, trainer
        self._checkpoint: TrainerCheckpoint | None = None

    def __repr__(self) -> str:
        return f"AdamTracIn({self._checkpoint.path if self._checkpoint is not None else 'current'!s})"

    def load(self, model: nn.Module, checkpoint: TrainerCheckpoint) -> None:
        """Load a checkpoint into the model, and take its second moments from now on."""
        checkpoint.load(model)
        self._checkpoint = checkpoint

    def precondition(self, provider: GroupGradients, directions: Tensor) -> Preconditioned:
        """The directions `[m, p]`, each parameter's divided by √v̂ + ε."""
        divisors = self.divisors(provider.space.parameters)
        row = provider.space.flatten(
            [divisors[name] for name in provider.space.parameters], directions.new_empty(provider.p)
        )
        return Preconditioned(directions / row, {"preconditioner": "adam"})

    def divisors(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """√v̂ + ε of every parameter, by name."""
        if self._checkpoint is not None:
            state = self._checkpoint.optimizer_state()
            try:
                return _saved_divisors(state, parameters, self._trainer, str(self._checkpoint.path))
            except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
                raise damaged(self._checkpoint.path / "optimizer.pt", error) from None
        if self._optimizer is None:
            raise ValueError(
                "preconditioner='adam' at the current parameters needs the optimizer: pass the Trainer after train(), "
                "or checkpoints= with their optimizer.pt."
            )
        return live_divisors(self._optimizer, parameters)


def live_divisors(optimizer: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """√v̂ + ε from an optimizer that is in use; before its first step, 1."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # out of accelerate's wrapper
    groups = {id(value): group for group in optimizer.param_groups for value in group["params"]}
    found = {}
    for name, parameter in parameters.items():
        if id(parameter) not in groups:
            raise ValueError(
                f"preconditioner='adam': parameter {name!r} is not in the optimizer, so it has no second moments: "
                "choose parameters= that were trained."
            )
        found[name] = _divisor(optimizer.state.get(parameter, {}), groups[id(parameter)], parameter, "the optimizer")
    return found


def _saved_divisors(
    saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], trainer: Any, where: str
) -> dict[str, Tensor]:
    """√v̂ + ε from a saved optimizer, whose parameters are numbered in the order a Trainer gives them."""
    model = trainer.model if trainer is not None else None
    named = dict(model.named_parameters()) if model is not None else dict(parameters)
    trained = {name: value for name, value in named.items() if value.requires_grad or name in parameters}
    groups = saved["param_groups"]
    order = _order(trained, groups, trainer)
    numbers = [number for group in groups for number in group["params"]]
    if len(numbers) != len(order):
        raise ValueError(
            f"{where} has an optimizer of {len(numbers)} parameters, and the model has {len(order)} that require a "
            "gradient: pass the Trainer with the model as it was trained."
        )
    by_name = dict(zip(order, numbers, strict=True))
    group_of = {number: group for group in groups for number in group["params"]}
    found = {}
    for name, parameter in parameters.items():
        number = by_name[name]
        state = saved["state"].get(number, {})
        moments = state.get("exp_avg_sq")
        if moments is not None and moments.shape != parameter.shape:
            raise ValueError(
                f"{where} has second moments {list(moments.shape)} where parameter {name!r} is "
                f"{list(parameter.shape)}: its optimizer orders parameters otherwise; pass the Trainer that made it."
            )
        found[name] = _divisor(state, group_of[number], parameter, where)
    return found


def _order(named: Mapping[str, nn.Parameter], groups: list[Any], trainer: Any) -> list[str]:
    """Names in the order of the optimizer: first those with weight decay, then those without."""
    if len(groups) == 1:
        return list(named)
    if trainer is not None:
        decays = set(trainer.get_decay_parameter_names(trainer.model))
    else:
        decays = {name for name in named if not any(part in name.lower() for part in _NO_WEIGHT_DECAY)}
    return [name for name in named if name in decays] + [name for name in named if name not in decays]


def _divisor(state: Mapping[str, Any], group: Mapping[str, Any], parameter: nn.Parameter, where: str) -> Tensor:
    if "betas" not in group or (state and "exp_avg_sq" not in state):
        kept = ", ".join(sorted(map(str, state))) or "nothing"
        raise ValueError(
            f"preconditioner='adam': {where} keeps {kept} and not Adam's second moments: leave out preconditioner for "
            "other optimizers than Adam and AdamW."
        )
    if not state:
        return torch.ones_like(parameter)  # no step so far
    step = float(state["step"])
    corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** step)
    return (corrected.sqrt() + group["eps"]).to(parameter)
