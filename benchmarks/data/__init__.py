"""The data sets of the benchmarks: HELOC, MNIST, CIFAR-10 and QNLI, and a small BERT, from where they can be found."""

from benchmarks.data.command import command, where
from benchmarks.data.errors import DataError
from benchmarks.data.sets import CLASSES, TITLES, DataSet, load
from benchmarks.data.sources import BertSource, bert

__all__ = ["load", "DataSet", "bert", "BertSource", "DataError", "TITLES", "CLASSES", "command", "where"]
