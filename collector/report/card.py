"""The verdict on a run, as a card for the terminal and as the public JSON (docs/report.md)."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Column, Table
from rich.text import Text

from collector.diagnosis import LAST_MINUTE_SECONDS, LEAST_LOST_RATIO, Verdict
from collector.diagnosis.tuning import HEALTHY_WAIT_RATIO
from collector.findings import (
    Advice,
    AllocationSite,
    Evidence,
    Finding,
    Locus,
    Severity,
    WaitingLine,
    as_json,
    finite,
)
from collector.report import labels, wording
from collector.report.terminal import grid
from collector.units import MISSING, counted, duration, is_known, number, percent, quantity, size

SCHEMA = 1
#: Severity -> (symbol, colour); the word is always shown too.
_MARKS: dict[Severity, tuple[str, str]] = {
    "critical": ("✖", "bold red"),
    "warning": ("▲", "bold yellow"),
    "info": ("●", "blue"),
}
#: Most processes in the card of a run that died.
_LAST_PROCESSES = 5
#: Share of the words of a text that a sentence has which is cut where it gets too long.
_QUOTED_RATIO = 0.6
#: Most warnings in the card that are more than a heading; only the first one has its figures and all of its advice.
_EXPLAINED = 3
#: Share of step time outside the step from which a run is not called healthy.
_MAINLY_OUTSIDE_RATIO = 0.5
_STATUS_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "killed": "red"}


def report(verdict: Verdict, *, run_id: str, name: str) -> dict[str, Any]:
    """Return the public JSON form; an unknown value is null, never NaN."""
    return {
        "schema": SCHEMA,
        "run": {
            "run_id": run_id,
            "name": name,
            "status": verdict.status,
            "exit_status": verdict.exit_status,
            "attempts": verdict.attempts,
            "steps": verdict.steps,
            "step_unit": verdict.step_unit,
            "batches": verdict.batches,
            "duration_seconds": finite(verdict.duration_seconds),
            "workers_reporting": list(verdict.workers_reporting),
        },
        "findings": [as_json(finding) for finding in verdict.findings],
        "checks": [asdict(check) for check in verdict.checks],
        "ending": None if verdict.ending is None else finite(asdict(verdict.ending)),
        "summary": finite(verdict.summary),
    }


def card(verdict: Verdict, *, run_id: str, name: str, command: Callable[..., str], verbose: bool = False) -> Group:
    """Draw the card for the terminal: the run, each finding with why it holds and what to do, and how to see more.

    Args:
        verdict: the verdict on the run.
        run_id: id of the run.
        name: name of the run.
        command: returns a command of Tidegauge for the run's home, from its words.
        verbose: show each finding whole, with every measurement.
    """
    ways = [("Dashboard", command("dashboard"))]
    if not verbose and verdict.findings:
        ways.insert(0, ("All figures", command("report", run_id, "--verbose")))
    is_whole = verbose or not _failed_early(verdict)
    has_ending = is_whole and (verbose or not _was_stopped(verdict))
    return Group(
        Rule(Text(f"Tidegauge: {name}", style="bold"), align="left", style="dim"),
        headline(verdict),
        Text(),
        *_findings(verdict, verbose=verbose),
        *(_ending(verdict, verbose=verbose) if has_ending else ()),
        _grid([("run", run_id), *(figures(verdict) if is_whole else ())]),
        Text(),
        *((_checks(verdict), Text()) if is_whole else ()),
        *(_command_line(label, words) for label, words in ways),
    )


def command_for(home: Path, default_home: Path, *words: str) -> str:
    """Return a command of Tidegauge for a home; with its path if the shell finds no `tidegauge`."""
    script = Path(sys.executable).with_name("tidegauge")
    program = str(script) if shutil.which("tidegauge") is None and script.exists() else "tidegauge"
    home_option = [] if home == default_home else ["--home", str(home)]
    return shlex.join([program, *words, *home_option])


def headline(verdict: Verdict) -> Text:
    """Return the state of the run in one line: `finished, exit status 0 · 61 s · 1,200 steps · 4 of 4 workers`."""
    status = Text(verdict.status, style=_STATUS_STYLES[verdict.status])
    if verdict.watch_ended:
        status.append(" when the watch ended", style="default")
    if verdict.exit_status is not None:
        status.append(f", {wording.exit_words(verdict.exit_status)}", style="default")
    parts = [duration(verdict.duration_seconds)]
    if _has_trained(verdict):
        unit = wording.step_word(verdict)
        iterations = counted(verdict.steps or verdict.batches, unit)
        parts.append(f"{iterations}{', no optimizer step' if unit == 'batch' else ''}")
        reporting, workers = verdict.workers_reporting
        parts += [f"{reporting} of {workers} workers"] if workers else []
    if verdict.attempts > 1:
        parts.append(f"the last of {verdict.attempts} attempts")
    return status.append("".join(f" · {part}" for part in parts), style="default")


def figures(verdict: Verdict) -> list[tuple[str, str]]:
    """Return the figures of the whole run, as pairs of label and value."""
    peak, throughput = verdict.summary["peak"], verdict.summary["throughput"]
    pairs: list[tuple[str, str]] = []
    if _has_trained(verdict):
        if start := wording.start_words(verdict):
            pairs.append(("start", start))
        speeds = [quantity(throughput["steps_per_second"], "steps/second")]
        if throughput["samples_per_second"] is not None:
            speeds = speeds if verdict.steps else []
            speeds.append(quantity(throughput["samples_per_second"], "samples/second"))
        pairs.append(("speed", ", ".join(speeds)))
        if throughput["slowdown"] is not None:
            pairs.append(("slower", wording.slower_words(throughput["slowdown"])))
        pairs += [
            ("data wait", _data_wait(verdict)),
            *([] if _explains_waiting(verdict) else _stall(verdict)),
            *_outside(verdict),
        ]
        if not verdict.workers_reporting[1]:
            inline = "none: the training process makes its batches"
            pairs.append(("workers", inline if verdict.batches else f"{MISSING} no DataLoader seen"))
    if _has_trained(verdict) or peak["run_pss_bytes"] is not None:
        held = quantity(peak["run_pss_bytes"], "bytes")
        pairs.append(("peak", f"{held} host memory (PSS of the training's processes)"))
    if peak["device_reserved_bytes"] is not None:
        pairs.append(("", f"{quantity(peak['device_reserved_bytes'], 'bytes')} reserved on a device"))
    return pairs + _own_cost(verdict)


def _own_cost(verdict: Verdict) -> list[tuple[str, str]]:
    """Return what Tidegauge itself takes, none if it was not measured."""
    overhead = verdict.summary["overhead"]
    held, share = overhead["collector_private_dirty_bytes"], overhead["collector_cpu_ratio"]
    if not (is_known(held) and is_known(share)):
        return []
    return [("tidegauge", f"{size(held)} private memory, {percent(share)} of a core")]


def _data_wait(verdict: Verdict) -> str:
    ratio = verdict.summary["data_wait_ratio"]
    if ratio is None:
        return f"{MISSING} no DataLoader seen" if not verdict.batches else f"{MISSING} not recorded"
    return f"{percent(ratio)} of the loop's time, first batches included"


def _outside(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield the time outside the step in a loop without a DataLoader, which includes its data loading."""
    outside = verdict.summary["outside_step"]
    if outside is not None:
        computing = "" if outside["cpu_ratio"] is None else f", {percent(outside['cpu_ratio'])} of it computing"
        yield (
            "outside",
            f"{percent(outside['ratio'])} of step time outside forward, backward and optimizer: "
            f"{duration(outside['seconds'])} per step{computing}",
        )


