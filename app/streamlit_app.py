"""The server of the dashboard: Streamlit's own, which imports the modules of all pages at its start."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import streamlit as st

from app.pages import MENU


@asynccontextmanager
async def _load_pages_at_start(_: st.App) -> AsyncIterator[None]:
    """Load the pages in a thread, while the browser of a first visitor starts."""
    threading.Thread(target=_load_pages, name="tidegauge-pages", daemon=True).start()
    yield


def _load_pages() -> None:
    for page in MENU:
        importlib.import_module(f"app.views.{page.module}")
    gc.collect()
    gc.freeze()  # imported modules stay: garbage collections need not visit them


app = st.App("frame.py", lifespan=_load_pages_at_start)
