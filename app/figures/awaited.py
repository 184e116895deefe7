"""Flame graphs of the time that a training waits: which function, line and stage takes how much of it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from html import escape

from app.figures.base import Chart, blank
from app.theme import Theme
from collector import report
from collector.diagnosis.loading import AwaitedTime, SourceFrame, stage_of
from collector.units import number, percent

#: Share of the samples below which a box is left out, since it has no room for its name.
_LEAST_RATIO = 0.01
_MOST_DEPTH = 14
_ROW_HEIGHT, _AROUND = 36, 40
_HIDDEN = ("/training_harness/hooks/", "/torch/utils/data/_utils/fetch.py", "/torch/utils/data/_utils/worker.py")
#: Kind of finding -> name of the whole.
_WHOLE = {"main-thread-pause": "pauses", "compute-bound": "work of all processes"}
#: Kind of finding -> what is asked of the lines.
_ASKED = {"main-thread-pause": "does training pause in", "compute-bound": "take the cores"}

#: Box of the figure: its label, what is said of it on hover, and the attribute of the theme that has its colour.
_Box = tuple[str, str, str]


def flame_graph(awaited: AwaitedTime, theme: Theme, *, by_stage: bool = False) -> Chart:
    """Draw the stacks of the awaited time, callers above the functions that they call."""
    counts: Counter[tuple[_Box, ...]] = Counter()
    for stack, count in awaited.stacks.items():
        boxes = tuple(_boxes(stack, by_stage=by_stage))[:_MOST_DEPTH]
        for depth in range(len(boxes) + 1):
            counts[boxes[:depth]] += count
    shown = {path: count for path, count in counts.items() if count >= _LEAST_RATIO * awaited.n}
    places = {path: str(place) for place, path in enumerate(shown)}
    whole = _WHOLE.get(awaited.kind, "awaited time")
    root: _Box = (whole, whole, "grid")
    depth = 1 + max(map(len, shown))
    figure = blank(theme, x_title="", y_title="", height=_AROUND + _ROW_HEIGHT * depth)
    figure.add_trace(
        {
            "type": "icicle",
            "name": whole,
            "ids": list(places.values()),
            "parents": [places[path[:-1]] if path else "" for path in shown],
            "labels": [(path[-1] if path else root)[0] for path in shown],
            "values": list(shown.values()),
            "customdata": [
                [(path[-1] if path else root)[1], percent(count / awaited.n), number(count)]
                for path, count in shown.items()
            ],
            "marker": {
                "colors": [getattr(theme, (path[-1] if path else root)[2]) for path in shown],
                "line": {"color": theme.background, "width": 1},
            },
            "leaf": {"opacity": 1},
            "textfont": {"color": [theme.background if path else theme.text for path in shown]},
            "branchvalues": "total",
            "sort": True,
            "tiling": {"orientation": "v", "pad": 0},
            "pathbar": {"visible": False},
            "textposition": "middle left",
            "hovertemplate": "%{customdata[0]}<br>%{customdata[1]}, %{customdata[2]} samples<extra></extra>",
        }
    )
    figure.update_layout(margin={"l": 4, "r": 4, "t": 8, "b": 8}, xaxis_visible=False, yaxis_visible=False)
    figure.update_layout(uniformtext={"minsize": 12, "mode": "hide"})
    stages = ", grouped by stage" if by_stage else ""
    return Chart(
        title="Which stage and line does training wait for?"
        if by_stage
        else f"Which lines {_ASKED.get(awaited.kind, 'does training wait for')}?",
        figure=figure,
        caption=f"{report.samples(awaited)}{stages}: callers above, callees below. "
        "Coloured: your code. Grey: libraries. Click a box to enlarge it.",
        takeaway=_takeaway(counts, awaited.n, by_stage=by_stage),
    )


def has_stages(awaited: AwaitedTime) -> bool:
    """Return whether the stacks are in more than one stage."""
    return len({stage_of(stack) for stack in awaited.stacks}) > 1


def _boxes(stack: tuple[SourceFrame, ...], *, by_stage: bool) -> Iterator[_Box]:
    if by_stage:
        stage = report.part(stage_of(stack) or "other")
        yield escape(stage, quote=False), f"stage: {escape(stage, quote=False)}", "worker"
    for frame in stack:
        if any(path in frame.path for path in _HIDDEN):
            continue
        file = os.path.basename(frame.path)
        if frame.is_own:
            source = f"<br><b>{escape(frame.source, quote=False)}</b>" if frame.source else ""
            label = f"{frame.function}  {file}:{frame.line}"
            yield (
                escape(label, quote=False),
                f"{escape(f'{frame.function}, {frame.path}:{frame.line}')}{source}",
                "lost",
            )
        else:
            name = escape(frame.place.full_name, quote=False)
            yield name, f"{name}, {escape(frame.path, quote=False)}", "quiet"


def _takeaway(counts: Counter[tuple[_Box, ...]], n: int, *, by_stage: bool) -> str:
    colour = "worker" if by_stage else "lost"
    totals: Counter[str] = Counter()
    for path, count in counts.items():
        if path and path[-1][2] == colour:
            totals[path[-1][0]] = max(totals[path[-1][0]], count)
    largest = totals.most_common(1)
    return f"Largest: {largest[0][0]}, {percent(largest[0][1] / n)}." if largest else ""
