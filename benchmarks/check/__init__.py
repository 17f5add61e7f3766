"""`python -m benchmarks check`: compares the original of every toolkit with its group version, on every data set.

Both run on the same model and points. The original scores point by point; its scores, summed by group, must be equal to
the scores of the group version.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.check import table
from benchmarks.side_by_side import SideBySide
from benchmarks.sizes import CheckScale, Scale

if TYPE_CHECKING:
    from benchmarks.check.case import Case, Method

TOOLKITS = ("captum", "dattri", "trak", "fisher")
SKIPPED: Mapping[tuple[str, str, str], str] = {}
"""(task, toolkit, method) → the reason why the original cannot run there; no other check may be skipped."""


def methods() -> tuple[Method, ...]:
    """Import all toolkits and return all their methods."""
    found: list[Method] = []
    for toolkit in TOOLKITS:
        found += importlib.import_module(f"benchmarks.check.{toolkit}").METHODS
    return tuple(found)


def _rows(task: str, method: Method, given: tuple[Case, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    case, common = given
    yield common | _checked(task, method, case)


def _checked(task: str, method: Method, case: Case) -> dict[str, Any]:
    from benchmarks.check.measure import row_of

    reason = SKIPPED.get((task, method.toolkit, method.name))
    if reason is not None:
        about = {"toolkit": method.toolkit, "method": method.name}
        return about | {"status": "skipped", "reason": reason, "train_points": 0}
    return row_of(method, case.few if method.toolkit == "dattri" else case)


def prepared(name: str, scale: Scale, data_dir: Path | None, numbers: CheckScale) -> tuple[Case, dict[str, Any]]:
    """Return the case of a task, with as many points as `numbers` says, and the fields that its rows share."""
    from benchmarks import data
    from benchmarks.check.case import Case
    from benchmarks.tasks import PAPER, task

    of_data = PAPER[name].data
    size = scale.data[of_data]
    dataset = data.load(of_data, data_dir, train=size.train, test=size.test, text_length=scale.text_length)
    made = task(name, dataset, scale, folder=data_dir)
    source = f"{dataset.source}; weights: {made.weights}" if made.weights else dataset.source
    points = dataset.subset(train=numbers.points, test=numbers.tests)
    model = made.trained(seed=0).model
    case = Case(model, points.train, points.test, numbers, made.projection_dim)
    return case, {
        "experiment": "check",
        "data": data.TITLES[dataset.name],
        "model": made.title,
        "source": source,
        "stand_in": made.stand_in,
        "scale": scale.name,
        "test_points": len(points.test[0]),
    }


SIDE = SideBySide(
    __name__, lambda: methods(), "check", table.heading, table.source, lambda rows: table.line(rows[0]),
    lambda task, method: [f"check/{task}/{method.toolkit}/{method.name}"],
    lambda task, scale, data_dir: prepared(task, scale, data_dir, scale.check[task]), _rows,
)  # fmt: skip
run = SIDE.run
