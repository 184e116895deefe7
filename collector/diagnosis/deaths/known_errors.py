"""Causes that the message of an uncaught exception names: memory, files, /dev/shm, disks, processes, pickles.

The texts are those of the kernel (errno(3)), CPython, NumPy and PyTorch. Figures of the run say whether the machine
was short of what the program asked for, or the program asked for too much.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from collector.diagnosis.deaths.catalogue import EQUAL_STEPS, READ_STACKS, READER_GONE
from collector.diagnosis.loading.loaders import awaited_batch, living_workers, loader_settings
from collector.diagnosis.loading.uneven_ranks import batches_meanwhile, uneven_ranks
from collector.diagnosis.memory import resources
from collector.diagnosis.memory.exhaustion import FULL_RATIO
from collector.diagnosis.memory.shared_memory import SharedMemory
from collector.diagnosis.run.columns import SECOND_NS, floats, host_samples, last, peak, sampled, seconds
from collector.diagnosis.run.exceptions import LOADER_TIMEOUT
from collector.diagnosis.run.host_memory import binding_limit
from collector.diagnosis.run.lifecycle import lifecycle_of
from collector.diagnosis.run.processes import rank_of, sentence
from collector.diagnosis.run.tables import RunTables, writer_of
from collector.diagnosis.statistics.growth import BLOCK_COUNTS, MIN_POINTS, Floats
from collector.findings import Advice, Evidence, Fault, advise, fact
from collector.flight_recorder import ranks_words
from collector.store import ProcessKey
from collector.units import duration, listed, size

#: Message of a collective that failed: gloo and NCCL, and torch's own words.
_OF_COLLECTIVE = r"[/ ]gloo|NCCL|ProcessGroup"
#: Messages of gloo and NCCL about the end of a connection, not about a timeout.
LOST_PEER = re.compile(r"[Cc]onnection (?:was )?(?:likely )?(?:closed|reset)|remote process exited|[Bb]roken pipe")
#: Timeout in ms of a collective (gloo's unbound_buffer.cc; torch's ProcessGroupNCCL.cpp).
_WAITED = re.compile(r"(?:Timed out waiting |Timeout\(ms\)=)(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The cause of an error. `sentence` follows the one about the exception, with a blank before it."""

    sentence: str = ""
    advice: tuple[Advice, ...]
    fault: Fault | None = None
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Raised:
    """An exception that ended a training process, `key`, in it or in one of its workers, `raiser`."""

    tables: RunTables
    key: ProcessKey
    raiser: ProcessKey
    time_ns: float
    text: str
    trace: str


def cause_of(
    tables: RunTables, key: ProcessKey, worker: ProcessKey | None, event: Mapping[str, Any], text: str
) -> Cause | None:
    """Return the cause that an exception names, None if it names none that is known.

    Args:
        tables: the run.
        key: the training process.
        worker: its worker that raised, None if it raised itself.
        event: its `exception` event.
        text: type and first line of what was raised.
    """
    trace = f"{event.get('traceback')} {event.get('message')}"
    raised = _Raised(tables=tables, key=key, raiser=worker or key, time_ns=event["time_ns"], text=text, trace=trace)
    causes = (explain(raised) for pattern, explain in _CAUSES if pattern.search(text))
    return next(filter(None, causes), None)


def is_of_collective(event: Mapping[str, Any]) -> bool:
    """Return whether an `exception` event is about a collective, which fails where a rank has left."""
    return re.search(_OF_COLLECTIVE, str(event.get("message"))) is not None


#: Calls that fork, as tracebacks show them.
_FORKS = ("os.fork", "fork_exec")
#: The text of CPython's error (threading.py).
_NO_THREAD = "can't start new thread"
_REQUEST = re.compile(r"(?:allocate|mmap) ([\d.]+) (bytes|[KMGTPE]iB)", re.IGNORECASE)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SMALLER_ARRAY = Advice(
    text="Check shape and dtype of what is allocated at that line", expected="it fits into the host's memory"
)
_PROCESS_LIMITS = Advice(
    text="Check `ulimit -v`, `ulimit -d`, /proc/sys/vm/overcommit_memory, and, where many small segments are "
    "mapped, /proc/sys/vm/max_map_count",
    expected="the process may allocate what the host has",
)


