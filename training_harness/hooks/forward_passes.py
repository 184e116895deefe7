"""Iterations of a process without a DataLoader: the forward passes of its top-level module.

Evaluation on hand-made batches, reinforcement learning and hand-written updates use neither a DataLoader nor an
optimizer. They call a module, again and again. Watching every module call would cost each submodule a slower path
through `Module._call_impl` (torch/nn/modules/module.py), so the calls are watched in two phases:

1. Discovery: a global forward pre-hook, torch's own API, sees which class is called from outside any other module.
   It goes as soon as one class with parameters has been called `_CALLS_TO_LEAD` times, or when the process uses a
   DataLoader.
2. Counting: only the `__call__` of that class is replaced. Nothing is stored in the module itself, so what is
   pickled, scripted or copied stays as it was. If the class turns out to be a part of another one, that one counts.

Code that is being compiled is never counted. A compiled model is called through `OptimizedModule`, whose class is
then the one that counts; discovery ends before anything is compiled, because torch warns of global hooks there.
"""

from __future__ import annotations

import functools
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable
from threading import get_ident
from types import FrameType, MethodType
from typing import Any

from training_harness import session
from training_harness.hooks import compiler
from training_harness.hooks.patching import Hook
from training_harness.hooks.progress import PASS, Progress
from training_harness.hooks.steps import has_optimizer
from training_harness.hooks.worker import is_worker

MODULE = "torch.nn.modules.module"
_EVAL_FRAME = "torch._dynamo.eval_frame"
#: Calls from outside any other module after which a class counts as the top-level one.
_CALLS_TO_LEAD = 3


class _Call:
    """The `__call__` of a class that counts.

    Classes of scripts and notebooks are pickled by value by cloudpickle and dill, with all that is in them: this
    pickles as the `__call__` that the class would have without it. That is also what a lookup in the class finds.
    """

    __slots__ = ("_function", "_kind", "_own")

    def __init__(self, function: Callable[..., Any], kind: type, own: Any) -> None:
        self._function = function
        self._kind = kind
        self._own = own

    def __get__(self, module: Any, kind: type | None = None) -> Any:
        if module is not None:
            return MethodType(self._function, module)
        base: Any = super(self._kind, kind or self._kind)
        return self._own or base.__call__

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        return self._function(module, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.__get__(None),),)


