"""The events of single operators on a GPU, forward and backward, against those of their trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.gpu_events import predicted, processors_here, real

DTYPES = (torch.float32, torch.bfloat16)


def tensor(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=grad)


def heads(dtype: torch.dtype, head: int = 64, length: int = 256) -> tuple[Tensor, ...]:
    return tuple(tensor(4, 8, length, head, dtype=dtype) for _ in range(3))


def both_ways(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a function and its backward pass."""

    def run(*inputs: Any) -> Any:
        found = function(*inputs)
        out = found if isinstance(found, Tensor) else found[0]
        inputs = [one for one in inputs if isinstance(one, Tensor) and one.requires_grad]
        return out, torch.autograd.grad(out, inputs, torch.empty_like(out))

    return run


def of_type(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    attend = F.scaled_dot_product_attention
    mask = torch.ones(4, 1, 256, 256, dtype=torch.bool)
    image, channels = tensor(16, 64, 32, 32, dtype=dtype), [tensor(64, dtype=dtype) for _ in range(2)]
    pair = (tensor(4096, 256, dtype=dtype), tensor(4096, 256, dtype=dtype, grad=False))
    labels = torch.zeros(4096, dtype=torch.long)
    few = torch.zeros(100, dtype=torch.long)
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "attention with dropout": (lambda q, k, v: attend(q, k, v, dropout_p=0.1), heads(dtype)),
        "masked attention with dropout": (
            lambda q, k, v, mask: attend(q, k, v, attn_mask=mask, dropout_p=0.1),
            (*heads(dtype), mask),
        ),
        "layer norm": (
            lambda x, w, b: F.layer_norm(x, (256,), w, b),
            (pair[0], *(tensor(256, dtype=dtype) for _ in range(2))),
        ),
        "rms norm": (lambda x, w: F.rms_norm(x, (256,), w), (pair[0], tensor(256, dtype=dtype))),
        "group norm": (lambda x, w, b: F.group_norm(x, 8, w, b), (image, *channels)),
        "group norm without weights": (lambda x: F.group_norm(x, 8), (image,)),
        "group norm of channels last": (
            lambda x, w, b: F.group_norm(x.to(memory_format=torch.channels_last), 8, w, b),
            (image, *channels),
        ),
        "batch norm": (
            lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b, True),
            (image, tensor(64), tensor(64), torch.zeros(64), torch.ones(64)),
        ),
        "batch norm of features": (
            lambda x, w, b, mean, var: F.batch_norm(x, mean, var, w, b, True),
            (tensor(1600, 64, dtype=dtype), tensor(64), tensor(64), torch.zeros(64), torch.ones(64)),
        ),
        "dropout": (lambda x: F.dropout(x, 0.1), (pair[0],)),
        "softmax": (lambda x: x.softmax(-1), (pair[0],)),
        "cross entropy": (F.cross_entropy, (pair[0], labels)),
        "smoothed cross entropy": (
            lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
            (pair[0], labels),
        ),
        "binary cross entropy": (lambda x, y: F.binary_cross_entropy(x.sigmoid(), y), pair),
        "log sigmoid": (F.logsigmoid, (pair[0],)),
        "linear of rows": (
            F.linear,
            (tensor(64, 128, 256, dtype=dtype), tensor(512, 256, dtype=dtype), tensor(512, dtype=dtype)),
        ),
        "linear of a transposed tensor": (
            lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
            (tensor(64, 128, 256, dtype=dtype), tensor(512, 256, dtype=dtype), tensor(512, dtype=dtype)),
        ),
        "logsumexp": (lambda x: x.logsumexp(-1), (pair[0],)),
        "layer norm of a transposed tensor": (
            lambda x: F.layer_norm(x.transpose(0, 1), (4096,)),
            (pair[0],),
        ),
        "embedding of few tokens": (F.embedding, (few, tensor(1000, 64, dtype=dtype))),
        "gather": (lambda x, at: x.gather(0, at), (pair[0], torch.zeros(10, 64, dtype=torch.long))),
        "rows by index": (lambda x, at: x.index_select(0, at), (pair[0], few)),
        "largest of columns": (lambda x: x.max(0), (pair[0],)),
        "top 5": (lambda x: x.topk(5), (pair[0],)),
        "norms of many": (lambda *x: torch.stack(torch._foreach_norm(list(x))), (pair[0], *channels)),
    }
    for mode in ("nearest", "nearest-exact", "bilinear", "bicubic"):
        found[f"{mode} interpolation, concatenated"] = (
            lambda x, mode=mode: torch.cat(
                [F.interpolate(x, scale_factor=2, mode=mode), x.new_ones(16, 1, 64, 64)], 1
            ),
            (image,),
        )
    for name in ("avg_pool2d", "max_pool2d"):
        found[f"{name}, concatenated"] = (
            lambda x, name=name: torch.cat([getattr(F, name)(x, 2), x.new_ones(16, 1, 16, 16)], 1),
            (image,),
        )
    for name in ("sum", "mean", "std", "amax", "norm"):
        found[f"{name} of rows"] = (lambda x, name=name: getattr(x, name)(dim=0), (pair[0],))
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "l1_loss", "binary_cross_entropy_with_logits"):
        for reduction in ("mean", "sum", "none"):
            found[f"{name}, {reduction}"] = (
                lambda x, y, name=name, how=reduction: getattr(F, name)(x, y, reduction=how),
                pair,
            )
    if dtype is torch.float32:
        # In 16 bits these run on cuDNN, whose workspaces are its own.
        found["attention"] = (attend, heads(dtype))
        found["causal attention"] = (lambda q, k, v: attend(q, k, v, is_causal=True), heads(dtype, 128))
        found["attention of odd lengths"] = (attend, heads(dtype, 72, 250))
    return found


CASES = [(dtype, name) for dtype in DTYPES for name in of_type(dtype)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "name"), CASES, ids=[f"{name}-{dtype}"[:60] for dtype, name in CASES])
def test_an_operator_takes_what_its_trace_says(dtype, name):
    function, inputs = of_type(dtype)[name]
    capability, processors = torch.cuda.get_device_capability(), processors_here()
    function = both_ways(function)
    expected = real(function, inputs)
    assert predicted(function, inputs, capability=capability, processors=processors) == expected
