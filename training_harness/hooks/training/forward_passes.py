"""Iterations of a process without a DataLoader: the forward passes of its top-level module.

Evaluation on hand-made batches, reinforcement learning and hand-written updates use neither a DataLoader nor an
optimizer. They call a module, again and again. Watching every module call would cost each submodule a slower path
through `Module._call_impl` (torch/nn/modules/module.py), so the calls are watched in two phases:

1. Discovery: a global forward pre-hook, torch's own API, sees which class is called from outside any other module.
   It is removed as soon as one class with parameters has been called `_CALLS_TO_LEAD` times, or when the process
   uses a DataLoader.
2. Counting: only the `__call__` of that class, the leading one, is replaced. Nothing is stored in the module, so
   pickling, scripting and copying work as before. If the class turns out to be part of another one, that one leads.

Code that is being compiled is never counted. A compiled model is called through `OptimizedModule`, whose class is
then the leading one; discovery ends before anything is compiled, because torch warns of global hooks there.

A replay of a CUDA graph runs no code of a module, so a loop that only replays graphs has its replays as passes.
"""

from __future__ import annotations

import functools
import operator
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from types import FrameType, MethodType
from typing import Any

from training_harness import session
from training_harness.hooks import compiler
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import is_worker
from training_harness.hooks.training.step_phases import UNREAD, Progress
from training_harness.hooks.training.steps import has_optimizer
from training_harness.records import UNIT_PASS

MODULE = "torch.nn.modules.module"
EVAL_FRAME = "torch._dynamo.eval_frame"
#: Number of calls from outside any other module after which a class counts as the top-level one.
_CALLS_TO_LEAD = 3
#: Packages whose code replays graphs as parts of a call: one for each compiled graph, or for a backward pass.
_REPLAYING_PACKAGES = ("torch._inductor.", "torch.autograd.")


class _Call:
    """Replacement for the `__call__` of the leading class.

    cloudpickle and dill pickle the classes of scripts and notebooks by value, with all attributes. So this one
    pickles as the `__call__` that the class would have without it. A lookup in the class finds that `__call__` too.
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


class _LeadHook(Hook):
    """The replaced `__call__` of one class; an error in it counts as the owner's."""

    def __init__(self, owner: ForwardHook) -> None:
        super().__init__(owner.name)
        self._owner = owner

    def patch(self, kind: type, call: _Call) -> None:
        """Replace the `__call__` of a class."""
        own = vars(kind).get("__call__")
        type.__setattr__(kind, "__call__", call)

        def undo() -> None:
            if vars(kind).get("__call__") is not call:
                return  # other code has wrapped it: it stays, and passes through
            if own is None:
                type.__delattr__(kind, "__call__")
            else:
                type.__setattr__(kind, "__call__", own)

        self._undo.append(undo)

    def fail(self, error: BaseException) -> None:
        """Fail the owner."""
        self._owner.fail(error)


