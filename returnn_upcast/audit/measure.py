"""
Errors and magnitudes of RETURNN tensors, padding excluded.
"""

from __future__ import annotations
from typing import Any, Iterator, List, Optional, Tuple
import dataclasses
import math
import torch
from returnn.tensor import Tensor
from .. import dtypes


def tensors_in(value: Any) -> Iterator[Tensor]:
    """:return: the RETURNN tensors in nested arguments; not those inside of modules"""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for x in value:
            yield from tensors_in(x)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


def is_float(x: Any) -> bool:
    """:return: whether it is a tensor of a float dtype, with data"""
    return isinstance(x, Tensor) and x.raw_tensor is not None and dtypes.is_float(x.dtype)


def is_packed(x: Tensor) -> bool:
    """:return: whether x has packed storage, see :func:`rf.pack`"""
    return not isinstance(x.raw_tensor, torch.Tensor)


def inside(x: Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """:return: raw data, and a mask broadcastable to it, True inside the sequences (None without padding)"""
    if is_packed(x):
        return inside(x.raw_tensor.inner)
    raw, mask = x.raw_tensor.detach(), None
    for dim in x.dims:
        if dim.need_masking() and all(d in x.dims for d in dim.dyn_size_ext.dims):
            more = x.get_sequence_mask_broadcast(dim)
            mask = more if mask is None else mask & more
    return raw, mask


def valid(x: Tensor) -> torch.Tensor:
    """:return: flat, the elements inside the sequences"""
    raw, mask = inside(x)
    return raw.reshape(-1) if mask is None else raw[mask.to(raw.device).expand(raw.shape)]


def is_finite(x: Tensor) -> bool:
    """:return: whether all elements inside the sequences are"""
    return bool(torch.isfinite(valid(x)).all())


def magnitude(x: Tensor) -> float:
    """:return: largest finite magnitude, 0 without elements"""
    values = valid(x)
    values = values[torch.isfinite(values)] if values.is_floating_point() else values
    return float(values.abs().max()) if values.numel() else 0.0


@dataclasses.dataclass
class Measured:
    """Of one result against float64"""

    error: float
    floor: float
    nonfinite: int
    zeros: int
    elements: int


def measure(out: Tensor, want: Tensor) -> Measured:
    """
    :param out: of any float dtype
    :param want: float64, the same dims in any order (or others of the same sizes in the same order)
    """
    if not is_packed(out) and not is_packed(want) and out.dims_set == want.dims_set:
        out = out.copy_transpose(want.dims)
    a, b = valid(out), valid(want).double()
    if a.shape != b.shape:
        return Measured(math.nan, 0.0, 0, 0, a.numel())
    fine = torch.isfinite(b)  # an infinite loss is right where the reference has it
    a, b = a[fine], b[fine]
    size = float(b.norm()) or 1.0
    bad = ~torch.isfinite(a)
    # what the dtype could well represent
    large = b.abs() > max(float(b.abs().max()) * 1e-3, torch.finfo(a.dtype).tiny) if b.numel() else b > 0
    error = math.inf if bool(bad.any()) else float((a.double() - b).norm()) / size
    floor = float((b.to(a.dtype).double() - b).norm()) / size
    return Measured(error, floor, int(bad.sum()), int(((a == 0) & large).sum()), a.numel())


def results(value: Any) -> List[Tensor]:
    """:return: the float tensors among what an op returned"""
    return [x for x in tensors_in(value) if is_float(x)]
