"""Real training scripts under the shim: what is recorded, and that nothing else changes."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from tests.conftest import TRAIN, WARM_PYTHON, bare_environment, run_bare
from training_harness import layout


@pytest.fixture(scope="module")
def bare_losses() -> str:
    """Output of the script without Tidegauge."""
    return run_bare(TRAIN).stdout


def test_spawned_workers_report_when_the_script_drops_pythonpath(run_attached):
    options = ("--num-workers=1", "--start-method=spawn", "--drop-pythonpath", "--epochs=1")
    run = run_attached(TRAIN, *options, in_new_python=True)
    assert run.done.returncode == 0, run.done.stderr
    assert len(run.table("fetch")) == 16


def test_inline_loading_is_recorded_as_inline(run_attached):
    run = run_attached(TRAIN, "--num-workers=0", "--row-ms=2", "--epochs=1")
    batch, fetch = run.table("batch"), run.table("fetch")
    assert set(batch.worker) == set(fetch.worker) == {-1}
    assert batch.outstanding_count.isna().all(), "there is no queue to look at"
    assert fetch.idle_ns.isna().all()
    # The scheduler counts the wait for a core on its own; on a busy one it may book a part of a sleep there.
    assert fetch.blocked_ns.median() >= 4 * 2e6, "four sleeps of 2 ms each are blocked time"
    assert (batch.wait_ns >= 4 * 2e6).all()


def test_a_loader_inside_a_dataset_is_part_of_the_fetch(run_attached):
    run = run_attached(TRAIN, "--num-workers=2", "--start-method=fork", "--dataset=nested", "--epochs=1")
    assert run.done.returncode == 0, run.done.stderr
    assert len(run.table("batch")) == len(run.table("fetch")) == 16
    assert len(run.events("process-start")) == 1


def test_a_killed_worker_is_named(run_attached):
    options = ("--num-workers=2", "--start-method=fork", "--kill-worker-at=40", "--row-ms=1")
    run = run_attached(TRAIN, *options, in_new_python=True)
    assert run.done.returncode == 1
    assert "killed by signal" in run.done.stderr
    (died,) = map(json.loads, run.events("worker-died").body)
    finished = set(run.events("worker-exit").pid)
    assert died["exit_code"] == -9
    assert died["worker_pid"] in set(run.events("worker-start").pid) - finished
    # torch's SIGCHLD handler may raise once more while the first exception is on its way out, and that may be the
    # connection that the worker's death broke: all that is recorded is what the script itself died of.
    raised = [json.loads(body)["type"] for body in run.events("exception").body]
    assert raised
    assert all(re.search(rf"^{kind}: ", run.done.stderr, re.MULTILINE) for kind in raised), run.done.stderr


def test_killed_worker_is_named_while_its_iterator_is_referenced(run_attached, tmp_path):
    script = tmp_path / "keeps.py"
    script.write_text(
        "import os, signal, time, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "def main():\n"
        "    rows = TensorDataset(torch.ones(64, 2))\n"
        "    batches = iter(DataLoader(rows, num_workers=2, multiprocessing_context='fork'))\n"
        "    next(batches)\n"
        "    os.kill(batches._workers[1].pid, signal.SIGKILL)\n"
        "    try:\n"
        "        time.sleep(60)\n"
        "    except RuntimeError as error:\n"
        "        kept = error  # and with it this frame, until the interpreter is gone\n"
        "        raise\n"
        "main()\n"
    )
    run = run_attached(script)
    assert run.done.returncode == 1
    assert "killed by signal" in run.done.stderr
    (died,) = map(json.loads, run.events("worker-died").body)
    assert (died["worker"], died["exit_code"]) == (1, -9)


def test_an_uncaught_exception_and_the_exit_are_recorded(run_attached):
    run = run_attached(TRAIN, "--crash-at-step=5")
    assert run.done.returncode == 1
    (raised,) = map(json.loads, run.events("exception").body)
    assert raised["message"] == "the loss is not a number"
    assert "RuntimeError" in run.done.stderr
    assert len(run.events("process-exit")) == 1


def test_an_exception_is_recorded_although_a_signal_handler_raises_meanwhile(run_attached, tmp_path):
    """torch's handler of SIGCHLD raises wherever the training is as a worker is killed, once."""
    script = tmp_path / "reset.py"
    script.write_text(
        "import signal, sys, torch\n"
        "def report(number, frame):\n"
        "    signal.signal(signal.SIGCHLD, signal.SIG_DFL)\n"
        "    raise RuntimeError('a worker was killed')\n"
        "class Reset(Exception):\n"
        "    def __str__(self):\n"
        "        if 'traceback' not in sys._getframe(1).f_code.co_filename:\n"
        "            signal.raise_signal(signal.SIGCHLD)\n"
        "        return 'the connection is gone'\n"
        "signal.signal(signal.SIGCHLD, report)\n"
        "raise Reset\n"
    )
    [event] = map(json.loads, run_attached(script).events("exception").body)
    assert (event["type"], event["message"]) == ("Reset", "the connection is gone")