def _stall(verdict: Verdict) -> Iterator[tuple[str, str]]:
    """Yield what the loop that waits longest waits for; nothing if it does not wait."""
    worst = next(iter(verdict.summary["exposed_stall"]), None)
    if worst is None or worst["wait_ratio"] < HEALTHY_WAIT_RATIO:
        return
    if worst["wait_seconds"] >= LEAST_LOST_RATIO * (verdict.duration_seconds or 0.0):
        yield "stall", wording.stall(worst)


def _was_stopped(verdict: Verdict) -> bool:
    """Return whether someone ended the run, as by Ctrl-C: its last minute is of no interest then."""
    deaths = [finding for finding in verdict.findings if finding.group == "death"]
    return bool(deaths) and all(finding.severity == "info" for finding in deaths)


def _explains_waiting(verdict: Verdict) -> bool:
    return any(finding.group == "data loading" and finding.severity != "info" for finding in verdict.findings)


def _has_trained(verdict: Verdict) -> bool:
    return bool(verdict.steps or verdict.batches)


def _failed_early(verdict: Verdict) -> bool:
    """Return whether the command failed before it trained, and nothing was found but that or its exception."""
    is_plain = all(finding.severity == "info" or finding.kind == "crashed" for finding in verdict.findings)
    return verdict.ending is not None and bool(verdict.findings) and is_plain and not _has_trained(verdict)


