"""Models that treat a batch otherwise only now and then: in large batches, or for rare examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CLASSES = 6, 3
LARGE = 20  # examples of a batch
RARE = 1.9  # the first feature of a rare example


class Body(nn.Module):
    """A small network whose forward pass subclasses change."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, 5), nn.Linear(5, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).tanh())


class Swaps(Body):
    """Swaps two rows in large batches, and puts the outputs back."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.arange(len(x))
        if len(x) >= LARGE:
            order[3], order[7] = 7, 3
        return self.body(x[order])[order.argsort()]


class Rolls(Body):
    """The same functions for every batch; only for large ones do they move rows."""

    def forward(self, x: Tensor) -> Tensor:
        by = len(x) // LARGE
        return self.body(x.roll(by, 0)).roll(-by, 0)


class Joins(Body):
    """Cuts large batches and joins them in another order."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) < LARGE:
            return self.body(x)
        out = self.body(torch.cat([x[2:], x[:2]]))
        return torch.cat([out[-2:], out[:-2]])


class Multiplies(Body):
    """Moves rows by a product with a permutation matrix."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.eye(len(x), dtype=x.dtype)
        if len(x) >= LARGE:
            order = order.flip(0)
        return order.T @ self.body(order @ x)


class SortsColumns(Body):
    """Sorts batches that hold a rare example, turned on their side."""

    def forward(self, x: Tensor) -> Tensor:
        order = (x[:, 0] * (x[:, 0] > RARE)).argsort(stable=True)
        return self.body(x.T[:, order].T).T[:, order.argsort()].T


class SwapsColumns(Body):
    """Swaps two rows of large batches, turned on their side, by the same functions as in small ones."""

    def forward(self, x: Tensor) -> Tensor:
        order = list(range(len(x)))
        if len(x) >= LARGE:
            order[13], order[17] = 17, 13
        return self.body(x.T[:, order].T).T[:, order].T


class SortsWhatIsRare(Body):
    """Sorts batches that hold a rare example; as by length, where most batches are sorted already."""

    def forward(self, x: Tensor) -> Tensor:
        order = (x[:, 0] * (x[:, 0] > RARE)).argsort(stable=True)
        return self.body(x[order])[order.argsort()]


class Hooks(Body):
    """A hook changes the gradients of rare examples."""

    def forward(self, x: Tensor) -> Tensor:
        h, rare = self.first(x), (x[:, :1] > RARE).to(x.dtype)
        if h.requires_grad:
            h.register_hook(lambda d: d * (1 - 0.5 * rare))
        return self.head(h.tanh())


class HooksRarely(Body):
    """A hook that only batches with a rare example are given."""

    def forward(self, x: Tensor) -> Tensor:
        h, rare = self.first(x), (x[:, :1] > RARE).to(x.dtype)
        if h.requires_grad and bool(rare.any()):
            h.register_hook(lambda d: d * (1 - 0.5 * rare))
        return self.head(h.tanh())


class StopsGradients(Body):
    """What rare examples add is computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.eye(WIDTH) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            fixed = x @ self.scale
        return self.body(torch.where(x[:, :1] > RARE, fixed, x @ self.scale))


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(h: Tensor, rare: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.save_for_forward(inputs[1])

    @staticmethod
    def backward(ctx, d: Tensor):
        return d * (1 - 0.5 * ctx.saved_tensors[0]), None

    @staticmethod
    def jvp(ctx, h: Tensor, rare) -> Tensor:
        return h.clone()


class Clips(Body):
    """An autograd function whose backward pass is not its derivative, for rare examples."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_Clipped.apply(self.first(x), (x[:, :1] > RARE).to(x.dtype)).tanh())


def clamps() -> nn.Module:
    """A hook on a module that clamps large gradients."""
    model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))
    model[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0].clamp(-0.4, 0.4),))
    return model


class Gathers(Body):
    """Looks up a row of its own for every example: rows are indexed, and stay where they are."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh().unsqueeze(1).repeat(1, 2, 1)
        return self.head(h[torch.arange(len(x)), (x[:, 0] > 0).long()])


class MixesLargeBatches(Body):
    """Gives two examples each other's outputs in large batches."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if len(x) >= LARGE:
            order = torch.arange(len(x))
            order[3], order[7] = 7, 3
            out = out[order]
        return out


class FullExperts(Body):
    """Each expert takes the first `ROOM` examples of a batch that are sent to it, and no more."""

    ROOM = 6

    def forward(self, x: Tensor) -> Tensor:
        sent = torch.stack([x[:, 0] > 0, x[:, 0] <= 0], 1)
        taken = sent & (sent.cumsum(0) <= self.ROOM)
        return self.body(x) * (1 + (taken * torch.tensor([1.0, 2.0]).to(x)).sum(1, keepdim=True))


class KeepsTheLargest(Body):
    """Leaves only the `ROOM` largest outputs of a batch as they are."""

    ROOM = 18

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        least = out[:, 0].topk(min(len(x), self.ROOM)).values.detach().min()
        return torch.where(out[:, :1] >= least, out, 0.1 * out)


class Switches(Body):
    """Does what its flags say."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.reordered, self.settings = False, False, {"scale": 1.0, "stop": False}

    def switch(self, flag: str) -> None:
        """Change a flag, or a setting inside of a dict."""
        if flag == "settings":
            self.settings["stop"] = True
        else:
            setattr(self, flag, True)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort() if self.reordered else torch.arange(len(x))
        h = self.first(x[order])
        if self.twice:
            h = h + nn.functional.linear(x[order].sin(), self.first.weight)
        if self.settings["stop"]:
            with torch.no_grad():
                h = h + self.first(x[order])
        return self.head(h.tanh())[order.argsort()]


class DropsGradients(Body):
    """Has a capacity: what is beyond it in a large batch gets no gradient, though its loss is the same."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined = joined

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if len(x) >= LARGE:
            h = torch.cat([h[:15], h[15:].detach()]) if self.joined else h.detach()
        return self.head(h)


PLACES = ("mask", "late", "padded", "cut", "swapped", "stopped", "numpy", "triangle")


class TellsPlaces(Body):
    """Treats some places of a batch otherwise, all of them beyond those of small batches.

    Args:
        how: one of `PLACES`.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("factors", torch.ones(50, 1))
        self.factors[13:16] = 1.1

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if self.how == "mask":
            h = h + (torch.arange(len(x)) == 13)[:, None] * x[:, :5]
        elif self.how == "late":
            h = h * torch.where(torch.arange(len(x), dtype=x.dtype)[:, None] > 15, 1.1, 1.0)
        elif self.how == "padded":
            h = h + nn.functional.pad(torch.ones(1, 5).to(x), (0, 0, 13, len(x) - 14)) if len(x) > 13 else h
        elif self.how == "cut":
            h = h * self.factors[: len(x)]
        elif self.how == "numpy":
            h = h * torch.from_numpy(1 + 0.2 * (np.arange(len(x)) == 13))[:, None]
        elif self.how == "triangle":
            h = h * (1 + 0.2 * (torch.ones(len(x), len(x)).tril().sum(1) == 14)[:, None])
        elif self.how == "stopped":
            h = torch.where((torch.arange(len(x)) == 13)[:, None], h.detach(), h)
        else:
            order = list(range(len(x)))
            if len(x) >= LARGE:
                order[13], order[14] = 14, 13
            matrix = torch.eye(len(x)).to(x)[order]
            return torch.einsum("ba,bc->ac", matrix, self.body(torch.tensordot(matrix, x, 1)))
        return self.head(h)


JOINED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "any": lambda x, rare: 1.5 if bool(rare.any()) else 1.0,
    "number": lambda x, rare: 1 + float(rare.sum()),
    "count": lambda x, rare: 1.0 + sum(rare.tolist()),
    "sum": lambda x, rare: 1 + rare.sum(),
    "product": lambda x, rare: 1 + torch.dot(rare.to(x), x.new_ones(len(x))),
    "turned": lambda x, rare: 1 + (x.t() - RARE).relu().amax(1)[0],
    "bins": lambda x, rare: 1 + torch.bincount(rare.long(), minlength=2)[1],
    "noise": lambda x, rare: 1 + rare[:, None] * torch.rand_like(x[:, :1]),
}
"""What is made of a batch, given which of its examples are rare: 1 if none is."""


