"""The checks of `tidegauge doctor`: what works on this machine, what does not, and the remedy.

Each check is one function, which takes the things that it checks as arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table
from rich.text import Text

from collector import store
from collector.agent.launch import child_environment
from collector.agent.samplers.devices import DeviceSampler, find_devices
from collector.agent.samplers.host import HostSampler
from collector.agent.samplers.procfs import read_rollup
from collector.agent.samplers.samples import Sample
from collector.agent.samplers.stack_dumps import StackError, read_stacks
from collector.errors import TidegaugeError, last_line
from collector.findings import Locus
from collector.report.terminal import grid
from collector.units import counted, percent, size
from training_harness.layout import STORE_VARIABLE, create_run
from training_harness.ptracer import COLLECTOR_VARIABLE, RESTRICTED, process_name, ptrace_scope

_TRAINING_TIMEOUT_SECONDS = 120
_SMALL_SHM_BYTES = 2**30
#: Time beyond the longest pause between two commits after which the lake must have refused records.
_INGEST_GRACE_NS = 60_000_000_000
#: An ordinary training without any code of Tidegauge, run under the shim.
_TRAINING = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(8, 1), batch_size=4, num_workers=1):
    model(batch).sum().backward()
    optimizer.step()
"""


#: Hook of the harness -> what is measured there, as a name and in words.
_MEASUREMENTS = {
    "batch": ("batches", "each batch, and how long the training waited for it"),
    "_next_index": ("batch sizes", "samples in a batch"),
    "_get_data": ("waits for workers", "which worker made a batch; how much of the wait was for the queue"),
    "_reset": ("worker processes", "which processes are the workers of a loader, and whether all of them report"),
    "_shutdown_workers": ("ends of workers", "exit status of a worker that ends while its loader shuts down"),
    "worker": ("work of workers", "fetch, collate, idle, CPU, run queue, I/O of each worker"),
    "epochs:torchdata": (
        "epochs of torchdata",
        "how long StatefulDataLoader takes to make the iterator of an epoch",
    ),
    "loader site": ("names of loaders", "variable and line of each DataLoader"),
    "loader setting": ("settings of loaders", "changes of num_workers and prefetch_factor by `--workers auto`"),
    "step": (
        "optimizer steps",
        "each step, memory of devices at its end; without it batches or forward passes count as steps",
    ),
    "step:fastai": ("fastai steps", "optimizer steps of fastai"),
    "forward": ("forward passes", "they count as steps where there is no DataLoader and no optimizer"),
    "forward:compiled": ("compiled models", "forward passes of models that torch.compile compiled"),
    "backward": ("backward passes", "time of forward and backward, each"),
    "loaded_state": ("loaded checkpoints", "tensors of a loaded state that stay on the device"),
    "checkpoint": ("checkpoints", "when torch.save writes one"),
    "exit": ("messages of sys.exit", "why a script ended itself, and where"),
    "cuda_graph": ("CUDA graphs", "optimizer steps and forward passes in replays of a graph"),
    "cuda_oom": ("CUDA out of memory", "snapshot of the allocator when CUDA memory runs out"),
    "thread": ("threads", "exceptions that end a thread of the training"),
    "compiler": ("torch.compile", "it leaves the hooks alone"),
    "compilation": ("compilations", "what torch.compile compiles again, and why"),
    "stage:torch": ("copies", "copies to devices, conversions to tensors"),
    "stage:torch.nn.parallel.data_parallel": ("DataParallel", "its scatter, replicate and gather"),
}