def _memory(raised: _Raised) -> Cause:
    request = _REQUEST.search(raised.text)
    asked = float(request[1]) * 1024 ** _UNITS.index(request[2]) if request else math.nan
    name, limit = binding_limit(raised.tables, raised.key[0])
    samples = host_samples(raised.tables, raised.key[0])
    is_before = floats(samples, "time_ns") <= raised.time_ns
    available = last(floats(samples, "memory_available_bytes")[is_before])
    known = {"requested_bytes": asked, "memory_available_bytes": available}
    evidence = tuple(fact(each, round(of), "at the exception") for each, of in known.items() if math.isfinite(of))
    if any(each in raised.trace for each in _FORKS):
        sentence = " It was starting a process, for which fork() asks for as much memory as the process has."
        return Cause(sentence=sentence, advice=(_FORK,), evidence=evidence)
    if asked > limit:
        sentence = f" It asked for {size(asked)} at once; the limit is {size(limit)} ({name})."
        return Cause(sentence=sentence, advice=(_SMALLER_ARRAY,), fault="your code", evidence=evidence)
    if asked < available:
        sentence = f" The host had {size(available)} available, so a limit of the process refused {size(asked)}."
        return Cause(sentence=sentence, advice=(_PROCESS_LIMITS,), fault="your settings", evidence=evidence)
    if available > (1 - FULL_RATIO) * limit:
        sentence = f" The host had {size(available)} available."
        return Cause(sentence=sentence, advice=(_SMALLER_ARRAY, _PROCESS_LIMITS), evidence=evidence)
    return Cause(advice=resources.HOST_MEMORY_WITHOUT_WORKERS.full_advice, evidence=evidence)


_FORK = Advice(
    text="Start processes before the training grows (make the loader first, persistent_workers=True), or with "
    "multiprocessing_context='forkserver'; or set /proc/sys/vm/overcommit_memory to 1",
    expected="the new process can be started",
)


def _files(raised: _Raised) -> Cause:
    rows = sampled(raised.tables, raised.raiser)
    figures = {name: last(floats(rows, name)) for name in ("fd_count", "fd_limit_count")}
    evidence = tuple(fact(each, of, "last sample") for each, of in figures.items() if math.isfinite(of))
    passes_tensors = "torch/multiprocessing" in raised.trace or "set_sharing_strategy" in raised.text
    resource = resources.OPEN_BATCHES if passes_tensors else resources.OPEN_FILES
    return Cause(advice=resource.leak_advice, evidence=evidence)


def _shared_memory(raised: _Raised) -> Cause:
    memory = SharedMemory.of(raised.tables, raised.key[0])
    if not memory.total > 0:
        return Cause(advice=resources.SHARED_MEMORY.full_advice)
    return Cause(
        sentence=f" /dev/shm has {size(memory.total)}.",
        advice=memory.advice,
        fault="your settings",
        evidence=(fact("shm_used_peak_bytes", peak(memory.used), "run", n=len(memory.used)),),
    )


def _timeout(raised: _Raised) -> Cause:
    fetches = raised.tables.stream("fetch")
    longest = peak(floats(fetches, "getitem_ns") + floats(fetches, "collate_ns")) / SECOND_NS
    if not math.isfinite(longest):
        return Cause(advice=(READ_STACKS,))
    errors = raised.tables.events_of("loader-error", by=raised.key)
    late = awaited_batch(raised.tables, raised.key, errors[-1]["loader"]) if errors else None
    which = f" It waited for {late.words}." if late else ""
    return Cause(
        sentence=f"{which} No batch took its worker longer than {duration(longest)} before.",
        advice=(READ_STACKS,),
        evidence=(fact("longest_fetch_seconds", round(longest, 4), "run", n=len(fetches)),),
    )


