"""A few mutated inputs for every reader; see `tests/fuzz.py` for the full number."""

from __future__ import annotations

import pytest

from tests import fuzz


@pytest.mark.parametrize("name", fuzz.READERS)
def test_mutated_inputs_are_refused_or_read_as_they_were(name: str) -> None:
    assert fuzz.in_child(name, 60) == []
