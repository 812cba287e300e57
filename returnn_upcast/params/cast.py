"""
Cast the parameters of a model or a state dict, with masks.
"""

from __future__ import annotations
from typing import Any, Dict, Hashable, List, Mapping, Optional, Union
import torch
from .arrays import cast_tensor, dtype_name, is_float, like, parse_dtype, to_torch
from .masks import Mask, check_tied, resolve_mask
from .walk import flatten, identity, is_model, raw, rf_class, walk


def cast_params(
    params: Any, dtype: Union[str, torch.dtype], mask: Optional[Mask] = None, *, allow_overflow: bool = False
) -> Any:
    """
    :param params: rf.Module or torch.nn.Module: changed in place; Parameter objects stay the same, tied ones stay tied.
        Optimizer state that exists already keeps its dtype: cast before the first step.
        Or a mapping, flat or nested, of torch, NumPy or JAX arrays: a new mapping of plain dicts is returned.
    :param dtype: of all floating parameters and buffers; integers and float8 are left alone
    :param mask: True means cast. ``(name, param) -> bool``, a mapping of the same structure, or :func:`not_norms`
    :param allow_overflow: finite values may become infinite. Otherwise that is an OverflowError, and nothing is changed
    :return: the same model, or the new mapping
    """
    dtype = parse_dtype(dtype)
    named = flatten(params)
    tensors = {name: to_torch(raw(value), name) for name, value in named.items()}
    names = resolve_mask(mask, named, {name for name, x in tensors.items() if is_float(x)})
    groups: Dict[Hashable, List[str]] = {}
    for name, value in named.items():
        groups.setdefault(identity(value), []).append(name)
    check_tied(groups, names)
    todo = [group for group in groups.values() if group[0] in names]
    if not allow_overflow:
        bad = [name for group in todo for name in group if cast_tensor(tensors[group[0]], dtype)[1]]
        if bad:
            raise OverflowError(f"{dtype_name(dtype)}: values become infinite in {', '.join(bad)} (see allow_overflow)")
    if not is_model(params):
        new = {group[0]: like(cast_tensor(tensors[group[0]], dtype)[0], named[group[0]]) for group in todo}
        return _rebuild(params, {name: new[group[0]] for group in todo for name in group})
    for group in todo:
        value = cast_tensor(tensors[group[0]], dtype)[0]
        for name in group:
            _set_value(named[name], value)
    _sync_rf_dtypes(params)
    return params


def _rebuild(params: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> Dict[str, Any]:
    return {
        key: _rebuild(value, new, f"{prefix}{key}.") if isinstance(value, Mapping) else new.get(f"{prefix}{key}", value)
        for key, value in params.items()
    }


def _set_value(param: Any, value: torch.Tensor):
    array = raw(param)
    if not isinstance(array, torch.Tensor):  # RETURNN's JAX backend, arrays are immutable
        param.dtype = dtype_name(value.dtype)
        param.raw_tensor = like(value, array)
        return
    # as torch.nn.Module.to: the Parameter object, which optimizers hold, stays
    grad = array.grad
    array.data = value
    if grad is not None:
        grad.data = cast_tensor(grad.data, value.dtype)[0]


def _sync_rf_dtypes(model: Any):
    # rf.Parameter keeps the dtype apart from the raw tensor
    for _, mod, _ in walk(model):
        for param in vars(mod).values():
            if isinstance(param, rf_class("Parameter")) and isinstance(param.raw_tensor, torch.Tensor):
                param.dtype = dtype_name(param.raw_tensor.dtype)


def to_bf16(params: Any, mask: Optional[Mask] = None) -> Any:
    """:func:`cast_params` to bfloat16"""
    return cast_params(params, torch.bfloat16, mask)


def to_fp16(params: Any, mask: Optional[Mask] = None, *, allow_overflow: bool = False) -> Any:
    """:func:`cast_params` to float16"""
    return cast_params(params, torch.float16, mask, allow_overflow=allow_overflow)


def to_fp32(params: Any, mask: Optional[Mask] = None) -> Any:
    """:func:`cast_params` to float32"""
    return cast_params(params, torch.float32, mask)
