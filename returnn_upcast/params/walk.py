"""
The parameters of a model or mapping, by name.
"""

from __future__ import annotations
from typing import Any, Dict, Hashable, Iterator, Mapping, Tuple
import sys
import torch


def rf_class(name: str) -> Tuple[type, ...]:
    """:return: the class of RETURNN's frontend, for isinstance; empty if that is not loaded or has no such class"""
    cls = getattr(sys.modules.get("returnn.frontend"), name, None)
    return (cls,) if cls is not None else ()


def join(*names: str) -> str:
    """:return: the names joined with dots, empty ones left out"""
    return ".".join(filter(None, names))


def walk(model: Any, prefix: str = "") -> Iterator[Tuple[str, Any, Dict[str, Any]]]:
    """
    :param model: rf.Module or torch.nn.Module; one may be inside the other
    :param prefix: put before all names
    :return: for each module: full name, module, its own parameters and buffers by their name within the module.
        Tied parameters come under each of their names
    """
    if isinstance(model, torch.nn.Module):
        for name, mod in model.named_modules(prefix=prefix):
            own = dict(mod.named_parameters(recurse=False, remove_duplicate=False))
            yield name, getattr(mod, "rf_module", mod), {**own, **dict(mod.named_buffers(recurse=False))}
        return
    for name, mod in model.named_modules():
        name = join(prefix, name)
        kinds = (torch.Tensor, *rf_class("Parameter"))
        wrapped = getattr(mod, "pt_module", None)  # its parameters are there as rf.Parameter too
        yield name, mod if wrapped is None else wrapped, {k: v for k, v in vars(mod).items() if isinstance(v, kinds)}
        for key, value in vars(mod).items():
            if isinstance(value, torch.nn.Module) and value is not wrapped:
                yield from walk(value, join(name, key))


def is_model(x: Any) -> bool:
    """:return: whether this is an rf.Module or a torch.nn.Module"""
    return isinstance(x, (torch.nn.Module, *rf_class("Module")))


def flatten(params: Any) -> Dict[str, Any]:
    """
    :param params: model, or mapping, flat or nested
    :return: full name -> rf.Parameter or array. ValueError if two entries get the same name
    """
    result: Dict[str, Any] = {}
    clashes = []
    if is_model(params):
        entries = [(join(prefix, name), value) for prefix, _, own in walk(params) for name, value in own.items()]
    elif isinstance(params, Mapping):
        entries = list(_flatten_mapping(params))
    else:
        raise TypeError(f"params: expected an rf.Module, a torch.nn.Module or a mapping, got {type(params).__name__}")
    for name, value in entries:
        if name in result:
            clashes.append(name)
        result[name] = value
    if clashes:
        raise ValueError(f"params: two entries with the same name: {', '.join(clashes)}")
    return result


def _flatten_mapping(params: Mapping[str, Any], prefix: str = "") -> Iterator[Tuple[str, Any]]:
    for key, value in params.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten_mapping(value, f"{name}.")
        else:
            yield name, value


def raw(value: Any) -> Any:
    """:return: the array of an rf.Parameter, or the array itself"""
    return value.raw_tensor if isinstance(value, rf_class("Parameter")) else value


def identity(value: Any) -> Hashable:
    """:return: the same for tied parameters: one object under two names, or two tensors with the same memory"""
    value = raw(value)
    if isinstance(value, torch.Tensor) and value.numel() and value.device.type != "meta":
        return value.data_ptr(), tuple(value.shape), value.stride(), value.dtype
    return id(value)
