"""
RETURNN's ``.orbax``: the directory that its JAX backend reads and writes (see ``returnn.jax.checkpoint``).

One flat map name -> array. Entries that start with an underscore are no parameters; RETURNN has "_step" and "_epoch".
All arrays are in memory at once, Orbax wants it so.
"""

from __future__ import annotations
from typing import Any, Dict
import json
import os
import numpy
from ..params import to_numpy, to_torch
from ..params.walk import flatten
from .common import Checkpoint, CheckpointError, Writing, extra
from .safetensors_file import to_json

# Bytes of JSON. RETURNN ignores it.
_META_KEY = "_returnn_upcast"
_RETURNN_KEYS = ("step", "epoch")


def read(path: str) -> Checkpoint:
    """:param path: a directory"""
    if not os.path.isdir(path):
        raise CheckpointError("an .orbax checkpoint is a directory")
    tree = _checkpointer().restore(os.path.abspath(path))
    meta: Dict[str, Any] = {}
    if _META_KEY in tree:
        meta.update(json.loads(numpy.asarray(tree.pop(_META_KEY)).tobytes()))
    dtypes = meta.pop("original_dtypes", {})
    for key in _RETURNN_KEYS:
        if f"_{key}" in tree:
            meta[key] = int(tree.pop(f"_{key}"))
    arrays = {name: to_torch(x, name) for name, x in flatten(tree).items()}
    return Checkpoint(arrays, meta=meta, original_dtypes=dtypes, wrapped=bool(meta))


def write(path: str, writing: Writing):
    """:param path: must not exist"""
    ckpt = writing.ckpt
    checkpointer = _checkpointer()
    hidden = [name for name in ckpt.arrays if name.startswith("_")]
    if hidden:
        raise CheckpointError(f"RETURNN ignores names in .orbax that start with an underscore: {', '.join(hidden)}")
    empty = [name for name, x in ckpt.arrays.items() if not x.numel()]
    if empty:
        raise CheckpointError(f"Orbax cannot store arrays without elements: {', '.join(empty)}")
    tree = {name: to_numpy(writing.array(name)) for name in ckpt.arrays}
    meta = dict(ckpt.meta)
    for key in _RETURNN_KEYS:
        if isinstance(meta.get(key), int):
            tree[f"_{key}"] = numpy.array(meta.pop(key))
    if ckpt.original_dtypes:
        meta["original_dtypes"] = ckpt.original_dtypes
    if meta:
        tree[_META_KEY] = numpy.frombuffer(to_json(meta).encode(), numpy.uint8)
    try:
        checkpointer.save(os.path.abspath(path), tree)
    except Exception as exc:  # whatever TensorStore raises on a full disk
        raise OSError(f"{type(exc).__name__}: {' '.join(str(exc).split())}") from exc


def _checkpointer() -> Any:
    return extra("orbax.checkpoint", "jax").PyTreeCheckpointer()
