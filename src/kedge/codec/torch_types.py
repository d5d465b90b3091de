"""torch: dense and sparse tensors, parameters, and the small values beside them.

As in torch.save, `.grad` and hooks are not part of a tensor's state. A tensor is loaded contiguous, in main memory or
on the given device. Tensors that overlap in memory are loaded over one memory, with their strides.
"""

from __future__ import annotations

from typing import Any

import torch

from kedge.blobs.memory_map import unseal
from kedge.chunks import Target
from kedge.errors import Validation

from .kinds import Choice, DecodeContext, EncodeContext, Leaf, Problem, Source, Tag, add, by_class, unsupported
from .shared_memory import Group
from .summaries import SPARSE_LAYOUTS, TORCH_DTYPES, TensorParts, shape_of, tensor_parts
from .torch_memory import REACHABLE, TensorMemory, allocate, bytes_of, flat, is_remote

_NAMES = {getattr(torch, name): name for name in TORCH_DTYPES if hasattr(torch, name)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_CLASSES = {"Tensor": torch.Tensor, "Parameter": torch.nn.Parameter}
_SMALL_BYTES = 256 * 1024  # less of a device's memory is copied at once: it shares chunks with others


def _refuse(what: str, hint: str) -> Problem:
    return unsupported(f"is a {what}", hint)


def _check(tensor: Any) -> None:
    if tensor.device.type not in REACHABLE:
        raise _refuse(f"tensor on {tensor.device}", "save tensor.cpu()")
    if tensor.is_quantized or tensor.dtype not in _NAMES:
        raise _refuse(f"tensor of dtype {tensor.dtype}", "save tensor.dequantize(), or its parts")
    if not tensor.is_leaf:
        raise _refuse("tensor inside a graph (it has a grad_fn)", "save tensor.detach()")
    if getattr(tensor, "__dict__", None):
        name = next(iter(tensor.__dict__))
        raise _refuse(f"tensor with the attribute {name!r}", "save tensor.detach(), and the attribute apart")


# --- dense tensors ---


def _save_tensor(tensor: Any, ctx: EncodeContext) -> bytes:
    _check(tensor)
    parts = [type(tensor).__name__, _NAMES[tensor.dtype], list(tensor.shape), tensor.requires_grad]
    group, start = _group_of(tensor, ctx)
    if group is None:
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return ctx.pack([*parts, _place(plain, ctx)])
    if group.ordinal is None:
        group.ordinal = ctx.add_buffer(_source(flat(tensor.untyped_storage(), group.start, group.stop)))
    view = [list(tensor.stride()), start - group.start, group.stop - group.start]
    return ctx.pack([*parts, group.ordinal, *view])


def _group_of(tensor: Any, ctx: EncodeContext) -> tuple[Group | None, int]:
    """Return the memory it shares with other tensors of the state, and where in its storage it begins."""
    if not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return None, 0
    storage, size = tensor.untyped_storage(), tensor.element_size()
    reach = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * size
    place = str(tensor.device), storage.data_ptr()
    return ctx.shares.see(place, start, start + (reach + 1) * size, tensor), start


def _source(tensor: Any) -> Source:
    if is_remote(tensor):
        if tensor.numel() * tensor.element_size() >= _SMALL_BYTES:
            return TensorMemory(tensor)
        tensor = tensor.cpu()
    return bytes_of(tensor)


def _place(tensor: Any, ctx: EncodeContext) -> int | bytes:
    source = _source(tensor)
    return ctx.place_bytes(source) if isinstance(source, memoryview) else ctx.add_buffer(source)


def _load_tensor(payload: bytes, ctx: DecodeContext) -> Any:
    parts = tensor_parts(ctx.unpack(payload))
    dtype = _dtype(parts.dtype)
    memory = _memory(parts, ctx)
    if parts.stride is not None:
        offset = parts.offset_bytes // dtype.itemsize
        usable = parts.memory_bytes - parts.memory_bytes % dtype.itemsize
        tensor = memory[:usable].view(dtype).as_strided(parts.shape, parts.stride, offset)
    elif parts.memory_bytes:
        tensor = memory.view(dtype).reshape(parts.shape)
    else:
        tensor = torch.empty(parts.shape, dtype=dtype, device=memory.device)
    if parts.cls == "Parameter":
        return torch.nn.Parameter(tensor, requires_grad=parts.requires_grad)
    return tensor.requires_grad_() if parts.requires_grad else tensor


def _memory(parts: TensorParts, ctx: DecodeContext) -> Any:
    """Return the memory of a tensor as a tensor of bytes; the same one for all that share it."""
    reference, size_bytes = parts.reference, parts.memory_bytes
    device = torch.device(ctx.device.name) if ctx.device is not None else torch.device("cpu")
    if not size_bytes:
        ctx.bytes_of(reference, 0)
        return torch.empty(0, dtype=torch.uint8, device=device)
    if type(reference) is int and reference in ctx.shared:
        return ctx.shared[reference]
    if ctx.device is not None and type(reference) is int:
        ctx.device.check(reference, size_bytes)
        storage = allocate(size_bytes, device)
        ctx.device.targets[reference] = TensorMemory(storage)
    else:
        memory = ctx.bytes_of(reference, size_bytes)
        # torch has no read-only tensors: a write to one would kill the process.
        storage = torch.frombuffer(unseal(memory) if memory.readonly else memory, dtype=torch.uint8).to(device)
    if type(reference) is int:
        ctx.shared[reference] = storage
    return storage


def _dtype(name: str) -> Any:
    if name not in _DTYPES:
        what = f"has the dtype {name}, which this torch {torch.__version__} lacks"
        raise unsupported(what, "pip install --upgrade torch")
    return _DTYPES[name]


def _tensor_target(payload: bytes, ctx: DecodeContext, own: Any) -> tuple[int | bytes, Target] | None:
    parts = tensor_parts(ctx.unpack(payload))
    if tuple(own.shape) != parts.shape or own.dtype is not _dtype(parts.dtype):
        raise Problem(
            f"the target is {own.dtype} {list(own.shape)}, what was saved is torch.{parts.dtype} {list(parts.shape)}",
            "give a target of that form, or load without into=",
            Validation,
        )
    if own.device.type not in REACHABLE or not own.is_contiguous():
        raise Problem("the target tensor is not contiguous", "use .contiguous()", Validation)
    if own.is_conj() or own.is_neg():
        raise Problem("the target tensor is a lazy view", "use .resolve_conj().resolve_neg()", Validation)
    if parts.stride is not None:
        return None  # it shares memory with other tensors
    return parts.reference, TensorMemory(own) if is_remote(own) and own.numel() else bytes_of(own)


def _fill_tensor(own: Any, loaded: Any) -> None:
    own.detach().copy_(loaded.detach())


# --- sparse tensors ---


def _save_sparse(tensor: Any, ctx: EncodeContext) -> bytes:
    _check(tensor)
    name = str(tensor.layout).removeprefix("torch.")
    if name not in SPARSE_LAYOUTS or type(tensor) is not torch.Tensor:
        raise _refuse(f"{type(tensor).__name__} of layout {tensor.layout}", "save tensor.to_dense()")
    plain = tensor.detach()
    if plain.layout is torch.sparse_coo:
        parts = [plain._indices(), plain._values(), plain.is_coalesced()]
    elif plain.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [plain.crow_indices(), plain.col_indices(), plain.values()]
    else:
        parts = [plain.ccol_indices(), plain.row_indices(), plain.values()]
    return ctx.pack([name, list(tensor.shape), tensor.requires_grad, *(_detached(part) for part in parts)])


def _detached(part: Any) -> object:
    return part.detach() if isinstance(part, torch.Tensor) else part


def _load_sparse(payload: bytes, ctx: DecodeContext) -> Any:
    device, ctx.device = ctx.device, None  # its indices are checked before they are used
    try:
        layout, lengths, requires_grad, *parts = ctx.unpack(payload)
    finally:
        ctx.device = device
    shape = shape_of(lengths)
    if layout not in SPARSE_LAYOUTS or type(requires_grad) is not bool:
        raise ValueError(f"{layout!r} is not a layout of sparse tensors")
    if layout == "sparse_coo":
        indices, values, is_coalesced = parts
        is_coalesced = bool(is_coalesced)
        tensor = torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=is_coalesced)
    else:
        compressed, plain, values = parts
        kind = getattr(torch, layout)
        tensor = torch.sparse_compressed_tensor(compressed, plain, values, shape, layout=kind, check_invariants=True)
    tensor = tensor if device is None else tensor.to(device.name)
    return tensor.requires_grad_() if requires_grad else tensor


