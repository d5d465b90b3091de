"""The codec with numpy, torch, pandas, polars and pyarrow: exact or refused; loading into memory the caller has."""

import collections
import dataclasses
import datetime as dt
import functools
import subprocess
import sys
import textwrap
from decimal import Decimal

import numpy as np
import ormsgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge import codec
from kedge.codec import BufferSummary, TypeSummary
from kedge.errors import Corrupted, UnsupportedType, Validation
from tests.parts import library
from tests.strategies import arrays, equal, states


def round_trip(state, out_of_band_bytes=64, **options):
    encoded = codec.encode(state, out_of_band_bytes=out_of_band_bytes)
    codec.outline(encoded.tree)
    return codec.decode(encoded.tree, lambda n: bytearray(encoded.buffers[n]), **options)


def ext(tag, *values):
    return ormsgpack.packb(ormsgpack.Ext(tag, ormsgpack.packb(list(values))))


def objects(*items, shape=None):
    array = np.empty(len(items), object)
    for index, item in enumerate(items):
        array[index] = item
    return array.reshape(shape or array.shape)


structured = np.dtype([("a", ">i4"), ("b", "U3"), ("c", "f4", (2, 2)), ("d", [("x", "?"), ("y", "M8[us]")])])
aligned = np.dtype([("a", "i1"), ("b", "f8")], align=True)
titled = np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4], "titles": ["T"], "itemsize": 16})

ARRAYS = {
    **{f"dtype {char}": np.arange(6).astype(char) for char in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]},
    "bool": np.array([True, False]),
    "nan, inf, -0.0": np.array([np.nan, np.inf, -0.0]),
    "big-endian": np.arange(5, dtype=">f8"),
    "big-endian long long": np.arange(5, dtype=np.dtype("q").newbyteorder(">")),
    "text": np.array(["a", "bcd", ""]),
    "byte strings": np.array([b"a", b"bcd", b""]),
    "void": np.array([b"abc"], dtype="V5"),
    "datetime64": np.array(["2020-01-01", "NaT"], dtype="M8[25s]"),
    "datetime64 without unit": np.array(["NaT"], dtype="M8"),
    "timedelta64": np.array([1, -1], dtype="m8[as]"),
    "structured": np.zeros(3, structured),
    "aligned": np.zeros(3, aligned),
    "titled": np.zeros(3, titled),
    "no fields": np.zeros(3, np.dtype([])),
    "0-d": np.array(5),
    "0-d structured": np.zeros((), structured),
    "empty": np.zeros((0,)),
    "empty with lengths": np.zeros((3, 0, 2), "i2"),
    "64 dimensions": np.zeros((1,) * 32),
    "Fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "Fortran, large": np.asfortranarray(np.arange(6000).reshape(20, 300)),
    "strided": np.arange(100)[::3],
    "reversed": np.arange(100)[::-1],
    "transposed slice": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "read-only": np.frombuffer(b"abcd" * 100, dtype="i4"),
    "large": np.random.default_rng(0).random((100, 100)),
    "no itemsize": np.zeros(3, "V0"),
    "objects": objects(None, 1, "a", [1, (2,)], np.arange(3), np.array(5), {"k": b"x" * 100}),
    "objects 2-d": objects(1, 2, 3, 4, 5, 6, shape=(2, 3)),
    "objects Fortran": np.asfortranarray(objects(1, 2, 3, 4, 5, 6, shape=(2, 3))),
    "objects 0-d": np.array(None, dtype=object),
    "objects empty": np.empty((0, 3), object),
    "objects nested": objects(objects(1, objects("deep"))),
}


