"""EK-FAC: the Gauss–Newton matrix of each layer, in the basis in which a Kronecker product is diagonal.

Let a be the input of a Linear or Conv layer, and d the gradient at its output for a random cotangent, so that d dᵀ is
on average the Gauss–Newton matrix of this output. The basis U_a, U_d of the layer consists of the eigenvectors of
E a aᵀ and of E d dᵀ. The curvature in this basis is taken as diagonal: E (U_dᵀ d aᵀ U_a)², the mean squared gradient of
a point. Other layers (norms, embeddings), and layers that share a parameter, have a diagonal curvature in their own
parameters. One pass over a sample finds the bases, one the diagonals. A side with more than `LARGEST` entries (the
vocabulary of a language model) gets no new basis, as if its factor were diagonal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ggda_ext.curvature.sampled import as_cross_entropy
from ggda_ext.data import IndexedData, to_device
from ggda_ext.gradients import GroupGradients
from ggda_ext.gradients.layers import Layer
from ggda_ext.gradients.observation import Observer
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import BatchLoss, OutputLoss, ignored_targets, model_output
from ggda_ext.sharing import add_up

LARGEST = 4096
"""Most entries of a layer's input or output for which a basis is computed; the cost grows with the cube of them."""
_AT_ONCE = 2**23  # most numbers in the gradients that are formed at a time


@dataclass
class _Factors:
    """Sums over points for the parameters of one layer.

    Attributes:
        left: first Σ d dᵀ `[out, out]`, later its eigenvectors; None for a side that gets no new basis.
        right: first Σ a aᵀ `[in, in]`, later its eigenvectors; None for a side that gets no new basis.
        squares: first Σ (gradient in the basis)² `[out, in]`, later its mean.
    """

    left: Tensor | None
    right: Tensor | None
    squares: Tensor


