"""Group scores from what a Trainer leaves behind, against plain autograd on every sequence."""

from __future__ import annotations

import json

import pytest
import torch
from cases import relative_error
from ggda_transformers import Binned, Nested, TrainerSetup, attribute_trainer
from ggda_transformers.attribution import training_steps
from ggda_transformers.setup import shifts_labels
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers_cases import MODELS, collate, exactness, examples, gradients, made, own_loss, sources, trainer_of

from ggda_ext import GroupGradients, Groups
from ggda_ext.curvature import kronecker
from ggda_ext.gradients.proof import sample

N = 11


def without_source(rows):
    return [{key: value for key, value in row.items() if key != "source"} for row in rows]


def truth_of(model, rows, tests, losses=own_loss, divisor=None):
    """Scores `[k]` of the groups by source for the mean loss of the tests, one backward pass each, in float64."""
    goal = gradients(model, own_loss, tests).mean(0)
    goal = goal if divisor is None else goal / divisor
    groups = Groups([row["source"] for row in rows])
    return groups.names, groups.sum(gradients(model, losses, without_source(rows)), 0) @ goal


@pytest.fixture(params=list(MODELS))
def case(request):
    name = request.param
    return made(name), sources(examples(name, N)), examples(name, 3, seed=1)


def test_scores_are_the_sum_of_one_backward_pass_for_each_sequence(case):
    model, rows, tests = case
    result = attribute_trainer(
        model, rows, "source", eval_dataset=tests, data_collator=collate, method="tracin", batch_size=4
    )
    names, truth = truth_of(model, rows, tests)
    assert result.names == names
    assert relative_error(result.scores[0], truth) <= exactness(model)
    assert result.properties == ("eval_loss",)
    assert result.higher_is_better == (False,)


