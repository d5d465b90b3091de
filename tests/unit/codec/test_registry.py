"""Registered types: saved by name and version, rebuilt exactly without running their code, upgraded on load."""

import collections
import dataclasses
import enum
import functools
import subprocess
import sys
import textwrap
import typing

import pytest

from kedge import codec
from kedge.codec import TypeSummary, register
from kedge.errors import InvalidName, UnsupportedType, Validation
from tests.parts import library

pydantic = library("pydantic")
msgspec = library("msgspec")


def round_trip(state, **options):
    encoded = codec.encode(state)
    return codec.decode(encoded.tree, lambda n: bytearray(encoded.buffers[n]), **options)


ran = []  # names of methods that a load must not run


@register("tests.Plain")
@dataclasses.dataclass
class Plain:
    a: int
    b: list = dataclasses.field(default_factory=list)


@register("tests.Frozen")
@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    b: tuple = ()


@register("tests.Busy")
@dataclasses.dataclass
class Busy:
    a: int
    start: dataclasses.InitVar[int] = 0
    total: int = dataclasses.field(init=False)

    def __post_init__(self, start):
        ran.append("__post_init__")
        self.total = self.a + start

    def __setattr__(self, name, value):
        ran.append("__setattr__")
        super().__setattr__(name, value)

    @functools.cached_property
    def twice(self):
        return self.a * 2


@register("tests.Child")
@dataclasses.dataclass(kw_only=True)
class Child(Plain):
    c: float = 1.5


T = typing.TypeVar("T")


@register("tests.Box")
@dataclasses.dataclass
class Box(typing.Generic[T]):
    content: T


@register("tests.Colour")
class Colour(enum.Enum):
    RED = "r"
    GREEN = object()
    ROUGE = "r"  # noqa: PIE796


@register("tests.Level")
class Level(enum.IntEnum):
    LOW = 1


@register("tests.Name")
class Name(enum.StrEnum):
    A = "a"


@register("tests.Mode")
class Mode(enum.Flag):
    READ = 1
    WRITE = 2


@register("tests.Point")
class Point(typing.NamedTuple):
    x: int
    y: object = None


Old = register("tests.Old")(collections.namedtuple("Old", "x y"))  # noqa: PYI024


@register("tests.Struct")
class Struct(msgspec.Struct):
    a: int
    b: list = []  # noqa: RUF012


@register("tests.FrozenStruct")
class FrozenStruct(msgspec.Struct, frozen=True, tag="x", rename="camel", kw_only=True):
    some_name: int


@register("tests.Model")
class Model(pydantic.BaseModel):
    a: int
    b: list[int] = []  # noqa: RUF012
    other: typing.Any = pydantic.Field(default=None, alias="o")

    @pydantic.field_validator("a")
    @classmethod
    def twice(cls, value):
        ran.append("validator")
        return value * 2


@register("tests.Open")
class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow", frozen=True)
    a: int = 1
    _secret: dict = pydantic.PrivateAttr(default_factory=dict)

    def model_post_init(self, context):
        ran.append("model_post_init")

    @functools.cached_property
    def cached(self):
        return 5


@register("tests.Root")
class Root(pydantic.RootModel[list[int]]):
    pass


@register("tests.Custom", encode=lambda value: {"parts": value.parts}, decode=lambda state: Custom(*state["parts"]))
class Custom:
    def __init__(self, *parts):
        self.parts = parts

    def __eq__(self, other):
        return isinstance(other, Custom) and self.parts == other.parts

    def __hash__(self):
        return hash(self.parts)


@register("tests.Failure", encode=lambda error: list(error.args), decode=lambda args: Failure(*args))
class Failure(Exception):
    pass