_CHECK_LIMITS = "Check `ulimit -u` and pids.max of the cgroup (docker: --pids-limit)"
_FEWER_PROCESSES = Advice(
    text=f"{_CHECK_LIMITS}; lower num_workers or OMP_NUM_THREADS, and wait for child processes that have ended "
    "(`Popen.wait`), which count until then",
    expected="the process can be started",
)
_FEWER_THREADS = Advice(
    text=f"{_CHECK_LIMITS}, and `ulimit -v`: each thread takes a stack of `ulimit -s`; lower num_workers or "
    "OMP_NUM_THREADS",
    expected="the thread can be started",
)


def _processes(raised: _Raised) -> Cause | None:
    starts = (*_FORKS, "start_new_thread", "start_joinable_thread", _NO_THREAD)
    if not any(each in raised.trace for each in starts):
        return None
    samples = sampled(raised.tables, raised.raiser)
    counts = floats(samples, "thread_count") - living_workers(raised.tables, raised.raiser, seconds(samples))
    counts = counts[np.isfinite(counts)]
    evidence = (fact("thread_count", counts[-1], "last sample", n=len(counts)),) if len(counts) else ()
    if _NO_THREAD in raised.trace and _rises_evenly(counts):
        text = resources.END_THREADS.text.format(count=f"{counts[-1] - counts[0]:.0f}")
        return Cause(
            sentence=f" It had {counts[-1]:.0f} threads, and ever more of them.",
            advice=(replace(resources.END_THREADS, text=text),),
            fault="your code",
            evidence=evidence,
        )
    sentence, advice = " The limit of processes and threads is met.", _FEWER_PROCESSES
    if _NO_THREAD in raised.trace:
        sentence = " The limit of threads is met, or that of address space, in which each has its stack."
        advice = _FEWER_THREADS
    return Cause(sentence=sentence, advice=(advice,), fault="your settings", evidence=evidence)


