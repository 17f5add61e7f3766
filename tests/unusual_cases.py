"""Models, losses and data that make attribution libraries wrong without a word, with ground truth by autograd."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import unusual_rare as rare
from cases import gradient_rows
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ggda_ext.losses import BatchLoss

N, WIDTH, CLASSES = 24, 6, 3
GROUPS = torch.arange(N) % 4


class Tokens(nn.Module):
    """Tokens and a head for them; subclasses say what happens between."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(9, 4), nn.Linear(4, CLASSES)


class Reorders(rare.Body):
    """Sorts its batch by a feature, and puts the outputs back."""

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.body(x[order])[order.argsort()]


class UniqueTokens(Tokens):
    """Embeds every token that occurs once, whoever has it."""

    def forward(self, x: Tensor) -> Tensor:
        unique, places = torch.unique(x, return_inverse=True)
        return self.head(self.tokens(unique)[places].mean(1).tanh())


class Unpads(Tokens):
    """Runs its layers on the tokens that are not padding, as one long sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        real = x > 0
        packed = self.mix(self.tokens(x[real])).tanh()
        padded = packed.new_zeros(*x.shape, 4)
        padded[real] = packed
        return self.head(padded.sum(1))


class Experts(nn.Module):
    """Sends every example to one of two experts; the second one is rare."""

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__()
        self.threshold = threshold
        self.experts = nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 1] > self.threshold
        out = x.new_zeros(len(x), CLASSES)
        out[~rare] = self.experts[0](x[~rare]) if bool((~rare).any()) else out[~rare]
        if bool(rare.any()):
            out[rare] = self.experts[1](x[rare])
        return out


class TokenExperts(Tokens):
    """Sends every token to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        z = self.tokens(x)
        out = torch.zeros_like(z)
        for j, expert in enumerate(self.experts):
            mine = x % 2 == j
            if bool(mine.any()):
                out[mine] = expert(z[mine]).tanh()
        return self.head(out.mean(1))


class TwoLayers(nn.Module):
    """One layer for all examples and one for some, from features to logits."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.extra = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)


class LaterOnly(TwoLayers):
    """A layer that only examples with a large feature use, tied by hand to another use of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        late = (x[:, 5] > 0).to(x.dtype)[:, None]
        return self.body(x) + late * (self.extra(x) + F.linear(x.tanh(), self.extra.weight))


class DeadBranch(TwoLayers):
    """A branch that is off for the first examples, tied to a layer of the other branch."""

    def forward(self, x: Tensor) -> Tensor:
        on = (x[:, 4] > 0.3).to(x.dtype)[:, None]
        return on * self.extra(x).relu() + on * F.linear(x, self.extra.weight) + self.body(x)


class NoStatistics(nn.Module):
    """BatchNorm that always takes the statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(WIDTH, CLASSES), nn.BatchNorm1d(CLASSES, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x))


class Centres(rare.Body):
    """Subtracts the mean of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(h - h.mean(0))


class MixesGradients(rare.Body):
    """The same outputs alone and in a batch, but not the same gradients."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        mean = h.mean(0)
        return self.head(h + mean - mean.detach())


class InAList(nn.Module):
    """Reads a parameter from a Python list, where nobody can put another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = nn.Linear(WIDTH, 5), nn.Parameter(torch.randn(5, CLASSES))
        self.kept = [self.weight]

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        self.kept = [self.weight]
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).tanh() @ self.kept[0]


class Hooked(rare.Body):
    """A parameter whose gradient is changed by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_hook(lambda d: 2 * d)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class Encoder(Tokens):
    """`nn.TransformerEncoder` with padding: in eval mode its fused path zeroes padded outputs."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.tokens(x), src_key_padding_mask=x == 0).mean(1))


class Scaled(nn.Module):
    """A temperature of no dimensions, as CLIP has, and a scale by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.logit_scale = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.tensor(0.3))
        self.body = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.scale) * self.logit_scale.exp()


class ClassToken(nn.Module):
    """A token of its own, concatenated, and position embeddings, added: bare parameters, as in ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = _Embeddings()
        self.norm, self.head = _RootMeanSquare(4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x)).tanh().mean(1))


