"""
What the losses on raw tensors keep and make: tensors saved for backward, blocks of rows, compiled kernels.
"""

from __future__ import annotations
from typing import Optional
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from ops_loss_cases import as_leaf, make_target, randn, random_labels
from tolerances import assert_within_one_rounding
from returnn_upcast.ops import fuse, loss, loss_rows


def _saved_bytes(func, *own: torch.Tensor) -> int:
    known = {x.untyped_storage().data_ptr() for x in own}
    saved = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in known:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = func()
    del out
    return sum(saved.values())


@pytest.mark.parametrize("compile_", ("1", "0"))
def test_what_is_kept_for_backward(compile_: str, monkeypatch):
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", compile_)
    x, labels = as_leaf(randn(4, 50, 300), torch.bfloat16), random_labels(300, 4, 50)
    dense = make_target("dense", x.shape, 2, torch.bfloat16)
    per_row = 200 * 4
    assert _saved_bytes(lambda: loss.cross_entropy(x, labels, axis=2), x, labels) <= 2 * per_row
    assert _saved_bytes(lambda: loss.cross_entropy(x, dense, axis=2), x, dense) <= 3 * per_row
    assert _saved_bytes(lambda: loss.nll_from_log_probs(x, dense, axis=2), x, dense) <= per_row
    assert _saved_bytes(lambda: loss.log_softmax(x, axis=2), x) == x.numel() * 4
    out = loss.ctc_log_probs(x)
    assert (
        _saved_bytes(lambda: F.ctc_loss(loss.ctc_log_probs(x), labels[:2, :50].T, [4] * 50, [2] * 50), x)
        < 4.2 * x.numel()
    )
    assert out.grad_fn.saved_tensors[0].data_ptr() == out.data_ptr()


def _all_numbers(shape, axis: int, dtype=torch.bfloat16):
    """:return: results and gradients of all that runs kernels on rows"""
    x = as_leaf(randn(*shape) * 4, dtype)
    target = make_target("dense", shape, axis, dtype).requires_grad_()
    results = []
    for op in (
        lambda: loss.cross_entropy(x, make_target("sparse", shape, axis, dtype), axis=axis),
        lambda: loss.cross_entropy(x, target, axis=axis),
        lambda: loss.nll_from_log_probs(x, target, axis=axis),
        lambda: loss.log_softmax(x, axis=axis),
        lambda: loss.ctc_log_probs(x) if x.ndim == 3 else x.float(),
        lambda: loss.ctc_log_probs(x.transpose(0, 1)) if x.ndim == 3 else x.float(),
    ):
        out = op()
        grads = torch.autograd.grad(out, (x, target), torch.full_like(out, 0.3), allow_unused=True)
        results += [out.detach(), *(g for g in grads if g is not None)]
    return results


@pytest.mark.parametrize("shape, axis", [((40, 70), 1), ((40, 7, 30), 2), ((3, 31, 40), 1), ((31, 40), 0)], ids=str)
def test_blocks_of_rows(shape, axis: int, monkeypatch):
    """Without a compiler, rows are done in blocks, with the same numbers."""
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    whole = _all_numbers(shape, axis)
    monkeypatch.setattr(loss_rows, "_BLOCK_NUMEL", 500)
    for in_blocks, value in zip(_all_numbers(shape, axis), whole):
        assert_within_one_rounding(in_blocks, value)


class _Largest(TorchDispatchMode):
    """Number of elements of the largest float32 tensor that is made."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs: Optional[dict] = None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
                self.numel = max(self.numel, x.numel())
        return out


def test_blocks_need_little_memory(monkeypatch):
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    monkeypatch.setattr(loss_rows, "_BLOCK_NUMEL", 1000)
    rows = randn(100, 90).bfloat16()
    with _Largest() as largest:
        peak, log_sum = loss_rows.row_stats(rows)
        loss_rows.softmax_times(rows, peak, log_sum, torch.ones(100), torch.bfloat16)
    assert 0 < largest.numel <= 1000


@pytest.mark.parametrize("shape, axis", [((60, 700), 1), ((4, 700, 20), 1), ((30, 8, 200), 2)], ids=str)
def test_compiled_is_the_same(shape, axis: int, monkeypatch):
    compiled = _all_numbers(shape, axis)
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    for value, plain in zip(compiled, _all_numbers(shape, axis)):
        assert_within_one_rounding(value, plain)


def test_number_of_compilations_is_bounded(monkeypatch):
    """Over 60 lengths, with and without gradient."""
    monkeypatch.setattr(fuse, "_failed", lambda func, args, exc: pytest.fail(f"{func.__name__}: {exc}"))
    counters = torch._dynamo.utils.counters
    before = counters["stats"]["unique_graphs"]
    for length in range(70, 130):
        x = as_leaf(randn(3, length, 200), torch.bfloat16)
        out = loss.cross_entropy(x if length % 5 else x.detach(), random_labels(200, 3, length), axis=2)
        if length % 5:
            out.mean().backward()
    assert counters["stats"]["unique_graphs"] - before <= 4
