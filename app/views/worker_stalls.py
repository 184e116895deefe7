"""Workers & stalls: what the training waits for, which worker is behind it, and what to set instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pandas as pd

from app.blocks import Block, Fold, Metric, Metrics, Note, Widget, answer
from app.figures import awaited, workers
from app.runtime.loading import Recent, recent
from app.runtime.moment import FINDINGS, Moment, Panel, View, once
from app.runtime.refresh import show
from app.shared_panels import NO_FETCH
from app.what_if import initial_blocks, what_if
from collector import report
from collector.diagnosis import command_words
from collector.diagnosis.loading import lanes, waits_by_worker
from collector.diagnosis.tuning import HEALTHY_WAIT_RATIO
from collector.findings import Finding, Locus
from collector.store import queries
from collector.store.queries import EXACT_QUANTILE_ROWS
from collector.units import MISSING, duration, number, percent, quantity
from training_harness.records import INLINE_WORKER

#: Findings on a loader that explain no wait.
_NO_WAITS = ("caught-errors", "idle-workers")
NOTHING = "No stall has been found."
NO_LOADER = "No DataLoader has been seen, so there are no workers to wait for."


def answer_in_words(moment: Moment) -> str:
    """Return the gravest finding, or the share of waiting and the name of the finding about it."""
    recent_loop, chosen = recent(moment), moment.findings
    if recent_loop is None:
        return answer(chosen, NOTHING if moment.has_loader else NO_LOADER)
    waiting = f"Training waits {percent(recent_loop.seen.wait_ratio)} of its time over {_batches(recent_loop)}"
    if recent_loop.seen.wait_ratio < HEALTHY_WAIT_RATIO:
        return answer(chosen, f"{NOTHING} {waiting}.{moment.unjudged('data loading')}")
    return answer(chosen, f"{waiting}{_why(recent_loop, chosen)}.")


def _setting(moment: Moment) -> Iterator[Block]:
    if moment.loader is None:
        yield NO_FETCH
        return
    table = queries.loaders(moment.snapshot)
    of_loader = table[table["loader"] == moment.loader]
    if of_loader.empty:
        return
    first = of_loader.iloc[0]
    made = (
        "batches are made inline, in the training process (num_workers = 0)"
        if first["num_workers"] == 0
        else f"num_workers = {number(first['num_workers'])}, prefetch_factor = {number(first['prefetch_factor'])}"
    )
    yield Note(
        f"Loader {moment.loader} ({first['dataset']}, batch size {number(first['batch_size'])}): {made}.",
        icon=":material/settings:",
    )


def _key_figures(moment: Moment) -> Iterator[Block]:
    """Show the share of waiting, its main reason, and its share while a later batch was ready."""
    recent_loop = recent(moment)
    if recent_loop is None:
        return
    seen = recent_loop.seen
    most, seconds = next(iter(seen.by_part.items()), ("—", 0.0))
    waited = max(seen.wait_seconds, 1e-9)
    items = [
        Metric(
            f"Waiting, last {len(seen.waits):,} batches",
            percent(seen.wait_ratio),
            f"{duration(seen.wait_seconds)} over {_batches(recent_loop)}. The Overview has it over the whole run",
        ),
        Metric(
            "Largest part of the wait",
            f"{report.part(most)} {percent(seconds / waited)}",
            "What the worker of the awaited batch was doing; Pipeline stages shows the full split",
        ),
    ]
    if seen.loop.num_workers > 1:
        help = "Share of the wait in which a later batch was finished, and parked until its turn"
        items.append(Metric("Later batch ready", percent(seen.head_of_line_seconds / waited), help))
    yield Metrics(items=items)


def _wait_lanes(moment: Moment) -> Iterator[Block]:
    recent_loop = recent(moment)
    if recent_loop is None or not recent_loop.seen.loop.num_workers:
        return
    shown = lanes(recent_loop.seen)
    if shown is None or not (shown.bars["kind"] == "wait").any():
        yield Note("No lanes: they need a few batches of each worker after the first ones of an epoch.")
        return
    begin = (shown.begin_ns - moment.span.origin_ns) / 1e9
    yield workers.lanes(shown, moment.theme, begin_seconds=begin)


def _waits_by_worker(moment: Moment) -> Iterator[Block]:
    """Draw the waits by worker; say why if there are none."""
    recent_loop = recent(moment)
    if recent_loop is None or not recent_loop.seen.loop.num_workers:
        return
    loop = recent_loop.seen.loop
    if len(table := waits_by_worker(recent_loop.seen)):
        yield workers.waits_by_worker(table, moment.theme)
    else:
        text = (
            f"No worker can be named yet: this window has only the first {number(loop.ramp)} batches of an epoch. "
            "They do not count, because the workers had not filled the queue."
        )
        yield Note(text)


def _lines(moment: Moment) -> Iterator[Block]:
    """Draw the stacks behind the findings of this loader; without any, say how to get them if there is a stall."""
    verdict = moment.verdict
    places = (moment.loader, moment.span.rank)
    found = [one for one in (verdict.awaited if verdict else ()) if _is_at(one.locus, *places)]
    if found:
        yield awaited.flame_graph(found[0], moment.theme)
        if awaited.has_stages(found[0]):
            by_stage = awaited.flame_graph(found[0], moment.theme, by_stage=True)
            yield Fold(label="The same lines, by stage", blocks=[by_stage])
        place = (found[0].kind, found[0].locus)
        lines = next((each.waits_in for each in moment.all_findings if (each.kind, each.locus) == place), ())
        yield moment.table(
            "lines",
            f"Largest lines: shares of {report.samples(found[0])}.",
            {
                "Share": [percent(line.ratio) for line in lines],
                "Line": [line.site for line in lines],
                "Source": [line.source or MISSING for line in lines],
                "Context": [report.context(line) or MISSING for line in lines],
            },
        )
        return
    urgent = [f for f in moment.findings if f.has_line and f.severity != "info" and _is_at(f.locus, *places)]
    if urgent and not any("--investigate" in advice.text for finding in urgent for advice in finding.advice):
        command = f"`tidegauge run --investigate -- {command_words(moment.manifest)}`"
        yield Note(f"{command} names the lines that training waits for.")


def _is_at(where: Locus, loader: int | None, rank: int | None) -> bool:
    return where.loader in (None, loader) and (rank is None or where.rank in (None, rank))


def _other_settings(moment: Moment) -> Iterator[Block]:
    recent_loop = recent(moment)
    if recent_loop is None:
        return
    outlook, rank = recent_loop.outlook, recent_loop.seen.loop.rank
    slow = [f for f in moment.findings if f.kind == "slow-worker" and _is_at(f.locus, moment.loader, rank)]
    if slow:
        outlook = f"the replay assumes equally fast workers, and worker {slow[0].locus.worker} is slower"
    if isinstance(outlook, str):
        command = f"`tidegauge tune -- {command_words(moment.manifest)}`"
        yield Note(f"No prediction for other settings: {outlook}. {command} measures them.")
        return
    crowded = [f for f in moment.findings if f.limited_by == "oversubscribed" and f.fault == "this machine"]
    first = "Free the cores first: until then other processes decide what these settings gain." if crowded else ""
    of, revision = _rank(recent_loop), moment.run_id
    yield Widget(
        draw=partial(what_if, outlook=outlook, theme=moment.theme, of=of, revision=revision, first=first),
        initial=partial(initial_blocks, outlook, moment.theme, of=of, revision=revision),
    )


def _time_of_workers(moment: Moment) -> Iterator[Block]:
    """Fold away how the workers spend their time: the whole, the fetches, and each worker over time."""
    split = _split(moment)
    if split is None or moment.loader is None:
        return
    inline = _is_inline(split)
    charts: list[Block] = [] if inline else [workers.stages(split, moment.theme)]
    if split[["cpu_ms", "run_queue_ms", "blocked_ms"]].isna().all(axis=None):
        charts.append(Note("CPU time per fetch was not measured here."))
    else:
        charts.append(workers.causes(split, moment.theme))
    if not inline:
        fetches = queries.fetch_heat(moment.snapshot, moment.span, moment.loader)
        charts.append(workers.heat(fetches, moment.theme))
    yield Fold(label="What limits a fetch?" if inline else "How does each worker spend its time?", blocks=charts)


def _is_inline(split: pd.DataFrame) -> bool:
    return bool((split["worker"] == INLINE_WORKER).all())


def _waits(moment: Moment) -> Iterator[Block]:
    if (loader := moment.loader) is None:
        return
    waits = moment.zoomed(lambda span: queries.batch_waits(moment.snapshot, span, loader))
    if waits.empty:
        yield Note("No batch was yielded to the training loop in this window.")
        return
    split = _split(moment)
    inline = split is not None and _is_inline(split)
    queue = queries.queue_lines(moment.snapshot, moment.span, loader)
    yield workers.waits(waits, queue, moment.theme, inline=inline)


def _table(moment: Moment) -> Iterator[Block]:
    split = _split(moment)
    if split is None:
        return
    parts = {
        "Idle": "idle_ms",
        "__getitem__": "getitem_ms",
        "Collate": "collate_ms",
        "CPU": "cpu_ms",
        "Run queue": "run_queue_ms",
        "Blocked": "blocked_ms",
    }
    means = {name: [quantity(ms, "ms") for ms in split[column] / split["n"]] for name, column in parts.items()}
    sampled = " Fetch p50 and p95 are those of a sample." if split["n"].sum() > EXACT_QUANTILE_ROWS else ""
    yield moment.table(
        "workers",
        f"Columns after Fetch p95: mean per batch.{sampled}",
        {
            "Worker": [workers.worker_name(w, r) for w, r in zip(split["worker"], split["rank"], strict=True)],
            "Batches": [number(count) for count in split["n"]],
            "Fetch p50": [quantity(value, "ms") for value in split["median_ms"]],
            "Fetch p95": [quantity(value, "ms") for value in split["p95_ms"]],
            **means,
        },
    )


def _why(recent_loop: Recent, chosen: Sequence[Finding]) -> str:
    """Return the name of the finding about this loop's waiting, as the end of a sentence."""
    loop = recent_loop.seen.loop
    chosen = [finding for finding in chosen if finding.kind not in _NO_WAITS]
    of_loop = [f for f in chosen if f.locus.loader in (None, loop.loader) and f.locus.rank in (None, loop.rank)]
    if not of_loop:
        return ", and no rule says why"
    if of_loop[0].kind == "cannot-tell":
        return ", and the cause is not known: the reason is below"
    if of_loop[0].kind == "compute-bound":  # a finding about the whole run
        return f", but over the whole run its batches were made in time: see {report.title(of_loop[0])} below"
    return f": see {report.title(of_loop[0])} below"


def _batches(recent_loop: Recent) -> str:
    return f"the last {len(recent_loop.seen.waits):,} batches{_rank(recent_loop)}"


def _rank(recent_loop: Recent) -> str:
    """Return ` of rank 1` if there are ranks: a loop belongs to one rank."""
    rank = recent_loop.seen.loop.rank
    return "" if rank is None else f" of rank {rank}"


@once
def _split(moment: Moment) -> pd.DataFrame | None:
    if moment.loader is None:
        return None
    split = queries.worker_split(moment.snapshot, moment.span, moment.loader)
    return None if split.empty else split


# The newest batches come first, then the whole window.
VIEW = View(
    name="worker-stalls",
    question="What does training wait for, and which worker causes it?",
    answer=answer_in_words,
    by_loader=True,
    rows=(
        (FINDINGS,),
        (Panel("Setting", _setting),),
        (Panel("Key figures", _key_figures),),
        (Panel("Lines", _lines),),
        (Panel("Lanes", _wait_lanes),),
        (Panel("Waits by worker", _waits_by_worker), Panel("Waits", _waits, turn=1)),
        (Panel("Other settings", _other_settings),),
        (Panel("Time of workers", _time_of_workers, turn=1),),
        (Panel("Workers", _table, turn=1),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
