"""A language model in the Trainer of transformers: two lines more than without autobatch.

python examples/hf_trainer.py
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from autobatch.integrations.transformers import plan  # +

TEXT = "the quick brown fox jumps over the lazy dog. "


def texts(count: int = 200) -> list[dict[str, list[int]]]:
    """Return pieces of a text, 8 to 24 letters long."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randint(8, 25, (count,), generator=draw).tolist()
    return [{"input_ids": [ord((TEXT * 3)[n % 45 + i]) for i in range(size)]} for n, size in enumerate(sizes)]


def pad(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest text; padding is neither attended to nor learnt."""
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def main() -> None:
    """Train for two epochs."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=128, n_positions=32, bos_token_id=0, eos_token_id=0, **sizes)
    arguments = TrainingArguments("runs/hf_trainer", num_train_epochs=2, learning_rate=1e-2, report_to=[])
    trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=texts(), data_collator=pad)
    print(plan(trainer, target_batch=64, memory_budget="6MiB"))  # +
    print(f"loss {trainer.train().training_loss:.3f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
