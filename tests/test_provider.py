"""The provider: refusals that name cause and fix, a model left as it was, plans, progress, memory, streams."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cases import N, make_case, relative_error
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ggda_ext import STRATEGIES, GroupGradients, Groups, PointGradients, attribute, properties
from ggda_ext.data import IndexedData
from ggda_ext.gradients.plan import Cost
from ggda_ext.gradients.strategies import BY_NAME
from ggda_ext.losses import BatchLoss, OutputLoss
from ggda_ext.model import named_modules

LOSS = nn.CrossEntropyLoss()
LABELS = np.arange(N) % 4


def provider(name: str = "mlp", **options) -> GroupGradients:
    case = make_case(name)
    return GroupGradients(case.model, LOSS, case.data, LABELS, **options)


def direction(p: int) -> torch.Tensor:
    return torch.randn(1, p, dtype=torch.float64)


def score(found: GroupGradients) -> torch.Tensor:
    return found.scores(direction(found.p))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "fast"}, "strategy='fast' is not one of 'auto', 'directional'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"memory_budget": -1}, "memory_budget=-1"),
        ({"parameters": ["body"]}, r"parameters= names 'body', which is no parameter or module.*0.weight"),
        ({"parameters": []}, "parameters= chooses no parameter"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        provider(**options)


def test_groups_that_do_not_fit_the_data_are_refused():
    case = make_case("mlp")
    with pytest.raises(ValueError, match="labels for 3 points, but the training set has 23"):
        GroupGradients(case.model, LOSS, case.data, [0, 1, 2])


def test_a_frozen_model_is_refused():
    case = make_case("mlp")
    case.model.requires_grad_(False)
    with pytest.raises(ValueError, match="none of which requires a gradient"):
        GroupGradients(case.model, LOSS, case.data, LABELS)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout(0.5), r"train mode, where Dropout '1' is random.*model.eval\(\)"),
        (nn.BatchNorm1d(7), r"train mode, where BatchNorm1d '1' mixes the examples.*model.eval\(\)"),
    ],
)
def test_train_mode_is_refused_by_the_name_of_the_module(layer, message):
    model = nn.Sequential(nn.Linear(6, 7), layer, nn.Linear(7, 3)).double()
    case = make_case("mlp")
    for ask in (score, lambda found: next(found.blocks()), lambda found: found.plan(1)):
        with pytest.raises(ValueError, match=message):
            ask(GroupGradients(model, LOSS, case.data, LABELS))
    model[1].eval()
    assert score(GroupGradients(model, LOSS, case.data, LABELS)).shape == (1, 4)


def test_a_random_loss_or_augmented_data_is_refused():
    case = make_case("mlp")
    with pytest.raises(ValueError, match=r"came out as .*switch off what is random"):
        score(GroupGradients(case.model, BatchLoss(lambda m, b: F.dropout(m(b[0]), 0.5).sum(1)), case.data, LABELS))

    class Augmented(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, i):
            return case.x[i] + torch.randn(6, dtype=torch.float64), case.y[i]

    with pytest.raises(ValueError, match="the training data \\(augmentation"):
        score(GroupGradients(case.model, LOSS, Augmented(), LABELS))


def test_a_shuffled_loader_is_refused():
    case = make_case("mlp")
    with pytest.raises(ValueError, match="the training data is a DataLoader that shuffles"):
        GroupGradients(case.model, LOSS, DataLoader(TensorDataset(*case.data), shuffle=True), LABELS)


@pytest.mark.parametrize("strategy", ["directional", "forward", "segmented", "backward", "persample"])
def test_non_finite_gradients_name_the_group(strategy):
    case = make_case("mlp")
    case.x[9] = float("nan")
    found = GroupGradients(case.model, LOSS, case.data, [f"site {j}" for j in LABELS], strategy=strategy)
    with pytest.raises(
        ValueError, match=r"1 of 4 groups have non-finite .*first group 'site 1' \(training points \[1, 5, 9"
    ):
        score(found)
    if strategy in ("segmented", "backward", "persample"):
        with pytest.raises(ValueError, match="non-finite gradients, first group 'site 1'"):
            list(found.blocks())


@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer", "unknown"])
@pytest.mark.parametrize("options", [{}, {"memory_budget": 2_000}, {"batch_size": 5}], ids=str)
@pytest.mark.parametrize("labels", [LABELS, np.arange(N)], ids=["groups", "points"])
def test_rows_through_a_matrix_are_the_rows_times_the_matrix(model, options, labels):
    case = make_case(model)
    found = GroupGradients(case.model, LOSS, case.data, labels, **options)
    weights = torch.rand(2, N, dtype=torch.float64)
    matrix = torch.randn(found.p, 3, dtype=torch.float64)
    for some in (None, weights):
        expected = torch.cat([rows for _, rows in found.blocks(weights=some)]) @ matrix
        ids, mapped = map(torch.cat, zip(*found.blocks(weights=some, through=matrix), strict=True))
        assert relative_error(mapped, expected[ids]) < 1e-10
    with pytest.raises(ValueError, match=rf"through has shape \[{found.p - 1}, 3\]: pass a matrix \[{found.p}, d\]"):
        found.blocks(through=matrix[:-1])


def test_rows_through_a_linear_map_are_the_mapped_rows_and_name_the_group_that_is_not_finite():
    found = provider()
    matrix = torch.randn(found.p, 3, dtype=found.space.dtype)
    rows = found.rows() @ matrix
    for ids, mapped in found.blocks(2, through=lambda rows: rows @ matrix):
        assert relative_error(mapped, rows[ids]) < 1e-6
    case = make_case("mlp")
    case.x[9] = float("nan")
    spoiled = GroupGradients(case.model, LOSS, case.data, LABELS)
    with pytest.raises(ValueError, match="1 of 4 groups have non-finite gradients, first group 1 "):
        list(spoiled.blocks(through=lambda rows: rows @ matrix))


@pytest.mark.parametrize("model", [
    nn.Sequential(shared := nn.Linear(2, 2), nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"a": nn.Identity()})),
    nn.TransformerEncoderLayer(4, 2), torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))),
])  # fmt: skip
def test_modules_are_those_of_torch_in_its_order(model):
    if isinstance(model, nn.Sequential):
        model.register_module("none", None)
    assert named_modules(model) == list(model.named_modules())


@pytest.mark.parametrize(
    ("shape", "value", "message"),
    [
        ((2, 5), 1.0, r"directions has shape \[2, 5\]: pass \[m, 73\]"),
        ((73,), 1.0, r"directions has shape \[73\]: pass \[m, 73\]"),
        ((1, 73), float("inf"), "directions holds NaN or infinite numbers"),
    ],
)
def test_bad_directions_are_named(shape, value, message):
    with pytest.raises(ValueError, match=message):
        provider().scores(torch.full(shape, value))


MLP = make_case("mlp")
OTHER = make_case("mlp").model


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda found: found.scores([[1.0] * 73]), TypeError, r"directions is a list: pass a tensor \[m, p\]"),
        (
            lambda found: found.scores(properties.mean_loss(MLP.data, LOSS)),
            TypeError,
            "directions is a MeanProperty: .* or use attribute",
        ),
        (lambda found: found.scores(None), TypeError, "directions is None: pass a tensor"),
        (lambda found: found.scores(3), TypeError, r"directions=3: pass the directions themselves, a tensor \[m, 73\]"),
        (lambda found: found.plan(-3), ValueError, "directions=-3: pass how many"),
        (lambda found: found.blocks(0), ValueError, "max_rows=0: pass a positive number"),
        (lambda found: found.blocks(weights=[[1.0] * 23]), TypeError, r"weights is a list: pass a tensor \[w, 23\]"),
        (lambda found: found.blocks(weights=np.ones(23)), ValueError, r"weights has shape \[23\]: pass \[w, 23\]"),
    ],
)
def test_what_a_provider_cannot_answer_is_named(ask, error, message):
    with pytest.raises(error, match=message):
        ask(provider())


@pytest.mark.parametrize("kind", ["parameter", "Linear"])
def test_parameters_of_another_model_are_named(kind):
    other = OTHER[0] if kind == "Linear" else OTHER[0].bias
    with pytest.raises(ValueError, match=rf"parameters\[1\] is a {kind} that is not of the model"):
        GroupGradients(MLP.model, LOSS, MLP.data, LABELS, parameters=[MLP.model[0].weight, other])


def test_arrays_are_directions_and_weights():
    found = provider()
    v, w = torch.randn(2, found.p, dtype=torch.float64), torch.rand(2, len(LABELS), dtype=torch.float64)
    torch.testing.assert_close(found.scores(v.numpy()), found.scores(v))
    assert found.plan(v.numpy()) == found.plan(v)
    for (_, rows), (_, expected) in zip(found.blocks(weights=w.numpy()), found.blocks(weights=w), strict=True):
        torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda found: pickle.loads(pickle.dumps(found))])
def test_a_copy_gives_the_same_scores(copied, used):
    found = provider()
    v = direction(found.p)
    if used:
        found.scores(v)
    other = copied(found)
    torch.testing.assert_close(other.scores(v), found.scores(v))
    if copied is not copy.copy:
        with torch.no_grad():
            next(found.model.parameters()).zero_()
        assert relative_error(other.scores(v), found.scores(v)) > 1e-3


def test_an_unknown_layer_asked_for_by_name_is_named():
    for strategy in ("directional", "segmented", "ghost"):
        with pytest.raises(
            ValueError, match=rf"strategy='{strategy}' cannot be used here.*parameter 'act.weight'.*PReLU"
        ):
            provider("unknown", strategy=strategy).plan(1)
    case = make_case("cnn")
    with pytest.raises(ValueError, match="'ghost' cannot be used here: Conv2d '0' is not a Linear layer"):
        GroupGradients(case.model, LOSS, case.data, LABELS, strategy="ghost").scores(points(case))
    with pytest.raises(ValueError, match="the directions are not gradients of test points"):
        score(provider(strategy="ghost"))
    with pytest.raises(ValueError, match="'directional' cannot be used here: it never forms gradients"):
        provider(strategy="directional").rows()


def points(case) -> PointGradients:
    return PointGradients(OutputLoss(LOSS), IndexedData((case.x[:5], case.y[:5])))


class UsedElsewhere(nn.Module):
    """A layer whose weight is also used outside of it: hooks on the layer see only a part."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.body(x).relu() + F.linear(x, self.body.weight))


