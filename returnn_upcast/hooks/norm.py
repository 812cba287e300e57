"""
Norms: the RF modules and functions bound to :func:`returnn_upcast.ops.norm.normalize`.

Each hook says over which dims the statistics go, and which dtype stock RETURNN returns there.
"""

from __future__ import annotations
from typing import Any, Callable, Optional, Sequence, Union
import torch
import returnn.frontend as rf
from returnn.frontend import normalization
from returnn.tensor import Tensor, Dim
from ..ops.norm import normalize as normalize_raw
from .common import dtypes, in_float32, is_low, is_packed, is_torch, mask_raw, module_dtype, promoted, raw_dtype, wrap

_Dims = Union[Dim, Sequence[Dim]]


def _as_list(dims: _Dims) -> Sequence[Dim]:
    return [dims] if isinstance(dims, Dim) else list(dims)


def _stats_dtype(x: Tensor) -> str:
    # releases before the option took the statistics in the input's dtype
    stats_in_float32 = getattr(normalization, "_moments_float32", lambda: False)
    return "float32" if stats_in_float32() else x.dtype


def _broadcast(param: Optional[Tensor], x: Tensor) -> Optional[torch.Tensor]:
    return None if param is None else param.copy_compatible_to_dims_raw(x.dims)


def _normalize(
    plain: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    axis: _Dims,
    scale: Optional[Tensor],
    bias: Optional[Tensor],
    eps: Union[float, Tensor],
    out_dtype: str,
    center: bool = True,
) -> Tensor:
    """
    :param plain: RETURNN's own code
    :param x: low precision
    :param axis: dims of the statistics
    :param scale: dims among those of x
    :param bias: the same
    """
    axis = _as_list(axis)
    if is_packed(x) and all(dim in x.raw_tensor.inner.dims for dim in axis):
        inner = _normalize(
            plain, x.raw_tensor.inner, axis=axis, scale=scale, bias=bias, eps=eps, out_dtype=out_dtype, center=center
        )
        return x.raw_tensor.rewrap(inner, name=inner.name)
    dims = x.dims_set
    covered = is_torch(x, scale, bias) and dims.issuperset(axis) and isinstance(eps, (int, float))
    if not covered or not all(dims.issuperset(p.dims) for p in (scale, bias) if p is not None):
        return in_float32(plain, x, out_dtype)
    raw, _, _ = normalize_raw(
        x.raw_tensor,
        axes=[x.dims.index(dim) for dim in axis],
        scale=_broadcast(scale, x),
        bias=_broadcast(bias, x),
        mask=mask_raw(x, axis),
        eps=eps,
        center=center,
        out_dtype=raw_dtype(out_dtype),
    )
    return wrap(x, raw, "norm")


def layer_norm(original: Callable, self: rf.LayerNorm, x: Tensor) -> Tensor:
    """:func:`rf.LayerNorm.__call__`"""
    if not is_low(x):
        return original(self, x)
    dtype = module_dtype(promoted(x.dtype, _stats_dtype(x), *dtypes(self.scale, self.bias)), x.dtype)
    plain = lambda x_: original(self, x_)
    return _normalize(plain, x, axis=self.in_dim, scale=self.scale, bias=self.bias, eps=self.eps, out_dtype=dtype)


def rms_norm(original: Callable, self: rf.RMSNorm, x: Tensor) -> Tensor:
    """:func:`rf.RMSNorm.__call__`"""
    if not is_low(x):
        return original(self, x)
    dtype = module_dtype(promoted(x.dtype, *dtypes(self.scale, self.bias)), x.dtype)
    return _normalize(
        lambda x_: original(self, x_),
        x,
        axis=self.in_dim,
        scale=self.scale,
        bias=self.bias,
        eps=self.eps,
        out_dtype=dtype,
        center=False,
    )


def group_norm(original: Callable, self: rf.GroupNorm, x: Tensor, *, spatial_dim: _Dims = ()) -> Tensor:
    """:func:`rf.GroupNorm.__call__`, and :func:`rf.GroupNormSpatial.__call__` with ``spatial_dim``"""
    kwargs = {"spatial_dim": spatial_dim} if isinstance(self, rf.GroupNormSpatial) else {}
    if not is_low(x):
        return original(self, x, **kwargs)
    dtype = module_dtype(promoted(x.dtype, _stats_dtype(x), *dtypes(self.scale, self.bias)), x.dtype)
    if is_packed(x) and not kwargs and self.in_dim in x.raw_tensor.inner.dims:
        return x.raw_tensor.rewrap(group_norm(original, self, x.raw_tensor.inner), name="group_norm")
    groups = [self.num_groups, self.in_group_dim]
    divides = self.num_groups.dimension * self.in_group_dim.dimension == self.in_dim.dimension
    if not is_torch(x) or not divides or self.in_dim not in x.dims:
        return in_float32(lambda x_: original(self, x_, **kwargs), x, dtype)
    split = lambda p: rf.split_dims(p, axis=self.in_dim, dims=groups)
    out = _normalize(
        lambda x_: x_,
        split(x),
        axis=[self.in_group_dim, *_as_list(spatial_dim)],
        scale=split(self.scale),
        bias=split(self.bias),
        eps=self.eps,
        out_dtype=dtype,
    )
    return wrap(x, out.raw_tensor.reshape(x.raw_tensor.shape), "group_norm")


def normalize(original: Callable, a: Tensor, *, axis: _Dims, epsilon: float = 1e-6) -> Tensor:
    """:func:`rf.normalize`"""
    if not is_low(a):
        return original(a, axis=axis, epsilon=epsilon)
    dtype = promoted(a.dtype, _stats_dtype(a))
    plain = lambda a_: original(a_, axis=axis, epsilon=epsilon)
    return _normalize(plain, a, axis=axis, scale=None, bias=None, eps=epsilon, out_dtype=dtype)


def normalize_module(original: Callable, self: rf.Normalize, a: Tensor, *, axis: _Dims) -> Tensor:
    """:func:`rf.Normalize.__call__`"""
    if not is_low(a):
        return original(self, a, axis=axis)
    dtype = promoted(a.dtype, _stats_dtype(a), *dtypes(self.scale, self.bias))
    plain = lambda a_: original(self, a_, axis=axis)
    return _normalize(plain, a, axis=axis, scale=self.scale, bias=self.bias, eps=self.epsilon, out_dtype=dtype)


def batch_norm_masked(original: Callable, self: rf.BatchNorm, source: Tensor) -> Tensor:
    """:func:`rf.BatchNorm.__call__`: the generic implementation with masking; without, the backend's op is hooked"""
    use_mask = any(d.need_masking() for d in source.dims if d != self.in_dim)
    if use_mask:
        use_mask = rf.use_mask_default(default=True, func_name="BatchNorm") if self.use_mask is None else self.use_mask
    if not is_low(source) or not (use_mask or self.distributed):
        return original(self, source)
    train = rf.get_run_ctx().is_train_flag_enabled(func=rf.BatchNorm.__call__)
    use_stats = self.running_mean is not None and not train
    stats = self.running_mean.dtype if use_stats else _stats_dtype(source)
    dtype = promoted(source.dtype, stats, *dtypes(self.gamma, self.beta))
    packing = None
    if use_stats and is_packed(source) and self.in_dim in source.raw_tensor.inner.dims:
        # With given statistics it is elementwise. RETURNN's own code takes 1/sqrt(variance) in the dtype of the buffer.
        packing, source = source.raw_tensor, source.raw_tensor.inner
    if (self.distributed and not use_stats) or not isinstance(train, bool) or not is_torch(source):
        return in_float32(lambda x: original(self, x), source, dtype)
    mask = None if use_stats else mask_raw(source, [d for d in source.dims if d != self.in_dim])
    raw, mean, var = _batch_norm(self, source, self.in_dim, use_stats, mask, self.eps, raw_dtype(dtype))
    if self.running_mean is not None and train:
        # as stock: biased variance, and no update by a batch without any frame
        _update_running(self.running_mean, mean, self.momentum, mask)
        _update_running(self.running_variance, var, self.momentum, mask)
    out = wrap(source, raw, "batch_norm")
    return packing.rewrap(out, name="batch_norm") if packing is not None else out


