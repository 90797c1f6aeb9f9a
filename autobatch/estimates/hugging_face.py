"""Estimates of Hugging Face models that are only named: from their configs, without weights, data or code.

The step is that of transformers' ``Trainer``: the loss that the model returns for its labels, in sequences of
one length. Weights have the type that the config states, as ``from_pretrained`` loads them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autobatch.core.errors import InputError
from autobatch.core.options import Options
from autobatch.core.text import LONGEST_VALUE, cut, error_text, one_line, printable, quoted
from autobatch.workload.contract import Workload
from autobatch.workload.user_code import NAMED_MODEL

USUAL_SEQUENCE = 2048
"""Tokens of a sequence if none is asked for and the model takes as many."""
USUAL_IMAGE = 224
"""Height and width of an image if the config states none, as for ResNet."""
LEARNING_RATE = 1e-4
"""Any rate: no memory depends on it."""
PAST_PADDING = ("roberta", "camembert", "longformer", "mpnet")
"""Parts of the model types that count positions from past that of the padding, which is the second one."""
TEXT, CLASSES, IMAGES, SPEECH = "text", "classes of text", "images", "speech"
HEADS = {
    "ForCausalLM": ("AutoModelForCausalLM", TEXT),
    "LMHeadModel": ("AutoModelForCausalLM", TEXT),
    "ForMaskedLM": ("AutoModelForMaskedLM", TEXT),
    "ForSequenceClassification": ("AutoModelForSequenceClassification", CLASSES),
    "ForTokenClassification": ("AutoModelForTokenClassification", TEXT),
    "ForImageClassification": ("AutoModelForImageClassification", IMAGES),
    "ForConditionalGeneration": ("AutoModelForSeq2SeqLM", TEXT),
    "WhisperForConditionalGeneration": ("AutoModelForSpeechSeq2Seq", SPEECH),
}
"""Ends of architectures that are known, the longest last: the class of transformers that builds each, and the
kind of its samples."""
INPUTS = {TEXT: "input_ids", CLASSES: "input_ids", IMAGES: "pixel_values", SPEECH: "input_features"}
"""First input of a model, by the kind of its samples."""
OWN_HEADS = ("ForMaskedLM", "ForCausalLM", "ForImageClassification")
"""Heads to train a model with whose config names none, the first that transformers has for it."""


def open_named(reference: str, asked: Options) -> tuple[Workload, str]:
    """Return the training of ``hf:NAME_OR_FOLDER`` as a workload of two samples, described in one line.

    Raises:
        InputError: there is no such model, its kind is unknown, or it takes no sequence like that.
    """
    task = Task.of(load_config(reference.removeprefix(NAMED_MODEL)), reference)
    sample, size = task.sample(asked.sequence)
    workload = Workload(
        model=partial(task.build, asked),
        train_data=[sample, sample],
        loss=own_loss,
        optimizer=fused_adamw,
        learning_rate=LEARNING_RATE,
        name=Path(reference.removeprefix(NAMED_MODEL)).name,
    )
    trained = "all weights" if asked.lora is None else f"adapters of rank {asked.lora} (LoRA)"
    blocks = ", each block recomputed" if asked.checkpointing else ""
    dtype = str(task.dtype).removeprefix("torch.")
    about = f"{task.architecture}: {trained} in {dtype}, {size}, fused AdamW{blocks}"
    return workload, about


def load_config(name: str) -> Any:
    """Load the config of a model from a folder or from the hub. No code of the model's own is run.

    Raises:
        InputError: transformers is not installed, or there is no such config.
    """
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            f"{NAMED_MODEL}{name} needs transformers ({error}): pip install transformers"
        ) from None
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        shown = printable(name, limit=LONGEST_VALUE)
        reason = one_line(error_text(error, first_line=True), limit=250)
        raise InputError(
            f"{NAMED_MODEL}{shown} has no config that transformers can read ({reason}): give a "
            "folder with its config.json, or check the name, the network and hf auth login"
        ) from None


class Task(NamedTuple):
    """The way in which a model is trained, by its config."""

    config: Any
    architecture: str
    builder: str
    """Class of transformers that builds it."""
    kind: str
    """Kind of its samples, a key of `INPUTS`."""

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
            heads = [found for head, found in HEADS.items() if name.endswith(head)]
            model = getattr(transformers, name, None)
            if heads and model is not None and model.main_input_name == INPUTS[heads[-1][1]]:
                return cls(config, name, *heads[-1])
        raise InputError(
            f"{cut(reference, LONGEST_VALUE)} is {quoted(first)} of model type {quoted(config.model_type)}; "
            "known here is the training of text alone, of images, and of speech as Whisper's: write a "
            "workload for it"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, float32 if the config states none."""
        found = getattr(self.config, "dtype", None)
        return found if isinstance(found, torch.dtype) else torch.float32

    def sample(self, sequence: int | None) -> tuple[dict[str, Tensor], str]:
        """Return a sample with its labels, and its size in words.

        Raises:
            InputError: the model takes no such sequence.
        """
        config, label = self.config, torch.tensor(0, device="cpu")
        if self.kind == IMAGES:
            if sequence is not None:
                raise InputError(f"{self.architecture} takes images, found a sequence of {sequence:,} tokens")
            size = getattr(config, "image_size", None) or USUAL_IMAGE
            height, width = (size, size) if isinstance(size, int) else size
            image = torch.zeros(getattr(config, "num_channels", 3), height, width, device="cpu")
            return {"pixel_values": image, "labels": label}, f"images of {height} × {width}"
        name = "max_target_positions" if self.kind == SPEECH else "max_position_embeddings"
        longest = getattr(config, name, None)
        if longest and any(part in config.model_type for part in PAST_PADDING):
            longest -= 2
        if sequence is not None and sequence > (longest or math.inf):
            raise InputError(f"{self.architecture} takes {longest:,} tokens at most, found {sequence:,}")
        count = sequence or min(longest or USUAL_SEQUENCE, USUAL_SEQUENCE)
        tokens = torch.zeros(count, dtype=torch.long, device="cpu")
        if self.kind == SPEECH:
            frames = 2 * config.max_source_positions
            features = torch.zeros(config.num_mel_bins, frames, device="cpu")
            return {"input_features": features, "labels": tokens}, f"{frames:,} frames and {count:,} tokens"
        labels = label if self.kind == CLASSES else tokens
        return {"input_ids": tokens, "labels": labels}, f"sequences of {count:,} tokens"

    def build(self, options: Options) -> nn.Module:
        """Build the model with random weights, or without any on the meta device.

        Raises:
            InputError: a package for an option is missing, or the model cannot be recomputed.
        """
        import transformers

        config = self.config
        config.use_cache = False  # no training reads the keys and values of earlier tokens
        # Without them some models take no batch. Scripts set them, and no memory depends on which they are.
        needed = ["decoder_start_token_id", "pad_token_id"] if config.is_encoder_decoder else []
        for name in needed or ["pad_token_id"] * (self.kind == CLASSES):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)
        with warnings.catch_warnings():
            # The libraries warn of each other's old names, which no user can change.
            warnings.simplefilter("ignore", FutureWarning)
            model: Any = getattr(transformers, self.builder).from_config(config, dtype=self.dtype)
            if options.lora is not None:
                try:
                    from peft import LoraConfig, get_peft_model
                except ImportError as error:
                    raise InputError(f"--lora needs peft ({error}): pip install peft") from None
                model = get_peft_model(model, LoraConfig(r=options.lora, target_modules="all-linear"))
            if options.checkpointing:
                # transformers 5.2x renames it, and warns of the old name.
                new = getattr(model, "activation_checkpointing_enable", None)
                try:
                    (new or model.gradient_checkpointing_enable)({"use_reentrant": False})
                except ValueError as error:
                    raise InputError(f"--checkpointing: {one_line(str(error))}") from None
        made: nn.Module = model.train()
        return made


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss that the model computes itself."""
    loss: Tensor = model(**batch).loss
    return loss


def fused_adamw(params: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    """Build the usual optimizer for the parameters that are trained."""
    return torch.optim.AdamW([one for one in params if one.requires_grad], lr=learning_rate, fused=True)
