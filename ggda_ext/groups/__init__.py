"""The partition of the training set: `Groups`, from whatever labels users have. Depends on nothing else here."""

from ggda_ext.groups.labels import Rest
from ggda_ext.groups.partition import GroupBatch, Groups, GroupsLike

__all__ = ["Groups", "GroupsLike", "GroupBatch", "Rest"]
