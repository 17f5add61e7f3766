"""TRAK's savers, under TRAK's names. Group sums are kept beside them by `ggda_trak.store`."""

from trak.savers import AbstractSaver, MmapSaver, ModelIDException

__all__ = ["AbstractSaver", "MmapSaver", "ModelIDException"]