def _findings(verdict: Verdict, *, verbose: bool) -> Iterator[RenderableType]:
    is_calm = not any(finding.severity != "info" for finding in verdict.findings)
    if is_calm and not _failed_early(verdict):
        words = calm_words(verdict)
        yield Text(words, style="bold green" if words.startswith("✔") else "bold")
        yield Text()
    advised: dict[tuple[Advice, ...], str] = {}
    for place, finding in enumerate(verdict.findings if verbose else wording.grouped(verdict.findings)):
        if finding.is_healthy and not (is_calm or verbose):
            continue  # it is among the checks
        yield heading(finding)
        is_brief = not verbose and place > 0
        if finding.severity == "info" and not verbose:
            yield Padding(Text(finding.summary), (0, 0, 0, 2))
        elif verbose or place < _EXPLAINED:
            details = _details(finding, advised.get(finding.advice), verbose=verbose, is_brief=is_brief)
            yield Padding(_grid(details), (0, 0, 0, 2))
            advised.setdefault(finding.advice, finding.kind)
        yield Text()


def calm_words(verdict: Verdict) -> str:
    """Return what the card of a run without warnings begins with."""
    if not _has_trained(verdict):
        begin = "No warnings." if verdict.ending is None else "The command ended before it trained."
        return f"{begin} No steps or batches were seen."
    if next(_stall(verdict), None) is not None and not _costs_more_than_waiting(verdict):
        return "No warnings. The line `stall` shows what the run waited for."
    if verdict.summary["throughput"]["slowdown"] is not None:
        return "No warnings. The steps became slower: see the line `slower`."
    outside = verdict.summary["outside_step"]
    if outside is not None and outside["ratio"] > _MAINLY_OUTSIDE_RATIO:
        return "No warnings. Most of the time passes outside the step: see the line `outside`."
    if not all(finding.is_healthy for finding in verdict.findings):
        return "No warnings. The findings below are information."
    return "✔ Nothing needs attention"


def _costs_more_than_waiting(verdict: Verdict) -> bool:
    """Return whether a finding is about more of the run's time than the loop that waits longest lost."""
    lost = max((finding.value_of("lost_wall_ratio") or 0.0 for finding in verdict.findings), default=0.0)
    waited = verdict.summary["exposed_stall"][0]["wait_seconds"]
    return lost * (verdict.duration_seconds or 0.0) > waited


def heading(finding: Finding) -> Text:
    """Return the severity and the kind of a finding, and the one figure that says how much it matters."""
    mark, style = _MARKS[finding.severity]
    text = Text.assemble((f"{mark} {finding.severity.upper()}  {wording.title(finding)}", style))
    stake = wording.stake(finding)
    return text.append(f": {stake}", style="bold") if stake else text


def _checks(verdict: Verdict) -> Text:
    """Draw what was looked at without a finding, and what was not judged, with the reasons."""
    return Text("\n".join(filter(None, wording.check_words(verdict.checks))), style="dim")


def _ending(verdict: Verdict, *, verbose: bool) -> Iterator[RenderableType]:
    """Yield how a run that died came to its end."""
    yield from _exit_record(verdict)
    yield from _happenings(verdict, verbose=verbose)
    yield from _last_minute(verdict)


