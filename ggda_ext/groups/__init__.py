"""The partition of the training set: `Groups`, from whatever labels users have. Depends on nothing else here."""

from ggda_ext.groups.partition import GroupBatch, Groups, GroupsLike, Rest

__all__ = ["Groups", "GroupsLike", "GroupBatch", "Rest"]