class TestArrays:
    @pytest.mark.parametrize("out_of_band_bytes", [1, 64, 4096])
    @pytest.mark.parametrize("name", ARRAYS)
    def test_come_back_exactly(self, name, out_of_band_bytes):
        array = ARRAYS[name]
        loaded = round_trip({"a": array}, out_of_band_bytes)["a"]
        assert equal(array, loaded)
        assert type(loaded.dtype) is type(array.dtype)
        assert loaded.dtype.isalignedstruct == array.dtype.isalignedstruct
        assert loaded.flags.writeable

    @given(arrays(), st.sampled_from((0, 1, 4096)))
    def test_of_any_form(self, array, out_of_band_bytes):
        assert equal(array, round_trip(array, out_of_band_bytes))

    @given(states(with_arrays=True))
    def test_inside_any_state(self, state):
        assert equal(state, round_trip(state))

    def test_string_dtype(self):
        array = np.array(["a", "a longer text than fits", ""], dtype=np.dtypes.StringDType())
        loaded = round_trip(array.reshape(3, 1))
        assert loaded.dtype == array.dtype
        assert loaded.tolist() == [["a"], ["a longer text than fits"], [""]]
        strict = np.array(["a"], dtype=np.dtypes.StringDType(coerce=False))
        assert round_trip(strict).dtype == strict.dtype

    def test_buffers_are_the_memory_of_the_array(self):
        for array in (np.zeros(1000), np.asfortranarray(np.zeros((20, 50))), np.zeros(1000, "M8[s]")):
            (buffer,) = codec.encode(array).buffers
            assert (buffer.format, buffer.ndim, buffer.nbytes) == ("B", 1, 8000)
            assert np.shares_memory(np.frombuffer(buffer, "u1"), array)

    def test_are_built_on_the_fetched_memory(self):
        encoded = codec.encode(np.arange(1000))
        memory = bytearray(encoded.buffers[0])
        loaded = codec.decode(encoded.tree, lambda n: memory)
        loaded[0] = 77
        assert memory[0] == 77
        fixed = codec.decode(encoded.tree, lambda n: bytes(memory))
        assert not fixed.flags.writeable

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: np.ma.array([1, 2], mask=[0, 1]), "save its .data and .mask"),
            (lambda: np.zeros((1, 1)).view(np.matrix), "save numpy.asarray"),
            (lambda: np.rec.array([(1,)], dtype=[("a", "i4")]), "save numpy.asarray"),
            (lambda: np.zeros(1, np.dtype([("a", "O")])), "objects inside a structure"),
            (lambda: np.zeros(1, np.dtype("i4", metadata={"unit": "m"})), "with metadata"),
            (lambda: np.zeros(1, np.dtype([("a", np.dtype("i4", metadata={"unit": "m"}))])), "with metadata"),
            (lambda: np.zeros(1, np.dtype((np.record, [("a", "i4")]))), "could not be restored exactly"),
            (lambda: np.array(["a"], dtype=np.dtypes.StringDType(na_object=None)), "could not be restored exactly"),
            (lambda: objects(1, object()), r'state\["a"\]\[1\] has type object'),
            (lambda: np.random.default_rng(0), "numpy.random"),
        ],
    )
    def test_refused(self, make, message):
        with pytest.raises(UnsupportedType, match=message) as caught:
            codec.encode({"a": make()})
        assert caught.value.path.startswith('state["a"]')

    def test_memmap_is_refused(self, tmp_path):
        with pytest.raises(UnsupportedType, match=r"save numpy\.asarray"):
            codec.encode(np.memmap(tmp_path / "m", dtype="u1", mode="w+", shape=3))

    def test_an_array_that_contains_itself(self):
        array = np.empty(1, object)
        array[0] = [array]
        with pytest.raises(UnsupportedType, match=r"state contains itself \(at state\[0\]\[0\]\)"):
            codec.encode(array)

    def test_outline(self):
        tree = codec.encode({"big": np.zeros((100, 3), "f4"), "s": np.zeros(2, structured)}, out_of_band_bytes=64).tree
        outline = codec.outline(tree)
        assert outline["big"] == BufferSummary("ndarray", "<f4", (100, 3), 1200, (0,))
        assert outline["s"].dtype.startswith("{a: >i4, b: <U3")
        items = codec.outline(codec.encode(objects(1, "a")).tree)
        assert items == TypeSummary("numpy.ndarray", 1, {"dtype": "object", "shape": (2,), "items": [1, "a"]})


SCALARS = [
    *(np.dtype(char).type(1) for char in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]),
    np.bool_(True),
    np.float64(np.nan),
    np.float64(-0.0),
    np.str_("text"),
    np.str_("end\0\0"),
    np.str_(""),
    np.bytes_(b"b\0"),
    np.datetime64("2020-01-01T00:00:00.5"),
    np.datetime64("NaT"),
    np.timedelta64(5, "W"),
    np.void(b"abc"),
    np.zeros(1, structured)[0],
]


class TestScalars:
    @pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{type(value).__name__} {value!r}")
    def test_come_back_exactly(self, value):
        loaded = round_trip([value])[0]
        assert type(loaded) is type(value)
        assert loaded.dtype == value.dtype
        assert str.__eq__(value, loaded) if isinstance(value, str) else value.tobytes() == loaded.tobytes()

    def test_are_keys(self):
        assert equal(round_trip({np.int32(1): 1}), {np.int32(1): 1})
        with pytest.raises(UnsupportedType, match="NaN key"):
            codec.encode({np.float32("nan"): 1})

    @pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("O"), np.dtype(">U7"), structured, aligned, titled])
    def test_dtypes(self, dtype):
        loaded = round_trip(dtype)
        assert loaded == dtype
        assert loaded.isalignedstruct == dtype.isalignedstruct

    def test_object_dtype_inside_a_structure(self):
        dtype = np.dtype([("a", "O")])
        assert round_trip(dtype) == dtype


