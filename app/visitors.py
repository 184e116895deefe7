"""The list of visitors that may see the runs, among those that the identity provider lets in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


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
