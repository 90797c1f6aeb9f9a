"""The colours are readable, by the contrast ratios of WCAG 2.2."""

from __future__ import annotations

from autobatch.report.theme import DARK, EITHER, LIGHT, style_sheet


def luminance(value: str) -> float:
    """Return the relative luminance of a colour (WCAG 2.2)."""
    parts = [int(value[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_has_the_known_contrast():
    assert round(contrast("#000000", "#ffffff"), 9) == 21


def test_text_is_readable_on_its_paper():
    for palette in (LIGHT, DARK):
        for role in ("ink", "muted", "accent", "bad", "warn"):
            assert contrast(palette[role], palette["paper"]) >= 4.5, role
        assert contrast(palette["on-accent"], palette["accent"]) >= 4.5


def test_mid_tones_are_readable_on_white_and_on_near_black():
    for role, color in EITHER.items():
        if role in ("paper", "surface", "ink", "rule", "on-accent"):
            continue
        for page in ("#ffffff", "#1e1e1e", "#111111"):
            assert contrast(color, page) >= 3, (role, page)
    assert contrast(EITHER["accent"], EITHER["on-accent"]) >= 4.5


def test_every_palette_has_the_same_roles():
    assert LIGHT.keys() == DARK.keys() == EITHER.keys()


def test_the_style_sheet_has_both_themes():
    sheet = style_sheet()
    assert "prefers-color-scheme:dark" in sheet
    for role in LIGHT:
        assert sheet.count(f"--{role}:{LIGHT[role]};") >= 1, role
        assert sheet.count(f"--{role}:{DARK[role]};") >= 2, role