VALUES = [
    Plain(1, [2, (3, b"x" * 5000)]),
    Frozen(1, (2, Frozen(3))),
    Child(a=1, c=0.5),
    Box(Box(None)),
    Box[int](3),
    Colour.RED,
    Colour.GREEN,
    Level.LOW,
    Name.A,
    Mode.READ,
    Mode.READ | Mode.WRITE,
    Mode(0),
    Point(1, [2]),
    Old(1, 2),
    Struct(1, [Struct(2)]),
    FrozenStruct(some_name=5),
    Model(a=1, b=[2], o=Plain(1)),
    Model.model_construct(a="unchecked", b=3, other=4),
    Open(a=2, more=(1, 2)),
    Root([1, 2]),
    Custom(1, "a"),
]


class TestRoundTrip:
    @pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
    def test_is_exact_and_runs_no_method(self, value):
        tree = codec.encode({"v": value}).tree
        ran.clear()
        loaded = round_trip({"v": value})["v"]
        assert codec.encode({"v": loaded}).tree == tree
        assert type(loaded) is type(value)
        assert loaded == value
        assert ran == []

    def test_constructors_do_not_run(self):
        busy = Busy(1, start=10)
        assert busy.twice == 2
        ran.clear()
        loaded = round_trip(busy)
        assert ran == []
        assert (loaded.a, loaded.total) == (1, 11)
        assert vars(loaded) == {"a": 1, "total": 11}

    def test_enum_members_are_the_members(self):
        assert round_trip([Colour.GREEN, Colour.ROUGE])[0] is Colour.GREEN
        assert round_trip({Colour.RED: {Level.LOW}}) == {Colour.RED: {Level.LOW}}

    def test_values_as_keys_and_elements(self):
        state = {Frozen(1): {Frozen(2), Point(1)}, Custom(1): 2}
        assert round_trip(state) == state

    def test_pydantic_state_is_complete(self):
        value = Open(a=3, extra=[1])
        value._secret["k"] = Plain(1)
        assert value.cached == 5
        loaded = round_trip(value)
        assert loaded == value
        assert loaded.model_fields_set == {"a", "extra"}
        assert loaded.model_extra == {"extra": [1]}
        assert loaded._secret == {"k": Plain(1)}
        assert round_trip(Open()).model_fields_set == set()

    def test_exceptions_when_registered(self):
        loaded = round_trip(Failure("a", 1))
        assert type(loaded) is Failure
        assert loaded.args == ("a", 1)

    def test_third_party_classes_can_be_registered(self):
        register("tests.Re", encode=lambda value: value.text, decode=Words)(Words)
        assert round_trip([Words("x")])[0].text == "x"


class Words:
    def __init__(self, text):
        self.text = text


class Unregistered(Plain):
    pass


@register("tests.Failing", encode=lambda value: 1 / 0, decode=lambda state: None)
class Failing:
    pass


class TestRefusalOnSave:
    @pytest.mark.parametrize(
        ("value", "message"),
        [
            (Unregistered(1), r'add @kedge\.register\(".*\.Unregistered"\) above the class'),
            (Failing(), r"encode of type 'tests\.Failing' failed: ZeroDivisionError"),
            (Model, "save the name of the class"),
        ],
    )
    def test_at_the_value(self, value, message):
        with pytest.raises(UnsupportedType, match=message) as caught:
            codec.encode({"v": [value]})
        assert caught.value.path == 'state["v"][0]'

    def test_inside_a_value(self):
        for value, path in (
            (Plain(1, [object()]), ".b[0]"),
            (Point(1, object()), ".y"),
            (Struct(1, [object()]), ".b[0]"),
            (Model(a=1, o=object()), ".other"),
            (Open(more=object()), ".more"),
            (Custom(object()), '["parts"][0]'),
        ):
            with pytest.raises(UnsupportedType) as caught:
                codec.encode({"v": value})
            assert caught.value.path == f'state["v"]{path}'

    def test_attributes_that_are_not_fields(self):
        value = Plain(1)
        value.extra = 5
        with pytest.raises(UnsupportedType, match="with the attribute 'extra', which is not a field"):
            codec.encode(value)

        @register("tests.Roomy")
        class Roomy(msgspec.Struct, dict=True):
            a: int

        value = Roomy(1)
        value.extra = 5
        with pytest.raises(UnsupportedType, match="with the attribute 'extra'"):
            codec.encode(value)

    def test_fields_without_a_value(self):
        value = Plain(1)
        del value.b
        with pytest.raises(UnsupportedType, match="field without a value"):
            codec.encode(value)
        with pytest.raises(UnsupportedType, match="field without a value"):
            codec.encode(Model.model_construct())

    def test_a_value_that_contains_itself(self):
        value = Plain(1)
        value.b.append(value)
        with pytest.raises(UnsupportedType, match=r"state contains itself \(at state\.b\[0\]\)"):
            codec.encode(value)


