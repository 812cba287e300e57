"""
When a fused op may run, what it does under transforms and second derivatives, and what becomes of a failing compiler.
"""

from __future__ import annotations
import contextlib
import logging
import math
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
import returnn.frontend as rf
from returnn.config import Config, global_config_ctx
from returnn.tensor import Dim
from common import MODES, seq_dim, setting, static_traceable, tensor, values
from returnn_upcast.ops import fuse, norm, rope, rows_native
from returnn_upcast.ops.fuse import may_fuse
import tolerances
from tolerances import assert_within_one_rounding, relative_error


def _norm(x, scale, bias, *, mask=None, axes=(1,), center=True):
    return norm.normalize(x, axes=axes, scale=scale, bias=bias, mask=mask, eps=1e-3, center=center)[0]


def _inputs(dtype=torch.float64, num: int = 3):
    x, scale, bias = values(num, 5, seed=1), values(1, 5, seed=2).abs() + 0.5, values(1, 5, seed=3)
    return tuple(v.to(dtype).requires_grad_() for v in (x, scale, bias))


class _Subclass(torch.Tensor):
    pass


def _asked(run) -> bool:
    """:return: what may_fuse says inside of ``run``, which gets a function to call"""
    got = []

    def func(x):
        got.append(may_fuse(x))
        return x * 2

    run(func)
    assert len(set(got)) == 1, got
    return got[0]


X = torch.ones(3)


def _forward_ad(func):
    with torch.autograd.forward_ad.dual_level():
        func(torch.autograd.forward_ad.make_dual(X, X))


def _fake(func):
    with torch._subclasses.FakeTensorMode():
        func(torch.ones(3))


def _static_traceable(func):
    from returnn_upcast.hooks import common  # noqa: F401, tells fuse of RETURNN's tracing

    with static_traceable():
        func(X)


TRACERS = {
    "make_fx": lambda func: make_fx(func)(X),
    "jit.trace": lambda func: torch.jit.trace(func, X, check_trace=False),
    "grad": lambda func: torch.func.grad(lambda x: func(x).sum())(X),
    "vjp": lambda func: torch.func.vjp(func, X),
    "jvp": lambda func: torch.func.jvp(func, (X,), (X,)),
    "vmap": lambda func: torch.func.vmap(func)(X),
    "forward AD": _forward_ad,
    "fake tensors": _fake,
    **({"static traceable": _static_traceable} if static_traceable else {}),
    "subclass": lambda func: func(X.as_subclass(_Subclass)),
}


@pytest.mark.parametrize("tracer", TRACERS)
def test_no_fusing_under_a_trace(tracer: str):
    assert not _asked(TRACERS[tracer])
    assert may_fuse(X) and may_fuse(None, torch.nn.Parameter(X))  # and that is over afterwards


def test_no_fusing_inside_torch_compile():
    @torch.compile(fullgraph=True, backend="eager")
    def func(x):
        return x * (2 if may_fuse(x) else 3)

    assert torch.equal(func(X), X * 3)


def test_fusing_in_plain_contexts():
    assert _asked(lambda func: func(X))
    with torch.no_grad():
        assert _asked(lambda func: func(X))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert _asked(lambda func: func(X))
    assert _asked(lambda func: torch.utils.checkpoint.checkpoint(func, X.clone().requires_grad_(), use_reentrant=False))


MASK = torch.tensor([[True], [False], [True]])
NORMS = {
    "layer": {},
    "RMS": {"center": False},
    "batch": {"axes": (0,)},
    "batch, masked": {"axes": (0,), "mask": MASK},
    "all, masked": {"axes": (0, 1), "mask": MASK},
}


@pytest.mark.parametrize("kind", NORMS)
def test_first_and_second_derivative(kind: str):
    func = lambda *args: _norm(*args, **NORMS[kind])
    assert torch.autograd.gradcheck(func, _inputs())
    assert torch.autograd.gradgradcheck(func, _inputs())


