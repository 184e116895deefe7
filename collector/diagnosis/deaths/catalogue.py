"""The kinds of death, each with its sentence and its advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from signal import SIGABRT, SIGBUS, SIGILL

from collector.diagnosis.deaths.stuck_process import (
    AWAITS_LOOP,
    AWAITS_NOTICE,
    AWAITS_POOL,
    AWAITS_QUEUE,
    AWAITS_TAKER,
    AWAITS_TASK,
    AWAITS_THREAD,
    AWAITS_THREADS,
    COLLECTIVE,
)
from collector.findings import Advice, Evidence, Fault, Finding, Limit, Locus, Severity
from collector.stacks import FULL_PIPE


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A kind of death. The sentence and the advice are templates."""

    kind: str
    sentence: str
    advice: tuple[Advice, ...] = ()
    severity: Severity = "critical"
    confidence: float = 0.97
    fault: Fault | None = None

    def finding(
        self,
        *,
        locus: Locus,
        since_step: int | None = None,
        evidence: tuple[Evidence, ...],
        limit: Limit | None = None,
        confidence: float | None = None,
        severity: Severity | None = None,
        went_on: str = "",
        **words: object,
    ) -> Finding:
        """Return the finding that a process died in this way; `words` are for the templates.

        `went_on` is a sentence on what went on without the process. A death that a run survives is not critical.
        """
        return Finding(
            kind=self.kind,
            severity=severity or ("warning" if went_on and self.severity == "critical" else self.severity),
            confidence=self.confidence if confidence is None else confidence,
            summary=self.sentence.format(**words) + went_on,
            locus=locus,
            since_step=since_step,
            evidence=evidence,
            limit=limit,
            fault=self.fault,
            advice=tuple(
                replace(item, text=item.text.format(**words), expected=item.expected.format(**words))
                for item in self.advice
            ),
        )


