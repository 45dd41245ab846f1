"""Text -> vectors of length one, by a model in this process or by somebody's embeddings URL.

The vectors of two models cannot be compared: whoever keeps vectors keeps the
embedder's `name` and `dimensions` with them. Numbers of this kind are heavy to
import, so nothing is loaded before the first text; a process that only imports
this module stays light.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from engram.kernel.errors import EmbeddingFailed
from engram.kernel.logs import hide

if TYPE_CHECKING:
    import httpx2
    import numpy
    from numpy.typing import NDArray
    from wordllama.inference import WordLlamaInference

    Vector = NDArray[numpy.float32]
    Matrix = NDArray[numpy.float32]

# What a text says, it says in its beginning; the rest is found by its words.
MAX_CHARS = 4000
_MAX_TOKENS = 512
_BATCH = 64
_CJK_TOKEN = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
_BYTE_TOKEN = re.compile("^<0x[89A-F][0-9A-F]>$")
_TIMEOUT_SECONDS = 10.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
# The texts were refused, not the service missing: the same texts will be refused again.
_REFUSALS = frozenset({400, 413, 422})


class Embedder(Protocol):
    """name  which vectors can be compared with these
    close  the least cosine similarity at which two texts may be about the same thing
    """

    name: str
    close: float

    async def dimensions(self) -> int:
        """How long a vector is; raises `EmbeddingFailed` while nobody can tell."""

    async def embed(self, texts: Sequence[str]) -> Matrix:
        """A row for each text, of length one; raises `EmbeddingFailed`."""

    async def shut(self) -> None: ...


def embedder_for(url: str | None, key: str | None, model: str) -> Embedder:
    """The configured service, or the model that comes with engram."""
    hide(key)
    return RemoteEmbedder(url, key, model) if url else LocalEmbedder()


class LocalEmbedder:
    """wordllama's 256-dimension model, in a thread of its own: the event loop goes on."""

    name = "wordllama-l2-supercat-256-centred"
    close = 0.2

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="embedding")

    async def dimensions(self) -> int:
        model = await self._in_thread(_local_model)
        return int(model.embedding.shape[1])

    async def embed(self, texts: Sequence[str]) -> Matrix:
        rows: Matrix = await self._in_thread(embed_locally, texts)
        return rows

    async def shut(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)


@cache
def _local_model() -> WordLlamaInference:
    """Loaded once in a process, from the files of its own package: nothing is downloaded."""
    try:
        import wordllama

        found = wordllama.WordLlama.load(
            cache_dir=Path(wordllama.__file__).parent, disable_download=True, dim=256
        )
        found.tokenizer.enable_truncation(_MAX_TOKENS)
        # It would keep the short texts it has seen, ten thousand of them, and is no faster for it.
        found.tokenizer.model._clear_cache()
        found.tokenizer.model._resize_cache(0)
        found.embedding = _centred(found.embedding, found.tokenizer.get_vocab())
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise EmbeddingFailed(
            f"the embedding model cannot be loaded: {error}", retryable=False, hint="reinstall wordllama"
        ) from error
    return found


def _centred(embedding: Matrix, vocabulary: Mapping[str, int]) -> Matrix:
    """Take from CJK tokens what they have in common.

    It says only that a text is Chinese or Japanese, and says it so loudly that
    any two such texts look alike. The bytes of which rare characters are made
    up are treated likewise.
    """
    centred: Matrix = embedding.copy()
    for pattern in (_CJK_TOKEN, _BYTE_TOKEN):
        alike = [number for token, number in vocabulary.items() if pattern.search(token)]
        centred[alike] -= centred[alike].mean(axis=0)
    return centred


def embed_locally(texts: Sequence[str]) -> Matrix:
    """What `LocalEmbedder` runs in its thread; blocks, and the first time for half a second.

    Short texts go with short ones: a batch costs as much as if all were as long as its longest.
    """
    import numpy as np

    order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
    found = _local_model().embed([texts[at][:MAX_CHARS] for at in order], batch_size=_BATCH)
    rows: Matrix = np.empty_like(found)
    rows[order] = found
    return _of_length_one(rows)


