"""Pictures for the documentation: ``python -m benchmarks.screenshots`` writes them to docs/img.

It trains the demo twice, the second time in less memory, compares the runs, and opens both pages in Chromium:
wide, wide and dark, and as narrow as a phone. It predicts what fits of a model of the hub, whose config is at
hand, in terminals of those widths.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from PIL import Image

from benchmarks.recording import play, rows_of, still
from benchmarks.report import arguments
from benchmarks.which_gpu import MODELS

IMAGES = Path(__file__).parent.parent / "docs" / "img"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
RUNS = {"6MiB": "--memory-budget 6MiB", "4MiB": "--memory-budget 4MiB --seed 1"}
"""Options of each run by its name."""
FIT = "fit --target-batch 512 --steps 120 --validate-every 12 --trials 0 --quiet"
WIDE, NARROW = 1280, 390
HEIGHTS = {"report": 1240, "compare": 2500}
"""Pixels of each page from its top."""
SHAPES = (("", WIDE, "light"), ("-dark", WIDE, "dark"), ("-narrow", NARROW, "light"))
"""End of the name of each picture, its pixels across, and its theme."""
MODEL = "Qwen/Qwen3-0.6B"
ESTIMATE = f"autobatch estimate hf:{MODEL} --sequence 2048 --profile rtx-4090"
COLUMNS = {WIDE: 147, NARROW: 46}
"""Columns of a terminal of so many pixels."""
COLORS = 96
"""Colours of a picture: few enough for a small file, and as many as the charts have."""
MOST_BYTES = 150_000
"""Size of a picture that a page of the documentation loads at once."""


def browse(folder: Path, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Open a page in Chromium without a window.

    Args:
        folder: keeps the profile of the browser.
        page: the page.
        options: what to do with it, for example ``--dump-dom``.
    """
    assert CHROMIUM is not None, "install Chromium"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--enable-logging=stderr", "--virtual-time-budget=4000",
        f"--user-data-dir={folder / 'profile'}", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def shoot(page: str, image: Path, *, width: int, height: int, theme: str = "light") -> Path:
    """Write a picture of the top of a page. A frame makes it narrower than a window of Chromium can be."""
    page = page.replace('<html lang="en">', f'<html lang="en" data-theme="{theme}">')
    style = f"width:{width}px;height:{height}px;border:0"
    with tempfile.TemporaryDirectory() as folder:
        shown, shot = Path(folder, "frame.html"), Path(folder, "shot.png")
        frame = f'<iframe srcdoc="{escape(page)}" style="{style}"></iframe>'
        head = '<!doctype html><meta charset="utf-8"><body style="margin:0">'
        shown.write_text(f"{head}{frame}", encoding="utf-8")
        size = f"--window-size={max(width, 600)},{height + 200}"
        browse(Path(folder), shown, "--hide-scrollbars", size, f"--screenshot={shot}")
        with Image.open(shot) as whole:
            few = whole.convert("RGB").crop((0, 0, width, height)).quantize(COLORS, dither=Image.Dither.NONE)
            few.save(image, optimize=True)
    return image


def train() -> dict[str, str]:
    """Train the runs of the pictures in a folder of their own. Return the pages by name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"AUTOBATCH_HOME": folder}
        commands = [f"{FIT} {options} --out runs/digits/{name}" for name, options in RUNS.items()]
        for command in (*commands, "compare"):
            words = [sys.executable, "-m", "autobatch", *command.split()]
            subprocess.run(words, cwd=folder, env=environment, check=True)
        first, last = (Path(folder, "runs", "digits", name) for name in RUNS)
        files = {"report": first / "report.html", "compare": last / "compare.html"}
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}


def estimate(ending: str, width: int, theme: str) -> Path:
    """Write a picture of a terminal that predicts what fits of a model."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, MODEL)
        model.mkdir(parents=True)
        (model / "config.json").write_text(json.dumps(MODELS[MODEL].config), encoding="utf-8")
        rows = rows_of(play(ESTIMATE, folder, COLUMNS[width]), COLUMNS[width])
    drawn, across, down = still(ESTIMATE, rows, COLUMNS[width], theme)
    page = f'<html lang="en"><body style="margin:0">{drawn}'
    return shoot(page, IMAGES / f"estimate{ending}.png", width=width, height=width * down // across)


def main() -> None:
    """Write every picture."""
    arguments(__doc__)
    pages = train()
    for ending, width, theme in SHAPES:
        images = [estimate(ending, width, theme)]
        for name, page in pages.items():
            image = IMAGES / f"{name}{ending}.png"
            images.append(shoot(page, image, width=width, height=HEIGHTS[name], theme=theme))
        for image in images:
            size = image.stat().st_size
            print(f"{image.relative_to(IMAGES.parent.parent)}  {size:,} bytes")
            assert size <= MOST_BYTES, "draw fewer colours, or less of the page"


if __name__ == "__main__":
    main()
