"""The codec: every builtin type comes back exactly or is refused with its path; hostile trees meet typed errors."""

import collections
import datetime as dt
import enum
import io
import os
import pathlib
import random
import subprocess
import sys
import textwrap
import threading
import uuid
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple
from zoneinfo import ZoneInfo

import ormsgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge import codec
from kedge.codec import BufferSummary, TypeSummary
from kedge.errors import CheckpointError, Corrupted, NotFound, StorageError, UnsupportedType, Validation
from tests.parts import library
from tests.strategies import equal, states


def round_trip(state, out_of_band_bytes=4096, **options):
    encoded = codec.encode(state, out_of_band_bytes=out_of_band_bytes)
    return codec.decode(encoded.tree, lambda n: bytearray(encoded.buffers[n]), **options)


def no_fetch(ordinal):
    raise AssertionError(f"buffer {ordinal} was fetched")


def nested(levels, wrap, value=None):
    for _ in range(levels):
        value = wrap(value)
    return value


def named(cls, **attributes):
    value = cls()
    vars(value).update(attributes)
    return value


class Model:
    """Like a module of torch: callable, with its state in a dictionary."""

    def __call__(self): ...

    def state_dict(self): ...


nan = float("nan")
inf = float("inf")
oslo = ZoneInfo("Europe/Oslo")

VALUES = {
    "none": None,
    "bools": [True, False],
    "ints": [0, -1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)],
    "big ints": [2**64, -(2**63) - 1, 2**1000, -(2**1000), 255 << 64],
    "floats": [0.0, -0.0, nan, inf, -inf, 5e-324, 1.7976931348623157e308, 0.1],
    "complex": [1j, complex(nan, -0.0), complex(-inf, 1)],
    "text": ["", "ø", "\0", "\U0001f600", "x" * 100_000],
    "lone surrogates": ["\ud800", "a\udfffb", "\ud83d\ude00", {"\ud800": 1}],
    "bytes": [b"", b"\0\xff", b"x" * 4095, b"x" * 4096, b"y" * 100_000],
    "bytearrays": [bytearray(), bytearray(b"abc"), bytearray(b"x" * 5000)],
    "tuples": ((), (1,), (1, (2, [3, (4,)]))),
    "sets": [set(), {1, "a", None, (1, 2)}, {nan}, frozenset(), frozenset({frozenset({1})})],
    "dicts": [{}, {"a": 1}, {1: "a", None: 2, (1, 2): 3, False: 4, b"k": 5, 2.5: 6, frozenset({1}): 7}],
    "key order": {"z": 1, "a": 2, "m": {3: 1, 1: 2, 2: 3}},
    "empty keys": {"": 0, "$": 1, "/": 2},
    "OrderedDict": [collections.OrderedDict(), collections.OrderedDict([("b", 1), ("a", 2)])],
    "OrderedDict with attributes": named(collections.OrderedDict, _metadata={"": {"version": 1}}, pair=(1, 2)),
    "Counter": collections.Counter("abracadabra"),
    "deque": [collections.deque([1, 2]), collections.deque([1], maxlen=3), collections.deque(maxlen=0)],
    "defaultdict": [collections.defaultdict(f, {1: 2}) for f in (None, int, list, dict, set, str, bytes, tuple)],
    "ranges": [range(5), range(3, -7, -2), range(2**70), range(0)],
    "slices": [slice(None), slice(1, 2, 3), slice("a", None, 2.5)],
    "Decimal": [*map(Decimal, ("0", "-0", "1E+5", "1.500", "NaN", "sNaN123", "-Infinity", "1E-999999"))],
    "Fraction": [Fraction(1, 3), Fraction(-(2**70), 3**50), Fraction(0)],
    "datetime": [
        dt.datetime(2020, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001
        dt.datetime.min,  # noqa: DTZ901
        dt.datetime.max,  # noqa: DTZ901
        dt.datetime(2020, 10, 25, 2, 30, tzinfo=oslo),
        dt.datetime(2020, 10, 25, 2, 30, tzinfo=oslo, fold=1),
        dt.datetime(2020, 1, 1, tzinfo=dt.UTC),
        dt.datetime(2020, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-5, microseconds=7), "odd")),
    ],
    "date": [dt.date.min, dt.date(2024, 2, 29), dt.date.max],
    "time": [dt.time(), dt.time(23, 59, 59, 999_999, fold=1), dt.time(1, tzinfo=oslo), dt.time(1, tzinfo=dt.UTC)],
    "timedelta": [dt.timedelta.min, dt.timedelta(-1, 1, 1), dt.timedelta.max],
    "zones": [dt.UTC, dt.timezone(dt.timedelta(minutes=5)), dt.timezone(dt.timedelta(0), "Z"), oslo],
    "UUID": [uuid.UUID(int=0), uuid.uuid4(), uuid.UUID(int=5, is_safe=uuid.SafeUUID.safe)],
    "paths": [
        pathlib.Path("/a/b"),
        pathlib.Path("."),
        pathlib.PurePosixPath("a//b/../c"),
        pathlib.PureWindowsPath(r"C:\a\b"),
        pathlib.Path(os.fsdecode(b"/caf\xe9")),
    ],
}


