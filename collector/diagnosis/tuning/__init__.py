"""Predict how a loop would run with other settings."""

from collector.diagnosis.tuning.batch_sizes import (
    BatchSizeRun as BatchSizeRun,
    batch_size_run as batch_size_run,
    line_through as line_through,
    micro_batch as micro_batch,
    next_size as next_size,
)
from collector.diagnosis.tuning.calibration import (
    Calibration as Calibration,
    calibrate as calibrate,
    setting_of as setting_of,
)
from collector.diagnosis.tuning.loader_memory import held_memory as held_memory
from collector.diagnosis.tuning.recommendation import settings_json as settings_json
from collector.diagnosis.tuning.replay import Setting as Setting
from collector.diagnosis.tuning.search import (
    Candidate as Candidate,
    Outcome as Outcome,
    Plan as Plan,
    nearby_settings as nearby_settings,
    plan_trials as plan_trials,
)
from collector.diagnosis.tuning.stage_speedup import (
    HEALTHY_WAIT_RATIO as HEALTHY_WAIT_RATIO,
    WaitSummary as WaitSummary,
    summarize_waits as summarize_waits,
)
from collector.diagnosis.tuning.what_if import (
    Forecast as Forecast,
    Option as Option,
    forecast as forecast,
    option_text as option_text,
)
