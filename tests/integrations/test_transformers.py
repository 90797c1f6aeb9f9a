"""Plans for a Trainer, against the library itself and the gradient of the whole batch.

The oracle of a step is the model's own mean over the whole batch, in one backward pass of a plain loop.
"""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, default_collate

from autobatch import InputError
from autobatch.integrations import transformers
from tests.support.libraries import installed
from tests.support.trainers import BUDGET, WORDS, gpt2, pad, texts
from tests.support.training import apart, make_workload, reference, weights

BATCH, WIDTH, CLASSES = 24, 8, 3


def a_trainer(folder: Path, model: nn.Module | None = None, *, kind: Any = None, **options: Any) -> Any:
    library = installed("transformers")
    arguments = {
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "optim": "sgd",
        "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 1, "max_grad_norm": 0.0,
        "logging_steps": 1,
    }  # fmt: skip
    own = {"train_dataset": texts(), "data_collator": pad}
    own |= {name: options.pop(name) for name in [*own, "optimizers", "compute_loss_func"] if name in options}
    model = gpt2() if model is None else model
    made = library.TrainingArguments(str(folder), **arguments | options)
    return (kind or library.Trainer)(model, made, **own)


def classes() -> list[dict[str, Tensor]]:
    """Draw texts of one length with a class each."""
    rows = torch.randint(3, WORDS, (BATCH, WIDTH), generator=torch.Generator().manual_seed(5))
    return [{"input_ids": row, "labels": row.sum() % CLASSES} for row in rows]


def of_text() -> nn.Module:
    """Build a classifier whose loss is a mean over samples."""
    library = installed("transformers")
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = library.BertConfig(vocab_size=WORDS, num_labels=CLASSES, **sizes, **dropout)
    return library.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def mean_of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return cross_entropy(outputs.logits, labels)


