"""A pass that observes layers: their inputs in the forward pass, the gradients at their outputs in the backward pass.

An `Observation` runs one forward pass and an activation-only backward pass. Hooks hand an observer the input a of every
known layer, and later the gradient d at the layer's output. The gradients of parameters are not computed, so the
backward pass costs half of an ordinary one. The hooks are on tensors. They see the gradient at the value that the layer
returned, even if an in-place activation overwrites it afterwards. A parameter outside any known layer (a scale, a class
token) may be given to the model as one copy per example; then the gradient at the copies is observed.

During the pass a `Watch` sees the functions that the model calls from Python. Three things can make a strategy wrong,
always, for some batch sizes, or for rare examples: a function that may move rows, a number that Python reads from a
tensor, and a hook that may change gradients in the backward pass. Batches with one of them are checked more closely.

A layer is called with detached parameters, while the parameters themselves require a gradient. If the loss still has a
gradient for a parameter, something other than its layer uses it (a functional call, a penalty), and the layers alone
do not give the score.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ggda_ext.data import batch_length
from ggda_ext.gradients.example_copies import UnderVmap, given_biases, given_copies
from ggda_ext.gradients.layers import Layer, UnknownLayer
from ggda_ext.gradients.movers import MOVERS
from ggda_ext.gradients.row_order import RowOrder
from ggda_ext.losses import ExampleLoss
from ggda_ext.model import ParameterSpace, full_precision

Signature = tuple[tuple[tuple[str, int], ...], int]


_LOOKED_AT = 100_000  # most nodes of an autograd graph that are looked at
TELLERS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__, Tensor.item,
    Tensor.tolist, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose, torch.is_nonzero,
}  # fmt: skip
_GETTERS: dict[str, Any] = {name: getattr(Tensor, name).__get__ for name in ("grad_fn", "requires_grad")}
_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, _GETTERS["grad_fn"]}
_ASKS = {_GETTERS["requires_grad"], torch.is_grad_enabled}
_LOOKED_AT_CLOSELY = {*MOVERS, *TELLERS, *_HOOKS, *_ASKS}


class Watch(TorchFunctionMode):
    """A mode that records the functions that a model calls, and lets them run.

    Args:
        size: number of examples in the batch.

    Attributes:
        moves: the name of a function that may have moved rows of the batch, or None.
        hooks: ``"register_hook"`` if the model may have put a hook on a gradient, or None.
        asks: whether the model asks if gradients are required; it may then do something else if they are not.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self._called: list[Hashable] = []
        self._told: list[Hashable] = []
        self.moves: str | None = None
        self.hooks: str | None = None
        self.asks = False

    @cached_property
    def called(self) -> int:
        """A hash that is the same for runs that call the same functions in the same order. Read it after the run."""
        return hash(tuple(self._called))

    @cached_property
    def told(self) -> int:
        """Like `called`, but the runs must also have read the same numbers from tensors into Python."""
        return hash((*self._called, *self._told)) if self._told else self.called

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._called.append(func)
        if func not in _LOOKED_AT_CLOSELY:
            return func(*args, **kwargs)
        if self.size > 1 and self.moves is None:
            may_move = MOVERS.get(func)
            if may_move is not None and may_move(self.size, *args, **kwargs):
                self.moves = getattr(func, "__name__", str(func))
        found = func(*args, **kwargs)
        if func in TELLERS:
            (self._called if isinstance(found, bool) else self._told).append(str(found))
        elif func in _HOOKS:
            self.hooks = "register_hook"
        elif func in _ASKS:
            self.asks = True
        return found


