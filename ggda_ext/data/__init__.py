"""How the library reads data sets: any kind of data, by index, in batches.

`indexed` has one interface to all kinds of data, and functions for batches of any shape. `loaders` reads the order and
the settings of a DataLoader. `in_memory` keeps points in memory.
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