class TestRoundTrip:
    @pytest.mark.parametrize("out_of_band_bytes", [0, 1, 4096])
    @pytest.mark.parametrize("name", VALUES)
    def test_of_each_type(self, name, out_of_band_bytes):
        state = VALUES[name]
        assert equal(state, round_trip(state, out_of_band_bytes))

    @given(states(), st.sampled_from((0, 1, 100, 4096)))
    def test_of_any_state(self, state, out_of_band_bytes):
        encoded = codec.encode(state, out_of_band_bytes=out_of_band_bytes)
        loaded = codec.decode(encoded.tree, lambda n: bytearray(encoded.buffers[n]))
        assert equal(state, loaded)
        assert codec.encode(loaded, out_of_band_bytes=out_of_band_bytes).tree == encoded.tree

    @given(states())
    def test_encoding_leaves_the_state_alone(self, state):
        before = codec.encode(state)
        assert codec.encode(state).tree == before.tree

    def test_uuid_keeps_its_safety(self):
        assert round_trip(uuid.UUID(int=1, is_safe=uuid.SafeUUID.unsafe)).is_safe is uuid.SafeUUID.unsafe
        assert round_trip(uuid.UUID(int=1)).is_safe is uuid.SafeUUID.unknown

    def test_utc_is_the_singleton(self):
        assert round_trip(dt.UTC) is dt.UTC

    def test_values_of_mutable_containers_are_not_shared(self):
        shared = [1]
        first, second = round_trip([shared, shared])
        first.append(2)
        assert second == [1]

    def test_equal_sets_encode_equally_in_every_process(self):
        program = "from kedge import codec; s = {'a', 'b', ('d', 1), None, b'1' * 9, b'2' * 9, (b'3' * 9,), b'4' * 9}; "
        program += "print(codec.encode(s, out_of_band_bytes=9).tree.hex())"
        outputs = {
            subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in ("1", "2", "3")
        }
        assert len(outputs) == 1


