"""
The audit of one setup: trace, variants, noise, verdict.
"""

from __future__ import annotations
from typing import Any, Callable, List, Sequence, Union
import time
import torch
import returnn
import returnn.frontend as rf
from returnn.tensor import Tensor
from .. import hooks
from ..policy import OPS, UpcastPolicy, get_policy
from ..version import __version__
from . import autocast, variants, verdict
from .report import AuditReport, CallSite
from .setup import Mode, Model, Setup, dtype_name, environment, fixed_batch, named_tensors, run_step
from .trace import trace
from .variants import Progress, StepError

REFERENCES = {"float32": torch.float32, "float64": torch.float64}


def audit(setup: Setup, *, name: str, reference: str = "float32", progress: Progress = lambda _: None) -> AuditReport:
    """
    :param setup: what to run
    :param name: of the config or model
    :param reference: float32 or float64
    :param progress: told what runs
    :return: the report
    :raise StepError: the user's step fails where it must not
    :raise ValueError: reference is neither
    """
    if reference not in REFERENCES:
        raise ValueError(f"audit: reference must be one of {', '.join(REFERENCES)}, got {reference!r}")
    start, installed = time.perf_counter(), hooks.is_installed()
    hooks.install()
    try:
        report = _audit(setup, name, reference, progress)
    finally:
        if not installed:
            hooks.uninstall()
    report.seconds = time.perf_counter() - start
    verdict.judge(report)
    return report


def _audit(setup: Setup, name: str, reference: str, progress: Progress) -> AuditReport:
    configured = get_policy()
    on = UpcastPolicy(frozenset(OPS) | configured.ops)
    notes: List[str] = []
    progress("call sites")
    sites = _sites(setup, on, reference, notes, progress)
    report = AuditReport(
        name=name,
        versions={"returnn": returnn.__version__, "torch": torch.__version__, "returnn_upcast": __version__},
        device=setup.device,
        precision=precision(setup),
        reference=reference,
        batches=setup.sizes,
        sites=sites,
        notes=notes,
        memory_kind="peak allocated" if setup.device_type == "cuda" else "kept for backward",
    )
    used = {site.op for site in sites if site.low}
    if used:
        policies = variants.make_policies(setup, configured, used)
        report.variants = _shrinking(
            setup, notes, progress, lambda: variants.compare(setup, policies, REFERENCES[reference], progress)
        )
        report.batches = setup.sizes
        if setup.train and not report.variant("on").error:
            report.noise = variants.noise(setup, on, progress)
    low = setup.low
    if low is not None:
        report.autocast = autocast.behavior(setup.autocast or low, setup.device_type)
    return report


def _sites(setup: Setup, on: UpcastPolicy, reference: str, notes: List[str], progress: Progress) -> List[CallSite]:
    def run() -> List[CallSite]:
        try:
            with environment(setup, Mode(on)), trace(setup.model) as found:
                run_step(setup, setup.batches[0], Mode(on))
        except Exception as exc:
            if variants.is_out_of_memory(exc):
                raise
            raise StepError("on", exc) from exc
        notes.extend(dict.fromkeys(found.failures))
        return found.sites

    return _shrinking(setup, notes, progress, run)


def _shrinking(setup: Setup, notes: List[str], progress: Progress, func: Callable[[], Any]) -> Any:
    """:return: func(), with fewer and fewer sequences as long as it runs out of memory"""
    while True:
        try:
            return func()
        except Exception as exc:
            if not variants.is_out_of_memory(exc):
                raise
            smaller = [setup.halve(i) if setup.halve else None for i in range(len(setup.batches))]
            if any(x is None for x in smaller):
                raise StepError("reference", exc) from exc
            setup.batches, setup.sizes = [x[0] for x in smaller], [x[1] for x in smaller]
            notes.append(f"Out of memory: went on with half of the sequences ({'; '.join(setup.sizes)}).")
            progress(notes[-1])
            if setup.device_type == "cuda":
                torch.cuda.empty_cache()


def precision(setup: Setup) -> str:
    """:return: in words"""
    dtypes = {dtype_name(p.dtype) for _, p in named_tensors(setup.model) if p.is_floating_point()}
    amp = f"autocast to {dtype_name(setup.autocast)}" if setup.autocast else "no autocast"
    return f"parameters {'/'.join(sorted(dtypes)) or 'none'}, {amp}"


def audit_step(
    model: Model,
    step_fn: Callable[..., Any],
    batches: Sequence[Any],
    *,
    autocast: Union[None, str, torch.dtype] = None,
    loss_scale: float = 1.0,
    reference: str = "float32",
    seed: int = 42,
    progress: Progress = lambda _: None,
) -> AuditReport:
    """
    The audit for scripts without a config. Model, gradients, random state and hooks are afterwards as they were.

    :param model: its parameters in the dtype of the training, on its device
    :param step_fn: called as RETURNN's train step, ``step_fn(model=model, extern_data=batch)``: marks its losses with
        ``mark_as_loss``, or returns one scalar loss
    :param batches: each is given to step_fn; tensors in it, also in dicts, lists and a TensorDict, are cast for the
        reference. Their dims must stay as they are: one batch per set of dims
    :param autocast: dtype of autocast, None for that of the autocast around this call
    :param loss_scale: of a grad scaler
    :param reference: "float32" or "float64"
    :param seed: of the random state before every step
    :param progress: told what runs
    :return: the report; ``print`` shows it as a table
    :raise ValueError: no batch, or an unknown reference
    :raise StepError: step_fn fails also with the upcast on, or in the reference
    """
    batches = list(batches)
    if not batches:
        raise ValueError("audit_step: batches is empty, at least one is needed")
    raw = [p for _, p in named_tensors(model)]
    device = str(raw[0].device) if raw else "cpu"
    if isinstance(autocast, str):
        autocast = getattr(torch, autocast)
    kind = device.split(":")[0]
    if autocast is None and torch.is_autocast_enabled(kind):
        autocast = torch.get_autocast_dtype(kind)
    default = getattr(torch, rf.get_default_float_dtype())
    setup = Setup(
        model,
        step_fn,
        [fixed_batch(batch) for batch in batches],
        [size_of(batch) for batch in batches],
        device=device,
        autocast=autocast,
        float_dtype=None if default == torch.float32 else default,
        loss_scale=loss_scale,
        seed=seed,
    )
    setup.batches = [_as_it_is(batch, data) for batch, data in zip(setup.batches, batches)]
    return audit(setup, name=type(model).__name__, reference=reference, progress=progress)


def _as_it_is(batch: Any, data: Any) -> Any:
    # only the reference casts; the user's batch already has the precision of the training
    return lambda dtype: batch(dtype) if dtype in REFERENCES.values() else data


def size_of(batch: Any) -> str:
    """:return: dims of the first tensor of a batch, in words"""
    from .measure import tensors_in

    data = getattr(batch, "data", batch) if not isinstance(batch, (Tensor, torch.Tensor)) else batch
    first = next(tensors_in(data), None)
    if first is None:
        first = next((x for x in (data.values() if isinstance(data, dict) else [data]) if hasattr(x, "shape")), None)
        return "x".join(map(str, first.shape)) if first is not None else "?"
    return ", ".join(f"{dim.name or '?'} {dim.get_dim_value()}" for dim in first.dims)
