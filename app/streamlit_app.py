"""The server of the dashboard: Streamlit's own, that has what a page needs at hand before it is asked for."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import streamlit as st
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.pages import PAGES

#: What draws charts: 4.7 MB, which Streamlit's page asks for only once it has a chart to draw.
_CHARTS = "PlotlyChart.*.js"


class EarlyCharts:
    """Has the browser load what draws charts together with the page, while the run is being read.

    Args:
        app: that answers.

    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        scripts = Path(st.__file__).parent / "static" / "static" / "js"
        self._links = ", ".join(f"<./static/js/{file.name}>; rel=modulepreload" for file in scripts.glob(_CHARTS))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; a page of HTML has a header more."""

        async def send_with_links(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if self._links and headers.get("content-type", "").startswith("text/html"):
                    headers["link"] = self._links
            await send(message)

        await self._app(scope, receive, send_with_links)


@asynccontextmanager
async def _with_pages_loaded(_: st.App) -> AsyncIterator[None]:
    """While the server runs; the first visitor need not wait for what all pages import."""
    threading.Thread(target=_load_pages, name="tidegauge-pages", daemon=True).start()
    yield


def _load_pages() -> None:
    for page in PAGES:
        importlib.import_module(f"app.views.{page.module}")
    gc.collect()
    gc.freeze()  # what is imported stays: to look through it for garbage again and again takes 100 ms each time


app = st.App("frame.py", lifespan=_with_pages_loaded, middleware=[Middleware(EarlyCharts)])
