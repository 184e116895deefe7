"""Colours with a fixed meaning, in a light and a dark theme.

The hues are those of Okabe and Ito, and a violet; on white they are darker, so that each has a contrast of 3:1 or
more.
A colour never carries a meaning alone: dashes, labels or words repeat it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """One theme. Each colour is `#rrggbb` and stands for the same thing in every view.

    Attributes:
        text: words, limits, and what belongs to a whole machine.
        quiet: the rest, such as idle time, or memory outside PyTorch.
        main: the training process, and its work.
        worker: DataLoader workers, and the making of batches.
        other: all other processes.
        lost: what is lost, such as time spent waiting, or memory in fragments.
        allocated, reserved: memory of PyTorch's allocator on a device.
        heat: the least and the greatest of many values.
        series: several things of one kind, which labels tell apart.
    """

    background: str
    text: str
    grid: str
    quiet: str
    main: str
    worker: str
    other: str
    lost: str
    allocated: str
    reserved: str
    heat: tuple[str, str]
    series: tuple[str, ...]


LIGHT = Theme(
    background="#FFFFFF",
    text="#1F2937",
    grid="#E5E7EB",
    quiet="#7B8794",
    main="#00795C",
    worker="#0072B2",
    other="#B0528C",
    lost="#D55E00",
    allocated="#5B3A9E",
    reserved="#9A82D6",
    heat=("#F4F6F8", "#0072B2"),
    series=("#0072B2", "#D55E00", "#00795C", "#B0528C", "#1F2937"),
)

DARK = Theme(
    background="#0F1419",
    text="#E5E7EB",
    grid="#2B3440",
    quiet="#8B98A5",
    main="#009E73",
    worker="#56B4E9",
    other="#CC79A7",
    lost="#E69F00",
    allocated="#B9A3F5",
    reserved="#7A63C2",
    heat=("#1A212B", "#56B4E9"),
    series=("#56B4E9", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#8B98A5"),
)


def theme_of(kind: str | None) -> Theme:
    """Return the theme for Streamlit's `light` or `dark`, or None while the browser has not reported it."""
    return DARK if kind == "dark" else LIGHT
