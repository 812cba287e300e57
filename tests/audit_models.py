"""
Models, batches and configs for the tests of the audit.
"""

from __future__ import annotations
from typing import Any, Callable, Optional
import torch
import returnn.frontend as rf
from returnn.tensor import Dim, TensorDict
from common import seq_dim, tensor

LENS = (7, 5, 6)


class Step:
    """
    A batch, a model on it, and its train step. To be made in the default float dtype of the training.

    :param body: makes the module between input and logits; called with the feature dim
    :param scale: of the inputs
    :param lens: of the sequences
    :param loss: "logits", "log-probs" or "float32-log-probs" (cross entropy of these), or "ctc"
    """

    def __init__(self, body: Callable[[Dim], rf.Module], *, scale: float = 1.0, lens=LENS, loss: str = "logits"):
        self.batch, self.feat, self.vocab = Dim(len(lens), name="batch"), Dim(16, name="feat"), Dim(11, name="vocab")
        self.time, self.out_time = seq_dim("time", lens, self.batch), seq_dim("out", [2] * len(lens), self.batch)
        self.loss = loss
        dtype = getattr(torch, rf.get_default_float_dtype())
        gen = torch.Generator().manual_seed(0)
        x = torch.randn(len(lens), max(lens), 16, generator=gen) * scale
        y = torch.randint(0, 10, (len(lens), max(lens)), generator=gen, dtype=torch.int32)
        z = torch.randint(0, 10, (len(lens), 2), generator=gen, dtype=torch.int32)
        self.data = TensorDict(
            {
                "x": tensor(x.to(dtype), self.batch, self.time, self.feat, feature_dim=self.feat),
                "y": rf.convert_to_tensor(y, dims=[self.batch, self.time], sparse_dim=self.vocab),
                "z": rf.convert_to_tensor(z, dims=[self.batch, self.out_time], sparse_dim=self.vocab),
            }
        )
        rf.set_random_seed(1)
        self.model = Model(body(self.feat), self.feat, self.vocab)

    def __call__(self, *, model: Model, extern_data: TensorDict):
        logits = model(extern_data["x"], self.time)
        if self.loss == "ctc":
            loss = rf.ctc_loss(
                logits=logits,
                targets=extern_data["z"],
                input_spatial_dim=self.time,
                targets_spatial_dim=self.out_time,
                blank_index=10,
            )
        elif "log-probs" in self.loss:
            if self.loss == "float32-log-probs":
                logits = rf.cast(logits, "float32")
            log_probs = rf.log_softmax(logits, axis=self.vocab)  # the line that rounds
            loss = rf.cross_entropy(
                estimated=log_probs * 1.0, target=extern_data["y"], axis=self.vocab, estimated_type="log-probs"
            )
        else:
            loss = rf.cross_entropy(estimated=logits, target=extern_data["y"], axis=self.vocab, estimated_type="logits")
        loss.mark_as_loss("loss", use_normalized_loss=True)


class Model(rf.Module):
    """body, then logits"""

    def __init__(self, body: rf.Module, feat: Dim, vocab: Dim):
        super().__init__()
        self.body, self.logits = body, rf.Linear(feat, vocab)

    def __call__(self, x: Any, time: Dim) -> Any:
        return self.logits(self.body(x) if not isinstance(self.body, Positions) else self.body(x, time))


class Norms(rf.Module):
    """two norms with a dropout"""

    def __init__(self, feat: Dim, dropout: float = 0.0):
        super().__init__()
        self.first, self.linear, self.second = rf.RMSNorm(feat), rf.Linear(feat, feat), rf.RMSNorm(feat)
        self.dropout = dropout

    def __call__(self, x: Any) -> Any:
        return self.second(rf.dropout(self.linear(self.first(x)), self.dropout))


class Positions(rf.Module):
    """adds the sinusoidal encoding"""

    def __call__(self, x: Any, time: Dim) -> Any:
        return x + rf.sinusoidal_positional_encoding(spatial_dim=time, feat_dim=x.feature_dim)


CONFIG = """#!/usr/bin/env python
import returnn.frontend as rf
from returnn.tensor import Dim, batch_dim
import returnn_upcast

returnn_upcast.install()
backend = "torch"
device = "cpu"
behavior_version = 39
default_float_dtype = "bfloat16"
time_dim, feat_dim = Dim(None, name="time"), Dim(16, name="feat")
in_dim, out_dim = Dim(9, name="in"), Dim(2, name="out")
extern_data = {
    "data": {"dims": [batch_dim, time_dim, in_dim], "feature_dim": in_dim, "dtype": "float32"},
    "classes": {"dims": [batch_dim, time_dim], "sparse_dim": out_dim, "dtype": "int32"},
}
train = {"class": "Task12AXDataset", "num_seqs": 40}
batch_size, max_seqs = 500, 4


class Model(rf.Module):
    def __init__(self):
        super().__init__()
        self.inner = rf.Linear(in_dim, feat_dim)
        self.norm = rf.RMSNorm(feat_dim)
        self.out = rf.Linear(feat_dim, out_dim)


def get_model(**_kwargs):
    return Model()


def train_step(*, model, extern_data, **_kwargs):
    logits = model.out(model.norm(model.inner(extern_data["data"])))
    loss = rf.cross_entropy(
        estimated=logits, target=extern_data["classes"], axis=out_dim, estimated_type="logits"
    )
    loss.mark_as_loss("ce", use_normalized_loss=True)


num_epochs = 1
optimizer = {"class": "adamw"}
learning_rate = 1e-3
log_verbosity = 5
"""


def write_config(folder: Any, more: str = "", *, without: Optional[str] = None) -> str:
    """
    :param folder: of the experiment: config, model, scores
    :param more: appended
    :param without: this name is deleted
    :return: file name
    """
    paths = f"model = {str(folder / 'model')!r}\nlearning_rate_file = {str(folder / 'scores')!r}\n"
    paths += f"log = [{str(folder / 'log')!r}]\n"
    text = CONFIG + paths + more + (f"\ndel {without}\n" if without else "")
    path = folder / "my.config"
    path.write_text(text)
    return str(path)