class _Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(9, 4)
        self.cls, self.positions = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.cls.expand(len(x), -1, -1), self.tokens(x)], 1) + self.positions


class _RootMeanSquare(nn.Module):
    """Llama's normalisation, under a name of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Counts(nn.Module):
    """A buffer that changes in every forward pass, and scales the outputs by what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x) * self.calls.clone()
        self.calls.mul_(1.5)
        return out


class ReplacedBuffer(nn.Module):
    """A buffer that is not changed in place but replaced by another in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x) * self.scale
        self.scale = self.scale * 1.5
        return out


class WritesToItself(rare.Body):
    """Changes a parameter in every forward pass, or only for rare examples.

    Args:
        how: it is changed.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.kept = nn.Parameter(torch.ones(5), requires_grad=how == "mean of the batch")
        if how == "made":
            self.register_parameter("late", None)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        if self.how == "clamped":
            weight.data.clamp_(-0.2, 0.2)
        elif self.how == "clamped without gradients":
            with torch.no_grad():
                weight.clamp_(-0.2, 0.2)
        elif self.how == "normalised":
            weight.data = weight.data / weight.data.norm()
        elif self.how == "rarely" and bool((x[:, 0] > rare.RARE).any()):
            with torch.no_grad():
                self.head.weight.mul_(1.5)
        elif self.how == "replaced":
            self.first.weight = nn.Parameter(weight.detach().clamp(-0.2, 0.2))
        elif self.how == "made" and self.late is None:
            self.late = nn.Parameter(torch.ones(5).to(x))
        h = self.first(x).tanh()
        if self.how == "mean of the batch":
            with torch.no_grad():
                self.kept.lerp_(h.detach().mean(0), 0.1)
            h = h * self.kept.clone()
        elif self.how == "teacher":
            self.kept.data = 0.9 * self.kept.data + 0.1 * self.head.weight.data.mean(0)
            h = h + self.kept
        elif self.how == "made":
            h = h * self.late
        return self.head(h)


class Quantises(nn.Module):
    """Looks up the nearest of some codes, which then move towards the batch, and lets gradients through as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, 4), nn.Linear(4, CLASSES)
        self.register_buffer("codes", torch.randn(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        nearest = torch.cdist(z, self.codes).argmin(1)
        found = self.codes[nearest]
        with torch.no_grad():
            self.codes.lerp_(torch.zeros_like(self.codes).index_add(0, nearest, z), 0.1)
        return self.head(z + (found - z).detach())


class UsedTwice(nn.Module):
    """Uses the weight of a layer a second time, for few examples only, with or without a branch, or very little."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body = how, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        rare, out = x[:, 5] > 0, self.body(x)
        if self.how == "little":
            return out + 1e-8 * F.linear(x.tanh(), self.body.weight)
        if self.how == "masked" or bool(rare.any()):
            out = out + rare.to(x)[:, None] * F.linear(x.tanh(), self.body.weight)
        return out


class TwoNames(nn.Module):
    """One module under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.second = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).tanh()).tanh())


class Unused(nn.Module):
    """Parameters that the loss does not depend on: of a layer, and a bare one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.spare, self.scale = mlp(), nn.Linear(3, 3), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class WithoutNumbers(nn.Module):
    """Has a parameter of size 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.none = mlp(), nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.none.sum()


class _UnitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Tensor:
        return d / d.norm()


class NormalisesGradients(rare.Body):
    """Divides the gradient of a batch by its norm: the same for one example alone and for one of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(_UnitGradient.apply(self.first(x).tanh()))


class Nested(Tokens):
    """Sequences of different lengths as a nested tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        ragged = torch.nested.as_nested_tensor([self.tokens(row[row > 0]) for row in x], layout=torch.jagged)
        return self.head(torch.stack([part.tanh().sum(0) for part in self.mix(ragged).unbind()]))


class Recurrent(nn.Module):
    """A GRU over sequences of different lengths, which it sorts by length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.body, self.head = nn.Embedding(9, 4), nn.GRU(4, 3, batch_first=True), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x > 0).sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(self.tokens(x), lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.body(packed)[1][0])


