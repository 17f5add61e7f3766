"""Builders of `Groups`: at random, from labels or clusters that the user has, and the paper's three clusterings."""

from ggda_ext.grouping.builders import by_column, by_label, from_clusters, random_groups
from ggda_ext.grouping.diagnostics import Summary
from ggda_ext.grouping.features import gradients, representations
from ggda_ext.grouping.kmeans_groups import GradKMeansGroups, KMeansGroups, ReprKMeansGroups

__all__ = [
    "random_groups",
    "by_label",
    "by_column",
    "from_clusters",
    "KMeansGroups",
    "ReprKMeansGroups",
    "GradKMeansGroups",
    "representations",
    "gradients",
    "Summary",
]
