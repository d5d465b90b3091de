"""jax: trees of arrays, exact or refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import ormsgpack
import pytest

import kedge
from kedge import codec
from kedge.errors import Corrupted, UnsupportedType

pytestmark = [pytest.mark.requires("module:jax"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@kedge.register("tests.jax.Moments")
class Moments(NamedTuple):
    mean: Any
    square: Any


def test_trees_come_back() -> None:
    import jax
    from jax import numpy as jnp

    tree = {
        "params": {"dense": [jnp.arange(3000.0).reshape(30, 100), jnp.ones(4, jnp.bfloat16)], "step": jnp.int32(3)},
        "state": Moments(jnp.zeros((0, 2)), jnp.array([True, False])),
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "eight": jnp.ones(5, jnp.float8_e4m3fn),
    }
    with kedge.open("memory:") as store:
        loaded: Any = store.load(store.save("job", "one", tree))
    assert jax.tree.structure(loaded) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(loaded), strict=True):
        assert isinstance(b, jax.Array)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert bool(jnp.all(a == b))
    assert jax.random.uniform(loaded["key"]) == jax.random.uniform(tree["key"])


def test_what_would_not_come_back_is_refused() -> None:
    import jax
    from jax import numpy as jnp

    with pytest.raises(UnsupportedType, match="cannot be saved"):
        jax.jit(lambda x: codec.encode({"x": x}))(jnp.ones(3))
    with jax.enable_x64(True):
        wide = codec.encode(jnp.arange(3, dtype=jnp.int64))
        assert codec.decode(wide.tree, bytes).dtype == jnp.int64  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedType, match="off here"):
        codec.decode(wide.tree, bytes)
    for values in (["float32", [2], "", bytes(4)], ["object", [1], "", bytes(8)], ["uint32", [2], "mine", bytes(8)]):
        with pytest.raises(Corrupted):
            codec.decode(ormsgpack.packb(ormsgpack.Ext(42, ormsgpack.packb(values))), bytes)
