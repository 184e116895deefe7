"""The kinds of death, each with its sentence and its advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from signal import (
    SIGABRT,
    SIGALRM,
    SIGBUS,
    SIGHUP,
    SIGILL,
    SIGPIPE,
    SIGPROF,
    SIGUSR1,
    SIGUSR2,
    SIGVTALRM,
    SIGXCPU,
    SIGXFSZ,
)

from collector.findings import Advice, Evidence, Fault, Finding, Limit, Locus, Severity, advise


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


RAISE_LIMIT = Advice(text="Raise the memory limit of the job", expected="the demand fits")
#: Advice on a process that the kernel killed for lack of memory, if it leaked.
FIX_LEAK = Advice(text="Fix {kind} first: {process} grew until its end", expected="its growth stops")
FIX_CUDA_OOM = Advice(
    text="See cuda-oom first: CUDA memory ran out in this process, and no step ended between that and this error",
    expected="the script gets past it, if this error follows from it",
)
#: Advice on a DataLoader that timed out, where no stacks show at what.
READ_STACKS = Advice(
    text="Run `tidegauge stacks` while the training waits, with a longer timeout",
    expected="it names the awaited worker, and the line that it executes",
)
#: The same where they show a worker that may merely be slow.
SEE_LINE = Advice(
    text="Look at the hang finding first: it names the line at which the awaited worker stood",
    expected="that line is what made the batch late",
)
FIX_HANG = Advice(
    text="Fix the hang first: the training made no progress before its end",
    expected="the training goes on",
)
#: The same where the silence may be no hang yet.
EXPLAIN_SILENCE = Advice(
    text="Look at the hang finding first: the training made no progress when its time was over",
    expected="more time helps only if the training goes on by itself",
)
#: Advice where ranks wait in a collective for one that has left the loop, or has ended.
EQUAL_STEPS = Advice(
    text="Let all ranks do the same number of steps: shards of equal size (DistributedSampler, drop_last=True), or "
    "`with model.join():` around the loop",
    expected="no rank waits in a collective for one that has left the loop",
)
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
#: Advice on a training process that took most of its growth with batches after its last step.
FIND_OUTPUTS = Advice(
    text="Find what is kept of the batches after the last step, as of an evaluation: a list of outputs or losses "
    "grows with the dataset. Keep numbers (.item()), or write the results to a file as they come",
    expected="it needs no more memory than a few batches take",
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
    advice=advise(
        text="Read the Python stack in the command's output; if it has none, run again with PYTHONFAULTHANDLER=1",
        expected="the stack shows the line at the moment of the fault",
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
#: Advice on a fault after the end of the script.
END_BEFORE_EXIT = Advice(
    text="Join the script's threads at its end, daemon threads too. With torch.distributed, call "
    "dist.destroy_process_group() there",
    expected="no thread is in native code when the interpreter ends, which can abort the process",
)
WORKER_CRASHED = replace(CRASHED, kind="worker-killed")
WORKER_INTERRUPTED = replace(CRASHED, kind="worker-killed", advice=())
WORKER_KILLED = Death(
    kind="worker-killed",
    sentence="{what} ended {by}.",
    advice=advise(
        text="Find the sender of the signal in the system log (`journalctl -e`): a job scheduler, an operator, "
        "a memory guard such as earlyoom or systemd-oomd",
        expected="it names the cause; the kernel's out-of-memory killer is ruled out; {loss}",
    ),
)
#: A worker that ended by an exit status of its own, not by a signal.
WORKER_EXITED = replace(
    WORKER_KILLED,
    sentence="{what} ended by itself with exit status {code}, without an exception that DataLoader could pass on.",
    advice=advise(
        text="Look for sys.exit, exit or os._exit in the dataset, collate_fn and worker_init_fn and in the "
        "libraries that they call, and at the end of the command's own output",
        expected="an exception instead of the exit names the line; {loss}",
    ),
    fault="your code",
)
KILLED = Death(
    kind="killed",
    sentence="{what} ended {by}.",
    advice=advise(
        text="Find the sender of the signal in the system log (`journalctl -e`): the job scheduler's time or "
        "memory limit, or an operator",
        expected="it names the cause; the kernel's out-of-memory killer is ruled out",
    ),
)
#: The same under a program whose own status is 0, such as a shell, with that of the last program of a pipeline.
KILLED_UNDER_PROGRAM = replace(
    KILLED,
    sentence="{what} ended in the middle of an epoch without recording its end, as after a signal or os._exit.",
    advice=advise(
        text="Run it with PYTHONFAULTHANDLER=1, and look at the log and the exit status of the program that "
        "started it. Begin a shell script with `#!/bin/bash` and `set -eo pipefail`",
        expected="the stack shows the line of a crash, and the log or the exit status names the signal",
    ),
)
STOPPED = replace(KILLED, severity="warning", fault="outside")
INTERRUPTED = replace(KILLED, severity="info", advice=())
CPU_LIMIT = replace(
    KILLED,
    sentence="{what} ended {by}: it had used the CPU time that it may use.",
    advice=advise(
        text="Raise the CPU time that a process may use (`ulimit -t`, or the scheduler's own limit), or train "
        "where there is none. Login nodes often set one",
        expected="the training goes on",
    ),
    fault="your settings",
)
FILE_LIMIT = replace(
    CPU_LIMIT,
    sentence="{what} ended {by}: it wrote beyond the size that a file may have (RLIMIT_FSIZE).",
    advice=advise(
        text="Raise the size that a file may have (`ulimit -f`), or write several files",
        expected="the training goes on",
    ),
)
TERMINAL_CLOSED = replace(
    STOPPED,
    sentence="{what} ended {by}, which the kernel sends when a terminal or its connection is closed.",
    advice=advise(
        text="Start the training in `tmux`, with `nohup` or as a batch job",
        expected="it goes on when the terminal closes",
    ),
)
UNHANDLED = replace(
    STOPPED,
    sentence="{what} ended {by}, for which it had no handler.",
    advice=advise(
        text="Save a checkpoint in a handler (`signal.signal`): schedulers send this signal before they end a job",
        expected="the signal no longer ends the training",
    ),
)
TIMER = replace(
    STOPPED,
    sentence="{what} ended {by}: a timer ran out for which it had no handler.",
    advice=advise(
        text="Look for signal.alarm and signal.setitimer in the script and its libraries, and handle the "
        "signal or cancel the timer",
        expected="the timer no longer ends the training",
    ),
    fault="your code",
)
READER_GONE = replace(
    STOPPED,
    sentence="{what} ended {by}: it wrote to a pipe or connection whose reader was gone.",
    advice=advise(
        text="Check what reads its output, such as the program after a `|`, and why that ended first",
        expected="the output has a reader until the training ends",
    ),
)
#: Signal that tells more than that someone sent it (signal(7)) -> the end of a training process by it.
ENDED_BY: Mapping[int | None, Death] = {
    SIGXCPU: CPU_LIMIT,
    SIGXFSZ: FILE_LIMIT,
    SIGHUP: TERMINAL_CLOSED,
    SIGPIPE: READER_GONE,
    SIGUSR1: UNHANDLED,
    SIGUSR2: UNHANDLED,
    SIGALRM: TIMER,
    SIGVTALRM: TIMER,
    SIGPROF: TIMER,
}
CANCELLED = replace(INTERRUPTED, sentence="{what} ended {by}, by which Tidegauge cancelled the training that hung.")
EXCEPTION = Death(
    kind="crashed",
    sentence="{what} ended with {exception}{site}{headline}",
    advice=advise(
        text="Read the traceback on the page Post-mortem, or in events/{host}.{pid}.jsonl of the run",
        expected="it shows the calls that led to the line that raised",
    ),
)
FAILED_EXIT = Death(
    kind="crashed",
    sentence="The command ended with exit status {status}, without an uncaught Python exception.",
    advice=advise(text="Look at the end of the command's own output", expected="it gives the reason"),
    confidence=0.8,
)
#: No training process recorded its end.
EXIT_WITHOUT_HANDLERS = replace(
    FAILED_EXIT,
    sentence="The command ended with exit status {status}, without an exception and without running exit handlers, "
    "as by os._exit or an exit in native code.",
)
#: A rank whose launcher names the status.
RANK_EXITED = replace(
    EXIT_WITHOUT_HANDLERS,
    sentence=EXIT_WITHOUT_HANDLERS.sentence.replace("The command", "{what}"),
    confidence=0.95,
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
    advice=advise(
        text="Give `timeout` more time, or save a checkpoint when its signal comes, if the script does not yet",
        expected="the training ends by itself, or goes on from there",
    ),
)
EXIT_AFTER_INTERRUPT = replace(EXIT_AFTER_SIGNAL, severity="info", advice=())
COLLECTOR_KILLED = Death(
    kind="killed",
    sentence="Tidegauge's collector (pid {pid}) was killed; the training is unharmed and its journals go on.",
    advice=advise(
        text="Run `tidegauge collect latest`",
        expected="sampling of processes and host resumes; steps, batches and fetches were not interrupted",
    ),
    severity="warning",
    confidence=0.95,
)
#: The same once nothing is left to do about it.
COLLECTOR_WAS_KILLED = Death(
    kind="killed",
    sentence="Tidegauge's collector (pid {pid}) was killed; the training was unharmed. From then until {until}, "
    "processes and host were not sampled.",
    severity="info",
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
    advice=advise(
        text="Load the newest checkpoint when the script starts, and save one more often",
        expected="a new attempt repeats only the steps since then",
    ),
    severity="warning",
    confidence=0.85,
)
ATTEMPT_CRASHED = replace(ATTEMPT_KILLED, kind="crashed", confidence=0.95)
