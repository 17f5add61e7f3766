"""Read the folders that a Trainer saves: parameters, learning rates, Adam's moments. No code in their files is run."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ggda_ext.model import unwrapped
from ggda_ext.storage.files import DamagedFile, read_json
from ggda_transformers.peft_models import check_fits, is_peft, load_adapter

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_SHARDED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class TrainerCheckpoint:
    """A folder ``checkpoint-<step>``, or any other folder that a model was saved to."""

    path: Path

    @property
    def step(self) -> int | None:
        """The step after which the checkpoint was saved; None if the folder's name does not tell it."""
        found = re.fullmatch(r"checkpoint-(\d+)", self.path.name)
        return int(found.group(1)) if found else None

    @property
    def learning_rate(self) -> float:
        """The learning rate of the checkpoint's step: the last one that `trainer_state.json` logged up to this step."""
        path = self.path / "trainer_state.json"
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.path} has no trainer_state.json, so its learning rate is not known: pass weights=, one for "
                "each checkpoint."
            )
        state = read_json(path.resolve())  # in the cache of a hub, files are links
        try:
            logged = [
                (int(entry["step"]), float(entry["learning_rate"]))
                for entry in state.get("log_history", [])
                if "learning_rate" in entry
            ]
            step = int(state.get("global_step", logged[-1][0] if logged else 0))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise damaged(path, error) from None
        if not logged:
            raise ValueError(
                f"{path} logs no learning rate up to step {step}: train with logging_steps no "
                "larger than save_steps, or pass weights=, one for each checkpoint."
            )
        return max((entry for entry in logged if entry[0] <= step), default=logged[0])[1]

    def load(self, model: nn.Module) -> None:
        """Load the parameters into a model. Raise an error if they belong to another model."""
        model = unwrapped(model)
        adapter = next((self.path / name for name in _ADAPTER if (self.path / name).is_file()), None)
        if adapter is not None:
            load_adapter(model, self.path, read_tensors(adapter))
            return
        if is_peft(model):
            raise FileNotFoundError(
                f"{self.path} has no adapter ({' or '.join(_ADAPTER)}), and the model is a PEFT model: pass "
                "checkpoints of its training."
            )
        state = self._state()
        check_fits(model.state_dict(), state, f"{self.path} is the checkpoint of another model")
        model.load_state_dict(state, strict=False)

    def _state(self) -> dict[str, Tensor]:
        """All parameters by name, from one file or from shards."""
        for name in _WHOLE:
            if (self.path / name).is_file():
                return read_tensors(self.path / name)
        for name in _SHARDED:
            if (self.path / name).is_file():
                index = read_json((self.path / name).resolve())
                try:  # file names only, so that an index cannot point to another folder
                    inside = [self.path / Path(file).name for file in sorted(set(index["weight_map"].values()))]
                except (AttributeError, KeyError, TypeError, IndexError) as error:
                    raise damaged(self.path / name, error) from None
                absent = [file.name for file in inside if not file.is_file()]
                if absent:
                    raise FileNotFoundError(f"{self.path} lacks {absent[0]!r}, which {name} lists: copy all shards.")
                return {key: value for file in inside for key, value in read_tensors(file).items()}
        held = ", ".join(sorted(file.name for file in self.path.iterdir())[:10]) or "nothing"
        raise FileNotFoundError(
            f"{self.path} holds no parameters ({', '.join((*_WHOLE, *_SHARDED, *_ADAPTER))}), but {held}."
        )

    def optimizer_state(self) -> dict[str, Any]:
        """The content of `optimizer.pt`, loaded without running code."""
        path = self.path / "optimizer.pt"
        if not path.is_file():
            raise FileNotFoundError(
                f"{self.path} has no optimizer.pt, which preconditioner='adam' needs: train with "
                "save_only_model=False, or leave out preconditioner."
            )
        return _read_pytorch(path, mmap=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a PyTorch file loaded without running code."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise damaged(path, error) from None
    return _read_pytorch(path)


def _read_pytorch(path: Path, **options: Any) -> dict[str, Any]:
    """The content of a PyTorch file, loaded without running code."""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True, **options))
    except (
        pickle.UnpicklingError,
        RuntimeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
    ) as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: Exception) -> DamagedFile:
    """Make the error for a file whose content is not what a Trainer writes."""
    reason = str(error).split("\n")[0] or type(error).__name__
    return DamagedFile(f"{path} is damaged or not what a Trainer writes ({reason}): take another checkpoint.")


def found_checkpoints(checkpoints: Any, output_dir: str | None) -> list[TrainerCheckpoint] | None:
    """The checkpoint folders, by step or in the order of the list; None for the current parameters.

    Args:
        checkpoints: ``"output_dir"`` for the checkpoints in the Trainer's output folder; a folder that holds
            ``checkpoint-*`` folders, or is a checkpoint itself; or a list of folders.
        output_dir: the Trainer's output folder, or None.
    """
    if checkpoints is None:
        return None
    if isinstance(checkpoints, str) and checkpoints == "output_dir":
        if output_dir is None:
            raise ValueError(
                "checkpoints='output_dir' stands for the Trainer's output folder, but a model is given: pass the "
                "folder, or a list of checkpoint folders."
            )
        checkpoints = output_dir
    if isinstance(checkpoints, str | PathLike):
        return _in_folder(Path(checkpoints))
    if not isinstance(checkpoints, Iterable):
        raise TypeError(f"checkpoints is a {type(checkpoints).__name__}: pass a folder, or a list of folders.")
    listed = [TrainerCheckpoint(Path(path)) for path in checkpoints]
    absent = [str(one.path) for one in listed if not one.path.is_dir()]
    if absent:
        raise FileNotFoundError(f"checkpoints names {absent[0]!r}, which is no folder.")
    if not listed:
        raise ValueError("checkpoints is empty: pass at least one folder, or None for the current parameters.")
    return listed


def _in_folder(folder: Path) -> list[TrainerCheckpoint]:
    if not folder.is_dir():
        raise FileNotFoundError(f"checkpoints={str(folder)!r} is no folder.")
    inside = [TrainerCheckpoint(path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    inside = sorted((one for one in inside if one.step is not None), key=lambda one: one.step or 0)
    if inside:
        return inside
    if any((folder / name).is_file() for name in (*_WHOLE, *_SHARDED, *_ADAPTER)):
        return [TrainerCheckpoint(folder)]
    raise FileNotFoundError(
        f"{folder} holds no checkpoint-* folders: train with save_strategy='steps' or 'epoch', or pass "
        "checkpoints=None for the current parameters."
    )
