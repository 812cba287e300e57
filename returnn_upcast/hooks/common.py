"""
What all hooks ask about RF tensors.
"""

from __future__ import annotations
from typing import Any, Callable, Optional, Sequence, Set
import functools
import logging
import torch
import returnn.frontend as rf
from returnn.frontend import _utils
from returnn.tensor import Tensor, Dim
from .. import config, dtypes as dtype_names
from ..ops import fuse

log = logging.getLogger("returnn.frontend.upcast")

_said: Set[str] = set()

# Under RETURNN's static tracing (which not all releases have), fused ops must leave plain ops to the outer trace.
if hasattr(rf, "is_static_traceable"):
    fuse.trace_checks.add(rf.is_static_traceable)
fuse.compile_option = config.compile_option


def is_low(x: Any) -> bool:
    """
    :param x: tensor or anything else
    :return: whether it is a torch tensor, padded or packed, of a float dtype narrower than 32 bit
    """
    if not isinstance(x, Tensor) or not dtype_names.is_low(x.dtype) or x.raw_tensor is None:
        return False
    raw = x.raw_tensor
    return isinstance(raw, torch.Tensor) or (is_packed(x) and isinstance(raw.inner.raw_tensor, torch.Tensor))


def is_torch(*tensors: Optional[Tensor]) -> bool:
    """:return: whether all are plain torch tensors, not packed, not of another backend"""
    return all(isinstance(x.raw_tensor, torch.Tensor) for x in tensors if x is not None)


def is_packed(x: Tensor) -> bool:
    """:return: whether x has packed storage, see :func:`rf.pack`"""
    return getattr(x._raw_backend, "name", None) == "packed"


def device_type(x: Tensor) -> str:
    """:return: e.g. "cuda", without the index"""
    return (x.device or "cpu").split(":")[0]


def autocast_dtype(x: Tensor) -> Optional[torch.dtype]:
    """:return: the dtype of autocast on the device of x, None where autocast is off"""
    device = device_type(x)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def raw_dtype(name: str) -> torch.dtype:
    """:return: torch dtype of RETURNN's dtype name"""
    return getattr(torch, name)


@functools.lru_cache(maxsize=None)
def promoted(*dtypes: Optional[str]) -> str:
    """
    :param dtypes: dtype names, None is skipped
    :return: name of the dtype that arithmetic on tensors of these gives
    """
    names = [d for d in dtypes if d]
    dtype = raw_dtype(names[0])
    for name in names[1:]:
        dtype = torch.promote_types(dtype, raw_dtype(name))
    return str(dtype).split(".")[1]


def dtypes(*tensors: Optional[Tensor]) -> Sequence[Optional[str]]:
    """:return: dtype names, None for None"""
    return [x.dtype if x is not None else None for x in tensors]


def module_dtype(out_dtype: str, in_dtype: str) -> str:
    """:return: dtype of a module's output, as stock RETURNN decides by ``rf_module_output_keep_dtype``"""
    return in_dtype if out_dtype != in_dtype and _utils.should_module_output_keep_dtype() else out_dtype


def in_float32(func: Callable[..., Tensor], x: Tensor, out_dtype: str) -> Tensor:
    """
    RETURNN's own code on a float32 copy: for what no raw op covers (packed along the axis, distributed statistics).

    :param func: called with x in float32, without autocast
    :param x: low precision
    :param out_dtype: the result is rounded to it
    """
    with fuse.autocast_off(device_type(x)):
        return rf.cast(func(rf.cast(x, "float32")), out_dtype)


def mask_raw(x: Tensor, dims: Sequence[Dim]) -> Optional[torch.Tensor]:
    """
    :param x: with dims
    :param dims: padded positions in these are masked
    :return: bool, broadcastable to x, True inside the sequences; None if nothing is padded
    """
    result = None
    for dim in dims:
        if dim.need_masking():
            mask = x.get_sequence_mask_broadcast(dim)
            result = mask if result is None else result & mask
    return result


def wrap(template: Tensor, raw: torch.Tensor, name: str) -> Tensor:
    """
    :param template: has the dims of the result
    :param raw: raw tensor of the result
    :param name: of the result
    """
    out = template.copy_template(name, dtype=str(raw.dtype).split(".")[1])
    out.raw_tensor = raw
    return out


def say_once(key: str, message: str):
    """
    :param key: said once per key and process
    :param message: warning
    """
    if key not in _said:
        _said.add(key)
        log.warning(message)
