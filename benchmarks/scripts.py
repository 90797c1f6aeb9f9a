"""Public training scripts, unchanged but for their flags and made-up data: what fits, and whether it is so.

    python -m tests.stub_gpu -- python -m benchmarks.scripts FOLDER [--only NAME …]

FOLDER has a clone of each repository, as ``OWNER+NAME``. What the scripts import must be installed: minGPT,
torchvision, timm, wandb, transformers, datasets, evaluate, accelerate and diffusers. For each, `autobatch
probe` searches. Then it runs without autobatch, under the same limit of the allocator, at the answer, where
it must take three optimizer steps, and at one more, where it must not.
"""

from __future__ import annotations

import json
import os
import runpy
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

STEPS = 3
RETRIED = "the allocator emptied its cache"
HEAD = ("script", "budget", "largest", "it runs", "one more runs", "runs", "errors", "seconds")


class Script(NamedTuple):
    """A script of a repository, and the flags to run it with."""

    name: str
    repository: str
    commit: str
    folder: str
    words: str
    budget_gib: float
    make_data: Callable[[Path], None] = lambda folder: None
    """Writes made-up data to the folder of the script."""


def tokens(folder: Path) -> None:
    """Write the tokens of a text for nanoGPT."""
    data = folder / "data" / "made-up"
    data.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        (data / name).write_bytes(bytes(range(0, 200, 2)) * 20_000)


def digits(folder: Path) -> None:
    """Write images in the format of MNIST, beside the folder of the script."""
    raw = folder.parent / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 60_000), ("t10k", 1_000)):
        images = struct.pack(">iiii", 2051, count, 28, 28) + bytes(count * 28 * 28)
        labels = struct.pack(">ii", 2049, count) + bytes(number % 10 for number in range(count))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)


def pictures(folder: Path) -> None:
    """Write a data set of pictures in folders of classes."""
    for part, count in (("train", 1024), ("val", 8)):
        for label in "abcde":  # torchvision's script also counts what is among its five best
            write(count, (64, 64), folder / "made-up" / part / label)


def masked_pictures(folder: Path) -> None:
    """Write pictures and their masks for a U-Net."""
    write(4000, (96, 64), folder / "data" / "imgs")
    write(4000, (96, 64), folder / "data" / "masks", "L", "_mask")


def write(count: int, size: tuple[int, int], folder: Path, mode: str = "RGB", suffix: str = "") -> None:
    """Write black pictures."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        Image.new(mode, size).save(folder / f"{number}{suffix}.png")


def text(folder: Path) -> None:
    """Write a text of one letter, and a tokenizer of it, for transformers."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    letters = Tokenizer(models.BPE({"a": 0}, []))
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(folder / "made-up")
    (folder / "made-up" / "train.txt").write_text(("a" * 256 + "\n") * 4000)


NANOGPT = ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", ".")
EXAMPLES = ("pytorch/examples", "77f55b912142")
GPT_FLAGS = (
    "--dataset=made-up --compile=False --eval_iters=1 --block_size=256 --gradient_accumulation_steps=2"
)
RANKS = "torchrun --standalone --nproc_per_node=2 train.py --backend=gloo"
MINGPT = ("karpathy/minGPT", "37baab71b9ab", "projects/adder")
TIMM = ("huggingface/pytorch-image-models", "aa4b5850c154", ".")
TIMM_WORDS = "python train.py --data-dir made-up --num-classes 5 -j 1 -b {} --model"
BF16 = "--amp --amp-dtype bfloat16"
UNET = ("milesial/Pytorch-UNet", "21d7850f2af3", ".")
VISION = ("pytorch/vision", "428a54c96e82", "references/classification")
VISION_WORDS = "python train.py --data-path made-up --model efficientnet_b0 -j 1 -b {}"
CLM = ("huggingface/transformers", "ae05b2ae619a", "examples/pytorch/language-modeling")
CLM_WORDS = (
    "python run_clm.py --model_type gpt2 --tokenizer_name made-up --train_file made-up/train.txt "
    "--block_size 256 --do_train --output_dir made-up/out --report_to none --per_device_train_batch_size {}"
)
DDPM = ("huggingface/diffusers", "58eb52c0803e", "examples/unconditional_image_generation")
DDPM_WORDS = "python train_unconditional.py --train_data_dir made-up --logger wandb --train_batch_size {}"
SCRIPTS = (
    Script("nanoGPT", *NANOGPT, f"python train.py {GPT_FLAGS} --batch_size={{}}", 4, tokens),
    Script("nanoGPT, 2 ranks", *NANOGPT, f"{RANKS} {GPT_FLAGS} --batch_size={{}}", 4, tokens),
    Script("ResNet-50", *EXAMPLES, "imagenet", "python main.py --dummy -a resnet50 -j 1 -b {}", 4),
    Script("ResNet-18", *EXAMPLES, "imagenet", "python main.py --dummy -a resnet18 -j 1 -b {}", 2),
    Script("DCGAN", *EXAMPLES, "dcgan", "python main.py --dataset fake --accel --batchSize {}", 2),
    Script("VAE", *EXAMPLES, "vae", "python main.py --batch-size {}", 0.5, digits),
    Script("MNIST", *EXAMPLES, "mnist", "python main.py --batch-size {}", 1, digits),
    Script("Siamese", *EXAMPLES, "siamese_network", "python main.py --batch-size {}", 1, digits),
    Script("minGPT adder", *MINGPT, "python adder.py --trainer.batch_size={}", 1),
    Script("timm ResNet-50", *TIMM, f"{TIMM_WORDS} resnet50 --opt adamw", 4, pictures),
    Script("timm ViT-S, bf16", *TIMM, f"{TIMM_WORDS} vit_small_patch16_224 --opt adamw {BF16}", 4, pictures),
    Script("U-Net", *UNET, "python train.py --scale 1 --batch-size {}", 2, masked_pictures),
    Script("torchvision EfficientNet", *VISION, VISION_WORDS, 4, pictures),
    Script("transformers GPT-2", *CLM, CLM_WORDS, 4, text),
    Script("diffusers DDPM", *DDPM, DDPM_WORDS, 8, pictures),
)