FIELDS = {"fields": [["a", None, 0, "<i4"]], "itemsize": 4, "aligned": False}
HOSTILE = {
    "object dtype": ext(30, "O", [1], "C", b"\0" * 8),
    "object in a structure": ext(30, {**FIELDS, "fields": [["a", None, 0, "O"]]}, [1], "C", b"\0" * 4),
    "object by another spelling": ext(30, "|O8", [1], "C", b"\0" * 8),
    "object by name": ext(30, "object", [1], "C", b"\0" * 8),
    "several types": ext(30, "i4,O", [1], "C", b"\0" * 12),
    "native order": ext(30, "=f8", [1], "C", b"\0" * 8),
    "huge shape": ext(30, "<f8", [2**40, 2**40], "C", 0),
    "huge inline": ext(30, "<f8", [2**62], "C", b""),
    "huge and empty": ext(30, "<f8", [0, 2**62, 2**62], "C", b""),
    "negative length": ext(30, "<f8", [-1], "C", b""),
    "bool length": ext(30, "<f8", [True], "C", b"\0" * 8),
    "65 dimensions": ext(30, "<f8", [1] * 65, "C", b"\0" * 8),
    "bad order": ext(30, "<f8", [1], "K", b"\0" * 8),
    "short data": ext(30, "<f8", [2], "C", b"\0" * 8),
    "itemsize below the fields": ext(30, {**FIELDS, "itemsize": 2}, [1], "C", b"\0" * 2),
    "offset outside": ext(30, {**FIELDS, "fields": [["a", None, 9, "<i4"]]}, [1], "C", b"\0" * 4),
    "negative offset": ext(30, {**FIELDS, "fields": [["a", None, -4, "<i4"]]}, [1], "C", b"\0" * 4),
    "field twice": ext(30, {**FIELDS, "fields": [["a", None, 0, "<i4"]] * 2}, [1], "C", b"\0" * 4),
    "huge subarray": ext(30, {"base": "<i4", "shape": [2**31, 2**31]}, [1], "C", b""),
    "unknown description": ext(30, {"code": "import os"}, [1], "C", b""),
    "long text": ext(30, "<U999999999", [1], "C", b""),
    "objects, wrong count": ext(31, "O", [3], "C", 1, 2),
    "objects, huge shape": ext(31, "O", [2**62], "C"),
    "objects of floats": ext(31, "<f8", [1], "C", 1.0),
    "strings from numbers": ext(31, {"string": False}, [1], "C", 1),
    "scalar of object": ext(32, "O", b"\0" * 8),
    "scalar, short": ext(32, "<f8", b"\0" * 4),
    "scalar, text reference": ext(32, "<f8", "0"),
    "scalar text of bytes": ext(32, "U", b"a"),
    "dtype of words": ext(33, "float64"),
    "tensor of words": ext(34, "Tensor", "words", [1], False, b""),
}


class TestHostileArrays:
    @pytest.mark.parametrize("name", [name for name in HOSTILE if "tensor" not in name])
    def test_are_corrupted(self, name):
        with pytest.raises(Corrupted):
            codec.decode(HOSTILE[name], lambda n: bytearray(8))

    @given(arrays() | st.just(objects(1, "a", None)), st.data())
    def test_mutated(self, array, data):
        tree = bytearray(codec.encode([array], out_of_band_bytes=64).tree)
        for _ in range(data.draw(st.integers(1, 3))):
            tree[data.draw(st.integers(0, len(tree) - 1))] = data.draw(st.integers(0, 255))
        for load in (lambda: codec.decode(bytes(tree), lambda n: bytearray(64)), lambda: codec.outline(bytes(tree))):
            try:
                load()
            except (Corrupted, Validation):
                pass


@codec.register("tests.Layer")
@dataclasses.dataclass
class Layer:
    weights: np.ndarray
    name: str = ""