def measurement(hook: str) -> tuple[str, str]:
    """Return what is measured at a hook: its name, and in words."""
    library = hook.removeprefix("stage:")
    if library != hook and hook not in _MEASUREMENTS:
        return f"stages: {library}", f"time of calls of {library} that read, decode or change samples"
    return _MEASUREMENTS.get(hook, (hook, "a further hook"))


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; it has a remedy if something is wrong."""

    name: str
    detail: str
    remedy: str | None = None


def check_all(home: Path, python: str) -> list[Check]:
    """Run every check on this machine and this home, for trainings that run with `python`."""
    host = HostSampler(os.getpid()).sample()
    return [
        check_python(python),
        *check_hooks(python),
        check_memory_limit(host),
        check_shm(host),
        check_pressure(host),
        check_smaps("/proc", os.getpid()),
        check_stacks(),
        check_devices(find_devices(), Path("/proc")),
        check_lake(),
        check_store(),
        check_home(home),
        check_latest_run(home),
        check_streamlit(),
    ]


def checks_table(checks: Iterable[Check]) -> Table:
    """Draw one row per check; its status is a word, not the colour alone."""
    table = grid(Column(no_wrap=True), Column(style="bold", max_width=24, overflow="fold"), Column())
    for check in checks:
        if check.remedy is None:
            table.add_row(Text("✔ ok", style="green"), check.name, check.detail)
        else:
            table.add_row(Text("▲ warning", style="yellow"), check.name, f"{check.detail}: {check.remedy}")
    return table


def check_python(python: str) -> Check:
    """Name the Python of Tidegauge, and that of the training if it is another."""
    detail = f"{sys.version.split()[0]}, {sys.executable}"
    return Check("python", detail if python == sys.executable else f"{detail}; the training's: {python}")


def check_hooks(python: str) -> Iterator[Check]:
    """Run a tiny training under the shim and check what it reported."""
    with tempfile.TemporaryDirectory(prefix="tidegauge-doctor-") as scratch:
        home = Path(scratch)
        run_dir = create_run(home, name="doctor", argv=[python])
        command = [python, "-P", "-W", "ignore", "-c", _TRAINING]
        environment = child_environment(os.environ, run_dir, home)
        try:
            result = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TRAINING_TIMEOUT_SECONDS,
                check=False,
            )
        except OSError as error:
            yield Check("torch", f"{python} cannot be run ({error.strerror})", "give another --python")
            return
        except subprocess.TimeoutExpired:
            yield Check("torch", "a training of two steps did not end", "check that torch works without Tidegauge")
            return
        events = list(_events(run_dir / "events"))
    yield from judge_hooks(result.returncode, result.stderr, events)


def judge_hooks(exit_status: int, stderr: str, events: list[dict[str, Any]]) -> Iterator[Check]:
    """Judge torch and the hooks by the events of that training."""
    if exit_status != 0:
        silent = f"exit status {exit_status} without a message, as of a program that is no Python"
        remedy = "install torch there, or give --python the Python of your training"
        yield Check("torch", f"a training of two steps failed, {last_line(stderr) or silent}", remedy)
        return
    start = next((event for event in events if event["kind"] == "process-start"), None)
    if start is None:
        remedy = "check that TIDEGAUGE_DISABLED is not set and that python is not started with -I, -E or -S"
        yield Check("hooks", "a training of two steps reported nothing", remedy)
        return
    yield Check("torch", str(start["torch"]))
    if accelerator := start.get("accelerator"):
        names = "torch.xpu" if accelerator.startswith("XPU") else "torch.cuda"
        yield Check("allocator", f"memory of GPUs is read from {names} at each step ({accelerator})")
    else:
        yield Check("allocator", "this torch is built for the CPU alone: no memory of a GPU to read")
    errors = {event["hook"]: event["error"] for event in events if event["kind"] == "hook-disabled"}
    capabilities = start["capabilities"] | dict.fromkeys(errors, False)
    for hook in sorted(capabilities, key=[*_MEASUREMENTS, *capabilities].index):
        name, words = measurement(hook)
        if capabilities[hook]:
            yield Check(name, words)
        else:
            reason = errors.get(hook, f"this torch has no {hook}")
            yield Check(name, f"not measured: {words} ({reason})", "upgrade Tidegauge, or torch")
    if not any(event["kind"] == "worker-start" for event in events):
        yield Check("workers", "the worker did not report", "upgrade Tidegauge, or torch")


def check_memory_limit(host: Sample) -> Check:
    """Check the limit that a training would meet first."""
    limit, total = host.get("cgroup_limit_bytes"), host.get("memory_total_bytes")
    if total is None:
        return Check("memory", "unknown", "mount /proc; forecasts of memory need MemTotal")
    if limit is None:
        return Check("memory", f"{size(total)}, no control group limits it")
    used = size(host.get("cgroup_usage_bytes"))
    return Check("memory", f"a control group allows {size(limit)}, {used} in use")


def check_shm(host: Sample) -> Check:
    """Check /dev/shm, through which workers hand over their batches."""
    total = host.get("shm_total_bytes")
    if total is None:
        return Check("/dev/shm", "not there", "mount it; DataLoader workers hand their batches over through it")
    detail = f"{size(total)}, {size(host['shm_used_bytes'])} in use"
    if total < _SMALL_SHM_BYTES:
        return Check("/dev/shm", detail, "small for workers; in Docker give --shm-size=8g")
    return Check("/dev/shm", detail)


def check_pressure(host: Sample) -> Check:
    """Check the kernel's pressure stall information."""
    if host.get("memory_some_avg10_ratio") is None:
        remedy = "boot with psi=1; without it memory pressure is not shown"
        return Check("pressure", "/proc/pressure is not there", remedy)
    cpu = percent(host.get("cpu_some_avg10_ratio"))
    return Check("pressure", f"/proc/pressure can be read, cpu {cpu} in the last 10 s")


def check_smaps(proc: str, pid: int) -> Check:
    """Check that private and proportional memory of a process can be read."""
    rollup = read_rollup(proc, pid)
    if rollup is None or rollup.pss_bytes is None:
        remedy = "it needs Linux 4.14 and ptrace rights; leaks are judged by RSS instead, which misses some"
        return Check("smaps_rollup", "cannot be read", remedy)
    return Check("smaps_rollup", f"can be read, this process has {size(rollup.pss_bytes)} PSS")