class MixesExamples(nn.Module):
    """A layer that sees the batch transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(x.view(-1, 2, 3).transpose(0, 1).reshape(2, -1, 3).repeat(1, 1, 2)).mean(0)[:, :6])


@pytest.mark.parametrize("model", [UsedElsewhere, MixesExamples])
def test_a_parameter_that_layers_do_not_show_never_gives_a_wrong_number(model):
    case = make_case("mlp")
    case.model = model().double()
    found = GroupGradients(case.model, LOSS, case.data, LABELS)
    v = torch.randn(3, found.p, dtype=torch.float64)
    assert relative_error(found.scores(v), Groups(LABELS).sum(v @ case.gradients().T)) <= 1e-12
    with pytest.raises(ValueError, match="cannot be used here"):
        GroupGradients(case.model, LOSS, case.data, LABELS, strategy="directional").scores(v)


def test_layers_without_forward_mode_and_vmap_fall_back_to_backward():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRUCell(6, 4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.cell(x))

    case = make_case("mlp")
    case.model = Recurrent().double()
    for m in (1, 50):
        found = GroupGradients(case.model, LOSS, case.data, LABELS)
        v = torch.randn(m, found.p, dtype=torch.float64)
        assert relative_error(found.scores(v), Groups(LABELS).sum(v @ case.gradients().T)) <= 1e-12
    with pytest.raises(ValueError, match="strategy='persample' cannot be used here: vmap over the model failed"):
        GroupGradients(case.model, LOSS, case.data, LABELS, strategy="persample").rows()


def state_of(model: nn.Module) -> list:
    return [
        {name: value.clone() for name, value in model.state_dict().items()},
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        [parameter.grad for parameter in model.parameters()],
        [
            len(module._forward_hooks) + len(module._backward_hooks) + len(module._forward_pre_hooks)
            for module in model.modules()
        ],
    ]


def same_state(before: list, after: list) -> bool:
    states = all(torch.equal(value, after[0][name]) for name, value in before[0].items())
    gradients = all(a is b for a, b in zip(before[3], after[3], strict=True))
    return states and gradients and before[1:3] + before[4:] == after[1:3] + after[4:]


class Interrupted(OutputLoss):
    """A loss that fails in the second batch after it was armed."""

    def __init__(self) -> None:
        super().__init__(LOSS)
        self.error: type[BaseException] | None = None
        self.calls = 0

    def each(self, model, batch):
        self.calls += self.error is not None
        if self.error is not None and self.calls == 2:
            raise self.error
        return super().each(model, batch)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, None])
@pytest.mark.parametrize("strategy", [s for s in STRATEGIES if s != "ghost"])
def test_the_model_is_left_as_it_was(strategy, error):
    case = make_case("cnn")
    case.model[0].weight.requires_grad_(False)
    case.model[6].train()
    case.model[8].weight.grad = torch.ones_like(case.model[8].weight)
    before = state_of(case.model)
    loss = Interrupted()
    found = GroupGradients(case.model, loss, case.data, LABELS, strategy=strategy, batch_size=4)
    v = torch.randn(2, found.p, dtype=torch.float64)
    expected = found.scores(v)
    assert same_state(before, state_of(case.model))
    if error is not None:
        loss.error = error
        with pytest.raises(error):
            found.scores(v)
        assert same_state(before, state_of(case.model))
        loss.error = None
    assert torch.equal(found.scores(v), expected)


@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer"])
@pytest.mark.parametrize(
    "sizes", [(6, 6, 6, 5), (1, 1, 1, 4, 4, 4, 8), (4, 4, 1, 1, 5, 5, 3), (7, 3, 1, 12), (1,) * N, (N,)], ids=str
)
def test_rows_are_the_sums_for_groups_of_any_sizes(model, sizes):
    case = make_case(model)
    labels = np.repeat(np.arange(len(sizes)), sizes)

    def rows(strategy: str, batch_size: int) -> torch.Tensor:
        return GroupGradients(case.model, LOSS, case.data, labels, strategy=strategy, batch_size=batch_size).rows()

    expected = rows("backward", N)
    for batch_size in (N, 5):  # batches of 5 cut groups
        assert relative_error(rows("segmented", batch_size), expected) < 1e-12


@pytest.mark.parametrize("strategy", ["segmented", "backward", "persample"])
def test_the_model_is_as_it_was_between_blocks_too(strategy):
    case = make_case("mlp")
    before = state_of(case.model)
    blocks = GroupGradients(case.model, LOSS, case.data, LABELS, strategy=strategy, batch_size=4).blocks(1)
    next(blocks)
    assert same_state(before, state_of(case.model))


def test_the_global_random_state_is_not_touched():
    before = torch.get_rng_state()
    score_of = provider()
    torch.set_rng_state(before)
    score_of.scores(torch.ones(1, score_of.p))
    list(score_of.blocks())
    assert torch.equal(torch.get_rng_state(), before)


def test_plans_say_which_strategy_and_why():
    line = provider().plan(1).explain()
    assert line.startswith("directional: 1 direction, mean group size 5.75, every parameter is in a layer known")
    assert "x one forward+backward pass over 23 points" in line
    assert provider("unknown").plan(1).strategy == "forward"
    assert "not known to be linear" in provider("unknown").plan(1).explain()
    assert provider().plan(None).strategy == "segmented"
    assert provider(strategy="backward").plan(3).explain().startswith("backward: asked for by name")


def test_a_plan_names_the_memory_of_its_directions_and_their_scores():
    model, data = nn.Linear(500, 20), (torch.randn(64, 500), torch.zeros(64, dtype=torch.long))
    found = GroupGradients(model, LOSS, data, np.arange(64) // 4)
    one, many = found.plan(1).working_bytes, found.plan(1001).working_bytes
    assert many - one >= 1000 * (found.p * 4 + 16 * 4)
    assert f"{many / 2**20:.0f} MB of working memory" in found.plan(1001).explain()
    points = PointGradients(LOSS, (torch.randn(1001, 500), torch.zeros(1001, dtype=torch.long)))
    assert found.plan(points).strategy == "ghost"
    assert found.plan(points).working_bytes < many / 2  # points are kept, not their gradients


def test_auto_follows_directions_and_group_size():
    x, y = torch.randn(4096, 300), torch.zeros(4096, dtype=torch.long)
    model = nn.Sequential(nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 10))

    def taken(group_size: int, asked) -> str:
        return GroupGradients(model, LOSS, (x, y), np.arange(4096) // group_size).plan(asked).strategy

    tests = PointGradients(OutputLoss(LOSS), IndexedData((x[:100], y[:100])))
    assert {taken(size, 1) for size in (1, 64, 1024)} == {"directional"}
    assert taken(1, tests) == "ghost"
    assert taken(1024, tests) in ("segmented", "backward")
    assert taken(64, 100) == "segmented"


def test_progress_bar_is_off_by_default_and_counts_points(capsys):
    score(provider())
    assert capsys.readouterr().err == ""
    score(provider(show_progress=True))
    assert "directional group scores: 100%" in capsys.readouterr().err


def test_a_stream_is_scored_without_being_indexed():
    case = make_case("mlp")

    class Stream(IterableDataset):
        def __iter__(self):
            return zip(case.x, case.y, strict=True)

    found = GroupGradients(case.model, LOSS, DataLoader(Stream(), batch_size=5), LABELS)
    v = torch.randn(1, found.p, dtype=torch.float64)
    assert relative_error(found.scores(v), Groups(LABELS).sum(v @ case.gradients().T)) <= 1e-12
    with pytest.raises(
        ValueError, match="groups was built for 30 training points, but the training data gives only 23"
    ):
        GroupGradients(case.model, LOSS, DataLoader(Stream(), batch_size=5), np.arange(30) % 4).scores(v)
    with pytest.raises(ValueError, match="groups was built for 10 training points, but the training data gives more"):
        GroupGradients(case.model, LOSS, DataLoader(Stream(), batch_size=5), np.arange(10) % 4).scores(v)
    with pytest.raises(TypeError, match="IterableDataset"):
        found.rows()
    with pytest.raises(TypeError, match="a stream without a length: pass groups"):
        GroupGradients(case.model, LOSS, Stream())


@pytest.mark.parametrize("strategy", ["auto", "directional", "forward"])
def test_points_of_a_stream_in_no_group_are_left_out(strategy):
    case = make_case("mlp")

    class Stream(IterableDataset):
        def __iter__(self):
            return zip(case.x, case.y, strict=True)

    labels = np.array(LABELS)
    labels[[0, 7, *range(10, 15)]] = -1  # a whole batch, too
    groups = Groups(labels, rest="drop")
    found = GroupGradients(case.model, LOSS, DataLoader(Stream(), batch_size=5), groups, strategy=strategy)
    v = torch.randn(1, found.p, dtype=torch.float64)
    assert relative_error(found.scores(v), groups.sum(v @ case.gradients().T)) <= 1e-12


def test_rows_in_flight_are_bounded_by_the_budget():
    row = 73 * 8
    for strategy in ("segmented", "backward", "persample"):
        found = provider(strategy=strategy, memory_budget=2 * row)
        assert max(len(rows) for _, rows in found.blocks()) <= 2


def test_attribute_refuses_what_does_not_belong_together():
    case = make_case("mlp")
    goal = properties.mean_loss(case.data, LOSS)
    arguments = (case.model, LOSS, case.data, LABELS, goal)
    with pytest.raises(ValueError, match="weights is given without checkpoints"):
        attribute(*arguments, weights=[1.0])
    with pytest.raises(ValueError, match="checkpoints is empty"):
        attribute(*arguments, checkpoints=[])
    with pytest.raises(ValueError, match="weights has 1 entries for 2 checkpoints"):
        attribute(*arguments, checkpoints=[case.model.state_dict()] * 2, weights=[1.0])
    before = state_of(case.model)
    with pytest.raises(ValueError, match=r"checkpoints\[1\] does not fit the model(.|\n)*Missing key"):
        attribute(*arguments, checkpoints=[case.model.state_dict(), {}])
    assert same_state(before, state_of(case.model))


def test_checkpoints_may_be_files(tmp_path):
    case = make_case("mlp")
    torch.save(case.model.state_dict(), tmp_path / "one.pt")
    goal = properties.mean_loss(case.data, LOSS)
    now = attribute(case.model, LOSS, case.data, LABELS, goal, method="tracin")
    for given in ([tmp_path / "one.pt"], tmp_path / "one.pt", str(tmp_path / "one.pt"), case.model.state_dict()):
        assert torch.equal(
            attribute(case.model, LOSS, case.data, LABELS, goal, checkpoints=given, method="tracin"), now
        )


NO_STATES = {"text": b"epoch 3\n", "nothing": b"", "bytes": bytes(range(256)), "an archive": b"PK\x03\x04"}


@pytest.mark.parametrize("kind", [*NO_STATES, "list", "tensor"])
def test_a_file_that_holds_no_state_dict_is_named(kind, tmp_path):
    path = tmp_path / "one.pt"
    if kind in NO_STATES:
        path.write_bytes(NO_STATES[kind])
    else:
        torch.save([1, 2] if kind == "list" else torch.ones(3), path)
    case = make_case("mlp")
    goal = properties.mean_loss(case.data, LOSS)
    with pytest.raises(ValueError, match=r"checkpoints\[0\] is '.*one.pt', which holds .*torch.save\(model.state_dict"):
        attribute(case.model, LOSS, case.data, LABELS, goal, checkpoints=[path])


def test_point_gradients_are_built_from_a_loss_and_data_as_users_have_them():
    case = make_case("mlp")
    found, x, y = provider(), case.x[:5], case.y[:5]
    truth = GroupGradients(case.model, LOSS, (x, y)).rows() @ found.rows().T
    for loss_fn in (LOSS, nn.CrossEntropyLoss(), F.cross_entropy, OutputLoss(LOSS)):
        for data in ((x, y), TensorDataset(x, y), DataLoader(TensorDataset(x, y), 2), IndexedData((x, y))):
            given = PointGradients(loss_fn, data)
            assert given.n == 5
            torch.testing.assert_close(found.scores(given), truth)
    with pytest.raises(TypeError, match="loss_fn is a str"):
        PointGradients("loss", (x, y))
    with pytest.raises(ValueError, match="the test data holds tensors of different lengths"):
        PointGradients(LOSS, (x, y[:2]))


@pytest.mark.parametrize("finding", ["it gives twice the gradient", None])
def test_a_new_strategy_is_trusted_only_where_it_was_compared_with_autograd(monkeypatch, finding):
    known = BY_NAME["forward"]
    cheap = replace(known, name="cheap", cost=Cost(), compare=lambda proof, direction: finding)
    monkeypatch.setitem(BY_NAME, "cheap", cheap)
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), (torch.randn(6, 3), torch.randint(0, 2, (6,)))
    asked = GroupGradients(model, nn.CrossEntropyLoss(), data, [0, 0, 1, 1, 2, 2], strategy="cheap")
    assert GroupGradients(model, nn.CrossEntropyLoss(), data, strategy="auto").plan(1).strategy == "directional"
    if finding is None:
        assert asked.plan(1).strategy == "cheap"
    else:
        with pytest.raises(ValueError, match=f"strategy='cheap' cannot be used here: {finding}"):
            asked.plan(1)


@pytest.mark.parametrize(("into", "out"), [(5, 3), (5, 40), (5, 90), (70, 40), (70, 90), (90, 70)])
def test_layers_of_every_shape_give_the_same_scores(into, out):
    """The products of a Linear layer are taken in one order or another, as its shape makes them fast."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(into, out), nn.Tanh(), nn.Linear(out, 3)).double()
    data, labels = (torch.randn(N, into, dtype=torch.float64), torch.arange(N) % 3), torch.arange(N) % 4
    found = [GroupGradients(model, LOSS, data, labels, strategy=strategy) for strategy in ("directional", "backward")]
    v = torch.randn(2, found[0].p, dtype=torch.float64)
    assert relative_error(found[0].scores(v), found[1].scores(v)) < 1e-12


