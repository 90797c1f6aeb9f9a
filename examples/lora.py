"""LoRA adapters of peft on a small Llama, trained in a loop of your own on exact batches.

python examples/lora.py
"""

from __future__ import annotations

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import autobatch

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def build_model() -> nn.Module:
    """Build the model with adapters; the rest is frozen."""
    return get_peft_model(LlamaForCausalLM(CONFIG), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def loss(model: nn.Module, ids: Tensor) -> autobatch.Loss:
    """Return the sum over the predicted tokens, and their number."""
    logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
    return autobatch.Loss(cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum"), len(logits))


def adapters_only(model: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    """Build AdamW for the adapters. The name ``model`` asks for the model itself."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate)


def main() -> None:
    """Plan, then train for one epoch."""
    data = torch.randint(3, 64, (256, 16), generator=torch.Generator().manual_seed(0))
    workload = autobatch.Workload(
        model=build_model, train_data=data, loss=loss, optimizer=adapters_only, learning_rate=1e-2
    )
    plan = autobatch.plan(workload, target_batch=64, memory_budget="1MiB", device="cpu")
    print(plan)
    model = build_model()
    optimizer = adapters_only(model, plan.learning_rate)
    for batch in autobatch.batches(data, plan, epochs=1):
        for micro in batch:
            batch.backward(loss(model, micro.data))
        print(f"step {batch.index}: loss {batch.step(optimizer).loss:.4f}")


if __name__ == "__main__":
    main()
