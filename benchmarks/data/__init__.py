"""The data sets HELOC, MNIST, CIFAR-10 and QNLI, and a small BERT, each from the first source that has it."""

from benchmarks.data.command import command, where
from benchmarks.data.errors import DataError
from benchmarks.data.sets import TITLES, DataSet, load
from benchmarks.data.sources import BertSource, bert

__all__ = ["load", "DataSet", "bert", "BertSource", "DataError", "TITLES", "command", "where"]
