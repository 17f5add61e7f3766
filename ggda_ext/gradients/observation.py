"""A pass that observes layers: their inputs on the way forward, the gradients at their outputs on the way back.

An `Observation` runs one forward pass and an activation-only backward pass. Hooks hand the input a of every known layer
to an observer, and then the gradient d at its output. The gradients of parameters are left out meanwhile, so the
backward pass costs half of an ordinary one. Hooks on tensors see the gradient at the value the layer returned, also
when an in-place activation overwrites it afterwards. A parameter outside any known layer (a scale, a class token) may
be given to the model as one copy per example; then the gradient at the copies is what is observed.

Meanwhile a `Watch` sees the functions that the model calls from Python. One that may move rows, a number that Python is
told, or a hook that may change gradients on the way back, can make a strategy wrong: always, for some batch sizes, or
for rare examples. Such batches are looked at closely.

A layer is called with detached parameters, while the parameters themselves require a gradient. So where the loss has a
gradient of a parameter, something else uses it (a functional call, a penalty), and layers alone do not tell the score.
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


_LOOKED_AT = 100_000  # nodes of a graph
TELLERS = {
    Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.__contains__, Tensor.item,
    Tensor.tolist, Tensor.equal, torch.equal, Tensor.allclose, torch.allclose, torch.is_nonzero,
}  # fmt: skip
_GETTERS: dict[str, Any] = {name: getattr(Tensor, name).__get__ for name in ("grad_fn", "requires_grad")}
_HOOKS = {Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, _GETTERS["grad_fn"]}
_ASKS = {_GETTERS["requires_grad"], torch.is_grad_enabled}
_LOOKED_AT_CLOSELY = {*MOVERS, *TELLERS, *_HOOKS, *_ASKS}


class Watch(TorchFunctionMode):
    """Lets functions run, and keeps their names.

    Args:
        size: examples of the batch.

    Attributes:
        moves: the name of a function that may have moved rows of the batch, or None.
        hooks: the name of a function that may have put a hook on a gradient, or None.
        asks: whether the model asks if something requires a gradient, and may do otherwise if not.
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
        """The same for runs that call the same functions in the same order; asked for when a run is over."""
        return hash(tuple(self._called))

    @cached_property
    def told(self) -> int:
        """The same for runs in which Python was told the same numbers, too."""
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
    """A hook on gradients that the model or its parameters were given, or None."""
    for name, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a hook on the gradients of module {name!r}"
    hooked = any(parameter._backward_hooks for parameter in parameters)
    return "a hook on the gradient of a parameter" if hooked else None


def altered_gradients(losses: Tensor, watch: Watch) -> str | None:
    """What makes gradients of losses other than derivatives: a hook, or a `Function`; None if nothing does.

    Args:
        losses: computed with gradients.
        watch: what was called for it.
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
    """Whether an autograd function is PyTorch's own, such as that of a checkpoint."""
    return getattr(type(node), "_forward_cls", type(node)).__module__.split(".")[0] == "torch"


class Observer:
    """Sees every call of a known layer, first forward, then (in reverse order) backward."""

    def forward(self, layer: Layer, a: Tensor) -> Any:
        """Keep what `backward` will need of the layer's input a `[b·r, …]`; by default a itself."""
        return a

    def backward(self, layer: Layer, kept: Any, d: Tensor, repeats: int) -> None:
        """Use the gradient at the layer's output d `[b·r, …]`, of r = `repeats` rows per example; here, do not."""


@dataclass
class Calls:
    """What happened in one run: how often each layer was called, with how many rows per example."""

    watch: Watch
    """Sees the functions that are called."""
    rows: list[tuple[str, int]] = field(default_factory=list)
    touched: list[nn.Parameter] = field(default_factory=list)
    """Those of the parameters asked about that had a gradient other than zero."""
    strayed: list[nn.Parameter] = field(default_factory=list)
    """Parameters that had a gradient outside of their layers."""
    alters: str | None = None
    """What makes gradients other than derivatives, where that was asked for."""
    misplaced: str | None = None
    """A layer whose rows turned out not to be those of the examples in their order."""
    losses: Tensor | None = None
    """Of the examples `[b]`."""

    @property
    def suspicious(self) -> bool:
        """Whether something was seen that layers may not tell."""
        watch = self.watch
        return bool(self.strayed) or watch.moves is not None or watch.hooks is not None or self.misplaced is not None

    @property
    def signature(self) -> Signature:
        """The same for runs that call the same functions, and layers equally often with as many rows per example."""
        return tuple(sorted(self.rows)), self.watch.called


