"""
The audit in training: ``rf_upcast_audit = {"every": 1000}`` in the config.

Every so many steps one batch runs once more, with and without float32, and a line goes to the log.
In between, nothing of it runs but one comparison per step.
"""

from __future__ import annotations
from typing import Any, Callable, Mapping, Optional
import ast
import functools
import logging
from .. import config as upcast_config
from ..patch import Patch
from ..policy import get_policy

OPTION = "rf_upcast_audit"
NEAR = 1e-3  # of the range of the dtype: the square overflows in f16 from 4e-3 on
# RETURNN's torch engine calls this of its base class once, when it prepares the training.
PATCH = Patch(
    "returnn.engine.base:EngineBase", "init_train_from_config", f"{__name__}:init_train_from_config", None, ("config",)
)

log = logging.getLogger("returnn.frontend.upcast")


def parse(value: Any) -> Optional[int]:
    """
    :param value: of the option; a string as on the command line
    :return: the interval, None if the option is unset or off
    :raise TypeError, ValueError: what it must be
    """
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            raise ValueError(f"{OPTION}: cannot read {value!r}; expected {{'every': 1000}}") from None
    if value is None or value is False:
        return None
    if not isinstance(value, Mapping) or set(value) != {"every"}:
        raise TypeError(f"{OPTION}: expected a dict with the key 'every', e.g. {{'every': 1000}}, got {value!r}")
    every = value["every"]
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"{OPTION}: 'every' must be a number of steps, at least 1, got {every!r}")
    return every


def init_train_from_config(original: Callable, self: Any, config: Any = None, **kwargs: Any) -> Any:
    """``EngineBase.init_train_from_config``: gives the engine a :class:`TrainingAudit` if the config asks for it"""
    result = original(self, config, **kwargs)
    every = parse(upcast_config.read_option(config or self.config, OPTION))
    if every is None:
        return result
    if not hasattr(self, "_run_step") or getattr(self, "_graph_capture_opts", None) is not None:
        log.warning("%s: only for the torch engine without torch_cuda_graph, not used here", OPTION)
        return result
    self._run_step = functools.partial(_run_step, self, type(self)._run_step, TrainingAudit(self, every))
    return result


def _run_step(engine: Any, original: Callable, audit: TrainingAudit, extern_data: Any, **kwargs: Any) -> Any:
    inside = kwargs.get("_inside_wrapped", False)  # by DistributedDataParallel: the outer call has done it
    if kwargs.get("train_flag") and kwargs.get("train_func") and not inside:
        audit.step(extern_data)
    return original(engine, extern_data, **kwargs)


class TrainingAudit:
    """
    :param engine: RETURNN's torch engine
    :param every: interval in steps
    """

    def __init__(self, engine: Any, every: int):
        self._engine, self._every, self._broken = engine, every, False

    def step(self, extern_data: Any):
        """
        :param extern_data: of the step that is about to run. Every so often it is audited, by rank 0.
            Gradients, buffers and random state stay as they are. A failure is logged, and the last try.
        """
        if self._engine.global_train_step % self._every or self._broken:
            return
        import torch

        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        try:
            self._report(extern_data)
        except Exception as exc:  # the training goes on
            self._broken = True
            log.warning("%s: stopped, %s: %s", OPTION, type(exc).__name__, exc)

    def _report(self, extern_data: Any):
        import torch
        from .engine import setup_of
        from .setup import Mode, fixed_batch
        from .trace import trace
        from .variants import Comparison, run

        engine, policy = self._engine, get_policy()
        cast = fixed_batch(extern_data)
        # what comes from the engine already has the precision of the training
        batch = lambda dtype: extern_data if dtype == engine._default_float_dtype else cast(dtype)
        setup = setup_of(engine, engine._train_step_func, [batch], [""])
        setup.seed += engine.global_train_step
        row = Comparison("now", policy)
        with trace(setup.model, analyse=False) as found:
            now = run(setup, batch, Mode(policy))
        row.add(run(setup, batch, Mode(dtype=torch.float32)), now)
        result = row.finish()
        births = sum(site.upcast_nonfinite for site in found.sites)
        near = max(found.sites, key=_nearness, default=None)
        where = (
            f"{100 * _nearness(near):.2g} % of the range at {near.path} ({near.op})" if near is not None else "no op"
        )
        log.info(
            "%s: step %i, gradient error %.2e, %i NaN/inf in it, %i ops with overflow, largest input %s",
            OPTION, engine.global_train_step, result.gradient_error or 0.0, result.nonfinite, births, where,
        )  # fmt: skip
        values = {"gradient_error": result.gradient_error or 0.0, "nonfinite": result.nonfinite, "overflows": births}
        values["nearest_to_limit"] = _nearness(near) if near is not None else 0.0
        if engine._tensorboard_writer is not None:
            for name, value in values.items():
                engine._tensorboard_writer.add_scalar(f"{OPTION}/{name}", value, global_step=engine.global_train_step)


def _nearness(site: Any) -> float:
    return max(site.max_input, site.max_output) / site.limit
