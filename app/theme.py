"""Colours with a fixed meaning, in a light and a dark theme.

The hues are those of Okabe and Ito, darkened on white until each has a contrast of 3:1 or more.
A colour never carries a meaning alone: dashes, labels or words repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """One theme. Each colour is `#rrggbb` and stands for the same thing in every view."""

    background: str
    text: str
    grid: str
    allocated: str
    reserved: str
    host: str
    latency: str
    limit: str
    quiet: str
    heat: tuple[str, str]
    series: tuple[str, ...]

    @property
    def main(self) -> str:
        """Colour of the training process."""
        return self.host

    @property
    def worker(self) -> str:
        """Colour of DataLoader workers."""
        return self.allocated

    @property
    def other(self) -> str:
        """Colour of all other processes of the run."""
        return self.latency

    @property
    def wait(self) -> str:
        """Colour of time lost to waiting."""
        return self.reserved


LIGHT = Theme(
    background="#FFFFFF",
    text="#1F2937",
    grid="#E5E7EB",
    allocated="#0072B2",
    reserved="#D55E00",
    host="#00795C",
    latency="#B0528C",
    limit="#1F2937",
    quiet="#7B8794",
    heat=("#F4F6F8", "#0072B2"),
    series=("#0072B2", "#D55E00", "#00795C", "#B0528C", "#1F2937"),
)

DARK = Theme(
    background="#0F1419",
    text="#E5E7EB",
    grid="#2B3440",
    allocated="#56B4E9",
    reserved="#E69F00",
    host="#009E73",
    latency="#CC79A7",
    limit="#E5E7EB",
    quiet="#8B98A5",
    heat=("#1A212B", "#56B4E9"),
    series=("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#8B98A5"),
)


def theme_of(kind: str | None) -> Theme:
    """Return the theme for Streamlit's `light` or `dark`, or None while the browser has not reported it."""
    return DARK if kind == "dark" else LIGHT
