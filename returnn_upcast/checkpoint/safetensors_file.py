"""
``.safetensors``. Read with the library, which checks the file; written here, which takes one array at a time.
"""

from __future__ import annotations
from typing import Any, Dict
import json
import struct
import torch
from .common import Checkpoint, CheckpointError, Writing, extra

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
}
# The format's metadata is str -> str. Strings are stored as they are, all else under this key, as JSON.
_META_KEY = "returnn_upcast"


def read(path: str) -> Checkpoint:
    """:param path: any safetensors file"""
    with extra("safetensors", "safetensors").safe_open(path, "pt") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}
        strings = dict(file.metadata() or {})
    rest = json.loads(strings.pop(_META_KEY, "{}"))
    strings.pop("format", None)
    dtypes = rest.pop("original_dtypes", {})
    meta = {**strings, **rest}
    return Checkpoint(arrays, meta=meta, original_dtypes=dtypes, wrapped=bool(meta))


def write(path: str, writing: Writing):
    """:param path: is overwritten"""
    ckpt = writing.ckpt
    wrong = [f"{name} ({ckpt.dtype(name)})" for name in ckpt.arrays if ckpt.dtype(name) not in _CODES]
    if wrong:
        raise CheckpointError(f"safetensors has no such dtype: {', '.join(wrong)}")
    # the widest first: then each is aligned to its element size
    names = sorted(ckpt.arrays, key=lambda name: (-ckpt.dtype(name).itemsize, name))
    header: Dict[str, Any] = {"__metadata__": _metadata(ckpt)}
    end = 0
    for name in names:
        begin, end = end, end + ckpt.nbytes(name)
        code, shape = _CODES[ckpt.dtype(name)], list(ckpt.arrays[name].shape)
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            for chunk in writing.chunks(name):
                file.write(chunk)


def _metadata(ckpt: Checkpoint) -> Dict[str, str]:
    strings = {key: value for key, value in ckpt.meta.items() if isinstance(value, str)}
    rest = {key: value for key, value in ckpt.meta.items() if not isinstance(value, str)}
    if ckpt.original_dtypes:
        rest["original_dtypes"] = ckpt.original_dtypes
    # other loaders want to read "pt" there
    return {"format": "pt", **strings, **({_META_KEY: to_json(rest)} if rest else {})}


def to_json(meta: Dict[str, Any]) -> str:
    """:return: as JSON. CheckpointError if something in it is more than numbers, strings, lists and dicts"""
    wrong = []
    for key, value in meta.items():
        try:
            json.dumps(value)
        except TypeError:
            wrong.append(f"{key} ({type(value).__name__})")
    if wrong:
        raise CheckpointError(f"metadata that only .pt can store: {', '.join(wrong)}")
    return json.dumps(meta)
