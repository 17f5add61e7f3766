"""TRAK's projectors with rows of group sums, and the two that are not TRAK's."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from ggda_trak.projection import Projection, check_dimension, release
from ggda_trak.projectors import (
    BasicProjector,
    BasicSingleBlockProjector,
    ChunkedCudaProjector,
    CudaProjector,
    FactoredProjector,
    NoOpProjector,
    ProjectionType,
    SketchProjector,
)
from torch import Tensor, nn

from ggda_ext import GroupGradients
from ggda_ext.model import ParameterSpace


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


SIZE = 5 * 8 + 8 + 8 * 3 + 3


def projection(projector: Any, **options: Any) -> Projection:
    return Projection(projector, ParameterSpace(network()), 2.0, **options)


class FastJL(types.ModuleType):
    """Stands in for TRAK's CUDA kernels: a fixed matrix by seed, and a record of the calls."""

    def __init__(self) -> None:
        super().__init__("fast_jl")
        self.calls: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        def kernel(rows: Tensor, dim: int, seed: int, processors: int) -> Tensor:
            self.calls.append((name, len(rows)))
            generator = torch.Generator().manual_seed(seed)
            return rows @ torch.randn(rows.shape[1], dim, generator=generator)

        if not name.startswith("project_"):
            raise AttributeError(name)
        return kernel


@pytest.fixture
def fast_jl(monkeypatch: pytest.MonkeyPatch) -> FastJL:
    module = FastJL()
    monkeypatch.setitem(sys.modules, "fast_jl", module)
    properties = types.SimpleNamespace(multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *a, device=None, **k: zeros(*a, **k))
    return module


def test_cuda_projector_gets_blocks_its_kernels_can_count(fast_jl: FastJL, monkeypatch: pytest.MonkeyPatch) -> None:
    projector = CudaProjector(SIZE, 20, 0, ProjectionType.rademacher, "cuda:0", 32)
    project = projection(projector)
    rows = torch.randn(70, SIZE)
    expected = projector.project(rows, model_id=3) / 2
    fast_jl.calls.clear()
    torch.testing.assert_close(project(rows, 3), expected)
    assert fast_jl.calls == [("project_rademacher_32", 70)]
    assert project.most_rows == (2**31 - 1) // SIZE
    monkeypatch.setattr(Projection, "most_rows", 30)
    fast_jl.calls.clear()
    torch.testing.assert_close(project(rows, 3), expected)
    assert fast_jl.calls == [
        ("project_rademacher_32", 30),
        ("project_rademacher_32", 30),
        ("project_rademacher_16", 10),
    ]


def test_chunked_projector_gets_no_more_rows_than_it_takes() -> None:
    chunks = [48, SIZE - 48]
    basic = [BasicProjector(size, 20, seed, "normal", "cpu") for seed, size in enumerate(chunks)]
    projector = ChunkedCudaProjector(basic, 50, chunks, 8, "cpu", torch.float32)
    rows = torch.randn(21, SIZE)
    found = projection(projector)(rows, 1)
    expected = sum(own.project(part.contiguous(), 1) for own, part in zip(basic, rows.split(chunks, 1), strict=True))
    torch.testing.assert_close(found, expected / 2)


@pytest.mark.parametrize("kind", [BasicProjector, BasicSingleBlockProjector])
@pytest.mark.parametrize("dim", [16, 130])
def test_released_projector_draws_the_same_matrix_again(kind: Any, dim: int) -> None:
    projector = kind(SIZE, dim, 0, "normal", "cpu")
    rows = torch.randn(20, SIZE)
    before = [projector.project(rows, model_id) for model_id in (0, 2)]
    for _ in range(2):
        release(projector)
        assert torch.equal(projector.project(rows, 2), before[1])
    release(projector)
    release(projector)
    assert torch.equal(projector.project(rows, 0), before[0])


@pytest.mark.parametrize("dim", [16, 130])
def test_rows_keep_their_dtype_and_are_not_changed(dim: int) -> None:
    rows = torch.randn(9, SIZE)
    kept = rows.clone()
    for projector in (NoOpProjector(), BasicProjector(SIZE, dim, 0, "normal", "cpu"), SketchProjector(SIZE, dim)):
        projected = projection(projector)(rows, 0)
        assert projected.dtype == rows.dtype
        assert torch.equal(rows, kept)
        torch.testing.assert_close(projected, projector.project(rows, model_id=0) / 2)


def test_only_projectors_that_draw_their_matrix_on_every_call_collect_rows() -> None:
    assert projection(BasicProjector(SIZE, 130, 0, "normal", "cpu"), memory_budget=4 * SIZE * 130 - 1).collects
    assert not projection(BasicProjector(SIZE, 130, 0, "normal", "cpu"), memory_budget=4 * SIZE * 130).collects
    for projector in (BasicProjector(SIZE, 16, 0, "normal", "cpu"), SketchProjector(SIZE, 130), NoOpProjector()):
        assert not projection(projector).collects


