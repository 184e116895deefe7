"""Overview: what needs attention, the key figures, host memory, and where the step time goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from app.blocks import Block, Findings, Metric, Metrics, Note, Table, answer, workers_reporting
from app.figures import devices, memory, steps
from app.moment import Moment, Panel, View
from app.panel import show
from collector.quantities import MISSING, known, number, percent, quantity, size
from collector.store import device_queries, loading_queries, memory_queries, queries
from collector.store.tiles import SAMPLED_BEYOND

NOTHING = "No rule has found anything wrong so far."


def headline(moment: Moment) -> Iterator[Block]:
    """The ranked findings, with the way to their evidence."""
    if moment.verdict is not None:
        yield Findings(findings=moment.verdict.findings, link=True, headline=True)


def key_figures(moment: Moment) -> Iterator[Block]:
    """Up to six key figures over the chosen window; data wait and peaks are over the whole run."""
    step = queries.step_summary(moment.snapshot, moment.span)
    sampled = ", from a sample of them" if step["n"] > SAMPLED_BEYOND else ""
    over = f"over {int(step['n']):,} steps in the chosen window{sampled}"
    times = f"{quantity(step['p50_ms'], 'ms')} / {quantity(step['p95_ms'], 'ms')}" if step["n"] else MISSING
    items = [
        _steps(moment, step["step"]),
        Metric(label="Step p50 / p95", value=times, help=f"Median and 95th percentile {over}"),
        _data_wait(moment),
        _throughput(moment),
        _host_peak(moment),
        _gpu_peak(moment) or workers_reporting(moment.verdict, has_loader=moment.has_loader),
    ]
    yield Metrics(items=items)


def host_memory(moment: Moment) -> Iterator[Block]:
    """PSS by role against the limit that binds."""
    metric, held = _held(moment)
    if metric is None:
        yield Note(text="No process has been sampled in this window: only the collector does that.")
        return
    tightest = memory_queries.tightest_limit(moment.snapshot) or {}
    host = tightest.get("host")
    yield memory.by_role(
        held,
        moment.theme,
        metric=metric,
        capacity_bytes=tightest.get("capacity_bytes"),
        capacity_name=_limit_words(tightest),
        title=f"Who holds the memory of {host}?" if _hosts_count(moment) > 1 else "Who holds the host memory?",
        revision=moment.run_id,
    )
    if _hosts_count(moment) > 1:
        yield Note(
            text=f"Of {_hosts_count(moment)} hosts, {host} came nearest to its limit; OOM risk has the others."
        )


def step_time(moment: Moment) -> Iterator[Block]:
    """Data wait and the rest of each step."""
    table = queries.steps(moment.snapshot, moment.span)
    if table.empty:
        yield Note(text="No step in this window, so there is no step time to split.")
        return
    yield steps.split(table, moment.theme, revision=moment.run_id)


def roles(moment: Moment) -> Iterator[Block]:
    """Host memory in numbers."""
    metric, found = _held(moment)
    if metric is None:
        return
    word, held = (
        memory.METRIC_WORDS[metric],
        found.drop(columns="elapsed_seconds").rename(columns=memory.ROLE_WORDS),
    )
    held = held.assign(together=held.sum(axis=1))
    yield Table(
        frame=pd.DataFrame(
            {
                "Processes": held.columns,
                f"{word}, last": [size(value) for value in held.iloc[-1]],
                f"{word}, highest": [size(value) for value in held.max()],
            }
        ),
        caption="As drawn above. Each is highest at its own time.",
        download=f"{moment.run_id}-host-memory",
    )


def ranks(moment: Moment) -> Iterator[Block]:
    """Step time in numbers."""
    found = queries.rank_steps(moment.snapshot, moment.span)
    found = found[found["n"] > 0]
    if found.empty:
        return
    frame = pd.DataFrame(
        {
            "Rank": [number(rank) for rank in found["rank"]],
            "Steps": [number(count) for count in found["n"]],
            "Mean step": [quantity(value, "ns") for value in found["duration_ns"] / found["n"]],
            "Slowest": [quantity(value, "ns") for value in found["slowest_ns"]],
            "Data wait": [percent(ratio) for ratio in found["wait_ns"] / found["duration_ns"]],
        }
    )
    yield Table(
        frame=frame if found["rank"].notna().any() else frame.drop(columns="Rank"),
        caption="Of the steps in the window that were timed, which the first is not.",
        download=f"{moment.run_id}-steps",
    )


def no_gpu(moment: Moment) -> Iterator[Block]:
    """One note in place of the GPU cards of a run without CUDA."""
    if device_queries.devices(moment.snapshot).empty:
        yield Note(text="CPU-only run: no CUDA device was used or seen, so the GPU figures are left out.")


def _held(moment: Moment) -> tuple[str | None, pd.DataFrame]:
    """What is drawn of host memory, and by role: of several hosts, on the one that came nearest to its limit."""
    return moment.once("held by role", lambda: _hold(moment))


def _hold(moment: Moment) -> tuple[str | None, pd.DataFrame]:
    metric = memory_queries.process_metric(moment.snapshot, moment.span, "pss_bytes")
    if metric is None:
        return None, pd.DataFrame()
    host = (memory_queries.tightest_limit(moment.snapshot) or {}).get("host")
    return metric, memory_queries.memory_by_role(moment.snapshot, moment.span, metric, host)


def _steps(moment: Moment, newest: float) -> Metric:
    """Count as the verdict does once the run is over, and up to the newest step while it goes on."""
    count = newest + 1 if known(newest) else None
    if moment.verdict is not None and moment.verdict.status != "running":
        count = moment.verdict.steps
    return Metric(label="Steps", value=number(count), help=f"{_unit(moment)} so far, of one rank")


def _throughput(moment: Moment) -> Metric:
    loaders = moment.verdict.summary["throughput"]["training_loaders"] if moment.verdict else None
    made = loading_queries.throughput(moment.snapshot, moment.span, loaders)
    unit = "samples" if known(made["samples_per_second"]) else "batches"
    value = made[f"{unit}_per_second"]
    return Metric(
        label="Throughput",
        value=quantity(value, f"{unit}/second"),
        help=f"Over {int(made['n']):,} batches of training, the chosen ranks together",
    )


def _unit(moment: Moment) -> str:
    units = {"forward pass": "Forward passes", "batch": "Batches (no optimizer was seen)", "step": "Own steps"}
    return units.get((moment.verdict.step_unit if moment.verdict else None) or "", "Optimizer steps")


def _data_wait(moment: Moment) -> Metric:
    """Show the verdict's own figure, so that report and dashboard agree; without a DataLoader the time outside."""
    summary = moment.verdict.summary if moment.verdict else {}
    outside = summary.get("outside_step")
    if summary.get("data_wait_ratio") is None and outside is not None:
        computing = "" if outside["cpu_ratio"] is None else f", {percent(outside['cpu_ratio'])} of it computing"
        words = f"Share of step time outside forward, backward and optimizer{computing}; no DataLoader was seen"
        return Metric(label="Outside the step", value=percent(outside["ratio"]), help=words)
    words = "Share of the loop's time, whole run"
    return Metric(label="Data wait", value=percent(summary.get("data_wait_ratio")), help=words)


