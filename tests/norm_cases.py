"""
The norms as a table: RETURNN's module and call beside the float64 reference, and both run on the same numbers.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Optional, Sequence, Tuple
import dataclasses
import functools
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, Tensor
import references
from common import Mode, Result, inside, run, seq_dim, setting, values

LENS = (11, 7, 4, 1)
GROUPS = 4
batch, feat = Dim(len(LENS), name="batch"), Dim(16, name="feat")
heads, key = Dim(4, name="heads"), Dim(4, name="key")
time = seq_dim("time", LENS, batch)


@dataclasses.dataclass(frozen=True)
class Case:
    """
    :param op: key of the policy
    :param make: the module
    :param call: with the module, the input and the time dim
    :param reference: float64, of x and the parameters
    :param names: of the parameters
    :param feats: feature dims of the input
    :param train: train flag
    :param stats: reference of the running statistics after the step
    :param stock_fails: in which of the modes stock RETURNN (behavior version 38) misses the tolerances of the upcast
    """

    name: str
    op: str
    make: Callable[[], Optional[rf.Module]]
    call: Callable[[Any, Tensor, Dim], Tensor]
    reference: Callable[..., torch.Tensor]
    names: Sequence[str] = ("scale", "bias")
    feats: Tuple[Dim, ...] = (feat,)
    train: bool = True
    stats: Optional[Callable[..., Dict[str, torch.Tensor]]] = None
    stock_fails: Sequence[str] = ("bf16", "f16", "amp-bf16")

    def __str__(self) -> str:
        return self.name

    @property
    def dims(self) -> Tuple[Dim, ...]:
        """:return: dims of the input"""
        return batch, time, *self.feats

    @property
    def shape(self) -> Tuple[int, ...]:
        """:return: of the input"""
        return len(LENS), max(LENS), *(d.dimension for d in self.feats)

    def params(self, dtype: torch.dtype) -> Dict[str, torch.Tensor]:
        """:return: float64 values that dtype represents"""
        result = {}
        for i, name in enumerate(self.names):
            value = values(*self.shape[2:], seed=10 + i, std=0.2)
            if name not in ("bias", "beta", "running_mean"):
                value = value.abs() + 0.8
            result[name] = value.to(dtype).double()
        return result


def _plain(module: rf.Module, x: Tensor, _time: Dim) -> Tensor:
    return module(x)


_BN = ("gamma", "beta", "running_mean", "running_variance")
_ref = functools.partial


def _batch_norm(name: str, stock_fails: Sequence[str], *, use_mask: bool, train: bool = True, **kwargs: Any) -> Case:
    lens = LENS if use_mask else None
    return Case(
        name, "batch_norm", lambda: rf.BatchNorm(feat, use_mask=use_mask, **kwargs), _plain,
        _ref(references.batch_norm, lens=lens, train=train), _BN, train=train,
        stats=_ref(references.running_stats, lens=lens, momentum=kwargs.get("momentum", 0.1)) if train else None,
        stock_fails=stock_fails,
    )  # fmt: skip


CASES = (
    Case("LayerNorm", "layer_norm", lambda: rf.LayerNorm(feat), _plain, references.layer_norm),
    Case(
        "LayerNorm, no bias", "layer_norm", lambda: rf.LayerNorm(feat, with_bias=False), _plain,
        references.layer_norm, ("scale",),
    ),
    Case(
        "LayerNorm, two dims", "layer_norm", lambda: rf.LayerNorm([heads, key]), _plain,
        _ref(references.layer_norm, axes=(-2, -1)), feats=(heads, key),
    ),
    Case("RMSNorm", "rms_norm", lambda: rf.RMSNorm(feat), _plain, references.rms_norm, ("scale",)),
    Case("RMSNorm, bias", "rms_norm", lambda: rf.RMSNorm(feat, with_bias=True), _plain, references.rms_norm),
    Case(
        "RMSNorm, two dims", "rms_norm", lambda: rf.RMSNorm([heads, key], eps=1e-5), _plain,
        _ref(references.rms_norm, axes=(-2, -1), eps=1e-5), ("scale",), (heads, key),
    ),
    Case(
        "GroupNorm", "group_norm", lambda: rf.GroupNorm(feat, num_groups=GROUPS), _plain,
        _ref(references.group_norm, groups=GROUPS),
    ),
    Case(
        "GroupNormSpatial", "group_norm", lambda: rf.GroupNormSpatial(feat, num_groups=GROUPS),
        lambda m, x, t: m(x, spatial_dim=t), _ref(references.group_norm_spatial, groups=GROUPS, lens=LENS),
        stock_fails=("f16",),
    ),
    _batch_norm("BatchNorm, masked", ("bf16", "f16", "amp-bf16"), use_mask=True),
    _batch_norm("BatchNorm, masked, momentum", ("bf16", "f16", "amp-bf16"), use_mask=True, momentum=0.37),
    _batch_norm("BatchNorm, masked, eval", ("bf16", "f16"), use_mask=True, train=False),
    # F.batch_norm has float32 inside, only low-precision parameters are trouble
    _batch_norm("BatchNorm", ("bf16", "f16"), use_mask=False),
    _batch_norm("BatchNorm, momentum", ("bf16", "f16"), use_mask=False, momentum=0.37),
    _batch_norm("BatchNorm, eval", (), use_mask=False, train=False),
    _batch_norm("BatchNorm, distributed", ("bf16", "f16", "amp-bf16"), use_mask=True, distributed=True),
    _batch_norm("BatchNorm, distributed, eval", ("bf16", "f16"), use_mask=True, train=False, distributed=True),
    Case(
        "BatchNorm, no parameters", "batch_norm",
        lambda: rf.BatchNorm(feat, use_mask=True, affine=False, track_running_stats=False), _plain,
        _ref(references.batch_norm, lens=LENS), (), train=False,
    ),
    Case(
        "normalize, features", "normalize", lambda: None, lambda _, x, _t: rf.normalize(x, axis=feat),
        references.layer_norm, (),
    ),
    Case(
        "normalize, time", "normalize", lambda: None, lambda _, x, t: rf.normalize(x, axis=t, epsilon=1e-5),
        _ref(references.normalize_time, lens=LENS, eps=1e-5), (),
    ),
    Case(
        "Normalize", "normalize", lambda: rf.Normalize(param_dims=feat, epsilon=1e-4), lambda m, x, t: m(x, axis=t),
        _ref(references.normalize_time, lens=LENS, eps=1e-4),
    ),
    Case(
        "Normalize, no scale", "normalize", lambda: rf.Normalize(param_dims=feat, scale=False),
        lambda m, x, _t: m(x, axis=feat), references.layer_norm, ("bias",),
    ),
)  # fmt: skip


def example(case: Case, dtype: torch.dtype, *, mean: float = 5.0, std: float = 3.0) -> torch.Tensor:
    """:return: input in dtype; the padding is far away, so that it would show in the statistics"""
    x = values(*case.shape, seed=1, mean=mean, std=std)
    padding = ~inside(LENS)
    x[padding] = x[padding] * 2 + 7 * std
    return x.to(dtype)


def run_case(
    case: Case,
    mode: Mode,
    name: str,
    *,
    x: Optional[torch.Tensor] = None,
    dims: Optional[Sequence[Dim]] = None,
    upstream: Optional[torch.Tensor] = None,
    around: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = lambda call, x: call(x),
    version: int = 38,
    options: Optional[Dict[str, Any]] = None,
    backward: bool = True,
) -> Result:
    """
    :param name: see :data:`common.SETTINGS`
    :param x: default :func:`example`
    :param dims: of x, default those of the case, with another time dim in its place maybe
    :param upstream: gradient of the output in the order of the case's dims, default :func:`upstream_gradient`
    :param around: gets the call and the input
    :return: of the case. The raw output has the order of the case's dims, the gradient that of x
    """
    x = example(case, mode.low) if x is None else x
    dims = list(dims or case.dims)
    times = [d for d in dims if d not in (batch, *case.feats)]
    grad = (upstream_gradient(case, mode.low) if upstream is None else upstream) if backward else None
    rf.init_train_step_run_ctx(train_flag=case.train, step=0)
    call = lambda module, x_: around(lambda x__: case.call(module, x__, times[-1]), x_)
    out_dims = case.dims if set(dims) == set(case.dims) else dims
    with setting(name, mode, version=version, options=options):
        return run(call, case.make, x, dims, params=case.params(mode.param_dtype), out_dims=out_dims, grad=grad)


def upstream_gradient(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """:return: gradient of the output, of the padding as well: all positions depend on the statistics"""
    return values(*case.shape, seed=2).to(dtype)


def reference(case: Case, mode: Mode, x: torch.Tensor) -> Dict[str, torch.Tensor]:
    """:return: what :meth:`Result.numbers` should be, float64"""
    params = case.params(mode.param_dtype)
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    x = x.double().requires_grad_()
    out = case.reference(x, leaves)
    out.backward(upstream_gradient(case, mode.low).double())
    result = {"output": out.detach(), "input gradient": x.grad}
    buffers = ("running_mean", "running_variance")
    result.update({name: leaf.grad for name, leaf in leaves.items() if name not in buffers})
    stats = case.stats(x.detach(), params) if case.stats else params
    result.update({name: stats[name] for name in buffers if name in params})
    return result


def split(numbers: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """:return: the numbers, output and input gradient split into sequences and padding"""
    mask = inside(LENS)
    result = {}
    for name, value in numbers.items():
        if name in ("output", "input gradient"):
            result[f"{name}, sequences"], result[f"{name}, padding"] = value[mask], value[~mask]
        else:
            result[name] = value
    return result