class TestBuffers:
    def test_are_views_of_the_state(self):
        data = bytearray(b"x" * 10_000)
        (buffer,) = codec.encode({"data": data}).buffers
        data[0] = ord("y")
        assert bytes(buffer[:2]) == b"yx"
        assert (buffer.format, buffer.ndim, buffer.nbytes) == ("B", 1, 10_000)

    def test_come_in_the_order_of_the_state(self):
        encoded = codec.encode([b"a" * 5000, {"k": (b"b" * 6000,)}, b"small", bytearray(b"c" * 7000)])
        assert [buffer.nbytes for buffer in encoded.buffers] == [5000, 6000, 7000]

    def test_threshold_is_inclusive(self):
        assert codec.encode(b"x" * 10, out_of_band_bytes=10).buffers
        assert not codec.encode(b"x" * 9, out_of_band_bytes=10).buffers
        assert not codec.encode(b"", out_of_band_bytes=0).buffers

    @pytest.mark.parametrize("wrong", [b"", b"x" * 4999, b"x" * 5001])
    def test_of_another_size_are_corrupted(self, wrong):
        encoded = codec.encode({"a": b"x" * 5000})
        with pytest.raises(Corrupted, match=r'state\["a"\]: buffer 0 has .* bytes where 5,000 belong'):
            codec.decode(encoded.tree, lambda n: wrong)

    def test_that_do_not_exist_are_corrupted(self):
        encoded = codec.encode({"a": b"x" * 5000})
        with pytest.raises(Corrupted, match="names buffer 0, which does not exist"):
            codec.decode(encoded.tree, {}.__getitem__)

    @pytest.mark.parametrize("error", [StorageError("disk"), NotFound("gone"), OSError("pipe"), ZeroDivisionError()])
    def test_errors_of_fetch_pass_through(self, error):
        def fetch(ordinal):
            raise error

        with pytest.raises(type(error)) as caught:
            codec.decode(codec.encode(b"x" * 5000).tree, fetch)
        assert caught.value is error


class Text(str):
    __slots__ = ()


