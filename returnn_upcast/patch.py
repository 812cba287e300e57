"""
A table of patches, and how to put it in place and take it back.

Every patch wraps one attribute of a RETURNN module or class. The wrapper asks the policy, then calls the hook with the
original; so a hook is a function ``hook(original, *args, **kwargs)``. Owners and hooks are named by strings
("module:Class", "module:function"), since neither torch nor the hooks may be imported before they are needed:
a config file runs before RETURNN has set up the environment for torch.
"""

from __future__ import annotations
from typing import Any, Callable, List, Optional, Sequence, Tuple
import ast
import dataclasses
import functools
import importlib
import inspect
import pathlib
import sys
from .policy import get_policy


@dataclasses.dataclass(frozen=True)
class Patch:
    """
    :param owner: "module" or "module:Class"
    :param name: the attribute
    :param hook: "module:function", called as ``hook(original, *args, **kwargs)``
    :param op: the policy's key: without it, the original is called. None: the hook is always called
    :param params: parameter names of the original which the hook relies on
    :param replace: the attribute is no function: it becomes ``hook(original)``
    """

    owner: str
    name: str
    hook: str
    op: Optional[str] = None
    params: Tuple[str, ...] = ()
    replace: bool = False

    def __str__(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"

    @property
    def module(self) -> str:
        """:return: name of the module that must be loaded"""
        return self.owner.partition(":")[0]


_applied: List[Tuple[Any, str, bool, Any]] = []  # owner, name, whether it was the owner's own, raw original
_names: List[Patch] = []


def applied() -> Tuple[Patch, ...]:
    """:return: the patches in place"""
    return tuple(_names)


def _load(spec: str) -> Any:
    module, _, attr = spec.partition(":")
    obj = importlib.import_module(module)
    return getattr(obj, attr) if attr else obj


def apply(patches: Sequence[Patch]):
    """
    :param patches: put in place in this order, those that are in place already are skipped
    """
    for patch in patches:
        if patch in _names:
            continue
        owner = _load(patch.owner)
        raw = inspect.getattr_static(owner, patch.name)
        _applied.append((owner, patch.name, patch.name in vars(owner), raw))
        _names.append(patch)
        setattr(owner, patch.name, _load(patch.hook)(raw) if patch.replace else _wrap(patch, raw))


def restore():
    """Takes all patches back, the last one first: every attribute is the original object again."""
    while _applied:
        owner, name, own, raw = _applied.pop()
        if own:
            setattr(owner, name, raw)
        else:
            delattr(owner, name)
    _names.clear()


def _wrap(patch: Patch, raw: Any) -> Any:
    kind = type(raw) if isinstance(raw, (staticmethod, classmethod)) else None
    original = raw.__func__ if kind else raw
    op = patch.op
    hook: Optional[Callable] = None

    @functools.wraps(original)
    def wrapper(*args, **kwargs):
        if op is not None and op not in get_policy().ops:
            return original(*args, **kwargs)
        nonlocal hook
        if hook is None:
            hook = _load(patch.hook)
        return hook(original, *args, **kwargs)

    return kind(wrapper) if kind else wrapper


def missing(patches: Sequence[Patch], root: pathlib.Path) -> List[str]:
    """
    :param patches: the table
    :param root: RETURNN's package directory, where the source of modules lies that are not loaded yet
    :return: the hook points that this RETURNN does not have, or whose parameters changed
    """
    result = []
    for patch in patches:
        params = _params(patch) if patch.module in sys.modules else _params_from_source(patch, root)
        if params is None:
            result.append(str(patch))
        elif not set(patch.params) <= set(params):
            result.append(f"{patch} (parameter {', '.join(sorted(set(patch.params) - set(params)))})")
    return result


def _params(patch: Patch) -> Optional[Sequence[str]]:
    try:
        obj = getattr(_load(patch.owner), patch.name)
    except AttributeError:
        return None
    return () if patch.replace else list(inspect.signature(obj).parameters)


@functools.lru_cache(maxsize=None)
def _parse(path: pathlib.Path) -> Optional[ast.Module]:
    return ast.parse(path.read_text(encoding="utf8")) if path.exists() else None


def _params_from_source(patch: Patch, root: pathlib.Path) -> Optional[Sequence[str]]:
    node = _parse(root.joinpath(*patch.module.split(".")[1:]).with_suffix(".py"))
    for name in [n for n in (patch.owner.partition(":")[2], patch.name) if n]:
        body = getattr(node, "body", ())
        node = next((n for n in body if getattr(n, "name", None) == name), None)
    if not isinstance(node, ast.FunctionDef):
        return None
    return [arg.arg for arg in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
