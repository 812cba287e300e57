"""
Norms with the upcast on, on other layouts of the same numbers: order of dims, views, packed storage, a sequence alone,
and above the size from which the ops compile.
"""

from __future__ import annotations
import math
import pytest
import torch
import returnn.frontend as rf
from returnn.frontend import normalization
from returnn.frontend._packed_backend import is_packed
from returnn.tensor import Dim
from common import MODES, inside, seq_dim, setting, tensor, values
from norm_cases import CASES, LENS, Case, batch, example, feat, run_case, time, upstream_gradient
from returnn_upcast.ops import fuse, norm, rows_native
from tolerances import OUTPUT, assert_close, assert_within_one_rounding

CASE = {case.name: case for case in CASES}
BF16 = MODES["bf16"]
all_cases = pytest.mark.parametrize("case", CASES, ids=str)


def _reordered(case: Case, order: str):
    features = list(range(2, 2 + len(case.feats)))
    return {"FTB": [*features, 1, 0], "TFB": [1, *features, 0], "TBF": [1, 0, *features]}[order]


@pytest.mark.parametrize("order", ["FTB", "TFB", "TBF"])
@all_cases
def test_order_of_dims_and_views(case: Case, order: str):
    order = _reordered(case, order)
    expected = run_case(case, BF16, "on").numbers()
    x = example(case, BF16.low).permute(order)
    view = torch.empty([size + 1 for size in x.shape], dtype=x.dtype)[(slice(1, None),) * x.ndim].copy_(x)
    for raw in (x, x.contiguous(), view):
        found = run_case(case, BF16, "on", x=raw, dims=[case.dims[i] for i in order]).numbers()
        found["input gradient"] = found["input gradient"].permute([order.index(i) for i in range(x.ndim)])
        for name, value in expected.items():
            assert_within_one_rounding(found[name], value, name)


