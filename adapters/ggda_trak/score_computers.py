"""TRAK's score computers, under TRAK's names."""

from trak.score_computers import AbstractScoreComputer, BasicScoreComputer, BasicSingleBlockScoreComputer

__all__ = ["AbstractScoreComputer", "BasicScoreComputer", "BasicSingleBlockScoreComputer"]
