"""
Projection in float32, and with cross entropy in one, under what torch does with functions: second derivatives,
transforms, compilation, autocast.
"""

from __future__ import annotations
import functools
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from ops_loss_cases import BF16, DTYPES, F32, F64, gradients, make_operands, randn, sparse_target
from tolerances import assert_within_one_rounding, relative_error
from returnn_upcast.ops.linear_loss import linear_cross_entropy, linear_f32

TARGET = sparse_target(6, 4)
FUNCS = {
    "linear_f32": linear_f32,
    "cross entropy": functools.partial(linear_cross_entropy, target=TARGET),
    "smoothed": functools.partial(linear_cross_entropy, target=TARGET, label_smoothing=0.1),
    "float32 logits": functools.partial(linear_cross_entropy, target=TARGET, float32_logits=True),
}


@pytest.mark.parametrize("func", FUNCS)
def test_derivatives(func: str):
    operands = make_operands(4, 5, labels=6, dtypes=(F64, F64))
    assert torch.autograd.gradcheck(FUNCS[func], operands) and torch.autograd.gradgradcheck(FUNCS[func], operands)


@pytest.mark.parametrize("func", FUNCS)
def test_second_derivative_in_low_precision(func: str):
    results = []
    for fused in (True, False):
        operands = make_operands(4, 5, labels=6)
        call = FUNCS[func] if fused else _plain(func)
        grads = torch.autograd.grad(call(*operands).sin().sum(), operands, create_graph=True)
        penalty = sum((g.double() * randn(*g.shape, seed=i)).sum() for i, g in enumerate(grads))
        results.append([*(g.detach() for g in grads), *torch.autograd.grad(penalty, operands)])
    for value, plain in zip(*results):
        assert value.dtype == BF16
        assert relative_error(value, plain.double()) <= 4 * 2**-9  # rounded a few times on the way, each by half a step


def _plain(func: str):
    """:return: the function as torch.func sees it: plain code"""
    return lambda *operands: torch.func.vmap(lambda x: FUNCS[func](x, *operands[1:]))(operands[0][None])[0]


def _compile(func, operands):
    torch._dynamo.reset()  # torch 2.6 takes partials of one function for one another
    return torch.compile(func, fullgraph=True, backend="aot_eager")(*operands)


TRANSFORMS = {
    "vmap": lambda func, operands: torch.func.vmap(lambda x: func(x, *operands[1:]))(operands[0][None])[0],
    "make_fx": lambda func, operands: make_fx(func)(*operands)(*operands),
    "torch.compile": _compile,
    "jvp": lambda func, operands: torch.func.jvp(func, operands, operands)[0],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("func", FUNCS)
def test_transforms(func: str, transform: str):
    operands = tuple(v.detach() for v in make_operands(4, 5, labels=6))
    assert_within_one_rounding(TRANSFORMS[transform](FUNCS[func], operands), FUNCS[func](*operands))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("func", FUNCS)
def test_functional_gradient(func: str, dtypes):
    operands = make_operands(4, 5, labels=6, dtypes=dtypes)
    plain = tuple(v.detach() for v in operands)
    found = torch.func.grad(lambda *args: FUNCS[func](*args).sum(), argnums=(0, 1, 2))(*plain)
    for value, expected in zip(found, gradients(FUNCS[func](*operands).sum(), operands, torch.ones(()))):
        assert_within_one_rounding(value, expected)


@pytest.mark.parametrize("func", FUNCS)
def test_autocast_changes_nothing(func: str):
    results = []
    for autocast in (False, True):
        operands = make_operands(4, 5, labels=6, dtypes=(BF16, F32))
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            out = FUNCS[func](*operands)
            results.append([out.detach(), *torch.autograd.grad(out.sum(), operands)])
    assert all(torch.equal(a, b) for a, b in zip(*results))


@pytest.mark.parametrize("func", FUNCS)
def test_without_a_compiler(func: str, monkeypatch):
    results = []
    for compile_ in ("1", "0"):
        monkeypatch.setenv("RETURNN_UPCAST_COMPILE", compile_)
        operands = make_operands(50, 8, labels=1000)
        call = FUNCS[func]
        if func != "linear_f32":
            call = functools.partial(call.func, **{**call.keywords, "target": sparse_target(1000, 50)})
        out = call(*operands)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), operands)])
    for a, b in zip(*results):
        assert_within_one_rounding(a, b)