class _Leading(Hook):
    """The replaced `__call__` of one class; an error in it is one of the hook that put it there."""

    def __init__(self, owner: ForwardHook) -> None:
        super().__init__(owner.name)
        self._owner = owner

    def take(self, kind: type, call: _Call) -> None:
        """Put a `__call__` into a class."""
        own = vars(kind).get("__call__")
        type.__setattr__(kind, "__call__", call)

        def undo() -> None:
            if vars(kind).get("__call__") is not call:
                return  # somebody wrapped it: it stays, and passes through
            if own is None:
                type.__delattr__(kind, "__call__")
            else:
                type.__setattr__(kind, "__call__", own)

        self._undo.append(undo)

    def fail(self, error: BaseException) -> None:
        """Let the owner fail."""
        self._owner.fail(error)


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
        self._leading, self._leads = _Leading(self), False
        self._call_code = sys.modules[MODULE].Module._wrapped_call_impl.__code__
        self._is_compiling = compiler.is_compiling()

    def discover(self) -> None:
        """Watch all module calls until one class leads."""

        def called(module: Any, _args: object) -> None:
            try:
                if not self._is_compiling() and self.active and not self._progress.sees_batches:
                    self._called(module, sys._getframe(1))
            except Exception as error:
                self.fail(error)

        self._discovery = sys.modules[MODULE].register_module_forward_pre_hook(called)

    def end_discovery(self) -> None:
        """Take the global pre-hook out."""
        if self._discovery is not None:
            self._discovery.remove()
            self._discovery = None

    def remove(self) -> None:
        """Take everything out."""
        self._progress.tape.play()
        self._leading.remove()
        super().remove()
        self.end_discovery()

    def fail(self, error: BaseException) -> None:
        """Take everything out after an error of the hook's own."""
        super().fail(error)
        self.end_discovery()
        self._leading.remove()

    def _called(self, module: Any, frame: FrameType) -> None:
        """Note a module call during discovery; one without parameters is a transform or a loss, not the model."""
        if is_worker():
            self.end_discovery()
        elif next(module.parameters(), None) is not None and self._outermost(frame) is module:
            kind = type(module)
            self._calls[kind] += 1
            if (passes := self._calls[kind]) >= _CALLS_TO_LEAD:
                self.lead(kind)
                self._begin(passes)

    def lead_with_the_most_called(self) -> None:
        """End the discovery before its time, with what it has seen so far."""
        self.end_discovery()
        if self._calls and not self._leads:
            self.lead(self._calls.most_common(1)[0][0])

    def lead(self, kind: type) -> None:
        """Count the calls of this class from now on; no other class counts any longer."""
        self._progress.tape.play()  # calls that are logged count only while their hook is active
        self.end_discovery()
        self._leading.remove()
        self._calls.clear()
        self._leading, self._leads = _Leading(self), True
        self._leading.take(kind, self._counted(kind, vars(kind).get("__call__")))

    def _begin(self, passes: int = 0) -> None:
        """Say that this process iterates, at a pass of the top-level module, and with which passes before."""
        current = session.start()
        if current is not None:
            self._progress.announce(current)
            self._progress.follow_passes(current, has_optimizer=has_optimizer(), passes=passes)

    def _counted(self, kind: Any, own: Any) -> _Call:
        """Return what counts the calls of a class that has a `__call__` of its own, or none."""
        hook, progress, is_compiling, outermost = self, self._progress, self._is_compiling, self._outermost
        leading = self._leading
        tape, clock, cpu_clock = progress.tape, time.monotonic_ns, progress.cpu_clock
        boundary_cpu_clock = progress.boundary_cpu_clock
        entered, passed = progress.entered, progress.passed
        running: set[int] = set()  # threads that are within a call

        def plain(module: Any, args: Any, kwargs: Any) -> Any:
            """Call the next `__call__` in the order of the module's classes, as if this one were not there.

            FX replaces that of `Module` while it traces, and a class that derives from this one may have another.
            """
            if own is None:
                base: Any = super(kind, module)
                return base.__call__(*args, **kwargs)
            return own(module, *args, **kwargs)

        @functools.wraps(kind.__call__)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not leading.active or progress.sees_batches or get_ident() in running:
                return plain(module, args, kwargs)
            thread, counts = get_ident(), False
            running.add(thread)
            try:
                outer = outermost(sys._getframe(1))
                if outer is not None:
                    hook._met_within(type(outer))
                elif (current := session.active or session.start()) is not None:
                    if not (current.process_started and progress.sees_passes):  # the first pass, also after a fork
                        hook._begin()
                    counts, now_ns = True, clock()
                    tape.log((leading, entered, now_ns, thread, boundary_cpu_clock(now_ns)))
                    if now_ns >= tape.due_ns and progress.ended_by <= PASS:
                        progress.catch_up(now_ns)
            except Exception as error:
                hook.fail(error)
            try:
                return plain(module, args, kwargs)
            finally:
                running.discard(thread)
                try:
                    if counts and leading.active:
                        tape.log((leading, passed, clock(), thread, cpu_clock()))
                except Exception as error:
                    hook.fail(error)

        return _Call(call, kind, own)

    def _met_within(self, outer: type) -> None:
        """Let the class lead within whose modules the leading one was met several times."""
        self._calls[outer] += 1
        if self._calls[outer] >= _CALLS_TO_LEAD:
            self.lead(outer)

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


def install_compiled(hook: ForwardHook, progress: Progress) -> Hook:
    """End the discovery before anything is compiled, and count the calls of compiled modules.

    Raises:
        AttributeError: this torch has no such classes.
    """
    module = sys.modules[_EVAL_FRAME]

    def guarded(original: Any, then: Callable[[Any], None]) -> Any:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if hook.active and not progress.sees_batches and not is_worker():
                    then(self)
            except Exception as error:
                hook.fail(error)
            return original(self, *args, **kwargs)

        return call

    with Hook("forward:compiled") as own:
        end: Callable[[Any], None] = lambda _: hook.lead_with_the_most_called()  # noqa: E731
        own.replace(module.OptimizeContext, "__init__", lambda original: guarded(original, end))
        lead: Callable[[Any], None] = lambda _: hook.lead(module.OptimizedModule)  # noqa: E731
        own.replace(module.OptimizedModule, "__init__", lambda original: guarded(original, lead))
        in_place: Callable[[Any], None] = lambda model: hook.lead(type(model))  # noqa: E731
        own.replace(sys.modules[MODULE].Module, "compile", lambda original: guarded(original, in_place))
        return own