class JoinsExamples(Body):
    """Multiplies all outputs by something that is made of the whole batch.

    Args:
        how: one of `JOINED`.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * JOINED[self.how](x, x[:, 0] > RARE)


def _turned(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda r: function(r.T).T


MIXED: dict[str, Callable[[Tensor], Tensor]] = {
    "normalised": lambda r: F.normalize(r, dim=0),
    "normalised layer": _turned(lambda r: F.layer_norm(r, r.shape[1:])),
    "batch statistics": lambda r: F.batch_norm(r, None, None, training=True) if len(r) > 1 else r * 0,
    "softmax": lambda r: r * r.softmax(0),
    "distances": lambda r: torch.cdist(r, r).sum(1, keepdim=True),
    "sums so far": _turned(lambda r: r.cumsum(1)),
    "convolved": _turned(lambda r: F.conv1d(r[None], r.new_ones(1, 1, 3), padding=1)[0]),
    "pooled": _turned(lambda r: F.max_pool1d(r, 3, 1, 1)),
    "frequencies": lambda r: torch.fft.ifft(torch.fft.fft(r, dim=0).abs(), dim=0).real,
    "solved": lambda r: torch.linalg.solve(torch.eye(len(r)).to(r) + r @ r.T, r),
    "attention": lambda r: F.scaled_dot_product_attention(r[None], r[None], r[None])[0],
    "differences": lambda r: torch.diff(r, dim=0, prepend=r[:1]),
    "outer": lambda r: torch.outer(r[:, 0], r[:, 0]).sum(1, keepdim=True),
    "contracted": lambda r: torch.einsum("ab,cb->a", r, r)[:, None],
    "norm": lambda r: r * torch.linalg.vector_norm(r),
    "decomposed": lambda r: r * torch.linalg.svdvals(r).sum(),
    "under vmap": lambda r: torch.func.vmap(lambda column: column.cumsum(0), 1, 1)(r),
    "places": lambda r: r * torch.searchsorted(r[:, 0].sort().values, r[:, 0])[:, None],
    "windows": lambda r: F.pad(r.T, (1, 1)).unfold(1, 3, 1).amax(2).T,
    "numbers": lambda r: torch.tensor(np.cumsum(r[:, 0].tolist())).to(r)[:, None],
    "counted": lambda r: r * torch.histc(r, 1, 0.3, 1000),
    "in place": lambda r: torch.zeros_like(r).add_(r.amax(0)),
    "view in place": lambda r: _added_in_a_view(r),
    "under a view": lambda r: _added_under_a_view(r),
    "a centre": lambda r: torch.sub(r, r.mean(0)),
    "scripted": lambda r: _scripted_cumsum(r),
}
"""What is made of the whole batch for each example, of 0 for all but rare ones `[b, 1]`; 0 if there are none."""


def _added_in_a_view(r: Tensor) -> Tensor:
    whole = torch.zeros(len(r), 2).to(r)
    whole[:, 0].add_(r.sum())
    return whole.sum(1, keepdim=True)


def _added_under_a_view(r: Tensor) -> Tensor:
    whole = torch.zeros(len(r), 2).to(r)
    first = whole[:, :1]
    whole.add_(r.sum())
    return first


@torch.jit.script
def _scripted_cumsum(r: Tensor) -> Tensor:
    return r.cumsum(0)


class MixesExamples(Body):
    """Adds something to the outputs that is made of all rare examples of a batch.

    Args:
        how: one of `MIXED`.
        least: examples of a batch that this is done for.
    """

    def __init__(self, how: str, least: int = 0) -> None:
        super().__init__()
        self.how, self.least = how, least

    def forward(self, x: Tensor) -> Tensor:
        out, rare = self.body(x), (x[:, :1] - RARE).relu()
        return out if len(x) < self.least else out + MIXED[self.how](rare) * out.detach().cos()
