"""Overview: what needs attention, the key figures, host memory, and where the step time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from app.blocks import Block, Metric, Metrics, Note, answer, needs_attention, workers_reporting
from app.figures import devices, memory, steps
from app.runtime.moment import FINDINGS, Moment, Panel, View, once
from app.runtime.refresh import show
from app.shared_panels import NO_PROCESS, gpu_usage, gpus
from collector import report
from collector.diagnosis import Slowdown
from collector.store import queries
from collector.store.queries import EXACT_QUANTILE_ROWS
from collector.units import MISSING, is_known, number, percent, quantity, size

#: Unit of a verdict's steps, where no optimizer was seen -> its name.
_STEP_UNITS = {"forward pass": "Forward passes", "batch": "Batches (no optimizer was seen)", "step": "Own steps"}


def _answer(moment: Moment) -> str:
    ending = moment.verdict.ending if moment.verdict else None
    if ending is not None:
        return answer(moment.findings, report.unexplained_end(ending.record.exit_status))
    is_healthy = all(finding.is_healthy for finding in moment.findings)
    is_calm = is_healthy and _slowdown(moment) is None
    what = "The steps became slower" if is_healthy else "The findings below are information"
    calm = "Nothing needs attention" if is_calm else f"No warnings. {what}"
    return answer(moment.findings, f"{calm}{' so far' if moment.is_running and is_calm else ''}.")


def _slowdown(moment: Moment) -> Slowdown | None:
    return moment.verdict.summary["throughput"]["slowdown"] if moment.verdict else None


def _checks(moment: Moment) -> Iterator[Block]:
    """List what was looked at without a finding, and what could not be judged."""
    if moment.verdict is None:
        return
    fine, unjudged = report.check_words(moment.verdict.checks)
    if fine:
        yield Note(fine, icon=":material/check:")
    if unjudged:
        yield Note(unjudged, icon=":material/help:")


def _key_figures(moment: Moment) -> Iterator[Block]:
    """Show six key figures: data wait and peaks over the whole run, the others over the chosen window."""
    step = queries.step_summary(moment.snapshot, moment.span)
    sampled = ", from a sample of them" if step["n"] > EXACT_QUANTILE_ROWS else ""
    over = f"over {int(step['n']):,} steps in the chosen window{sampled}"
    times = f"{quantity(step['p50_ms'], 'ms')} / {quantity(step['p95_ms'], 'ms')}" if step["n"] else MISSING
    items = [
        _steps(moment, step["step"]),
        Metric("Step p50 / p95", times, f"Median and 95th percentile {over}"),
        _data_wait(moment),
        _throughput(moment),
        _host_peak(moment),
        _gpu_peak(moment) or workers_reporting(moment.verdict, has_loader=moment.has_loader),
    ]
    yield Metrics(items=items)
    if moment.verdict and (start := report.start_words(moment.verdict)):
        yield Note(f"Start: {start}.", icon=":material/timer:")
    if slowdown := _slowdown(moment):
        words = report.slower_words(slowdown)
        yield Note(f"The steps became slower: {words}.", icon=":material/trending_down:")


def _host_memory(moment: Moment) -> Iterator[Block]:
    metric, by_role = _memory_by_role(moment)
    if metric is None:
        yield NO_PROCESS
        return
    tightest = queries.tightest_limit(moment.snapshot) or {}
    host = tightest.get("host")
    yield memory.by_role(
        by_role,
        moment.theme,
        metric=metric,
        capacity_bytes=tightest.get("capacity_bytes"),
        capacity_name=_limit_words(tightest),
        title=f"Which processes hold the memory of {host}?"
        if _hosts_count(moment) > 1
        else "Which processes hold the host memory?",
    )
    if _hosts_count(moment) > 1:
        yield Note(f"{host} came nearest to its limit, of {_hosts_count(moment)} hosts. OOM risk shows the others.")


def _step_time(moment: Moment) -> Iterator[Block]:
    table = moment.zoomed(lambda span: queries.steps(moment.snapshot, span))
    if table.empty:
        yield Note("No step in this window, so there is no step time to split.")
        return
    yield steps.split(table, moment.theme)


def _decisive_chart(moment: Moment) -> Iterator[Block]:
    """Draw the chart that shows the gravest finding: a GPU's memory, the step time, else the host memory."""
    urgent = needs_attention(moment.findings)
    if urgent and (where := urgent[0].locus).device is not None:
        for gpu in gpus(moment):
            if gpu.row["device"] == where.device and where.host in (None, gpu.row["host"]):
                yield from gpu_usage(moment, gpu)
    yield from _time_and_memory(moment)[0](moment)


