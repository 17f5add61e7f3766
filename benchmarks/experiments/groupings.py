"""The paper's groupings by name, with the CPU seconds that they took."""

from __future__ import annotations

from benchmarks import names
from benchmarks.experiments.subject import Subject, Timed, timed
from benchmarks.tasks import LOSS
from ggda_ext import Groups
from ggda_ext.grouping import GradKMeansGroups, KMeansGroups, ReprKMeansGroups, random_groups

OF_MODEL = (
    names.REPR_K_MEANS,
    names.GRAD_K_MEANS,
    names.EQUAL_GRAD_K_MEANS,
)  # these depend on the model; the others depend only on the inputs


def grouped(subject: Subject, name: str, size: int, seed: int) -> Timed[Groups]:
    """Return groups of about `size` training points, and the CPU seconds of the grouping.

    Args:
        subject: the data, and the model whose representations and gradients are clustered.
        name: one of `names.GROUPINGS` or `names.EQUAL_GROUPINGS`, `names.SINGLE_POINTS` for groups of one, or
            `names.SOURCES`.
        size: mean size of a group; ignored for single points and sources.
        seed: seed of the grouping.
    """
    n = len(subject.train[0])
    match name:
        case names.SINGLE_POINTS:
            return Timed(Groups.singletons(n), 0.0)
        case names.SOURCES:
            if subject.task.data.sources is None:
                raise ValueError(f"the data of {subject.task.name} has no sources: choose another grouping.")
            return Timed(Groups(subject.task.data.sources), 0.0)
        case names.RANDOM:
            return timed(random_groups, n, size, random_state=seed)
        case names.K_MEANS | names.EQUAL_K_MEANS:
            equal = name == names.EQUAL_K_MEANS
            return timed(KMeansGroups(size, balanced=equal, random_state=seed).fit_groups, subject.train[0])
        case names.REPR_K_MEANS:
            builder = ReprKMeansGroups(subject.model, group_size=size, random_state=seed)
            return timed(builder.fit_groups, subject.train)
        case names.GRAD_K_MEANS | names.EQUAL_GRAD_K_MEANS:
            equal = name == names.EQUAL_GRAD_K_MEANS
            builder = GradKMeansGroups(subject.model, LOSS, group_size=size, balanced=equal, random_state=seed)
            return timed(builder.fit_groups, subject.train)
    known = (names.SINGLE_POINTS, names.SOURCES, *names.GROUPINGS, *names.EQUAL_GROUPINGS)
    raise ValueError(f"grouping {name!r} is not one of {', '.join(known)}.")
