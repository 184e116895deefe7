"""Predict how a loop would run with other settings."""

from collector.diagnosis.tuning.batch_sizes import (
    BatchSizeRun,
    batch_size_run,
    line_through,
    micro_batch,
    next_size,
)
from collector.diagnosis.tuning.calibration import Calibration, calibrate, setting_of
from collector.diagnosis.tuning.loader_memory import held_memory
from collector.diagnosis.tuning.recommendation import settings_json
from collector.diagnosis.tuning.replay import Setting
from collector.diagnosis.tuning.search import Candidate, Outcome, Plan, nearby_settings, plan_trials
from collector.diagnosis.tuning.stage_speedup import HEALTHY_WAIT_RATIO, WaitSummary, summarize_waits
from collector.diagnosis.tuning.what_if import Forecast, Option, forecast, option_text
