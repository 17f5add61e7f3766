"""Train one model with PyTorch's own Adam and schedulers; training many models at once must give the same result."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Adam
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from ggda_ext.checkpoints import State, state_on_cpu
from ggda_ext.losses import cannot_take, check_not_broadcast, errors, training_loss
from ggda_ext.sharing import ProgressBar
from ggda_ext.training.denormals import denormals_flushed
from ggda_ext.training.recipe import Recipe, check_recipe, checked_data, checked_subset, order_generator, shuffled
from ggda_ext.words import check_whole

LossFn = Callable[[Tensor, Tensor], Tensor]
MakeModel = Callable[[], nn.Module]


@dataclass(frozen=True)
class Trained:
    """A trained model in eval mode, with the requested checkpoints.

    Attributes:
        model: the model.
        checkpoints: state dicts on the CPU, one for each requested epoch.
        rates: for each checkpoint, the mean learning rate of the steps since the checkpoint before; these are the
            weights for TracIn.
    """

    model: nn.Module
    checkpoints: tuple[State, ...] = ()
    rates: tuple[float, ...] = ()


@torch.inference_mode(False)
@torch.enable_grad()
def train_one(
    model: nn.Module,
    loss_fn: LossFn,
    data: tuple[Tensor, Tensor],
    recipe: Recipe,
    *,
    seed: int,
    subset: Any = None,
    checkpoint_epochs: Collection[int] = (),
    show_progress: bool = False,
) -> Trained:
    """Train a model in place, and return it with its checkpoints.

    Args:
        model: the model, freshly initialised (see `initial_model`).
        loss_fn: ``loss_fn(model(x), y)`` returns a mean over the batch. PyTorch's losses of numbers take y `[n]` for
            outputs `[n, 1]`.
        data: the training set ``(x, y)``, on the device to train on.
        recipe: epochs, learning rate, batch size, weight decay, schedule.
        seed: determines the batch order, and dropout if the model has it.
        subset: training indices or a mask `[n]`; all points if left out.
        checkpoint_epochs: the epochs, counted from 1, after which the parameters are kept.
        show_progress: whether to show a progress bar.
    """
    x, y = checked_data(data)
    check_model_and_recipe(model, recipe)
    points = checked_subset(subset, len(x))
    wanted = _checked_epochs(checkpoint_epochs, recipe.epochs)
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter) and parameter.is_inference():
            raise ValueError(
                f"parameter {name!r} was made in torch.inference_mode and cannot be trained: make the model outside of "
                "it, or by initial_model."
            )
    model.to(x.device).train()
    optimizer = Adam(
        [parameter for parameter in model.parameters() if parameter.requires_grad],
        recipe.learning_rate,
        weight_decay=recipe.weight_decay,
    )
    scheduler = _scheduler(optimizer, recipe, recipe.steps(len(points)))
    batch_loss = training_loss(loss_fn)
    order, used, checkpoints, rates = order_generator(seed), [], [], []
    with seeded(seed, x.device), denormals_flushed():
        for epoch in ProgressBar(range(1, recipe.epochs + 1), "training", unit="epoch", disable=not show_progress):
            for at in shuffled(points, order).to(x.device).split(recipe.batch_size):
                used.append(optimizer.param_groups[0]["lr"])
                optimizer.zero_grad(set_to_none=True)
                output = run_model(model, x[at], y[at])
                if len(used) == epoch == 1:
                    check_not_broadcast(loss_fn, output, y[at])
                one_number(batch_loss(output, y[at])).backward()
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()
            if epoch in wanted:
                checkpoints.append(state_on_cpu(model))
                rates.append(float(np.mean(used)))
                used.clear()
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    check_finite(trained, seed, len(points), recipe, x)
    return Trained(model.eval(), tuple(checkpoints), tuple(rates))


def check_model_and_recipe(model: Any, recipe: Any) -> None:
    """Raise an error if `model` is no module, or `recipe` no `Recipe`."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model is a {type(model).__name__}: pass a torch.nn.Module, such as initial_model(make_model, 0)."
        )
    check_recipe(recipe)