class ForwardHook(Hook):
    """Hook that finds the top-level module's class and counts its calls."""

    def __init__(self, progress: Progress) -> None:
        super().__init__("forward")
        self._progress = progress
        self._calls: Counter[type] = Counter()
        self._discovery: Any = None
        self._leading, self._has_leader = _LeadHook(self), False
        self._was_called = False
        self._replayed: set[int] = set()  # graphs since the leading class was called
        self._replaying_thread = 0
        self._call_code = sys.modules[MODULE].Module._wrapped_call_impl.__code__
        self._is_compiling = compiler.is_compiling()

    def discover(self) -> None:
        """Watch all module calls until one class leads."""

        def called(module: Any, _args: object) -> None:
            if not self._is_compiling() and not self._progress.sees_batches:
                self.attempt(self._count_discovered, module, sys._getframe(1))

        self._discovery = sys.modules[MODULE].register_module_forward_pre_hook(called)

    def end_discovery(self) -> None:
        """Remove the global pre-hook."""
        if self._discovery is not None:
            self._discovery.remove()
            self._discovery = None

    def remove(self) -> None:
        """Remove everything."""
        self._progress.calls.run()
        self._leading.remove()
        super().remove()
        self.end_discovery()

    def fail(self, error: BaseException) -> None:
        """Remove everything after an error of the hook's own."""
        super().fail(error)
        with suppress(Exception):
            self.end_discovery()
            self._leading.remove()

    def _count_discovered(self, module: Any, frame: FrameType) -> None:
        """Count a module call during discovery, if the module has parameters: transforms and losses have none."""
        if is_worker():
            self.end_discovery()
        elif next(module.parameters(), None) is not None and self._outermost(frame) is module:
            kind = type(module)
            self._calls[kind] += 1
            if (passes := self._calls[kind]) >= _CALLS_TO_LEAD:
                self.lead(kind)
                self._begin(passes)

    def lead_with_the_most_called(self) -> None:
        """End the discovery early, with the calls seen so far."""
        self.end_discovery()
        if self._calls and not self._has_leader:
            self.lead(self._calls.most_common(1)[0][0])

    def lead(self, kind: type) -> None:
        """Count the calls of this class from now on; no other class counts any longer."""
        self._progress.calls.run()  # calls that are logged count only while their hook is active
        self.end_discovery()
        self._leading.remove()
        self._calls.clear()
        self._leading, self._has_leader = _LeadHook(self), True
        self._leading.patch(kind, self._counting_call(kind, vars(kind).get("__call__")))

    def _begin(self, passes: int = 0) -> None:
        """Record that this process iterates, at a pass of the top-level module and after `passes` of them."""
        current = session.start()
        if current is not None:
            self._progress.announce(current)
            self._progress.follow_passes(current, has_optimizer=has_optimizer(), passes=passes)

    def _counting_call(self, kind: Any, own: Any) -> _Call:
        """Return a `__call__` that counts the calls of a class; `own` is the class's own one, if it has one.

        `call` runs in every forward pass, so it uses names that are bound beforehand and only logs deferred calls.
        Its fast path: find the outermost module on the stack, read the clocks, log the beginning of the pass, call
        the original, log the end.
        """
        hook, progress, is_compiling, outermost = self, self._progress, self._is_compiling, self._outermost
        leading = self._leading
        calls, clock, cpu_clock = progress.calls, time.monotonic_ns, time.thread_time_ns
        boundary_cpu_clock = progress.boundary_cpu_clock
        on_pass_begin, on_pass_end = progress.on_pass_begin, progress.on_pass_end
        running: set[int] = set()  # threads that are within a call

        def plain(module: Any, args: Any, kwargs: Any) -> Any:
            """Call the next `__call__` in the order of the module's classes, as if this one were not there.

            FX replaces the one of `Module` while it traces, and a class derived from this one may have another.
            """
            if own is None:
                base: Any = super(kind, module)
                return base.__call__(*args, **kwargs)
            return own(module, *args, **kwargs)

        @functools.wraps(kind.__call__)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not leading.active or progress.sees_batches or get_ident() in running:
                return plain(module, args, kwargs)
            thread, is_pass = get_ident(), False
            running.add(thread)
            try:
                outer = outermost(sys._getframe(1))
                if outer is not None:
                    hook._count_outer(type(outer))
                elif (current := session.active or session.start()) is not None:
                    if not (current.process_started and progress.sees_passes):  # the first pass, also after a fork
                        hook._begin()
                    is_pass, now_ns = True, clock()
                    hook._was_called = True
                    calls.log((leading, on_pass_begin, now_ns, thread, boundary_cpu_clock(now_ns)))
                    if now_ns >= calls.due_ns and progress.ended_by <= UNIT_PASS:
                        progress.catch_up(now_ns)
            except Exception as error:
                hook.fail(error)
            try:
                result = plain(module, args, kwargs)
            finally:
                running.discard(thread)
            try:  # a call that raised is no pass: its loop may take it again with less
                if is_pass and leading.active:
                    cpu_ns = cpu_clock() if progress.reads_cpu else UNREAD
                    calls.log((leading, on_pass_end, clock(), thread, cpu_ns))
            except Exception as error:
                hook.fail(error)
            return result

        return _Call(call, kind, own)

    def begin_replay(self, graph: Any) -> bool:
        """Begin a pass that replays a CUDA graph; return False if the replay is no pass.

        It is none where other units count, within a call of a module or of torch's compiler or autograd, in another
        thread than the first one that replayed, and if the leading class has been called since the last replay of
        this graph: the replay is a part of the iteration that began with the call.
        """
        progress, frame = self._progress, sys._getframe(1)
        if progress.sees_batches or progress.ended_by > UNIT_PASS or has_optimizer() or is_worker():
            return False
        current = session.active or session.start()
        if current is None or self._outermost(frame) is not None or _replays_for_torch(frame):
            return False
        self._replaying_thread = self._replaying_thread or get_ident()
        if self._replaying_thread != get_ident():
            return False
        if self._was_called:
            self._was_called = False
            self._replayed.clear()
        is_again = id(graph) in self._replayed
        self._replayed.add(id(graph))
        if self._has_leader and not is_again:
            return False
        if not (current.process_started and progress.sees_passes):
            self._begin()
        now_ns = time.monotonic_ns()
        cpu_ns = progress.boundary_cpu_clock(now_ns)
        progress.calls.log((self, progress.on_pass_begin, now_ns, get_ident(), cpu_ns))
        if now_ns >= progress.calls.due_ns:
            progress.catch_up(now_ns)
        return True

    def end_replay(self) -> None:
        """End a pass that replayed a CUDA graph."""
        progress = self._progress
        cpu_ns = time.thread_time_ns() if progress.reads_cpu else UNREAD
        progress.calls.log((self, progress.on_pass_end, time.monotonic_ns(), get_ident(), cpu_ns))

    def _count_outer(self, outer: type) -> None:
        """Count a module found around the leading one; its class leads after several such calls."""
        self._calls[outer] += 1
        if self._calls[outer] >= _CALLS_TO_LEAD:
            self.lead(outer)

    def _outermost(self, frame: FrameType | None) -> Any:
        """Return the module whose call is the outermost one on the stack, None outside of any."""
        module = None
        while frame is not None:
            if frame.f_code is self._call_code:
                module = frame.f_locals["self"]
            frame = frame.f_back
        return module


