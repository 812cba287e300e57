"""
Arrays of torch, NumPy and JAX with the dtype kept to the bit, bfloat16 included.
"""

from __future__ import annotations
from typing import Any, Optional, Tuple, Union
import sys
import numpy
import torch

# by what users write; the integer type of the same width, and the number of mantissa bits
DTYPES = {
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16", "f16", "half"), torch.float16),
    **dict.fromkeys(("float32", "fp32", "f32"), torch.float32),
    **dict.fromkeys(("float64", "fp64", "f64"), torch.float64),
}
_LAYOUT = {
    torch.bfloat16: (torch.int16, 7),
    torch.float16: (torch.int16, 10),
    torch.float32: (torch.int32, 23),
    torch.float64: (torch.int64, 52),
}


def parse_dtype(dtype: Union[str, torch.dtype]) -> torch.dtype:
    """:return: the floating dtype of this name (``bfloat16``, ``bf16``, ``float32``, ...). ValueError on another one"""
    result = DTYPES.get(dtype.rpartition(".")[2] if isinstance(dtype, str) else dtype_name(dtype))
    if result is None:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    return result


def dtype_name(dtype: torch.dtype) -> str:
    """:return: "bfloat16" for ``torch.bfloat16``"""
    return str(dtype).rpartition(".")[2]


def is_float(x: torch.Tensor) -> bool:
    """:return: whether casts apply to it. Not to float8: that are quantized weights, meaningless without their scales"""
    return x.dtype in _LAYOUT


def cast_tensor(
    x: torch.Tensor, dtype: torch.dtype, buffer: Optional[torch.Tensor] = None
) -> Tuple[torch.Tensor, bool]:
    """
    Rounds to nearest even. Unlike :func:`torch.Tensor.to`, keeps sign and payload of NaNs as far as they fit,
    so that widening and casting back is exact to the bit.

    :param x: any shape, see :func:`is_float`
    :param dtype: one of those too
    :param buffer: of this dtype and at least this size, x then is [N]. The result may be in there
    :return: x in dtype (x itself if it is that already), and whether finite values became infinite
    """
    if dtype == x.dtype or x.numel() == 0:
        return x.to(dtype), False
    out = x.to(dtype) if buffer is None else buffer[: len(x)].copy_(x)
    if all(map(torch.isfinite, torch.aminmax(out))):  # NaN propagates: one pass over the result
        return out, False
    out = torch.where(torch.isnan(x), _cast_nan(x, dtype), out)
    return out, bool((torch.isinf(out) & torch.isfinite(x)).any())


def _cast_nan(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    int_in, bits_in = _LAYOUT[x.dtype]
    int_out, bits_out = _LAYOUT[dtype]
    mantissa = x.contiguous().view(int_in).to(torch.int64) & ((1 << bits_in) - 1)
    shift = bits_out - bits_in
    mantissa = mantissa << shift if shift >= 0 else mantissa >> -shift
    # a payload that does not fit must not become an infinity
    mantissa = torch.where(mantissa == 0, 1 << (bits_out - 1), mantissa)
    inf = torch.full((), float("inf"), dtype=dtype).view(int_out).to(torch.int64)
    sign = torch.where(torch.signbit(x), torch.full_like(mantissa, -1) << (8 * dtype.itemsize - 1), 0)
    return (mantissa | inf | sign).to(int_out).view(dtype)


def is_jax(x: Any) -> bool:
    """:return: whether this is a JAX array. Does not import JAX"""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(x, jax.Array)


def to_torch(x: Any, name: str = "array") -> torch.Tensor:
    """
    :param x: torch, NumPy (bfloat16 of ml_dtypes included) or JAX array
    :param name: for errors
    :return: same shape, dtype and bits; detached. TypeError if it is no array
    """
    if isinstance(x, torch.Tensor):
        return x.detach()
    if not (isinstance(x, (numpy.ndarray, numpy.generic)) or is_jax(x)):
        raise TypeError(f"{name}: expected a torch, NumPy or JAX array, got {type(x).__name__} {str(x)[:50]!r}")
    array = numpy.array(x, order="C")  # a copy: JAX arrays are read-only
    dtype = getattr(torch, array.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: torch has no dtype {array.dtype}")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return torch.from_numpy(array.reshape(-1).view(numpy.uint8)).view(dtype).reshape(array.shape)


def to_numpy(x: torch.Tensor) -> numpy.ndarray:
    """
    :param x: any dtype; bfloat16 and float8 need ml_dtypes, which comes with JAX
    :return: same shape, dtype and bits
    """
    x = x.detach().cpu().contiguous()
    try:
        dtype = numpy.dtype(dtype_name(x.dtype))
    except TypeError:
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError(
                f"NumPy has no {dtype_name(x.dtype)}: needs ml_dtypes, pip install 'returnn_upcast[jax]'"
            ) from None
        dtype = numpy.dtype(getattr(ml_dtypes, dtype_name(x.dtype)))
    return x.reshape(-1).view(torch.uint8).numpy().view(dtype).reshape(x.shape)


def like(value: torch.Tensor, original: Any) -> Any:
    """:return: value as the kind of array that the original is. TypeError if JAX would narrow it"""
    if isinstance(original, torch.Tensor):
        return value
    if not is_jax(original):
        return to_numpy(value)
    result = sys.modules["jax"].numpy.asarray(to_numpy(value))
    if result.dtype.name != dtype_name(value.dtype):
        raise TypeError(f"JAX has no {dtype_name(value.dtype)} here: enable jax_enable_x64")
    return result