def define(version, upgrade=None, **fields):
    """The class tests.Changing as one release of a program has it."""
    cls = dataclasses.make_dataclass("Changing", fields.items())
    cls.__module__ = __name__
    return register("tests.Changing", version=version, upgrade=upgrade)(cls)


def grown_dataclass(has_more):
    more = [("b", int, 7), ("c", list, dataclasses.field(default_factory=list))] if has_more else []
    cls = dataclasses.make_dataclass("Grown", [("a", int), *more])
    cls.__module__ = __name__
    return cls


def grown_tuple(has_more):
    more = [("b", int)] if has_more else []
    cls = collections.namedtuple("Grown", ["a", *(name for name, _ in more)], defaults=[7] * has_more)  # noqa: PYI024
    cls.__module__ = __name__
    return cls


def grown_struct(has_more):
    more = [("b", int, 7), ("c", list, msgspec.field(default_factory=list))] if has_more else []
    return msgspec.defstruct("Grown", [("a", int), *more], module=__name__)


def grown_model(has_more):
    more = {"b": (int, 7), "c": (list, pydantic.Field(default_factory=list))} if has_more else {}
    return pydantic.create_model("Grown", __module__=__name__, a=(int, ...), **more)


FORMS = {"Data": grown_dataclass, "Named": grown_tuple, "Struct": grown_struct, "Model": grown_model}


