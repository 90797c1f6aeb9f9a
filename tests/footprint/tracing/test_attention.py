"""The attention kernel of a GPU on fake tensors, and its scratch memory by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from autobatch.footprint.tracing.attention import attention_kernel
from autobatch.footprint.tracing.cuda_policy import cuda_policy

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32


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
        ((9, 0), fp16, False, 80, "Cudnn"),
        ((8, 9), fp32, False, 64, "Efficient"),
        ((8, 9), bf16, True, 64, "Efficient"),
        ((7, 5), fp16, False, 64, "Efficient"),
        ((7, 5), bf16, False, 64, None),  # no such type before 8.0
        ((8, 0), bf16, False, 320, "Efficient"),
        ((9, 0), bf16, True, 64, "Cudnn"),
        ((9, 0), bf16, True, 160, "Efficient"),
        ((8, 6), bf16, False, 200, "Efficient"),  # the backward pass of flash takes none of these on 8.6
        ((8, 0), bf16, False, 200, "Flash"),
        ((8, 0), fp32, False, 30, None),  # tensor cores take fp32 heads of a multiple of 4
        ((7, 5), fp32, False, 30, "Efficient"),
    ],
)
def test_attention_takes_the_kernel_of_the_gpu(capability, dtype, mask, head, kernel):
    with FakeTensorMode(), cuda_policy(capability):
        q = torch.randn(2, 3, 128, head, dtype=dtype, requires_grad=True)
        given = torch.ones(128, 128, dtype=torch.bool) if mask else None
        out = F.scaled_dot_product_attention(q, q, q, attn_mask=given)
        assert out.shape == q.shape
        found = kernels_of(out)
        assert (found == []) if kernel is None else (kernel in found[0])
        out.sum().backward()
        assert q.grad.shape == q.shape


@pytest.mark.parametrize(
    ("shapes", "is_causal", "kernel"),
    [
        (((2, 3, 128, 64), (2, 3, 64, 64)), False, "Flash"),
        (((2, 3, 128, 64), (2, 3, 64, 64)), True, "Efficient"),
        (((2, 3, 128, 64), (1, 3, 128, 64)), False, None),
    ],
)
def test_shapes_that_torch_refuses_get_the_next_kernel(shapes, is_causal, kernel):
    with FakeTensorMode(), cuda_policy((8, 0)):
        query, key = (torch.randn(shape, dtype=bf16, requires_grad=True) for shape in shapes)
        found = kernels_of(F.scaled_dot_product_attention(query, key, key, is_causal=is_causal))
        assert (found == []) if kernel is None else (kernel in found[0])


def test_the_users_choice_of_a_kernel_counts():
    with FakeTensorMode(), cuda_policy((8, 0)), sdpa_kernel(SDPBackend.MATH):
        q = torch.randn(2, 3, 128, 64, dtype=bf16, requires_grad=True)
        assert "ScaledDotProduct" not in F.scaled_dot_product_attention(q, q, q).grad_fn.name()


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_a_fused_kernel_attention_is_the_plain_formula(is_causal):
    """float64 has no fused kernel, so values can be compared on the CPU."""
    q, k, v = torch.randn(3, 2, 3, 5, 4, dtype=torch.float64)
    scores = q @ k.mT / 2
    if is_causal:
        scores = scores.masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), float("-inf"))
    found = attention_kernel((8, 0))(q, k, v, is_causal=is_causal)
    torch.testing.assert_close(found, scores.softmax(-1) @ v)
