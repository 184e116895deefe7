"""Read the pages of a run from the HTML report: their words in order, and each figure as Plotly draws it."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np

#: Longer arrays are digested.
_PLAIN_LENGTH = 6
_LINE_TAGS = ("h2", "h3", "p", "pre", "dd", "tr", "li")


class PageReader(HTMLParser):
    """Collects the words and figures of each section; findings are in the report, so their titles are enough.

    Attributes:
        pages: page -> its blocks, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[str, list[Any]] = {}
        self._blocks: list[Any] = []
        self._text: list[str] = []
        self._help = ""
        self._figure: dict[str, Any] | None = None
        self._in_finding = self._in_chart = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Begin a page, a finding, a figure or a metric."""
        given = dict(attrs)
        if tag == "h2":
            self._blocks = self.pages.setdefault(str(given["id"]), [])
            self._text.clear()
        elif tag == "article":
            self._in_finding, self._in_chart = "class" in given, "class" not in given
        elif tag == "figure":
            self._figure = {"words": given["aria-label"]}
        elif tag == "div" and "title" in given:
            self._help = f" ({given['title']})"

    def handle_endtag(self, tag: str) -> None:
        """End a line or a figure."""
        if tag in ("td", "th"):
            self._text.append(" | ")
        elif tag == "dt":
            self._text.append(": ")
        elif tag == "figure":
            self._blocks.append(self._figure)
            self._figure = None
        elif tag == "article":
            self._in_finding = self._in_chart = False
        elif tag in _LINE_TAGS:
            self._end_line(tag)

    def handle_data(self, data: str) -> None:
        """Take words, or the script that draws a figure."""
        if self._figure is None:
            self._text.append(data)
        elif "Plotly.newPlot(" in data:
            self._figure |= _drawn(data)

    def _end_line(self, tag: str) -> None:
        line = " ".join("".join(self._text).split()).removesuffix(" |")
        self._text.clear()
        # A chart's title and caption are in its words.
        if line and not self._in_chart and (tag == "h3" or not self._in_finding):
            self._blocks.append(line + (self._help if tag == "dd" else ""))


def _drawn(script: str) -> dict[str, Any]:
    """Return the traces and the layout from a call of Plotly.newPlot(id, data, layout, …)."""
    decoder, place, found = json.JSONDecoder(), script.index("Plotly.newPlot(") + len("Plotly.newPlot("), []
    for _ in range(3):
        while script[place] in " ,\n\t":
            place += 1
        value, place = decoder.raw_decode(script, place)
        found.append(value)
    return figure(found[1], found[2])


def figure(data: Sequence[Any], layout: Mapping[str, Any]) -> dict[str, Any]:
    """Return a figure with its arrays digested, without the id of the run."""
    shown = {name: value for name, value in layout.items() if name != "uirevision"}
    return {"data": [shortened(trace) for trace in data], "layout": shortened(shown)}


def shortened(value: Any) -> Any:
    """Return a JSON value with its long arrays digested."""
    if isinstance(value, Mapping):
        if {"dtype", "bdata"} <= set(value):
            array = np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"])
            return _array(array.tolist(), value.get("shape"))
        return {name: shortened(each) for name, each in value.items()}
    if isinstance(value, list):
        if any(isinstance(each, Mapping) for each in value):
            return [shortened(each) for each in value]
        return _array(value, None)
    return _rounded(value)


def _array(values: list[Any], shape: str | None) -> Any:
    """Return an array of numbers or words, or what tells it from others if it is long."""
    flat = list(_flat(values))
    # A flat list needs no shape.
    of_shape = {} if shape is None and flat == values else {"shape": shape or f"{len(values)}, …"}
    if len(flat) <= _PLAIN_LENGTH:
        return [_rounded(each) for each in flat] if not of_shape else {**of_shape, "all": [*map(_rounded, flat)]}
    ends = {"first": _rounded(flat[0]), "last": _rounded(flat[-1])}
    if any(isinstance(each, str) for each in flat):
        words = json.dumps([_rounded(each) for each in flat]).encode()
        return {**of_shape, "n": len(flat), **ends, "crc": zlib.crc32(words)}
    numbers = np.array([math.nan if each is None else each for each in flat], dtype=np.float64)
    known = np.isfinite(numbers)
    digest = {**of_shape, "n": len(flat), **ends, **({} if known.all() else {"missing": int((~known).sum())})}
    if known.any():
        there = numbers[known]
        # The second sum tells another order of the same values.
        ordered = float(there @ (np.flatnonzero(known) + 1.0) / len(flat))
        sums = {"min": there.min(), "max": there.max(), "sum": there.sum(), "ordered": ordered}
        digest |= {name: _rounded(float(number)) for name, number in sums.items()}
    return digest


def _flat(values: list[Any]) -> Iterator[Any]:
    for each in values:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each


def _rounded(value: Any) -> Any:
    """Return a number with the digits that are compared."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.12g}") if math.isfinite(value) else None
