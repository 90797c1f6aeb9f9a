"""Estimates of models that are only named: their configs suffice, and what cannot be read is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

import autobatch
from autobatch import InputError
from autobatch.workload.reference import check_reference
from tests.support.commandline import autobatch as command
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
    ("llama", {"model_type": "llamma"}, {}, "model type"),
    ("llama", {"architectures": ["LlamaForQuestionAnswering"]}, {}, "known are architectures that end in"),
    ("bert", ROBERTA, {"sequence": 127}, "RobertaForMaskedLM takes 126 tokens at most, found 127"),
    ("bert", {"hidden_size": 63}, {}, "transformers cannot build BertForMaskedLM from this config"),
    ("bert", {"architectures": ["Wav2Vec2ForSequenceClassification"], "model_type": "wav2vec2"}, {},
     "of models of text alone"),
    ("llama", {"hidden_size": "wide"}, {}, "has no config that transformers"),
    ("llama", {"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, {}, "has no config that"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "options", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_trained_by_its_config_is_one_line(
    tmp_path: Path, name: str, changes: dict[str, Any], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as raised:
        estimate(config_folder(tmp_path, name, **changes), **options)
    assert said in str(raised.value)
    assert str(raised.value).isprintable()


BERT_CLASSES = {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
ODD: list[tuple[str, dict[str, Any], str]] = [
    # Positions count from past the padding: 128 rows leave 126 tokens.
    ("bert", ROBERTA, "126 tokens"),
    ("bert", {**BERT_CLASSES, "problem_type": "multi_label_classification"}, "128 tokens"),
    ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "256 tokens"),
    ("bert", {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_kv": 16,
              "num_hidden_layers": 1}, "128 tokens"),
    ("vit", {"architectures": ["ResNetForImageClassification"], "model_type": "resnet", "hidden_size": 8,
             "image_size": None, "embedding_size": 8, "hidden_sizes": [8, 8], "depths": [1, 1]}, "224 × 224"),
]  # fmt: skip


@pytest.mark.program
@pytest.mark.parametrize(("name", "changes", "size"), ODD, ids=range(len(ODD)))
def test_what_a_config_leaves_open_is_set(
    tmp_path: Path, name: str, changes: dict[str, Any], size: str
) -> None:
    found = estimate(config_folder(tmp_path, name, **changes), micro_batch=2, memory_budget="256MiB")
    assert changes["architectures"][0] in found.notes[0]
    assert size in found.notes[0]


def test_missing_configs_and_names_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"the folder .* has no config\.json"):
        estimate(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="is no folder here, and the hub cannot be reached"):
        autobatch.estimate("hf:nobody/nothing", profile=GPUS)
    with pytest.raises(InputError, match="is no folder here and no model on the hub"):
        autobatch.estimate("hf:a/b/c", profile=GPUS)
    with pytest.raises(InputError, match="no profile 'h1000': did you mean 'h100-80gb'"):
        autobatch.estimate(f"hf:{config_folder(tmp_path, 'bert')}", profile=["h1000"])


def test_a_broken_package_is_named_and_not_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        broken = RuntimeError("operator torchvision::nms does not exist")
        raise ModuleNotFoundError("Could not import module 'BertConfig'") from broken

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", fail)
    with pytest.raises(InputError, match="package fails to import: operator torchvision::nms"):
        estimate(config_folder(tmp_path, "bert"))


class Hub(BaseHTTPRequestHandler):
    """A hub whose owners are named after what their models are."""

    def do_GET(self) -> None:
        """Answer as the hub does, with its codes for errors."""
        owner, name = self.path.split("/")[1], self.path.rpartition("/")[2]
        status, code = ERRORS.get(owner, (404, "RepoNotFound"))
        if owner == "known":
            status, code = (200, "") if name == "config.json" else (404, "EntryNotFound")
        body = json.dumps(CONFIGS["bert"]).encode() if status == 200 else b""
        self.send_response(status)
        for key, value in {"X-Error-Code": code, "ETag": '"1"', "X-Repo-Commit": "a" * 40}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.command == "GET" else b"")

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Print nothing."""


