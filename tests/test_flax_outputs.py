"""
Converted parameters give the same outputs: torch and Flax, and RETURNN's torch and JAX backends.
"""

from __future__ import annotations
import math
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, Tensor
from returnn.torch.frontend.bridge import rf_module_to_pt_module
from returnn_upcast import checkpoint as C
from returnn_upcast import params as P
from checkpoint_cases import BF16, F32, same
from flax_cases import jax, torch_backend  # noqa: F401, an autouse fixture
from param_models import FEAT, TorchNet, conformer, state_dict

F64 = torch.float64


def _flax_net(dtype):
    from flax import linen as nn

    class FlaxNet(nn.Module):
        """the same as TorchNet"""

        @nn.compact
        def __call__(self, tokens):
            kw = {"dtype": dtype, "param_dtype": dtype}
            x = nn.Embed(11, 16, name="embed", **kw)(tokens)
            x = nn.Conv(12, (3,), padding=1, name="conv", **kw)(x)
            x = x + nn.Conv(4, (3, 5), padding=(1, 2), name="conv2", **kw)(x[..., None]).mean(-1)
            flat = x.reshape(-1, 1, 12)
            x = nn.GroupNorm(num_groups=3, epsilon=1e-6, name="group", **kw)(flat).reshape(x.shape)
            x = nn.BatchNorm(use_running_average=True, epsilon=1e-5, name="batch", **kw)(x)
            y = nn.LayerNorm(epsilon=1e-5, name="norm", **kw)(x)
            x = x + nn.MultiHeadDotProductAttention(3, name="att", **kw)(y, y)
            y = nn.RMSNorm(epsilon=1e-6, name="rms", **kw)(x)
            return Layers(name="layers")(y)

    class Layers(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Dense(12, name="0", dtype=dtype, param_dtype=dtype)(x))
            return nn.Dense(5, use_bias=False, name="1", dtype=dtype, param_dtype=dtype)(x)

    return FlaxNet()


def _error(a, ref) -> float:
    return float((a.double() - ref).abs().mean())


def _check_outputs(outs, ref):
    """
    :param outs: (framework, dtype) -> output
    :param ref: float64 on the rounded parameters, by dtype
    """
    mean = {dtype: _error(outs["torch", dtype], outs["jax", dtype].double()) for dtype in (F32, BF16)}
    own = {key: _error(out, ref[key[1]]) for key, out in outs.items()}
    print(f"\n  dtype     torch-jax  torch-f64    jax-f64   (mean absolute; outputs {ref[F32].abs().mean():.2g})")
    for dtype in (F32, BF16):
        row = [mean[dtype], own["torch", dtype], own["jax", dtype]]
        print(f"  {P.dtype_name(dtype):<8}", *(f"{x:10.2e}" for x in row))
    assert (outs["torch", F32] - outs["jax", F32]).abs().max() < 1e-5
    # two bf16 runs, each this far from float64, with independent errors, are apart by the root of their squares
    assert mean[BF16] <= math.hypot(own["torch", BF16], own["jax", BF16])
    assert own["jax", BF16] < 2 * own["torch", BF16] + 1e-12 and own["torch", BF16] < 2 * own["jax", BF16] + 1e-12
    assert own["torch", BF16] > 1e-5  # so that this is about bf16 at all


def test_flax_and_torch_outputs_agree():
    torch.manual_seed(1)
    net = TorchNet().eval()
    for x in net.state_dict().values():
        if x.is_floating_point() and x.ndim == 1:  # norms and statistics that are not all one or zero
            x.add_(torch.rand(x.shape) * 0.5)
    tokens = torch.randint(0, 11, (2, 9))
    outs, ref = {}, {}
    for dtype in (F32, BF16):
        state = P.cast_params(net.state_dict(), dtype)
        model = P.cast_params(TorchNet().eval(), dtype)
        model.load_state_dict(state)
        variables = C.to_flax(model, state)
        module = _flax_net(P.dtype_name(dtype))
        shapes = jax.eval_shape(module.init, jax.random.PRNGKey(0), jax.numpy.asarray(tokens.numpy()))
        got = {name: variables[name] for name in ("params", "batch_stats")}
        # Flax's own structure and shapes, so that nothing was ignored; its statistics are float32 always
        assert jax.tree_util.tree_map(lambda x: x.shape, got) == jax.tree_util.tree_map(lambda x: x.shape, shapes)
        with torch.no_grad():
            outs["torch", dtype] = model(tokens)
            ref[dtype] = model.double()(tokens)
        with jax.default_matmul_precision("highest"):
            outs["jax", dtype] = P.to_torch(module.apply(got, tokens.numpy()))
        assert {outs[key, dtype].dtype for key in ("torch", "jax")} == {dtype}
    _check_outputs(outs, ref)


