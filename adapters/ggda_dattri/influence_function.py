"""dattri's six influence functions for groups. Each class says how it solves with the curvature of the whole data."""

from __future__ import annotations

import math
from typing import Any

import torch
from dattri.algorithm import influence_function as dattri_if
from torch import Tensor
from torch.utils.data import DataLoader

from ggda_dattri.checkpoint import Checkpoint
from ggda_dattri.inner_product import GroupedInnerProduct, Solve
from ggda_ext.curvature import direct_solve, lissa
from ggda_ext.curvature.conjugate_gradients import conjugate_gradients


class IFAttributorExplicit(GroupedInnerProduct, dattri_if.IFAttributorExplicit):
    """dattri's explicit inverse Hessian. For groups, the Hessian of all cached data is formed once.

    dattri itself adds up one inverse for each batch of the cached loader (``curvature="upstream"``).
    """

    transformation_kwargs: dict[str, Any]
    _uses_hessian = True

    def _whole_solver(self, checkpoint: Checkpoint) -> Solve:
        matrix = self._hessian(checkpoint).matrix()
        return _in_core_layout(checkpoint, lambda rows: direct_solve(matrix, rows, **self.transformation_kwargs))


class IFAttributorCG(GroupedInnerProduct, dattri_if.IFAttributorCG):
    """dattri's conjugate gradients. For groups, they use the Hessian of all cached data and respect `tol`.

    dattri itself adds up one solve for each batch of the cached loader (``curvature="upstream"``), and does not stop at
    negative curvature or rounding errors. Here a solve stops there and reports it (see
    `ggda_ext.curvature.conjugate_gradients`). ``curvature="gauss-newton"`` has no negative curvature.
    """

    transformation_kwargs: dict[str, Any]
    _uses_hessian = True

    def _whole_solver(self, checkpoint: Checkpoint) -> Solve:
        hessian = self._hessian(checkpoint)
        options = {name: value for name, value in self.transformation_kwargs.items() if name != "mode"}
        return _in_core_layout(checkpoint, lambda rows: conjugate_gradients(hessian, rows, **options))


