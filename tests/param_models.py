"""
Models whose parameters the tests of params and checkpoint cast and convert, and values that bite.
"""

from __future__ import annotations
from typing import Dict
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
from returnn.frontend.encoder.conformer import ConformerConvSubsample, ConformerEncoder
from returnn.frontend.decoder.transformer import TransformerDecoder
from returnn.torch.frontend.bridge import rf_module_to_pt_module

FEAT = Dim(8, name="feat")
MODEL = Dim(16, name="model")
VOCAB = Dim(11, name="vocab")


def conformer(num_layers: int = 2) -> rf.Module:
    """conv subsampling, relative positions, batch norm"""
    dims = [Dim(n, name=f"conv{i}") for i, n in enumerate((4, 4))]
    front = ConformerConvSubsample(
        FEAT, out_dims=dims, filter_sizes=[(3, 3)] * 2, pool_sizes=[(1, 2)], strides=[(1, 1), (2, 1)]
    )
    opts = {"conv_norm_opts": {"use_mask": True}}
    return ConformerEncoder(
        FEAT,
        MODEL,
        num_layers=num_layers,
        input_layer=front,
        ff_dim=Dim(32, name="ff"),
        num_heads=2,
        conv_kernel_size=5,
        encoder_layer_opts=opts,
    )


def decoder() -> rf.Module:
    """cross-attention, 2 layers; embedding and output layer are tied"""
    return TransformerDecoder(
        MODEL, VOCAB, Dim(16, name="dec"), num_layers=2, num_heads=2, share_embedding=True, ff_dim=32
    )


class TorchNet(torch.nn.Module):
    """every kind of torch.nn module that is converted"""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 16)
        self.conv = torch.nn.Conv1d(16, 12, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(1, 4, (3, 5), padding=(1, 2))
        self.norm = torch.nn.LayerNorm(12)
        self.rms = torch.nn.RMSNorm(12, eps=1e-6)
        self.group = torch.nn.GroupNorm(3, 12, eps=1e-6)
        self.batch = torch.nn.BatchNorm1d(12)
        self.att = torch.nn.MultiheadAttention(12, 3, batch_first=True)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(12, 12), torch.nn.Linear(12, 5, bias=False)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """
        :param tokens: [B, T]
        :return: [B, T, 5]
        """
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        x = x + self.conv2(x[:, None]).mean(1)
        x = self.group(x.flatten(0, 1)).view(x.shape)
        x = self.batch(x.transpose(1, 2)).transpose(1, 2)
        y = self.norm(x)
        x = x + self.att(y, y, y, need_weights=False)[0]
        return self.layers[1](torch.relu(self.layers[0](self.rms(x))))


MODELS = {"conformer": conformer, "decoder": decoder, "torch": TorchNet}


def state_dict(model) -> Dict[str, torch.Tensor]:
    """as RETURNN saves it"""
    return dict((rf_module_to_pt_module(model) if isinstance(model, rf.Module) else model).state_dict())


INTS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def biting(shape, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """random bits: quiet and signaling NaNs with payloads, infinities, denormals, and negative zero for sure"""
    generator = torch.Generator().manual_seed(seed)
    int_dtype = INTS[dtype]
    info = torch.iinfo(int_dtype)
    size = max(int(torch.Size(shape).numel()), 1)
    bits = torch.randint(info.min, info.max, (size,), generator=generator, dtype=int_dtype)
    inf = torch.tensor(float("inf"), dtype=dtype).view(int_dtype).item()
    special = torch.tensor([inf + 1, inf, info.min, info.min + 1, info.min + inf, info.min + inf + 3], dtype=int_dtype)
    bits[: min(len(special), size)] = special[:size]
    return bits[: torch.Size(shape).numel()].view(dtype).reshape(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """same dtype, shape and bits, NaNs included"""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = (x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(a, b)


def fill_biting(state: Dict[str, torch.Tensor], dtype: torch.dtype) -> Dict[str, torch.Tensor]:
    """same names and shapes, floats of this dtype; what was tied stays tied"""
    made = {}
    for i, x in enumerate(state.values()):
        made.setdefault(x.data_ptr(), biting(x.shape, dtype, i) if x.is_floating_point() else x)
    return {name: made[x.data_ptr()] for name, x in state.items()}
