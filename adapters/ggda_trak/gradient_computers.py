"""TRAK's gradient computers, under TRAK's names."""

from trak.gradient_computers import AbstractGradientComputer, FunctionalGradientComputer, IterativeGradientComputer

__all__ = ["AbstractGradientComputer", "FunctionalGradientComputer", "IterativeGradientComputer"]