class IFAttributorLiSSA(GroupedInnerProduct, dattri_if.IFAttributorLiSSA):
    """dattri's LiSSA. For groups, one recursion is enough for all groups and all test points or properties.

    dattri itself runs the recursion again for every training batch, draws other batches for every test point, adds up
    one solve for each batch of the cached loader, and casts its data to float. ``curvature="upstream"`` does the same,
    except for the first. Here all vectors share the random batches of a step. Each estimate has dattri's distribution,
    and for one seed, scores add up over groups and properties. An iterate that grows raises an error.

    Args:
        *args: dattri's own arguments.
        generator: seed of the random batches, or a `torch.Generator` that the seed is drawn from. The global random
            state does not change.
        **kwargs: dattri's own arguments, and the arguments of `GroupedInnerProduct`.
    """

    transformation_kwargs: dict[str, Any]
    _uses_hessian = True
    _remedy = "Raise scaling or damping, or lower recursion_depth."

    def __init__(self, *args: Any, generator: int | torch.Generator = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if isinstance(generator, bool) or not isinstance(generator, int | torch.Generator):
            raise TypeError(f"generator is a {type(generator).__name__}: pass a seed or a torch.Generator.")
        self.generator = generator
        self.seed = generator if isinstance(generator, int) else generator.initial_seed()

    def _whole_solver(self, checkpoint: Checkpoint) -> Solve:
        options = self.transformation_kwargs
        hessian = self._hessian(checkpoint)
        seed = self.generator
        if isinstance(seed, torch.Generator):
            seed = int(torch.randint(2**62, (), generator=seed, device=seed.device))

        def solve(rows: Tensor) -> Tensor:
            return lissa(
                hessian,
                rows,
                depth=options["recursion_depth"],
                scaling=options["scaling"],
                damping=options["damping"],
                repeat=options["num_repeat"],
                batch_size=options["batch_size"],
                seed=seed,
                show_progress=self._drop_in.show_progress is not False,
            )

        return _in_core_layout(checkpoint, solve)


class _NeedsCache(GroupedInnerProduct):
    """Base class of influence functions that need a call of `cache` first."""

    def _without_cache(self, train_dataloader: DataLoader) -> None:
        raise ValueError(f"{type(self).__name__}.attribute was called before cache: call cache(full_train_dataloader).")


class IFAttributorArnoldi(_NeedsCache, dattri_if.IFAttributorArnoldi):
    """dattri's Arnoldi projection. For groups, the projection P and its adjoint are applied to the test side.

    The scores are the same, because ``⟨P G, P ∇g⟩ = ⟨G, Pᵀ P ∇g⟩``. A projection with negative eigenvalues, which gives
    NaN in dattri, raises an error.
    """

    def _whole_solver(self, checkpoint: Checkpoint) -> Solve:
        project = self.arnoldi_projectors[checkpoint.index]

        def solve(rows: Tensor) -> Tensor:
            leaf = rows.detach().requires_grad_()
            with torch.enable_grad():
                projected = project(leaf)
            return torch.autograd.grad(projected, leaf, projected.detach())[0]

        return solve

    _dattri_solver = _whole_solver


class IFAttributorDataInf(_NeedsCache, dattri_if.IFAttributorDataInf):
    """dattri's DataInf. For groups, the gradients of the cached points are streamed and never all in memory.

    The layers are taken from `layer_name`. dattri itself splits rows at the layers of the whole model, and keeps one
    row per cached point in memory (``curvature="upstream"``).
    """

    def cache(self, full_train_dataloader: DataLoader) -> None:
        """Keep the full training data; for dattri's own curvature, also its gradients."""
        if self.curvature == "upstream":
            super().cache(full_train_dataloader)
        else:
            self.full_train_dataloader = full_train_dataloader

    def _whole_solver(self, checkpoint: Checkpoint) -> Solve:
        data = self._curvature_data()
        loader = self.full_train_dataloader
        batches = math.ceil(len(loader) * self.fim_estimate_data_ratio)
        used = min(data.n or 0, batches * (loader.batch_size or 1))
        points = checkpoint.points(data, used)
        regularization = 0.1 if self.regularization is None else self.regularization
        if regularization <= 0:
            raise ValueError(f"regularization={regularization}: DataInf divides by it, pass a positive number.")

        def solve(rows: Tensor) -> Tensor:
            def correction(ids: Tensor, gradients: Tensor) -> Tensor:
                found = torch.empty_like(rows)
                for low, high in checkpoint.layer_spans:
                    part = gradients[:, low:high]
                    shares = rows[:, low:high] @ part.T / (regularization + part.square().sum(1))
                    found[:, low:high] = shares @ part
                return found

            return (rows - points.sum_rows(correction, checkpoint.max_rows) / used) / regularization

        return _in_core_layout(checkpoint, solve)


class IFAttributorEKFAC(_NeedsCache, dattri_if.IFAttributorEKFAC):
    """dattri's EK-FAC. For groups, the bias is the last column of a layer's matrix, as in its Kronecker factors.

    dattri itself reshapes the weights followed by the biases, so that they do not match the factors
    (``curvature="upstream"``).
    """

    _remedy = "Pass a positive damping, or raise it."

    def cache(self, full_train_dataloader: DataLoader, max_iter: int | None = None) -> None:
        """Cache the full training data and its Kronecker factors, made of the first `max_iter` batches."""
        self.max_iter = max_iter
        with torch.enable_grad():
            super().cache(full_train_dataloader, max_iter)

    def _whole_solver(self, checkpoint: Checkpoint) -> Solve:
        def solve(rows: Tensor) -> Tensor:
            parts, low = [], 0
            for name in self.module_name:
                module = self.name_to_module[name]
                out, into = module.weight.shape
                weight = rows[:, low : low + out * into].reshape(-1, out, into)
                low += out * into
                matrix = weight
                if module.bias is not None:
                    matrix = torch.cat([weight, rows[:, low : low + out, None]], 2)
                    low += out
                q_a, q_s = self.cached_q[name]
                solved = q_s.T @ ((q_s @ matrix @ q_a.T) / (self.cached_lambdas[name] + self.damping)) @ q_a
                parts.append(solved[:, :, :into].flatten(1))
                if module.bias is not None:
                    parts.append(solved[:, :, into])
            return torch.cat(parts, 1).detach()

        return solve


def _in_core_layout(checkpoint: Checkpoint, solve: Solve) -> Solve:
    """Make a solve for rows in dattri's layout from a solve in the core's layout."""
    return lambda rows: checkpoint.to_dattri(solve(checkpoint.to_core(rows)))
