"""The page docs/sight.md, from what the tools said."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import textwrap
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from benchmarks.environments import PACKAGES, REPOSITORY, python_of
from benchmarks.sight.rules import FAULTS, NOT_RUN, Verdict, judge, sentences
from benchmarks.sight.tools import TOOLS, Tool

#: Most lines of a quotation, and characters of a line.
_LINES, _WIDTH = 4, 240
#: Lines with a tool's verdict, quoted where nothing else decides.
_VERDICT = re.compile(r"^(verdict|why):|^. (info|warning|critical)\b|finding|attention|no warnings", re.IGNORECASE)
#: Text of each run: fault -> tool -> what it said.
Runs = Mapping[str, Mapping[str, Mapping[str, Any]]]

_INTRODUCTION = """\
# What each tool sees

The same small training runs under each tool, each time with one planted fault. The table says what the tool says
*by itself*: in its summary, its report, its alert, or the curves that it stores. `python -m benchmarks.sight` runs
it all and writes this page. Each tool has an environment of its own. A training takes {seconds} s; one that still
runs after {patience} s gets Ctrl-C.

- **✓**: one sentence names the fault: it says all that the second column asks for.
- **hint**: a sentence names the symptom alone. **curve**, **line**, **table**, **stack**: the fault is in a curve,
  in the functions that hold memory, in a table or in a stack, unlike in the healthy training. A reader must find
  it.
- **—**: nothing that differs from the healthy training.

The rule is the same for all tools, ours too (`benchmarks/sight/rules.py`). Sentences that a tool says of the
healthy training as well do not count. The recorders of system metrics take a sample each second here instead of one
in 10 or 15 s. Other tools have other purposes: trackers keep metrics, memray and the profilers answer questions.

Others say more in places. memray names the function that holds the memory, Tidegauge only with `--investigate`.
py-spy shows the stacks at once, Tidegauge after 30 s without a batch. torch.profiler's table names the operation
that takes the memory.
"""


def page(runs: Runs, *, seconds: float, patience: float) -> Iterator[str]:
    """Yield the lines of the page."""
    tools = [tool for tool in TOOLS.values() if any(tool.name in runs[fault] for fault in runs)]
    yield _INTRODUCTION.format(seconds=f"{seconds:.0f}", patience=f"{patience:.0f}")
    yield (
        f"{datetime.datetime.now(datetime.UTC):%-d %B %Y}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.machine()}, no GPU, Python {platform.python_version()}, torch {version('torch')}. "
        f"{_load(runs)}\n"
    )
    verdicts = {
        (fault, tool.name): judge(tool, fault, runs[fault][tool.name], runs["healthy"][tool.name])
        for fault in runs
        for tool in tools
        if tool.name in runs[fault]
    }
    yield from _row("fault", "a sentence must say", *(tool.title for tool in tools))
    yield from _row(*("---" for _ in range(len(tools) + 2)))
    for fault in runs:
        marks = [verdicts[fault, tool.name].mark if (fault, tool.name) in verdicts else "" for tool in tools]
        title = f"[{FAULTS[fault].title}](#{fault})"
        yield from _row(title, FAULTS[fault].rule, *(_strong(mark) for mark in marks))
    for title, reason in NOT_RUN.items():
        yield from _row(title, f"not run: {reason}", *("" for _ in tools))
    yield "\nFor the healthy training the table says whether the tool raises an alarm: warning or critical."
    yield "An empty cell: not run.\n"
    yield from _how(tools)
    for fault in runs:
        yield f"\n## {fault}\n\nFault: {FAULTS[fault].title}. A sentence must say: {FAULTS[fault].rule}.\n"
        for tool in tools:
            if (fault, tool.name) in verdicts:
                verdict = verdicts[fault, tool.name]
                yield from _quotation(tool, verdict, runs[fault][tool.name])


def _load(runs: Runs) -> str:
    """Return a sentence on the other work of the machine."""
    loads = [said["load"] for tools in runs.values() for said in tools.values() if "load" in said]
    if not loads:
        return ""
    count = f"recorded in {len(loads)} of {sum(map(len, runs.values()))} runs"
    return f"Load average, with other work: {min(loads):.0f} to {max(loads):.0f} ({count})."


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"


def _strong(mark: str) -> str:
    return f"**{mark}**" if mark == "✓" else mark


def _how(tools: list[Tool]) -> Iterator[str]:
    yield "## How each tool is used\n"
    yield "The cost is the median that `benchmarks.peers` adds to a step: see [Overhead](overhead.md).\n"
    yield from _row("tool", "version", "use", "added to a step")
    yield from _row("---", "---", "---", "---")
    for tool in tools:
        yield from _row(tool.title, _version(tool), tool.use, _cost(tool))


def _version(tool: Tool) -> str:
    if tool.name == "py-spy":
        words = [str(python_of("").with_name("py-spy")), "--version"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1]
    if tool.name == "torch.profiler":
        return version("torch")
    return PACKAGES[tool.environment].partition("==")[2] if tool.environment else "this version"


def _cost(tool: Tool) -> str:
    """Return the third column of its row in docs/overhead.md."""
    text = (REPOSITORY / "docs" / "overhead.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {re.escape(tool.title)}[ ,|][^|]*\|[^|]*\|([^|]*)\|", text, re.MULTILINE)
    return row[1].strip() if row else "not measured"


def _quotation(tool: Tool, verdict: Verdict, said: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a tool said: the lines that decide, else its verdict, else the names of its curves."""
    lines = verdict.lines or tuple(line for line in sentences(said["text"]) if _VERDICT.search(line))
    heading = f"**{tool.title}** ({verdict.mark})"
    if not lines:
        curves = ", ".join(f"`{name}`" for name in sorted(said["series"], key=_interest)[:6])
        nothing = "nothing in words" if said["text"].strip() else "nothing"
        yield f"{heading}: {nothing}{f'; curves of {curves}' if curves and tool.shows == 'curve' else ''}.\n"
        return
    yield f"{heading}:\n\n```text"
    for line in lines[:_LINES]:
        yield textwrap.shorten(line, _WIDTH, placeholder=" …")
    yield "```\n"


def _interest(name: str) -> tuple[bool, str]:
    return not re.search("mem|rss|loss", name, re.IGNORECASE), name
