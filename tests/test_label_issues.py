"""Wrong labels: the three signals against autograd, the choice between them, and the table."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from cases import point_rows
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from unusual_rare import FullExperts

from ggda_ext import Groups, find_label_issues
from ggda_ext.training import Recipe, initial_model, train_one

LOSS = nn.CrossEntropyLoss()
MODELS = {
    "linear layers": lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 3)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(30, 3)
    ),
}


def points(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 12, generator=generator), torch.randint(0, 3, (n,), generator=generator)


def gradients(model, data):
    return point_rows(model, F.cross_entropy, data).double()


@pytest.mark.parametrize("kind", MODELS)
def test_the_three_signals_are_those_of_autograd(kind):
    model, data, clean = initial_model(MODELS[kind], 0), points(20), points(7, seed=1)
    issues = find_label_issues(model, LOSS, data, validation=clean)
    rows, clean_rows = gradients(model, data), gradients(model, clean)
    cosines = F.cosine_similarity(rows[:, None], clean_rows[None], dim=2)
    np.testing.assert_allclose(issues.loss, F.cross_entropy(model(data[0]), data[1], reduction="none").detach(), 1e-5)
    np.testing.assert_allclose(issues.self_influence, rows.square().sum(1), 1e-4)
    np.testing.assert_allclose(issues.influence, cosines.pow(3).mean(1), 1e-3, 1e-6)


def test_blocks_of_clean_points_do_not_change_the_influence():
    model, data, clean = initial_model(MODELS["linear layers"], 0), points(20), points(7, seed=1)
    whole = find_label_issues(model, LOSS, data, validation=clean)
    blocks = find_label_issues(model, LOSS, data, validation=clean, memory_budget=8 * 20 * 3, batch_size=4)
    np.testing.assert_allclose(blocks.influence, whole.influence, 1e-3, 1e-6)


def test_permuting_the_data_permutes_the_signals():
    model, (x, y), clean = initial_model(MODELS["linear layers"], 0), points(20), points(7, seed=1)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    there, here = (find_label_issues(model, LOSS, data, validation=clean) for data in ((x[order], y[order]), (x, y)))
    for name in ("loss", "self_influence", "influence"):
        np.testing.assert_allclose(getattr(there, name), getattr(here, name)[order.numpy()], 1e-3, 1e-6)


def flipped(seed, n=400, share=0.2):
    """Two noisy halves of a plane in 10 dimensions, a fifth of the training labels flipped; 200 clean points."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n + 200, 10, generator=generator)
    y = (x[:, :3].sum(1) + 0.3 * torch.randn(n + 200, generator=generator) > 0).long()
    wrong = torch.randperm(n, generator=generator)[: int(share * n)]
    labels = y[:n].clone()
    labels[wrong] = 1 - labels[wrong]
    is_wrong = np.zeros(n, bool)
    is_wrong[wrong.numpy()] = True
    return (x[:n], labels), (x[n:], y[n:]), is_wrong


def trained(widths, data, epochs):
    def make():
        return nn.Sequential(nn.Linear(10, widths), nn.Tanh(), nn.Linear(widths, 2)) if widths else nn.Linear(10, 2)

    recipe = Recipe(epochs=epochs, learning_rate=0.02, batch_size=32)
    return train_one(initial_model(make, 0), LOSS, data, recipe, seed=0).model


@pytest.mark.parametrize("seed", range(3))
def test_what_was_learned_by_heart_is_found_better_than_by_loss(seed):
    data, clean, is_wrong = flipped(seed)
    issues = find_label_issues(trained(40, data, 40), LOSS, data, validation=clean)
    assert issues.ranked_by == "loss and influence"
    assert roc_auc_score(is_wrong, issues.suspicion) > roc_auc_score(is_wrong, issues.loss) + 0.02


def test_where_no_label_is_known_by_heart_it_is_as_good_as_the_loss():
    data, clean, is_wrong = flipped(0)
    issues = find_label_issues(trained(0, data, 10), LOSS, data, validation=clean)
    assert issues.ranked_by == "loss"
    assert "not learned by heart" in issues.why
    assert roc_auc_score(is_wrong, issues.suspicion) == pytest.approx(roc_auc_score(is_wrong, issues.loss))
    assert is_wrong[issues.indices[:40]].mean() > 0.7


def test_without_clean_points_the_ranking_is_that_of_the_loss_and_says_so():
    issues = find_label_issues(initial_model(MODELS["linear layers"], 0), LOSS, points(30))
    assert issues.ranked_by == "loss"
    assert "without clean validation data nothing was found to be better" in str(issues)
    np.testing.assert_array_equal(issues.indices, np.argsort(-issues.loss, kind="stable"))


@pytest.mark.parametrize("by", ["loss", "self_influence", "influence"])
def test_asked_for_by_name_it_ranks_by_one_signal(by):
    model, data, clean = initial_model(MODELS["linear layers"], 0), points(30), points(7, seed=1)
    issues = find_label_issues(model, LOSS, data, validation=clean, rank_by=by)
    values = getattr(issues, by) * (-1 if by == "influence" else 1)
    np.testing.assert_array_equal(issues.indices, np.argsort(-values, kind="stable"))