def measure(script: Script, checkouts: Path) -> list[object]:
    """Search with autobatch, and run the script without it at the answer and at one more; return a row."""
    clone = checkouts / script.repository.replace("/", "+")
    subprocess.run(["git", "-C", clone, "checkout", "--quiet", script.commit], check=True)
    folder = clone / script.folder
    script.make_data(folder)
    variables = {**os.environ, "WANDB_MODE": "disabled", "HF_HUB_OFFLINE": "1"}
    start = time.monotonic()
    budget = f"{script.budget_gib:g} GiB"
    line = [sys.executable, "-m", "autobatch", "probe", "--json", "--memory-budget", budget]
    said = subprocess.check_output([*line, "--", *script.words.split()], cwd=folder, env=variables)
    seconds, found = time.monotonic() - start, json.loads(said)
    probe = found["probe"]
    fraction = (found["device"]["budget_bytes"] + 0.5) / found["device"]["total_bytes"]  # torch truncates
    variables["PYTORCH_ALLOC_CONF"] = f"per_process_memory_fraction:{fraction!r}"
    size = probe["micro_batch"]
    plainly = [("no", "yes")[runs_plainly(script, each, folder, variables)] for each in (size, size + 1)]
    counts = (len(probe["attempts"]), probe["oom_count"], f"{seconds:.0f}")
    return [script.name, budget, f"{size:,}", *plainly, *counts]


def runs_plainly(script: Script, size: int, folder: Path, variables: dict[str, str]) -> bool:
    """Return whether the script takes its steps under a limit, with the hook of this file alone.

    Raises:
        CalledProcessError: it fails for another reason than memory.
    """
    words = script.words.replace("{}", str(size)).split()
    at = next(place for place, word in enumerate(words) if word.endswith(".py"))
    words[at:at] = [str(Path(__file__).resolve()), "steps"]
    done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if not any(reason in done.stderr for reason in ("OutOfMemoryError", RETRIED)):
        done.check_returncode()
    return done.returncode == 0


def take_steps(words: list[str]) -> None:
    """Run a script until its third optimizer step, and exit with 1 if the allocator emptied its cache."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken: dict[int, int] = {}

    def count(optimizer: Any, *_: Any) -> None:
        taken[id(optimizer)] = taken.get(id(optimizer), 0) + 1
        if taken[id(optimizer)] == STEPS:
            torch.cuda.synchronize()
            if has_retried := torch.cuda.memory_stats()["num_alloc_retries"] > 0:
                print(RETRIED, file=sys.stderr, flush=True)
            os._exit(has_retried)

    register_optimizer_step_post_hook(count)
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")
    sys.exit(1)


def main() -> None:
    """Print a row for each script."""
    options = arguments(__doc__, checkouts=Path, only=[script.name for script in SCRIPTS])
    rows = []
    for script in SCRIPTS:
        if script.name in options.only:
            try:
                rows.append(measure(script, options.checkouts.resolve()))
            except subprocess.CalledProcessError as error:
                rows.append([script.name, f"exit code {error.returncode}", *[""] * 6])
            print(*rows[-1], flush=True)
    print(markdown(HEAD, rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["steps"]:
        take_steps(sys.argv[2:])
    else:
        from benchmarks.report import arguments, markdown

        main()
