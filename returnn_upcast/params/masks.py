"""
Which parameters to cast: masks, and what they match.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, FrozenSet, Hashable, Mapping, Optional, Sequence, Set, Union
import dataclasses
import logging
import torch
from .walk import flatten, join, rf_class, walk

log = logging.getLogger("returnn.frontend.upcast")

Mask = Union[Callable[[str, Any], bool], Mapping[str, Any]]

_TORCH_NORMS = ("LayerNorm", "RMSNorm", "GroupNorm")  # RMSNorm since torch 2.4
_RF_NORMS = ("LayerNorm", "RMSNorm", "GroupNorm", "GroupNormSpatial", "BatchNorm")


@dataclasses.dataclass(frozen=True)
class AllBut:
    """
    Mask: everything but these names.
    """

    names: FrozenSet[str]

    def __call__(self, name: str, param: Any) -> bool:
        return name not in self.names


def norm_classes() -> tuple:
    """:return: the classes of norm modules of torch and of RETURNN's frontend, for isinstance"""
    base = torch.nn.modules.batchnorm._NormBase  # all batch and instance norms
    result = [getattr(torch.nn, name) for name in _TORCH_NORMS if hasattr(torch.nn, name)]
    return (base, *result, *(cls for name in _RF_NORMS for cls in rf_class(name)))


def norm_names(model: Any, extra: Sequence[type] = ()) -> FrozenSet[str]:
    """
    :param model: rf.Module or torch.nn.Module
    :param extra: more classes of norm modules, such as an own RMSNorm
    :return: names of all parameters and buffers of norm modules, found by their class
    """
    classes = (*norm_classes(), *extra)
    return frozenset(join(prefix, name) for prefix, mod, own in walk(model) if isinstance(mod, classes) for name in own)


def not_norms(model: Any, extra: Sequence[type] = ()) -> AllBut:
    """
    Mask for a model, or for a state dict of it: everything but the parameters (and statistics) of norm modules.

    :param model: rf.Module or torch.nn.Module
    :param extra: more classes of norm modules, such as an own RMSNorm
    """
    names = norm_names(model, extra)
    if not names:
        log.warning(
            "not_norms: %s has no norm module of a known class; own classes go into extra", type(model).__name__
        )
    return AllBut(names)


def resolve_mask(mask: Optional[Mask], named: Mapping[str, Any], floats: Set[str]) -> Set[str]:
    """
    :param mask: None matches all
    :param named: name -> parameter
    :param floats: those of the names that are floats; only they are ever matched
    :return: the names that match, a subset of floats. ValueError if none do, or the mask's names do not fit
    """
    if mask is None:
        return set(floats)
    if isinstance(mask, AllBut):
        _fail("names that do not exist", mask.names - set(named))
    if isinstance(mask, Mapping):
        values = flatten(mask)
        problems = {"names that do not exist": set(values) - set(named), "no value for": floats - set(values)}
        _fail("; ".join(f"{k}: {', '.join(sorted(v))}" for k, v in problems.items() if v))
    elif callable(mask):
        values = {name: mask(name, param) for name, param in named.items()}
    else:
        raise TypeError(f"mask: expected a callable (name, param) -> bool or a mapping, got {type(mask).__name__}")
    wrong = [f"{name}: {value!r}" for name, value in values.items() if not _is_bool(value)]
    if wrong:
        raise TypeError(f"mask: expected True or False, got {', '.join(wrong)}")
    result = {name for name in floats if values[name]}
    if not result:
        raise ValueError(f"mask: matches none of {', '.join(sorted(floats)) or 'the parameters, none is a float'}")
    return result


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or (
        getattr(value, "shape", None) == () and str(getattr(value, "dtype", "")) == "bool"
    )


def _fail(what: str, names: Any = None):
    if names is not None:
        what = f"{what}: {', '.join(sorted(names))}" if names else ""
    if what:
        raise ValueError(f"mask: {what}")


def check_tied(groups: Mapping[Hashable, Sequence[str]], names: Set[str]):
    """ValueError if a mask wants one name of a tied parameter to be cast and another one not."""
    split: Dict[Hashable, Sequence[str]] = {
        key: g for key, g in groups.items() if len({name in names for name in g}) > 1
    }
    if split:
        raise ValueError(f"mask: splits tied parameters: {'; '.join(' = '.join(group) for group in split.values())}")
