"""Random draws of a forward pass, made the same for a sample in the whole batch and in its part.

Functional dropout becomes the identity. The draws of a pass over the whole batch are recorded, and a part
gets the rows of its samples. A draw whose shape does not grow with the batch is the same for all parts. A
draw of another kind is a doubt: after it, a difference between the whole batch and its parts proves nothing.
"""

from __future__ import annotations

import random
import sys
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from autobatch.workload.rng import seed_everything, seed_torch

Generators: TypeAlias = list[torch.Generator]
SEED = 1
DROPOUTS = {
    f"{prefix}dropout{suffix}"
    for prefix in ("", "alpha_", "feature_", "feature_alpha_")
    for suffix in ("", "_", "1d", "2d", "3d")
}
RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Layers with a dropout between them, their only argument that is a float."""
ELEMENTWISE = {
    *("uniform_", "normal_", "bernoulli_", "exponential_", "geometric_", "log_normal_", "cauchy_", "random_"),
    *("bernoulli", "rand_like", "randn_like", "randint_like", "normal", "poisson", "binomial"),
    *("rand", "randn", "randint"),
}
"""Operators that draw each element alone, so that some rows of a draw are a draw of their own."""


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


class SameDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that records the draws of a pass over a whole batch, and gives each part its rows of them.

    Args:
        samples: of the whole batch.
    """

    def __init__(self, samples: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.doubts: set[str] = set()
        """Draws that could not be made the same for a sample, in words."""
        self.is_flat = False
        """True if a draw had several rows per sample: all of them in a block, or each a batch apart."""
        self.is_interleaved = False
        """Whether the rows of a sample are taken to be a batch apart (time before batch)."""
        self._samples = samples
        self._first = 0
        self._size = samples
        self._is_recording = False
        self._recorded: dict[int, Tensor] = {}
        """The draws of the whole batch, by their keys."""
        self._ends: set[int] = set()

    def record(self) -> None:
        """Begin a pass over the whole batch, whose draws are recorded."""
        self._recorded.clear()
        self._ends.clear()
        self._is_recording = True
        self.place(0, self._samples)
        seed_everything(SEED)

    def replay(self, first: int, size: int) -> None:
        """Begin a pass over ``size`` samples from ``first`` on, with the draws recorded for them."""
        self._is_recording = False
        self.place(first, size)
        seed_everything(SEED)

    def place(self, first: int, size: int) -> None:
        """Set which samples the following draws are for."""
        self._first, self._size = first, size

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator; a random one returns what was recorded for its samples."""
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
            _seed(key, own)
            found = func(*args, **kwargs)
            return self._same(key, name, found)
        finally:
            torch.set_rng_state(after)
            for generator, state in states:
                generator.set_state(state)

    def _same(self, key: int, name: str, found: Any) -> Any:
        """Return a draw with the values that were recorded for its samples."""
        if name not in ELEMENTWISE:
            self.doubts.add(name)
            return found
        if self._is_recording and key not in self._recorded:
            self._recorded[key] = found.clone()
        known = self._recorded.get(key)
        rows = None if known is None else self._rows(known, found.shape)
        if rows is None:
            self.doubts.add(name)
            return found
        return found.copy_(rows)

    def _rows(self, whole: Tensor, shape: torch.Size) -> Tensor | None:
        """Return the rows of a recorded draw that belong to the samples; None if it is not clear which."""
        if whole.shape == shape:
            return whole
        differ = [axis for axis, (one, own) in enumerate(zip(whole.shape, shape, strict=False)) if one != own]
        if whole.dim() != len(shape) or len(differ) != 1 or whole.shape[differ[0]] % self._samples:
            return None
        axis = differ[0]
        each = whole.shape[axis] // self._samples
        if shape[axis] != each * self._size:
            return None
        self.is_flat |= each > 1
        if self.is_interleaved:
            apart = whole.reshape(*whole.shape[:axis], each, self._samples, *whole.shape[axis + 1 :])
            return apart.narrow(axis + 1, self._first, self._size).reshape(shape)
        return whole.narrow(axis, self._first * each, self._size * each)


def _seed(key: int, own: Generators) -> None:
    # The CPU's generator takes 32 bits of a seed.
    seed = hash(key) & 0xFFFFFFFF
    seed_torch(seed)
    for generator in own:
        generator.manual_seed(seed)