# --- small values ---


def _save_value(value: Any, ctx: EncodeContext) -> bytes:
    if isinstance(value, torch.Size):
        return ctx.pack(["Size", list(value)])
    if isinstance(value, torch.device):
        return ctx.pack(["device", str(value)])
    if value not in _NAMES:
        raise _refuse(f"dtype {value}", "save its name")
    return ctx.pack(["dtype", _NAMES[value]])


def _load_value(payload: bytes, ctx: DecodeContext) -> Any:
    cls, value = ctx.unpack(payload)
    if cls == "Size":
        return torch.Size(shape_of(value))
    if cls == "device" and type(value) is str:
        return torch.device(value)
    if cls == "dtype" and type(value) is str:
        return _dtype(value)
    raise ValueError(f"{cls!r} is not a class of torch")


_DENSE = Leaf(Tag.TENSOR, "tensor", _save_tensor, _load_tensor, _tensor_target, _fill_tensor)
_SPARSE = Leaf(Tag.SPARSE_TENSOR, "sparse tensor", _save_sparse, _load_sparse)


add(_DENSE)
add(_SPARSE)
for cls in _CLASSES.values():
    by_class[cls] = Choice(lambda tensor: _DENSE if tensor.layout is torch.strided else _SPARSE)
add(Leaf(Tag.TORCH_VALUE, "torch value", _save_value, _load_value), torch.Size, torch.device, torch.dtype)
