"""Tidegauge inside the training process: hooks that only append to the journal.

`attach()` and `detach()` are for code that wants them; under `tidegauge run` nothing needs to be called. Each name
is looked up when it is first used, so that the import is fast.
"""

from training_harness.standard_library import StandardLibraryFirst

with StandardLibraryFirst():
    import importlib
    from typing import TYPE_CHECKING, Any

__all__ = ["attach", "detach", "on_risk", "recommended", "stage", "step"]

if TYPE_CHECKING:
    from training_harness.hooks.on_request.risk import on_risk
    from training_harness.hooks.stages.stages import stage
    from training_harness.installation import attach, detach, recommended, step
else:
    _MODULES = {"on_risk": "hooks.on_request.risk", "stage": "hooks.stages.stages"}

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with StandardLibraryFirst():
            module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'installation')}")
        return globals().setdefault(name, getattr(module, name))

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
