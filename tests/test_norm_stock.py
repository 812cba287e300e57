"""
Norms beside stock RETURNN: the same dtypes and dims always, the same bits wherever the upcast has nothing to do.
"""

from __future__ import annotations
import itertools
import pytest
import torch
from common import Mode, needs_native, setting
from norm_cases import CASES, Case, example, run_case

all_cases = pytest.mark.parametrize("case", CASES, ids=str)
# behavior version, rf_module_output_keep_dtype
VERSIONS = ((24, None), (30, None), (38, None), (24, True), (38, False))
LOW = (torch.bfloat16, torch.float16)


def assert_same_bits(case: Case, mode: Mode, name: str, **kwargs):
    expected = run_case(case, mode, "stock", **kwargs)
    found = run_case(case, mode, name, **kwargs)
    assert found.out.dims == expected.out.dims and found.out.feature_dim == expected.out.feature_dim
    assert found.numbers().keys() == expected.numbers().keys()
    for what, value in expected.numbers().items():
        other = found.numbers()[what]
        assert other.dtype == value.dtype and torch.equal(other.nan_to_num(7), value.nan_to_num(7)), what


@needs_native
@all_cases
def test_dtype_and_dims_of_stock(case: Case):
    for low, params, amp in itertools.product(LOW, (None, torch.float32), (False, True)):
        mode = Mode(low, amp=amp, params=params or low)
        for version, keep in VERSIONS if low == torch.bfloat16 else VERSIONS[-1:]:
            options = {"rf_module_output_keep_dtype": keep}
            stock, upcast = (
                run_case(case, mode, name, version=version, options=options, backward=False).out
                for name in ("stock", "on")
            )
            what = (mode, version, keep)
            assert upcast.dtype == stock.dtype and upcast.raw_tensor.dtype == stock.raw_tensor.dtype, what
            assert upcast.dims == stock.dims and upcast.feature_dim == stock.feature_dim, what


@needs_native
@all_cases
def test_dims_of_stock_in_any_order(case: Case):
    mode = Mode(torch.bfloat16)
    x = example(case, mode.low)
    for order in itertools.permutations(range(x.ndim)) if x.ndim == 3 else [(1, 0, 2, 3), (3, 1, 2, 0)]:
        dims = [case.dims[i] for i in order]
        stock, upcast = (
            run_case(case, mode, name, x=x.permute(order), dims=dims, backward=False).out for name in ("stock", "on")
        )
        assert upcast.dims == stock.dims and upcast.feature_dim == stock.feature_dim
        assert upcast.raw_tensor.shape == stock.raw_tensor.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@all_cases
def test_wide_inputs_are_stock_bit_for_bit(case: Case, dtype: torch.dtype):
    for version in (24, 38):
        assert_same_bits(case, Mode(dtype), "on", version=version)


@all_cases
def test_policy_off_is_stock_bit_for_bit(case: Case):
    for version in (24, 38):
        assert_same_bits(case, Mode(torch.bfloat16), "off", version=version)
        assert_same_bits(case, Mode(torch.bfloat16, amp=True), "off", version=version)
    assert_same_bits(case, Mode(torch.float16), "off")


@all_cases
def test_other_ops_leave_a_norm_alone(case: Case):
    """Each norm follows its own key."""
    from returnn_upcast import OPS, scope

    mode = Mode(torch.float16)
    stock, on = (run_case(case, mode, name).numbers() for name in ("stock", "on"))
    for policy, expected in [({case.op: False}, stock), ({op: op == case.op for op in OPS}, on)]:
        around = lambda call, x, policy=policy: _in_scope(scope(policy), call, x)
        found = run_case(case, mode, "on", around=around).numbers()
        assert all(torch.equal(found[what].nan_to_num(7), value.nan_to_num(7)) for what, value in expected.items())


def _in_scope(scope, call, x):
    with scope:
        return call(x)


def test_default_is_off_below_behavior_version_39():
    case, mode = CASES[3], Mode(torch.float16)
    with setting("stock", mode):
        pass
    stock, on = (run_case(case, mode, name).raw for name in ("stock", "on"))
    assert not torch.equal(stock, on)
    for version, expected in [(38, stock), (39, on)]:
        assert torch.equal(run_case(case, mode, "off", version=version, options={"rf_upcast": None}).raw, expected)
