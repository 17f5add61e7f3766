"""`attribute_trainer` computes group scores from a finished Trainer, a trained model or saved checkpoints."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from ggda_ext import attribute
from ggda_ext.curvature.damping import TrainingSteps
from ggda_ext.losses.row_reductions import Tokens
from ggda_ext.methods import EKFAC, Influence, Method
from ggda_ext.model import ParameterChoice, ParameterSpace
from ggda_ext.results import Attribution
from ggda_transformers.adam import AdamTracIn, unwrapped
from ggda_transformers.checkpoints import TrainerCheckpoint, found_checkpoints
from ggda_transformers.columns import groups_of
from ggda_transformers.peft_models import counted_parameters, unmerged
from ggda_transformers.properties import property_of
from ggda_transformers.setup import TrainerSetup

MethodChoice = Literal["auto", "tracin", "influence", "fisher", "ekfac"]
FEW_PARAMETERS = 2_000_000
"""Up to this number (adapters, heads) the default is to solve with the curvature; above, to factor it, for memory."""
CURVATURE_ROWS = 1024
"""The largest number of rows that the curvature is computed on. Rows are long: this many hold enough tokens for it."""
_ADAM = re.compile(r"(Fused|Paged|AnyPrecision|DeepSpeedCPU)?AdamW?(\d+bit)?")  # classes that step as Adam does


def attribute_trainer(
    trainer_or_model: Any,
    train_dataset: Any,
    groups: Any,
    property: Any = "eval_loss",
    checkpoints: Any = None,
    preconditioner: Literal["adam"] | None = None,
    *,
    method: MethodChoice | Method = "auto",
    eval_dataset: Any = None,
    tokens: Tokens = "mean",
    data_collator: Callable[[list[Any]], Any] | None = None,
    processing_class: Any = None,
    compute_loss_func: Callable[..., Any] | None = None,
    weights: Sequence[float] | None = None,
    damping: float | None = None,
    parameters: ParameterChoice = None,
    strategy: str = "auto",
    batch_size: int | None = None,
    memory_budget: int = 256 * 2**20,
    show_progress: bool | None = None,
    save_dir: str | Path | None = None,
    tag: str | None = None,
) -> Attribution:
    """Score how each group of the training data helped or hurt.

    A positive score means that the property is predicted to rise if the group is removed.

    Args:
        trainer_or_model: the `transformers.Trainer` after training, or the trained model. For a PEFT model, gradients
            are taken for the adapter's parameters. Dropout is off during the call; the model is left as it was.
        train_dataset: the rows as they were given to the Trainer: a `datasets.Dataset`, a list of dicts, or a map-style
            Dataset. It may have columns that the model does not take.
        groups: the name of a column (``"source"``, ``"meta.source"``), `Binned`, `Nested`, a list of these for the
            combinations of their values, or one label per row.
        property: a callable ``g(model)``, one of `ggda_ext.properties`, or a name: ``"eval_loss"``, ``"accuracy"``
            (mean probability of the right label), ``"f1"``, ``"probability"`` (of the whole answer), ``"perplexity"``,
            or ``"difference"`` (loss of the first of two sets minus loss of the second); or a list of these.
        checkpoints: None for the current parameters; ``"output_dir"`` for all ``checkpoint-*`` in the Trainer's output
            folder; a folder; or a list of folders.
        preconditioner: ``"adam"`` divides gradients as Adam does (TracIn only). It takes the second moments from the
            ``optimizer.pt`` of each checkpoint, or from the Trainer's optimizer for the current parameters.
        method: as in `ggda_ext.attribute`. ``"auto"`` uses curvature: ``"influence"`` for up to two million parameters
            (adapters, heads) and ``"ekfac"`` above; with a preconditioner it is ``"tracin"``. The result names the
            method. Curvature is computed on up to 1,024 rows, with up to six passes over them; pass one of
            `ggda_ext.methods` for other settings. Then every method makes one pass over all rows for each checkpoint;
            ``"tracin"`` makes only this pass.
        eval_dataset: the rows that a property given by name is computed on; by default the Trainer's. A dict of several
            sets gives one row of scores for each set.
        tokens: the loss of a sequence is the ``"mean"`` of its tokens' losses, which is its loss in a batch of its own,
            or their ``"sum"``. A Trainer takes the mean over all tokens of a batch, which is neither: there, sequences
            count by their length, as with the sum.
        data_collator: by default the Trainer's.
        processing_class: the tokenizer, needed for padding if there is no Trainer.
        compute_loss_func: by default the Trainer's.
        weights: one weight for each checkpoint; for TracIn, by default the learning rates in ``trainer_state.json``.
        damping: damping of the curvature; by default from the Trainer's steps, else from the curvature itself.
        parameters: the parameters that gradients are taken for; by default those that require a gradient.
        strategy: as in `attribute`.
        batch_size: rows per batch; by default the Trainer's batch size for training.
        memory_budget, show_progress, save_dir, tag: as in `attribute`.

    Returns:
        An `Attribution` with scores `[m, k]` and the names of the groups.
    """
    setup = TrainerSetup.of(
        trainer_or_model, data_collator=data_collator, processing_class=processing_class,
        compute_loss_func=compute_loss_func, batch_size=batch_size,
    )  # fmt: skip
    if getattr(setup.collator, "mlm", False):
        raise ValueError(
            "the data collator masks tokens at random (mlm=True), so that a row has another loss each time: mask the "
            "rows once, before, and pass data_collator= one that only pads, such as DataCollatorForTokenClassification."
        )
    partition = groups_of(train_dataset, groups)
    goal = property_of(setup, property, eval_dataset)
    listed = found_checkpoints(checkpoints, getattr(getattr(setup.trainer, "args", None), "output_dir", None))
    chosen = counted_parameters(setup.model) if parameters is None else parameters
    data = setup.rows(setup.prepared(train_dataset), "train_dataset")
    with evaluated(setup.model):
        by, damping = _method(method, preconditioner, setup, damping, ParameterSpace(setup.model, chosen).size)
        if listed is None and isinstance(by, AdamTracIn):
            _check_moments_fit(setup.trainer)
        load = None if listed is None else by.load if isinstance(by, AdamTracIn) else _load
        result = attribute(
            setup.model, setup.loss(tokens), data, partition, goal, method=by,
            damping=damping, checkpoints=listed, weights=_weights(listed, weights, by),
            load_checkpoint=load, parameters=chosen, strategy=strategy,
            batch_size=setup.batch_size, memory_budget=memory_budget, show_progress=show_progress, save_dir=save_dir,
            tag=tag,
        )  # fmt: skip
    return result.replace(notes=(*result.notes, _token_note(tokens)))


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Switch dropout off and take merged adapters out of the weights, inside this context."""
    modes = [(module, module.training) for module in model.modules()]
    with unmerged(model):
        model.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training


