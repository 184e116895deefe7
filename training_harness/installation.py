"""Installation and removal of the hooks: at import time under the shim, or by `attach()`.

Everything here fails open: a hook that cannot be installed is named in an event, and the training goes on.
"""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from training_harness import command, layout, notebook, ptracer, session
from training_harness.hooks import compiler, trial
from training_harness.hooks.loading import auto_setting, iterators, loader_ids, worker
from training_harness.hooks.loading.loader import LoaderHook
from training_harness.hooks.on_request import risk
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import farewell
from training_harness.hooks.stages import stage_calls, stages
from training_harness.hooks.training import (
    checkpoints,
    compilations,
    cuda_graphs,
    cuda_oom,
    forward_passes,
    loaded_states,
    steps,
)
from training_harness.hooks.training.step_phases import Progress

#: Most exceptions of threads, and most messages to `sys.exit`, that a process records: a script may start a thread
#: for each batch, or catch what it raises.
_MOST_RECORDED = 100
_progress = Progress()
_hooks: dict[str, Hook] = {}


def _beyond(name: str, install: Callable[..., Hook | None], *arguments: Any) -> Callable[[], Hook | None]:
    """Return the installer of a hook that needs the hook of this name, and is left out without it."""

    def install_beyond() -> Hook | None:
        base = _hooks.get(name)
        return None if base is None else install(base, *arguments)

    return install_beyond


def _with(name: str, install: Callable[..., Hook | None], *arguments: Any) -> Callable[..., Hook | None]:
    """Return the installer of a hook that uses the hook of this name, its last argument: None without it."""
    return lambda *bases: install(*bases, *arguments, _hooks.get(name))


def _install_stages() -> Hook | None:
    hook = stage_calls.install("torch", _progress.on_copy)
    _progress.sees_copies = hook is not None
    return hook


def _watch_exceptions() -> Hook:
    hook = Hook("exception")

    def make(previous: Any) -> Any:
        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            try:
                session.record_exception(kind, error, trace)
            except Exception:
                pass
            previous(kind, error, trace)

        return excepthook

    hook.replace(sys, "excepthook", make)
    return hook


def _watch_exits() -> Hook:
    hook = Hook("exit")
    numbers = iter(range(_MOST_RECORDED))

    def make(previous: Any) -> Any:
        @functools.wraps(previous)
        def exit(status: Any = None, /) -> Any:
            if hook.active and status not in (None, 0) and next(numbers, None) is not None:
                try:
                    session.record_exit_message(status, sys._getframe(1))
                except Exception:
                    pass
            return previous(status)

        return exit

    hook.replace(sys, "exit", make)
    return hook


def _watch_threads() -> Hook:
    hook = Hook("thread")
    numbers = iter(range(_MOST_RECORDED))

    def make(previous: Any) -> Any:
        def excepthook(args: threading.ExceptHookArgs) -> None:
            if hook.active and next(numbers, None) is not None:
                try:
                    session.record_thread_exception(args)
                except Exception:
                    pass
            previous(args)

        return excepthook

    hook.replace(threading, "excepthook", make)
    return hook


