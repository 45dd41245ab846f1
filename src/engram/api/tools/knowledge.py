"""Searching in documents."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from pydantic import Field

from engram.api.tools.base import Arguments, Call, Tool
from engram.ingest.search import MAX_QUERY_CHARS, MAX_RESULTS, Hit


class SearchArguments(Arguments):
    query: str = Field(
        description="What you want to know, in words or as a question.", max_length=MAX_QUERY_CHARS
    )
    top_k: int = Field(
        default=5, ge=1, le=MAX_RESULTS, description=f"How many passages at most, 1 to {MAX_RESULTS}."
    )
    document_id: UUID | None = Field(
        default=None, description="Look in this document only: the document_id of an earlier answer."
    )


@dataclass(frozen=True, slots=True)
class SearchReply:
    """`words_only_because` is set when only words were searched, not meaning."""

    ok: bool
    results: list[Hit]
    total: int
    words_only_because: str | None
    correlation_id: str


async def knowledge_search(call: Call[SearchArguments]) -> SearchReply:
    """Search the documents that were uploaded: manuals, specifications, papers, tables.

    Each result has the passage itself, and where it stands: title, heading (the
    path of headings) and page. Quote the passage and name its place. Ask again in
    other words if the answer is not among them; pass document_id to stay in one
    document. For what agents have learned, use memory_query.
    """
    asked = call.asked
    found = await call.services.knowledge.search(
        call.caller.actor, asked.query, asked.top_k, asked.document_id
    )
    return SearchReply(
        ok=True,
        results=found.hits,
        total=len(found.hits),
        words_only_because=found.words_only_because,
        correlation_id=call.correlation_id,
    )


TOOLS = (
    Tool(
        "knowledge_search",
        "Search documents",
        "/api/knowledge/search",
        "read",
        SearchArguments,
        SearchReply,
        knowledge_search,
        twin=False,
    ),
)
