"""Where each DataLoader is made: the file and line, and the variable that it is put into.

They tell the loaders of a run apart. The newest loaders are remembered, weakly, until they are iterated.
"""

from __future__ import annotations

import functools
import linecache
import re
import sys
import weakref
from types import FrameType
from typing import Any

from training_harness.hooks.patching import Hook
from training_harness.session import is_own

#: id of a loader -> (the loader, weakly, and where it was made).
_sites: dict[int, tuple[weakref.ref[Any], dict[str, Any]]] = {}
#: Loaders that may wait to be iterated; a script that makes one in each step must not fill the memory.
_WAITING_AT_MOST = 256
#: `train_loader = DataLoader(...)`, also as an attribute or with an annotation.
_ASSIGNED = re.compile(r"\s*(?:\w+\.)*(\w+)\s*(?::[^=]+)?=[^=]")


def install() -> Hook:
    """Replace `DataLoader.__init__`.

    Raises:
        AttributeError: this torch has no such class.
    """
    with Hook("loader site") as hook:
        kind = sys.modules["torch.utils.data.dataloader"].DataLoader
        hook.replace(kind, "__init__", lambda original: _init(hook, original))
        return hook


def site_of(loader: Any) -> dict[str, Any]:
    """Return `file`, `line` and `variable` of a loader; empty where it is not known."""
    reference, site = _sites.get(id(loader), (None, {}))
    return site if reference is not None and reference() is loader else {}


def _init(hook: Hook, original: Any) -> Any:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if hook.active:
            try:
                _remember(self, sys._getframe(1))
            except Exception as error:
                hook.fail(error)

    return init


def _remember(loader: Any, frame: FrameType | None) -> None:
    if len(_sites) >= _WAITING_AT_MOST:
        _sites.pop(next(iter(_sites)))
    key = id(loader)
    _sites[key] = weakref.ref(loader, lambda _: _sites.pop(key, None)), _site(frame)


def _site(frame: FrameType | None) -> dict[str, Any]:
    """Find the innermost line of the user's own code, else the one that made the loader."""
    maker = frame
    while frame is not None and not is_own(frame.f_code.co_filename):
        frame = frame.f_back
    found = frame or maker
    if found is None:
        return {}
    path, line = found.f_code.co_filename, found.f_lineno
    assigned = _ASSIGNED.match(linecache.getline(path, line))
    return {"file": path, "line": line, "variable": assigned[1] if assigned else None}
