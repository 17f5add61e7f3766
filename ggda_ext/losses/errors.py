"""Errors for data that does not fit a model or a loss. Their messages say what to do.

These functions are called after the model or the loss has failed, or for shapes that a loss would misinterpret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ggda_ext.data import tensors_in

_SHAPES = (
    "shapes cannot be multiplied",
    "Given groups=",
    "to have",
    "normalized_shape",
    "size of tensor a",
    "size mism",
)


def of_model(error: Exception, model: nn.Module, batch: Any) -> Exception:
    """Return a clearer error for a model that failed on a batch, with what the model was given; or the error itself."""
    said = f"The model says: {error}"
    given = batch[:-1] if isinstance(batch, tuple | list) and len(batch) > 1 else [batch]
    strange = next((type(part).__name__ for part in given if not isinstance(part, Tensor | Mapping)), None)
    if strange is not None and ("must be Tensor" in str(error) or isinstance(error, AttributeError)):
        return TypeError(
            f"the data gives a {strange} where the model needs a tensor: return torch.tensor(values) from the data "
            f"set, with texts encoded, or pass a DataLoader with collate_fn=. {said}."
        )
    if isinstance(error, TypeError):
        if isinstance(batch, Mapping) and "keyword argument" in str(error):
            return TypeError(
                f"the data gives dicts, whose entries are given as keywords, {', '.join(f'{key}=' for key in batch)}: "
                "pass a dict whose keys are arguments of the model's forward and one of labels, target, y; or tuples "
                f"(x, y). {said}."
            )
        if "positional argument" in str(error) and not isinstance(batch, Tensor | Mapping):
            return TypeError(
                f"the data gives {len(given)} input{'s' * (len(given) != 1)}, all but the last part of a tuple, and a "
                f"target: pass (x, y), or as many inputs as the model takes. {said}."
            )
        return error
    if "dtype" in str(error) or "should be the same" in str(error):
        own = next((str(p.dtype) for p in model.parameters()), "another type")
        dtypes = ", ".join(str(tensor.dtype) for tensor in tensors_in(batch))
        fix = "pass inputs first, then the target; x.float() for x, or df.astype('float32')"
        if own in ("torch.bfloat16", "torch.float16"):
            fix = f"pass x.to({own}) for x"
        elif "float64" in dtypes:
            fix = "pass x.float() for x, or model.double()"
        elif own == "torch.float64":
            fix = "pass inputs first, then the target; x.double() for x, or model.float()"
        return TypeError(
            f"the data holds tensors of {dtypes}, and the parameters of the model are {own}: {fix}. {said}."
        )
    if any(words in str(error) for words in _SHAPES):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors_in(given))
        return ValueError(f"the model cannot run on inputs of shape {shapes}: pass what it was trained on. {said}.")
    return error


def check_classes(name: str, output: Tensor, target: Tensor) -> None:
    """Raise an error for outputs and targets that a loss of classes would misinterpret or cannot take."""
    if output.shape[1] == 1 and not target.is_floating_point():
        raise ValueError(
            f"the model gives one output, of which {name} makes the loss 0 for whatever target: use "
            "nn.BCEWithLogitsLoss(), or a model with an output for each class."
        )
    if target.is_floating_point() and target.dim() == 1:
        raise _not_whole(name, target)
    if not target.is_floating_point() and list(target.shape) == [len(output), 1]:
        raise ValueError(
            f"the targets have shape {list(target.shape)}, and {name} takes the number of a class for each point: "
            "pass y[:, 0]."
        )


def of_loss(error: Exception, name: str, output: Tensor, target: Tensor) -> Exception:
    """Return a clearer error for a PyTorch loss that failed, with what to do; or the error itself."""
    if isinstance(error, IndexError) and "out of bounds" in str(error):
        classes = output.shape[1]
        worst = int(target.min()) if target.min() < 0 else int(target.max())
        return ValueError(
            f"the targets hold class {worst}, and the model has outputs for {classes}, 0 … {classes - 1}: "
            "number the classes from 0, or use a model with more outputs."
        )
    if isinstance(error, RuntimeError) and "class probabilities" in str(error):
        return TypeError(f"the targets are one-hot, of {_kind(target)}: pass y.argmax(1) for {name}, or y.float().")
    if isinstance(error, RuntimeError) and any(said in str(error) for said in ("target dtype", "scalar type Long")):
        return _not_whole(name, target)  # PyTorch 2.6 uses the second message
    if isinstance(error, RuntimeError) and "between 0 and 1" in str(error):
        return ValueError(
            f"{name} takes probabilities, and the outputs are {output.min().item():.3g} to {output.max().item():.3g}: "
            "pass nn.BCEWithLogitsLoss(), and the model without a sigmoid at its end."
        )
    if isinstance(error, RuntimeError) and "target size" in str(error):
        return ValueError(
            f"{name} cannot compare outputs {list(output.shape)} of the model with targets {list(target.shape)}: pass "
            f"inputs of the shape the model was trained on, so that it gives [b, classes]. {name} says: {error}."
        )
    return error


def _not_whole(name: str, target: Tensor) -> TypeError:
    return TypeError(
        f"the targets are {_kind(target)} numbers of classes: pass y.long() for {name}, or y.astype('int64') of an "
        "array or a table."
    )


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
