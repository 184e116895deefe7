"""Post-mortem: whether the run died, which process, of what, and its last minute."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from app.blocks import Block, Facts, Listing, Metric, Metrics, Note, answer, needs_attention
from app.figures import devices, memory
from app.runtime.moment import FINDINGS, Moment, Panel, View
from app.runtime.refresh import show
from app.shared_panels import GPUS_AT_ONCE, gpus
from collector import report, stacks
from collector.diagnosis import LAST_MINUTE_SECONDS, MIN_POINTS
from collector.store import queries
from collector.store.queries import Span
from collector.units import MISSING, duration, is_known, number, size

#: Number of lines that a reader can tell apart; the largest are drawn.
MAX_LINES = 12
#: Seconds that are drawn after an error that the run outlived.
_AFTER_ERROR_SECONDS = 5


def _exit_record(moment: Moment) -> Iterator[Block]:
    if moment.verdict is None or moment.verdict.ending is None:
        yield from _facts(moment)
        return
    yield Facts(headings=("Exit record", ""), rows=report.exit_record(moment.verdict.ending.record))


def _happenings(moment: Moment) -> Iterator[Block]:
    if moment.verdict is None or moment.verdict.ending is None:
        return
    happenings = moment.verdict.ending.happenings
    rows = [(report.ago(happening.seconds), happening.text) for happening in happenings]
    yield Facts(headings=("Time", "What happened"), rows=rows)


def _facts(moment: Moment) -> Iterator[Block]:
    verdict = moment.verdict
    if verdict is None:
        return
    label, meaning = (
        ("Running for", "Time since the start of the run")
        if _goes_on(moment)
        else ("Duration", "Time from the start of the run to its end")
    )
    yield Metrics(
        items=[
            Metric(label, duration(verdict.duration_seconds), meaning),
            Metric("Steps", number(verdict.steps), "Optimizer steps of the last attempt"),
            Metric("Attempts", number(verdict.attempts), "Number of times that the launcher started the ranks"),
        ]
    )


def _traceback(moment: Moment) -> Iterator[Block]:
    """Show the end of the traceback of the exception that ended the run."""
    crashed = {finding.locus.pid for finding in moment.findings if finding.kind == "crashed"}
    events = queries.events(moment.snapshot, "exception") if crashed else pd.DataFrame()
    for event in events.to_dict("records"):
        body = json.loads(event["body"])
        if event["pid"] in crashed and body.get("traceback"):
            yield Listing(f"Traceback of process {event['pid']}", [str(body["type"])], str(body["traceback"]))
            return


def _stacks(moment: Moment) -> Iterator[Block]:
    """Show where the processes of a training that hangs stood in the last dump: the odd ones first."""
    culprits = {finding.locus.pid for finding in moment.findings if finding.kind == "hang"}
    dumps = queries.events(moment.snapshot, "stacks") if culprits else pd.DataFrame()
    if dumps.empty:
        return
    groups = stacks.group(stacks.of_event(json.loads(dumps["body"].iloc[0])))
    ago = moment.whole.elapsed(dumps["time_ns"].iloc[:1]).iloc[0]
    yield Note(f"Stacks of the processes {duration(ago)} after the start of the run, equal ones once.")
    for alike in groups:
        if alike.has_own_frames:
            is_culprit = any(stack.locus.pid in culprits for stack in alike.stacks)
            tag = "waited for" if is_culprit else "waits" if alike.waits_for_another else ""
            yield Listing(report.heading(alike), [tag] if tag else [], report.frame_text(alike))
    if others := [report.heading(alike) for alike in groups if not alike.has_own_frames]:
        yield Listing("Threads without a frame of your own code", [], "\n".join(others))


def _fatal_gpus(moment: Moment) -> Iterator[Block]:
    """Draw the last minute of each GPU whose memory ran out."""
    if not any(finding.kind == "cuda-oom" for finding in needs_attention(moment.findings)):
        return
    errors = queries.cuda_errors(moment.snapshot, moment.whole)
    ran_out = errors[~errors["was_caught"].astype(bool)].drop_duplicates("gpu", keep="last").set_index("gpu")
    for gpu in [gpu for gpu in gpus(moment) if gpu.row["gpu"] in ran_out.index][:GPUS_AT_ONCE]:
        error = ran_out.loc[gpu.row["gpu"]]
        within = _minute(moment, error["elapsed_seconds"] + _AFTER_ERROR_SECONDS)
        chart = devices.usage(
            queries.device_lines(moment.snapshot, within, gpu.row["gpu"]),
            gpu.of(queries.cuda_errors(moment.snapshot, within)),
            moment.theme,
            name=gpu.name,
            capacity_bytes=gpu.row["total_bytes"],
            share_bytes=float(error["limit_bytes"]) if error["is_of_share"] else None,
        )
        yield replace(chart, title=f"How did the memory of {gpu.name} run out?")


def _processes(moment: Moment) -> Iterator[Block]:
    within = _minute(moment)
    metric = queries.process_metric(moment.snapshot, within, "pss_bytes")
    if metric is None:
        yield Note("No sample of a process in the last minute. The collector takes them.")
        return
    places = queries.processes(moment.snapshot, within, fewest=MIN_POINTS)
    held = places[metric].fillna(places["rss_bytes"])  # a process that died young may have no PSS
    largest = held.groupby(places["series"], sort=False).max().nlargest(MAX_LINES).index.tolist()
    places = places[places["series"].isin(largest)]
    resident = None
    if memory.unread(places, metric):
        resident = queries.process_lines(moment.snapshot, within, "rss_bytes", largest, lacking=metric)
    yield memory.per_process(
        queries.process_lines(moment.snapshot, within, metric, largest),
        places,
        moment.theme,
        metric=metric,
        resident=resident,
        title="How much host memory did each process hold in the last minute?",
    )


def _limits(moment: Moment) -> Iterator[Block]:
    tightest = queries.tightest_limit(moment.snapshot)
    if tightest is not None:
        yield memory.against_limit(
            queries.host_lines(moment.snapshot, _minute(moment), tightest["limit"], tightest["host"]),
            moment.theme,
            name=memory.LIMIT_WORDS[tightest["limit"]],
            capacity_bytes=tightest["capacity_bytes"],
        )


def _table(moment: Moment) -> Iterator[Block]:
    within = _minute(moment)
    found = queries.processes(moment.snapshot, within, fewest=None)
    if found.empty:
        return
    # The last record of a process may be the one that found it gone.
    found = found.merge(queries.last_alive(moment.snapshot, within), how="left", on=["host", "pid", "ticks"])
    listed = _at_the_end(moment)
    if listed:
        found = found[
            [key in listed for key in zip(found["host"], found["pid"], found["ticks"], strict=True)]
        ].copy()
    found["highest"] = found["pss_peak_bytes"].fillna(found["rss_peak_bytes"])
    found = found.sort_values(["highest", "pid"], ascending=[False, True])
    lacks_pss = bool(memory.unread(found, "pss_bytes"))
    lacking = " (RSS): PSS was not read, and RSS counts shared pages fully." if lacks_pss else ""
    yield moment.table(
        "last-minute",
        f"Processes with a sample in the last minute, largest first.{lacking}{_earlier(moment)}",
        {
            "Process": found["series"],
            "Pid": found["pid"].astype(str),
            "Host": found["host"],
            "PSS, highest": _pss(found, "peak_bytes"),
            "PSS, last": _pss(found, "bytes"),
            "Private dirty, last": [size(value) for value in found["private_dirty_bytes"]],
            "RSS, last": [size(value) for value in found["rss_bytes"]],
            **_ends(moment, found, (within.to_ns - within.origin_ns) / 1e9),
        },
    )


def _at_the_end(moment: Moment) -> set[tuple[str, int, int]]:
    """Return the processes that the report lists of a run that died; none for any other run."""
    states = moment.verdict.summary["last_minute"] if moment.verdict else []
    return {(state["host"], state["pid"], state["start_ticks"]) for state in states}


def _earlier(moment: Moment) -> str:
    earlier = report.earlier_workers(moment.verdict.summary["earlier_workers_count"]) if moment.verdict else ""
    return f" {earlier}" if earlier and _at_the_end(moment) else ""


def _pss(found: pd.DataFrame, what: str) -> list[str]:
    """Return PSS in words, or RSS, marked as such, where no PSS was read."""
    both = zip(found[f"pss_{what}"], found[f"rss_{what}"], strict=True)
    return [size(pss) if is_known(pss) or not is_known(rss) else f"{size(rss)} (RSS)" for pss, rss in both]


def _ends(moment: Moment, found: pd.DataFrame, end_seconds: float) -> dict[str, list[str]]:
    """Return when each process was last seen alive, and whether its exit was seen."""
    ago = [f"{max(s, 0.0):.1f} s" if is_known(s) else MISSING for s in end_seconds - found["alive_seconds"]]
    ended = found["ended"].fillna(False)
    if _goes_on(moment):
        return {
            "Last seen": [text if text == MISSING else f"{text} ago" for text in ago],
            "State": ["ended" if gone else "alive" for gone in ended],
        }
    return {"Last seen before the end": ago, "Exit seen": ["yes" if gone else "no" for gone in ended]}


def _goes_on(moment: Moment) -> bool:
    if moment.verdict is None:  # not drawn up yet
        return moment.manifest.get("end_time_ns") is None
    return moment.is_running


def _minute(moment: Moment, end_seconds: float | None = None) -> Span:
    """Return the 60 s before an elapsed time, or the last 60 s if the records end earlier, of all ranks."""
    whole = moment.whole
    end_ns = whole.to_ns if end_seconds is None else min(whole.to_ns, whole.origin_ns + int(end_seconds * 1e9))
    from_ns = max(whole.from_ns, end_ns - int(LAST_MINUTE_SECONDS * 1e9))
    return replace(whole, from_ns=from_ns, to_ns=end_ns, rank=None)


def _answer(moment: Moment) -> str:
    assert moment.verdict is not None, "a view without a verdict has no answer"
    if moment.is_running:
        return answer(moment.findings, "No. The run is going on, and no process has died.")
    if moment.verdict.status == "finished" and not needs_attention(moment.findings):
        return "No. The run finished normally (exit status 0)."
    return answer(moment.findings, f"Yes. {report.unexplained_end(moment.verdict.exit_status)}")


VIEW = View(
    name="post-mortem",
    question="Did a process die, and why?",
    answer=_answer,
    rows=(
        (Panel("Exit record", _exit_record), Panel("Last 60 s", _happenings)),
        (FINDINGS,),
        (Panel("Traceback", _traceback),),
        (Panel("Stacks", _stacks),),
        (Panel("GPU memory", _fatal_gpus),),
        (Panel("Last minute", _processes),),
        (Panel("Limit", _limits),),
        (Panel("Processes", _table),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
