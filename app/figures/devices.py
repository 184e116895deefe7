"""Figures of a GPU's memory: use against capacity over time, its parts, and the allocator's segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from app.figures.base import MAX_POINTS, Chart, TimeChart, Trace, bar, blank, faint, limit, marks
from app.figures.memory import against, byte_figure, highest
from app.figures.samples import sample_line, stack
from app.format import MIB
from app.theme import Theme
from collector.diagnosis import DEVICE_PARTS, UNATTRIBUTED
from collector.store.queries import Lines
from collector.units import after_steps, duration, is_known, percent, size

#: Number of devices that are drawn.
MAX_DRAWN = 4
#: Number of segments that are drawn, the largest first.
MAX_SEGMENTS = 24
#: part -> attribute of the theme.
_COLOURS = {
    "allocated": "allocated",
    "cached": "reserved",
    "fragmentation": "lost",
    "non-PyTorch": "quiet",
    "other processes": "other",
    UNATTRIBUTED: "text",
}
#: part -> end of a sentence about its bytes.
PART_WORDS = {
    "allocated": "are live tensors",
    "cached": "are the allocator's cache",
    "fragmentation": "are fragmentation",
    "non-PyTorch": "are outside PyTorch",
    "other processes": "belong to other processes",
    UNATTRIBUTED: "are unattributed",
}
#: key of `queries.device_lines` -> name of its line.
LINE_WORDS = {"reserved": "reserved", "allocated": "allocated", "used": "used, all processes"}


def device_names(gpus: pd.DataFrame, *, word: str = "GPU") -> list[str]:
    """Return `GPU 0` for each row of `queries.devices`; `GPU 0 of node-a` if they are of several hosts."""
    has_hosts = gpus["host"].nunique() > 1
    places = zip(gpus["host"], gpus["device"], strict=True)
    return [f"{word} {int(device)} of {host}" if has_hosts else f"{word} {int(device)}" for host, device in places]


def select_devices(gpus: pd.DataFrame, rank: int | None) -> tuple[list[int], str]:
    """Choose the rows of `queries.devices` to draw, those of a rank and the fullest, and say so."""
    fullness = gpus[["used_peak_bytes", "reserved_peak_bytes"]].max(axis=1) / gpus["total_bytes"]
    is_other_rank = [rank is None or not np.isin(rank, ranks) for ranks in gpus["ranks"]]
    places = np.lexsort((-fullness.fillna(0).to_numpy(), np.array(is_other_rank)))[:MAX_DRAWN]
    words = (
        f"The {MAX_DRAWN} fullest of {len(gpus)} GPUs are drawn. The table has all; choose a rank to see its own."
    )
    return sorted(places.tolist()), words if len(gpus) > MAX_DRAWN else ""


def own_peaks(gpu: Mapping[Any, Any]) -> str:
    """Return the sentence about the peaks that PyTorch counts itself, of a row of `queries.devices`."""
    peaks = ((word, gpu[f"{word}_peak_bytes"]) for word in ("allocated", "reserved"))
    words = ", ".join(f"{word} {size(peak)}" for word, peak in peaks if is_known(peak))
    return f" Peaks that PyTorch counted itself, in one process: {words}." if words else ""


def usage(
    lines: Mapping[str, Lines],
    errors: pd.DataFrame,
    theme: Theme,
    *,
    name: str,
    capacity_bytes: float | None,
    share_bytes: float | None = None,
) -> TimeChart:
    """Draw allocated, reserved and used memory of a device over time, with its capacity and the errors.

    Reserved is an area behind the line of allocated, since the two often coincide. With several ranks it is a thin
    dotted line, since areas would hide each other.

    Args:
        lines: `queries.device_lines`.
        errors: `queries.cuda_errors` of this device.
        theme: colours.
        name: of the device.
        capacity_bytes: of the device, None if it is not known.
        share_bytes: the share of it that a process may use, if that is a limit of its own.
    """
    peak = max(highest(lines), float(errors["used_bytes"].max()) if errors["used_bytes"].notna().any() else 0.0)
    figure, scale, unit = byte_figure(peak, capacity_bytes, theme, y_title="used")
    for key, word in LINE_WORDS.items():
        of_ranks = list(lines[key].points.groupby("series"))
        for rank, points in of_ranks:
            label = f"{word}, {rank!s}" if rank else word
            style = _line_style(key, theme, is_alone=len(of_ranks) == 1)
            figure.add_trace(sample_line(label, points, **style, unit=unit, scale=scale, showlegend=True))
    caption = f"Peak {size(peak)}{against(figure, peak, capacity_bytes, scale, theme, word='capacity')}"
    if is_known(share_bytes):
        limit(figure, share_bytes / scale, f"share of the process {size(share_bytes)}", theme)
        top = max(
            float(figure.layout.yaxis.range[1] if figure.layout.yaxis.range else 0), share_bytes / scale * 1.12
        )
        figure.update_yaxes(range=[0, top])
        caption += f" The process may use {size(share_bytes)} of it."
    figure.add_traces([*_errors(errors, theme, scale, peak)])
    return TimeChart(
        title=f"How near is {name} to its limit?",
        figure=figure,
        caption=f"{caption}{error_words(errors)}" if peak else "No samples in this window.",
        gpu=name,
    )


def _line_style(key: str, theme: Theme, *, is_alone: bool) -> dict[str, Any]:
    if key == "used":
        return {"colour": theme.text}
    if key == "allocated":
        return {"colour": theme.allocated, "line": {"width": 2.4}}
    if is_alone:
        fill = {"fill": "tozeroy", "fillcolor": faint(theme.reserved, 0.3)}
        return {"colour": theme.reserved, "line": {"width": 0.8}, **fill}
    return {"colour": theme.reserved, "line": {"width": 1.2, "dash": "dot"}}


def account(
    parts: pd.DataFrame,
    flushes: pd.DataFrame,
    errors: pd.DataFrame,
    theme: Theme,
    *,
    name: str,
    capacity_bytes: float,
) -> TimeChart:
    """Draw the parts of a device's used memory as a stack, with its capacity, cache flushes and errors as marks.

    The tables are `diagnosis.accounts`, `queries.cache_flushes` and `queries.cuda_errors` of this device; its
    capacity is NaN if it is not known.
    """
    known_parts = [part for part in (*DEVICE_PARTS, UNATTRIBUTED) if part in parts]
    total = parts[known_parts].sum(axis=1)
    peak, at_peak = float(total.max()), parts.iloc[int(total.to_numpy().argmax())]
    figure, scale, unit = byte_figure(peak, capacity_bytes, theme, y_title="device memory", height=400)
    layers = [
        (part, parts[part].fillna(0) / scale, getattr(theme, _COLOURS[part]))
        for part in known_parts
        if (parts[part] > 0).any()
    ]
    figure.add_traces(list(stack(parts["elapsed_seconds"], layers, unit)))
    sentence = against(figure, peak, capacity_bytes, scale, theme, word="capacity")
    figure.add_traces([*_flushes(flushes, theme, peak / scale), *_errors(errors, theme, scale, peak)])
    largest = str(at_peak[known_parts].astype(float).idxmax())
    caption = f"Peak {size(peak)}{sentence} {size(at_peak[largest])} of it {PART_WORDS[largest]}."
    if missing := [part for part in DEVICE_PARTS if part not in parts]:
        caption += f" Not known here: {', '.join(missing)}."
    if parts.get("allocated", pd.Series(dtype=float)).isna().any():
        caption += " Until PyTorch's first record its memory counts as unattributed."
    if flushes_count := int(flushes["count"].sum()):
        caption += f" Cache flushed: {_times(flushes_count)}."
    caption += error_words(errors)
    return TimeChart(title=f"What takes the memory of {name}?", figure=figure, caption=caption, gpu=name)


def error_words(errors: pd.DataFrame) -> str:
    """Return a sentence about the last error that was not caught, and one that counts those that were."""
    words, fatal = "", errors[~errors["was_caught"].astype(bool)]
    if len(fatal):
        last = fatal.iloc[-1]
        words += f" Out of memory {_place(last)}{_shortage(last)}."
    if caught := int(errors.loc[errors["was_caught"].astype(bool), "errors_count"].sum()):
        words += f" Out-of-memory errors that the training caught: {caught:,}."
    return words


def _flushes(flushes: pd.DataFrame, theme: Theme, top: float) -> Iterator[Trace]:
    if not flushes.empty:
        words = "cache flushed"
        at = zip(flushes["count"], flushes["step"], strict=True)
        steps = [after_steps(step) if n == 1 else f"{_times(n)}, last {after_steps(step)}" for n, step in at]
        yield _marks(words, flushes, np.full(len(flushes), top), steps, "triangle-up", 11, theme.lost)


def _errors(errors: pd.DataFrame, theme: Theme, scale: float, top: float) -> Iterator[Trace]:
    """Yield a cross per error at the height of the memory in use, hollow and smaller if the training caught it."""
    was_caught = errors["was_caught"].astype(bool)
    for words, at, symbol, side in (
        ("out of memory, caught", errors[was_caught], "x-open", 9),
        ("out of memory", errors[~was_caught], "x", 12),
    ):
        if not at.empty:
            y = at["used_bytes"].astype(float).fillna(at["reserved_bytes"].astype(float)).fillna(top) / scale
            texts = [f"{_place(row)}{_shortage(row)}" for _, row in at.iterrows()]
            yield _marks(words, at, y, texts, symbol, side, theme.text)


def _marks(words: str, at: pd.DataFrame, y: Any, texts: list[str], symbol: str, side: int, colour: str) -> Trace:
    return marks(
        words,
        at["elapsed_seconds"].to_numpy(),
        np.asarray(y, dtype=np.float64),
        colour,
        symbol,
        side,
        f"{words} %{{text}}<extra></extra>",
        edge={"width": 1.5, "color": colour},
        cliponaxis=False,
        text=texts,
    )


def _place(error: pd.Series) -> str:
    place = duration(error["elapsed_seconds"])
    return f"{after_steps(error['step'])} ({place})" if is_known(error["step"]) else f"at {place}"


def _shortage(error: pd.Series) -> str:
    if not (is_known(error["requested_bytes"]) and is_known(error["free_bytes"])):
        return ""
    words = f": {size(error['requested_bytes'])} requested, {size(error['free_bytes'])} free"
    return (
        f"{words}, but the share of the process is {size(error['limit_bytes'])}" if error["is_of_share"] else words
    )


def _times(count: float) -> str:
    return "once" if count == 1 else f"{count:,.0f} times"


def segments(table: pd.DataFrame, theme: Theme) -> Chart:
    """Draw the segments of an allocator snapshot, with blocks in use filled. The holes cannot be given back."""
    shown = table.head(MAX_SEGMENTS)
    height = 160 + 14 * len(shown)
    figure = blank(theme, x_title="offset in the segment (MiB)", y_title="segment", height=height)
    used = [(row, *block) for row, blocks in enumerate(shown["blocks"]) for block in _join_blocks(blocks)]
    rows, starts, sizes = np.array(used[:MAX_POINTS] or [(0, 0, 0)], dtype=np.float64).T
    wholes = shown["total_bytes"].to_numpy(np.float64)
    for name, y, base, x, colour in (
        ("free", np.arange(len(shown)), np.zeros(len(shown)), wholes, theme.grid),
        ("in use", rows, starts, sizes, theme.allocated),
    ):
        hover = f"{name}: %{{x:,.4~g}} MiB from %{{base:,.4~g}} MiB on<extra></extra>"
        more: dict[str, Any] = {"base": base / MIB, "marker": {"line": {"width": 0}}}
        figure.add_trace(bar(name, y, x / MIB, colour, hover, **more))
    figure.update_layout(barmode="overlay", bargap=0.25, hovermode="closest")
    figure.update_yaxes(autorange="reversed", showgrid=False, showticklabels=False, zeroline=False)
    whole, held = table["total_bytes"].sum(), table["allocated_bytes"].sum()
    caption = f"{percent(held / whole)} in use: {size(held)} of {size(whole)} in {len(table):,} segments."
    if len(table) > len(shown):
        caption += f" The {len(shown)} largest are drawn."
    return Chart(title="How are the allocator's segments filled?", figure=figure, caption=caption)


def _join_blocks(blocks: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """Return offset and bytes of each stretch without a hole."""
    joined: list[tuple[int, int]] = []
    for offset, size_bytes, used in blocks:
        if used and joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size_bytes)
        elif used:
            joined.append((offset, size_bytes))
    return joined
