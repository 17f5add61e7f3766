"""How outputs move along parameter directions: Φ(x) = J_f(x) V.

Along directions V = [v_1 … v_r] the outputs are f(x; θ + V d) ≈ f(x; θ) + Φ(x) d. A forward-mode product with one
direction takes two forward passes; directions go through the model in chunks that share the pass at θ. If points use
each parameter often (tokens, places of an image) and outputs are few, it is less work to form every point's gradient
of each output and multiply it with all directions (`are_rows_less_work`). Features that do not fit the memory budget
are kept in a file.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from ggda_ext.data import IndexedData, batch_length, to_device
from ggda_ext.gradients import GroupGradients
from ggda_ext.gradients.plan import Facts
from ggda_ext.gradients.proof.findings import Apart
from ggda_ext.gradients.strategies import forward
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import BatchLoss, model_output, output_of
from ggda_ext.model import ParameterSpace, called_with
from ggda_ext.sharing import adding_up, in_order, my_share, progress

_CHUNK_BYTES = 64 * 2**20  # tangents of one batch along one chunk of directions
_LOOKED_AT = 16  # examples that are looked at first to see whether outputs are linear in the parameters
_ROUNDING = {torch.float64: 1e-7, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Features:
    """Outputs of a data set and how they move.

    Attributes:
        outputs: the model's own outputs `[N]` or `[N, C]`; outputs of half precision are float32 here.
        targets: the target of every example, or None.
        tangents: Φ `[N, C, r]`, in the precision of `outputs`; in a file if they do not fit the memory budget.
    """

    outputs: Tensor
    targets: Tensor | None
    tangents: Tensor

    def moved(self, coefficients: Tensor) -> Tensor:
        """Return linearised outputs `[N]` or `[N, C]` at θ + V d for one d `[r]`; exactly the model's own for d = 0."""
        flat = self.tangents.reshape(-1, self.tangents.shape[2])
        step = flat @ coefficients.to(flat)
        return self.outputs + step.view(self.outputs.shape)


