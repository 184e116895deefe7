"""Post-mortem: whether the run died, which process, of what, and its last minute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pandas as pd

from app.blocks import Block, Findings, Metric, Metrics, Note, Table, answer, needs_attention
from app.figures import devices, memory
from app.runtime.moment import Moment, Panel, View
from app.runtime.refresh import show
from collector import report
from collector.diagnosis import LAST_MINUTE_SECONDS, MIN_POINTS
from collector.findings import KINDS, Finding
from collector.store import queries
from collector.store.queries import Span
from collector.units import MISSING, duration, is_known, number, size

#: Number of lines that a reader can tell apart; the largest are drawn.
MAX_LINES = 12
#: Seconds that are drawn after an error that the run outlived.
_AFTER_ERROR_SECONDS = 5


def findings(moment: Moment) -> Iterator[Block]:
    """Show the deaths, with their evidence."""
    if moment.verdict is not None:
        yield Findings(findings=_deaths(moment))


def facts(moment: Moment) -> Iterator[Block]:
    """Show how the command ended."""
    verdict = moment.verdict
    if verdict is None:
        return
    ended = MISSING if verdict.exit_status is None else report.exit_words(verdict.exit_status)
    last = (
        [Metric(label="So far", value=duration(verdict.duration_seconds), help="Time since the start of the run")]
        if _goes_on(moment)
        else [
            Metric(label="Ended with", value=ended, help="Exit status or signal of the command"),
            Metric(
                label="Lasted",
                value=duration(verdict.duration_seconds),
                help="Time from the start of the run to its end",
            ),
        ]
    )
    yield Metrics(
        items=[
            Metric(label="Status", value=verdict.status, help="State of the command and of the training under it"),
            *last,
            Metric(label="Steps", value=number(verdict.steps), help="Optimizer steps of the last attempt"),
            Metric(
                label="Attempts",
                value=number(verdict.attempts),
                help="Number of times that the launcher started the ranks",
            ),
        ]
    )


def gpus(moment: Moment) -> Iterator[Block]:
    """Draw the last minute of each GPU whose memory ran out."""
    if not any(finding.kind == "cuda-oom" for finding in needs_attention(_deaths(moment))):
        return
    table = queries.devices(moment.snapshot)
    errors = queries.cuda_errors(moment.snapshot, moment.whole)
    ran_out = errors[~errors["was_caught"].astype(bool)].drop_duplicates("gpu", keep="last").set_index("gpu")
    names = dict(zip(table["gpu"], devices.device_names(table), strict=True))
    chosen = [row for row in table.to_dict("records") if row["gpu"] in ran_out.index]
    for row in chosen[: devices.AT_ONCE]:
        gpu, error = row["gpu"], ran_out.loc[row["gpu"]]
        within = minute_before(moment, error["elapsed_seconds"] + _AFTER_ERROR_SECONDS)
        of_minute = queries.cuda_errors(moment.snapshot, within)
        chart = devices.usage(
            queries.device_lines(moment.snapshot, within, gpu),
            of_minute[of_minute["gpu"] == gpu],
            moment.theme,
            name=names[gpu],
            capacity_bytes=row["total_bytes"],
            share_bytes=float(error["limit_bytes"]) if error["is_of_share"] else None,
        )
        yield replace(chart, title=f"How did the memory of {names[gpu]} run out?")


def processes(moment: Moment) -> Iterator[Block]:
    """Draw the host memory of each process in the last minute."""
    within = last_minute(moment)
    metric = queries.process_metric(moment.snapshot, within, "pss_bytes")
    if metric is None:
        yield Note(text="No sample of a process in the last minute. The collector takes them.")
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


def limits(moment: Moment) -> Iterator[Block]:
    """Draw the host memory that was nearest to its limit in the last minute."""
    tightest = queries.tightest_limit(moment.snapshot)
    if tightest is not None:
        yield memory.against_limit(
            queries.host_lines(moment.snapshot, last_minute(moment), tightest["limit"], tightest["host"]),
            moment.theme,
            name=memory.LIMIT_WORDS[tightest["limit"]],
            capacity_bytes=tightest["capacity_bytes"],
        )


def table(moment: Moment) -> Iterator[Block]:
    """List the processes of the last minute."""
    within = last_minute(moment)
    found = queries.processes(moment.snapshot, within, fewest=None)
    if found.empty:
        return
    # The last record of a process may be the one that found it gone.
    found = found.merge(queries.last_alive(moment.snapshot, within), how="left", on=["host", "pid", "ticks"])
    found["highest"] = found["pss_peak_bytes"].fillna(found["rss_peak_bytes"])
    found = found.sort_values("highest", ascending=False)
    lacking = memory.unread(found, "pss_bytes") and " (RSS): PSS was not read, and RSS counts shared pages fully."
    yield Table(
        frame=pd.DataFrame(
            {
                "Process": found["series"],
                "Pid": found["pid"].astype(str),
                "Host": found["host"],
                "PSS, highest": _pss(found, "peak_bytes"),
                "PSS, last": _pss(found, "bytes"),
                "Private dirty, last": [size(value) for value in found["private_dirty_bytes"]],
                "RSS, last": [size(value) for value in found["rss_bytes"]],
                **_ends(moment, found, (within.to_ns - within.origin_ns) / 1e9),
            }
        ),
        caption=f"Processes with a sample in the last minute, largest first.{lacking}",
        download=f"{moment.run_id}-last-minute",
    )


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
    return moment.verdict.status == "running"


def last_minute(moment: Moment) -> Span:
    """Return the last 60 s that were recorded, of all ranks."""
    whole = moment.whole
    return replace(whole, from_ns=max(whole.from_ns, whole.to_ns - int(LAST_MINUTE_SECONDS * 1e9)), rank=None)


def minute_before(moment: Moment, end_seconds: float) -> Span:
    """Return the 60 s before an elapsed time, or the last 60 s if the records end earlier."""
    to_ns = min(moment.whole.to_ns, moment.whole.origin_ns + int(end_seconds * 1e9))
    return replace(
        last_minute(moment), from_ns=max(moment.whole.from_ns, to_ns - int(LAST_MINUTE_SECONDS * 1e9)), to_ns=to_ns
    )


def _deaths(moment: Moment) -> list[Finding]:
    return [f for f in moment.verdict.findings if KINDS[f.kind] == "death"] if moment.verdict else []


def _answer(moment: Moment) -> str:
    assert moment.verdict is not None, "a view without a verdict has no answer"
    if moment.verdict.status == "running":
        return answer(_deaths(moment), "No. The run is going on, and no process has died.")
    if moment.verdict.status == "finished" and not needs_attention(_deaths(moment)):
        return "No. The run finished normally (exit status 0)."
    status = moment.verdict.exit_status
    ended = "" if not is_known(status) else f" with {report.exit_words(int(status))}"
    return answer(_deaths(moment), f"Yes. The run ended{ended}. Its records do not show the cause.")


VIEW = View(
    name="post-mortem",
    question="Did it die, which process, and of what?",
    answer=_answer,
    rows=(
        (Panel(name="Findings", build=findings),),
        (Panel(name="End", build=facts),),
        (Panel(name="GPU memory", build=gpus),),
        (Panel(name="Last minute", build=processes),),
        (Panel(name="Limit", build=limits),),
        (Panel(name="Processes", build=table),),
    ),
)

if __name__ == "__main__":
    show(VIEW)