IGNORES, USES = "ignores num_items_in_batch", "divides by num_items_in_batch"
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "texts of many lengths": (gpt2, {}, ""),
    "classes of texts": (of_text, {}, IGNORES),
    "function": (of_text, {"compute_loss_func": mean_of_outputs}, IGNORES),
    "said to be a mean": (gpt2, {"said": False}, USES),
    "said to be scaled": (of_text, {"said": True}, IGNORES),
}
"""A model, what is special about its trainer, and what the notes say of its loss."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.program if "said" in case else ()) for case in CASES]
)
def test_a_planned_step_is_that_of_the_whole_batch(tmp_path: Path, case: str) -> None:
    """Losses that ignore ``num_items_in_batch``, and those that use it."""
    model, special, line = CASES[case]
    options = {**special}
    said = options.pop("said", None)
    data, collate, limit = (
        (texts(BATCH), pad, {"memory_budget": BUDGET})
        if model is gpt2
        else (classes(), default_collate, {"max_micro_batch": 6})
    )
    trained = model()
    before = weights(trained)
    trainer = a_trainer(tmp_path, trained, train_dataset=data, data_collator=collate, **options)
    if said is not None:
        trainer.loss_is_scaled_for_ga = said
    plan = transformers.plan(trainer, target_batch=BATCH, **limit)
    assert plan.accumulation_steps > 1
    assert trainer.args.gradient_accumulation_steps == plan.accumulation_steps
    assert trainer.args.per_device_train_batch_size == trainer._train_batch_size == plan.micro_batch
    assert torch.equal(weights(trained), before)
    assert trained.training
    assert not hasattr(trainer, "current_gradient_accumulation_steps")
    sizes, ask = [], trainer.compute_loss

    def counting(model: Any, inputs: Any, **more: Any) -> Any:
        sizes.append(len(inputs["labels"]))
        return ask(model, inputs, **more)

    trainer.compute_loss = counting
    trainer.train()

    assert sizes == plan.micro_batches
    plain = make_workload(model=model, train_data=data, collate=collate)
    expected, losses = reference(plain, [range(BATCH)], lambda model, batch: model(**batch).loss)
    assert apart(weights(trained) - before, expected - before) < 1e-4
    assert trainer.state.log_history[0]["loss"] == pytest.approx(losses[0], rel=1e-3)
    lines = [note for note in plan.notes if "num_items_in_batch" in note]
    assert len(lines) == bool(line)
    assert all(line in note for note in lines)


def test_an_optimizer_keeps_its_rate(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.3)
    before = trainer.args.learning_rate
    plan = transformers.plan(trainer, target_batch=24, memory_budget=BUDGET, base_batch=6, lr_rule="sqrt")
    assert "Trainer: the optimizer keeps its rate of 0.3: build it with plan.learning_rate, 0.6" in plan.notes
    assert trainer.args.learning_rate == before
    assert trainer.optimizer.param_groups[0]["lr"] == 0.3


def test_a_plan_sets_the_rate_and_logs_nothing_of_a_loss_that_logs(tmp_path: Path) -> None:
    class Logging(installed("transformers").Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
            found = super().compute_loss(model, inputs, *more, **others)
            self.log({"own": float(found)})
            self.figures["train"]["loss"].append(1.0)
            self.last.append(2)
            self.calls, self.new = self.calls + 1, 1
            return found

    trainer = a_trainer(tmp_path, kind=Logging)
    trainer.figures, trainer.calls = {"train": defaultdict(list, loss=[0.5])}, 0
    trainer.last, trainer.rows = deque([1], maxlen=2), (rows := [0] * 2000)
    transformers.plan(trainer, target_batch=16, base_batch=4, lr_rule="sqrt", max_micro_batch=4)
    assert trainer.args.learning_rate == pytest.approx(0.2)
    assert trainer.state.log_history == []
    assert (trainer.figures, trainer.calls) == ({"train": {"loss": [0.5]}}, 0)
    assert (list(trainer.last), trainer.last.maxlen) == ([1], 2)
    assert trainer.rows is rows, "data are not copied"
    assert not hasattr(trainer, "new")
    trainer.log({"own": 1.0})
    assert [one["own"] for one in trainer.state.log_history] == [1.0]


def test_the_optimizer_is_that_of_the_trainer(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, optim="adamw_torch", weight_decay=0.1)
    made = transformers.workload(trainer).optimizer(gpt2(), 0.1)
    assert isinstance(made, torch.optim.AdamW)
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert trainer.optimizer is None
    model = gpt2()
    own = torch.optim.SGD(model.lm_head.parameters(), lr=0.5)
    trainer = a_trainer(tmp_path, model, optimizers=(own, None))
    other = gpt2()
    made = transformers.workload(trainer).optimizer(other, 0.1)
    assert isinstance(made, torch.optim.SGD)
    assert made.param_groups[0]["params"] == [other.lm_head.weight]


@pytest.mark.program
def test_adapters_of_peft_and_checkpointing_are_planned_with(tmp_path: Path) -> None:
    peft = installed("peft")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.0)
    model = peft.get_peft_model(gpt2(), config)
    trainer = a_trainer(tmp_path, model, gradient_checkpointing=True, bf16=True)
    plan = transformers.plan(trainer, target_batch=24, memory_budget="250KiB")
    assert plan.precision == "bf16"
    assert plan.probe.limited_by == "memory"
    assert not model.is_gradient_checkpointing
    before = weights(model)
    trainer.train()
    assert not torch.equal(weights(model), before)
    plain = a_trainer(tmp_path, peft.get_peft_model(gpt2(), config), bf16=True)
    limit = transformers.plan(plain, target_batch=24, memory_budget="250KiB").probe.micro_batch
    assert limit < plan.probe.micro_batch


def test_ways_to_train_that_no_plan_describes_are_refused(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, auto_find_batch_size=True)
    with pytest.raises(InputError, match="cannot plan for a Trainer with auto_find_batch_size: turn it off"):
        transformers.plan(trainer, target_batch=24)
    trainer = a_trainer(tmp_path)
    trainer.train_dataset = None
    with pytest.raises(InputError, match="the Trainer has no train_dataset"):
        transformers.plan(trainer, target_batch=24)


def test_a_loader_of_a_fixed_size_is_refused(tmp_path: Path) -> None:
    class Fixed(installed("transformers").Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            return self.accelerator.prepare(DataLoader(self.train_dataset, batch_size=3, collate_fn=pad))

    with pytest.raises(
        InputError, match=r"loader of 3 samples, after per_device_train_batch_size was set to 6"
    ):
        transformers.plan(a_trainer(tmp_path, kind=Fixed), target_batch=24, max_micro_batch=6)