#: Begin of what a process that hangs waits for (`collector.stacks.wait_words`) -> the advice.
_HANG_ADVICE = {
    "blocked on a lock": Advice(
        text="Find out what holds the lock at that line; if it was made before the workers were forked, make it in "
        "worker_init_fn, or use multiprocessing_context='forkserver'",
        expected="no process waits for a lock whose holder is gone, as after fork() of a process with threads",
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
_FORKED_LOCK = Advice(
    text="Start that process by `multiprocessing.get_context('spawn')`, or before the training uses threads",
    expected="a process that is forked from one with threads, as OpenMP starts them, inherits locks that no thread "
    "of it will ever release; one that is spawned has none of them",
)
_READ_OUTPUT = Advice(
    text="Read the child's output while it runs: use subprocess.run or communicate(), or stdout=subprocess.DEVNULL",
    expected="its pipe never fills, and it ends",
)
#: Advice while the run goes on.
_LOOK_AGAIN = Advice(text="Run `tidegauge stacks` twice", expected="it shows whether the process moves, and where")
_LOAD_AHEAD = Advice(
    text="Fetch large remote files before the training, or raise prefetch_factor",
    expected="the training waits less, or not at all, for a slow download",
    effect="changes memory",
)
HANG = Death(kind="hang", sentence="{what} has not trained for {silent}: it is {does}{where}{held}.")
HANG_WITHOUT_HOOKS = replace(
    HANG,
    sentence="{what} {hangs}: it is {does}{where}{held}; no process of the run has used CPU time for {silent}.",
)
HANG_OF_WORKER = replace(
    HANG,
    sentence="{what} {hangs}: it is {does}{where}; {training} has had no batch for {silent}{held}.",
    advice=(
        Advice(
            text="Set DataLoader(timeout=...) until the cause is found",
            expected="training ends with an exception, not silently",
        ),
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
    advice=(
        Advice(
            text="Look in the command's output for an error of the worker's queue, such as \"cannot pickle\": let "
            "collate_fn return tensors, arrays, numbers and strings, without generators, locks and open files",
            expected="the batch can be sent to the training process",
        ),
    ),
    confidence=0.9,
    fault="your code",
)
#: A rank that PyTorch's Flight Recorder names, without stacks of its own.
HANG_OF_RANK = replace(
    HANG,
    sentence="{what}; {since}.",
    advice=(
        Advice(
            text="Look for what rank {rank} does after {last}: in its log, and by `tidegauge stacks` on its node",
            expected="its own line or error shows why it has not entered the collective",
        ),
    ),
)


def with_remedy(hang: Finding, waits: str | None, *, goes_on: bool) -> Finding:
    """Return a hang with the advice for what its process waits for, where the cause lies, and how to see more."""
    kind = next((begin for begin in _HANG_ADVICE if (waits or "").startswith(begin)), None)
    remedies = [] if kind is None else [_HANG_ADVICE[kind]]
    if kind == "waiting for a child" and FULL_PIPE in (waits or ""):
        remedies = [_READ_OUTPUT]
    if kind == "blocked on a lock" and hang.locus.role != "worker":
        remedies = [_OWN_LOCK if hang.locus.role == "main" else _FORKED_LOCK]
    advice = [replace(remedy, text=remedy.text.format(pid=hang.locus.pid)) for remedy in remedies]
    if goes_on:
        advice.append(_LOOK_AGAIN)
    return replace(
        hang, advice=(*advice, *hang.advice), fault=None if kind is None else _HANG_FAULTS.get(kind, "your code")
    )


def of_lost_thread(hang: Finding, exception: str, when: str) -> Finding:
    """Return the hang of a process that waits for its own threads, one of which ended with an exception."""
    advice = Advice(
        text="Hand the exceptions of that thread to the training, as through the queue, and raise them there",
        expected="the training ends with the error, and does not wait for a thread that has ended",
    )
    summary = f"{hang.summary} One of its threads ended {when} with {exception}"
    return replace(hang, summary=summary, advice=(advice, *hang.advice[1:]))


def of_lone_thread(hang: Finding, awaits: str | None) -> Finding:
    """Return the hang of a process that waits for one of its threads, and has none besides the main thread."""
    if awaits == AWAITS_LOOP:
        told = "The loop has no connection, pipe, child or timer, and no other Python thread could wake it."
        return replace(hang, summary=f"{hang.summary} {told}")
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
    summary = f"{hang.summary} The {process} has no other Python thread that could end this wait."
    return replace(hang, summary=summary, advice=(advice, *hang.advice[1:]))


def of_lost_process(hang: Finding, pids: Sequence[int], *, of_pool: bool) -> Finding:
    """Return the hang of a process that waits for a Pool or a queue; its children `pids` ended at once."""
    is_one = len(pids) == 1
    named = f"Its child process (pid {pids[0]})" if is_one else f"{len(pids)} of its child processes"
    them = f"process {pids[0]}" if is_one else "them"
    causes = "an error or an exit in the code that it ran, a signal, or the kernel for lack of memory (`dmesg`)"
    find = f"what ended {them}: {causes}"
    if of_pool:
        effect = "and a Pool waits for ever for the task of a process that died"
        text = f"Use concurrent.futures.ProcessPoolExecutor in place of multiprocessing.Pool, and find out {find}"
        expected = "a lost process raises BrokenProcessPool instead of a hang"
    else:
        effect = "and a queue does not tell that the process that filled it is gone"
        text = f"Find out {find}; give `get` a timeout, and look then at `is_alive()` of that process"
        expected = "the training ends with an error, and does not wait for a process that has ended"
    advice = Advice(text=text, expected=expected)
    return replace(
        hang, summary=f"{hang.summary} {named} ended just then, {effect}.", advice=(advice, *hang.advice[1:])
    )


def of_slow(hang: Finding, transfer: str) -> Finding:
    """Return the finding on a process that still moves data: it is slow, and nothing says that it hangs."""
    advice = tuple(item for item in hang.advice if item == _LOOK_AGAIN)
    return replace(hang, summary=f"{hang.summary} {transfer}", advice=(*advice, _LOAD_AHEAD))


RAISE_LIMIT = Advice(text="Raise the memory limit of the job", expected="the demand fits")
#: Advice on a process that the kernel killed for lack of memory, if it leaked.
FIX_LEAK = Advice(text="Fix {kind} first: {process} grew until its end", expected="its growth stops")
#: Advice on a training process that grew until the kernel killed it, with no leak that is certain.
FIND_KEPT = Advice(
    text="Find what the training process keeps from step to step: batches, outputs or losses in a list, a cache "
    "without bound. `tidegauge run --investigate -- COMMAND` names its lines if it grows for a minute or more",
    expected="it needs no more memory than a few steps take",
)
#: The same of a worker.
FIND_CACHE = Advice(
    text="Look for a cache in the dataset (`__getitem__` that stores what it read, lru_cache without bound), and "
    "for lists and dicts of Python objects, which a forked worker copies by reading",
    expected="the worker needs no more memory than a few batches take",
)
#: Advice on a training process that took most of its growth between its last step or batch and the kill.
TAKE_LESS_AT_ONCE = Advice(
    text="Look at what the training did after that step or batch: a copy of the state for a checkpoint, an "
    "evaluation, results that are joined, or a batch larger than those before",
    expected="it takes less memory at once",
)
OOM_KILL = Death(
    kind="host-oom-kill",
    sentence="The kernel killed {what} for lack of memory{last_held}{the_limit}.",
    advice=(
        Advice(text="Hold less memory in that process", expected="demand stays below the limit"),
        RAISE_LIMIT,
    ),
)
OOM_KILL_OF_WORKER = replace(
    OOM_KILL,
    advice=(
        Advice(
            text="Lower num_workers or prefetch_factor, or hold the dataset in tensors or memory-mapped arrays",
            expected="each worker removed frees the memory that it held{this_one}",
        ),
        RAISE_LIMIT,
    ),
)
#: Slurm's own count passed the job's limit, where no control group holds the limit.
SLURM_KILL = replace(
    OOM_KILL,
    sentence="Slurm probably killed {what}: its job {job} used {used} of its {limit_size}. Slurm adds up the "
    "resident memory of all processes, with shared pages in each of them.",
    confidence=0.85,
)
BUS_ERROR = Death(
    kind="shm-bus-error",
    sentence="{what} was killed by SIGBUS when /dev/shm was full: {used} of {total} were in use one "
    "sample earlier.",
    confidence=0.95,
)
BUS_ERROR_BETWEEN_SAMPLES = replace(
    BUS_ERROR,
    sentence="{what} was killed by SIGBUS, probably when /dev/shm was full: {used} of {total} were in use, with "
    "what it mapped after the last sample.",
    confidence=0.85,
)
CRASHED = Death(
    kind="crashed",
    sentence="{what} ended {by}.",
    advice=(
        Advice(
            text="Run again with PYTHONFAULTHANDLER=1",
            expected="it prints the Python stack at the moment of the fault",
        ),
    ),
)
#: Signal of a fault in native code (signal(7)) -> its usual cause.
FAULT_ADVICE: Mapping[int | None, Advice] = {
    SIGABRT: Advice(
        text="Look at the end of the command's own output: native code that finds an error says which, and aborts",
        expected="it names the failed check",
    ),
    SIGBUS: Advice(
        text="Check the room in /dev/shm, and whether a file that is memory-mapped was cut short",
        expected="every mapped page can be read",
    ),
    SIGILL: Advice(
        text="Install packages that are built for this CPU: one uses an instruction that it lacks",
        expected="the CPU has each instruction (`lscpu` lists them)",
    ),
}
WORKER_CRASHED = replace(CRASHED, kind="worker-killed")
WORKER_INTERRUPTED = replace(CRASHED, kind="worker-killed", advice=())
WORKER_KILLED = Death(
    kind="worker-killed",
    sentence="{what} ended {by}.",
    advice=(
        Advice(
            text="Find the sender of the signal in the system log (`journalctl -e`): a job scheduler, an operator, "
            "a memory guard such as earlyoom or systemd-oomd",
            expected="it names the cause; the kernel's out-of-memory killer is ruled out; {loss}",
        ),
    ),
)
#: A worker that ended by an exit status of its own, not by a signal.
WORKER_EXITED = replace(
    WORKER_KILLED,
    sentence="{what} ended by itself with exit status {code}, without an exception that DataLoader could pass on.",
    advice=(
        Advice(
            text="Look for sys.exit, exit or os._exit in the dataset, collate_fn and worker_init_fn and in the "
            "libraries that they call, and at the end of the command's own output",
            expected="an exception instead of the exit names the line; {loss}",
        ),
    ),
    fault="your code",
)
KILLED = Death(
    kind="killed",
    sentence="{what} ended {by}.",
    advice=(
        Advice(
            text="Find the sender of the signal in the system log (`journalctl -e`): the job scheduler's time or "
            "memory limit, or an operator",
            expected="it names the cause; the kernel's out-of-memory killer is ruled out",
        ),
    ),
)
STOPPED = replace(KILLED, severity="warning", fault="outside")
INTERRUPTED = replace(KILLED, severity="info", advice=())
CANCELLED = replace(INTERRUPTED, sentence="{what} ended {by}, by which Tidegauge cancelled the training that hung.")
EXCEPTION = Death(
    kind="crashed",
    sentence="{what} ended with {exception}{site}{headline}",
    advice=(
        Advice(
            text="Read the traceback on the page Post-mortem, or in events/{host}.{pid}.jsonl of the run",
            expected="it shows the calls that led to the line that raised",
        ),
    ),
)
FAILED_EXIT = Death(
    kind="crashed",
    sentence="The command ended with exit status {status}, without an uncaught Python exception.",
    advice=(Advice(text="Look at the end of the command's own output", expected="it gives the reason"),),
    confidence=0.8,
)
#: No training process recorded its end.
EXIT_WITHOUT_HANDLERS = replace(
    FAILED_EXIT,
    sentence="The command ended with exit status {status}, without an exception and without running exit handlers, "
    "as by os._exit or an exit in native code.",
)
EXIT_WITH_STATUS = replace(FAILED_EXIT, sentence="{what} called sys.exit{site}: {message}.", confidence=0.95)
EXIT_WITH_MESSAGE = replace(
    FAILED_EXIT, sentence="{what} called sys.exit{site}: {message}", advice=(), confidence=0.95
)
#: By the convention of shells, 128 + n stands for signal n.
EXIT_AFTER_SIGNAL = replace(
    STOPPED,
    kind="crashed",
    sentence="The command ended by itself with exit status {status}, which stands for {signal} (128 + {number}): "
    "it probably handled that signal.",
    confidence=0.8,
)
TIMED_OUT = replace(
    STOPPED,
    sentence="`timeout` ended the command, since its time was over (exit status {status}).",
    advice=(
        Advice(
            text="Give `timeout` more time, or save a checkpoint when SIGTERM comes, if the script does not yet",
            expected="the training ends by itself, or goes on from there",
        ),
    ),
)
EXIT_AFTER_INTERRUPT = replace(EXIT_AFTER_SIGNAL, severity="info", advice=())
COLLECTOR_KILLED = Death(
    kind="killed",
    sentence="Tidegauge's collector (pid {pid}) was killed; the training is unharmed and its journals go on.",
    advice=(
        Advice(
            text="Run `tidegauge collect latest`",
            expected="sampling of processes and host resumes; steps, batches and fetches were not interrupted",
        ),
    ),
    severity="warning",
    confidence=0.95,
)
COLLECTOR_KILLED_TOO = Death(
    kind="killed",
    sentence="Tidegauge's collector (pid {pid}) was killed too. No record is lost.",
    severity="info",
    confidence=0.95,
)
#: An attempt after which the launcher restarted all ranks, in which no rank recorded an exception.
ATTEMPT_KILLED = Death(
    kind="killed",
    sentence="Attempt {attempt} ended after {steps}{how}.{silent} All ranks started again; their steps count "
    "from 0.",
    advice=(
        Advice(
            text="Load the newest checkpoint when the script starts, and save one more often",
            expected="a new attempt repeats only the steps since then",
        ),
    ),
    severity="warning",
    confidence=0.85,
)
ATTEMPT_CRASHED = replace(ATTEMPT_KILLED, kind="crashed", confidence=0.95)
