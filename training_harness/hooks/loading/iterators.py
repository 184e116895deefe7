"""Replacements for the methods of torch's DataLoader iterators, so that `LoaderHook` sees indices and batches.

Class methods are replaced, so `for batch in loader`, `next(iter(loader))` and `itertools.cycle` are all
seen, and the loader, its iterators and its batches stay the user's own. Differences between torch
versions are probed by name, never by version number; a name that is missing costs the column that
needs it, not the hook (torch/utils/data/dataloader.py).

Iterators with workers from other libraries, such as torchdata, have methods and a worker loop of their own. Those
are replaced when the first such iterator is created, which is early enough: it has no worker yet.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from threading import get_ident
from typing import Any

from training_harness import session
from training_harness.hooks.loading.loader import NESTED, STOPPING, LoaderHook, states
from training_harness.hooks.loading.worker import WorkerEntry
from training_harness.hooks.patching import Hook, unseen_by_warnings
from training_harness.hooks.stages import stages
from training_harness.hooks.training.step_phases import Progress
from training_harness.records import MISSING_INT32, MISSING_INT64, UNIT_BATCH


def install(progress: Progress) -> LoaderHook:
    """Replace the iterator methods, and record for each optional name whether this torch has it.

    Raises:
        AttributeError: `_BaseDataLoaderIter.__init__` or `__next__` is missing: no batch can be seen.
    """
    module = sys.modules["torch.utils.data.dataloader"]
    base, parallel = module._BaseDataLoaderIter, module._MultiProcessingDataLoaderIter
    with LoaderHook(progress) as hook:
        hook.replace(base, "__init__", lambda original: _init(hook, original))
        hook.replace(base, "__next__", lambda original: _next(hook, original))
        hook.replace(module.DataLoader, "__iter__", lambda original: _iter(hook, original))
        for name, make in (("_next_index", _next_index), ("_reset", _reset)):
            progress.capabilities[name] = hasattr(base, name)
            if progress.capabilities[name]:
                hook.replace(base, name, functools.partial(make, hook))
        progress.capabilities |= _replace_queue_methods(hook, parallel)
        return hook


def install_epochs(hook: LoaderHook, module: str, loader: str) -> Hook:
    """Replace the `__iter__` of a loader class that does not call DataLoader's, before it makes an iterator."""
    with Hook("epochs") as epochs:
        epochs.replace(getattr(sys.modules[module], loader), "__iter__", lambda original: _iter(hook, original))
        return epochs


def _replace_queue_methods(hook: LoaderHook, kind: type) -> dict[str, bool]:
    """Replace the methods that only iterators with workers have; return for each name whether the class has it.

    Where a derived class extends a method, the base's one is replaced: that one waits for the queue.
    """
    hook.patch_keys.add(kind)
    exists = {}
    for name, make in (("_get_data", _get_data), ("_shutdown_workers", _shutdown_workers)):
        owners = [owner for owner in kind.__mro__ if inspect.isfunction(vars(owner).get(name))]
        exists[name] = bool(owners) and [*inspect.signature(vars(owners[-1])[name]).parameters] == ["self"]
        if exists[name] and (owners[-1], name) not in hook.patch_keys:
            hook.patch_keys.add((owners[-1], name))
            hook.replace(owners[-1], name, functools.partial(make, hook))
    for module in (sys.modules.get(owner.__module__) for owner in kind.__mro__):
        if inspect.isfunction(getattr(module, "_worker_loop", None)):
            hook.replace(module, "_worker_loop", WorkerEntry)
    return exists


def _init(hook: LoaderHook, original: Any) -> Any:
    clock = time.monotonic_ns

    @unseen_by_warnings
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        begun_ns = clock()
        original(self, loader, *args, **kwargs)
        if type(self) not in hook.patch_keys:
            hook.attempt(_replace_queue_methods, hook, type(self))
        hook.attempt(hook.on_iterator, self, loader, begun_ns)

    return init


def _iter(hook: LoaderHook, original: Any) -> Any:
    clock = time.monotonic_ns

    def iterate(self: Any) -> Any:
        begun_ns = clock()
        iterator = original(self)
        hook.attempt(hook.on_epoch_ready, iterator, begun_ns, clock())
        return iterator

    return iterate