def hidden_hooks(model: nn.Module, parameters: Sequence[nn.Parameter]) -> str | None:
    """Describe a hook on gradients that is registered on the model or its parameters; None if there is none."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a hook on the gradients of module {name!r}"
    hooked = any(parameter._backward_hooks for parameter in parameters)
    return "a hook on the gradient of a parameter" if hooked else None


def altered_gradients(losses: Tensor, watch: Watch) -> str | None:
    """Describe what makes the gradients of losses differ from derivatives: a hook, or a `Function`; else None.

    Args:
        losses: losses that were computed with gradients.
        watch: the functions that were called for them.
    """
    if watch.hooks is not None:
        return "a hook on a gradient"
    seen: set[Any] = set()
    todo: list[Any] = [losses.grad_fn]
    while todo and len(seen) < _LOOKED_AT:
        node = todo.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction) and not _of_torch(node):
            return f"the autograd function {type(node).__name__.removesuffix('Backward')}"
        seen.add(node)
        todo += [following for following, _ in node.next_functions]
    return None


def _of_torch(node: BackwardCFunction) -> bool:
    """Whether an autograd function belongs to PyTorch itself, such as the function of a checkpoint."""
    return getattr(type(node), "_forward_cls", type(node)).__module__.split(".")[0] == "torch"


class Observer:
    """Sees every call of a known layer, first forward, then (in reverse order) backward."""

    def forward(self, layer: Layer, a: Tensor) -> Any:
        """Return what `backward` will need of the layer's input a `[b·r, …]`; by default a itself."""
        return a

    def backward(self, layer: Layer, kept: Any, d: Tensor, repeats: int) -> None:
        """Use the gradient d `[b·r, …]` at the layer's output, with r = `repeats` rows per example; here do nothing."""


@dataclass
class Calls:
    """What happened in one run: which layers were called, and with how many rows per example."""

    watch: Watch
    """The functions that were called."""
    rows: list[tuple[str, int]] = field(default_factory=list)
    touched: list[nn.Parameter] = field(default_factory=list)
    """Parameters in the observation's `unseen` that had a gradient other than zero."""
    strayed: list[nn.Parameter] = field(default_factory=list)
    """Parameters that had a gradient from outside of their layers."""
    alters: str | None = None
    """What makes gradients differ from derivatives, if the run looked for it; None if nothing does."""
    misplaced: str | None = None
    """A layer whose rows are not those of the examples in their order, or None."""
    losses: Tensor | None = None
    """Losses of the examples `[b]`."""

    @property
    def suspicious(self) -> bool:
        """Whether the run did something that the layers may not show."""
        watch = self.watch
        return bool(self.strayed) or watch.moves is not None or watch.hooks is not None or self.misplaced is not None

    @property
    def signature(self) -> Signature:
        """The same for runs that call the same functions, and the same layers with as many rows per example."""
        return tuple(sorted(self.rows)), self.watch.called


