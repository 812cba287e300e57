"""
Tolerances that follow from the rounding floor: the error of the float64 reference, rounded once to the dtype of the result.
Nothing of that dtype can be closer. What is allowed is the floor times a stated factor.
"""

from __future__ import annotations
import torch

# Factors of the floor.
OUTPUT = 1.02
INPUT_GRAD = 1.05
PARAM_GRAD = 1.1
# Float32 gradients of parameters: sums over all frames, so not the floor but float32 arithmetic limits them.
PARAM_GRAD_FLOAT32 = 1e-5
# The same for float32 results.
FLOAT32 = 3e-7


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """
    :param value: any float dtype
    :param reference: float64, the same shape
    :return: |value - reference| / |reference| in the Euclidean norm, inf if a value is not finite
    """
    assert reference.dtype == torch.float64 and value.shape == reference.shape, (value.shape, reference.shape)
    value = value.detach().double()
    if not torch.isfinite(value).all():
        return float("inf")
    size = float(reference.norm())
    return float((value - reference).norm()) / size if size else float(value.norm())


def floor(reference: torch.Tensor, dtype: torch.dtype) -> float:
    """:return: the error of the float64 reference when it is rounded once to dtype"""
    return relative_error(reference.to(dtype), reference)


def tolerance(reference: torch.Tensor, dtype: torch.dtype, factor: float, *, float32: float = FLOAT32) -> float:
    """
    :param reference: float64
    :param dtype: of the value that is compared with it
    :param factor: of the floor
    :param float32: relative error allowed for float32 (and wider) values
    """
    return max(factor * floor(reference, dtype), float32 if dtype.itemsize >= 4 else 0.0)


def assert_close(
    value: torch.Tensor, reference: torch.Tensor, factor: float, *, float32: float = FLOAT32, what: str = ""
):
    """Asserts that the relative error is within :func:`tolerance`."""
    error, limit = relative_error(value, reference), tolerance(reference, value.dtype, factor, float32=float32)
    assert error <= limit, f"{what}: error {error:.3e} > {limit:.3e} = {factor} x floor ({value.dtype})"


def assert_within_one_rounding(a: torch.Tensor, b: torch.Tensor, what: str = "", *, noise: float = 10 * FLOAT32):
    """
    Asserts that a and b can be the same number, computed in float32 in another order and then rounded to their dtype:
    elementwise, one step of the dtype plus float32 noise, relative to the largest value.
    """
    assert a.dtype == b.dtype and a.shape == b.shape, (what, a.dtype, b.dtype, a.shape, b.shape)
    eps = torch.finfo(a.dtype).eps
    a, b = a.detach().double(), b.detach().double()
    assert torch.isfinite(a).all() and torch.isfinite(b).all(), what
    allowed = eps * torch.maximum(a.abs(), b.abs()) + noise * torch.maximum(a.abs().max(), b.abs().max())
    excess = (a - b).abs() - allowed
    assert (excess <= 0).all(), f"{what}: off by up to {float((a - b).abs().max()):.3e}"
