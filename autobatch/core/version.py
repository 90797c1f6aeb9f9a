"""The version of autobatch, and of what a run depends on."""

from __future__ import annotations

from pathlib import Path

GIT_SECONDS = 5.0
"""Time after which Git counts as absent, for example on a slow network file system."""
__version__ = "0.2.0"


def commit(folder: Path) -> str | None:
    """Return the commit of a folder, with a mark if files have changed; None without Git."""
    import subprocess

    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GIT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """Return the versions that a run depends on, by name."""
    import platform
    from importlib.metadata import version

    return {"autobatch": __version__, "torch": version("torch"), "python": platform.python_version()}
