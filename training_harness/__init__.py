"""Tidegauge inside the training process: hooks that only append to the journal.

`attach()` and `detach()` are for code that wants them; under `tidegauge run` nothing needs to be called.
"""

from training_harness.standard_library import StandardLibraryFirst

with StandardLibraryFirst():
    from training_harness.attach import attach, detach, recommended, step
    from training_harness.hooks.on_request.risk import on_risk
    from training_harness.hooks.stages.stages import stage

__all__ = ["attach", "detach", "on_risk", "recommended", "stage", "step"]
