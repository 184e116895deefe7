"""Replaces the methods of torch's DataLoader iterators, so that `LoaderHook` sees what passes.

Class methods are replaced, so `for batch in loader`, `next(iter(loader))` and `itertools.cycle` are all
seen, and the loader, its iterators and its batches stay the user's own. What differs between torch
versions is probed by name, never by version number; a name that is missing costs the column that
needs it, not the hook (torch/utils/data/dataloader.py).

Iterators with workers that are not torch's own, such as torchdata's, have methods and a worker loop of their own.
Those are met when the first such iterator is created, which is early enough: it has no worker yet.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

from training_harness import session
from training_harness.hooks import stages
from training_harness.hooks.loader import INNER, LoaderHook, states
from training_harness.hooks.progress import BATCH, Progress
from training_harness.hooks.worker import WorkerEntry
from training_harness.records import MISSING_INT64


def install(progress: Progress) -> tuple[LoaderHook, dict[str, bool]]:
    """Replace the iterator methods; returns the hook and which optional names were found.

    Raises:
        AttributeError: `_BaseDataLoaderIter.__init__` or `__next__` is not there: no batch can be seen.
    """
    module = sys.modules["torch.utils.data.dataloader"]
    base, parallel = module._BaseDataLoaderIter, module._MultiProcessingDataLoaderIter
    with LoaderHook(progress) as hook:
        hook.replace(base, "__init__", lambda original: _init(hook, original))
        hook.replace(base, "__next__", lambda original: _next(hook, original))
        found = {}
        for name, make in (("_next_index", _next_index), ("_reset", _reset)):
            found[name] = hasattr(base, name)
            if found[name]:
                hook.replace(base, name, functools.partial(make, hook))
        return hook, found | _adopt(hook, parallel)


def _adopt(hook: LoaderHook, kind: type) -> dict[str, bool]:
    """Replace what an iterator class with workers has of its own; returns which names were found.

    Where a derived class extends a method, the one that it extends is replaced: that one waits for the queue.
    """
    hook.known.add(kind)
    found = {}
    for name, make in (("_get_data", _get_data), ("_shutdown_workers", _shutdown_workers)):
        owners = [owner for owner in kind.__mro__ if inspect.isfunction(vars(owner).get(name))]
        found[name] = bool(owners) and [*inspect.signature(vars(owners[-1])[name]).parameters] == ["self"]
        if found[name] and (owners[-1], name) not in hook.known:
            hook.known.add((owners[-1], name))
            hook.replace(owners[-1], name, functools.partial(make, hook))
    for module in (sys.modules.get(owner.__module__) for owner in kind.__mro__):
        if inspect.isfunction(getattr(module, "_worker_loop", None)):
            hook.replace(module, "_worker_loop", WorkerEntry)
    return found


def _init(hook: LoaderHook, original: Any) -> Any:
    clock = time.monotonic_ns

    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        begun_ns = clock()
        original(self, loader, *args, **kwargs)
        if hook.active:
            try:
                if type(self) not in hook.known:
                    _adopt(hook, type(self))
                hook.begin(self, loader, begun_ns)
            except Exception as error:
                hook.fail(error)

    return init


def _next(hook: LoaderHook, original: Any) -> Any:
    clock, here, waiting, fetching = time.monotonic_ns, stages.here, stages.waiting, hook.fetching
    state_of, progress, tape = states.get, hook.progress, hook.progress.tape
    asked, yielded = progress.asked, hook.yielded

    def advance(self: Any) -> Any:
        state, thread = state_of(id(self)), get_ident()
        # Inside the dataset of a loader that loads inline, a loader is part of that one's fetch.
        inner = thread in fetching
        if state is None or not hook.active or (inner and state.inline):
            return original(self)
        meter, begun_ns = None, clock()
        try:
            if inner:
                thread = INNER
            else:
                is_due = begun_ns >= tape.due_ns and progress.ended_by <= BATCH  # else its end is the time
                if is_due or not tape.waits or not state.queued:  # else `yielded` tells it
                    tape.log((hook, asked, begun_ns, thread))
                if is_due:
                    progress.catch_up(begun_ns)
                elif waiting and begun_ns >= stages.due_ns:
                    stages.used(begun_ns)
            if state.inline:
                meter = hook.open_fetch(begun_ns)
                begun_ns = clock()
        except Exception as error:
            hook.fail(error)
        try:
            data = original(self)
        except BaseException as error:
            if state.inline:
                fetching.discard(get_ident())
            if not isinstance(error, StopIteration):
                _guarded(hook, hook.note_deaths, self)
            raise
        now_ns = clock()
        try:
            if meter is not None:
                hook.fetched_inline(state, meter)
            if not state.looked:
                hook.look_for_books(self, state)
            index, queue = state.yielded, None
            if state.queued:
                index = self._rcvd_idx - 1 if state.in_order else state.popped_index
                queue = self._tasks_outstanding, len(self._task_info), state.free_places()
            state.yielded += 1
            size_bytes = hook.weigh(state, data, now_ns) if now_ns >= state.weigh_at_ns else MISSING_INT64
            tape.log((hook, yielded, state, index, thread, (begun_ns, now_ns), queue, size_bytes))
            if now_ns >= tape.batch_due_ns and session.active is not None:
                tape.write_batches(session.active, now_ns)
            if thread != INNER:
                here.tally.batch = state.info.number, state.epoch, index
        except Exception as error:
            hook.fail(error)
        return data

    return advance


def _next_index(hook: LoaderHook, original: Any) -> Any:
    state_of = states.get

    def _next_index(self: Any) -> Any:
        index = original(self)
        state = state_of(id(self))
        if state is not None and state.countable and isinstance(index, (list, tuple)):
            try:
                state.samples[state.yielded if state.inline else self._send_idx] = len(index)
            except AttributeError:  # it counts otherwise than torch does
                state.countable = False
            except Exception as error:
                hook.fail(error)
        return index

    return _next_index


def _reset(hook: LoaderHook, original: Any) -> Any:
    def _reset(self: Any, loader: Any, first_iter: bool = False) -> Any:
        if hook.active:
            try:
                hook.started(self, first=first_iter)
            except Exception as error:
                hook.fail(error)
        return original(self, loader, first_iter)

    return _reset


def _get_data(hook: LoaderHook, original: Any) -> Any:
    clock, state_of, tape, popped = time.monotonic_ns, states.get, hook.progress.tape, hook.popped

    def _get_data(self: Any) -> Any:
        begun_ns = clock()
        message = original(self)
        state = state_of(id(self))
        if state is not None and state.queued and hook.active:
            try:
                index, tasks = message[0], getattr(self, "_task_info", ())
                if index in tasks:  # else a persistent worker's `_ResumeIteration`, which stands for no task
                    state.popped_index = index
                    tape.log((hook, popped, state, index, tasks[index][0], clock() - begun_ns))
            except Exception as error:
                hook.fail(error)
        return message

    return _get_data


def _shutdown_workers(hook: LoaderHook, original: Any) -> Any:
    def _shutdown_workers(self: Any) -> Any:
        _guarded(hook, hook.note_deaths, self)
        try:
            return original(self)
        finally:
            _guarded(hook, hook.note_late_deaths, self)

    return _shutdown_workers


def _guarded(hook: LoaderHook, call: Callable[[Any], None], argument: Any) -> None:
    if hook.active:
        try:
            call(argument)
        except Exception as error:
            hook.fail(error)
