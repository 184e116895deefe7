"""Every colour can be seen on its background."""

import pytest

from app.theme import DARK, LIGHT, theme_of


def _luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_contrast_is_at_least_three_to_one(theme):
    background = _luminance(theme.background)
    named = (theme.text, theme.quiet, theme.main, theme.worker, theme.other, theme.lost)
    named += (theme.allocated, theme.reserved)
    for colour in (*named, *theme.series):
        light, dark = sorted((_luminance(colour), background), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 3, colour


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_no_two_meanings_share_a_colour(theme):
    meanings = (theme.text, theme.quiet, theme.main, theme.worker, theme.other, theme.lost)
    meanings += (theme.allocated, theme.reserved)
    assert len(set(meanings)) == len(meanings)


def test_theme_is_light_until_the_browser_reports_one():
    assert (theme_of(None), theme_of("light"), theme_of("dark")) == (LIGHT, LIGHT, DARK)
