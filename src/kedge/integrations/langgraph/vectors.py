"""Search by meaning: the vectors of a memory's texts, and how close each memory is to a query: exact, no index."""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from langchain_core.embeddings import Embeddings
from langgraph.store.base import IndexConfig, ensure_embeddings, get_text_at_path, tokenize_path
from langgraph.store.base.embed import EmbeddingsLambda

from kedge.errors import Validation

Vectors = Mapping[str, bytes]  # path of the text in the value → float32, in this machine's order


_loop: ContextVar[asyncio.AbstractEventLoop | None] = ContextVar("kedge_embedding_loop", default=None)


@contextmanager
def embedding_here() -> Iterator[None]:
    """Asynchronous functions that make vectors run in this event loop, also if threads begun inside ask for them."""
    token = _loop.set(asyncio.get_running_loop())
    try:
        yield
    finally:
        _loop.reset(token)


class Meaning:
    """What `index=` asks for."""

    def __init__(self, config: IndexConfig) -> None:
        self._embeddings: Embeddings = ensure_embeddings(config.get("embed"))
        self._is_async = isinstance(self._embeddings, EmbeddingsLambda) and not hasattr(self._embeddings, "func")
        self._dims = config.get("dims")
        self._fields = _fields_of(config)

    def vectors(self, value: Mapping[str, Any], paths: Sequence[str] | None) -> dict[str, bytes]:
        """The vectors of an item, of these paths or the configured ones."""
        texts: dict[str, str] = {}
        for path in self._fields if paths is None else paths:
            matches = get_text_at_path(value, path if path == "$" else tokenize_path(path))
            texts |= (
                {path: matches[0]} if len(matches) == 1 else {f"{path}.{n}": text for n, text in enumerate(matches)}
            )
        if not texts:
            return {}
        return dict(zip(texts, map(self._packed, self._embedded([*texts.values()])), strict=True))

    def _embedded(self, texts: list[str]) -> list[list[float]]:
        loop = _loop.get()
        if self._is_async and loop is not None:
            return asyncio.run_coroutine_threadsafe(self._embeddings.aembed_documents(texts), loop).result()
        return self._embeddings.embed_documents(texts)  # an asynchronous function says here that it cannot

    def _packed(self, vector: Sequence[float]) -> bytes:
        if self._dims is not None and len(vector) != self._dims:
            raise Validation(
                f"index: the embeddings have {len(vector)} dimensions, dims says {self._dims}", hint="correct dims"
            )
        return array("f", vector).tobytes()

    def query(self, text: str) -> bytes:
        if self._is_async:
            return self._packed(self._embedded([text])[0])
        return self._packed(self._embeddings.embed_query(text))


def _fields_of(config: Mapping[str, object]) -> Sequence[str]:
    """The paths of the texts that are embedded; SqliteStore calls them text_fields, and takes a single one as text."""
    fields = config.get("fields") or config.get("text_fields") or "$"
    if isinstance(fields, list | tuple):
        return [str(field) for field in fields]
    if not isinstance(fields, str):
        raise Validation(f"index: fields is a {type(fields).__name__}", hint='use a list of paths: ["text"]')
    return [fields]


def closeness(query: bytes, items: Sequence[Vectors]) -> list[float | None]:
    """The cosine of the closest text of each item; None for items without vectors of this length."""
    flat = [(n, vector) for n, vectors in enumerate(items) for vector in vectors.values() if len(vector) == len(query)]
    scores: list[float | None] = [None] * len(items)
    for (n, _), score in zip(flat, _cosines(query, [vector for _, vector in flat]), strict=True):
        best = scores[n]
        scores[n] = score if best is None else max(best, score)
    return scores


def _cosines(query: bytes, vectors: Sequence[bytes]) -> list[float]:
    try:
        import numpy
    except ImportError:
        return [_cosine(array("f", query), array("f", vector)) for vector in vectors]
    if not vectors:
        return []
    ours = numpy.frombuffer(query, numpy.float32)
    matrix = numpy.frombuffer(b"".join(vectors), numpy.float32).reshape(len(vectors), len(ours))
    lengths = numpy.linalg.norm(matrix, axis=1) * numpy.linalg.norm(ours)
    products = matrix @ ours
    cosines: list[float] = numpy.divide(products, lengths, out=numpy.zeros_like(products), where=lengths != 0).tolist()
    return cosines


def _cosine(ours: array[float], other: array[float]) -> float:
    length = math.hypot(*ours) * math.hypot(*other)
    return sum(a * b for a, b in zip(ours, other, strict=True)) / length if length else 0.0
