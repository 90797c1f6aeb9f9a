"""CUDA's operator policy on the CPU, against torch's own header and CUDA's documented types."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from autobatch.estimates import policy

HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.skipif(not HEADER.is_file(), reason="this torch comes without its headers")
@pytest.mark.parametrize(
    ("macro", "names"),
    [
        ("AT_FORALL_FP32", policy.FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", policy.FP32_RESULT),
        ("AT_FORALL_LOWER_PRECISION_FP", policy.LOWER),
        ("AT_FORALL_PROMOTE", policy.WIDEST),
    ],
)
def test_lists_are_those_of_torch(macro, names):
    """Every operator of the header is in our list, or the CPU casts it."""
    text = HEADER.read_text()
    body = re.search(rf"#define {macro}\(_\)\s*\\\n((?:.*\\\n)*.*\n)", text)[1]
    listed = {".".join(re.split(r",\s*", name)) for name in re.findall(r"_\(([^()]+)\)", body)}
    # Overloads for named tensors, in torch until 2.12. Nobody trains on named tensors.
    listed = {name for name in listed if "imname" not in name}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    known = set(torch._C._dispatch_get_all_op_names())
    missing = {
        name
        for name in listed - names
        if f"aten::{name}" in known and not has(f"aten::{name}", "AutocastCPU")
    }
    assert missing == set()
    # torch 2.11 leaves rms_norm to its parts, which are in the list.
    assert {name for name in names if f"aten::{name}" in known} <= listed | {"rms_norm"}


@pytest.mark.parametrize(("low", "steps"), [(fp16, ["LogSoftmax"]), (bf16, ["LogSoftmax", "ToCopy"])])
def test_softmax_of_fp16_needs_no_copy_in_fp32(low, steps):
    with FakeTensorMode(), policy.cuda_policy((8, 0)):
        x = torch.randn(4, 8, dtype=low, requires_grad=True)
        with torch.autocast("cpu", dtype=low):
            y = x.log_softmax(-1)
        assert y.dtype is fp32
        nodes = [y.grad_fn, *(node for node, _ in y.grad_fn.next_functions)][: len(steps)]
        assert [node.name().removesuffix("Backward0") for node in nodes] == steps
        y.sum().backward()
        assert x.grad.dtype is low


def test_the_policy_of_the_cpu_is_restored():
    x = torch.randn(4, 4, requires_grad=True)

    def behaviour():
        with torch.autocast("cpu", dtype=bf16):
            y = x @ x
            attended = F.scaled_dot_product_attention(*[x[None, None]] * 3)
            return y.softmax(-1).dtype, y.sum().dtype, attended.dtype, type(F.dropout(x, 0.5).grad_fn)

    before = behaviour()
    with FakeTensorMode(), policy.cuda_policy((9, 0)):
        pass
    assert behaviour() == before


def kernels_of(out: torch.Tensor) -> list[str]:
    """Name the fused kernels in the graph of a tensor."""
    names, nodes = [], [out.grad_fn]
    while nodes:
        node = nodes.pop()
        names.append(node.name())
        nodes += [following for following, _ in node.next_functions if following is not None]
    return [name for name in names if "ScaledDotProduct" in name]


@pytest.mark.parametrize(
    ("capability", "dtype", "mask", "head", "kernel"),
    [
        ((8, 0), bf16, False, 64, "Flash"),
        ((9, 0), fp16, False, 80, "Flash"),
        ((8, 9), fp32, False, 64, "Efficient"),
        ((8, 9), bf16, True, 64, "Efficient"),
        ((7, 5), fp16, False, 64, "Efficient"),
        ((7, 5), bf16, False, 64, None),  # no such type before 8.0
        ((8, 0), bf16, False, 320, "Efficient"),
        ((8, 0), fp32, False, 30, None),  # tensor cores take fp32 heads of a multiple of 4
        ((7, 5), fp32, False, 30, "Efficient"),
    ],
)
def test_attention_takes_the_kernel_of_the_gpu(capability, dtype, mask, head, kernel):
    with FakeTensorMode(), policy.cuda_policy(capability):
        q = torch.randn(2, 3, 128, head, dtype=dtype, requires_grad=True)
        given = torch.ones(128, 128, dtype=torch.bool) if mask else None
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=given)
        assert out.shape == q.shape
        found = kernels_of(out)
        assert (found == []) if kernel is None else (kernel in found[0])
        out.sum().backward()
        assert q.grad.shape == q.shape
