"""
Distributed training: the policies of all ranks must agree, else the gradients of different computations get averaged.

Not by a collective: a rank without the hooks would not enter it, and what it enters instead would meet ours.
Each rank puts its policy into the key-value store of the process group and reads those of the others,
so that no collective of RETURNN changes its place, and a rank that puts nothing is known by its number.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, List
import datetime
import itertools
import logging
from ..policy import get_policy

# As RETURNN and torch have it for their collectives: "timeout_sec" of the option torch_distributed.
DEFAULT_TIMEOUT_SEC = 1800
# What is waited for is said after so many seconds.
SAY_AFTER_SEC = 60

log = logging.getLogger("returnn.frontend.upcast")

_rounds = itertools.count()  # all ranks make the same checks in the same order, so this tells them apart


def init_train_from_config(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """
    ``EngineBase.init_train_from_config``: where all ranks of a training come to, whatever their policies are,
    before the model is built
    """
    if getattr(self, "_torch_distributed_ctx", None) is not None:
        opts = self.config.typed_value("torch_distributed")
        check_ranks(timeout_sec=opts.get("timeout_sec", DEFAULT_TIMEOUT_SEC))
    return original(self, *args, **kwargs)


def check_ranks(*, timeout_sec: float = DEFAULT_TIMEOUT_SEC):
    """
    To be called by all ranks of the default process group. Does nothing without one.

    :param timeout_sec: how long the other ranks may take to come here. What they all do next is a collective with
        this timeout, so ours is a bit less: who is missing is then said here, and not by that one as a lost connection
    :raise RuntimeError: the policies differ, or ranks have none; names the ranks and what each has
    """
    from torch import distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    if store is None:  # MPI
        log.warning("rf_upcast: this process group has no store, whether the ranks agree is not checked")
        return
    prefix = f"rf_upcast/{next(_rounds)}"
    keys = [f"{prefix}/{rank}" for rank in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], str(get_policy()))
    _wait(store, keys, 0.9 * timeout_sec)
    policies: Dict[str, List[int]] = {}
    for rank, policy in enumerate(store.multi_get(keys)):
        policies.setdefault(policy.decode("utf8"), []).append(rank)
    if len(policies) > 1:
        lines = [f"\n  {_names(ranks)}: {policy}" for policy, ranks in policies.items()]
        raise RuntimeError(
            f"rf_upcast: the ranks must have the same ops in float32, and have{''.join(lines)}\n"
            "Check the option rf_upcast and the behavior version of each."
        )


def _wait(store: Any, keys: List[str], timeout_sec: float):
    soon = min(SAY_AFTER_SEC, timeout_sec / 2)
    try:
        store.wait(keys, datetime.timedelta(seconds=soon))
        return
    except RuntimeError:
        log.warning("rf_upcast: nothing came from %s yet, waiting for it", _missing(store, keys))
    try:
        store.wait(keys, datetime.timedelta(seconds=timeout_sec - soon))
    except RuntimeError as exc:
        raise RuntimeError(
            f"rf_upcast: nothing came from {_missing(store, keys)} in {timeout_sec:g} s:"
            " either returnn_upcast.install() is not called there, or it is stuck."
        ) from exc


def _missing(store: Any, keys: List[str]) -> str:
    return _names([rank for rank, key in enumerate(keys) if not store.check([key])] or list(range(len(keys))))


def _names(ranks: List[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
