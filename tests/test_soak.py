"""
Many training steps of varying lengths: what grows, what is compiled again, what is left open, and what an error leaves.

``RF_UPCAST_SOAK_STEPS=2000`` in the environment for the long run.
"""

from __future__ import annotations
from typing import Any, Dict, List, Set
import collections
import contextlib
import ctypes
import functools
import gc
import inspect
import os
import random
import threading
import pytest
import torch
import returnn.frontend as rf
from returnn.tensor import Dim
import returnn_upcast
from returnn_upcast import get_policy, hooks, patch
from returnn_upcast.hooks import encoding_cache
from returnn_upcast.ops import fuse
from common import MODES, seq_dim, setting, tensor, values
from engine_models import Model, sequences, train, train_step

STEPS = int(os.environ.get("RF_UPCAST_SOAK_STEPS", 150))
AMP = {"torch_amp": "bfloat16", "grad_scaler": None}


def _open_files() -> Set[str]:
    result = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of listdir itself
            result.add(f"{name} -> {os.readlink(f'/proc/self/fd/{name}')}")
    return result


def _memory() -> int:
    """:return: bytes of memory of this process, without what the allocator keeps for later"""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Watch:
    """a train step that keeps what the process has after a third, two thirds, and all of the steps"""

    def __init__(self):
        self.seen: List[Dict[str, Any]] = []
        self.step = 0

    def __call__(self, **kwargs: Any):
        if self.step + 1 in (STEPS // 3, STEPS * 2 // 3, STEPS):
            gc.collect()
            objects = gc.get_objects()
            seen = {"files": _open_files(), "graphs": _graphs(), "objects": len(objects), "memory": _memory()}
            self.seen.append({**seen, "tensors": sum(type(x) is torch.Tensor for x in objects)})
        self.step += 1
        train_step(**kwargs)


def _graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _lens() -> List[int]:
    rnd = random.Random(1)
    # All within the first third, since RETURNN caches the encodings of the last 128. From below the size that is
    # compiled to above it. The longest comes first, so that memory is there.
    distinct = [600, 1, 599, 2, *rnd.sample(range(3, 599), min(STEPS // 4, 400))]
    return distinct + [rnd.choice(distinct) for _ in range(STEPS - len(distinct))]


def test_long_training(monkeypatch):
    """Steps of one sequence each: no growth, no compilation after the first third, no open file."""
    monkeypatch.delenv("RETURNN_UPCAST_COMPILE", raising=False)
    monkeypatch.setattr(fuse, "_failed", lambda func, args, exc: pytest.fail(f"{func.__name__}: {exc}"))
    returnn_upcast.install()
    watch, before = Watch(), _graphs()

    def prepare(engine):
        engine.grads, engine.losses = collections.deque(maxlen=1), collections.deque(maxlen=1)

    train(
        sequences(_lens()),
        prepare=prepare,
        rf_upcast=True,
        train_step=watch,
        get_model=functools.partial(Model, dim=Dim(64, name="wide")),
        learning_rate=1e-3,
        **AMP,
    )
    assert watch.step == STEPS
    start, middle, end = watch.seen
    print([{**seen, "files": len(seen["files"])} for seen in watch.seen])
    assert start["files"] == middle["files"] == end["files"]
    assert 0 < start["graphs"] - before <= 12 and end["graphs"] == start["graphs"]
    # One tensor more per step would be STEPS / 3
    assert end["tensors"] - middle["tensors"] <= 4 and end["objects"] - middle["objects"] <= STEPS // 10
    assert end["memory"] - middle["memory"] < 8 * 2**20


class _Fails:
    """the train step of the model, and in one step an exception in the midst of it"""

    def __init__(self, place: str):
        self.place, self.step = place, 0

    def __call__(self, *, model: Model, extern_data: Any, **kwargs: Any):
        self.step += 1
        if self.step != 3:
            return train_step(model=model, extern_data=extern_data)
        with rf.upcast.scope({"attention": False}):
            if self.place == "scope":
                raise KeyError("my own")
            x = model.inner(extern_data["data"])
            # the time dim of something else: fails inside of the rotary attention, and of the norm
            other = seq_dim("other", (3,), Dim(1, name="other_batch"))
            model.att(x, axis=other) if self.place == "rotary" else rf.GroupNorm(Dim(5, name="wrong"), num_groups=5)(x)


def _state() -> tuple:
    points = hooks.PATCHES + hooks.TORCH_PATCHES
    attributes = [inspect.getattr_static(patch._load(point.owner), point.name) for point in points]
    flags = encoding_cache.rotary.get(), encoding_cache.bypass.get(), torch.is_autocast_enabled("cpu")
    return patch.applied(), attributes, flags, get_policy(), torch.is_grad_enabled(), rf.get_default_float_dtype()


@pytest.mark.parametrize("place", ["scope", "rotary", "norm"])
def test_exception_in_a_step(place: str, monkeypatch):
    """Policy and patches are as before, and the next training gives the same numbers."""
    monkeypatch.setenv("RETURNN_UPCAST_COMPILE", "0")
    returnn_upcast.install()
    call = lambda step: train(sequences((7, 5, 9, 3)), rf_upcast=True, train_step=step, **AMP)
    expected = call(train_step).losses
    before, files = _state(), _open_files()
    with pytest.raises(Exception) as info:
        call(_Fails(place))
    assert place != "scope" or info.type is KeyError
    del info  # its traceback holds all that was there
    gc.collect()
    assert _state() == before and _open_files() == files
    assert call(train_step).losses == expected


def test_exception_inside_of_the_engine_keeps_the_policy_of_a_scope():
    returnn_upcast.install()
    returnn_upcast.set_policy({"rms_norm": True})
    with rf.upcast.scope(True):
        within = get_policy()
        with pytest.raises(KeyError):
            train(sequences((7, 5, 9)), train_step=_Fails("scope"), **AMP)
        assert get_policy() is within
    assert get_policy().ops == {"rms_norm"}


def test_threads_with_different_scopes():
    """Two threads go through the same ops in turns, each in its own scope: each gets the numbers of its policy."""
    batch, feat = Dim(2, name="batch"), Dim(16, name="feat")
    frames, x = Dim(400, name="frames"), values(2, 16, seed=1, std=4.0).bfloat16()
    barrier, results = threading.Barrier(2, timeout=300), {True: [], False: []}

    def ops() -> List[torch.Tensor]:
        norm = rf.RMSNorm(feat)(tensor(x, batch, feat))
        encoding = rf.sinusoidal_positional_encoding(spatial_dim=frames, feat_dim=feat)
        return [norm.raw_tensor, encoding.raw_tensor]

    def run(on: bool):
        # a new thread starts with the defaults of RETURNN
        with setting_of_thread(), rf.upcast.scope(on):
            for _ in range(20):
                barrier.wait()
                results[on].append(ops())
                barrier.wait()
                assert bool(get_policy()) == on

    with setting("on", MODES["bf16"]):
        expected = {}
        for on in (True, False):
            with rf.upcast.scope(on):
                expected[on] = ops()
        setting_of_thread = functools.partial(rf.set_default_float_dtype_ctx, rf.get_default_float_dtype())
        threads = [threading.Thread(target=run, args=(on,)) for on in results]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not any(torch.equal(a, b) for a, b in zip(expected[True], expected[False]))
    for on, got in results.items():
        assert len(got) == 20
        assert all(torch.equal(a, b) for out in got for a, b in zip(out, expected[on]))
