"""Numbers of DataLoaders, and one event each with the place that made it (file, line, variable) and its settings.

A DataLoader whose number of workers or prefetch factor changes gets another number, so that every record belongs to
one setting. The place distinguishes the loaders of a run. The newest loaders are remembered, weakly, until they are
iterated.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import linecache
import re
import sys
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from training_harness import session
from training_harness.hooks.patching import Hook, unseen_by_warnings

#: Number of loaders that get an event: a loop that makes a new DataLoader in each step must not flood the events.
_DESCRIBED_LOADERS = 1000
#: Number of recent loaders with the same settings among which a dead one is searched.
_SAME_SETTINGS_LOADERS = 8
#: Number of remembered settings: a loader of another length in each step must not fill the memory.
_CONFIGURATIONS = 256
#: id of a loader -> (weak reference to the loader, the place that made it, the call there: code and instruction).
_sites: dict[int, tuple[weakref.ref[Any], dict[str, Any], tuple[CodeType, int] | None]] = {}
#: Number of remembered places: a script that makes a loader in each step must not fill the memory.
_SITES_AT_MOST = 256
#: `train_loader = DataLoader(...)`, also as an attribute or with an annotation.
_ASSIGNED = re.compile(r"\s*(?:\w+\.)*(\w+)\s*(?::[^=]+)?=[^=]")
#: Obstacle of a loader before its first batch.
NO_BATCH = "no batch that it made itself was looked at"
#: Number of workers and prefetch factor of a loader.
Setting = tuple[int, int | None]


class LoaderInfo:
    """A DataLoader that was iterated, or several in turn, each with the settings of a dead one before it.

    Attributes:
        number: number of the loader, in the order of first use.
        setting: its number of workers and its prefetch factor.
        epochs: number of passes begun.
        first_epoch: first pass over the newest of them.
        is_made_again: True if another one has taken the place of one after a single pass.
        batch_obstacle: why workers could not make its batches, in words; None if they could.
        loader: weak reference to the newest of them.
        is_pass_over: returns whether its newest pass has ended; an iterator may outlive its loader.
    """

    def __init__(self, number: int, setting: Setting) -> None:
        self.number = number
        self.setting = setting
        self.epochs = 0
        self.first_epoch = 0
        self.is_made_again = False
        self.batch_obstacle: str | None = NO_BATCH
        self.loader: Callable[[], Any] = lambda: None
        self.is_pass_over: Callable[[], bool] = lambda: True

    def is_gone(self) -> bool:
        """Return whether the loader does not exist any more, and nothing iterates over it."""
        return self.loader() is None and self.is_pass_over()


class LoaderRegistry:
    """Registry of the DataLoaders iterated in a session; a forked child has a session of its own."""

    def __init__(self, current: session.Session) -> None:
        self.session = current
        #: id of a loader -> its numbers, one for each setting, the present one last.
        self._loaders: dict[int, list[LoaderInfo]] = {}
        self._same_settings: dict[str, deque[LoaderInfo]] = defaultdict(
            lambda: deque(maxlen=_SAME_SETTINGS_LOADERS)
        )
        self._next_number = 0
        #: True once the training has asked for a setting.
        self.has_asked = False

    def info(self, loader: Any) -> LoaderInfo:
        """Return the info of a loader with its present setting; describe a new one in an event."""
        key, setting = id(loader), setting_of(loader)
        infos = self._loaders.get(key)
        if infos is None or infos[-1].loader() is not loader:
            infos = self._loaders[key] = []
        elif infos[-1].setting == setting:
            return infos[-1]
        info = next((one for one in infos if one.setting == setting), None)
        if info is None:
            info = self._new(loader, infos[-1].number if infos else None)
            info.loader = weakref.ref(loader, lambda _: self._loaders.pop(key, None))
        else:
            infos.remove(info)
        infos.append(info)
        return info

    def number(self, loader: Any) -> int | None:
        """Return the number of a loader with the setting of its last iterator; None if it was not iterated."""
        infos = self._loaders.get(id(loader))
        return infos[-1].number if infos and infos[-1].loader() is loader else None

    def epochs_count(self, loader: Any) -> int:
        """Return the number of passes over a loader that have begun, with any setting."""
        return sum(info.epochs for info in self._loaders.get(id(loader), ()))

    def _new(self, loader: Any, replaces: int | None) -> LoaderInfo:
        configuration = _configuration(loader)
        if len(self._same_settings) > _CONFIGURATIONS:
            self._same_settings.clear()
        loaders = self._same_settings[str(configuration)]
        info = next((info for info in loaders if info.is_gone()), None)
        if info is None:
            info = LoaderInfo(self._next_number, setting_of(loader))
            self._next_number += 1
            loaders.append(info)
            if info.number < _DESCRIBED_LOADERS:
                self.session.events.append(
                    "loader", loader=info.number, replaces=replaces, **configuration, **site_of(loader)
                )
            return info
        if info.epochs == info.first_epoch + 1 and not info.is_made_again:
            info.is_made_again = True
            self.session.events.append("loader-again", loader=info.number)
        info.first_epoch = info.epochs
        return info


def setting_of(loader: Any) -> Setting:
    """Return the number of workers and the prefetch factor of a loader."""
    return loader.num_workers, getattr(loader, "prefetch_factor", None)


def _configuration(loader: Any) -> dict[str, Any]:
    num_workers, prefetch_factor = setting_of(loader)
    sampler, timeout = _sampler_in_use(loader), getattr(loader, "timeout", None)
    return {
        "num_workers": num_workers,
        "prefetch_factor": prefetch_factor,
        "batch_size": getattr(loader, "batch_size", None),
        "pin_memory": bool(getattr(loader, "pin_memory", False)),
        "persistent_workers": bool(getattr(loader, "persistent_workers", False)),
        "in_order": getattr(loader, "in_order", True),
        "timeout_seconds": float(timeout) if timeout else None,
        "start_method": start_method_of(loader),
        "dataset": type(getattr(loader, "dataset", None)).__qualname__,
        "dataset_length": _length(getattr(loader, "sampler", None)),
        "sampler": type(sampler).__qualname__,
        "shuffle": _shuffles(sampler),
        "collate": getattr(getattr(loader, "collate_fn", None), "__name__", None),
        "iterable": is_iterable(loader),
    }


def _sampler_in_use(loader: Any) -> Any:
    """Return what draws the indices: a batch sampler of the script's own, or the sampler."""
    own_batches = getattr(loader, "batch_sampler", None) if getattr(loader, "batch_size", None) is None else None
    return getattr(loader, "sampler", None) if own_batches is None else own_batches