def _next(hook: LoaderHook, original: Any) -> Any:
    """Return the replacement for `__next__`.

    It runs for every batch, in the middle of the training loop, where each function call costs some 0.7 µs. Hence
    its form: names are bound once, nothing is split into functions, and the meaning of a batch is worked out later,
    in deferred calls. The fast path, for a loader with workers and nothing due, is:

    1. Look up the iterator's state and the thread, and read the clock.
    2. Check that no write and no stage record is due. The request is not logged: the batch's call reports it.
    3. Call torch's `__next__` and read the clock again.
    4. Read the batch's index and the counters of the queues.
    5. Log `on_yield` with these values, and check that no write of batches is due.
    6. Note the batch for the stages that the loop calls next.

    A loader without workers makes the batch in step 3, so the two readings of the clock time the fetch as well. It
    is metered if that is due, and `on_inline_batch` is logged.
    """
    clock, local, pending_tallies, fetching = time.monotonic_ns, stages.local, stages.pending_tallies, hook.fetching
    state_of, progress, calls = states.get, hook.progress, hook.progress.calls
    on_batch_request, on_yield, on_inline_batch = progress.on_batch_request, hook.on_yield, hook.on_inline_batch

    @unseen_by_warnings
    def advance(self: Any) -> Any:
        state, thread = state_of(id(self)), get_ident()
        # A loader within the dataset of a loader that loads inline is part of that one's fetch.
        nested = thread in fetching
        if state is None or not hook.active or (nested and state.is_inline):
            return original(self)
        is_inline, meter, begun_ns = state.is_inline, None, clock()
        try:
            if not nested:
                is_due = begun_ns >= calls.due_ns and progress.ended_by <= UNIT_BATCH  # else the step's end writes
                if is_due or not (calls.are_deferred and (is_inline or state.has_queue)):
                    calls.log((hook, on_batch_request, begun_ns, thread))
                if is_due:
                    progress.catch_up(begun_ns)
                if pending_tallies and is_inline:
                    stages.begin_fetch(begun_ns)
                elif pending_tallies and begun_ns >= stages.due_ns:
                    stages.write_loop_stages(begun_ns)
            if is_inline:
                fetching.add(thread)
                if begun_ns >= state.meter_at_ns:
                    meter = hook.begin_metering(state)
                    begun_ns = meter.begun_ns  # the kernel may take the core away at its readings: that is no wait
        except Exception as error:
            hook.fail(error)
        try:
            data = original(self)
        except BaseException as error:
            if is_inline:
                fetching.discard(thread)
                hook.attempt(stages.return_to_loop)
                calls.log((hook, on_batch_request, begun_ns, thread))
            if not isinstance(error, StopIteration):
                hook.attempt(hook.note_deaths, self, ())
            hook.attempt(hook.note_error, state, error)
            raise
        now_ns = clock()
        try:
            index = state.yielded_count
            details: Any = None  # the costs of a metered fetch, or the state of the queue
            state.yielded_count += 1
            if is_inline:
                fetching.discard(thread)
                details = meter and meter.end()
                if pending_tallies:
                    stages.end_fetch(now_ns, state.info.number, state.epoch, index)
            elif not state.is_probed:
                hook.probe_queue(self, state)
            if state.has_queue:
                index = self._rcvd_idx - 1 if state.in_order else state.popped_index
                worker_id, blocked_ns = state.workers.pop(index, MISSING_INT32), state.blocked_ns
                details = worker_id, blocked_ns, self._tasks_outstanding, len(self._task_info), state.free_slots()
                state.blocked_ns = 0
            size_bytes = hook.measure(state, data, now_ns) if now_ns >= state.measure_at_ns else MISSING_INT64
            thread = NESTED if nested else thread
            on_arrival = on_inline_batch if is_inline else on_yield
            batch = state.info.number, state.epoch, index
            calls.log((hook, on_arrival, state, batch, thread, (begun_ns, now_ns), details, size_bytes))
            if now_ns >= calls.batch_due_ns and session.active is not None:
                calls.write_batches(session.active, now_ns)
            if not nested:
                local.tally.batch = batch
        except Exception as error:
            hook.fail(error)
        return data

    return advance


def _next_index(hook: LoaderHook, original: Any) -> Any:
    state_of = states.get

    def _next_index(self: Any) -> Any:
        index = original(self)
        state = state_of(id(self))
        if state is not None and state.has_sample_counts and isinstance(index, (list, tuple)):
            try:
                state.samples[state.yielded_count if state.is_inline else self._send_idx] = len(index)
            except AttributeError:  # this iterator counts in another way than torch's
                state.has_sample_counts = False
            except Exception as error:
                hook.fail(error)
        return index

    return _next_index


def _reset(hook: LoaderHook, original: Any) -> Any:
    def _reset(self: Any, loader: Any, first_iter: bool = False) -> Any:
        hook.attempt(hook.on_epoch_start, self, first=first_iter)
        return original(self, loader, first_iter)

    return _reset


def _get_data(hook: LoaderHook, original: Any) -> Any:
    clock, state_of = time.monotonic_ns, states.get

    def _get_data(self: Any) -> Any:
        begun_ns = clock()
        message = original(self)
        state = state_of(id(self))
        if state is not None and state.has_queue and hook.active:
            try:
                index, tasks = message[0], getattr(self, "_task_info", ())
                if index in tasks:  # else a persistent worker's `_ResumeIteration`, which belongs to no task
                    state.popped_index, state.workers[index] = index, tasks[index][0]
                    state.blocked_ns += clock() - begun_ns
            except Exception as error:
                hook.fail(error)
        return message

    return _get_data


def _shutdown_workers(hook: LoaderHook, original: Any) -> Any:
    clock = time.monotonic_ns

    def _shutdown_workers(self: Any) -> Any:
        hook.attempt(hook.note_deaths, self, STOPPING)
        begun_ns = clock()
        try:
            return original(self)
        finally:
            hook.attempt(hook.on_workers_ended, self, begun_ns)

    return _shutdown_workers
