"""torch: dense tensors and parameters in main memory, and the small values found beside them.

As in torch.save, `.grad` and hooks are not part of a tensor's state, and it comes back contiguous.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from holdfast.errors import UnsupportedType, Validation

from .kinds import DecodeContext, EncodeContext, Leaf, Problem, Tag, add
from .summaries import TORCH_DTYPES, shape_of, tensor_parts

_NAMES = {getattr(torch, name): name for name in TORCH_DTYPES if hasattr(torch, name)}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_CLASSES = {"Tensor": torch.Tensor, "Parameter": torch.nn.Parameter}


def _memory_of(tensor: Any) -> memoryview:
    """The bytes of a contiguous tensor, not copied. Works without numpy and for every dtype."""
    size_bytes = tensor.numel() * tensor.element_size()
    if not size_bytes:
        return memoryview(bytearray())
    memory = (ctypes.c_uint8 * size_bytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # keeps it alive as long as the view
    return memoryview(memory).cast("B")


def _refuse(what: str, hint: str) -> Problem:
    return Problem(f"{{path}} is a {what}", hint, UnsupportedType)


def _check(tensor: Any) -> None:
    if tensor.device.type != "cpu":
        raise _refuse(f"tensor on {tensor.device}", "save tensor.cpu()")
    if tensor.layout is not torch.strided:
        raise _refuse(f"tensor of layout {tensor.layout}", "save tensor.to_dense(), or its indices and values")
    if tensor.is_quantized or tensor.dtype not in _NAMES:
        raise _refuse(f"tensor of dtype {tensor.dtype}", "save tensor.dequantize(), or its parts")
    if not tensor.is_leaf:
        raise _refuse("tensor inside a graph (it has a grad_fn)", "save tensor.detach()")
    if getattr(tensor, "__dict__", None):
        name = next(iter(tensor.__dict__))
        raise _refuse(f"tensor with the attribute {name!r}", "save tensor.detach(), and the attribute apart")


def _save_tensor(tensor: Any, ctx: EncodeContext) -> bytes:
    _check(tensor)
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    reference = ctx.place_bytes(_memory_of(plain))
    parts = [type(tensor).__name__, _NAMES[tensor.dtype], list(tensor.shape), tensor.requires_grad, reference]
    return ctx.pack(parts)


def _load_tensor(payload: bytes, ctx: DecodeContext) -> Any:
    cls, name, shape, requires_grad, reference, size_bytes = tensor_parts(ctx.unpack(payload))
    dtype = _dtype(name)
    if size_bytes:
        memory = ctx.bytes_of(reference, size_bytes)
        if memory.readonly:  # torch has no read-only tensors: a write would end the process
            memory = memoryview(bytearray(memory))
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).reshape(shape)
    else:
        ctx.bytes_of(reference, 0)
        tensor = torch.empty(shape, dtype=dtype)
    if cls == "Parameter":
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _dtype(name: str) -> Any:
    if name not in _DTYPES:
        raise Problem(
            f"{{path}} has the dtype {name}, which this torch {torch.__version__} lacks",
            "pip install --upgrade torch",
            UnsupportedType,
        )
    return _DTYPES[name]


def _tensor_target(payload: bytes, ctx: DecodeContext, own: Any) -> tuple[int | bytes, memoryview]:
    _, name, shape, _, reference, _ = tensor_parts(ctx.unpack(payload))
    if tuple(own.shape) != shape or own.dtype is not _dtype(name):
        raise Problem(
            f"the target is {own.dtype} {list(own.shape)}, what was saved is torch.{name} {list(shape)}",
            "give a target of that form, or load without into=",
            Validation,
        )
    if own.device.type != "cpu" or own.layout is not torch.strided or not own.is_contiguous():
        raise Problem("the target tensor is not contiguous in main memory", "use .contiguous()", Validation)
    if own.is_conj() or own.is_neg():
        raise Problem("the target tensor is a lazy view", "use .resolve_conj().resolve_neg()", Validation)
    return reference, _memory_of(own)


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


add(Leaf(Tag.TENSOR, "tensor", _save_tensor, _load_tensor, _tensor_target), *_CLASSES.values())
add(Leaf(Tag.TORCH_VALUE, "torch value", _save_value, _load_value), torch.Size, torch.device, torch.dtype)