def batch_norm(original: Callable, source: Tensor, **kwargs: Any) -> Tensor:
    """:func:`TorchBackend.batch_norm`, without masking"""
    in_dim, mean_buf = kwargs["in_dim"], kwargs["running_mean"]
    count = source.raw_tensor.numel() // max(in_dim.get_dim_value(), 1)
    # With float32 parameters torch's own kernel has float32 inside. With low ones it rounds, and float32 input
    # (from packed_batch_norm) it does not take.
    low = any(map(is_low, (kwargs["gamma"], kwargs["beta"], mean_buf)))
    if not low or kwargs["use_mask"] or count <= 1:
        return original(source, **kwargs)
    train = rf.get_run_ctx().is_train_flag_enabled(func=rf.BatchNorm.__call__)
    module = _Params(kwargs["gamma"], kwargs["beta"], mean_buf, kwargs["running_variance"])
    use_stats = mean_buf is not None and not train
    raw, mean, var = _batch_norm(module, source, in_dim, use_stats, None, kwargs["epsilon"], source.raw_tensor.dtype)
    if mean_buf is not None and train:
        # as torch: the unbiased variance is tracked, the biased one normalises
        _update_running(mean_buf, mean, kwargs["momentum"])
        _update_running(kwargs["running_variance"], var * (count / (count - 1)), kwargs["momentum"])
    out = wrap(source, raw, "batch_norm")
    out.feature_dim = in_dim
    return out


def packed_batch_norm(original: Callable, source: Tensor, **kwargs: Any) -> Tensor:
    """
    :func:`PackedBackend.batch_norm`: with gaps between the sequences, older releases sum in the input's dtype,
    and all of them round low-precision running statistics several times
    """
    if not is_low(source) or not is_packed(source) or not source.raw_tensor.has_gap_frames:
        return original(source, **kwargs)
    buffers = {name: kwargs[name] for name in ("running_mean", "running_variance") if is_low(kwargs[name])}
    wide = {name: rf.cast(buffer, "float32") for name, buffer in buffers.items()}
    out = in_float32(lambda x: original(x, **{**kwargs, **wide}), source, source.dtype)
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.raw_tensor.copy_(wide[name].raw_tensor)
    return out


class _Params:
    def __init__(self, gamma, beta, running_mean, running_variance):
        self.gamma, self.beta = gamma, beta
        self.running_mean, self.running_variance = running_mean, running_variance


def _batch_norm(module: Any, source: Tensor, in_dim: Dim, use_stats: bool, mask, eps: float, dtype: torch.dtype):
    scale, bias = _broadcast(module.gamma, source), _broadcast(module.beta, source)
    axes = [i for i, d in enumerate(source.dims) if d != in_dim]
    stats = None
    if use_stats:
        stats = _broadcast(module.running_mean, source), _broadcast(module.running_variance, source)
    return normalize_raw(
        source.raw_tensor, axes=axes, scale=scale, bias=bias, mask=mask, eps=eps, out_dtype=dtype, stats=stats
    )


@torch.no_grad()
def _update_running(buffer: Tensor, value: torch.Tensor, momentum: float, mask: Optional[torch.Tensor] = None):
    raw = buffer.raw_tensor
    wide = raw.to(torch.promote_types(raw.dtype, value.dtype))
    delta = (value.reshape(raw.shape) - wide) * momentum
    if mask is not None:
        delta = torch.where(mask.any(), delta, 0.0)
    raw.copy_(wide + torch.where(torch.isfinite(delta), delta, 0.0) if mask is not None else wide + delta)