def _replays_for_torch(frame: FrameType | None) -> bool:
    """Return whether torch's compiler or autograd is on the stack."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_REPLAYING_PACKAGES):
            return True
        frame = frame.f_back
    return False


def install(progress: Progress) -> ForwardHook:
    """Begin the discovery."""
    with ForwardHook(progress) as hook:
        if not progress.sees_batches:
            hook.discover()
        progress.on_first_loader = hook.remove
        return hook


def install_compiled(hook: ForwardHook, progress: Progress) -> Hook:
    """End the discovery before anything is compiled, and count the calls of compiled modules."""
    module = sys.modules[EVAL_FRAME]

    def unless_in_worker(then: Callable[[Any], None], model: Any) -> None:
        if not is_worker():
            then(model)

    def make(then: Callable[[Any], None], original: Any) -> Any:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not progress.sees_batches:
                hook.attempt(unless_in_worker, then, self)
            return original(self, *args, **kwargs)

        return call

    with Hook("forward:compiled") as compiled_hook:
        replacements: list[tuple[type, str, Callable[[Any], None]]] = [
            (module.OptimizeContext, "__init__", lambda _: hook.lead_with_the_most_called()),
            (module.OptimizedModule, "__init__", lambda _: hook.lead(module.OptimizedModule)),
            (sys.modules[MODULE].Module, "compile", lambda model: hook.lead(type(model))),
        ]
        for owner, name, then in replacements:
            compiled_hook.replace(owner, name, functools.partial(make, then))
        return compiled_hook
