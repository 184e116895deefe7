"""The what-if of a loader: sliders for its settings, and the prediction that a replay of the run makes for them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import streamlit as st

from app.blocks import Block, Fold, Metric, Metrics, Note, draw
from app.figures import what_if as figures
from app.figures.base import Chart
from app.theme import Theme
from collector.diagnosis.tuning import Forecast, Option, Setting, option_text
from collector.units import is_known, number, percent, size

_QUESTION = "What would other settings give?"
_MIN_PREFETCH_RANGE = 8
_MAX_LINE_POINTS = 16
_MAX_CACHED = 8


def what_if(key: str, outlook: Forecast, theme: Theme, *, of: str, revision: str, first: str) -> None:
    """Draw the sliders, and below them the throughput, waiting and host memory of the chosen setting.

    `of` names the rank (` of rank 1`); it is empty without ranks. `first` says what to change before the setting.
    """
    own, start, most = outlook.measured.setting, _start(outlook), _most_workers(outlook)
    st.subheader(_QUESTION, anchor=False)
    st.caption(" ".join(filter(None, (first, _begin(outlook, is_first=not first), _source(of)))))
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        workers = st.slider("num_workers", 1, most, start.num_workers, key=f"{key}-workers", width=320)
        depth = max(_MIN_PREFETCH_RANGE, own.prefetch_factor)
        prefetch = st.slider("prefetch_factor", 1, depth, start.prefetch_factor, key=f"{key}-prefetch", width=320)
        help = (
            "in_order: batches arrive in the order of the sampler. "
            "Without it (torch ≥ 2.7), the first finished one arrives first"
        )
        in_order = st.toggle("in order", own.in_order, key=f"{key}-order", help=help)
    chosen = Setting(num_workers=workers, prefetch_factor=prefetch, in_order=in_order)
    metrics, by_workers, front = _predicted(outlook, chosen, most, theme, of, revision)
    draw(metrics, f"{key}-figures")
    draw(by_workers, f"{key}-by-workers")
    draw(Fold(label="Which settings wait least for their memory?", blocks=[front]), f"{key}-front")


def initial_blocks(outlook: Forecast, theme: Theme, *, of: str, revision: str) -> list[Block]:
    """Return the prediction for the initial setting of the sliders, for a page without sliders."""
    start = _start(outlook)
    figures_of_start = _predicted(outlook, start, _most_workers(outlook), theme, of, revision)
    return [
        Note(f"{_QUESTION} {_source(of)} These figures are for {figures.words(start)}."),
        *figures_of_start,
        Note("Ask for any other setting with the sliders in", command="tidegauge dashboard"),
    ]


def _start(outlook: Forecast) -> Setting:
    """Return the initial setting: the recommended one, else that of the run, with at least one worker."""
    setting = outlook.best.setting if outlook.best else outlook.measured.setting
    return replace(setting, num_workers=max(1, setting.num_workers), in_order=outlook.measured.setting.in_order)


def _most_workers(outlook: Forecast) -> int:
    own = outlook.measured.setting.num_workers
    return max(8, 2 * own, *(option.setting.num_workers for option in outlook.options))


def _source(of: str) -> str:
    return f"Computed by replaying the last batches{of or ' of this run'}; docs/tuning.md lists the limits."


@lru_cache(_MAX_CACHED)
def _predicted(
    outlook: Forecast, setting: Setting, most: int, theme: Theme, of: str, revision: str
) -> tuple[Metrics, Chart, Chart]:
    """Predict a setting. The result is cached: most refreshes have the same forecast, and the replay takes long."""
    step = -(-most // _MAX_LINE_POINTS)
    numbers = sorted({1, setting.num_workers, *range(step, most + 1, step)})
    chosen, *line = outlook.at([setting, *(replace(setting, num_workers=each) for each in numbers)])
    by_workers = figures.by_workers(line, chosen, outlook, theme, of=of)
    front = figures.front(outlook, chosen, theme)
    for chart in (by_workers, front):
        chart.keep_view(revision)
    return Metrics(items=_metrics(outlook, chosen, of)), by_workers, front


def _begin(outlook: Forecast, *, is_first: bool) -> str:
    """Return the initial setting as a sentence.

    It is recommended if it is faster with certainty and nothing else has to change first.
    """
    if outlook.best is not None:
        is_recommended = is_first and outlook.best.low > outlook.measured.batches_per_second
        which = "recommended setting" if is_recommended else "best predicted setting"
        return f"The sliders start at the {which}: {figures.words(outlook.best.setting)}."
    start = "the setting of this run" if outlook.measured.setting.num_workers else "one worker"
    return f"No better setting was found: the sliders start at {start}."


def _metrics(outlook: Forecast, chosen: Option, of: str) -> list[Metric]:
    own, (per_batch, unit) = outlook.current, figures.rate_unit(outlook)
    rates = [rate * per_batch for rate in (chosen.batches_per_second, chosen.low, chosen.high)]
    now = f"Now {number(outlook.measured.batches_per_second * per_batch)} {unit}."
    fits = "" if chosen.fits else " It does not fit into the free memory."
    full = f"; up to {size(chosen.most_bytes)} while training pauses" if is_known(chosen.most_bytes) else ""
    return [
        Metric(f"Throughput{of}", f"{number(rates[0])} {unit}", now),
        Metric("90% interval", f"{number(rates[1])} to {number(rates[2])} {unit}", "Of the throughput"),
        *_undecided_rates(chosen, per_batch, unit),
        Metric(
            "Waiting, predicted",
            percent(chosen.wait_ratio),
            f"Share of the loop's time in the DataLoader; now {percent(outlook.measured.wait_ratio)}",
        ),
        Metric(
            "Host memory",
            size(chosen.memory_bytes),
            f"Training process, workers and the batches in memory{full}. Now {size(own.memory_bytes)}.{fits}",
        ),
    ]


def _undecided_rates(chosen: Option, per_batch: float, unit: str) -> list[Metric]:
    """Return the throughput for both cases that the run cannot decide: workers share what they wait for or not."""
    return [
        Metric(
            label,
            f"{number(rate.batches_per_second * per_batch)} {unit}",
            f"This run does not show how much they share: {option_text(chosen, per_batch, unit)}.",
        )
        for label, rate in (
            ("If workers share what they wait for", chosen.if_shared),
            ("If each worker waits for itself", chosen.if_apart),
        )
        if rate is not None
    ]