def check_devices(sampler: DeviceSampler, proc: Path) -> Check:
    """Check the GPUs that the driver's library shows, and whether it names the processes that use them.

    A machine without a GPU passes.
    """
    if sampler.reason:
        return Check("GPUs", sampler.reason)
    totals = [sample["total_bytes"] for sample in sampler.sample(set())]
    sizes = ", ".join("size unknown" if total is None else size(total) for total in totals)
    gpus = f"{counted(len(totals), 'GPU')} ({sizes}) by {sampler.library}"
    pids = sampler.user_pids()
    if not pids:
        return Check("GPUs", f"{gpus}; no process uses them now, or the driver hides it, as in a container")
    if any((proc / str(pid)).exists() for pid in pids):
        return Check("GPUs", f"{gpus}; it names the processes that use them")
    return Check(
        "GPUs",
        f"{gpus}; it names only processes outside this container",
        "start the container with --pid=host; until then memory of the run and of other jobs is one sum",
    )


#: A process that lets the collector of its run read it, and waits.
_READABLE = """
from training_harness.ptracer import allow_collector
allow_collector()
print(flush=True)
input()
"""


def check_stacks() -> Check:
    """Check that the stacks of a run's Python process can be read: the line of a hang comes from them."""
    command = [sys.executable, "-P", "-c", _READABLE]
    environment = {**os.environ, COLLECTOR_VARIABLE: process_name(os.getpid())}
    child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            read_stacks(child.pid, Locus(pid=child.pid))
        except StackError as error:
            remedy = "until then a hang is not explained, and `tidegauge stacks` shows nothing"
            return Check("stacks", str(error), remedy)
        finally:
            child.kill()
    if ptrace_scope() == RESTRICTED and os.geteuid() != 0:
        return Check(
            "stacks",
            "the collector can read those of its run; `tidegauge stacks` and `watch` need root, or "
            "`sysctl kernel.yama.ptrace_scope=0` (it is 1)",
        )
    return Check("stacks", "those of other processes can be read")


def check_lake() -> Check:
    """Check that DuckDB's extensions load from the installed packages."""
    try:
        with store.open_connection(threads=1):
            return Check("lake", "DuckDB's extensions load")
    except TidegaugeError as error:
        remedy = "pip install 'tidegauge[collector]'; until then the journals keep everything"
        return Check("lake", str(error), remedy)


def check_store() -> Check:
    """Check that the shared store, if one is named, can be read."""
    if not os.environ.get(STORE_VARIABLE):
        return Check("store", "each run has its own; no shared store is set")
    try:
        runs_count = store.check_shared_store()
        return Check("store", f"the shared store and its files can be read, {runs_count} runs are in it")
    except TidegaugeError as error:
        return Check("store", str(error), f"see docs/cluster.md; unset {STORE_VARIABLE} to do without it")


def check_home(home: Path) -> Check:
    """Check that runs can be stored; a missing home will be created under its nearest existing parent."""
    folder = next(path for path in (home.absolute(), *home.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    except OSError as error:
        remedy = "give --home or TIDEGAUGE_HOME a directory that can be written"
        return Check("home", f"{home} cannot be written ({error.strerror})", remedy)
    return Check("home", f"{home} can be written, {size(free_bytes)} free")


def check_latest_run(home: Path) -> Check:
    """Check that the newest run can be read, and that its records get into its lake."""
    from collector.agent.ingest_feed import LONGEST_PAUSE_NS

    name = "latest run"
    try:
        runs = store.own_first(store.list_runs(home))
        if not runs:
            return Check(name, "none yet")
        with store.read(runs[0]) as snapshot:
            lags = snapshot.query("SELECT ingest_lag_ns FROM agent ORDER BY time_ns DESC LIMIT 1")["ingest_lag_ns"]
            bodies = snapshot.query("SELECT body FROM event WHERE kind = 'collector-problem' ORDER BY time_ns DESC")
            problems = snapshot.problems
    except TidegaugeError as error:
        return Check(name, str(error), "fix it, or look at another run")
    lag_ns = max((lag for lag in lags if lag == lag), default=0)
    is_slow = lag_ns >= LONGEST_PAUSE_NS + _INGEST_GRACE_NS
    recorded = [json.loads(body) for body in bodies["body"]]
    upkeep_error = next((problem["error"] for problem in recorded if problem["part"] == "upkeep"), None)
    if not problems and not is_slow:
        if upkeep_error:
            remedy = (
                "it is tried again every five minutes and by `tidegauge collect`; a damaged file stays as it is"
            )
            return Check(name, f"{runs[0].run_id}: {upkeep_error}", remedy)
        return Check(name, f"{runs[0].run_id} can be read")
    reason = problems[0] if problems else recorded[0]["error"] if recorded else "its collector is slow"
    waiting = f"records have waited outside its lake for {lag_ns / 1e9:.0f} s, " if is_slow else ""
    remedy = "fix it; until then the records stay in the journals, and they are stored afterwards"
    return Check(name, f"{runs[0].run_id}: {waiting}{reason}", remedy)


def check_streamlit() -> Check:
    """Check that the dashboard's library is installed."""
    if importlib.util.find_spec("streamlit") is None:
        return Check("streamlit", "not installed", "pip install 'tidegauge[app]' for the dashboard")
    from importlib.metadata import version

    return Check("streamlit", version("streamlit"))


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            yield json.loads(line)
