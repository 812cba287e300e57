"""
Where a fused implementation may run, and ``torch.compile`` as an implementation detail of it.

Every op here exists twice: as plain differentiable torch code, which is right everywhere,
and as an ``autograd.Function`` that runs fused code and saves little.
:func:`may_fuse` decides which one runs, :func:`compiled` compiles and falls back by itself,
:func:`differentiate` derives the backward of the plain code, for a second derivative of the fused one.
"""

from __future__ import annotations
from typing import Any, Callable, ContextManager, Dict, Optional, Sequence, Set, Tuple
import contextlib
import functools
import logging
import os
import threading
import time
import types
import torch

log = logging.getLogger("returnn.frontend.upcast")

# Below that, the guards of a compiled function cost more than the memory traffic that it saves.
MIN_COMPILE_NUMEL = 32_768

# Asked by may_fuse: callables which tell that somebody traces what runs now. Who knows of such a tracer adds to it.
trace_checks: Set[Callable[[], bool]] = set()

# Who knows of an option sets this: None for the default, on.
compile_option: Callable[[], Optional[bool]] = lambda: None

# Known to have autocast: torch 2.6 cannot trace the question.
_AUTOCAST_DEVICES = ("cpu", "cuda")

_broken = False
_lock = threading.RLock()


def compile_enabled() -> bool:
    """
    :return: whether fused ops may compile: not with ``RETURNN_UPCAST_COMPILE=0`` in the environment, nor where the
        option says no, nor after a compilation has failed
    """
    return not _broken and os.environ.get("RETURNN_UPCAST_COMPILE", "1") != "0" and compile_option() is not False


def may_fuse(*tensors: Optional[torch.Tensor]) -> bool:
    """
    :param tensors: all inputs of the op
    :return: False where an ``autograd.Function`` with opaque kernels would be wrong or would hide the op:
        in all that :func:`is_traced` names, and under a dispatch mode. The plain code must run there.
    """
    return not is_traced(*tensors) and torch._C._len_torch_dispatch_stack() == 0


def is_traced(*tensors: Optional[torch.Tensor]) -> bool:
    """
    :param tensors: all inputs of the op
    :return: whether we are under an outer trace (torch.compile, export, jit, fake tensors, CUDA graph capture),
        in ``torch.func`` transforms or in forward-mode AD
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.jit.is_scripting():
        return True
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return True
    if any(check() for check in trace_checks):
        return True
    if not all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors if t is not None):
        return True
    return any(t is not None and t.is_cuda for t in tensors) and torch.cuda.is_current_stream_capturing()


def needs_grad(*tensors: Optional[torch.Tensor]) -> bool:
    """:return: whether autograd records what is done with these"""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def autocast_off(device_type: str) -> ContextManager:
    """
    :param device_type: e.g. "cuda"
    :return: context without autocast there: it would cast the float32 operands of a matmul down again
    """
    return torch.autocast(device_type, enabled=False) if autocast_is_on(device_type) else contextlib.nullcontext()


def autocast_is_on(device_type: str) -> bool:
    """
    :param device_type: e.g. "cuda", or one that knows no autocast
    :return: whether autocast is on there
    """
    available = device_type in _AUTOCAST_DEVICES or torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def compiled(func: Callable) -> Callable:
    """
    :param func: plain torch code on raw tensors, without autograd
    :return: func, compiled at its first use with dynamic shapes.
        Where compilation is off or not possible (no C++ compiler), and for less than :data:`MIN_COMPILE_NUMEL`
        elements, func itself; a failure is logged once.
    """
    variants = {}

    @functools.wraps(func)
    def call(*args: Any) -> Any:
        if not _is_large(args) or not compile_enabled():
            return func(*args)
        key = tuple((a.dtype, a.ndim, a.device.type) if isinstance(a, torch.Tensor) else a for a in args)
        fast = variants.get(key)
        # without autograd's state, which the compiler would specialise on
        args = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
        try:
            with torch.no_grad():
                return fast(*args) if fast is not None else _first_call(func, variants, key, args)
        except torch.OutOfMemoryError:
            raise
        except Exception as exc:  # a later specialisation may fail to compile as well
            return _failed(func, args, exc)

    call.plain = func
    return call


def _is_large(args: Sequence[Any]) -> bool:
    for a in args:  # for small tensors, a generator would take as long as one of their ops
        if isinstance(a, torch.Tensor) and a.numel() >= MIN_COMPILE_NUMEL:
            return True
    return False


def _first_call(func: Callable, variants: Dict, key: Tuple, args: Sequence[Any]) -> Any:
    with _lock:
        # Dynamo limits how often one code object is compiled. Dtypes, axes and flags are few but more than that limit,
        # so each combination gets a code object of its own; its shapes are dynamic.
        code = func.__code__.replace(co_name=func.__name__)
        own = types.FunctionType(code, func.__globals__, func.__name__, func.__defaults__, func.__closure__)
        fast = variants.setdefault(key, torch.compile(own, dynamic=True))
    start = time.perf_counter()
    result = fast(*args)
    log.info("rf_upcast: compiled %s in %.1f s", func.__name__, time.perf_counter() - start)
    return result


def _failed(func: Callable, args: Sequence[Any], exc: Exception) -> Any:
    global _broken
    result = func(*args)  # an error in the arguments raises here, as it should
    if not _broken:
        _broken = True
        reason = str(exc).strip().split("\n")[0]
        log.warning("rf_upcast: torch.compile does not work here (%s: %s), using plain ops", type(exc).__name__, reason)
    return result


def differentiate(
    plain: Callable, inputs: Sequence[Optional[torch.Tensor]], grad: torch.Tensor
) -> Tuple[Optional[torch.Tensor], ...]:
    """
    The backward of a fused op where its result is to be differentiated once more (``create_graph=True``).

    :param plain: the op as plain differentiable code, called with inputs
    :param inputs: the tensors saved by the forward, None where absent
    :param grad: gradient of the output
    :return: one gradient per input, None where it needs none; connected to inputs and grad
    """
    with torch.enable_grad():
        wanted = [i for i, x in enumerate(inputs) if x is not None and x.requires_grad]
        out = plain(*inputs)
        grads = torch.autograd.grad(out, [inputs[i] for i in wanted], grad, create_graph=True, allow_unused=True)
    result = [None] * len(inputs)
    for i, g in zip(wanted, grads):
        result[i] = g
    return tuple(result)