def test_a_pass_that_fails_in_the_middle_leaves_the_model_as_it_was():
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(3, 2)

        def forward(self, x):
            if bool((x > 50).any()):
                raise RuntimeError("too large")
            return self.body(x)

    torch.manual_seed(0)
    x, y = torch.randn(60, 3), torch.randint(0, 2, (60,))
    model = Fails()
    model.body.bias.requires_grad_(False)
    found = GroupGradients(model, LOSS, (x, y), torch.arange(60) % 4, batch_size=10, parameters=["body"])
    v = torch.randn(1, found.p)
    expected = found.scores(v)
    before = x[33].clone()
    x[33] += 100
    with pytest.raises(RuntimeError, match="too large"):
        found.scores(v)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.body.weight.requires_grad
    assert not model.body.bias.requires_grad
    x[33] = before
    assert torch.allclose(found.scores(v), expected)


def test_code_that_makes_batches_sees_the_model_without_our_hooks():
    model, seen = nn.Linear(3, 2), []

    class Looks(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, at):
            seen.append(len(model._forward_hooks) + len(model._forward_pre_hooks))
            return torch.full((3,), float(at)), at % 2

    found = GroupGradients(model, LOSS, Looks(), torch.arange(40) % 4, batch_size=10)
    score_of_ones = found.scores(torch.ones(1, found.p))
    assert bool(score_of_ones.isfinite().all())
    assert len(seen) >= 40
    assert not any(seen)


