"""
Plain float64 references for the norms, attention, the positional encodings and the rotation. Nothing here is shared with what it checks.
"""

from __future__ import annotations
from typing import Dict, Optional, Sequence
import math
import torch

Params = Dict[str, torch.Tensor]


def _affine(x: torch.Tensor, params: Params, scale: str = "scale", bias: str = "bias") -> torch.Tensor:
    if scale in params:
        x = x * params[scale]
    return x + params[bias] if bias in params else x


def _standardize(x: torch.Tensor, elements: torch.Tensor, eps: float) -> torch.Tensor:
    """:return: x, normalised by mean and biased variance of the elements"""
    mean = elements.mean()
    variance = ((elements - mean) ** 2).mean()
    return (x - mean) / torch.sqrt(variance + eps)


def layer_norm(x: torch.Tensor, params: Params, *, axes: Sequence[int] = (-1,), eps: float = 1e-6) -> torch.Tensor:
    """:return: x [..., D], each entry standardised over axes, which are the last ones, then scaled"""
    mean = x.mean(tuple(axes), keepdim=True)
    variance = ((x - mean) ** 2).mean(tuple(axes), keepdim=True)
    return _affine((x - mean) / torch.sqrt(variance + eps), params)


def rms_norm(x: torch.Tensor, params: Params, *, axes: Sequence[int] = (-1,), eps: float = 1e-6) -> torch.Tensor:
    """:return: as :func:`layer_norm`, without mean"""
    return _affine(x / torch.sqrt((x**2).mean(tuple(axes), keepdim=True) + eps), params)


def group_norm(x: torch.Tensor, params: Params, *, groups: int, eps: float = 1e-6) -> torch.Tensor:
    """:return: x [..., D], each of the groups of features by itself"""
    parts = [layer_norm(part, {}, eps=eps) for part in x.chunk(groups, dim=-1)]
    return _affine(torch.cat(parts, dim=-1), params)


def group_norm_spatial(
    x: torch.Tensor, params: Params, *, groups: int, lens: Sequence[int], eps: float = 1e-6
) -> torch.Tensor:
    """:return: x [B, T, D], each of the groups over the features and the frames of the sequence"""
    rows = []
    for row, length in zip(x, lens):
        parts = [_standardize(part, part[:length], eps) for part in row.chunk(groups, dim=-1)]
        rows.append(torch.cat(parts, dim=-1))
    return _affine(torch.stack(rows), params)


def normalize_time(x: torch.Tensor, params: Params, *, lens: Sequence[int], eps: float = 1e-6) -> torch.Tensor:
    """:return: x [B, T, D], each feature over the frames of its sequence"""
    rows = []
    for row, length in zip(x, lens):
        rows.append(torch.stack([_standardize(f, f[:length], eps) for f in row.unbind(-1)], dim=-1))
    return _affine(torch.stack(rows), params)


def batch_norm(
    x: torch.Tensor, params: Params, *, lens: Optional[Sequence[int]] = None, train: bool = True, eps: float = 1e-3
) -> torch.Tensor:
    """:return: x [B, T, D], each feature over all frames, those of the sequences where lens are given"""
    if not train:
        x = (x - params["running_mean"]) / torch.sqrt(params["running_variance"] + eps)
        return _affine(x, params, "gamma", "beta")
    frames = _frames(x, lens)
    columns = [_standardize(x[..., i], frames[:, i], eps) for i in range(x.shape[-1])]
    return _affine(torch.stack(columns, dim=-1), params, "gamma", "beta")


def _frames(x: torch.Tensor, lens: Optional[Sequence[int]]) -> torch.Tensor:
    return x.flatten(0, 1) if lens is None else torch.cat([row[:length] for row, length in zip(x, lens)])


def running_stats(
    x: torch.Tensor, params: Params, *, lens: Optional[Sequence[int]] = None, momentum: float = 0.1
) -> Params:
    """:return: running statistics after a training step. RETURNN tracks the biased variance where it masks"""
    frames = _frames(x, lens)
    mean, variance = frames.mean(0), frames.var(0, unbiased=lens is None)
    new = {"running_mean": mean, "running_variance": variance}
    return {name: (1 - momentum) * params[name] + momentum * value for name, value in new.items()}


def sinusoidal(positions: Sequence[int], dim: int, *, base: float = 1e4) -> torch.Tensor:
    """:return: [len(positions), dim]: sin, then cos, of position / base ** (i / (dim / 2 - 1))"""
    half = dim // 2
    rates = [math.exp(-math.log(base) * i / (half - 1)) for i in range(half)]
    return _sin_cos(positions, rates)


def relative(num_queries: int, num_keys: int, dim: int, *, offset: int = 0) -> torch.Tensor:
    """:return: [num_queries + num_keys - 1, dim], for key minus query position"""
    rates = [math.exp(-math.log(1e4) * 2 * i / dim) for i in range(dim // 2)]
    return _sin_cos(range(1 - num_queries - offset, num_keys - offset), rates)


def _sin_cos(positions: Sequence[int], rates: Sequence[float]) -> torch.Tensor:
    rows = [[f(p * rate) for f in (math.sin, math.cos) for rate in rates] for p in positions]
    return torch.tensor(rows, dtype=torch.float64)


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """
    :param x: [..., D], float64; neighbours are real and imaginary part
    :param angles: [..., D / 2]
    :return: x, times exp(i * angle)
    """
    numbers = torch.complex(x[..., 0::2], x[..., 1::2])
    numbers = numbers * torch.complex(torch.cos(angles), torch.sin(angles))
    return torch.stack((numbers.real, numbers.imag), dim=-1).flatten(-2)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    pos: Optional[torch.Tensor] = None,
    bias_u: Optional[torch.Tensor] = None,
    bias_v: Optional[torch.Tensor] = None,
    mask: Optional[torch.Tensor] = None,
    causal: bool = False,
    keep: Optional[torch.Tensor] = None,
    keep_scale: float = 1.0,
) -> torch.Tensor:
    """
    [..., time, features] each; pos by relative position, that of query i and key j at j - i + queries - 1.
    mask, keep [..., queries, keys]: where to attend, and which weights are not dropped. A query without keys gives 0.
    """
    queries, keys = q.shape[-2], k.shape[-2]
    energies = (q if bias_u is None else q + bias_u) @ k.mT
    if pos is not None:
        index = torch.arange(keys)[None] - torch.arange(queries)[:, None] + queries - 1
        by_position = (q if bias_v is None else q + bias_v) @ pos.mT
        energies = energies + by_position.gather(-1, index.expand(*by_position.shape[:-2], -1, -1))
    attend = torch.ones(queries, keys, dtype=torch.bool)
    attend = attend.tril() if causal else attend
    attend = attend if mask is None else attend & mask
    weights = torch.where(attend, energies * scale, -1e30).softmax(-1) * attend
    return (weights if keep is None else weights * keep * keep_scale) @ v
