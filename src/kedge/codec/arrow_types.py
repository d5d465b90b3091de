"""pyarrow: tables and record batches, as one buffer of Arrow IPC (stream format) each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from .kinds import DecodeContext, EncodeContext, Leaf, Problem, Tag, add, unsupported
from .summaries import shape_of, table_parts


def _save(table: Any, ctx: EncodeContext) -> bytes:
    for kind in _types(field.type for field in table.schema):
        if isinstance(kind, pa.ExtensionType):
            raise _refuse(f"a column of the extension type {kind}", "save the storage of that column")
    if table.num_rows and not table.num_columns:
        raise _refuse("rows and no columns", "save the number of rows")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        if isinstance(table, pa.Table):
            writer.write_table(table)
        else:
            writer.write_batch(table)
    data = sink.getvalue()
    if not pa.ipc.read_schema(data).equals(table.schema, check_metadata=True):
        raise _refuse("a schema that Arrow IPC does not keep", "cast the column that is special")
    about = {
        "shape": [table.num_rows, table.num_columns],
        "columns": [f"{field.name}: {field.type}" for field in table.schema],
    }
    view = memoryview(data).cast("B")
    return ctx.pack([type(table).__name__, about, view.nbytes, ctx.place_bytes(view)])


def _types(kinds: Any) -> Iterator[object]:
    for kind in kinds:
        yield kind
        if pa.types.is_dictionary(kind):
            yield from _types([kind.value_type])
        else:
            yield from _types(kind.field(index).type for index in range(kind.num_fields))


def _refuse(what: str, hint: str) -> Problem:
    return unsupported(f"is a pyarrow table with {what}", hint)


def _load(payload: bytes, ctx: DecodeContext) -> Any:
    cls, about, size_bytes, reference = table_parts(ctx.unpack(payload))
    with pa.ipc.open_stream(pa.py_buffer(ctx.bytes_of(reference, size_bytes))) as reader:
        if cls == "Table":
            table = reader.read_all()
        elif cls == "RecordBatch":
            table = reader.read_next_batch()
        else:
            raise ValueError(f"{cls!r} is not a class of pyarrow")
    table.validate(full=True)  # Arrow trusts offsets it reads; never use them unchecked
    if (table.num_rows, table.num_columns) != shape_of(about["shape"]):
        raise ValueError("it has another shape")
    return table


add(Leaf(Tag.ARROW, "pyarrow table", _save, _load), pa.Table, pa.RecordBatch)
