"""Iterations of a process without a DataLoader: the forward passes of its top-level module.

Evaluation on hand-made batches, reinforcement learning and hand-written updates use neither a DataLoader nor an
optimizer. They call a module, again and again. Watching every module call would cost each submodule a slower path
through `Module._call_impl` (torch/nn/modules/module.py), so the calls are watched in two phases:

1. Discovery: a global forward pre-hook, torch's own API, sees which class is called from outside any other module.
   It goes as soon as one class has been called `_CALLS_TO_LEAD` times, or when the process uses a DataLoader.
2. Counting: only the `__call__` of that class is replaced. Nothing is stored in the module itself, so what is
   pickled, scripted or copied stays as it was.

Code that is being compiled is never counted. A compiled model is called through `OptimizedModule`, whose class is
then the one that counts; discovery ends before anything is compiled, because torch warns of global hooks there.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from threading import get_ident
from types import FrameType
from typing import Any

from training_harness import session
from training_harness.hooks import compiler
from training_harness.hooks.patching import Hook
from training_harness.hooks.progress import PASS, Progress
from training_harness.hooks.steps import has_optimizer

MODULE = "torch.nn.modules.module"
_EVAL_FRAME = "torch._dynamo.eval_frame"
_WORKER = "torch.utils.data._utils.worker"
#: Calls from outside any other module after which a class counts as the top-level one.
_CALLS_TO_LEAD = 3


class ForwardHook(Hook):
    """Finds the top-level module's class and counts its calls.

    Args:
        progress: the step that the training loop is in.
    """

    def __init__(self, progress: Progress) -> None:
        super().__init__("forward")
        self._progress = progress
        self._calls: Counter[type] = Counter()
        self._discovery: Any = None
        self._leading = Hook("forward")
        self._call_code = sys.modules[MODULE].Module._wrapped_call_impl.__code__
        self._is_compiling = compiler.is_compiling()

    def discover(self) -> None:
        """Watch all module calls until one class leads."""
        self._discovery = sys.modules[MODULE].register_module_forward_pre_hook(self._called)

    def end_discovery(self) -> None:
        """Take the global pre-hook out."""
        if self._discovery is not None:
            self._discovery.remove()
            self._discovery = None

    def remove(self) -> None:
        """Take everything out."""
        self._progress.tape.play()
        self.end_discovery()
        self._leading.remove()
        super().remove()

    def fail(self, error: BaseException) -> None:
        """Take everything out after an error of the hook's own."""
        super().fail(error)
        self.end_discovery()
        self._leading.remove()

    def _called(self, module: Any, _args: object) -> None:
        """Note a module call during discovery; returns None, so that the arguments stay as they are."""
        if self._is_compiling() or not self.active or self._progress.sees_batches:
            return
        try:
            if self._outermost(sys._getframe(1)) is module and not _is_worker():
                kind = type(module)
                self._calls[kind] += 1
                if self._calls[kind] >= _CALLS_TO_LEAD:
                    self.end_discovery()
                    self.lead(kind, self._calls[kind])
        except Exception as error:
            self.fail(error)

    def lead(self, kind: type, passes: int = 0) -> None:
        """Count the calls of this class from now on, with those so far; no other class counts any longer."""
        self._progress.tape.play()  # calls that are logged count only while their hook is active
        self._leading.remove()
        self._leading = Hook("forward")
        current = session.start()
        if current is not None:
            self._progress.announce(current)
            made = has_optimizer()
            self._progress.follow_passes(current, has_optimizer=made, passes=passes)
            self._leading.replace(kind, "__call__", self._counted)

    def _counted(self, original: Any) -> Any:
        hook, progress, is_compiling, outermost = self, self._progress, self._is_compiling, self._outermost
        leading = self._leading
        tape, clock, cpu_clock = progress.tape, time.monotonic_ns, progress.cpu_clock
        boundary_cpu_clock = progress.boundary_cpu_clock
        entered, passed = progress.entered, progress.passed
        running = False  # a module within this one, or another thread's replica of it

        @functools.wraps(original)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal running
            if is_compiling() or running or not leading.active or progress.sees_batches:
                return original(module, *args, **kwargs)
            running = True
            try:
                outer = outermost(sys._getframe(1))
                current = session.active
                if outer is not None:
                    hook.lead(type(outer))
                elif current is not None:
                    if not current.process_started:  # a forked child goes on with its parent's modules
                        progress.announce(current)
                    now_ns = clock()
                    tape.log((leading, entered, now_ns, get_ident(), boundary_cpu_clock(now_ns)))
                    if now_ns >= tape.due_ns and progress.ended_by <= PASS:
                        progress.catch_up(now_ns)
            except Exception as error:
                hook.fail(error)
            try:
                return original(module, *args, **kwargs)
            finally:
                running = False
                try:
                    if leading.active:
                        tape.log((leading, passed, clock(), get_ident(), cpu_clock()))
                except Exception as error:
                    hook.fail(error)

        return call

    def _outermost(self, frame: FrameType | None) -> Any:
        """Return the module whose call is the outermost one on the stack, None outside of any."""
        found = None
        while frame is not None:
            if frame.f_code is self._call_code:
                found = frame.f_locals["self"]
            frame = frame.f_back
        return found


def install(progress: Progress) -> ForwardHook:
    """Begin the discovery.

    Raises:
        AttributeError: this torch has no global module hooks.
        KeyError: `torch.compiler` is not imported yet.
    """
    with ForwardHook(progress) as hook:
        if not progress.sees_batches:
            hook.discover()
        progress.on_batches = hook.remove
        return hook


def install_compiled(progress: Progress, hook: ForwardHook) -> Hook:
    """End the discovery before anything is compiled, and count the calls of compiled modules.

    Raises:
        AttributeError: this torch has no such classes.
    """
    module = sys.modules[_EVAL_FRAME]
    compiled: type = module.OptimizedModule

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            try:
                if hook.active and not progress.sees_batches and not _is_worker():
                    hook.end_discovery()
                    hook.lead(compiled)
            except Exception as error:
                hook.fail(error)
            original(self, *args, **kwargs)

        return init

    with Hook("forward:compiled") as own:
        own.replace(module.OptimizeContext, "__init__", make)
        return own


def _is_worker() -> bool:
    """Return whether this process is a DataLoader worker: its modules are part of a fetch."""
    worker = sys.modules.get(_WORKER)
    return worker is not None and worker.get_worker_info() is not None