_COMPILER = "torch.compiler"
_DATALOADER = "torch.utils.data.dataloader"
_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"
#: hook -> (its installer, the modules that it needs), in the order of installation. An installer raises an
#: exception, mostly an AttributeError, where this torch lacks a name that the hook needs.
HOOKS: dict[str, tuple[Callable[[], Hook | None], set[str]]] = {
    "thread": (_watch_threads, {_DATALOADER}),
    "exit": (_watch_exits, {_DATALOADER}),
    "worker": (worker.install, {_DATALOADER}),
    # First, so that the hooks below see the loader as the trial changed it.
    "trial": (partial(trial.install, _DATALOADER, "DataLoader"), {_DATALOADER}),
    "batch": (partial(iterators.install, _progress), {_DATALOADER}),
    "loader site": (loader_ids.install, {_DATALOADER}),
    "loader setting": (_beyond("batch", auto_setting.install), {_DATALOADER}),
    "forward": (partial(forward_passes.install, _progress), {forward_passes.MODULE, _COMPILER}),
    "stage:torch": (_install_stages, {_DATALOADER, _COMPILER}),
    "step": (partial(steps.install, _progress), {"torch.optim.optimizer", _COMPILER}),
    "cuda_graph": (_beyond("step", _with("forward", cuda_graphs.install)), {"torch.optim.optimizer", _COMPILER}),
    "backward": (partial(steps.install_backward, _progress), {"torch.autograd", _COMPILER}),
    "loaded_state": (loaded_states.install, {forward_passes.MODULE, _COMPILER}),
    "cuda_oom": (_with("loaded_state", cuda_oom.install, _progress), {forward_passes.MODULE, _COMPILER}),
    "checkpoint": (checkpoints.install, {"torch.optim.optimizer", _COMPILER}),
}
_TORCH_MODULES = sorted(set[str]().union(*(needs for _, needs in HOOKS.values())))
HOOKS |= {
    f"stage:{module}": (partial(stage_calls.install, module), {module})
    for module in (*stage_calls.CALLS, *stage_calls.COMPOSERS)
    if module != "torch"
}
HOOKS["trial:torchdata"] = (partial(trial.install, _STATEFUL, "StatefulDataLoader"), {_STATEFUL})
HOOKS["epochs:torchdata"] = (
    _beyond("batch", iterators.install_epochs, _STATEFUL, "StatefulDataLoader"),
    {_STATEFUL},
)
HOOKS["compiler"] = (compiler.install, {forward_passes.EVAL_FRAME})
HOOKS["compilation"] = (partial(compilations.install, _progress), {forward_passes.EVAL_FRAME})
HOOKS["step:fastai"] = (_beyond("step", steps.install_fastai), {steps.FASTAI})
HOOKS["forward:compiled"] = (
    _beyond("forward", forward_passes.install_compiled, _progress),
    {forward_passes.EVAL_FRAME},
)
#: Modules whose import makes a hook possible.
TRIGGERS = frozenset[str]().union(*(needs for _, needs in HOOKS.values()))


def on_import(module: str) -> None:
    """Install the hooks that the import of `module`, one of `TRIGGERS`, makes possible. Never raises."""
    try:
        current = session.start()
        if current is None:
            return
        if "torch" in sys.modules:
            current.report_attach()
        for name, (install, needs) in HOOKS.items():
            if module not in needs or not needs <= sys.modules.keys():
                continue
            if name in _hooks or _progress.capabilities.get(name) is False:
                continue
            try:
                hook = install()
                if hook is not None:
                    _hooks[name] = hook
                    _progress.capabilities[name] = True
            except Exception as error:
                _progress.capabilities[name] = False
                current.events.append("hook-disabled", hook=name, error=f"{type(error).__name__}: {error}")
    except Exception:
        pass


