"""
Norms with the upcast on, against float64: output, input gradient, gradients of the parameters, running statistics.
"""

from __future__ import annotations
from typing import Optional
import contextlib
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from common import MODES, Mode, seq_dim, setting, static_traceable, tensor, traced, values
from norm_cases import CASES, Case, batch, example, feat, reference, run_case, split
import tolerances
from tolerances import assert_within_one_rounding, relative_error

pytestmark = pytest.mark.usefixtures("rows_path")

CASE = {case.name: case for case in CASES}
all_cases = pytest.mark.parametrize("case", CASES, ids=str)
all_modes = pytest.mark.parametrize("mode_name", MODES)
low_dtypes = pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
# what begins with: (factor of the floor, relative error for float32)
LIMITS = {
    "output": (tolerances.OUTPUT, tolerances.FLOAT32),
    "running": (tolerances.OUTPUT, tolerances.FLOAT32),
    "input": (tolerances.INPUT_GRAD, tolerances.FLOAT32),
    "": (tolerances.PARAM_GRAD, tolerances.PARAM_GRAD_FLOAT32),
}


def too_far(case: Case, mode: Mode, name: str, *, condition: float = 1.0, **kwargs):
    """
    :param name: see :data:`common.SETTINGS`
    :param condition: of the problem: that much more is allowed for float32 results
    :param kwargs: for :func:`run_case`
    :return: what is not within its tolerance
    """
    x = kwargs.pop("x", None)
    x = example(case, mode.low) if x is None else x
    got = split(run_case(case, mode, name, x=x, **kwargs).numbers())
    expected = split(reference(case, mode, x))
    assert set(got) == set(expected)
    result = {}
    for what, value in got.items():
        factor, float32 = next(limit for word, limit in LIMITS.items() if what.startswith(word))
        error = relative_error(value, expected[what])
        limit = tolerances.tolerance(expected[what], value.dtype, factor, float32=float32 * condition)
        if error > limit:
            result[what] = f"{error:.3e} > {limit:.3e}"
    return result


@all_modes
@all_cases
def test_against_float64(case: Case, mode_name: str):
    assert not too_far(case, MODES[mode_name], "on")
    if mode_name in case.stock_fails:
        assert too_far(case, MODES[mode_name], "off")


@all_modes
@all_cases
def test_plain_code_against_float64(case: Case, mode_name: str):
    """What runs inside of another trace, where RETURNN compiles or captures a whole step."""
    with traced():
        assert not too_far(case, MODES[mode_name], "on")


@all_cases
def test_float32_parameters_without_autocast(case: Case):
    assert not too_far(case, Mode(torch.bfloat16, params=torch.float32), "on")


@all_cases
def test_same_numbers_with_and_without_autocast_and_in_all_behavior_versions(case: Case):
    plain = Mode(torch.bfloat16, params=torch.float32)
    expected = run_case(case, plain, "on").numbers()
    for mode in (plain, MODES["amp-bf16"]):
        for version in (24, 30, 38):
            found = run_case(case, mode, "on", version=version).numbers()
            for name, value in expected.items():
                # the dtype may be wider: it is that of stock RETURNN in this behavior version
                narrow = min(value.dtype, found[name].dtype, key=lambda dtype: dtype.itemsize)
                assert_within_one_rounding(found[name].to(narrow), value.to(narrow), f"{name}, {version}, {mode}")


@low_dtypes
@pytest.mark.parametrize(
    "name", ["LayerNorm", "GroupNorm", "BatchNorm, masked", "BatchNorm", "normalize, features", "normalize, time"]
)
def test_mean_of_100_standard_deviations(name: str, low: torch.dtype):
    case = CASE[name]
    x = values(*case.shape, seed=5, mean=100.0).to(low)
    assert not too_far(case, Mode(low), "on", x=x, condition=100)
    assert too_far(case, Mode(low), "off", x=x, condition=100)


def test_rms_norm_of_300():
    features = Dim(64, name="features")
    right = torch.ones(64, dtype=torch.float64)
    right[1::2] = -1
    for mode_name, name, expected in [
        ("bf16", "off", 0.99609375),
        ("f16", "off", 0.0),
        ("bf16", "on", 1),
        ("f16", "on", 1),
    ]:
        mode = MODES[mode_name]
        with setting(name, mode):
            out = rf.RMSNorm(features)(tensor((right * 300).to(mode.low), features)).raw_tensor
        assert out.dtype == mode.low
        assert torch.equal(out.double(), right * expected), (mode_name, name)


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm", "RMSNorm, bias", "GroupNorm", "normalize, features"])
def test_squares_that_underflow_or_overflow_in_f16(name: str):
    case, mode = CASE[name], MODES["f16"]
    for std in (1e-4, 300.0):
        x = example(case, mode.low, mean=0.0, std=std)
        assert not too_far(case, mode, "on", x=x)
        assert too_far(case, mode, "off", x=x)


@low_dtypes
def test_running_statistics_over_many_steps(low: torch.dtype):
    """Buffers of low precision take one rounding per step, whatever the momentum."""
    features, frames = Dim(8, name="features"), Dim(50, name="frames")
    rf.init_train_step_run_ctx(train_flag=True, step=0)
    with setting("on", Mode(low)):
        module = rf.BatchNorm(features, use_mask=False, momentum=0.1)
        buffers = [module.running_mean.raw_tensor, module.running_variance.raw_tensor]
        for step in range(5):
            x = values(50, 8, seed=step, mean=2.0, std=1.5).to(low)
            new = [x.double().mean(0), x.double().var(0)]
            expected = [(0.9 * b.double() + 0.1 * n).to(low) for b, n in zip(buffers, new)]
            module(tensor(x, frames, features))
            for buffer, value in zip(buffers, expected):
                assert buffer.dtype == low
                assert_within_one_rounding(buffer, value)


@pytest.mark.parametrize("capacity", [None, 11])
@all_modes
def test_batch_norm_without_any_valid_frame(mode_name: str, capacity: Optional[int]):
    case, mode = CASE["BatchNorm, masked"], MODES[mode_name]
    empty = seq_dim("empty", [0, 0, 0, 0], batch)
    empty.capacity = capacity
    x = example(case, mode.low)[:, : capacity or 0]
    before = case.params(mode.param_dtype)
    if capacity and not static_traceable:
        pytest.skip("needs static tracing")
    with static_traceable() if capacity else contextlib.nullcontext():
        result = run_case(case, mode, "on", x=x, dims=[batch, empty, feat], upstream=torch.ones_like(x))
    assert result.raw.shape == x.shape
    for name, value in result.numbers().items():
        assert torch.isfinite(value).all(), name
        if name.startswith("running"):
            assert torch.equal(value.double(), before[name]), name


def test_train_flag_of_batch_norm_alone():
    """The flag can be set for ``rf.BatchNorm.__call__``, which is a patched attribute."""
    features, frames = Dim(8, name="features"), Dim(50, name="frames")
    x = tensor(values(50, 8, seed=0).bfloat16(), frames, features)
    for use_mask in (False, True):
        rf.init_train_step_run_ctx(train_flag=True, step=0)
        with setting("on", MODES["bf16"]):
            module = rf.BatchNorm(features, use_mask=use_mask)
            with rf.get_run_ctx().train_flag_ctx(False, func=rf.BatchNorm.__call__):
                module(x)
            assert not module.running_mean.raw_tensor.any()
            module(x)
            assert module.running_mean.raw_tensor.any()
