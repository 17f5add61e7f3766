"""The readers that are tried with mutated inputs: how a folder of each is made, read, and changed by a stranger."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from ggda_trak import TRAKer
from ggda_transformers.adam import AdamTracIn, Momentum
from ggda_transformers.checkpoints import TrainerCheckpoint
from ggda_transformers.tracked_sums import TrackedSums
from safetensors.torch import save_file

from benchmarks.data import checksums, folders, formats
from benchmarks.results import ResultFolder, read_config, read_rows
from ggda_ext import Attribution, Groups
from ggda_ext.results import MethodFacts, saving
from ggda_ext.storage.folder import Store
from tests.benchmarks import data_cases

PIECES = (
    b"\xff" * 8,
    b"\0" * 16,
    b"[" * 5_000,
    b"-1",
    b"99999999999999999999",
    b"\x93NUMPY",
    b"PK\3\4",
    b"null",
    b"../../x",
)
STRANGE = (
    None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "", "x", "float64", "int16", "complex64", "bool", "quint8", [],
    [1], [[1]], {}, [6], [3, 2], [2, 3, 1], [0], [0, 10**15], {"tuple": 1}, {"date": "x"}, {"datetime64": ["x", "D"]},
    {"a": {"b": 1}},
)  # fmt: skip


def mutate(folder: Path, draw: random.Random, outside: Path) -> None:
    """Change one file of a folder, or put something else in its place, or in the way of its next version."""
    path = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    if draw.random() < 0.08:
        if draw.random() < 0.3:
            path = path.with_name(f"{path.name}.part")
        path.unlink(missing_ok=True)
        draw.choice([lambda: path.symlink_to(outside), lambda: os.mkfifo(path), path.mkdir])()
        return
    content = bytearray(path.read_bytes())
    for _ in range(draw.randint(1, 3)):
        at, length = draw.randrange(len(content) + 1), draw.choice([1, 1, 4, 64, 1_000])
        kind = draw.randrange(6)
        if kind == 0 and content:
            content[at % len(content)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            del content[at : at + length]
        elif kind == 3:
            content[at:at] = draw.choice(PIECES)
        elif kind == 4:
            content[at : at + length] = draw.randbytes(length)
        else:
            content[at:at] = content[at : at + length]
    path.write_bytes(content)


@dataclass(frozen=True)
class Reader:
    """Something that reads a folder.

    Attributes:
        make: fills an empty folder.
        read: what the folder holds, by name; entries may be missing, but not others.
        forge: changes the content and its checksum, as a stranger would, instead of single bytes; such content may be
            accepted.
    """

    make: Callable[[Path], Any]
    read: Callable[[Path], dict[str, Any]]
    forge: Callable[[Path, random.Random], None] | None = None


def make_store(folder: Path) -> None:
    with Store(folder, {"seed": 0, "sums": [1.0, 2.0]}) as store:
        store.save("a", np.arange(12.0).reshape(3, 4))
        store.part("checkpoint-000", {"values": "a"}).save("b", np.arange(5, dtype=np.int8))


def read_store(folder: Path) -> dict[str, Any]:
    with Store(folder, {"seed": 0, "sums": [1.0, 2.0]}) as store:
        both = (store, store.part("checkpoint-000", {"values": "a"}))
        return {name: np.array(arrays.load(name)) for arrays in both for name in arrays.names if name in arrays}


@cache
def trak_case() -> SimpleNamespace:
    """A task so small that a mutation costs little more than reading the folder."""
    torch.manual_seed(0)
    x, y = torch.randn(27, 3), torch.randint(0, 2, (27,))
    model = nn.Linear(3, 2).eval()
    return SimpleNamespace(model=model, state=copy.deepcopy(model.state_dict()), train=(x[:24], y[:24]),
                           targets=(x[24:], y[24:]))  # fmt: skip


def traker(folder: Path) -> Any:
    case = trak_case()
    made = TRAKer(case.model, "image_classification", 24, save_dir=folder, groups=np.arange(24) % 5, device="cpu",
                  proj_dim=8, use_half_precision=False, logging_level=100)  # fmt: skip
    made.load_checkpoint(case.state, 0)
    return made


def featurize(made: Any, batches: int) -> None:
    for at in np.arange(24).reshape(3, 8)[:batches]:
        made.featurize([part[at] for part in trak_case().train], inds=at)


def make_trak(folder: Path) -> None:
    made = traker(folder)
    featurize(made, 2)
    made._commit()
    made._sums.store.close()


def read_trak(folder: Path) -> dict[str, Any]:
    made, case = traker(folder), trak_case()
    try:
        featurize(made, 3)
        made.finalize_features()
        made.start_scoring_checkpoint("test", case.state, 0, num_targets=3)
        made.score(case.targets, num_samples=3)
        return {"scores": np.round(np.array(made.finalize_scores("test")), 4)}
    finally:
        made._sums.store.close()


def make_rows(folder: Path) -> None:
    made = ResultFolder.open("check", {"command": "check", "scale": "quick"}, base=folder)
    for number in range(4):
        made.append({"key": f"row {number}", "value": number / 3, "text": "é|x"})
    made.path.rename(folder / "run")
    assert made._lock is not None
    made._lock.release()


def read_rows_of(folder: Path) -> dict[str, Any]:
    config = read_config(folder / "run")
    rows = {row["key"]: row for row in read_rows(folder / "run")}
    return {"command": config["command"], **rows}


def make_result(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    method = MethodFacts("tracin", "rank", {"checkpoints": 1}, seconds=0.5)
    groups = Groups(["north", "south", ("east", 3)] * 4)
    Attribution.of(torch.randn(2, 3, generator=generator), groups, method=method, test_axis=0).save(folder / "result")


def read_result(folder: Path) -> dict[str, Any]:
    found = Attribution.load(folder / "result")
    scores = found.scores.double().numpy() if found.scores.is_floating_point() else found.scores.numpy()
    return {"scores": scores, "labels": found.groups.labels, "text": f"{found} {found.method}"}


def forge_result(folder: Path, draw: random.Random) -> None:
    """Other values in places of the JSON, other numbers behind it."""
    path, start = folder / "result", len(saving.MAGIC) + 24
    content = path.read_bytes()
    end = start + int.from_bytes(content[start - 8 : start], "little")
    header, numbers = json.loads(content[start:end]), content[end:]
    header["result"] = json.loads(header["result"])
    for _ in range(draw.randint(1, 2)):
        *way, last = draw.choice(places(header))
        holder: Any = header
        for key in way:
            holder = holder[key]
        holder[last] = copy.deepcopy(draw.choice(STRANGE))
    if draw.random() < 0.3:
        numbers = draw.randbytes(draw.randrange(len(numbers) + 1))
    header["result"] = json.dumps(header["result"])
    text = json.dumps(header).encode()
    rest = len(text).to_bytes(8, "little") + text + numbers
    path.write_bytes(saving.MAGIC + xxhash.xxh3_128_digest(rest) + rest)


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The ways to all entries inside of a JSON value."""
    keys: Any = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((*way, key), *places(value[key], (*way, key)))]


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))