class TestVersions:
    def test_older_ones_are_upgraded(self):
        tree = codec.encode([define(1, a=int)(5)]).tree
        seen = []

        def upgrade(fields, version):
            seen.append((dict(fields), version))
            return {"b": fields["a"] * 2}

        current = define(3, upgrade, b=int)
        assert codec.decode(tree, None.__class__) == [current(10)]
        assert seen == [({"a": 5}, 1)]
        assert round_trip(current(1)) == current(1)
        assert len(seen) == 1

    def test_older_ones_without_upgrade(self):
        tree = codec.encode({"v": define(1, a=int)(5)}).tree
        define(2, a=int)
        with pytest.raises(
            UnsupportedType, match=r"is version 1 of type 'tests\.Changing', this program has version 2"
        ):
            codec.decode(tree, None.__class__)

    def test_newer_ones_are_refused(self):
        tree = codec.encode({"v": define(7, a=int)(5)}).tree
        define(2, a=int)
        with pytest.raises(
            UnsupportedType, match=r"version 7 of type 'tests\.Changing', this program has version 2"
        ) as e:
            codec.decode(tree, None.__class__)
        assert e.value.path == 'state["v"]'

    def test_changed_fields_need_a_version(self):
        tree = codec.encode({"v": define(1, a=int, b=int)(5, 6)}).tree
        define(1, a=int, c=int)
        with pytest.raises(Validation, match=r'state\["v"\] does not fit .*: what was saved lacks c and has b'):
            codec.decode(tree, None.__class__)

    def test_a_new_field_with_a_default_needs_no_version(self):
        """The default comes with the class; a mutable one is made anew for each object."""
        before, after = {}, {}
        for form, base in FORMS.items():
            name = f"tests.Grown{form}"
            before[form] = register(name)(base(False))
            tree = codec.encode([before[form](a=5), before[form](a=6)]).tree
            after[form] = register(name)(base(True))
            first, second = codec.decode(tree, None.__class__)
            assert (first, second) == (after[form](a=5), after[form](a=6)), form
            assert first.b == 7
            if form != "Named":
                assert first.c == []
                assert first.c is not second.c
            tree = codec.encode(first).tree
            register(name)(base(False))
            with pytest.raises(Validation, match="what was saved has b"):
                codec.decode(tree, None.__class__)

    def test_errors_of_upgrades_are_named(self):
        tree = codec.encode({"v": define(1, a=int)(5)}).tree
        define(2, lambda fields, version: fields["missing"], a=int)
        with pytest.raises(Validation, match=r"state\[\"v\"\]: upgrade of type 'tests.Changing' failed: KeyError"):
            codec.decode(tree, None.__class__)

    def test_pydantic_validates_what_was_upgraded(self):
        def release(version, upgrade, annotation):
            fields = {"__module__": __name__, "__annotations__": {"a": annotation}, "b": 7}
            fields["__annotations__"]["b"] = int
            return register("tests.Release", version=version, upgrade=upgrade)(
                type(pydantic.BaseModel)("Release", (pydantic.BaseModel,), fields)
            )

        tree = codec.encode(release(1, None, int)(a=5)).tree
        current = release(2, lambda fields, version: {"a": "5"}, int)
        assert codec.decode(tree, None.__class__) == current(a=5, b=7)
        release(3, lambda fields, version: {"a": "five"}, int)
        with pytest.raises(Validation, match=r"decode of type 'tests.Release' failed: ValidationError"):
            codec.decode(tree, None.__class__)

    def test_enum_members_that_are_gone(self):
        def release(version, upgrade, *members):
            members = {name: number for number, name in enumerate(members)}
            return register("tests.Shade", version=version, upgrade=upgrade)(
                enum.Enum("Shade", members, module=__name__)
            )

        tree = codec.encode([release(1, None, "A", "B").B]).tree
        release(1, None, "A")
        with pytest.raises(Validation, match=r"state\[0\] is 'B', which .*Shade does not have"):
            codec.decode(tree, None.__class__)
        current = release(2, lambda name, version: {"B": "C"}[name], "C")
        assert codec.decode(tree, None.__class__) == [current.C]

    def test_custom_values_are_upgraded(self):
        register("tests.Text", encode=lambda value: value.text, decode=Text)(Text)
        tree = codec.encode(Text("a")).tree
        register("tests.Text", version=2, upgrade=lambda text, n: text + "!", encode=vars, decode=Text)(Text)
        assert codec.decode(tree, None.__class__).text == "a!"


class Text:
    def __init__(self, text):
        self.text = text