def _hosts_count(moment: Moment) -> int:
    return int(memory_queries.host_limits(moment.snapshot)["host"].nunique())


def _limit_words(limit: Mapping[str, Any]) -> str:
    return "cgroup limit" if limit.get("limit") == "cgroup" else "host memory"


def _host_peak(moment: Moment) -> Metric:
    peak = moment.verdict.summary["peak"]["run_pss_bytes"] if moment.verdict else None
    tightest = memory_queries.tightest_limit(moment.snapshot) or {}
    capacity, where = tightest.get("capacity_bytes"), "of the run"
    if _hosts_count(moment) > 1:  # what several hosts hold together meets no limit
        host = tightest["host"]
        held = memory_queries.memory_by_role(moment.snapshot, moment.whole, "pss_bytes", host)
        peak, where = held.drop(columns="elapsed_seconds").sum(axis=1).max(), f"on {host}"
    share = f" ({percent(peak / capacity)})" if known(peak) and capacity else ""
    return Metric(
        label="Peak host memory (PSS)",
        value=f"{size(peak)}{share}",
        help=f"PSS of all processes {where} together, whole run, against the {_limit_words(tightest)} of "
        f"{size(capacity)}. PSS counts a page that n processes share as 1/n in each, so it adds up",
    )


def _gpu_peak(moment: Moment) -> Metric | None:
    table = device_queries.devices(moment.snapshot)
    if table.empty:
        return None
    ratio = table["reserved_peak_bytes"] / table["total_bytes"]
    place = int(ratio.fillna(-1).to_numpy().argmax())
    worst, name = table.iloc[place], devices.named(table, word="Device")[place]
    share = worst["reserved_peak_bytes"] / worst["total_bytes"]
    return Metric(
        label="GPU reserved peak",
        value=percent(share) if known(share) else size(worst["reserved_peak_bytes"]),
        help=f"{name}: {size(worst['reserved_peak_bytes'])} of {size(worst['total_bytes'])} "
        "held by PyTorch's caching allocator, whole run",
    )


VIEW = View(
    name="overview",
    question="Is this run well, and if not, what first?",
    answer=lambda moment: answer(moment.verdict.findings if moment.verdict else (), NOTHING),
    rows=(
        (Panel(name="Findings", build=headline),),
        (Panel(name="Key figures", build=key_figures),),
        (Panel(name="Host memory", build=host_memory), Panel(name="Step time", build=step_time, turn=1)),
        (Panel(name="Host memory in numbers", build=roles), Panel(name="Steps in numbers", build=ranks, turn=1)),
        (Panel(name="GPU", build=no_gpu),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
