"""TracIn with Adam's preconditioner: the effect of a group's gradient in a step of Adam instead of gradient descent.

A step of Adam divides a gradient by √v̂ + ε. Here v̂ = v / (1 − β₂ᵗ) are the bias-corrected second moments. So the
score of group G for a property g is

    τ_G = Σ_c η_c ⟨∇g(θ_c) / (√v̂_c + ε), Σ_{i∈G} ∇ℓ_i(θ_c)⟩

Adam also takes its steps along a mean of gradients. In this mean, a gradient of s steps ago has weight β₁ˢ, see
`Momentum`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
        optimizer: the optimizer in use, for the current parameters; None if checkpoints hold their own optimizers.
        trainer: the Trainer, which knows the order of parameters in a saved optimizer, or None.
    """

    name: ClassVar[str] = "tracin"
    unit: ClassVar[Unit] = "rank"

    def __init__(self, optimizer: torch.optim.Optimizer | None = None, trainer: Any = None) -> None:
        self._optimizer, self._trainer = optimizer, trainer
        self._checkpoint: TrainerCheckpoint | None = None

    def __repr__(self) -> str:
        return f"AdamTracIn({self._checkpoint.path if self._checkpoint is not None else 'current'!s})"

    def __fingerprint__(self) -> list[Any]:
        """What the divisors depend on: the optimizer's state, and the Trainer's order of parameters."""
        order = None
        if self._trainer is not None and self._trainer.optimizer is not None:
            names = {id(value): name for name, value in self._trainer.model.named_parameters()}
            order = [
                [names.get(id(value)) for value in group["params"]] for group in self._trainer.optimizer.param_groups
            ]
        if self._checkpoint is not None:
            return [type(self._trainer), order, self._checkpoint.optimizer_state()]
        return [type(self._trainer), order, None if self._optimizer is None else self._optimizer.state_dict()]

    def load(self, model: nn.Module, checkpoint: TrainerCheckpoint) -> None:
        """Load a checkpoint into the model, and use its second moments from now on."""
        checkpoint.load(model)
        self._checkpoint = checkpoint

    def precondition(self, provider: GroupGradients, directions: Tensor) -> Preconditioned:
        """Divide the directions `[m, p]`, parameter by parameter, by √v̂ + ε."""
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


@dataclass
class Momentum:
    """The mean of a property's directions `[m, p]` over the steps so far, weighted by age as Adam weights gradients.

    A gradient acts in its own step and, with decreasing weight, in later steps. So its effect is its product with the
    mean of the directions of these steps. The directions of later steps are not known yet, so the directions of
    earlier steps replace them. If the model swings to and fro, they cancel, as gradients do in Adam's mean.

    Attributes:
        total: the sum of the weighted directions; None before the first directions.
        weight: the sum of the weights, each β₁ to the power of the age.
        step: the step of the last directions.
    """

    total: Tensor | None = None
    weight: float = 0.0
    step: int = 0

    def mean(self, directions: Tensor, step: int, optimizer: Any) -> Tensor:
        """Add the directions of a step and return the mean."""
        kept = unwrapped(optimizer).param_groups[0]["betas"][0] ** (step - self.step)
        self.total = directions if self.total is None else directions + kept * self.total.to(directions)
        self.weight, self.step = 1 + kept * self.weight, step
        return self.total / self.weight


