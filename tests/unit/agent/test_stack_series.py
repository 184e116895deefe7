"""py-spy's trace read as stacks at the same moments, the stages of a source, and failures of py-spy."""

import os
import sys

import pytest

from collector.agent.samplers import stack_series
from collector.agent.samplers.procfs import LocalProcess
from collector.agent.samplers.stack_dumps import StackError
from collector.agent.samplers.stack_series import Series, named_stages, read_trace, record_series, series_fields
from collector.stacks import Frame


class Trace:
    """A trace as py-spy writes it: at each change of a thread's stack, the frames that end and begin."""

    def __init__(self):
        self.events = []
        self._open = {}

    def read(self, seconds, pid, functions, *, thread=1, name="MainThread", os_thread=None):
        processes = ["process 7:'train.py'"] + ([f"process {pid}:'train.py'"] if pid != 7 else [])
        frames = [*processes, f"thread ({os_thread or pid}): {name}", *functions]
        before = self._open.get(thread, [])
        same = 0
        while same < min(len(before), len(frames)) and before[same] == frames[same]:
            same += 1
        for event, names in (("E", before[same:][::-1]), ("B", frames[same:])):
            self.events += [
                {
                    "ph": event,
                    "name": function,
                    "args": {
                        "filename": "/home/me/data.py" if not function.startswith(("process", "thread")) else "",
                        "line": 3,
                    },
                    "pid": pid,
                    "tid": thread,
                    "ts": round(seconds * 1e6),
                }
                for function in names
            ]
        self._open[thread] = frames


def functions(stacks):
    return [None if stack is None else [frame.function for frame in stack] for stack in stacks]


def test_forked_processes_share_thread_ids_and_show_at_each_moment():
    trace = Trace()
    for moment in range(3):
        trace.read(0.1 + moment / 20, 7, ["main", "wait"])
        trace.read(0.1002 + moment / 20, 8, ["fetch", "load" if moment else "open"])
        trace.read(0.1004 + moment / 20, 8, ["feed"], thread=2, name="QueueFeederThread", os_thread=99)
    series = read_trace(trace.events, 3)
    assert series.times == [0.1, 0.15, 0.2]
    assert functions(series.stacks[7]) == [["wait", "main"]] * 3
    assert functions(series.stacks[8]) == [["open", "fetch"], ["load", "fetch"], ["load", "fetch"]]


def test_stacks_that_do_not_change_count_for_as_long_as_they_stand():
    trace = Trace()
    trace.read(0.1, 7, ["main", "sleep"])
    trace.read(1.7, 7, ["main", "compute"])
    trace.read(2.1, 7, ["main"])
    series = read_trace(trace.events, 40)
    counts = [functions(series.stacks[7]).count(stack) for stack in (["sleep", "main"], ["compute", "main"])]
    assert len(series.times) == 41
    assert abs(counts[0] - 32) <= 1
    assert abs(counts[1] - 8) <= 1


def test_fields_have_each_stack_once_and_the_users_source_lines(tmp_path):
    source = tmp_path / "data.py"
    source.write_text("def load():\n    with stage('decode'):\n        decode()\n")
    own = Frame("load", str(source), 3)
    library = Frame("split", "/usr/lib/python3.11/re/__init__.py", 206)
    waiting = Frame("_try_get_data", "/x/site-packages/torch/utils/data/dataloader.py", 1291)
    poll = Frame("poll", "/usr/lib/python3.11/selectors.py", 415)
    series = Series([0.1, 0.15], {7: [(poll, waiting, own), (waiting, own)], 8: [(library, own), None]})
    fields = series_fields(series, 1_000)
    assert fields["times_ns"] == [100_001_000, 150_001_000]
    samples = {process["pid"]: process["samples"] for process in fields["processes"]}
    assert samples[7][0] == samples[7][1], "where the training polls for its batch makes no difference"
    assert samples[8][1] is None
    assert ["load", str(source), 3, "decode()", "decode"] in fields["frames"]
    assert ["split", "/usr/lib/python3.11/re/__init__.py", 206, None, None] in fields["frames"]


def test_stages_are_named_by_with_blocks_and_decorators():
    source = """
@training_harness.stage("read")
def read(path):
    return open(path).read()

def make(path):
    with stage("decode"), lock:
        image = decode(read(path))
    with stage(name):
        pass
"""
    assert [(name, first) for first, _, name in named_stages(source.splitlines(keepends=True))] == [
        ("read", 3),
        ("decode", 7),
    ]
    assert named_stages(["with stage(:\n"]) == []


@pytest.fixture
def this_process():
    return LocalProcess(os.getpid(), 0)


def test_a_missing_py_spy_is_said(this_process, monkeypatch):
    monkeypatch.setattr(stack_series, "py_spy", lambda: None)
    with pytest.raises(StackError, match="py-spy is not installed"):
        record_series(this_process, 1, with_children=False)


def test_a_py_spy_that_may_not_read_is_said(this_process, monkeypatch, tmp_path):
    program = tmp_path / "py-spy"
    program.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('Error: Permission denied (os error 13)')\n")
    program.chmod(0o700)
    monkeypatch.setattr(stack_series, "py_spy", lambda: str(program))
    with pytest.raises(StackError, match="Permission denied"):
        record_series(this_process, 1, with_children=False)
