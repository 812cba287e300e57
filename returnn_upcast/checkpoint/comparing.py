"""
How much two checkpoints differ.
"""

from __future__ import annotations
from typing import Dict, List, Tuple
import dataclasses
import math
import torch
from ..params import dtype_name
from ..params.report import format_table
from .common import Checkpoint

_CHUNK = 1 << 22


@dataclasses.dataclass
class Difference:
    """
    :param missing: names that only one has, and shapes that differ
    :param rows: name -> both dtypes, relative difference ‖a-b‖/‖a‖, largest absolute difference
    :param total: relative difference of everything together
    """

    missing: List[str]
    rows: Dict[str, Tuple[str, float, float]]
    total: float

    def worst(self) -> float:
        """:return: the largest relative difference of any parameter; infinite where one is missing"""
        return math.inf if self.missing else max((row[1] for row in self.rows.values()), default=0.0)

    def __str__(self) -> str:
        cells = [(name, dtypes, f"{rel:.3g}", f"{top:.3g}") for name, (dtypes, rel, top) in self.rows.items()]
        table = format_table(("name", "dtype", "relative", "max abs"), [*cells, ("total", "", f"{self.total:.3g}", "")])
        return "\n".join([*self.missing, table])


def compare(a: Checkpoint, b: Checkpoint) -> Difference:
    """
    :param a: the reference
    :param b: another one
    :return: computed in float64. NaN equals NaN, an infinity equals itself, anything else non-finite is infinitely far
    """
    missing = [f"only in the first: {name}" for name in a.arrays if name not in b.arrays]
    missing += [f"only in the second: {name}" for name in b.arrays if name not in a.arrays]
    rows, sums = {}, [0.0, 0.0]
    for name, x in a.arrays.items():
        y = b.arrays.get(name)
        if y is None:
            continue
        if x.shape != y.shape:
            missing.append(f"shapes differ: {name}: {list(x.shape)} and {list(y.shape)}")
            continue
        diff2, norm2, top = _sums(x, y)
        if x.is_floating_point() or x.is_complex() or diff2:  # equal counters and indices would dwarf the weights
            sums = [sums[0] + diff2, sums[1] + norm2]
        dtypes = dtype_name(x.dtype) if x.dtype == y.dtype else f"{dtype_name(x.dtype)}/{dtype_name(y.dtype)}"
        rows[name] = (dtypes, _relative(diff2, norm2), top)
    return Difference(missing, rows, _relative(*sums))


def _relative(diff2: float, norm2: float) -> float:
    return math.sqrt(diff2 / norm2) if norm2 else math.inf if diff2 else 0.0


def _sums(x: torch.Tensor, y: torch.Tensor) -> Tuple[float, float, float]:
    """:return: squared norm of the difference, of x, and largest difference, in pieces so that memory stays small"""
    result = [0.0, 0.0, 0.0]
    for u, v in zip(x.reshape(-1).split(_CHUNK), y.reshape(-1).split(_CHUNK)):
        wide = torch.complex128 if u.is_complex() or v.is_complex() else torch.float64
        u, v = u.to(wide), v.to(wide)
        diff = torch.where((u == v) | (u.isnan() & v.isnan()), 0.0, (u - v).abs()).nan_to_num(math.inf, math.inf)
        norm = torch.where(u.isfinite(), u.abs(), 0.0)
        result[0] += float(diff.square().sum())
        result[1] += float(norm.square().sum())
        result[2] = max(result[2], float(diff.max()) if diff.numel() else 0.0)
    return result[0], result[1], result[2]
