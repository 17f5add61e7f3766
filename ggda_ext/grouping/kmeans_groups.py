"""The paper's three clusterings, as builders of `Groups` with the interface of scikit-learn.

``GradKMeansGroups(model, loss_fn, group_size=64, random_state=0).fit_groups(data)`` returns the groups. As in
scikit-learn, ``fit_predict`` returns the labels; after ``fit`` the groups are in ``groups_``.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from sklearn.base import BaseEstimator, ClusterMixin
from torch import nn

from ggda_ext.grouping.builders import RandomState, generator, group_count
from ggda_ext.grouping.features import LayerChoice, gradients, input_features, representations
from ggda_ext.grouping.kmeans import inertia, kmeans, numbered, ranks
from ggda_ext.grouping.sizes import cut_to_count, cut_to_size, equal_sizes
from ggda_ext.grouping.whitening import Whitening, check_features, content_order, whitened
from ggda_ext.groups.partition import Groups
from ggda_ext.losses import as_example_loss
from ggda_ext.sharing import once

Self = TypeVar("Self", bound="KMeansGroups")


class KMeansGroups(ClusterMixin, BaseEstimator):
    """Groups of points with similar inputs: k-means on whitened raw features.

    The same `random_state` gives exactly the same groups. Random draws depend on the features of a point and not on its
    position, so a permutation of the data permutes the groups in the same way. (Points with exactly the same features
    may change places if they are in different groups.) Groups are numbered from the middle outwards, in whitened
    features: group 0 holds the point nearest to the mean, group 1 the nearest point outside of group 0, and so on. So
    neither groups nor ids depend on the order of the data. Except for ties and rounding, they do not depend on the
    coordinates of the features either. With several ranks, rank 0 clusters for all of them.

    Args:
        group_size: mean size of a group; there are ⌈n / group_size⌉ groups.
        n_groups: number of groups; pass this or `group_size`.
        max_size: maximum size of a group. Larger clusters are cut, so there may be more groups than asked for.
        balanced: whether to make sizes equal, up to one point. This makes groups wider if the data is uneven, as
            gradients are; then `max_size` is the better choice.
        whiten: ``"pca"`` (give all directions the same variance), ``"scale"`` (give all features the same variance) or
            None. Directions and features without variance are left out.
        max_iter: maximum number of Lloyd iterations.
        tol: stop when the squared shift of all centres is at most this, in units of the features' variance. With more
            than 500 clusters, also stop when an iteration lowers the inertia by less than this fraction.
        random_state: a seed, or a NumPy generator. Global random states are neither read nor changed.
        batch_size: number of examples fetched at a time from a data set or loader.

    Attributes:
        groups_: the `Groups`.
        labels_: group id of every point `[n]`.
        inertia_: sum of squared distances to the group means, in whitened features.
        n_features_in_: number of features before whitening.

    >>> import numpy as np
    >>> KMeansGroups(n_groups=2, random_state=0).fit_groups(np.array([[0.0], [9.0], [0.1], [9.1]]))
    Groups(k=2, n=4, sizes 2…2)
    """

    _own_units = True  # raw features have different units: metres, years, euros

    def __init__(
        self,
        group_size: int | None = None,
        n_groups: int | None = None,
        *,
        max_size: int | None = None,
        balanced: bool = False,
        whiten: Whitening = "pca",
        max_iter: int = 60,
        tol: float = 1e-3,
        random_state: RandomState = None,
        batch_size: int = 1024,
    ) -> None:
        self.group_size = group_size
        self.n_groups = n_groups
        self.max_size = max_size
        self.balanced = balanced
        self.whiten = whiten
        self.max_iter = max_iter
        self.tol = tol
        self.random_state = random_state
        self.batch_size = batch_size

    def features(self, data: Any) -> np.ndarray:
        """Return the features that are clustered, before whitening `[n, d]`."""
        return input_features(data, self.batch_size)

    def whitened_features(self, data: Any) -> np.ndarray:
        """Return the checked and whitened features `[n, r]`, in which distances are measured."""
        return whitened(check_features(self.features(data)), self.whiten, self._own_units)

    def fit(self: Self, data: Any, y: Any = None) -> Self:
        """Cluster `data`: an array, a tensor, a DataFrame, a data set or a DataLoader; `y` is not used."""
        self._check_parameters()
        rows = check_features(self.features(data))
        n = len(rows)
        k = group_count(n, self.group_size, self.n_groups)
        if self.balanced and self.max_size is not None and self.max_size < -(-n // k):
            raise ValueError(
                f"max_size={self.max_size} is below the size of {k} balanced groups of {n} points: ask for more groups."
            )
        labels, self.inertia_ = once(lambda: self._labels(rows, k))
        self.groups_ = Groups(labels)
        self.labels_ = self.groups_.labels
        self.n_features_in_ = rows.shape[1]
        return self

    def fit_groups(self, data: Any) -> Groups:
        """Cluster `data` and return the `Groups`."""
        return self.fit(data).groups_

    def _labels(self, rows: np.ndarray, k: int) -> tuple[np.ndarray, float]:
        """Return the cluster of every point `[n]` and the inertia, from checked features `[n, d]`."""
        order = content_order(rows)
        points = whitened(rows[order], self.whiten, self._own_units)
        outwards = np.argsort(ranks(np.einsum("ij,ij->i", points, points)), kind="stable")  # the same in any rotation
        order, points = order[outwards], points[outwards]
        sorted_labels = numbered(self._cluster(points, k))
        labels = np.empty(len(rows), np.int64)
        labels[order] = sorted_labels
        return labels, inertia(points, sorted_labels)

    def _cluster(self, points: np.ndarray, k: int) -> np.ndarray:
        rng = generator(self.random_state)
        if self.balanced:
            return equal_sizes(points, k)
        labels = cut_to_count(points, kmeans(points, k, rng, self.max_iter, self.tol), k)
        return labels if self.max_size is None else cut_to_size(points, labels, self.max_size)

    def _check_parameters(self) -> None:
        if self.whiten not in ("pca", "scale", None):
            raise ValueError(f"whiten={self.whiten!r} is not one of 'pca', 'scale', None.")
        for name in ("max_iter", "batch_size", "max_size"):
            value = getattr(self, name)
            if name == "max_size" and value is None:
                continue
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: pass a whole number of at least 1.")
        if not self.tol >= 0:
            raise ValueError(f"tol={self.tol!r}: pass a number of at least 0.")


class ReprKMeansGroups(KMeansGroups):
    """Groups of points that look similar to the model: k-means on the whitened inputs of its last linear layer.

    Args:
        model: any module in eval mode; it is not changed.
        loss_fn: needed only for a model with its own calling convention: a `BatchLoss` that calls the model.
        layer: name of the layer whose input is clustered; None for the last linear layer that runs.
        batch_size: number of examples per forward pass.
        group_size, n_groups, max_size, balanced, whiten, max_iter, tol, random_state: as in `KMeansGroups`.
    """

    _own_units = False

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any = None,
        *,
        group_size: int | None = None,
        n_groups: int | None = None,
        layer: LayerChoice = None,
        max_size: int | None = None,
        balanced: bool = False,
        whiten: Whitening = "pca",
        max_iter: int = 60,
        tol: float = 1e-3,
        random_state: RandomState = None,
        batch_size: int = 1024,
    ) -> None:
        super().__init__(
            group_size, n_groups, max_size=max_size, balanced=balanced, whiten=whiten, max_iter=max_iter, tol=tol,
            random_state=random_state, batch_size=batch_size,
        )  # fmt: skip
        self.model = model
        self.layer = layer
        self.loss_fn = loss_fn

    def features(self, data: Any) -> np.ndarray:
        """Return the inputs of the layer `[n, d]`."""
        return representations(self.model, data, layer=self.layer, batch_size=self.batch_size, loss_fn=self.loss_fn)


class GradKMeansGroups(ReprKMeansGroups):
    """Groups of points that pull the model the same way: k-means on whitened loss gradients.

    This is the paper's Grad-K-Means, its best grouping. It takes the gradient of each point's loss with respect to the
    input of the last linear layer. Gradients are clustered in the dimensions that they span, at most C − 1.

    Args:
        model: any module in eval mode; it is not changed.
        loss_fn: ``loss_fn(output, target)`` with any reduction, or an `ExampleLoss`; None for a model that returns its
            own loss.
        layer, batch_size: as in `ReprKMeansGroups`.
        group_size, n_groups, max_size, balanced, whiten, max_iter, tol, random_state: as in `KMeansGroups`.
    """

    def features(self, data: Any) -> np.ndarray:
        """Return gradients with respect to the inputs of the layer, rotated to `[n, C]` if that keeps the clusters."""
        return gradients(
            self.model,
            as_example_loss(self.loss_fn),
            data,
            layer=self.layer,
            batch_size=self.batch_size,
            rotate=self.whiten != "scale",  # scaling is by feature, so it needs the features themselves
        )
