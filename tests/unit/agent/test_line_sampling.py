"""The moments at which series of stacks are taken, and their budget."""

import json
import os

import pytest

from collector.agent.live.line_sampling import BUDGET_RATIO, LineSampler
from collector.agent.problems import Problems
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.stack_dumps import StackError
from collector.findings import Finding, Locus, measurements
from training_harness.journal import EventLog, Identity, start_ticks

HERE = LocalProcess(os.getpid(), start_ticks(os.getpid()))
OTHER = LocalProcess(1, 2)


def finding(kind="workers-too-slow", severity="warning", **where):
    locus = Locus(host="here", **where)
    evidence = measurements(10, "run", starved_ratio=0.5, lost_wall_ratio=0.5)
    return Finding(kind=kind, severity=severity, confidence=0.9, summary="slow", locus=locus, evidence=evidence)


class World:
    """A sampler under a clock of its own, and the series that it asked for."""

    def __init__(self, path, *, always, cost_ratio=0.05):
        self.events = path / "here.1.jsonl"
        self.problems = Problems(EventLog(path, Identity(host="here", pid=1, start_ticks=2)))
        self.taken = []
        self.cost_ratio = cost_ratio
        self.error = None
        self.mains = [(HERE, None)]
        self.workers_count = 2
        self.sampler = LineSampler(always=always, record=self.record)
        self.now = 1_000

    def record(self, main, seconds, *, with_children, on_begin):
        self.taken.append((self.now - 1_000, main, seconds, with_children))
        if self.error:
            raise self.error
        return {"cpu_seconds": seconds * self.cost_ratio, "times_ns": [0] * 20 * seconds}

    def run(self, seconds):
        """Tick once a second; return the fields of the series that have ended."""
        fields = []
        for _ in range(seconds):
            fields += self.sampler.tick(round(self.now * 1e9), self.mains, self.workers_count, self.problems)
            if self.sampler._thread is not None:
                self.sampler._thread.join()
            self.now += 1
        return fields


@pytest.fixture
def world(tmp_path):
    return lambda **options: World(tmp_path, **options)


def test_a_warning_must_stand_for_half_a_minute(world):
    one = world(always=False)
    one.run(60)
    one.sampler.note([finding(), finding("worker-startup"), finding("compute-bound")])
    one.run(29)
    assert one.taken == []
    one.run(5)
    assert {main for _, main, *_ in one.taken} == {HERE}


def test_a_warning_that_is_gone_is_forgotten(world):
    one = world(always=False)
    one.run(60)
    one.sampler.note([finding()])
    one.run(20)
    one.sampler.note([finding(severity="info")])
    one.run(60)
    assert one.taken == []


@pytest.mark.parametrize("cost_ratio", [0.05, 0.1, 0.4])
def test_an_investigation_samples_from_the_begin_within_its_budget(world, cost_ratio):
    one = world(always=True, cost_ratio=cost_ratio)
    fields = one.run(600)
    assert len(fields) == len(one.taken) > 0
    begin, _, seconds, with_children = one.taken[0]
    assert (seconds, with_children) == (2, True)
    assert begin <= 20
    spent = seconds * cost_ratio
    for at, _, length, _ in one.taken[1:]:
        spent += length * cost_ratio
        assert spent <= BUDGET_RATIO * at


def test_many_workers_are_sampled_only_once_the_budget_allows_it(world):
    one = world(always=True, cost_ratio=2.0)
    one.workers_count = 64
    one.run(1_200)
    spent = 0.0
    for at, _, length, _ in one.taken:
        spent += length * one.cost_ratio
        assert spent <= BUDGET_RATIO * at * 1.1
    assert one.taken


def test_series_become_rare_once_there_are_enough_samples(world):
    one = world(always=True)
    one.run(2_000)
    assert 5 <= len(one.taken) <= 12


def test_a_new_finding_is_sampled_at_once(world):
    one = world(always=True)
    one.run(200)
    count = len(one.taken)
    one.sampler.note([finding("slow-worker", worker=1, loader=0)])
    one.run(5)
    assert len(one.taken) > count


def test_a_finding_on_the_training_process_needs_no_workers(world):
    one = world(always=False)
    one.mains = [(OTHER, 0), (HERE, 1)]
    one.sampler.note([finding("main-thread-pause", role="main", rank=1, pid=HERE.pid)])
    one.run(60)
    assert {(main, with_children) for _, main, _, with_children in one.taken} == {(HERE, False)}


def test_stacks_that_cannot_be_read_are_a_problem_and_no_more_are_tried(world):
    one = world(always=True)
    one.error = StackError("reading is not allowed")
    assert one.run(600) == []
    assert len(one.taken) == 3
    problem = json.loads(one.events.read_text())
    assert (problem["kind"], problem["part"]) == ("collector-problem", "lines")
    assert "reading is not allowed" in problem["error"]


def test_a_training_that_has_ended_is_no_problem(world):
    one = world(always=True)
    one.mains = [(OTHER, None)]
    one.error = StackError("no such process")
    one.run(60)
    assert not one.events.exists()