def _run_conformer(model, backend: str, raw: torch.Tensor):
    raw = jax.numpy.asarray(P.to_numpy(raw)) if backend == "jax" else raw
    dims = [Dim(2, name="batch"), Dim(raw.shape[1], name="time")]
    dtype = "float64" if raw.dtype == F64 else raw.dtype.name if backend == "jax" else P.dtype_name(raw.dtype)
    x = Tensor("x", dims=[*dims, FEAT], feature_dim=FEAT, dtype=dtype, raw_tensor=raw)
    rf.init_forward_step_run_ctx()
    with rf.set_default_float_dtype_ctx(dtype):
        out, spatial = model(x, in_spatial_dim=dims[1])
    return P.to_torch(out.copy_compatible_to_dims_raw([dims[0], spatial, model.out_dim]))


def test_conformer_outputs_agree_on_returnns_backends(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    from returnn.jax import checkpoint as returnn_jax

    rf.set_random_seed(1)
    state = state_dict(conformer(1))
    for i, x in enumerate(state.values()):
        if x.ndim == 1:
            x.add_(torch.rand(x.shape, generator=torch.Generator().manual_seed(i)) * 0.5)
    torch.save({"model": state, "epoch": 2, "step": 5, "effective_learning_rate": 0.1}, tmp_path / "a.pt")
    raw = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(2))
    outs, ref = {}, {}
    for dtype in (F32, BF16):
        source, target = tmp_path / f"{P.dtype_name(dtype)}.pt", tmp_path / f"{P.dtype_name(dtype)}.orbax"
        C.cast_file(tmp_path / "a.pt", source, dtype)
        C.write(target, C.read(source))
        rf.select_backend_torch()
        model = P.cast_params(conformer(1), dtype)
        rf_module_to_pt_module(model).load_state_dict(C.read(source).arrays)
        with torch.no_grad():
            outs["torch", dtype] = _run_conformer(model, "torch", raw.to(dtype))
            ref[dtype] = _run_conformer(P.cast_params(model, F64), "torch", raw.to(dtype).double())
        rf.select_backend("jax")
        model = P.cast_params(conformer(1), dtype)
        with jax.default_matmul_precision("highest"):
            returnn_jax.set_model_params(model, returnn_jax.load_checkpoint(str(target)))
            outs["jax", dtype] = _run_conformer(model, "jax", raw.to(dtype))
        assert {p.dtype for p in model.parameters()} == {P.dtype_name(dtype)}
        assert outs["jax", dtype].dtype == outs["torch", dtype].dtype == dtype
        # what RETURNN's JAX backend saves, converts back: exactly, with epoch and step
        returnn_jax.save_checkpoint(model, str(tmp_path / f"saved{dtype}.orbax"), step=5, epoch=2)
        back = C.read(tmp_path / f"saved{dtype}.orbax")
        assert same(back.arrays, C.read(source).arrays) and back.meta == {"epoch": 2, "step": 5}
    _check_outputs(outs, ref)


def test_returnn_jax_cannot_read_bf16_itself(tmp_path):
    from returnn.jax.checkpoint import load_torch_checkpoint

    torch.save({"model": {"w": torch.ones(2, dtype=BF16)}}, tmp_path / "a.pt")
    with pytest.raises(TypeError, match="BFloat16"):
        load_torch_checkpoint(str(tmp_path / "a.pt"))
