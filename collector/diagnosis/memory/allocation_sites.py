"""Add to a leak its allocation sites, the lines whose memory stays; or the command that finds them.

The bytes of tensors that Python knows, and of Python objects, are counted by the line that allocated them. Memory
that autograd keeps in C++ is not. So if a process grew by more than twice what its lines explain, lines whose
tensors keep growing graphs come first, and the unexplained rest is a site of its own. Lines with ever more tensors
that each keep a graph come first in any case: a graph keeps the batches that went into it, which other lines made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from collector.diagnosis.memory.leak import CONFIRMED
from collector.diagnosis.memory.resources import SINGLE_TENSORS, WORKER_HEAP
from collector.diagnosis.run.tables import RunTables
from collector.findings import KINDS, Advice, AllocationSite, Finding, extended
from collector.store import ProcessGrowth, SiteGrowth
from collector.units import size

_NO_LINE = "no line"
_GRAPH = "with their graph"
_EXCEPTION = "held by the traceback of a kept exception"
#: Advice on workers that take memory without new Python objects: they build no graphs of autograd.
_NATIVE = Advice(
    text="Look at the C and C++ libraries that the dataset calls (decoders, readers): no new Python object and no "
    "tensor keeps this memory",
    expected="",
)
_NAMES_LINES = "the report names the lines that allocate the memory that stays"
#: Advice on memory that grows seldom, as at the start of each epoch: the traced steps kept nothing.
_TWO_SNAPSHOTS = Advice(
    text="Run it again with `tidegauge run --memory-history 100000 -- COMMAND`, and take two snapshots "
    "(`tidegauge snapshot latest`) with growth between them: the steps that were traced kept no tensor",
    expected=_NAMES_LINES,
)
#: Number of allocation sites that a finding names.
_SITES_COUNT = 5
#: A line with less than this share of the growth is noise of the loop.
_LEAST_RATIO = 0.02
#: Bytes by which a loop's usual allocations may differ between two snapshots.
_LEAST_BYTES = 2**13
#: Growth in bytes below which the part that no line explains does not matter.
_LEAST_UNEXPLAINED_BYTES = 2**20


def add_allocation_sites(finding: Finding, tables: RunTables, *, running: bool) -> Finding:
    """Return a leak with its allocation sites if they were recorded, else with the command that finds them."""
    if not KINDS[finding.kind].has_allocation_sites or finding.locus.role == "other":  # without hooks to answer
        return finding
    device = "cpu" if finding.locus.device is None else f"cuda:{finding.locus.device}"
    place = ("role", "host", "rank", "pid", "loader", "worker")
    snapshots = [
        grown
        for grown in tables.grown
        if all(getattr(finding.locus, name) in (None, {"role": "main", **grown.event}.get(name)) for name in place)
    ]
    sites = rank_sites(snapshots[-1], device) if snapshots else ()
    if sites and sites[0].site != _NO_LINE:
        return extended(finding, "", advice=(_cure(sites[0], finding),), held_by=sites)
    if sites:
        caches = {item.text for item in WORKER_HEAP.leak_advice}  # ruled out: a cache keeps Python objects
        advice = (
            replace(_NATIVE, expected=item.expected) if item.text in caches else item for item in finding.advice
        )
        return replace(finding, held_by=sites, advice=tuple(advice))
    further = _snapshot_advice(finding, tables, running=running, was_traced=bool(snapshots))
    return replace(finding, advice=(*finding.advice, further))


def rank_sites(grown: ProcessGrowth, device: str) -> tuple[AllocationSite, ...]:
    """Return the allocation sites of a device, the largest first; Python objects belong to "cpu"."""
    sites: dict[str, list[SiteGrowth]] = {}
    for line in grown.lines:
        if line.site and (line.device == device or (device == "cpu" and not line.device)):
            sites.setdefault(line.site, []).append(line)
    explained = sum(map(_bytes, sites.values()))
    total = grown.held_bytes.get(device, 0)
    has_rest = total > _LEAST_UNEXPLAINED_BYTES and explained < CONFIRMED * total
    rest_bytes = max(0, total - explained) if has_rest else 0
    nodes = {site: _nodes(lines) if rest_bytes or _keeps_graphs(lines) else 0 for site, lines in sites.items()}
    order = sorted(sites, key=lambda site: (-nodes[site], -_bytes(sites[site])))
    largest = [
        _allocation_site(sites[site], grown.window)
        for site in order
        if nodes[site] or _bytes(sites[site]) >= max(_LEAST_BYTES, _LEAST_RATIO * max(explained, total))
    ]
    rest = AllocationSite(
        site=_NO_LINE,
        what="memory without a new Python object: autograd keeps it for the tensors above or for an older one "
        "(total += loss), or a C++ extension keeps it",
        grown_bytes=rest_bytes,
        grown_count=0,
        window=grown.window,
    )
    return (*largest[:_SITES_COUNT], *([rest] if rest_bytes else []))


def _cure(site: AllocationSite, finding: Finding) -> Advice:
    rate = f": {size(finding.rate.value)}/s less" if finding.rate else ""
    if _EXCEPTION in site.what:
        return Advice(
            text=f"Keep no exception with its traceback, whose frames hold the tensors from `{site.site}`: keep "
            "str(error), or call traceback.clear_frames(error.__traceback__) first",
            expected=f"they are freed once the exception is handled{rate}",
        )
    if _GRAPH in site.what and SINGLE_TENSORS.leak_advice[0] in finding.advice:
        return Advice(
            text=f"Keep no tensors from `{site.site}`: use .item() for a number, .detach().cpu() for a tensor. The "
            "memory is their own; .detach() alone frees only their graph",
            expected=f"they are freed after their step{rate}",
        )
    if _GRAPH in site.what:
        return Advice(
            text=f"Keep no graph of the tensors from `{site.site}`: use .item() for a number, .detach() "
            "for a tensor",
            expected=f"the activations of each step are freed{rate}",
        )
    return Advice(
        text=f"Find what keeps the objects from `{site.site}`: a list, dict, cache or closure without bound",
        expected=f"they are freed after their step{rate}",
    )


def _allocation_site(lines: list[SiteGrowth], window: str) -> AllocationSite:
    """Return the site of these allocations, named after most of its memory."""
    most = max(lines, key=lambda line: (line.grown_nodes_count > 0, line.grown_bytes))
    what = "tensors" if most.device else "Python objects"
    if most.made_by:
        nodes = f", {_nodes(lines):,} nodes" if _nodes(lines) else ""
        what = f"tensors {_GRAPH} ({most.made_by}{nodes})"
    if most.in_traceback:
        what = f"tensors {_EXCEPTION}"
    return AllocationSite(
        site=most.site,
        callers=most.callers,
        what=what,
        grown_bytes=_bytes(lines) or None,
        grown_count=most.grown_count,
        window=window,
    )


def _nodes(lines: Iterable[SiteGrowth]) -> int:
    return max(0, sum(line.grown_nodes_count for line in lines))


def _keeps_graphs(lines: Iterable[SiteGrowth]) -> bool:
    """Return whether ever more tensors of a line keep a graph, each its own."""
    return any(0 < line.grown_count <= line.grown_nodes_count for line in lines)


def _bytes(lines: Iterable[SiteGrowth]) -> int:
    return sum(line.grown_bytes for line in lines)


def _snapshot_advice(finding: Finding, tables: RunTables, *, running: bool, was_traced: bool) -> Advice:
    """Return the cheapest command that would find the allocation sites; a trace may have shown nothing."""
    locus = finding.locus
    run = tables.manifest.get("run_id", "RUN") if running else "latest"
    worker = f" --worker {locus.worker or 0}" if locus.role == "worker" else ""
    command = f"tidegauge snapshot {run} --kind growth{worker}"
    if was_traced and locus.device is not None:
        return _TWO_SNAPSHOTS
    if was_traced:
        return Advice(
            text=f"Trace more steps while it runs, so that the growth lies within: `{command} --steps 1000`. The "
            "steps that were traced kept nothing",
            expected=_NAMES_LINES,
        )
    mains = {(event["host"], event["pid"]) for event in tables.events_of("process-start")}
    if running and (locus.role == "worker" or (locus.host, locus.pid) in mains):
        return Advice(
            text=f"Run `{command}`",
            expected="it names the lines that allocate the memory that stays; 100 steps are slower",
        )
    if any(event.get("investigates") for event in tables.events_of("collector-start")):
        return Advice(
            text="Run it for longer: `--investigate` made no trace of this process. A trace takes 100 steps after "
            "a verdict on the growth, and verdicts come after 30 s, then about every four minutes",
            expected=_NAMES_LINES,
        )
    return Advice(
        text="Run it again for a minute or more with `tidegauge run --investigate -- COMMAND`",
        expected=_NAMES_LINES,
    )
