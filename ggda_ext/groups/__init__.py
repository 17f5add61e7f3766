"""The partition of the training set: `Groups`, from whatever labels users have. Depends on nothing else here."""

from ggda_ext.groups.batches import GroupBatch
from ggda_ext.groups.labels import Rest
from ggda_ext.groups.partition import Groups, GroupsLike

__all__ = ["Groups", "GroupsLike", "GroupBatch", "Rest"]
