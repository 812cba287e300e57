"""
Traces and transforms of RF code, with the upcast on: the numbers of eager mode. And RETURNN's as they are with it off.
"""

from __future__ import annotations
import contextlib
import gc
import pytest
import torch
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from functorch.compile import aot_function, nop
import returnn.frontend as rf
from common import MODES, inside, setting, static_traceable, traced
from returnn_upcast.ops import attention
from returnn_upcast.ops.attention_plain import Inputs
from returnn_upcast.ops.matmul import Product, product
from tolerances import relative_error
from tracing_cases import CASES, DROPOUT, OPTIONS, SIZES, Op, assert_same, seeded

MODE_NAMES = ["bf16", "amp-bf16"]
needs_static = pytest.mark.skipif(static_traceable is None, reason="this RETURNN has no static tracing")


def _static(op: Op, backend=nop):
    """RETURNN's torch_cuda_graph with compile: the whole step with its gradients as one graph, no Dynamo"""
    traced = aot_function(lambda inputs: op.static_step(*inputs), fw_compiler=backend)
    return lambda *inputs: traced(list(inputs))


def _dynamo(op: Op, backend="aot_eager"):
    torch._dynamo.reset()
    return torch.compile(op.step, backend=backend)  # graphs break at RETURNN's native module, in stock as well


TRACERS = {"static": _static, "compile": _dynamo}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "tracer,mode",
    # torch.compile takes seconds a case, and autocast is the harder mode for it
    [*(pytest.param("static", mode, marks=needs_static) for mode in MODE_NAMES), ("compile", "amp-bf16")],
)
def test_traced_step_is_eager(tracer, case, mode):
    if (tracer, case) == ("static", "ctc_loss"):
        pytest.skip("an error, as in stock: next test")
    with setting("on", MODES[mode], options=OPTIONS):
        op = Op(CASES[case], SIZES["large"], mode)
        expected = op.step(*op.inputs())
        assert_same(TRACERS[tracer](op)(*op.inputs()), expected, op.lens.tolist())


@needs_static
@pytest.mark.parametrize("name", ["stock", "off", "on"])
def test_torch_ctc_has_no_static_trace_in_stock_nor_here(name):
    with setting(name, MODES["bf16"], options=OPTIONS):
        op = Op(CASES["ctc_loss"], SIZES["small"], "bf16")
        with pytest.raises(DynamicOutputShapeException, match="_ctc_loss"):
            _static(op)(*op.inputs())


@pytest.mark.parametrize("case", ["LayerNorm", "SelfAttention", "cross_entropy"])
@pytest.mark.parametrize("tracer", [pytest.param("static", marks=needs_static), "compile"])
def test_traced_step_with_the_policy_off_is_stock(tracer, case):
    results = []
    for name in ("stock", "off"):
        with setting(name, MODES["bf16"], options=OPTIONS):
            op = Op(CASES[case], SIZES["large"], "bf16")
            results.append(TRACERS[tracer](op)(*op.inputs()))
    assert all(torch.equal(stock, off) for stock, off in zip(*results))


@needs_static
@pytest.mark.parametrize("tracer", TRACERS)
def test_with_inductor(tracer):
    """as RETURNN compiles, and as users do; inductor rounds less often than eager mode, so both against float64"""
    from returnn.torch.util import graph_capture
    from torch._inductor.compile_fx import compile_fx

    wrap = getattr(graph_capture, "inductor_fw_compiler", lambda backend: backend)
    backend = wrap(compile_fx) if tracer == "static" else "inductor"
    with setting("stock", None, dtype=torch.float64):
        op = Op(CASES["SelfAttention"], SIZES["large"], "amp-bf16")
        reference = op.step(*op.inputs(torch.float64))
    with setting("on", MODES["amp-bf16"], options=OPTIONS):
        op = Op(CASES["SelfAttention"], SIZES["large"], "amp-bf16")
        eager = op.step(*op.inputs())
        found = TRACERS[tracer](op, backend)(*op.inputs())
    valid = [inside(op.lens.tolist()), ...]
    for i, (a, b, c) in enumerate(zip(found, eager, reference, strict=True)):
        part = valid[min(i, 1)]
        assert relative_error(a[part], c[part]) < 1.05 * relative_error(b[part], c[part]), i


