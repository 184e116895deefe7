"""How the collector keeps up, and what it takes."""

from __future__ import annotations

from collections.abc import Mapping

from app.figures.base import Chart, blank, sampled
from app.figures.memory import ELAPSED
from app.figures.samples import sample_line
from app.format import MIB
from app.theme import Theme
from collector.quantities import quantity, size
from collector.store.line_queries import Lines

#: name -> SQL over `agent`, in seconds.
LINES = {"interval": "interval_ns / 1e9", "lag": "ingest_lag_ns / 1e9"}


def timing(lines: Mapping[str, Lines], theme: Theme, *, revision: str) -> Chart:
    """Achieved sampling interval, and the age of the oldest record that is not in the lake."""
    figure = blank(theme, x_title=ELAPSED, y_title="time (s)", revision=revision)
    captions = []
    for name, colour, dash in (("interval", theme.latency, "dash"), ("lag", theme.reserved, "solid")):
        several = lines[name].points["series"].nunique() > 1
        for host, points in lines[name].points.groupby("series"):
            called = f"{name}, {host}" if several else name
            x, y = points["elapsed_seconds"], points["value"]
            figure.add_trace(sample_line(called, x, y, colour, "s", line={"dash": dash}))
        highest = quantity(lines[name].points["value"].max(), "seconds")
        captions.append(f"longest {name} {highest} of {lines[name].samples_count:,} samples")
    caption = f"{'; '.join(captions).capitalize()}. The lag falls with each commit to the lake."
    if sampled(lines["interval"]):
        caption += f" Drawn as {sampled(lines['interval'])}."
    return Chart(title="Does the collector keep up?", figure=figure, caption=caption)


def own_memory(lines: Lines, theme: Theme, *, revision: str) -> Chart:
    """Resident memory of the collector of each host."""
    figure = blank(theme, x_title=ELAPSED, y_title="RSS (MiB)", revision=revision)
    for number, (host, points) in enumerate(lines.points.groupby("series")):
        colour = theme.series[number % len(theme.series)]
        x, y = points["elapsed_seconds"], points["value"] / MIB
        figure.add_trace(sample_line(str(host), x, y, colour, "MiB"))
    caption = f"Peak {size(lines.points['value'].max())} of {lines.samples_count:,} samples."
    return Chart(title="What does the collector hold itself?", figure=figure, caption=caption)
