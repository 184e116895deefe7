"""What a panel can consist of, and how Streamlit draws it. Blocks are values; only `draw` has effects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pandas as pd
import streamlit as st

from app import pages
from app.figures.base import Chart
from app.format import plain
from app.terms import explained
from collector.diagnosis.findings import KINDS, Finding, Holder
from collector.diagnosis.verdict import Verdict
from collector.quantities import MISSING, number, percent, quantity
from collector.wording import eta, kept, label, locus, more, since, title

#: severity -> (icon, word, badge colour): never a colour alone.
SEVERITY = {
    "critical": (":material/error:", "critical", "red"),
    "warning": (":material/warning:", "warning", "orange"),
    "info": (":material/info:", "info", "blue"),
}
#: group of findings -> the page on which the evidence is to be seen.
EVIDENCE_PAGES = {
    "memory forecast": pages.OOM_RISK,
    "memory leak": pages.LEAK_TIMELINE,
    "data loading": pages.WORKER_STALLS,
    "training": pages.WORKER_STALLS,
    "death": pages.POST_MORTEM,
    "trust": pages.AGENT_HEALTH,
}
#: What is seen on another page than the rest of its group.
_OF_KIND = {
    **dict.fromkeys(
        ("gpu-tensor-leak", "gpu-non-pytorch-growth", "gpu-fragmentation", "pinned-cache-growth"), pages.GPU_MEMORY
    ),
    **dict.fromkeys(("fd-leak", "shm-leak"), pages.OOM_RISK),
    "rank-straggler": pages.OVERVIEW,  # which has the steps of each rank
}
#: What a formula begins with.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
#: A table of more rows scrolls.
_WHOLE_ROWS = 20
#: At most so many findings stand open; the rest unfold.
_OPEN_FINDINGS = 4


#: Of a chart's own buttons, the picture and the way back from a zoom; the others are on the mouse.
CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "png", "filename": "tidegauge", "scale": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One key figure."""

    label: str
    value: str
    help: str


