"""PEFT models: adapters' gradients are exact, merged or not, and come from checkpoint folders."""

from __future__ import annotations

import peft
import pytest
import torch
from cases import relative_error
from ggda_transformers import GroupTracker, attribute_trainer
from transformers_cases import collate, examples, gradients, made, own_loss, sources, trainer_of

from ggda_ext import Groups

N = 9
KINDS = {
    "lora": lambda: peft.LoraConfig(r=2, target_modules=["c_attn", "c_proj"], task_type="CAUSAL_LM",
                                    fan_in_fan_out=True),
    "dora": lambda: peft.LoraConfig(r=2, target_modules=["c_attn"], use_dora=True, task_type="CAUSAL_LM",
                                    fan_in_fan_out=True),
    "ia3": lambda: peft.IA3Config(target_modules=["c_attn", "mlp.c_proj"], feedforward_modules=["mlp.c_proj"],
                                  task_type="CAUSAL_LM", fan_in_fan_out=True),
    "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}  # fmt: skip


def adapted(kind="lora", dtype=torch.float64, seed=0):
    model = peft.get_peft_model(made("gpt2", dtype), KINDS[kind]())
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).eval()


def scores(model, rows, tests, **options):
    options = {"eval_dataset": tests, "data_collator": collate, "method": "tracin", "batch_size": 4} | options
    return attribute_trainer(model, rows, "source", **options)


def truth_of(model, rows, tests):
    plain = [{key: value for key, value in row.items() if key != "source"} for row in rows]
    groups = Groups([row["source"] for row in rows])
    return groups.sum(gradients(model, own_loss, plain), 0) @ gradients(model, own_loss, tests).mean(0)


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_have_the_gradients_of_one_backward_pass_for_each_sequence(kind):
    model, rows, tests = adapted(kind), sources(examples("gpt2", N)), examples("gpt2", 3, seed=1)
    truth = truth_of(model, rows, tests)
    assert relative_error(scores(model, rows, tests).scores[0], truth) <= (
        1e-10 if kind == "lora" else 1e-6
    )  # forward mode: float32 loss


def test_merged_adapters_count_and_stay_merged_to_the_bit():
    model, rows, tests = adapted(), sources(examples("gpt2", N)), examples("gpt2", 3, seed=1)
    truth = truth_of(model, rows, tests)
    model.merge_adapter()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert relative_error(scores(model, rows, tests).scores[0], truth) <= 1e-10
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert any(getattr(module, "merged", False) is True for module in model.modules())


def test_an_adapter_loaded_for_inference_counts(tmp_path):
    model, rows, tests = adapted(), sources(examples("gpt2", N)), examples("gpt2", 3, seed=1)
    truth = truth_of(model, rows, tests)
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(made("gpt2"), tmp_path).double().eval()
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert relative_error(scores(loaded, rows, tests).scores[0], truth) <= 1e-6  # saved in the base's precision
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_adapters_are_read_from_checkpoints_and_tracked_while_training(tmp_path):
    rows, tests = sources(examples("gpt2", N)), examples("gpt2", 3, seed=1)
    tracker = GroupTracker(rows, "source", eval_dataset=tests, data_collator=collate, show=False)
    trainer = trainer_of(
        adapted(dtype=torch.float32), rows, tmp_path, eval_dataset=tests, save_strategy="steps", save_steps=4,
        callbacks=[tracker],
    )  # fmt: skip
    trainer.train()
    assert bool((tracker.result.scores != 0).all())
    now = attribute_trainer(trainer, rows, "source", method="tracin")
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    read = attribute_trainer(
        trainer, rows, "source", checkpoints=[tmp_path / "checkpoint-4"], weights=[1.0], method="tracin"
    )
    torch.testing.assert_close(read.scores, now.scores)
    adam = attribute_trainer(trainer, rows, "source", checkpoints="output_dir", preconditioner="adam")
    assert bool(adam.scores.isfinite().all())
    with pytest.raises(ValueError, match="holds a PEFT adapter, and the model is a GPT2LMHeadModel"):
        scores(made("gpt2", torch.float32), rows, tests, checkpoints=[tmp_path / "checkpoint-4"], weights=[1.0])
    other = peft.get_peft_model(made("gpt2", torch.float32), peft.LoraConfig(r=3, target_modules=["c_attn"])).eval()
    with pytest.raises(ValueError, match="is the checkpoint of another adapter"):
        scores(other, rows, tests, checkpoints=[tmp_path / "checkpoint-4"], weights=[1.0])


def test_models_in_four_bits_are_refused_with_a_word():
    model = made("gpt2", torch.float32)
    model.is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="loaded in 4 bits"):
        scores(model, sources(examples("gpt2", 4)), examples("gpt2", 2))
