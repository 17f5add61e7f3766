"""Read the setup of a training from a Trainer, or from a model alone: model, collator, columns, loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, default_data_collator
from transformers.data.data_collator import DataCollatorWithPadding
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ggda_ext.data import IndexedData, batch_length
from ggda_ext.losses.row_reductions import Tokens
from ggda_ext.words import check_counts
from ggda_transformers.columns import check_rows, column_names, column_values
from ggda_transformers.losses import OverriddenLoss, TrainerLoss
from ggda_transformers.peft_models import base_of, check_not_quantized

LABELS = frozenset({"label", "label_ids", "labels"})
"""Columns that a Trainer keeps, whether they are arguments of the model or not."""
BATCH_SIZE = 8
"""Rows per batch if a model is given without a Trainer."""


@dataclass
class TrainerSetup:
    """Turns rows of a data set into batches, and batches into losses, as the Trainer does.

    Attributes:
        model: the model itself, without any wrapper.
        collator: makes a batch of rows.
        columns: the columns that the collator gets; None for all.
        batch_size: rows per batch.
        trainer: the Trainer that all this was read from, or None.
    """

    model: nn.Module
    collator: Callable[[list[Any]], Any]
    columns: frozenset[str] | None
    batch_size: int
    trainer: Any = None
    compute_loss_func: Callable[..., Any] | None = None
    _losses: dict[Any, TrainerLoss] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        trainer_or_model: Any,
        *,
        data_collator: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        compute_loss_func: Callable[..., Any] | None = None,
        batch_size: int | None = None,
    ) -> TrainerSetup:
        """Read the setup from a Trainer, or from a model and the arguments that a Trainer would get.

        Args:
            trainer_or_model: a `transformers.Trainer`, or the trained model.
            data_collator: by default the Trainer's. For a model, the default pads if there is a tokenizer.
            processing_class: the tokenizer, if a model is given without a Trainer.
            compute_loss_func: as given to Trainer.
            batch_size: rows per batch; by default the Trainer's batch size for training.
        """
        check_counts(batch_size=batch_size)
        batch_size = None if batch_size is None else int(batch_size)  # a DataLoader takes no numbers of NumPy
        for name, function in (("data_collator", data_collator), ("compute_loss_func", compute_loss_func)):
            if function is not None and not callable(function):
                raise TypeError(f"{name} is a {type(function).__name__}: pass a function, or leave it out.")
        if isinstance(trainer_or_model, Trainer):
            trainer = trainer_or_model
            check_not_packed(trainer.args)
            model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=True)
            check_not_quantized(model)
            columns = _trainer_columns(trainer, model) if trainer.args.remove_unused_columns else None
            return cls(
                model, data_collator or trainer.data_collator, columns,
                batch_size or trainer.args.per_device_train_batch_size, trainer,
                compute_loss_func or getattr(trainer, "compute_loss_func", None),
            )  # fmt: skip
        if not isinstance(trainer_or_model, nn.Module):
            raise TypeError(
                f"trainer_or_model is a {type(trainer_or_model).__name__}: pass the transformers.Trainer, or the model."
            )
        check_not_quantized(trainer_or_model)
        if data_collator is None:
            padded = processing_class is not None
            data_collator = DataCollatorWithPadding(processing_class) if padded else default_data_collator
        return cls(
            trainer_or_model, data_collator, _columns(trainer_or_model), batch_size or BATCH_SIZE, None,
            compute_loss_func,
        )  # fmt: skip

    def loss(
        self,
        tokens: Tokens = "mean",
        of_token: Callable[[Tensor], Tensor] | None = None,
        of_example: Callable[[Tensor], Tensor] | None = None,
        *,
        is_models: bool = False,
    ) -> TrainerLoss:
        """The training loss of each row, or the model's own loss, which no setting of the Trainer changes."""
        key = tokens, of_token, of_example, is_models
        if key not in self._losses:
            changes = {} if is_models else self._changes()
            self._losses[key] = TrainerLoss(
                tokens, shifts=shifts_labels(self.model), of_token=of_token, of_example=of_example, **changes
            )
        return self._losses[key]

    def _changes(self) -> dict[str, Any]:
        """What the Trainer makes of the model's own loss, as arguments of `TrainerLoss`."""
        own = type(self.trainer).compute_loss if self.trainer is not None else Trainer.compute_loss
        usual = (
            own.__qualname__ == "SFTTrainer.compute_loss" and getattr(self.trainer.args, "loss_type", "nll") == "nll"
        )
        overrides = own is not Trainer.compute_loss and not usual
        return {
            "compute_loss_func": self.compute_loss_func,
            "smoother": getattr(self.trainer, "label_smoother", None),
            "compute_loss": OverriddenLoss(self.trainer) if overrides else None,
        }

    def prepared(self, dataset: Any) -> Any:
        """The training data with columns that the model takes: `dataset`, or the rows that the Trainer made from it."""
        own = getattr(self.trainer, "train_dataset", None)
        if own is None or own is dataset or self.columns is None or self.columns & set(column_names(dataset)):
            _check_length(dataset, own)
            return dataset
        shared = [name for name in column_names(dataset) if name in column_names(own)]
        if len(own) == len(dataset) and shared:
            pairs = (zip(column_values(dataset, name), column_values(own, name), strict=True) for name in shared)
            if all(given == made or str(made).startswith(str(given)) for pair in pairs for given, made in pair):
                return own  # the Trainer may have added an end-of-sequence token to a text
        have = ", ".join(map(repr, column_names(dataset)))
        raise ValueError(
            f"no column of train_dataset is an argument of the model: it has {have}. The Trainer made its own rows of "
            f"it ({len(own)} of {len(dataset)}), and which is which cannot be told: pass trainer.train_dataset, with "
            "the column that groups names kept in it."
        )

    def rows(self, dataset: Any, name: str) -> IndexedData:
        """A data set whose batches are taken by index; example i is row i.

        Args:
            dataset: a `datasets.Dataset`, a list of dicts, or a map-style torch Dataset.
            name: name of the data in error messages.
        """
        data = IndexedData(self.loader(dataset, name), name)
        data.anchors = (dataset, self.collator)
        return data

    def loader(self, dataset: Any, name: str = "the data") -> DataLoader[Any]:
        """A DataLoader over a data set, for functions that take one: `properties`, `WhatIf`."""
        check_rows(dataset, name)
        return DataLoader(dataset, batch_size=self.batch_size, collate_fn=self.collate)

    @property
    def collate(self) -> Collate:
        """Makes a batch of rows, from the columns that a Trainer keeps."""
        return Collate(self.collator, self.columns)


