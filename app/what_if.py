"""The what-if of a loader: two sliders, and what the replay of the run says to them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import streamlit as st

from app.blocks import Metric, Metrics, draw
from app.figures import outlook as figures
from app.figures.base import Chart
from app.theme import Theme
from collector.diagnosis.replay import Setting
from collector.diagnosis.tuning import Forecast, Option
from collector.quantities import known, number, percent, quantity, size

_MOST_PREFETCH = 8
_LINE_WORKERS = 16
_KEPT = 8


def what_if(key: str, outlook: Forecast, theme: Theme, *, revision: str) -> None:
    """Draw the sliders, and below them the throughput, the waiting and the host memory of what they say."""
    own = outlook.measured.setting
    most = max(8, 2 * own.num_workers, *(option.setting.num_workers for option in outlook.options))
    start = outlook.best.setting if outlook.best else own
    st.subheader("What would other settings give?", anchor=False)
    st.caption("By a replay of the last batches of this run: docs/tuning.md says what it cannot know.")
    with st.container(horizontal=True, vertical_alignment="bottom", gap="medium"):
        workers = st.slider("num_workers", 1, most, max(1, start.num_workers), key=f"{key}-workers", width=320)
        depth = max(_MOST_PREFETCH, own.prefetch_factor)
        prefetch = st.slider("prefetch_factor", 1, depth, start.prefetch_factor, key=f"{key}-prefetch", width=320)
        help = (
            "in_order: batches come in the order of the sampler; without it (torch ≥ 2.7) whichever is made first"
        )
        in_order = st.toggle("in order", own.in_order, key=f"{key}-order", help=help)
    chosen = Setting(num_workers=workers, prefetch_factor=prefetch, in_order=in_order)
    metrics, by_workers, front = _predicted(outlook, chosen, most, theme, revision)
    draw(metrics, f"{key}-figures")
    left, right = st.columns(2)
    with left:
        draw(by_workers, f"{key}-by-workers")
    with right:
        draw(front, f"{key}-front")


@lru_cache(_KEPT)
def _predicted(
    outlook: Forecast, setting: Setting, most: int, theme: Theme, revision: str
) -> tuple[Metrics, Chart, Chart]:
    """What a setting gives, kept: most refreshes have the same forecast, and the replay takes long."""
    chosen, *line = outlook.at([setting, *_beside(setting, most)])
    return (
        Metrics(items=_metrics(outlook, chosen)),
        figures.by_workers(line, chosen, outlook, theme, revision=revision),
        figures.front(outlook, chosen, theme, revision=revision),
    )


def _beside(setting: Setting, most: int) -> list[Setting]:
    """The same setting with other numbers of workers, and its own."""
    step = -(-most // _LINE_WORKERS)
    numbers = sorted({1, setting.num_workers, *range(step, most + 1, step)})
    return [replace(setting, num_workers=number) for number in numbers]


def _metrics(outlook: Forecast, chosen: Option) -> list[Metric]:
    own, samples = outlook.own, outlook.measured.samples_per_batch
    per_batch, unit = (samples, "samples") if known(samples) else (1.0, "batches")
    rates = [rate * per_batch for rate in (chosen.batches_per_second, chosen.low, chosen.high)]
    fits = "" if chosen.fits else " It does not fit into what is free."
    return [
        Metric(
            label="Throughput",
            value=quantity(rates[0], f"{unit}/second"),
            help=f"90 % interval {number(rates[1])} to {number(rates[2])}; now "
            f"{quantity(outlook.measured.batches_per_second * per_batch, f'{unit}/second')}",
        ),
        Metric(
            label="90 % interval",
            value=f"{number(rates[1])} to {number(rates[2])}",
            help=f"Of the {unit} per second",
        ),
        Metric(
            label="Waiting",
            value=percent(chosen.wait_ratio),
            help=f"Share of the loop's time in the DataLoader; now {percent(outlook.measured.wait_ratio)}",
        ),
        Metric(
            label="Host memory",
            value=size(chosen.memory_bytes),
            help=f"Training process, workers and the batches that wait while it trains; now "
            f"{size(own.memory_bytes)}. Up to {size(chosen.most_bytes)} when the training pauses and "
            f"{chosen.setting.in_flight + 1} batches are there.{fits}",
        ),
    ]
