"""
The losses on raw tensors under what torch does with functions: second derivatives, transforms, compilation, autocast.
"""

from __future__ import annotations
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
import tolerances
from ops_loss_cases import as_leaf, make_target, randn, random_labels
from tolerances import assert_close, assert_within_one_rounding, relative_error
from returnn_upcast.ops import loss

LABELS, DENSE = random_labels(5, 4, 3), make_target("dense", (4, 3, 5), 2, torch.bfloat16)
# of logits [4, 3, 5]
OPS = {
    "sparse": lambda x: loss.cross_entropy(x, LABELS, axis=2),
    "dense": lambda x: loss.cross_entropy(x, DENSE.to(x.dtype), axis=2),
    "nll sparse": lambda x: loss.nll_from_log_probs(x, LABELS, axis=2),
    "nll dense": lambda x: loss.nll_from_log_probs(x, DENSE.to(x.dtype), axis=2),
    "log_softmax": lambda x: loss.log_softmax(x, axis=2),
    "ctc": lambda x: loss.ctc_log_probs(x),
}
NONLINEAR = ("sparse", "dense", "log_softmax", "ctc")
X = (randn(4, 3, 5) * 2).bfloat16()


@pytest.mark.parametrize("op", OPS)
def test_derivatives(op: str):
    x = X.double().requires_grad_()
    assert torch.autograd.gradcheck(OPS[op], (x,)) and torch.autograd.gradgradcheck(OPS[op], (x,))


@pytest.mark.parametrize("op", NONLINEAR)
def test_second_derivative_in_low_precision(op: str):
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        x = as_leaf(X, dtype)
        (grad,) = torch.autograd.grad(OPS[op](x).sin().sum(), x, create_graph=True)
        assert grad.requires_grad
        results.append((grad.detach(), *torch.autograd.grad((grad.double() * randn(4, 3, 5, seed=7)).sum(), x)))
    for value, exact in zip(*results):
        assert value.dtype == torch.bfloat16
        assert relative_error(value, exact) <= 4 * tolerances.floor(exact, torch.bfloat16)  # rounded on the way, too


def test_second_derivative_of_a_dense_target():
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        x, target = as_leaf(X, dtype), as_leaf(DENSE, dtype)
        out = loss.cross_entropy(x, target, axis=2).sin().sum()
        grads = torch.autograd.grad(out, (x, target), create_graph=True)
        penalty = sum((g.double() * randn(4, 3, 5, seed=i)).sum() for i, g in enumerate(grads))
        results.append(torch.autograd.grad(penalty, (x, target)))
    for value, exact in zip(*results):
        assert relative_error(value, exact) <= 3 * tolerances.floor(exact, torch.bfloat16)


TRANSFORMS = {
    "vmap": lambda func, x: torch.func.vmap(func)(x[None])[0],
    "jvp": lambda func, x: torch.func.jvp(func, (x,), (x,))[0],
    "make_fx": lambda func, x: make_fx(func)(x)(x),
    "torch.compile": lambda func, x: torch.compile(func, fullgraph=True, backend="aot_eager")(x),
    "checkpoint": lambda func, x: torch.utils.checkpoint.checkpoint(func, x, use_reentrant=False),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("op", OPS)
def test_transforms(op: str, transform: str):
    assert_within_one_rounding(TRANSFORMS[transform](OPS[op], X), OPS[op](X))


@pytest.mark.parametrize("op", OPS)
def test_forward_mode(op: str):
    exact = torch.func.jvp(OPS[op], (X.double(),), (X.double(),))[1]
    assert_close(torch.func.jvp(OPS[op], (X,), (X,))[1], exact, 1.05, float32=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_functional_gradient(op: str):
    x = as_leaf(X, torch.bfloat16)
    found = torch.func.grad(lambda x_: OPS[op](x_).sum())(X)
    assert found.dtype == torch.bfloat16
    assert_within_one_rounding(found, torch.autograd.grad(OPS[op](x).sum(), x)[0])


@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_nothing(op: str):
    plain, under = [as_leaf(X, torch.bfloat16) for _ in range(2)]
    out = OPS[op](plain)
    out.sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out_under = OPS[op](under)
        out_under.sum().backward()
        assert torch.equal(OPS[op](X.float()), OPS[op](X.float()))
    assert torch.equal(out, out_under) and torch.equal(plain.grad, under.grad)