ERRORS = {
    "gated": (403, "GatedRepo"),
    "gone": (401, "RepoNotFound"),
    "bare": (404, "EntryNotFound"),
}
BY_NAME = """
import json, sys, autobatch
for name in sys.argv[1:]:
    try:
        found = autobatch.estimate("hf:" + name, profile=["t4", "v100-16gb"], micro_batch=2).notes[0]
    except autobatch.InputError as error:
        found = str(error)
    print(json.dumps(found))
"""


def ask_hub(folder: Path, port: int, *names: str) -> list[str]:
    """Estimate models of a hub by their names, and return the first note or the error of each."""
    variables = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(folder)}
    variables = {name: one for name, one in variables.items() if name not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    command = [sys.executable, "-W", "error::UserWarning", "-c", BY_NAME, *names]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=variables)
    assert (ran.returncode, ran.stderr) == (0, "")
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.mark.program
def test_a_hub_gives_the_config_or_the_reason(tmp_path: Path) -> None:
    hub = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=hub.serve_forever, daemon=True).start()
    try:
        found = ask_hub(tmp_path, hub.server_port, "known/bert", "gated/llama", "gone/away", "bare/weights")
    finally:
        hub.shutdown()
        hub.server_close()
    assert found[0].startswith("BertForMaskedLM: all weights in float32")
    said = ["gated/llama is gated", "gone/away is no folder here and no model", "bare/weights has no config"]
    assert [line.startswith(f"hf:{one}") for line, one in zip(found[1:], said, strict=True)] == [True] * 3
    # What was fetched before needs no network.
    assert ask_hub(tmp_path, hub.server_port, "known/bert") == found[:1]


@pytest.mark.program
def test_without_a_network_the_hub_cannot_be_reached(tmp_path: Path) -> None:
    (found,) = ask_hub(tmp_path, 9, "known/bert")  # where nothing listens
    assert found.startswith(
        "hf:known/bert is no folder here, and the hub cannot be reached: check the network"
    )


def test_only_an_estimate_takes_a_name_and_only_a_name_takes_its_options(tmp_path: Path) -> None:
    place = config_folder(tmp_path, "bert")
    with pytest.raises(InputError, match="which only autobatch estimate takes"):
        autobatch.probe(f"hf:{place}")
    # A module called hf is named as a file.
    module = tmp_path / "hf.py"
    module.write_text("")
    assert check_reference(f"{module}:workload") == (str(module), "workload")
    with pytest.raises(InputError, match=r"sequence 16, lora 4: only autobatch estimate hf:NAME takes that"):
        autobatch.estimate(sequence=16, lora=4, profile=GPUS)


@pytest.mark.program
def test_experts_are_predicted_without_a_page_of_torchs_log(tmp_path: Path, capfd: Any) -> None:
    kind = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4}
    place = config_folder(tmp_path, "qwen3", **kind, num_experts_per_tok=2, moe_intermediate_size=64)
    found = autobatch.estimate(f"hf:{place}", profile=["rtx-4090"], sequence=32).estimates
    assert found[0].micro_batch > 0
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.program
def test_the_table_of_ranks_has_gpus_down_and_tabs_in_a_pipe(tmp_path: Path) -> None:
    place = config_folder(tmp_path, "qwen3", num_hidden_layers=1)
    ran = command(
        tmp_path, "estimate", f"hf:{place}", "--ranks", "1,2", "--parallel", "shard", "--profile", "t4",
        "a100-40gb", "--sequence", "32", "--memory-budget", "64MiB",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    lines = ran.out.splitlines()
    head = lines.index("GPU\t1 rank\t2 ranks")
    cells = [line.split("\t") for line in lines[head + 1 : head + 3]]
    assert [row[0] for row in cells] == ["t4", "a100-40gb"]
    assert all(int(cell.replace(",", "")) > 0 for row in cells for cell in row[1:])
