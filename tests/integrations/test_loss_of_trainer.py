"""Losses that ignore ``num_items_in_batch``, and those that use it: one planned step against the whole batch.

The oracle is the model's own mean over the whole batch, in one backward pass of a plain loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from autobatch import integrations
from tests.support.libraries import installed
from tests.support.trainers import WORDS, gradient_of, weights_of

transformers = integrations.transformers
BATCH, WIDTH, CLASSES = 24, 8, 3
SIZES = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
BERT = {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def samples(labels: str) -> list[dict[str, Tensor]]:
    """Draw texts of one length, so that means over samples and over words weigh micro-batches the same."""
    draw = torch.Generator().manual_seed(5)
    texts = torch.randint(3, WORDS, (BATCH, WIDTH), generator=draw)
    classes = texts.sum(dim=1) % CLASSES
    targets = {"text": classes, "words": texts}[labels]
    return [{"input_ids": text, "labels": label} for text, label in zip(texts, targets, strict=True)]


def build(kind: str, config: str, **options: Any) -> nn.Module:
    library = installed("transformers")
    torch.manual_seed(0)
    made = getattr(library, config)(vocab_size=WORDS, num_labels=CLASSES, pad_token_id=0, **options)
    return getattr(library, kind)(made)  # type: ignore[no-any-return]


def llama() -> nn.Module:
    return build("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2, **SIZES)


def own_mean(trainer: Any, model: Any, inputs: Any, **_: Any) -> Any:
    return cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"])


def own_sum(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, **_: Any) -> Any:
    total = cross_entropy(model(input_ids=inputs["input_ids"]).logits, inputs["labels"], reduction="sum")
    return total / (len(inputs["labels"]) if num_items_in_batch is None else num_items_in_batch)


def mean_of_outputs(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return cross_entropy(outputs.logits, labels)


def of_text() -> nn.Module:
    return build("BertForSequenceClassification", "BertConfig", **BERT)


IGNORES, USES = "ignores num_items_in_batch", "divides by num_items_in_batch"
CASES = {
    "classes of texts": (of_text, "text", {}, IGNORES),
    "causal": (llama, "words", {}, ""),
    "own mean": (of_text, "text", {"own": own_mean}, IGNORES),
    "own sum": (of_text, "text", {"own": own_sum}, ""),
    "function": (of_text, "text", {"compute_loss_func": mean_of_outputs}, IGNORES),
    "said to be a mean": (llama, "words", {"said": False}, USES),
    "said to be scaled": (of_text, "text", {"said": True}, IGNORES),
}
FIRST = ("classes of texts", "causal", "own mean", "function")
"""Cases of the default run."""


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in FIRST else pytest.mark.program) for case in CASES]
)
def test_a_planned_step_is_that_of_the_whole_batch(tmp_path: Path, case: str) -> None:
    library = installed("transformers")
    model, labels, options, line = CASES[case]
    options = {**options}
    own, said = options.pop("own", None), options.pop("said", None)
    members = {"compute_loss": own} if own else {}
    data = samples(labels)
    trained = model()
    before = weights_of(trained)
    arguments = library.TrainingArguments(
        str(tmp_path), report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_steps=1, max_grad_norm=0.0, logging_steps=1,
    )  # fmt: skip
    trainer = type("Own", (library.Trainer,), members)(trained, arguments, train_dataset=data, **options)
    if said is not None:
        trainer.loss_is_scaled_for_ga = said
    plan = transformers.plan(trainer, target_batch=BATCH, max_micro_batch=6)
    assert (plan.micro_batch, plan.accumulation_steps) == (6, 4)
    assert torch.equal(weights_of(trained), before)
    assert trained.training
    assert not hasattr(trainer, "current_gradient_accumulation_steps")
    trainer.train()

    whole = {name: torch.stack([one[name] for one in data]) for name in data[0]}
    expected = model().eval()
    loss = expected(**whole).loss
    step = -0.1 * gradient_of(expected, loss)
    assert float((weights_of(trained) - before - step).norm() / step.norm()) < 1e-4
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(loss.detach()), rel=1e-3)
    lines = [note for note in plan.notes if "num_items_in_batch" in note]
    assert len(lines) == bool(line)
    assert all(line in note for note in lines)
