"""The empirical Fisher, its relative damping, and the refusal to invert what cannot be inverted."""

from __future__ import annotations

import pytest
import torch

from ggda_ext.fisher import EmpiricalFisher


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_added_in_blocks_give_the_sum_of_outer_products(dtype: torch.dtype) -> None:
    rows = torch.randn(50, 7, dtype=dtype)
    fisher = EmpiricalFisher(7)
    for block in rows.split(13):
        fisher.add(block)
    assert fisher.rows == 50
    assert fisher.matrix.dtype == dtype
    torch.testing.assert_close(fisher.matrix, rows.T @ rows)


def test_auto_damping_goes_by_dimensions_per_row() -> None:
    found = [EmpiricalFisher(30).add(torch.randn(rows, 30)).damped("auto")[1] for rows in (10, 300)]
    assert found == pytest.approx([0.9, 0.03])


def test_damping_is_relative_scaled_rows_give_scaled_fishers() -> None:
    rows = torch.randn(20, 5, dtype=torch.float64)
    for damping in (0.3, "auto"):
        small, chosen = EmpiricalFisher(5).add(rows).damped(damping)
        large, again = EmpiricalFisher(5).add(10 * rows).damped(damping)
        assert chosen == pytest.approx(again)
        torch.testing.assert_close(large, 100 * small)


def test_singular_fisher_without_ridge_is_refused() -> None:
    fisher = EmpiricalFisher(40).add(torch.randn(10, 40))
    with pytest.raises(ValueError, match=r"10 rows in 40 dimensions is singular .* 'auto'"):
        fisher.damped(0)
    for damping in (0.1, "auto"):
        damped, _ = fisher.damped(damping)
        assert bool(torch.linalg.inv(damped).isfinite().all())


def test_fisher_of_zeros_is_refused_whatever_the_ridge() -> None:
    with pytest.raises(ValueError, match="singular"):
        EmpiricalFisher(3).add(torch.zeros(5, 3)).damped(0.5)


@pytest.mark.parametrize("damping", [-0.1, float("nan"), float("inf"), "much", True])
def test_damping_that_is_no_number_is_refused(damping: object) -> None:
    with pytest.raises(ValueError, match="damping="):
        EmpiricalFisher(2).add(torch.eye(2)).damped(damping)  # type: ignore[arg-type]
