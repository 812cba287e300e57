"""
Casting parameters: in place and tied for models, new for mappings, masks that are loud, and exact where it can be.
"""

from __future__ import annotations
import numpy
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from returnn.torch.frontend.bridge import rf_module_to_pt_module
from returnn.util.basic import BehaviorVersion
from returnn_upcast import params as P
from param_models import MODELS, TorchNet, biting, decoder, same_bits, state_dict

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16


def _float_dtypes(model):
    return {x.dtype for x in state_dict(model).values() if x.is_floating_point()}


@pytest.mark.parametrize("name", MODELS)
def test_model_is_cast_in_place(name):
    model = MODELS[name]()
    pt = rf_module_to_pt_module(model) if isinstance(model, rf.Module) else model
    before = {n: (id(x), x.dtype) for n, x in pt.state_dict(keep_vars=True).items()}
    assert P.to_bf16(model) is model
    for n, x in pt.state_dict(keep_vars=True).items():
        assert id(x) == before[n][0], n
        assert x.dtype == (BF16 if before[n][1] == F32 else before[n][1]), n
    if isinstance(model, rf.Module):
        assert {p.dtype for p in model.parameters()} == {"bfloat16"}
        P.to_fp32(pt)  # the wrapper that RETURNN's engine trains: its rf.Parameters follow
        assert {p.dtype for p in model.parameters()} == {"float32"}
    else:
        assert model.batch.num_batches_tracked.dtype == torch.int64 and model.batch.running_var.dtype == BF16


def test_tied_parameters_stay_tied():
    model = P.to_bf16(decoder())
    assert model.logits.weight is model.input_embedding.weight
    pt = torch.nn.Module()
    pt.a, pt.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    pt.b.weight = pt.a.weight
    P.to_bf16(pt)
    assert pt.b.weight is pt.a.weight and pt.a.weight.dtype == BF16
    with pytest.raises(ValueError, match="splits tied.*a.weight = b.weight"):
        P.to_fp32(pt, lambda name, param: name.startswith("a"))
    assert pt.a.bias.dtype == BF16  # nothing was changed
    array = torch.ones(2)
    new = P.to_bf16({"a": array, "b": array})
    assert new["a"] is new["b"] and array.dtype == F32
    new = P.to_fp32(pt.state_dict())  # here two tensors, with the same memory
    assert new["a.weight"] is new["b.weight"] and new["a.bias"] is not new["b.bias"]
    pt.b.weight = torch.nn.Parameter(pt.a.weight.detach())
    P.to_fp32(pt)
    assert pt.b.weight.data_ptr() == pt.a.weight.data_ptr() and pt.b.weight.dtype == F32


def test_optimizer_keeps_the_parameters():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    P.to_bf16(model)
    assert model.weight.grad.dtype == BF16
    before = model.weight.detach().clone()
    optimizer.step()
    assert model.weight.dtype == BF16 and (model.weight != before).all()


def test_mappings_are_new():
    flat = {"a.w": torch.ones(2), "a.n": torch.tensor([1]), "b": numpy.ones(2, "float64")}
    new = P.to_fp16(flat)
    assert new["a.w"].dtype == F16 and new["b"].dtype == numpy.float16 and new["a.n"] is flat["a.n"]
    assert flat["a.w"].dtype == F32 and flat["b"].dtype == numpy.float64
    nested = {"x": {"w": torch.ones(2), "b": torch.ones(1)}, "y": torch.zeros(1)}
    new = P.to_bf16(nested, {"x": {"w": True, "b": False}, "y": True})
    assert (new["x"]["w"].dtype, new["x"]["b"].dtype, new["y"].dtype) == (BF16, F32, BF16)
    assert new["x"]["b"] is nested["x"]["b"]
    with pytest.raises(ValueError, match="same name: a.w"):
        P.to_bf16({"a.w": torch.ones(1), "a": {"w": torch.ones(1)}})
    with pytest.raises(TypeError, match="epoch: expected a torch, NumPy or JAX array, got int"):
        P.to_bf16({"model": {"w": torch.ones(1)}, "epoch": 3})
    with pytest.raises(TypeError, match="params: expected"):
        P.to_bf16([torch.ones(1)])
    with pytest.raises(ValueError, match="dtype: expected one of bfloat16.*'int8'"):
        P.cast_params(flat, "int8")


def test_jax_arrays():
    jax = pytest.importorskip("jax")
    x = jax.numpy.asarray([1.0, -0.0, 3.0], dtype="float32")
    new = P.to_bf16({"a": {"x": x, "i": jax.numpy.arange(2)}})
    assert isinstance(new["a"]["x"], jax.Array) and new["a"]["x"].dtype.name == "bfloat16"
    assert new["a"]["i"].dtype.name.startswith("int")
    back = P.to_fp32(new)["a"]["x"]
    assert numpy.asarray(back).tobytes() == numpy.asarray(x).tobytes()


