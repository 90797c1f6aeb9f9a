"""Traces of a workload for an estimate, at the same time on all cores.

Allocations differ between GPUs with and without flash attention and bf16, between ways to share a step among
ranks, and with each change that may help. Everything else, for example the budget, is a replay of a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from autobatch.core.errors import AutobatchError, InputError
from autobatch.core.options import Options
from autobatch.core.records import Parallel, Remedy, ShardSync
from autobatch.core.units import format_bytes
from autobatch.device.host import host_memory, usable_cores
from autobatch.device.oom import first_line, is_oom
from autobatch.estimates.gpus import precision_on
from autobatch.footprint.depth import DeepFootprint, deep_footprint, is_deep, record_few
from autobatch.footprint.fit import Footprint
from autobatch.footprint.suggestions import NATIVE_BF16, Spending, changes_of, find_suggestions
from autobatch.footprint.tracing.apart import run_in_copies
from autobatch.footprint.tracing.trace_mode import Recording
from autobatch.footprint.tracing.trace_step import Setting
from autobatch.rehearsal.setup import build_model, whole_batch_notes, whole_batch_of
from autobatch.step.gradients import gradient_dtype_of, gradient_sum_notes
from autobatch.workload.contract import Workload
from autobatch.workload.data import WorstCaseSampler

T = TypeVar("T")
Capability = tuple[int, int]


class Layout(NamedTuple):
    """The ranks of a step, and what each of them holds."""

    world: int = 1
    parallel: Parallel = "replicate"
    sync: ShardSync = "each"
    modules: str | None = None


ALONE = Layout()


class TraceKey(NamedTuple):
    """Everything in which traces of a workload differ."""

    layout: Layout
    capability: Capability
    """Of the GPU that was asked about first, among those with, or without, bf16 and flash attention."""
    change: str = ""
    """Name of a change that may help; empty for none."""


class Traces:
    """Traces of a workload, each made once."""

    def __init__(self, workload: Workload, options: Options) -> None:
        self.workload = workload
        self.options = options
        self.whole_batch = whole_batch_of(workload, options.batch.target_batch)
        self.model, self.build_notes = on_meta(workload)
        self.gradient_dtype = gradient_dtype_of(self.model, options.device.gradient_dtype)
        self.worst_case = WorstCaseSampler(workload)
        self.worst_case.check_collate()
        self._found: dict[TraceKey, DeepFootprint | AutobatchError] = {}
        """What was traced, or the error with which that failed."""
        self._recorded: dict[TraceKey, Recording] = {}
        self._capabilities: dict[bool, Capability] = {}

    def prepare(
        self,
        capability: Capability,
        layouts: Sequence[Layout],
        *,
        changed: Layout | None = None,
        like: Sequence[Layout] = (),
    ) -> None:
        """Trace several steps at the same time; what cannot be traced fails when it is asked for.

        Args:
            capability: compute capability of the GPU.
            layouts: trace these.
            changed: trace this one with each change that may help; None for no such trace.
            like: of a deep model, trace these as far as `step` needs it that finds another one like them.
        """
        keys = [self._key(layout, capability) for layout in layouts]
        if changed is not None:
            with self.setting(ALONE, capability) as setting:
                names = [name for name, _, _ in changes_of(setting)]
            keys += [self._key(changed, capability, name) for name in names]
        keys = [key for key in keys if key not in self._found]
        few = [self._key(layout, capability) for layout in like] if is_deep(self.model) else []
        if not few and len(keys) > usable_cores():
            # What is left over is traced when it is asked for, on all cores, instead of on one.
            keys = keys[: len(keys) // usable_cores() * usable_cores()]
        jobs: list[Callable[[], DeepFootprint | Recording | None]] = []
        jobs += [partial(_attempted, self._trace, key) for key in keys]
        jobs += [partial(_attempted, self._record_few, key) for key in few]
        for key, one in zip(keys + few, run_in_copies(jobs), strict=True):
            if isinstance(one, DeepFootprint):
                self._found[key] = one
            elif one is not None:
                self._recorded[key] = one

    def step(self, layout: Layout, capability: Capability, *, like: Layout | None = None) -> Footprint:
        """Return the footprint of a step, from that of ranks like these if only sizes differ.

        Raises:
            AutobatchError: the step cannot be traced.
        """
        key = self._key(layout, capability)
        other = None if like is None else self._found.get(self._key(like, capability))
        return self._once(key, lambda: self._trace(key, other if isinstance(other, DeepFootprint) else None))

    def suggestions(self, layout: Layout, capability: Capability, spending: Spending) -> list[Remedy]:
        """Return the changes that help. A change is traced once for all GPUs that run it in the same way."""
        step, key = self.step(layout, capability), self._key(layout, capability)

        def trace(name: str, changed: Setting) -> Footprint:
            return self._once(key._replace(change=name), lambda: deep_footprint(changed))

        with self.setting(layout, capability) as setting:
            return find_suggestions(setting, step, spending, trace=trace)

    @contextmanager
    def setting(self, layout: Layout, capability: Capability, change: str = "") -> Iterator[Setting]:
        """Return what is traced, with a change that may help if it is named. Ranks exist in the block."""
        with ExitStack() as stack:
            arrange = None
            if layout.parallel == "shard":
                # Importing FSDP takes a second, which other estimates save.
                from autobatch.distributed.sharding.build import fake_ranks
                from autobatch.distributed.sharding.model import Sharding

                # This rank is rank 0 of a group that exchanges nothing.
                mesh = stack.enter_context(fake_ranks(layout.world))
                arrange = Sharding(mesh=mesh, sync=layout.sync, modules=layout.modules)
            made = Setting(
                workload=self.workload,
                model=self.model,
                batch_of=self.worst_case.batch,
                precision=precision_on(capability, self.options.device.precision),
                gradient_dtype=self.gradient_dtype,
                capability=capability,
                samples=self.whole_batch,
                arrange=arrange,
                world=1 if arrange else layout.world,
            )
            yield next((to(made) for name, _, to in changes_of(made) if name == change), made)

    def notes(self) -> Iterator[str]:
        """Yield remarks on the workload and its traces, one per line."""
        yield from self.worst_case.notes
        yield from self.build_notes
        yield from whole_batch_notes(self.workload, self.whole_batch)
        yield from gradient_sum_notes(self.model, self.gradient_dtype)
        for key, found in self._found.items():
            if not key.change and isinstance(found, DeepFootprint):
                yield from found.step.notes

    def _key(self, layout: Layout, capability: Capability, change: str = "") -> TraceKey:
        return TraceKey(layout, self._capabilities.setdefault(capability >= NATIVE_BF16, capability), change)

    def _once(self, key: TraceKey, trace: Callable[[], DeepFootprint]) -> Footprint:
        """Return the footprint of a key, or raise the error with which its trace failed."""
        if key not in self._found:
            try:
                self._found[key] = trace()
            except AutobatchError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, AutobatchError):
            raise found
        return found.step

    def _trace(self, key: TraceKey, like: DeepFootprint | None = None) -> DeepFootprint:
        with self.setting(*key) as setting:
            return deep_footprint(setting) if like is None else like.on(setting, self._recorded.get(key))

    def _record_few(self, key: TraceKey) -> Recording:
        with self.setting(*key) as setting:
            return record_few(setting)


def _attempted(trace: Callable[[TraceKey], T], key: TraceKey) -> T | None:
    """Trace a step; return None if that fails, maybe only because it shares a process with others."""
    try:
        return trace(key)
    except AutobatchError:
        return None


def on_meta(workload: Workload) -> tuple[nn.Module, list[str]]:
    """Build the workload's model without memory for its parameters, or on the CPU with a note.

    Returns:
        The model, and a remark if its constructor needs values.

    Raises:
        InputError: its constructor needs values, and the memory of this machine does not suffice for them.
    """
    try:
        with torch.device("meta"):
            return build_model(workload), []
    except InputError:
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    refused = f"the model cannot be built on the meta device ({reason})"
    try:
        model = build_model(workload)
    except Exception as error:
        if not is_oom(error):
            raise
        full = first_line(error).rstrip(".")
    else:
        size = format_bytes(sum(p.numel() * p.element_size() for p in model.parameters()))
        return model, [f"{refused}, so it was built on the CPU, where its parameters take {size}"]
    available = format_bytes(host_memory().available_bytes)
    raise InputError(
        f"{refused}, and not on the CPU either, where {available} are available ({full}): let its "
        "constructor read no values of tensors, so that it is built without memory"
    )
