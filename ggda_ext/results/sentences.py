"""The question and the answers of a result as sentences; a magnitude is stated only if the method predicts one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ggda_ext.results import ranking
from ggda_ext.results.table import shown

if TYPE_CHECKING:
    from ggda_ext.results.attribution import Attribution

_DIRECTIONS = {True: " (higher is better)", False: " (lower is better)", None: ""}


@dataclass(frozen=True)
class Sentence:
    """A group and the words about it: ``forum`` + ``hurts most: without it …``."""

    group: str
    words: str

    def __str__(self) -> str:
        return f"{self.group} {self.words}" if self.group else self.words


def question(result: Attribution) -> str:
    """Return the question that the result answers."""
    k = len(result.groups)
    names = [f"{shown(n)}{_DIRECTIONS[d]}" for n, d in zip(result.properties, result.higher_is_better, strict=True)]
    listed = _listed(names) if len(names) <= 4 else f"{len(names)} properties"
    if k == 1:
        return f"What did one group of {int(result.sizes[0]):,} training points do to the model’s {listed}?"
    are = "what it is" if len(names) == 1 else "what they are"
    return f"Which of {k:,} groups of {result.groups.n:,} training points made the model’s {listed} {are}?"


def answers(result: Attribution, property: int) -> list[Sentence]:
    """Return which groups hurt and help most for one property; or rise and fall, if its direction is not known."""
    scores, direction = result.scores[property].tolist(), result.higher_is_better[property]
    order = sorted((j for j in range(len(scores)) if scores[j] == scores[j]), key=lambda j: -abs(scores[j]))
    found = []
    for effect in ("hurts", "helps") if direction is not None else ("rises", "falls"):
        first = next((j for j in order if ranking.effect_of(scores[j], direction) == effect), None)
        if first is not None:
            found.append(Sentence(shown(result.groups.name(first)), _about(result, property, first, effect)))
        elif effect in ("hurts", "helps"):
            found.append(Sentence("", f"No group {effect}."))
    return found or [Sentence("", "No group has a score that is a number other than 0.")]


def _about(result: Attribution, row: int, group: int, effect: str) -> str:
    """Return the words about the group with the strongest effect of one kind."""
    score, name, ends = float(result.scores[row, group]), shown(result.properties[row]), ranking.ends(result, row)
    seen = "was seen to" if result.method is not None and result.method.measured else "is predicted to"
    words = f"{effect} most" if effect in ("hurts", "helps") else "matters most in this direction"
    if len(result.groups) == 1:
        words = words.replace(" most", "")
    words += f": without it, {name} {seen} {'rise' if score > 0 else 'fall'}"
    if result.method is not None and result.method.unit == "property":
        words += f" by {abs(score):.3g}{'' if ends is None else _in_brackets(*ends[group])}"
    words += "."
    if ranking.effects(result, row)[group] == "unclear":
        words += " Its interval does not exclude 0, so even the direction is unclear."
    if result.groups.name(group) in result.warnings:
        words += " There is a warning about this group."
    return words


def _in_brackets(low: float, high: float) -> str:
    """Return the interval of a change, in brackets."""
    if low <= 0 <= high:
        return f" (anything from a fall by {-low:.3g} to a rise by {high:.3g})"
    ends = sorted((abs(low), abs(high)))
    return f" ({ends[0]:.3g}–{ends[1]:.3g})"


def magnitude(result: Attribution) -> str:
    """Return a sentence about what the size of a score means."""
    if result.method is None:
        return "How the scores were made is not known here: trust their order before their size."
    if result.method.unit == "rank":
        return "The method ranks groups: the sign and order of scores mean something, their size has no unit."
    if result.method.measured:
        return "A score is the change that was measured when the model was trained again without the group."
    return "A score is the predicted change if the group is removed and the model trained again."


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