class Switched(nn.Module):
    """Units that are 0 but for rounding, which is not the same for an example alone and in a batch."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.first, self.last, self.mixes = nn.Linear(4, 3), nn.Linear(3, 2), mixes
        nn.init.zeros_(self.first.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) + (1e-9 if len(x) == 1 else -1e-9)
        return self.last(hidden.relu() + (1e-2 * hidden.mean(0) if self.mixes else 0))


@pytest.mark.parametrize("strategy", ["auto", "backward"])
def test_a_unit_that_rounding_switches_on_is_no_mixing_of_examples(strategy):
    torch.manual_seed(0)
    model, x, y = Switched(mixes=False), torch.randn(24, 4), torch.randint(0, 2, (24,))
    x[[0, -1]] = 0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = GroupGradients(model, LOSS, (x, y), np.arange(24) // 6, strategy=strategy)
    rows = found.rows()
    truth = torch.stack([torch.cat([part.flatten() for part in torch.autograd.grad(
        F.cross_entropy(model(x[low : low + 6]), y[low : low + 6], reduction="sum"), list(model.parameters()))])
        for low in range(0, 24, 6)])  # fmt: skip
    assert relative_error(rows, truth) < 1e-5
    assert strategy != "auto" or found.plan(1).strategy == "directional"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        GroupGradients(Switched(mixes=True), LOSS, (x, y), strategy=strategy).rows()


def test_examples_that_are_mixed_at_some_parameters_only_are_refused():
    class AtOnes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mixes = bool((self.weight == 1).all())
            return super().forward(x) + (x.mean() if mixes else 0.0) * torch.arange(3)

    torch.manual_seed(0)
    model, data = AtOnes(4, 3), (torch.randn(24, 4), torch.randint(0, 3, (24,)))
    nn.init.ones_(model.weight)
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        GroupGradients(model, LOSS, data).rows()
