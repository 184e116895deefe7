"""The blocks that panels consist of. They are plain values; only `draw` calls Streamlit."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import pandas as pd
import streamlit as st

from app import pages
from app.figures.base import Chart
from app.format import plain
from app.terms import explain_terms
from collector import report
from collector.diagnosis import Verdict
from collector.findings import KINDS, Evidence, Finding
from collector.units import MISSING, counted, number

#: severity -> (icon, badge colour). A colour never stands alone.
_SEVERITY = {
    "critical": (":material/error:", "red"),
    "warning": (":material/warning:", "orange"),
    "info": (":material/info:", "blue"),
}
_PAGES = {page.path: page for page in pages.PAGES}
#: Characters that a formula of a spreadsheet begins with.
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
#: Rows above which a table scrolls.
_MAX_UNSCROLLED_ROWS = 20
#: Columns from which the first one has a width of its own; pixels of a letter, around a text, and at most.
_MANY_COLUMNS, _LETTER_WIDTH, _CELL_PADDING, _MOST_WIDTH = 7, 7, 24, 320
#: Parameter of the address: the time that charts zoom to, `12-33` in seconds.
FOCUS = "focus"


#: Plotly's options. Of a chart's buttons, "download" and "reset axes" stay; the mouse does what the others do.
CONFIG = {
    "displaylogo": False,
    "modeBarButtonsToRemove": ["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "autoScale2d"],
    "toImageButtonOptions": {"format": "png", "filename": "tidegauge", "scale": 2},
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One key figure."""

    label: str
    value: str
    help: str


