"""
Where in the user's code and in the model something comes from.

Every call is found by the Python stack; how a tensor came to be by its autograd graph, whose nodes know their
stack under :func:`torch.autograd.detect_anomaly`.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Iterator, Optional, Tuple
import os
import re
import sys
import torch
import returnn
import returnn.frontend as rf

STEP = "(step)"
MAX_NODES = 300

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(path)) + os.sep
    for path in (returnn.__file__, torch.__file__, os.path.dirname(__file__))
)
_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def _is_user(path: str) -> bool:
    # "<frozen runpy>" and the like are nobody's code
    return not path.startswith("<") and not os.path.abspath(path).startswith((*_LIBRARIES, sys.prefix + os.sep + "lib"))


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line() -> str:
    """:return: "file:line" of the innermost frame of the user's code, "" if there is none"""
    for frame in _frames():
        if _is_user(frame.f_code.co_filename):
            return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno}"
    return ""


def module_path(module: Any, names: Optional[Dict[int, str]]) -> str:
    """
    :param module: the one that was called, None for a function
    :param names: id(module) -> path in the model. None: the outermost module on the stack is taken as the model
    :return: path of module, or else of the innermost module on the stack
    """
    stack = [] if module is None else [module]
    for frame in _frames():
        obj = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(obj, (rf.Module, torch.nn.Module)):
            stack.append(obj)
    if names is None and stack:
        names = names_of(stack[-1])
    return next((names[id(obj)] for obj in stack if id(obj) in (names or {})), STEP) or STEP


def names_of(model: Any) -> Dict[int, str]:
    """:return: id(module) -> path; that of the model itself is "" """
    return {id(module): name for name, module in model.named_modules()}


def _line_of(node: Any) -> str:
    # innermost last
    for entry in reversed(node.metadata.get("traceback_", [])):
        match = _LINE.search(entry)
        if match and _is_user(match["file"]):
            return f"{_short(match['file'])}:{match['line']}"
    return ""


def ancestors(x: torch.Tensor, depth: int = 1_000) -> Iterator[Tuple[Any, int]]:
    """:return: the nodes of the graph behind x, nearest first, at most :data:`MAX_NODES`, and their distance"""
    queue, seen = [(x.grad_fn, 0)], set()
    while queue and len(seen) < MAX_NODES:
        node, distance = queue.pop(0)
        if node is None or node in seen or distance > depth:
            continue
        seen.add(node)
        yield node, distance
        queue += [(parent, distance + 1) for parent, _ in node.next_functions]


def find(x: torch.Tensor, wanted: Callable[[Any], bool], depth: int = 1_000) -> str:
    """
    :param x: made under anomaly detection
    :param wanted: asked of each node behind x
    :param depth: how far to look
    :return: "file:line" of the user's code that made the nearest one, "" if there is none
    """
    for node, _ in ancestors(x, depth):
        if wanted(node):
            return _line_of(node)
    return ""


def made_at(x: torch.Tensor) -> str:
    """:return: "file:line" of the user's code that made x, "" if unknown"""
    return _line_of(x.grad_fn) if x.grad_fn is not None else ""
