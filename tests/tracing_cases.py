"""
One RF op or module per case, as a function of raw tensors (input, lengths, parameters), for tracers and transforms.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple
import contextlib
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, Tensor
from common import MODES, inside, static_traceable, tensor, values
from tolerances import relative_error

BATCH, FEATURES = 3, 32
OPTIONS = {"rf_att_dropout_broadcast": False}
SIZES = {"small": 17, "large": 400}  # frames: 400 * 3 * 32 elements are more than what compiles at least
feat, labels = Dim(FEATURES, name="feat"), Dim(11, name="labels")
batch = Dim(BATCH, name="batch")

# All but this much in common is less than what one rounding to bfloat16 makes (1.7e-3).
SAME = 1e-3


class Case(NamedTuple):
    """
    :param make: the module, None if there is none
    :param call: gets module, input [batch, time, feat] and the time dim
    """

    make: Callable[[], Optional[rf.Module]]
    call: Callable[[Any, Tensor, Dim], Any]


def _attention(cls: Any, **kwargs: Any) -> Case:
    sizes = dict(key_dim_total=feat, value_dim_total=feat, num_heads=4)
    make = lambda: cls(feat, feat, **sizes, **{"att_dropout": 0.0, **kwargs})

    def call(module: Any, x: Tensor, time: Dim) -> Tensor:
        out = module(x, axis=time)
        return out[0] if isinstance(out, tuple) else out  # the causal ones return their state as well

    return Case(make, call)


def _module(make: Callable[[], rf.Module]) -> Case:
    return Case(make, lambda module, x, time: module(x))


def _targets(time: Dim, dim: Dim) -> Tensor:
    raw = torch.arange(BATCH * time.get_dim_value()).reshape(BATCH, -1) % dim.dimension
    return rf.convert_to_tensor(raw, dims=[batch, time], sparse_dim=dim)


def _ctc(_module: None, x: Tensor, time: Dim) -> Tensor:
    lens = Tensor("lens", [batch], dtype="int32", raw_tensor=torch.tensor([3, 3, 2], dtype=torch.int32))
    spatial = Dim(lens, name="targets")
    spatial.capacity = 3
    raw = torch.tensor([[1, 2, 3], [4, 4, 4], [1, 0, 0]])
    targets = rf.convert_to_tensor(raw, dims=[batch, spatial], sparse_dim=feat)
    kwargs = dict(input_spatial_dim=time, targets_spatial_dim=spatial, blank_index=FEATURES - 1, use_native_op=False)
    return rf.ctc_loss(logits=x, targets=targets, **kwargs)


def _cross_entropy(dense: bool) -> Case:
    def call(_module: None, x: Tensor, time: Dim) -> Tensor:
        target = rf.softmax(x * 2, axis=feat) if dense else _targets(time, feat)
        return rf.cross_entropy(estimated=x, target=target, axis=feat, estimated_type="logits")

    return Case(lambda: None, call)


def _linear_cross_entropy(module: rf.Linear, x: Tensor, time: Dim) -> Tensor:
    return rf.upcast.linear_cross_entropy(module, x, target=_targets(time, labels))


def _sinusoidal(_module: None, x: Tensor, time: Dim) -> Tensor:
    return x + rf.sinusoidal_positional_encoding(spatial_dim=time, feat_dim=feat)


CASES: Dict[str, Case] = {
    "LayerNorm": _module(lambda: rf.LayerNorm(feat)),
    "RMSNorm": _module(lambda: rf.RMSNorm(feat)),
    "GroupNorm": _module(lambda: rf.GroupNorm(feat, num_groups=4)),
    "BatchNorm": _module(lambda: rf.BatchNorm(feat, use_mask=False)),
    "BatchNorm, masked": _module(lambda: rf.BatchNorm(feat, use_mask=True)),
    "normalize": Case(lambda: None, lambda _, x, time: rf.normalize(x, axis=time)),
    "SelfAttention": _attention(rf.SelfAttention),
    "RotaryPosCausalSelfAttention": _attention(rf.RotaryPosCausalSelfAttention),
    "RelPosSelfAttention": _attention(rf.RelPosSelfAttention),
    "sinusoidal": Case(lambda: None, _sinusoidal),
    "cross_entropy": _cross_entropy(dense=False),
    "cross_entropy, dense": _cross_entropy(dense=True),
    "linear_cross_entropy": Case(lambda: rf.Linear(feat, labels), _linear_cross_entropy),
    "ctc_loss": Case(lambda: None, _ctc),
}
DROPOUT = {
    name: _attention(getattr(rf, name), att_dropout=0.3) for name in ("RotaryPosSelfAttention", "RelPosSelfAttention")
}


class Op:
    """A case as a function of raw tensors, made within a :func:`common.setting`"""

    def __init__(self, case: Case, size: int, mode: str):
        self.case, self.size = case, size
        self.module = case.make()
        self.params: List[rf.Parameter] = list(self.module.parameters()) if self.module is not None else []
        for i, param in enumerate(self.params):
            raw = param.raw_tensor.data
            std, mean = (0.0, 1.0) if param.auxiliary else (0.3, float(raw.ndim < 2))
            # exact in all dtypes
            raw.copy_(values(*raw.shape, seed=30 + i, std=std, mean=mean).to(torch.bfloat16))
        self.lens = torch.tensor([size, size // 2, 5], dtype=torch.int32)
        self.x = values(BATCH, size, FEATURES, seed=1, mean=1.0).to(torch.bfloat16).to(MODES[mode].low)

    def inputs(self, dtype: Optional[torch.dtype] = None) -> Tuple[torch.Tensor, ...]:
        """:return: fresh leaves: input, lengths, parameters; in their own dtypes, or what is floating in this one"""
        raws = (p.raw_tensor.detach().to(dtype, copy=True).requires_grad_(not p.auxiliary) for p in self.params)
        return (self.x.to(dtype, copy=True).requires_grad_(), self.lens.clone(), *raws)

    def __call__(self, x: torch.Tensor, lens: torch.Tensor, *raws: torch.Tensor) -> torch.Tensor:
        """:return: [batch, time, ...] or [batch]"""
        before = [p.raw_tensor for p in self.params]
        for param, raw in zip(self.params, raws):
            param.raw_tensor = raw
        time = Dim(Tensor("time", [batch], dtype="int32", raw_tensor=lens), name="time")
        if rf.is_static_traceable():
            time.capacity = self.size  # what RETURNN's torch_cuda_graph declares
        try:
            out = self.case.call(self.module, tensor(x, batch, time, feat, feature_dim=feat), time)
        finally:
            for param, raw in zip(self.params, before):
                param.raw_tensor = raw
        dims = [d for d in (batch, time) if d in out.dims]
        return out.copy_compatible_to_dims_raw(dims + [d for d in out.dims if d not in dims])

    def loss(self, *inputs: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """:return: the output, and a weighted sum of the frames inside of the sequences"""
        out = self(*inputs)
        weights = torch.cos(torch.arange(out.numel()) * 0.7).reshape(out.shape)
        weighted = out.to(torch.promote_types(out.dtype, torch.float32)) * weights
        if out.ndim > 1:
            mask = torch.arange(out.shape[1]) < inputs[1].unsqueeze(1)
            weighted = torch.where(mask.reshape(mask.shape + (1,) * (out.ndim - 2)), weighted, 0.0)
        return out, weighted.sum()

    def step(self, *inputs: torch.Tensor) -> List[torch.Tensor]:
        """:return: output and gradients, as RETURNN's compiled train step makes them"""
        out, loss = self.loss(*inputs)
        leaves = [x for x in inputs if x.requires_grad]
        grads = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves))]

    def static_step(self, *inputs: torch.Tensor) -> List[torch.Tensor]:
        """:return: the same under RETURNN's static tracing"""
        with static_traceable():
            return self.step(*inputs)


def assert_same(results: List[torch.Tensor], expected: List[torch.Tensor], lens: List[int]):
    """Asserts that outputs (inside of the sequences) and gradients have one dtype and differ by less than a rounding."""
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape, (i, a.dtype, b.dtype)
        if a.ndim > 1 and a.shape[:2] == (BATCH, max(lens)):
            a, b = a[inside(lens)], b[inside(lens)]
        assert relative_error(a, b.detach().double()) < SAME, i


@contextlib.contextmanager
def seeded(seed: int = 1):
    """the same random numbers each time"""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield
