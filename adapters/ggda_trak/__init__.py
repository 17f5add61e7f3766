"""TRAK for groups of training points: put `ggda_` in front of the import and pass `groups=`.

>>> from ggda_trak import TRAKer
"""

try:
    import trak
except ImportError as error:  # pragma: no cover
    raise ImportError("ggda_trak needs TRAK: pip install 'ggda-ext[trak]'") from error

from trak import test_install

from ggda_trak.fisher_influence import FisherInfluence
from ggda_trak.projectors import FactoredProjector, SketchProjector
from ggda_trak.traker import TRAKer

__version__ = trak.__version__
VERSION = __version__

__all__ = ["TRAKer", "FisherInfluence", "SketchProjector", "FactoredProjector", "test_install"]