def test_compiled_forward_with_backward_outside_of_autocast():
    """torch.compile traces a backward under the autocast of its forward: float32 products there must stay float32"""
    with setting("on", MODES["amp-bf16"], options=OPTIONS):
        op = Op(CASES["SelfAttention"], SIZES["small"], "amp-bf16")
        results = []
        for func in (op.loss, torch.compile(op.loss, backend="aot_eager")):
            inputs = op.inputs()
            out, loss = func(*inputs)
            with torch.autocast("cpu", enabled=False):
                loss.backward()
            results.append([out.detach(), *(x.grad for x in inputs if x.grad is not None)])
        assert_same(*results, op.lens.tolist())


def test_product_without_autocast():
    a, b = (torch.randn(2, 3, n, m, dtype=torch.float64) for n, m in [(4, 5), (5, 6)])
    b = b[0]
    leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
    assert torch.autograd.gradcheck(Product.apply, leaves) and torch.autograd.gradgradcheck(Product.apply, leaves)
    assert torch.allclose(torch.func.vmap(Product.apply, in_dims=(0, None))(a, b), a @ b)
    leaves = a.float().requires_grad_(), b.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = product(*leaves)
        out.sum().backward()
        tangents = torch.func.jvp(product, (a.float(), b.float()), (a.float(), b.float()))[1]
    assert relative_error(out, a @ b) < 1e-6 and relative_error(tangents, 2 * (a @ b)) < 1e-6
    assert relative_error(leaves[0].grad, b.sum(-1).unsqueeze(-2).expand_as(a)) < 1e-6
    assert relative_error(leaves[1].grad, a.sum((0, 2)).unsqueeze(-1).expand_as(b)) < 1e-6


def _reentrant(func, x):
    return torch.utils.checkpoint.checkpoint(func, x, use_reentrant=True)


def _not_reentrant(func, x):
    return torch.utils.checkpoint.checkpoint(func, x, use_reentrant=False)


def _scope(func, x):
    with rf.gradient_checkpoint_scope():
        out = func(x * 1)
    return out * 1


CHECKPOINTS = {"reentrant": _reentrant, "not reentrant": _not_reentrant, "RETURNN's scope": _scope}


@pytest.fixture
def no_hooks_left():
    """RETURNN's scope leaves once its tensors are gone, when saved_tensors_hooks are used next; `with` then fails."""
    yield
    gc.collect()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    hooks.__enter__()
    hooks.__exit__()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def _train(op: Op, checkpoint, amp: bool, backward_in_amp: bool = False):
    inputs = op.inputs()
    with seeded():
        out = checkpoint(lambda x: op(x, *inputs[1:]), inputs[0])
        out = out + torch.nn.functional.dropout(out, 0.3)
        # one should call backward outside of autocast
        with torch.autocast("cpu", enabled=False) if amp and not backward_in_amp else contextlib.nullcontext():
            out.float().square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


