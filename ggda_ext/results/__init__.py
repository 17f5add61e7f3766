"""Results: scores with the names of their groups and properties, and methods to rank, print, save and load them."""

from ggda_ext.results import saving  # lets torch.load read an Attribution in a process that has not saved one
from ggda_ext.results.attribution import Attribution
from ggda_ext.results.method import MethodFacts

__all__ = ["saving", "Attribution", "MethodFacts"]
