"""
What dtypes a model has, and which of its modules compute in another one than asked for.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Hashable, Iterator, List, Mapping, Sequence, Set, Tuple, Union
import contextlib
import dataclasses
import fnmatch
import torch
from .arrays import dtype_name, is_jax, parse_dtype, to_torch
from .walk import flatten, identity, raw, rf_class, walk


def dtype_report(params: Any) -> str:
    """
    :param params: rf.Module, torch.nn.Module, or mapping of arrays, flat or nested
    :return: table of modules, dtypes, and counts of arrays, elements and bytes. Tied parameters count once
    """
    rows: Dict[Tuple[str, str], List[int]] = {}
    seen: Set[Hashable] = set()
    for name, value in flatten(params).items():
        key = identity(value)
        if key in seen:
            continue
        seen.add(key)
        x = to_torch(raw(value), name)
        for module in (name.rpartition(".")[0] or "(root)", "total"):
            row = rows.setdefault((module, dtype_name(x.dtype)), [0, 0, 0])
            for i, n in enumerate((1, x.numel(), x.numel() * x.element_size())):
                row[i] += n
    cells = [(*key, *map("{:,}".format, row)) for key, row in rows.items() if key[0] != "total"]
    cells += [(*key, *map("{:,}".format, row)) for key, row in rows.items() if key[0] == "total"]
    return format_table(("module", "dtype", "arrays", "elements", "bytes"), cells)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """:return: text table; the first two columns to the left, numbers to the right"""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    return "\n".join(
        "  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in (header, *rows)
    )


def assert_compute_dtype(
    model: Any,
    dtype: Union[str, torch.dtype],
    run: Callable[[], Any],
    *,
    ignore: Sequence[Union[str, type]] = (),
):
    """
    Runs the model, and finds the modules whose float output has another dtype than asked for.
    That is how a dtype argument shows that was never passed on: one float32 parameter makes all that follows float32.

    :param model: rf.Module or torch.nn.Module
    :param dtype: expected of every float output of every module
    :param run: runs the model once
    :param ignore: names of modules (globs), or classes, that may differ, such as a float32 output layer
    :raises AssertionError: lists all other modules in the order in which they finished, the cause comes first
    """
    dtype = parse_dtype(dtype)
    names: Dict[int, str] = {id(mod): name or "(root)" for name, mod, _ in walk(model)}
    seen: List[Tuple[Any, Set[str]]] = []
    failure = None
    with _recording([mod for _, mod, _ in walk(model)], seen):
        try:
            run()
        except RuntimeError as exc:  # torch's own complaint of mixed dtypes names no module, and comes too late
            failure = exc
    if not seen and failure is None:
        raise ValueError("assert_compute_dtype: run() called no module of the model")
    classes = tuple(c for c in ignore if isinstance(c, type))
    globs = [c for c in ignore if isinstance(c, str)]
    wrong: Dict[str, str] = {}
    for mod, dtypes in seen:
        name = names[id(mod)]
        skip = isinstance(mod, classes) or any(fnmatch.fnmatchcase(name, glob) for glob in globs)
        if not skip and dtypes - {dtype_name(dtype)}:
            wrong.setdefault(name, f"{name} ({type(mod).__name__}): {', '.join(sorted(dtypes))}")
    if wrong:
        raise AssertionError(
            f"expected {dtype_name(dtype)}, but these modules return: " + "; ".join(wrong.values())
        ) from failure
    if failure is not None:
        raise failure


@contextlib.contextmanager
def _recording(mods: Sequence[Any], seen: List[Tuple[Any, Set[str]]]) -> Iterator[None]:
    ids = set(map(id, mods))
    with contextlib.ExitStack() as stack:
        owners = set()
        for mod in mods:
            if isinstance(mod, torch.nn.Module):
                hook = mod.register_forward_hook(lambda m, args, out: seen.append((m, set(_float_dtypes(out)))))
                stack.callback(hook.remove)
            else:
                owners.add(next(cls for cls in type(mod).__mro__ if "__call__" in vars(cls)))
        # on the class: rf.Module's own forward hooks recurse endlessly with two hooked instances of one class
        for cls in owners:
            original = vars(cls)["__call__"]
            stack.callback(setattr, cls, "__call__", original)
            cls.__call__ = _recorder(original, ids, seen)
        yield


def _recorder(original: Callable, ids: Set[int], seen: List[Tuple[Any, Set[str]]]) -> Callable:
    def call(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        if id(self) in ids:
            seen.append((self, set(_float_dtypes(out))))
        return out

    return call


def _float_dtypes(value: Any) -> Iterator[str]:
    if isinstance(value, rf_class("Tensor")):
        value = value.raw_tensor
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield dtype_name(value.dtype)
    elif is_jax(value):
        if "float" in value.dtype.name:
            yield value.dtype.name
    elif isinstance(value, (Mapping, list, tuple)) or dataclasses.is_dataclass(value):
        for sub in (
            value.values()
            if isinstance(value, Mapping)
            else value
            if isinstance(value, (list, tuple))
            else vars(value).values()
        ):
            yield from _float_dtypes(sub)
