"""`tidegauge run --workers auto`: the next iterator of a loader gets the setting that the collector found.

The collector writes the settings into the run directory. They are read when an iterator is about to be made, never
within a pass. A loader is left as it is where other samples, another order or a failure could follow, and gets its
own setting back if an iterator cannot be made with the new one.

An iterator draws a seed for its workers when it is made. A persistent one is made once, so the training's random
numbers are put back if it is replaced.
"""

from __future__ import annotations

import functools
import json
import os
import random
import sys
from threading import get_ident
from typing import Any, NamedTuple

from training_harness import session
from training_harness.hooks.loading.loader import LoaderHook
from training_harness.hooks.loading.loader_ids import LoaderInfo, Setting
from training_harness.hooks.loading.obstacles import batch_obstacle, error_words, is_persistent, obstacle
from training_harness.hooks.patching import Hook, unseen_by_warnings
from training_harness.hooks.process import is_worker
from training_harness.layout import WORKERS_AUTO, WORKERS_VARIABLE, loader_settings_path

_SEED_BITS = 62


def install(loaders: LoaderHook) -> Hook | None:
    """Replace `DataLoader.__iter__`; return None without `--workers auto`."""
    if os.environ.get(WORKERS_VARIABLE) != WORKERS_AUTO:
        return None
    module = sys.modules["torch.utils.data.dataloader"]
    with _SettingHook(loaders) as hook:
        hook.replace(module.DataLoader, "__iter__", functools.partial(_iter, hook))
        hook.replace(module._BaseDataLoaderIter, "__init__", functools.partial(_init, hook))
        loaders.check_batch = batch_obstacle
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


class _Change(NamedTuple):
    """A loader's change to another setting.

    Attributes:
        info: the loader with its setting before.
        wanted: the collector's entry for it.
        epochs_count: passes that began before.
        random_state: state of the random numbers before.
        seed: seed for the workers; None if no persistent iterator is dropped.
    """

    info: LoaderInfo
    wanted: dict[str, Any]
    epochs_count: int
    random_state: Any
    seed: int | None

    @property
    def setting(self) -> Setting:
        return self.wanted["num_workers"], self.wanted["prefetch_factor"]


class _SettingHook(Hook):
    """Hook that changes the settings of loaders."""

    def __init__(self, loaders: LoaderHook) -> None:
        super().__init__("loader setting")
        self._loaders = loaders
        self._reported_obstacles: set[tuple[int, str]] = set()
        #: id of a loader whose next iterator is being made -> its change.
        self.changes: dict[int, _Change] = {}

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
        if wanted is None or (wanted["num_workers"], wanted["prefetch_factor"]) == info.setting:
            return
        is_dropped = is_persistent(loader)
        change = _Change(
            info=info,
            wanted=wanted,
            epochs_count=epochs_count or info.epochs,
            random_state=_generator(loader).get_state(),
            seed=random.Random(loader._iterator._base_seed).getrandbits(_SEED_BITS) if is_dropped else None,
        )
        reason = obstacle(loader, info, change.setting)
        if reason is not None:
            if (info.number, reason) not in self._reported_obstacles:
                self._reported_obstacles.add((info.number, reason))
                self.report(change, info.number, reason)
            return
        self.changes[id(loader)] = change
        if is_dropped:
            loader._iterator = None  # which ends its workers
        _set(loader, change.setting)

    def after_iterator(self, loader: Any, change: _Change) -> None:
        """Report the change of a loader whose iterator was made."""
        current = session.active
        if current is not None:
            self.report(change, self._loaders.registry(current).info(loader).number)

    def take_back(self, loader: Any, change: _Change, error: Exception) -> None:
        """Give a loader its own setting again, since no iterator could be made with the other one."""
        _set(loader, change.info.setting)
        _generator(loader).set_state(change.random_state)
        self.attempt(
            self.report, change, change.info.number, f"it cannot be iterated with that: {error_words(error)}"
        )
        self.fail(error)

    def report(self, change: _Change, number: int, reason: str | None = None) -> None:
        """Append the event about a change, or about what is in its way."""
        current, before = session.active, change.info
        if current is not None:
            current.events.append(
                "loader-set",
                loader=number,
                replaces=before.number,
                num_workers=change.setting[0],
                prefetch_factor=change.setting[1],
                replaced_num_workers=before.setting[0],
                replaced_prefetch_factor=before.setting[1],
                epochs_count=change.epochs_count,
                is_undo=change.wanted["is_undo"],
                obstacle=reason,
                measured=change.wanted["measured"],
                expected=change.wanted["expected"],
            )


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


def _iter(hook: _SettingHook, original: Any) -> Any:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        hook.attempt(hook.before_iterator, self)
        change = hook.changes.get(id(self))
        if change is None:
            return original(self)
        try:
            iterator = original(self)
        except Exception as error:
            hook.take_back(self, change, error)
            return original(self)
        finally:
            hook.changes.pop(id(self), None)
        hook.attempt(hook.after_iterator, self, change)
        return iterator

    return iterate


def _init(hook: _SettingHook, original: Any) -> Any:
    @unseen_by_warnings
    @functools.wraps(original)
    def init(self: Any, loader: Any, *args: Any, **kwargs: Any) -> None:
        change = hook.changes.get(id(loader))
        if change is None or change.seed is None:
            original(self, loader, *args, **kwargs)
            return
        generator = _generator(loader)
        state = generator.get_state()
        original(self, loader, *args, **kwargs)
        generator.set_state(state)
        self._base_seed = change.seed

    return init
