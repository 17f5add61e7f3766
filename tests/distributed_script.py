"""Everything that is split over ranks: on every rank, and in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import captum_cases
import cases
import dattri_cases
import ggda_dattri
import ggda_trak
import numpy as np
import torch
import torch.distributed as dist
import trak_cases
from ggda_trak import FisherInfluence
from ggda_trak.ranks import is_to_reset
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from ggda_ext import STRATEGIES, GroupGradients, Groups, PointGradients, attribute, grouping, properties
from ggda_ext.counterfactual import WhatIf
from ggda_ext.counterfactual.leave_group_out import leave_group_out
from ggda_ext.curvature import EmpiricalFisher, Hessian, conjugate_gradients, lissa
from ggda_ext.data import IndexedData
from ggda_ext.evaluation import Retrainer
from ggda_ext.losses import as_example_loss
from ggda_ext.methods import METHODS
from ggda_ext.model import ParameterSpace
from ggda_ext.sharing import add_up, gathered, in_order, my_share, rank, world_size
from ggda_ext.training import Recipe

LABELS = np.random.default_rng(0).integers(0, 5, cases.N) ** 2 % 5
UNEVEN = Groups(np.unique(LABELS, return_inverse=True)[1])
GROUPS = {
    "uneven": UNEVEN,
    "fewer than ranks": Groups(np.arange(cases.N) % 2),
    "one": Groups(np.zeros(cases.N, np.int64)),
    "singletons": Groups.singletons(cases.N),
    "left out": Groups(np.where(np.arange(cases.N) % 4, UNEVEN.labels, -1), rest="drop"),
}
RUNS = (
    ("mlp", "uneven", STRATEGIES),
    ("mlp", "fewer than ranks", STRATEGIES),
    ("mlp", "one", ("auto", "backward")),
    ("mlp", "singletons", ("auto", "segmented")),
    ("mlp", "left out", ("auto", "directional", "segmented")),
    ("cnn", "uneven", ("auto", "segmented", "backward")),
    ("transformer", "fewer than ranks", ("directional", "backward")),
    ("unknown", "uneven", ("auto", "forward", "persample")),
)


class Stream(IterableDataset):
    """Points that come one after the other, without a length."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*self.tensors, strict=True)


def tests_of(case: cases.Case) -> tuple[Tensor, Tensor]:
    return case.x[:5].flip(0).clone(), (case.y[:5] + 1) % cases.CLASSES


