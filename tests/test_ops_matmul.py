"""
Products of low-precision matrices in float32, on raw tensors, against float64.
"""

from __future__ import annotations
import pytest
import torch
from ops_loss_cases import BF16, F16, F32, F64, randn
from tolerances import PARAM_GRAD_FLOAT32, assert_close, relative_error
from returnn_upcast.ops import matmul


@pytest.mark.parametrize("onednn", (True, False))
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (F32, BF16), (F16, F32), (F32, F32), (F64, BF16)], ids=str)
def test_matmul_wide(dtypes, onednn: bool, monkeypatch):
    if onednn and not matmul._ONEDNN:
        pytest.skip("this torch has no oneDNN, or its private op is gone")
    monkeypatch.setattr(matmul, "_ONEDNN", onednn)
    monkeypatch.setattr(matmul, "_MIN_ONEDNN_PRODUCTS", 1)
    a, b = randn(30, 50, seed=1).to(dtypes[0]), randn(50, 70, seed=2).to(dtypes[1])
    for left, right in [(a, b), (a.T.contiguous().T, b), (a[:, 3:], b[3:]), (a[::2], b[:, 4:60]), (a[:1], b[:, :1])]:
        out = matmul.matmul_wide(left, right)
        assert out.dtype == (F64 if F64 in dtypes else F32)
        assert_close(out, left.double() @ right.double(), 1.02)
    assert matmul.matmul_wide(a[:0], b).shape == (0, 70)
    assert (matmul.matmul_wide(a[:, :0], b[:0]) == 0).all()


@pytest.mark.parametrize("scale", (1e-9, 1.0, 1e6))
@pytest.mark.parametrize("low", (BF16, F16))
def test_split_product(low: torch.dtype, scale: float):
    """What CUDA runs, with a product of this device in place of that one's: float32 times low precision, to 16 bits."""
    wide, narrow = (randn(30, 50, seed=1) * scale).float(), randn(50, 20, seed=2).to(low)

    def mm(a, b):
        assert a.dtype == b.dtype == low and torch.isfinite(a).all()
        return a.float() @ b.float()

    ref = wide.double() @ narrow.double()
    assert relative_error(matmul.split_matmul(wide, narrow, mm), ref) <= PARAM_GRAD_FLOAT32
    assert relative_error(matmul.split_matmul(narrow.T, wide.T, mm), ref.T) <= PARAM_GRAD_FLOAT32
    other = narrow.to(F16 if low == BF16 else BF16)
    assert_close(matmul.split_matmul(other.T, narrow, mm), other.double().T @ narrow.double(), 1, float32=1e-5)
    assert (matmul.split_matmul(wide * 0, narrow, mm) == 0).all()
