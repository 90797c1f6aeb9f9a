"""Random draws of a forward pass, made the same for a sample in the whole batch and in its part.

Functional dropout becomes the identity. Any other draw gets a seed per sample if its shape grows with the
batch, and one seed if it does not. A draw of another kind is a doubt: after it, a difference between the
whole batch and its parts proves nothing.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.workload.rng import seed_everything, seed_torch

Shape: TypeAlias = tuple[int, ...]
_Generators: TypeAlias = list[torch.Generator]
SEED = 1
DROPOUTS = {
    f"{prefix}dropout{suffix}"
    for prefix in ("", "alpha_", "feature_", "feature_alpha_")
    for suffix in ("", "_", "1d", "2d", "3d")
}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Layers with a dropout between them, their only argument that is a float."""
FILLS = {
    "uniform_",
    "normal_",
    "bernoulli_",
    "exponential_",
    "geometric_",
    "log_normal_",
    "cauchy_",
    "random_",
}
"""Operators that fill their first argument, each element alone."""
MAPS = {"bernoulli", "rand_like", "randn_like", "randint_like", "normal", "poisson", "binomial"}
"""Operators that draw each element for one element of their tensors."""
FACTORIES = {"rand", "randn", "randint"}
"""Operators that draw each element of a tensor of a given size."""


class NoDropout(TorchFunctionMode):
    """A mode in which functional dropout returns its input."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, without its dropout."""
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in DROPOUTS:
            return args[0] if args else kwargs["input"]
        if name == "native_dropout":
            whole = args[0] if args else kwargs["input"]
            return whole, torch.ones_like(whole, dtype=torch.bool)
        if name == "scaled_dot_product_attention":
            kwargs.pop("dropout_p", None)
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
        if name in RECURRENT:
            args = tuple(0.0 if isinstance(one, float) else one for one in args)
        if name == "multi_head_attention_forward":
            # This function of Python calls the others where no mode sees them.
            kwargs["training"] = False
        return func(*args, **kwargs)


class SampleDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which the random draws for a sample do not depend on the rest of its micro-batch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.doubts: set[str] = set()
        """Draws that could not be made the same for a sample, in words."""
        self.is_flat = False
        """True if a draw had several rows per sample: all of them in a block, or each a batch apart."""
        self.is_interleaved = False
        """Whether the rows of a sample are taken to be a batch apart (time before batch)."""
        self._first = 0
        self._samples = 1
        self._recorded: dict[int, Shape | None] | None = None
        self._axes: dict[int, int | None] = {}
        """Dimension of each draw that counts samples, by the key of the draw; None for one draw for all."""
        self._ends: set[int] = set()

    def start(self, first: int, samples: int) -> None:
        """Set the generators to the start of a pass over ``samples`` samples from ``first`` on."""
        self.place(first, samples)
        seed_everything(SEED)

    def place(self, first: int, samples: int) -> None:
        """Set which samples the following draws are for."""
        self._first, self._samples = first, samples

    def end(self) -> None:
        """Note after a pass what Python and NumPy drew: passes must draw alike to be comparable."""
        numpy = sys.modules.get("numpy")
        drawn: tuple[bytes, int] | None = None
        if numpy is not None:
            _, words, position, *_ = numpy.random.get_state()
            drawn = words.tobytes(), position
        self._ends.add(hash((random.getstate(), drawn)))
        if len(self._ends) > 1:
            self.doubts.add("numbers from Python or NumPy")

    @contextmanager
    def recorded(self) -> Iterator[dict[int, Shape | None]]:
        """Record the shape of each draw within the block, by its key; None for an unknown operator."""
        found: dict[int, Shape | None] = {}
        self._recorded = found
        try:
            yield found
        finally:
            self._recorded = None

    def compare(
        self, few: dict[int, Shape | None], part: int, many: dict[int, Shape | None], whole: int
    ) -> None:
        """Learn which draws grow with the batch, from passes over ``part`` and over ``whole`` samples."""
        for key in few.keys() & many.keys():
            one, other = few[key], many[key]
            if one is None or other is None or len(one) != len(other):
                continue
            differ = [axis for axis, sizes in enumerate(zip(one, other, strict=True)) if len(set(sizes)) > 1]
            if not differ:
                self._axes[key] = None
            elif len(differ) == 1 and one[differ[0]] * whole == other[differ[0]] * part:
                self._axes[key] = differ[0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator, with draws that depend on the sample alone."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        # Attention draws for its dropout only, which is off.
        if torch.Tag.nondeterministic_seeded not in func.tags or "attention" in name:
            return func(*args, **kwargs)
        # From the generator, so that a recomputed forward pass finds the same keys.
        key = int(torch.randint(2**62, (), device="cpu"))
        own = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Generator)]
        states = [(one, one.get_state()) for one in own]
        after = torch.get_rng_state()
        try:
            return self._draw(func, args, kwargs, (key, own))
        finally:
            torch.set_rng_state(after)
            for generator, state in states:
                generator.set_state(state)

    def _draw(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: tuple[int, _Generators]
    ) -> Any:
        """Draw from the key and the generators of ``source``."""
        key, own = source
        name = func.overloadpacket.__name__
        shape, axis = _shape(name, args), self._axes.get(key)
        if self._recorded is not None:
            self._recorded[key] = shape
        if shape is None or axis is None or shape[axis] % self._samples:
            is_shared = key in self._axes and axis is None
            if self._recorded is None and not is_shared:
                self.doubts.add(name)
            _seed(key, 0, own)
            return func(*args, **kwargs)
        each = shape[axis] // self._samples
        self.is_flat |= each > 1
        out = args[0] if name in FILLS else None
        for sample in range(self._samples):
            _seed(key, 1 + self._first + sample, own)
            rows = slice(sample * each, (sample + 1) * each)
            if self.is_interleaved:
                rows = slice(sample, None, self._samples)
            piece = _Piece(shape, axis, rows, each)
            drawn = func(*map(piece.of, args), **{word: piece.of(one) for word, one in kwargs.items()})
            if name not in FILLS:
                out = drawn.new_empty(shape) if out is None else out
                piece.of(out).copy_(drawn)
        return out


class _Piece(NamedTuple):
    """The part of a draw that belongs to one sample."""

    shape: Shape
    axis: int
    rows: slice
    size: int

    def of(self, argument: Any) -> Any:
        """Return the part of an argument that has the shape of the draw; return another one unchanged."""
        if isinstance(argument, Tensor) and tuple(argument.shape) == self.shape:
            return argument[(slice(None),) * self.axis + (self.rows,)]
        if isinstance(argument, list | tuple) and tuple(argument) == self.shape:
            return [*self.shape[: self.axis], self.size, *self.shape[self.axis + 1 :]]
        return argument


def _shape(name: str, args: tuple[Any, ...]) -> Shape | None:
    """Return the shape of what an operator draws; None if it is unknown to this module."""
    if name not in FILLS | MAPS | FACTORIES:
        return None
    tensors = [tuple(one.shape) for one in args if isinstance(one, Tensor)]
    sizes = [tuple(one) for one in args if isinstance(one, list | tuple)]
    # A factory has no tensor, and normal() may have tensors or a size.
    return next(iter([*tensors, *sizes]), None)


def _seed(key: int, place: int, own: _Generators) -> None:
    # The CPU's generator takes 32 bits of a seed.
    seed = hash((key, place)) & 0xFFFFFFFF
    seed_torch(seed)
    for generator in own:
        generator.manual_seed(seed)