def test_first_and_second_derivative_of_the_rotation():
    x, pos = values(3, 6, seed=1).requires_grad_(), values(3, 6, seed=2)
    func = lambda x_: rope.apply_rope(x_, pos, out_dtype=torch.float64)
    assert torch.autograd.gradcheck(func, (x,)) and torch.autograd.gradgradcheck(func, (x,))


@pytest.mark.parametrize("kind", NORMS)
def test_second_derivative_in_low_precision(kind: str, monkeypatch):
    """A penalty of gradients: those of the fused op as close to float64 as those of the plain code."""
    results = []
    for dtype, fused in [(torch.bfloat16, True), (torch.bfloat16, False), (torch.float64, False)]:
        monkeypatch.setattr(norm, "may_fuse", may_fuse if fused else lambda *_: False)
        inputs = [v.to(dtype).requires_grad_() for v in _inputs(torch.bfloat16)]
        out = _norm(*inputs, **NORMS[kind])
        upstream = values(3, 5, seed=4).bfloat16().to(dtype)
        grads = torch.autograd.grad(out, inputs, upstream, create_graph=True)
        penalty = sum(grad.double().square().sum() for grad in grads)
        results.append([*grads, *torch.autograd.grad(penalty, inputs[:2])])  # the gradients don't depend on the bias
    for fused, plain, exact in zip(*(map(torch.detach, result) for result in results)):
        assert fused.dtype == torch.bfloat16
        assert_within_one_rounding(fused, plain)
        # the gradients that the penalty takes are rounded already
        assert relative_error(fused, exact) <= 4 * tolerances.floor(exact, torch.bfloat16)


def test_functional_transforms():
    inputs = tuple(v.detach() for v in _inputs())
    tangents = tuple(values(*v.shape, seed=7 + i) for i, v in enumerate(inputs))
    leaves = [v.clone().requires_grad_() for v in inputs]
    expected = torch.autograd.grad(_norm(*leaves).sin().sum(), leaves)
    for found, value in zip(torch.func.grad(lambda *a: _norm(*a).sin().sum(), argnums=(0, 1, 2))(*inputs), expected):
        assert torch.allclose(found, value)
    _, jvp = torch.func.jvp(_norm, inputs, tangents)
    jacobian = torch.autograd.functional.jvp(_norm, inputs, tangents)[1]
    assert torch.allclose(jvp, jacobian)
    batched = torch.func.vmap(lambda x: _norm(x[None], *inputs[1:])[0])(inputs[0])
    assert torch.allclose(batched, _norm(*inputs))


def test_inside_torch_compile_and_make_fx():
    inputs = tuple(v.detach() for v in _inputs(torch.bfloat16))
    expected = _norm(*inputs)
    whole = torch.compile(_norm, fullgraph=True, backend="aot_eager")
    assert torch.equal(whole(*inputs), expected)
    graph = make_fx(lambda x, scale, bias: _norm(x, scale, bias))(*inputs)
    assert torch.equal(graph(*inputs), expected)
    assert all(n.target.__module__.startswith("torch._ops") for n in graph.graph.nodes if n.op == "call_function")


def test_hooked_module_inside_torch_compile_and_make_fx():
    """RETURNN traces with make_fx. Dynamo breaks the graph at RETURNN's native module, with the hooks as without."""
    batch, feat = Dim(3, name="batch"), Dim(8, name="feat")
    x = values(3, 8, seed=1).bfloat16()
    with setting("on", MODES["bf16"]):
        module = rf.LayerNorm(feat)
        call = lambda x_: module(tensor(x_, batch, feat)).raw_tensor
        expected = call(x)
        with static_traceable() if static_traceable else contextlib.nullcontext():
            assert torch.equal(make_fx(call)(x)(x), expected)
        if not torch.__version__.startswith("2.6."):  # which fails at RETURNN's native module, in stock as well
            assert torch.equal(torch.compile(call, backend="eager")(x), expected)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