def unwrapped(optimizer: Any) -> Any:
    """An optimizer without accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def live_divisors(optimizer: Any, parameters: Mapping[str, nn.Parameter], coming: bool = False) -> dict[str, Tensor]:
    """√v̂ + ε by name, from an optimizer in use: of its last step (1 before the first step), or of the coming step.

    The moments of the coming step include its own gradients. So a divided gradient is not larger than in the step
    itself, even for the embedding of a new token, which has no moments before this step.
    """
    optimizer = unwrapped(optimizer)
    groups = {id(value): group for group in optimizer.param_groups for value in group["params"]}
    found = {}
    for name, parameter in parameters.items():
        if id(parameter) not in groups and coming:
            found[name] = torch.ones_like(parameter)  # any value will do, as its learning rate is 0
            continue
        if id(parameter) not in groups:
            raise _not_trained(name)
        state, group = optimizer.state.get(parameter, {}), groups[id(parameter)]
        gradient = parameter.grad if coming else None
        found[name] = _divisor(state, group, parameter, "the optimizer", gradient)
    return found


def steady(divisors: Mapping[str, Tensor], steps: int) -> dict[str, Tensor]:
    """Smooth divisors, as if one more step had had the mean square of the parameter in all its entries.

    In the first steps, a sum of gradients may be near 0 in entries where the gradients of points are not. After
    division by it, a few entries would dominate the score of a point. The mean prevents this, and its weight decreases
    with the number of steps.
    """
    squares = {name: value.square() for name, value in divisors.items()}
    means = {name: value[value.isfinite()].mean().nan_to_num() for name, value in squares.items()}
    return {name: ((steps * value + means[name]) / (steps + 1)).sqrt() for name, value in squares.items()}


def _saved_divisors(
    saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter], trainer: Any, where: str
) -> dict[str, Tensor]:
    """√v̂ + ε by name, from a saved optimizer that numbers its parameters in the Trainer's order."""
    groups = saved["param_groups"]
    order = _order(parameters, len(groups), trainer)
    sizes, own = [len(group["params"]) for group in groups], [len(names) for names in order]
    if sizes != own:
        raise ValueError(
            f"{where} has an optimizer of {sum(sizes)} parameters, in groups of {sizes}, and the model has {sum(own)}, "
            f"in groups of {own}: pass the Trainer that made it, with the model as it was trained."
        )
    numbers = [number for group in groups for number in group["params"]]
    by_name = dict(zip((name for names in order for name in names), numbers, strict=True))
    group_of = {number: group for group in groups for number in group["params"]}
    found = {}
    for name, parameter in parameters.items():
        if name not in by_name:
            raise _not_trained(name)
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


def _order(parameters: Mapping[str, nn.Parameter], groups: int, trainer: Any) -> list[list[str | None]]:
    """Names of the parameters in each group of the optimizer; None for those that gradients are not taken for.

    The groups are taken from the Trainer's own optimizer. Without a Trainer, two groups are the parameters with weight
    decay, then the parameters without.
    """
    if trainer is not None:
        names = {id(value): name for name, value in parameters.items()}
        found = _optimizer_of(trainer, parameters).param_groups
        return [[names.get(id(value)) for value in group["params"]] for group in found]
    if groups == 1:
        return [list(parameters)]
    still = [name for name in parameters if any(part in name.lower() for part in _NO_WEIGHT_DECAY)]
    return [[name for name in parameters if name not in still], list(still)]


def _optimizer_of(trainer: Any, parameters: Mapping[str, nn.Parameter]) -> Any:
    """The Trainer's optimizer; before training, a new one made by the Trainer, which does not keep it."""
    if trainer.optimizer is not None:
        return trainer.optimizer
    frozen = [value for value in parameters.values() if not value.requires_grad]
    try:
        for value in frozen:
            value.requires_grad_(True)
        return trainer.create_optimizer() or trainer.optimizer
    finally:
        trainer.optimizer = None
        for value in frozen:
            value.requires_grad_(False)


def _not_trained(name: str) -> ValueError:
    return ValueError(
        f"preconditioner='adam': parameter {name!r} is not in the optimizer, so it has no second moments: choose "
        "parameters= that were trained."
    )


def _divisor(
    state: Mapping[str, Any], group: Mapping[str, Any], parameter: nn.Parameter, where: str,
    gradient: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if "betas" not in group or (state and "exp_avg_sq" not in state):
        kept = ", ".join(sorted(map(str, state))) or "nothing"
        raise ValueError(
            f"preconditioner='adam': {where} keeps {kept} and not Adam's second moments: leave out preconditioner for "
            "other optimizers than Adam and AdamW."
        )
    if not state and gradient is None:
        return torch.ones_like(parameter)  # the optimizer has taken no step
    moments, step, beta = state.get("exp_avg_sq", 0.0), float(state.get("step", 0)), group["betas"][1]
    if gradient is not None:
        moments, step = beta * moments + (1 - beta) * gradient**2, step + 1
    if "max_exp_avg_sq" in state:  # amsgrad
        moments = torch.maximum(moments, state["max_exp_avg_sq"])
    divisor = (moments / (1 - beta**step)).sqrt() + group["eps"]
    # an entry that never had a gradient was not moved, even if it has a gradient without dropout
    return divisor.masked_fill(moments == 0, torch.inf).to(parameter)
