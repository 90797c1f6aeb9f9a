"""Estimates of Hugging Face models that are only named: from their configs, without weights, data or code.

The step is that of transformers' ``Trainer``: the loss that the model returns for its labels, in sequences of
one length. Weights have the type that the config states, as ``from_pretrained`` loads them.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.core.options import ModelOptions, Options
from autobatch.core.records import Estimate
from autobatch.core.text import LONGEST_VALUE, error_text, one_line, printable
from autobatch.core.units import format_bytes
from autobatch.estimates.estimator import estimate_limits
from autobatch.footprint.tracing.apart import without_collections
from autobatch.report.result import Estimates
from autobatch.workload.contract import Workload
from autobatch.workload.reference import NAMED_MODEL

USUAL_SEQUENCE = 2048
"""Tokens of a sequence if none is asked for and the model takes as many."""
USUAL_IMAGE = 224
"""Height and width of an image if the config states none, as for ResNet."""
LEARNING_RATE = 1e-4
"""Any rate: no memory depends on it."""
HUB_TIMEOUT_S = 5.0
HEADS = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForTokenClassification": "AutoModelForTokenClassification",
    "ForImageClassification": "AutoModelForImageClassification",
    "ForSpeechSeq2Seq": "AutoModelForSpeechSeq2Seq",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
}
"""Ends of architectures that are known, and the class of transformers that builds each."""
OWN_HEADS = ("ForMaskedLM", "ForCausalLM", "ForImageClassification")
"""Heads to train a model with whose config names none, the first that transformers has for it."""
BLOCK_8BIT, SMALLEST_8BIT = 256, 4096
"""Elements that share a factor, and those of the smallest tensor in 8 bits, as in ``init_state`` of
bitsandbytes/optim/optimizer.py."""


def refuse_model_options(workload: object, options: ModelOptions) -> None:
    """Refuse the options of a named model for a workload whose code says all that itself.

    Raises:
        InputError: one is given.
    """
    usual = msgspec.structs.asdict(ModelOptions())
    given = [
        f"{name} {value}" for name, value in msgspec.structs.asdict(options).items() if value != usual[name]
    ]
    if given:
        found = "the demo" if workload is None else workload if isinstance(workload, str) else "a Workload"
        raise InputError(
            f"{', '.join(given)}: only autobatch estimate {NAMED_MODEL}NAME takes that, found "
            f"{found}: change its model, data or optimizer in its code"
        )


def estimate_named(reference: str, options: Options, *, home: Path) -> Estimates:
    """Predict what fits of ``hf:NAME_OR_FOLDER``, by its config alone.

    Args:
        reference: ``hf:`` and a folder with a ``config.json``, or a name on the Hugging Face hub.
        options: those of ``estimate``.
        home: the data directory.

    Raises:
        InputError: there is no such model, its kind is unknown, or it takes no sequence like that.
        DoesNotFitError: not even a micro-batch of 1 fits on any of the GPUs.
    """
    named = open_named(reference, options.model)
    found = estimate_limits(named.workload, options, home=home)
    notes = [named.about, compare_with_weights(found.estimates[0], named.parameters), *found.notes]
    return msgspec.structs.replace(found, notes=notes)


class Named(NamedTuple):
    """A named model as a workload."""

    workload: Workload
    about: str
    """What is trained, and how, in one line."""
    parameters: int
    """Of the model without adapters."""


def open_named(reference: str, asked: ModelOptions) -> Named:
    """Return the training of ``hf:NAME_OR_FOLDER`` as a workload of two samples.

    Raises:
        InputError: there is no such model, its kind is unknown, or it takes no sequence like that.
    """
    with without_collections():  # transformers is imported
        config = load_config(reference.removeprefix(NAMED_MODEL))
        task = Task.of(config, reference)
        model = build_on_meta(task, reference)
    sample, size = task.sample(asked.sequence, model)
    workload = Workload(
        model=partial(build, task, asked),
        train_data=[sample, sample],
        loss=own_loss,
        optimizer=partial(make_optimizer, asked.optimizer),
        learning_rate=LEARNING_RATE,
        name=Path(reference.removeprefix(NAMED_MODEL)).name,
    )
    trained = "all weights" if asked.lora is None else f"adapters of rank {asked.lora} (LoRA)"
    blocks = ", each block recomputed" if asked.checkpointing else ""
    dtype = str(dtype_of(config)).removeprefix("torch.")
    about = f"{task.architecture}: {trained} in {dtype}, {size}, {OPTIMIZERS[asked.optimizer]}{blocks}"
    return Named(workload, about, sum(one.numel() for one in model.parameters()))


def compare_with_weights(one: Estimate, parameters: int) -> str:
    """Describe how the memory of a step differs from the rule of thumb for weights and Adam.

    ``accelerate estimate-memory`` prints 4 times the weights in float32 for training: weights, gradients and
    Adam's state (``estimate_training_usage`` in accelerate/commands/estimate.py).
    """
    held = sum(one.memory.get(kind, 0) for kind in ("parameters", "gradients", "optimizer state", "buffers"))
    rest = sum(one.memory.values()) - held
    return (
        f"accelerate estimate-memory: {format_bytes(16 * parameters)} (4 × the weights in float32). Here, on "
        f"{one.profile}: {format_bytes(held)} of weights, gradients and optimizer, and "
        f"{format_bytes(rest)} of all else at a micro-batch of {max(1, one.micro_batch):,}"
    )


def load_config(name: str) -> Any:
    """Load the config of a model from a folder or from the hub. No code of the model's own is run.

    Raises:
        InputError: transformers is not installed, or there is no such config.
    """
    try:
        import transformers
        from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
        from huggingface_hub.utils import logging as hub_logging
    except ImportError as error:
        raise InputError(
            f"{NAMED_MODEL}{name} needs transformers ({error}): pip install transformers"
        ) from None
    shown = printable(name, limit=LONGEST_VALUE) or "."
    if Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise InputError(f"the folder {shown} has no config.json: give one that has, or a name on the hub")
    instead = "or give a folder with its config.json"
    out_of_reach = f"is no folder here, and the hub cannot be reached: check the network, {instead}"
    try:
        # Asked once: without an answer, the client behind from_pretrained tries for 24 seconds.
        if not Path(name).is_dir() and not try_to_load_from_cache(name, "config.json"):
            get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_TIMEOUT_S)
    except (errors.HfHubHTTPError, errors.HFValidationError):
        pass  # below, from_pretrained gets the same answer, with its cause
    except Exception:
        raise InputError(f"{NAMED_MODEL}{shown} {out_of_reach}") from None
    verbosity = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)  # without a network it tells of every attempt
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        cause = error.__cause__ or error
        if isinstance(cause, errors.GatedRepoError):
            reason = f"is gated: ask for access on its page and run hf auth login, {instead}"
        elif isinstance(cause, errors.LocalEntryNotFoundError):
            reason = out_of_reach
        elif isinstance(cause, errors.RepositoryNotFoundError | errors.HFValidationError):
            reason = f"is no folder here and no model on the hub: check the name, {instead}"
        else:
            version = transformers.__version__
            reason = f"has no config that transformers {version} can read ({one_line(error_text(error))})"
        raise InputError(f"{NAMED_MODEL}{shown} {reason}") from None
    finally:
        hub_logging.set_verbosity(verbosity)


def dtype_of(config: Any) -> torch.dtype:
    """Return the type of the weights, float32 if the config states none."""
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.float32


class Task(NamedTuple):
    """The way in which a model is trained, by its config."""

    config: Any
    architecture: str
    builder: str
    """Class of transformers that builds it."""

    @classmethod
    def of(cls, config: Any, reference: str) -> Task:
        """Find the task in the name of the architecture.

        Raises:
            InputError: it is none of those that are known.
        """
        import transformers

        (first, *_) = config.architectures or [f"{type(config).__name__.removesuffix('Config')}Model"]
        stem = first.removesuffix("Model").removesuffix("ForPreTraining")
        others = [stem + head for head in OWN_HEADS] if stem != first and "LMHead" not in first else []
        for name in (first, *others):
            head = next((one for one in HEADS if name.endswith(one)), None)
            if head is None or not hasattr(transformers, name):
                continue
            takes = getattr(transformers, name).main_input_name
            if takes == "input_features" and hasattr(config, "num_mel_bins") and config.is_encoder_decoder:
                return cls(config, name, HEADS["ForSpeechSeq2Seq"])
            expected = "pixel_values" if head == "ForImageClassification" else "input_ids"
            if takes == expected and (head != "ForConditionalGeneration" or config.is_encoder_decoder):
                return cls(config, name, HEADS[head])
        raise InputError(
            f"{reference} is {first} (model type {config.model_type}), which is trained in no way that is "
            f"known here: of models of text alone, of images, and of speech as Whisper's, known are "
            f"architectures that end in {', '.join(HEADS)}. Write a workload for it"
        )

    def sample(self, sequence: int | None, model: nn.Module) -> tuple[dict[str, Tensor], str]:
        """Return a sample with its labels for a model, and its size in words.

        Raises:
            InputError: the model takes no such sequence.
        """
        config = self.config
        if self.builder == "AutoModelForImageClassification":
            if sequence is not None:
                raise InputError(f"{self.architecture} takes images, found a sequence of {sequence:,} tokens")
            height, width = _pair(getattr(config, "image_size", None) or USUAL_IMAGE)
            image = torch.zeros(getattr(config, "num_channels", 3), height, width, device="cpu")
            return {
                "pixel_values": image,
                "labels": torch.tensor(0, device="cpu"),
            }, f"images of {height} × {width}"
        is_speech = self.builder == "AutoModelForSpeechSeq2Seq"
        longest = getattr(config, "max_target_positions" if is_speech else "max_position_embeddings", None)
        longest = _positions_past_padding(model) or longest
        if sequence is not None and sequence > (longest or math.inf):
            raise InputError(f"{self.architecture} takes {longest:,} tokens at most, found {sequence:,}")
        count = sequence or min(longest or USUAL_SEQUENCE, USUAL_SEQUENCE)
        tokens = torch.zeros(count, dtype=torch.long, device="cpu")
        if is_speech:
            frames = 2 * config.max_source_positions
            features = torch.zeros(config.num_mel_bins, frames, device="cpu")
            return {"input_features": features, "labels": tokens}, f"{frames:,} frames and {count:,} tokens"
        labels = tokens
        if self.builder == "AutoModelForSequenceClassification":
            labels = torch.tensor(0.0 if config.num_labels == 1 else 0, device="cpu")
            if config.problem_type == "multi_label_classification":
                labels = torch.zeros(config.num_labels, device="cpu")
        return {"input_ids": tokens, "labels": labels}, f"sequences of {count:,} tokens"


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _positions_past_padding(model: nn.Module) -> int | None:
    """Return the tokens that have positions, where they count from past the padding (RoBERTa)."""
    for name, one in model.named_modules():
        if isinstance(one, nn.Embedding) and name.endswith("position_embeddings"):
            return None if one.padding_idx is None else one.num_embeddings - one.padding_idx - 1
    return None


def build_on_meta(task: Task, reference: str) -> nn.Module:
    """Build the model without weights and adapters.

    Raises:
        InputError: transformers cannot build it.
    """
    try:
        with torch.device("meta"):
            return build(task, ModelOptions())
    except Exception as error:
        reason = one_line(error_text(error))
        raise InputError(
            f"{reference}: transformers cannot build {task.architecture} from this config ({reason})"
        ) from None


def build(task: Task, options: ModelOptions) -> nn.Module:
    """Build the model with random weights, or without any on the meta device."""
    with warnings.catch_warnings():
        # The libraries warn of each other's old names, which no user can change.
        warnings.simplefilter("ignore", FutureWarning)
        return _built(task, options)


def _built(task: Task, options: ModelOptions) -> nn.Module:
    import transformers

    config = task.config
    config.use_cache = False  # no training reads the keys and values of earlier tokens
    # Without them some models take no batch. Scripts set them, and no memory depends on which they are.
    needed = ["decoder_start_token_id"] * config.is_encoder_decoder
    needed += ["pad_token_id"] * (
        config.is_encoder_decoder or task.builder == "AutoModelForSequenceClassification"
    )
    for name in needed:
        if getattr(config, name, None) is None:
            setattr(config, name, 0)
    model: Any = getattr(transformers, task.builder).from_config(config, dtype=dtype_of(config))
    if options.lora is not None:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise InputError(f"--lora needs peft ({error}): pip install peft") from None
        model = get_peft_model(model, LoraConfig(r=options.lora, target_modules="all-linear"))
    if options.checkpointing:
        # transformers 5.2x renames it, and warns of the old name.
        switch = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        try:
            switch({"use_reentrant": False})
        except ValueError as error:
            raise InputError(f"--checkpointing: {one_line(str(error))}") from None
    assert isinstance(model, nn.Module)
    return model.train()


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that the model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


OPTIMIZERS = {
    "adamw": "fused AdamW",
    "adamw8bit": "AdamW in 8 bits (as in bitsandbytes)",
    "sgd": "SGD without momentum",
    "adafactor": "Adafactor",
}


def make_optimizer(name: str, params: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Build an optimizer by its name, for the parameters that are trained."""
    trained = [one for one in params if one.requires_grad]
    if name == "adamw8bit":
        return AdamW8bitMemory(trained, {"lr": learning_rate})
    if name == "sgd":
        return torch.optim.SGD(trained, lr=learning_rate, fused=True)
    if name == "adafactor":
        return torch.optim.Adafactor(trained, lr=learning_rate)
    return torch.optim.AdamW(trained, lr=learning_rate, fused=True)


class AdamW8bitMemory(torch.optim.Optimizer):
    """The memory of bitsandbytes' ``AdamW8bit``: its state, and an update in place. It trains nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make the state of each parameter, and write to it as the kernel does."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                if not self.state[one]:
                    self.state[one] = self._state_of(one)
                one.add_(one.grad, alpha=-group["lr"])

    def _state_of(self, one: Tensor) -> dict[str, Tensor]:
        is_small = one.numel() < SMALLEST_8BIT
        dtype = torch.float32 if is_small else torch.uint8
        state = {name: torch.zeros_like(one, dtype=dtype) for name in ("state1", "state2")}
        if not is_small:
            blocks = math.ceil(one.numel() / BLOCK_8BIT)
            for name in ("absmax1", "absmax2"):
                state[name] = torch.zeros(blocks, dtype=torch.float32, device=one.device)
        return state
