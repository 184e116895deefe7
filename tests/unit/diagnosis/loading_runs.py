"""A training whose loading keeps up, and what is found on its loading."""

from simulated_runs import finish, jittered

from collector.diagnosis.verdict import diagnose

STEADY = {"workers": 4, "prefetch": 2, "service": jittered(0.02), "consumer": jittered(0.04), "batches": 300}


def loading_findings(script):
    """Return the verdict's (kind, severity) pairs, without compute-bound, and each kind's finding."""
    findings = [f for f in diagnose(finish(script).tables()).findings if f.kind != "compute-bound"]
    return [(f.kind, f.severity) for f in findings], {f.kind: f for f in findings}
