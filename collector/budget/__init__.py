"""Hold a run to a budget (`training_harness.budget`): its figures, their judgements, and how they are shown."""

from collector.budget.figures import ExaminedRun, Figure, figures_of
from collector.budget.judgement import Judgement, judge_budget
from collector.budget.output import all_details, as_json, markdown_details, table

__all__ = [
    "ExaminedRun",
    "Figure",
    "Judgement",
    "all_details",
    "as_json",
    "figures_of",
    "judge_budget",
    "markdown_details",
    "table",
]
