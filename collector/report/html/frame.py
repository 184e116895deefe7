"""The frame of a card in a notebook: it brings its style, and loads nothing.

Colours are those of the page around it, with accents that can be read on a light and on a dark one.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from collector.report.html.finding_box import inline

#: The doubled class wins over a notebook's own rules for tables and headings.
_STYLE = """
.tidegauge.tidegauge { max-width: 62rem; font: 14px/1.45 system-ui, sans-serif; color: inherit;
border: 1px solid rgba(128,128,128,.4); border-radius: 6px; padding: .6rem .9rem; margin: .25rem 0 }
.tidegauge.tidegauge p { margin: .3rem 0 } .tidegauge.tidegauge h3 { font-size: 1em; margin: .1rem 0 }
.tidegauge.tidegauge article { border: 1px solid rgba(128,128,128,.35); border-left: 4px solid #3A8FC7;
border-radius: 4px; padding: .4rem .8rem; margin: .5rem 0 }
.tidegauge.tidegauge article.critical { border-left-color: #E5484D }
.tidegauge.tidegauge article.warning { border-left-color: #D9730D }
.tidegauge.tidegauge .quiet { opacity: .72; font-size: .92em }
.tidegauge.tidegauge ol, .tidegauge.tidegauge ul { margin: .3rem 0; padding-left: 1.4rem }
.tidegauge.tidegauge table { border-collapse: collapse; border: 0; margin: .3rem 0; font-size: 1em;
display: block; overflow-x: auto }
.tidegauge.tidegauge tr { background: none } .tidegauge.tidegauge td { border: 0; text-align: left;
vertical-align: top; white-space: normal; max-width: none; padding: .1rem 1.2rem .1rem 0 }
.tidegauge.tidegauge code { background: rgba(128,128,128,.18); color: inherit; border-radius: 3px;
padding: 0 .25em; overflow-wrap: anywhere } .tidegauge.tidegauge summary { cursor: pointer }
"""


def card(*parts: str) -> str:
    """Return the parts of a card in its frame."""
    return f'<div class="tidegauge"><style>{_STYLE}</style>{"".join(parts)}</div>'


def table(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a table of labels and values; empty without any."""
    rows = "".join(
        f'<tr><td class="quiet">{escape(label)}</td><td>{inline(value)}</td></tr>' for label, value in pairs
    )
    return f"<table>{rows}</table>" if rows else ""
