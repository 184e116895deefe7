"""Visitors of the dashboard: who may see runs, who may change and delete them, and a home without runs to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from app.format import first_line, plain
from collector.store import Run, list_runs

QUICK_START = """tidegauge run -- python train.py
tidegauge job images"""
#: Addresses of this machine, on which a server listens or by which a browser reaches it.
_LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")


def may_enter() -> bool:
    """Return True if the visitor may see the runs; log-in is needed if the server's secrets ask for it.

    The secrets name the identity provider (docs/sharing.md).
    """
    if not st.secrets.load_if_toml_exists() or "auth" not in st.secrets:
        return True
    if not st.user.get("is_logged_in"):
        st.subheader("Log in to see the runs", anchor=False)
        st.button("Log in", icon=":material/login:", on_click=st.login)
        return False
    if is_expected(st.user, st.secrets.get("tidegauge", {}).get("visitors")):
        return True
    st.subheader("This account may not see the runs", anchor=False)
    st.markdown(plain(f"{st.user.get('email') or 'It'} is not among the visitors that this server expects."))
    st.button("Log out", icon=":material/logout:", on_click=st.logout)
    return False


def is_expected(user: Mapping[str, Any], visitors: Sequence[str] | None) -> bool:
    """Return True if a visitor is on the list, or if there is no list.

    A visitor whose address the provider marks as unverified is refused, since it could be anyone's. Some providers
    do not report whether they verified it.

    Args:
        user: the provider's claims about the visitor (OpenID Connect).
        visitors: addresses and domains (`@example.org`), None for no list.
    """
    if visitors is None:
        return True
    address = str(user.get("email") or "").lower()
    domain = "@" + address.rpartition("@")[2]
    expected = {visitor.lower() for visitor in visitors}
    return user.get("email_verified") is not False and bool(address) and not expected.isdisjoint((address, domain))


def may_edit() -> bool:
    """Return True if the visitor may change and delete runs.

    With log-in, the server's secrets name those who may (docs/sharing.md). Without, it is everyone who reaches the
    server as `localhost`: on this machine, or through SSH. A web page of another site cannot (DNS rebinding), since
    the browser sends the name of that site.
    """
    if st.secrets.load_if_toml_exists() and "auth" in st.secrets:
        return is_expected(st.user, st.secrets.get("tidegauge", {}).get("editors", ()))
    host = str(st.context.headers.get("Host") or "localhost")
    return st.get_option("server.address") in _LOCAL and _without_port(host) in _LOCAL


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdecimal() and (":" not in name or name.endswith("]")) else host


def runs_or_reason(home: Path) -> list[Run]:
    """Return the runs of a home, newest first; without any, draw the reason and what to do."""
    try:
        runs = list_runs(home)
    except Exception as error:  # noqa: BLE001 - the reader needs one line, not a traceback
        why = f"Cannot read the runs in {home}: {first_line(error)}."
        st.error(plain(f"{why} Fix it, or set TIDEGAUGE_HOME to another home."), icon=":material/error:")
        st.code("tidegauge doctor", language="bash")
        return []
    if not runs:
        st.subheader("No runs yet", anchor=False)
        st.markdown(plain(f"The home is `{home}`. Start your own training, unchanged, or a built-in one:"))
        st.code(QUICK_START, language="bash")
        return []
    return runs
