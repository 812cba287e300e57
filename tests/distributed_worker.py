"""
What ``test_distributed.py`` runs under torchrun: one rank. Its results go to a file.
"""

from __future__ import annotations
from typing import Any, Dict, List
import logging
import os
import sys
import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
import returnn.frontend as rf
from returnn.torch import distributed
from returnn.util.basic import BehaviorVersion
import returnn_upcast
from returnn_upcast.hooks import distributed as hook
from engine_models import sequences, train

RANK = int(os.environ.get("RANK", 0))
LENS = (7, 5, 9, 3, 8, 6)
GLOO = {"backend": "gloo", "timeout_sec": 300}  # where ranks wait for each other by a fault, they must not stay
PRECISIONS = {
    "amp": {"torch_amp": "bfloat16", "grad_scaler": None},
    "bf16": {"default_float_dtype": "bfloat16"},
}
buckets: List[List[Any]] = []


class BucketRecorder(torch.nn.parallel.DistributedDataParallel):
    """keeps dtype and size of every bucket of gradients"""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.register_comm_hook(None, self._record)

    @staticmethod
    def _record(group, bucket):  # without annotations, which torch compares with its own types, not as text
        buckets.append([bucket.buffer().dtype, bucket.buffer().numel(), [g.dtype for g in bucket.gradients()]])
        return allreduce_hook(group, bucket)


def _train(dist: Dict[str, Any], *, installed: bool = True, **options: Any) -> Dict[str, Any]:
    distributed._is_set_up, distributed._ctx = False, None
    os.environ.pop("_RETURNN_TORCH_DISTRIBUTED_INIT_INFO", None)
    BehaviorVersion._reset((None, 16))
    buckets.clear()
    returnn_upcast.uninstall()
    if installed:
        returnn_upcast.install()
    try:
        engine = train(sequences(LENS)[RANK::2], torch_distributed={**GLOO, **dist}, **options)
    except RuntimeError as exc:
        if "rf_upcast" not in str(exc):
            raise
        return {"error": str(exc)}
    return {
        "losses": engine.losses,
        "grads": engine.grads,
        "params": engine.parameters(),
        "buckets": list(buckets),
        "wrapped": type(engine._ddp_pt_model).__name__,
    }


def main(path: str):
    """:param path: of the result, without the rank"""
    rf.select_backend_torch()
    # no torch.compile of RETURNN's own rotation, which takes seconds
    torch._dynamo.config.disable = True
    init = torch.distributed.init_process_group
    # one group for all cases
    torch.distributed.init_process_group = lambda **kw: None if torch.distributed.is_initialized() else init(**kw)
    ddp, param = {"class": BucketRecorder}, {"reduce_type": "param", "param_sync_step": 1}
    result = {}
    for name, precision in PRECISIONS.items():
        result[f"{name} stock"] = _train(ddp, installed=False, **precision)
        result[f"{name} on"] = _train(ddp, rf_upcast=True, **precision)
    result["param stock"] = _train(param, installed=False, **PRECISIONS["amp"])
    result["param on"] = _train(param, rf_upcast=True, **PRECISIONS["amp"])
    result["other op"] = _train(ddp, rf_upcast={"attention": RANK == 0}, behavior_version=39)
    result["one off"] = _train(param, rf_upcast=RANK == 0)
    result["other version"] = _train(ddp, behavior_version=38 + RANK)
    result["both off"] = _train(ddp, rf_upcast=False, **PRECISIONS["amp"])
    messages: List[str] = []
    logging.getLogger("returnn.frontend.upcast").addFilter(lambda record: messages.append(record.getMessage()) or True)
    hook.SAY_AFTER_SEC = 1
    if RANK == 0:  # the other rank has no hooks, so it does not answer
        result["one without"] = _train({"timeout_sec": 2}, rf_upcast=True)
    result["messages"] = messages
    torch.save(result, f"{path}.{RANK}")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