def _time_and_memory(moment: Moment) -> list[Callable[[Moment], Iterator[Block]]]:
    """Return what draws step time and host memory, that first which the gravest finding is about."""
    is_about_time = bool(moment.findings) and moment.findings[0].group in ("data loading", "training")
    return [_step_time, _host_memory] if is_about_time else [_host_memory, _step_time]


def _roles(moment: Moment) -> Iterator[Block]:
    metric, grid = _memory_by_role(moment)
    if metric is None:
        return
    word = memory.METRIC_WORDS[metric]
    by_role = grid.drop(columns="elapsed_seconds").rename(columns=memory.ROLE_WORDS)
    by_role = by_role.assign(together=by_role.sum(axis=1))
    yield moment.table(
        "host-memory",
        "As drawn above. Each is highest at its own time.",
        {
            "Processes": by_role.columns,
            # at the end of a run every process is gone
            **({f"{word}, last": [size(value) for value in by_role.iloc[-1]]} if moment.is_running else {}),
            f"{word}, highest": [size(value) for value in by_role.max()],
        },
    )


def _ranks(moment: Moment) -> Iterator[Block]:
    rows = queries.rank_steps(moment.snapshot, moment.span)
    rows = rows[rows["n"] > 0]
    if rows.empty:
        return
    numbers = {"Rank": [number(rank) for rank in rows["rank"]]} if rows["rank"].notna().any() else {}
    yield moment.table(
        "steps",
        "All timed steps in the window; the first step is not timed.",
        {
            **numbers,
            "Steps": [number(count) for count in rows["n"]],
            "Mean step": [quantity(value, "ns") for value in rows["duration_ns"] / rows["n"]],
            "Slowest": [quantity(value, "ns") for value in rows["slowest_ns"]],
            "Data wait": [percent(ratio) for ratio in rows["wait_ns"] / rows["duration_ns"]],
        },
    )


@once
def _memory_by_role(moment: Moment) -> tuple[str | None, pd.DataFrame]:
    """Return (metric, bytes by role over time), on the host that came nearest to its limit if there are several."""
    metric = queries.process_metric(moment.snapshot, moment.span, "pss_bytes")
    if metric is None:
        return None, pd.DataFrame()
    host = (queries.tightest_limit(moment.snapshot) or {}).get("host")
    return metric, queries.memory_by_role(moment.snapshot, moment.span, metric, host)


def _steps(moment: Moment, newest: float) -> Metric:
    """Show the verdict's count once the run is over, and the newest step while it goes on."""
    count = newest + 1 if is_known(newest) else None
    if moment.verdict is not None and not moment.is_running:
        count = moment.verdict.steps
    unit = _STEP_UNITS.get((moment.verdict.step_unit if moment.verdict else None) or "", "Optimizer steps")
    return Metric("Steps", number(count), f"{unit} of one rank")


def _throughput(moment: Moment) -> Metric:
    loaders = moment.verdict.summary["throughput"]["training_loaders"] if moment.verdict else None
    throughput = queries.throughput(moment.snapshot, moment.span, loaders)
    unit = "samples" if is_known(throughput["samples_per_second"]) else "batches"
    value = throughput[f"{unit}_per_second"]
    return Metric(
        "Throughput",
        quantity(value, f"{unit}/second"),
        f"Over {int(throughput['n']):,} batches of training, the chosen ranks together",
    )


