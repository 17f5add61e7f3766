"""Scores added up while a Trainer trains, against a plain loop over the same steps."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from cases import relative_error
from ggda_transformers import GroupTracker
from ggda_transformers.adam import live_divisors
from scipy import stats
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers_cases import collate, exactness, examples, gradients, made, own_loss, sources, trainer_of

from ggda_ext import Groups

N = 11


def plain_rows(rows):
    return [{key: value for key, value in row.items() if key not in ("source", "number")} for row in rows]


class PlainLoop(TrainerCallback):
    """What the tracker should find: every batch of every scored step, row by row, with plain autograd."""

    def __init__(self, rows, tests, every=1, adam=False, loss=own_loss, batches="own"):
        self.rows, self.tests, self.every, self.adam, self.loss = rows, tests, every, adam, loss
        self.gather = batches == "all"
        self.groups = Groups([row["source"] for row in rows])
        self.each, self.directions = [], []  # of every batch, by group; of every scored step
        self.collated, self.batches = [], []

    def collate(self, rows):
        """As a Trainer's collator that sees all columns, and remembers which rows it was given."""
        self.collated.append([row["number"] for row in rows])
        return collate(plain_rows(rows))

    def on_train_begin(self, args, state, control, **kwargs):
        self.left, self.steps = args.gradient_accumulation_steps, []

    def on_pre_optimizer_step(self, args, state, control, model=None, optimizer=None, **kwargs):
        count = args.gradient_accumulation_steps
        per_epoch = -(-len(self.rows) // args.per_device_train_batch_size)
        position = sum(len(step) for step in self.steps)
        step = list(range(position, position + min(count, per_epoch - position % per_epoch)))
        self.steps.append(step)
        if len(self.steps) % self.every != (0 if self.gather else 1 % self.every):
            return
        step = [batch for one in self.steps[-self.every :] for batch in one] if self.gather else step
        model.eval()
        goal = gradients(model, self.loss, self.tests).mean(0).double()
        goal = goal * optimizer.param_groups[0]["lr"]
        if self.adam:
            self.directions.append((len(self.steps), goal / self._divisors(model, optimizer)))
            weights = [0.9 ** (len(self.steps) - step) for step, _ in self.directions]
            goal = sum(w * one for w, (_, one) in zip(weights, self.directions, strict=True)) / sum(weights)
        for batch in step:
            numbers = self.collated[batch]
            rows = gradients(model, self.loss, plain_rows([self.rows[i] for i in numbers])).double()
            scores = rows @ goal
            labels = torch.from_numpy(self.groups.labels[numbers]).long()
            self.each.append(torch.zeros(len(self.groups), dtype=torch.float64).index_add_(0, labels, scores))
        model.train()

    @property
    def sums(self):
        return torch.stack(self.each).sum(0)

    @staticmethod
    def _divisors(model, optimizer):
        """√v̂ + ε of the step to come, by Adam's own arithmetic, with the mean square as of one step more."""
        own, beta, eps = optimizer.state, optimizer.param_groups[0]["betas"][1], optimizer.param_groups[0]["eps"]
        parts = []
        for p in model.parameters():
            before, steps = (own[p]["exp_avg_sq"], float(own[p]["step"])) if own.get(p) else (torch.zeros_like(p), 0)
            moments = beta * before + (1 - beta) * p.grad**2
            moved = torch.where(moments > 0, 1.0, torch.inf)  # dropout may leave out a parameter
            squares = ((moments / (1 - beta ** (steps + 1))).sqrt() + eps) ** 2
            mean = squares[moments > 0].mean() if (moments > 0).any() else 0.0
            parts.append(moved * (((steps + 1) * squares + mean) / (steps + 2)).sqrt())
        return torch.cat([part.flatten() for part in parts]).detach().double()


def run(
    tmp_path, name="gpt2", every=1, adam=False, dtype=torch.float64, loss=own_loss, attached=False, batches="own",
    collator=collate, **settings,
):  # fmt: skip
    rows = [row | {"number": i} for i, row in enumerate(sources(examples(name, N, dtype=dtype)))]
    tests = examples(name, 3, seed=1, dtype=dtype)
    loop = PlainLoop(rows, tests, every, adam, loss, batches)
    tracker = GroupTracker(
        rows, "source", eval_dataset=tests, every=every, batches=batches, preconditioner="adam" if adam else None,
        data_collator=collator, show=False,
    )  # fmt: skip
    defaults = {"max_steps": -1, "num_train_epochs": 2, "remove_unused_columns": False}
    trainer = trainer_of(
        made(name, dtype), rows, tmp_path, data_collator=loop.collate, callbacks=[loop, tracker],
        **(defaults | settings),
    )  # fmt: skip
    if attached:
        tracker.attach(trainer)
    trainer.train()
    return loop, tracker, trainer


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_the_sums_are_those_of_a_plain_loop(name, accumulation, tmp_path):
    loop, tracker, trainer = run(tmp_path, name, gradient_accumulation_steps=accumulation)
    assert len(loop.steps) == trainer.state.global_step == tracker.sums.steps
    assert sorted(number for batch in loop.collated[:3] for number in batch) == list(
        range(N)
    )  # 4 + 4 + 3 rows: an uneven last batch
    assert loop.collated[0] != sorted(loop.collated[0])  # the Trainer shuffles
    assert relative_error(tracker.result.scores[0], loop.sums) <= 1e-10
    assert tracker.result.method.unit == "rank"
    assert tracker.overhead > 0
    n = len(loop.each)
    half = stats.t.ppf(0.975, n - 1) * n**0.5 * torch.stack(loop.each).std(0)
    assert relative_error(tracker.result.low[0], loop.sums - half) <= 1e-10
    assert relative_error(tracker.result.high[0], loop.sums + half) <= 1e-10


@pytest.mark.parametrize(("settings", "bound"), [
    ({"every": 2}, 0), ({"adam": True}, 1e-8), ({"adam": True, "every": 2}, 1e-8), ({"name": "t5"}, 0),
    ({"name": "vit"}, 0), ({"every": 3, "batches": "all"}, 0), ({"every": 2, "batches": "all", "adam": True}, 1e-8),
    ({"dtype": torch.float32}, 1e-4), ({"lr_scheduler_type": "cosine", "warmup_steps": 2}, 0),
    ({"dataloader_num_workers": 0, "average_tokens_across_devices": False}, 0),
])  # fmt: skip
def test_the_sums_hold_for_other_settings(settings, bound, tmp_path):
    loop, tracker, trainer = run(tmp_path, **settings)
    assert relative_error(tracker.result.scores[0], loop.sums) <= (bound or exactness(trainer.model))


def test_the_division_is_that_of_the_coming_step():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2).double()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, betas=(0.8, 0.95), eps=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.randn(4, 3).double()).square().sum().backward()
        before = live_divisors(optimizer, dict(layer.named_parameters()), coming=True)
        optimizer.step()
        for name, after in live_divisors(optimizer, dict(layer.named_parameters())).items():
            assert relative_error(before[name], after) <= 1e-12


