"""The types that users meet: `typed_page.py` passes ``mypy --strict``, its mistakes are found."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from mypy import api

import ggda_ext

PAGE = Path(__file__).with_name("typed_page.py")


def test_user_code_type_checks_and_mistakes_do_not(request: pytest.FixtureRequest) -> None:
    cache = getattr(request.config, "cache", None)  # kept between runs: the first takes some 12 CPU seconds
    options = ["--strict", "--config-file=", "--follow-imports=silent"]
    options += [f"--cache-dir={cache.mkdir('mypy') if cache is not None else os.devnull}"]
    report, errors, status = api.run([*options, str(PAGE)])
    assert (report.strip(), errors, status) == ("Success: no issues found in 1 source file", "", 0)


def test_the_page_uses_every_public_name() -> None:
    text = PAGE.read_text()
    unused = [name for name in ggda_ext.__all__ if not re.search(rf"(?<![\w.]){name}\b(?!,\n)", text)]
    unused += [name for name in ggda_ext.properties.__all__ if f"properties.{name}" not in text]
    assert not unused
