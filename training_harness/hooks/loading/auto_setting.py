"""`tidegauge run --workers auto`: the next iterator of a loader gets the setting that the collector found.

The collector writes the settings into the run directory. They are read when an iterator is about to be made, never
within an epoch. A loader is left as it is where other samples, another order or a failure could follow.

An iterator draws a seed for its workers when it is made. A persistent one is made once, so the training's random
numbers are put back if it is replaced.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import random
import sys
from threading import get_ident
from typing import Any

from training_harness import session
from training_harness.hooks.loading.loader import LoaderHook
from training_harness.hooks.loading.loader_ids import LoaderInfo, Setting, is_iterable, setting_of, start_method_of
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import is_worker
from training_harness.layout import LOADER_SETTINGS, WORKERS_AUTO, WORKERS_VARIABLE

#: References to a persistent iterator that nothing else holds: one of its loader, two of this module, and one of
#: `sys.getrefcount`.
_OWN_REFERENCES = 4
_SEED_BITS = 62


def install(loaders: LoaderHook) -> Hook | None:
    """Replace `DataLoader.__iter__`; return None without `--workers auto`."""
    if os.environ.get(WORKERS_VARIABLE) != WORKERS_AUTO:
        return None
    module = sys.modules["torch.utils.data.dataloader"]
    with _SettingHook(loaders) as hook:
        hook.replace(module.DataLoader, "__iter__", functools.partial(_iter, hook))
        hook.replace(module._BaseDataLoaderIter, "__init__", functools.partial(_init, hook))
        loaders.notes_devices = True
        return hook


class _SettingHook(Hook):
    """Hook that changes the settings of loaders."""

    def __init__(self, loaders: LoaderHook) -> None:
        super().__init__("loader setting")
        self._loaders = loaders
        self._reported_obstacles: set[tuple[int, str]] = set()
        #: id of a loader whose persistent iterator was dropped -> seed for the workers of the next one.
        self.seeds: dict[int, int] = {}

    def before_iterator(self, loader: Any) -> None:
        """Change the setting of a loader that is about to be iterated, if the collector has found another one."""
        current = session.active
        if current is None or is_worker() or get_ident() in self._loaders.fetching:
            return
        wanted = _wanted_settings(current)
        if not wanted:
            return
        registry = self._loaders.registry(current)
        epochs_count, info = registry.epochs_count(loader), registry.info(loader)
        request = wanted.get(str(info.number))
        if request is None:
            return
        setting = request["num_workers"], request["prefetch_factor"]
        iterator = loader._iterator if loader.persistent_workers and loader.num_workers else None
        obstacle = _obstacle(loader, info, setting, iterator)
        if obstacle is None:
            if iterator is not None:
                self.seeds[id(loader)] = random.Random(iterator._base_seed).getrandbits(_SEED_BITS)
                iterator._shutdown_workers()
                loader._iterator = None
            loader.prefetch_factor = setting[1]  # first, since an iterator with workers needs it
            loader.num_workers = setting[0]
        elif (info.number, obstacle) in self._reported_obstacles:
            return
        else:
            self._reported_obstacles.add((info.number, obstacle))
        current.events.append(
            "loader-set",
            loader=registry.info(loader).number,
            replaces=info.number,
            num_workers=setting[0],
            prefetch_factor=setting[1],
            replaced_num_workers=info.setting[0],
            replaced_prefetch_factor=info.setting[1],
            epochs_count=epochs_count or info.epochs,
            is_undo=request["is_undo"],
            obstacle=obstacle,
            measured=request["measured"],
            expected=request["expected"],
        )


def _wanted_settings(current: session.Session) -> dict[str, Any]:
    """Return loader number -> setting for this process."""
    try:
        text = (current.run_dir / LOADER_SETTINGS).read_bytes()
    except FileNotFoundError:
        return {}
    who = current.identity
    of_process: dict[str, Any] = json.loads(text).get(f"{who.host}.{who.pid}.{who.start_ticks}", {})
    return of_process


def _obstacle(loader: Any, info: LoaderInfo, setting: Setting, iterator: Any) -> str | None:
    """Return why a loader cannot get this setting without changing results, in words; None if it can."""
    if is_iterable(loader) and (setting[0] != loader.num_workers or iterator is not None):
        return "its dataset is iterable, so each worker may have its own part of the samples"
    if (not loader.num_workers or iterator is not None) and not _begins_late(loader._index_sampler):
        return f"its sampler, {type(loader._index_sampler).__name__}, would begin once more"
    if not loader.num_workers and info.is_on_device:
        return "its batches are made on a device, which forked workers cannot use"
    if not loader.num_workers and start_method_of(loader) != "fork":
        return "workers are not forked here, and a script without workers may not be made for that"
    if iterator is not None and sys.getrefcount(iterator) > _OWN_REFERENCES:
        return "its persistent iterator is still in use"
    return None


def _begins_late(sampler: Any) -> bool:
    """Return whether a sampler does nothing until its first index: an iterator with workers begins it twice."""
    kind = type(sampler)
    return inspect.isgeneratorfunction(kind.__iter__) or kind.__name__ == "SequentialSampler"


def _iter(hook: _SettingHook, original: Any) -> Any:
    @functools.wraps(original)
    def __iter__(self: Any) -> Any:
        hook.attempt(hook.before_iterator, self)
        return original(self)

    return __iter__


def _init(hook: _SettingHook, original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        seed = hook.seeds.pop(id(loader), None) if hook.seeds else None
        if seed is None:
            original(self, loader, *args, **kwargs)
            return
        generator = loader.generator or sys.modules["torch"].default_generator
        state = generator.get_state()
        original(self, loader, *args, **kwargs)
        generator.set_state(state)
        self._base_seed = seed

    return init
