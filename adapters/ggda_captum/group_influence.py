"""What the five classes share: groups where Captum has training points, a property where it has test points.

Without groups, and for groups of one, Captum's own code runs. Otherwise the score of group G is Captum's
formula with ∇ℓ_i replaced by Σ_{i∈G} ∇ℓ_i, which is the sum of Captum's scores over the members of G. Started by
``torchrun``, the ranks share out what is summed over groups; Captum's own code runs in full on each of them.
"""

from __future__ import annotations

import glob
import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from os.path import join
from pathlib import Path
from typing import Any

import numpy as np
import torch
from captum._utils.sample_gradient import SUPPORTED_MODULES
from captum.influence import DataInfluence
from captum.influence._utils.common import KMostInfluentialResults
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from ggda_ext import STRATEGIES, GroupGradients, Groups, PointGradients
from ggda_ext.attribution import property_directions
from ggda_ext.data import IndexedData
from ggda_ext.gradients.provider import Directions
from ggda_ext.groups import GroupsLike
from ggda_ext.losses import ExampleLoss, OutputLoss, as_example_loss
from ggda_ext.methods.keeping import KeptScores, keep_scores
from ggda_ext.model import inner_name, left_as_it_was, unwrapped
from ggda_ext.properties import Property


class GroupInfluence(DataInfluence):
    """Stands before one of Captum's classes and adds `groups`, `strategy` and `property` to it.

    Args:
        *args: the class's own arguments, unchanged.
        groups: a `Groups` or anything it accepts; None for Captum itself, point by point.
        strategy: how group gradients are computed, see `ggda_ext.STRATEGIES`. ``"auto"`` leaves groups of one to
            Captum; any other name computes them as groups, too.
        save_dir: a folder that keeps what is finished, see `ggda_ext.attribute`: after a kill the same calls go on with
            what is missing, and scores are memory maps on the CPU. Groups of one are computed as groups then.
        tag: with `save_dir`, names what cannot be seen from here, such as the version of the data; another is refused.
        **kwargs: the class's own arguments, unchanged. `batch_size` bounds Captum's own passes; group passes choose
            theirs by memory.
    """

    model: nn.Module
    loss_fn: Any
    test_loss_fn: Any
    train_dataloader: DataLoader
    _said_what_captum_drops = False

    def __init__(
        self,
        *args: Any,
        groups: GroupsLike | None = None,
        strategy: str = "auto",
        save_dir: str | Path | None = None,
        tag: str | None = None,
        **kwargs: Any,
    ) -> None:
        if strategy != "auto" and strategy not in STRATEGIES:
            raise ValueError(f"strategy={strategy!r} is not one of 'auto', {', '.join(map(repr, STRATEGIES))}.")
        self.groups: Groups | None = None
        self.strategy, self.save_dir, self.tag = strategy, save_dir, tag
        if groups is None and save_dir is not None:
            raise ValueError(f"save_dir={str(save_dir)!r} is given without groups: it keeps scores of groups.")
        if groups is None:
            super().__init__(*args, **kwargs)
            return
        bound = inspect.signature(super().__init__).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given |= unwrapped_arguments(given)
        self.groups = _groups_of(groups, given["train_dataset"])
        _check_checkpoints(given.get("checkpoints"))
        given["checkpoints_load_func"] = CheckpointLoader(given["checkpoints_load_func"])
        with left_as_it_was(given["model"], only_on_failure=True):
            super().__init__(*bound.args, **bound.kwargs)

    @property
    def _grouped(self) -> bool:
        """Whether the training side is summed by group; if not, it is Captum's, in the order of the data set."""
        captum_serves = self.strategy == "auto" and self.save_dir is None
        return self.groups is not None and not (self.groups.are_singletons and captum_serves)

    def influence(self, inputs: Any = None, *args: Any, property: Property | None = None, **kwargs: Any) -> Any:
        """Captum's `influence` with groups as training points; `property` stands where `inputs` would.

        A positive score means that the loss, or the property, is predicted to rise if the group is removed.

        Args:
            inputs: test points, a tuple ``(*inputs, labels)`` or a DataLoader of such tuples.
            *args: Captum's own arguments, unchanged.
            property: a callable ``g(model) -> Tensor`` or one of `ggda_ext.properties`, instead of `inputs`. As
                with a test loss, a positive score means that training on the group lowers g: for a g where
                higher is better, proponents are the groups that hurt.
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
            return self._in_group_order(super()._influence(inputs, **options))
        return self._group_influence(inputs, **options)

    def _get_k_most_influential(
        self, inputs: Any, k: int = 5, proponents: bool = True, **options: Any
    ) -> KMostInfluentialResults:
        if self._by_captum(inputs):
            found = super()._get_k_most_influential(inputs, k, proponents, **options)
            if self.groups is None or self._grouped:
                return found
            ids = torch.from_numpy(self.groups.labels.astype(np.int64)).to(found.indices.device)
            return KMostInfluentialResults(ids[found.indices], found.influence_scores)
        scores = self._group_influence(inputs, **options)
        best = torch.topk(scores, min(k, scores.shape[1]), dim=1, largest=proponents)
        return KMostInfluentialResults(best.indices, best.values)

    def self_influence(self, *args: Any, **kwargs: Any) -> Tensor:
        """Captum's `self_influence`; for the training set (no inputs given), of every group `[k]`.

        The self influence of a group is the influence of the whole group on the loss of the whole group: the
        quadratic form ``(Σ_{i∈G} ∇ℓ_i)ᵀ A (Σ_{i∈G} ∇ℓ_i)`` of its summed gradient, with Captum's A (learning
        rates and checkpoints for TracIn, the inverse Hessian for influence functions).

        It is not the sum of the members' own self influences, but that sum plus the influence of every member
        on every other one, ``Σ_{i≠j∈G} ∇ℓ_iᵀ A ∇ℓ_j``. Members that pull the same way make it grow with the
        square of the group's size; members that pull against each other cancel. So it is large for a group that
        the model learned from as one (a source of wrong labels, a rare cluster), and small for a mixed group,
        even one that holds a few outliers. For groups of one it is Captum's self influence. Divide by
        ``groups.sizes ** 2`` to compare groups of different sizes by the self influence of their mean gradient.

        Test points given as `inputs` keep Captum's meaning: one number per point.
        """
        given = inspect.signature(super().self_influence).bind(*args, **kwargs).arguments
        points = given.get("inputs", given.get("inputs_dataset"))
        if points is not None or not self._grouped:
            values = super().self_influence(*args, **kwargs)
            return values if points is not None else self._in_group_order(values)
        return self._group_self_influence(given.get("show_progress", False))

    def _group_influence(self, inputs: Any, show_progress: bool = False) -> Tensor:
        """Scores `[m, k]` of test points or of an `OfProperty`."""
        raise NotImplementedError

    def _group_self_influence(self, show_progress: bool) -> Tensor:
        """The quadratic form of every group's summed gradient `[k]`."""
        raise NotImplementedError

    def _parameters(self) -> list[nn.Parameter]:
        """The parameters that count, in Captum's order."""
        layers: list[nn.Module] | None = getattr(self, "layer_modules", None)
        return [parameter for module in layers or [self.model] for parameter in module.parameters()]

    def _by_captum(self, inputs: Any) -> bool:
        return not self._grouped and not isinstance(inputs, OfProperty)

    def _in_group_order(self, values: Tensor) -> Tensor:
        """Captum's values `[…, n]`, put in the order of groups of one."""
        if self.groups is None or self._grouped:
            return values
        return values[..., torch.from_numpy(self.groups.order.astype(np.int64)).to(values.device)]

    def _keep(self, inputs: Any = None) -> KeptScores:
        """Where scores are kept; those of test points and of properties may be of different training losses."""
        if self.save_dir is None:
            return keep_scores(None, self.tag)
        return keep_scores(
            Path(self.save_dir) / ("properties" if isinstance(inputs, OfProperty) else "inputs"), self.tag
        )

    @cached_property
    def _train_data(self) -> IndexedData:
        return IndexedData(self.train_dataloader, "train_dataset")

    def _provider(self, show_progress: bool = False, inputs: Any = None) -> GroupGradients:
        """The group-summed gradients of the training loss, at the model's current parameters, to explain `inputs`."""
        if not self._said_what_captum_drops:
            self._said_what_captum_drops = True
            _warn_of_dropped(self._dropped_by_captum())
        return GroupGradients(
            self.model,
            self._example_loss(self.loss_fn, inputs),
            self._train_data,
            self.groups,
            parameters=self._parameters(),
            strategy=self.strategy,
            show_progress=show_progress,
        )

    def _directions(self, provider: GroupGradients, inputs: Any) -> Directions:
        """What the group gradients are multiplied with: a property's gradient, or those of test points."""
        if isinstance(inputs, OfProperty):
            return property_directions(provider, inputs.property)
        return PointGradients(self._example_loss(self.test_loss_fn, inputs), points_of(inputs))

    def _example_loss(self, loss_fn: Any, inputs: Any) -> ExampleLoss:
        """The loss of each example, of training or test points, when `inputs` is to be explained."""
        return OutputLoss(None) if loss_fn is None else as_example_loss(loss_fn)  # as in Captum: the summed outputs

    def _point_provider(self, points: PointGradients, groups: GroupsLike | None = None) -> GroupGradients:
        """The gradients of test points, each for itself or summed by `groups`."""
        return GroupGradients(self.model, points.loss, points.data, groups, parameters=self._parameters())

    def _dropped_by_captum(self) -> list[str]:
        """Names of the parameters that count, but not in Captum with ``sample_wise_grads_per_batch=True``."""
        if not getattr(self, "sample_wise_grads_per_batch", False):
            return []
        layers: list[nn.Module] | None = getattr(self, "layer_modules", None)
        seen = {
            id(parameter)
            for module in self.model.modules()
            if (layers is None or module in layers) and isinstance(module, tuple(SUPPORTED_MODULES))
            for parameter in module.parameters(recurse=False)
        }
        dropped = {id(parameter) for parameter in self._parameters()} - seen
        return [name for name, parameter in self.model.named_parameters() if id(parameter) in dropped]


