"""Which of those whom the identity provider lets in may see the runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_expected(user: Mapping[str, Any], visitors: Sequence[str] | None) -> bool:
    """Whether a visitor is on the list, which has addresses and domains (`@example.org`); without one, all are.

    An address that the provider has not verified could be anybody's. Not every provider says that it has.

    Args:
        user: what the provider says of them (claims of OpenID Connect).
        visitors: the list.

    """
    if visitors is None:
        return True
    address = str(user.get("email") or "").lower()
    domain = "@" + address.rpartition("@")[2]
    known = {visitor.lower() for visitor in visitors}
    return user.get("email_verified") is not False and bool(address) and not known.isdisjoint((address, domain))