def attach(run_dir: str | os.PathLike[str] | None = None, *, name: str | None = None) -> Path | None:
    """Attach Tidegauge to this process, and to the DataLoader workers that it will start.

    Within `tidegauge run` this joins the run that is being followed. Otherwise it begins a new run; the first rank
    of a launcher does so for all of them. A collector is started for the new run if one is installed, else the
    journals wait for `tidegauge collect`. A notebook shows a card of the run, which is updated.

    Args:
        run_dir: run to join instead; a process that is attached already stays in its run.
        name: name of a new run; the name of the script or notebook by default.

    Returns:
        The run directory, or None when Tidegauge is disabled, its home cannot be written or there is no torch.
    """
    if os.environ.get(layout.DISABLED_VARIABLE) == "1":
        return None
    try:
        for module in _TORCH_MODULES:
            importlib.import_module(module)  # the caller wants torch hooked: it is imported, or is about to be
        current = session.active
        existing = current.run_dir if current is not None else run_dir or os.environ.get(layout.RUN_DIR_VARIABLE)
        shell, collector = notebook.find_shell(), None
        if existing is None:
            script = name or (Path(sys.argv[0]).stem if shell is None else notebook.notebook_name()) or "notebook"
            directory, is_new = layout.join_or_create_run(layout.home_path(), name=script, argv=sys.orig_argv)
            if is_new:
                collector = start_collector(directory, *(["--card"] if shell is not None else []))
        else:
            directory = Path(existing)
        os.environ[layout.RUN_DIR_VARIABLE] = str(directory)
        current = session.start(directory)
        if current is not None:
            risk.announce(current)
        for module in sorted(TRIGGERS & sys.modules.keys()):
            on_import(module)
        if existing is None:  # under `tidegauge run` the shim watches them
            _hooks["exception"] = _watch_exceptions()
        if shell is not None:
            notebook.show_card(shell, directory, collector)
    except Exception as error:
        print(f"tidegauge: not attached: {error}", file=sys.stderr)  # noqa: T201
        return None
    return directory


def announce() -> None:
    """Record now that this attached process trains; else its first batch or step does."""
    if session.active is not None:
        _progress.announce(session.active)


def detach() -> None:
    """Remove every hook and close the journals; the run ends here. Workers that already run keep recording."""
    _progress.capabilities.clear()
    undo = [_hooks.popitem()[1].remove for _ in range(len(_hooks))]
    undo = [_progress.calls.run, stages.flush, _progress.requests.close, *undo]
    for part in (*undo, lambda: farewell(session.active, detached=True), session.stop, _progress.forget):
        try:
            part()
        except Exception:
            pass
    os.environ.pop(layout.RUN_DIR_VARIABLE, None)
    os.environ.pop(ptracer.COLLECTOR_VARIABLE, None)


def step() -> None:
    """End a training step here, at a boundary that only the loop knows. After the first call nothing else ends one.

    This never affects the training, not even without a run or after an error.
    """
    try:
        steps.step(_progress)
    except Exception as error:
        hook = _hooks.get("step")
        if hook is not None:
            hook.fail(error)


def recommended(loader: Any) -> dict[str, int] | None:
    """Return the `num_workers` and `prefetch_factor` that a DataLoader should get, as the run suggests so far.

    None means that it is not known, or not yet: the first call asks the collector, which needs some hundred batches
    of the loader and some seconds. `DataLoader(dataset, **setting)` makes one like that. This never affects the
    training.
    """
    loaders = _hooks.get("batch")
    try:
        return auto_setting.recommended(loaders, loader) if isinstance(loaders, LoaderHook) else None
    except Exception as error:
        if session.active is not None:
            session.active.events.append(
                "hook-disabled", hook="recommended", error=f"{type(error).__name__}: {error}"
            )
        return None


def start_collector(run_dir: Path, *options: str) -> subprocess.Popen[bytes] | None:
    """Start a collector for this process, if it is installed. It must outlive the training and never disturb it."""
    if command.missing_packages():
        return None
    launcher = None if layout.ray_group() else layout.launcher_pid()
    descriptor = os.open(run_dir / "collector.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as log:
        collector = subprocess.Popen(
            # Not `-m collector`: the user's project may have a package of that name on PYTHONPATH.
            [
                *(sys.executable, "-P", "-m", "training_harness.command"),
                *("collect", str(run_dir), "--follow", str(launcher or os.getpid())),
                *options,
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, layout.DISABLED_VARIABLE: "1"},
        )
    # Ranks may have named another reader already: UCX and others let them read each other's memory.
    if not any(name.endswith(("WORLD_SIZE", "PMI_SIZE")) for name in os.environ):
        os.environ[ptracer.COLLECTOR_VARIABLE] = ptracer.process_name(collector.pid)
        ptracer.allow_collector()
    return collector