@dataclass(frozen=True)
class Collate:
    """Makes a batch of rows.

    Attributes:
        collator: makes a batch of rows with the columns that are kept.
        columns: the columns that are kept; None for all.
    """

    collator: Callable[[list[Any]], Any]
    columns: frozenset[str] | None

    def __call__(self, rows: Sequence[Any]) -> dict[str, Any]:
        kept = [self._kept(row) for row in rows]
        try:
            batch = self.collator(kept)
        except ValueError as error:
            if self.collator is not default_data_collator:
                raise
            raise ValueError(
                f"rows cannot be put into one batch ({error}): if they are of different lengths, pass "
                "processing_class= the tokenizer, or data_collator= one that pads."
            ) from error
        return dict(checked_batch(batch, len(rows)))

    def _kept(self, row: Any) -> Any:
        if self.columns is None or not isinstance(row, Mapping):
            return row
        kept = {name: value for name, value in row.items() if name in self.columns}
        if not kept.keys() - LABELS:
            raise ValueError(
                f"no column of the data is an argument of the model: it has {', '.join(map(repr, row))}. Tokenize it "
                "first, or use a Trainer with remove_unused_columns=False if its collator does."
            )
        return kept


def checked_batch(batch: Any, count: int) -> Mapping[str, Any]:
    """Return the batch that a collator made of `count` rows; raise an error if it does not hold the rows one by one."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"the data collator returned a {type(batch).__name__}: it must return a dict of tensors, the arguments of "
            "the model."
        )
    if batch_length(batch) != count:
        raise ValueError(
            f"the data collator made a batch of {batch_length(batch)} rows from {count} examples (it flattens, packs "
            "or pairs them), so its rows cannot be told apart and have no loss of their own: use a data collator that "
            "pads, such as DataCollatorWithPadding."
        )
    return batch


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model predicts label i + 1 at position i, by the names that a Trainer goes by, and by others alike."""
    name = type(base_of(model)).__name__
    config = getattr(model, "config", None)
    known = name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or "ForCausalLM" in name or "LMHeadModel" in name
    return known and not getattr(config, "is_encoder_decoder", False)


def _check_length(dataset: Any, own: Any) -> None:
    """Raise an error if a data set has another number of rows than the Trainer's own."""
    if hasattr(own, "__len__") and hasattr(dataset, "__len__") and len(own) != len(dataset):
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, and the Trainer has {len(own)} to train on: pass "
            "trainer.train_dataset, or trainer.model instead of the Trainer if the model was trained on these rows."
        )


def _columns(model: nn.Module) -> frozenset[str]:
    """Columns that are arguments of a model, or labels."""
    parameters = inspect.signature(base_of(model).forward).parameters
    return LABELS.union(parameters)


def _trainer_columns(trainer: Trainer, model: nn.Module) -> frozenset[str]:
    """Columns that the Trainer keeps; a subclass may keep other columns than the model's arguments."""
    trainer._set_signature_columns_if_needed()
    return frozenset(trainer._signature_columns or ()) | _columns(model)


def check_not_packed(arguments: Any) -> None:
    """Raise an error if the Trainer packs several documents into a row."""
    if getattr(arguments, "packing", False) or getattr(arguments, "padding_free", False):
        raise ValueError(
            "the Trainer packs several documents into a row (packing or padding_free), so a row belongs to several "
            "groups and its documents cannot be told apart: train, or make a Trainer for the attribution, with "
            "packing=False and padding_free=False; the model may stay the one trained on packed rows."
        )