def run_model(model: nn.Module, x: Tensor, *targets: Tensor) -> Any:
    """Return the model's output for a batch; errors say what to do."""
    try:
        return model(x)
    except (RuntimeError, TypeError, AttributeError) as error:
        explained = errors.of_model(error, model, (x, *targets))
        if explained is error:
            raise
        raise explained from error


def check_finite(parameters: Mapping[str, Tensor], seed: int, points: int, recipe: Recipe, x: Tensor) -> None:
    """Raise an error if a trained model holds numbers that are not finite.

    Args:
        parameters: the trained parameters, by name.
        seed: the seed of the training.
        points: the number of its training points.
        recipe: how the model was trained.
        x: the inputs of all training points.
    """
    strange = next((name for name, values in parameters.items() if not bool(values.isfinite().all())), None)
    if strange is not None:
        whole = not x.is_floating_point() or bool(x.isfinite().all())
        fix = f"lower learning_rate={recipe.learning_rate:g}, or check" if whole else "fill or drop these, and check"
        raise ValueError(
            f"the training of seed {seed} on {points} points ended with NaN or infinity in parameter {strange!r}"
            f"{'' if whole else ', and the inputs hold such numbers'}: {fix} that the targets and the loss are finite."
        )


def one_number(loss: Tensor) -> Tensor:
    """Return the loss of a batch; raise an error if it is not one number."""
    if loss.dim() and loss.numel() != 1:
        raise ValueError(
            f"loss_fn returned shape {list(loss.shape)} for a batch, where training needs one number: let it return "
            "their mean."
        )
    return loss


def initial_model(make_model: MakeModel, seed: int) -> nn.Module:
    """Return a new model whose initial weights are determined by `seed`; the global random state does not change."""
    if isinstance(make_model, nn.Module):
        raise TypeError(
            f"make_model is a {type(make_model).__name__}: pass a function that makes a new model at every call."
        )
    if not callable(make_model) or cannot_take(make_model, 0):
        raise TypeError(f"make_model={make_model!r}: pass a function without arguments, e.g. lambda: nn.Linear(4, 2).")
    check_whole(seed=seed)
    with torch.inference_mode(False), seeded(seed):
        model = make_model()
    if not isinstance(model, nn.Module):
        raise TypeError(f"make_model returned a {type(model).__name__}: return a torch.nn.Module.")
    return model


def new_model(make_model: MakeModel) -> nn.Module:
    """Return a new model; raise an error if another call of make_model returns parameters in the same memory.

    Parameters that are frozen may be shared by all models.
    """
    model, other = (initial_model(make_model, 0) for _ in range(2))
    if _trained_memory(model) & _trained_memory(other):
        raise ValueError(
            f"make_model returned a {type(model).__name__} with the same parameters twice, so each training would "
            "change the others: pass a function that makes a new model at every call, e.g. lambda: deepcopy(model)."
        )
    return model


def _trained_memory(model: nn.Module) -> set[tuple[torch.device, int]]:
    """Return where the numbers are that training changes; lazy parameters and the meta device have none."""
    trained = [value for value in model.parameters() if value.requires_grad and not is_lazy(value)]
    places = {(value.device, value.untyped_storage().data_ptr()) for value in trained}
    return {(device, address) for device, address in places if address}


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed PyTorch's global random state inside the context; restore the state afterwards."""
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(int(seed))
        yield


def _scheduler(optimizer: Adam, recipe: Recipe, steps: int) -> LRScheduler | None:
    if recipe.schedule == "onecycle":
        return OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps)
    if recipe.schedule == "linear":
        return LambdaLR(optimizer, lambda step: 1 - step / steps)
    return None


def _checked_epochs(wanted: Collection[int], epochs: int) -> set[int]:
    outside = [epoch for epoch in wanted if not 1 <= epoch <= epochs]
    if outside:
        raise ValueError(f"checkpoint_epochs holds {outside[0]}: pass epochs from 1 to {epochs}.")
    return set(wanted)
