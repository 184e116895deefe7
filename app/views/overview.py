"""Overview: what needs attention, the key figures, host memory, and where the step time goes."""

from __future__ import annotations

from collections.abc import Iterator

from app.blocks import Block, Findings, Metric, Metrics, Note
from app.figures import memory, steps
from app.panel import Moment, Panel, View, show
from collector.store import loading_queries, memory_queries, queries
from collector.wording import MISSING, known, number, percent, quantity, size


def headline(moment: Moment) -> Iterator[Block]:
    """The ranked findings, with the way to their evidence."""
    if moment.verdict is not None:
        nothing = "No rule has found anything wrong so far."
        yield Findings(findings=moment.verdict.findings, nothing=nothing, link=True, headline=True)


def key_figures(moment: Moment) -> Iterator[Block]:
    """Up to six key figures over the chosen window; data wait and peaks are over the whole run."""
    step = queries.step_summary(moment.snapshot, moment.span)
    over = f"over {int(step['n']):,} steps in the chosen window"
    times = f"{quantity(step['p50_ms'], 'ms')} / {quantity(step['p95_ms'], 'ms')}" if step["n"] else MISSING
    items = [
        Metric(label="Steps", value=number(_next(step["step"])), help="Optimizer steps so far, of one rank"),
        Metric(label="Step p50 / p95", value=times, help=f"Median and 95th percentile {over}"),
        Metric(label="Data wait", value=percent(_data_wait(moment)), help="Share of the loop's time, whole run"),
        _throughput(moment),
        _host_peak(moment),
        _gpu_peak(moment) or _workers(moment),
    ]
    yield Metrics(items=items)


def host_memory(moment: Moment) -> Iterator[Block]:
    """PSS by role against the limit that binds."""
    metric = memory_queries.process_metric(moment.snapshot, moment.span, "pss_bytes")
    if metric is None:
        yield Note(text="No process has been sampled in this window: only the collector does that.")
        return
    capacity, name = binding_limit(moment)
    yield memory.by_role(
        memory_queries.memory_by_role(moment.snapshot, moment.span, metric),
        moment.theme,
        metric=metric,
        capacity_bytes=capacity,
        capacity_name=name,
        title="Who holds the host memory?",
        revision=moment.run_id,
    )


def step_time(moment: Moment) -> Iterator[Block]:
    """Data wait and the rest of each step."""
    table = queries.steps(moment.snapshot, moment.span)
    if table.empty:
        yield Note(text="No optimizer step in this window, so there is no step time to split.")
        return
    yield steps.split(table, moment.theme, revision=moment.run_id)


def no_gpu(moment: Moment) -> Iterator[Block]:
    """One note in place of the GPU cards of a run without CUDA."""
    if memory_queries.devices(moment.snapshot).empty:
        yield Note(text="CPU-only run: no CUDA device was used or seen, so the GPU figures are left out.")


def binding_limit(moment: Moment) -> tuple[float | None, str]:
    """The smaller of the cgroup's limit and the host's memory, with its name."""
    limits = memory_queries.host_limits(moment.snapshot)
    limits = limits[limits["limit"].isin(["cgroup", "host"])].sort_values("capacity_bytes")
    if limits.empty:
        return None, "host memory"
    first = limits.iloc[0]
    return float(first["capacity_bytes"]), "cgroup limit" if first["limit"] == "cgroup" else "host memory"


def _next(step: float) -> float | None:
    return step + 1 if known(step) else None


def _throughput(moment: Moment) -> Metric:
    made = loading_queries.throughput(moment.snapshot, moment.span)
    unit = "samples" if known(made["samples_per_second"]) else "batches"
    value = made[f"{unit}_per_second"]
    return Metric(
        label="Throughput",
        value=quantity(value, f"{unit}/second"),
        help=f"Over {int(made['n']):,} batches, the chosen ranks together",
    )


def _data_wait(moment: Moment) -> float | None:
    """The verdict's own figure, so that report and dashboard agree."""
    return moment.verdict.summary["data_wait_ratio"] if moment.verdict else None


def _host_peak(moment: Moment) -> Metric:
    peak = moment.verdict.summary["peak"]["run_pss_bytes"] if moment.verdict else None
    capacity, name = binding_limit(moment)
    share = f" ({percent(peak / capacity)})" if known(peak) and capacity else ""
    return Metric(
        label="Peak host memory (PSS)",
        value=f"{size(peak)}{share}",
        help=f"PSS of all processes of the run together, whole run, against the {name} of {size(capacity)}",
    )


def _gpu_peak(moment: Moment) -> Metric | None:
    table = memory_queries.devices(moment.snapshot)
    if table.empty:
        return None
    ratio = table["reserved_peak_bytes"] / table["total_bytes"]
    worst = table.iloc[int(ratio.fillna(-1).to_numpy().argmax())]
    share = worst["reserved_peak_bytes"] / worst["total_bytes"]
    return Metric(
        label="GPU reserved peak",
        value=percent(share) if known(share) else size(worst["reserved_peak_bytes"]),
        help=f"Device {int(worst['device'])}: {size(worst['reserved_peak_bytes'])} of {size(worst['total_bytes'])} "
        "held by PyTorch's caching allocator, whole run",
    )


def _workers(moment: Moment) -> Metric:
    reporting, expected = moment.verdict.workers_reporting if moment.verdict else (None, None)
    return Metric(
        label="Workers reporting",
        value=f"{number(reporting)} of {number(expected)}" if expected else "inline" if expected == 0 else MISSING,
        help="DataLoader workers that send records, of those that were started",
    )


show(
    View(
        name="overview",
        rows=(
            (Panel(name="Findings", build=headline),),
            (Panel(name="Key figures", build=key_figures),),
            (Panel(name="Host memory", build=host_memory), Panel(name="Step time", build=step_time)),
            (Panel(name="GPU", build=no_gpu),),
        ),
    )
)
