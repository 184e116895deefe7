"""`tidegauge report --format html`: the views of a run as one file that opens anywhere, without a network.

It turns the blocks of the dashboard's panels into HTML. The file contains Plotly's script once.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import plotly.io
from plotly.offline import get_plotlyjs

from app.blocks import (
    CONFIG,
    Block,
    Facts,
    Findings,
    Fold,
    Listing,
    Metrics,
    Note,
    Table,
    Widget,
)
from app.figures.base import Chart
from app.pages import Page
from app.run_charts import RUN_PAGES, page_moment
from app.runtime.moment import answer_of, build
from app.theme import LIGHT
from collector import report
from collector.diagnosis import Verdict
from collector.store import Run, Snapshot, queries, read
from collector.store.queries import Extent

_STYLE = """
:root { color-scheme: light } body { font: 15px/1.5 system-ui, sans-serif; color: #1F2937; margin: 0 auto;
max-width: 1280px; padding: 1rem } h1 { font-size: 1.5rem } h2 { font-size: 1.25rem; border-top: 1px solid #E5E7EB;
padding-top: 1rem; margin-top: 2rem } h3 { font-size: 1rem; margin: .5rem 0 } nav a { margin-right: 1rem }
a { color: #0072B2 }
article { border: 1px solid #E5E7EB; border-radius: 4px; padding: .5rem 1rem; margin: .75rem 0 }
.critical { border-left: 4px solid #B91C1C } .warning { border-left: 4px solid #D55E00 }
.info { border-left: 4px solid #0072B2 } .quiet { color: #5B6672; font-size: .87rem }
dl { display: flex; flex-wrap: wrap; gap: .75rem } dl div { border: 1px solid #E5E7EB; padding: .5rem 1rem }
dd { margin: 0; font-size: 1.25rem } table { border-collapse: collapse; display: block; overflow-x: auto }
th, td { border: 1px solid #E5E7EB; padding: .25rem .5rem; text-align: left }
pre { background: #F4F6F8; padding: .5rem }
"""
#: Restores the links of marks: Plotly drops them in a page opened from a file (svg_text_utils.js knows no `file:`).
_LINKS = """
function tidegaugeLinks(id) {
  const plot = document.getElementById(id);
  const link = () => plot.querySelectorAll(".annotation a").forEach(mark => {
    const text = plot.layout.annotations[mark.closest(".annotation").dataset.index].text;
    mark.setAttribute("href", /href="(#[^"]+)"/.exec(text)[1]);
  });
  plot.on("plotly_afterplot", link);
  link();
}
"""
#: Content policy of the page, which loads nothing from any address.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def render(run: Run, verdict: Verdict) -> str:
    """Return the whole document.

    Raises:
        TidegaugeError: the run cannot be read.
    """
    with read(run) as snapshot:
        reach = queries.extent(snapshot)
        sections = [_section(page, run, snapshot, reach, verdict) for page in RUN_PAGES] if reach else []
        problems = snapshot.problems
    nothing = (
        "" if reach else "<p>This run left no records. <code>tidegauge doctor</code> says what works here.</p>"
    )
    links = "".join(f'<a href="#{page.path}">{page.title}</a>' for page in RUN_PAGES if reach)
    name = escape(run.run_id)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tidegauge: {name}</title><style>{_STYLE}</style><script>{get_plotlyjs()}</script>"
        f"<script>{_LINKS}</script></head><body>"
        f"<h1>{name}: {verdict.status}</h1>"
        + "".join(f"<p>Not read: {report.inline(problem)}</p>" for problem in problems)
        + f"<nav>{links}</nav>{nothing}{''.join(sections)}</body></html>\n"
    )


def _section(page: Page, run: Run, snapshot: Snapshot, reach: Extent, verdict: Verdict) -> str:
    view, moment = page_moment(
        page, run, snapshot, reach, verdict, theme=LIGHT, address=lambda page: f"#{page.path}"
    )
    heading, answer = escape(view.question), report.inline(answer_of(view, moment))
    parts = [f'<section><h2 id="{page.path}">{heading}</h2><p><b>{answer}</b></p>']
    for panel in (panel for row in view.rows for panel in row):
        content = build(panel, moment)
        if isinstance(content, str):
            parts.append(f"<p>{report.inline(f'{panel.name} cannot be shown: {content}')}</p>")
        else:
            parts += [html for block in content for html in _block(block)]
    return "".join([*parts, "</section>"])


def _block(block: Block) -> Iterator[str]:
    match block:
        case Chart():
            links = "tidegaugeLinks('{plot_id}')"
            figure = plotly.io.to_html(
                block.figure, full_html=False, include_plotlyjs=False, config=CONFIG, post_script=links
            )
            yield f'<article><h3>{escape(block.title)}</h3><figure role="img" aria-label="{escape(block.alt)}">'
            yield f'{figure}</figure><p class="quiet">{report.inline(block.caption)}</p></article>'
        case Metrics():
            cells = (
                f'<div title="{escape(item.help)}"><dt class="quiet">{escape(item.label)}</dt>'
                f"<dd>{escape(item.value)}</dd></div>"
                for item in block.items
            )
            yield f"<dl>{''.join(cells)}</dl>"
        case Table():
            yield f"{block.frame.to_html(index=False, border=0)}<p class=quiet>{report.inline(block.caption)}</p>"
        case Facts():
            head = "".join(f"<th>{escape(heading)}" for heading in block.headings)
            rows = "".join(f"<tr><td>{report.inline(name)}<td>{report.inline(value)}" for name, value in block.rows)
            yield f"<table><tr>{head}{rows}</table>"
        case Note():
            yield f"<p>{report.inline(block.text)}</p>" + (
                f"<pre>{escape(block.command)}</pre>" if block.command else ""
            )
        case Listing():
            tags = "".join(f"<i>{escape(tag)}</i> " for tag in block.tags)
            yield f"<article><h3>{tags}{report.inline(block.heading)}</h3>"
            yield f"<pre>{escape(block.lines)}</pre></article>"
        case Findings():
            for place, finding in enumerate(block.findings):
                yield report.finding_box(finding, has_summary=place > 0 or finding.severity == "info")
        case Widget():
            for inner in block.initial():
                yield from _block(inner)
        case Fold():
            for inner in block.blocks:
                yield from _block(inner)