class Observation:
    """Hooks on the layers of a model that tell an observer what happens in a batch; for one batch or many.

    While the hooks are on, only `unseen` and the parameters of the layers require a gradient.

    Args:
        space: model and chosen parameters.
        layers: the layers to observe.
        loss: loss of the examples.
        unseen: parameters to watch: a run records whether the loss depends on them.
    """

    def __init__(
        self, space: ParameterSpace, layers: list[Layer], loss: ExampleLoss, unseen: Iterable[nn.Parameter] = ()
    ) -> None:
        self._space, self._loss, self._unseen = space, loss, list(unseen)
        self._watched = _watched(layers, self._unseen)
        self._copied = [layer for layer in layers if layer.copied is not None]
        self._biases = [layer for layer in layers if layer.bias_of is not None]
        self._tapped = [layer for layer in layers if layer.copied is None and layer.bias_of is None]
        self._run: _Run | None = None

    @contextmanager
    def on(self) -> Iterator[Observation]:
        """Keep the hooks on the layers inside this context."""
        handles: list[RemovableHandle] = []
        own = {id(parameter) for parameter in self._watched}
        with self._space.require_gradients(of_chosen=False, also=[*self._unseen, *self._watched]):
            try:
                for layer in [*self._tapped, *self._biases]:
                    handles += _detached_inside(layer, own)
                for layer in self._tapped:
                    handles.append(layer.module.register_forward_hook(self._hook(layer), with_kwargs=True))
                yield self
            finally:
                for handle in handles:
                    handle.remove()

    def _hook(self, layer: Layer) -> Callable[..., Tensor | None]:
        def on_forward(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
        ) -> Tensor | None:
            if self._run is None:
                return None
            a = args[0] if args else kwargs["input"]
            with torch._C.DisableTorchFunction():  # the calls made here are not the model's
                if self._loss.vectorized:
                    return UnderVmap.apply(output, a, layer, self._run.tap)
                return self._run.tap(layer, a, output)

        return on_forward

    def run(
        self,
        batch: Any,
        observer: Observer,
        closely: Callable[[Watch], bool] = lambda watch: watch.moves is not None,
        allowed: float = 1e-3,
        alters: bool = False,
    ) -> Calls:
        """Run the summed loss of a batch forward and backward, and tell `observer` about every layer call.

        Args:
            batch: examples along dim 0.
            observer: the observer to tell.
            closely: given what the model did, whether a second backward pass checks which example each row belongs
                to (`RowOrder`).
            allowed: relative differences that rounding may explain.
            alters: whether to look for something that makes gradients differ from derivatives.
        """
        self._loss.prepare(self._space.model, batch)
        run = _Run(self._space, batch_length(batch), observer)
        calls = run.calls
        with self._given_instead(run) if self._copied or self._biases else nullcontext():
            self._run = run
            try:
                with calls.watch:
                    losses = self._loss.each(self._space.model, batch)
            except RuntimeError as error:
                if run.shared is None:
                    raise
                raise UnknownLayer(
                    f"layer {run.shared!r} returned one row for a batch of {run.size} examples, and the model does not "
                    f"take one for each ({str(error).partition(chr(10))[0]})"
                ) from error
            finally:
                self._run, run.ran = None, True  # a checkpoint calls layers again in the backward pass
            calls.losses = losses.detach()
            calls.alters = altered_gradients(losses, calls.watch) if alters else None
            if losses.requires_grad:
                if run.size > 1 and run.leaves and closely(calls.watch):
                    run.order = RowOrder(allowed)
                self._go_back(run, losses)
        run.leaves.clear()  # their hooks know the run: a cycle would keep them until Python looks for cycles
        return calls

    @contextmanager
    def _given_instead(self, run: _Run) -> Iterator[None]:
        """Give the model copies in place of parameters and biases inside this context, for layers that need them."""
        with given_copies(self._copied, run.size) as copied, given_biases(self._biases, run.share):
            for layer, copies in copied:
                run.tell_of_copies(layer, copies)
            yield

    def _go_back(self, run: _Run, losses: Tensor) -> None:
        """Run the backward pass, and a second one if `run.order` is set; record parameters that have a gradient."""
        calls, order, leaves, others = run.calls, run.order, run.leaves, [*self._unseen, *self._watched]
        again = order is not None
        with full_precision(losses):
            found = torch.autograd.grad(losses.sum(), [*leaves, *others], allow_unused=True, retain_graph=again)
            if order is not None:
                weights = order.weights(run.size, losses)
                torch.autograd.grad((losses * weights).sum(), leaves, allow_unused=True)
                calls.misplaced = order.misplaced
        for at, d in enumerate(found[len(leaves) :]):
            if d is not None and bool(_dense(d).any()):
                (calls.touched if at < len(self._unseen) else calls.strayed).append(others[at])


def observe(
    space: ParameterSpace,
    layers: list[Layer],
    loss: ExampleLoss,
    batch: Any,
    observer: Observer,
    **looking: Any,
) -> Calls:
    """Run one batch under observation. For the arguments see `Observation` and `Observation.run`."""
    with Observation(space, layers, loss).on() as observation:
        return observation.run(batch, observer, **looking)


