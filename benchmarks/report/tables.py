"""All tables of a report, in the order of the report. Each experiment has its own module."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.report.check_tables import check_tables
from benchmarks.report.cost_tables import cost_tables
from benchmarks.report.dattri_tables import dattri_tables
from benchmarks.report.formats import Table
from benchmarks.report.lds_tables import lds_tables
from benchmarks.report.noisy_tables import noisy_tables
from benchmarks.report.removal_tables import pruning_tables, retraining_tables
from benchmarks.report.review_tables import review_tables
from benchmarks.report.rows import Results
from benchmarks.report.speed_tables import speed_tables
from benchmarks.report.what_if_tables import what_if_tables


def all_tables(results: Results) -> Iterator[Table]:
    """Yield every table that the rows allow."""
    yield from check_tables(results)
    yield from speed_tables(results)
    yield from retraining_tables(results.of("retraining"))
    yield from pruning_tables(results.of("pruning"))
    yield from noisy_tables(results.of("noisy"))
    yield from lds_tables(results.of("lds"))
    yield from what_if_tables(results.of("lds"))
    yield from dattri_tables(results.of("dattri"))
    yield from cost_tables(results)
    yield from review_tables(results)