def _load(model: nn.Module, checkpoint: TrainerCheckpoint) -> None:
    checkpoint.load(model)


def _method(
    method: MethodChoice | Method, preconditioner: str | None, setup: TrainerSetup, damping: float | None, p: int
) -> tuple[Any, float | None]:
    """The method, and the damping if the method object does not hold it."""
    if preconditioner not in (None, "adam"):
        raise ValueError(f"preconditioner={preconditioner!r} is not one of None, 'adam'.")
    if preconditioner == "adam":
        if method not in ("auto", "tracin"):
            raise ValueError(f"preconditioner='adam' is for TracIn, and method={method!r} has its own: leave out one.")
        return AdamTracIn(getattr(setup.trainer, "optimizer", None), setup.trainer), damping
    if method == "auto":
        method = "influence" if p <= FEW_PARAMETERS else "ekfac"
    if not isinstance(method, str) or method not in ("influence", "ekfac"):
        return method, damping
    kind = Influence if method == "influence" else EKFAC
    recipe = training_steps(setup.trainer) if damping is None else None
    return kind(damping=damping, recipe=recipe, points=CURVATURE_ROWS), None


def training_steps(trainer: Any) -> TrainingSteps | None:
    """The training steps according to a Trainer's schedule, or to its log; None if they tell too little."""
    steps = _steps_taken(trainer)
    rates = _learning_rates(trainer, steps)
    if not sum(rates) > 0:
        return None
    kind, momentum, weight_decay = _optimizer(trainer)
    if kind is None:
        return None
    rate = sum(rates) / len(rates)
    batch = (
        trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps * trainer.args.world_size
    )
    return TrainingSteps(rate * steps, kind, momentum, weight_decay, batch)