class Kronecker:
    """The curvature of the mean training loss on a sample, diagonal in a basis of each layer.

    Args:
        provider: the model, its loss and the training data.
        sample: the points for the curvature.
        seed: seed of the random cotangents.
    """

    def __init__(self, provider: GroupGradients, sample: IndexedData, seed: int) -> None:
        self.space, self.n = provider.space, sample.n or 0
        self.dtype = torch.promote_types(self.space.dtype, torch.float32)
        """The dtype of products; sums over batches are kept in double precision."""
        self.empirical, source = _with_cotangents(provider, sample, seed)
        self.matrices: dict[str, tuple[Layer, _Factors]] = {}
        self.diagonals: dict[int, Tensor] = {}
        calls = _Calls(self._add_factors)
        for _ in source.observe(lambda _: calls):
            calls.end_batch()
        shared = calls.families
        self.matrices = {name: kept for name, kept in self.matrices.items() if name not in shared}
        for _, found in self.matrices.values():
            found.left, found.right = (self._eigenvectors(part) for part in (found.left, found.right))
        calls = _Calls(self._add_squares, {name: name for name in calls.several} | shared)
        for _ in source.observe(lambda _: calls):
            calls.end_batch()
        for _, found in self.matrices.values():
            found.squares = add_up(found.squares) / self.n
        self.diagonals = {key: add_up(value) / self.n for key, value in self.diagonals.items()}

    def scale(self) -> float:
        """Return tr H² / tr H."""
        total = sum(float(part.sum()) for part in self._eigenvalues)
        return sum(float(part.square().sum()) for part in self._eigenvalues) / total if total > 0 else 0.0

    @property
    def _eigenvalues(self) -> list[Tensor]:
        """The curvature in the basis of every layer, and of parameters without one."""
        return [found.squares for _, found in self.matrices.values()] + list(self.diagonals.values())

    def solve(self, vectors: Tensor, damping: float) -> Tensor:
        """Return (H + damping)⁻¹ times `vectors [m, p]`.

        Raises:
            ValueError: the damping is 0 and the curvature is 0 somewhere, as it is for units that are never active.
        """
        if not damping and not self._is_positive():
            raise ValueError(
                "damping=0: the curvature is 0 for some parameters, so it has no inverse: pass a positive damping, or "
                "leave it out."
            )
        result = vectors.double() / damping if damping else vectors.double()
        for parameter in self.space.parameters.values():
            if id(parameter) in self.diagonals:
                part = self.space.part(vectors, parameter).double()
                self.space.part(result, parameter).copy_(part / (self.diagonals[id(parameter)] + damping))
        for layer, found in self.matrices.values():
            turned = _turned(self._matrix(vectors, layer), found.left, found.right)
            back = (None if side is None else side.mT for side in (found.left, found.right))
            self._write(result, layer, _turned(turned / (found.squares + damping), *back))
        return result.to(vectors)

    def _is_positive(self) -> bool:
        """Whether the curvature is above 0 for every parameter."""
        known = sum(part.numel() for part in self._eigenvalues)
        return known == self.space.size and all(bool((part > 0).all()) for part in self._eigenvalues)

    def _matrix(self, rows: Tensor, layer: Layer) -> Tensor:
        """Return the columns of rows that belong to a layer, weight and bias side by side `[m, out, in (+ 1)]`."""
        parts = []
        if layer.weight is not None:
            weight = self.space.part(rows, layer.weight).double()
            parts.append(weight.mT if _transposed(layer) else weight.flatten(2))
        if layer.bias is not None:
            parts.append(self.space.part(rows, layer.bias).double()[..., None])
        return torch.cat(parts, 2)

    def _write(self, rows: Tensor, layer: Layer, matrix: Tensor) -> None:
        if layer.weight is not None:
            part = self.space.part(rows, layer.weight)
            wide = (
                matrix[..., : layer.weight[0].numel()] if not _transposed(layer) else matrix[..., : len(layer.weight)]
            )
            part.copy_((wide.mT if _transposed(layer) else wide).reshape(part.shape))
        if layer.bias is not None:
            self.space.part(rows, layer.bias).copy_(matrix[..., -1])

    def _add_factors(self, calls: list[Call], size: int) -> None:
        layer = calls[0][0]
        if not _is_matrix(layer):
            return
        left, right = (part.flatten(0, 1).to(self.dtype) for part in _tokens(calls, size))
        if layer.name not in self.matrices:
            squares = left.new_zeros(left.shape[1], right.shape[1], dtype=torch.float64)
            empty_left, empty_right = (
                None if width > LARGEST else squares.new_zeros(width, width) for width in squares.shape
            )
            self.matrices[layer.name] = layer, _Factors(empty_left, empty_right, squares)
        found = self.matrices[layer.name][1]
        for total, part in ((found.left, left), (found.right, right)):
            if total is not None:
                total += part.T @ part

    def _eigenvectors(self, matrix: Tensor | None) -> Tensor | None:
        return None if matrix is None else torch.linalg.eigh(add_up(matrix).to(self.dtype))[1]

    def _add_squares(self, calls: list[Call], size: int) -> None:
        name = calls[0][0].name
        if name not in self.matrices:
            self._add_diagonals(calls, size)
            return
        found = self.matrices[name][1]
        left, right = _tokens(calls, size)
        left, right = (
            part.to(self.dtype) if side is None else part.to(self.dtype) @ side
            for part, side in ((left, found.left), (right, found.right))
        )
        if left.shape[1] == 1:
            found.squares += left[:, 0].square().T @ right[:, 0].square()
            return
        step = max(1, _AT_ONCE // found.squares.numel())
        for one, other in zip(left.split(step), right.split(step), strict=True):
            found.squares += torch.bmm(one.mT, other).square_().sum(0)

    def _add_diagonals(self, calls: list[Call], size: int) -> None:
        layer = calls[0][0]
        embedding, alone = layer.module, all(other is layer for other, _, _ in calls)
        if type(embedding) is nn.Embedding and layer.weight is not None and alone:
            tokens = torch.cat([a.reshape(size, -1) for _, a, _ in calls], 1)
            d = torch.cat([d.reshape(size, -1, d.shape[-1]) for _, _, d in calls], 1)
            if embedding.padding_idx is not None:
                d = d.masked_fill((tokens == embedding.padding_idx)[..., None], 0)
            _add_token_squares(self._diagonal(layer.weight), tokens, d)
            return
        for parameter, rows in _own_rows(calls, size):
            self._diagonal(parameter).add_(rows.double().square().sum(0).reshape(parameter.shape))

    def _diagonal(self, parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in self.diagonals:
            self.diagonals[id(parameter)] = torch.zeros_like(parameter, dtype=torch.float64, requires_grad=False)
        return self.diagonals[id(parameter)]


Call: TypeAlias = tuple[Layer, Tensor, Tensor]
"""A layer that was called, its input a, and the gradient d at its output."""


class _Calls(Observer):
    """Passes the calls of every layer, and the number of points of the batch, to a function.

    Args:
        tell: the function; it is told of each call by itself.
        together: layers by name that wait for the end of the batch; those with the same value are told of at once.

    Attributes:
        several: names of the layers that were called more than once in a batch.
    """

    def __init__(
        self,
        tell: Callable[[list[Call], int], None],
        together: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.tell, self._together = tell, together
        self.several, self._seen = set[str](), set[str]()
        self._layers, self._held = dict[str, Layer](), dict[str, tuple[list[Call], int]]()

    def backward(self, layer: Layer, kept: Tensor, d: Tensor, repeats: int) -> None:
        (self.several if layer.name in self._seen else self._seen).add(layer.name)
        self._layers[layer.name] = layer
        size = len(d) // repeats
        if layer.name in self._together:
            calls, _ = self._held.setdefault(self._together[layer.name], ([], size))
            calls.append((layer, kept, d.clone()))
        else:
            self.tell([(layer, kept, d)], size)

    def end_batch(self) -> None:
        for calls, size in self._held.values():
            self.tell(calls, size)
        self._held.clear()
        self._seen.clear()

    @property
    def families(self) -> dict[str, str]:
        """The layers that share parameters with others, by name, each with the name of one of those it belongs to."""
        family: dict[int, str] = {}
        own = {
            name: [id(value) for value in (layer.weight, layer.bias) if value is not None]
            for name, layer in self._layers.items()
        }
        for name, keys in own.items():
            joined = {family[key] for key in keys if key in family}
            family = {key: name if other in joined else other for key, other in family.items()}
            family |= dict.fromkeys(keys, name)
        members = Counter(family[keys[0]] for keys in own.values())
        return {name: family[keys[0]] for name, keys in own.items() if members[family[keys[0]]] > 1}


def _is_matrix(layer: Layer) -> bool:
    """Whether a layer multiplies with a matrix, token by token or patch by patch."""
    module = layer.module
    return isinstance(module, nn.Linear) or _transposed(layer) or (isinstance(module, nn.Conv2d) and module.groups == 1)


def _transposed(layer: Layer) -> bool:
    return type(layer.module).__name__ == "Conv1D"


def _tokens(calls: list[Call], size: int) -> tuple[Tensor, Tensor]:
    """Return output gradients and inputs `[size, t, …]` of all calls of a layer; image patches are tokens."""
    if len(calls) == 1:
        return _tokens_of_call(*calls[0], size)
    left, right = zip(*(_tokens_of_call(*call, size) for call in calls), strict=True)
    return torch.cat(left, 1), torch.cat(right, 1)


def _tokens_of_call(layer: Layer, a: Tensor, d: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return output gradients and inputs `[size, t, …]` of one call; the bias has an input of one."""
    module = layer.module
    if isinstance(module, nn.Conv2d):
        padded = F.pad(a, module._reversed_padding_repeated_twice, mode=_padding(module))
        a = F.unfold(padded, module.kernel_size, module.dilation, 0, module.stride).mT
        d = d.flatten(2).mT
    left, right = d.reshape(size, -1, d.shape[-1]), a.reshape(size, -1, a.shape[-1])
    if layer.weight is None:
        right = right[..., :0]
    if layer.bias is not None:
        right = torch.cat([right, right.new_ones(*left.shape[:2], 1)], 2)
    return left, right


def _padding(module: nn.Conv2d) -> str:
    return "constant" if module.padding_mode == "zeros" else module.padding_mode


def _own_rows(calls: list[Call], size: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter of layers of any kind with the gradients of the points `[b, …]`, a few points at a time.

    The gradient of a parameter is the sum over all calls of all layers that use it.
    """
    step = max(1, 2**22 // max(1 if layer.weight is None else layer.weight.numel() for layer, _, _ in calls))
    for low in range(0, size, step):
        found: dict[nn.Parameter, Tensor] = {}
        for layer, a, d in calls:
            repeats = len(d) // size
            cut = slice(low * repeats, (low + step) * repeats)
            starts = list(range(0, len(d[cut]) + 1, repeats))
            rows = {}
            if layer.bias is not None:
                rows[layer.bias] = layer.rule.bias_rows(layer.module, d[cut], starts)
            if layer.weight is not None:
                rows[layer.weight] = d.new_empty(len(starts) - 1, *layer.weight.shape)
                layer.rule.weight_rows(layer.module, a[cut], d[cut], starts, rows[layer.weight])
            for parameter, row in rows.items():
                found[parameter] = found[parameter] + row if parameter in found else row
        yield from found.items()


def _turned(matrices: Tensor, left: Tensor | None, right: Tensor | None) -> Tensor:
    """Return leftᵀ times matrices `[m, out, in]` times right; None stands for the identity."""
    turned = matrices if left is None else left.mT.double() @ matrices
    return turned if right is None else turned @ right.double()


def _add_token_squares(total: Tensor, tokens: Tensor, d: Tensor) -> None:
    """Add the squared gradients of points with `tokens [b, t]` for an embedding; only their tokens' rows change."""
    places = torch.arange(len(tokens), device=tokens.device)[:, None] * len(total) + tokens
    taken, which = places.flatten().unique(return_inverse=True)
    rows = d.new_zeros(len(taken), d.shape[-1], dtype=torch.float64).index_add_(0, which, d.flatten(0, 1).double())
    total.index_add_(0, taken % len(total), rows.square_())


def _with_cotangents(provider: GroupGradients, sample: IndexedData, seed: int) -> tuple[bool, GroupGradients]:
    """Return False and point gradients of ⟨output, random cotangent⟩; for an unknown loss, True and its gradients."""
    singles = Groups.singletons(sample.n or 0)
    loss_fn = provider.loss.loss_fn if isinstance(provider.loss, OutputLoss) else None
    generator, parts = torch.Generator().manual_seed(seed), []
    if loss_fn is not None:
        with torch.no_grad():
            for _, batch in sample.sequential(provider.batch_size):
                outputs, targets = model_output(provider.model, to_device(batch, provider.space.device))
                found = _cotangents(as_cross_entropy(loss_fn, outputs) or loss_fn, outputs.cpu(), generator)
                if found is None:
                    break
                ignored = ignored_targets(loss_fn, targets)
                parts.append(found if ignored is None else found.masked_fill(ignored.cpu()[:, None], 0))
    if not parts:
        return True, provider.on(sample, singles)

    def product(model: nn.Module, batch: Any) -> Tensor:
        examples, cotangents = batch
        outputs, _ = model_output(model, examples)
        return (outputs * cotangents.to(outputs)).flatten(1).sum(1)

    return False, GroupGradients(
        provider.model, BatchLoss(product), _WithCotangents(sample, torch.cat(parts)), singles,
        parameters=provider.space.parameters.values(), memory_budget=provider.memory_budget,
        batch_size=provider.batch_size, show_progress=provider.show_progress,
    )  # fmt: skip


class _WithCotangents(IndexedData):
    """Data whose points come with a cotangent of their outputs: batches are ``(batch, cotangents [b, …])``."""

    def __init__(self, data: IndexedData, cotangents: Tensor) -> None:
        self.data, self.cotangents = data, cotangents
        self.name, self.n = data.name, data.n

    def batches(self, index_batches: Iterable[Sequence[int] | np.ndarray]) -> Iterator[Any]:
        """Yield one batch for every sequence of indices, in the same order."""
        asked, again = tee(index_batches)
        for indices, batch in zip(asked, self.data.batches(again), strict=True):
            yield batch, self.cotangents[torch.from_numpy(np.asarray(indices).astype(np.int64))]


def _cotangents(loss_fn: Any, z: Tensor, random: torch.Generator) -> Tensor | None:
    """Return random cotangents of outputs z whose covariance is the loss's second derivative; None if it is unknown."""
    plain = getattr(loss_fn, "weight", None) is None and getattr(loss_fn, "label_smoothing", 0.0) == 0.0
    if type(loss_fn) is nn.CrossEntropyLoss and plain and z.dim() == 2:
        p = z.softmax(1)
        drawn = torch.rand(len(p), 1, generator=random, dtype=torch.float64)  # multinomial depends on the batch size
        label = (p.double().cumsum(1) <= drawn).sum(1).clamp(max=p.shape[1] - 1)
        return p - F.one_hot(label, p.shape[1])
    of_one = max(1, z[0].numel()) if getattr(loss_fn, "reduction", "") == "mean" else 1  # outputs that share a mean
    if type(loss_fn) is nn.BCEWithLogitsLoss and plain and loss_fn.pos_weight is None:
        return (z.sigmoid() - torch.bernoulli(z.sigmoid(), generator=random)) / of_one**0.5
    if type(loss_fn) is nn.MSELoss:
        return (torch.randint(0, 2, z.shape, generator=random) * 2 - 1).to(z) * (2 / of_one) ** 0.5
    return None
