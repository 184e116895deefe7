"""What holds a leak: the lines whose memory stayed, where a process was asked; else how to ask it.

The bytes of tensors that Python knows, and of Python's own memory, are counted by the line that made them. What
autograd keeps in C++ is not: where the process grew by more than twice what the lines explain, those come first
whose tensors keep ever larger graphs, and what no line explains is told as such.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from collector.diagnosis.findings import ASKED_FOR_LINES, Advice, Finding, Holder
from collector.diagnosis.tables import RunTables
from collector.diagnosis.witnesses import CONFIRMED
from collector.quantities import size
from collector.store.snapshots import Grown, GrownLine

_NO_LINE = "no line"
_GRAPH = "with their graph"
#: So many lines are told of.
_HOLDERS = 5
#: A line with less than this share of the growth is noise of the loop.
_LEAST_RATIO = 0.02
#: What a loop makes at any time may differ by this between the two marks.
_LEAST_BYTES = 2**13
#: In a window in which the process grew by less than this, it does not matter what no line explains.
_LEAST_HIDDEN_BYTES = 2**20


def with_holders(finding: Finding, tables: RunTables, *, running: bool) -> Finding:
    """A leak with what holds it, if that was asked for; else with the command that tells it."""
    if finding.kind not in ASKED_FOR_LINES or finding.locus.role == "other":  # has no hooks that could answer
        return finding
    device = "cpu" if finding.locus.device is None else f"cuda:{finding.locus.device}"
    of_it = [grown for grown in tables.grown if _is_of(grown, finding)]
    holders = ranked(of_it[-1], device) if of_it else ()
    if holders:
        cure = () if holders[0].site == _NO_LINE else (_cure(holders[0], finding),)
        return replace(finding, held_by=holders, advice=(*cure, *finding.advice))
    return replace(finding, advice=(*finding.advice, _to_ask(finding, tables, running=running)))


def ranked(grown: Grown, device: str) -> tuple[Holder, ...]:
    """The lines that hold the memory of a device, Python's own with that of the host; the first holds most."""
    sites: dict[str, list[GrownLine]] = {}
    for line in grown.lines:
        if line.site and (line.device == device or (device == "cpu" and not line.device)):
            sites.setdefault(line.site, []).append(line)
    told = sum(map(_bytes, sites.values()))
    held = grown.held_bytes.get(device, 0)
    hidden = max(0, held - told) if held > _LEAST_HIDDEN_BYTES and told < CONFIRMED * held else 0
    nodes = {site: _nodes(lines) if hidden else 0 for site, lines in sites.items()}
    order = sorted(sites, key=lambda site: (-nodes[site], -_bytes(sites[site])))
    of_lines = [
        _holder(sites[site], grown.window)
        for site in order
        if nodes[site] or _bytes(sites[site]) >= max(_LEAST_BYTES, _LEAST_RATIO * max(told, held))
    ]
    rest = Holder(
        site=_NO_LINE,
        what="of which no new Python object knows: kept by autograd for the tensors above or for an older one "
        "(total += loss), or by a C++ extension",
        grown_bytes=hidden,
        grown_count=0,
        window=grown.window,
    )
    return (*of_lines[:_HOLDERS], *([rest] if hidden else []))


def _cure(holder: Holder, finding: Finding) -> Advice:
    """What to do at the line that holds most."""
    rate = f": {size(finding.rate.value)}/s less" if finding.rate else ""
    if _GRAPH in holder.what:
        return Advice(
            text=f"Keep no graph of what `{holder.site}` makes: .item() for a number, .detach() for a tensor",
            expected=f"the activations of each step go with it{rate}",
        )
    return Advice(
        text=f"Find who keeps what `{holder.site}` makes: a list, dict, cache or closure without bound",
        expected=f"it goes when its step is over{rate}",
    )


def _is_of(grown: Grown, finding: Finding) -> bool:
    told, names = {"role": "main", **grown.event}, ("role", "host", "rank", "pid", "loader", "worker")
    return all(getattr(finding.locus, name) in (None, told.get(name)) for name in names)


def _holder(lines: list[GrownLine], window: str) -> Holder:
    """What one line holds; it is called what most of it is."""
    most = max(lines, key=lambda line: (line.grown_nodes_count > 0, line.grown_bytes))
    what = "tensors" if most.device else "Python objects"
    if most.made_by:
        nodes = f", {_nodes(lines):,} nodes" if _nodes(lines) else ""
        what = f"tensors {_GRAPH} ({most.made_by}{nodes})"
    return Holder(
        site=most.site,
        callers=most.callers,
        what=what,
        grown_bytes=_bytes(lines) or None,
        grown_count=most.grown_count,
        window=window,
    )


def _nodes(lines: Iterable[GrownLine]) -> int:
    return max(0, sum(line.grown_nodes_count for line in lines))


def _bytes(lines: Iterable[GrownLine]) -> int:
    return sum(line.grown_bytes for line in lines)


def _to_ask(finding: Finding, tables: RunTables, *, running: bool) -> Advice:
    """The cheapest command that would tell."""
    locus = finding.locus
    known = {(event["host"], event["pid"]) for event in tables.events_of("process-start")}
    if running and (locus.role == "worker" or (locus.host, locus.pid) in known):
        worker = f" --worker {locus.worker or 0}" if locus.role == "worker" else ""
        command = f"`tidegauge snapshot {tables.manifest.get('run_id', 'RUN')} --kind growth{worker}`"
        return Advice(text=command, expected="the lines that make what stays, for 100 slower steps")
    return Advice(
        text="Run it again with `tidegauge run --investigate -- COMMAND`",
        expected="the report names the lines that make what stays",
    )