def test_an_exception_in_a_dataset_reaches_the_script_unchanged(run_attached):
    arguments = ("--num-workers=2", "--start-method=fork", "--raise-at=3")
    run = run_attached(TRAIN, *arguments)
    assert run.done.returncode == 1
    assert "ValueError: a bad row" in run.done.stderr


def test_message_of_sys_exit_is_recorded_with_its_line(run_attached, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch.utils.data\ntry:\n    sys.exit(2)\n"
        "except SystemExit as error:\n    assert error.code == 2\n"
        "try:\n    open('/data/images')\nexcept OSError:\n    sys.exit('no images in /data')\n"
    )
    run = run_attached(script)
    assert run.done.returncode == 1
    assert "no images in /data" in run.done.stderr
    caught, event = map(json.loads, run.events("exit-message").body)
    assert (caught["status"], caught["site"], caught["handled"]) == (2, f"{script}:3, in <module>", None)
    assert (event["message"], event["site"]) == ("no images in /data", f"{script}:9, in <module>")
    assert event["handled"].startswith("FileNotFoundError: [Errno 2]")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_exception_of_a_training_in_a_child_process_is_recorded_with_its_line(run_attached, tmp_path, method):
    """multiprocessing prints it without calling sys.excepthook; a script may go on without the child."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, torch\nfrom torch.utils.data import DataLoader\n"
        "class Lock:\n    def __del__(self):\n        print('released', flush=True)\n"
        "class Error(Exception):\n    def __bool__(self):\n        return False\n"
        "def train(number):\n    lock = Lock()\n    for batch in DataLoader(torch.ones(8, 1)):\n        pass\n"
        "    if not number:\n        raise Error('no rows')\n"
        "if __name__ == '__main__':\n    context = multiprocessing.get_context('" + method + "')\n"
        "    for number in (0, 1):\n        child = context.Process(target=train, args=(number,))\n"
        "        child.start()\n        child.join()\n"
    )
    run = run_attached(script)
    assert run.done.returncode == 0
    assert "Error: no rows" in run.done.stderr
    assert run.done.stdout.split() == ["released", "released"]
    [event] = map(json.loads, run.events("exception").body)
    assert (event["type"], event["site"]) == ("Error", f"{script}:14, in train")
    assert len(run.events("process-exit")) == 2


def test_child_that_inherits_an_exception_or_raises_one_without_words_ends_as_without_tidegauge(
    run_attached, tmp_path
):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, torch\nfrom torch.utils.data import DataLoader\n"
        "class Wordless(Exception):\n    def __str__(self):\n        return self.missing\n"
        "def train(error):\n    for batch in DataLoader(torch.ones(8, 1)):\n        pass\n"
        "    if error:\n        raise error\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    for error in (None, Wordless()):\n"
        "        child = multiprocessing.get_context('fork').Process(target=train, args=(error,))\n"
        "        child.start()\n        child.join()\n        print(child.exitcode)\n"
    )
    run = run_attached(script)
    assert run.done.stdout.split() == ["0", "1"]
    assert "training_harness" not in run.done.stderr
    [event] = map(json.loads, run.events("exception").body)
    assert f"Wordless: {event['message']}" in run.done.stderr, "the words are those of Python"
    assert len(run.events("process-exit")) == 2


def test_group_of_exceptions_is_recorded_with_its_first_cause(run_attached, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.utils.data\nerrors = []\nfor text in ('shard 3', 'shard 4'):\n    try:\n"
        "        raise OSError(28, text)\n    except OSError as error:\n        errors.append(error)\n"
        "raise ExceptionGroup('reading', errors)\n"
    )
    [event] = map(json.loads, run_attached(script).events("exception").body)
    assert event["message"] == "reading (2 sub-exceptions), first OSError: [Errno 28] shard 3"
    assert event["site"] == f"{script}:5, in <module>"


def test_disabled_hooks_leave_no_trace(run_attached):
    run = run_attached(TRAIN, environ={"TIDEGAUGE_DISABLED": "1"}, in_new_python=True)
    assert run.done.returncode == 0
    assert list(run.run.journal_dir.iterdir()) == []
    assert list(run.run.events_dir.iterdir()) == []


def test_the_users_own_sitecustomize_runs(run_attached, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.mine = 'was here'\n")
    script = tmp_path / "script.py"
    script.write_text("import sys, sitecustomize; print(mine, sitecustomize.__file__)\n")
    path = f"{layout.Path(layout.__file__).parent / 'bootstrap'}:{tmp_path}"
    run = run_attached(script, environ={"PYTHONPATH": path}, in_new_python=True)
    assert run.done.stdout.split() == ["was", "here", str(tmp_path / "sitecustomize.py")]


@pytest.mark.parametrize("stream", ["batch", "step", "optimizer"])
def test_failing_hook_reports_once_and_training_goes_on(run_attached, bare_losses, tmp_path, stream):
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy, torch.utils.data\n"
        "from training_harness import session\n"
        f"session.active.{stream} = None\n"
        f"runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
    )
    run = run_attached(script)
    assert run.done.returncode == 0, run.done.stderr
    assert run.done.stdout == bare_losses
    (disabled,) = map(json.loads, run.events("hook-disabled").body)
    assert disabled["hook"] == stream
    lengths = {name: len(run.table(name)) for name in {"batch", "step", stream}}
    assert lengths == {"batch": 32, "step": 32, stream: 0}


def test_memory_of_the_optimizer_is_read(run_attached):
    kept = run_attached(TRAIN).table("optimizer")
    assert set(kept["device"]) == {-1}
    assert (kept["gradients_bytes"] > 0).all()


def test_missing_private_names_cost_only_their_columns(run_attached, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch._utils, torch\n"
        "import torch.utils.data.dataloader as d\n"
        "parallel = d._MultiProcessingDataLoaderIter\n"
        "from training_harness import detach, attach\n"
        "detach()\n"
        "import os; os.environ['TIDEGAUGE_RUN_DIR'] = os.environ['KEPT']\n"
        "original = parallel._get_data\n"
        "parallel._renamed = original\n"
        "del parallel._get_data\n"
        "parallel._next_data_ = None\n"
        "attach()\n"
        "parallel._get_data = original\n"
        f"import sys, runpy; sys.argv[1:] = ['--num-workers=2', '--start-method=fork', '--epochs=1']\n"
        f"runpy.run_path({str(TRAIN)!r}, run_name='__main__')\n"
    )
    directory = layout.create_run(tmp_path, name="kept", argv=[])
    run = run_attached(script, run_dir=directory, environ={"KEPT": str(directory)})
    assert run.done.returncode == 0, run.done.stderr
    assert len(run.table("batch")) == 16
    (start,) = map(json.loads, run.events("process-start").body)
    assert start["capabilities"]["_get_data"] is False


def test_hooks_allow_start_methods_threads_and_sparse_batches(run_attached, tmp_path):
    """Choose the start method after a first loader, iterate in short-lived threads, yield sparse batches."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, os, threading, time, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "rows = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)\n"
        "list(rows)\n"
        "time.sleep(0.01)\n"
        "list(rows)\n"  # by now the journals are open
        "before = len(os.listdir('/proc/self/fd'))\n"
        "for _ in range(20):\n"
        "    thread = threading.Thread(target=list, args=(rows,)); thread.start(); thread.join()\n"
        "print(len(os.listdir('/proc/self/fd')) - before)\n"
        "list(DataLoader([torch.eye(2).to_sparse()] * 4, batch_size=None))\n"
        "list(rows)\n"
        "multiprocessing.set_start_method('spawn')\n"
    )
    run = run_attached(script)
    assert run.done.returncode == 0, run.done.stderr
    assert run.done.stdout.split() == ["0"]
    batch = run.table("batch")
    assert len(batch) == 2 + 2 + 20 * 2 + 4 + 2
    assert (batch.groupby("loader").payload_bytes.count() == 0).sum() == 1, "a sparse tensor has no size in bytes"


