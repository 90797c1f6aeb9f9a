"""The memory of attention on a GPU, for every kernel that takes the inputs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.machine import Machine

ATTENTIONS: dict[str, tuple[torch.dtype, bool, bool, float]] = {
    "bf16": (torch.bfloat16, False, False, 0.0),
    "bf16 causal": (torch.bfloat16, True, False, 0.0),
    "bf16 mask": (torch.bfloat16, False, True, 0.0),
    "bf16 dropout": (torch.bfloat16, False, False, 0.1),
    "fp32": (torch.float32, False, False, 0.0),
    "fp32 causal": (torch.float32, True, False, 0.0),
    "fp32 mask": (torch.float32, False, True, 0.0),
}
"""Data type, causal, mask and dropout of the attentions that are measured."""


def attention(machine: Machine) -> dict[str, Any]:
    """Return what each kernel of attention keeps and what its backward pass takes, in bytes."""
    found: dict[str, Any] = {}
    for name, (dtype, causal, masked, dropout) in ATTENTIONS.items():
        shape = (8, 16, 1024, 64) if machine.is_real else (1, 1, 8, 8)
        qkv = [
            torch.randn(shape, device=machine.torch_device, dtype=dtype, requires_grad=True) for _ in range(3)
        ]
        side = shape[2]
        mask = torch.zeros(1, 1, side, side, device=machine.torch_device, dtype=dtype) if masked else None
        options = {"is_causal": causal, "attn_mask": mask, "dropout_p": dropout}
        row: dict[str, Any] = {"choice": int(torch._fused_sdp_choice(*qkv, **options))}
        for backend in (
            None,
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
        ):
            label = "default" if backend is None else backend.name
            try:
                with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                    row[label] = memory_of_attention(machine, qkv, options)
            except RuntimeError as error:  # this kernel does not take these inputs
                row[label] = str(error).splitlines()[0][:100]
        found[name] = row
    return found


def memory_of_attention(machine: Machine, qkv: list[torch.Tensor], options: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of the second forward and backward pass, when all plans are made."""
    found = {}
    for _ in range(2):
        for tensor in qkv:
            tensor.grad = None
        machine.empty()
        machine.reset_peak()
        base = machine.allocated()
        out = functional.scaled_dot_product_attention(*qkv, **options)
        forward, kept = machine.peak() - base, machine.allocated() - base
        gradient = torch.ones_like(out)
        machine.reset_peak()
        before = machine.allocated()
        out.backward(gradient)
        backward = machine.peak() - before
        found = {"kept": kept, "forward": forward, "backward": backward}
        del out, gradient
    gradients = sum(tensor.grad.nbytes for tensor in qkv if tensor.grad is not None)
    return found | {"gradients": gradients}
