"""Figures of memory over time: by role, per process, and against each limit."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from app.figures.base import DASHES, TimeChart, Trace, limit, line, marks, over_time, sampled
from app.figures.samples import pauses, sample_line, stack, with_gaps
from app.format import byte_axis
from app.theme import Theme
from collector.store.queries import MAIN_PLACE, Lines
from collector.units import count, counted, growth, is_known, percent, size

#: column of `process` -> its name on an axis.
METRIC_WORDS = {"pss_bytes": "PSS", "private_dirty_bytes": "private dirty", "rss_bytes": "RSS"}
#: role, as in `queries.memory_by_role` -> name of its processes in a figure.
ROLE_WORDS = {"main": MAIN_PLACE, "worker": "workers", "other": "other"}
#: limit of `queries.HOST_LIMITS` -> its name.
LIMIT_WORDS = {"cgroup": "cgroup memory", "host": "host memory", "shm": "/dev/shm"}
#: Factor above the peak at which a limit would press the lines flat: only the caption names it then.
FARTHEST_LIMIT = 4
#: Restarts of one worker above which their marks would hide its line.
MAX_MARKED_RESTARTS = 200
#: Distance to the nearest sample (s, or as a share of the line) up to which a restart is drawn on the line; farther
#: ones are drawn on the axis.
_NEAR_SECONDS, _NEAR_RATIO = 2.0, 0.01
#: Places above which a caption gives their number instead of their names.
_NAMED_PLACES = 4


def by_role(
    totals: pd.DataFrame,
    theme: Theme,
    *,
    metric: str,
    title: str,
    capacity_bytes: float | None = None,
    capacity_name: str = "",
    lacking: str = "",
) -> TimeChart:
    """Draw process memory stacked by role (`queries.memory_by_role`), under the limit that binds.

    A limit that is more than three times as high as the stack would press it flat: only the caption names it.
    `lacking` are the processes missing from the sums, since their metric was not read (`unread`).
    """
    word = METRIC_WORDS[metric]
    roles = [column for column in totals.columns if column != "elapsed_seconds"]
    sums = totals[roles].sum(axis=1)
    last, peak = sums.iloc[-1], sums.max()
    scale, unit = byte_axis(peak)
    figure = over_time(theme, y_title=f"{word} ({unit})")
    colours = {"main": theme.main, "worker": theme.worker, "other": theme.other}
    layers = [(ROLE_WORDS[role], totals[role] / scale, colours[role]) for role in roles]
    figure.add_traces(list(stack(totals["elapsed_seconds"], layers, unit)))
    now = f", last {size(last)}" if last else ""  # at the end of a run every process is gone
    caption = f"Peak {size(peak)}{now}: {word} of all processes together (n = {len(totals):,})."
    caption += f" Without {lacking}, whose {word} was not read." if lacking else ""
    if metric == "rss_bytes":
        caption += " PSS could not be read: RSS counts shared pages once per process, so the sum is too high."
    if capacity_bytes is not None and is_known(capacity_bytes):
        name = f"{capacity_name[:1].upper()}{capacity_name[1:]}"
        caption += f" {name}: {size(capacity_bytes)}, the peak is {percent(peak / capacity_bytes)} of it."
        caption += " PSS counts mapped files too, which the kernel can drop." if peak > capacity_bytes else ""
        if peak * 3 > capacity_bytes:
            limit(figure, capacity_bytes / scale, f"{capacity_name} {size(capacity_bytes)}", theme)
    return TimeChart(title=title, figure=figure, caption=caption)


def against_limit(
    usage: Mapping[str, Lines], theme: Theme, *, name: str, capacity_bytes: float | None
) -> TimeChart:
    """Draw usage of a limited resource over time (label -> bytes), with its limit unless that is far above."""
    peak = highest(usage)
    figure, scale, unit = byte_figure(peak, capacity_bytes, theme, y_title="used")
    captions = []
    for label, lines in usage.items():
        if lines.points.empty:
            continue
        includes_cache = label == "used" and "anonymous" in usage
        colour = theme.quiet if includes_cache else theme.text
        for part, points in lines.points.groupby("series"):
            name_of_line = f"{label}, {part!s}" if part else label
            figure.add_trace(sample_line(name_of_line, points, colour, unit, scale=scale, showlegend=True))
        values = lines.points["value"]
        of = sampled(lines) or f"n = {lines.samples_count:,}"
        peak_of_line = f"peak {size(values.max())}, " if len(usage) > 1 else ""
        captions.append(f"{label} {size(values.iloc[-1])} ({peak_of_line}{of})")
    sentence = f"Peak {size(peak)}{against(figure, peak, capacity_bytes, scale, theme)}"
    caption = f"{sentence} Last: {', '.join(captions)}." if captions else "No samples in this window."
    return TimeChart(title=f"How near is {name} to its limit?", figure=figure, caption=caption)


def highest(usage: Mapping[str, Lines]) -> float:
    """Return the largest value of lines, 0 if they have none."""
    return max(
        (float(lines.points["value"].max()) for lines in usage.values() if not lines.points.empty), default=0.0
    )


def byte_figure(
    peak: float, capacity_bytes: float | None, theme: Theme, *, y_title: str, height: int = 320
) -> tuple[go.Figure, int, str]:
    """Return an empty figure of bytes over time that `against` finishes, its bytes per unit, and the unit."""
    scale, unit = byte_axis(max(peak, (capacity_bytes or 0.0) if _is_near(peak, capacity_bytes) else 0.0))
    return over_time(theme, y_title=f"{y_title} ({unit})", height=height), scale, unit


def against(
    figure: go.Figure, peak: float, capacity_bytes: float | None, scale: int, theme: Theme, *, word: str = "limit"
) -> str:
    """Draw a limit, unless it is far above the peak, and return the end of a sentence about the peak."""
    if not is_known(capacity_bytes):
        return f". The {word} is not known."
    words = f", {percent(peak / capacity_bytes)} of the {word} of {size(capacity_bytes)}"
    is_near = _is_near(peak, capacity_bytes)
    if is_near:
        limit(figure, capacity_bytes / scale, f"{word} {size(capacity_bytes)}", theme)
    figure.update_yaxes(range=[0, (max(capacity_bytes, peak) if is_near else peak) / scale * 1.12 or 1])
    return f"{words}." if is_near else f"{words} (above this axis)."


def _is_near(peak: float, capacity_bytes: float | None) -> bool:
    return is_known(capacity_bytes) and peak * FARTHEST_LIMIT > capacity_bytes


def open_files(lines: Lines, theme: Theme, *, limit_count: float) -> TimeChart:
    """Draw open files of processes, and their limit if a process comes within a factor of three of it."""
    figure = over_time(theme, y_title="open files (count)")
    by_place = {str(name): points for name, points in lines.points.groupby("series")}
    for name, colour, turn in _colours(by_place, theme):
        style = {"dash": DASHES[turn % len(DASHES)]}
        figure.add_trace(sample_line(name, by_place[name], colour, "files", line=style))
    peak = lines.points["value"].max()
    if peak * 3 > limit_count:
        limit(figure, limit_count, f"limit {count(limit_count)}", theme)
    caption = f"Peak {count(peak)} of {count(limit_count)} allowed, over {counted(lines.samples_count, 'sample')}."
    return TimeChart(title="How near are open files to their limit?", figure=figure, caption=caption)


def per_process(
    lines: Lines,
    places: pd.DataFrame,
    theme: Theme,
    *,
    metric: str,
    resident: Lines | None = None,
    title: str = "Which process grows, and since when?",
) -> TimeChart:
    """Draw one line per place in the run; a triangle marks where a restarted worker begins a new part of its line.

    Args:
        lines: the thinned lines, series = place.
        places: `queries.processes`.
        theme: colours.
        metric: the column of `process` that is drawn.
        resident: the RSS of processes whose metric was never read; else these would not be drawn.
        title: the question that the figure answers.
    """
    word = METRIC_WORDS[metric]
    parts = {"": dict(iter(lines.points.groupby("series")))}
    if resident is not None and not resident.points.empty:
        parts["RSS"] = dict(iter(resident.points.groupby("series")))
    all_points = [points for part in parts.values() for points in part.values()]
    scale, unit = byte_axis(max((float(points["value"].max()) for points in all_points), default=0.0))
    y_title = f"{word}, dashed RSS ({unit})" if "RSS" in parts else f"{word} ({unit})"
    figure = over_time(theme, y_title=y_title, height=400)
    restarts = 0
    names = [name for name in places["series"].unique() if any(name in part for part in parts.values())]
    for name, colour, turn in _colours(names, theme):
        starts = places.loc[(places["series"] == name) & places["restart"], "first_seconds"].sort_values().tolist()
        dash = DASHES[turn % len(DASHES)]
        of_place = {kind: part[name] for kind, part in parts.items() if name in part}
        style = {"color": colour, "dash": dash}
        figure.add_traces([*_place_traces(str(name), of_place, starts, scale, unit, style)])
        restarts += len(starts)
    caption = f"{word[0].upper()}{word[1:]} memory per process"
    if metric == "rss_bytes":
        caption += " (private dirty could not be read; RSS is blind to copy-on-read growth)"
    caption += (
        f", drawn as {sampled(lines)}." if sampled(lines) else f", n = {counted(lines.samples_count, 'sample')}."
    )
    if "RSS" in parts:
        caption += (
            f" No {word} was read of {unread(places, metric)}: RSS is drawn, which counts shared pages fully."
        )
    caption += f" {counted(restarts, 'worker restart')} (▲)." if restarts else ""
    return TimeChart(title=title, figure=figure, caption=caption, takeaway=_fastest(places, metric))


def _colours(names: Iterable[str], theme: Theme) -> Iterator[tuple[str, str, int]]:
    """Yield each place with its colour, and how often that was used before: the training process has its own.

    The numbers in a place's name choose its colour: a worker has the same in all charts.
    """
    others = [colour for colour in theme.series if colour != theme.main]
    taken: Counter[str] = Counter()
    for name in names:
        is_first_main = name.endswith(MAIN_PLACE) and not taken[theme.main]
        number = sum(map(int, re.findall(r"\d+", name)))
        colour = theme.main if is_first_main else others[number % len(others)]
        yield name, colour, taken[colour]
        taken[colour] += 1


def unread(places: pd.DataFrame, metric: str) -> str:
    """Return in words which of `queries.processes` have an RSS but never this metric; empty for none."""
    lacks = places[metric].isna() & places["rss_bytes"].notna()
    of_places = [
        (str(name), int(flags.sum()), len(flags)) for name, flags in lacks.groupby(places["series"], sort=False)
    ]
    names = [
        name if lacking == all_count else f"{lacking:,} of {all_count:,} processes of {name}"
        for name, lacking, all_count in of_places
        if lacking
    ]
    if len(names) > _NAMED_PLACES:
        return f"{int(lacks.sum()):,} of {len(places):,} processes"
    return " and ".join([part for part in (", ".join(names[:-1]), *names[-1:]) if part])


def _place_traces(
    name: str, parts: Mapping[str, pd.DataFrame], starts: list[float], scale: int, unit: str, style: dict[str, str]
) -> Iterator[Trace]:
    """Yield the lines of one place, dots for isolated samples, and marks for restarts."""
    gaps = starts if len(starts) <= MAX_MARKED_RESTARTS else []
    all_points = []
    for kind, points in parts.items():
        x, y = points["elapsed_seconds"].to_numpy(), points["value"].to_numpy() / scale
        all_points.append((x, y))
        x, y = with_gaps(x, y, [*pauses(x), *gaps])
        label, dash = (f"{name} ({kind})", "dash") if kind else (name, style["dash"])
        yield line(label, x, y, style["color"], unit, line={"dash": dash}, legendgroup=label)
        if (isolated := _is_isolated(x)).any():  # a line through one point is invisible
            dots = line(label, x[isolated], y[isolated], style["color"], unit, mode="markers", legendgroup=label)
            yield dots | {"marker": {"size": 5, "color": style["color"]}, "showlegend": False, "hoverinfo": "skip"}
    if gaps:
        x, y = (np.concatenate(arrays) for arrays in zip(*all_points, strict=True))
        yield _restarts(name, gaps, x, y, style["color"])


def _is_isolated(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return for each point of a line whether it has a gap, or the line's end, on both sides."""
    gap = np.isnan(np.r_[np.nan, x, np.nan])
    isolated: np.ndarray[Any, Any] = ~gap[1:-1] & gap[:-2] & gap[2:]
    return isolated


def _restarts(
    name: str, starts: list[float], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any], colour: str
) -> Trace:
    """Return marks at the restarts, each at the height of the nearest sample, or on the axis if none is near."""
    at = np.asarray(starts)
    distances = np.abs(at[:, np.newaxis] - x)
    nearest = distances.argmin(axis=1)
    is_near = distances.min(axis=1) <= max(_NEAR_SECONDS, _NEAR_RATIO * float(np.ptp(x)))
    heights = np.where(is_near, y[nearest], 0.0)
    return marks(f"{name} restarted", at, heights, colour, "triangle-up", 9, "restarted", showlegend=False)


def _fastest(places: pd.DataFrame, metric: str) -> str:
    slope = f"{metric.removesuffix('_bytes')}_slope"
    rising = places[places[slope] > 0] if slope in places else places[:0]
    if rising.empty:
        return ""
    first = rising.iloc[int(rising[slope].to_numpy().argmax())]
    return f"Fastest: {first['series']}, {growth(first[slope])}."
