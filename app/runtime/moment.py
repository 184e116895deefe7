"""The parts of a view: one run at one moment, panels that build blocks from it, and the marks on its figures."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlencode

import pandas as pd

from app.blocks import Block, Findings, Fold, Table, evidence_page, needs_attention
from app.figures.axis import ZOOM_MARGIN, Mark, add_marks, convert_axis, scale_elapsed, zoom
from app.figures.base import Axis, Chart, TimeChart
from app.figures.devices import device_names
from app.format import first_line
from app.pages import POST_MORTEM, Page
from app.theme import Theme
from collector import report
from collector.diagnosis import Verdict
from collector.findings import KINDS, Finding
from collector.store import Run, queries
from collector.store.queries import Extent, Queryable, Span, Window
from collector.units import MISSING

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
#: Window -> its name, in the address too.
WINDOW_WORDS: dict[Window, str] = {"5min": "last 5 min", "500steps": "last 500 steps", "run": "whole run"}

#: Seconds until the record of an out-of-memory error is written.
_ERROR_SECONDS = 0.1

_log = logging.getLogger("tidegauge.app")
#: Marks in a figure, to leave room for its lines: the gravest findings and the last restarts.
MAX_FINDINGS, MAX_RESTARTS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The state of the frame's controls.

    `others` are the runs to compare with. `focus` is the time of a finding that charts zoom to, in elapsed seconds.
    """

    run: Run
    rank: int | None
    window: Window
    live: bool
    axis: Axis = "elapsed"
    others: tuple[Run, ...] = ()
    focus: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The input of every panel: one run at one moment, and the runs that it is compared with.

    `findings` are those of the view, whose path is `page`. `params` are the parameters of an address that select
    the same on any page. `values` are those that functions made with `once` have computed.
    """

    run: Run
    manifest: Mapping[str, Any]
    snapshot: Queryable
    span: Span
    whole: Span
    verdict: Verdict | None
    findings: Sequence[Finding]
    theme: Theme
    axis: Axis
    loaders: tuple[int, ...]
    loader: int | None
    page: str
    address: Callable[[Page], str]
    params: Mapping[str, str]
    focus: tuple[float, float] | None = None
    others: tuple[Moment, ...] = ()
    values: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.run.run_id

    @property
    def has_loader(self) -> bool:
        """True if a DataLoader of the run is known, used in the chosen window or not."""
        return not queries.loaders(self.snapshot).empty

    @property
    def all_findings(self) -> Sequence[Finding]:
        """The verdict's findings, none without a verdict."""
        return self.verdict.findings if self.verdict else ()

    @property
    def is_running(self) -> bool:
        """True if the verdict says that the run goes on."""
        return self.verdict is not None and self.verdict.status == "running"

    def unjudged(self, *names: str) -> str:
        """Return a sentence, after a blank, on those of these checks that could not be made; else empty.

        What a run does not have, such as workers, needs no check.
        """
        checks = [check for check in (self.verdict.checks if self.verdict else ()) if check.name in names]
        _, words = report.check_words([check for check in checks if not check.reason.startswith("no ")])
        return f" {words}" if words else ""

    def zoomed(self, read: Callable[[Span], pd.DataFrame]) -> pd.DataFrame:
        """Return a table of what charts show: of the time that they zoom to, unless it has no row there."""
        if self.focus is None:
            return read(self.span)
        begin, end = (self.span.origin_ns + round(seconds * 1e9) for seconds in self.focus)
        margin = round(ZOOM_MARGIN * (end - begin))
        from_ns, to_ns = max(self.span.from_ns, begin - margin), min(self.span.to_ns, end + margin)
        near = read(replace(self.span, from_ns=from_ns, to_ns=max(from_ns, to_ns)))
        return near if len(near) else read(self.span)

    def table(self, name: str, caption: str, columns: Any) -> Table:
        """Return a table of columns of texts, or of rows, which is downloaded under the run's name and its own.

        A column without any value is left out.
        """
        frame = pd.DataFrame(columns)
        known = frame if frame.empty else frame.loc[:, (frame != MISSING).any()]
        return Table(frame=known, caption=caption, download=f"{self.run_id}-{name}")