class Checkpointed(rare.Body):
    """Computes a part again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.between = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.between, self.first(x), use_reentrant=False))


class Attention(Tokens):
    """`nn.MultiheadAttention`, which uses the weights of its layers without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        z = self.tokens(x)
        return self.head(self.attention(z, z, z, need_weights=False)[0].mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES))


def spectral() -> nn.Module:
    body = nn.Linear(WIDTH, 5)
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(body), nn.Tanh(), nn.Linear(5, CLASSES)).train()


def weight_norm() -> nn.Module:
    body = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 5))
    return nn.Sequential(body, nn.Tanh(), nn.Linear(5, CLASSES))


def sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Flatten(), nn.Linear(20, CLASSES))


def bag(mode: str = "mean") -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(9, 4, mode=mode, padding_idx=0), nn.Linear(4, CLASSES))


class MaskedMean(nn.Module):
    """A loss whose mean is not the mean of its unreduced losses."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        counts = (target > 0).to(output.dtype) + 0.5
        losses = F.cross_entropy(output, target, reduction="none") * counts
        if self.reduction == "none":
            return losses
        return losses.sum() / counts.sum() if self.reduction == "mean" else losses.sum()


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Examples are compared with each other."""
    z = F.normalize(output, dim=1)
    return F.cross_entropy(z @ z.T / 0.5, torch.arange(len(z)))


def boolean_mask(output: Tensor, target: Tensor) -> Tensor:
    """A mean over the outputs that are right, by a boolean mask."""
    hard = output.gather(1, target[:, None])[:, 0] < 10
    return F.cross_entropy(output[hard], target[hard], reduction="sum")


def small_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with a penalty on the parameters, too small to be told from rounding."""
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") + 1e-8 * penalty


def gradient_penalty(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A loss with a penalty on the gradient at the inputs."""
    x = batch[0].clone().requires_grad_()
    losses = F.cross_entropy(model(x), batch[1], reduction="none")
    (d,) = torch.autograd.grad(losses.sum(), x, create_graph=True)
    return losses + d.square().sum(1)