def make_checkpoint(folder: Path) -> None:
    """What a Trainer leaves behind, with parameters in two shards."""
    model = small_network()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    history = [{"step": 1, "learning_rate": 0.1}, {"step": 2, "learning_rate": 0.05}, {"step": 2, "loss": 1.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2, "log_history": history}))
    state = model.state_dict()
    shards = {name: f"model-0000{1 + (name[0] == '1')}-of-00002.safetensors" for name in state}
    for shard in set(shards.values()):
        save_file({name: state[name] for name in state if shards[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


def read_checkpoint(folder: Path) -> dict[str, Any]:
    model, checkpoint, adam = small_network(), TrainerCheckpoint(folder), AdamTracIn(None)
    adam.load(model, checkpoint)
    divisors = adam.divisors(dict(model.named_parameters()))
    return {"rate": checkpoint.learning_rate, **{name: value.detach().numpy() for name, value in divisors.items()}}


def forge_checkpoint(folder: Path, draw: random.Random) -> None:
    """Any change, as a Trainer's files have no checksums: other numbers may be read, nothing else may happen."""
    mutate(folder, draw, folder.parent / "outside.txt")


TRAINER = SimpleNamespace(), SimpleNamespace(global_step=3, is_world_process_zero=True)


def make_tracker(folder: Path) -> None:
    arguments, state = TRAINER
    arguments.output_dir = folder
    (folder / "checkpoint-3").mkdir()
    directions = Momentum(torch.arange(8.0).reshape(2, 4), 1.9, 3)
    sums = TrackedSums(Groups(["north", "south", "east"]), steps=2, seconds=0.5, momentum=directions)
    sums.add(torch.arange(6.0).reshape(2, 3), [0, 1, 2])
    sums.save(arguments, state)


def read_tracker(folder: Path) -> dict[str, Any]:
    sums = TrackedSums(Groups(["north", "south", "east"]), momentum=Momentum())
    sums.resume(folder / "checkpoint-3", TRAINER[1])
    kept = {"directions": sums.momentum.total.numpy(), "weight": sums.momentum.weight, "step": sums.momentum.step}
    return kept | {"scores": sums.scores.numpy(), "steps": sums.steps, "seconds": sums.seconds}


def data_reader(name: str, layout: str) -> Reader:
    def make(folder: Path) -> None:
        data_cases.WRITERS[layout](folder, data_cases.tiny(name))

    def read(folder: Path) -> dict[str, Any]:
        found = folders.read(name, folder)
        if found is None:
            return {}
        whole = data_cases.tiny(name)
        with pytest.MonkeyPatch.context() as patch:
            data_cases.publish(patch, name, whole)
            if name == "qnli":
                rows = [whole[f"train_{field}"] for field in ("question", "sentence", "label")]
                patch.setattr(checksums, "QNLI_TRAIN_ROWS", len(rows[0]))
                patch.setattr(checksums, "QNLI_TRAIN_MD5", hashlib.md5(formats.glue_tsv_bytes(*rows)).hexdigest())
            checks = checksums.verify(name, found[0])
        some = any("training rows, none of them in dev" in check for check in checks)  # allowed, and said
        return {part: values.tolist() for part, values in found[0].items() if not (some and part.startswith("train"))}

    return Reader(make, read)


READERS = {
    "store": Reader(make_store, read_store),
    "TRAK folder": Reader(make_trak, read_trak),
    "result rows": Reader(make_rows, read_rows_of),
    "attribution": Reader(make_result, read_result),
    "attribution, forged": Reader(make_result, read_result, forge_result),
    "Trainer's folder": Reader(make_checkpoint, read_checkpoint, forge_checkpoint),
    "tracker": Reader(make_tracker, read_tracker),
    **{f"{name}, {layout}": data_reader(name, layout) for name, layout in data_cases.LAYOUTS},
}
