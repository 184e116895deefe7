"""The what-if of a loader: two sliders, and what the replay of the run says to them."""

from __future__ import annotations

import streamlit as st

from app.blocks import Metric, Metrics, draw
from app.figures import outlook as figures
from app.theme import Theme
from collector.diagnosis.replay import Setting
from collector.diagnosis.tuning import Forecast, Option
from collector.wording import known, number, percent, quantity, size

_MOST_PREFETCH = 8
_LINE_WORKERS = 16


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
    chosen, *line = outlook.at(_settings(workers, prefetch, most, in_order=in_order))
    draw(Metrics(items=_metrics(outlook, chosen)), f"{key}-figures")
    left, right = st.columns(2)
    with left:
        draw(figures.by_workers(line, chosen, outlook, theme, revision=revision), f"{key}-by-workers")
    with right:
        draw(figures.front(outlook, chosen, theme, revision=revision), f"{key}-front")


def _settings(workers: int, prefetch: int, most: int, *, in_order: bool) -> list[Setting]:
    """What is chosen, and other numbers of workers beside it."""
    step = -(-most // _LINE_WORKERS)
    numbers = sorted({1, workers, *range(step, most + 1, step)})
    return [Setting(num_workers=each, prefetch_factor=prefetch, in_order=in_order) for each in (workers, *numbers)]


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
