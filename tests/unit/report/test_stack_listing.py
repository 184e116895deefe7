"""Stacks in words: what a thread waits for, which frames are the user's, and which stack comes first."""

from __future__ import annotations

import io

import pytest

from collector.findings import Locus
from collector.report.stack_listing import as_json, heading, stack_lines
from collector.report.terminal import Terminal
from collector.stacks import Frame, folded, group, stacks_of, wait_words

LIBRARY = "/opt/conda/lib/python3.12"
TORCH = f"{LIBRARY}/site-packages/torch/utils/data"


def frame(name: str, path: str, line: int = 1) -> dict:
    return {"name": name, "filename": path, "line": line}


def worker_dump(*inner: dict) -> list[dict]:
    outer = [
        frame("_worker_loop", f"{TORCH}/_utils/worker.py"),
        frame("BaseProcess._bootstrap", f"{LIBRARY}/multiprocessing/process.py"),
        frame("<module>", "/home/me/train.py", 99),
    ]
    return [{"thread_id": 1, "os_thread_id": 7, "thread_name": "MainThread", "frames": [*inner, *outer]}]


IDLE = (frame("Queue.get", f"{LIBRARY}/multiprocessing/queues.py", 113),)


def read_dataset(path: str, line: int) -> tuple[dict, ...]:
    return (
        frame("Files.__getitem__", path, line),
        frame("_MapDatasetFetcher.fetch", f"{TORCH}/_utils/fetch.py"),
    )


def test_native_frames_are_shown_by_library_and_are_not_the_users_own():
    library = "/opt/lib/python3.12/site-packages/torch/lib/libgomp.so.1"
    native = {**frame("GOMP_parallel", library), "module": library}
    accept = {**frame("sock_accept", "/build/Python/Modules/socketmodule.c", 2759), "module": "/usr/bin/python3"}
    dump = [{"thread_id": 1, "os_thread_id": 7, "thread_name": "MainThread"}]
    dump[0]["frames"] = [native, frame("train", "/home/me/train.py", 3), accept]
    groups = group(stacks_of(dump, Locus(pid=1), {}))
    assert [one.is_own for one in groups[0].frames] == [False, True, False]
    text = "\n".join(line.plain for line in stack_lines(groups))
    assert "GOMP_parallel  libgomp.so.1" in text


def test_threads_of_one_name_are_counted():
    feeder = {"thread_name": "QueueFeederThread", "frames": [*IDLE]}
    dump = [{"thread_id": number, "os_thread_id": number, **feeder} for number in (1, 2)]
    (alike,) = group(stacks_of(dump, Locus(pid=1), {}))
    assert heading(alike).startswith("2 × pid 1, thread QueueFeederThread")


@pytest.mark.parametrize(
    ("state", "channel", "words"),
    [
        ("S", "futex_wait_queue", "blocked on a lock (futex)"),
        ("S", "do_wait", "waiting for a child process"),
        ("S", "anon_pipe_read", "waiting for a pipe"),
        ("S", "wait_for_partner", "waiting for a pipe (a FIFO whose other end is not open)"),
        ("T", "do_signal_stop", "suspended (SIGSTOP or a debugger)"),
        ("D", "folio_wait_bit_common", "waiting for a disk (folio_wait_bit_common)"),
        ("D", "rpc_wait_bit_killable", "waiting for NFS"),
        ("R", None, "computing"),
        ("S", "some_new_function", "waiting in some_new_function"),
        ("S", None, None),
    ],
)
def test_a_wait_is_shown_in_words_and_one_that_the_kernel_hides_is_not_known(state, channel, words):
    assert wait_words(state, channel) == words


def test_frames_of_the_parent_before_the_fork_do_not_count_as_the_workers_own():
    (stack,) = stacks_of(worker_dump(*IDLE), Locus(role="worker", worker=1), {})
    assert stack.activity == "waits for an index"
    assert not any(frame.is_own for frame in stack.frames)


def test_the_one_worker_that_stands_elsewhere_comes_first_and_equal_ones_are_shown_once(tmp_path):
    source = tmp_path / "dataset.py"
    source.write_text("".join(f"line {number}\n" for number in range(1, 21)))
    stacks = [
        stack
        for worker in range(8)
        for stack in stacks_of(
            worker_dump(*(read_dataset(str(source), 12) if worker == 5 else IDLE)),
            Locus(role="worker", loader=0, worker=worker, pid=100 + worker),
            {7: "blocked on a lock (futex)" if worker == 5 else "waiting for a pipe or socket"},
        )
    ]
    groups = group(stacks)
    assert [len(alike.stacks) for alike in groups] == [1, 7]
    stream = io.StringIO()
    terminal = Terminal(file=stream, width=200, highlight=False)
    for line in stack_lines(groups):
        terminal.print(line)
    text = stream.getvalue()
    assert text.startswith("worker 5 of loader 0, pid 105 · makes a batch · blocked on a lock (futex)\n")
    assert ">   12  line 12" in text
    assert "line 10" in text
    assert "line 14" in text
    assert "line 9\n" not in text
    assert "3 library frames" in text
    assert "3 more" in text
    told = as_json(groups)
    assert told[0]["threads"][0]["worker"] == 5
    assert told[0]["frames"][0] == {
        "function": "Files.__getitem__",
        "path": str(source),
        "line": 12,
        "is_own": True,
    }


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/home/me/project/train.py", True),
        ("/home/me/lib/python/train.py", True),
        ("/home/me/.venv/lib/python3.13/site-packages/timm/data.py", False),
        ("/usr/lib/python3/dist-packages/cv2/__init__.py", False),
        ("/usr/lib64/python3.11/threading.py", False),
        ("<frozen runpy>", False),
    ],
)
def test_a_file_of_an_environment_is_a_librarys_wherever_the_environment_lies(path, is_own):
    assert Frame("f", path, 1).is_own is is_own


def test_library_frames_are_folded_except_the_one_that_is_executed():
    lock = Frame("acquire", f"{LIBRARY}/threading.py", 5)
    own = Frame("f", "/home/me/a.py", 1)
    torch = Frame("fetch", f"{TORCH}/_utils/fetch.py", 1)
    assert folded([lock, torch, own, torch, torch]) == [lock, 1, own, 2]