def test_hooks_do_not_change_a_compiled_optimizer_step(run_attached, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "from torch._dynamo.utils import counters\n"
        "parameter = torch.nn.Parameter(torch.ones(2))\n"
        "optimizer = torch.optim.SGD([parameter], lr=0.1)\n"
        "step = torch.compile(lambda: optimizer.step(), backend='eager')\n"
        "for _ in range(12):\n"
        "    parameter.grad = torch.ones(2)\n"
        "    step()\n"
        "torch.compile(lambda: parameter.sum().backward(), backend='eager')()\n"
        "print(parameter.tolist(), dict(counters['graph_break']), counters['frames']['total'])\n"
    )
    run = run_attached(script, in_new_python=True)
    done = run_bare(script)
    assert run.done.returncode == 0, run.done.stderr
    attached_result, attached_frames = run.done.stdout.rsplit(maxsplit=1)
    bare_result, bare_frames = done.stdout.rsplit(maxsplit=1)
    assert attached_result == bare_result
    assert len(run.done.stderr.splitlines()) == len(done.stderr.splitlines()), run.done.stderr
    assert int(attached_frames) <= int(bare_frames) + 3, "two hooks and the first report, each traced once"


def test_compilations_are_recorded_with_the_condition_that_failed(run_attached, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, threading, torch\n"
        "model = torch.nn.Linear(4, 1)\n"
        "@torch.compile(backend='eager', dynamic=False)\n"
        "def loss(x, scale): return model(x).sum() * scale\n"
        "@torch.compile(backend='eager')\n"
        "def double(x): return x * 2\n"
        "double(torch.ones(1))\n"  # before it attaches
        "from training_harness import attach, detach\n"
        "detach()\n"
        "os.environ['TIDEGAUGE_RUN_DIR'] = os.environ['KEPT']\n"
        "attach()\n"
        "for size in range(1, 13): loss(torch.ones(size, 4), 2.0).backward()\n"
        "torch.compile(model, backend='eager')(torch.ones(2, 4))\n"
        "thread = threading.Thread(target=double, args=[torch.ones(2)]); thread.start(); thread.join()\n"
    )
    directory = layout.create_run(tmp_path, name="kept", argv=[])
    run = run_attached(script, run_dir=directory, environ={"KEPT": str(directory)})
    assert run.done.returncode == 0, run.done.stderr
    _, first, *again, gave_up, other = (json.loads(body) for body in run.events("compilation").body)
    assert (first["function"], first["reason"]) == (f"{script}:3, in loss", None)
    assert [event["again_count"] for event in again] == list(range(1, 8))
    assert again[-1]["reason"] == "tensor 'x' size mismatch at index 0. expected 7, actual 8"
    assert np.diff([event["again_ns"] for event in again]).min() > 0
    assert (gave_up["gave_up"], gave_up["again_count"]) == (True, 7), "torch's limit is 8 versions of a function"
    assert other["function"] == f"{script}:13, in <module>", "the call, where torch's own code is compiled"