def once(
    compute: Callable[Concatenate[Moment, Arguments], Value],
) -> Callable[Concatenate[Moment, Arguments], Value]:
    """Make a function of a moment compute each value once, since several panels ask for it."""

    @functools.wraps(compute)
    def cached(moment: Moment, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        key = (compute, args, *kwargs.items())
        if key not in moment.values:
            moment.values[key] = compute(moment, *args, **kwargs)
        value: Value = moment.values[key]
        return value

    return cached


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a view: its name, and the pure function that builds its blocks.

    A refresh of a live page builds only the panels of one turn, and the next refresh those of the next turn.
    """

    name: str
    build: Callable[[Moment], Iterator[Block]]
    turn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A view: the question, the sentence that answers it, and rows of panels side by side.

    The answer belongs to the first turn. A view lists the findings whose kinds name it (`tidegauge.kinds`), or all
    with `lists_all`; with `own_first`, those whose evidence it shows come before the others.
    """

    name: str
    rows: Sequence[Sequence[Panel]]
    question: str
    answer: Callable[[Moment], str]
    lists_all: bool = False
    own_first: bool = False
    by_loader: bool = False

    def has_finding(self, finding: Finding) -> bool:
        """Return whether the view lists a finding; one that cannot tell is listed with what it may be."""
        return self.lists_all or self.name in KINDS[finding.suspected].pages

    def findings_of(self, verdict: Verdict | None) -> list[Finding]:
        """Return the findings that the view lists, in its order."""
        listed = [finding for finding in (verdict.findings if verdict else ()) if self.has_finding(finding)]
        if self.own_first:
            listed.sort(key=lambda finding: KINDS[finding.suspected].pages[0] != self.name)
        return listed

    @property
    def turns_count(self) -> int:
        """Number of refreshes until all panels are new."""
        return 1 + max(panel.turn for row in self.rows for panel in row)


def _findings(moment: Moment) -> Iterator[Block]:
    if moment.verdict is not None:
        yield Findings(findings=report.grouped(moment.findings), page=moment.page, params=moment.params)


#: The findings of the view.
FINDINGS = Panel("Findings", _findings)


def moment_of(
    view: View,
    selection: Selection,
    run: Run,
    memo: queries.Memo,
    reach: Extent,
    *,
    verdict: Verdict | None,
    theme: Theme,
    address: Callable[[Page], str],
    loader: int | None = None,
) -> Moment:
    """Return a run at the moment of a snapshot, for the selected window and rank.

    Args:
        view: the view that will show it.
        selection: the frame's controls.
        run: the selected run, or one that it is compared with.
        memo: its snapshot.
        reach: first and newest time of its records.
        verdict: on the run, None while there is none.
        theme: colours.
        address: gives the address of a page, for the links of marks.
        loader: the DataLoader to show; the busiest one if this one was not used in the window.
    """
    manifest = run.manifest
    origin = queries.origin_ns(manifest) or reach.first_ns
    span = queries.span(memo, reach, origin=origin, window=selection.window, rank=selection.rank)
    loaders = queries.used_loaders(memo, span) if view.by_loader else []
    return Moment(
        run=run,
        manifest=manifest,
        snapshot=memo,
        span=span,
        whole=queries.whole(span, reach),
        verdict=verdict,
        findings=view.findings_of(verdict),
        theme=theme,
        axis=selection.axis,
        loaders=tuple(loaders),
        loader=loader if loader in loaders else loaders[0] if loaders else None,
        page=view.name,
        address=lambda page: "" if page.path == view.name else address(page),
        params=params_of(selection),
        focus=selection.focus,
    )


def address_of(selection: Selection, page: Page) -> str:
    """Return the address of a page for the same selection, relative to any other page. The page is live there."""
    return f"{page.path}?{urlencode(params_of(selection))}"


def params_of(selection: Selection) -> dict[str, str]:
    """Return the parameters of an address for the same selection, without the defaults."""
    params = {
        "run": selection.run.run_id,
        "rank": selection.rank,
        "window": None if selection.window == "run" else WINDOW_WORDS[selection.window],
        "x": None if selection.axis == "elapsed" else selection.axis,
    }
    return {name: str(value) for name, value in params.items() if value is not None}


def build(panel: Panel, moment: Moment) -> list[Block] | str:
    """Return the blocks of a panel with the selected axis, or the line that says why there are none."""
    try:
        return [_finish(block, moment) for block in panel.build(moment)]
    except Exception as error:  # noqa: BLE001 - the other panels must still be drawn
        _log.exception("panel %s", panel.name)
        return first_line(error)


def answer_of(view: View, moment: Moment) -> str:
    """Return the sentence that answers a view's question, empty without a verdict."""
    try:
        return view.answer(moment) if moment.verdict else ""
    except Exception:  # noqa: BLE001 - the figures must be drawn without the sentence
        _log.exception("answer of %s", view.name)
        return ""


def _finish(block: Block, moment: Moment) -> Block:
    """Convert a chart over time to the selected axis, and add marks and the unit of elapsed time."""
    if isinstance(block, Fold):
        return replace(block, blocks=[_finish(inner, moment) for inner in block.blocks])
    if isinstance(block, Chart):
        focus = [] if moment.focus is None else [str(moment.focus)]
        block.keep_view(" ".join([*(run.run_id for run in (moment, *moment.others)), *focus]))
    if not isinstance(block, TimeChart):
        return block
    clock = pd.DataFrame(columns=["elapsed", "step"], dtype=float)
    if {block.axis, moment.axis} != {"elapsed"}:
        clock = _step_clock(moment)
    chart = convert_axis(block, moment.axis, clock)
    if not moment.others:  # marks of one run would mislead in a figure of several
        others = [*_restart_marks(moment), *_finding_marks(moment, block.gpu)]
        chart = add_marks(chart, _epoch_marks(moment), others, moment.theme, clock)
        if moment.focus is not None:
            chart = zoom(chart, *moment.focus, moment.theme, clock)
    return scale_elapsed(chart, (moment.span.to_ns - moment.span.from_ns) / 1e9)


def _step_clock(moment: Moment) -> pd.DataFrame:
    """Return the step at each time, including the step that a CUDA out-of-memory error cut short."""
    clock = queries.step_clock(moment.snapshot, moment.span)
    if not len(clock) or not any(finding.kind == "cuda-oom" for finding in moment.all_findings):
        return clock
    errors = queries.cuda_errors(moment.snapshot, moment.span)
    fatal = errors.loc[~errors["was_caught"].astype(bool), ["elapsed_seconds", "step"]].dropna().tail(1)
    fatal = fatal.rename(columns={"elapsed_seconds": "elapsed"}).astype(float)
    later = fatal[(fatal > clock.max()).all(axis=1)]
    after = later.assign(elapsed=later["elapsed"] + _ERROR_SECONDS)
    return pd.concat([clock, later, after]) if len(later) else clock


@once
def _epoch_marks(moment: Moment) -> list[Mark]:
    starts = queries.epoch_starts(moment.snapshot, moment.span)
    has_loaders = starts["loader"].nunique() > 1
    return [
        Mark(at_seconds=at, words=f"loader {loader} epoch {epoch}" if has_loaders else f"epoch {epoch}")
        for at, loader, epoch in starts.itertuples(index=False)
    ]


@once
def _restart_marks(moment: Moment) -> list[Mark]:
    """Return when a launcher restarted the job, with the address of the post-mortem."""
    attempts_ns: dict[int, int] = {}
    events = queries.starts(moment.snapshot)
    events = events[events["kind"] == "process-start"]
    for time_ns, body in zip(events["time_ns"], events["body"], strict=True):  # in order of time
        if (attempt := json.loads(body).get("attempt")) is not None:
            attempts_ns.setdefault(int(attempt), int(time_ns))
    restarts_ns = [time_ns for _, time_ns in sorted(attempts_ns.items())[1:]]
    address, origin_ns = moment.address(POST_MORTEM), moment.span.origin_ns
    return [
        Mark(at_seconds=(time_ns - origin_ns) / 1e9, words=f"restart {number}", address=address)
        for number, time_ns in enumerate(restarts_ns, start=1)
    ][-MAX_RESTARTS:]


@once
def _finding_marks(moment: Moment, gpu: str) -> list[Mark]:
    """Return since when findings that need attention hold: the earliest of each kind, with its page.

    With a selected rank, findings about other ranks are left out, and in a chart of a GPU those about other GPUs.
    """
    findings = needs_attention(moment.all_findings)
    has_gpu = any(finding.locus.device is not None for finding in findings)
    names = _gpu_names(moment) if has_gpu else {}
    first: dict[str, tuple[int, Finding]] = {}
    for finding in findings:
        where, step = finding.locus, finding.since_step
        is_of_other_rank = None not in (moment.span.rank, where.rank) and moment.span.rank != where.rank
        is_of_other_gpu = bool(gpu) and where.device is not None and names.get((where.host, where.device)) != gpu
        if step is None or is_of_other_rank or is_of_other_gpu:
            continue
        if finding.kind not in first or step <= first[finding.kind][0]:
            first[finding.kind] = step, finding
    chosen = [finding for _, finding in first.values()][:MAX_FINDINGS]
    marks = []
    for finding, at in zip(chosen, _since_seconds(chosen, moment), strict=True):
        device = finding.locus.device if len(names) > 1 and not gpu else None
        words = f"{finding.kind} {report.since(finding)}{'' if device is None else f' on GPU {device}'}"
        if at is not None:
            marks.append(Mark(at_seconds=at, words=words, address=moment.address(evidence_page(finding))))
    return marks


@once
def _gpu_names(moment: Moment) -> dict[tuple[str | None, int | None], str]:
    """Return (host, device) -> name of each GPU."""
    gpus = queries.devices(moment.snapshot)
    return dict(zip(zip(gpus["host"], gpus["device"], strict=True), device_names(gpus), strict=True))


def _since_seconds(findings: Sequence[Finding], moment: Moment) -> Iterator[float | None]:
    """Yield since when each finding holds; an out-of-memory error has its own time, since its step never ended."""
    steps = [finding.since_step for finding in findings if finding.since_step is not None]
    times = queries.steps_elapsed(moment.snapshot, moment.span, steps) if steps else []
    for finding, at in zip(findings, times, strict=True):
        of_step = []
        if finding.kind == "cuda-oom":
            errors = queries.cuda_errors(moment.snapshot, moment.span)
            of_step = errors.loc[errors["step"] == finding.since_step, "elapsed_seconds"].tolist()
        yield of_step[-1] if of_step else at
