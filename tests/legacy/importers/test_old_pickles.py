"""Values of old pickles: rebuilt, or kept as data that names their class. None is a reason to lose the others."""

from __future__ import annotations

import collections
import enum
import pickle
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import pytest

from kedge.legacy.importers.common import Unreadable
from kedge.legacy.importers.old_pickles import Pickles
from tests.parts import require

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
HERE = __name__


@pytest.fixture(scope="module")
def reader() -> Iterator[Pickles]:
    with Pickles() as opened:
        yield opened


class Config:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class Slotted:
    __slots__ = ("x",)


class Color(enum.Enum):
    RED = "red"


class Names(list[str]):
    pass


class Table(dict[str, int]):
    pass


class Marks(set[int]):
    pass


class Key:
    """Hashable; what stands for it is not."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "value",
    [
        Decimal("-1.50"),
        uuid.UUID(int=7),
        Path("a/b c"),
        PurePosixPath("/x"),
        PureWindowsPath("c:\\x"),
        collections.defaultdict(list, {"a": [1]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_are_rebuilt(reader: Pickles, value: object, protocol: int) -> None:
    found, unknown = reader.read(pickle.dumps({"it": value}, protocol))
    assert found == {"it": value}
    assert type(found["it"]) is type(value)
    assert unknown == ()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_objects_of_unknown_classes_are_kept_as_data(reader: Pickles, protocol: int) -> None:
    slotted = Slotted()
    if protocol >= 2:
        slotted.x = 2  # type: ignore[attr-defined]
    value = {
        "config": Config(size=3, inner=Config(name="n")),
        "color": Color.RED,
        "names": Names(["a", "b"]),
        "table": Table(x=1),
        "class": Config,
        "builtin": list,
        "rest": [1, 2],
    } | ({"slotted": slotted} if protocol >= 2 else {})
    found, unknown = reader.read(pickle.dumps(value, protocol))
    assert found["config"] == {
        "$class": f"{HERE}.Config",
        "size": 3,
        "inner": {"$class": f"{HERE}.Config", "name": "n"},
    }
    assert found["color"] == {"$class": f"{HERE}.Color", "$args": ("red",)}
    assert "a" in repr(found["names"])
    assert "b" in repr(found["names"])
    assert "'x', 1" in repr(found["table"]) or "'x': 1" in repr(found["table"])
    assert found["class"] == {"$name": f"{HERE}.Config"}
    assert found["builtin"] == {"$name": "builtins.list"}
    assert found["rest"] == [1, 2]
    if protocol >= 2:
        assert found["slotted"] == {"$class": f"{HERE}.Slotted", "x": 2}
    assert f"{HERE}.Config" in unknown


def test_they_may_be_keys_and_members(reader: Pickles) -> None:
    found, _ = reader.read(pickle.dumps([{Key(): 1, "b": 2}, {Key()}, Marks({3}), collections.OrderedDict({Key(): 4})]))
    stand_in = {"$class": f"{HERE}.Key"}
    assert found[0] == {"$class": "builtins.dict", "$pairs": [(stand_in, 1), ("b", 2)]}
    assert found[1] == {"$class": "builtins.set", "$items": [stand_in]}
    assert "3" in repr(found[2])
    assert found[3]["$pairs"] == [(stand_in, 4)]


def test_numpy_and_its_neighbours(reader: Pickles) -> None:
    require("module:numpy")
    import numpy as np

    masked = np.ma.MaskedArray([1.0, 2.0, 3.0], [False, True, False], fill_value=-9.0)
    objects = np.array([Config(n=1), [1, 2], None], dtype=object)
    found, unknown = reader.read(pickle.dumps({"masked": masked, "objects": objects}))
    assert found["masked"]["$class"] == "numpy.ma.MaskedArray"
    assert found["masked"]["data"].tolist() == [1.0, 2.0, 3.0]
    assert found["masked"]["mask"].tolist() == [False, True, False]
    assert found["masked"]["fill_value"] == -9.0
    assert found["objects"].tolist() == [{"$class": f"{HERE}.Config", "n": 1}, [1, 2], None]
    assert unknown == (f"{HERE}.Config",)


@pytest.mark.parametrize(
    "data",
    [
        b"cuuid\nUUID\n)\x81}(X\x03\x00\x00\x00intX\x01\x00\x00\x00xub.",
        b"cdecimal\nDecimal\n(I1\ntR.",
        b"cdecimal\nDecimal\n(V" + b"9" * 20_000 + b"\ntR.",
        b"cpathlib\nPosixPath\n(I1\ntR.",
        b"cnumpy.ma.core\nMaskedArray\n)\x81.",
    ],
    ids=["uuid", "decimal", "long decimal", "path", "masked array"],
)
def test_values_that_are_none(reader: Pickles, data: bytes) -> None:
    with pytest.raises(Unreadable):
        reader.read(data)
