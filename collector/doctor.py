"""`tidegauge doctor`: what works on this machine, what does not, and what to do about it.

Each check is a function of its own that takes what it looks at as arguments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from collector.agent.devices import DeviceSampler
from collector.agent.host import HostSampler
from collector.agent.launch import child_environment
from collector.agent.procfs import read_rollup
from collector.agent.samples import Sample
from collector.errors import TidegaugeError
from collector.quantities import percent, quantity
from training_harness.layout import STORE_VARIABLE, create_run

_TRAINING_TIMEOUT_SECONDS = 120
_SMALL_SHM_BYTES = 2**30
#: The collector moves records at least every 20 s: older ones outside the lake have been refused.
_SLOW_INGEST_NS = 60_000_000_000
#: An ordinary training that knows nothing of Tidegauge, run under the shim.
_TRAINING = """
import torch
from torch.utils.data import DataLoader
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in DataLoader(torch.ones(8, 1), batch_size=4, num_workers=1):
    model(batch).sum().backward()
    optimizer.step()
"""


#: What the harness hooks in torch, by the names of its capabilities -> what is known thanks to it.
_HOOK_POINTS = {
    "batch": "each batch, and how long the training waited for it",
    "_next_index": "samples in a batch",
    "_get_data": "which worker made a batch; how much of the wait was for the queue",
    "_reset": "which processes are the workers of a loader, and whether all of them report",
    "_shutdown_workers": "exit status of a worker that ends while its loader shuts down",
    "worker": "what workers do: fetch, collate, idle, CPU, run queue, I/O",
    "step": "optimizer steps, memory of devices at each step; without it batches or forward passes count as steps",
    "backward": "forward and backward apart",
    "cuda_oom": "snapshot of the allocator when CUDA memory runs out",
    "compiler": "torch.compile leaves the hooks alone",
    "stage:torch": "copies to devices, conversions to tensors",
    "stage:torch.nn.parallel.data_parallel": "scatter, replicate and gather of DataParallel",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One answer; without a remedy all is well."""

    name: str
    detail: str
    remedy: str | None = None


def check_all(home: Path, python: str = sys.executable) -> list[Check]:
    """Every check, on this machine and this home, for trainings that are run with `python`."""
    host = HostSampler(os.getpid()).sample()
    checks: list[Callable[[], Iterable[Check]]] = [
        lambda: [Check(name="python", detail=f"{sys.version.split()[0]}, {sys.executable}")],
        lambda: check_hooks(python),
        lambda: [check_memory_limit(host)],
        lambda: [check_shm(host)],
        lambda: [check_pressure(host)],
        lambda: [check_smaps("/proc", os.getpid())],
        lambda: [check_devices(DeviceSampler(), Path("/proc"))],
        lambda: [check_lake(), check_store()],
        lambda: [check_home(home)],
        lambda: [check_latest_run(home)],
        lambda: [check_streamlit()],
    ]
    return [answer for check in checks for answer in check()]


