"""
All ops with the upcast on, packed as padded: packed storage (:func:`rf.pack`, where the packed axis is still batch and
time) and gathered frames (:func:`rf.pack_padded`, where it is one other dim); results, gradients and dtypes.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Optional, Sequence, Tuple
import dataclasses
import pytest
import torch
import returnn.frontend as rf
from returnn.frontend import _packed_backend
from returnn.tensor import Dim, Tensor
from common import inside, native, seq_dim, setting, tensor, values
from property_cases import OPS, Layout, Op, run
from tolerances import assert_within_one_rounding, relative_error

LOW = (torch.bfloat16, torch.float16)
LENS = (5, 1, 0, 3)


@dataclasses.dataclass(frozen=True)
class Packed(Layout):
    """:param gap: frames between the sequences"""

    gap: int = 0

    def tensor(self, leaf: torch.Tensor, dims: Optional[Sequence[Dim]] = None, feature: bool = False) -> Tensor:
        """:return: packed over batch and time"""
        padded = super().tensor(leaf, dims, feature)
        batch, _, time, _ = dims or self.dims
        packed = rf.pack(padded, dims=(batch, time), gap=self.gap)
        assert rf.is_packed(packed)
        return packed


@pytest.fixture(autouse=True)
def fallbacks():
    """RETURNN may unpack where it has no packed implementation"""
    allow = getattr(_packed_backend, "set_allowed_fallbacks", lambda ops: None)  # not in all releases
    allow(True)
    yield
    allow(None)


@pytest.mark.parametrize("gap", [0, 2])
@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
@pytest.mark.parametrize("op", OPS, ids=str)
def test_packed_as_padded(op: Op, low: torch.dtype, gap: int):
    if op.name == "Normalize" and not native:
        pytest.skip("its scale is multiplied by RETURNN's own arithmetic, which rounds otherwise there")
    # RETURNN's own packed code for relative positions fails for an empty sequence: with 2 * 0 - 1 positions
    lens = LENS if "rel-pos" not in op.name else tuple(n for n in LENS if n)
    with setting("on"):
        padded = run(op, Layout(lens, low, beam=2), "on")
        packed = run(op, Packed(lens, low, beam=2, gap=gap), "on")
    names = ["output", *(f"gradient {i}" for i in range(len(padded.grads)))]
    for name, a, b in zip(names, (packed.out, *packed.grads), (padded.out, *padded.grads)):
        assert a.dtype == b.dtype, name
        assert b.any(), name
        if "rel-pos" in op.name and name == "gradient 3":
            # RETURNN takes one sequence after the other there: one rounding for each of the shared positions' gradients
            assert relative_error(a, b.double()) < len(lens) * torch.finfo(low).eps
            continue
        assert_within_one_rounding(a, b, name, noise=2e-5 if "ctc" in op.name else 3e-6)


FRAMES, LABEL_LENS = (9, 4, 1, 6), (3, 2, 0, 2)
batch, feat = Dim(len(FRAMES), name="batch"), Dim(8, name="feat")
time, labels = seq_dim("time", FRAMES, batch), seq_dim("labels", LABEL_LENS, batch)


def _ctc_kwargs() -> Dict[str, Any]:
    raw = torch.randint(0, 7, (len(FRAMES), max(LABEL_LENS)), generator=torch.Generator().manual_seed(1))
    targets = rf.convert_to_tensor(raw, dims=(batch, labels), sparse_dim=feat)
    return dict(targets=targets, input_spatial_dim=time, targets_spatial_dim=labels, blank_index=7)


@pytest.mark.parametrize("normalized", [False, True], ids=["logits", "log_probs"])
@pytest.mark.parametrize("kwargs", [{}, {"use_native_op": False}, {"max_approx": True}, {"label_loop": False}], ids=str)
@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
def test_ctc(low: torch.dtype, kwargs: Dict[str, Any], normalized: bool):
    results, raw = [], values(len(FRAMES), max(FRAMES), 8, seed=2, std=3.0)
    raw = (raw.log_softmax(-1) if normalized else raw).to(low)
    for packed in (False, True):
        leaf = raw.clone().requires_grad_()
        with setting("on"):
            logits = tensor(leaf, batch, time, feat, feature_dim=feat)
            logits = rf.pack(logits, dims=(batch, time)) if packed else logits
            loss = rf.ctc_loss(logits=logits, logits_normalized=normalized, **_ctc_kwargs(), **kwargs)
        assert loss.dtype == "float32"
        loss = loss.copy_compatible_to_dims_raw([batch])
        (loss * torch.tensor([1.0, -2.0, 0.5, 3.0])).sum().backward()
        results.append((loss.detach(), leaf.grad[inside(FRAMES)]))
    (padded, padded_grad), (packed, packed_grad) = results
    assert torch.isfinite(padded).all() and (padded != 0).all()
    assert torch.allclose(packed, padded, rtol=2e-6)
    if not normalized or kwargs:
        # else padded runs by torch's kernel, whose gradient of log-probs is that of logits
        assert_within_one_rounding(packed_grad, padded_grad, "gradient", noise=2e-5)


def _norm(make: Callable[[], rf.Module]) -> Callable[..., Tensor]:
    return lambda x, _: make()(x)


def _entropy(func: str, kind: str) -> Callable[..., Tensor]:
    module = {"rf": lambda: rf, "upcast": lambda: rf.upcast}[func]
    return lambda x, t: module().cross_entropy(estimated=x, target=t["sparse"], axis=feat, estimated_type=kind)


def _rope(x: Tensor, t: Dict[str, Tensor]) -> Tensor:
    return x._raw_backend.apply_rope(x, t["encoding"], feat)


def _linear_entropy(x: Tensor, t: Dict[str, Tensor]) -> Tensor:
    linear = rf.Linear(feat, feat)
    linear.weight.raw_tensor.data.copy_(values(8, 8, seed=5))
    return rf.upcast.linear_cross_entropy(linear, x, target=t["sparse"])


GATHERED: Dict[str, Callable[[Tensor, Dict[str, Tensor]], Tensor]] = {
    "LayerNorm": _norm(lambda: rf.LayerNorm(feat)),
    "RMSNorm": _norm(lambda: rf.RMSNorm(feat)),
    "GroupNorm": _norm(lambda: rf.GroupNorm(feat, num_groups=2)),
    "BatchNorm": _norm(lambda: rf.BatchNorm(feat, use_mask=True)),
    "normalize": lambda x, _: rf.normalize(x, axis=feat),
    "Normalize": lambda x, _: rf.Normalize(param_dims=feat)(x, axis=feat),
    "RoPE": _rope,
    "softmax": lambda x, _: rf.softmax(x, axis=feat),
    "log_softmax": lambda x, _: rf.log_softmax(x, axis=feat),
    "cross_entropy, logits": _entropy("rf", "logits"),
    "cross_entropy, log-probs": _entropy("rf", "log-probs"),
    "cross_entropy, probs": _entropy("rf", "probs"),
    "cross_entropy, dense": lambda x, t: rf.cross_entropy(
        estimated=x, target=t["dense"], axis=feat, estimated_type="logits"
    ),
    "rf.upcast.cross_entropy": _entropy("upcast", "logits"),
    "rf.upcast.log_softmax": lambda x, _: rf.upcast.log_softmax(x, axis=feat),
    "rf.upcast.reduce_logsumexp": lambda x, _: rf.upcast.reduce_logsumexp(x, axis=feat),
    "rf.upcast.linear_cross_entropy": _linear_entropy,
}


def _others(low: torch.dtype) -> Dict[str, Tensor]:
    sparse = torch.randint(0, 8, (len(FRAMES), max(FRAMES)), generator=torch.Generator().manual_seed(3))
    encoding = values(len(FRAMES), max(FRAMES), 8, seed=4).sin().to(low)
    return {
        "sparse": rf.convert_to_tensor(sparse, dims=(batch, time), sparse_dim=feat),
        "dense": tensor(values(*sparse.shape, 8, seed=6).softmax(-1).to(low), batch, time, feat),
        "encoding": tensor(encoding, batch, time, feat),
    }


@pytest.mark.parametrize("low", LOW, ids=["bf16", "f16"])
@pytest.mark.parametrize("name", GATHERED)
def test_gathered_frames_as_padded(name: str, low: torch.dtype):
    """their dim is not the batch and time of the padded ones, so the frames are compared"""

    def apply(gather: bool) -> Tuple[torch.Tensor, torch.Tensor]:
        raw = values(len(FRAMES), max(FRAMES), 8, seed=7, std=2.0, mean=1.0)
        leaf = (raw.softmax(-1) if "probs" in name else raw).to(low).requires_grad_()
        others, x, dims = _others(low), tensor(leaf, batch, time, feat), [batch, time]
        with setting("on", dtype=low), rf.upcast.scope({"softmax": True, "log_softmax": True}):
            if gather:
                x, packed = rf.pack_padded(x, dims=dims)
                others = {k: rf.pack_padded(v, dims=dims, out_dim=packed)[0] for k, v in others.items()}
                dims = [packed]
            out = GATHERED[name](x, others)
        out = out.copy_compatible_to_dims_raw([*dims, *([feat] if feat in out.dims else [])])
        out = out if gather else out[inside(FRAMES)]
        (grad,) = torch.autograd.grad(out, leaf, values(*out.shape, seed=8).to(low).to(out.dtype))
        return out.detach(), grad[inside(FRAMES)]

    for what, a, b in zip(("output", "gradient"), apply(True), apply(False)):
        # frames have no padding, and without masking stock's batch norm returns the dtype of its input
        assert (a.dtype == b.dtype or (name == "BatchNorm" and a.dtype == low)) and b.any()
        assert_within_one_rounding(a, b.to(a.dtype), what)
