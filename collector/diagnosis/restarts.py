"""Attempts of a run that failed and that the launcher (torchrun) made good by starting all ranks anew."""

from __future__ import annotations

from collector.diagnosis.findings import Advice, Finding, Locus
from collector.diagnosis.lifecycle import Lifecycle
from collector.diagnosis.victims import fact, last_step, rank_of
from collector.store.runs import ProcessKey


def find_restarts(life: Lifecycle) -> list[Finding]:
    """One warning for each attempt that was not the last."""
    return [
        _restart(life, attempt, [key for key, its in life.replaced.items() if its == attempt])
        for attempt in sorted(set(life.replaced.values()))
    ]


def _restart(life: Lifecycle, attempt: int, ranks: list[ProcessKey]) -> Finding:
    raised = sorted((event["time_ns"], key) for key, event in life.exceptions.items() if key in ranks)
    first = raised[0][1] if raised else None
    error = life.exceptions[first] if first else {}
    made = max((step + 1 for key in ranks if (step := last_step(life.tables, key)) is not None), default=0)
    locus = Locus(host=ranks[0][0], role="main")
    if first is not None:
        locus = Locus(host=first[0], rank=rank_of(life.tables, first), role="main", pid=first[1])
    silent = [key for key in ranks if key not in life.farewells and key not in life.exceptions]
    how = f"with {error['type']} in rank {locus.rank}, and" if error else "with"
    evidence = [
        fact("attempts_count", life.attempts, "run"),
        fact("steps_of_the_attempt_count", made, f"attempt {attempt}"),
        fact("ranks_without_farewell_count", len(silent), f"of {len(ranks)} that reported"),
    ]
    if error:
        evidence.append(fact("exception", f"{error['type']}: {error['message']}"[:300], "uncaught", unit="text"))
    return Finding(
        kind="crashed" if error else "killed",
        severity="warning",
        confidence=0.95 if error else 0.85,
        summary=f"Attempt {attempt} ended after {made} steps, {how} {len(silent)} of {len(ranks)} ranks without "
        "farewell (killed, or stopped by the launcher). All ranks were started anew; their steps count from 0.",
        locus=locus,
        since_step=made,
        evidence=tuple(evidence),
        advice=(
            Advice(
                text="Load the newest checkpoint when the script starts, and save one often enough",
                expected="a new attempt repeats no more than the steps since then",
            ),
        ),
    )
