"""
The layout that the ops of :mod:`property_cases` are run on, and what the table holds for an op.
"""

from __future__ import annotations
from typing import Any, Callable, Optional, Sequence, Tuple
import dataclasses
import functools
import math
import torch
from returnn.tensor import Dim, Tensor
from common import inside, seq_dim, tensor, values

STD = 2.0


@dataclasses.dataclass(frozen=True)
class Layout:
    """
    :param lens: of the sequences
    :param beam: size of an extra dim
    :param feat: number of features or labels
    :param order: of the dims batch, beam, time, feature in memory
    :param view: the input is a part of a larger tensor
    :param low: dtype
    :param special: what is put into some places inside of the sequences
    :param seed: of the numbers and places
    """

    lens: Tuple[int, ...]
    low: torch.dtype
    beam: int = 1
    feat: int = 8
    order: Tuple[int, ...] = (0, 1, 2, 3)
    view: bool = False
    special: Optional[float] = None
    seed: int = 0

    @functools.cached_property
    def dims(self) -> Tuple[Dim, ...]:
        """:return: batch, beam, time, feature"""
        batch = Dim(len(self.lens), name="batch")
        return batch, Dim(self.beam, name="beam"), seq_dim("time", self.lens, batch), Dim(self.feat, name="feat")

    @functools.cached_property
    def other_dims(self) -> Tuple[Dim, ...]:
        """:return: the same, with another time and feature dim of the same sizes"""
        batch, beam, _, feat = self.dims
        return batch, beam, seq_dim("other", self.lens[::-1], batch), Dim(self.feat, name="other_feat")

    @property
    def shape(self) -> Tuple[int, ...]:
        """:return: of an input"""
        return len(self.lens), self.beam, max(self.lens), self.feat

    @property
    def mask(self) -> torch.Tensor:
        """:return: bool [batch, beam, time], True inside of the sequences"""
        return inside(self.lens)[:, None].expand(-1, self.beam, -1)

    def numbers(self, index: int, lens: Optional[Sequence[int]] = None, std: float = STD) -> torch.Tensor:
        """:return: [batch, beam, time, feature] in low, with the special value in some places of the sequences"""
        x = values(*self.shape, seed=self.seed + index, std=std).to(self.low)
        if self.special is not None:
            places = torch.rand(self.shape, generator=torch.Generator().manual_seed(self.seed + 50 + index)) < 0.04
            x[places & inside(lens or self.lens)[:, None, :, None]] = self.special
        return x

    def labels(self, index: int = 0, num: Optional[int] = None) -> torch.Tensor:
        """:return: [batch, beam, time] below num"""
        generator = torch.Generator().manual_seed(self.seed + 90 + index)
        return torch.randint(0, num or self.feat, self.shape[:-1], generator=generator)

    def leaf(self, x: torch.Tensor) -> torch.Tensor:
        """:return: x in the memory of the layout, [batch, beam, time, feature], to be differentiated"""
        moved = x.permute(self.order)
        memory = torch.empty([n + self.view for n in moved.shape], dtype=x.dtype)
        moved = memory[(slice(int(self.view), None),) * 4].copy_(moved)
        return moved.permute([self.order.index(i) for i in range(4)]).requires_grad_()

    def tensor(self, leaf: torch.Tensor, dims: Optional[Sequence[Dim]] = None, feature: bool = False) -> Tensor:
        """:return: leaf, its dims in the order that they have in memory"""
        dims = dims or self.dims
        return tensor(
            leaf.permute(self.order), *(dims[i] for i in self.order), feature_dim=dims[-1] if feature else None
        )


@dataclasses.dataclass(frozen=True)
class Op:
    """
    :param call: of the layout and the leaves -> tensor
    :param out: of the layout -> dims of the result
    :param formula: of the layout and the inputs in float64 -> the raw result. Maybe several, that treat differently
        what is multiplied with a weight of zero: the op may do as any of them
    :param inputs: of the layout -> low-precision inputs
    :param mask: of the layout -> bool, where the result counts
    :param limit: largest magnitude of bf16 for which float32 is as float64
    :param stock: compare with stock RETURNN as well
    """

    name: str
    call: Callable[..., Tensor]
    out: Callable[[Layout], Sequence[Dim]]
    formula: Callable[..., Any]
    inputs: Callable[[Layout], Sequence[torch.Tensor]] = lambda la: (la.numbers(0),)
    mask: Callable[[Layout], torch.Tensor] = lambda la: la.mask
    policy: Any = True
    limit: float = math.inf
    stock: bool = True

    def __str__(self) -> str:
        return self.name


def frame_dims(la: Layout) -> Sequence[Dim]:
    """:return: dims of a result for each frame and feature"""
    return la.dims


def row_dims(la: Layout) -> Sequence[Dim]:
    """:return: dims of a result for each frame"""
    return la.dims[:3]
