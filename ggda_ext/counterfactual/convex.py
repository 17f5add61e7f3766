"""Training losses as functions of the outputs: their values, slopes and curvatures for many counterfactuals at once.

A refit needs ℓ(z), ∂ℓ/∂z and (∂²ℓ/∂z²) t of every point, for outputs z `[n, c, s]` of s counterfactuals. Three families
have closed forms, with constants per point that are read off the loss by evaluating it, and then checked:

* softmax   ℓ = w log Σ exp z − Σ_c q_c z_c      cross-entropy, with class weights, label smoothing, soft labels;
* logistic  ℓ = a log(1 + e^−z) + b log(1 + e^z)  binary cross-entropy; also softmax of two classes, of z₁ − z₀;
* squared   ℓ = w/2 (z − y)²                      squared error.

Anything else is differentiated by autograd. A loss is refused where its curvature is negative, because the problem of a
refit then has more than one solution, and where it has none at all, as that of log-probabilities: nothing would
bound the outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ggda_ext.losses import ExampleLoss, OutputLoss, example_losses

LossFn = Callable[..., Tensor] | None
_PROBED = 64  # points on which convexity is looked at
_RADIUS = 10.0
_MOVES = (0.0, 0.5, 3.0)  # how far outputs are moved for it


class ConvexLoss:
    """The loss of every training point as a function of what a refit moves, the *columns* of the outputs.

    Args:
        constants: what the closed form needs of every point, tensors with points along dim 0.
    """

    radius = math.inf
    """How far outputs may move, in the mean square; for logits, beyond which probabilities are 0 or 1."""

    def __init__(self, *constants: Tensor) -> None:
        self.constants = constants

    def columns(self, outputs: Tensor) -> Tensor:
        """The columns `[n, c, …]` of outputs `[n, C, …]`, a linear map."""
        return outputs

    def of_columns(self, rows: Tensor) -> Tensor:
        """The transposed map: a cotangent of columns `[n, c]` as one of outputs `[n, C]`."""
        return rows

    def take(self, at: slice | Tensor) -> ConvexLoss:
        """The same for some of the points."""
        return type(self)(*(constant[at] for constant in self.constants))

    def to(self, dtype: torch.dtype) -> ConvexLoss:
        """The same with constants of another precision."""
        return type(self)(*(constant.to(dtype) for constant in self.constants))

    @property
    def bends(self) -> Tensor:
        """A factor of every second derivative, of its sign."""
        raise NotImplementedError

    def state(self, z: Tensor) -> Tensor:
        """What `slope` and `bend` need of columns z `[n, c, s]`, of the same shape."""
        raise NotImplementedError

    def value(self, z: Tensor) -> Tensor:
        """Losses `[n, s]`."""
        raise NotImplementedError

    def slope(self, state: Tensor) -> Tensor:
        """First derivatives `[n, c, s]`."""
        raise NotImplementedError

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        """Second derivatives times t `[n, c, s]`."""
        raise NotImplementedError

    def root(self, state: Tensor) -> Tensor:
        """Square roots B `[n, c, c]` of the second derivatives BᵀB, of a state `[n, c, 1]`."""
        raise NotImplementedError

    def noise(self, state: Tensor, generator: torch.Generator) -> Tensor:
        """A random cotangent `[n, c]` of every point, whose covariance is the second derivative."""
        signs = torch.randint(0, 2, state.shape[:2], generator=generator).to(state) * 2 - 1
        return torch.einsum("nab,na->nb", self.root(state), signs)


class SoftmaxLoss(ConvexLoss):
    """w log Σ exp z − Σ q z, with constants w `[n]` and q `[n, c]`."""

    radius = _RADIUS

    @property
    def bends(self) -> Tensor:
        return self.constants[0]

    def state(self, z: Tensor) -> Tensor:
        return torch.softmax(z, 1)

    def value(self, z: Tensor) -> Tensor:
        w, q = self.constants
        return w[:, None] * torch.logsumexp(z, 1) - (q[:, :, None] * z).sum(1)

    def slope(self, state: Tensor) -> Tensor:
        w, q = self.constants
        return torch.addcmul(-q[:, :, None], w[:, None, None], state)

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        moved = state * t
        return moved.sub_(state * moved.sum(1, keepdim=True)).mul_(self.constants[0][:, None, None])

    def root(self, state: Tensor) -> Tensor:
        p = state[:, :, 0]
        eye = torch.eye(p.shape[1], dtype=p.dtype, device=p.device)
        return (self.constants[0][:, None] * p).sqrt()[:, :, None] * (eye - p[:, None, :])

    def noise(self, state: Tensor, generator: torch.Generator) -> Tensor:
        p = state[:, :, 0]  # the slope for a label drawn from the model: closer to real gradients than signs are
        labels = torch.multinomial(p.cpu(), 1, generator=generator)[:, 0].to(p.device)
        return self.constants[0].clamp_min(0).sqrt()[:, None] * (p - F.one_hot(labels, p.shape[1]))


class LogisticLoss(ConvexLoss):
    """a log(1 + e^−z) + b log(1 + e^z) of every column, with constants a and b `[n, c]`."""

    radius = _RADIUS

    @property
    def bends(self) -> Tensor:
        return self.constants[0] + self.constants[1]

    def state(self, z: Tensor) -> Tensor:
        return torch.sigmoid(z)

    def value(self, z: Tensor) -> Tensor:
        a, b = self.constants
        return (a[:, :, None] * F.softplus(-z) + b[:, :, None] * F.softplus(z)).sum(1)

    def slope(self, state: Tensor) -> Tensor:
        a, b = self.constants
        return torch.addcmul(-a[:, :, None], (a + b)[:, :, None], state)

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        a, b = self.constants
        return torch.addcmul(state, state, state, value=-1).mul_(t).mul_((a + b)[:, :, None])

    def root(self, state: Tensor) -> Tensor:
        a, b = self.constants
        p = state[:, :, 0]
        return torch.diag_embed(((a + b) * p * (1 - p)).clamp_min(0).sqrt())


class TwoClassLoss(LogisticLoss):
    """Softmax of two classes, in one column z₁ − z₀."""

    def columns(self, outputs: Tensor) -> Tensor:
        return outputs[:, 1:] - outputs[:, :1]

    def of_columns(self, rows: Tensor) -> Tensor:
        return torch.cat([-rows, rows], 1)


class SquaredLoss(ConvexLoss):
    """w/2 (z − y)² + e, with constants w and y `[n, c]`, e `[n]`."""

    @property
    def bends(self) -> Tensor:
        return self.constants[0]

    def state(self, z: Tensor) -> Tensor:
        return z

    def value(self, z: Tensor) -> Tensor:
        w, y, e = self.constants
        return (w[:, :, None] / 2 * (z - y[:, :, None]).square()).sum(1) + e[:, None]

    def slope(self, state: Tensor) -> Tensor:
        w, y, _ = self.constants
        return w[:, :, None] * (state - y[:, :, None])

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        return self.constants[0][:, :, None] * t

    def root(self, state: Tensor) -> Tensor:
        return torch.diag_embed(self.constants[0].clamp_min(0).sqrt())


class AnyLoss(ConvexLoss):
    """Any loss, by autograd; its only constant is the targets, in the order of the points.

    Args:
        loss_fn: of outputs and targets.
        targets: of every point, or None.
        shape: of one output.
        dtype: the precision in which the loss is computed, whatever that of the columns.
    """

    def __init__(
        self, loss_fn: LossFn, targets: Tensor | None, shape: torch.Size, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self.loss_fn, self.shape, self.dtype = loss_fn, shape, dtype
        self.targets = targets.to(dtype) if targets is not None and targets.is_floating_point() else targets

    def take(self, at: slice | Tensor) -> AnyLoss:
        return AnyLoss(self.loss_fn, None if self.targets is None else self.targets[at], self.shape, self.dtype)

    def to(self, dtype: torch.dtype) -> AnyLoss:
        return self

    def state(self, z: Tensor) -> Tensor:
        return z

    def value(self, z: Tensor) -> Tensor:
        outputs = z.to(self.dtype).unbind(2)
        each = [example_losses(self.loss_fn, one.reshape(len(z), *self.shape), self.targets) for one in outputs]
        return torch.stack(each, 1).to(z)

    def slope(self, state: Tensor) -> Tensor:
        z = state.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(self.value(z).sum(), z)[0]

    def bend(self, state: Tensor, t: Tensor) -> Tensor:
        z = state.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.value(z).sum(), z, create_graph=True)
            if not slope.requires_grad:  # a loss without curvature
                return torch.zeros_like(t)
            found = torch.autograd.grad(slope, z, t, allow_unused=True)[0]
        return torch.zeros_like(t) if found is None else found

    def root(self, state: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(self.curvature(state))
        return values.clamp_min(0).sqrt()[:, :, None] * vectors.transpose(1, 2)

    def curvature(self, state: Tensor) -> Tensor:
        """Second derivatives `[n, c, c]` of a state `[n, c, 1]`."""
        units = torch.eye(state.shape[1], dtype=state.dtype, device=state.device)
        columns = [self.bend(state, unit[None, :, None].expand_as(state))[:, :, 0] for unit in units]
        return torch.stack(columns, 2)


def convex_loss(loss: ExampleLoss, outputs: Tensor, targets: Tensor | None) -> ConvexLoss:
    """The training loss in closed form where it has one of the known forms; refused if it is not convex.

    Args:
        loss: ``loss_fn(output, target)`` as an `OutputLoss`.
        outputs: the model's own `[n]` or `[n, C]`.
        targets: of every point, or None.
    """
    if not isinstance(loss, OutputLoss):
        raise TypeError(
            f"loss_fn is a {type(loss).__name__}, which does not say how the loss depends on the outputs: pass "
            "loss_fn(output, target)."
        )
    if outputs.dim() > 2:
        raise ValueError(
            f"the model gives outputs of shape {list(outputs.shape)}: what-if needs one number or one row of numbers "
            "for each example, e.g. the logits of its last token."
        )
    z = outputs.detach().double().reshape(len(outputs), -1)
    plain = _computable(loss.loss_fn, outputs, targets)
    try:
        for found in _closed_forms(plain, z):
            if _same(found, plain, z):
                _check_bends(found.bends.reshape(len(z), -1), plain)
                return found
        _check_bends(_lowest_and_highest(plain, z), plain)
    except RuntimeError as error:
        raise ValueError(
            f"loss_fn {_name(loss.loss_fn)} cannot be differentiated twice at outputs that move a little "
            f"({str(error).splitlines()[0]}): what-if needs that. For a model that gives probabilities pass the model "
            "without its last activation, and nn.BCEWithLogitsLoss or nn.CrossEntropyLoss."
        ) from error
    return plain


def _computable(loss_fn: LossFn, outputs: Tensor, targets: Tensor | None) -> AnyLoss:
    """The loss in double precision, or in the model's own where it holds numbers of that precision."""
    if isinstance(loss_fn, nn.Module):
        loss_fn = copy.deepcopy(loss_fn).double()
    first, some = outputs[:2].detach(), None if targets is None else targets[:2]
    for dtype in (torch.float64, outputs.dtype):
        try:
            AnyLoss(loss_fn, some, outputs.shape[1:], dtype).value(first.reshape(len(first), -1, 1))
        except RuntimeError:
            if dtype == outputs.dtype:
                raise
        else:
            break
    return AnyLoss(loss_fn, targets, outputs.shape[1:], dtype)