def test_masks_are_loud():
    params = {"a": torch.ones(1), "b": torch.ones(1), "i": torch.tensor(1)}
    with pytest.raises(ValueError, match="matches none of a, b"):
        P.to_bf16(params, lambda name, param: name == "i")
    with pytest.raises(ValueError, match="do not exist: x, y; no value for: a, b"):
        P.to_bf16(params, {"x": True, "y": True})
    with pytest.raises(TypeError, match="a: 1, b: 1"):
        P.to_bf16(params, lambda name, param: 1)
    with pytest.raises(TypeError, match="mask: expected a callable"):
        P.to_bf16(params, "a")
    with pytest.raises(ValueError, match="do not exist: norm.bias, norm.scale"):
        P.to_bf16(params, P.masks.AllBut(frozenset({"norm.scale", "norm.bias"})))
    seen = {}
    P.to_bf16(params, lambda name, param: seen.setdefault(name, param) is not None)
    assert seen == params


class _Liars(rf.Module):
    """names that say the opposite of what the modules are"""

    def __init__(self):
        super().__init__()
        dim = Dim(4, name="d")
        self.layer_norm = rf.Linear(dim, Dim(3, name="e"))
        self.linear = rf.LayerNorm(dim)
        self.inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        self.last = rf.GroupNorm(dim, num_groups=2)


def test_not_norms_goes_by_class(caplog):
    model = _Liars()
    P.to_bf16(model, P.not_norms(model))
    assert model.layer_norm.weight.dtype == "bfloat16" and model.inner[0].weight.dtype == BF16
    assert model.linear.scale.dtype == "float32" and model.linear.bias.raw_tensor.dtype == F32
    assert model.last.scale.dtype == "float32" and model.inner[1].running_var.dtype == F32
    net = TorchNet()
    new = P.to_bf16(net.state_dict(), P.not_norms(net))
    kept = {name.split(".")[0] for name, x in new.items() if x.dtype == F32}
    assert kept == {"norm", "rms", "group", "batch"}

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

    own = torch.nn.Sequential(torch.nn.Linear(3, 3), Own())
    assert not caplog.records and P.not_norms(own)("1.weight", None)
    assert "no norm module" in caplog.text
    assert not P.not_norms(own, extra=[Own])("1.weight", None)


def test_overflow_names_the_parameters_and_changes_nothing():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    model["b"].weight.data[0, 0] = 65520.0  # the first value that rounds to infinity; 65519 becomes 65504
    model["a"].weight.data[0, 0] = 65519.0
    model["a"].bias.data[0] = float("inf")  # was infinite before
    with pytest.raises(OverflowError, match="float16: values become infinite in b.weight "):
        P.to_fp16(model)
    assert _float_dtypes(model) == {F32}
    P.to_fp16(model, allow_overflow=True)
    assert model["b"].weight[0, 0].isinf() and model["a"].weight[0, 0] == 65504
    with pytest.raises(OverflowError, match="bfloat16"):
        P.to_bf16({"x": torch.tensor([3.4e38])})


@pytest.mark.parametrize("low", [BF16, F16, F32], ids=str)
def test_widening_and_back_is_exact(low):
    high = torch.float64 if low == F32 else F32
    x = biting((300,), low, seed=1)
    wide = P.to_torch(P.cast_params({"x": x}, high)["x"])
    assert wide.dtype == high and torch.equal(wide.nan_to_num(), x.to(high).nan_to_num())
    assert same_bits(P.cast_params({"x": wide}, low)["x"], x)
    naive = x.to(high).to(low)  # torch replaces NaNs' payloads
    assert not same_bits(naive, x)


def test_narrowing_rounds_once_and_keeps_signs():
    x = torch.tensor([1.00390625, -0.0, float("-inf"), 1e-40, float("nan"), -float("nan")])
    new = P.to_bf16({"x": x})["x"]
    assert same_bits(new[:4], x[:4].to(BF16))
    assert new[4:].isnan().all() and new[4:].signbit().tolist() == x[4:].signbit().tolist()


def test_numpy_conversion_keeps_bits():
    pytest.importorskip("ml_dtypes")
    for dtype in (BF16, F16, F32, torch.float64):
        x = biting((3, 5), dtype, seed=2).t()
        array = P.to_numpy(x)
        assert array.dtype.name == P.dtype_name(dtype) and array.shape == (5, 3)
        assert same_bits(P.to_torch(array), x)
    assert P.to_torch(numpy.array(3.0, ">f4")).item() == 3.0 and P.to_numpy(torch.tensor(2)).shape == ()


