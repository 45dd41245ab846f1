"""API keys: who is asking. The tenant comes from the key and from nowhere else."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from engram.kernel.errors import Forbidden, Unauthenticated

OPEN_TENANT = "default"


class ApiKeys:
    """Keys and their tenants. Without any, everybody is the one tenant there is."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        if not all(tenants) or not all(tenants.values()):
            raise ValueError("an API key and its tenant must not be empty")
        self._tenants = [(key.encode(), tenant) for key, tenant in tenants.items()]

    def tenant(self, offered: str | None) -> str:
        if not self._tenants:
            return OPEN_TENANT
        if not offered:
            raise Unauthenticated("an x-api-key header is needed")
        tenant = self._match(offered.encode("latin-1"))  # a header's bytes, as they came
        if tenant is None:
            raise Forbidden("this API key is not known")
        return tenant

    def _match(self, offered: bytes) -> str | None:
        # Every key is compared, in constant time: the time taken tells nothing.
        found = None
        for key, tenant in self._tenants:
            if hmac.compare_digest(key, offered):
                found = tenant
        return found