def _closed_forms(plain: AnyLoss, z: Tensor) -> list[ConvexLoss]:
    """The known forms that agree with the loss at zero and one; whether they agree elsewhere is not known yet."""
    zero, one = (torch.full_like(z, at)[:, :, None] for at in (0.0, 1.0))
    try:
        value, low, high = plain.value(zero)[:, 0], plain.slope(zero)[:, :, 0], plain.slope(one)[:, :, 0]
    except RuntimeError:  # no gradient, or a loss that is not defined there
        return []
    forms: list[ConvexLoss] = []
    classes = z.shape[1]
    if classes > 1:
        w = value / math.log(classes)
        q = w[:, None] / classes - low
        forms.append(TwoClassLoss(q[:, 1:], q[:, :1]) if classes == 2 else SoftmaxLoss(w, q))
    # From the slopes at 0 and 1: s₀ = (a + b)/2 − a, s₁ = (a + b) σ(1) − a
    total = (high - low) / (1 / (1 + math.exp(-1.0)) - 0.5)
    forms.append(LogisticLoss(total / 2 - low, total / 2 + low))
    w = high - low
    y = torch.where(w > 0, -low / w.clamp_min(1e-300), torch.zeros_like(w))
    forms.append(SquaredLoss(w, y, value - (w / 2 * y.square()).sum(1)))
    return forms


