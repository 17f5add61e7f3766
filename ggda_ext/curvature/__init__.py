"""Curvature of the training loss: Hessian and Gauss–Newton products, solvers, the empirical Fisher and its damping."""

from ggda_ext.curvature.conjugate_gradients import LostAccuracy, NegativeCurvature, conjugate_gradients
from ggda_ext.curvature.fisher import Damping, EmpiricalFisher, FisherKind
from ggda_ext.curvature.hessian import GaussNewton, Hessian, direct_solve
from ggda_ext.curvature.lissa import lissa

__all__ = [
    "Hessian",
    "GaussNewton",
    "conjugate_gradients",
    "lissa",
    "direct_solve",
    "EmpiricalFisher",
    "FisherKind",
    "Damping",
    "NegativeCurvature",
    "LostAccuracy",
]