class TestLoading:
    def test_a_name_that_is_not_registered(self):
        program = """
            import dataclasses
            from kedge import codec

            @codec.register("tests.Elsewhere", version=3)
            @dataclasses.dataclass
            class Elsewhere:
                a: int
                b: list

            print(codec.encode({"v": Elsewhere(1, [2.5])}).tree.hex())
        """
        output = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True
        ).stdout
        tree = bytes.fromhex(output)
        with pytest.raises(UnsupportedType, match=r"is of type 'tests\.Elsewhere', which is not registered") as caught:
            codec.decode(tree, None.__class__)
        assert caught.value.path == 'state["v"]'
        assert codec.outline(tree) == {"v": TypeSummary("tests.Elsewhere", 3, {"a": 1, "b": [2.5]})}

    def test_no_class_is_found_by_its_module(self):
        import ormsgpack

        for name in ("subprocess.Popen", "builtins.eval", "os.system"):
            for tag, content in ((27, [name, 1, None, "args", "true"]), (28, [name, 1, "true"])):
                tree = ormsgpack.packb(ormsgpack.Ext(tag, ormsgpack.packb(content)))
                with pytest.raises(UnsupportedType, match="not registered"):
                    codec.decode(tree, None.__class__)

    def test_a_decoder_that_answers_something_else(self):
        register("tests.Liar", encode=lambda value: 1, decode=lambda state: "text")(Liar)
        with pytest.raises(Validation, match=r"state\[0\]: decode of type 'tests.Liar' returned a str"):
            round_trip([Liar()])

    def test_errors_of_decoders_are_named(self):
        register("tests.Broken", encode=lambda value: 1, decode=lambda state: 1 / 0)(Broken)
        with pytest.raises(Validation, match=r"decode of type 'tests\.Broken' failed: ZeroDivisionError") as caught:
            round_trip([Broken()])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_outline_constructs_nothing(self):
        tree = codec.encode({"v": VALUES, Colour.RED: {Frozen(1)}}).tree
        ran.clear()
        outline = codec.outline(tree)
        assert outline["v"][0].fields["a"] == 1
        assert outline["v"][5] == TypeSummary("tests.Colour", 1, {"value": "RED"})
        assert outline["v"][18] == TypeSummary("tests.Open", 1, {"a": 2, "more": (1, 2), "_secret": {}})
        assert outline[TypeSummary("tests.Colour", 1, {"value": "RED"})] == {
            TypeSummary("tests.Frozen", 1, {"a": 1, "b": ()})
        }
        assert ran == []

    def test_only_looks_into_fields_and_loads_the_whole_value(self):
        state = {"p": Plain(1, [2]), "q": Plain(3)}
        assert round_trip(state, only=["p/b/0"]) == {"p": Plain(1, [2])}


class Liar:
    pass


class Broken:
    pass


class TestRegister:
    def test_a_class_defined_again_replaces_itself(self):
        for _ in range(2):

            @register("tests.Again")
            @dataclasses.dataclass
            class Again:
                a: int

            assert round_trip(Again(1)) == Again(1)

    @pytest.mark.parametrize("name", ["", "a b", "../x", "x" * 129, 5, "_a"])
    def test_names_follow_the_grammar(self, name):
        with pytest.raises(InvalidName):
            register(name)

    @pytest.mark.parametrize("version", [0, -1, True, 1.5, "1"])
    def test_versions_are_whole_numbers(self, version):
        with pytest.raises(Validation, match="is not a whole number"):
            register("tests.X", version=version)

    def test_both_functions_or_none(self):
        with pytest.raises(Validation, match="only one of encode and decode"):
            register("tests.X", encode=vars)

    def test_a_name_belongs_to_one_class(self):
        with pytest.raises(Validation, match=r"the type name 'tests\.Plain' belongs to .*Plain"):
            register("tests.Plain")(Point)
        assert round_trip(Plain(1)) == Plain(1)

    def test_a_class_has_one_name(self):
        with pytest.raises(Validation, match="known to the codec already"):
            register("tests.Other")(Plain)
        with pytest.raises(Validation, match="known to the codec already"):
            register("tests.Other", encode=list, decode=dict)(dict)

    def test_what_could_not_come_back_is_refused(self):
        class Bare:
            pass

        @dataclasses.dataclass
        class Mapping(dict):
            a: int = 1

        @dataclasses.dataclass
        class Error(Exception):
            a: int = 1

        class Slots:
            __slots__ = ("hidden",)

        @dataclasses.dataclass
        class Hiding(Slots):
            a: int = 1

        class Behind:
            def __get__(self, instance, owner):
                return 1

            def __set__(self, instance, value):
                ran.append("__set__")

        @dataclasses.dataclass
        class Described:
            a: int = Behind()

        class Active(msgspec.Struct):
            a: int

            def __post_init__(self):
                ran.append("__post_init__")

        for cls, message in (
            (Bare, "has no fields to save by"),
            (Mapping, "cannot be made from its fields alone"),
            (Error, "cannot be made from its fields alone"),
            (Hiding, "keeps 'hidden' outside its fields"),
            (Described, "has code behind its field 'a'"),
            (Active, "has a __post_init__"),
            (len, "is not a class"),
        ):
            with pytest.raises(Validation, match=message):
                register("tests.Refused")(cls)
