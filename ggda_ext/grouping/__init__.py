"""Builders of `Groups`: at random, from what the user has, and the paper's three clusterings."""

from ggda_ext.grouping.clustering import GradKMeansGroups, KMeansGroups, ReprKMeansGroups
from ggda_ext.grouping.diagnostics import Summary
from ggda_ext.grouping.features import gradients, representations
from ggda_ext.grouping.simple import by_column, by_label, from_clusters, random_groups

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
