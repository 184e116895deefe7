"""Findings in words, for the terminal and the dashboard: loci, forecasts, allocation sites, names of evidence."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from collector.findings import AllocationSite, Eta, Evidence, Finding, Locus, WaitingLine, extended
from collector.report import labels
from collector.units import MISSING, after_steps, counted, duration, number, percent, quantity, size, until

if TYPE_CHECKING:
    from collector.diagnosis import Check, ExitRecord, Slowdown, Verdict
    from collector.diagnosis.loading import AwaitedTime
    from collector.diagnosis.tuning import WaitSummary

#: Units of a step that are named as such; all others are steps.
_NAMED_UNITS = ("forward pass", "batch")
#: Time until the first step that is worth a sentence, in seconds and as a share of the run.
_LONG_START_SECONDS, _LONG_START_RATIO = 15.0, 0.2
#: Share of the run's time below which a heading does not mention it.
_LEAST_LOST_RATIO = 0.01
#: Number of measurements that are shown at once; the others are a click, or `--verbose`, away.
_DECISIVE = 4
#: Measurements that many findings share: the context of those that decide.
_CONTEXT = (
    "starved_ratio",
    "hand_over_seconds",
    "consumer_seconds",
    "lost_wall_ratio",
    "lost_seconds",
    "batch_payload_bytes",
    "earlier_batch_payload_peak_bytes",
)
#: Figure in a sentence, with its unit.
_FIGURE = re.compile(r"\d[\d,.]*(?:%| ?(?:[KMGT]?i?B|[mµn]?s|min|h)\b)?")
#: Parts of a wait that are no stage, in words.
_PARTS = {
    "other": "dataset code",
    "idle": "worker idle",
    "transfer": "transfer to main process",
    "dispatch": "sampler and sending indices",
    "no core": "waiting for a core",
}


def locus(where: Locus) -> str:
    """Return a locus in words: `worker 1 of loader 0, rank 0`; empty for the whole run."""
    parts = []
    if where.worker is not None and where.worker >= 0:
        parts.append(f"worker {where.worker}" + (f" of loader {where.loader}" if where.loader is not None else ""))
    else:
        if where.role is not None:
            parts.append({"main": "training process", "worker": "workers"}.get(where.role, f"{where.role} process"))
        if where.loader is not None:
            parts.append(f"loader {where.loader}")
    if where.loader_name is not None:
        parts[-1] += f" ({where.loader_name})"
    if where.main_pid is not None:
        parts.append(f"training process {where.main_pid}")
    for name in ("stage", "device", "rank"):
        value = getattr(where, name)
        if value is not None:  # a part of a step is a phase, a part of a fetch a stage
            word = "phase" if name == "stage" and where.role == "main" and where.loader is None else name
            parts.append(f"{word} {value}")
    if where.pid is not None:
        parts.append(f"pid {where.pid}")
    if where.host is not None:
        parts.append(f"host {where.host}")
    return ", ".join(parts)


def bytes_growth(site: AllocationSite) -> str:
    """Return the growth of a site in bytes: `+25 MiB`; a dash if only the number of objects is known."""
    return MISSING if site.grown_bytes is None else f"+{size(site.grown_bytes)}"


def count_growth(site: AllocationSite) -> str:
    """Return the growth of a site in objects: `50 more tensors`."""
    return f"{number(site.grown_count)} more {site.what}" if site.grown_count > 0 else site.what


def context(line: WaitingLine) -> str:
    """Return the library function that a line calls, and the line that called it; empty if neither is known."""
    calls = [f"calls {line.calls}"] if line.calls else []
    return "; ".join([*calls, *(f"from {caller}" for caller in line.callers[:1])])


def samples(line: WaitingLine | AwaitedTime) -> str:
    """Return the observations that the shares of lines rest on."""
    return f"{number(line.n)} samples of stacks, {line.window}"


def eta(when: Eta) -> str:
    """Return the time to a limit in words: `12 min (10 min to 14 min), about 800 steps`.

    Of a run that has ended it is the time that would have been left.
    """
    words = f"{until(when.mid_seconds)} ({until(when.low_seconds)} to {until(when.high_seconds)})"
    return words if when.mid_steps is None else f"{words}, about {number(float(f'{when.mid_steps:.2g}'))} steps"


def stall(exposed: WaitSummary) -> str:
    """Return what a loop waited for, by stage, and the remedy: an entry of the report's `exposed_stall`.

    Example: `12 s (decode 60%, resize 30%), hardly any if decode took 14 ms per batch instead of 35 ms`.
    """
    total, stages = exposed["wait_seconds"], exposed["stages"]
    large = [stage for stage in stages[:4] if stage["seconds"] > 0.01 * total]
    parts = ", ".join(f"{part(stage['stage'])} {percent(stage['seconds'] / total)}" for stage in large)
    words = f"{duration(total)} ({parts})"
    cause = next((stage for stage in stages if stage["enough_seconds"] is not None), None)
    if cause is not None:
        now, then = duration(cause["batch_seconds"]), cause["enough_seconds"]
        if not then:
            return f"{words}, hardly any without {subject(cause['stage'])}"
        took = f"{duration(then)} per batch instead of {now}"
        return f"{words}, hardly any if {subject(cause['stage'])} took {took}"
    left = [(ratio, stage["stage"]) for stage in stages if (ratio := stage["free_wait_ratio"]) is not None]
    if not left:
        return words
    ratio, name = min(left, key=lambda pair: pair[0])
    return f"{words}; without {subject(name)}, training would still wait {percent(ratio)} of its time"


def step_word(verdict: Verdict) -> str:
    """Return what ends a step of a run, in words: `step`, `batch` or `forward pass`.

    A run that has made batches alone, such as an evaluation with an optimizer that it does not use, has batches.
    """
    if verdict.batches and not verdict.steps:
        return "batch"
    return verdict.step_unit if verdict.step_unit in _NAMED_UNITS else "step"


def start_words(verdict: Verdict) -> str:
    """Return how long the run took until its first step; empty if that is a small part of it, or not known."""
    start, took = verdict.summary["start"], verdict.duration_seconds
    if start is None or not took or start["seconds"] < max(_LONG_START_SECONDS, _LONG_START_RATIO * took):
        return ""
    in_use = ""
    if start["cores_used"] is not None:
        cores = number(round(start["cores_used"], 2))
        in_use = f", with {cores} {'core' if cores == '1' else 'cores'} in use"
    share = percent(min(start["seconds"] / took, 1.0))
    return f"{duration(start['seconds'])} until the first {step_word(verdict)}, {share} of the run{in_use}"


def slower_words(slowdown: Slowdown) -> str:
    """Return how much slower the steps became, and in which phase."""
    now, before = duration(slowdown["last_seconds"]), duration(slowdown["first_seconds"])
    more = duration(slowdown["phase_growth_seconds"])
    return f"a step takes {now}, at first {before}; {slowdown['phase']} grew most, by {more}"


def part(name: str) -> str:
    """Return a stage, or another part of a wait, in words."""
    return _PARTS.get(name, name)


def subject(name: str) -> str:
    """Return a stage, or another part of a wait, as the subject of a sentence."""
    return f"the {part(name)}" if name == "other" else part(name)


def check_words(checks: Sequence[Check]) -> tuple[str, str]:
    """Return what was looked at without a finding, and what was not judged or in part, with reasons; else empty."""
    fine = [
        f"{check.name} ({check.reason})" if check.reason else check.name
        for check in checks
        if check.status == "fine"
    ]
    reasons: dict[str, list[str]] = {}
    for check in checks:
        if check.status == "not judged":
            reasons.setdefault(check.reason, []).append(check.name)
    unjudged = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    return (
        f"Checked and fine: {', '.join(fine)}." if fine else "",
        f"Not judged: {'; '.join(unjudged)}." if unjudged else "",
    )


def exit_record(record: ExitRecord) -> list[tuple[str, str]]:
    """Return what is known of the end of a run that died, as pairs of name and value."""
    limit = ""
    if record.limit is not None:
        name, owner = record.limit.name, record.limit_owner or ""
        whose = owner if owner.startswith(name) else f"{name} ({owner})" if owner else name
        limit = f"{quantity(record.limit.value, record.limit.unit)}, {whose}"
    code = record.exit_status
    when = [] if record.seconds is None else [f"{duration(record.seconds)} after the start"]
    if record.step is not None:
        when.append(after_steps(record.step + 1))
    saved = []
    if record.saved_seconds is not None and record.seconds is not None:
        saved = [f"{duration(record.seconds - record.saved_seconds)} before the end"]
        saved += [] if record.saved_steps is None else [after_steps(record.saved_steps)]
    pairs = [
        ("Reason", record.reason),
        ("Victim", "" if record.victim is None else locus(record.victim)),
        ("Last memory", "" if record.last_held_bytes is None else size(record.last_held_bytes)),
        ("Limit", limit),
        ("Signal", record.signal or ("" if code is None or code >= 0 else f"{exit_words(code)}, of the command")),
        ("Exit status", "" if code is None or code < 0 else f"{code}, of the command"),
        ("When", ", ".join(when)),
        ("Last torch.save", ", ".join(saved)),
        (
            "Followed",
            counted(record.followers_count, "other training process") if record.followers_count else "",
        ),
    ]
    return [(name, value) for name, value in pairs if value]


def exit_words(exit_status: int) -> str:
    """Return an exit status in words: `exit status 1`, `signal 9 (SIGKILL)`."""
    if exit_status >= 0:
        return f"exit status {exit_status}"
    try:
        return f"signal {-exit_status} ({signal.Signals(-exit_status).name})"
    except ValueError:
        return f"signal {-exit_status}"


def unexplained_end(exit_status: int | None) -> str:
    """Return that a run died, and that no finding says of what."""
    ended = "" if exit_status is None else f" with {exit_words(exit_status)}"
    return f"The run ended{ended}. Its records do not show the cause."


def earlier_workers(count: int) -> str:
    """Return how many workers of earlier epochs a list of processes leaves out; empty without any."""
    workers = "worker of an earlier epoch" if count == 1 else "workers of earlier epochs"
    return f"{number(count)} {workers} had ended before." if count else ""


def ago(seconds: float) -> str:
    """Return a time before the end of a run: `-12 s`; "end" at the end."""
    return f"-{-seconds:.1f} s" if seconds < 0 else "end"


def stake(finding: Finding) -> str:
    """Return the one figure that says how much a finding matters; empty if it has none.

    It is the time until a limit is met, the end of a growth, the time that is lost, or the rate of a growth.
    """
    if finding.eta is not None and finding.severity != "info":
        return f"{until(finding.eta.mid_seconds)} to the limit"
    if (end := finding.value_of("level_at_end_high_bytes")) is not None:
        return f"at most {size(end)} at its end"
    lost = finding.value_of("lost_wall_ratio") or 0.0
    if lost >= _LEAST_LOST_RATIO:
        return f"up to {percent(lost)} of the run's time"
    return "" if finding.rate is None else f"grows by {quantity(finding.rate.value, finding.rate.unit)}"


def grouped(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, with information that several share once: sentences that differ in figures.

    They are of the same loader in several processes, or of several loaders.
    """
    groups: dict[object, list[Finding]] = {}
    for place, finding in enumerate(findings):
        words = _FIGURE.sub("", finding.summary)
        groups.setdefault((finding.kind, words) if finding.severity == "info" else place, []).append(finding)
    return [_for_all(*group) for group in groups.values()]


