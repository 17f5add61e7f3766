"""Data sets as the library reads them: any kind of data by index, in batches.

`indexed` has one interface to whatever holds the examples, and what is done with a batch of any shape; `loaders` what
has to be known of a DataLoader; `in_memory` points that stay in memory.
"""

from ggda_ext.data.in_memory import RememberedPoints, first_points
from ggda_ext.data.indexed import (
    DataLike,
    IndexedData,
    SelectedRows,
    SomePoints,
    as_batch_of_one,
    batch_length,
    pick,
    take,
    tensors_in,
    to_device,
)

__all__ = [
    "DataLike",
    "IndexedData",
    "SelectedRows",
    "SomePoints",
    "RememberedPoints",
    "first_points",
    "as_batch_of_one",
    "batch_length",
    "pick",
    "take",
    "tensors_in",
    "to_device",
]