class _Run:
    """The state of one batch under observation."""

    def __init__(self, space: ParameterSpace, size: int, observer: Observer) -> None:
        self.dtype, self.size, self.observer = space.dtype, size, observer
        self.calls = Calls(Watch(size))
        self.order: RowOrder | None = None  # checks which example each row belongs to, where that is in doubt
        self.ran = False  # whether the losses are known; from then on gradients are those of their sum
        self.leaves: list[Tensor] = []
        self.shared: str | None = None  # a layer whose only row was given to every example

    def tell_of_copies(self, layer: Layer, copies: Tensor) -> None:
        """Tell the observer about the copies of a parameter, and later about their gradient."""
        self.leaves.append(copies)
        shape = self.size, *_of(layer.weight).shape
        kept = self.observer.forward(layer, copies.detach().view(shape))
        back = self._back(layer, kept, 1)
        copies.register_hook(lambda d: back(d.view(shape)))

    def _back(self, layer: Layer, kept: Any, repeats: int) -> Callable[[Tensor], None]:
        """Return the hook for the gradient at the output of a layer; it frees `kept` after the final backward pass."""
        observer, dtype, held = self.observer, self.dtype, [kept]

        def on_gradient(d: Tensor) -> None:
            d = d.detach()
            if self.order is not None and self.order.saw(layer, d, repeats):
                return
            own = held.pop() if self.ran else held[0]  # a loss may take gradients of its own while it runs
            with full_precision(d):
                observer.backward(layer, own, _in_full(d, dtype), repeats)

        return on_gradient

    def tap(self, layer: Layer, a: Tensor, output: Tensor) -> Tensor:
        """Tell the observer about a layer's input; return an output whose hook will tell about its gradient."""
        a, rows, size = a.detach(), output.shape[0], self.size
        if rows != size and rows == 1:  # shared by the batch, as position embeddings are
            a, output, rows = a.expand(size, *a.shape[1:]), output.expand(size, *output.shape[1:]), size
            self.shared = layer.name
        repeats, remainder = divmod(rows, size)
        if remainder or not repeats:
            raise UnknownLayer(
                f"layer {layer.name!r} returned {list(output.shape)} for a batch of {size} examples, "
                "so its rows cannot be told apart by example"
            )
        self.calls.rows.append((layer.name, repeats))
        with full_precision(a):
            kept = self.observer.forward(layer, _in_full(a, self.dtype))
        tapped = output
        if not output.requires_grad:
            tapped = output.detach().requires_grad_()
            self.leaves.append(tapped)
            output = tapped.clone() if layer.copies_output else tapped
        tapped.register_hook(self._back(layer, kept, repeats))
        return output

    def share(self, layer: Layer, positions: Tensor, bias: Tensor) -> Tensor:
        """Return scores `[1, h, q, k]` of all examples as one copy per example, so that each has its own gradient."""
        if bias.dim() != 4 or len(bias) != 1 or bias.shape[2:] != positions.shape:
            raise UnknownLayer(f"layer {layer.name!r} gives scores {list(bias.shape)}, which are not [1, h, q, k]")
        self.calls.rows.append((layer.name, 1))
        with full_precision(positions):
            kept = self.observer.forward(layer, positions.expand(self.size, *positions.shape))
        copies = bias.detach().expand(self.size, *bias.shape[1:]).requires_grad_()
        self.leaves.append(copies)
        back = self._back(layer, kept, 1)
        copies.register_hook(lambda d: back(d.permute(0, 2, 3, 1)))
        return copies


def _watched(layers: list[Layer], unseen: list[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters of the layers, except those given as copies and those in `unseen`."""
    left_out = {id(parameter) for parameter in unseen}
    left_out |= {id(layer.weight) for layer in layers if layer.copied is not None}
    own = [value for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    return list({id(value): value for value in own if id(value) not in left_out}.values())


def _detached_inside(layer: Layer, watched: set[int]) -> list[RemovableHandle]:
    """Make a layer use detached parameters in its own calls, also if a checkpoint repeats a call; return the hooks."""
    own = {"weight": layer.weight, "bias": layer.bias}
    mine = {key: value for key, value in own.items() if value is not None and id(value) in watched}
    if not mine:
        return []
    swap, back = _swaps(layer.module._parameters, mine)
    return [
        layer.module.register_forward_pre_hook(swap),
        layer.module.register_forward_hook(back, prepend=True, always_call=True),
    ]


def _swaps(held: dict[str, Any], own: dict[str, nn.Parameter]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Return two hooks: one gives a module detached parameters, unless it holds others; one puts `own` back."""
    detached = {key: parameter.detach() for key, parameter in own.items()}
    given: list[str] = []

    def swap(*_: Any) -> None:
        for key, parameter in own.items():
            if held[key] is parameter:
                held[key] = detached[key]
                given.append(key)

    def back(*_: Any) -> None:
        for key in given:
            held[key] = own[key]
        given.clear()

    return swap, back


def _of(parameter: nn.Parameter | None) -> nn.Parameter:
    assert parameter is not None
    return parameter


def _dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


def _in_full(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert activations to the dtype of the parameters, because autocast computes in a smaller one."""
    return values.to(dtype) if values.dtype != dtype and values.is_floating_point() else values