class Linearizer:
    """Computes how the outputs of a model move along fixed directions.

    Args:
        space: the model and the parameters that the gradients are taken for.
        directions: V as rows `[r, p]`.
        batch_size: examples per batch.
        memory_budget: bytes of features kept in memory; features that need more go to a file.
        folder: where to put such files; a temporary folder if left out.
        show_progress: whether to show a progress bar; None shows it on passes over 5 seconds.
        by_rows: whether to form gradients of outputs instead of forward-mode products.
    """

    def __init__(
        self,
        space: ParameterSpace,
        directions: Tensor,
        batch_size: int = 1024,
        memory_budget: int = 2**30,
        folder: Path | None = None,
        show_progress: bool | None = False,
        by_rows: bool = False,
    ) -> None:
        self.space, self.batch_size, self.memory_budget, self.folder = space, batch_size, memory_budget, folder
        self.rank, self.show_progress, self.by_rows = len(directions), show_progress, by_rows
        self.directions = directions
        self._moves = {name: space.part(directions, value).to(value) for name, value in space.parameters.items()}
        self._mapped = True
        self._files: list[tempfile.TemporaryDirectory] = []

    @torch.no_grad()
    def features(self, data: IndexedData) -> Features:
        """Return outputs, targets and tangents of all examples; if there are several ranks, each computes a share."""
        if data.n is None:
            raise TypeError(f"{data.name} is a stream without a length: pass a map-style data set to what-if.")
        output, target = model_output(self.space.model, to_device(data.first(1), self.space.device))
        output = at_least_single(output)
        outputs = output.new_zeros(data.n, *output.shape[1:])
        targets: list[tuple[Tensor, Tensor]] | None = None if target is None else []
        tangents = self._empty((data.n, output[0].numel(), self.rank), output)
        title = "outputs" if self.by_rows else f"outputs along {self.rank} directions"
        apart = Apart(self.space.model, output_of, data.name, what="value")
        with (
            adding_up(outputs, *([] if self.by_rows else [tangents]), same={"the number of examples": data.n}),
            progress(len(my_share(data.n)), title, self.show_progress) as bar,
        ):
            for indices, batch in data.my_share(self.batch_size, whole_batches=True):
                at, batch = slice(int(indices[0]), int(indices[-1]) + 1), to_device(batch, self.space.device)
                if self.by_rows:
                    output, target = model_output(self.space.model, batch)
                else:
                    output, target, tangents[at] = self.of_batch(batch)
                apart.check(batch, output)
                outputs[at] = output
                if targets is not None and target is not None:
                    targets.append((torch.as_tensor(indices), target))
                bar.update(len(indices))
        check_finite(outputs, "outputs", data.name)
        for column in range(tangents.shape[1]) if self.by_rows else ():
            tangents[:, column] = self._of_output(data, column).T.to(tangents)
        check_finite(tangents, "features", data.name)
        return Features(outputs, None if targets is None else in_order(targets), tangents)

    @torch.enable_grad()
    def _of_output(self, data: IndexedData, column: int) -> Tensor:
        """Return how one output of every example moves along the directions `[r, N]`; ranks share the work."""

        def outputs(model: nn.Module, batch: Any) -> Tensor:
            output, _ = model_output(model, batch)
            return output.reshape(len(output), -1)[:, column]

        own = GroupGradients(
            self.space.model, BatchLoss(outputs), data, Groups.singletons(data.n or 0),
            parameters=self.space.parameters.values(), batch_size=self.batch_size,
            memory_budget=self.memory_budget, show_progress=self.show_progress,
        )  # fmt: skip
        return own.scores(self.directions)

    def of_batch(self, batch: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return outputs, targets and tangents `[b, C, r]` of one batch."""
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            output, target = model_output(self.space.model, batch)
            output = output.detach()
            moves = output.new_empty(len(output), output[0].numel(), self.rank)
            step = self._chunk(batch) if self._mapped else 1
            for low in range(0, self.rank, step):
                part = {name: value[low : low + step] for name, value in self._moves.items()}
                moves[:, :, low : low + step] = self._pushed(batch, part).reshape(-1, *moves.shape[:2]).permute(1, 2, 0)
        return output, target, moves

    def _pushed(self, batch: Any, part: dict[str, Tensor]) -> Tensor:
        """Return tangents `[directions, b, …]` along some directions, all at once if the model allows it."""
        values = {name: value.detach() for name, value in self.space.parameters.items()}

        def output(given: dict[str, Tensor]) -> Tensor:
            with torch.enable_grad(), forward.AsBackward(batch_length(batch)):
                return called_with(self.space.model, given, batch, function=output_of)

        def along(move: dict[str, Tensor]) -> Tensor:
            return jvp(output, (values,), (move,))[1]

        if self._mapped:
            try:
                return vmap(along)(part)
            except RuntimeError:  # e.g. an operation in place, whose tangent has one dimension more
                self._mapped = False
        count = len(next(iter(part.values())))
        return torch.stack([along({name: value[j] for name, value in part.items()}) for j in range(count)])

    def _chunk(self, batch: Any) -> int:
        """Number of directions that go through the model at once."""
        bytes_each = _activation_bytes(self.space.model, batch)
        return int(max(1, min(self.rank, _CHUNK_BYTES // max(1, bytes_each))))

    def _empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = int(np.prod(shape)) * like.element_size()
        if size <= self.memory_budget or like.device.type != "cpu":
            return like.new_zeros(shape)
        self._files.append(tempfile.TemporaryDirectory(prefix="features-", dir=self.folder))
        path = Path(self._files[-1].name) / "tangents"
        return torch.from_file(str(path), shared=True, size=int(np.prod(shape)), dtype=like.dtype).view(shape)


def are_rows_less_work(facts: Facts, outputs: int, directions: int) -> bool:
    """Whether gradients of outputs are clearly less work than forward-mode products, both counted in multiplications.

    Gradients of one output take a forward and a backward pass, and a product with every direction: over all parameters,
    or over the layers' inputs. Forward mode takes twice as many multiplications as the right side of the inequality, so
    gradients have to be clearly less work.
    """
    work = facts.work_per_point
    return outputs * (3 * work + directions * min(work, facts.parameters)) < directions * work


def at_least_single(values: Tensor) -> Tensor:
    """Return values of half precision as float32; leave other values unchanged."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def rounding(*precisions: torch.dtype) -> float:
    """Largest relative difference that rounding may explain, for the lowest of some precisions."""
    return max(_ROUNDING.get(precision, _ROUNDING[torch.float32]) for precision in precisions)


@torch.no_grad()
def is_linear(space: ParameterSpace, data: IndexedData, batch_size: int) -> bool:
    """Whether the outputs of all examples are linear in the parameters.

    All parameters are moved along a random line, by -1, 0 and 2 steps: an odd function might look linear at -1, 0 and
    1, and a ReLU at 0, 1 and 2. A few examples are looked at first, as most models show there that they are not linear.
    """
    generator, values = torch.Generator().manual_seed(0), space.parameters
    steps = {name: torch.randn(value.shape, generator=generator).to(value) for name, value in values.items()}
    batches = chain([data.first(_LOOKED_AT)], (batch for _, batch in data.sequential(batch_size)))
    return all(_is_linear_along(space, steps, to_device(batch, space.device)) for batch in batches)


def _is_linear_along(space: ParameterSpace, steps: dict[str, Tensor], batch: Any) -> bool:
    """Whether the outputs of a batch are linear along one line of parameters."""
    values = space.parameters
    back, here, forth = (
        at_least_single(
            called_with(
                space.model, {name: value + times * steps[name] for name, value in values.items()}, batch,
                function=output_of,
            )
        )
        for times in (-1, 0, 2)
    )  # fmt: skip
    size = 0.3 * rounding(space.dtype, here.dtype) * (1 + here.abs().max() + forth.abs().max())
    return bool((forth + 2 * back - 3 * here).abs().max() <= size)


def check_forward_mode(linearizer: Linearizer, data: IndexedData) -> None:
    """Compare forward-mode products of a few examples with a backward pass; raise an error if they differ."""
    spread = np.unique(np.linspace(0, (data.n or 1) - 1, 4).astype(int))
    space, batch = linearizer.space, to_device(next(iter(data.batches([spread]))), linearizer.space.device)
    try:
        output, _, moves = linearizer.of_batch(batch)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"the model cannot be differentiated in forward mode ({str(error).splitlines()[0]}): what-if needs that; "
            "choose other layers with parameters=."
        ) from error
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
    with space.require_gradients(of_chosen=True), sdpa_kernel(SDPBackend.MATH):
        again, _ = model_output(space.model, batch)
        parts = space.gradients_of((again * cotangent).sum())
    row = space.flatten(parts, torch.zeros(space.size, dtype=torch.float64, device=space.device))
    flat = torch.cat([value.reshape(linearizer.rank, -1) for value in linearizer._moves.values()], 1).double()
    expected = flat @ row
    found = torch.einsum("bcr,bc->r", moves.double(), cotangent.reshape(len(output), -1).double())
    if bool(
        ((found - expected).abs() > rounding(space.dtype, output.dtype) * (row.norm() * flat.norm(dim=1) + 1e-30)).any()
    ):
        raise ValueError(
            "forward-mode products of the model differ from its gradients (an operation that hides its derivative?), "
            "so what-if would be wrong: choose other layers with parameters=."
        )


def _activation_bytes(model: nn.Module, batch: Any) -> int:
    """Bytes of the outputs of all leaf modules for a batch."""
    seen = 0

    def count(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal seen
        if isinstance(output, Tensor):
            seen += output.numel() * output.element_size()

    leaves: list[nn.Module] = [module for module in model.modules() if next(module.children(), None) is None]
    handles = [module.register_forward_hook(count) for module in leaves]
    try:
        model_output(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def check_finite(values: Tensor, what: str, name: str) -> None:
    """Raise an error if values of examples `[N, …]` hold NaN or infinite numbers."""
    finite = torch.isfinite(values.flatten(1)).all(1) if values.dim() > 1 else torch.isfinite(values)
    if not bool(finite.all()):
        bad = (~finite).nonzero()[:, 0]
        raise ValueError(
            f"{name} gives NaN or infinite {what} for {len(bad)} of {len(values)} examples, first {int(bad[0])}: "
            "look at these inputs and at the model's parameters."
        )