def _warn_of_dropped(names: list[str]) -> None:
    if names:
        warnings.warn(
            f"{len(names)} parameters, first {names[0]!r}, are not in Linear or Conv2d layers: Captum's "
            "sample_wise_grads_per_batch=True leaves them out silently; scores of groups and properties count them. "
            "Pass layers= to choose the layers that count.",
            stacklevel=2,
        )


def unwrapped_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Captum's arguments that differ for the model inside of a DistributedDataParallel: itself, its layers' names."""
    model = given["model"]
    inner: dict[str, Any] = {"model": unwrapped(model)}
    if given.get("layers") is not None:
        inner["layers"] = [inner_name(layer, model) for layer in given["layers"]]
    if isinstance(given.get("final_fc_layer"), str):
        inner["final_fc_layer"] = inner_name(given["final_fc_layer"], model)
    return inner


@dataclass(frozen=True)
class OfProperty:
    """A property on its way through Captum's methods, in the place of test points."""

    property: Property


class NoInputs(ValueError, AssertionError):
    """Neither test points nor a property; an AssertionError too, because Captum raises one."""


class CheckpointLoader:
    """The user's `checkpoints_load_func`, with errors that name the checkpoint."""

    def __init__(self, load: Callable[[nn.Module, Any], float]) -> None:
        self.load: Callable[[nn.Module, Any], float] = load.load if isinstance(load, CheckpointLoader) else load

    def __call__(self, model: nn.Module, checkpoint: Any) -> float:
        try:
            return self.load(model, checkpoint)
        except Exception as error:
            path = isinstance(checkpoint, str | PathLike)
            what = repr(checkpoint) if path else f"of type {type(checkpoint).__name__}"
            raise ValueError(
                f"checkpoint {what} does not load ({type(error).__name__}: {error}): give checkpoints= only files "
                "of this model, or pass the checkpoints_load_func that reads them."
            ) from error


