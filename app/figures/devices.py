"""The memory of a GPU: what takes it over time, and how the allocator's segments are filled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from app.figures.base import MAX_POINTS, Chart, blank, limit
from app.figures.memory import ELAPSED
from app.figures.samples import stack
from app.format import GIB, MIB
from app.theme import Theme
from collector.diagnosis.device_account import PARTS, UNATTRIBUTED
from collector.quantities import known, percent, size

#: So many devices are drawn, and of them so many anew in one refresh.
MAX_DRAWN, AT_ONCE = 4, 2
#: The segments that are drawn, the largest first.
MAX_SEGMENTS = 40
#: part -> attribute of the theme.
_COLOURS = {
    "allocated": "allocated",
    "cached": "reserved",
    "fragmentation": "latency",
    "non-PyTorch": "host",
    "other processes": "quiet",
    UNATTRIBUTED: "limit",
}
#: kind of trouble -> (words, symbol, attribute of the theme).
_TROUBLE = {"retries": ("cache flushed", "triangle-up", "reserved"), "ooms": ("out of memory", "x", "limit")}


def named(gpus: pd.DataFrame, *, word: str = "GPU") -> list[str]:
    """`GPU 0` for each row of `device_queries.devices`; `GPU 0 of node-a` if they are of several hosts."""
    several = gpus["host"].nunique() > 1
    places = zip(gpus["host"], gpus["device"], strict=True)
    return [f"{word} {int(device)} of {host}" if several else f"{word} {int(device)}" for host, device in places]


def drawn(gpus: pd.DataFrame, rank: int | None) -> tuple[list[int], str]:
    """Which rows of `device_queries.devices` are drawn, those of a rank and the fullest, and what to say of it."""
    fullness = gpus[["used_peak_bytes", "reserved_peak_bytes"]].max(axis=1) / gpus["total_bytes"]
    is_others = [rank is None or not np.isin(rank, ranks) for ranks in gpus["ranks"]]
    places = np.lexsort((-fullness.fillna(0).to_numpy(), np.array(is_others)))[:MAX_DRAWN]
    told = (
        f"The {MAX_DRAWN} fullest of {len(gpus)} GPUs are drawn. The table has all; choose a rank to see its own."
    )
    return sorted(places.tolist()), told if len(gpus) > MAX_DRAWN else ""


def own_peaks(gpu: Mapping[Any, Any]) -> str:
    """What PyTorch counted at most, of a row of `device_queries.devices`: more than was there at any record."""
    peaks = ((word, gpu[f"{word}_peak_bytes"]) for word in ("allocated", "reserved"))
    told = ", ".join(f"{word} {size(peak)}" for word, peak in peaks if known(peak))
    return f" PyTorch's own peaks in one process, over the whole run, between samples too: {told}." if told else ""


def account(
    parts: pd.DataFrame, trouble: pd.DataFrame, theme: Theme, *, name: str, capacity_bytes: float, revision: str
) -> Chart:
    """What takes the memory of a device, stacked up to its capacity, with retries and OOMs as marks.

    Args:
        parts: `device_account.accounts`.
        trouble: `device_queries.allocator_trouble`.
        theme: colours.
        name: of the device.
        capacity_bytes: of the device, NaN if it is not known.
        revision: the run.

    """
    figure = blank(theme, x_title=ELAPSED, y_title="device memory (GiB)", revision=revision, height=400)
    layers = [part for part in (*PARTS, UNATTRIBUTED) if part in parts]
    drawn = [(part, parts[part].fillna(0) / GIB, getattr(theme, _COLOURS[part])) for part in layers]
    figure.add_traces(list(stack(parts["elapsed_seconds"], drawn, "GiB")))
    total = parts[layers].sum(axis=1)
    peak = parts.iloc[int(total.to_numpy().argmax())]
    top = max(float(total.max()), capacity_bytes if known(capacity_bytes) else 0.0)
    for kind, (words, symbol, colour) in _TROUBLE.items():
        at = trouble.loc[trouble[kind] > 0]
        if not at.empty:
            figure.add_trace(
                {
                    "type": "scatter",
                    "name": words,
                    "x": at["elapsed_seconds"].to_numpy(),
                    "y": np.full(len(at), top / GIB),
                    "mode": "markers",
                    "marker": {"symbol": symbol, "size": 11, "color": getattr(theme, colour)},
                    "text": [_when(*each) for each in zip(at[kind], at["step"], strict=True)],
                    "hovertemplate": f"{words} %{{text}}<extra></extra>",
                }
            )
    told = ", ".join(f"{part} {size(peak[part])}" for part in layers if known(peak[part]) and peak[part] > 0)
    caption = f"At the peak of {size(float(total.max()))}, of {len(parts):,} moments: {told}."
    if known(capacity_bytes):
        limit(figure, capacity_bytes / GIB, f"capacity {size(capacity_bytes)}", theme)
        figure.update_yaxes(range=[0, top / GIB * 1.12])
        caption += f" Capacity {size(capacity_bytes)}, the peak is {percent(float(total.max()) / capacity_bytes)}."
    missing = [part for part in PARTS if part not in parts]
    if missing:
        caption += f" Not known here: {', '.join(missing)}."
    for kind, (words, _, _) in _TROUBLE.items():
        count = int(trouble[kind].clip(lower=0).sum())
        caption += f" {words.capitalize()}: {f'{count:,} times' if count > 1 else 'once'}." if count else ""
    return Chart(title=f"What takes the memory of {name}?", figure=figure, caption=caption)


def _when(count: float, step: float) -> str:
    return f"in step {step:,.0f}" if count == 1 else f"{count:,.0f} times, last in step {step:,.0f}"


def segments(table: pd.DataFrame, theme: Theme, *, revision: str) -> Chart:
    """The allocator's segments as bars, blocks in use filled: holes are what cannot be given back.

    Args:
        table: `snapshots.AllocatorSnapshot.segments`.
        theme: colours.
        revision: the run.

    """
    shown = table.head(MAX_SEGMENTS)
    height = 160 + 14 * len(shown)
    x_title = "offset in the segment (MiB)"
    figure = blank(theme, x_title=x_title, y_title="segment", revision=revision, height=height)
    used = [(row, *block) for row, blocks in enumerate(shown["blocks"]) for block in _joined(blocks)]
    rows, starts, sizes = np.array(used[:MAX_POINTS] or [(0, 0, 0)], dtype=np.float64).T
    wholes = shown["total_bytes"].to_numpy(np.float64)
    for name, y, base, x, colour in (
        ("free", np.arange(len(shown)), np.zeros(len(shown)), wholes, theme.grid),
        ("in use", rows, starts, sizes, theme.allocated),
    ):
        figure.add_trace(
            {
                "type": "bar",
                "name": name,
                "orientation": "h",
                "y": y,
                "base": base / MIB,
                "x": x / MIB,
                "marker": {"color": colour, "line": {"width": 0}},
                "hovertemplate": f"{name}: %{{x:,.4~g}} MiB from %{{base:,.4~g}} MiB on<extra></extra>",
            }
        )
    figure.update_layout(barmode="overlay", bargap=0.25, hovermode="closest")
    figure.update_yaxes(autorange="reversed", showgrid=False, showticklabels=False, zeroline=False)
    whole, held = table["total_bytes"].sum(), table["allocated_bytes"].sum()
    caption = f"Segments: {len(table):,}, of {size(whole)}, of which {size(held)} are in use."
    if len(table) > len(shown):
        caption += f" The {len(shown)} largest are drawn."
    return Chart(title="How are the allocator's segments filled?", figure=figure, caption=caption)


def _joined(blocks: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    """Offset and bytes of what is in use without a hole."""
    joined: list[tuple[int, int]] = []
    for offset, size_bytes, used in blocks:
        if used and joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + size_bytes)
        elif used:
            joined.append((offset, size_bytes))
    return joined