def test_the_group_with_wrong_labels_comes_first():
    x, y = flipped(1, share=0)[0]
    groups = np.repeat(["north", "south", "<b>east</b>", "west"], 100)
    y[groups == "south"] = 1 - y[groups == "south"]
    issues = find_label_issues(trained(0, (x, y), 10), LOSS, (x, y), groups=groups)
    assert next(iter(issues.by_group)) == "south"
    assert issues.by_group["south"]["in_top_tenth"] > 0.3
    frame = issues.to_frame()
    assert frame.index.tolist() == issues.indices.tolist()
    assert list(frame.columns) == ["suspicion", "loss", "self_influence", "group"]
    assert frame.group.tolist()[0] == groups[issues.indices[0]]
    assert "south   100" in str(issues)


def test_a_column_of_groups_is_matched_by_its_index():
    x, y = points(20)
    frame, column = pd.DataFrame(x.numpy()), pd.Series(["p"] * 12 + ["q"] * 8)
    data, model = (frame, pd.Series(y.numpy())), initial_model(MODELS["linear layers"], 0)
    issues = find_label_issues(model, LOSS, data, groups=column.sample(frac=1, random_state=0))
    assert issues.groups == Groups(column)
    with pytest.raises(ValueError, match="groups has another index"):
        find_label_issues(model, LOSS, data, groups=column.rename(lambda index: index + 1))


def test_a_memory_budget_may_be_written_as_a_float():
    model, data, clean = initial_model(MODELS["linear layers"], 0), points(20), points(7, seed=1)
    whole, written = (find_label_issues(model, LOSS, data, validation=clean, memory_budget=b) for b in (10**9, 1e9))
    np.testing.assert_array_equal(written.influence, whole.influence)


def test_agreement_is_spearmans_and_the_overlap_of_the_top_tenths():
    data, clean, _ = flipped(2)
    issues = find_label_issues(trained(8, data, 5), LOSS, data, validation=clean)
    assert set(issues.agreement) == {
        ("loss", "self_influence"), ("loss", "influence"), ("self_influence", "influence")
    }  # fmt: skip
    both = issues.agreement["loss", "influence"]
    assert both.correlation == pytest.approx(spearmanr(issues.loss, -issues.influence).statistic)
    tops = [set(np.argsort(-values)[:40]) for values in (issues.loss, -issues.influence)]
    assert both.overlap == pytest.approx(len(tops[0] & tops[1]) / 40)


def test_a_point_without_a_gradient_has_no_influence():
    model = nn.Linear(2, 1, bias=False)
    data, clean = (torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.ones(2, 1)), (torch.ones(1, 2), torch.ones(1, 1))
    issues = find_label_issues(model, nn.MSELoss(), data, validation=clean)
    assert issues.influence[0] == 0
    assert np.isfinite(issues.influence).all()


def test_the_model_is_left_as_it_was():
    model = initial_model(MODELS["convolution"], 0).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    next(model.parameters()).requires_grad_(False)
    find_label_issues(model, LOSS, points(9), validation=points(3, seed=1))
    assert model.training
    assert [parameter.requires_grad for parameter in model.parameters()] == [False, True, True, True]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank_by": "losses"}, "rank_by='losses' is not one of 'auto'"),
        ({"rank_by": "influence"}, "rank_by='influence' needs clean points: pass validation="),
        ({"groups": ["a"] * 8}, "labels for 8 points"),
        ({"validation": (torch.zeros(0, 12), torch.zeros(0).long())}, "validation is empty"),
    ],
)
def test_mistakes_are_named(options, says):
    with pytest.raises(ValueError, match=says):
        find_label_issues(initial_model(MODELS["linear layers"], 0), LOSS, points(9), **options)


def test_an_infinite_loss_is_named():
    x, y = points(5)
    x[3] = float("nan")
    with pytest.raises(ValueError, match="the loss of point 3 of the training data is nan"):
        find_label_issues(initial_model(MODELS["linear layers"], 0), LOSS, (x, y))


@pytest.mark.parametrize("validation", [False, True])
def test_points_that_mix_in_large_batches_only_are_refused_there(validation):
    torch.manual_seed(0)
    model, data = FullExperts(), (torch.randn(150, 6), torch.arange(150) % 3)
    model.ROOM = 32
    few = data[0][:40], data[1][:40]
    given = {"data": few, "validation": data} if validation else {"data": data}
    options = {"strategy": "backward"}  # the signals other than the loss come from batches of one
    with pytest.raises(ValueError, match="mixes the examples of a batch"):
        find_label_issues(model, LOSS, **given, **options)
    assert len(find_label_issues(model, LOSS, **given, **options, batch_size=32)) == len(given["data"][0])


def test_without_groups_there_is_no_table_by_group():
    with pytest.raises(ValueError, match="pass groups= to find_label_issues"):
        _ = find_label_issues(initial_model(MODELS["linear layers"], 0), LOSS, points(9)).by_group


def test_no_batch_is_larger_than_those_of_the_loaders():
    class Counting(nn.Linear):
        largest = 0

        def forward(self, x):
            self.largest = max(self.largest, len(x))
            return super().forward(x)

    x, y = torch.randn(30, 4), torch.arange(30) % 3
    model, loader = Counting(4, 3), DataLoader(TensorDataset(x, y), batch_size=4)
    find_label_issues(model, LOSS, loader, validation=loader)
    assert model.largest <= 4