def wrapped(model: nn.Module) -> nn.Module:
    """In a DistributedDataParallel, if there is a process group."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def core() -> Iterator[tuple[str, Any]]:
    """Scores of every strategy, rows, norms."""
    for name, kind, strategies in RUNS:
        case, groups = cases.make_case(name), GROUPS[kind]
        directions = torch.randn(2, sum(p.numel() for p in case.model.parameters()), dtype=torch.float64)
        points = PointGradients(as_example_loss(nn.CrossEntropyLoss()), IndexedData(tests_of(case)))
        for strategy in strategies:
            provider = GroupGradients(
                case.model, nn.CrossEntropyLoss(), case.data, groups, strategy=strategy, batch_size=4
            )
            at = f"{name}, {kind}, {strategy}"
            if strategy != "ghost":
                yield f"scores: {at}", provider.scores(directions)
            if strategy in ("auto", "ghost", "segmented", "backward"):
                yield f"scores of test points: {at}", provider.scores(points)
            if strategy not in ("directional", "forward", "ghost"):
                yield f"rows: {at}", provider.rows()
                yield f"squared norms: {at}", provider.squared_norms()
                yield f"all blocks: {at}", torch.cat([rows for _, rows in provider.all_blocks(2)])
                yield f"gathered blocks: {at}", in_order(provider.blocks(2))


def fewer_points_than_ranks() -> Iterator[tuple[str, Any]]:
    case = cases.make_case("mlp")
    provider = GroupGradients(case.model, nn.CrossEntropyLoss(), (case.x[:1], case.y[:1]), [[0]])
    yield "one point: rows", provider.rows()
    yield "one point: scores", provider.scores(torch.ones(1, provider.p))
    yield (
        "one point: property",
        provider.scores(
            properties.property_gradient(
                properties.soft_f1((case.x[:1], case.y[:1])), case.model, dict(case.model.named_parameters())
            )
        ),
    )
    yield "one point: features", grouping.representations(case.model, (case.x[:1], case.y[:1]))


def streams() -> Iterator[tuple[str, Any]]:
    case = cases.make_case("mlp")
    stream = Stream(case.x, case.y)
    directions = torch.ones(1, sum(p.numel() for p in case.model.parameters()), dtype=torch.float64)
    provider = GroupGradients(case.model, nn.CrossEntropyLoss(), stream, UNEVEN, batch_size=4)
    yield "stream: scores", provider.scores(directions)
    parameters = dict(case.model.named_parameters())
    for name, kind in (("mean loss", properties.mean_loss), ("point losses", properties.point_losses)):
        of = kind(Stream(*tests_of(case)), nn.CrossEntropyLoss(), batch_size=2)
        yield f"stream: {name}", properties.property_gradient(of, case.model, parameters)
    f1 = properties.soft_f1(Stream(*tests_of(case)), batch_size=2)
    yield "stream: soft F1", properties.property_gradient(f1, case.model, parameters)
    yield "stream: representations", grouping.representations(case.model, Stream(case.x, case.y), batch_size=5)


def of_properties() -> Iterator[tuple[str, Any]]:
    case = cases.make_case("mlp")
    data, parameters = (case.x, case.y), dict(case.model.named_parameters())
    loss = nn.CrossEntropyLoss()
    x = tests_of(case)[0]
    for name, of in {
        "mean loss": properties.mean_loss(data, loss, batch_size=4),
        "point losses": properties.point_losses(data, loss),
        "soft F1": properties.soft_f1(data, batch_size=4),
        "parity gap": properties.demographic_parity_gap(data, np.arange(cases.N) % 2, batch_size=4),
        "calibration": properties.soft_calibration_error(data, batch_size=4),
        "attacked": properties.attacked_loss(data, loss, properties.fgsm(0.1), batch_size=4),
        "no targets": properties.of_outputs(case.x, lambda outputs, _: outputs.square().mean(), batch_size=4),
        "stacked": properties.stack(properties.mean_loss(data, loss), properties.soft_f1(data)),
        "plain": lambda model: model(x).square().mean(),
    }.items():
        yield f"property: {name}", properties.property_gradient(of, case.model, parameters)
        yield f"attribute: {name}", attribute(case.model, loss, case.data, UNEVEN, of, method="tracin")
    mean = properties.mean_loss(data, loss)
    for kind in METHODS:
        result = attribute(case.model, loss, case.data, UNEVEN, mean, method=METHODS[kind](), intervals=True)
        yield f"attribute: by {kind}", result
        yield f"attribute: how sure by {kind}", result.high


def curvature() -> Iterator[tuple[str, Any]]:
    case = cases.make_case("mlp")
    space = ParameterSpace(case.model)
    vectors = torch.randn(3, space.size, dtype=torch.float64)
    for reduction in ("mean", "sum"):

        def loss(model: nn.Module, batch: Any, reduction: str = reduction) -> Tensor:
            return cross_entropy(model(batch[0]), batch[1], reduction=reduction)

        hessian = Hessian(space, loss, IndexedData(case.data), batch_size=4)
        scaling = 5.0 if reduction == "mean" else 100.0
        yield f"Hessian: {reduction}", hessian @ vectors
        yield f"conjugate gradients: {reduction}", conjugate_gradients(hessian, vectors, regularization=1.0)
        for m, repeat, size in ((1, 1, 1), (1, 1, 7), (1, 2, 1), (3, 2, 4)):
            found = lissa(hessian, vectors[:m], depth=9, scaling=scaling, damping=0.1, repeat=repeat, batch_size=size)
            yield f"LiSSA: {reduction}, {m} vectors, {repeat} runs, batches of {size}", found
    seeded = lissa(hessian, vectors, depth=9, scaling=100.0, damping=0.1, seed=7 + rank())
    yield "LiSSA: the seed of rank 0", seeded
    fisher = EmpiricalFisher(3)
    rows = torch.arange(12.0).view(4, 3)
    mine = my_share(4)
    fisher.add(rows[mine.start : mine.stop])
    yield "Fisher", (fisher.add_up().matrix, torch.tensor(fisher.rows))


def groupings() -> Iterator[tuple[str, Any]]:
    case = cases.make_case("mlp", torch.float32)
    loss = nn.CrossEntropyLoss()
    data = TensorDataset(*case.data)
    yield "features: inputs", grouping.KMeansGroups(n_groups=3, batch_size=5).features(data)
    yield "features: representations", grouping.representations(case.model, data, batch_size=5)
    yield "features: gradients", grouping.gradients(case.model, loss, data, batch_size=5)
    for name, builder in {
        "inputs": grouping.KMeansGroups(n_groups=3, random_state=0),
        "gradients": grouping.GradKMeansGroups(case.model, loss, n_groups=3, random_state=0, batch_size=5),
    }.items():
        yield f"groups: {name}", torch.from_numpy(builder.fit_groups(data).labels.copy())
    generator = np.random.default_rng(rank())
    yield (
        "groups: random",
        torch.from_numpy(grouping.random_groups(30, n_groups=4, random_state=generator).labels.copy()),
    )
    summary = UNEVEN.summary(case.model, loss, case.data, property=properties.mean_loss(tests_of(case), loss))
    yield "summary", [torch.tensor(values).float() for name, values in summary.columns.items() if name != "group"]


def helpers() -> Iterator[tuple[str, Any]]:
    mine = my_share(7)
    yield "gather: uneven", gathered(torch.arange(14).view(7, 2)[mine.start : mine.stop])
    mine = my_share(1)
    yield "gather: one", gathered(torch.ones(1, 3) if len(mine) else None)
    held = np.zeros(5, bool)
    held[[[0, 1], [1, 2], [3]][rank()]] = True
    reset, taken = is_to_reset(held)  # rank 1 holds a point of rank 0
    assert reset == (rank() == 1)
    assert taken.tolist() == [True, True, False, world_size() > 2, False]
    yield "sum", add_up(torch.ones(4, 3).T[:2] / world_size())


def captum() -> Iterator[tuple[str, Any]]:
    for name in captum_cases.CLASSES:
        given = captum_cases.problem()
        influence = captum_cases.ours(name, given, groups=captum_cases.UNEVEN)
        yield f"Captum: {name}", captum_cases.score(influence, given.test)
        yield f"Captum: {name}, self", influence.self_influence()
        of = properties.mean_loss(given.test, nn.CrossEntropyLoss(), batch_size=2)
        yield f"Captum: {name}, property", captum_cases.score(influence, property=of)
        if name == "TracInCP":
            yield f"Captum: {name}, aggregated", influence.influence(given.test, aggregate=True)
            given.model = wrapped(given.model)
            inside = captum_cases.ours(name, given, groups=captum_cases.UNEVEN, layers=["module.last"])
            yield f"Captum: {name}, wrapped", captum_cases.score(inside, given.test)


def dattri() -> Iterator[tuple[str, Any]]:
    case = dattri_cases.make_case()
    of = properties.mean_loss(case.test.tensors, nn.CrossEntropyLoss(), batch_size=2)
    for name in dattri_cases.INFLUENCE:
        layer = ["0", "2"] if name == "EKFAC" else None
        attributor = dattri_cases.ours(name, case.task(), layer, groups=dattri_cases.GROUPS, show_progress=False)
        attributor.cache(case.full_loader())
        yield f"dattri: {name}", attributor.attribute(case.train_loader(), case.test_loader())
        yield f"dattri: {name}, property", attributor.attribute(case.train_loader(), property=of)
        if name in ("CG", "DataInf"):
            yield f"dattri: {name}, self", attributor.self_attribute(case.train_loader())
    options: dict[str, Any] = {"task": case.task(2, unbatched=True), "groups": dattri_cases.GROUPS}
    for projector in (None, {"proj_dim": 16, "proj_seed": 1, "device": "cpu"}):
        for normalized in (False, True):
            tracin = ggda_dattri.TracInAttributor(
                weight_list=torch.tensor([0.5, 1.0]), normalized_grad=normalized, projector_kwargs=projector,
                device="cpu", **options,
            )  # fmt: skip
            at = f"{'projected' if projector else 'plain'}{', normalized' if normalized else ''}"
            yield f"dattri: TracIn, {at}", tracin.attribute(case.train_loader(), case.test_loader())
            yield f"dattri: TracIn, {at}, property", tracin.attribute(case.train_loader(), property=of)
        yield f"dattri: TracIn, {at}, self", tracin.self_attribute(case.train_loader())
    for fisher in ("batched", "exact", "paper"):
        trak = ggda_dattri.TRAKAttributor(
            correct_probability_func=case.probability, fisher=fisher, regularization=1.0,
            projector_kwargs={"proj_dim": 16, "proj_seed": 1, "device": "cpu"}, device="cpu", **options,
        )  # fmt: skip
        trak.cache(case.full_loader())
        yield f"dattri: TRAK, {fisher}", trak.attribute(case.test_loader())
        yield f"dattri: TRAK, {fisher}, property", trak.attribute(property=of)
    case.model, outer = wrapped(case.model), "module." * dist.is_initialized()
    case.checkpoints = [{f"{outer}{name}": value for name, value in state.items()} for state in case.checkpoints]
    inside = dattri_cases.ours("CG", case.task(), [f"{outer}2.weight"], groups=dattri_cases.GROUPS)
    inside.cache(case.full_loader())
    yield "dattri: CG, wrapped", inside.attribute(case.train_loader(), case.test_loader())


def trak(folder: Path) -> Iterator[tuple[str, Any]]:
    case, labels = trak_cases.case("image_classification"), trak_cases.uneven_labels()
    for fisher, count in (("batched", 2), ("exact", 1), ("paper", 1)):
        states = case.checkpoints(count)
        save_dir = folder / f"trak-{fisher}"
        options: dict[str, Any] = {"task": case.task, "train_set_size": trak_cases.N, "save_dir": save_dir}
        options |= case.options | {"groups": labels, "fisher": fisher, "checkpoints": states}
        options |= {"lambda_reg": 1.0} if fisher == "exact" else {}
        model = wrapped(case.model) if fisher == "paper" else case.model
        if fisher == "exact":  # interrupted, then run again
            traker = ggda_trak.TRAKer(model, **options)
            traker.load_checkpoint(states[0], 0)
            for at in itertools.islice(trak_cases.batches(), 3):
                traker.featurize(trak_cases.take(case.train, at), inds=at)
            traker.load_checkpoint(states[0], 0)
        traker = ggda_trak.TRAKer(model, **options)
        trak_cases.featurize(traker, case, states)
        yield f"TRAK: {fisher}", torch.from_numpy(trak_cases.scored(traker, case, states))
        yield f"TRAK: {fisher}, damping", torch.tensor([traker.chosen_damping[j] for j in range(count)])
        of = properties.mean_loss(case.targets, nn.CrossEntropyLoss(), batch_size=2)
        again = ggda_trak.TRAKer(model, **options)
        for model_id, state in enumerate(states):
            again.start_scoring_checkpoint("property", state, model_id, num_targets=1)
            again.score(property=of)
        yield f"TRAK: {fisher}, property, opened again", torch.from_numpy(np.array(again.finalize_scores("property")))
        influence = FisherInfluence(
            case.model, case.train, nn.CrossEntropyLoss(), labels, proj_dim=32,
            fisher=fisher,
        )  # fmt: skip
        yield f"TRAK: Fisher influence, {fisher}", influence.influence(property=of)
        yield f"TRAK: Fisher influence, {fisher}, tests", influence.influence(case.targets)


def retrainings() -> Iterator[tuple[str, Any]]:
    case = cases.make_case("mlp")
    recipe = Recipe(epochs=2, learning_rate=0.01, batch_size=8)

    def make_model() -> nn.Module:
        return cases.make_case("mlp", seed=int(torch.randint(99, ()))).model

    retrain = Retrainer(make_model, nn.CrossEntropyLoss(), case.data, tests_of(case), recipe, range(2), "loss")
    yield "retraining: values", retrain([np.arange(20), np.arange(3, 23), np.arange(0, 23, 2)])
    yield "retraining: one model", Retrainer(*list(vars(retrain).values())[:5], [0], "loss")([np.arange(9)])
    left_out = leave_group_out(
        make_model, nn.CrossEntropyLoss(), case.data, UNEVEN, tests_of(case), recipe, seeds=range(2)
    )
    yield "retraining: leave group out", (left_out.scores, left_out.stderr)
    of = properties.soft_f1(tests_of(case))
    left_out = leave_group_out(make_model, nn.CrossEntropyLoss(), case.data, UNEVEN, of, recipe, seeds=[3], at_once=1)
    yield "retraining: leave group out, one by one", left_out.scores


def what_if() -> Iterator[tuple[str, Any]]:
    """Features are shared out by points, refits by subsets."""
    case = cases.make_case("mlp")
    measure = properties.mean_loss(tests_of(case), cross_entropy)
    for name, options in (("all", {}), ("some", {"rank": 8, "batch_size": 4})):
        asked = WhatIf(case.model, cross_entropy, case.data, UNEVEN, weight_decay=0.01, **options)
        yield f"what if: {name} directions", asked.subsets(1 - np.eye(len(UNEVEN)), measure)


def models_in_ddp() -> Iterator[tuple[str, Any]]:
    """The same scores of a model in a DistributedDataParallel as of the model itself."""
    case = cases.make_case("mlp")
    loss, of = nn.CrossEntropyLoss(), properties.mean_loss(tests_of(case), nn.CrossEntropyLoss())
    yield "wrapped: none", attribute(case.model, loss, case.data, UNEVEN, of, parameters=["2"], method="tracin")
    model = wrapped(case.model)
    states = [model.state_dict(), {name: 2 * value for name, value in case.model.state_dict().items()}]
    yield "wrapped: core", attribute(model, loss, case.data, UNEVEN, of, parameters=["2"], method="tracin")
    yield "wrapped: outer name", attribute(model, loss, case.data, UNEVEN, of, parameters=["module.2"], method="tracin")
    yield "wrapped: checkpoints", attribute(model, loss, case.data, UNEVEN, of, checkpoints=states, method="tracin")
    yield "wrapped: names", list(GroupGradients(model, loss, case.data, UNEVEN).space.parameters)
    yield "wrapped: gradients", grouping.gradients(model, loss, case.data, layer="module.2")


def errors() -> Iterator[tuple[str, Any]]:
    """What goes wrong on one rank, or differently on all: the message that every rank gets, and no dead-lock."""
    case = cases.make_case("mlp")
    loss, directions = nn.CrossEntropyLoss(), torch.ones(1, sum(p.numel() for p in case.model.parameters()))
    broken = case.x.clone()
    broken[-1, 0] = torch.nan  # on the last rank

    def scores(x: Tensor = case.x, groups: Any = UNEVEN, **options: Any) -> Any:
        return GroupGradients(case.model, loss, (x, case.y), groups, **options).scores(directions)

    def fails_on_last(model: nn.Module, batch: Any) -> Tensor:
        if rank() == world_size() - 1 and len(batch[0]) and bool((batch[0][-1] == case.x[-1]).all()):
            raise KeyError("only here")
        return cross_entropy(model(batch[0]), batch[1], reduction="none")

    def failing() -> Any:
        from ggda_ext import BatchLoss

        return GroupGradients(case.model, BatchLoss(fails_on_last), case.data, UNEVEN).scores(directions)

    def other_parameters() -> Any:
        other = cases.make_case("mlp", seed=rank())
        return GroupGradients(other.model, loss, case.data, UNEVEN).scores(directions)

    def with_sampler() -> Any:
        data = TensorDataset(*case.data)
        sampler = DistributedSampler(data, 2, 0)
        return GroupGradients(case.model, loss, DataLoader(data, sampler=sampler), UNEVEN)

    for name, run in {
        "not finite": lambda: scores(broken),
        "not finite rows": lambda: scores(broken, strategy="backward"),
        "one rank fails": failing,
        "test data not finite": lambda: properties.property_gradient(
            properties.mean_loss((broken, case.y), loss), case.model, dict(case.model.named_parameters())
        ),
        "other groups": lambda: scores(groups=np.arange(cases.N) % 3 if rank() else np.arange(cases.N) % 4 % 3),
        "other parameters": other_parameters,
        "sampler": with_sampler,
        "short stream": lambda: GroupGradients(case.model, loss, Stream(case.x[:9], case.y[:9]), UNEVEN).scores(
            directions
        ),
        "LiSSA diverges": lambda: lissa(
            Hessian(
                ParameterSpace(case.model), lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
                IndexedData(case.data),
            ),
            directions.double(), depth=200, scaling=0.001, batch_size=9,
        ),
    }.items():  # fmt: skip
        yield f"error: {name}", _message(run)
    yield "after errors", scores()


def _message(run: Callable[[], Any]) -> tuple[str, str]:
    try:
        run()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def everything(folder: Path) -> dict[str, Any]:
    """All results by name, arrays as tensors: what can be read without pickle."""
    found: dict[str, Any] = {}
    parts = (core, fewer_points_than_ranks, streams, of_properties, curvature, groupings, helpers)
    for part in (*parts, captum, dattri, retrainings, what_if, models_in_ddp, errors):
        torch.manual_seed(0)
        found |= part()
    found |= trak(folder)
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in found.items()}


def main(folder: Path) -> None:
    """By all ranks that were started, then by all but the last; every rank leaves what it found."""
    dist.init_process_group("gloo")
    mine, many = rank(), world_size()
    for count in (many, many - 1):
        own = folder / str(count)
        own.mkdir(exist_ok=True)
        torch.save(everything(own), folder / f"{mine}-of-{count}.pt")
        dist.destroy_process_group()
        if mine == many - 1:
            return
        if count == many:
            meeting = f"file://{folder}/meeting"
            dist.init_process_group("gloo", init_method=meeting, rank=mine, world_size=many - 1)