def test_what_dropout_left_out_of_the_first_step_does_not_count():
    layer = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer.weight.grad = torch.tensor([[0.0, 2.0]])
    assert live_divisors(optimizer, dict(layer.named_parameters()), coming=True)["weight"].tolist() == [
        [torch.inf, 2.0]
    ]


# ---- the Trainer's own losses, which a callback is not told of


def of_outputs(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return 2 * nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


class Chosen(Trainer):
    """Takes what it needs out of its inputs, and complains of more."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert set(inputs) == {"input_ids", "labels", "attention_mask"}
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        loss = 0.5 * nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        )
        return (loss, outputs) if return_outputs else loss


def loss_of(kind):
    """The same of one row, by hand."""

    def loss(model, batch):
        labels = batch["labels"][:, 1:].flatten()
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].flatten(0, 1)
        smoothing = 0.2 if kind == "smoothed" else 0.0
        factor = {"function": 2.0, "smoothed": 1.0, "overridden": 0.5}[kind]
        return factor * nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)

    return loss


@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize(("kind", "settings"), [
    ("function", {"compute_loss_func": of_outputs}), ("smoothed", {"label_smoothing_factor": 0.2}),
    ("overridden", {"kind": Chosen}),
])  # fmt: skip
def test_the_loss_is_the_trainers(kind, settings, attached, tmp_path):
    loop, tracker, _ = run(tmp_path, loss=loss_of(kind), attached=attached, **settings)
    assert relative_error(tracker.result.scores[0], loop.sums) <= 1e-10


def drawing(rows):
    """A collator that draws, as one does that masks tokens."""
    import random

    dropped = [int(torch.rand(()) < 0.5), random.random() < 0.5, np.random.rand() < 0.5]
    batch = collate(plain_rows(rows))
    return batch | {"labels": torch.where(torch.arange(batch["labels"].shape[1]) < sum(dropped), -100, batch["labels"])}


@pytest.mark.parametrize("collator", [collate, drawing])
def test_the_training_is_what_it_is_without_a_tracker(collator, tmp_path):
    loop, _, trainer = run(tmp_path, collator=collator)
    settings = {"data_collator": lambda rows: collate(plain_rows(rows)), "max_steps": -1, "num_train_epochs": 2}
    other = trainer_of(made("gpt2"), loop.rows, tmp_path, remove_unused_columns=False, **settings)
    other.train()
    for one, two in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert "training_step" not in vars(trainer)


def test_scores_are_in_the_log_and_in_a_picture_and_a_table(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    rows, tests = sources(examples("bert", N, dtype=torch.float32)), examples("bert", 2, seed=1)
    tracker = GroupTracker(rows, "source", eval_dataset=tests, every=2)
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    trainer = trainer_of(made("bert", torch.float32), rows, tmp_path, callbacks=[Reporter()])
    tracker.attach(trainer)
    trainer.train()
    for logged in (seen[-2], trainer.state.log_history[-2]):
        assert logged["ggda/web"] == pytest.approx(float(tracker.result["web"]), rel=1e-6)
    assert "Attribution of eval_loss" in capsys.readouterr().out
    assert (tmp_path / "group_tracker.png").stat().st_size > 1000
    assert len(tracker.sums.history) == 4
    assert "monitor" in tracker.result.notes[0]


def test_columns_that_the_trainer_removes_still_name_groups(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list(sources(examples("bert", N)))
    tracker = GroupTracker(rows, "source", eval_dataset=examples("bert", 2, seed=1), show=False)
    trainer_of(made("bert", torch.float32), rows, tmp_path, callbacks=[tracker]).train()
    assert set(tracker.result.names) == {"web", "books", "forum"}
    assert bool((tracker.result.scores != 0).all())


@pytest.mark.parametrize("adam", [False, True])
def test_a_resumed_run_ends_with_the_sums_of_one_that_was_not_stopped(adam, tmp_path):
    ours = {"every": 3, "batches": "all"} if adam else {}
    settings = {"save_strategy": "steps", "save_steps": 3, "adam": adam} | ours
    _, whole, _ = run(tmp_path / "one", **settings)
    loop, same, _ = run(tmp_path / "two", **settings)
    rows, tests, settings = loop.rows, loop.tests, {"save_strategy": "steps", "save_steps": 3}
    tracker = GroupTracker(
        rows, "source", eval_dataset=tests, data_collator=collate, show=False, preconditioner=same.preconditioner,
        **ours,
    )  # fmt: skip
    trainer = trainer_of(
        made("gpt2"), rows, tmp_path / "two", data_collator=lambda rows: collate(plain_rows(rows)), max_steps=-1,
        num_train_epochs=2, remove_unused_columns=False, callbacks=[tracker], **settings,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    assert tracker.sums.steps == whole.sums.steps
    for name in ("scores", "low", "high"):
        assert relative_error(getattr(tracker.result, name), getattr(whole.result, name)) <= 1e-6
    trainer.args.output_dir = str(tmp_path / "three")
    (tmp_path / "three" / "checkpoint-3").mkdir(parents=True)  # of another run, which does not matter
    trainer.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    assert relative_error(tracker.result.scores, whole.result.scores) <= 1e-6
    kept = json.loads((tmp_path / "two" / "checkpoint-3" / "ggda_tracker.json").read_text())
    assert kept["scored_steps"] == (1 if adam else 3)
    if adam:  # what is scored against is kept with a checksum
        array = tmp_path / "two" / "checkpoint-3" / "ggda_tracker.npy"
        array.write_bytes(array.read_bytes()[:-20] + bytes(20))
        with pytest.raises(ValueError, match=r"ggda_tracker.npy is damaged"):
            trainer.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))
    (tmp_path / "two" / "checkpoint-3" / "ggda_tracker.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"ggda_tracker.json is not there"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "two" / "checkpoint-3"))


def test_a_trainer_may_have_two_trackers(tmp_path):
    loop, tracker, _ = run(tmp_path / "one")
    two = [
        GroupTracker(loop.rows, groups, eval_dataset=loop.tests, every=every, data_collator=collate, show=False)
        for groups, every in (("source", 1), ("number", 2))
    ]
    trainer = trainer_of(
        made("gpt2"), loop.rows, tmp_path / "two", data_collator=lambda rows: collate(plain_rows(rows)), max_steps=-1,
        num_train_epochs=2, remove_unused_columns=False, callbacks=two,
    )  # fmt: skip
    trainer.train()
    assert relative_error(two[0].result.scores, tracker.result.scores) <= 1e-10
    assert (two[0].sums.steps, two[1].sums.steps) == (6, 3)
    assert len(two[1].result.names) == N
    assert "training_step" not in vars(trainer)


def test_trackers_of_one_trainer_have_logs_and_sums_of_their_own_and_take_up_no_others(tmp_path):
    rows, tests = sources(examples("bert", N)), [examples("bert", 3, seed=seed) for seed in (1, 2)]

    def trackers(property="eval_loss", groups="source", tests=tests, **settings):
        settings = {"show": False, "data_collator": collate} | settings
        return [GroupTracker(rows, groups, property, eval_dataset=held_out, **settings) for held_out in tests]

    def fitted(callbacks, **resume):
        trainer = trainer_of(made("bert"), rows, tmp_path, callbacks=callbacks, save_strategy="steps", save_steps=2)
        trainer.train(**resume)
        return trainer

    two, again, last = trackers(), trackers(), {"resume_from_checkpoint": str(tmp_path / "checkpoint-2")}
    log = fitted(two).state.log_history[-2]
    assert [log["ggda/web"], log["ggda-2/web"]] == pytest.approx([float(one.result["web"]) for one in two])
    fitted(again, **last)
    for one, other in zip(again, two, strict=True):
        assert relative_error(one.result.scores, other.result.scores) <= 1e-6
    for changed in ({"property": "accuracy"}, {"every": 2}, {"tokens": "sum"}, {"preconditioner": "adam"}):
        with pytest.raises(ValueError, match=f"ggda_tracker.json is of {next(iter(changed))}="):
            fitted(trackers(**changed), **last)
    with pytest.raises(ValueError, match=r"ggda_tracker\.json is of groups="):
        fitted(trackers(groups=[row["source"] for row in rows[1:] + rows[:1]]), **last)
    with pytest.raises(ValueError, match=r"ggda_tracker\.json is of test rows="):
        fitted(trackers(tests=tests[::-1]), **last)


def test_mixed_precision_is_scored_as_it_is_trained(tmp_path):
    loop, tracker, _ = run(tmp_path, dtype=torch.float32, bf16=True)
    assert relative_error(tracker.result.scores[0], loop.sums) <= 0.1


def test_mistakes_are_named_with_the_fix(tmp_path):
    rows, tests = sources(examples("bert", 6, dtype=torch.float32)), examples("bert", 2, seed=1)

    def refused(kind, message, **arguments):
        with pytest.raises(kind, match=message):
            GroupTracker(**({"train_dataset": rows, "groups": "source", "eval_dataset": tests} | arguments))

    refused(ValueError, "every=0", every=0)
    refused(TypeError, "every=2.5: pass a whole number", every=2.5)
    refused(ValueError, "batches='some' is not one of", batches="some")
    refused(ValueError, "share='half'", share="half")
    refused(ValueError, "share=2", share=2)
    refused(ValueError, "preconditioner='sgd'", preconditioner="sgd")
    refused(ValueError, "its columns are 'input_ids', 'labels', 'source'", groups="origin")
    refused(ValueError, "groups has 2 labels for 6 rows", groups=["a", "b"])
    refused(TypeError, "which is streamed", train_dataset=iter(rows))
    with pytest.raises(ValueError, match="has scored no step yet"):
        _ = GroupTracker(rows, "source", eval_dataset=tests).result
    tracker = GroupTracker(rows[:4], "source", eval_dataset=tests)
    with pytest.raises(ValueError, match="groups is of 4 rows, and the Trainer trains on 6"):
        trainer_of(made("bert", torch.float32), rows, tmp_path, callbacks=[tracker]).train()
    tracker = GroupTracker(rows[::-1], "source", eval_dataset=tests)
    with pytest.raises(ValueError, match=r"row 0 of the Trainer has another 'input_ids'.*after the shuffle"):
        trainer_of(made("bert", torch.float32), rows, tmp_path, callbacks=[tracker]).train()
    tracker = GroupTracker(rows, "source", eval_dataset=tests, preconditioner="adam", show=False)
    with pytest.raises(ValueError, match="keeps nothing and not Adam's second moments: leave out preconditioner"):
        trainer_of(made("bert", torch.float32), rows, tmp_path, callbacks=[tracker], optim="sgd").train()
    tracker = GroupTracker(rows, "source", eval_dataset=tests, show=False)

    def flattening(some):
        return {key: value.reshape(1, -1) for key, value in collate(plain_rows(some)).items()}

    trainer = trainer_of(made("bert", torch.float32), rows, tmp_path, callbacks=[tracker], data_collator=flattening)
    with pytest.raises(ValueError, match="made a batch of 1 rows from 4 examples"):
        trainer.train()
