"""Records, options, errors, units and versions, which every layer uses. Never imports torch."""

from __future__ import annotations

__version__ = "0.2.0"


def versions() -> dict[str, str]:
    """Return the versions that a run depends on, by name."""
    import platform
    from importlib.metadata import version

    return {"autobatch": __version__, "torch": version("torch"), "python": platform.python_version()}
