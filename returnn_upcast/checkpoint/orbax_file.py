"""
RETURNN's ``.orbax``: the directory that its JAX backend reads and writes (see ``returnn.jax.checkpoint``).

One flat map name -> array. Entries that start with an underscore are no parameters; RETURNN has "_step" and "_epoch".
Orbax wants all arrays of a call at once, and copies them: so it reads part by part, and is told not to copy in writing.
"""

from __future__ import annotations
from typing import Any, Iterator, Mapping, Tuple
import inspect
import json
import math
import os
import numpy
from ..params import to_numpy, to_torch
from ..params.walk import flatten
from .common import Checkpoint, CheckpointError, Writing, extra
from .safetensors_file import to_json

# Bytes of JSON. RETURNN ignores it.
_META_KEY = "_returnn_upcast"
_HIDDEN = {"_step": "step", "_epoch": "epoch"}

# Bytes that are restored by one call, and of the files that Orbax writes, each of which it first holds in memory.
_READ_BYTES, _FILE_BYTES = 1 << 24, 1 << 24


def read(path: str) -> Checkpoint:
    """:param path: a directory"""
    if not os.path.isdir(path):
        raise CheckpointError("an .orbax checkpoint is a directory")
    arrays, meta = {}, {}
    for name, x in _restored(os.path.abspath(path)):
        if name == _META_KEY:
            meta.update(json.loads(numpy.asarray(x).tobytes()))
        elif name in _HIDDEN:
            meta[_HIDDEN[name]] = int(x)
        elif name in arrays:
            raise CheckpointError(f"two entries with the same name: {name}")
        else:
            arrays[name] = to_torch(x, name)
    dtypes = meta.pop("original_dtypes", {})
    return Checkpoint(arrays, meta=meta, original_dtypes=dtypes, wrapped=bool(meta))


def _restored(path: str) -> Iterator[Tuple[str, Any]]:
    """:return: full names and arrays, in parts of about _READ_BYTES"""
    ocp, tree_map = extra("orbax.checkpoint", "jax"), extra("jax", "jax").tree.map
    checkpointer = ocp.PyTreeCheckpointer()
    part, size = {}, 0
    tree = getattr(checkpointer.metadata(path).item_metadata, "tree", None)
    if not isinstance(tree, Mapping):
        raise CheckpointError("no Orbax checkpoint of a mapping name -> array")
    for i, (key, value) in enumerate(tree.items(), 1):
        part[key] = value
        size += sum(math.prod(x.shape) * numpy.dtype(x.dtype).itemsize for x in flatten({key: value}).values())
        if size < _READ_BYTES and i < len(tree):
            continue
        args = ocp.args.PyTreeRestore(
            item=tree_map(lambda _: 0, part),
            restore_args=tree_map(lambda _: ocp.RestoreArgs(restore_type=numpy.ndarray), part),
            partial_restore=True,
        )
        yield from flatten(checkpointer.restore(path, args=args)).items()
        part, size = {}, 0


def write(path: str, writing: Writing):
    """:param path: must not exist"""
    ckpt = writing.ckpt
    ocp = extra("orbax.checkpoint", "jax")
    hidden = [name for name in ckpt.arrays if name.startswith("_")]
    if hidden:
        raise CheckpointError(f"RETURNN ignores names in .orbax that start with an underscore: {', '.join(hidden)}")
    empty = [name for name, x in ckpt.arrays.items() if not x.numel()]
    if empty:
        raise CheckpointError(f"Orbax cannot store arrays without elements: {', '.join(empty)}")
    tree = {name: to_numpy(writing.array(name)) for name in ckpt.arrays}
    meta = dict(ckpt.meta)
    for name, key in _HIDDEN.items():
        if isinstance(meta.get(key), int):
            tree[name] = numpy.array(meta.pop(key))
    if ckpt.original_dtypes:
        meta["original_dtypes"] = ckpt.original_dtypes
    if meta:
        tree[_META_KEY] = numpy.frombuffer(to_json(meta).encode(), numpy.uint8)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=_without_copies(ocp)))
    try:
        args = ocp.args.PyTreeSave(tree, ocdbt_target_data_file_size=_FILE_BYTES)
        checkpointer.save(os.path.abspath(path), args=args)
    except Exception as exc:  # whatever TensorStore raises on a full disk
        raise OSError(f"{type(exc).__name__}: {' '.join(str(exc).split())}") from exc


def _without_copies(ocp: Any) -> Any:
    """:return: registry of type handlers for saving; the default one copies all arrays before it writes the first"""
    handlers = ocp.type_handlers
    can_do_without = "deepcopy_host_arrays" in inspect.signature(handlers.NumpyHandler).parameters  # from 0.12.6 on
    return handlers.create_type_handler_registry(
        (numpy.ndarray, handlers.NumpyHandler(**({"deepcopy_host_arrays": False} if can_do_without else {}))),
        (extra("jax", "jax").Array, handlers.ArrayHandler()),  # Orbax warns without
    )