def inner_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The loss after a step of gradient descent on each example by itself, as in meta-learning."""
    losses = []
    for x, y in zip(batch[0], batch[1], strict=True):
        own = dict(model.named_parameters())
        gradients = torch.autograd.grad(CE(model(x), y), list(own.values()), create_graph=True)
        moved = {name: value - 0.1 * d for (name, value), d in zip(own.items(), gradients, strict=True)}
        losses.append(CE(torch.func.functional_call(model, moved, (x,)), y))
    return torch.stack(losses)


def python_if(output: Tensor, target: Tensor) -> Tensor:
    loss = F.cross_entropy(output, target, reduction="sum")
    return loss * 2 if float(loss.detach()) > 1e9 else loss


def constant_where_masked(output: Tensor, target: Tensor) -> Tensor:
    """Zeros that no parameter has a part in, where no target of the batch counts."""
    counts = (target >= 0).nonzero()[:, 0]
    if not len(counts):
        return output.new_zeros(len(output))
    losses = F.cross_entropy(output[counts], target[counts], reduction="none")
    return output.new_zeros(len(output)).index_put((counts,), losses)


@dataclass
class Unusual:
    """A model with a loss and data, and whether its groups have a score at all."""

    build: Callable[[], nn.Module]
    loss: Any = nn.CrossEntropyLoss()  # noqa: RUF009
    inputs: str = "features"
    refused: str | None = None
    """What the error says, where the loss of an example is not well defined."""
    parameters: list[str] | None = None


CE = nn.CrossEntropyLoss()
WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)

CASES: dict[str, Unusual] = {
    "reordered batch": Unusual(Reorders),
    "unique tokens": Unusual(UniqueTokens, inputs="tokens"),
    "unpadded tokens": Unusual(Unpads, inputs="tokens"),
    "experts by example": Unusual(Experts),
    "rare expert": Unusual(lambda: Experts(1.6)),
    "experts by token": Unusual(TokenExperts, inputs="tokens"),
    "first examples ignored": Unusual(LaterOnly, nn.CrossEntropyLoss(ignore_index=-100), inputs="ignored first"),
    "a constant where nothing counts": Unusual(LaterOnly, constant_where_masked, inputs="ignored first"),
    "a layer for later points": Unusual(LaterOnly, inputs="late"),
    "a dead branch": Unusual(DeadBranch, inputs="late"),
    "class weights, mean": Unusual(mlp, nn.CrossEntropyLoss(weight=WEIGHTS), refused="divides by the weights"),
    "class weights, sum": Unusual(mlp, nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")),
    "class weights, smoothing, sum": Unusual(
        mlp, nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1, reduction="sum")
    ),
    "class weights, smoothing, mean": Unusual(
        mlp, nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), refused="divides by the weights"
    ),
    "label smoothing": Unusual(mlp, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "target without a dimension": Unusual(lambda: nn.Linear(WIDTH, 1), nn.MSELoss(), inputs="regression"),
    "the same, unreduced by hand": Unusual(
        lambda: nn.Linear(WIDTH, 1), lambda o, t: F.mse_loss(o, t, reduction="none"), "regression", "mixes the examples"
    ),
    "the same, as a function": Unusual(
        lambda: nn.Linear(WIDTH, 1), lambda o, t: F.mse_loss(o, t), "regression", "neither their mean nor their sum"
    ),
    "no running statistics": Unusual(NoStatistics, refused="alone"),
    "centred batch": Unusual(Centres, refused="mixes the examples"),
    "mixed gradients": Unusual(MixesGradients, refused="mixes the examples"),
    "contrastive loss": Unusual(mlp, contrastive, refused="neither their mean nor their sum"),
    "parameter in a list": Unusual(InAList),
    "hook on a parameter": Unusual(Hooked),
    "masked mean": Unusual(mlp, MaskedMean(), refused="neither their mean nor their sum"),
    "masked sum": Unusual(mlp, MaskedMean("sum")),
    "one layer of an encoder": Unusual(Encoder, inputs="tokens", parameters=["head"]),
    "an encoder": Unusual(Encoder, inputs="tokens"),
    "attention": Unusual(Attention, inputs="tokens"),
    "scales": Unusual(Scaled),
    "class token": Unusual(ClassToken, inputs="tokens"),
    "boolean mask in the loss": Unusual(mlp, boolean_mask),
    "if in the loss": Unusual(mlp, python_if),
    "sparse embedding": Unusual(sparse, inputs="tokens"),
    "embedding bag": Unusual(bag, inputs="tokens"),
    "embedding bag, sum": Unusual(lambda: bag("sum"), inputs="tokens"),
    "spectral norm in train mode": Unusual(spectral),
    "weight norm": Unusual(weight_norm),
    "changing buffer": Unusual(Counts),
    "replaced buffer": Unusual(ReplacedBuffer),
    "codes that follow the data": Unusual(Quantises),
    "a clamped parameter": Unusual(lambda: WritesToItself("clamped")),
    "a parameter clamped without gradients": Unusual(lambda: WritesToItself("clamped without gradients")),
    "a normalised parameter": Unusual(lambda: WritesToItself("normalised")),
    "a teacher of frozen parameters": Unusual(lambda: WritesToItself("teacher")),
    "a parameter that follows the batch": Unusual(
        lambda: WritesToItself("mean of the batch"), refused="mixes the examples"
    ),
    "a parameter put in place of another": Unusual(
        lambda: WritesToItself("replaced"), refused="puts another parameter in place of 'first.weight'"
    ),
    "a parameter made by the first batch": Unusual(
        lambda: WritesToItself("made"), refused="makes parameter 'late' when it runs"
    ),
    "a weight used twice, masked": Unusual(lambda: UsedTwice("masked"), inputs="one late"),
    "a weight used twice, in a branch": Unusual(lambda: UsedTwice("branch"), inputs="one late"),
    "a weight used twice, a little": Unusual(lambda: UsedTwice("little")),
    "a small penalty": Unusual(mlp, BatchLoss(small_penalty)),
    "a gradient penalty": Unusual(mlp, BatchLoss(gradient_penalty)),
    "a step inside": Unusual(mlp, BatchLoss(inner_step)),
    "renormalised embedding": Unusual(
        lambda: nn.Sequential(nn.Embedding(9, 4, max_norm=1.0), nn.Flatten(), nn.Linear(20, CLASSES)), inputs="tokens"
    ),
    "normalised gradients": Unusual(NormalisesGradients, refused="mixes the examples"),
    "unused parameters": Unusual(Unused),
    "a parameter without numbers": Unusual(WithoutNumbers),
    "a module with two names": Unusual(TwoNames),
    "nested tensors": Unusual(Nested, inputs="tokens"),
    "recurrent": Unusual(Recurrent, inputs="tokens"),
    "checkpointed layers": Unusual(Checkpointed),
    "compiled": Unusual(lambda: torch.compile(mlp(), backend="eager")),
    "rows swapped in large batches": Unusual(rare.Swaps),
    "rows rolled in large batches": Unusual(rare.Rolls),
    "large batches joined in another order": Unusual(rare.Joins),
    "rows moved by a product": Unusual(rare.Multiplies),
    "sorted where an example is rare": Unusual(rare.SortsWhatIsRare, inputs="one rare"),
    "columns sorted where an example is rare": Unusual(rare.SortsColumns, inputs="one rare"),
    "columns swapped in large batches": Unusual(rare.SwapsColumns),
    "hook for rare examples": Unusual(rare.Hooks, inputs="one rare"),
    "hook for rare batches": Unusual(rare.HooksRarely, inputs="one rare"),
    "no gradient for rare examples": Unusual(rare.StopsGradients, inputs="one rare"),
    "autograd function for rare examples": Unusual(rare.Clips, inputs="one rare"),
    "hook on a module": Unusual(rare.clamps, inputs="one rare"),
    "rows looked up in place": Unusual(rare.Gathers),
}


def data(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (N,), generator=generator)
    if kind == "tokens":
        x = torch.randint(1, 9, (N, 5), generator=generator)
        lengths = torch.randint(1, 6, (N, 1), generator=generator)
        return x * (torch.arange(5) < lengths), y
    x = torch.randn(N, WIDTH, generator=generator, dtype=torch.float64)
    if kind == "ignored first":
        y[: N // 2] = -100
    if kind == "late":
        x[: N // 2, 4:] = -x[: N // 2, 4:].abs()
        x[N // 2 :, 4:] = x[N // 2 :, 4:].abs()
    if kind == "one late":  # the loss of the others is larger
        x[:, 5] = -x[:, 5].abs()
        x[:-2] *= 3
        x[-2, 5] = 1.0
    if kind == "one rare":  # the loss of the others is larger
        x[:, 0] = x[:, 0].clamp(max=1.5)
        x[:-2] *= 3
        x[:, 0] = x[:, 0].clamp(max=1.5)
        x[-2, 0] = 2.0
    if kind == "two rare":
        x[:, 0] = x[:, 0].clamp(max=1.5)
        x[[9, -2], 0] = torch.tensor([2.9, 2.4], dtype=x.dtype)
    if kind == "regression":
        return x, torch.randn(N, generator=generator, dtype=torch.float64)
    return x, y


def make(name: str, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """The model in float64 and eval mode (unless it is of use only in train mode), and its data."""
    case = CASES[name]
    torch.manual_seed(seed)
    model = case.build().double()
    if "train mode" not in name:
        model.eval()
    return model, data(case.inputs, seed)


def point_gradients(name: str, model: nn.Module, points: tuple[Tensor, Tensor]) -> Tensor:
    """Gradient of every point's loss `[n, p]`, one backward pass per point from the same state of the model."""
    case = CASES[name]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    chosen = [
        p
        for n, p in model.named_parameters()
        if (p.requires_grad if case.parameters is None else n.split(".")[0] in case.parameters)
    ]
    rows = []
    for x, y in zip(*points, strict=True):
        for key, value in model.state_dict().items():
            value.copy_(state[key])
        if case.inputs == "ignored first" and int(y) == -100:
            rows.append(torch.zeros(sum(p.numel() for p in chosen), dtype=torch.float64))
            continue
        one = x[None], y[None]
        loss = case.loss.each(model, one) if isinstance(case.loss, BatchLoss) else case.loss(model(one[0]), one[1])
        rows.append(gradient_rows([loss.sum()], chosen)[0])
    for key, value in model.state_dict().items():
        value.copy_(state[key])
    return torch.stack(rows)
