"""The partition of the training set: `Groups`, built from any labels that users have. Needs no other subpackage."""

from ggda_ext.groups.labels import Rest
from ggda_ext.groups.partition import GroupBatch, Groups, GroupsLike

__all__ = ["Groups", "GroupsLike", "GroupBatch", "Rest"]
