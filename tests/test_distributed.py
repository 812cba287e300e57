"""
Distributed training: two ranks by torchrun with gloo, in RETURNN's engine. The cases are in ``distributed_worker.py``.
"""

from __future__ import annotations
from typing import Any, Dict, List
import logging
import os
import pathlib
import re
import subprocess
import sys
import pytest
import torch
from torch.distributed import HashStore
import returnn_upcast
from audit_models import write_config
from distributed_worker import GLOO, LENS, PRECISIONS
from engine_models import sequences, train
from returnn_upcast.hooks import distributed as hook

TESTS = pathlib.Path(__file__).resolve().parent


def _torchrun(*args: str, cwd: pathlib.Path) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RETURNN_UPCAST_COMPILE": "0", "PYTHONPATH": path}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *args]
    return subprocess.run(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> List[Dict[str, Any]]:
    """what each rank has for each case"""
    folder = tmp_path_factory.mktemp("ranks")
    done = _torchrun(str(TESTS / "distributed_worker.py"), str(folder / "result"), cwd=folder)
    assert done.returncode == 0, done.stdout[-5000:]
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in (0, 1)]


def _single(precision: str) -> Any:
    """one process with the batches of both ranks, one after the other, for each update"""
    returnn_upcast.install()
    return train(
        sequences(LENS), rf_upcast=True, accum_grad_multiple_step=2, learning_rate=2.0**-5, **PRECISIONS[precision]
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_equals_a_single_process_on_the_same_batches(ranks, precision: str):
    single = _single(precision)
    results = [rank[f"{precision} on"] for rank in ranks]
    assert [losses for pair in zip(*(r["losses"] for r in results)) for losses in pair] == single.losses
    assert len(results[0]["grads"]) == len(single.grads) == 3
    for averaged, other, summed in zip(results[0]["grads"], results[1]["grads"], single.grads):
        assert averaged.keys() == summed.keys()
        for name, grad in averaged.items():
            assert grad.dtype == summed[name].dtype
            assert torch.equal(grad, other[name]), name
            assert torch.equal(grad * 2, summed[name]), name


def test_not_the_numbers_of_stock(ranks):
    """else the test above says nothing about the upcast"""
    for precision in PRECISIONS:
        assert ranks[0][f"{precision} on"]["losses"] != ranks[0][f"{precision} stock"]["losses"]


@pytest.mark.parametrize("precision, dtype", [("amp", torch.float32), ("bf16", torch.bfloat16)])
def test_buckets_of_gradients_are_those_of_stock(ranks, precision: str, dtype: torch.dtype):
    for rank in ranks:
        stock, on = rank[f"{precision} stock"], rank[f"{precision} on"]
        assert on["wrapped"] == "BucketRecorder" and len(on["buckets"]) == 3
        assert on["buckets"] == stock["buckets"]
        assert on["buckets"][0][0] == dtype and set(on["buckets"][0][2]) == {dtype}


def test_parameter_sync(ranks):
    """``reduce_type = "param"``: the parameters are averaged after each update"""
    first, second = (rank["param on"] for rank in ranks)
    summed = _single("amp").parameters()
    assert not first["buckets"] and first["params"].keys() == ranks[0]["param stock"]["params"].keys()
    for name, param in first["params"].items():
        assert torch.equal(param, second["params"][name]), name
        assert param.dtype == ranks[0]["param stock"]["params"][name].dtype
        if "running" not in name:  # those of each rank follow from its own batches
            assert (param - summed[name]).abs().max() <= 1e-6 * summed[name].abs().max(), name
    assert any(not torch.equal(*(r["grads"][0][name] for r in (first, second))) for name in first["grads"][0])


def test_off_is_stock_bit_for_bit(ranks):
    for rank in ranks:
        assert rank["both off"]["losses"] == rank["amp stock"]["losses"]
        for off, stock in zip(rank["both off"]["grads"], rank["amp stock"]["grads"]):
            assert all(torch.equal(grad, stock[name]) for name, grad in off.items())


@pytest.mark.parametrize(
    "case, has",
    [
        ("other op", [r"rank 0: attention, batch_norm, .*", r"rank 1: batch_norm, .*"]),
        ("one off", [r"rank 0: attention, .*", r"rank 1: none"]),
        ("other version", [r"rank 0: none", r"rank 1: attention, .*"]),
    ],
)
def test_difference_is_an_error_on_all_ranks(ranks, case: str, has: List[str]):
    for rank in ranks:
        lines = [line.strip() for line in rank[case]["error"].splitlines()]
        assert lines[0].startswith("rf_upcast: the ranks must have the same ops")
        assert len(lines) == 4 and all(re.fullmatch(regex, line) for regex, line in zip(has, lines[1:]))


def test_rank_without_hooks_is_named(ranks):
    assert re.match(r"rf_upcast: nothing came from rank 1 in 1.8 s: .*install", ranks[0]["one without"]["error"])
    assert ranks[0]["messages"] == ["rf_upcast: nothing came from rank 1 yet, waiting for it"]


def test_difference_through_the_command_line(tmp_path):
    """RETURNN as a user starts it: the config installs the hooks before torch is there"""
    more = "import os\nrf_upcast = os.environ['RANK'] == '0'\n"
    more += f"torch_distributed = {GLOO}\n"
    done = _torchrun("-m", "returnn", write_config(tmp_path, more), cwd=tmp_path)
    assert done.returncode != 0
    for rank in "01":
        log = (tmp_path / f"log.torch-distrib-{rank}-2").read_text()
        assert re.search(r"ranks must have the same ops.*\n  rank 0: attention, .*\n  rank 1: none", log + done.stdout)
        assert "start epoch" not in log


class _Ranks:
    """a process group of this many ranks, of which this process is one"""

    def __init__(self, monkeypatch, store: Any, rank: int, size: int):
        dist = torch.distributed
        for name, value in {"is_initialized": True, "get_world_size": size, "get_rank": rank}.items():
            monkeypatch.setattr(dist, name, lambda value=value: value)
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
        monkeypatch.setattr(hook, "_rounds", iter(range(7, 100)))


def test_many_ranks(monkeypatch):
    store = HashStore()
    _Ranks(monkeypatch, store, 2, 4)
    for rank, policy in enumerate(["attention", "none", "", "none"]):
        store.set(f"rf_upcast/7/{rank}", policy)
    with pytest.raises(RuntimeError, match=r"(?s)\n  rank 0: attention\n  ranks 1, 2, 3: none\n"):
        hook.check_ranks()
    for rank in (0, 1, 3):
        store.set(f"rf_upcast/8/{rank}", "none")
    hook.check_ranks()  # what was said in the round before does not count
    store.set("rf_upcast/9/1", "none")
    with pytest.raises(RuntimeError, match="nothing came from ranks 0, 3 in 0.09 s"):
        hook.check_ranks(timeout_sec=0.1)


def test_single_process_and_no_store(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "returnn.frontend.upcast")
    _Ranks(monkeypatch, None, 0, 1)
    hook.check_ranks()
    assert not caplog.records
    _Ranks(monkeypatch, None, 0, 2)
    hook.check_ranks()
    assert "has no store" in caplog.text
