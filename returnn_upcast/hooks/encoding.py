"""
Positional encodings and rotary embedding (RoPE).

The angle is position times frequency. In float32 its error grows with the position (6e-3 at 100,000), so the encodings
are computed in float64, once (RETURNN caches them), and rounded once.
"""

from __future__ import annotations
from typing import Any, Callable, Optional, Tuple
import returnn.frontend as rf
from returnn.frontend import attention
from returnn.tensor import Tensor, Dim
from ..ops import rope
from ..ops.fuse import autocast_off
from .common import device_type, is_low, is_torch, promoted, raw_dtype
from .encoding_cache import bypass, is_low_name, rotary, set_to_true


def sinusoidal_encoding(original: Callable, indices: Tensor, *, dtype: Optional[str] = None, **kwargs: Any) -> Tensor:
    """:func:`rf.sinusoidal_encoding`, on which :func:`rf.sinusoidal_positional_encoding` is built"""
    if not is_low_name(dtype) or not is_torch(indices):
        return original(indices, dtype=dtype, **kwargs)
    out = original(indices, dtype="float64", **kwargs)
    return rf.cast(out, "float32" if rotary.get() else dtype or rf.get_default_float_dtype())


def relative_positional_encoding(
    original: Callable, *, dtype: Optional[str] = None, device: Optional[str] = None, **kwargs: Any
) -> Tuple[Tensor, Dim]:
    """:func:`rf.relative_positional_encoding`. Only what is rounded goes into RETURNN's cache"""
    dtype, device = dtype or rf.get_default_float_dtype(), device or rf.get_default_device()
    if not is_low_name(dtype) or rf.get_selected_backend() != "torch":
        return original(dtype=dtype, device=device, **kwargs)
    cache = attention._relative_positional_encoding_cache
    dims = kwargs["query_spatial_dim"], kwargs["key_value_spatial_dim"], kwargs["feat_dim"]
    key = *dims, kwargs.get("query_offset", 0), dtype, device
    result = cache.get(key)
    if result is None:
        with set_to_true(bypass):
            out, dim = original(dtype="float64", device=device, **kwargs)
        result = rf.cast(out, dtype), dim
        cache.set(key, result)
    return result


def rotary_attention(original: Callable, self: rf.Module, *args: Any, **kwargs: Any) -> Any:
    """``__call__`` of :class:`rf.RotaryPosSelfAttention` and :class:`rf.RotaryPosCausalSelfAttention`"""
    with set_to_true(rotary):
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