@pytest.mark.parametrize("kind", ["normal", "rademacher"])
def test_kept_matrix_is_the_one_that_is_drawn(kind: str) -> None:
    rows = torch.randn(9, SIZE)
    kept, drawn = (projection(BasicProjector(SIZE, 130, 3, kind, "cpu"), memory_budget=size) for size in (10**6, 0))
    assert drawn.collects
    for model_id in (0, 2, 0):
        torch.testing.assert_close(kept(rows, model_id), drawn(rows, model_id))
        torch.testing.assert_close(kept(rows.view(3, 3, SIZE), model_id), drawn(rows, model_id).view(3, 3, -1))


def test_wrong_dimension_is_refused() -> None:
    basic = BasicProjector(40, 20, 0, "normal", "cpu")
    for projector in (basic, ChunkedCudaProjector([basic], 50, [40], 8, "cpu", torch.float32)):
        with pytest.raises(ValueError, match=f"gradients of length 40, but {SIZE} parameters"):
            check_dimension(projector, SIZE)
    check_dimension(NoOpProjector(), SIZE)


@pytest.mark.parametrize("kind", ["sketch", "factored"])
def test_inner_products_are_kept_on_average_at_the_scale_of_trak(kind: str) -> None:
    """E⟨Pᵀu, Pᵀv⟩ = proj_dim · ⟨u, v⟩, as with standard normal entries."""
    u, v = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(1))
    rows, found = torch.stack([u, v + u]), []
    for seed in range(400):
        projector = SketchProjector(SIZE, 24, seed) if kind == "sketch" else FactoredProjector(network(), 24, seed)
        a, b = projector.project(rows, model_id=0)
        found.append(float(a @ b) / projector.proj_dim)
    exact = float(u @ (v + u))
    assert sum(found) / len(found) == pytest.approx(exact, rel=0.15)


@pytest.mark.parametrize("kind", ["sketch", "factored"])
def test_seed_and_model_id_choose_the_matrix(kind: str) -> None:
    def project(seed: int, model_id: int) -> Tensor:
        projector = SketchProjector(SIZE, 24, seed) if kind == "sketch" else FactoredProjector(network(), 24, seed)
        projector.project(torch.ones(1, SIZE), model_id=7)
        return projector.project(torch.ones(1, SIZE), model_id=model_id)

    assert torch.equal(project(0, 1), project(0, 1))
    assert not torch.equal(project(0, 1), project(1, 1))
    assert not torch.equal(project(0, 1), project(0, 2))


def test_drawing_a_matrix_leaves_the_global_random_state_alone() -> None:
    model = network()
    state = torch.get_rng_state()
    SketchProjector(SIZE, 24).project(torch.ones(1, SIZE), model_id=0)
    FactoredProjector(model, 24).project(torch.ones(1, SIZE), model_id=0)
    assert torch.equal(torch.get_rng_state(), state)


class Convolutional(nn.Module):
    """Every kind of layer the factored projection treats in a way of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 12, padding_idx=0)
        self.conv = nn.Conv2d(3, 6, 2, padding="same")
        self.deep = nn.Conv2d(6, 6, 2, groups=3)
        self.norm = nn.LayerNorm(3)
        self.each, self.head = nn.Linear(3, 5), nn.Linear(30, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens).view(-1, 3, 4, 4)
        hidden = self.norm(self.deep(self.conv(hidden).tanh()).flatten(2)[..., :3])
        return self.head(self.each(hidden).tanh().flatten(1))


@pytest.mark.parametrize("dim", [40, 150])
def test_factored_projection_is_the_same_captured_and_formed(dim: int) -> None:
    model = Convolutional().double()
    data = (torch.randint(0, 20, (30, 4)), torch.randint(0, 4, (30,)))
    labels = torch.arange(30) % 7
    provider = GroupGradients(model, nn.CrossEntropyLoss(), data, labels, batch_size=8)
    projector = FactoredProjector(model, dim)
    assert projector.captures(provider)
    assert projector.proj_dim <= dim
    expected = projector.project(provider.rows(), model_id=1)
    found = torch.zeros_like(expected)
    for ids, rows in projector.blocks(provider, 1, torch.stack([torch.ones(30), torch.zeros(30)])):
        found.index_add_(0, ids, rows[:, 0])
        assert not rows[:, 1].any()
    torch.testing.assert_close(found, expected)
    alone = torch.zeros_like(expected)
    for ids, rows in projector.blocks(provider, 1):
        alone.index_add_(0, ids, rows)
    torch.testing.assert_close(alone, expected)


def test_factored_projection_needs_room_for_every_weight() -> None:
    with pytest.raises(ValueError, match="proj_dim=2 is too small for 2 weights"):
        FactoredProjector(network(), 2)


def test_a_kept_matrix_gives_trak_its_own_bits_and_leaves_the_projector_as_it_was() -> None:
    plain, kept = (BasicProjector(12, 10, 0, ProjectionType.normal, "cpu", 4) for _ in range(2))
    rows = torch.randn(7, 12, generator=torch.Generator().manual_seed(0))
    projection = Projection(kept, ParameterSpace(nn.Linear(11, 1)), 1.0)
    for model_id in (0, 0, 1, 0):
        expected = plain.project(rows, model_id=model_id)
        with projection.lent():
            assert torch.equal(kept.project(rows, model_id=model_id), expected)
        torch.testing.assert_close(projection(rows, model_id), expected)
        assert torch.equal(kept.project(rows, model_id=model_id), expected)
    assert "generate_sketch_matrix" not in vars(kept)
