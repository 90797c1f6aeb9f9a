"""Operators that change the values of a tensor in place, and never its storage."""

from __future__ import annotations

import torch

UPDATES = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for name, overload in (
        ("add_", "Tensor"),
        ("add_", "Scalar"),
        ("sub_", "Tensor"),
        ("mul_", "Tensor"),
        ("mul_", "Scalar"),
        ("div_", "Tensor"),
        ("lerp_", "Scalar"),
        ("lerp_", "Tensor"),
        ("addcmul_", "default"),
        ("addcdiv_", "default"),
        ("copy_", "default"),
        ("zero_", "default"),
        ("fill_", "Scalar"),
    )
)
"""Most operators of an optimizer step."""
