"""Step boundaries and phases: torch's global optimizer hooks, and the call that starts a backward pass.

With several optimizers (a GAN, say) the one that stepped first leads: a step ends when the leader has stepped. When
another one steps twice in between, the leader is gone or frozen, and the other one leads from then on. A new one
leads at once if the leader is gone. One that took turns with it does not: calls are deferred, so the leader may
have gone only after that step.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

from training_harness import session
from training_harness.hooks import compiler
from training_harness.hooks.accelerators import in_use, is_capturing
from training_harness.hooks.patching import Hook
from training_harness.hooks.training.devices import BACKWARD, OPTIMIZE, OTHER, Reading
from training_harness.hooks.training.optimizers import OptimizerGauge
from training_harness.hooks.training.step_phases import UNREAD, Progress
from training_harness.records import UNIT_OPTIMIZER, UNIT_SCRIPT

FASTAI = "fastai.optimizer"
#: Number of optimizers of a turn that are remembered: a loop may make a new one for each step.
_MOST_IN_TURN = 1000


def _no_optimizer() -> None:
    """Stand in for a weak reference to no optimizer."""


class _PickledAsNothing(functools.partial[None]):
    """Hook of torch's that does nothing in the process that unpickles it.

    cloudpickle and dill pickle the optimizers of scripts by value, and with them torch's table of global hooks.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext, "__exit__")  # accepts any arguments and returns None


class StepHook(Hook):
    """Hook on every `Optimizer.step` of the process.

    Attributes:
        before, after: torch's hooks, which take the optimizer, its arguments and its keyword arguments.
        captured: optimizers, by id, that step in the CUDA graph which is being captured; None outside of a capture.
    """

    before: Callable[[Any, Any, Any], None]
    after: Callable[[Any, Any, Any], None]

    def __init__(self, progress: Progress) -> None:
        super().__init__("step")
        self._progress = progress
        self._optimizers = OptimizerGauge()
        self._optimizers_hook = Hook("optimizer")
        progress.read_optimizers = self._read_optimizers
        self.captured: dict[int, Callable[[], Any]] | None = None
        self._leader: Callable[[], Any] = _no_optimizer
        self._follower: Callable[[], Any] = _no_optimizer
        self._turn: dict[int, Callable[[], Any]] = {}  # by id: those that stepped since the leader did
        self._last_turn: dict[int, Callable[[], Any]] = {}

    def on_step_begin(
        self,
        now_ns: int,
        thread: int,
        optimizer: Callable[[], Any],
        cpu_ns: int = UNREAD,
        reading: Reading | None = None,
    ) -> None:
        """Mark the start of an optimizer's step: the fixed phase at which device memory is read.

        A deferred call has that reading with it.
        """
        current, progress = session.active, self._progress
        if current is None:
            return
        progress.on_optimizer(thread)
        self._optimizers.see(optimizer)
        if progress.ended_by != UNIT_SCRIPT and (self._leader is optimizer or self._take_lead(optimizer)):
            progress.end_steps_by(UNIT_OPTIMIZER)
            if reading is not None or progress.uses_device:
                progress.gauge(current, reading)
        progress.mark(OTHER, now_ns, cpu_ns)

    def on_step_end(self, now_ns: int, optimizer: Callable[[], Any], cpu_ns: int = UNREAD) -> None:
        """Mark the end of an optimizer's step."""
        current, progress = session.active, self._progress
        if current is None:
            return
        progress.mark(OPTIMIZE, now_ns, cpu_ns)
        if progress.ended_by == UNIT_OPTIMIZER and self._leader is optimizer:
            progress.end(current, now_ns, cpu_ns)
            self._follower = _no_optimizer
            if self._turn:
                self._last_turn, self._turn = self._turn, {}

    def read_due_optimizers(self, now_ns: int) -> None:
        """Record the memory of the optimizers, if that is due; called when one of them has stepped."""
        if now_ns >= self._optimizers.due_ns:
            self._read_optimizers()

    def _read_optimizers(self) -> None:
        if session.active is not None:
            self._optimizers_hook.attempt(self._optimizers.record, session.active)

    def is_captured(self, optimizer: Any) -> bool:
        """Return whether a step becomes part of a CUDA graph and computes nothing now; note its optimizer then."""
        if self.captured is None or not is_capturing(in_use(sys.modules["torch"])):
            return False  # a capture that failed may have had no end
        self.captured[id(optimizer)] = weakref.ref(optimizer)
        return True

    def may_lead(self, optimizer: Callable[[], Any]) -> bool:
        """Return whether an optimizer ends the steps, as far as the calls that have run show."""
        return self._leader is optimizer or self._leader() is None

    def _take_lead(self, optimizer: Callable[[], Any]) -> bool:
        is_new = id(optimizer) not in self._turn and id(optimizer) not in self._last_turn
        if (is_new and self._leader() is None) or self._follower is optimizer:
            self._leader, self._turn, self._last_turn = optimizer, {}, {}
            return True
        if len(self._turn) < _MOST_IN_TURN:
            self._turn[id(optimizer)] = optimizer
        if self._follower() is None:
            self._follower = optimizer
        return False


