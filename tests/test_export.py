"""
torch.export, and ONNX as run by onnxruntime, of low-precision RF code with the upcast on: the numbers of eager mode.
"""

from __future__ import annotations
from typing import Optional, Sequence, Tuple
import pytest
import torch
import returnn.frontend as rf
from common import MODES, inside, setting, values
from returnn_upcast.ops.norm import normalize
from tolerances import relative_error
from tracing_cases import CASES, OPTIONS, SIZES, Op, assert_same

# relative_positional_encoding, sinusoidal encodings and rf.cross_entropy have no export in stock either
EXPORTED = ["LayerNorm", "RMSNorm", "GroupNorm", "SelfAttention"]


class _Module(torch.nn.Module):
    def __init__(self, op: Op, params: Sequence[torch.Tensor]):
        super().__init__()
        self.op, self.params = op, params

    def forward(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        return self.op(x, lens, *self.params)


def _prepare(
    case: str, mode: str, dtype: Optional[torch.dtype] = None
) -> Tuple[Op, _Module, Tuple[torch.Tensor, torch.Tensor]]:
    rf.init_forward_step_run_ctx(epoch=1, step=0)
    op = Op(CASES[case], SIZES["small"], mode)
    for param in op.params:
        param.raw_tensor.requires_grad_(False)
    x, lens, *params = (leaf.detach() for leaf in op.inputs(dtype))
    return op, _Module(op, params), (x, lens)


@pytest.mark.parametrize("mode", ["bf16", "f16"])
@pytest.mark.parametrize("case", EXPORTED)
def test_exported_program_is_eager(case, mode):
    with setting("on", MODES[mode], options=OPTIONS), torch.no_grad():
        op, module, inputs = _prepare(case, mode)
        program = torch.export.export(module, inputs, strict=False)
        assert_same([program.module()(*inputs)], [module(*inputs)], op.lens.tolist())


@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("case", EXPORTED)
def test_onnxruntime_gives_the_numbers_of_eager_mode(case, dynamo, tmp_path):
    """
    In f16, as onnxruntime has no bf16 on the CPU. Its own linear layers round elsewhere than torch's,
    so a module with those is compared by the distance to float64.
    """
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = str(tmp_path / "model.onnx")
    names = dict(input_names=["x", "lens"], output_names=["out"])
    with setting("stock", None, dtype=torch.float64), torch.no_grad():
        _, module, inputs = _prepare(case, "f16", torch.float64)
        reference = module(*inputs)
    with setting("on", MODES["f16"], options=OPTIONS), torch.no_grad():
        op, module, inputs = _prepare(case, "f16")
        expected = module(*inputs)
        torch.onnx.export(module, inputs, path, dynamo=dynamo, **names)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    feed = dict(zip(["x", "lens"], (x.numpy() for x in inputs)))
    (out,) = session.run(None, {x.name: feed[x.name] for x in session.get_inputs()})
    valid = inside(op.lens.tolist())
    assert out.dtype == "float16"
    found, eager, reference = (x[valid].double() for x in (torch.from_numpy(out), expected, reference))
    near = 1.1 * relative_error(eager, reference)
    assert relative_error(found, eager) < 2**-12 or relative_error(found, reference) < near


class _ToLongest(torch.nn.Module):
    """Cuts the padding to the longest sequence, which is a symbolic size in the exported program."""

    def forward(self, x: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
        longest = lens.max().item()
        torch._check(longest >= 0)
        torch._check(longest <= x.shape[1])
        mask = (torch.arange(longest) < lens[:, None])[:, :, None]
        return normalize(x[:, :longest], axes=(0, 1), mask=mask, eps=1e-3)[0]


def test_masked_norm_whose_length_is_symbolic():
    x, lens = values(4, 9, 5, seed=0).bfloat16(), torch.tensor([9, 4, 2, 7])
    program = torch.export.export(_ToLongest(), (x, lens)).module()
    for changed in (lens, torch.tensor([5, 4, 2, 3])):
        assert torch.equal(program(x, changed), _ToLongest()(x, changed))
