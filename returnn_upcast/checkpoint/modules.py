"""
Which parameter belongs to which kind of module: what names alone do not tell.
"""

from __future__ import annotations
from typing import Any, Dict, Hashable, Iterable, List, Mapping, Optional, Tuple
import torch
from ..params.walk import identity, is_model, rf_class, walk

# kind -> class names, the first that fits counts
_TORCH_KINDS = {
    "torch.MultiheadAttention": ("MultiheadAttention",),
    "torch.Linear": ("Linear",),
    "torch.Conv": ("Conv1d", "Conv2d", "Conv3d"),
    "torch.Embedding": ("Embedding", "EmbeddingBag"),
    "torch.LayerNorm": ("LayerNorm",),
    "torch.RMSNorm": ("RMSNorm",),
    "torch.GroupNorm": ("GroupNorm",),
    "torch.BatchNorm": ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"),
}
_RF_KINDS = {
    "rf.Linear": ("Linear",),
    "rf.Conv": ("Conv1d", "Conv2d", "Conv3d"),
    "rf.Embedding": ("Embedding",),
    "rf.LayerNorm": ("LayerNorm",),
    "rf.RMSNorm": ("RMSNorm",),
    "rf.GroupNorm": ("GroupNorm", "GroupNormSpatial"),
    "rf.BatchNorm": ("BatchNorm",),
}
ModuleMap = Mapping[str, Optional[str]]


def module_map(model: Any) -> Dict[str, Optional[str]]:
    """
    :param model: rf.Module or torch.nn.Module
    :return: full name of each module -> its kind, None for all that have no counterpart in Flax.
        Attention says how many heads it has: "torch.MultiheadAttention/4". It can be stored as JSON.
    """
    result: Dict[str, Optional[str]] = {}
    attention: Tuple[str, ...] = ()
    for name, mod, _ in walk(model):
        # its output projection is a torch.nn.Linear with another layout in Flax
        if not any(name.startswith(prefix) for prefix in attention):
            result[name] = _kind(mod)
        if isinstance(mod, torch.nn.MultiheadAttention):
            attention += (f"{name}." if name else "",)
    return result


def _kind(mod: Any) -> Optional[str]:
    kinds = [(kind, getattr(torch.nn, n, ())) for kind, names in _TORCH_KINDS.items() for n in names]
    kinds += [(kind, rf_class(n)) for kind, names in _RF_KINDS.items() for n in names]
    kind = next((kind for kind, cls in kinds if isinstance(mod, cls)), None)
    if kind == "torch.MultiheadAttention":
        return f"{kind}/{mod.num_heads}{'' if mod._qkv_same_embed_dim else '/separate'}"
    if kind == "rf.Linear" and mod.weight.dims[0] != mod.in_dim:
        return f"{kind}/transposed"  # tied to an embedding: RF goes by dims, not by their order
    return kind


def as_map(modules: Any) -> Dict[str, Optional[str]]:
    """:return: of a model or of a module map"""
    if is_model(modules):
        return module_map(modules)
    if not isinstance(modules, Mapping):
        raise TypeError(f"expected a model or a module map, got {type(modules).__name__}")
    return dict(modules)


def state_names(model: Any) -> List[Tuple[str, ...]]:
    """
    :param model: rf.Module or torch.nn.Module
    :return: for each parameter and persistent buffer, its names: several where it is tied
    """
    if isinstance(model, torch.nn.Module):
        entries = [(n, x) for n, x in model.state_dict(keep_vars=True).items() if isinstance(x, torch.Tensor)]
    else:
        entries = [(f"{prefix}.{n}" if prefix else n, x) for prefix, _, own in walk(model) for n, x in own.items()]
    groups: Dict[Hashable, Tuple[str, ...]] = {}
    for name, x in entries:
        groups[identity(x)] = (*groups.get(identity(x), ()), name)
    return list(groups.values())


def norms_of(modules: ModuleMap, names: Iterable[str]) -> List[str]:
    """:return: those of the names that are directly in a norm module"""
    norms = {name for name, kind in as_map(modules).items() if kind and kind.endswith("Norm")}
    return [name for name in names if name.rpartition(".")[0] in norms]