class RemoteEmbedder:
    """Any service that speaks OpenAI's `POST …/embeddings`."""

    close = 0.25

    def __init__(self, url: str, key: str | None, model: str, *, timeout: float = _TIMEOUT_SECONDS) -> None:
        self.name = model
        self._url = url
        self._key = key
        self._timeout = timeout
        self._opened: httpx2.AsyncClient | None = None

    async def dimensions(self) -> int:
        return int((await self.embed(["how long is a vector?"])).shape[1])

    async def embed(self, texts: Sequence[str]) -> Matrix:
        import httpx2

        body = {"model": self.name, "input": [text[:MAX_CHARS] for text in texts]}
        try:
            async with asyncio.timeout(self._timeout):
                reply = await self._http().post(self._url, json=body)
        except (httpx2.HTTPError, TimeoutError) as error:
            why = f"the embeddings service cannot be reached: {type(error).__name__}"
            raise EmbeddingFailed(why, retryable=True) from error
        if reply.status_code != 200:
            said = f"the embeddings service answered {reply.status_code}"
            hint = "check ENGRAM_EMBEDDINGS_URL, _KEY and _MODEL"
            raise EmbeddingFailed(said, retryable=reply.status_code not in _REFUSALS, hint=hint)
        return _rows_of(reply, len(texts))

    async def shut(self) -> None:
        if self._opened is not None:
            await self._opened.aclose()

    def _http(self) -> httpx2.AsyncClient:
        import httpx2

        if self._opened is None:
            self._opened = httpx2.AsyncClient(
                headers={"authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=self._timeout,
                # A proxy from the environment must never see traffic to this machine.
                trust_env=urlsplit(self._url).hostname not in _LOOPBACK,
            )
        return self._opened


def _rows_of(reply: httpx2.Response, expected: int) -> Matrix:
    import numpy as np

    try:
        entries = sorted(reply.json()["data"], key=lambda entry: int(entry["index"]))
        rows: Matrix = np.asarray([entry["embedding"] for entry in entries], dtype=np.float32)
    except (ValueError, TypeError, KeyError) as error:
        raise _nonsense("no embeddings in the answer") from error
    if rows.ndim != 2 or len(rows) != expected or not np.isfinite(rows).all():
        raise _nonsense(f"{expected} texts were sent, the answer has another shape")
    return _of_length_one(rows)


def _of_length_one(rows: Matrix) -> Matrix:
    """A text of which the model knows nothing stays zero, and is near to nothing."""
    import numpy as np

    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    scaled: Matrix = np.divide(rows, lengths, out=np.zeros_like(rows), where=lengths > 0)
    return scaled


def _nonsense(what: str) -> EmbeddingFailed:
    return EmbeddingFailed(f"the embeddings service answered nonsense: {what}", retryable=True)


class Together:
    """One text at a time for the caller; texts that come while a call is under way share the next."""

    def __init__(self, embedder: Embedder) -> None:
        self._embedder = embedder
        self._waiting: list[tuple[str, asyncio.Future[Vector]]] = []
        self._working: asyncio.Task[None] | None = None

    async def vector(self, text: str) -> Vector:
        answer: asyncio.Future[Vector] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, answer))
        if self._working is None:
            self._working = asyncio.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
                await self._embed(batch)
        finally:
            self._working = None

    async def _embed(self, batch: list[tuple[str, asyncio.Future[Vector]]]) -> None:
        texts = [text for text, _ in batch]
        (found,) = await asyncio.gather(self._embedder.embed(texts), return_exceptions=True)
        for at, (_, answer) in enumerate(batch):
            if answer.done():  # its caller has left
                continue
            if isinstance(found, BaseException):
                answer.set_exception(found)
            else:
                answer.set_result(found[at])
