"""Plans for a Trainer, against the library itself and the gradient of the whole batch."""

from __future__ import annotations

from collections import defaultdict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from autobatch import InputError, integrations
from tests.support.libraries import installed
from tests.support.trainers import BUDGET, Texts, gpt2, gradient_of, mean_over_words, pad, weights_of

transformers = integrations.transformers


def a_trainer(folder: Path, model: nn.Module | None = None, *, kind: Any = None, **options: Any) -> Any:
    library = installed("transformers")
    arguments = {
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "optim": "sgd",
        "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 1, "max_grad_norm": 0.0,
    }  # fmt: skip
    more = {name: options.pop(name) for name in ("optimizers", "compute_loss_func") if name in options}
    return (kind or library.Trainer)(
        gpt2() if model is None else model,
        library.TrainingArguments(str(folder), **arguments | options),
        train_dataset=Texts(),
        data_collator=pad,
        **more,
    )


def test_the_trainer_takes_the_step_of_the_whole_batch(tmp_path: Path) -> None:
    """One step of the library itself, against one backward pass over all 24 samples."""
    trainer = a_trainer(tmp_path)
    before = weights_of(trainer.model)
    plan = transformers.plan(trainer, target_batch=24, memory_budget=BUDGET)
    assert torch.equal(weights_of(trainer.model), before)
    assert plan.accumulation_steps > 1
    assert trainer.args.gradient_accumulation_steps == plan.accumulation_steps
    assert trainer.args.per_device_train_batch_size == trainer._train_batch_size == plan.micro_batch
    seen: list[Any] = []
    ask = trainer.compute_loss
    trainer.compute_loss = lambda model, inputs, **more: (
        seen.append(dict(inputs)) or ask(model, inputs, **more)
    )
    trainer.train()
    assert [len(one["labels"]) for one in seen] == plan.micro_batches
    texts = [
        {"input_ids": row[mask.bool()]}
        for one in seen
        for row, mask in zip(one["input_ids"], one["attention_mask"], strict=True)
    ]
    model = gpt2().eval()
    expected = weights_of(model) - 0.1 * gradient_of(model, mean_over_words(model, pad(texts)))
    assert float((weights_of(trainer.model) - expected).norm() / (expected - before).norm()) < 1e-5


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
            self.names.add("b")
            self.calls, self.new = self.calls + 1, 1
            return found

    trainer = a_trainer(tmp_path, kind=Logging)
    trainer.figures, trainer.calls = {"train": defaultdict(list, loss=[0.5])}, 0
    trainer.last, trainer.names = deque([1], maxlen=2), {"a"}
    trainer.rows = rows = [0] * 2000
    transformers.plan(trainer, target_batch=16, base_batch=4, lr_rule="sqrt", max_micro_batch=4)
    assert trainer.args.learning_rate == pytest.approx(0.2)
    assert trainer.state.log_history == []
    assert (trainer.figures, trainer.calls) == ({"train": {"loss": [0.5]}}, 0)
    assert trainer.figures["train"].default_factory is list
    assert (list(trainer.last), trainer.last.maxlen, trainer.names) == ([1], 2, {"a"})
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
    before = weights_of(model)
    trainer.train()
    assert not torch.equal(weights_of(model), before)
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
