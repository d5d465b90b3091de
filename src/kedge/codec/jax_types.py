"""jax: arrays and random keys. Trees of them are ordinary dictionaries, lists, tuples and registered types.

An array is loaded onto jax's default device with its own dtype, or not at all: without wide types jax itself would
silently reduce 64 bits to 32.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from .kinds import DecodeContext, EncodeContext, Leaf, Problem, Tag, add, unsupported
from .summaries import JAX_DTYPES, jax_parts

_KEYS = ("threefry2x32", "rbg", "unsafe_rbg")


def _save_array(array: Any, ctx: EncodeContext) -> bytes:
    if array.is_deleted():
        raise _refuse("jax array that was donated or deleted", "save it before")
    if not array.is_fully_addressable:
        raise _refuse("jax array spread over processes", "save array.addressable_shards in each process")
    kind = ""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        kind = str(jax.random.key_impl(array))
        if kind not in _KEYS:
            raise _refuse(f"random key of {kind}", "save jax.random.key_data(key)")
        array = jax.random.key_data(array)
    host = np.ascontiguousarray(np.asarray(array)).reshape(array.shape)
    if host.dtype.name not in JAX_DTYPES:
        raise _refuse(f"jax array of dtype {host.dtype.name}", "convert it with .astype(…)")
    view = memoryview(host.reshape(-1).view(np.uint8)) if host.nbytes else memoryview(b"")  # type: ignore[arg-type]
    return ctx.pack([host.dtype.name, list(host.shape), kind, ctx.place_bytes(view)])


def _load_array(payload: bytes, ctx: DecodeContext) -> Any:
    name, shape, kind, reference, size_bytes = jax_parts(ctx.unpack(payload))
    dtype = jnp.dtype(name)
    memory = ctx.bytes_of(reference, size_bytes)
    # Copy, because jax may adopt host memory; it never writes to it, but others might.
    host = np.frombuffer(bytes(memory), np.uint8).view(dtype).reshape(shape)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise _refuse(f"jax array of {name}, which is off here", 'jax.config.update("jax_enable_x64", True)')
    array = jnp.asarray(host)
    if kind:
        if kind not in _KEYS:
            raise ValueError(f"{kind!r} is not a kind of random key")
        return jax.random.wrap_key_data(array, impl=kind)
    return array


def _refuse(what: str, hint: str) -> Problem:
    return unsupported(f"is a {what}", hint)


_ARRAY = Leaf(Tag.JAX, "jax array", _save_array, _load_array)
with (
    jax.ensure_compile_time_eval()
):  # the types of arrays, not of tracers, also when a traced function comes here first
    add(_ARRAY, type(jnp.zeros(())), type(jax.random.key(0)))
