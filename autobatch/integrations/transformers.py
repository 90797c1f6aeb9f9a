"""Hugging Face ``transformers``: plan for a ``Trainer``, and set its arguments.

    from autobatch.integrations.transformers import plan

    trainer = Trainer(model, TrainingArguments("out"), train_dataset=dataset)
    print(plan(trainer, target_batch=16))
    trainer.train()

Everything is taken from the ``Trainer``: model (with PEFT), data and collator, ``compute_loss`` with
``num_items_in_batch``, optimizer, precision, clipping and activation checkpointing.

Its loop is less exact than autobatch, as the notes of the plan and ``docs/loops.md`` say.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import deque
from functools import partial
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.core.options import Keywords
from autobatch.integrations.library_plan import (
    LibraryLoop,
    float32_outputs,
    on_host,
    plan_for,
    rebuilt,
)
from autobatch.report.result import PlanResult
from autobatch.workload.contract import Collated, Loss, Workload, parts_of
from autobatch.workload.data import load_micro_batch
from autobatch.workload.nested import to_device
from autobatch.workload.rng import preserved_random_state
from autobatch.workload.streams import scanned
from autobatch.workload.user_code import user_code

__all__ = ["plan", "workload"]

MOST_ITEMS = 1000
"""Items of a list or dictionary above which it counts as data, which no loss writes."""


def plan(trainer: Any, *, target_batch: int, **options: Unpack[Keywords]) -> PlanResult:
    """Plan for a ``Trainer``, and set its batch size, accumulation steps and learning rate.

    An optimizer that the trainer was given keeps its own learning rate.

    Args:
        trainer: before ``train()``.
        target_batch: samples per optimizer step, over all ranks.
        options: those of `autobatch.plan`, such as ``memory_budget``. Precision,
            clipping and device are the trainer's.

    Raises:
        InputError: an option is invalid, or the trainer runs in a way that a plan cannot describe.
        DoesNotFitError: not even a micro-batch of 1 fits.
    """
    args = trainer.args
    _check(trainer)
    options.setdefault("precision", "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32")
    options.setdefault("max_grad_norm", args.max_grad_norm or None)
    copied = _copied(trainer)
    is_scaled, remarks = _ask_for_scaling(copied)
    if remarks:
        trainer.loss_is_scaled_for_ga = copied.loss_is_scaled_for_ga = is_scaled
    loop = LibraryLoop(
        name="Trainer",
        world_size=args.world_size,
        device=args.device,
        divides_by_plan=False,
        averages_means=not is_scaled,
        sets_rate=trainer.optimizer is None,
        remarks=remarks,
    )
    with on_host(trainer.model):
        copied.model = _prepared(copy.deepcopy(trainer.model), args)
        if (own := trainer.optimizer) is not None:
            copied.optimizer = rebuilt(getattr(own, "optimizer", own), trainer.model, copied.model)
        planned = plan_for(workload(copied), loop, target_batch, **options)
    args.per_device_train_batch_size = planned.micro_batch
    args.gradient_accumulation_steps = planned.accumulation_steps
    if trainer.optimizer is None:
        args.learning_rate = planned.learning_rate
    trainer._train_batch_size = args.train_batch_size
    made = trainer.get_train_dataloader()
    size = getattr(made, "total_batch_size", getattr(made, "batch_size", None))  # accelerate counts all ranks
    if size not in (None, planned.micro_batch, planned.micro_batch * args.world_size):
        raise InputError(
            f"get_train_dataloader made a loader of {size} samples, after per_device_train_batch_size was "
            f"set to {planned.micro_batch}: let it read self.args.per_device_train_batch_size"
        )
    return planned


def workload(trainer: Any) -> Workload:
    """Build the workload that a ``Trainer`` trains, for `autobatch.estimate` for example.

    Raises:
        InputError: the trainer has no training data.
    """
    if trainer.train_dataset is None:
        raise InputError("the Trainer has no train_dataset: give it one before you plan")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a batch size that is about to change
        parts = parts_of(trainer.get_train_dataloader())
    own = trainer.optimizer

    def optimizer(model: nn.Module, _: float) -> Any:
        if own is not None:
            return rebuilt(getattr(own, "optimizer", own), trainer.model, model)
        maker = copy.copy(trainer)  # which keeps the model and the optimizer
        maker.model = model
        return maker.create_optimizer()

    rate = trainer.args.learning_rate
    if own is not None:
        group = own.param_groups[0]
        rate = group.get("initial_lr", group["lr"])  # a schedule may have changed it
    return Workload(
        model=lambda: trainer.model,
        train_data=parts["train_data"],
        collate=parts["collate"],
        loss=partial(_loss, trainer),
        optimizer=optimizer,
        learning_rate=float(rate),
        name=type(trainer.model).__name__,
    )


def _copied(trainer: Any) -> Any:
    """Return a copy of a trainer that logs nothing, and keeps to itself what its loss keeps.

    It counts as if its rank were alone, because others probe other samples, or none.
    """
    copied = copy.copy(trainer)
    for name, value in vars(trainer).items():
        if isinstance(value, list | dict | set | deque) and len(value) <= MOST_ITEMS:
            setattr(copied, name, copy.deepcopy(value))
    copied.args = copy.copy(trainer.args)
    copied.args.average_tokens_across_devices = False
    copied.log = lambda *_, **__: None
    return copied


def _prepared(model: nn.Module, args: Any) -> nn.Module:
    """Let a model checkpoint its activations if the arguments ask for it, as ``train()`` does."""
    word = "activation" if hasattr(args, "activation_checkpointing") else "gradient"
    enable = getattr(model, f"{word}_checkpointing_enable", None)
    if getattr(args, f"{word}_checkpointing") and enable is not None:
        kwargs = dict(getattr(args, f"{word}_checkpointing_kwargs") or {})
        more = {name: kwargs.pop(name) for name in ("every_n_layers", "offload") if name in kwargs}
        enable(**{f"{word}_checkpointing_kwargs": kwargs or None}, **more)
    return model


def _loss(trainer: Any, model: nn.Module, inputs: Any) -> Tensor | Loss:
    """Return the loss of a micro-batch as a sum and the count that ``num_items_in_batch`` is made of."""
    count = _count(trainer, inputs)
    if count is None or not _is_scaled(trainer, count):
        return _compute(trainer, model, inputs, count)
    return Loss(_compute(trainer, model, inputs, 1), count)


def _compute(trainer: Any, model: nn.Module, inputs: Any, count: Any) -> Tensor:
    with float32_outputs(model, trainer.accelerator):
        # compute_loss may remove the labels from its inputs.
        loss: Tensor = trainer.compute_loss(model, dict(inputs), num_items_in_batch=count)
    return loss


def _count(trainer: Any, inputs: Collated) -> Any:
    """Return ``num_items_in_batch`` of a micro-batch; None if the trainer counts none."""
    device = next((p.device for p in trainer.model.parameters()), None)
    return trainer.get_batch_samples(iter([inputs]), 1, device)[1]


def _is_scaled(trainer: Any, count: Any) -> bool:
    """Check whether the trainer leaves the loss as it is, because it is divided by the count already."""
    told = getattr(trainer, "loss_is_scaled_for_ga", None)
    if told is not None:
        return bool(told)
    return (trainer.model_accepts_loss_kwargs and count is not None) or trainer.compute_loss_func is not None


def _ask_for_scaling(trainer: Any) -> tuple[bool, list[str]]:
    """Find out whether ``compute_loss`` divides by what the whole batch holds, as many models do not.

    It gets two samples, first as the whole batch, then as the half of one.

    Returns:
        True if it does, and a remark if the trainer takes the loss for another kind.
    """
    two = scanned(workload(trainer), most=2)
    asked, model, losses = copy.copy(trainer), trainer.model, []
    asked.args = copy.copy(trainer.args)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with user_code("loss"), preserved_random_state(), trainer.compute_loss_context_manager():
            inputs = load_micro_batch(two, range(min(2, len(two.train_data))))
            inputs = to_device(inputs, next(p.device for p in model.parameters()))
            count = _count(asked, inputs)
            model.eval()
            for parts in (1, 2):
                asked.current_gradient_accumulation_steps = asked.args.gradient_accumulation_steps = parts
                with torch.no_grad(), preserved_random_state():
                    whole = None if count is None else count * parts
                    losses.append(float(_compute(asked, model, inputs, whole)))
    finally:
        for module, is_training in modes:
            module.training = is_training
    is_taken_as_scaled = _is_scaled(trainer, count)
    if not losses[0] or not math.isfinite(losses[0]):
        return is_taken_as_scaled, []
    is_scaled = not math.isclose(*losses, rel_tol=1e-4)
    if is_scaled == is_taken_as_scaled:
        return is_scaled, []
    does, so = ("divides by", "added up") if is_scaled else ("ignores", "averaged")
    return is_scaled, [
        f"the losses of micro-batches are {so}, because compute_loss {does} num_items_in_batch: "
        f"trainer.loss_is_scaled_for_ga = {is_scaled} was set"
    ]


def _check(trainer: Any) -> None:
    """Raise if the trainer runs in a way that a plan of one device cannot describe."""
    args = trainer.args
    ways = {
        f"DataParallel over {args.n_gpu} GPUs in one process (start it with torchrun)": args.n_gpu > 1,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "auto_find_batch_size": args.auto_find_batch_size,
    }
    unknown = [name for name, is_on in ways.items() if is_on]
    if unknown:
        raise InputError(f"autobatch cannot plan for a Trainer with {' and '.join(unknown)}: turn it off")
