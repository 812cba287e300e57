"""
Cast a checkpoint, with what stays in float32, and back to the dtypes it had.
"""

from __future__ import annotations
from typing import Dict, List, Mapping, Optional, Sequence, Union
import dataclasses
import fnmatch
import torch
from ..params import dtype_name, is_float, parse_dtype
from .common import Checkpoint, CheckpointError
from .files import read, write
from .modules import norms_of

ORIGINAL = "original"
NORMS = "norms"

_SCALES = ("scale", "weight", "gamma")


def cast(
    ckpt: Checkpoint,
    dtype: Union[str, torch.dtype],
    *,
    keep_float32: Sequence[str] = (),
    modules: Optional[Mapping[str, Optional[str]]] = None,
    allow_overflow: bool = False,
) -> Checkpoint:
    """
    :param ckpt: is not changed
    :param dtype: of all float parameters; "original": the ones recorded by the first cast
    :param keep_float32: names (globs) that are float32 instead, never narrowed; "norms": those of norm modules
    :param modules: the module map (:func:`.module_map`), to find the norms. Without it, see :func:`norms_by_shape`
    :param allow_overflow: finite values may become infinite, otherwise :func:`.write` raises
    :return: the same arrays; the casts are done while writing. Records each parameter's dtype before the first cast.
        CheckpointError where a pattern matches nothing
    """
    floats = {name: x.dtype for name, x in ckpt.arrays.items() if is_float(x)}
    if dtype == ORIGINAL:
        return _restore(ckpt, floats, keep_float32, allow_overflow)
    dtype = parse_dtype(dtype)
    casts = dict.fromkeys(floats, dtype)
    for name in kept(ckpt, keep_float32, modules):
        casts[name] = torch.promote_types(floats[name], torch.float32)
    original = {**{name: dtype_name(x) for name, x in floats.items()}, **ckpt.original_dtypes}
    return dataclasses.replace(ckpt, casts=casts, original_dtypes=original, allow_overflow=allow_overflow)


def _restore(ckpt: Checkpoint, floats: Mapping[str, torch.dtype], keep: Sequence[str], overflow: bool) -> Checkpoint:
    if keep:
        raise CheckpointError("dtype original: each parameter gets the dtype it had, keep_float32 is not possible")
    if not ckpt.original_dtypes:
        raise CheckpointError("dtype original: this file does not say which dtypes it had, it was not cast by us")
    unknown = sorted(set(floats) - set(ckpt.original_dtypes))
    if unknown:
        raise CheckpointError(f"dtype original: no dtype is recorded for {', '.join(unknown)}")
    casts = {name: parse_dtype(ckpt.original_dtypes[name]) for name in floats}
    return dataclasses.replace(ckpt, casts=casts, original_dtypes={}, allow_overflow=overflow)


def kept(ckpt: Checkpoint, patterns: Sequence[str], modules: Optional[Mapping[str, Optional[str]]] = None) -> List[str]:
    """
    :param patterns: as keep_float32 of :func:`cast`
    :return: names of the float parameters which they match
    """
    floats = [name for name, x in ckpt.arrays.items() if is_float(x)]
    result: Dict[str, None] = {}
    for pattern in patterns:
        if pattern == NORMS:
            found = norms_of(modules, floats) if modules is not None else norms_by_shape(ckpt.arrays)
        else:
            found = fnmatch.filter(floats, pattern)
        if not found:
            raise CheckpointError(f"keep_float32: {pattern!r} matches no parameter")
        result.update(dict.fromkeys(found))
    return list(result)


def norms_by_shape(arrays: Mapping[str, torch.Tensor]) -> List[str]:
    """
    The norms of a file without its model, by what they consist of: a module that has running statistics, or
    whose parameters are all vectors, one of them a scale. That also takes other elementwise scales.

    :param arrays: name -> array
    :return: names
    """
    modules: Dict[str, Dict[str, torch.Tensor]] = {}
    for name, x in arrays.items():
        prefix, _, own = name.rpartition(".")
        modules.setdefault(prefix, {})[own] = x
    result = []
    for prefix, own in modules.items():
        vectors = all(x.ndim <= 1 for x in own.values()) and any(key in own for key in _SCALES)
        if vectors or "running_mean" in own or {"mean", "var"} <= set(own):
            result += [f"{prefix}.{key}" if prefix else key for key, x in own.items() if is_float(x)]
    return result


def cast_file(source: str, target: str, dtype: Union[str, torch.dtype], **options):
    """
    Reads source, writes target in another dtype, piece by piece: needs hardly more memory than the file that it reads.

    :param source: format by its ending
    :param target: format by its ending
    :param dtype: see :func:`cast`, as the other options
    """
    write(target, cast(read(source), dtype, **options), inputs=[source])
