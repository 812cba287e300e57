"""
State dict to Flax variables and back, by the kind of module and not by name pattern.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple
import dataclasses
import logging
import re
import torch
from ..params import to_numpy, to_torch
from ..params.walk import flatten, is_model, join
from .common import Checkpoint, CheckpointError
from .modules import as_map, state_names
from .msgpack_file import unflatten

log = logging.getLogger("returnn.frontend.upcast")

# What Flax knows, and one more for what only torch has, such as the counter of batch norm.
COLLECTIONS = ("params", "batch_stats", "buffers")

Tensors = Sequence[torch.Tensor]


def _same(x: torch.Tensor) -> Tensors:
    return (x,)


def _kernel(x: torch.Tensor) -> Tensors:
    return (x.permute(*range(2, x.ndim), 1, 0),)  # [out, in, *spatial] -> [*spatial, in, out]


def _kernel_back(xs: Tensors) -> torch.Tensor:
    n = xs[0].ndim
    return xs[0].permute(n - 1, n - 2, *range(n - 2))


@dataclasses.dataclass(frozen=True)
class Rule:
    """
    One parameter of a kind of module.

    :param flax: its name in the Flax module; several where Flax has several arrays
    :param forward: torch's array to Flax's
    :param backward: exact inverse
    """

    flax: Tuple[str, ...]
    collection: str = "params"
    forward: Callable[[torch.Tensor], Tensors] = _same
    backward: Callable[[Tensors], torch.Tensor] = lambda xs: xs[0]


def _attention(heads: int, separate: bool) -> Dict[str, Rule]:
    """:return: rules of torch.nn.MultiheadAttention; Flax has [in, heads, dim] and [heads, dim, out]"""
    names = ("query", "key", "value")
    kernels = tuple(f"{name}.kernel" for name in names)

    def split(x):  # [3 * heads * dim, in]
        return tuple(p.T.unflatten(1, (heads, -1)) for p in x.chunk(1 if separate else 3))

    def merge(xs):
        return torch.cat([x.flatten(1).T for x in xs])

    rules = {
        "in_proj_bias": Rule(
            tuple(f"{name}.bias" for name in names),
            forward=lambda x: tuple(p.unflatten(0, (heads, -1)) for p in x.chunk(3)),
            backward=lambda xs: torch.cat([x.flatten() for x in xs]),
        ),
        "out_proj.weight": Rule(
            ("out.kernel",),
            forward=lambda x: (x.T.unflatten(0, (heads, -1)),),
            backward=lambda xs: xs[0].flatten(0, 1).T,
        ),
        "out_proj.bias": Rule(("out.bias",)),
    }
    if separate:
        pairs = zip(("q_proj_weight", "k_proj_weight", "v_proj_weight"), kernels)
        return {**rules, **{name: Rule((kernel,), forward=split, backward=merge) for name, kernel in pairs}}
    return {**rules, "in_proj_weight": Rule(kernels, forward=split, backward=merge)}


_BIAS = {"bias": Rule(("bias",))}
_KERNEL = Rule(("kernel",), forward=_kernel, backward=_kernel_back)
_TORCH_NORM = {"weight": Rule(("scale",)), **_BIAS}
_RF_NORM = {"scale": Rule(("scale",)), **_BIAS}
_MEAN = {"running_mean": Rule(("mean",), "batch_stats")}

RULES: Dict[str, Dict[str, Rule]] = {
    "torch.Linear": {"weight": _KERNEL, **_BIAS},
    "torch.Conv": {"weight": _KERNEL, **_BIAS},
    "torch.Embedding": {"weight": Rule(("embedding",))},
    "torch.LayerNorm": _TORCH_NORM,
    "torch.RMSNorm": _TORCH_NORM,
    "torch.GroupNorm": _TORCH_NORM,
    "torch.BatchNorm": {
        **_TORCH_NORM,
        **_MEAN,
        "running_var": Rule(("var",), "batch_stats"),
        "num_batches_tracked": Rule(("num_batches_tracked",), "buffers"),
    },
    "rf.Linear": {"weight": Rule(("kernel",)), **_BIAS},  # [in, out] already
    "rf.Linear/transposed": {"weight": _KERNEL, **_BIAS},
    "rf.Conv": {"filter": _KERNEL, **_BIAS},
    "rf.Embedding": {"weight": Rule(("embedding",))},
    "rf.LayerNorm": _RF_NORM,
    "rf.RMSNorm": _RF_NORM,
    "rf.GroupNorm": _RF_NORM,
    "rf.BatchNorm": {
        "gamma": Rule(("scale",)),
        "beta": Rule(("bias",)),
        **_MEAN,
        "running_variance": Rule(("var",), "batch_stats"),
    },
}


def _rules(kind: Optional[str]) -> Dict[str, Rule]:
    if kind is None:
        return {}
    attention = re.fullmatch(r"torch\.MultiheadAttention/(\d+)(/separate)?", kind)
    if attention:
        return _attention(int(attention[1]), separate=bool(attention[2]))
    if kind not in RULES:
        known = ", ".join((*RULES, "torch.MultiheadAttention/<heads>"))
        raise ValueError(f"module map: unknown kind {kind!r}; known: {known}")
    return RULES[kind]


def to_flax(modules: Any, state_dict: Mapping[str, Any]) -> Dict[str, Dict[str, Any]]:
    """
    :param modules: the rf.Module or torch.nn.Module, or its module map (:func:`.module_map`)
    :param state_dict: name -> torch or NumPy array, of any dtype
    :return: {"params": ..., "batch_stats": ...}, nested by the dots in the names, with NumPy arrays of the same dtype.
        "buffers" too if there are integers which Flax does not have. Parameters of other modules keep name and layout.
        ValueError lists all names that are missing, unknown to the model, or clash
    """
    rules = _by_name(modules)
    claimed = {path for rule, paths in rules.values() for path in paths}
    _check_names(modules, state_dict, set(rules))
    flat: Dict[str, torch.Tensor] = {}
    clashes, unknown = [], []
    for name, x in state_dict.items():
        x = to_torch(x, name)
        if name in rules:
            rule, paths = rules[name]
            parts = rule.forward(x)
        else:
            paths, parts = [join("params" if x.is_floating_point() else "buffers", name)], (x,)
            unknown.append(name)
        clashes += [f"{name} -> {p}" for p in paths if p in flat or (name not in rules and p in claimed)]
        flat.update(zip(paths, parts))
    if clashes:
        raise ValueError(f"to_flax: names clash: {', '.join(clashes)}")
    _report("to_flax", unknown)
    try:
        return {"params": {}, "batch_stats": {}, **unflatten({path: to_numpy(x) for path, x in flat.items()})}
    except CheckpointError as exc:
        raise ValueError(f"to_flax: {exc}") from None


def from_flax(modules: Any, variables: Mapping[str, Any]) -> Dict[str, torch.Tensor]:
    """
    Exact inverse of :func:`to_flax`.

    :param modules: as there. That of another model with the same names converts between torch.nn and RF
    :param variables: {"params": ..., "batch_stats": ...}, nested, of NumPy or JAX arrays
    :return: name -> CPU tensor, of the same dtypes. ValueError lists all names that are left over on either side
    """
    wrong = sorted(set(variables) - set(COLLECTIONS))
    if wrong:
        raise ValueError(f"from_flax: unknown collections {', '.join(wrong)}; known: {', '.join(COLLECTIONS)}")
    flat = {path: to_torch(x, path) for path, x in flatten(variables).items()}
    result: Dict[str, torch.Tensor] = {}
    incomplete, clashes, unknown = [], [], []
    for name, (rule, paths) in _by_name(modules).items():
        present = [path for path in paths if path in flat]
        if present == list(paths):
            result[name] = rule.backward([flat.pop(path) for path in paths]).contiguous()
        elif present:
            incomplete += sorted(set(paths) - set(present))
    if incomplete:
        raise ValueError(f"from_flax: missing: {', '.join(incomplete)}")
    for path, x in flat.items():
        name = path.partition(".")[2]
        (clashes if name in result else unknown).append(name)
        result[name] = x
    if clashes:
        raise ValueError(f"from_flax: names clash: {', '.join(clashes)}")
    _check_names(modules, result, set(result) - set(unknown))
    _report("from_flax", unknown)
    return result


def checkpoint_to_flax(modules: Any, ckpt: Checkpoint) -> Checkpoint:
    """:return: with the arrays of :func:`to_flax` by their path ("params.linear.kernel"), and all that is known of them"""
    arrays = {path: to_torch(x) for path, x in flatten(to_flax(modules, ckpt.arrays)).items()}
    rules = _by_name(modules)
    dtypes = {}
    for name, dtype in ckpt.original_dtypes.items():
        dtypes.update(dict.fromkeys(rules[name][1] if name in rules else [join("params", name)], dtype))
    return Checkpoint(arrays, meta=ckpt.meta, original_dtypes=dtypes, wrapped=ckpt.wrapped)


def checkpoint_from_flax(modules: Any, ckpt: Checkpoint) -> Checkpoint:
    """:return: inverse of :func:`checkpoint_to_flax`"""
    variables: Dict[str, Dict[str, torch.Tensor]] = {}
    for path, x in ckpt.arrays.items():
        collection, _, name = path.partition(".")
        variables.setdefault(collection, {})[name] = x
    arrays = from_flax(modules, variables)
    rules = _by_name(modules)
    paths = {name: rules[name][1][0] if name in rules else join("params", name) for name in arrays}
    dtypes = {name: ckpt.original_dtypes[path] for name, path in paths.items() if path in ckpt.original_dtypes}
    return Checkpoint(arrays, meta=ckpt.meta, original_dtypes=dtypes, wrapped=ckpt.wrapped)


def _by_name(modules: Any) -> Dict[str, Tuple[Rule, List[str]]]:
    """:return: torch name -> rule, paths in Flax, for all parameters that the modules could have"""
    result = {}
    for prefix, kind in as_map(modules).items():
        for name, rule in _rules(kind).items():
            result[join(prefix, name)] = (rule, [join(rule.collection, prefix, flax) for flax in rule.flax])
    return result


def _check_names(modules: Any, names: Iterable[str], known: set):
    names = set(names)
    if is_model(modules):
        groups = state_names(modules)
        left = {
            "not in the model": names - {name for group in groups for name in group},
            "missing": {" = ".join(group) for group in groups if not names & set(group)},
        }
    else:
        # a map does not know which parameters there are, but none at all is a mistake
        empty = {m or "(root)" for m, kind in modules.items() if kind and not _has_any(m, kind, names & known)}
        left = {"modules without parameters": empty}
    problems = [f"{what}: {', '.join(sorted(which))}" for what, which in left.items() if which]
    if problems:
        raise ValueError(f"state dict does not fit the model; {'; '.join(problems)}")


def _has_any(prefix: str, kind: str, names: set) -> bool:
    return any(join(prefix, name) in names for name in _rules(kind))


def _report(what: str, unknown: Sequence[str]):
    if unknown:
        log.warning("%s: no counterpart known, name and layout kept: %s", what, ", ".join(unknown))
