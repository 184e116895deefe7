"""The environment shim: Python imports this at start-up because its folder leads PYTHONPATH.

It runs `shim.py`, unless `tidegauge.pth` has done so, and the user's own `sitecustomize`, if there is one.
The folder moves to the end of sys.path, where spawned workers (which get a copy of sys.path) find
`training_harness` even if the environment was changed in between.
"""

from __future__ import annotations

import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import spec_from_file_location

_HERE = os.path.dirname(os.path.abspath(__file__))
#: Module name of the shim, which `tidegauge.pth` uses too.
_SHIM = "_tidegauge_shim"


def _run_shim() -> None:
    spec = spec_from_file_location(_SHIM, os.path.join(_HERE, "shim.py"))
    if _SHIM not in sys.modules and spec is not None and spec.loader is not None:
        sys.modules[_SHIM] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_SHIM])


def _run_user_sitecustomize() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    shim_module = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if shim_module is not None:
            sys.modules["sitecustomize"] = shim_module
    finally:
        sys.path.append(_HERE)


try:
    _run_shim()
except Exception:
    sys.modules.pop(_SHIM, None)
_run_user_sitecustomize()