def _exit_record(verdict: Verdict) -> Iterator[RenderableType]:
    """Yield what ended a run that died; after a finding that says so, only what that lacks."""
    pairs = [] if verdict.ending is None else wording.exit_record(verdict.ending.record)
    deaths = [finding for finding in verdict.findings if finding.group == "death"]
    if deaths and verdict.ending is not None:
        owner = verdict.ending.record.limit_owner or ""
        has_limit = any(death.limit is not None and owner in death.summary for death in deaths)
        kept = {"Followed", "Last torch.save", *(() if has_limit else ("Limit",))}
        pairs = [pair for pair in pairs if pair[0] in kept]
    if pairs:
        yield _grid([(name, Text(value)) for name, value in pairs])
        yield Text()


def _happenings(verdict: Verdict, *, verbose: bool) -> Iterator[RenderableType]:
    """Yield what happened in the last minute of a run that died, each in one line unless `verbose`."""
    if verdict.ending is None or not verdict.ending.happenings:
        return
    rows = [
        (wording.ago(happening.seconds), Text(happening.text, no_wrap=not verbose, overflow="ellipsis"))
        for happening in verdict.ending.happenings
    ]
    table = grid(Column(justify="right", style="dim", no_wrap=True), Column(), rows=rows)
    yield _grid([("last 60 s", table)])
    yield Text()


def _last_minute(verdict: Verdict) -> Iterator[RenderableType]:
    """Yield memory, its change and the last activity of the largest processes of a run that died, training first.

    Those that had ended before the last minute come after the others of their role. Resident memory is only a bound
    of what a process holds, so it comes after what was read.
    """
    states = sorted(
        verdict.summary["last_minute"],
        key=lambda state: (
            state["role"] != "main",
            (state["seconds"] or 0.0) < -LAST_MINUTE_SECONDS,
            state["pss_bytes"] is None,
            -(state["held_bytes"] or 0),
        ),
    )
    if not states:
        return
    table = grid(*(Column(no_wrap=True) for _ in range(3)))
    table.add_row("", "memory", "change", "last", style="dim")
    has_loaders = len({state["loader"] for state in states if state["loader"] is not None}) > 1
    for state in states[:_LAST_PROCESSES]:
        rise = state["held_rise_bytes"]
        process = Locus(
            role=state["role"],
            rank=state["rank"],
            loader=state["loader"] if has_loaders else None,
            worker=state["worker"],
            pid=state["pid"],
        )
        batch = [] if state["batch"] is None else [f"batch {number(state['batch'])}"]
        activity = batch if state["step"] is None else [counted(state["step"] + 1, "step")]
        ago = -(state["seconds"] or 0.0)
        phase = f"last seen {duration(ago)} before the end" if ago > LAST_MINUTE_SECONDS else state["phase"]
        table.add_row(
            wording.locus(process).replace("training process", "training"),
            # Resident memory, where nothing else was read, counts shared pages in full.
            f"{'≤ ' if state['pss_bytes'] is None and state['held_bytes'] else ''}{size(state['held_bytes'])}",
            "" if rise is None else f"{'-' if rise < 0 else '+'}{size(abs(rise))}",
            ", ".join([*activity, *([phase] if phase else [])]),
        )
    earlier = wording.earlier_workers(verdict.summary["earlier_workers_count"])
    yield _grid([("processes", table), *([("", Text(earlier))] if earlier else [])])
    yield Text()


def _details(
    finding: Finding, adviser: str | None, *, verbose: bool, is_brief: bool
) -> Iterator[tuple[str, RenderableType]]:
    """Yield the rows on a finding.

    Args:
        finding: the finding.
        adviser: the kind of the finding above that gives the same advice.
        verbose: whether each measurement is shown.
        is_brief: whether only the reason, the first advice and the first line are.
    """
    most = 1 if is_brief else None
    yield "Why", finding.summary
    if finding.advice:
        yield "Do", f"As for {adviser} above." if adviser else _advice(finding.advice, most)
    if finding.held_by:
        yield "Held by", _beside(_allocation_sites(finding.held_by[:most]))
    if finding.waits_in:
        yield "Waits in", _beside(_waiting_lines(finding.waits_in[:most]))
    if is_brief:
        return
    figures = finding.evidence if verbose else [e for e in wording.decisive(finding) if not _says(finding, e)]
    if figures:
        yield "Figures", _evidence(figures)
    if verbose and finding.rate is not None:
        unit = finding.rate.unit
        low, high = quantity(finding.rate.low, unit), quantity(finding.rate.high, unit)
        yield "Growth", f"{quantity(finding.rate.value, unit)} ({low} to {high})"
    if finding.limit is not None:
        limit = quantity(finding.limit.value, finding.limit.unit)
        yield "Limit", f"{limit}, {finding.limit.name}"
    if finding.eta is not None and finding.eta.mid_steps is not None:
        yield "To limit", wording.eta(finding.eta)
    yield "Where", wording.scope_words(finding)


