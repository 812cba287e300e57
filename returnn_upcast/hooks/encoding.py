"""
Positional encodings and rotary embedding (RoPE).

The angle is position times frequency. In float32 its error grows with the position (6e-3 at 100,000), so the encodings
are computed in float64, once (RETURNN caches them), and rounded once.
"""

from __future__ import annotations
from typing import Any, Callable, Optional, Tuple
import contextlib
import returnn.frontend as rf
from returnn.tensor import Tensor, Dim
from ..ops import rope
from ..ops.fuse import autocast_off
from .common import device_type, is_low, is_torch, promoted, raw_dtype
from .encoding_cache import is_low_name, rotary


def sinusoidal_encoding(original: Callable, indices: Tensor, *, dtype: Optional[str] = None, **kwargs: Any) -> Tensor:
    """:func:`rf.sinusoidal_encoding`, on which :func:`rf.sinusoidal_positional_encoding` is built"""
    if not is_low_name(dtype):
        return original(indices, dtype=dtype, **kwargs)
    out = original(indices, dtype="float64", **kwargs)
    return rf.cast(out, "float32" if rotary.get() else dtype or rf.get_default_float_dtype())


def relative_positional_encoding(
    original: Callable, *, dtype: Optional[str] = None, **kwargs: Any
) -> Tuple[Tensor, Dim]:
    """:func:`rf.relative_positional_encoding`; RETURNN caches the float64 encoding under its own dtype"""
    if not is_low_name(dtype):
        return original(dtype=dtype, **kwargs)
    out, dim = original(dtype="float64", **kwargs)
    return rf.cast(out, dtype or rf.get_default_float_dtype()), dim


@contextlib.contextmanager
def _rotary_ctx():
    token = rotary.set(True)
    try:
        yield
    finally:
        rotary.reset(token)


def rotary_attention(original: Callable, self: rf.Module, *args: Any, **kwargs: Any) -> Any:
    """``__call__`` of :class:`rf.RotaryPosSelfAttention` and :class:`rf.RotaryPosCausalSelfAttention`"""
    with _rotary_ctx():
        return original(self, *args, **kwargs)


def apply_rope(original: Callable, x: Tensor, pos_enc: Tensor, feat_dim: Dim) -> Tensor:
    """``apply_rope`` of a backend: the rotation in float32, rounded once to the dtype that stock RETURNN returns"""
    if not is_low(x):
        return original(x, pos_enc, feat_dim)
    encoding_dtype = rf.get_default_float_dtype() if rotary.get() else pos_enc.dtype
    dtype = promoted(x.dtype, encoding_dtype)
    if not is_torch(x, pos_enc):
        with autocast_off(device_type(x)):
            return rf.cast(original(rf.cast(x, "float32"), rf.cast(pos_enc, "float32"), feat_dim), dtype)
    dims = [d for d in x.dims if d != feat_dim] + [feat_dim]
    out = Tensor("apply_rope", dims=dims, dtype=dtype)
    out.raw_tensor = rope.apply_rope(
        x.copy_compatible_to_dims_raw(dims), pos_enc.copy_compatible_to_dims_raw(dims), out_dtype=raw_dtype(dtype)
    )
    return out
