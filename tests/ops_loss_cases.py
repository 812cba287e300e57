"""
Operands of the losses on raw tensors, and of the projections before them.
"""

from __future__ import annotations
import torch

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [(BF16, BF16), (BF16, F32), (F16, F16), (F16, F32)]  # of x and of the parameters
LOW = (torch.bfloat16, torch.float16)
KINDS = ("sparse", "dense")


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    """normal numbers in float64, the same every time"""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_labels(size: int, *shape: int) -> torch.Tensor:
    """:return: [*shape], each below size"""
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(2))


def as_leaf(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """a copy in dtype that requires a gradient"""
    return x.detach().to(dtype).requires_grad_()


def make_target(kind: str, shape, axis: int, dtype: torch.dtype) -> torch.Tensor:
    """:param kind: of KINDS: labels without the axis, or probabilities over it"""
    if kind == "dense":
        return (randn(*shape, seed=3) * 2).softmax(axis).to(dtype)
    shape = list(shape)
    return random_labels(shape.pop(axis), *shape)


def make_operands(*shape: int, labels: int, dtypes=(BF16, BF16), std: float = 3.0):
    """:return: x [*shape], weight, bias: leaves"""
    x, weight = randn(*shape, seed=1) + 1, randn(shape[-1], labels, seed=2) * std / shape[-1] ** 0.5
    operands = x.to(dtypes[0]), weight.to(dtypes[1]), randn(labels, seed=3).to(dtypes[1])
    return tuple(v.requires_grad_() for v in operands)


def sparse_target(labels: int, *shape: int) -> torch.Tensor:
    """:return: labels [*shape], the second of them ignored"""
    target = torch.randint(0, labels, shape, generator=torch.Generator().manual_seed(4))
    if target.numel() > 2:
        target.view(-1)[1] = -100
    return target


def gradients(out: torch.Tensor, operands, upstream: torch.Tensor):
    """of all operands that are not None"""
    return torch.autograd.grad(out, [v for v in operands if v is not None], upstream.to(out.dtype))
