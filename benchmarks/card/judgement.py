"""The page of the runs recorded on a GPU."""

from __future__ import annotations

import json
import statistics
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks.card.trainings import Training, trainings
from collector.diagnosis.run.cuda_message import message_figures
from collector.diagnosis.run.tables import RunTables, load_tables
from collector.diagnosis.verdict import diagnose
from collector.findings import Finding
from collector.store.runs.run import Run
from collector.units import size

#: Rounding of PyTorch's message, which has GiB with two decimals.
_ROUNDING_BYTES = 0.006 * 2**30
_SENTENCE = "CUDA out of memory"
#: Figures of the finding that the message has too.
_FIGURES = ("requested_bytes", "allocated_bytes", "free_bytes")


def page(folder: Path) -> Iterator[str]:
    """Write the page from the archives in a folder, as lines of Markdown."""
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name)
        for path in sorted(folder.glob("runs-*.tar.gz")):
            with tarfile.open(path) as archive:
                archive.extractall(runs, filter="data")
        judged = [(each, runs / each.name) for each in trainings() if (runs / each.name).exists()]
        found: Found = {}
        for training, run in judged:
            tables = load_tables(Run(run))
            found[training.name] = tables, diagnose(tables).findings
        for table in ("cost.md", "batch-sizes.md"):
            if (folder / table).exists():
                yield from ("", (folder / table).read_text().rstrip())
        yield from _verdicts([each for each, _ in judged], found)
        yield from _errors([each for each in judged if each[0].name.startswith("error-")], found)
        for training, run in judged:
            tables, _ = found[training.name]
            if training.name == "clock":
                yield from _clock(run, tables)
            if training.name in ("gauges", "captured-graph"):
                yield _gauges(run, tables)


Found = dict[str, tuple[RunTables, Sequence[Finding]]]


def _verdicts(judged: list[Training], found: Found) -> Iterator[str]:
    yield from ("", "| training | right | warnings | is it right? |", "|---|---|---|---|")
    wrong = missed = 0
    for training in judged:
        findings = found[training.name][1]
        warned = dict.fromkeys(each.kind for each in findings if each.severity != "info")
        caught = training.kind == "cuda-oom" and any(f.kind == "cuda-oom" for f in findings)
        is_missed = training.kind is not None and training.kind not in warned and not caught
        right = (training.kind, *training.consequences)
        others = {each.kind: "" for each in findings if each.severity != "info" and _is_wrong(each, right)}
        missed, wrong = missed + is_missed, wrong + len(others)
        answer = "missed" if is_missed else "wrong: " + ", ".join(others) if others else "yes"
        yield f"| {training.name} | {training.kind or 'none'} | {', '.join(warned) or 'none'} | {answer} |"
    yield from ("", f"{len(judged)} trainings: {missed} missed, {wrong} wrong warnings.")


def _is_wrong(finding: Finding, right: tuple[str | None, ...]) -> bool:
    """Return whether a warning is wrong: of memory, but not of the growth of the neighbours side by side."""
    is_of_memory = finding.group in ("memory leak", "memory forecast", "death")
    return is_of_memory and finding.kind not in right and not finding.value_of("other_processes_rise_bytes")


def _errors(judged: list[tuple[Training, Path]], found: Found) -> Iterator[str]:
    yield from (
        "",
        "| error | figures of the finding and of the message | within 3 % | first advice |",
        "|---|---|---|---|",
    )
    for training, run in judged:
        error = next((each for each in found[training.name][1] if each.kind == "cuda-oom"), None)
        if error is None:
            yield f"| {training.name} | no finding | no | |"
            continue
        output = (run / "output.txt").read_text(errors="replace")
        said = message_figures(output.rpartition(_SENTENCE)[2] if training.name.endswith("-caught") else output)
        cells, is_near = [], True
        for name in _FIGURES:
            if name in said:
                mine = error.value_of(name) or 0.0
                near = bool(np.isclose(mine, said[name], rtol=0.03, atol=_ROUNDING_BYTES))
                is_near = is_near and near
                cells.append(f"{name.removesuffix('_bytes')} {size(mine)} / {size(said[name])}")
        advice = error.advice[0].text if error.advice else ""
        yield f"| {training.name} | {', '.join(cells)} | {'yes' if is_near else 'NO'} | {advice} |"


def _clock(run: Path, tables: RunTables) -> Iterator[str]:
    """Compare times on the GPU with those between the training's own events."""
    own = dict(json.loads((run / "clock.json").read_text()))
    rows = tables.stream("device_time")
    pairs = [
        (duration_ns / 1e6, own[step])
        for step, duration_ns in zip(rows["step"], rows["duration_ns"], strict=True)
        if step in own
    ]
    errors = [abs(mine - truth) / truth for mine, truth in pairs]
    worst = max(errors)
    yield from (
        "",
        f"Times on the GPU: {len(pairs)} sampled steps of {statistics.median(own.values()):.2f} ms; difference "
        f"from the training's own events: median {statistics.median(errors):.2%}, worst {worst:.2%}.",
    )


def _gauges(run: Path, tables: RunTables) -> str:
    """Compare the records of device memory with PyTorch's own numbers, step by step."""
    name = "gauges.json" if (run / "gauges.json").exists() else "graph.json"
    said = pd.DataFrame(json.loads((run / name).read_text()))
    records = tables.stream("device_memory").groupby("step").last().tail(len(said))
    known = [column for column in said if records[column].notna().any()]
    differing = [column for column in known if list(records[column]) != list(said[column])]
    return (
        f"Gauges of {run.name}: {len(said)} steps, {len(known)} gauges that this torch has; differing: "
        f"{', '.join(map(str, differing)) or 'none'}."
    )