def test_dtype_report():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    model.register_parameter("tied", model[0].weight)
    P.to_bf16(model, P.not_norms(model))
    lines = [line.split() for line in P.dtype_report(model).splitlines()]
    assert ["0", "bfloat16", "1", "2", "4"] in lines and ["1", "float32", "2", "4", "16"] in lines
    assert ["(root)", "bfloat16", "1", "6", "12"] in lines  # under its first name, once
    assert lines[-2:] == [["total", "bfloat16", "2", "8", "16"], ["total", "float32", "2", "4", "16"]]
    assert P.dtype_report({"a": {"w": numpy.ones((1000, 2), "f2")}}).splitlines()[-1].split()[2:] == [
        "1",
        "2,000",
        "4,000",
    ]


def test_compute_dtype_finds_the_cause():
    dims = [Dim(4, name=f"d{i}") for i in range(4)]

    class Net(rf.Module):
        def __init__(self):
            super().__init__()
            self.layers = rf.ModuleList(rf.Linear(dims[0], dims[1]), rf.LayerNorm(dims[1]), rf.RMSNorm(dims[1]))

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = P.to_bf16(Net())
    x = rf.convert_to_tensor(torch.ones(2, 4, dtype=BF16), dims=[Dim(2, name="b"), dims[0]])
    call = rf.Linear.__call__
    P.assert_compute_dtype(model, "bfloat16", lambda: model(x))
    P.to_fp32(model.layers[1])
    with pytest.raises(AssertionError, match=r"return: layers.1 \(LayerNorm\): float32; layers.2.*\(root\)") as info:
        P.assert_compute_dtype(model, "bfloat16", lambda: model(x))
    assert "layers.0" not in str(info.value) and rf.Linear.__call__ is call
    P.assert_compute_dtype(model, "bfloat16", lambda: model(x), ignore=["layers.[12]", Net])
    model.layers.append(rf.Linear(dims[1], dims[2]))
    P.to_bf16(model.layers[3])
    with pytest.raises(AssertionError, match=r"return: layers.1 ") as info:  # torch itself fails, in layers.3
        P.assert_compute_dtype(model, "bfloat16", lambda: model(x))
    assert "same dtype" in str(info.value.__cause__)
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)).bfloat16()
    with pytest.raises(AssertionError, match=r"return: 0 \(Linear\): bfloat16; 1"):
        P.assert_compute_dtype(net, "float32", lambda: net(torch.ones(2, dtype=BF16)))
    with pytest.raises(ValueError, match="called no module"):
        P.assert_compute_dtype(net, "float32", lambda: None)


class _Classifier(rf.Module):
    def __init__(self, in_dim: Dim, classes: Dim):
        super().__init__()
        self.hidden = Dim(32, name="hidden")
        self.first = rf.Linear(in_dim, self.hidden)
        self.norm = rf.LayerNorm(self.hidden)
        self.rms = rf.RMSNorm(self.hidden)
        self.out = rf.Linear(self.hidden, classes)

    def __call__(self, x):
        x = self.norm(self.first(x))
        return self.out(self.rms(rf.relu(x)))


def test_low_precision_model_with_float32_norms_trains_under_the_hooks(installed):
    BehaviorVersion._reset((39, 0))
    in_dim, classes, batch = Dim(8, name="in"), Dim(4, name="classes"), Dim(64, name="batch")
    rf.set_random_seed(1)
    model = _Classifier(in_dim, classes)
    P.to_bf16(model, P.not_norms(model))
    raw = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    x = rf.convert_to_tensor(raw.to(BF16), dims=[batch, in_dim], feature_dim=in_dim)
    y = rf.convert_to_tensor(raw[:, :4].argmax(1), dims=[batch], sparse_dim=classes)
    optimizer = torch.optim.AdamW([p.raw_tensor for p in model.parameters()], lr=0.01)
    losses = []
    for _ in range(60):
        loss = rf.reduce_mean(
            rf.cross_entropy(estimated=model(x), target=y, axis=classes, estimated_type="logits"), axis=batch
        )
        assert loss.dtype == "float32"
        optimizer.zero_grad()
        loss.raw_tensor.backward()
        optimizer.step()
        losses.append(float(loss.raw_tensor.detach()))
    assert losses[-1] < 0.1 * losses[0]
    assert (model.first.weight.dtype, model.norm.scale.dtype) == ("bfloat16", "float32")
    assert (model.norm.scale.raw_tensor.detach() != 1).any()
    with torch.no_grad():
        assert model(x).dtype in ("bfloat16", "float32") and model(x).raw_tensor.isfinite().all()
