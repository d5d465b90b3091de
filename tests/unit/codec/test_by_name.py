"""Classes that nobody has registered: rebuilt where they are allowed, data elsewhere, and never a line of code run."""

import array
import dataclasses
import enum
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, Self

import attrs
import msgspec
import ormsgpack
import pydantic
import pydantic.v1
import pytest

import kedge
from kedge.codec import by_name, decode, encode
from kedge.codec.by_name import Unrestored

HOME = "application_of_the_test"
ran: list[str] = []


class Colour(enum.Enum):
    RED = "r"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass
class Plan:
    steps: list[Any]
    note: str = ""

    def __post_init__(self) -> None:
        ran.append("__post_init__")


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int


class Answer(pydantic.BaseModel):
    text: str
    score: int = 0
    _trace: str = pydantic.PrivateAttr(default="")

    @pydantic.field_validator("text")
    @classmethod
    def check(cls, value: str) -> str:
        ran.append("validator")
        return value


class Pair(NamedTuple):
    a: int
    b: int


class Row(msgspec.Struct):
    a: int


class Older(pydantic.v1.BaseModel):
    text: str
    tags: list[str] = []
    _trace: str = pydantic.v1.PrivateAttr(default="")

    @pydantic.v1.validator("text")
    def check(cls, value: str) -> str:  # noqa: N805 - what pydantic 1 wants
        ran.append("validator")
        return value


class Open(pydantic.v1.BaseModel, extra="allow"):
    text: str


@attrs.define
class Parcel:
    weight: int
    stamps: list[int] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        ran.append("__attrs_post_init__")


@attrs.frozen(slots=False)
class Label:
    _text: str


class Text(str):
    def __new__(cls, text: str) -> Self:
        ran.append("__new__")
        return super().__new__(cls, text)


class Bag(dict[str, Any]):
    pass


class Items(list[Any]):
    pass


class Refused(Exception):
    def __init__(self, code: int) -> None:
        ran.append("__init__")
        super().__init__(f"code {code}")
        self.code = code


def refused() -> Refused:
    error = Refused(7)
    error.add_note("twice")
    return error


def traced() -> Older:
    model = Older(text="x", tags=["a"])
    model._trace = "seen"
    return model