def checks_table(checks: Iterable[Check]) -> Table:
    """One row per check; the word says how it is, not the colour alone."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", max_width=24, overflow="fold")
    table.add_column()
    for check in checks:
        if check.remedy is None:
            table.add_row(Text("✔ ok", style="green"), check.name, check.detail)
        else:
            table.add_row(Text("▲ warning", style="yellow"), check.name, f"{check.detail}: {check.remedy}")
    return table


def check_hooks(python: str = sys.executable) -> Iterator[Check]:
    """Run a tiny training under the shim and look at what it reported."""
    with tempfile.TemporaryDirectory(prefix="tidegauge-doctor-") as scratch:
        home = Path(scratch)
        run_dir = create_run(home, name="doctor", argv=[python])
        command = [python, "-P", "-W", "ignore", "-c", _TRAINING]
        environment = child_environment(os.environ, run_dir, home)
        try:
            done = subprocess.run(
                command,
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TRAINING_TIMEOUT_SECONDS,
                check=False,
            )
        except OSError as error:
            yield Check(
                name="torch", detail=f"{python} cannot be run ({error.strerror})", remedy="give another --python"
            )
            return
        except subprocess.TimeoutExpired:
            yield Check(
                name="torch", detail="a training of two steps did not end", remedy="see if torch works alone"
            )
            return
        events = list(_events(run_dir / "events"))
    yield from judge_hooks(done.returncode, done.stderr, events)


def judge_hooks(exit_status: int, stderr: str, events: list[dict[str, Any]]) -> Iterator[Check]:
    """What the events of that training say about torch and the hooks."""
    if exit_status != 0:
        last = stderr.strip().splitlines()[-1] if stderr.strip() else f"exit status {exit_status}"
        remedy = "install torch here, or run doctor with the Python of your training"
        yield Check(name="torch", detail=f"a training of two steps failed, {last}", remedy=remedy)
        return
    started = next((event for event in events if event["kind"] == "process-start"), None)
    if started is None:
        remedy = "see that TIDEGAUGE_DISABLED is not set and that python is not started with -I, -E or -S"
        yield Check(name="hooks", detail="a training of two steps reported nothing", remedy=remedy)
        return
    yield Check(name="torch", detail=str(started["torch"]))
    broken = {event["hook"]: event["error"] for event in events if event["kind"] == "hook-disabled"}
    found = started["capabilities"] | dict.fromkeys(broken, False)
    for name in sorted(found, key=[*_HOOK_POINTS, *found].index):
        told = _HOOK_POINTS.get(name, f"stages of {name.removeprefix('stage:')}")
        if found[name]:
            yield Check(name=f"hook {name}", detail=told)
        else:
            why = broken.get(name, "this torch has no such thing")
            yield Check(
                name=f"hook {name}", detail=f"not known: {told} ({why})", remedy="upgrade Tidegauge, or torch"
            )
    if not any(event["kind"] == "worker-start" for event in events):
        yield Check(name="workers", detail="the worker did not report", remedy="upgrade Tidegauge, or torch")


def check_memory_limit(host: Sample) -> Check:
    """The limit that a training would run into first."""
    limit, total = host.get("cgroup_limit_bytes"), host.get("memory_total_bytes")
    if total is None:
        return Check(name="memory", detail="unknown", remedy="mount /proc; forecasts of memory need MemTotal")
    if limit is None:
        return Check(name="memory", detail=f"{quantity(total, 'bytes')}, no control group limits it")
    used = quantity(host.get("cgroup_usage_bytes"), "bytes")
    return Check(name="memory", detail=f"a control group allows {quantity(limit, 'bytes')}, {used} in use")


def check_shm(host: Sample) -> Check:
    """Workers hand their batches over in /dev/shm."""
    total = host.get("shm_total_bytes")
    if total is None:
        return Check(
            name="/dev/shm", detail="not there", remedy="mount it; DataLoader workers hand batches over in it"
        )
    detail = f"{quantity(total, 'bytes')}, {quantity(host['shm_used_bytes'], 'bytes')} in use"
    if total < _SMALL_SHM_BYTES:
        return Check(name="/dev/shm", detail=detail, remedy="small for workers; in Docker give --shm-size=8g")
    return Check(name="/dev/shm", detail=detail)


def check_pressure(host: Sample) -> Check:
    """Pressure stall information of the kernel."""
    if host.get("memory_some_avg10_ratio") is None:
        remedy = "boot with psi=1; without it memory pressure is not shown"
        return Check(name="pressure", detail="/proc/pressure is not there", remedy=remedy)
    cpu = percent(host.get("cpu_some_avg10_ratio"))
    return Check(name="pressure", detail=f"/proc/pressure can be read, cpu {cpu} in the last 10 s")


def check_smaps(proc: str, pid: int) -> Check:
    """Private and proportional memory of a process."""
    rollup = read_rollup(proc, pid)
    if rollup is None or rollup.pss_bytes is None:
        remedy = "needs Linux 4.14 and ptrace rights; without it leaks are judged by RSS, which is blind to some"
        return Check(name="smaps_rollup", detail="cannot be read", remedy=remedy)
    return Check(name="smaps_rollup", detail=f"can be read, this process has {_size(rollup.pss_bytes)} PSS")


def check_devices(sampler: DeviceSampler, proc: Path) -> Check:
    """Visible GPUs by NVIDIA's management library, and whether it names the processes that use them.

    A machine without a GPU is well too.
    """
    if sampler.reason:
        return Check(name="NVML", detail=sampler.reason)
    totals = [sample["total_bytes"] for sample in sampler.sample(set())]
    sizes = ", ".join("size unknown" if total is None else _size(total) for total in totals)
    found = f"{len(totals)} GPU{'s' if len(totals) > 1 else ''} ({sizes})"
    pids = sampler.users()
    if not pids:
        return Check(name="NVML", detail=f"{found}; no process uses them now, or NVML hides it, as in a container")
    if any((proc / str(pid)).exists() for pid in pids):
        return Check(name="NVML", detail=f"{found}; it names the processes that use them")
    return Check(
        name="NVML",
        detail=f"{found}; the processes that it names are not of this container",
        remedy="memory of the run and of other jobs can't be told apart; start the container with --pid=host",
    )


def check_lake() -> Check:
    """DuckDB with its extensions, loaded from the installed packages."""
    from collector.store.engine import connected

    try:
        with connected(threads=1):
            return Check(name="lake", detail="DuckDB's extensions load")
    except TidegaugeError as error:
        remedy = "pip install 'tidegauge[collector]'; until then the journals keep everything"
        return Check(name="lake", detail=str(error), remedy=remedy)


def check_store() -> Check:
    """The shared store, if one is named: whether its database answers and knows runs."""
    from collector.store import shared

    if not os.environ.get(STORE_VARIABLE):
        return Check(name="store", detail="each run has its own; no shared store is named")
    try:
        runs_count = len(shared.nodes())
        shared.look_at_data()
        return Check(
            name="store", detail=f"the shared store and its files can be read, {runs_count} runs are in it"
        )
    except TidegaugeError as error:
        return Check(
            name="store", detail=str(error), remedy=f"see docs/cluster.md; unset {STORE_VARIABLE} to do without"
        )


def check_home(home: Path) -> Check:
    """Whether runs can be kept; a home that is not there yet will be made under its nearest parent."""
    folder = next(path for path in (home.absolute(), *home.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=folder):
            free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    except OSError as error:
        remedy = "give --home or TIDEGAUGE_HOME a directory that can be written"
        return Check(name="home", detail=f"{home} cannot be written ({error.strerror})", remedy=remedy)
    return Check(name="home", detail=f"{home} can be written, {_size(free_bytes)} free")


def check_latest_run(home: Path) -> Check:
    """Whether the newest run can be read, and whether its records get into its lake."""
    from collector.store.reader import read
    from collector.store.runs import list_runs

    name = "latest run"
    try:
        runs = list_runs(home)
        if not runs:
            return Check(name=name, detail="none yet")
        with read(runs[0]) as snapshot:
            lags = snapshot.query("SELECT ingest_lag_ns FROM agent ORDER BY time_ns DESC LIMIT 1")["ingest_lag_ns"]
            bodies = snapshot.query("SELECT body FROM event WHERE kind = 'collector-problem' ORDER BY time_ns DESC")
            problems = snapshot.problems
    except TidegaugeError as error:
        return Check(name=name, detail=str(error), remedy="mend it, or look at another run")
    lag_ns = max((lag for lag in lags if lag == lag), default=0)
    told = [json.loads(body) for body in bodies["body"]]
    untidy = next((each["error"] for each in told if each["part"] == "upkeep"), None)
    if not problems and lag_ns < _SLOW_INGEST_NS:
        if untidy:
            remedy = (
                "it is tried again every five minutes and by `tidegauge collect`; a damaged file stays as it is"
            )
            return Check(name=name, detail=f"{runs[0].run_id}: {untidy}", remedy=remedy)
        return Check(name=name, detail=f"{runs[0].run_id} can be read")
    why = problems[0] if problems else told[0]["error"] if told else "its collector is slow"
    waiting = f"records wait outside its lake since {lag_ns / 1e9:.0f} s, " if lag_ns >= _SLOW_INGEST_NS else ""
    remedy = "mend it; what is not in the lake stays in the journals, and goes in when it can"
    return Check(name=name, detail=f"{runs[0].run_id}: {waiting}{why}", remedy=remedy)


def check_streamlit() -> Check:
    """What the dashboard needs."""
    if importlib.util.find_spec("streamlit") is None:
        return Check(
            name="streamlit", detail="not installed", remedy="pip install 'tidegauge[app]' for the dashboard"
        )
    from importlib.metadata import version

    return Check(name="streamlit", detail=version("streamlit"))


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            yield json.loads(line)


def _size(value_bytes: float) -> str:
    return quantity(value_bytes, "bytes")