LARGE = torch.ones(fuse.MIN_COMPILE_NUMEL)


@pytest.fixture
def compiler(monkeypatch):
    """:return: list of the calls of torch.compile, which returns what is set as ``compiler.result``"""

    class _Compiler(list):
        result = staticmethod(lambda *_: "compiled")

    calls = _Compiler()
    monkeypatch.setattr(torch, "compile", lambda func, **kwargs: calls.append(func) or calls.result)
    monkeypatch.setattr(fuse, "_broken", False)
    return calls


def _raise(error):
    def func(*_args):
        raise error

    return func


def test_failing_compiler_is_said_once_and_plain_code_runs(compiler, caplog):
    compiler.result = _raise(RuntimeError("No working C++ compiler found\nmore"))
    caplog.set_level(logging.WARNING, "returnn.frontend.upcast")
    functions = [fuse.compiled(_wide), fuse.compiled(_wide)]
    for func in functions * 2:
        assert torch.equal(func(LARGE), LARGE * 2 + 1)
    assert len(compiler) == 1 and not fuse.compile_enabled()
    (message,) = [record.message for record in caplog.records]
    assert "No working C++ compiler found" in message and "plain ops" in message and "more" not in message


def test_wrong_arguments_and_no_memory_are_not_the_compilers_fault(compiler):
    compiler.result = _raise(torch.OutOfMemoryError("no memory"))
    with pytest.raises(torch.OutOfMemoryError):
        fuse.compiled(_wide)(LARGE)
    compiler.result = _raise(ValueError("whatever"))
    with pytest.raises(TypeError):
        fuse.compiled(_wide)(LARGE, LARGE)
    assert fuse.compile_enabled()


def test_small_inputs_do_not_compile(compiler):
    func = fuse.compiled(_wide)
    assert torch.equal(func(LARGE[1:]), LARGE[1:] * 2 + 1) and not compiler
    assert func(LARGE) == "compiled" and func(LARGE) == "compiled" and len(compiler) == 1
    func(LARGE.bfloat16()), func(LARGE[None])
    assert len(compiler) == 3


def test_switches(compiler, monkeypatch):
    func = fuse.compiled(_wide)
    with setting("on"):
        pass  # imports the hooks, which know of the option
    for value, on in [(None, True), (True, True), (False, False), ("off", False), ("True", True)]:
        with global_config_ctx(Config({"rf_upcast_compile": value})):
            assert (isinstance(func(LARGE), str)) == on, value
    with global_config_ctx(Config({"rf_upcast_compile": 3})), pytest.raises(TypeError, match="rf_upcast_compile.*3"):
        func(LARGE)
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    assert not isinstance(func(LARGE), str)


def test_number_of_compilations_is_bounded(monkeypatch):
    """One norm, 200 lengths, batches of one sequence among them, with and without gradient."""
    monkeypatch.setattr(rows_native, "MIN_NUMEL", math.inf)
    monkeypatch.setattr(norm, "_compiled_forward", fuse.compiled(norm._plain))
    monkeypatch.setattr(norm, "_compiled_backward", fuse.compiled(norm._plain_backward))
    monkeypatch.setattr(fuse, "_failed", lambda func, args, exc: pytest.fail(f"{func.__name__}: {exc}"))
    feat = Dim(256, name="feat")
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    with setting("on", MODES["amp-bf16"]):
        module = rf.LayerNorm(feat)
        for length in range(140, 340):
            size = 1 if length % 10 == 0 else 3
            batch = Dim(size, name="batch")
            time = seq_dim("time", [length] * size, batch)
            x = values(size, length, 256, seed=1).bfloat16().requires_grad_()
            with torch.set_grad_enabled(length % 7 > 0):
                out = module(tensor(x, batch, time, feat)).raw_tensor
            if out.requires_grad:
                out.float().sum().backward()
    # forward and backward, for one sequence and for several
    assert 2 <= counters["unique_graphs"] - before <= 4