VALUES: dict[str, Any] = {
    "older pydantic": Older(text="x"),
    "older pydantic, all set": traced(),
    "older pydantic, more fields": Open(text="x", more=[1]),
    "attrs": Parcel(3, [1]),
    "attrs, frozen": Label("x"),
    "enum": Colour.RED,
    "flag": Access.READ | Access.WRITE,
    "dataclass": Plan([Point(1), {"deep": Answer(text="x")}], "n"),
    "frozen": Point(3),
    "pydantic": Answer(text="x", score=2),
    "namedtuple": Pair(1, 2),
    "struct": Row(4),
    "str": Text("hello"),
    "dict": Bag(a=1),
    "list": Items([1, Point(2)]),
    "key": {Colour.RED: 1, Point(1): 2},
    "set": {Point(1), Point(2)},
}
CLASSES = (Colour, Access, Plan, Point, Answer, Pair, Row, Text, Bag, Items, Refused, Older, Open, Parcel, Label)


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """The classes of this file as those of an installed package that a fresh process has imported and not allowed."""
    module = types.ModuleType(HOME)
    module.__file__ = "/somewhere/site-packages/application_of_the_test.py"
    for cls in CLASSES:
        monkeypatch.setattr(cls, "__module__", HOME)
        setattr(module, cls.__name__, cls)
    monkeypatch.setitem(sys.modules, HOME, module)
    allowed = set[str]()
    monkeypatch.setattr(by_name, "_allowed", allowed)
    monkeypatch.setattr(by_name, "_are_own_allowed", False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield module


def saved(value: object) -> bytes:
    tree = encode(value, by_name=True).tree
    by_name._saved.clear()  # another process
    ran.clear()
    return tree


def load(tree: bytes) -> Any:
    return decode(tree, lambda number: b"")


@pytest.mark.parametrize("name", VALUES)
def test_an_allowed_class_comes_back_and_nothing_runs(name: str) -> None:
    tree = saved(VALUES[name])
    by_name.allow(HOME)
    assert load(tree) == VALUES[name]
    assert type(load(tree)) is type(VALUES[name])
    assert ran == []


def test_an_exception_comes_back_with_its_attributes() -> None:
    tree = saved(refused())
    by_name.allow(f"{HOME}:Refused")
    error = load(tree)
    assert type(error) is Refused
    assert (str(error), error.code, error.__notes__) == ("code 7", 7, ["twice"])
    assert ran == []


def test_what_pydantic_1_knows_beside_the_fields_comes_back() -> None:
    tree = saved([traced(), Older(text="x")])
    by_name.allow(HOME)
    model, bare = load(tree)
    assert (model._trace, model.__fields_set__) == ("seen", {"text", "tags"})
    assert (bare._trace, bare.__fields_set__, bare.tags) == ("", {"text"}, [])


def missing_file() -> OSError:
    error = FileNotFoundError(2, "no such file", "a.txt")
    error.add_note("looked twice")
    return error


EXCEPTIONS: dict[str, Exception] = {
    "of a file": missing_file(),
    "of a text": UnicodeDecodeError("utf-8", b"\xff", 0, 1, "wrong"),
    "of an import": ImportError("no", name="x", path="y"),
    "of several": ExceptionGroup("both", [ValueError(1), KeyError("k")]),
    "of a program": SyntaxError("bad", ("f.py", 1, 2, "x x", 1, 3)),
    "arguments": ValueError("x", 1, (2,)),
}


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_what_python_keeps_of_an_exception_beside_its_arguments_comes_back(name: str) -> None:
    error = EXCEPTIONS[name]
    tree = saved(error)
    by_name.allow("builtins")
    found = load(tree)
    assert type(found) is type(error)
    assert (repr(found), str(found), found.__dict__) == (repr(error), str(error), error.__dict__)
    for attribute in ("filename", "errno", "object", "start", "name", "path", "lineno", "text"):
        assert getattr(found, attribute, None) == getattr(error, attribute, None)


def test_an_exception_that_would_not_read_as_before_is_data_with_its_text() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Answer(score="many")  # type: ignore[call-arg, arg-type]
    by_name.allow("pydantic_core")
    data = load(saved(caught.value))
    assert isinstance(data, Unrestored)
    assert data.content[-1] == str(caught.value)


def test_an_exception_that_holds_what_cannot_be_saved_is_data() -> None:
    error = ValueError("refused", [print])
    error.connection, error.status = sys.stdout, 429  # type: ignore[attr-defined]
    by_name.allow("builtins:ValueError")
    tree = saved([error, ExceptionGroup("all", [error])])
    data, group = load(tree)
    assert isinstance(data, Unrestored)
    assert data.content == [
        ("refused", repr([print])),
        {"connection": repr(sys.stdout), "status": 429},
        None,
        str(error),
    ]
    assert isinstance(group, Unrestored)
    assert encode(load(tree)).tree == tree


VIEWS = (
    memoryview(b"abc"),
    memoryview(bytearray(b"abc")),
    memoryview(b"abcdef")[::2],
    memoryview(array.array("d", [1.5, 2])),
    memoryview(b"abcdef").cast("B", [2, 3]),
    memoryview(b""),
)


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_comes_back_with_bytes_of_its_own(view: memoryview) -> None:
    tree = saved(view)
    by_name.allow("builtins:memoryview")
    found = load(tree)
    assert (found, found.format, found.shape, found.readonly) == (view, view.format, view.shape, view.readonly)


def test_an_exception_in_itself_is_refused() -> None:
    error = ValueError("round")
    error.args = (error,)
    with pytest.raises(kedge.UnsupportedType, match="ValueError"):
        encode(error, by_name=True)


def test_a_default_that_code_would_make_is_not_made(monkeypatch: pytest.MonkeyPatch, elsewhere: Any) -> None:
    def make() -> list[int]:
        ran.append("factory")
        return []

    @dataclasses.dataclass
    class Planned:
        steps: list[int]
        more: list[int] = dataclasses.field(default_factory=make)

    class Answered(pydantic.BaseModel):
        text: str
        more: list[int] = pydantic.Field(default_factory=make)

    class Aged(pydantic.v1.BaseModel):
        text: str
        more: list[int] = pydantic.v1.Field(default_factory=make)

    class Lined(msgspec.Struct):
        a: int
        more: list[int] = msgspec.field(default_factory=make)

    @attrs.define
    class Packed:
        weight: int
        more: list[int] = attrs.field(factory=make)

    names = {Planned: "Plan", Answered: "Answer", Aged: "Older", Lined: "Row", Packed: "Parcel"}
    trees = [forged(f"{HOME}:Plan", fields={"steps": []}), forged(f"{HOME}:Row", fields={"a": 1})]
    trees += [forged(f"{HOME}:Parcel", fields={"weight": 1})]
    for name in ("Answer", "Older"):
        more: dict[str, Any] = {"fields_set": [], "extra": None, "private": None if name == "Answer" else []}
        trees.append(forged(f"{HOME}:{name}", fields={"text": "x"}, more=more))
    by_name.allow(HOME)
    for cls, name in names.items():
        cls.__module__, cls.__qualname__ = HOME, name
        monkeypatch.setattr(elsewhere, name, cls)
    ran.clear()
    assert [type(load(tree)) for tree in trees] == [Unrestored] * 5
    assert ran == []


@pytest.mark.parametrize("name", ["enum", "dataclass", "pydantic", "str", "struct", "key"])
def test_what_is_not_allowed_is_data_that_is_saved_as_what_it_was(name: str) -> None:
    tree = saved(VALUES[name])
    data = load(tree)
    assert ran == []
    again = encode(data).tree
    assert again == tree, "whoever may not rebuild it changes nothing by saving it again"
    by_name.allow(HOME)
    assert load(again) == VALUES[name]


def test_data_says_what_it_was() -> None:
    data = load(saved(VALUES["pydantic"]))
    assert isinstance(data, Unrestored)
    assert (data.name, data.content["text"]) == (f"{HOME}:Answer", "x")
    with pytest.raises(AttributeError, match=r'allow=\["application_of_the_test"\]'):
        _ = data.text
    with pytest.warns(UserWarning, match="came back as data"):
        load(saved(Point(1)))


def test_a_process_rebuilds_what_it_has_saved_itself() -> None:
    class Local(pydantic.BaseModel):
        x: int

    tree = encode([Local(x=1)], by_name=True).tree
    assert load(tree) == [Local(x=1)]


def test_the_modules_of_the_program_are_allowed_where_that_is_asked_for(
    elsewhere: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = saved(Point(1))
    by_name.allow_own_modules()
    assert isinstance(load(tree), Unrestored), "an installed package is not the program's own"
    monkeypatch.setattr(elsewhere, "__file__", __file__)
    assert load(tree) == Point(1)


def test_fields_that_came_since_have_their_defaults(monkeypatch: pytest.MonkeyPatch, elsewhere: Any) -> None:
    tree = saved([Plan([1], "n"), Answer(text="x")])
    by_name.allow(HOME)

    @dataclasses.dataclass
    class Grown:
        steps: list[Any]
        note: str
        more: list[int] = dataclasses.field(default_factory=list)
        tries: int = 3

    class Lessened(pydantic.BaseModel):
        score: int = 0

    for cls, name in ((Grown, "Plan"), (Lessened, "Answer")):
        cls.__module__, cls.__qualname__ = HOME, name
        monkeypatch.setattr(elsewhere, name, cls)
    plan, answer = load(tree)
    assert plan == Grown([1], "n", [], 3)
    assert isinstance(answer, Unrestored), "a field that is gone is not dropped in silence"
    assert answer.content["text"] == "x"


def test_elsewhere_a_class_is_registered_or_refused() -> None:
    with pytest.raises(kedge.UnsupportedType, match="register"):
        encode(Point(1))


# Hostile states


def forged(name: str, *, value: object = None, fields: dict[str, Any] | None = None, more: object = None) -> bytes:
    if fields is None:
        return ormsgpack.packb(ormsgpack.Ext(28, ormsgpack.packb([name, 0, value])))
    flat = [part for pair in fields.items() for part in pair]
    return ormsgpack.packb(ormsgpack.Ext(27, ormsgpack.packb([name, 0, more, *flat])))


@dataclasses.dataclass
class Watching:
    x: int = 0

    def __del__(self) -> None:
        ran.append("__del__")


HOSTILE = {
    "a function": forged("os:system", value="echo"),
    "a class by a way through a module": forged(f"{HOME}:os.system", value="echo"),
    "a class without fields": forged("subprocess:Popen", fields={"args": "echo"}),
    "a module that is not imported": forged("antigravity:x", value=1),
    "a class of the standard library": forged("pathlib:PurePath", fields={"x": 1}),
    "a class of an installed library": forged("pydantic.main:BaseModel", fields={}, more={}),
    "a method": forged(f"{HOME}:Plan.__init__", value=1),
    "a class under another's name": forged(f"{HOME}:alias", fields={"x": 1}),
    "no name": forged("", value=1),
    "dots": forged("...:...", value=1),
    "an attribute that answers by code": forged(f"{HOME}:made_on_demand", value=1),
    "a class that is told of its end": forged(f"{HOME}:Watching", fields={"x": 1}),
    "fields that are not the class's": forged(f"{HOME}:Plan", fields={"__class__": 1}),
    "a value where fields belong": forged(f"{HOME}:Plan", value=[1]),
    "fields where a value belongs": forged(f"{HOME}:Colour", fields={"RED": 1}),
    "a member that does not exist": forged(f"{HOME}:Colour", value="__class__"),
    "a model that asks to be validated": forged(f"{HOME}:Answer", fields={"text": "x"}, more=None),
    "a text that is none": forged(f"{HOME}:Text", value=[["x"], None]),
    "attributes that are none": forged(f"{HOME}:Bag", value=[{}, [1]]),
    "an exception's member that is none": forged("builtins:OSError", value=[[2, "no"], None, {"__class__": 1}]),
    "a view of nothing": forged("builtins:memoryview", value=[None, "B", [1], True]),
    "a view of a size": forged("builtins:memoryview", value=[1 << 40, "B", [1], False]),
    "an exception without arguments": forged("builtins:OSError", value=[]),
    "an exception's arguments that are none": forged("builtins:UnicodeDecodeError", value=[1, None]),
    "an older model that asks to be validated": forged(f"{HOME}:Older", fields={"text": "x"}, more=None),
    "an older model's fields that are none": forged(f"{HOME}:Older", fields={"text": "x"}, more={"private": ["y"]}),
    "a lazy module": forged("lazy_module_of_the_test:Plan", fields={"steps": []}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_state_is_data_and_runs_and_imports_nothing(
    name: str, elsewhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    class Lazy(types.ModuleType):
        def __getattribute__(self, attribute: str) -> Any:
            ran.append(attribute)
            return super().__getattribute__(attribute)

    elsewhere.os, elsewhere.alias, elsewhere.Watching = os, Point, Watching
    elsewhere.__getattr__ = ran.append
    monkeypatch.setattr(Watching, "__module__", HOME)
    monkeypatch.setitem(sys.modules, "lazy_module_of_the_test", Lazy("lazy_module_of_the_test"))
    by_name.allow(HOME, "lazy_module_of_the_test", "builtins")
    by_name.allow_own_modules()
    before = set(sys.modules)
    ran.clear()
    assert isinstance(load(HOSTILE[name]), Unrestored)
    assert ran == []
    assert set(sys.modules) == before
