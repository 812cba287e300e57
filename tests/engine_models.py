"""
A tiny model with every kind of covered op, its data and its training by RETURNN's torch engine in this process.
"""

from __future__ import annotations
from typing import Any, Dict, List, Optional, Sequence
from unittest import mock
import multiprocessing.dummy
import numpy
import torch
import returnn.frontend as rf
from returnn.config import Config, global_config_ctx
from returnn.datasets import init_dataset
from returnn.tensor import Dim, batch_dim
from returnn.torch.engine import Engine
from returnn.util import multi_proc_manager_with_watchdog

FEAT, VOCAB, HEADS = 16, 11, 2
time_dim, label_time_dim = Dim(None, name="time"), Dim(None, name="label_time")
in_dim, model_dim, vocab_dim = Dim(9, name="in"), Dim(FEAT, name="model"), Dim(VOCAB, name="vocab")

EXTERN_DATA = {
    "data": {"dims": [batch_dim, time_dim, in_dim], "dtype": "float32", "feature_dim": in_dim},
    "classes": {"dims": [batch_dim, time_dim], "sparse_dim": vocab_dim, "dtype": "int32"},
    "labels": {"dims": [batch_dim, label_time_dim], "sparse_dim": vocab_dim, "dtype": "int32"},
}


def sequences(lens: Sequence[int], seed: int = 0, scale: float = 3.0) -> List[Dict[str, numpy.ndarray]]:
    """
    :param lens: of the sequences
    :param seed: of the first one, the others count on
    :param scale: of the inputs
    :return: data of :class:`StaticDataset`
    """
    result = []
    for i, size in enumerate(lens):
        rnd = numpy.random.RandomState(seed + i)
        result.append(
            {
                "data": (rnd.randn(size, 9) * scale).astype("float32"),
                "classes": rnd.randint(0, VOCAB, size).astype("int32"),
                "labels": rnd.randint(1, VOCAB, max(1, size // 3)).astype("int32"),
            }
        )
    return result


def dataset(data: Sequence[Dict[str, numpy.ndarray]]) -> Any:
    """:return: what :func:`sequences` gave, as RETURNN's dataset, in this order"""
    dims = {"data": (9, 2), "classes": (VOCAB, 1), "labels": (VOCAB, 1)}
    opts = {"class": "StaticDataset", "data": list(data), "output_dim": dims, "input_dim": 9, "name": "train"}
    result = init_dataset({**opts, "target_list": ["classes", "labels"]})
    result.init_seq_order(epoch=1)
    return result


class Model(rf.Module):
    """
    Norms of every kind, rotary self-attention, logits.

    :param dim: of all between input and logits
    """

    def __init__(self, *, dim: Dim = model_dim, **_kwargs):
        super().__init__()
        self.inner = rf.Linear(in_dim, dim)
        self.first = rf.LayerNorm(dim)
        self.att = rf.RotaryPosSelfAttention(
            dim,
            dim,
            key_dim_total=dim,
            value_dim_total=dim,
            num_heads=HEADS,
            att_dropout=0.0,  # its random numbers would differ
        )
        self.second = rf.RMSNorm(dim)
        self.third = rf.BatchNorm(dim, use_mask=True)
        self.logits = rf.Linear(dim, vocab_dim)

    def __call__(self, x: rf.Tensor) -> rf.Tensor:
        x = self.first(self.inner(x))
        x = x + self.att(x, axis=time_dim)
        return self.logits(rf.cast(self.third(self.second(x)), x.dtype))


def train_step(*, model: Model, extern_data: Any, **_kwargs):
    """cross entropy of the frames and CTC"""
    logits = model(extern_data["data"])
    ce = rf.cross_entropy(estimated=logits, target=extern_data["classes"], axis=vocab_dim, estimated_type="logits")
    ce.mark_as_loss("ce", use_normalized_loss=True)
    ctc = rf.ctc_loss(
        logits=logits,
        targets=extern_data["labels"],
        input_spatial_dim=time_dim,
        targets_spatial_dim=label_time_dim,
        blank_index=0,
    )
    ctc.mark_as_loss("ctc", use_normalized_loss=True)


class Recorder(Engine):
    """
    RETURNN's engine, which keeps the losses of each step, and the gradients and parameters of each update.
    """

    def __init__(self, config: Config):
        super().__init__(config=config)
        self.losses: List[List[float]] = []
        self.grads: List[Dict[str, torch.Tensor]] = []

    def _run_step(self, extern_data: Any, **kwargs: Any):
        super()._run_step(extern_data, **kwargs)
        if kwargs.get("train_flag") and not kwargs.get("_inside_wrapped"):
            losses = rf.get_run_ctx().losses.values()
            self.losses.append([float(loss.get_summed_loss().raw_tensor.detach()) for loss in losses])

    def init_train_from_config(self, *args: Any, **kwargs: Any):
        """and from then on records the gradients"""
        super().init_train_from_config(*args, **kwargs)
        step = self._updater.step

        def record_and_step(**kwargs: Any):
            params = self._pt_model.named_parameters()
            self.grads.append({name: p.grad.clone() for name, p in params if p.grad is not None})
            step(**kwargs)

        self._updater.step = record_and_step

    def parameters(self) -> Dict[str, torch.Tensor]:
        """:return: copies, with the buffers"""
        return {name: p.detach().clone() for name, p in self._pt_model.state_dict().items()}


def options(**more: Any) -> Dict[str, Any]:
    """:return: of the config: one epoch, one sequence per batch, SGD"""
    return {
        "task": "train",
        "device": "cpu",
        "behavior_version": 38,
        "extern_data": EXTERN_DATA,
        "get_model": Model,
        "train_step": train_step,
        "batch_size": 1000,
        "max_seqs": 1,
        "num_epochs": 1,
        "optimizer": {"class": "sgd"},
        "learning_rate": 2.0**-4,
        "torch_dataloader_opts": {"num_workers": 0},
        "random_seed": 1,
        **more,
    }


def train(data: Sequence[Dict[str, numpy.ndarray]], *, prepare: Optional[Any] = None, **more: Any) -> Recorder:
    """
    :param data: see :func:`sequences`
    :param prepare: called with the engine before it trains
    :param more: options of the config
    :return: the engine, after its training
    """
    config = Config(options(**more))
    # the data is loaded in this process, so what is shared with others needs no server process
    no_server = mock.patch.object(multi_proc_manager_with_watchdog, "create_manager", multiprocessing.dummy.Manager)
    with global_config_ctx(config), no_server:
        engine = Recorder(config)
        engine.init_train_from_config(train_data=dataset(data))
        if prepare:
            prepare(engine)
        engine.train()
    return engine
