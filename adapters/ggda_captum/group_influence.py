"""Base class of the five influence classes: groups replace Captum's training points, a property replaces test points.

`ggda_ext.drop_in` decides whether Captum or the core answers a call. The core's score of group G is Captum's formula
with ∇ℓ_i replaced by Σ_{i∈G} ∇ℓ_i, which is the sum of Captum's scores over the members of G. Under ``torchrun`` the
ranks share the sums over groups; Captum's own code runs in full on every rank.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from captum.influence import DataInfluence
from captum.influence._utils.common import KMostInfluentialResults
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ggda_captum.arguments import (
    WORDS,
    CheckpointLoader,
    check_checkpoints,
    check_layers,
    count_points,
    points_of,
    unwrapped_arguments,
    warn_of_dropped,
)
from ggda_captum.last_layer import Asked
from ggda_ext import PointGradients
from ggda_ext.attribution import as_points
from ggda_ext.data import IndexedData
from ggda_ext.drop_in import DropIn, FullSignature
from ggda_ext.groups import GroupsLike
from ggda_ext.losses import ExampleLoss, OutputLoss, as_example_loss
from ggda_ext.properties import Property
from ggda_ext.words import refuse_words


class GroupInfluence(FullSignature, DataInfluence):
    """A mixin that stands before one of Captum's classes and adds `groups`, `strategy` and `property` to it.

    Args:
        *args: arguments of Captum's class, unchanged.
        groups: a `Groups` or anything that `Groups` accepts. With None, Captum's own code scores single points.
        strategy: how group gradients are computed, see `ggda_ext.STRATEGIES`. With ``"auto"``, Captum computes groups
            of one point; with any other name, the core computes them as groups, too.
        save_dir: a folder that keeps finished results, see `ggda_ext.attribute`. After a kill, the same calls compute
            only what is missing. Scores are then memory maps on the CPU, and the core computes groups of one, too.
        tag: with `save_dir`, a name for the version of the data and of anything else that cannot be checked. A folder
            with another tag raises an error.
        memory_budget: bytes for the activations of one batch and for one block of rows, in group passes.
        **kwargs: arguments of Captum's class, unchanged. `batch_size` limits the batches of Captum's own passes; group
            passes choose their batch size by memory. `layers` selects the parameters that gradients are taken for.
    """

    model: nn.Module
    loss_fn: Any
    test_loss_fn: Any
    train_dataloader: DataLoader

    def __init__(
        self,
        *args: Any,
        groups: GroupsLike | None = None,
        strategy: str = "auto",
        save_dir: str | Path | None = None,
        tag: str | None = None,
        memory_budget: int | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_words(kwargs, WORDS, super().__init__, type(self).__name__)
        options: dict[str, Any] = {
            "strategy": strategy, "save_dir": save_dir, "tag": tag, "memory_budget": memory_budget,
        }  # fmt: skip
        if groups is None:
            self._drop_in = DropIn(**options)
            super().__init__(*args, **kwargs)
            return
        bound = inspect.signature(super().__init__).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given |= unwrapped_arguments(given)
        check_layers(given["model"], given.get("layers"))
        self._drop_in = DropIn(groups, n=count_points(given["train_dataset"]), **options)
        check_checkpoints(given.get("checkpoints"))
        given["checkpoints_load_func"] = load = CheckpointLoader(given["checkpoints_load_func"])
        with load.undone_on_failure(given["model"]):
            super().__init__(*bound.args, **bound.kwargs)

    @property
    def groups(self) -> Any:
        """The groups, or None if there are none."""
        return self._drop_in.groups

    def influence(self, inputs: Any = None, *args: Any, property: Property | None = None, **kwargs: Any) -> Any:
        """Run Captum's `influence` with groups instead of training points; `property` may replace `inputs`.

        A positive score means that the loss, or the property, is predicted to rise if the group is removed.

        Args:
            inputs: test points, a tuple ``(*inputs, labels)`` or a DataLoader of such tuples.
            *args: Captum's own arguments, unchanged.
            property: a callable ``g(model) -> Tensor`` or one of `ggda_ext.properties`, instead of `inputs`. As
                with a test loss, a positive score means that training on the group lowers g. If higher values of g
                are better, the proponents are therefore the groups that hurt.
            **kwargs: Captum's own arguments, unchanged.

        Returns:
            Scores `[tests or properties, groups]`; with ``k=``, the ids and scores of the k most influential groups.
        """
        if inputs is None and property is None:
            raise NoInputs(
                "one of `inputs` and `property` is required. Pass test points, or property=g; "
                "self influence has a method of its own, `self_influence`."
            )
        if inputs is not None and property is not None:
            raise ValueError("both `inputs` and `property` are given: pass one, and call twice to explain both.")
        return super().influence(inputs if property is None else OfProperty(property), *args, **kwargs)

    def _influence(self, inputs: Any, **options: Any) -> Tensor:
        if self._by_captum(inputs):
            return self._drop_in.in_group_order(super()._influence(inputs, **options))
        return self._group_scores(self._asked(inputs, options.pop("show_progress", False)), **options)

    def _get_k_most_influential(
        self, inputs: Any, k: int = 5, proponents: bool = True, **options: Any
    ) -> KMostInfluentialResults:
        if self._by_captum(inputs):
            found = super()._get_k_most_influential(inputs, k, proponents, **options)
            return KMostInfluentialResults(self._drop_in.group_ids(found.indices), found.influence_scores)
        scores = self._group_scores(self._asked(inputs, options.pop("show_progress", False)), **options)
        best = torch.topk(scores, min(k, scores.shape[1]), dim=1, largest=proponents)
        return KMostInfluentialResults(best.indices, best.values)

    def self_influence(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run Captum's `self_influence`; without inputs, return the self influence of every group `[k]`.

        The self influence of a group is the influence of the whole group on the loss of the whole group: the
        quadratic form ``(Σ_{i∈G} ∇ℓ_i)ᵀ A (Σ_{i∈G} ∇ℓ_i)`` of its summed gradient, with Captum's A (learning
        rates and checkpoints for TracIn, the inverse Hessian for influence functions).

        It is not the sum of the members' own self influences. It is this sum plus the influence of every member
        on every other member, ``Σ_{i≠j∈G} ∇ℓ_iᵀ A ∇ℓ_j``. If the members pull the same way, it grows with the
        square of the group's size; members that pull against each other cancel. So it is large for a group that the
        model learned from as a unit (a source of wrong labels, a rare cluster), and small for a mixed group, even if
        a few of its points are outliers. For groups of one it is Captum's self influence. Divide by
        ``groups.sizes ** 2`` to compare groups of different sizes by the self influence of their mean gradient.

        If points are given as `inputs`, the result is Captum's own: one number per point.
        """
        given = inspect.signature(super().self_influence).bind(*args, **kwargs).arguments
        points = given.get("inputs", given.get("inputs_dataset"))
        if points is not None or self._drop_in.by_toolkit:
            values = super().self_influence(*args, **kwargs)
            return values if points is not None else self._drop_in.in_group_order(values)
        return self._group_self_influence(self._asked(None, given.get("show_progress", False)))

    def _group_scores(self, asked: Asked) -> Tensor:
        """Scores of the groups `[m, k]`."""
        raise NotImplementedError

    def _group_self_influence(self, asked: Asked) -> Tensor:
        """The quadratic form of every group's summed gradient `[k]`."""
        raise NotImplementedError

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters that gradients are taken for, in Captum's order."""
        return [parameter for module in self._layers or [self.model] for parameter in module.parameters()]

    @property
    def _layers(self) -> list[nn.Module] | None:
        return getattr(self, "layer_modules", None)

    def _by_captum(self, inputs: Any) -> bool:
        return self._drop_in.by_toolkit and not isinstance(inputs, OfProperty)

    @cached_property
    def _train_data(self) -> IndexedData:
        check_layers(self.model, self._layers)
        if getattr(self, "sample_wise_grads_per_batch", False):
            warn_of_dropped(self.model, self._layers, self._parameters())
        return IndexedData(self.train_dataloader, "train_dataset")

    def _asked(self, inputs: Any, show_progress: bool = False) -> Asked:
        """Build the question to the core: the effect of the groups on `inputs`, or on themselves if `inputs` is None.

        Scores of test points and scores of properties are kept in separate folders, because their training losses may
        differ.
        """
        provider = self._drop_in.provider(
            self.model, self._example_loss(self.loss_fn, inputs), self._train_data, parameters=self._parameters(),
            show_progress=show_progress,
        )  # fmt: skip
        if isinstance(inputs, OfProperty):
            return Asked(provider, as_points(inputs.property), self._drop_in.keep("properties"))
        explained = None
        if inputs is not None:
            explained = PointGradients(self._example_loss(self.test_loss_fn, inputs), points_of(inputs))
        return Asked(provider, explained, self._drop_in.keep("inputs"))

    def _example_loss(self, loss_fn: Any, inputs: Any) -> ExampleLoss:
        """The loss of each training or test example that is used to explain `inputs`."""
        return OutputLoss(None) if loss_fn is None else as_example_loss(loss_fn)  # Captum then sums the outputs


@dataclass(frozen=True)
class OfProperty:
    """Wraps a property, so that it can be passed through Captum's methods instead of test points."""

    property: Property


class NoInputs(ValueError, AssertionError):
    """Neither test points nor a property were given. It is also an AssertionError, because Captum raises one."""