def install(progress: Progress) -> StepHook:
    """Register the global optimizer hooks.

    They run in every step, where each function call costs some 0.7 µs. So they are flat: names are bound
    beforehand, and each reads one clock and logs one call. Dynamo treats `is_compiling` as a constant, so the hooks
    vanish from a compiled step.
    """
    module = sys.modules["torch.optim.optimizer"]
    is_compiling = compiler.is_compiling()
    calls, clock, cpu_clock, reference = progress.calls, time.monotonic_ns, time.thread_time_ns, weakref.ref

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling() or not hook.active:
            return
        try:
            current = session.active or session.start()
            if current is None or (hook.captured is not None and hook.is_captured(optimizer)):
                return
            if not current.process_started:
                progress.announce(current)
            now_ns, stepped = clock(), reference(optimizer)
            cpu_ns = cpu_clock() if progress.reads_cpu else UNREAD
            is_due = progress.uses_device and calls.are_deferred and hook.may_lead(stepped)
            reading = progress.read_gauges() if is_due else None
            calls.log((hook, on_step_begin, now_ns, get_ident(), stepped, cpu_ns, reading))
        except Exception as error:
            hook.fail(error)

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling() or not hook.active:
            return
        try:
            if hook.captured is not None and hook.is_captured(optimizer):
                return
            now_ns = clock()
            is_due = now_ns >= calls.due_ns
            cpu_ns = boundary_cpu_clock(now_ns) if progress.reads_cpu or is_due else UNREAD
            calls.log((hook, on_step_end, now_ns, reference(optimizer), cpu_ns))
            if is_due:
                progress.catch_up(now_ns)
                hook.read_due_optimizers(now_ns)
        except Exception as error:
            hook.fail(error)

    with StepHook(progress) as hook:
        on_step_begin, on_step_end = hook.on_step_begin, hook.on_step_end
        boundary_cpu_clock = progress.boundary_cpu_clock
        hook.before, hook.after = before, after
        hook.on_remove(module.register_optimizer_step_pre_hook(_PickledAsNothing(before)).remove)
        hook.on_remove(module.register_optimizer_step_post_hook(_PickledAsNothing(after)).remove)
        return hook


def install_fastai(step_hook: StepHook) -> Hook:
    """Replace `step` of fastai's optimizers, which do not derive from torch's (fastai/optimizer.py)."""

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            step_hook.before(optimizer, args, kwargs)
            result = original(optimizer, *args, **kwargs)
            step_hook.after(optimizer, args, kwargs)
            return result

        return step

    with Hook("step:fastai") as hook:
        hook.replace(sys.modules[FASTAI].Optimizer, "step", make)
        return hook


def install_backward(progress: Progress) -> Hook:
    """Replace `torch.autograd.backward`, which `Tensor.backward` calls (torch/_tensor.py).

    As with the optimizer's hooks, nothing in the replacement is split into functions.
    """
    hook = Hook("backward")
    is_compiling = compiler.is_compiling()
    calls, clock, cpu_clock = progress.calls, time.monotonic_ns, time.thread_time_ns
    on_backward, mark = progress.on_backward, progress.mark
    running = False  # a checkpointed part of the model runs a backward pass within the backward pass
    is_reported = False  # that this process trains, where nothing else may show it, as in hand-written updates

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal running, is_reported
            if is_compiling() or running or not hook.active:
                return original(*args, **kwargs)
            running = True
            try:
                if not is_reported:
                    is_reported = True
                    current = session.active or session.start()
                    if current is not None and not current.process_started:
                        current.events.append("backward-pass")
                calls.log((hook, on_backward, clock(), cpu_clock() if progress.reads_cpu else UNREAD))
            except Exception as error:
                hook.fail(error)
            try:
                return original(*args, **kwargs)
            finally:
                running = False
                try:
                    calls.log((hook, mark, BACKWARD, clock(), cpu_clock() if progress.reads_cpu else UNREAD))
                except Exception as error:
                    hook.fail(error)

        return backward

    hook.replace(sys.modules["torch.autograd"], "backward", make)
    return hook


def step(progress: Progress) -> None:
    """End a step for the script; from now on nothing else ends one."""
    current = session.start()
    if current is None:
        return
    progress.announce(current)
    progress.calls.run()
    now_ns = time.monotonic_ns()
    is_partial = progress.ended_by == UNIT_OPTIMIZER  # it ended the last step, so this one is only a part
    progress.end_steps_by(UNIT_SCRIPT)
    if is_partial:
        progress.begin(now_ns)
    else:
        progress.gauge(current)
        progress.end(current, now_ns)
    if now_ns >= progress.calls.due_ns:
        progress.catch_up(now_ns)


def has_optimizer() -> bool:
    """Return whether an optimizer was ever made: its class's `step` is wrapped then (torch/optim/optimizer.py)."""
    module = sys.modules.get("torch.optim.optimizer")
    classes = [module.Optimizer] if module is not None else []
    for kind in classes:
        if getattr(kind.step, "hooked", False):
            return True
        classes += kind.__subclasses__()
    return False