def _rises_evenly(counts: Floats) -> bool:
    """Return whether a number of threads rose all the time: a pool that is made at once does not."""
    if len(counts) < MIN_POINTS or counts[-1] - counts[0] < BLOCK_COUNTS[0]:
        return False
    return bool(0.25 < (counts[len(counts) // 2] - counts[0]) / (counts[-1] - counts[0]) < 0.75)


def _disk(raised: _Raised) -> Cause:
    """Explain a file that does not fit. The message seldom names it; /dev/shm may have been filling just then."""
    cause, memory = _DISK(raised), SharedMemory.of(raised.tables, raised.key[0])
    used = memory.used[memory.times * SECOND_NS <= raised.time_ns]
    if len(used) < 2 or not memory.total - used[-1] <= 2 * (used[-1] - used[-2]):
        return cause
    sentence = (
        f"{cause.sentence} /dev/shm was filling: {size(memory.total - used[-1])} of {size(memory.total)} were left."
    )
    return replace(cause, sentence=sentence, advice=(*resources.SHARED_MEMORY.leak_advice, *cause.advice))


def _archive(raised: _Raised) -> Cause | None:
    """Explain an archive that reads as damaged in a forked worker, which shares the position in its file."""
    methods = (
        one.get("start_method") for (key, _), one in loader_settings(raised.tables).items() if key == raised.key
    )
    if "DataLoader worker process" not in raised.trace or "fork" not in methods:
        return None
    return _SHARED_FILE(raised)


def _collective(raised: _Raised) -> Cause | None:
    """Explain a collective that another rank left, if that had fewer batches, or came to too late.

    Batches say which rank did something else during the timeout.
    """
    uneven, waited = uneven_ranks(raised.tables), _WAITED.search(raised.text)
    if uneven is not None:
        return Cause(sentence=uneven.sentence, advice=(uneven.advice,), fault="your code", evidence=uneven.evidence)
    if waited is None:
        return _ended_rank(raised) if LOST_PEER.search(raised.trace) else None
    seconds = int(waited[1]) / 1e3
    begin_ns = raised.time_ns - seconds * SECOND_NS
    busy = batches_meanwhile(raised.tables, raised.key, np.array([begin_ns]), np.array([raised.time_ns]))
    meanwhile = f" Meanwhile {listed(busy)}." if busy else ""
    share = "let all ranks share what one of them does alone"
    search = "find out what the others did (`tidegauge stacks` names their lines while it lasts)"
    return Cause(
        sentence=f" Another rank did not come to this collective within the timeout of {duration(seconds)}."
        f"{meanwhile}",
        advice=advise(
            text=f"Let no rank wait that long: {share if busy else search}, or raise the timeout "
            "(init_process_group(timeout=…))",
            expected="all ranks come to each collective in time",
        ),
        fault="your code",
    )


def _ended_rank(raised: _Raised) -> Cause | None:
    """Explain a lost connection by the ranks that had ended without an error since the training began."""
    events_of = raised.tables.events_of
    begun_ns = min((event["time_ns"] for event in events_of("process-start", by=raised.key)), default=0)
    peers = {*lifecycle_of(raised.tables).mains} - {raised.key}
    exits = (one for one in events_of("process-exit") if begun_ns < one["time_ns"] < raised.time_ns)
    fine = {writer_of(one) for one in exits if not one.get("detached")} & peers
    fine = {key for key in fine if not events_of("exception", "exit-message", "cuda-oom", by=key)}
    if not (ranks := {rank for key in fine if (rank := rank_of(raised.tables, key)) is not None}):
        return None
    words = sentence(f"{ranks_words(ranks)} had ended without an error before.")
    return Cause(sentence=f" {words}", advice=(EQUAL_STEPS,), fault="your code")


def _pipe(raised: _Raised) -> Cause:
    """Explain a pipe whose reader is gone: a child, or what reads the output. A closed socket raises it, too."""
    of_child = ("multiprocessing/connection.py", "multiprocessing/popen", "subprocess.py")
    if any(module in raised.trace for module in ("urllib3", "socket.py", "ssl.py", "http/client.py")):
        return _NETWORK(raised)
    if any(module in raised.trace for module in of_child):
        return _CHILD_GONE(raised)
    return Cause(sentence=" What reads its output had ended.", advice=READER_GONE.advice, fault="outside")


def _sender(raised: _Raised) -> Cause | None:
    """Explain a tensor in shared memory: its file is asked for at its sender (multiprocessing.resource_sharer)."""
    return _SENDER(raised) if "resource_sharer" in raised.trace or "/torch_" in raised.text else None


def _within(module: str, explain: Callable[[_Raised], Cause]) -> Callable[[_Raised], Cause | None]:
    """Return the explanation of an error that counts only in this module, such as torch/utils/data."""
    return lambda raised: explain(raised) if module in raised.trace else None


def _known(text: str, expected: str, fault: Fault | None, sentence: str = "") -> Callable[[_Raised], Cause]:
    """Return the explanation of an error whose text alone gives the cause."""
    cause = Cause(sentence=sentence, advice=advise(text=text, expected=expected), fault=fault)
    return lambda _: cause


_MAIN_GUARD = _known(
    'Put the code that trains under `if __name__ == "__main__":`',
    "a spawned worker, which imports the script, finds its definitions and starts no training",
    "your code",
)
#: The CUDA runtime reports errors of kernels late (CUDA C++ programming guide, asynchronous errors).
_KERNEL = _known(
    "Run again with CUDA_LAUNCH_BLOCKING=1, or on the CPU; a failed assertion is mostly an index or a "
    "label beyond its range",
    "the traceback ends in the call that failed",
    "your code",
    sentence=" A kernel failed before that line.",
)
_PICKLE = _known(
    "Define what the message names at the top level of a module, not as a lambda, in a function or under "
    "`if __name__`, and open files and connections in the worker; or use multiprocessing_context='fork'",
    "the dataset, its transforms and collate_fn can be sent to the workers",
    "your code",
)
_UNEQUAL_SAMPLES = _known(
    "Give all samples one size in the dataset (pad, crop or resize), or pass a collate_fn that pads each batch",
    "the samples of a batch can be stacked",
    "your code",
)
_GRADIENT = _known(
    "Return tensors without gradients from the dataset (`.detach()`, or compute them under torch.no_grad())",
    "a worker can put them into a batch and send it",
    "your code",
    sentence=" A tensor of the dataset requires gradients.",
)
_DISK = _known(
    "Check the room and the quota of the file system that is written to at that line (`df -h`), and "
    "delete old checkpoints there",
    "the file fits",
    "this machine",
    sentence=" A file could not be written in full.",
)
_FILE_SIZE = _known(
    "Check `ulimit -f` and the largest file that the file system can hold, or write several files",
    "the file may grow",
    "your settings",
)
_SENDER = _known(
    "Let a process that puts tensors into a queue live until they are received, for example until "
    "the receiver sets an Event; or send arrays (`tensor.numpy().copy()`), which the queue copies",
    "each tensor can still be opened when it is received",
    "your code",
    sentence=" It was opening a tensor in shared memory, and the process that sent it had ended.",
)
_CHILD_GONE = _known(
    "Look at the end of the command's output for the error of the process at the other end, and what ended it",
    "it lives until it has received everything",
    None,
    sentence=" The process at the other end of the pipe had ended.",
)
_SHARED_FILE = _known(
    "Open the file in each worker, at its first `__getitem__` or in worker_init_fn, and not before the workers "
    "start. If it fails with num_workers=0 too, the file is damaged",
    "each worker has a position of its own in the file",
    "your code",
    sentence=" It was in a forked worker. Workers share the position in a file that was opened before they were "
    "forked, so each may read at the place of another one.",
)
_HDF5_LOCK = _known(
    "End what has the file open for writing (`fuser -v FILE`), and open it everywhere with mode 'r'; on a file "
    "system without locks, set HDF5_USE_FILE_LOCKING=FALSE",
    "each process can open the file for reading",
    "your code",
    sentence=" Another process has the file open for writing, or its file system has no locks.",
)
_SQLITE_LOCK = _known(
    "Let one process alone write to the database, in short transactions, or give sqlite3.connect a longer timeout",
    "no process waits longer for its turn than its timeout",
    "your code",
    sentence=" Another process was writing to the SQLite database for longer than the timeout.",
)
_LMDB_READERS = _known(
    "Open the environment with lock=False where nothing writes to it, or with max_readers above the number of all "
    "ranks' workers, and once per process",
    "each reader has a place in the table of readers",
    "your code",
)
_CUDA_IN_WORKER = _known(
    "Keep CUDA out of dataset, transforms and collate_fn: move the batch to the GPU in the training "
    "loop; or use multiprocessing_context='spawn'",
    "the worker does not touch CUDA, or starts it itself",
    "your code",
    sentence=" A process that was forked can't use CUDA.",
)
_NO_CHILDREN = _known(
    "Use num_workers=0 for a DataLoader inside a dataset, and threads in place of a pool there",
    "the work is done in the worker itself",
    "your code",
    sentence=" A daemonic process, such as a DataLoader worker, may not start processes.",
)
_PORT = _known(
    "Give each training on this machine its own MASTER_PORT (torchrun: --standalone or "
    "--master-port), and end what is left of an earlier one (`ss -tlnp`)",
    "the ranks can meet",
    "your settings",
    sentence=" Another process listens on that port.",
)
_NETWORK = _known(
    "Check the server at the other end, and retry with a pause at that line",
    "a short failure of the network does not end the training",
    "outside",
)
_POOL = _known(
    "Find out what ended it: the kernel for lack of memory (`dmesg`), or a crash in the code that it ran "
    "(PYTHONFAULTHANDLER=1)",
    "the pool keeps its processes",
    None,
)
_STORAGE = _known(
    "Check the mount and its server (dmesg, `mount`, the log of the file server), and read the file again with a "
    "pause",
    "a short failure of the storage does not end the training",
    "outside",
    sentence=" The storage behind that file failed.",
)
_CUBLAS = _known(
    "Leave more GPU memory free: cuBLAS found no room for its workspace. Use a smaller batch, or end other "
    "processes on this GPU (`nvidia-smi`)",
    "cuBLAS gets its workspace, some MiB for each stream",
    "your settings",
)
_RENDEZVOUS = _known(
    "Look for the rank that has not started, in its own log, and check that each node reaches MASTER_ADDR at "
    "MASTER_PORT and has the same WORLD_SIZE",
    "all ranks meet",
    "your settings",
)
_GRAPH_TWICE = _known(
    "Detach what a step takes over from the one before (hidden states, running losses: .detach() or .item()), or "
    "call backward once, on the sum of the losses",
    "each backward pass has a graph of its own",
    "your code",
)
_UNUSED = _known(
    "Use each parameter in each forward pass, or give DistributedDataParallel find_unused_parameters=True, which "
    "costs a walk through the graph per step (TORCH_DISTRIBUTED_DEBUG=DETAIL names the unused ones)",
    "each gradient is reduced in each step",
    "your code",
)
_IN_PLACE = _known(
    "Run once under torch.autograd.set_detect_anomaly(True), which names the forward line, and write the operation "
    "there that changes a tensor in place (`+=`, `x[...] =`, relu_) as one that makes a new tensor. If the line is "
    "that of a step before, optimizer.step() changed its weights: detach() what a step keeps for the next one, "
    "such as a hidden state, and drop retain_graph=True",
    "the backward pass finds the values of the forward pass",
    "your code",
)
#: Text of an error -> its cause, None if the rest of the exception speaks against it; the first that fits counts.
_CAUSES: tuple[tuple[re.Pattern[str], Callable[[_Raised], Cause | None]], ...] = tuple(
    (re.compile(pattern), explain)
    for pattern, explain in (
        (r"shared memory\(shm\) for file|</torch_.*No space left on device", _shared_memory),
        (r"[Tt]oo many open files|received \d+ items of ancdata", _files),
        (r"[Cc]an(?:no|')t allocate memory|(?:\b|_Array|Arrow)MemoryError|bad_alloc|Insufficient memory", _memory),
        (r"No space left on device|Disk quota exceeded|inline_container.*unexpected pos", _disk),
        (r"\[Errno 27\]", _FILE_SIZE),
        (r"backward through the graph a second time", _GRAPH_TWICE),
        (r"modified by an inplace operation", _IN_PLACE),
        (r"Expected to have finished reduction in the prior iteration", _UNUSED),
        (r"CUDA error: (?:device-side assert|an illegal memory access)", _KERNEL),
        (r"stack expects each tensor to be equal size|list of batch should be of equal size", _UNEQUAL_SAMPLES),
        (r"resize storage that is not resizable", _within("utils/data", _UNEQUAL_SAMPLES)),
        (
            r"non-leaf tensor which requires_grad|out=\.\.\. arguments don't support automatic diff",
            _within("utils/data", _GRADIENT),
        ),
        (LOADER_TIMEOUT, _timeout),
        (r"finished its bootstrapping phase", _MAIN_GUARD),
        (r"[Cc]an(?:no|')t pickle|Can't get (?:local object|attribute)", _within("multiprocessing", _PICKLE)),
        (r"unable to lock file", _HDF5_LOCK),
        (r"database is locked", _SQLITE_LOCK),
        (r"MDB_READERS_FULL", _LMDB_READERS),
        (r"can't start new thread|Resource temporarily unavailable", _processes),
        (r"FileNotFoundError|EOFError|Connection(?:Reset|Refused)Error|open shared memory object", _sender),
        (r"BadZipFile|LZMAError|while decompressing|unexpected end of data|ead data \((?:inflate|wrong)", _archive),
        (r"re-initialize CUDA in forked subprocess", _CUDA_IN_WORKER),
        (r"daemonic processes are not allowed to have children", _NO_CHILDREN),
        (r"BrokenProcessPool", _POOL),
        (r"\[Errno (?:5|107|116|121)\]|Stale file handle", _STORAGE),
        (r"CUBLAS_STATUS_ALLOC_FAILED", _CUBLAS),
        (r"\d+/\d+ clients joined", _RENDEZVOUS),
        (_OF_COLLECTIVE, _collective),
        (r"BrokenPipeError", _pipe),
        (r"EADDRINUSE|[Aa]ddress already in use", _PORT),
        (r"Connection(?:Reset|Refused|Aborted)Error|URLError|ConnectTimeout|ReadTimeout", _NETWORK),
    )
)