@pytest.mark.parametrize("gap", [0, 3])
@all_cases
def test_packed_as_padded(case: Case, gap: int):
    # Without masking, padded training counts the padding as frames. Packed storage has none.
    masked = CASE.get(case.name.replace("BatchNorm", "BatchNorm, masked"), case) if case.train else case
    mask = inside(LENS)
    upstream = upstream_gradient(case, BF16.low)
    upstream[~mask] = 0
    padded = run_case(masked, BF16, "on", upstream=upstream)

    def around(call, x):
        out = call(rf.pack(x, dims=(batch, time), gap=gap))
        assert is_packed(out)
        return rf.unpack(out)

    packed = run_case(case, BF16, "on", upstream=upstream, around=around)
    if masked is case:
        assert packed.out.dtype == padded.out.dtype and packed.out.feature_dim == padded.out.feature_dim
    else:  # RETURNN tracks the unbiased variance there, and the biased one with masking
        frames = example(case, BF16.low)[mask][:, None].double()
        stats = case.stats(frames, case.params(BF16.param_dtype))
        padded.buffers = {name: value.to(BF16.low) for name, value in stats.items()}
    for name, value in padded.numbers().items():
        part = mask if name in ("output", "input gradient") else ...
        other = packed.numbers()[name]
        narrow = min(value.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        assert_within_one_rounding(other[part].to(narrow), value[part].to(narrow), name)


ALONE = [c for c in CASES if c.op != "batch_norm" or "eval" in c.name]


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_one_sequence_alone_as_in_the_batch(case: Case):
    """What leaks from the padding or from other sequences makes a difference."""
    upstream = upstream_gradient(case, BF16.low)
    upstream[~inside(LENS)] = 0
    whole = run_case(case, BF16, "on", upstream=upstream)
    for index, length in enumerate(LENS):
        one = Dim(1, name="one")
        x = example(case, BF16.low)[index : index + 1, :length]
        for alone in (seq_dim("alone", [length], one), Dim(length, name="static")):
            single = run_case(
                case, BF16, "on", x=x, dims=[one, alone, *case.feats], upstream=upstream[index : index + 1, :length]
            )
            assert_within_one_rounding(single.raw[0], whole.raw[index, :length])
            assert_within_one_rounding(single.grad[0], whole.grad[index, :length])


def test_padding_in_two_dims():
    """A frame counts if it is inside of both; the numbers of each sequence alone."""
    lens, widths = (5, 3, 2, 4), (2, 4, 3, 1)
    height, width = seq_dim("height", lens, batch), seq_dim("width", widths, batch)
    x = values(4, 5, 4, 16, seed=1, mean=2.0).to(BF16.low)
    dims = [batch, height, width, feat]
    parts = [x[i, : lens[i], : widths[i]].double() for i in range(4)]
    frames = torch.cat([part.flatten(0, 1) for part in parts])
    with setting("on", BF16):
        rf.init_train_step_run_ctx(train_flag=True, step=0)
        calls = {
            "normalize": rf.normalize(tensor(x, *dims), axis=[height, width]),
            "GroupNormSpatial": rf.GroupNormSpatial(feat, num_groups=16)(tensor(x, *dims), spatial_dim=[width, height]),
            "BatchNorm": rf.BatchNorm(feat, use_mask=True, eps=1e-6)(tensor(x, *dims)),
        }
    for name, out in calls.items():
        for i, part in enumerate(parts):
            elements = frames if name == "BatchNorm" else part.flatten(0, 1)
            expected = (part - elements.mean(0)) / torch.sqrt(elements.var(0, unbiased=False) + 1e-6)
            found = out.copy_compatible_to_dims_raw(dims)[i, : lens[i], : widths[i]]
            assert_close(found, expected, OUTPUT, float32=1e-6, what=name)


@pytest.mark.parametrize("case", [c for c in CASES if "eval" not in c.name and "distributed" not in c.name], ids=str)
def test_backward_keeps_no_float32_copy(case: Case):
    wide = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != BF16.low and x.numel() >= example(case, BF16.low).numel():
            wide.append(x.shape)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        run_case(case, BF16, "on", options={"rf_module_output_keep_dtype": True})
        assert not wide
        if hasattr(normalization, "_moments_float32"):  # older releases have no float32 at all there
            run_case(case, BF16, "off")
            assert wide or case.op not in ("layer_norm", "group_norm", "normalize")


# One norm for each way in which the kernels differ.
COMPILED = ("LayerNorm", "RMSNorm", "GroupNormSpatial", "BatchNorm, masked")


def _large(case: Case):
    """:return: input of twice as many elements as it takes to compile, and its dims"""
    repeat = 2 * fuse.MIN_COMPILE_NUMEL // example(case, BF16.low).numel() + 1
    lens = [length * repeat for length in LENS]
    x = example(case, BF16.low)
    large = values(len(LENS), max(lens), *case.shape[2:], seed=4, mean=5.0, std=3.0).to(x.dtype)
    return large, [batch, seq_dim("long", lens, batch), *case.feats]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_as_plain(name: str, monkeypatch):
    case = CASE[name]
    x, dims = _large(case)
    assert x.numel() >= fuse.MIN_COMPILE_NUMEL
    upstream = values(*x.shape, seed=2).to(x.dtype)
    monkeypatch.setattr(rows_native, "MIN_NUMEL", math.inf)
    monkeypatch.setattr(norm, "_compiled_forward", fuse.compiled(norm._plain))
    monkeypatch.setattr(norm, "_compiled_backward", fuse.compiled(norm._plain_backward))
    monkeypatch.setattr(fuse, "_failed", lambda func, args, exc: pytest.fail(f"{func.__name__}: {exc}"))
    graphs = torch._dynamo.utils.counters["stats"]
    results = []
    for flag, expected in [("0", 0), ("1", 2)]:  # forward and backward
        monkeypatch.setenv("RETURNN_UPCAST_COMPILE", flag)
        before = graphs["unique_graphs"]
        results.append(run_case(case, BF16, "on", x=x, dims=dims, upstream=upstream).numbers())
        assert graphs["unique_graphs"] - before == expected
    for what, value in results[0].items():
        other = results[1][what]
        # compiled code sums the frames one after the other, torch.sum in pairs
        assert_within_one_rounding(other, value, what, noise=1e-5)
        assert value.dtype == torch.float32 or (other != value).double().mean() < 1e-3, (
            what
        )  # float32 noise decides few roundings only