def _says(finding: Finding, item: Evidence) -> bool:
    """Return whether a finding's sentence has each word of a text among its evidence, up to where it is cut."""
    if not isinstance(item.value, str):
        return False
    words, sentence = _bare_words(item.value), _bare_words(finding.summary)
    least_ratio = _QUOTED_RATIO if finding.summary.endswith("…") else 1.0
    return len(words & sentence) >= least_ratio * len(words)


def _bare_words(text: str) -> set[str]:
    return {word.strip(".,:;()…") for word in text.split()}


def _evidence(evidence: Sequence[Evidence]) -> Group:
    """Draw numbers in columns, and texts such as an exception's message on separate lines that may wrap."""
    table = grid(Column(), Column(justify="right", no_wrap=True), Column(style="dim"))
    texts = []
    for item in evidence:
        observed = wording.observed(item)
        if isinstance(item.value, str):
            texts.append(Text.assemble(f"{labels.label(item.name)}: {item.value}  ", (observed, "dim")))
        else:
            table.add_row(labels.label(item.name), quantity(item.value, item.unit), observed)
    return Group(*([table] if table.row_count else []), *texts)


def _beside(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Draw figures in one column, and in the other what they are of, in rows below each other: paths are long."""
    return grid(Column(justify="right", no_wrap=True), Column(overflow="fold"), rows=rows)


def _allocation_sites(sites: Sequence[AllocationSite]) -> Iterator[tuple[str, str | Text]]:
    """Yield the bytes of each site with its line, its callers and its objects."""
    for site in sites:
        yield wording.bytes_growth(site), site.site
        for words in (*(f"from {caller}" for caller in site.callers), wording.count_growth(site)):
            yield "", Text(words, style="dim")
    yield "", Text(f"grown within {sites[0].window}", style="dim")


def _waiting_lines(lines: Sequence[WaitingLine]) -> Iterator[tuple[str, str | Text]]:
    """Yield the share of the awaited time of each line, with its source and its callers."""
    for line in lines:
        yield percent(line.ratio), line.site
        if line.source:
            yield "", Text(line.source, style="bold", no_wrap=True, overflow="ellipsis")
        if context := wording.context(line):
            yield "", Text(context, style="dim")
    yield "", Text(f"shares of {wording.samples(lines[0])}", style="dim")


def _advice(advices: Sequence[Advice], most: int | None) -> Table:
    """Draw the first advices, `most` of them, and how many more there are."""
    table = grid(gap=1)
    shown = advices[:most]
    is_list = len(shown) > 1
    for position, advice in enumerate(shown, start=1):
        rows = (
            (f"{position}.", Text.assemble(f"{advice.text.removesuffix('.')}. ", (f"[{advice.effect}]", "dim"))),
            ("", Text(f"→ {advice.expected}", "dim")),
        )
        for row in rows:
            table.add_row(*(row if is_list else row[1:]))
    if len(shown) < len(advices):
        table.add_row(Text(f"{len(advices) - len(shown)} more: see --verbose", "dim"))
    return table


def _command_line(label: str, words: str) -> Text:
    """Draw a command in one line, so that it can be copied whole."""
    return Text.assemble((f"{label:<13}", "dim"), words, no_wrap=True, overflow="ignore")


def _grid(pairs: Iterable[tuple[str, RenderableType]]) -> Table:
    """Draw one row per label and value; a long value wraps within its column."""
    return grid(Column(style="dim", min_width=9, no_wrap=True), Column(), rows=pairs)