def workers_reporting(verdict: Verdict | None, *, has_loader: bool) -> Metric:
    """How many workers send records; a run whose DataLoaders were not seen yet has none for all that is known."""
    reporting, expected = verdict.workers_reporting if verdict else (None, None)
    inline = "inline" if expected == 0 and has_loader else MISSING
    return Metric(
        label="Workers reporting",
        value=f"{number(reporting)} of {number(expected)}" if expected else inline,
        help="DataLoader workers that send records, of those that were started",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A row of key figures."""

    items: Sequence[Metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of texts, ready to be read, with its caption; it can be had as `download`.csv."""

    frame: pd.DataFrame
    download: str
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A sentence where a figure would be empty, or that explains one, and the command to type next."""

    text: str
    icon: str = ":material/info:"
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings in order; `link` adds the way to evidence, `headline` says how many there are.

    The sentence of the gravest is left out, for it is the view's answer (`answer`).
    """

    findings: Sequence[Finding]
    link: bool = False
    headline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Widget:
    """What the reader sets draws itself: a fragment of its own, so that nothing else is read or drawn anew.

    `still` gives what it shows before anybody sets anything.
    """

    draw: Callable[[str], None]
    still: Callable[[], Sequence[Block]]


Block = Chart | Metrics | Table | Note | Findings | Widget


def draw(block: Block, key: str) -> None:
    """Draw one block; `key` is stable from refresh to refresh."""
    match block:
        case Chart():
            with st.container(border=True, height="stretch", gap="xsmall"):
                st.markdown(f"**{plain(block.title)}**", help=explained(block.words))
                # Streamlit replaces a Plotly chart whose data have changed: hold its place meanwhile.
                with st.container(height=block.figure.layout.height, border=False):
                    st.plotly_chart(
                        block.figure,
                        width="stretch",
                        theme=None,
                        key=key,
                        config=CONFIG,
                        alt=block.alt,
                    )
                if block.caption:
                    st.caption(plain(block.caption))
        case Metrics():
            with st.container(horizontal=True):
                for item in block.items:
                    st.metric(plain(item.label), plain(item.value), help=plain(item.help), border=True)
        case Table():
            height: Literal["content", "auto"] = "content" if len(block.frame) <= _WHOLE_ROWS else "auto"
            st.dataframe(block.frame, hide_index=True, width="stretch", height=height, key=key)
            with st.container(horizontal=True, vertical_alignment="center"):
                name, icon = f"{block.download}.csv", ":material/download:"
                # It is made when it is asked for, and nothing on the page changes, so the script need not run.
                made = partial(sheet, block.frame)
                st.download_button("CSV", made, name, "text/csv", icon=icon, key=f"{key}-csv", on_click="ignore")
                if block.caption:
                    st.caption(plain(block.caption))
        case Note():
            st.caption(f"{block.icon} {plain(block.text)}")
            if block.command:
                st.code(block.command, language="bash", wrap_lines=True)
        case Findings():
            _draw_findings(block)
        case Widget():
            st.fragment(block.draw)(key)


def sheet(table: pd.DataFrame) -> str:
    """A table as CSV of which a spreadsheet computes nothing: a text that it would take for a formula is quoted.

    Runs, stages and paths are named by others (https://owasp.org/www-community/attacks/CSV_Injection).
    """

    def quoted(cell: object) -> str:
        return f"'{cell}" if str(cell).startswith(_FORMULA) else str(cell)

    return table.map(quoted).rename(columns=quoted).to_csv(index=False)


def evidence_page(kind: str) -> pages.Page:
    """Where the evidence of a kind of finding is to be seen."""
    return _OF_KIND.get(kind) or EVIDENCE_PAGES[KINDS[kind]]


def needs_attention(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that ask for something to be done."""
    return [finding for finding in findings if finding.severity != "info"]


def evidence(finding: Finding) -> list[tuple[str, str, str]]:
    """In words what was measured, the value, and of how many observations over which window."""
    return [
        (label(item.name), quantity(item.value, item.unit), f"n = {item.n:,}, {item.window}")
        for item in finding.evidence
    ]


def grown(holder: Holder) -> str:
    """What a line makes that stays, how much of it, and what called it."""
    grew = [] if holder.grown_bytes is None else [more(holder)]
    return ", from ".join(
        [", ".join([*grew, kept(holder), f"within {holder.window}"]), *(f"`{caller}`" for caller in holder.callers)]
    )


def answer(findings: Sequence[Finding], nothing: str) -> str:
    """The gravest finding in its own words, and how many more there are; else that there is nothing."""
    urgent = needs_attention(findings)
    if not urgent:
        return nothing
    more = "" if len(urgent) == 1 else f" And {len(urgent) - 1} more, below."
    return f"{urgent[0].summary}{more}"


def _draw_findings(block: Findings) -> None:
    urgent = needs_attention(block.findings)
    rest = [finding for finding in block.findings if finding.severity == "info"]
    if block.headline:
        things = "1 thing needs" if len(urgent) == 1 else f"{len(urgent)} things need"
        st.subheader(f"{things} attention" if urgent else "Nothing needs attention", anchor=False)
    for place, finding in enumerate(urgent[:_OPEN_FINDINGS]):
        _draw_finding(finding, link=block.link, said=place == 0)
    if urgent[_OPEN_FINDINGS:]:
        with st.expander(f"{len(urgent) - _OPEN_FINDINGS} more"):
            for finding in urgent[_OPEN_FINDINGS:]:
                _draw_finding(finding, link=block.link, said=False)
    for finding in rest:
        with st.expander(plain(f"{title(finding)}: {finding.summary}"), icon=SEVERITY["info"][0]):
            _draw_body(finding)


def _draw_finding(finding: Finding, *, link: bool, said: bool) -> None:
    icon, word, colour = SEVERITY[finding.severity]
    with st.container(border=True):
        with st.container(horizontal=True, vertical_alignment="center"):
            st.badge(word, icon=icon, color=colour)  # type: ignore[arg-type]
            st.markdown(f"**{title(finding)}**", width="content")
            where = locus(finding.locus)
            st.caption(
                plain(
                    " · ".join(
                        part
                        for part in (where, since(finding), f"confidence {percent(finding.confidence)}")
                        if part
                    )
                ),
                width="content",
            )
        if not said:
            st.markdown(plain(finding.summary))
        _draw_body(finding)
        if link:
            page = evidence_page(finding.kind)
            st.page_link(page.file, label=f"See {page.title}", icon=":material/arrow_forward:")


def _draw_body(finding: Finding) -> None:
    if finding.eta is not None:
        st.markdown(f":material/schedule: Limit met {eta(finding.eta)}")
    for holder in finding.held_by:
        st.markdown(f":material/code: {plain(f'Held by `{holder.site}` {grown(holder)}')}")
    for advice in finding.advice:
        expected = f" — *{plain(advice.expected)}*" if advice.expected else ""
        st.markdown(f":material/build: {plain(advice.text)}{expected}")
    if measured := [f"{plain(name)} **{plain(value)}** ({plain(seen)})" for name, value, seen in evidence(finding)]:
        st.caption("Measured: " + "; ".join(measured))
