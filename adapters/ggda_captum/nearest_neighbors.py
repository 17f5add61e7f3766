"""Exact nearest neighbours by inner product, for `TracInCPFastRandProj`: argmax_j ⟨query, data_j⟩."""

from __future__ import annotations

import torch
from captum.influence._utils.nearest_neighbors import NearestNeighbors
from torch import Tensor


class ExactNearestNeighbors(NearestNeighbors):
    """Computes all inner products and takes the k largest. It needs no extra package and no index."""

    def setup(self, data: Tensor) -> None:
        """Keep the rows `[n, …]` that will be searched."""
        self.data = data.flatten(1)

    def get_nearest_neighbors(self, query: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Indices and inner products `[m, min(k, n)]` of the nearest rows, nearest first."""
        best = torch.topk(query.flatten(1) @ self.data.T, min(k, len(self.data)), dim=1)
        return best.indices, best.values
