"""Workers & stalls: what the training waits for, which worker is behind it, and what to set instead."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pandas as pd

from app.blocks import Block, Findings, Metric, Metrics, Note, Table, Widget, answer
from app.figures import rounds, workers
from app.loading import Recent, recent
from app.moment import Moment, Panel, View
from app.panel import show
from app.what_if import at_first, what_if
from collector.diagnosis.findings import KINDS, Finding
from collector.diagnosis.rounds import fold, lanes
from collector.diagnosis.speed_ups import KEPT_BUSY
from collector.quantities import duration, number, percent, quantity
from collector.store import loading_queries
from collector.store.tiles import SAMPLED_BEYOND
from collector.wording import part, title
from training_harness.records import INLINE_WORKER

GROUPS = ("data loading", "training")
OF_WORKERS = ("workers-not-reporting", "worker-killed")
NOTHING = "No stall has been found."
NO_LOADER = "No DataLoader has been seen, so there are no workers to wait for."
NO_FETCH = Note(text="No batch was made in this window by a DataLoader that reports.")


def in_words(moment: Moment) -> str:
    """The gravest finding, or how much is waited, and the name of the finding below that is about that."""
    found, chosen = recent(moment), _chosen(moment)
    if found is None:
        return answer(chosen, NOTHING if moment.has_loader else NO_LOADER)
    waiting = f"The training waits {percent(found.seen.wait_ratio)} of its time over {_batches(found)}"
    if found.seen.wait_ratio < KEPT_BUSY:
        return answer(chosen, f"{NOTHING} {waiting}.")
    return answer(chosen, f"{waiting}{_why(found, chosen)}.")


def findings(moment: Moment) -> Iterator[Block]:
    """What was found about data loading and the training loop."""
    if moment.verdict is not None:
        yield Findings(findings=_chosen(moment))


def setting(moment: Moment) -> Iterator[Block]:
    """How the loader is set up."""
    if moment.loader is None:
        yield NO_FETCH
        return
    table = loading_queries.loaders(moment.snapshot)
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
        text=f"Loader {moment.loader} ({first['dataset']}, batch size {number(first['batch_size'])}): {made}.",
        icon=":material/settings:",
    )


def key_figures(moment: Moment) -> Iterator[Block]:
    """How much is waited, for what, and how much of it while other batches lay there."""
    found = recent(moment)
    if found is None:
        return
    seen = found.seen
    most, seconds = next(iter(seen.by_part.items()), ("—", 0.0))
    waited = max(seen.wait_seconds, 1e-9)
    items = [
        Metric(
            label=f"Waiting, last {len(seen.waits):,} batches",
            value=percent(seen.wait_ratio),
            help=f"{duration(seen.wait_seconds)} over {_batches(found)}. The Overview has it over the whole run",
        ),
        Metric(
            label="Mostly for",
            value=f"{part(most)} {percent(seconds / waited)}",
            help="What the worker of the awaited batch was doing; Pipeline stages has the rest",
        ),
    ]
    if seen.loop.num_workers > 1:
        help = "Of the waiting, while a later batch was made already and lay parked for its turn"
        value = percent(seen.head_of_line_seconds / waited)
        items.append(Metric(label="Head of line", value=value, help=help))
    yield Metrics(items=items)


def in_lanes(moment: Moment) -> Iterator[Block]:
    """The rounds with the longest waiting, lane by lane."""
    found = recent(moment)
    if found is None or not found.seen.loop.num_workers:
        return
    shown = lanes(found.seen)
    if shown is None or not (shown.bars["kind"] == "wait").any():
        yield Note(text="No lanes: they need a few rounds of batches after the first ones of an epoch.")
        return
    begin = (shown.begin_ns - moment.span.origin_ns) / 1e9
    yield rounds.lanes(shown, moment.theme, begin_seconds=begin, revision=moment.run_id)


def folded(moment: Moment) -> Iterator[Block]:
    """The waits by position in the round, or why there are none: beside them stands a chart."""
    found = recent(moment)
    if found is None:
        return
    loop = found.seen.loop
    if not loop.num_workers:
        yield Note(text="No worker is waited for: the training process makes its batches itself (num_workers = 0).")
    elif len(table := fold(found.seen)):
        yield rounds.fold(table, moment.theme, revision=moment.run_id)
    else:
        text = (
            f"Which worker of a round is waited for cannot be told: the first {number(loop.ramp)} batches of an "
            "epoch do not count, for nothing was ready yet, and this window has no others."
        )
        yield Note(text=text)


def other_settings(moment: Moment) -> Iterator[Block]:
    """What other settings of the loader would give."""
    found = recent(moment)
    if found is None:
        return
    outlook = found.outlook
    if isinstance(outlook, str):
        yield Note(text=f"No what-if: {outlook}. `tidegauge tune -- COMMAND` measures other settings.")
        return
    of, revision = _rank(found), moment.run_id
    yield Widget(
        draw=partial(what_if, outlook=outlook, theme=moment.theme, of=of, revision=revision),
        still=partial(at_first, outlook, moment.theme, of=of, revision=revision),
    )


def stages(moment: Moment) -> Iterator[Block]:
    """Idle, dataset and collate of each worker."""
    split = _split(moment)
    if split is not None:
        yield workers.stages(split, moment.theme, revision=moment.run_id)


def causes(moment: Moment) -> Iterator[Block]:
    """CPU, run queue and blocked of each worker."""
    split = _split(moment)
    if split is None:
        return
    if split[["cpu_ms", "run_queue_ms", "blocked_ms"]].isna().all(axis=None):
        yield Note(text="CPU time per fetch was not measured here.")
        return
    yield workers.causes(split, moment.theme, revision=moment.run_id)


def heat(moment: Moment) -> Iterator[Block]:
    """Fetch time by worker over time."""
    if moment.loader is None:
        return
    fetches = loading_queries.fetch_heat(moment.snapshot, moment.span, moment.loader)
    yield workers.heat(fetches, moment.theme, revision=moment.run_id)


def waits(moment: Moment) -> Iterator[Block]:
    """The wait per batch and what lay ready."""
    if moment.loader is None:
        return
    batches = loading_queries.batch_lines(moment.snapshot, moment.span, moment.loader)
    if batches["wait"].points.empty:
        yield Note(text="No batch was yielded to the training loop in this window.")
        return
    split = _split(moment)
    inline = split is not None and bool((split["worker"] == INLINE_WORKER).all())
    yield workers.waits(batches, moment.theme, inline=inline, revision=moment.run_id)


def table(moment: Moment) -> Iterator[Block]:
    """The same in numbers."""
    split = _split(moment)
    if split is None:
        return
    means = {
        name: [quantity(value, "ms") for value in split[f"{name}_ms"] / split["n"]]
        for name in ("idle", "getitem", "collate", "cpu", "run_queue", "blocked")
    }
    sampled = " Fetch p50 and p95 are those of a sample." if split["n"].sum() > SAMPLED_BEYOND else ""
    yield Table(
        frame=pd.DataFrame(
            {
                "Worker": [workers.worker_name(w, r) for w, r in zip(split["worker"], split["rank"], strict=True)],
                "Batches": [number(count) for count in split["n"]],
                "Fetch p50": [quantity(value, "ms") for value in split["median_ms"]],
                "Fetch p95": [quantity(value, "ms") for value in split["p95_ms"]],
                "Idle": means["idle"],
                "__getitem__": means["getitem"],
                "Collate": means["collate"],
                "CPU": means["cpu"],
                "Run queue": means["run_queue"],
                "Blocked": means["blocked"],
            }
        ),
        caption=f"Idle to Blocked: mean per batch.{sampled}",
        download=f"{moment.run_id}-workers",
    )


def _chosen(moment: Moment) -> list[Finding]:
    found = moment.verdict.findings if moment.verdict else ()
    return [f for f in found if KINDS[f.kind] in GROUPS or f.kind in OF_WORKERS or _cannot_tell(f)]


def _cannot_tell(finding: Finding) -> bool:
    """Whether it says why nothing can be said of a loader; what grows in a worker belongs to the leaks."""
    return finding.kind == "cannot-tell" and finding.locus.loader is not None and finding.rate is None


def _why(found: Recent, chosen: list[Finding]) -> str:
    """Which finding is about the waiting of this loop, as the end of a sentence; what it says stands below."""
    loop = found.seen.loop
    mine = [f for f in chosen if f.locus.loader in (None, loop.loader) and f.locus.rank in (None, loop.rank)]
    if not mine:
        return ", and no rule says why"
    if mine[0].kind == "cannot-tell":
        return ", and why cannot be told: see the reason below"
    if mine[0].kind == "compute-bound":  # which is said of the whole run
        return f", but in the run as a whole hardly for batches that are not made yet: see {title(mine[0])} below"
    return f": see {title(mine[0])} below"


def _batches(found: Recent) -> str:
    return f"the last {len(found.seen.waits):,} batches{_rank(found)}"


def _rank(found: Recent) -> str:
    """` of rank 1` where there are ranks: what is of one loop is of one rank."""
    rank = found.seen.loop.rank
    return "" if rank is None else f" of rank {rank}"


def _split(moment: Moment) -> pd.DataFrame | None:
    if (loader := moment.loader) is None:
        return None
    split = moment.once("split", lambda: loading_queries.worker_split(moment.snapshot, moment.span, loader))
    return None if split.empty else split


# First what is of the newest batches, then what is of the whole window.
VIEW = View(
    name="worker-stalls",
    question="What does the training wait for, and which worker is behind it?",
    answer=in_words,
    by_loader=True,
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="Setting", build=setting),),
        (Panel(name="Key figures", build=key_figures),),
        (Panel(name="Lanes", build=in_lanes),),
        (Panel(name="Fold", build=folded), Panel(name="Waits", build=waits, turn=1)),
        (Panel(name="Worker time", build=stages, turn=1), Panel(name="Fetch time", build=causes, turn=1)),
        (Panel(name="Fetch time by worker", build=heat, turn=1),),
        (Panel(name="Other settings", build=other_settings),),
        (Panel(name="Workers", build=table, turn=1),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