class TestInto:
    def load(self, state, own, out_of_band_bytes=64):
        encoded = codec.encode(state, out_of_band_bytes=out_of_band_bytes)
        targets = codec.buffer_targets(encoded.tree, own)
        fetched = []

        def fetch(ordinal):
            fetched.append(ordinal)
            if ordinal in targets:
                targets[ordinal][:] = encoded.buffers[ordinal]
                return targets[ordinal]
            return bytearray(encoded.buffers[ordinal])

        return codec.decode(encoded.tree, fetch, into=own), targets

    def test_fills_the_arrays_of_the_caller(self):
        state = {
            "w": np.arange(100.0),
            "f": np.asfortranarray(np.arange(20.0).reshape(4, 5)),
            "small": np.arange(3),
            "list": [np.arange(50), {1: np.arange(60)}],
            "tuple": (np.arange(70), 5),
            "layer": Layer(np.arange(80), "a"),
            "new": np.arange(90),
            "epoch": 7,
        }
        own = {
            "w": np.zeros(100),
            "f": np.zeros((4, 5), order="F"),
            "small": np.zeros(3, int),
            "list": [np.zeros(50, int), {1: np.zeros(60, int)}],
            "tuple": (np.zeros(70, int), 0),
            "layer": Layer(np.zeros(80, int)),
            "epoch": 0,
        }
        loaded, targets = self.load(state, own)
        assert equal(loaded.pop("layer").weights, np.arange(80))
        assert own["layer"].weights[79] == 79
        expected = {key: value for key, value in state.items() if key != "layer"}
        assert equal(loaded, expected)
        assert len(targets) == 6
        assert loaded["w"] is own["w"]
        assert loaded["f"] is own["f"]
        assert loaded["small"] is own["small"]
        assert loaded["list"][1][1] is own["list"][1][1]
        assert loaded["tuple"][0] is own["tuple"][0]

    def test_copies_when_fetch_answers_other_memory(self):
        encoded = codec.encode({"w": np.arange(100.0)}, out_of_band_bytes=64)
        own = {"w": np.zeros(100)}
        for answer in (bytes, bytearray, memoryview):
            own["w"][:] = 0
            loaded = codec.decode(encoded.tree, lambda n, answer=answer: answer(encoded.buffers[n]), into=own)
            assert loaded["w"] is own["w"]
            assert own["w"][99] == 99

    def test_ignores_what_holds_no_arrays(self):
        loaded, _ = self.load({"log": [1, 2, 3], "n": 1}, {"log": [], "n": {}, "other": 3})
        assert loaded == {"log": [1, 2, 3], "n": 1}

    @pytest.mark.parametrize(
        ("own", "message"),
        [
            ({"w": np.zeros(99)}, r'state\["w"\]: the target is float64 \[99\], what was saved is float64 \[100\]'),
            ({"w": np.zeros(100, "f4")}, r'state\["w"\]: the target is float32'),
            ({"w": np.zeros(100, ">f8")}, r'state\["w"\]: the target is >f8'),
            ({"w": np.zeros(200)[::2]}, r'state\["w"\]: the target array is not writable and contiguous in C'),
            ({"w": np.broadcast_to(0.0, 100)}, r'state\["w"\]: the target array is not writable'),
            ({"f": np.zeros((4, 5))}, r'state\["f"\]: the target array is not writable and contiguous in F'),
            ({"n": np.zeros(1)}, r'state\["n"\]: the target is a numpy.ndarray, what was saved is a int'),
            ({"x": np.zeros(1)}, r'state\["x"\]: the target has it, what was saved does not'),
            ({"l": [np.zeros(50)]}, r'state\["l"\]: the target has 1 items, what was saved has 2'),
            ({"w": {"deeper": np.zeros(100)}}, r'state\["w"\]: the target is a dict, what was saved is not'),
            ([np.zeros(100)], r"state: the target is a list, what was saved is not"),
        ],
    )
    def test_names_what_does_not_fit(self, own, message):
        state = {"w": np.arange(100.0), "f": np.asfortranarray(np.ones((4, 5))), "n": 1, "l": [np.zeros(50), 1]}
        encoded = codec.encode(state, out_of_band_bytes=64)
        with pytest.raises(Validation, match=message):
            codec.buffer_targets(encoded.tree, own)
        with pytest.raises(Validation, match=message):
            codec.decode(encoded.tree, lambda n: bytearray(encoded.buffers[n]), into=own)


