"""
PyTorch's ``.pt``, as RETURNN writes it. Read weights-only, so that a file cannot run code.

Written here and not by :func:`torch.save`, which needs all tensors in memory at once:
the format is an uncompressed zip file with a pickle, and one record for each storage.
"""

from __future__ import annotations
from typing import Any, Dict, Iterable, List, Tuple
import collections
import dataclasses
import io
import json
import pickle
import sys
import zipfile
import numpy
import torch
from ..params.walk import identity
from .common import Checkpoint, CheckpointError, Writing

# Apart from the pickle: RETURNN and torch.load do not see it, and a bare state dict stays one.
_DTYPES_RECORD = "returnn_upcast/original_dtypes.json"
_ALIGN = 64  # as torch.save, for loading with mmap

_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}


def read(path: str) -> Checkpoint:
    """:param path: a RETURNN checkpoint (a dict with "model"), or a bare state dict"""
    is_zip = zipfile.is_zipfile(path)
    try:
        with torch.serialization.safe_globals(_numpy_scalars()):
            obj = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as exc:
        detail = next((line.strip() for line in str(exc).splitlines() if "GLOBAL" in line or "Unsupported" in line), "")
        raise CheckpointError(f"{path}: more than weights in it, refused, it could run code. {detail}") from None
    if not isinstance(obj, dict):
        raise CheckpointError(f"{path}: expected a checkpoint, i.e. a dict, got {type(obj).__name__}")
    wrapped = isinstance(obj.get("model"), dict)
    model = obj["model"] if wrapped else obj
    wrong = [str(name) for name, x in model.items() if not _is_plain(name, x)]
    if wrong:
        raise CheckpointError(
            f"{path}: neither a RETURNN checkpoint with a 'model' nor a state dict of plain tensors,"
            f" these are none: {', '.join(wrong[:10])}"
        )
    return Checkpoint(
        arrays={name: x.detach() for name, x in model.items()},
        meta={k: _plain(v) for k, v in obj.items() if k != "model"} if wrapped else {},
        original_dtypes=_read_dtypes(path) if is_zip else {},
        wrapped=wrapped,
        module_versions=getattr(model, "_metadata", None),
    )


def _is_plain(name: Any, x: Any) -> bool:
    plain = isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_quantized
    return plain and isinstance(name, str)


def _numpy_scalars() -> List[Any]:
    # RETURNN saves the learning rate as it is; a config that made it with NumPy has NumPy scalars there
    core = getattr(numpy, "_core", None) or numpy.core
    kinds = [type(numpy.dtype(name)) for name in ("float64", "float32", "int64", "int32", "bool")]
    scalar = core.multiarray.scalar
    return [(scalar, f"numpy.{name}.multiarray.scalar") for name in ("core", "_core")] + [numpy.dtype, *kinds]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, numpy.generic) else value


def _read_dtypes(path: str) -> Dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.endswith("/" + _DTYPES_RECORD)), None)
        return json.loads(archive.read(name)) if name else {}


@dataclasses.dataclass(frozen=True)
class _Ref:
    """A tensor in the pickle: its values are in the record of this key."""

    key: str
    dtype: torch.dtype
    shape: Tuple[int, ...]

    def numel(self) -> int:
        """:return: number of elements"""
        return int(numpy.prod(self.shape, dtype=numpy.int64))

    def strides(self) -> Tuple[int, ...]:
        """:return: of the contiguous tensor"""
        return tuple(int(numpy.prod(self.shape[i + 1 :], dtype=numpy.int64)) for i in range(len(self.shape)))


class _Storage(_Ref):
    """Its storage."""


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, meta_tensors: Dict[str, torch.Tensor]):
        super().__init__(file, protocol=2)
        self._meta_tensors = meta_tensors

    def reducer_override(self, obj: Any) -> Any:
        """see :class:`pickle.Pickler`"""
        if isinstance(obj, torch.Tensor):  # in the metadata
            key = f"meta{len(self._meta_tensors)}"
            self._meta_tensors[key] = obj.detach()
            obj = _Ref(key, obj.dtype, tuple(obj.shape))
        if type(obj) is not _Ref:
            return NotImplemented
        args = (_Storage(obj.key, obj.dtype, obj.shape), 0, obj.shape, obj.strides(), False, collections.OrderedDict())
        if obj.dtype in _STORAGES:
            return torch._utils._rebuild_tensor_v2, args
        return torch._utils._rebuild_tensor_v3, (*args, obj.dtype)

    def persistent_id(self, obj: Any) -> Any:
        """see :class:`pickle.Pickler`"""
        if not isinstance(obj, _Storage):
            return None
        if obj.dtype in _STORAGES:
            return "storage", _STORAGES[obj.dtype], obj.key, "cpu", obj.numel()
        return "storage", torch.UntypedStorage, obj.key, "cpu", obj.numel() * obj.dtype.itemsize


def write(path: str, writing: Writing):
    """:param path: must not exist"""
    ckpt = writing.ckpt
    refs, owners = _refs(ckpt)
    model = collections.OrderedDict(refs)
    if ckpt.module_versions is not None:
        model._metadata = ckpt.module_versions
    data, meta_tensors = io.BytesIO(), {}
    _Pickler(data, meta_tensors).dump({"model": model, **ckpt.meta} if ckpt.wrapped else model)
    meta = Writing(Checkpoint(meta_tensors), "")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        _record(archive, "data.pkl", [data.getvalue()])
        _record(archive, "byteorder", [sys.byteorder.encode()])
        for key, name in owners.items():
            _record(archive, f"data/{key}", writing.chunks(name))
        for key in meta_tensors:
            _record(archive, f"data/{key}", meta.chunks(key))
        if ckpt.original_dtypes:
            _record(archive, _DTYPES_RECORD, [json.dumps(ckpt.original_dtypes).encode()])
        _record(archive, "version", [b"3\n"])


def _refs(ckpt: Checkpoint) -> Tuple[Dict[str, _Ref], Dict[str, str]]:
    """:return: name -> reference, key -> name whose values go into the record. Tied parameters share a record"""
    refs, owners, keys = {}, {}, {}
    for name, x in ckpt.arrays.items():
        key = keys.setdefault((identity(x), ckpt.dtype(name)), str(len(keys)))
        owners.setdefault(key, name)
        refs[name] = _Ref(key, ckpt.dtype(name), tuple(x.shape))
    return refs, owners


def _record(archive: zipfile.ZipFile, name: str, chunks: Iterable[bytes]):
    info = zipfile.ZipInfo(f"archive/{name}")
    # the values start after a header of 30 bytes, the name, padding in an "extra" field, and 20 bytes for zip64
    start = archive.fp.tell() + 30 + len(info.filename.encode()) + 20
    info.extra = b"FB" + (padding := -(start + 4) % _ALIGN).to_bytes(2, "little") + b"Z" * padding
    with archive.open(info, "w", force_zip64=True) as file:
        for chunk in chunks:
            file.write(chunk)
