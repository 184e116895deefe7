"""Every kind of event that Tidegauge records, declared once.

Events are rare, structured facts: one JSON object per line in `events/<host>.<pid>.jsonl`, and the table `event`
of the lake. `EventLog.append` and `RunTables.events_of` take no other kinds, and docs/events.md is generated from
here. A field that is not known is null.

This module is pure declarations and imports the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "process-attached",
    "backward-pass",
    "process-start",
    "process-exit",
    "exception",
    "thread-exception",
    "exit-message",
    "loader",
    "loader-again",
    "loader-set",
    "setting-asked",
    "epoch-start",
    "loads-ahead",
    "workers-ended",
    "worker-start",
    "worker-ready",
    "worker-exit",
    "worker-died",
    "loader-error",
    "cuda-device",
    "cuda-oom",
    "snapshot",
    "hyper-parameters",
    "phase",
    "checkpoint",
    "compilation",
    "hook-disabled",
    "records-lost",
    "collector-start",
    "collector-stop",
    "process-seen",
    "memory-limit",
    "stacks",
    "stack-series",
    "flight-recorder",
    "hang-cancelled",
    "before-oom",
    "risk-listener",
    "risk-call",
    "left-running",
    "command-exit",
    "collector-problem",
]


@dataclass(frozen=True)
class Field:
    """One field of an event: `kind` is its JSON type, or null."""

    name: str
    kind: Literal["bool", "int", "float", "str", "list", "object"]
    meaning: str


@dataclass(frozen=True)
class Event:
    """One kind of event: which process writes it, on what occasion, and its fields."""

    written_by: str
    occasion: str
    fields: tuple[Field, ...]


#: Fields of every event. They name the process that wrote it.
IDENTITY = (
    Field("time_ns", "int", "time of the event on CLOCK_MONOTONIC"),
    Field("kind", "str", "kind of the event"),
    Field("host", "str", "host name of the writing process"),
    Field("pid", "int", "process id of the writing process"),
    Field("start_ticks", "int", "start time of that process since boot, /proc/PID/stat field 22"),
    Field("rank", "int", "RANK of the writing process, null outside a distributed job"),
)

_ATTACHED, _TRAINING, _WORKER, _COLLECTOR = "any attached process", "training process", "worker", "collector"
_ARGV = Field("argv", "list", "command line, with secrets redacted")
_PARENT = Field("parent_pid", "int", "process id of the parent")
_LOADER = Field("loader", "int", "DataLoader, numbered from 0 in the order of first use in its process")
_EPOCH = Field("epoch", "int", "pass over that loader, from 0")
_WORKER_ID = Field("worker", "int", "worker id that DataLoader gave")
_RAISED = (
    Field("type", "str", "class of the exception"),
    Field("message", "str", "message of the exception"),
    Field("site", "str", "`file:line, in function` of the innermost frame in the user's own code"),
    Field("traceback", "str", "last part of the traceback"),
)
_SETTING = (
    Field("num_workers", "int", "workers"),
    Field("prefetch_factor", "int", "batches that each worker prefetches"),
)
_LOST = Field("lost_count", "int", "records that this process could not write")
_ERROR = Field("error", "str", "type and message of the error")
_COMMAND_PID = Field("command_pid", "int", "process id of the command")
_RISK = Field("risk", "str", "kind of the finding that the limit will be met")
_DEVICE = Field("device", "int", "device, numbered as the command of the run sees it")


def _event(written_by: str, occasion: str, *fields: Field) -> Event:
    return Event(written_by, occasion, fields)


EVENTS: dict[EventKind, Event] = {
    "process-attached": _event(
        _ATTACHED,
        "it imported torch with the hooks",
        _ARGV,
        _PARENT,
        Field("cpu_limit_seconds", "int", "hard RLIMIT_CPU in seconds, null without one"),
    ),
    "backward-pass": _event(_ATTACHED, "its first backward pass, if it has not recorded `process-start` by then"),
    "process-start": _event(
        _TRAINING,
        "first DataLoader iterator, optimizer step or third forward pass of one module",
        _ARGV,
        Field("python", "str", "version of Python"),
        Field("torch", "str", "version of torch"),
        Field("accelerator", "str", "accelerator that torch is built for, with its version; empty for the CPU"),
        Field("local_rank", "int", "LOCAL_RANK of the process"),
        Field("world_size", "int", "WORLD_SIZE of the process"),
        Field("attempt", "int", "restarts by an elastic launcher so far"),
        _PARENT,
        Field("capabilities", "object", "name of a hook or hook point -> true if this torch has it"),
    ),
    "process-exit": _event(
        _TRAINING,
        "interpreter exit, or `detach()` (not on a kill)",
        _LOST,
        Field("detached", "bool", "true: the process goes on"),
    ),
    "exception": _event(_ATTACHED, "an exception that was not caught", *_RAISED),
    "thread-exception": _event(
        _ATTACHED,
        "an exception ended one of its threads, and the process goes on",
        Field("thread", "str", "name of the thread"),
        *_RAISED,
    ),
    "exit-message": _event(
        _ATTACHED,
        "the main thread called `sys.exit` with a message, which makes the exit status 1, or with a status above 0",
        Field("message", "str", "the message, or the status in words"),
        Field("status", "int", "the status; null with a message"),
        Field("site", "str", "`file:line, in function` of the call"),
        Field("handled", "str", "type and message of the exception that was being handled; null if none was"),
    ),
    "loader": _event(
        _TRAINING,
        "first use of a DataLoader, and of each other number of workers or prefetch factor of it, which gives it "
        "another number; one created like another that is gone takes over its number",
        _LOADER,
        Field("replaces", "int", "number of the same DataLoader with its setting before; null at its first use"),
        *_SETTING,
        Field("batch_size", "int", "samples in a batch"),
        Field("pin_memory", "bool", "batches are copied to pinned memory"),
        Field("persistent_workers", "bool", "workers outlive the epoch"),
        Field("in_order", "bool", "batches come in the order of their indices"),
        Field("timeout_seconds", "float", "longest wait for a batch (`timeout`); null: none"),
        Field("start_method", "str", "how workers start: fork, spawn or forkserver"),
        Field("dataset", "str", "class of the dataset"),
        Field("dataset_length", "int", "samples in the dataset"),
        Field("sampler", "str", "class of the sampler, or of a batch sampler that the script gives"),
        Field("shuffle", "bool", "it is a DistributedSampler that shuffles; null for other samplers"),
        Field("collate", "str", "name of `collate_fn`"),
        Field("iterable", "bool", "the dataset is iterable"),
        Field("file", "str", "file in which the loader was created"),
        Field("line", "int", "line on which the loader was created"),
        Field("variable", "str", "variable that the loader is assigned to on that line"),
    ),
    "loader-again": _event(_TRAINING, "a DataLoader takes over the number of one that is gone", _LOADER),
    "loader-set": _event(
        _TRAINING,
        "a DataLoader gets the setting that `tidegauge run --workers auto` found, or cannot get it",
        Field("loader", "int", "number of the DataLoader with this setting; with the one before if it was not set"),
        Field("replaces", "int", "number of the DataLoader with its setting before"),
        *_SETTING,
        Field("replaced_num_workers", "int", "workers before"),
        Field("replaced_prefetch_factor", "int", "batches that each worker prefetched before"),
        Field("epochs_count", "int", "passes over the DataLoader that began before"),
        Field("is_undo", "bool", "true: the setting from before, since the throughput fell"),
        Field("obstacle", "str", "why it was not set; null if it was"),
        Field("measured", "float", "measured throughput before, in batches per second"),
        Field(
            "expected",
            "object",
            "`batches_per_second` predicted, with the ends `low` and `high` of its 90 % interval; null for an undo",
        ),
    ),
    "setting-asked": _event(
        _TRAINING, "it asks for the settings of its DataLoaders, with `training_harness.recommended`; once"
    ),
    "epoch-start": _event(
        _TRAINING,
        "an iterator with workers is created or reset",
        _LOADER,
        _EPOCH,
        Field("worker_pids", "list", "process ids of the workers, in the order of their worker ids"),
        Field("begun_ns", "int", "CLOCK_MONOTONIC before the workers were started"),
    ),
    "loads-ahead": _event(_TRAINING, "a thread that does not train takes a batch, once per loader", _LOADER),
    "workers-ended": _event(
        _TRAINING,
        "an iterator has shut its workers down",
        _LOADER,
        _EPOCH,
        Field("begun_ns", "int", "CLOCK_MONOTONIC before the first worker was told to end"),
    ),
    "worker-start": _event(_WORKER, "the worker loop begins", _LOADER, _EPOCH, _WORKER_ID, _PARENT),
    "worker-ready": _event(
        _WORKER,
        "it asks for its first index",
        _LOADER,
        _EPOCH,
        _WORKER_ID,
        Field("setup_ns", "int", "time since `worker-start`: `worker_init_fn`, iterator of an iterable dataset"),
    ),
    "worker-exit": _event(
        _WORKER,
        "the worker loop returned (not on a kill)",
        _LOADER,
        _WORKER_ID,
        Field("reason", "str", "`done`, `parent-gone`, or the exception's name"),
        _LOST,
    ),
    "worker-died": _event(
        _TRAINING,
        "DataLoader found a worker dead",
        _LOADER,
        _EPOCH,
        _WORKER_ID,
        Field("worker_pid", "int", "process id of the worker"),
        Field("exit_code", "int", "exit code of the worker; negative: the signal"),
        Field("last_index", "int", "last batch that it handed over"),
    ),
    "loader-error": _event(
        _TRAINING,
        "`next()` of a DataLoader raised an exception, StopIteration only of a dataset with indices, none about a "
        "dead worker: at the first of its type and line, whenever the count has doubled, and at the end",
        _LOADER,
        Field("type", "str", "class of the exception; in a worker, of the one there"),
        Field("message", "str", "last line of its message; null at the end"),
        Field("site", "str", "`file:line, in function` of the innermost frame in the user's own code"),
        Field("in_worker", "bool", "true: a worker raised it"),
        Field("count", "int", "such exceptions so far, caught by the training or not"),
        Field("error_time_ns", "int", "CLOCK_MONOTONIC at the last of them"),
    ),
    "cuda-device": _event(
        _TRAINING,
        "a device is in use, or the share of it that the process may use has changed",
        _DEVICE,
        Field("total_bytes", "int", "memory of the device"),
        Field("allowed_ratio", "float", "`set_per_process_memory_fraction`; null if the allocator does not say"),
    ),
    "cuda-oom": _event(
        _TRAINING,
        "CUDA ran out of memory ([memory.md](memory.md))",
        _DEVICE,
        Field("step", "int", "step in which it happened"),
        Field("caught", "bool", "true: training went on; false: it ended; null: not known"),
        Field("error_time_ns", "int", "CLOCK_MONOTONIC at the error"),
        Field("errors_count", "int", "errors since the last such event"),
        Field("requested_bytes", "int", "size of the request"),
        Field("limit_bytes", "int", "memory of the device, or the share that the process may use"),
        Field("free_bytes", "int", "free memory of the device, at the error"),
        Field("allocated_bytes", "int", "memory allocated by PyTorch, at the error"),
        Field("reserved_bytes", "int", "memory reserved by PyTorch, at the error"),
        Field("loaded_state_bytes", "int", "memory of states that `load_state_dict` has copied, at the error"),
        Field("type", "str", "class of the exception"),
        Field("site", "str", "line of the script that took the memory, or called the backward pass"),
        Field("message", "str", "message of the exception; absent if it was caught"),
        Field("thread", "str", "name of the thread that it ended, if that is not the main one"),
        Field("in_handler", "bool", "true: it was raised while another such error was handled"),
        Field("path", "str", "snapshot of the allocator, below the run directory"),
        Field("bytes", "int", "size of the snapshot"),
        Field("pickle", "str", "the same snapshot for pytorch.org/memory_viz"),
        Field("is_snapshot_later", "bool", "true: the snapshot was taken after the error"),
        Field("snapshot_error", "str", "why there is no snapshot"),
    ),
    "snapshot": _event(
        "training process, worker",
        "it answered `tidegauge snapshot`",
        Field("request", "str", "id of the request"),
        Field("what", "str", "`allocator`, `census`, `growth` or `profile`"),
        Field("role", "str", "role of the process"),
        Field("loader", "int", "loader of the worker"),
        Field("worker", "int", "worker id"),
        Field("step", "int", "step of the training process, or batch of the worker"),
        Field("begun_ns", "int", "begin of the answer, or of a `growth` or `profile`, which slow the process down"),
        Field("held_ns", "int", "time that training waited for the answer, at its end"),
        Field("path", "str", "file below the run directory"),
        Field("bytes", "int", "size of that file"),
        Field("pickle", "str", "the allocator's snapshot for pytorch.org/memory_viz"),
        Field("trace", "str", "trace of the profiler"),
        Field("trace_error", "str", "why there is no trace"),
        Field("error", "str", "why there is no answer; then there is no file"),
    ),
    "hyper-parameters": _event(
        "first rank, with a callback",
        "training begins",
        Field("framework", "str", "framework of the callback"),
        Field("values", "object", "hyper-parameters, as the framework names them"),
    ),
    "phase": _event(
        "training process, with a callback",
        "the framework enters another phase",
        Field("phase", "str", "`train`, `validation`, `test`, `predict` or `done`"),
        Field("epoch", "int", "epoch as the framework counts"),
        Field("step", "int", "step as the framework counts"),
    ),
    "checkpoint": _event(
        _TRAINING,
        "`torch.save` returned; at most one event per second; after 1,000 events, one per 10 s",
        Field("begun_ns", "int", "CLOCK_MONOTONIC at its begin"),
        Field("saves_count", "int", "saves in the main thread since its last event; null in another thread"),
        Field("saves_ns", "int", "time of these"),
    ),
    "compilation": _event(
        _ATTACHED,
        "`torch.compile` compiled a function in the thread that trains, or a backward pass; after 1,000 of them, "
        "at most one event in 10 s",
        Field("begun_ns", "int", "CLOCK_MONOTONIC at its begin"),
        Field("function", "str", "`file:line, in function` of the function; null for a backward pass"),
        Field(
            "reason", "str", "condition that the code compiled before asks for and that failed; null the first time"
        ),
        Field(
            "gave_up", "bool", "true: the limit of recompilations is met; calls that no version fits run uncompiled"
        ),
        Field("again_count", "int", "compilations of functions compiled before, so far, in this process"),
        Field("again_ns", "int", "their time, with that of their backward passes, in nanoseconds"),
    ),
    "hook-disabled": _event(
        _ATTACHED, "a hook failed and was removed", Field("hook", "str", "name of the hook"), _ERROR
    ),
    "records-lost": _event(
        "any attached process, the collector",
        "records could not be written: at the first loss, whenever the count has doubled, and at the end",
        Field("stream", "str", "stream of the records"),
        Field("count", "int", "records lost so far"),
        Field(
            "reason",
            "str",
            "`write-failed`; `not-collected`: the journals reached their bound and no collector took them in; "
            "`not-a-record`: a defect of Tidegauge",
        ),
    ),
    "collector-start": _event(
        _COLLECTOR,
        "it begins to follow the run",
        Field("resumed", "bool", "true: the run had a collector before"),
        Field("investigates", "bool", "true: by `--investigate`, it asks processes that leak for the lines"),
        Field("acts_before_oom", "bool", "true: `--before-oom` gives an action before a limit is met"),
        _COMMAND_PID,
    ),
    "collector-stop": _event(
        _COLLECTOR, "it ends as planned", Field("records_count", "int", "records that it wrote to the lake")
    ),
    "process-seen": _event(
        _COLLECTOR,
        "it saw a process twice that is in no event yet, and again after that process loaded torch; at most "
        "500 per run",
        Field("process_pid", "int", "process id"),
        Field("process_start_ticks", "int", "start time of that process"),
        _ARGV,
        Field("is_python", "bool", "it runs a Python interpreter"),
        Field("has_torch", "bool", "it has loaded torch"),
        Field(
            "obstacle",
            "str",
            "what keeps the hooks out where Tidegauge is not installed: `PYTHONPATH replaced`, `-E`, `-I`, `-S`, "
            "`environment cleared`, `another run`, `disabled`, `PID namespace`, `no Python`, or null",
        ),
    ),
    "memory-limit": _event(
        _COLLECTOR,
        "the memory limit of a control group binds, and when another one does",
        Field("path", "str", "path of the group; `/` where a container hides it"),
        Field("limit_bytes", "int", "limit in bytes"),
        Field("container", "str", "kind of container that the command is in: `docker`, `kubernetes`, `podman`"),
    ),
    "stacks": _event(
        _COLLECTOR,
        "a training process has written no step and no batch for suspiciously long, or the processes of a run "
        "without hooks have used no CPU time while work is pending; three in a row",
        Field("is_last", "bool", "true: the last of its series"),
        Field(
            "silent",
            "list",
            "`pid`, `start_ticks`, `silent_seconds`, `longest_seconds` (the longest silence before) and "
            "`budget_seconds` (silence that the pace explains) of each such process",
        ),
        Field("idle_seconds", "float", "time in which a run without hooks has used no CPU time; null with hooks"),
        Field(
            "helpers_cpu_seconds", "float", "CPU time of the run's other processes so far, without the collector"
        ),
        Field("helpers_runnable_count", "int", "those of them that run or wait for a core"),
        Field(
            "processes",
            "list",
            "`pid`, `start_ticks`, `role`, `rank`, `loader`, `worker`, `parent_pid`, `cpu_seconds`, "
            "`moved_seconds_ago` (since it, or a child of it, moved bytes; null if not in this silence), "
            "`received_seconds_ago` (the same of its TCP connections alone), "
            "`threads` (`thread`, `waits`, `frames`) of each training process and worker, or of each Python "
            "process in a run without hooks; `error` and `waits` of the main thread where they cannot be read",
        ),
    ),
    "stack-series": _event(
        _COLLECTOR,
        "stacks of a training process and its workers were taken for some seconds, to name the lines behind a wait",
        Field("of_pid", "int", "process id of the training process"),
        Field("of_start_ticks", "int", "start time of that process"),
        Field("times_ns", "list", "moments at which stacks were taken, on CLOCK_MONOTONIC"),
        Field(
            "frames",
            "list",
            "each frame once: function, path, line, source line (of the user's own files), and the stage or the "
            "part of the fetch that it is in",
        ),
        Field("stacks", "list", "each stack once: its frames, innermost first, as places in `frames`"),
        Field(
            "processes",
            "list",
            "`pid` and `samples` of each process: the place in `stacks` of its main thread's stack at each moment",
        ),
        Field("cpu_seconds", "float", "CPU time that taking them cost the collector"),
    ),
    "flight-recorder": _event(
        _COLLECTOR,
        "a dump of PyTorch's Flight Recorder is new or has changed; looked for with `stacks`, and after a command "
        "that failed",
        Field("path", "str", "file of the dump"),
        Field("of_rank", "int", "rank that wrote it"),
        Field("age_seconds", "float", "time from its last change to this event"),
        Field("version", "str", "version of its format"),
        Field("is_whole", "bool", "true: it goes back to the first collective of the rank"),
        Field(
            "groups",
            "list",
            "`name`, `desc`, `ranks` (null if not recorded) and `collectives` of each process group: those around "
            "the first that is not complete, and the last, each with `number`, `operation`, `sizes`, "
            "`is_complete`, `age_seconds` (since the rank entered it), `timeout_seconds` and `place` (function, "
            "path and line in the user's own code)",
        ),
        Field("error", "str", "why it cannot be read; then it has no groups"),
    ),
    "hang-cancelled": _event(_COLLECTOR, "it ends the command after a hang, by `--on-hang cancel`", _COMMAND_PID),
    "before-oom": _event(
        _COLLECTOR,
        "a limit is near, and `--before-oom` or `on_risk` asks for an action; once for each limit, a signal once "
        "for each process",
        _RISK,
        Field("limit", "str", "name of the limit"),
        Field("seconds_left", "float", "lower end of the forecast; null if the limit was nearly full"),
        Field("action", "str", "name of the signal, `command` or `function`"),
        Field("pids", "list", "process ids that the signal was sent to, or whose functions were asked for"),
    ),
    "risk-listener": _event(
        _ATTACHED,
        "`on_risk` registered a function",
        Field("lead_seconds", "float", "time before a limit at which it is to be called"),
    ),
    "risk-call": _event(
        _TRAINING,
        "the functions that `on_risk` registered were called",
        _RISK,
        Field("step", "int", "step at whose end they were called"),
        Field("held_ns", "int", "time that they took"),
        Field("errors", "list", "type and message of the error of each that failed"),
    ),
    "left-running": _event(
        "collector that is the command's parent",
        "the command ended, and processes that it started go on a second later",
        Field("processes", "list", "`pid`, `start_ticks`, `argv` and `is_python` of each process"),
    ),
    "command-exit": _event(
        "collector that is the command's parent",
        "the command ended",
        _COMMAND_PID,
        Field("exit_status", "int", "exit status; negative: the signal"),
    ),
    "collector-problem": _event(
        _COLLECTOR,
        "a part of it failed, and the others go on; only the first errors of each part",
        Field("part", "str", "name of the part"),
        _ERROR,
    ),
}
