"""
Flax's ``.msgpack`` (``flax.serialization``): nested maps, arrays as extension type 1. Names are joined with dots.

Read and written in pieces with the msgpack library; Flax's own functions need several times the file in memory.
"""

from __future__ import annotations
from typing import Any, BinaryIO, Dict, Iterator, Tuple
import json
import struct
import torch
from ..params import dtype_name
from .common import Checkpoint, CheckpointError, Writing, extra
from .safetensors_file import to_json

# On top level. Flax ignores keys that its target does not have.
_META_KEY = "_returnn_upcast"
_CHUNKED = "__msgpack_chunked_array__"  # how Flax stores arrays above 1 GiB
_MAX_BYTES = (1 << 32) - (1 << 10)  # lengths have 32 bits, with a margin for shape and dtype


def read(path: str) -> Checkpoint:
    """:param path: as of ``flax.serialization.to_bytes`` or ``msgpack_serialize``"""
    msgpack = extra("msgpack", "jax")
    with open(path, "rb") as file:
        unpacker = msgpack.Unpacker(
            file, ext_hook=_ext_hook, strict_map_key=False, max_buffer_size=1 << 33, read_size=1 << 20
        )
        tree = unpacker.unpack()
        if file.read(1) or unpacker.tell() != file.tell():
            raise CheckpointError("there is more data after the end")
    if not isinstance(tree, dict):
        raise CheckpointError(f"expected a map, got {type(tree).__name__}")
    meta = json.loads(tree.pop(_META_KEY, "{}"))
    # such as the step of a train state
    meta.update({k: tree.pop(k) for k, v in list(tree.items()) if isinstance(v, (bool, int, float, str, type(None)))})
    arrays: Dict[str, torch.Tensor] = {}
    for name, x in _flatten(tree):
        if not isinstance(x, torch.Tensor):
            raise CheckpointError(f"{name}: expected an array, got {type(x).__name__}")
        if name in arrays:
            raise CheckpointError(f"two arrays with the name {name}")
        arrays[name] = x
    dtypes = meta.pop("original_dtypes", {})
    return Checkpoint(arrays, meta=meta, original_dtypes=dtypes, wrapped=bool(meta))


def _ext_hook(code: int, data: bytes) -> Any:
    if code not in (1, 3):  # array, NumPy scalar
        raise CheckpointError(f"unknown msgpack extension type {code}")
    shape, name, values = extra("msgpack", "jax").unpackb(data, raw=True, max_bin_len=len(data))
    dtype = getattr(torch, name.decode(), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"torch has no dtype {name.decode()}")
    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).reshape(shape)


def _flatten(tree: Dict[Any, Any], prefix: str = "") -> Iterator[Tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and _CHUNKED in value:
            shape = [value["shape"][str(i)] for i in range(len(value["shape"]))]
            value = torch.cat([value["chunks"][str(i)] for i in range(len(value["chunks"]))]).reshape(shape)
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def write(path: str, writing: Writing):
    """:param path: is overwritten"""
    ckpt = writing.ckpt
    packer = extra("msgpack", "jax").Packer()
    big = [name for name in ckpt.arrays if ckpt.nbytes(name) > _MAX_BYTES]
    if big:
        raise CheckpointError(f"msgpack cannot store arrays of 4 GiB: {', '.join(big)}")
    tree: Dict[str, Any] = unflatten({name: _Leaf(name) for name in ckpt.arrays})
    meta = {**ckpt.meta, **({"original_dtypes": ckpt.original_dtypes} if ckpt.original_dtypes else {})}
    if _META_KEY in tree:
        raise CheckpointError(f"the name {_META_KEY} is taken")
    if meta:
        tree[_META_KEY] = to_json(meta)
    with open(path, "wb") as file:
        _pack(tree, file, packer, writing)


class _Leaf(str):
    """Name of an array."""


def _pack(value: Any, file: BinaryIO, packer: Any, writing: Writing):
    if isinstance(value, _Leaf):
        ckpt = writing.ckpt
        size, shape = ckpt.nbytes(value), tuple(ckpt.arrays[value].shape)
        head = packer.pack_array_header(3) + packer.pack(shape) + packer.pack(dtype_name(ckpt.dtype(value)))
        head += b"\xc6" + struct.pack(">I", size)  # bin 32
        file.write(b"\xc9" + struct.pack(">IB", len(head) + size, 1) + head)  # ext 32 of type 1
        for chunk in writing.chunks(value):
            file.write(chunk)
    elif isinstance(value, dict):
        file.write(packer.pack_map_header(len(value)))
        for key, sub in value.items():
            file.write(packer.pack(key))
            _pack(sub, file, packer, writing)
    else:
        file.write(packer.pack(value))


def unflatten(flat: Dict[str, Any]) -> Dict[str, Any]:
    """
    :param flat: "a.b" -> value
    :return: {"a": {"b": value}}. CheckpointError where a name is the beginning of another one
    """
    tree: Dict[str, Any] = {}
    clashes = []
    for name, value in flat.items():
        *path, last = name.split(".")
        node = tree
        for key in path:
            node = node.setdefault(key, {}) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last in node:
            clashes.append(name)
        else:
            node[last] = value
    if clashes:
        raise CheckpointError(f"names clash as nested maps: {', '.join(clashes)}")
    return tree