@pytest.mark.parametrize("mode", MODE_NAMES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [*DROPOUT, "LayerNorm", "BatchNorm, masked", "cross_entropy", "linear_cross_entropy"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_checkpoint_gives_the_same_numbers(checkpoint, case, size, mode, no_hooks_left):
    if (checkpoint, case) == ("RETURNN's scope", "BatchNorm, masked"):
        pytest.skip(
            "running statistics are updated in place, which RETURNN's scope repeats, and keeps its hooks for ever"
        )
    with setting("on", MODES[mode], options=OPTIONS):
        op = Op({**CASES, **DROPOUT}[case], SIZES[size], mode)
        amp = MODES[mode].amp
        expected = _train(op, lambda func, x: func(x), amp)
        found = _train(op, CHECKPOINTS[checkpoint], amp)
    if checkpoint == "RETURNN's scope":  # records torch's ops, so plain ones run
        assert_same(found, expected, op.lens.tolist())
    else:
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("case", [*DROPOUT, "linear_cross_entropy"])
def test_scope_and_backward_under_autocast(case, no_hooks_left):
    """what RETURNN replays in backward has been cast already; float32 products must not be cast down"""
    with setting("on", MODES["amp-bf16"], options=OPTIONS):
        op = Op({**CASES, **DROPOUT}[case], SIZES["small"], "amp-bf16")
        expected = _train(op, lambda func, x: func(x), True)
        found = _train(op, _scope, True, backward_in_amp=True)
    assert_same(found, expected, op.lens.tolist())


def test_scope_with_the_policy_off_is_stock(no_hooks_left):
    results = []
    for name in ("stock", "off"):
        with setting(name, MODES["amp-bf16"], options=OPTIONS):
            op = Op(DROPOUT["RelPosSelfAttention"], SIZES["small"], "amp-bf16")
            op(*op.inputs())  # a tensor that is cached inside of the scope would keep its hooks for ever
            results.append(_train(op, _scope, True))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _in_mode(func, *args):
    with _Mode():
        return func(*args)


DRAWERS = {
    "dispatch mode": _in_mode,
    "aot_function": lambda func, *args: aot_function(func, fw_compiler=nop)(*args),
    "torch.compile": lambda func, *args: torch.compile(func, backend="aot_eager", fullgraph=True)(*args),
}


@pytest.mark.parametrize("drawer", DRAWERS)
@pytest.mark.parametrize("shape", [(3, 2, 7, 5), (4, 300, 311)])
def test_the_same_weights_are_dropped(drawer, shape):
    """one chunk of random numbers, and several with a rest"""
    q, k = torch.ones(*shape[:-1], 8), torch.ones(*shape[:-2], shape[-1], 8)
    draw = lambda q_, k_: attention.dropout_mask(Inputs(q_, k_, k_), 0.3, False)[0]
    with seeded():
        expected, after = draw(q, k), torch.rand(1)
    with seeded():
        found = DRAWERS[drawer](draw, q, k)
        assert torch.equal(found, expected) and torch.rand(1) == after
    assert abs(float(found.double().mean()) - 0.7) < 4 * (0.21 / found.numel()) ** 0.5


def test_all_random_bits_are_used():
    bits = attention._random_bits(1 << 16, torch.device("cpu"))
    for i in range(16):
        assert abs(float((bits >> i & 1).double().mean()) - 0.5) < 0.01, i
    assert abs(float(bits[3::4].double().mean())) < 800  # of the standard deviation 19,000 / sqrt(16,384): 150


# RETURNN's cache of relative positions reads the lengths, which it can't in torch.func: see the test after this one.
TRANSFORMED = ["LayerNorm", "RMSNorm", "GroupNorm", "SelfAttention", "cross_entropy"]


@pytest.mark.parametrize("mode", MODE_NAMES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", TRANSFORMED)
def test_functional_transforms(case, size, mode):
    with setting("on", MODES[mode], options=OPTIONS):
        op = Op(CASES[case], SIZES[size], mode)
        out, *grads = op.step(*op.inputs())
        lens, *params = (x.detach() for x in op.inputs()[1:])
        func = lambda x, *params_: op.loss(x, lens, *params_)[1]
        numbers = tuple(range(1 + len(params)))
        found = torch.func.grad(func, argnums=numbers)(op.x, *params)
        assert_same(list(found), grads, op.lens.tolist())
        stacked = torch.stack([op.x, op.x.flip(0)])
        batched = torch.func.vmap(lambda x: op(x, lens, *params))(stacked)
        assert_same([batched[0]], [out], op.lens.tolist())
        assert_same([batched[1]], [op(op.x.flip(0), lens, *params)], op.lens.tolist())
        tangent = torch.ones_like(op.x)
        _, slope = torch.func.jvp(lambda x: func(x, *params), (op.x,), (tangent,))
    wide = grads[0].double()
    assert abs(float(slope) - float(wide.sum())) < 4e-3 * float(wide.abs().sum())


@pytest.mark.parametrize("name", ["stock", "off", "on"])
def test_relative_positions_have_no_functional_transform_in_stock_nor_here(name):
    with setting(name, MODES["bf16"], options=OPTIONS):
        op = Op(CASES["RelPosSelfAttention"], SIZES["small"], "bf16")
        _, lens, *params = (x.detach() for x in op.inputs())
        with pytest.raises(RuntimeError, match="data pointer"):
            torch.func.grad(lambda x: op.loss(x, lens, *params)[1])(op.x)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", [*TRANSFORMED, "RelPosSelfAttention"])
def test_double_backward(case, size):
    """a penalty of the gradient of the input: fused as close to float64 as plain, no further from it than stock"""
    results = {}
    for name, dtype in [("fused", "bf16"), ("plain", "bf16"), ("stock", "bf16"), ("float64", None)]:
        with setting(
            "on" if name in ("fused", "plain") else "stock", MODES.get(dtype), dtype=None if dtype else torch.float64
        ):
            op = Op(CASES[case], SIZES[size], "bf16")
            inputs = op.inputs(None if dtype else torch.float64)
            with traced() if name == "plain" else contextlib.nullcontext():
                (grad,) = torch.autograd.grad(op.loss(*inputs)[1], inputs[0], create_graph=True)
                results[name] = torch.autograd.grad(grad.double().square().sum(), inputs[0])[0]
    error = {name: relative_error(results[name], results["float64"]) for name in ("fused", "plain", "stock")}
    floor = 2 * 1.7e-3  # input gradient and what is differentiated are rounded once each
    assert error["fused"] < 1.1 * error["plain"] and error["plain"] < max(error["stock"], floor), error