def points_of(inputs: Any) -> IndexedData:
    """Test points by index, from a tuple or from whatever DataLoader Captum could run through once."""
    if isinstance(inputs, DataLoader):
        batched = inputs.batch_sampler is not None and isinstance(inputs.sampler, SequentialSampler)
        if batched and not isinstance(inputs.dataset, IterableDataset):
            return IndexedData(inputs, "inputs")
        return IndexedData(tuple(torch.cat(field) for field in zip(*inputs, strict=True)), "inputs")
    if not isinstance(inputs, tuple | list):
        raise TypeError(
            f"inputs is a {type(inputs).__name__}: pass a tuple (*inputs, labels) or a DataLoader of such tuples."
        )
    return IndexedData(tuple(inputs), "inputs")


def _groups_of(groups: GroupsLike, train_dataset: Any) -> Groups:
    source = train_dataset.dataset if isinstance(train_dataset, DataLoader) else train_dataset
    if isinstance(source, IterableDataset):
        raise TypeError(
            "train_dataset is an IterableDataset, whose points have no index that groups could refer to: pass a "
            "map-style Dataset (a list of its examples is one)."
        )
    return Groups.of(groups, IndexedData(train_dataset, "train_dataset").n)


def _check_checkpoints(checkpoints: Any) -> None:
    """Refuse a folder or a list without checkpoints, in the words of Captum's error and a few more."""
    empty = isinstance(checkpoints, list | tuple) and not checkpoints
    if empty or (isinstance(checkpoints, str) and not glob.glob(join(checkpoints, "*"))):
        raise ValueError(
            f"Invalid checkpoints provided for TracIn class: {checkpoints!r} holds no checkpoint; pass a folder with "
            "files in it, a list of paths, or any iterable of what checkpoints_load_func loads."
        )
