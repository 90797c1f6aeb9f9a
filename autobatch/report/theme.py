"""The colours of a report by role, for light and dark pages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#fbfbf9",
        "surface": "#f2f4f2",
        "ink": "#1b2126",
        "muted": "#5a656d",
        "rule": "#dde2df",
        "accent": "#0b6b72",
        "on-accent": "#ffffff",
        "soft": "#a6cdd0",
        "bad": "#b23a24",
        "warn": "#95620a",
        "series-1": "#0b6b72",
        "series-2": "#69a1ab",
        "series-3": "#c79a4b",
        "series-4": "#b4c1d0",
        "series-5": "#8ba37c",
        "series-6": "#b3858f",
        "series-7": "#8d7fb0",
    }
)
DARK: Mapping[str, str] = MappingProxyType(
    {
        "paper": "#14181a",
        "surface": "#1c2225",
        "ink": "#e6eae8",
        "muted": "#9aa6ab",
        "rule": "#2d3539",
        "accent": "#5cc0c4",
        "on-accent": "#0d1416",
        "soft": "#2c6468",
        "bad": "#f08b73",
        "warn": "#dcae5a",
        "series-1": "#5cc0c4",
        "series-2": "#35777f",
        "series-3": "#cfa257",
        "series-4": "#5b6b7d",
        "series-5": "#8fae7d",
        "series-6": "#bd838e",
        "series-7": "#9d8fc2",
    }
)
EITHER: Mapping[str, str] = MappingProxyType(
    {
        "paper": "transparent",
        "surface": "transparent",
        "ink": "currentColor",
        "muted": "#7d7d7d",
        "rule": "#80808059",
        "accent": "#0d8189",
        "on-accent": "#ffffff",
        "soft": "#53999e",
        "bad": "#cf432a",
        "warn": "#aa700b",
        "series-1": "#0c7880",
        "series-2": "#5b97a2",
        "series-3": "#ad8236",
        "series-4": "#5e7896",
        "series-5": "#6d865e",
        "series-6": "#9b606d",
        "series-7": "#7a69a6",
    }
)
"""Mid-tones that are readable on white and on near-black, for places whose theme is unknown."""


def style_sheet() -> str:
    """Return the colours as CSS variables.

    The system's theme decides between light and dark, unless the page sets ``data-theme``.
    """
    light, dark = (
        "".join(f"--{role}:{value};" for role, value in palette.items()) for palette in (LIGHT, DARK)
    )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}\n"
        ":root[data-theme=light]{color-scheme:light}\n"
    )
