"""The pages docs/sight.md and docs/sight-cuda.md, from what the tools said."""

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
from benchmarks.sight.rules import Fault, Verdict, judge, sentences
from benchmarks.sight.tools import ALONE, TOOLS, Tool

#: Most lines of a quotation, and characters of a line.
_LINES, _WIDTH = 4, 240
#: Lines with a tool's verdict, quoted where nothing else decides.
_VERDICT = re.compile(r"^(verdict|why):|^. (info|warning|critical)\b|finding|attention|no warnings", re.IGNORECASE)
#: Text of each run: fault -> tool -> what it said.
Runs = Mapping[str, Mapping[str, Mapping[str, Any]]]

_CPU = """\
# What each tool sees

The same small training runs under each tool, each time with one planted fault. The table says what the tool says
*by itself*: in its summary, its report, its alert, or the curves that it stores. `python -m benchmarks.sight` runs
it all and writes this page. Faults of GPU memory have [a page of their own](sight-cuda.md). Each tool has an
environment of its own. A training takes {seconds} s; one that still runs after {patience} s gets Ctrl-C.
"""
_CUDA = """\
# What each tool sees of CUDA memory

The same small training runs on a GPU under each tool, once healthy and twice with a planted fault. The table says
what the tool says *by itself*, as in [What each tool sees](sight.md). `python -m benchmarks.sight --cuda` runs it
all and writes this page.

The GPU is simulated (`tests/cuda_sim`): programs and PyTorch's allocator are real, driver and NVML only keep
account of memory. A tool that needs more of the driver may see more on a real GPU.
"""
_RULES = """\
- **✓**: one sentence names the fault: it says all that the second column asks for.
- **hint**: a sentence names the symptom alone. **curve**, **line**, **table**, **stack**: the fault is in a curve,
  in the functions that hold memory, in a table or in a stack, unlike in the healthy training. A reader must find
  it.
- **—**: nothing that differs from the healthy training.

The rule is the same for all tools, ours too (`benchmarks/sight/rules.py`). Sentences that a tool says of the
healthy training as well, or that the training prints without a tool, do not count. The recorders of system metrics
take a sample each second here instead of one in 10 or 15 s. Other tools have other purposes: trackers keep metrics,
memray and the profilers answer questions.
"""
_OTHERS = """\
Others say more in places. memray names the function that holds the memory, Tidegauge only with `--investigate`.
py-spy shows the stacks at once, Tidegauge after 30 s without a batch. torch.profiler's table names the operation
that takes the memory.
"""


def page(runs: Runs, faults: Mapping[str, Fault], device: str, *, seconds: float, patience: float) -> Iterator[str]:
    """Yield the lines of the page on trainings that run on `cpu` or on a simulated `cuda`."""
    tools = [tool for tool in TOOLS.values() if any(tool.name in runs[fault] for fault in runs)]
    if device == "cuda":
        yield from (_CUDA, _RULES)
    else:
        yield from (_CPU.format(seconds=f"{seconds:.0f}", patience=f"{patience:.0f}"), _RULES, _OTHERS)
    gpu = "simulated GPU" if device == "cuda" else "no GPU"
    yield (
        f"{datetime.datetime.now(datetime.UTC):%-d %B %Y}, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.machine()}, {gpu}, Python {platform.python_version()}, torch {version('torch')}. "
        f"{_load(runs)}\n"
    )
    verdicts = {
        (fault, tool.name): judge(
            tool, faults[fault], runs[fault][tool.name], runs["healthy"][tool.name], runs[fault][ALONE.name]["text"]
        )
        for fault in runs
        for tool in tools
        if tool.name in runs[fault]
    }
    yield from _row("fault", "a sentence must say", *(tool.title for tool in tools))
    yield from _row(*("---" for _ in range(len(tools) + 2)))
    for fault in faults:
        marks = [verdicts[fault, tool.name].mark if (fault, tool.name) in verdicts else "" for tool in tools]
        title = f"[{faults[fault].title}](#{fault})"
        yield from _row(title, faults[fault].rule, *(_strong(mark) for mark in marks))
    yield "\nFor the healthy training the table says whether the tool raises an alarm: warning or critical."
    yield "An empty cell: not run.\n"
    yield from _how(tools)
    for fault in faults:
        yield f"\n## {fault}\n\nFault: {faults[fault].title}. A sentence must say: {faults[fault].rule}.\n"
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
    for line in [*dict.fromkeys(lines)][:_LINES]:
        yield textwrap.shorten(line, _WIDTH, placeholder=" …")
    yield "```\n"


def _interest(name: str) -> tuple[bool, str]:
    return not re.search("mem|rss|loss", name, re.IGNORECASE), name
