"""Estimates of models that are only named: their configs suffice, and what cannot be read is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import autobatch
from autobatch import InputError
from autobatch.workload.user_code import check_reference
from tests.support.configs import CONFIGS, config_folder

pytest.importorskip("transformers")
GPUS = ["t4", "v100-16gb"]
"""Two, so that no changes are traced that would let more fit."""


def estimate(place: Path, **options: Any):
    return autobatch.estimate(f"hf:{place}", profile=GPUS, **{"memory_budget": "64MiB", **options})


def weights_of(place: Path) -> int:
    """Count the weights of a model that transformers builds by itself."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(place)
    with torch.device("meta"):
        return sum(one.numel() for one in getattr(transformers, config.architectures[0])(config).parameters())


@pytest.mark.parametrize(
    "name",
    [name if name == "bert" else pytest.param(name, marks=pytest.mark.program) for name in CONFIGS],
)
def test_a_config_is_enough(tmp_path: Path, name: str) -> None:
    place = config_folder(tmp_path, name)
    found = estimate(place)
    one = found.estimates[0]
    assert one.micro_batch > 1
    itemsize = 2 if "torch_dtype" in CONFIGS[name] else 4
    # The allocator rounds each tensor up to 512 bytes.
    assert 1 <= one.memory["parameters"] / (itemsize * weights_of(place)) < 1.2
    assert CONFIGS[name]["architectures"][0] in found.notes[0]


@pytest.mark.program
def test_the_sequence_the_optimizer_and_adapters_are_counted(tmp_path: Path) -> None:
    place = config_folder(tmp_path, "qwen3", num_hidden_layers=1)
    weights = weights_of(place)

    def at(**options: Any):
        return estimate(place, micro_batch=4, precision="fp32", **options).estimates[0]

    usual = at(sequence=64)
    assert at(sequence=128).peak_allocated_bytes > usual.peak_allocated_bytes
    assert at(sequence=64, checkpointing=True).memory["activations"] < usual.memory["activations"]
    assert 1 <= usual.memory["optimizer state"] / (8 * weights) < 1.2
    pytest.importorskip("peft")
    adapted = at(sequence=64, lora=2)
    assert adapted.memory.get("gradients", 0) < usual.memory["gradients"] / 5
    assert adapted.memory["parameters"] > usual.memory["parameters"]


ROBERTA = {"architectures": ["RobertaForMaskedLM"], "model_type": "roberta", "pad_token_id": 1}
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("llama", {}, {"sequence": 257}, "LlamaForCausalLM takes 256 tokens at most, found 257"),
    ("vit", {}, {"sequence": 16}, "takes images, found a sequence of 16 tokens"),
    ("llama", {"model_type": "llamma"}, {}, "has model type `llamma` but Transformers does not recognize"),
    ("llama", {"architectures": ["LlamaForQuestionAnswering"]}, {}, "LlamaForQuestionAnswering' of model"),
    ("bert", ROBERTA, {"sequence": 127}, "RobertaForMaskedLM takes 126 tokens at most, found 127"),
    ("llama", {"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, {}, "contains custom code"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "options", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_trained_by_its_config_is_one_line(
    tmp_path: Path, name: str, changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as raised:
        estimate(config_folder(tmp_path, name, **changes), **options)
    assert said in str(raised.value)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 500


def test_missing_configs_and_names_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (tmp_path, "", ".", "./nowhere", "nobody/nothing", "a/b/c", "~"):
        with pytest.raises(InputError, match="check the name, the network and hf auth login") as raised:
            autobatch.estimate(f"hf:{name}", profile=GPUS)
        assert str(raised.value).isprintable()
    with pytest.raises(InputError, match=r"no profile 'h1000': known are .*'?h100-80gb"):
        autobatch.estimate(f"hf:{config_folder(tmp_path, 'bert')}", profile=["h1000"])


def test_only_an_estimate_takes_a_name_and_only_a_name_takes_its_options(tmp_path: Path) -> None:
    place = config_folder(tmp_path, "bert")
    with pytest.raises(InputError, match="which only autobatch estimate takes"):
        autobatch.probe(f"hf:{place}")
    # A module called hf is named as a file.
    module = tmp_path / "hf.py"
    module.write_text("")
    assert check_reference(f"{module}:workload") == (str(module), "workload")
    with pytest.raises(InputError, match="--sequence 16, --lora 4: only autobatch estimate hf:NAME"):
        autobatch.estimate(sequence=16, lora=4, profile=GPUS)