def _data_wait(moment: Moment) -> Metric:
    """Show the verdict's figure, so that report and dashboard agree.

    Without a DataLoader, show the share of time outside the step instead.
    """
    verdict = moment.verdict
    outside = verdict.summary["outside_step"] if verdict else None
    ratio = verdict.summary["data_wait_ratio"] if verdict else None
    if verdict and ratio is None and outside is not None:
        computing = "" if outside["cpu_ratio"] is None else f", {percent(outside['cpu_ratio'])} of it computing"
        why = "a thread of its own loads ahead" if verdict.batches else "no DataLoader was seen"
        words = f"Share of step time outside forward, backward and optimizer{computing}; {why}"
        return Metric("Outside the step", percent(outside["ratio"]), words)
    words = "Share of its time that training waits for the next batch, over the whole run"
    return Metric("Data wait", percent(ratio), words)


def _hosts_count(moment: Moment) -> int:
    return int(queries.host_limits(moment.snapshot)["host"].nunique())


def _limit_words(limit: Mapping[str, Any]) -> str:
    return "cgroup limit" if limit.get("limit") == "cgroup" else "host memory"


def _host_peak(moment: Moment) -> Metric:
    tightest = queries.tightest_limit(moment.snapshot) or {}
    # The limit is per host, so a sum over hosts has none.
    capacity, host = tightest.get("capacity_bytes"), tightest["host"] if _hosts_count(moment) > 1 else None
    all_ranks = replace(moment.whole, rank=None)
    by_role = queries.memory_by_role(moment.snapshot, all_ranks, "pss_bytes", host).drop(columns="elapsed_seconds")
    peak, where = by_role.sum(axis=1, min_count=1).max(), "of the run" if host is None else f"on {host}"
    judged = moment.verdict.summary["peak"]["run_pss_bytes"] if moment.verdict and host is None else None
    if judged is not None and not peak >= judged:
        peak = judged  # memory grew after the last reading
    # Above the limit it is no share of it: a group is not charged for pages that others have read before.
    has_share = is_known(peak) and capacity and peak <= capacity
    share = f", and its share of the {_limit_words(tightest)} ({size(capacity)})" if has_share else ""
    return Metric(
        "Peak host memory (PSS)",
        f"{size(peak)} ({percent(peak / capacity)})" if has_share else size(peak),
        f"Highest PSS of all processes {where} together, over the whole run{share}. PSS counts shared pages once",
    )


def _gpu_peak(moment: Moment) -> Metric | None:
    table = queries.devices(moment.snapshot)
    if table.empty:
        return None
    ratio = table["reserved_peak_bytes"] / table["total_bytes"]
    place = int(ratio.fillna(-1).to_numpy().argmax())
    worst, name = table.iloc[place], devices.device_names(table, word="Device")[place]
    share, held = ratio.iloc[place], size(worst["reserved_peak_bytes"])
    return Metric(
        "GPU reserved peak",
        f"{held} ({percent(share)})" if is_known(share) else held,
        f"{name}: {held} of {size(worst['total_bytes'])} held by PyTorch's caching allocator, whole run",
    )


VIEW = View(
    name="overview",
    question="Is this run healthy, and if not, what should change first?",
    answer=_answer,
    lists_all=True,
    rows=(
        (FINDINGS,),
        (Panel("Key figures", _key_figures),),
        (Panel("Decisive chart", _decisive_chart),),
        (Panel("Second chart", lambda moment: _time_and_memory(moment)[1](moment), turn=1),),
        (Panel("Host memory in numbers", _roles), Panel("Steps in numbers", _ranks, turn=1)),
        (Panel("Checks", _checks),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