class Colour(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: int


class Key:
    pass


def cyclic_list():
    value = [1]
    value.append({"x": (value,)})
    return {"a": value}


def cyclic_dict():
    value = {}
    value["self"] = value
    return value


class Unregistered(Exception):
    """Integrations register some of the exceptions of Python itself."""


class TestRefusal:
    @pytest.mark.parametrize(
        ("state", "path"),
        [
            (object(), "state"),
            ({"model": [{"opt": object()}]}, 'state["model"][0]["opt"]'),
            ({"a": (1, [2, object()])}, 'state["a"][1][1]'),
            ({1: {None: object()}}, "state[1][None]"),
            ({"m": {nan: 1}}, 'state["m"][nan]'),
            ({"m": {Decimal("NaN"): 1}}, "state[\"m\"][Decimal('NaN')]"),
            ({"m": {(1, nan): 1}}, 'state["m"][(1, nan)]'),
            ({"ø\n": object()}, 'state["ø\\n"]'),
            ({"x" * 100: object()}, f'state["{"x" * 56}…]'),
            ([collections.deque([object()])], "state[0][0]"),
            ({"k": collections.OrderedDict(a=object())}, 'state["k"]["a"]'),
            ({"v": memoryview(b"")}, 'state["v"]'),
            ({"s": Text("a")}, 'state["s"]'),
            ({Text("a"): 1}, "state[key 'a']"),
            ({"e": Colour.RED}, 'state["e"]'),
            ({Colour.RED: 1}, "state[key <Colour.RED: 1>]"),
            ({"p": Point(1, 2)}, 'state["p"]'),
            ({"f": print}, 'state["f"]'),
            ({"c": int}, 'state["c"]'),
            ({"e": Unregistered("x")}, 'state["e"]'),
            ({"l": threading.Lock()}, 'state["l"]'),
            ({"g": (n for n in ())}, 'state["g"]'),
            ({"d": collections.defaultdict(lambda: 0)}, 'state["d"]'),
            ({"d": collections.defaultdict(Text)}, 'state["d"]'),
            ({"c": named(collections.Counter, x=1)}, 'state["c"]'),
            ({"o": named(collections.OrderedDict, items=1)}, 'state["o"]'),
            ({"u": collections.UserDict()}, 'state["u"]'),
            ({"m": ormsgpack.Ext(7, b"\x90")}, 'state["m"]'),
            ({"m": [ormsgpack.Fragment(b"\x01")]}, 'state["m"][0]'),
            ([[[ormsgpack.Fragment(b"\x01")]]], "state[0][0][0]"),
        ],
    )
    def test_names_the_path(self, state, path):
        with pytest.raises(UnsupportedType) as caught:
            codec.encode(state)
        assert caught.value.path == path
        assert path in caught.value.message
        assert caught.value.hint

    @pytest.mark.parametrize(
        ("value", "hint"),
        [
            (Model(), "save its state_dict()"),
            (Point(1, 2), 'add @kedge.register("{module}.Point") above the class'),
            (Colour.RED, 'add @kedge.register("{module}.Colour") above the class'),
            (Key(), 'add @kedge.register("{module}.Key", encode=…, decode=…)'),
            (Text("a"), "convert it with str(…)"),
            (memoryview(b""), "save bytes(view)"),
            (Unregistered(), "save its text"),
            (int, "save the name of the class"),
            (random.Random(1), "rng.setstate(state)"),
            (random.SystemRandom(), "rng.setstate(state)"),
            (io.BytesIO(b"x"), "buffer.getvalue()"),
            (iter([1]), "save list(…) of it, or how many items were taken"),
            ((n for n in ()), "save list(…) of it, or how many items were taken"),
            (lambda: 0, "save a name, and look the function up"),
            (print, "save a name, and look the function up"),
            (random, "save a name, and look the function up"),
            (threading.Lock(), "belongs to the running process"),
        ],
    )
    def test_says_what_to_do(self, value, hint):
        with pytest.raises(UnsupportedType) as caught:
            codec.encode([value])
        assert hint.format(module=__name__) in str(caught.value)

    @pytest.mark.parametrize(
        ("state", "message"),
        [
            (cyclic_dict(), 'state contains itself (at state["self"])'),
            (cyclic_list(), 'state["a"] contains itself (at state["a"][1]["x"][0])'),
        ],
    )
    def test_of_cycles(self, state, message):
        with pytest.raises(UnsupportedType) as caught:
            codec.encode(state)
        assert caught.value.message == message

    def test_of_time_zones_of_other_classes(self):
        class Zone(dt.tzinfo):
            pass

        with pytest.raises(UnsupportedType, match=r'state\["t"\] has a time zone of class'):
            codec.encode({"t": dt.datetime(2020, 1, 1, tzinfo=Zone())})
        with (pathlib.Path("/usr/share/zoneinfo/UTC")).open("rb") as file, pytest.raises(UnsupportedType):
            codec.encode(ZoneInfo.from_file(file))

    def test_of_a_state_that_changes_meanwhile(self):
        class Grows:
            def __init__(self, owner):
                self.owner = owner

        @codec.register("tests.Grows", encode=lambda value: value.owner.update(more=1), decode=Grows)
        class GrowsMore(Grows):
            pass

        state = {}
        state["a"] = GrowsMore(state)
        with pytest.raises(Validation, match="could not be read: dictionary changed size"):
            codec.encode(state)


WRAPPERS = {
    "list": lambda value: [value],
    "dict": lambda value: {"k": value},
    "pairs": lambda value: {1: value},
    "tuple": lambda value: (value,),
    "deque": lambda value: collections.deque([value]),
    "mixed": lambda value: [{"k": (value,)}],
}


class TestDepth:
    @pytest.mark.parametrize("name", WRAPPERS)
    def test_up_to_the_limit_is_kept(self, name):
        step = 3 if name == "mixed" else 1
        for innermost in (1, dt.datetime(2020, 1, 1, tzinfo=dt.UTC), 2**70, "\ud800", b"x" * 5000):
            state = nested(codec.PART_DEPTH // step, WRAPPERS[name], innermost)
            assert equal(round_trip(state), state)

    @pytest.mark.parametrize("levels", [codec.MAX_DEPTH + 1, 30_000])
    @pytest.mark.parametrize("name", WRAPPERS)
    def test_beyond_is_refused_on_save(self, name, levels):
        step = 3 if name == "mixed" else 1
        with pytest.raises(UnsupportedType, match="more than 10,000 levels deep") as caught:
            codec.encode(nested(levels // step + 1, WRAPPERS[name]))
        assert len(caught.value.message) < 200

    @pytest.mark.parametrize("levels", [201, 240, 300, 1000, 1021, 1022, 1023, 100_000])
    @pytest.mark.parametrize("header", [b"\x91", b"\x81\xa1k"])
    def test_beyond_is_corrupted_on_load(self, header, levels):
        tree = header * levels + b"\xc0"
        for load in (lambda: codec.decode(tree, no_fetch), lambda: codec.outline(tree)):
            with pytest.raises(Corrupted):
                load()

    @pytest.mark.parametrize("tag", [7, 8, 10, 11, 14, 18, 23, 27, 28, 30, 36])
    @pytest.mark.parametrize("levels", [250, 2000])
    def test_of_nested_ext_is_bounded(self, tag, levels):
        payload = b"\xc0"
        for _ in range(levels):
            if len(payload) > 200_000:
                break
            payload = ormsgpack.packb(ormsgpack.Ext(tag, ormsgpack.packb([ormsgpack.Fragment(payload)])))
        with pytest.raises((Corrupted, Validation)):
            codec.decode(payload, no_fetch)

    def test_of_native_nesting_inside_each_ext_is_bounded(self):
        payload = b"\xc0"
        for _ in range(100):
            payload = ormsgpack.packb(ormsgpack.Ext(7, b"\x91" * 900 + payload))
        with pytest.raises(Corrupted, match="more than 200 levels"):
            codec.decode(payload, no_fetch)

    def test_short_of_stack_is_a_typed_error(self):
        tree = codec.encode(nested(150, WRAPPERS["tuple"])).tree

        def deeper(action, frames):
            return action() if frames == 0 else deeper(action, frames - 1)

        frames = sys.getrecursionlimit() - len(list(_frames())) - 150
        for action in (lambda: codec.encode(nested(150, WRAPPERS["tuple"])), lambda: codec.decode(tree, no_fetch)):
            with pytest.raises(Validation, match="too deep for what is left of the Python stack"):
                deeper(action, frames)


def _frames():
    frame = sys._getframe()
    while frame:
        yield frame
        frame = frame.f_back


def ext(tag, payload):
    return ormsgpack.packb(ormsgpack.Ext(tag, payload))


def listed(tag, *values):
    return ext(tag, ormsgpack.packb(list(values)))


HOSTILE = {
    "nothing": b"",
    "reserved byte": b"\xc1",
    "cut off": codec.encode({"a": [1, "text", 2.5]}).tree[:-1],
    "trailing byte": codec.encode({"a": 1}).tree + b"\xc0",
    "two values": b"\x01\x02",
    "huge array": b"\xdd\xff\xff\xff\xff\x01",
    "huge map": b"\xdf\xff\xff\xff\xff\xa1a\x01",
    "huge bytes": b"\xc6\xff\xff\xff\xff",
    "huge ext": b"\xc9\xff\xff\xff\xff\x07",
    "key not text": b"\x81\x01\x02",
    "bad UTF-8": b"\xa1\xff",
    "unknown tag": ext(39 + 80, b""),
    "tag 0": ext(0, b""),
    "tag 6": ext(6, b""),
    "negative tag": b"\xd4\xff\x00",
    "timestamp": b"\xd6\xff\x00\x00\x00\x00",
    "trailing byte inside": ext(7, b"\x90\x00"),
    "bad surrogates": ext(2, b"\xff"),
    "complex cut off": ext(3, b"\0" * 15),
    "bytes without reference": listed(4, 3),
    "bytes, negative ordinal": listed(4, 3, -1),
    "bytes, bool ordinal": listed(4, 3, True),
    "bytes, text ordinal": listed(4, 3, "0"),
    "bytes, huge ordinal": listed(4, 3, 2**63),
    "bytes, negative size": listed(4, -3, b""),
    "bytes, other size": listed(4, 2, b"abc"),
    "bytearray of a list": ext(5, b"\x90"),
    "tuple not a list": ext(7, b"\x80"),
    "tuple empty": ext(7, b""),
    "set twice": listed(8, 1, 1),
    "set of lists": listed(8, []),
    "frozenset of dicts": listed(9, {}),
    "pairs odd": listed(10, 1),
    "pairs twice": listed(10, 1, "a", 1, "b"),
    "pairs unhashable": listed(10, [], 1),
    "OrderedDict without head": listed(11),
    "OrderedDict hiding items": listed(11, {"items": 1}),
    "OrderedDict, attributes a list": listed(11, [1]),
    "defaultdict of eval": listed(13, "eval"),
    "defaultdict of a list": listed(13, []),
    "deque over maxlen": listed(14, 1, 1, 2),
    "deque of text": listed(14, "1"),
    "range of text": listed(15, "a", "b", "c"),
    "range step 0": listed(15, 0, 1, 0),
    "range of bools": listed(15, True, False, True),
    "slice of two": listed(16, 1, 2),
    "Decimal of words": ext(17, b"abc"),
    "Fraction by 0": listed(18, 1, 0),
    "Fraction unreduced": listed(18, 2, 4),
    "Fraction negative": listed(18, 1, -4),
    "datetime month 13": listed(19, 2020, 13, 1, 0, 0, 0, 0, 0, None),
    "datetime short": listed(19, 2020),
    "datetime zone text": listed(19, 2020, 1, 1, 0, 0, 0, 0, 0, "UTC"),
    "datetime fold 2": listed(19, 2020, 1, 1, 0, 0, 0, 0, 2, None),
    "date of words": ext(20, b"not-a-date"),
    "time hour 25": listed(21, 25, 0, 0, 0, 0, None),
    "timedelta too long": listed(22, 10**10, 0, 0),
    "timedelta not normal": listed(22, 0, 10**6, 0),
    "timezone of text": listed(23, "x"),
    "timezone too far": ext(23, b"\x91" + listed(22, 2, 0, 0)),
    "zone outside": ext(24, b"../../etc/passwd"),
    "zone absolute": ext(24, b"/etc/passwd"),
    "UUID short": ext(25, b"\0" * 16),
    "UUID safety 3": ext(25, b"\0" * 16 + b"\3"),
    "path of another class": listed(26, "Popen", "x"),
    "path of int": listed(26, "PosixPath", 1),
    "fields without name": listed(27, 1, 1, None),
    "fields, version text": listed(27, "a", "1", None),
    "fields, key int": listed(27, "a", 1, None, 1, 2),
    "value with more": listed(28, "a", 1, None, 5),
    "int in ten bytes of nothing": ext(17, b""),
}


EXT_HEADERS = (0xC7, 0xD4, 0xD5, 0xD6, 0xD7, 0xD8)


class TestHostileTree:
    @pytest.mark.parametrize("name", HOSTILE)
    def test_is_corrupted(self, name):
        with pytest.raises((Corrupted, UnsupportedType)) as caught:
            codec.decode(HOSTILE[name], {}.__getitem__)
        if "zone" not in name and "value with more" not in name:
            assert type(caught.value) is Corrupted

    @pytest.mark.parametrize("name", [name for name, tree in HOSTILE.items() if tree and tree[0] in EXT_HEADERS])
    def test_names_where(self, name):
        inside = b"\x81\xa1k" + HOSTILE[name]
        with pytest.raises(CheckpointError) as caught:
            codec.decode(inside, {}.__getitem__)
        assert 'state["k"]' in caught.value.message

    @given(st.binary(max_size=200))
    def test_random_bytes(self, data):
        self.check(data)

    @given(states(), st.data())
    def test_mutated_bytes(self, state, data):
        tree = bytearray(codec.encode(state).tree)
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, max(len(tree) - 1, 0)))
            kind = data.draw(st.sampled_from(("set", "drop", "add")))
            byte = data.draw(st.integers(0, 255))
            if kind == "add" or not tree:
                tree.insert(at, byte)
            elif kind == "drop":
                del tree[at]
            else:
                tree[at] = byte
        self.check(bytes(tree))

    @given(st.integers(0, 60), st.recursive(st.integers() | st.binary() | st.text(), lambda s: st.lists(s, max_size=6)))
    def test_any_content_of_any_ext(self, tag, content):
        try:
            payload = content if isinstance(content, bytes) else ormsgpack.packb(content)
        except TypeError:
            return
        self.check(ext(tag, payload))

    def check(self, tree):
        for load in (
            lambda: codec.decode(tree, lambda n: bytearray(b"x" * 16)),
            lambda: codec.decode(tree, lambda n: bytearray(b"x" * 16), only=["a*"]),
            lambda: codec.outline(tree),
            lambda: codec.buffer_targets(tree, {"a": [1]}),
        ):
            try:
                load()
            except (Corrupted, Validation, NotFound):
                pass


class TestOnly:
    state = {  # noqa: RUF012
        "model": {"layer1": {"w": b"1" * 5000, "b": 1}, "layer3": {"w": b"3" * 5000, "b": 3}},
        "optimiser": collections.OrderedDict([("layer3", (1, [b"o" * 5000])), (7, {"m": 1.5})]),
        "epoch": 3,
        "history": [{"loss": 1.0}, {"loss": 0.5}],
    }

    def load(self, *patterns):
        fetched = []

        def fetch(ordinal):
            fetched.append(ordinal)
            return encoded.buffers[ordinal]

        encoded = codec.encode(self.state)
        return codec.decode(encoded.tree, fetch, only=patterns), fetched

    @pytest.mark.parametrize(
        ("patterns", "expected", "fetched"),
        [
            (["epoch"], {"epoch": 3}, []),
            (["model/layer3/*"], {"model": {"layer3": state["model"]["layer3"]}}, [1]),
            (["model/layer3"], {"model": {"layer3": state["model"]["layer3"]}}, [1]),
            (["model/layer*/b"], {"model": {"layer1": {"b": 1}, "layer3": {"b": 3}}}, []),
            (["*/b", "epoch"], {"model": {"layer1": {"b": 1}, "layer3": {"b": 3}}, "epoch": 3}, []),
            (["optimiser/7/m"], {"optimiser": collections.OrderedDict([(7, {"m": 1.5})])}, []),
            (["optimiser/layer3/0"], {"optimiser": collections.OrderedDict(layer3=(1, [b"o" * 5000]))}, [2]),
            (["history/1/loss"], {"history": state["history"]}, []),
            (["history", "history/0"], {"history": state["history"]}, []),
            (["*"], state, [0, 1, 2]),
            ([""], state, [0, 1, 2]),
            (["model", "model/layer1/w"], {"model": state["model"]}, [0, 1]),
        ],
    )
    def test_keeps_matching_branches(self, patterns, expected, fetched):
        assert self.load(*patterns) == (expected, fetched)
        assert equal(self.load(*patterns)[0], expected)

    @pytest.mark.parametrize("pattern", ["nothing", "model/layer9/*", "history/2", "EPOCH", "epoch/x", "model/"])
    def test_without_a_match_is_not_found(self, pattern):
        with pytest.raises(NotFound, match="nothing in the state matches") as caught:
            self.load("epoch", pattern)
        assert repr(pattern) in str(caught.value)

    def test_one_pattern_as_text(self):
        assert codec.decode(codec.encode(self.state).tree, no_fetch, only="epoch") == {"epoch": 3}

    def test_attributes_of_a_pruned_ordered_dict_stay(self):
        state = named(collections.OrderedDict, extra=(1, 2))
        state["a"], state["b"] = 1, 2
        pruned = round_trip(state, only=["b"])
        assert list(pruned.items()) == [("b", 2)]
        assert pruned.extra == (1, 2)

    def test_a_state_that_is_no_dictionary(self):
        assert round_trip([1, {"a": 2}], only=["1/a"]) == [1, {"a": 2}]
        assert round_trip(5, only=["*"]) == 5


class TestOutline:
    def test_shows_builtin_values_and_summarises_buffers(self):
        state = {"a": (1, b"short"), "b": b"x" * 5000, "c": bytearray(b"abc"), 3: {1, 2}}
        assert codec.outline(codec.encode(state).tree) == {
            "a": (1, b"short"),
            "b": BufferSummary("bytes", "uint8", (5000,), 5000, (0,)),
            "c": BufferSummary("bytearray", "uint8", (3,), 3, (), b"abc"),
            3: {1, 2},
        }

    @given(states())
    def test_of_any_state(self, state):
        codec.outline(codec.encode(state, out_of_band_bytes=1).tree)

    def test_summaries_are_hashable(self):
        summary = TypeSummary("a", 1, {"x": [1]})
        assert {summary: 1}[TypeSummary("a", 1, {"x": [1]})] == 1
        assert summary != TypeSummary("a", 2, {"x": [1]})


class TestBuiltin:
    """Kinds that other parts of Kedge bring, such as files."""

    def test_with_buffers(self):
        class File:
            def __init__(self, data):
                self.data = data

        class Source:
            size_bytes = 9

            def pieces(self):
                yield b"from disk"

        codec.register_builtin(
            101,
            File,
            lambda value, ctx: ctx.pack(["name", ctx.add_buffer(Source())]),
            lambda payload, ctx: File(bytes(ctx.fetch(ctx.unpack(payload)[1], 9))),
            outline=lambda payload, ctx: BufferSummary("file", "", (), 9, (ctx.unpack(payload)[1],)),
        )
        encoded = codec.encode({"f": File(b""), "b": b"x" * 5000})
        assert encoded.buffers[0].size_bytes == 9
        assert codec.outline(encoded.tree)["f"] == BufferSummary("file", "", (), 9, (0,))
        loaded = codec.decode(encoded.tree, lambda n: [b"from disk", b"x" * 5000][n])
        assert loaded["f"].data == b"from disk"

    @pytest.mark.parametrize("tag", [0, 7, 39, 128, -1])
    def test_tags_are_taken_once(self, tag):
        with pytest.raises(Validation, match="not free"):
            codec.register_builtin(tag, Key, lambda value, ctx: b"", lambda payload, ctx: Key())


class TestImports:
    def run(self, program):
        subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)

    def test_no_library_is_imported_without_need(self):
        self.run(
            """
            import sys
            from kedge import codec
            encoded = codec.encode({"a": [1, (2, b"x" * 5000)], 3: {"set"}})
            codec.decode(encoded.tree, lambda n: encoded.buffers[n])
            codec.outline(encoded.tree)
            libraries = {"numpy", "torch", "pandas", "polars", "pyarrow", "pydantic", "msgspec"}
            assert not libraries & sys.modules.keys(), libraries & sys.modules.keys()
            """
        )

    def test_a_refused_class_of_a_library_that_is_not_loaded_imports_nothing(self):
        self.run(
            """
            import sys
            from kedge import codec, errors
            Fake = type("Fake", (), {"__module__": "numpy.fake"})
            try:
                codec.encode(Fake())
            except errors.UnsupportedType:
                pass
            assert "numpy" not in sys.modules
            """
        )

    def test_an_outline_of_arrays_needs_no_library(self):
        numpy = library("numpy")
        tree = codec.encode({"a": numpy.arange(6.0).reshape(2, 3), "o": numpy.array([None, 1])}).tree
        self.run(
            f"""
            import sys
            from kedge import codec
            outline = codec.outline({tree!r})
            assert outline["a"].shape == (2, 3) and outline["a"].size_bytes == 48, outline
            assert "numpy" not in sys.modules
            """
        )

    def test_a_missing_library_is_named(self):
        numpy = library("numpy")
        tree = codec.encode({"a": numpy.arange(3)}).tree
        self.run(
            f"""
            import sys
            sys.modules["numpy"] = None
            from kedge import codec, errors
            try:
                codec.decode({tree!r}, {{}}.__getitem__)
            except errors.UnsupportedType as error:
                assert error.path == 'state["a"]', error.path
                assert "pip install numpy" in str(error)
            else:
                raise AssertionError
            """
        )


def test_threads_encode_and_decode_at_once():
    state = {"a": [(n, {n: b"x" * 5000}) for n in range(50)], "b": {"c": dt.datetime(2020, 1, 1, tzinfo=oslo)}}
    failures = []

    def work():
        try:
            for _ in range(20):
                assert equal(round_trip(state), state)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@settings(max_examples=20)
@given(st.integers(1, 10**5))
def test_long_lists(length):
    state = [*range(length), "end"]
    assert round_trip(state) == state