def _shuffles(sampler: Any) -> bool | None:
    """Return whether a DistributedSampler shuffles; None of others, which may shuffle groups alone."""
    module = sys.modules.get("torch.utils.data.distributed")
    is_distributed = module is not None and isinstance(sampler, module.DistributedSampler)
    return bool(vars(sampler).get("shuffle")) if is_distributed else None


def is_iterable(loader: Any) -> bool:
    """Return whether the loader's dataset is an IterableDataset."""
    return bool(getattr(loader, "_dataset_kind", 0) == 1)  # `_DatasetKind.Iterable`


def start_method_of(loader: Any) -> str | None:
    """Return how the workers of a loader start, without fixing it: `set_start_method` must still work later."""
    context = getattr(loader, "multiprocessing_context", None) or sys.modules.get("multiprocessing")
    if context is None:
        return None
    try:
        method: str | None = context.get_start_method(allow_none=True)
        return method or str(context.get_all_start_methods()[0])
    except Exception:  # a context of the user's own
        return None


def _length(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except Exception:
        return None


def install() -> Hook:
    """Replace `DataLoader.__init__`."""
    with Hook("loader site") as hook:
        kind = sys.modules["torch.utils.data.dataloader"].DataLoader
        hook.replace(kind, "__init__", lambda original: _init(hook, original))
        return hook


def site_of(loader: Any) -> dict[str, Any]:
    """Return `file`, `line` and `variable` of a loader about to be iterated; empty where it is not known."""
    reference, site, call = _sites.get(id(loader), (None, {}, None))
    if reference is None or reference() is not loader:
        return {}
    return site | {"variable": None} if _goes_on(call, loader) else site


def _goes_on(call: tuple[CodeType, int] | None, loader: Any) -> bool:
    """Return whether the call that made the loader uses it, too: `model = train()` assigns something else."""
    methods = (vars(kind).get("__init__") for kind in type(loader).__mro__)
    constructors = {getattr(inspect.unwrap(method), "__code__", None) for method in methods if method}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (frame.f_code, frame.f_lasti) != call:
        if frame.f_code in constructors:
            return False  # the loader's own constructor iterates
        frame = frame.f_back
    return frame is not None


def _init(hook: Hook, original: Any) -> Any:
    @unseen_by_warnings
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hook.attempt(_record_site, self, sys._getframe(1))

    return init


def _record_site(loader: Any, frame: FrameType | None) -> None:
    if len(_sites) >= _SITES_AT_MOST:
        _sites.pop(next(iter(_sites)))
    key = id(loader)
    frame = session.user_frame(frame) or frame  # the innermost of the user's own code
    call = frame and (frame.f_code, frame.f_lasti)
    _sites[key] = weakref.ref(loader, lambda _: _sites.pop(key, None)), _site(frame), call


def _site(frame: FrameType | None) -> dict[str, Any]:
    if frame is None:
        return {}
    path, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(path, line)
    position = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))
    before = text.encode()[: position[2] or 0].decode(errors="ignore")
    assigned = _ASSIGNED.match(text[before.rfind(";") + 1 :])
    return {"file": path, "line": line, "variable": assigned[1] if assigned else None}