def _for_all(finding: Finding, *others: Finding) -> Finding:
    """Return a finding that also holds for the processes or the loaders of others."""
    if not others:
        return finding
    is_shared = all(other.locus.loader == finding.locus.loader for other in others)
    also = f"The same holds for {counted(len(others), 'other process' if is_shared else 'other loader')}."
    return extended(finding, also)


def decisive(finding: Finding) -> list[Evidence]:
    """Return the few measurements that decide a finding, those of its own before those that many share."""
    return sorted(finding.evidence, key=lambda item: item.name in _CONTEXT)[:_DECISIVE]


def title(finding: Finding) -> str:
    """Return the kind, with what limits it: `workers-too-slow (cpu)`."""
    return f"{finding.kind} ({finding.limited_by})" if finding.limited_by else finding.kind


def since(finding: Finding) -> str:
    """Return after how many steps a finding began, or a process died of it; empty if no step is known."""
    if finding.steps_before is None:
        return ""
    if finding.steps_before == 0 and finding.group != "death":
        return "from the first step on"
    return after_steps(finding.steps_before)


def evidence_rows(measurements: Sequence[Evidence]) -> list[tuple[str, str, str]]:
    """Return (name, value, number of observations and window) of each measurement, in words."""
    return [(labels.label(item.name), quantity(item.value, item.unit), observed(item)) for item in measurements]


