"""Which strategy to take, and why.

Costs are multiples of one forward and backward pass over the training points, from a model fitted to
measurements (``python -m benchmarks speed`` compares them): a pass counts three forward passes, capturing a and d two,
a direction one more. Forming rows of length p is bound by memory, so it pays only once the points of a
group (or their tokens) share it; a backward pass of its own for every group also has a fixed price.
"""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("directional", "forward", "ghost", "segmented", "backward", "persample")

_ROW_WRITE = 6.0  # passes a row costs in `segmented`, shared by the points and tokens of a group
_GROUP_ROW = 100.0  # passes a row costs in `backward`, likewise
_GROUP_CALL = 2e6  # multiplications that could be done in the time of one more backward call
_VMAP = 30.0  # passes vmap(grad) costs over the two of its arithmetic, shared by tokens


@dataclass(frozen=True)
class Facts:
    """What the choice depends on."""

    points: int
    groups: int
    parameters: int
    work_per_point: float
    """Multiplications of one forward pass over one point."""
    uncovered: dict[str, str]
    """Parameters that `directional`, `segmented` and `ghost` cannot see: name → why."""
    not_ghost: str | None
    """Why `ghost` cannot serve, or None."""
    ghost_work: float
    """Multiplications of `ghost` per training and test point."""
    no_forward_mode: str | None
    """Why `forward` cannot serve, or None."""
    no_vmap: str | None
    """Why `persample` cannot serve, or None."""
    batch_size: int
    working_bytes: int

    @property
    def group_size(self) -> float:
        return self.points / self.groups

    @property
    def sharing(self) -> float:
        """How often a group uses each parameter, on average: points times tokens."""
        return max(self.group_size * self.work_per_point / self.parameters, 1e-9)


@dataclass(frozen=True)
class Plan:
    """A chosen strategy, with its reason and estimated cost."""

    strategy: str
    reason: str
    passes: float
    facts: Facts

    def explain(self) -> str:
        """One readable line: the strategy, why, and what it should cost."""
        facts = self.facts
        return (
            f"{self.strategy}: {self.reason}; about {self.passes:.1f} x one forward+backward pass over "
            f"{facts.points:,} points in batches of {facts.batch_size}, {facts.working_bytes / 2**20:.0f} MB of "
            f"working memory ({facts.groups:,} groups, {facts.parameters:,} parameters)"
        )


def refusal(strategy: str, facts: Facts, rows: bool, points: bool) -> str | None:
    """Why a strategy cannot answer the question, or None if it can.

    Args:
        strategy: its name.
        facts: what is known of model, data and groups.
        rows: whether the gradients themselves are asked for, not only inner products.
        points: whether the directions are gradients of test points.
    """
    if strategy in ("directional", "segmented", "ghost") and facts.uncovered:
        name, why = next(iter(facts.uncovered.items()))
        more = f" (and {len(facts.uncovered) - 1} more parameters)" if len(facts.uncovered) > 1 else ""
        return f"it cannot see the gradient of parameter {name!r}{more}: {why}"
    if strategy in ("directional", "forward", "ghost") and rows:
        return "it never forms gradients, only inner products with directions"
    if strategy == "ghost":
        return facts.not_ghost or (None if points else "the directions are not gradients of test points")
    if strategy == "forward":
        return facts.no_forward_mode
    return facts.no_vmap if strategy == "persample" else None


def cost(strategy: str, facts: Facts, m: int) -> float:
    """Estimated cost of m directions in passes over the data."""
    products = m / (3 * facts.sharing)
    match strategy:
        case "directional":
            return (2 + m) / 3
        case "forward":
            return 1.3 * m
        case "ghost":
            return (2 + 2 * m * facts.ghost_work / facts.work_per_point) / 3
        case "segmented":
            return 1 + _ROW_WRITE / facts.sharing + products
        case "backward":
            call = _GROUP_CALL / (facts.group_size * facts.work_per_point)
            return 1 + _GROUP_ROW / facts.sharing + call + products
        case _:
            return 2 + _VMAP * facts.group_size / facts.sharing + products


def choose(facts: Facts, m: int, *, rows: bool = False, points: bool = False) -> Plan:
    """The cheapest strategy that can answer, by the cost model."""
    possible = [name for name in STRATEGIES if refusal(name, facts, rows, points) is None]
    best = min(possible, key=lambda name: cost(name, facts, m))
    return Plan(best, _reason(facts, m, rows, points), cost(best, facts, m), facts)


def named(strategy: str, facts: Facts, m: int, *, rows: bool = False, points: bool = False) -> Plan:
    """A plan for the strategy the user asked for; refused if it cannot answer."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not one of 'auto', {', '.join(map(repr, STRATEGIES))}.")
    why = refusal(strategy, facts, rows, points)
    if why is not None:
        others = [name for name in STRATEGIES if refusal(name, facts, rows, points) is None]
        raise ValueError(f"strategy={strategy!r} cannot be used here: {why}. Use 'auto' or {others}.")
    return Plan(strategy, "asked for by name", cost(strategy, facts, m), facts)


def _reason(facts: Facts, m: int, rows: bool, points: bool) -> str:
    asked = "gradient rows" if rows else f"{m} test point{'s' * (m > 1)}" if points else f"{m} direction{'s' * (m > 1)}"
    seen = (
        f"{len(facts.uncovered)} parameters are in layers not known to be linear"
        if facts.uncovered
        else "every parameter is in a layer known to be linear"
    )
    return f"{asked}, mean group size {facts.group_size:.4g}, {seen}"
