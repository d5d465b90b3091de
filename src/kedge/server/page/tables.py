"""Values that are tables, shown as such: data frames, lists of records, the first elements of an array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from kedge.codec import BufferSummary, TypeSummary
from kedge.codec.kinds import key_name
from kedge.diff.outline import StoredState, inside
from kedge.errors import NotFound, TooLarge
from kedge.terminal.tree import describe

if TYPE_CHECKING:
    import numpy
    from numpy.typing import NDArray

_ROWS, _COLUMNS = 100, 20
_CELL_CHARACTERS = 80
_FRAME_BYTES = 32 << 20  # a data frame is loaded as a whole
_ELEMENTS = 10  # of an array in each direction
_FRAMES = ("pandas.DataFrame", "pandas.Series", "polars.DataFrame", "polars.Series", "pyarrow.Table")


@dataclass(frozen=True, slots=True)
class Table:
    """The first rows and columns of something."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    total_rows: int
    total_columns: int

    @property
    def is_cut(self) -> bool:
        return len(self.rows) < self.total_rows or len(self.columns) < self.total_columns


def is_table(value: object) -> bool:
    return is_frame(value) or bool(_records(value))


def is_frame(value: object) -> bool:
    """A data frame: without its library, not even its rows can be told apart."""
    kind = value.name if isinstance(value, TypeSummary) else value.kind if isinstance(value, BufferSummary) else ""
    return kind in _FRAMES


def _records(value: object) -> Sequence[Mapping[str, object]]:
    """The first rows of a list of dicts with names; nothing for any other value."""
    if not isinstance(value, list | tuple) or len(value) < 2:
        return []
    first: list[Mapping[str, object]]
    first = [row for row in value[:_ROWS] if isinstance(row, dict) and row and all(isinstance(key, str) for key in row)]
    return first if len(first) == len(value[:_ROWS]) else []


def table_at(state: StoredState, path: str) -> Table:
    value = inside(state.outline, path)
    if is_frame(value):
        return _of_frame(state, path, value)
    if records := _records(value):
        names = list(dict.fromkeys(name for record in records for name in record))
        rows = [[_cell(record[name]) if name in record else "" for name in names[:_COLUMNS]] for record in records]
        return Table(names[:_COLUMNS], rows, len(value), len(names))  # type: ignore[arg-type]
    raise NotFound(f"there is no table at {path}", hint="the tree shows what is there")


def _of_frame(state: StoredState, path: str, summary: object) -> Table:
    size_bytes = sum(_sizes(summary))
    if size_bytes > _FRAME_BYTES:
        raise TooLarge(
            f"the table at {path} has {size_bytes:,} bytes", hint=f"up to {_FRAME_BYTES >> 20} MiB are shown"
        )
    frame: Any = inside(state.load(path), path)
    if hasattr(frame, "to_frame"):  # one column
        frame = frame.to_frame()
    if hasattr(frame, "column_names"):  # pyarrow
        head = frame.slice(0, _ROWS).to_pylist()
        rows = [[_cell(value) for value in islice(row.values(), _COLUMNS)] for row in head]
        return Table(frame.column_names[:_COLUMNS], rows, frame.num_rows, frame.num_columns)
    total_rows, total_columns = frame.shape
    if hasattr(frame, "iter_rows"):  # polars
        rows = [[_cell(value) for value in row[:_COLUMNS]] for row in frame.head(_ROWS).iter_rows()]
        return Table(frame.columns[:_COLUMNS], rows, total_rows, total_columns)
    head = frame.iloc[:_ROWS, : _COLUMNS - 1]
    names = ["" if frame.index.name is None else str(frame.index.name), *map(key_name, head.columns)]
    rows = [[_cell(value) for value in row] for row in head.itertuples(name=None)]
    return Table(names, rows, total_rows, total_columns + 1)


def _sizes(value: object) -> Iterator[int]:
    if isinstance(value, BufferSummary):
        yield value.size_bytes
    elif isinstance(value, TypeSummary):
        yield from _sizes(list(value.fields.values()))
    elif isinstance(value, Mapping | list | tuple):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _sizes(inner)


def _cell(value: object) -> str:
    text = value if isinstance(value, str) else describe(value)[0]
    return text if len(text) <= _CELL_CHARACTERS else text[: _CELL_CHARACTERS - 1] + "…"


def of_array(values: NDArray[numpy.generic], summary: BufferSummary) -> Table | None:
    """The first elements of an array with one or two dimensions; `values` are those it begins with."""
    shape = summary.shape
    if len(shape) not in (1, 2) or 0 in shape or (summary.order != "C" and len(values) < shape[0] * shape[-1]):
        return None
    if len(shape) == 1:
        rows = [[_element(value) for value in values[: 2 * _ELEMENTS].tolist()]]
        return Table([str(n) for n in range(len(rows[0]))], rows, 1, shape[0])
    height = min(_ELEMENTS, shape[0], len(values) // shape[1] if summary.order == "C" else shape[0])
    matrix = (
        values[: height * shape[1]].reshape(height, shape[1])
        if summary.order == "C"
        else values.reshape(shape, order="F")
    )
    rows = [[_element(value) for value in row] for row in matrix[:height, :_ELEMENTS].tolist()]
    return Table([str(n) for n in range(len(rows[0]) if rows else 0)], rows, shape[0], shape[1]) if rows else None


def _element(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float | complex) else str(value)
