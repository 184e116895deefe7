"""`tidegauge run --workers auto`: the next iterator of a loader gets the setting that the collector found.

The collector writes the settings into the run directory. They are read when an iterator is about to be made, never
within a pass. A loader is left as it is where other samples, another order or a failure could follow, and gets its
own setting back if an iterator cannot be made with the new one.

An iterator draws a seed for its workers when it is made. A persistent one is made once, so the training's random
numbers are put back if it is replaced.
"""

from __future__ import annotations

import functools
import gc
import inspect
import json
import logging
import os
import random
import sys
from threading import get_ident
from types import BuiltinFunctionType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from training_harness import session
from training_harness.hooks.loading.loader import LoaderHook
from training_harness.hooks.loading.loader_ids import LoaderInfo, Setting, is_iterable, start_method_of
from training_harness.hooks.patching import Hook
from training_harness.hooks.process import is_worker
from training_harness.layout import WORKERS_AUTO, WORKERS_VARIABLE, loader_settings_path

_SEED_BITS = 62
#: Number of objects of a dataset that are searched for an open file.
_OBJECTS_AT_MOST = 10_000
#: Libraries whose objects hold files, connections or decoders that processes may not share after a fork.
_LIBRARIES_OF_HANDLES = frozenset(
    ("av", "cv2", "decord", "h5py", "lmdb", "netCDF4", "psycopg", "psycopg2", "sqlite3")
)
_NO_HANDLES = (type, ModuleType, FunctionType, BuiltinFunctionType, logging.Logger, logging.Handler)


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


def recommended(loaders: LoaderHook, loader: Any) -> dict[str, int] | None:
    """Return the setting of `training_harness.recommended`."""
    current = session.active
    if current is None or is_worker():
        return None
    registry = loaders.registry(current)
    setting = _settings(current).get(str(registry.number(loader)))
    if setting is None:
        if not registry.has_asked:
            registry.has_asked = True
            current.events.append("setting-asked")
        return None
    names = ("num_workers", "prefetch_factor") if setting["num_workers"] else ("num_workers",)
    return {name: int(setting[name]) for name in names}


class _SettingHook(Hook):
    """Hook that changes the settings of loaders."""

    def __init__(self, loaders: LoaderHook) -> None:
        super().__init__("loader setting")
        self._loaders = loaders
        self._reported_obstacles: set[tuple[int, str]] = set()
        #: id of a loader whose persistent iterator was dropped -> seed for the workers of the next one.
        self.seeds: dict[int, int] = {}
        #: id of a loader whose setting was changed -> setting and state of the random numbers before.
        self.before: dict[int, tuple[Setting, Any]] = {}

    def before_iterator(self, loader: Any) -> None:
        """Change the setting of a loader that is about to be iterated, if the collector has found another one."""
        current = session.active
        if current is None or is_worker() or get_ident() in self._loaders.fetching:
            return
        settings = _settings(current)
        if not settings:
            return
        registry = self._loaders.registry(current)
        epochs_count, info = registry.epochs_count(loader), registry.info(loader)
        wanted = settings.get(str(info.number))
        setting = (wanted["num_workers"], wanted["prefetch_factor"]) if wanted is not None else info.setting
        if wanted is None or setting == info.setting:
            return
        obstacle = _obstacle(loader, info, setting)
        if obstacle is None:
            self.before[id(loader)] = info.setting, _generator(loader).get_state()
            if _is_persistent(loader):
                self.seeds[id(loader)] = random.Random(loader._iterator._base_seed).getrandbits(_SEED_BITS)
                loader._iterator = None  # which ends its workers
            _set(loader, setting)
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
            is_undo=wanted["is_undo"],
            obstacle=obstacle,
            measured=wanted["measured"],
            expected=wanted["expected"],
        )

    def take_back(self, loader: Any) -> bool:
        """Give a loader its own setting again if it was just changed; return whether it was."""
        setting, state = self.before.pop(id(loader), (None, None))
        if setting is None:
            return False
        _set(loader, setting)
        _generator(loader).set_state(state)
        return True


