"""The four sentences that a reader sees first: same scores? how much faster? how faithful? which method?"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from benchmarks.check.table import verdict
from benchmarks.compare.table import HEADLINE_SIZE, headline, slower, times
from benchmarks.report.advice import Need, advice
from benchmarks.report.fidelity import Fidelity, fidelity
from benchmarks.report.rows import Results


@dataclass(frozen=True)
class Headlines:
    """The main results of a run, one sentence each.

    Attributes:
        equality: on how many checks the scores are equal to the originals, and how many others there are.
        speed: how many times faster the group versions are than the originals.
        fidelity: how well group scores follow real retraining.
        method: which method to use.
        warning: that the numbers mean nothing, for runs at the smoke scale; else empty.
    """

    equality: str
    speed: str
    fidelity: str
    method: str
    warning: str = ""

    @property
    def lines(self) -> tuple[str, ...]:
        """All sentences in order. If there are no rows for a sentence, it names the command that makes them."""
        sentences = self.equality, self.speed, self.fidelity, self.method
        return (self.warning, *sentences) if self.warning else sentences

    def __str__(self) -> str:
        return "\n".join(self.lines)


def headlines(results: Results) -> Headlines:
    """Return the sentences for the given rows."""
    return Headlines(
        _equality(results), _speed(results), _fidelity(fidelity(results)), _method(advice(results)), _warning(results)
    )


def _warning(results: Results) -> str:
    scales = [run.config.get("scale") for run in results.runs]
    if "smoke" not in scales:
        return ""
    which = "These runs are" if set(scales) == {"smoke"} else f"{scales.count('smoke')} of {len(scales)} runs are"
    return f"{which} at the smoke scale, which shows that everything runs: its numbers mean nothing."


def _equality(results: Results) -> str:
    checks = results.of("check").to_dict("records")
    if not checks:
        return "Same scores? Not checked here; run `python -m benchmarks check`."
    return f"Same scores: the group versions of Captum, dattri and TRAK are {next(iter(verdict(checks)))}."


def _speed(results: Results) -> str:
    rows = results.of("speed").to_dict("records")
    cells = headline(rows)
    found = sorted(cell["speed_up"] for cell in cells)
    if not found:
        return "Faster? Not measured here; run `python -m benchmarks compare`."
    first = median(cell["speed_up_first"] for cell in cells)
    late, count = len(slower(rows)), sum(len(row["cells"]) for row in rows if row["status"] == "measured")
    rest = (
        f"{late} of {count} measurements {'is' if late == 1 else 'are'} slower"
        if late
        else f"none of {count} measurements is slower"
    )
    return (
        f"Faster: scores of groups of {HEADLINE_SIZE} training points come {times(median(found))} faster in the median "
        f"({times(found[0])} to {times(found[-1])}, one property; {times(first)} on a first call); {rest} than the "
        "original."
    )


def _fidelity(found: Fidelity | None) -> str:
    if found is None:
        return "Faithful? Not measured here; run `python -m benchmarks run lds`."
    best, value = next(iter(found.by_method.items()))
    limit = "" if found.ceiling is None else f"; retraining itself, with other seeds, reaches {found.ceiling:.2f}"
    rank = f"a rank correlation (LDS) of {value:.2f} ({best}, the best method)"
    return f"Faithful: {found.question} predict what real retraining without groups does with {rank}{limit}."


def _method(needs: list[Need]) -> str:
    if not needs:
        return "Which method? Nothing was measured to tell; run `python -m benchmarks`."
    return f"Which method: {'; '.join(f'{need.short}, {need.use}' for need in needs[:3])}."
