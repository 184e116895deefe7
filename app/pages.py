"""The lists of pages: those of one run, in the order in which one examines a run that went wrong, and the menu."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page: its title, its path in the address, and its icon."""

    title: str
    path: str
    icon: str

    @property
    def module(self) -> str:
        """Name of its file in app/views, without the ending."""
        return self.path.replace("-", "_")

    @property
    def file(self) -> str:
        """Path of its file, relative to the entry script, as Streamlit expects it."""
        return f"views/{self.module}.py"


RUNS = Page(title="Runs", path="runs", icon=":material/table_rows:")
OVERVIEW = Page(title="Overview", path="overview", icon=":material/dashboard:")
OOM_RISK = Page(title="OOM risk", path="oom-risk", icon=":material/memory:")
LEAK_TIMELINE = Page(title="Leak timeline", path="leak-timeline", icon=":material/trending_up:")
GPU_MEMORY = Page(title="GPU memory", path="gpu-memory", icon=":material/developer_board:")
WORKER_STALLS = Page(title="Workers & stalls", path="worker-stalls", icon=":material/hourglass:")
PIPELINE_STAGES = Page(title="Pipeline stages", path="pipeline-stages", icon=":material/layers:")
POST_MORTEM = Page(title="Post-mortem", path="post-mortem", icon=":material/troubleshoot:")
COMPARE = Page(title="Compare", path="compare", icon=":material/compare_arrows:")
AGENT_HEALTH = Page(title="Agent health", path="agent-health", icon=":material/monitor_heart:")

#: Pages of one run. The first is the landing page.
PAGES = (
    OVERVIEW,
    OOM_RISK,
    LEAK_TIMELINE,
    GPU_MEMORY,
    WORKER_STALLS,
    PIPELINE_STAGES,
    POST_MORTEM,
    COMPARE,
    AGENT_HEALTH,
)
#: The menu.
MENU = (RUNS, *PAGES)