class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        self.torch = library("torch")

    def same(self, a, b):
        torch = self.torch
        assert type(a) is type(b)
        assert (a.dtype, a.shape, a.requires_grad) == (b.dtype, b.shape, b.requires_grad)
        raw = [torch.empty(a.shape, dtype=a.dtype).copy_(t.detach()).reshape(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*raw)

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
    def test_every_dtype(self):
        from kedge.codec.summaries import TORCH_DTYPES

        torch = self.torch
        for name, size in TORCH_DTYPES.items():
            dtype = getattr(torch, name)
            values = torch.randint(0, 2, (3, 5 * size), dtype=torch.uint8).view(dtype)
            assert values.element_size() == size
            self.same(values, round_trip([values])[0])
            self.same(values[0, 0], round_trip(values[0, 0]))
            self.same(values[:0], round_trip(values[:0]))

    def test_views_flags_and_parameters(self):
        torch = self.torch
        base = torch.arange(24.0).reshape(2, 3, 4)
        conjugated = torch.tensor([1 + 2j]).conj()
        for tensor in (
            base.transpose(0, 2),
            base[:, ::2],
            torch.tensor(5),
            conjugated,
            conjugated.imag,
            torch.ones(3, requires_grad=True),
            torch.nn.Parameter(torch.ones(30)),
            torch.nn.Parameter(torch.ones(3), requires_grad=False),
            torch.zeros((0, 5)),
        ):
            self.same(tensor, round_trip({"t": tensor})["t"])

    def test_state_of_a_model_and_its_optimiser(self):
        torch = self.torch
        model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))
        optimiser = torch.optim.AdamW(model.parameters())
        model(torch.ones(4, 30)).sum().backward()
        optimiser.step()
        state = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "rng": torch.get_rng_state()}
        loaded = round_trip(state)
        assert type(loaded["model"]) is collections.OrderedDict
        assert loaded["model"]._metadata == model.state_dict()._metadata
        for key, tensor in model.state_dict().items():
            self.same(tensor, loaded["model"][key])
        model.load_state_dict(loaded["model"])
        optimiser.load_state_dict(loaded["optimiser"])

    def test_small_values(self):
        torch = self.torch
        for value in (torch.Size([1, 2]), torch.device("cuda:1"), torch.device("cpu"), torch.bfloat16):
            loaded = round_trip([value])[0]
            assert type(loaded) is type(value)
            assert loaded == value

    def test_memory_is_not_copied(self):
        torch = self.torch
        tensor = torch.zeros(2000)
        encoded = codec.encode(tensor)
        tensor[0] = 1.0
        assert bytes(encoded.buffers[0][:4]) == b"\0\0\x80?"
        memory = bytearray(8000)
        loaded = codec.decode(encoded.tree, lambda n: memory)
        loaded[1] = 1.0
        assert memory[4:8] == b"\0\0\x80?"

    def test_read_only_memory_is_copied(self):
        encoded = codec.encode(self.torch.zeros(2000))
        loaded = codec.decode(encoded.tree, lambda n: bytes(8000))
        loaded[0] = 1

    def test_buffers_outlive_the_tensor(self):
        encoded = codec.encode(self.torch.arange(10_000))
        assert np.array_equal(np.frombuffer(encoded.buffers[0], "i8"), np.arange(10_000))

    @pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
    def test_refused(self):
        torch = self.torch
        tagged = torch.ones(3)
        tagged.note = "x"

        class Mine(torch.Tensor):
            pass

        for tensor, message in (
            (torch.ones(3).to_mkldnn(), "layout torch._mkldnn"),
            (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "dtype torch.qint8"),
            (torch.ones(3, device="meta"), "tensor on meta"),
            (torch.ones(3, requires_grad=True) * 2, "has a grad_fn"),
            (tagged, "with the attribute 'note'"),
            (torch.ones(3).as_subclass(Mine), "subclass of Tensor"),
            (torch.nn.Linear(2, 2), "cannot be saved"),
            (torch.qint8, "dtype torch.qint8"),
        ):
            with pytest.raises(UnsupportedType, match=message) as caught:
                codec.encode({"t": tensor})
            assert caught.value.path == 'state["t"]'

    def test_into(self):
        torch = self.torch
        encoded = codec.encode({"t": torch.arange(100), "p": torch.nn.Parameter(torch.ones(5))}, out_of_band_bytes=64)
        own = {"t": torch.zeros(100, dtype=torch.int64), "p": torch.nn.Parameter(torch.zeros(5))}
        targets = codec.buffer_targets(encoded.tree, own)
        targets[0][:] = encoded.buffers[0]
        loaded = codec.decode(encoded.tree, targets.__getitem__, into=own)
        assert loaded["t"] is own["t"]
        assert loaded["p"] is own["p"]
        assert own["t"][99] == 99
        assert own["p"].sum() == 5
        for wrong in (torch.zeros(99, dtype=torch.int64), torch.zeros(100), torch.zeros(200, dtype=torch.int64)[::2]):
            with pytest.raises(Validation, match=r'state\["t"\]: the target'):
                codec.buffer_targets(encoded.tree, {"t": wrong})

    def test_hostile(self):
        for tree in (
            HOSTILE["tensor of words"],
            ext(34, "Tensor", "float32", [2**62], False, b""),
            ext(34, "Tensor", "float32", [2**40, 2**40], False, 0),
            ext(34, "Tensor", "float32", [0, 2**62, 2**62], False, b""),
            ext(34, "Module", "float32", [1], False, b"\0" * 4),
            ext(34, "Tensor", "int8", [1], True, b"\0"),
            ext(34, "Tensor", "nn", [1], False, b"\0"),
            ext(35, "dtype", "nn"),
            ext(35, "device", "gpu"),
            ext(35, "Size", [-1]),
            ext(35, "hub", "load"),
        ):
            with pytest.raises((Corrupted, UnsupportedType)):
                codec.decode(tree, lambda n: bytearray(8))


