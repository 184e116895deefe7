"""Predictions for other settings of a DataLoader, by the replay of the run."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from app.figures.base import Chart, Trace, blank, faint, line, marks
from app.format import byte_axis
from app.theme import Theme
from collector.diagnosis.tuning import Forecast, Option, Setting, option_text
from collector.units import is_known, number, percent, size


def by_workers(
    options: Sequence[Option], chosen: Option, outlook: Forecast, theme: Theme, *, of: str = ""
) -> Chart:
    """Draw throughput and its interval by number of workers, all else as chosen; `of` names the rank."""
    per_batch, unit = rate_unit(outlook)
    figure = blank(theme, x_title="num_workers", y_title=f"throughput{of} ({unit})")
    x = np.array([option.setting.num_workers for option in options], dtype=np.float64)
    low, high = (per_batch * np.array([getattr(option, name) for option in options]) for name in ("low", "high"))
    figure.add_trace(
        {
            "type": "scatter",
            "name": "90% interval",
            "x": np.concatenate([x, x[::-1]]),
            "y": np.concatenate([high, low[::-1]]).astype(np.float32),
            "fill": "toself",
            "mode": "lines",
            "fillcolor": faint(theme.worker),
            "line": {"width": 0},
            "hoverinfo": "skip",  # an outline has no value at x: the hover of the line gives the interval
        }
    )
    rates = [option.batches_per_second * per_batch for option in options]
    predicted = line("predicted", x, rates, theme.worker, unit, mode="lines+markers")
    figure.add_trace(_with_texts(predicted, [_interval(option, per_batch) for option in options]))
    for name, others in (
        ("if they share one thing", [option.if_shared for option in options]),
        ("if each waits for itself", [option.if_apart for option in options]),
    ):
        if any(others):
            other = [math.nan if rate is None else rate.batches_per_second * per_batch for rate in others]
            figure.add_trace(line(name, x, other, theme.quiet, unit, mode="lines+markers", line={"dash": "dot"}))
    measured = outlook.measured
    measured_point = [float(measured.setting.num_workers)], [measured.batches_per_second * per_batch]
    figure.add_trace(_mark("measured", *measured_point, theme.text, "diamond", unit))
    chosen_point = [float(chosen.setting.num_workers)], [chosen.batches_per_second * per_batch]
    figure.add_trace(
        _with_texts(_mark("chosen", *chosen_point, theme.worker, "circle", unit), [_interval(chosen, per_batch)])
    )
    figure.update_xaxes(dtick=1 if x.max() <= 16 else None)
    is_undecided = chosen.if_shared or chosen.if_apart
    undecided = f" Two predictions: {option_text(chosen, per_batch, unit)}." if is_undecided else ""
    return Chart(
        title="How much faster would it be?",
        figure=figure,
        caption=f"Predicted by the replay, with {words(chosen.setting, workers=False)}.",
        takeaway=f"{number(chosen.batches_per_second * per_batch)} {unit} with {words(chosen.setting)}, "
        f"{number(outlook.current.batches_per_second * per_batch)} {unit} in this run.{undecided}",
    )


def front(outlook: Forecast, chosen: Option, theme: Theme) -> Chart:
    """Draw waiting against host memory, or against batches in flight if memory is not known."""
    in_bytes = is_known(outlook.current.memory_bytes)
    shown = [*outlook.options, outlook.current, chosen]
    unit_bytes, unit = byte_axis(max((o.memory_bytes for o in shown if is_known(o.memory_bytes)), default=0.0))
    title = f"host memory of the loop ({unit})" if in_bytes else "batches in flight (count)"
    figure = blank(theme, x_title=title, y_title="waiting (% of the time)")

    def place(options: Sequence[Option]) -> tuple[list[float], list[float]]:
        x = [o.memory_bytes / unit_bytes if in_bytes else float(o.setting.in_flight) for o in options]
        return x, [o.wait_ratio * 100 for o in options]

    for name, options, colour, symbol in (
        ("settings", [o for o in outlook.options if o.fits], theme.quiet, "circle-open"),
        ("does not fit into memory", [o for o in outlook.options if not o.fits], theme.quiet, "x-thin-open"),
    ):
        if options:
            trace = _mark(name, *place(options), colour, symbol, "%", size=8)
            figure.add_trace(_with_texts(trace, [words(o.setting) for o in options]))
    best = outlook.front
    figure.add_trace(line("least waiting for the memory", *place(best), theme.worker, "%", line={"dash": "dot"}))
    figure.add_trace(_mark("this run", *place([outlook.current]), theme.text, "diamond", "%"))
    figure.add_trace(_mark("chosen", *place([chosen]), theme.worker, "circle", "%"))
    figure.update_layout(hovermode="closest")
    figure.update_yaxes(rangemode="tozero")
    return Chart(
        title="How much memory does less waiting cost?",
        figure=figure,
        caption="Each point is a setting of num_workers and prefetch_factor.",
        takeaway=f"Chosen: {percent(chosen.wait_ratio)} waiting, {size(chosen.memory_bytes)}.",
    )


def words(setting: Setting, *, workers: bool = True) -> str:
    """Return a setting as `num_workers = 4, prefetch_factor = 2, in_order = False`."""
    parts = [f"num_workers = {setting.num_workers}"] if workers else []
    parts.append(f"prefetch_factor = {setting.prefetch_factor}")
    return ", ".join(parts if setting.in_order else [*parts, "in_order = False"])


def rate_unit(outlook: Forecast) -> tuple[float, str]:
    """Return (units per batch, unit of throughput): samples if their number is known, else batches."""
    samples = outlook.measured.samples_per_batch
    return (samples, "samples/s") if is_known(samples) else (1.0, "batches/s")


def _interval(option: Option, per_batch: float) -> str:
    return f"(90% interval {number(option.low * per_batch)} to {number(option.high * per_batch)})"


def _with_texts(trace: Trace, texts: Sequence[str]) -> Trace:
    """Return the trace with a text after each value on hover; each point needs one, else Plotly shows its name."""
    return {**trace, "text": list(texts), "hovertemplate": f"{trace['hovertemplate']} %{{text}}"}


def _mark(
    name: str, x: list[float], y: list[float], colour: str, symbol: str, unit: str, *, size: int = 13
) -> Trace:
    hover, values = f"%{{y:,.4~g}} {unit}", np.asarray(y, dtype=np.float32)
    return marks(name, np.asarray(x, dtype=np.float64), values, colour, symbol, size, hover)
