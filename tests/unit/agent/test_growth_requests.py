"""Requests that `--investigate` puts to a training whose memory grows."""

import json

from collector.agent.live.outlets import Investigator
from collector.findings import STEPS_BETWEEN, Finding, Locus, fact
from collector.store.runs.run import Run
from training_harness import layout


def leak(*further):
    return Finding(
        kind="gpu-tensor-leak",
        severity="warning",
        confidence=0.9,
        summary="It leaks.",
        locus=Locus(host="node", rank=0, device=0, role="main", pid=7),
        evidence=(fact("allocated_rise_bytes", 2**30, "run"), fact("allocation_rise_count", 9, "run"), *further),
    )


def test_growth_once_an_epoch_is_traced_over_two_epochs_even_after_a_short_trace(tmp_path):
    run = Run(layout.create_run(tmp_path, name="leaks", argv=["leaks.py"]))
    investigator = Investigator(run)
    for finding in (leak(), leak(fact(STEPS_BETWEEN, 5000, "6 times"))):
        investigator.investigate([finding])
        investigator.investigate([finding])
    asked = [json.loads(path.read_text()) for path in sorted((run.path / layout.REQUESTS).iterdir())]
    assert [(each["steps"], each["is_of_devices"]) for each in asked] == [(12500, True), (100, False)]
    investigator.close()
    assert not list((run.path / layout.REQUESTS).iterdir())