def frames():
    pd, pa = library("pandas"), library("pyarrow")
    days = pd.date_range("2020-03-28", periods=3, tz="Europe/Oslo", freq="D")
    interval = pd.interval_range(0.0, 3.0, closed="left")
    series = {
        "int": pd.Series([1, 2, 3], dtype="i2"),
        "float": pd.Series([1.5, np.nan, -0.0]),
        "complex": pd.Series([1j, 2, 3]),
        "bool": pd.Series([True, False, True]),
        "objects": pd.Series([1, "a", None], dtype=object),
        "texts as objects": pd.Series(["a", "b", "c"], dtype=object),
        "timestamps as objects": pd.Series(list(days), dtype=object),
        "tuples": pd.Series([(1, 2), [3], {4: 5}]),
        "str": pd.Series(["a", None, "ø"]),
        "string": pd.Series(["a", None, "ø"], dtype="string"),
        "string, python": pd.Series(["a", None, "ø"], dtype=pd.StringDtype("python")),
        "str, python": pd.Series(["a", None, "ø"], dtype=pd.StringDtype("python", na_value=np.nan)),
        "Int64": pd.Series([1, None, 3], dtype="Int64"),
        "UInt8": pd.Series([1, None, 3], dtype="UInt8"),
        "Float32": pd.Series([1.5, None, 3], dtype="Float32"),
        "boolean": pd.Series([True, None, False], dtype="boolean"),
        "category": pd.Series(["b", "a", None], dtype=pd.CategoricalDtype(["b", "a", "unused"], ordered=True)),
        "category of days": pd.Series(pd.Categorical(days)),
        "datetime": pd.Series(days.tz_localize(None)),
        "datetime s": pd.Series(days.tz_localize(None)).dt.as_unit("s"),
        "datetime, zone": pd.Series(days),
        "datetime, zone ns": pd.Series(days).dt.as_unit("ns"),
        "datetime, offset": pd.Series(pd.date_range("2020", periods=3, tz="+05:30")),
        "datetime, UTC": pd.Series(pd.DatetimeIndex(["2020-01-01", None, "2021-01-01"], tz="UTC")),
        "timedelta": pd.Series(pd.to_timedelta([1, None, 3], unit="s")),
        "period": pd.Series(pd.period_range("2020-01", periods=3, freq="M")),
        "interval": pd.Series(interval),
        "arrow int": pd.Series([1, None, 3], dtype="int64[pyarrow]"),
        "arrow list": pd.Series(pd.arrays.ArrowExtensionArray(pa.array([[1], None, [2, 3]]))),
        "attributes": pd.Series([1, 2], name=("a", 1)),
    }
    series["attributes"].attrs = {"unit": "m", 1: [1, (2,)]}
    indexes = {
        "range": pd.RangeIndex(2, 20, 3, name="r"),
        "int": pd.Index([3, 1, 2], name=5),
        "float": pd.Index([1.5, np.nan]),
        "text": pd.Index(["a", "b"], name=None),
        "objects": pd.Index([1, "a"], dtype=object),
        "tuples": pd.Index([(1, 2), (3, 4)], tupleize_cols=False),
        "days": days,
        "days without frequency": pd.DatetimeIndex(["2020-01-01", "2020-01-05", "2020-01-06"]),
        "business days": pd.date_range("2020", periods=5, freq="B"),
        "hours": pd.timedelta_range("1h", periods=3, freq="h"),
        "periods": pd.period_range("2020Q1", periods=3, freq="Q-JAN"),
        "intervals": interval,
        "categories": pd.CategoricalIndex(["a", "b", "a"], name="c"),
        "Int64": pd.Index([1, None], dtype="Int64"),
        "multi": pd.MultiIndex.from_product([[1, 2], ["a", "b"], days], names=["x", None, ("y", 1)]),
        "multi, unused levels": pd.MultiIndex.from_product([[1, 2], ["a", "b"]])[1:2],
        "multi, missing": pd.MultiIndex.from_arrays([[1, np.nan], ["a", None]]),
        "empty": pd.Index([]),
    }
    wide = pd.DataFrame({name: values for name, values in series.items() if len(values) == 3})
    many = pd.DataFrame(np.arange(12.0).reshape(3, 4), columns=["a", "b", "a", 5], index=indexes["days"])
    tables = {
        "every dtype": wide,
        "one block": pd.DataFrame(np.arange(12.0).reshape(4, 3)),
        "names twice": many,
        "index twice": pd.DataFrame({"a": [1, 2]}, index=["x", "x"]),
        "multi columns": pd.DataFrame(np.ones((2, 4)), columns=pd.MultiIndex.from_product([["a", "b"], [1, 2]])),
        "multi index": pd.DataFrame({"v": range(12)}, index=indexes["multi"]),
        "named": many.rename_axis(index="i", columns="c"),
        "empty": pd.DataFrame(),
        "no rows": wide.iloc[:0],
        "no columns": pd.DataFrame(index=indexes["days"]),
        "attributes": pd.DataFrame({"a": [1]}),
        "no duplicates": pd.DataFrame({"a": [1]}).set_flags(allows_duplicate_labels=False),
    }
    tables["attributes"].attrs["source"] = {"path": "x"}
    return {"series": series, "index": indexes, "frame": tables}


frames = functools.cache(frames)