def test_tokens_may_be_summed():
    model, rows, tests = made("gpt2"), sources(examples("gpt2", N)), examples("gpt2", 3, seed=1)

    def summed(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return model(**batch).loss * (batch["labels"][:, 1:] != -100).sum()

    result = attribute_trainer(
        model, rows, "source", eval_dataset=tests, data_collator=collate, method="tracin", tokens="sum"
    )
    _, truth = truth_of(model, rows, tests, summed)
    assert relative_error(result.scores[0], truth) <= 1e-6
    assert any("sum over its tokens" in note for note in result.notes)


# ---- the Trainer's own losses


def func(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    total = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return 2 * total / num_items_in_batch


class Halved(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (0.5 * outputs.loss, outputs) if return_outputs else 0.5 * outputs.loss


class Divided(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = 0.5 * func(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.parametrize("tokens", ["mean", "sum"])
@pytest.mark.parametrize("settings", [{"compute_loss_func": func}, {"kind": Divided}])
def test_a_loss_that_divides_by_the_number_of_tokens_is_given_that_number(settings, tokens, tmp_path):
    model, rows, tests = made("gpt2"), sources(examples("gpt2", N)), examples("gpt2", 3, seed=1)
    trainer = trainer_of(model, rows, tmp_path, eval_dataset=tests, **settings)
    factor = 1.0 if "kind" in settings else 2.0

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        counts = (batch["labels"][:, 1:] != -100).sum() if tokens == "sum" else 1
        return factor * counts * model(**batch).loss

    result = attribute_trainer(
        trainer, rows, "source", lambda m: own_loss(m, collate(tests[:1])), method="tracin", tokens=tokens
    )
    _, truth = truth_of(model, rows, tests[:1], loss)
    assert relative_error(result.scores[0], truth) <= 1e-6


@pytest.mark.parametrize("kind", ["function", "smoothed", "overridden"])
def test_the_loss_is_the_trainers(kind, tmp_path):
    model, rows, tests = made("gpt2"), sources(examples("gpt2", N)), examples("gpt2", 3, seed=1)
    settings = {
        "function": {"compute_loss_func": func},
        "smoothed": {"label_smoothing_factor": 0.2},
        "overridden": {"kind": Halved},
    }[kind]
    trainer = trainer_of(model, rows, tmp_path, eval_dataset=tests, **settings)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        batch = dict(batch)
        if kind == "overridden":
            return 0.5 * model(**batch).loss
        labels = batch.pop("labels")
        outputs = model(**batch)
        if kind == "function":
            return func(outputs, labels, (labels[:, 1:] != -100).sum())
        return trainer.label_smoother(outputs, labels, shift_labels=True)

    result = attribute_trainer(trainer, rows, "source", lambda m: own_loss(m, collate(tests[:1])), method="tracin")
    _, truth = truth_of(model, rows, tests[:1], loss)
    assert relative_error(result.scores[0], truth) <= (1e-10 if kind == "function" else 1e-6)


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "Gemma3ForConditionalGeneration"])
def test_smoothed_labels_are_shifted_for_the_models_that_a_trainer_shifts_them_for(name):
    assert name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    assert shifts_labels(type(name, (nn.Module,), {})())


# ---- checkpoints


def trained(tmp_path, name="gpt2", **settings):
    model, rows = made(name, torch.float32), sources(examples(name, N, dtype=torch.float32))
    settings = {"save_strategy": "steps", "save_steps": 2, "weight_decay": 0.1} | settings
    trainer = trainer_of(model, rows, tmp_path, eval_dataset=examples(name, 3, seed=1), **settings)
    trainer.train()
    return trainer, rows


@pytest.mark.parametrize("preconditioner", [None, "adam"])
def test_checkpoints_are_read_with_learning_rates_and_moments(preconditioner, tmp_path):
    trainer, rows = trained(tmp_path)
    model, before = trainer.model, {name: value.clone() for name, value in trainer.model.state_dict().items()}
    result = attribute_trainer(
        trainer, rows, "source", checkpoints="output_dir", preconditioner=preconditioner, method="tracin"
    )
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    other, total = made("gpt2", torch.float32), 0.0
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        state = type(other).from_pretrained(folder).state_dict()
        other.load_state_dict(state)
        log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
        rate = next(entry["learning_rate"] for entry in log if entry["step"] == step and "learning_rate" in entry)
        divisor = None
        if preconditioner == "adam":
            saved = torch.load(folder / "optimizer.pt", weights_only=True)
            decays = set(trainer.get_decay_parameter_names(other))
            names = [n for n, _ in other.named_parameters() if n in decays]
            names += [n for n, _ in other.named_parameters() if n not in decays]
            group = saved["param_groups"][0]
            moments = {
                name: (saved["state"][j]["exp_avg_sq"] / (1 - group["betas"][1] ** step)).sqrt() + group["eps"]
                for j, name in enumerate(names)
            }
            divisor = torch.cat([moments[name].flatten() for name, _ in other.named_parameters()])
        _, part = truth_of(other, rows, trainer.eval_dataset, divisor=divisor)
        total = total + rate * part
    assert relative_error(result.scores[0], total) <= 1e-4
    assert result.method.settings["checkpoints"] == 2


def test_adam_at_the_current_parameters_takes_the_trainers_optimizer(tmp_path):
    trainer, rows = trained(tmp_path)
    last = [tmp_path / "checkpoint-4"]
    now = attribute_trainer(trainer, rows, "source", preconditioner="adam")
    saved = attribute_trainer(trainer, rows, "source", checkpoints=last, weights=[1.0], preconditioner="adam")
    assert relative_error(now.scores, saved.scores) <= 1e-5
    assert now.method.name == "tracin"


class HeadFirst(Trainer):
    """Two groups of parameters that are not those of weight decay."""

    def create_optimizer(self, model=None):
        named = list(self.model.named_parameters())
        head, body = ([value for name, value in named if name.startswith("bert.") is rest] for rest in (False, True))
        self.optimizer = torch.optim.AdamW([{"params": head, "lr": 1e-2}, {"params": body}])
        return self.optimizer


def test_saved_moments_are_in_the_order_of_the_trainers_own_optimizer(tmp_path):
    trainer, rows = trained(tmp_path, "bert", kind=HeadFirst)
    last = {"checkpoints": [tmp_path / "checkpoint-4"], "weights": [1.0], "preconditioner": "adam"}
    now = attribute_trainer(trainer, rows, "source", preconditioner="adam")
    other = trainer_of(made("bert", torch.float32), rows, tmp_path, kind=HeadFirst, eval_dataset=trainer.eval_dataset)
    for one in (trainer, other):
        assert relative_error(attribute_trainer(one, rows, "source", **last).scores, now.scores) <= 1e-5
    assert other.optimizer is None
    usual = trainer_of(made("bert", torch.float32), rows, tmp_path, eval_dataset=trainer.eval_dataset)
    with pytest.raises(ValueError, match=r"in groups of \[2, .*pass the Trainer that made it"):
        attribute_trainer(usual, rows, "source", **last)


def test_a_best_checkpoint_that_was_loaded_has_its_own_steps_and_moments(tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    trainer, rows = trained(tmp_path, "bert", learning_rate=1e-20, **best)  # nothing gets better after the first
    assert trainer.state.best_global_step == 2
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert training_steps(trainer).learning_rates == pytest.approx(sum(rates[:2]))
    folder = trainer.state.best_model_checkpoint
    with pytest.raises(ValueError, match=r"optimizer is that of step 4: pass checkpoints=\['.*checkpoint-2'\]"):
        attribute_trainer(trainer, rows, "source", preconditioner="adam")
    attribute_trainer(trainer, rows, "source", checkpoints=[folder], weights=[1.0], preconditioner="adam")


@pytest.mark.parametrize("settings", [{}, {"lr_scheduler_type": "cosine", "warmup_steps": 3}])
def test_the_steps_of_a_training_are_those_of_its_schedule_however_few_are_logged(settings, tmp_path):
    rates = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
            rates.append(optimizer.param_groups[0]["lr"])

    rows = examples("bert", N, dtype=torch.float32)
    trainer = trainer_of(made("bert", torch.float32), rows, tmp_path, max_steps=8, logging_steps=8,
                         callbacks=[Watch()], **settings)  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["learning_rate"] < 0.3 * sum(rates) / len(rates)
    assert training_steps(trainer).learning_rates == pytest.approx(sum(rates))


def test_shards_are_read(tmp_path):
    trainer, rows = trained(tmp_path)
    trainer.model.save_pretrained(tmp_path / "shards", max_shard_size="6KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    with torch.no_grad():
        kept = attribute_trainer(trainer, rows, "source", method="tracin")
        next(trainer.model.parameters()).mul_(2)
    read = attribute_trainer(trainer, rows, "source", checkpoints=tmp_path / "shards", weights=[1.0], method="tracin")
    torch.testing.assert_close(read.scores, kept.scores)


# ---- methods and properties


def test_curvature_is_the_default_and_the_result_says_so(tmp_path):
    trainer, rows = trained(tmp_path, "bert", save_strategy="no")
    result = attribute_trainer(trainer, rows, "source")
    assert result.method.name == "influence"
    assert result.method.unit == "property"
    assert "Adam" in str(result.method) or "adam" in str(result.method)


@pytest.mark.parametrize("property", ["eval_loss", "accuracy", "f1", "probability", "perplexity"])
def test_properties_by_name_have_the_gradient_of_their_value(property):
    name = "bert" if property == "f1" else "gpt2"
    model, rows = made(name), sources(examples(name, N))
    tests = examples(name, 5, seed=1)
    result = attribute_trainer(
        model, rows, "source", property, eval_dataset=tests, data_collator=collate, method="tracin", batch_size=4
    )

    def value(model: nn.Module) -> Tensor:
        parts = [model(**{k: v for k, v in collate([row]).items() if k != "labels"}).logits for row in tests]
        if property == "f1":
            probabilities, labels = torch.cat(parts).softmax(1), torch.tensor([row["labels"] for row in tests])
            hits = probabilities * nn.functional.one_hot(labels, 3)
            return (2 * hits.sum(0) / (probabilities.sum(0) + labels.bincount(minlength=3))).mean()
        losses = [
            nn.functional.cross_entropy(z[0, :-1], torch.tensor(row["labels"])[1:], reduction="none")[
                torch.tensor(row["labels"])[1:] != -100
            ]
            for z, row in zip(parts, tests, strict=True)
        ]
        if property == "perplexity":
            return torch.cat(losses).mean().exp()
        each = {
            "eval_loss": lambda loss: loss.mean(),
            "accuracy": lambda loss: (-loss).exp().mean(),
            "probability": lambda loss: (-loss.sum()).exp(),
        }[property]
        return torch.stack([each(loss) for loss in losses]).mean()

    plain = attribute_trainer(model, rows, "source", value, data_collator=collate, method="tracin", batch_size=4)
    assert relative_error(result.scores, plain.scores) <= 1e-5  # the model's own loss goes through float32
    assert result.properties == (property,)


def test_the_probability_of_an_answer_is_that_of_its_start_and_end():
    model, rows, tests = made("bert_answers"), sources(examples("bert_answers", N)), examples("bert_answers", 3, seed=1)

    def value(model: nn.Module) -> Tensor:
        batch = collate(tests)
        found = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        start, end = (
            logits.softmax(1).gather(1, batch[f"{name}_positions"][:, None])
            for name, logits in (("start", found.start_logits), ("end", found.end_logits))
        )
        return (start * end).mean()

    options = {"eval_dataset": tests, "data_collator": collate, "method": "tracin", "batch_size": 4}
    found, plain = (attribute_trainer(model, rows, "source", one, **options) for one in ("probability", value))
    assert relative_error(found.scores, plain.scores) <= 1e-6


def test_a_list_of_properties_gives_a_row_each():
    model, rows, tests = made("bert"), sources(examples("bert", N)), examples("bert", 5, seed=1)
    options = {"eval_dataset": tests, "data_collator": collate, "method": "tracin"}
    both = attribute_trainer(model, rows, "source", ["eval_loss", "accuracy"], **options)
    assert both.properties == ("eval_loss", "accuracy")
    assert both.higher_is_better == (False, True)
    for row, name in zip(both.scores, both.properties, strict=True):
        torch.testing.assert_close(row, attribute_trainer(model, rows, "source", name, **options).scores[0])


def test_sets_by_name_give_a_row_each_and_their_difference():
    model, rows = made("gpt2"), sources(examples("gpt2", N))
    sets = {"a": examples("gpt2", 3, seed=1), "b": examples("gpt2", 4, seed=2)}
    both = attribute_trainer(model, rows, "source", eval_dataset=sets, data_collator=collate, method="tracin")
    assert both.properties == ("eval_loss of a", "eval_loss of b")
    gap = attribute_trainer(
        model, rows, "source", "difference", eval_dataset=sets, data_collator=collate, method="tracin"
    )
    torch.testing.assert_close(gap.scores[0], both.scores[0] - both.scores[1])


def test_questions_in_turn_have_the_answers_of_each_alone():
    """What was found out about a model is kept: for losses that are read off a batch, not under the hooks of a pass."""
    rows = pytest.importorskip("datasets").Dataset.from_list(sources(examples("gpt2", N)))
    model, tests = made("gpt2"), examples("gpt2", 5, seed=1)
    options = {"eval_dataset": tests, "data_collator": collate, "method": "tracin", "batch_size": 8}
    for property in ("eval_loss", "perplexity", "accuracy"):
        found = attribute_trainer(model, rows, "source", property, **options)
        alone = attribute_trainer(made("gpt2"), rows, "source", property, **options)
        torch.testing.assert_close(found.scores, alone.scores)


class Multiplications(TorchDispatchMode):
    """Counts those of matrix products; no hooks, which would be seen."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        counted = flop_registry.get(func._overloadpacket)
        self.count += 0 if counted is None else counted(*args, **(kwargs or {}), out_val=out)
        return out


def test_a_first_look_at_a_heavy_model_takes_less_than_a_batch(monkeypatch):
    monkeypatch.setattr(sample, "HEAVY", 0)
    model, data = made("gpt2", torch.float32), collate(examples("gpt2", 32))

    def counted(run):
        with Multiplications() as seen:
            run()
        return seen.count

    batch = counted(lambda: model(**{key: value[:8] for key, value in data.items()}).loss.backward())
    provider = GroupGradients(model, None, data, batch_size=8, show_progress=False)
    directions = torch.randn(1, provider.p)
    first, again = (counted(lambda: provider.scores(directions)) for _ in range(2))
    assert provider.plan(1).strategy == "directional"
    assert again <= 1.1 * 4 * batch
    assert first - again <= batch


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_factored_curvature_without_bases_is_the_mean_square_of_every_gradient(name, monkeypatch):
    """For embeddings, sides too large to find a basis for, and a weight that embedding and head share."""
    model, rows = made(name), examples(name, N)
    monkeypatch.setattr(kronecker, "LARGEST", 0)
    setup = TrainerSetup.of(model, data_collator=collate, batch_size=4)
    provider = GroupGradients(model, setup.loss(), setup.rows(rows, "rows"), batch_size=4, show_progress=False)
    curvature = kronecker.Kronecker(provider, provider.data, 0)
    vectors = torch.randn(2, provider.p, dtype=torch.float64)
    squares = gradients(model, own_loss, rows).square().mean(0)
    found, truth = curvature.solve(vectors, 0.1), vectors / (squares + 0.1)
    for parameter, value in provider.space.parameters.items():
        one, other = (provider.space.part(rows, value) for rows in (found, truth))
        assert relative_error(one, other) <= 1e-10, parameter


# ---- groups from columns


@pytest.mark.parametrize(("groups", "names"), [
    ("source", {"web", "books", "forum"}),
    ("meta.lang", {"en", "de"}),
    (["source", "meta.lang"], {("web", "en"), ("web", "de"), ("books", "en"), ("books", "de"), ("forum", "en"),
                               ("forum", "de")}),
    (Nested("path"), {"a", "b"}),
    (Nested("path", 2), {"a/0", "a/1", "b/0", "b/1"}),
    (Binned("year", bins=[2000, 2004, 2012]), {"[2000, 2004)", "[2004, 2012]"}),
    (Binned("day", freq="Y"), {"2000", "2001"}),
    (Binned("day", bins=["2000-01-01", "2001-01-01", "2002-01-01"]),
     {"[2000-01-01, 2001-01-01)", "[2001-01-01, 2002-01-01]"}),
    ([0] * 6 + [1] * 6, {0, 1}),
    ({"early": range(6), "late": list(range(6, 12))}, {"early", "late"}),
    ([range(6), torch.arange(6, 12)], {0, 1}),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["list", "datasets"])
def test_groups_come_from_columns(groups, names, kind):
    rows = [
        row
        | {
            "meta": {"lang": "en" if i % 2 else "de"},
            "path": f"{'ab'[i % 2]}/{i // 2 % 2}/x",
            "year": 2000 + i,
            "day": f"200{i // 6}-05-31",
        }
        for i, row in enumerate(sources(examples("bert", 12)))
    ]
    if kind == "datasets":
        rows = pytest.importorskip("datasets").Dataset.from_list(rows).shuffle(seed=1)
    model = made("bert")
    result = attribute_trainer(
        model, rows, groups, eval_dataset=examples("bert", 2, seed=1), data_collator=collate, method="tracin"
    )
    assert set(result.names) == names
    assert sum(result.sizes) == 12


# ---- bad input


def test_mistakes_are_named_with_the_fix(tmp_path):
    from torch.utils.data import DataLoader

    model, rows, tests = made("bert"), sources(examples("bert", 6)), examples("bert", 2, seed=1)

    def run(given=model, data=rows, groups="source", property="eval_loss", **more):
        options = {"eval_dataset": tests, "data_collator": collate, "method": "tracin"} | more
        return attribute_trainer(given, data, groups, property, **options)

    def refused(kind, message, **arguments):
        with pytest.raises(kind, match=message):
            run(**arguments)

    refused(ValueError, "'sources'.*its columns are 'input_ids', 'labels', 'source'", groups="sources")
    refused(ValueError, "its columns are 'input_ids', 'labels'. If a map or a Trainer", data=without_source(rows))
    refused(ValueError, "groups has 3 labels for 6 rows.*its columns: 'input_ids'", groups=["a", "b", "a"])
    refused(TypeError, "train_dataset is a generator, which is streamed", data=(row for row in rows))
    refused(TypeError, "train_dataset is a DataLoader: pass its data set", data=DataLoader(rows))
    refused(TypeError, r"train_dataset is a dict of 'train'.*data\['train'\]", data={"train": rows})
    table = pytest.importorskip("pandas").DataFrame(rows)
    refused(TypeError, r"train_dataset is a table of pandas: pass its rows.*from_pandas", data=table)
    refused(ValueError, "of different lengths, pass processing_class= the tokenizer", data_collator=None)
    texts = [{"text": "a b", "labels": 0, "source": "x"}]
    refused(ValueError, "no column of the data is an argument of the model: it has 'text'", data=texts)
    bare = [{"input_ids": row["input_ids"], "source": "x"} for row in rows]
    refused(
        ValueError, "the model returned no loss: the rows have 'input_ids', 'attention_mask' and no 'labels'", data=bare
    )
    language = {"given": made("gpt2"), "data": sources(examples("gpt2", 4)), "eval_dataset": examples("gpt2", 2)}
    refused(ValueError, "'f1' is of one label for each row, and a GPT2LMHeadModel", property="f1", **language)
    number, measures = made("bert", num_labels=1), [row | {"labels": 0.5} for row in tests]
    regression = {"given": number, "data": [row | {"labels": 0.5} for row in rows], "eval_dataset": measures}
    for name in ("accuracy", "f1", "probability"):
        refused(ValueError, f"property='{name}' is of labels.*predicts a number", property=name, **regression)
    refused(ValueError, "property='loss' is not one of 'eval_loss'", property="loss")
    refused(ValueError, "pass eval_dataset=", eval_dataset=None)
    refused(ValueError, "'difference' is the loss of one set minus", property="difference")
    refused(TypeError, "trainer_or_model is a str", given="bert")
    refused(ValueError, "a BertModel gave no loss for rows with labels: take a model with a head", given=model.bert)
    refused(ValueError, "groups=None names no column.*has 'input_ids', 'labels', 'source'", groups=None)
    refused(TypeError, "train_dataset is the text 'rows.csv': load it first", data="rows.csv")
    refused(ValueError, r"row 5 of the training data has no 'source'", data=[*rows[:5], *tests])
    refused(ValueError, r"Binned\('labels'\) says no bins: pass bins=", groups=Binned("labels"))
    refused(ValueError, r"Binned\('source'\).*holds the text 'web': write dates as", groups=Binned("source", freq="M"))
    refused(
        ValueError, r"Binned\('day'\) needs.*row 1 has None: fill it in", groups=Binned("day", freq="M"),
        data=[row | {"day": None if i == 1 else "2024-05-31"} for i, row in enumerate(rows)],
    )  # fmt: skip
    refused(TypeError, "'input_ids', which holds a list in a row: pass one label", groups="input_ids")
    refused(TypeError, "'input_ids', which holds a list in a row", groups=Binned("input_ids", bins=2))
    refused(
        TypeError, "'meta', which holds a dict in a row: name 'meta.lang'", groups="meta",
        data=[row | {"meta": {"lang": "en"}} for row in rows],
    )  # fmt: skip
    refused(ValueError, "there is none: pass eval_dataset=", eval_dataset={})
    refused(TypeError, "eval_dataset is a int: pass the rows", eval_dataset=5)
    refused(TypeError, "batch_size='4': pass a whole number", batch_size="4")
    refused(TypeError, "data_collator is a int: pass a function", data_collator=5)
    refused(TypeError, "compute_loss_func is a str: pass a function", compute_loss_func="mean")
    refused(ValueError, "made a batch of 1 rows from", data_collator=lambda rows: collate(rows[:1]))
    masking = type("Masking", (), {"mlm": True, "__call__": lambda self, rows: collate(rows)})()
    refused(ValueError, r"masks tokens at random \(mlm=True\).*mask the rows once", data_collator=masking)
    refused(ValueError, "checkpoints='output_dir' stands for", checkpoints="output_dir")
    refused(FileNotFoundError, "holds no checkpoint-", checkpoints=tmp_path)
    refused(FileNotFoundError, "which is no folder", checkpoints=[tmp_path / "nothing"])
    refused(ValueError, "preconditioner='sgd' is not one of", preconditioner="sgd")
    refused(ValueError, "needs the optimizer: pass the Trainer", preconditioner="adam")
    refused(ValueError, "is for TracIn", preconditioner="adam", method="ekfac")
    made("gpt2").save_pretrained(tmp_path / "other")
    refused(ValueError, "is the checkpoint of another model", checkpoints=[tmp_path / "other"], weights=[1.0])
    made("bert").save_pretrained(tmp_path / "same")
    refused(FileNotFoundError, "no trainer_state.json", checkpoints=[tmp_path / "same"])
    refused(FileNotFoundError, "no optimizer.pt", checkpoints=[tmp_path / "same"], weights=[1], preconditioner="adam")
    assert not model.training


def test_a_streamed_data_set_of_hugging_face_is_refused():
    datasets = pytest.importorskip("datasets")
    stream = datasets.Dataset.from_list(sources(examples("bert", 4))).to_iterable_dataset()
    with pytest.raises(TypeError, match="train_dataset is a IterableDataset, which is streamed"):
        attribute_trainer(made("bert"), stream, "source", eval_dataset=examples("bert", 2))


def test_packed_rows_are_refused(tmp_path):
    trainer = trainer_of(made("gpt2"), examples("gpt2", 4), tmp_path)
    trainer.args.packing = True
    with pytest.raises(ValueError, match="packs several documents into a row"):
        attribute_trainer(trainer, sources(examples("gpt2", 4)), "source", eval_dataset=examples("gpt2", 2))


# ---- scores that are kept in a folder


class Weighted(Trainer):
    """Its loss depends on an attribute of its own."""

    factor = 0.5

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (self.factor * outputs.loss, outputs) if return_outputs else self.factor * outputs.loss


def other_func(outputs, labels, num_items_in_batch=None):
    return 3 * func(outputs, labels, num_items_in_batch)


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, {}),
        ({"label_smoothing_factor": 0.2}, {}),
        ({"compute_loss_func": func}, {}),
        ({"kind": Weighted}, {}),
        ({}, {"property": "perplexity"}),
        ({}, {"preconditioner": "adam"}),
        ({}, {"method": "ekfac"}),
    ],
)
def test_kept_scores_are_used_again_for_the_same_call_and_refused_for_another(settings, asked, tmp_path, monkeypatch):
    rows, tests = sources(examples("gpt2", N)), examples("gpt2", 3, seed=1)

    def call(rows=rows, seed=0, settings=settings, factor=0.5, **changed):
        torch.manual_seed(0)
        trainer = trainer_of(made("gpt2", torch.float32, seed), rows, tmp_path / "runs", eval_dataset=tests, **settings)
        trainer.factor = factor
        trainer.train()
        return attribute_trainer(trainer, rows, "source", save_dir=tmp_path / "kept", **asked | changed)

    other = (
        {"label_smoothing_factor": 0.3} if "label_smoothing_factor" in settings else {"compute_loss_func": other_func}
    )
    first = call()
    with monkeypatch.context() as patched:
        patched.setattr(GroupGradients, "scores", None)
        assert torch.equal(call().scores, first.scores)
    changes = [{"rows": rows[::-1]}, {"seed": 1}, {"tokens": "sum"}, {"settings": other}]
    if "kind" in settings:
        changes[-1] = {"factor": 0.25}
    for change in changes:
        with pytest.raises(ValueError, match="save_dir"):
            call(**change)


@pytest.mark.parametrize("of", [lambda rows: rows[:-3], lambda rows: rows + rows])
def test_rows_of_another_number_than_the_trainers_are_refused(of, tmp_path):
    trainer, rows = trained(tmp_path)
    given = of(rows)
    with pytest.raises(ValueError, match=f"has {len(given)} rows, and the Trainer has {N} .*trainer.train_dataset"):
        attribute_trainer(trainer, given, "source")
    attribute_trainer(trainer.model, given, "source", eval_dataset=trainer.eval_dataset, data_collator=collate)
    trainer.train_dataset = None
    attribute_trainer(trainer, given, "source")
