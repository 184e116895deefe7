"""The server of the dashboard: Streamlit's own, that loads what pages import before somebody asks for one."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import streamlit as st

from app.pages import PAGES


@asynccontextmanager
async def _with_pages_loaded(_: st.App) -> AsyncIterator[None]:
    """While the server runs: the browser of a first visitor starts meanwhile."""
    threading.Thread(target=_load_pages, name="tidegauge-pages", daemon=True).start()
    yield


def _load_pages() -> None:
    for page in PAGES:
        importlib.import_module(f"app.views.{page.module}")
    gc.collect()
    gc.freeze()  # what is imported stays: no look for garbage need go through it again


app = st.App("frame.py", lifespan=_with_pages_loaded)