class TestPandas:
    @pytest.fixture(autouse=True)
    def pandas(self):
        self.pd = library("pandas")

    @pytest.mark.parametrize("out_of_band_bytes", [1, 4096])
    @pytest.mark.parametrize("kind", ["series", "index", "frame"])
    def test_come_back_exactly(self, kind, out_of_band_bytes):
        for name, value in frames()[kind].items():
            loaded = round_trip({"v": value}, out_of_band_bytes)["v"]
            try:
                self.same(value, loaded)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from error

    def same(self, a, b):
        pd = self.pd
        assert type(a) is type(b)
        if isinstance(a, pd.DataFrame):
            pd.testing.assert_frame_equal(a, b, check_exact=True, check_freq=True, check_column_type="exact")
            self.same(a.columns, b.columns)
            self.same(a.index, b.index)
            assert equal(list(a.dtypes), list(b.dtypes))
            for position in range(a.shape[1]):
                self.same_values(a.iloc[:, position], b.iloc[:, position])
        elif isinstance(a, pd.Series):
            pd.testing.assert_series_equal(a, b, check_exact=True, check_freq=True, check_index_type="exact")
            self.same(a.index, b.index)
            assert equal(a.name, b.name)
            self.same_values(a, b)
        else:
            pd.testing.assert_index_equal(a, b, exact=True, check_exact=True)
            assert equal(list(a.names), list(b.names))
            assert getattr(a, "freq", None) == getattr(b, "freq", None)
            if isinstance(a, pd.MultiIndex):
                for mine, other in zip((*a.levels, *a.codes), (*b.levels, *b.codes), strict=True):
                    assert type(mine) is type(other)
                    assert mine.dtype == other.dtype
                    assert len(mine) == len(other)
        if not isinstance(a, pd.Index):
            assert equal(a.attrs, b.attrs)
            assert a.flags.allows_duplicate_labels == b.flags.allows_duplicate_labels

    def same_values(self, a, b):
        assert a.dtype == b.dtype
        assert type(a.array) is type(b.array)
        if a.dtype == object:
            assert equal(a.tolist(), b.tolist())

    def test_loaded_frames_can_be_changed(self):
        loaded = round_trip(frames()["frame"]["every dtype"])
        loaded.loc[0, "int"] = 9
        loaded["new"] = 1
        assert loaded["int"].tolist() == [9, 2, 3]

    def test_columns_of_numpy_memory_are_not_copied(self):
        frame = self.pd.DataFrame({"a": np.arange(1000.0), "b": np.arange(1000.0)})
        buffers = codec.encode(frame).buffers
        assert len(buffers) == 2
        assert np.shares_memory(np.frombuffer(buffers[0], "f8"), frame["a"].to_numpy())

    def test_scalars(self):
        pd = self.pd
        moment = pd.Timestamp("2020-10-25 02:30").tz_localize("Europe/Oslo", ambiguous=True)
        for value in (
            pd.Timestamp("2020-01-01 00:00:00.123456789"),
            pd.Timestamp("2020-01-01").as_unit("s"),
            moment,
            moment + pd.Timedelta("1h"),
            pd.Timestamp("2020-10-25 02:30", tz="UTC"),
            pd.Timedelta("1ns"),
            pd.Timedelta(-5, "s").as_unit("s"),
            pd.NaT,
            pd.NA,
        ):
            loaded = round_trip([value])[0]
            assert type(loaded) is type(value)
            assert loaded is value or (loaded == value and loaded.unit == value.unit)
            if isinstance(value, pd.Timestamp):
                assert (str(loaded.tz), loaded.fold) == (str(value.tz), value.fold)

    def test_refused(self):
        pd = self.pd
        holidays = pd.offsets.CustomBusinessDay(holidays=["2020-01-02"])

        class Mine(pd.DataFrame):
            pass

        for value, path, message in (
            (pd.Series([1, 0], dtype="Sparse[int]"), 'state["v"]', "Sparse"),
            (pd.date_range("2020", periods=3, freq=holidays), 'state["v"]', "frequency"),
            (pd.DataFrame({"a": [object()]}), 'state["v"].data[0][0]', "has type object"),
            (Mine({"a": [1]}), 'state["v"]', "cannot be saved"),
            (pd.Period("2020"), 'state["v"]', "of pandas"),
            (pd.Interval(0, 1), 'state["v"]', "of pandas"),
        ):
            with pytest.raises(UnsupportedType, match=message) as caught:
                codec.encode({"v": value})
            assert caught.value.path == path

    def test_outline(self):
        outline = codec.outline(codec.encode(self.pd.DataFrame({"a": np.arange(1000.0)})).tree)
        assert outline.name == "pandas.DataFrame"
        assert outline.fields["data"] == [BufferSummary("ndarray", "<f8", (1000,), 8000, (0,))]

    @given(st.data())
    def test_mutated(self, data):
        value = frames()["frame"][data.draw(st.sampled_from(("names twice", "multi index", "every dtype")))]
        encoded = codec.encode(value, out_of_band_bytes=256)
        tree = bytearray(encoded.tree)
        for _ in range(data.draw(st.integers(1, 3))):
            tree[data.draw(st.integers(0, len(tree) - 1))] = data.draw(st.integers(0, 255))
        try:
            codec.decode(bytes(tree), lambda n: bytearray(encoded.buffers[n]))
        except (Corrupted, Validation):
            pass


