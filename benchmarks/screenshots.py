"""Pictures for the documentation: ``python -m benchmarks.screenshots`` writes them to docs/img.

It trains the demo, opens its report in Chromium, and predicts what fits of a model of the hub in a terminal.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from PIL import Image

from benchmarks.recording import picture
from benchmarks.report import arguments

IMAGES = Path(__file__).parent.parent / "docs" / "img"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FIT = "fit --target-batch 512 --steps 120 --validate-every 12 --trials 0 --quiet --out run"
WIDTH, HEIGHT = 1280, 1240
"""Pixels of the page from its top."""
MODEL = "Qwen/Qwen3-0.6B"
ESTIMATE = f"autobatch estimate hf:{MODEL} --sequence 2048 --profile rtx-4090"
COLUMNS = 147
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
        "--disable-background-networking", "--force-prefers-reduced-motion",
        "--enable-logging=stderr", "--virtual-time-budget=4000",
        f"--user-data-dir={folder / 'profile'}", *options, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def shoot(page: str, image: Path, *, width: int, height: int) -> Path:
    """Write a picture of the top of a page. A frame makes it narrower than a window of Chromium can be."""
    page = page.replace("color-scheme: light dark;", "color-scheme: light;")
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


def report() -> Path:
    """Train the demo, and write a picture of its report."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "autobatch", *FIT.split()]
        subprocess.run(words, cwd=folder, env=os.environ | {"AUTOBATCH_HOME": folder}, check=True)
        page = Path(folder, "run/report.html").read_text(encoding="utf-8")
    return shoot(page, IMAGES / "report.png", width=WIDTH, height=HEIGHT)


def estimate() -> Path:
    """Write a picture of a terminal that predicts what fits of a model."""
    from benchmarks.which_gpu import write_config

    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder, MODEL).parent, MODEL)
        drawn = picture(ESTIMATE, folder, COLUMNS)
    across, down = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)[0])
    page = f'<html lang="en"><body style="margin:0">{drawn}'
    return shoot(page, IMAGES / "estimate.png", width=WIDTH, height=round(WIDTH * down / across))


def main() -> None:
    """Write every picture."""
    arguments(__doc__)
    for image in (report(), estimate()):
        assert image.stat().st_size <= MOST_BYTES, "draw fewer colours, or less of the page"


if __name__ == "__main__":
    main()