class Observation:
    """The layers of a model with hooks on them that tell an observer what a batch does, for one batch or many.

    Meanwhile no parameter but `unseen` and those of the layers requires a gradient.

    Args:
        space: model and chosen parameters.
        layers: what to observe.
        loss: of the examples.
        unseen: parameters to look after: whether the loss depends on them.
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
        """With the hooks on the layers."""
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
            with torch._C.DisableTorchFunction():  # what is done here is not the model's
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
        """Run the summed loss of a batch forward and backward, telling `observer` about every layer call.

        Args:
            batch: examples along dim 0.
            observer: is told.
            closely: by what the model did, whether a second backward pass looks whose rows are whose (`RowOrder`).
            allowed: relative differences that rounding may explain.
            alters: whether to look for what makes gradients other than derivatives.
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
                self._run, run.ran = None, True  # a checkpoint calls layers again on the way back
            calls.losses = losses.detach()
            calls.alters = altered_gradients(losses, calls.watch) if alters else None
            if losses.requires_grad:
                if run.size > 1 and run.leaves and closely(calls.watch):
                    run.order = RowOrder(allowed)
                self._go_back(run, losses)
        return calls

    @contextmanager
    def _given_instead(self, run: _Run) -> Iterator[None]:
        """With copies in place of parameters and biases, where layers ask for it."""
        with given_copies(self._copied, run.size) as copied, given_biases(self._biases, run.share):
            for layer, copies in copied:
                run.tell_of_copies(layer, copies)
            yield

    def _go_back(self, run: _Run, losses: Tensor) -> None:
        """The backward pass, and a second one if that is wanted; parameters that have a gradient are kept."""
        calls, order, leaves, others = run.calls, run.order, run.leaves, [*self._unseen, *self._watched]
        again = order is not None
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
    """Run one batch under observation; see `Observation.run`."""
    with Observation(space, layers, loss).on() as observation:
        return observation.run(batch, observer, **looking)


class _Run:
    """One batch under observation: what happened so far."""

    def __init__(self, space: ParameterSpace, size: int, observer: Observer) -> None:
        self.dtype, self.size, self.observer = space.dtype, size, observer
        self.calls = Calls(Watch(size))
        self.order: RowOrder | None = None  # looks whose rows are whose, where that is in doubt
        self.ran = False  # whether the losses are known, and gradients are those of their sum
        self.leaves: list[Tensor] = []
        self.shared: str | None = None  # a layer whose only row was given to every example

    def tell_of_copies(self, layer: Layer, copies: Tensor) -> None:
        """Tell of a parameter's copies, and of their gradient."""
        self.leaves.append(copies)
        shape = self.size, *_of(layer.weight).shape
        kept = self.observer.forward(layer, copies.detach().view(shape))
        back = self._back(layer, kept, 1)
        copies.register_hook(lambda d: back(d.view(shape)))

    def _back(self, layer: Layer, kept: Any, repeats: int) -> Callable[[Tensor], None]:
        """What is done with the gradient at the output of a layer; `kept` is let go of once the loss has used it."""
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
        """Tell of a layer's input; what goes on in place of its output tells of its gradient."""
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
        """Scores `[1, h, q, k]` that all examples get, as one copy for each, so that each has a gradient of its own."""
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
    """The parameters of the layers, but for copies and those that are looked after already."""
    left_out = {id(parameter) for parameter in unseen}
    left_out |= {id(layer.weight) for layer in layers if layer.copied is not None}
    own = [value for layer in layers for value in (layer.weight, layer.bias) if value is not None]
    return list({id(value): value for value in own if id(value) not in left_out}.values())


def _detached_inside(layer: Layer, watched: set[int]) -> list[RemovableHandle]:
    """Let a layer compute with detached parameters, in its own calls only; also when a checkpoint calls it again."""
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
    """Hooks that put detached parameters into a module's own, unless others are there, and put the parameters back."""
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
    """Activations in the precision of the parameters; autocast makes them smaller."""
    return values.to(dtype) if values.dtype != dtype and values.is_floating_point() else values