class TestPolars:
    @pytest.fixture(autouse=True)
    def polars(self):
        self.pl = library("polars")

    def frame(self):
        pl = self.pl
        return pl.DataFrame(
            {
                "int": pl.Series([1, None], dtype=pl.Int8),
                "i128": pl.Series([2**100, None], dtype=pl.Int128),
                "float": [float("nan"), -0.0],
                "text": ["ø", None],
                "bytes": [b"x", None],
                "category": pl.Series(["b", "a"], dtype=pl.Categorical),
                "enum": pl.Series(["b", "a"], dtype=pl.Enum(["a", "b", "c"])),
                "decimal": [Decimal("1.50"), None],
                "datetime": pl.Series([1_600_000_000, None]).cast(pl.Datetime("ns", "Europe/Oslo")),
                "date": [dt.date(2020, 1, 1), None],
                "time": [dt.time(1, 2), None],
                "duration": [dt.timedelta(1), None],
                "list": [[1, None], None],
                "array": pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int16, 2)),
                "struct": [{"a": 1, "b": ["x"]}, None],
                "null": [None, None],
            }
        )

    @pytest.mark.parametrize("out_of_band_bytes", [1, 1 << 20])
    def test_come_back_exactly(self, out_of_band_bytes):
        frame = self.frame()
        for value in (frame, frame.clear(), frame.vstack(frame), frame[1:], self.pl.DataFrame()):
            loaded = round_trip({"v": value}, out_of_band_bytes)["v"]
            assert loaded.schema == value.schema
            assert loaded.equals(value)
        for name in frame.columns:
            loaded = round_trip(frame[name], out_of_band_bytes)
            assert loaded.dtype == frame[name].dtype
            assert loaded.equals(frame[name], check_names=True, check_dtypes=True)

    def test_refused(self):
        pl = self.pl
        for value in (pl.DataFrame({"o": pl.Series([object()], dtype=pl.Object)}), pl.LazyFrame({"a": [1]})):
            with pytest.raises(UnsupportedType) as caught:
                codec.encode({"v": value})
            assert caught.value.path == 'state["v"]'

    def test_outline(self):
        outline = codec.outline(codec.encode(self.pl.DataFrame({"a": [1.5, 2.5]})).tree)
        assert (outline.kind, outline.shape) == ("polars.DataFrame", (2, 1))
        assert "a: Float64" in outline.dtype

    def test_broken_bytes_are_corrupted(self):
        encoded = codec.encode(self.frame(), out_of_band_bytes=1)
        (buffer,) = encoded.buffers
        for broken in (bytes(len(buffer)), b"ARROW1" * (len(buffer) // 6) + b"x" * (len(buffer) % 6)):
            with pytest.raises(Corrupted):
                codec.decode(encoded.tree, lambda n, broken=broken: broken)


class TestArrow:
    @pytest.fixture(autouse=True)
    def arrow(self):
        self.pa = library("pyarrow")

    def table(self):
        pa = self.pa
        columns = {
            "int": pa.array([1, None, 3], pa.int16()),
            "text": pa.array(["a", None, "ø"]),
            "view": pa.array(["a", None, "ø"], pa.string_view()),
            "dictionary": pa.array(["a", "b", None]).dictionary_encode(),
            "list": pa.array([[1], None, []]),
            "struct": pa.array([{"a": 1}, None, {"a": None}]),
            "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int8())),
            "decimal": pa.array([Decimal("1.50"), None, None]),
            "moment": pa.array([0, None, 1], pa.timestamp("ns", "Europe/Oslo")),
            "null": pa.nulls(3),
        }
        return pa.table(columns).replace_schema_metadata({"k": "v"})

    @pytest.mark.parametrize("out_of_band_bytes", [1, 1 << 20])
    def test_come_back_exactly(self, out_of_band_bytes):
        pa, table = self.pa, self.table()
        for value in (table, table.slice(1, 1), table.slice(0, 0), pa.concat_tables([table, table])):
            loaded = round_trip({"v": value}, out_of_band_bytes)["v"]
            assert loaded.equals(value, check_metadata=True)
        batch = table.to_batches()[0]
        loaded = round_trip(batch, out_of_band_bytes)
        assert type(loaded) is pa.RecordBatch
        assert loaded.equals(batch, check_metadata=True)

    def test_refused(self):
        pa = self.pa

        class Mine(pa.ExtensionType):
            def __init__(self):
                super().__init__(pa.int64(), "tests.mine")

            def __arrow_ext_serialize__(self):
                return b""

        array = pa.ExtensionArray.from_storage(Mine(), pa.array([1]))
        for value in (
            pa.table({"a": array}),
            pa.table({"a": pa.StructArray.from_arrays([array], ["x"])}),
            pa.array([1]),
        ):
            with pytest.raises(UnsupportedType) as caught:
                codec.encode({"v": value})
            assert caught.value.path == 'state["v"]'

    @given(st.data())
    def test_broken_bytes_are_corrupted(self, data):
        encoded = codec.encode(self.table(), out_of_band_bytes=1)
        broken = bytearray(encoded.buffers[0])
        for _ in range(data.draw(st.integers(1, 4))):
            broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
        try:
            codec.decode(encoded.tree, lambda n: broken)
        except Corrupted:
            pass


@pytest.mark.parametrize("name", ["numpy", "pandas", "polars", "pyarrow"])
def test_loading_imports_only_what_the_tree_needs(name):
    module = library(name)
    value = {
        "numpy": lambda: module.arange(3),
        "pandas": lambda: module.Series([1, 2]),
        "polars": lambda: module.DataFrame({"a": [1]}),
        "pyarrow": lambda: module.table({"a": [1]}),
    }[name]()
    program = f"""
        import sys
        from kedge import codec
        codec.decode({codec.encode(value).tree!r}, None.__class__)
        assert {name!r} in sys.modules
        known = {{"numpy", "torch", "pandas", "polars", "pyarrow", "pydantic", "msgspec"}}
        assert "torch" not in sys.modules and "pydantic" not in sys.modules
        if {name!r} == "numpy":
            assert known & sys.modules.keys() == {{"numpy"}}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (np.random.default_rng(1), "rng.bit_generator.state = state"),
        (np.random.RandomState(1), "rng.set_state(state)"),
        (np.random.PCG64(1), "assigning to .state"),
    ],
)
def test_sources_of_random_numbers_say_how_they_are_saved(value, hint):
    with pytest.raises(UnsupportedType) as caught:
        codec.encode({"rng": value})
    assert hint in str(caught.value)


def test_the_hint_for_random_numbers_works():
    rng = np.random.default_rng(1)
    saved = round_trip(rng.bit_generator.state)
    expected = rng.random()
    other = np.random.default_rng(2)
    other.bit_generator.state = saved
    assert other.random() == expected
