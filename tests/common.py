"""
What the tests of the hooks share: dims with lengths, and one module call run as stock or upcast, in every precision.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Mapping, Optional, Sequence
import contextlib
import dataclasses
import pytest
import torch
import returnn.frontend as rf
from returnn.frontend import _native
from returnn.config import Config, global_config_ctx
from returnn.tensor import Dim, Tensor
from returnn.util.basic import BehaviorVersion
import returnn_upcast
from returnn_upcast.ops import fuse

# Context of RETURNN's static tracing. Not all releases have it.
static_traceable = getattr(rf, "set_static_traceable_ctx", None)

# Without its native module, RETURNN casts the second operand of arithmetic to the dtype of the first.
native = _native.is_enabled()
needs_native = pytest.mark.skipif(not native, reason="dtypes and rounding of RETURNN's native module")

# "stock": nothing installed. "off" and "on": installed, with ``rf_upcast`` False and True.
SETTINGS = ("stock", "off", "on")


@dataclasses.dataclass(frozen=True)
class Mode:
    """
    :param low: dtype of the inputs
    :param amp: autocast to it
    :param params: dtype of the parameters. None: float32 under autocast, else that of the inputs
    """

    low: torch.dtype
    amp: bool = False
    params: Optional[torch.dtype] = None

    @property
    def param_dtype(self) -> torch.dtype:
        """:return: dtype of the parameters, and the default float dtype"""
        return self.params or (torch.float32 if self.amp else self.low)


MODES: Dict[str, Mode] = {
    "bf16": Mode(torch.bfloat16),
    "f16": Mode(torch.float16),
    "amp-bf16": Mode(torch.bfloat16, amp=True),
}


def name_of(dtype: torch.dtype) -> str:
    """:return: RETURNN's name of the dtype"""
    return str(dtype).split(".")[1]


def seq_dim(name: str, lens: Sequence[int], batch: Dim) -> Dim:
    """:return: dynamic dim with these lengths"""
    return Dim(Tensor(name, [batch], dtype="int32", raw_tensor=torch.tensor(lens, dtype=torch.int32)), name=name)


def inside(lens: Sequence[int], size: Optional[int] = None) -> torch.Tensor:
    """:return: bool [batch, time], True for the frames of the sequences"""
    return torch.arange(size or max(lens))[None] < torch.tensor(lens)[:, None]


def tensor(raw: torch.Tensor, *dims: Dim, feature_dim: Optional[Dim] = None) -> Tensor:
    """:return: raw as RETURNN's tensor"""
    return rf.convert_to_tensor(raw, dims=dims, feature_dim=feature_dim)


def values(*shape: int, seed: int, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """:return: float64 [*shape], normally distributed"""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * std + mean


@contextlib.contextmanager
def traced():
    """as inside of somebody's trace: the plain code runs"""
    check = lambda: True
    fuse.trace_checks.add(check)  # the set stays the same: hooks that are loaded meanwhile add to it, for good
    try:
        yield
    finally:
        fuse.trace_checks.remove(check)


@contextlib.contextmanager
def setting(
    name: str, mode: Optional[Mode] = None, *, version: int = 38, options: Optional[Dict[str, Any]] = None, dtype=None
):
    """
    :param name: see :data:`SETTINGS`
    :param mode: for autocast and the default float dtype
    :param version: behavior version
    :param options: of the config; ``rf_upcast`` among them wins
    :param dtype: default float dtype, wins over that of mode
    """
    config = {**({} if name == "stock" else {"rf_upcast": name == "on"}), **(options or {})}
    dtype = dtype or (mode.param_dtype if mode else torch.float32)
    returnn_upcast.uninstall()
    BehaviorVersion._reset((version, 0))
    if name != "stock":
        returnn_upcast.install()
    amp = torch.autocast("cpu", dtype=mode.low) if mode and mode.amp else contextlib.nullcontext()
    with global_config_ctx(Config(config)), rf.set_default_float_dtype_ctx(name_of(dtype)), amp:
        yield


@dataclasses.dataclass
class Result:
    """
    :param out: what the op returned
    :param raw: its raw tensor, in the order of dims that was asked for
    :param grad: of the input
    :param param_grads: by name
    :param buffers: values of the auxiliary parameters afterwards
    """

    out: Tensor
    raw: torch.Tensor
    grad: Optional[torch.Tensor]
    param_grads: Dict[str, torch.Tensor]
    buffers: Dict[str, torch.Tensor]

    def numbers(self) -> Dict[str, torch.Tensor]:
        """:return: all raw tensors by name"""
        grads = {} if self.grad is None else {"input gradient": self.grad}
        return {"output": self.raw, **grads, **self.param_grads, **self.buffers}


def set_parameters(module: Optional[rf.Module], params: Mapping[str, torch.Tensor]):
    """Copies params into those of the module, rounded to their dtypes."""
    if module is None:
        return
    for name, param in module.named_parameters():
        param.raw_tensor.data.copy_(params[name])


def run(
    call: Callable[[Any, Tensor], Tensor],
    make: Callable[[], Optional[rf.Module]],
    x: torch.Tensor,
    dims: Sequence[Dim],
    *,
    params: Mapping[str, torch.Tensor],
    out_dims: Optional[Sequence[Dim]] = None,
    grad: Optional[torch.Tensor] = None,
) -> Result:
    """
    One forward and one backward of ``call(make(), x)`` within a :func:`setting`.

    :param x: in its final dtype and memory order
    :param dims: of x
    :param params: float64 values of the parameters
    :param out_dims: the raw result is brought to this order. Default dims
    :param grad: of the raw result; None for no backward
    """
    module = make()
    set_parameters(module, params)
    x = x.detach().requires_grad_(grad is not None)
    out = call(module, tensor(x, *dims))
    raw = out.copy_compatible_to_dims_raw(list(out_dims or dims))
    named = dict(module.named_parameters()) if module is not None else {}
    if grad is not None:
        raw.backward(grad.to(raw.dtype))
    return Result(
        out=out,
        raw=raw.detach(),
        grad=x.grad,
        param_grads={n: p.raw_tensor.grad for n, p in named.items() if not p.auxiliary and grad is not None},
        buffers={n: p.raw_tensor.detach().clone() for n, p in named.items() if p.auxiliary},
    )
