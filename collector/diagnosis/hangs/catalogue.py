"""The kinds of hang, each with its sentence, and the advice for what a process waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from collector.diagnosis.deaths.catalogue import Death
from collector.diagnosis.hangs.stuck_process import (
    AWAITS_LOOP,
    AWAITS_NOTICE,
    AWAITS_POOL,
    AWAITS_PROCESS,
    AWAITS_QUEUE,
    AWAITS_ROOM,
    AWAITS_TAKER,
    AWAITS_TASK,
    AWAITS_THREAD,
    AWAITS_THREADS,
    COLLECTIVE,
    SHARED_LOCKS,
    Process,
    is_forked,
)
from collector.diagnosis.run.lifecycle import Lifecycle
from collector.findings import Advice, Fault, Finding, advise, extended
from collector.stacks import FULL_PIPE

#: Begin of what a process that hangs waits for (`collector.stacks.wait_words`) -> the advice; the first that fits.
_HANG_ADVICE = {
    "waiting for input at the terminal": Advice(
        text="Answer what asks at that line, or start the command with `< /dev/null`: then it fails at once",
        expected="training goes on, or ends with an error in place of the hang",
    ),
    "waiting for a pipe (standard input": Advice(
        text="Give the input that is read at that line, and check that the program before the `|` is alive; if "
        "nothing should be read, start the command with `< /dev/null`",
        expected="training goes on, or ends with an error in place of the hang",
    ),
    **dict.fromkeys(
        SHARED_LOCKS,
        Advice(
            text="Look where the other processes stand (`tidegauge stacks`): one of them holds the lock, or one "
            "that has ended does. Hold it only briefly, and give `acquire` a timeout",
            expected="an exception in place of the hang",
        ),
    ),
    "blocked on a lock": Advice(
        text="Find out what holds the lock at that line; if it was made before the workers were forked, make it in "
        "worker_init_fn, or use multiprocessing_context='forkserver'",
        expected="no process waits for a lock whose holder is gone, as after fork() of a process with threads",
    ),
    "waiting for a pipe (a FIFO": Advice(
        text="Start the program that opens the other end of that FIFO, or open it with os.O_NONBLOCK",
        expected="`open` returns",
    ),
    "waiting for a pipe": Advice(
        text="Give what is read at that line a timeout, and check that its writer is alive",
        expected="an exception in place of the hang",
    ),
    FULL_PIPE: Advice(
        text="Let something read what that line writes, such as the program after a `|`, or write it to a file",
        expected="the pipe does not stay full",
    ),
    "waiting for a child": Advice(
        text="Start the child process with stdin=subprocess.DEVNULL and a timeout",
        expected="it cannot wait for input for ever; an exception in place of the hang",
    ),
    AWAITS_POOL: Advice(
        text="Look at what the pool's processes do (`py-spy dump --pid` of each), and give its results a timeout "
        "(`.get(timeout=...)`)",
        expected="an exception in place of the hang",
    ),
    AWAITS_QUEUE: Advice(
        text="Find the thread or process that should fill this queue: `tidegauge stacks` shows whether it lives "
        "and where it stands; give `get` a timeout",
        expected="an exception in place of the hang",
    ),
    AWAITS_ROOM: Advice(
        text="Find the thread or process that should take (`get`) what is put at that line: `tidegauge stacks` "
        "shows whether it lives and where it stands; give `put` a timeout",
        expected="an exception in place of the hang",
    ),
    AWAITS_TAKER: Advice(
        text="Take everything out of its queue (`get`) before `join`, or let it call `cancel_join_thread()` on the "
        "queue if the rest may be lost",
        expected="it ends as soon as what it put is taken, and `join` returns",
    ),
    AWAITS_THREAD: Advice(
        text="Look where that thread stands (`tidegauge stacks`), and give `join` a timeout",
        expected="the line that the thread executes is the cause",
    ),
    AWAITS_THREADS: Advice(
        text="Tell those threads to end (`finally:`, for after an exception), or start them with daemon=True",
        expected="the process ends when its main thread has ended",
    ),
    AWAITS_NOTICE: Advice(
        text="Find the thread that should call `notify`, `set` or `release`, and give `wait` a timeout",
        expected="an exception in place of the hang",
    ),
    AWAITS_PROCESS: Advice(
        text="Find the process that should call `notify`, `set` or `release`, or come to the Barrier "
        "(`tidegauge stacks`): it may have ended, as a worker does that has no samples left. Give `wait` a timeout",
        expected="an exception in place of the hang",
    ),
    AWAITS_LOOP: Advice(
        text="Await every task that the loop runs (asyncio.TaskGroup), and give `get` a timeout (asyncio.timeout)",
        expected="an exception of a task ends the training, and is not lost",
    ),
    AWAITS_TASK: Advice(
        text="Look where the threads or processes of the pool stand (`tidegauge stacks`), and give `result` a "
        "timeout",
        expected="the line that the task executes is the cause",
    ),
    "waiting for the network": Advice(
        text="Set a timeout for that connection, and retry", expected="an exception in place of the hang"
    ),
    "waiting for a disk": Advice(
        text="Check the storage behind that file (dmesg, mount, NFS server)",
        expected="the process goes on when the storage answers; no signal ends it before",
    ),
    COLLECTIVE: Advice(
        text="Find the rank that has not entered it: `tidegauge stacks` on the other nodes, and their logs",
        expected="the missing rank's own stack shows the cause",
    ),
    "suspended": Advice(
        text="Resume it with `kill -CONT {pid}`, and find out who sent the stop signal", expected="training goes on"
    ),
    "computing": Advice(
        text="Check the loop at that line for an end that it never reaches",
        expected="a bounded loop gives the batch; a slow one shows as progress in `tidegauge stacks`",
    ),
}
#: Begin of such a wait -> where the cause lies, if not in the user's code. It is not known in a collective.
_HANG_FAULTS: Mapping[str, Fault | None] = {
    **dict.fromkeys(("waiting for the network", "waiting for a disk", "suspended"), "outside"),
    COLLECTIVE: None,
}
_OWN_LOCK = Advice(
    text="Find the thread that holds the lock at that line (`tidegauge stacks`), and take several locks in "
    "the same order everywhere",
    expected="no thread waits for a lock whose holder waits for it",
)
_LOCKED_TWICE = Advice(
    text="Look at the callers of that line (`tidegauge stacks --native`): a signal handler or a `__del__` waits "
    "for ever for a lock that is held by the code which it interrupts. Let it only set a flag, or use "
    "threading.RLock",
    expected="no thread waits for a lock that it holds itself",
)
_FORKED_LOCK = Advice(
    text="Start that process by `multiprocessing.get_context('spawn')`, or before the training uses threads",
    expected="a process that is forked from one with threads, as OpenMP starts them, inherits locks that no thread "
    "of it will ever release; one that is spawned has none of them",
)
_READ_OUTPUT = Advice(
    text="Read the child's output while it runs: use subprocess.run or communicate(), or stdout=subprocess.DEVNULL",
    expected="its pipe never fills, and it ends",
)
#: Advice on a process whose stacks could not be read.
_READ_STACKS = Advice(
    text="Install py-spy, or give Tidegauge the right to read stacks (`tidegauge doctor` says what is missing)",
    expected="the finding names the line, and advises on its wait",
)
#: Advice while the run goes on.
_LOOK_AGAIN = Advice(text="Run `tidegauge stacks` twice", expected="it shows whether the process moves, and where")
_LOAD_AHEAD = Advice(
    text="Fetch large remote files before the training, or raise prefetch_factor",
    expected="the training waits less, or not at all, for a slow download",
    effect="changes memory",
)
#: Advice on a worker that may merely be slower than its loader's timeout.
LONGER_TIMEOUT = Advice(
    text="Raise the loader's `timeout` above its longest fetch, or make that line faster",
    expected="a slow batch does not end the training",
)
#: Advice on ranks that are all in a collective: at different lines, and at the same line.
ONE_ORDER = Advice(
    text="Call each collective on all ranks and in one order: none in a branch that only some ranks enter, such as "
    "`if rank == 0`. With TORCH_DISTRIBUTED_DEBUG=DETAIL, an error names the calls that differ",
    expected="each rank enters the same collective",
)
ONE_SHAPE = Advice(
    text="Run with TORCH_DISTRIBUTED_DEBUG=DETAIL: an error names calls that differ in the collective or the shape "
    "of its tensor. If none does, look at the network between the ranks",
    expected="an error in place of the hang",
)
#: Advice on a rank that others wait for in a collective after it has ended.
FIX_END = Advice(
    text="Find out first what ended that rank: its own finding, its log, `dmesg`", expected="the others do not hang"
)
HANG = Death(kind="hang", sentence="{what} has not trained for {silent}: it is {does}{where}{held}.")
HANG_WITHOUT_HOOKS = replace(
    HANG,
    sentence="{what} {hangs}: it is {does}{where}{held}; no process of the run has used CPU time for {silent}.",
)
HANG_OF_WORKER = replace(
    HANG,
    sentence="{what} {hangs}: it is {does}{where}; {training} has had no batch for {silent}{held}.",
    advice=advise(
        text="Set DataLoader(timeout=...) until the cause is found",
        expected="training ends with an exception, not silently",
    ),
)
#: A process that the training started by itself, and waits for.
HANG_OF_CHILD = replace(
    HANG,
    sentence="{what} {hangs}: it is {does}{where}; {training} waits for it{waits_where}, and has not "
    "trained for {silent}{held}.",
)
#: All workers wait for an index, and the batch that the training waits for was made.
HANG_OF_UNDELIVERED = replace(
    HANG,
    sentence="{what} made batch {index}, and it never arrived: {training} has had no batch for {silent}.",
    advice=advise(
        text="Look in the command's output for an error of the worker's queue, such as \"cannot pickle\": let "
        "collate_fn return tensors in host memory, arrays, numbers and strings, without generators, locks, open "
        "files and CUDA tensors",
        expected="the batch can be sent to the training process",
    ),
    confidence=0.9,
    fault="your code",
)
#: A rank that PyTorch's Flight Recorder names, without stacks of its own.
HANG_OF_RANK = replace(
    HANG,
    sentence="{what}; {since}.",
    advice=advise(
        text="Look for what rank {rank} does after {last}: in its log, and by `tidegauge stacks` on its node",
        expected="its own line or error shows why it has not entered the collective",
    ),
)


def with_remedy(hang: Finding, waits: str | None, life: Lifecycle, culprit: Process) -> Finding:
    """Return a hang with the advice for what its process waits for, where the cause lies, and how to see more."""
    kind = next((begin for begin in _HANG_ADVICE if (waits or "").startswith(begin)), None)
    if culprit.is_unread and kind not in _HANG_FAULTS:
        kind = None  # the state in the kernel alone does not show whose code waits
    remedies = [] if kind is None else [_HANG_ADVICE[kind]]
    if kind == "waiting for a child" and FULL_PIPE in (waits or ""):
        remedies = [_READ_OUTPUT]
    if kind == "blocked on a lock" and hang.locus.role != "worker":
        is_own = hang.locus.role == "main" and not is_forked(life, culprit)
        remedies = [_OWN_LOCK if is_own else _FORKED_LOCK]
    if culprit.is_unread and not culprit.is_suspended:
        remedies.insert(0, _READ_STACKS)
    advice = [replace(remedy, text=remedy.text.format(pid=hang.locus.pid)) for remedy in remedies]
    if life.status() == "running":
        advice.append(_LOOK_AGAIN)
    return replace(
        hang, advice=(*advice, *hang.advice), fault=None if kind is None else _HANG_FAULTS.get(kind, "your code")
    )


def held(others_count: int, waits: str | None) -> str:
    """Return the words for the other ranks that wait for a process; none if they all wait in a collective."""
    if not others_count or waits == COLLECTIVE:
        return ""
    ranks = "1 other rank waits" if others_count == 1 else f"{others_count} other ranks wait"
    return f"; {ranks} for it"


def _with_cause(hang: Finding, sentence: str, advice: Advice) -> Finding:
    """Return a hang with what is behind it, and advice on that in place of the first one."""
    return extended(replace(hang, advice=hang.advice[1:]), sentence, advice=(advice,))


def of_taken_pool(hang: Finding) -> Finding:
    """Return the hang of a process that waits for a task, while each thread of its pool does so too."""
    advice = Advice(
        text="Wait in no task for a task of the same pool: call its function, or give it a pool of its own",
        expected="a thread is left for each task that another one waits for",
    )
    lacks = "if that is one of this pool, no thread is left to run it"
    return _with_cause(hang, f"Each thread of its pool waits for a task, too: {lacks}.", advice)


def of_lost_thread(hang: Finding, exception: str, when: str) -> Finding:
    """Return the hang of a process that waits for its own threads, one of which ended with an exception."""
    advice = Advice(
        text="Hand the exceptions of that thread to the training, as through the queue, and raise them there",
        expected="the training ends with the error, and does not wait for a thread that has ended",
    )
    return _with_cause(hang, f"One of its threads ended {when} with {exception}", advice)


def of_lone_thread(hang: Finding, awaits: str | None) -> Finding:
    """Return the hang of a process that waits for one of its threads, and has none besides the main thread.

    It is at a lock if `awaits` is None.
    """
    if awaits is None:
        holder = "this thread holds the lock itself, or native code or another process does"
        return _with_cause(hang, f"The process has no other Python thread: {holder}.", _LOCKED_TWICE)
    if awaits == AWAITS_LOOP:
        wakes = "no other Python thread could wake it"
        return extended(hang, f"The loop has no connection, pipe, child or timer, and {wakes}.")
    is_worker = hang.locus.role == "worker"
    if is_worker:
        advice = Advice(
            text="Start that thread in the worker, in worker_init_fn or at its first use: fork() copies the main "
            "thread alone, so a thread that the training process started is missing in its workers",
            expected="the worker has the thread that its main thread waits for",
        )
    else:
        advice = Advice(
            text="Let the thread that should end this wait do so before it ends itself, also after an exception",
            expected="nothing waits for a thread that has ended",
        )
    process = "worker" if is_worker else "process"
    return _with_cause(hang, f"The {process} has no other Python thread that could end this wait.", advice)


def of_lost_process(hang: Finding, pids: Sequence[int], awaits: str | None) -> Finding:
    """Return the hang of a process that waits for a Pool, a queue or a lock; the processes `pids` ended at once."""
    is_one = len(pids) == 1
    named = f"Its child process (pid {pids[0]})" if is_one else f"{len(pids)} of its child processes"
    them = f"process {pids[0]}" if is_one else "them"
    causes = "an error or an exit in the code that it ran, a signal, or the kernel for lack of memory (`dmesg`)"
    find = f"what ended {them}: {causes}"
    if awaits in SHARED_LOCKS:
        named = f"Process {pids[0]}" if is_one else f"{len(pids)} processes of the training"
        effect = (
            "and nothing frees the lock if it held it" if is_one else "and nothing frees the lock if one held it"
        )
        text = f"Find out {find}; give `acquire` a timeout"
        expected = "the training ends with an error, and does not wait for a process that has ended"
    elif awaits == AWAITS_POOL:
        effect = "and a Pool waits for ever for the task of a process that died"
        text = f"Use concurrent.futures.ProcessPoolExecutor in place of multiprocessing.Pool, and find out {find}"
        expected = "a lost process raises BrokenProcessPool instead of a hang"
    else:
        effect = "and a queue does not tell that the process that filled it is gone"
        text = f"Find out {find}; give `get` a timeout, and look then at `is_alive()` of that process"
        expected = "the training ends with an error, and does not wait for a process that has ended"
    return _with_cause(hang, f"{named} ended just then, {effect}.", Advice(text=text, expected=expected))


def of_slow(hang: Finding, transfer: str) -> Finding:
    """Return the finding on a process that still moves data: it is slow, and nothing says that it hangs."""
    advice = tuple(item for item in hang.advice if item == _LOOK_AGAIN)
    return extended(replace(hang, advice=(*advice, _LOAD_AHEAD)), transfer)