def _same(form: ConvexLoss, plain: AnyLoss, z: Tensor) -> bool:
    """Whether a closed form has the values and slopes of the loss, at and around the outputs of every point."""
    generator = torch.Generator().manual_seed(0)
    relative, absolute = (1e-6, 1e-9) if plain.dtype == torch.float64 else (1e-4, 1e-5)
    for size in _MOVES:
        moved = z + size * torch.randn(z.shape, generator=generator, dtype=z.dtype).to(z.device)
        columns = form.columns(moved)[:, :, None]
        slope = form.of_columns(form.slope(form.state(columns))[:, :, 0])
        for found, real in (
            (form.value(columns)[:, 0], plain.value(moved[:, :, None])[:, 0]),
            (slope, plain.slope(moved[:, :, None])[:, :, 0]),
        ):
            if not torch.allclose(found, real, rtol=relative, atol=absolute):
                return False
    return True


def _lowest_and_highest(plain: AnyLoss, z: Tensor) -> Tensor:
    """The lowest and highest second derivative `[m, 2]` at and around the outputs of some of the points."""
    some = torch.linspace(0, len(z) - 1, min(_PROBED, len(z)), dtype=torch.float64).long()
    part, generator, found = plain.take(some), torch.Generator().manual_seed(0), []
    for size in _MOVES:
        moved = z[some] + size * torch.randn(z[some].shape, generator=generator, dtype=z.dtype).to(z.device)
        curvature = part.curvature(moved[:, :, None])
        if not bool(torch.isfinite(curvature).all()):
            raise ValueError("loss_fn has no finite second derivatives in the outputs: a refit needs them.")
        found.append(torch.linalg.eigvalsh((curvature + curvature.transpose(1, 2)) / 2)[:, [0, -1]])
    return torch.cat(found)


def _check_bends(bends: Tensor, plain: AnyLoss) -> None:
    """Refuse a loss with negative second derivatives, or with none, given some of every point `[n, m]`."""
    name, rounding = _name(plain.loss_fn), 1e-12 if plain.dtype == torch.float64 else 1e-5
    if bool((bends.amin(1) < -1e-6 * bends.abs().amax(1) - rounding).any()):
        raise ValueError(
            f"loss_fn {name} is not convex in the outputs (its curvature there is "
            f"{float(bends.min()):.3g}), so a refit has no single answer: use cross-entropy, a squared error or "
            "another convex loss."
        )
    if not bool((bends > rounding).any()):
        raise ValueError(
            f"loss_fn {name} has no curvature in the outputs, so nothing bounds a refit: for a model that "
            "gives log-probabilities pass the model without its last layer, and nn.CrossEntropyLoss; in place of an "
            "absolute error or a margin pass nn.HuberLoss or another smooth loss."
        )


def _name(loss_fn: LossFn) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
