"""TRAK's `utils`, under TRAK's names."""

from trak.utils import get_matrix_mult, get_num_params, get_parameter_chunk_sizes, is_not_buffer, parameters_to_vector
from trak.utils import test_install as test_install
from trak.utils import vectorize as vectorize

__all__ = [
    "get_matrix_mult",
    "get_num_params",
    "get_parameter_chunk_sizes",
    "is_not_buffer",
    "parameters_to_vector",
    "test_install",
    "vectorize",
]
