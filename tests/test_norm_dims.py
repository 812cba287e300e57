"""
Norms with dims that are not those of the input: the errors of stock RETURNN, and parameters that add a dim.
"""

from __future__ import annotations
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from common import needs_native, setting, tensor, values
from tolerances import OUTPUT, assert_close

batch, feat, other, speakers = Dim(4, name="batch"), Dim(8, name="feat"), Dim(6, name="other"), Dim(3, name="speakers")

WITHOUT_THE_DIM = {
    "LayerNorm": lambda x: rf.LayerNorm(other)(x),
    "RMSNorm": lambda x: rf.RMSNorm(other)(x),
    "GroupNorm": lambda x: rf.GroupNorm(other, num_groups=2)(x),
    "BatchNorm": lambda x: rf.BatchNorm(other, use_mask=False)(x),
    "BatchNorm, masked": lambda x: rf.BatchNorm(other, use_mask=True)(x),
    "normalize": lambda x: rf.normalize(x, axis=other),
}


@pytest.mark.parametrize("op", WITHOUT_THE_DIM)
def test_error_of_stock_for_a_dim_that_is_not_in_the_tensor(op: str):
    errors = {}
    for name in ("stock", "on"):
        with setting(name), pytest.raises(Exception) as info:
            WITHOUT_THE_DIM[op](tensor(values(4, 8, seed=0).bfloat16(), batch, feat, feature_dim=feat))
        message = str(info.value).replace(", dtype='bfloat16'", "")  # it is the float32 copy that lacks the dim
        errors[name] = type(info.value), message
    assert errors["on"] == errors["stock"]


@needs_native
@pytest.mark.parametrize("cls", [rf.LayerNorm, rf.RMSNorm])
def test_scale_with_a_dim_that_the_input_lacks(cls):
    """one scale per speaker, say: the result has that dim too"""
    outs, raw = {}, values(4, 8, seed=0, mean=3.0).bfloat16()
    for name, dtype in [("stock", torch.bfloat16), ("on", torch.bfloat16), ("float64", torch.float64)]:
        with setting("stock" if name == "float64" else name, dtype=dtype):
            module = cls(feat)
            module.scale = tensor(values(3, 8, seed=1).bfloat16().to(dtype), speakers, feat)
            outs[name] = module(tensor(raw.to(dtype), batch, feat, feature_dim=feat))
    assert outs["on"].dims == outs["stock"].dims and outs["on"].dtype == outs["stock"].dtype
    assert_close(outs["on"].raw_tensor, outs["float64"].raw_tensor.detach(), OUTPUT)
