"""The OpenAPI document, corrected where only engram knows better than FastAPI.

A path that needs no token must not ask for one, and what is wrong with a body
is answered with 400 in the one error shape, never with FastAPI's own 422.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

from engram.api.authentication import PUBLIC

_NEVER_SENT = ("HTTPValidationError", "ValidationError")


class Documented(FastAPI):
    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for path, operations in document["paths"].items():
            for operation in operations.values():
                if _is_fastapis(operation["responses"].get("422", {})):
                    del operation["responses"]["422"]
                if path in PUBLIC:
                    operation.pop("security", None)
        for name in _NEVER_SENT:
            document.get("components", {}).get("schemas", {}).pop(name, None)
        return document


def _is_fastapis(response: dict[str, Any]) -> bool:
    schema = response.get("content", {}).get("application/json", {}).get("schema", {})
    return str(schema.get("$ref")).endswith("/HTTPValidationError")