def observed(item: Evidence) -> str:
    """Return what a measurement rests on: the number of observations, if there are several, and their window."""
    return f"n = {number(item.n)}, {item.window}" if item.n > 1 else item.window


def finding_heading(finding: Finding) -> str:
    """Return the kind of a finding, and the one figure that says how much it matters."""
    return ": ".join(filter(None, (title(finding), stake(finding))))


def scope_words(finding: Finding) -> str:
    """Return in words where a finding holds and its cause lies, since when, and how sure it is."""
    parts = (
        locus(finding.locus),
        since(finding),
        f"confidence {percent(finding.confidence)}",
        f"cause: {finding.fault}" if finding.fault else "",
    )
    return " · ".join(part for part in parts if part)


def site_words(site: AllocationSite) -> str:
    """Return in words how an allocation site grew, within which window, and the lines that called it."""
    growth = [] if site.grown_bytes is None else [bytes_growth(site)]
    words = ", ".join([*growth, count_growth(site), f"within {site.window}"])
    return ", from ".join([words, *(f"`{caller}`" for caller in site.callers)])


def line_words(lines: Sequence[WaitingLine]) -> Iterator[str]:
    """Yield in words the share of each line in the awaited time, its source and its caller; the first has n."""
    for place, line in enumerate(lines):
        words = f"{percent(line.ratio)} of the awaited time: `{line.site}`"
        if line.source:
            words += ": `{}`".format(line.source.replace("`", "'"))
        details = [context(line), samples(line) if place == 0 else ""]
        if any(details):
            words += f" ({'; '.join(filter(None, details))})"
        yield words