def test_training_child_of_multiprocessing_records_its_exit(run_attached, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, torch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "def train(): list(DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4))\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('fork').Process(target=train)\n"
        "    child.start(); child.join(); print(child.pid)\n"
    )
    run = run_attached(script)
    child = int(run.done.stdout)
    assert run.events("process-start").pid.tolist() == [child]
    assert run.events("process-exit").pid.tolist() == [child]


def test_secrets_on_the_command_line_are_not_recorded(run_attached, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import torch\nfrom torch.utils.data import DataLoader\nlist(DataLoader(torch.ones(2, 2)))\n")
    run = run_attached(script, "--lr=0.1", "--api-key=hunter2", "--wandb-token", "hunter2", "--epochs", "3")
    kept = run.events("process-start").body[0] + (run.run.path / layout.MANIFEST).read_text()
    assert "hunter2" not in kept
    assert "--lr=0.1" in kept


def test_a_journal_that_cannot_be_written_does_not_stop_training(run_attached, home):
    directory = layout.create_run(home, name="gone", argv=[])
    for part in ("journal", "events"):
        (directory / part).rmdir()
    run = run_attached(TRAIN, "--num-workers=2", "--start-method=fork", run_dir=directory)
    assert run.done.returncode == 0
    assert run.done.stderr == ""
    assert run.done.stdout == run_bare(TRAIN, "--num-workers=2", "--start-method=fork").stdout


def test_attach_and_detach_work_from_code(home, tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "import training_harness\n"
        "def epoch():\n"
        "    for _ in DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2): pass\n"
        "method = torch.utils.data.dataloader._BaseDataLoaderIter.__next__\n"
        "print(first := training_harness.attach(name='book'))\n"
        "assert training_harness.attach('elsewhere') == first, 'it stays in its run'\n"
        "epoch()\n"
        "training_harness.detach()\n"
        "assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is method\n"
        "epoch()\n"
    )
    done = WARM_PYTHON.run(script, env=bare_environment() | {"TIDEGAUGE_HOME": str(home)}, timeout=60)
    assert done.returncode == 0, done.stderr
    from collector.store.catalogue import find_run
    from collector.store.lake.reader import read

    run = find_run(home, "latest")
    assert done.stdout.strip() == str(run.path)
    with read(run) as snapshot:
        assert snapshot.query("SELECT count(*) AS n FROM batch").n[0] == 4
        assert snapshot.query("SELECT count(*) AS n FROM event WHERE kind = 'process-exit'").n[0] == 1


def test_second_run_in_a_process_counts_waits_for_persistent_workers_of_the_first(home, tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "import training_harness\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loader = DataLoader(torch.ones(16, 2), batch_size=2, num_workers=1, persistent_workers=True)\n"
        "for _ in range(2):\n"
        "    training_harness.attach()\n"
        "    for batch in loader:\n"
        "        model(batch).sum().backward()\n"
        "        optimizer.step()\n"
        "    training_harness.detach()\n"
    )
    environment = bare_environment() | {"TIDEGAUGE_HOME": str(home)}
    assert WARM_PYTHON.run(script, env=environment, timeout=60).returncode == 0
    from collector.store.catalogue import list_runs
    from collector.store.lake.reader import read

    runs = list_runs(home)
    assert len(runs) == 2
    for run in runs:
        with read(run) as snapshot:
            step = snapshot.query("SELECT data_wait_ns, passes_count FROM step")
        assert len(step) == 8
        assert step.data_wait_ns.notna().all()
        assert step.passes_count.isna().all(), "the DataLoader is watched instead of the model's calls"


def test_a_long_message_keeps_its_end_where_a_quoted_traceback_has_the_error(run_attached, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.utils.data\nframes = ''.join(f'  File a.py, line {n}\\n' for n in range(300))\n"
        "raise RuntimeError(f'Process 1 raised:\\n{frames}KeyError: 7')\n"
    )
    [event] = map(json.loads, run_attached(script).events("exception").body)
    assert event["message"].startswith("Process 1 raised:\n")
    assert event["message"].endswith("\nKeyError: 7")
    assert len(event["message"]) < 2100


def test_exception_that_ends_a_thread_is_recorded_and_printed(run_attached, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import threading, torch, torch.utils.data\n"
        "def save():\n    raise OSError('no space left')\n"
        "thread = threading.Thread(target=save, name='saver')\n"
        "thread.start(); thread.join()\n"
        "print(sum(1 for _ in torch.utils.data.DataLoader(torch.ones(8))))\n"
    )
    run = run_attached(script)
    assert (run.done.returncode, run.done.stdout) == (0, "8\n")
    assert "Exception in thread saver" in run.done.stderr
    (raised,) = map(json.loads, run.events("thread-exception").body)
    assert (raised["thread"], raised["type"], raised["message"]) == ("saver", "OSError", "no space left")
    assert raised["site"].endswith("train.py:3, in save")
    assert run.events("exception").empty
