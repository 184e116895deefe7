"""CPU time of child processes that outlive the fetches which use them: pools, and programs that feed a pipe.

The kernel counts a child's CPU time for its parent when the child has ended (RUSAGE_CHILDREN, getrusage(2)), so a
fetch's own record has none of theirs. The collector samples them like all processes of the run.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from collector.diagnosis.run.columns import between, floats, sampled_on
from collector.diagnosis.run.tables import RunTables, once
from training_harness.records import ROLE_OTHER

#: Share of the fetches' time that children must compute to count: a logger's process computes a little, too.
_LEAST_PART = 0.1


def living_children(tables: RunTables, host: str, pid: int) -> set[int]:
    """Return the sampled descendants of a process that neither train nor load."""
    pairs, found = _parents(tables, host), {float(pid)}
    while grown := {child for child, parent in pairs if parent in found} - found:
        found |= grown
    return {int(child) for child in found} - {pid}


@once
def _parents(tables: RunTables, host: str) -> set[tuple[float, float]]:
    """Return pid and parent's pid of each process that neither trains nor loads."""
    rows = sampled_on(tables, host)
    rows = rows[floats(rows, "role") == ROLE_OTHER]
    known = pd.DataFrame({name: floats(rows, name) for name in ("process_pid", "parent_pid")})
    return set(known.dropna().drop_duplicates().itertuples(index=False, name=None))


def with_living_children(tables: RunTables, fetches: pd.DataFrame) -> pd.DataFrame:
    """Return fetches whose `children_cpu_ns` has what living children computed; `children_outlive` says which.

    It is known for all fetches of a process together, and is shared out by their blocked time.
    """
    outlive = np.zeros(len(fetches), dtype=bool)
    children_ns = floats(fetches, "children_cpu_ns")
    blocked_ns = np.nan_to_num(floats(fetches, "blocked_ns"))
    took_ns = np.nan_to_num(floats(fetches, "getitem_ns")) + np.nan_to_num(floats(fetches, "collate_ns"))
    ends_ns = floats(fetches, "time_ns")
    for _, rows in fetches.groupby(["host", "pid"]):
        places = fetches.index.get_indexer(rows.index)
        host, pid = str(rows["host"].iloc[0]), int(rows["pid"].iloc[0])
        children = living_children(tables, host, pid)
        if not children:
            continue
        samples = sampled_on(tables, host)
        samples = samples[samples["process_pid"].isin(children)]
        begin_ns, end_ns = (ends_ns - took_ns)[places].min(), ends_ns[places].max()
        spent_ns = cpu_spent_ns(samples, float(begin_ns), float(end_ns))
        if spent_ns > max(float(np.nansum(children_ns[places])), _LEAST_PART * float(took_ns[places].sum())):
            children_ns[places] = spent_ns * blocked_ns[places] / max(float(blocked_ns[places].sum()), 1.0)
            outlive[places] = True
    return fetches.assign(children_cpu_ns=children_ns, children_outlive=outlive)


def cpu_spent_ns(samples: pd.DataFrame, begin_ns: float, end_ns: float) -> float:
    """Return the CPU time that sampled processes spent between their first and last samples in a window."""
    rows = between(samples, begin_ns, end_ns)
    spent = (
        rows[np.isfinite(floats(rows, "cpu_ns"))]
        .groupby(["process_pid", "process_start_ticks"])["cpu_ns"]
        .agg(["min", "max"])
    )
    return float((spent["max"] - spent["min"]).sum())