def _learning_rates(trainer: Any, steps: int) -> list[float]:
    """The learning rates of all steps, by the schedule; where it is no function of the step, those of logged steps."""
    schedule = getattr(trainer, "lr_scheduler", None)
    if isinstance(schedule, LambdaLR):
        return [float(schedule.base_lrs[0] * schedule.lr_lambdas[0](step)) for step in range(steps)]
    log = getattr(getattr(trainer, "state", None), "log_history", [])
    return [entry["learning_rate"] for entry in log if "learning_rate" in entry and entry["step"] <= steps]


def _optimizer(trainer: Any) -> tuple[Literal["sgd", "adam"] | None, float, float]:
    """The optimizer, its momentum and weight decay: of the Trainer's optimizer, else by its arguments.

    Where groups of parameters differ, the largest group counts. Other optimizers than SGD, Adam and AdamW are None.
    """
    if trainer.optimizer is None:
        name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
        return "adam" if name.startswith("adamw") else "sgd" if name == "sgd" else None, 0.0, trainer.args.weight_decay
    used = unwrapped(trainer.optimizer)
    names = [one.__name__ for one in type(used).__mro__]
    kind: Literal["sgd", "adam"] | None = "sgd" if "SGD" in names else None
    kind = "adam" if any(map(_ADAM.fullmatch, names)) else kind
    largest = max(used.param_groups, key=lambda group: sum(value.numel() for value in group["params"]))
    return kind, float(largest.get("momentum", 0.0)), float(largest.get("weight_decay", 0.0))


def _check_moments_fit(trainer: Any) -> None:
    """Raise an error if the Trainer's optimizer and its model belong to different steps."""
    if trainer is not None and _steps_taken(trainer) != trainer.state.global_step:
        best = trainer.state.best_model_checkpoint
        raise ValueError(
            f"preconditioner='adam': the Trainer has loaded its best checkpoint, {best}, and its optimizer is that of "
            f"step {trainer.state.global_step}: pass checkpoints=[{best!r}], weights=[1.0]."
        )


def _steps_taken(trainer: Any) -> int:
    """Number of steps that made the Trainer's model: fewer than it took if it loaded its best checkpoint at the end."""
    state: Any = getattr(trainer, "state", None)
    loaded = trainer is not None and trainer.args.load_best_model_at_end and state.best_model_checkpoint is not None
    return int(state.best_global_step if loaded else getattr(state, "global_step", 0))


def _weights(
    listed: list[TrainerCheckpoint] | None, weights: Sequence[float] | None, method: Any
) -> Sequence[float] | None:
    """One weight per checkpoint; for TracIn, by default the logged learning rates."""
    if listed is None or weights is not None or not (method == "tracin" or isinstance(method, AdamTracIn)):
        return weights
    found = [checkpoint.learning_rate for checkpoint in listed]
    if not any(found):
        raise ValueError(
            "the logged learning rate of every checkpoint is 0, so all scores would be: pass weights=, one for each."
        )
    return found


def _token_note(tokens: Tokens) -> str:
    return f"The loss of a row is the {tokens} over its tokens, where it has several."
