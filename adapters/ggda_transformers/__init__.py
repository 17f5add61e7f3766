"""Group attribution for Hugging Face's `Trainer` and PEFT: find the data sources that helped or hurt a fine-tuning.

>>> from ggda_transformers import GroupTracker, attribute_trainer
"""

try:
    import transformers  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError("ggda_transformers needs transformers: pip install 'ggda-ext[transformers]'") from error

from ggda_transformers.attribution import attribute_trainer
from ggda_transformers.columns import Binned, Nested
from ggda_transformers.setup import TrainerSetup
from ggda_transformers.tracker import GroupTracker
from ggda_transformers.what_if import what_if_trainer

__all__ = ["attribute_trainer", "GroupTracker", "what_if_trainer", "Binned", "Nested", "TrainerSetup"]
