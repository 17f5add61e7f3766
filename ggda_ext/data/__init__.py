"""Data sets as the library reads them: any kind of data by index, in batches, with a bar over the points.

`indexed` has one interface to whatever holds the examples, `batches` what is done with a batch of any shape, `loaders`
what has to be known of a DataLoader, `in_memory` points that stay in memory.
"""

from ggda_ext.data.batches import SelectedRows, as_batch_of_one, batch_length, pick, take, tensors_in, to_device
from ggda_ext.data.indexed import DataLike, IndexedData, ProgressBar, SomePoints, progress, with_progress

__all__ = [
    "DataLike",
    "IndexedData",
    "SelectedRows",
    "SomePoints",
    "ProgressBar",
    "progress",
    "with_progress",
    "as_batch_of_one",
    "batch_length",
    "pick",
    "take",
    "tensors_in",
    "to_device",
]