def _settings(current: session.Session) -> dict[str, Any]:
    """Return loader number -> setting for this process."""
    who = current.identity
    try:
        text = loader_settings_path(current.run_dir, who.host).read_bytes()
    except FileNotFoundError:
        return {}
    of_process: dict[str, Any] = json.loads(text).get(f"{who.host}.{who.pid}.{who.start_ticks}", {})
    return of_process


def _set(loader: Any, setting: Setting) -> None:
    loader.prefetch_factor = setting[1]  # first, since an iterator with workers needs it
    loader.num_workers = setting[0]


def _generator(loader: Any) -> Any:
    """Return the random numbers from which an iterator draws the seed for its workers."""
    return loader.generator if loader.generator is not None else sys.modules["torch"].default_generator


def _obstacle(loader: Any, info: LoaderInfo, setting: Setting) -> str | None:
    """Return why a loader cannot get this setting without changing results, in words; None if it can."""
    has_workers, is_persistent = bool(loader.num_workers), _is_persistent(loader)
    if is_iterable(loader):
        return "its dataset is iterable, so each worker may have its own part of the samples"
    if (not has_workers or is_persistent) and not _begins_late(loader._index_sampler):
        return f"its sampler, {type(loader._index_sampler).__name__}, would begin once more"
    if is_persistent and _is_held(loader):
        return "its persistent iterator is still in use"
    if has_workers or not setting[0]:
        return None
    if info.is_on_device:
        return "its batches are made on a device, which forked workers cannot use"
    if start_method_of(loader) != "fork":
        return "workers are not forked here, and a script without workers may not be made for that"
    handle = _handle(loader.dataset, loader.collate_fn)
    if handle is not None:
        return f"its dataset holds an open {handle}, which forked workers cannot share"
    return None


def _is_persistent(loader: Any) -> bool:
    """Return whether a loader has an iterator that outlives its pass."""
    return bool(loader.persistent_workers and loader.num_workers and loader._iterator is not None)


def _begins_late(sampler: Any) -> bool:
    """Return whether a sampler does nothing until its first index: an iterator with workers begins it twice."""
    kind = type(sampler)
    return inspect.isgeneratorfunction(kind.__iter__) or kind.__name__ == "SequentialSampler"


def _is_held(loader: Any) -> bool:
    """Return whether something besides a loader refers to its persistent iterator, as a loop does within a pass."""
    alone = SimpleNamespace(_iterator=SimpleNamespace())
    return sys.getrefcount(loader._iterator) > sys.getrefcount(alone._iterator)


def _handle(*roots: Any) -> str | None:
    """Return the type of an open file, connection or the like among what a dataset refers to; None without one.

    The search runs no code of the dataset. It is not complete: it looks at a bounded number of objects.
    """
    things, seen = list(roots), set[int]()
    for thing in things:  # grows meanwhile
        if len(seen) >= _OBJECTS_AT_MOST:
            return None
        kind = type(thing)
        if id(thing) in seen or issubclass(kind, _NO_HANDLES):
            continue
        seen.add(id(thing))
        if hasattr(kind, "fileno") or kind.__module__.partition(".")[0] in _LIBRARIES_OF_HANDLES:
            return kind.__qualname__
        things += gc.get_referents(thing)
    return None


def _iter(hook: _SettingHook, original: Any) -> Any:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        hook.attempt(hook.before_iterator, self)
        if not hook.before:
            return original(self)
        try:
            return original(self)
        except Exception as error:
            if not hook.take_back(self):
                raise
            hook.fail(error)
            return original(self)
        finally:
            hook.before.pop(id(self), None)
            hook.seeds.pop(id(self), None)

    return iterate


def _init(hook: _SettingHook, original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        seed = hook.seeds.get(id(loader)) if hook.seeds else None
        if seed is None:
            original(self, loader, *args, **kwargs)
            return
        generator = _generator(loader)
        state = generator.get_state()
        original(self, loader, *args, **kwargs)
        generator.set_state(state)
        self._base_seed = seed

    return init