def workers_reporting(verdict: Verdict | None, *, has_loader: bool) -> Metric:
    """Return how many workers send records; the value is missing until a DataLoader is seen."""
    reporting, expected = verdict.workers_reporting if verdict else (None, None)
    inline = "inline" if expected == 0 and has_loader else MISSING
    return Metric(
        "Workers reporting",
        f"{number(reporting)} of {number(expected)}" if expected else inline,
        "DataLoader workers that send records, of those that were started",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """A row of key figures."""

    items: Sequence[Metric]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table of texts with its caption; readers can download it as `download`.csv."""

    frame: pd.DataFrame
    download: str
    caption: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A table of short texts that wrap: its two headings, and its rows."""

    headings: tuple[str, str]
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence that explains a figure or stands in place of an empty one, and the command to type next."""

    text: str
    icon: str = ":material/info:"
    command: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """Findings in order, each with a link that zooms the charts to its time.

    The sentence of the gravest one is left out, since it is the view's answer (`answer`).

    Attributes:
        page: path of the page that they are on; the link of a finding leads to the page that shows its evidence.
        params: the parameters of an address that select the run and its part, for a link opened in a new tab.
    """

    findings: Sequence[Finding]
    page: str = ""
    params: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Listing:
    """Lines of code under a heading with tags, such as a stack."""

    heading: str
    tags: Sequence[str]
    lines: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Widget:
    """Controls and the blocks that depend on them, drawn in their own fragment: the rest of the page stays.

    `initial` returns the blocks for the initial setting, for a page without controls.
    """

    draw: Callable[[str], None]
    initial: Callable[[], Sequence[Block]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Blocks that are folded away until a reader asks for them: they keep a page short, above all on a phone."""

    label: str
    blocks: Sequence[Block]


Block = Chart | Metrics | Table | Facts | Note | Findings | Listing | Widget | Fold


def draw(block: Block, key: str) -> None:
    """Draw one block; `key` is stable from refresh to refresh."""
    match block:
        case Chart():
            with st.container(border=True, height="stretch", gap="xsmall"):
                st.markdown(f"**{plain(block.title)}**", help=explain_terms(block.words))
                # Streamlit replaces a Plotly chart whose data have changed: the container holds its place.
                with st.container(height=block.figure.layout.height, border=False):
                    st.plotly_chart(block.figure, theme=None, key=key, config=CONFIG, alt=block.alt)
                if block.caption:
                    st.caption(plain(block.caption))
        case Metrics():
            with st.container(horizontal=True):
                for item in block.items:
                    st.metric(plain(item.label), plain(item.value), help=plain(item.help), border=True)
        case Table():
            height: Literal["content", "auto"] = "content" if len(block.frame) <= _MAX_UNSCROLLED_ROWS else "auto"
            wide = {name: st.column_config.Column(width=width) for name, width in name_width(block.frame).items()}
            st.dataframe(block.frame, hide_index=True, width="stretch", height=height, key=key, column_config=wide)
            with st.container(horizontal=True, vertical_alignment="center"):
                name, icon = f"{block.download}.csv", ":material/download:"
                # The file is made at the click. Nothing on the page changes, so the script need not run.
                data = partial(sheet, block.frame)
                st.download_button("CSV", data, name, "text/csv", icon=icon, key=f"{key}-csv", on_click="ignore")
                if block.caption:
                    st.caption(plain(block.caption))
        case Facts():
            rows = (f"| {_unbroken(_cell(name))} | {_cell(value)} |" for name, value in block.rows)
            st.markdown("\n".join([f"| {' | '.join(block.headings)} |", "|:--|:--|", *rows]))
        case Note():
            st.caption(f"{block.icon} {plain(block.text)}")
            if block.command:
                st.code(block.command, language="bash", wrap_lines=True)
        case Findings():
            _draw_findings(block)
        case Listing():
            with st.container(border=True, gap="xsmall"):
                with st.container(horizontal=True, vertical_alignment="center"):
                    for tag in block.tags:
                        st.badge(tag, color="gray")
                    st.markdown(f"**{plain(block.heading)}**", width="content")
                st.code(block.lines, language=None, wrap_lines=True)
        case Widget():
            st.fragment(block.draw)(key)
        case Fold():
            with st.expander(plain(block.label), icon=":material/bar_chart:"):
                for place, inner in enumerate(block.blocks):
                    draw(inner, f"{key}-{place}")


def name_width(table: pd.DataFrame) -> dict[str, int]:
    """Return the width in pixels that the first column of a table of many needs; Streamlit would cut its names."""
    if table.empty or len(table.columns) < _MANY_COLUMNS:
        return {}
    first = table.columns[0]
    return {first: min(_MOST_WIDTH, _LETTER_WIDTH * max(map(len, table[first].astype(str))) + _CELL_PADDING)}


def sheet(table: pd.DataFrame) -> str:
    """Return a table as CSV; texts that a spreadsheet would take for a formula are quoted.

    Names of runs, stages and paths come from outside (https://owasp.org/www-community/attacks/CSV_Injection).
    """

    def quote(cell: object) -> str:
        return f"'{cell}" if str(cell).startswith(_FORMULA_STARTS) else str(cell)

    return table.map(quote).rename(columns=quote).to_csv(index=False)


def evidence_page(finding: Finding) -> pages.Page:
    """Return the page that shows the evidence of a finding."""
    return _PAGES[KINDS[finding.suspected].pages[0]]


def needs_attention(findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings that ask for action."""
    return [finding for finding in findings if finding.severity != "info"]


def answer(findings: Sequence[Finding], nothing: str) -> str:
    """Return the gravest finding's summary and the number of others, or `nothing` if none needs attention."""
    urgent = needs_attention(findings)
    if not urgent:
        return nothing
    others = "" if len(urgent) == 1 else f" {counted(len(urgent) - 1, 'more finding')} below."
    return f"{urgent[0].summary}{others}"


def _draw_findings(block: Findings) -> None:
    urgent = needs_attention(block.findings)
    rest = [finding for finding in block.findings if finding.severity == "info"]
    for finding in urgent[:1]:
        icon, colour = _SEVERITY[finding.severity]
        with st.container(border=True, gap="small"):
            with st.container(horizontal=True, vertical_alignment="center"):
                st.badge(finding.severity, icon=icon, color=colour)  # type: ignore[arg-type]
                st.markdown(f"**{plain(report.finding_heading(finding))}**", width="content")
                st.caption(plain(report.scope_words(finding)), width="content")
            _draw_finding(finding, block)
    for finding in urgent[1:]:
        label = f"{finding.severity}: {report.finding_heading(finding)}. {finding.summary}"
        with st.expander(plain(label), icon=_SEVERITY[finding.severity][0]):
            st.caption(plain(report.scope_words(finding)))
            _draw_finding(finding, block)
    for finding in rest:
        with st.expander(plain(f"{report.title(finding)}: {finding.summary}"), icon=_SEVERITY["info"][0]):
            _draw_finding(finding, block)


def _draw_finding(finding: Finding, block: Findings) -> None:
    """Draw what to do, and next to it the measurements that decide."""
    actions, figures = st.columns([3, 2], gap="medium")
    with actions:
        _draw_actions(finding)
        _draw_link(finding, block)
    with figures:
        decisive = report.decisive(finding)
        if decisive:
            st.markdown(_evidence_table(decisive))
        if len(decisive) < len(finding.evidence):
            with st.expander(f"All {len(finding.evidence)} measurements"):
                st.markdown(_evidence_table(finding.evidence))


def _draw_link(finding: Finding, block: Findings) -> None:
    """Draw the link to the evidence: its page, and the time that the charts zoom to."""
    page, window = evidence_page(finding), finding.window_seconds
    is_here = page.path == block.page
    if is_here and not window:
        return
    words = "Show it in the charts" if is_here else f"See {page.title}"
    params = dict(block.params)
    if window:
        params[FOCUS] = "{:.0f}-{:.0f}".format(*window)
        words += ": {:.0f} to {:.0f} s".format(*window)
    st.page_link(page.file, label=words, icon=":material/arrow_forward:", query_params=params)


def _draw_actions(finding: Finding) -> None:
    for advice in finding.advice:
        expected = f" — *{plain(advice.expected)}*" if advice.expected else ""
        st.markdown(f":material/build: {plain(advice.text)}{expected} :gray-badge[{advice.effect}]")
    if finding.eta is not None and finding.eta.mid_steps is not None:  # the heading has the time
        st.markdown(f":material/schedule: Time to the limit: {report.eta(finding.eta)}")
    for site in finding.held_by:
        st.markdown(f":material/code: {plain(f'Held by `{site.site}` {report.site_words(site)}')}")
    for words in report.line_words(finding.waits_in):
        st.markdown(f":material/code: {plain(words)}")


def _evidence_table(measurements: Sequence[Evidence]) -> str:
    cells = ([_cell(text) for text in row] for row in report.evidence_rows(measurements))
    rows = [f"| {name} | {_unbroken(value)} | :gray[{_unbroken(sample)}] |" for name, value, sample in cells]
    return "\n".join(["| Measurement | Value | Sample |", "|:--|--:|:--|", *rows])


def _unbroken(text: str) -> str:
    """Return a text that a narrow table breaks between words, but not before a unit nor in `n = 12` or `4-17 s`."""
    return re.sub(r"(?<=\d)-(?=\d)", "\u2011", re.sub(r"(?<=[\d=]) | (?==)", "\u00a0", text))


def _cell(text: str) -> str:
    return plain(text).replace("|", "\\|").replace("\n", " ")
