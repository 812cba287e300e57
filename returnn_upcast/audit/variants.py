"""
The train step as float32 reference, with the upcast off, on, and on but for one op: losses and gradients compared.

Batch by batch, so that only one reference gradient is kept.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, List, Optional, Sequence, Set
import dataclasses
import math
import time
import traceback
import torch
from returnn.tensor import Tensor
from ..policy import ALL_OPS, OPS, UpcastPolicy
from .report import LossResult, Noise, ParamError, Variant
from .setup import Batch, Mode, Setup, environment, named_tensors, run_step

WORST_PARAMS = 5
TIMING_ROUNDS = 3

Progress = Callable[[str], None]


class StepError(Exception):
    """The user's step failed where it must not: in the reference, or with the upcast as well as without."""

    def __init__(self, variant: str, exc: BaseException):
        self.variant = variant
        self.trace = user_traceback(exc)
        super().__init__(f"the step failed in variant {variant!r}: {type(exc).__name__}: {first_line(exc)}")


def first_line(exc: BaseException) -> str:
    """:return: first line of the message, RETURNN's and torch's are long"""
    return (str(exc).strip().splitlines() or [""])[0][:300]


def is_out_of_memory(exc: BaseException) -> bool:
    """:return: whether that is why it was raised; on the CPU, torch has no type for it"""
    return isinstance(exc, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(exc)


def user_traceback(exc: BaseException) -> str:
    """:return: traceback without the frames of the audit"""
    frames = [f for f in traceback.extract_tb(exc.__traceback__) if "/returnn_upcast/audit/" not in f.filename]
    return "".join(traceback.format_list(frames) + traceback.format_exception_only(type(exc), exc))


@dataclasses.dataclass
class Outcome:
    """Of one step: losses (or outputs), and gradients by parameter"""

    losses: Dict[str, float]
    outputs: Dict[str, torch.Tensor]
    grads: Dict[str, Optional[torch.Tensor]]
    seconds: float
    memory: Optional[int] = None


def run(setup: Setup, batch: Batch, mode: Mode, *, memory: bool = False) -> Outcome:
    """
    :param batch: one of those of setup
    :param memory: measure it
    :return: of one forward and backward. Raises what the user's step raises
    """
    cuda = setup.device_type == "cuda"
    with environment(setup, mode), torch.set_grad_enabled(setup.train):
        if cuda:
            torch.cuda.synchronize()
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        ctx = run_step(setup, batch, mode)
        outputs: Dict[str, torch.Tensor] = {}
        used = None
        if setup.train:
            total = ctx.total_loss()
            raw = total.raw_tensor if isinstance(total, Tensor) else None
            if memory and not cuda and raw is not None:
                used = kept_for_backward(raw, setup)
            if raw is not None and raw.requires_grad:
                scale = setup.loss_scale if mode.dtype is None else 1.0
                (raw.to(torch.promote_types(raw.dtype, torch.float32)) * scale if scale != 1.0 else raw).backward()
        else:
            outputs = {name: x.raw_tensor for name, x in ctx.outputs.data.items() if _is_float(x)}
        if cuda:
            torch.cuda.synchronize()
            used = torch.cuda.max_memory_allocated() - base
        seconds = time.perf_counter() - start
        losses = {name: _value(loss) for name, loss in ctx.losses.items()}
        return Outcome(losses, outputs, _gradients(setup, mode), seconds, used)


def _is_float(x: Tensor) -> bool:
    return isinstance(x.raw_tensor, torch.Tensor) and x.raw_tensor.is_floating_point()


def _value(loss: Any) -> float:
    norm = loss.get_inv_norm_factor()
    return float(loss.get_summed_loss().raw_tensor.detach()) / max(float(getattr(norm, "raw_tensor", norm)), 1.0)


def _gradients(setup: Setup, mode: Mode) -> Dict[str, Optional[torch.Tensor]]:
    scale = setup.loss_scale if mode.dtype is None else 1.0
    grads = {name: p.grad for name, p in named_tensors(setup.model) if p.requires_grad}
    if scale != 1.0:
        grads = {name: None if g is None else g.float() / scale for name, g in grads.items()}
    return grads


def kept_for_backward(loss: torch.Tensor, setup: Setup) -> int:
    """:return: bytes of the tensors that the graph of loss keeps, without the parameters"""
    known = {p.untyped_storage().data_ptr() for _, p in named_tensors(setup.model)}
    sizes: Dict[int, int] = {}
    stack, seen = [loss.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        stack += [next_node for next_node, _ in node.next_functions]
        for tensor in _saved(node):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def _saved(node: Any) -> Sequence[torch.Tensor]:
    result: List[Any] = []
    for name in [n for n in dir(node) if n.startswith("_saved_") or n == "saved_tensors"]:
        try:
            value = getattr(node, name)
        except RuntimeError:  # changed in place, or freed
            continue
        result += value if isinstance(value, (list, tuple)) else [value]
    return [x for x in result if isinstance(x, torch.Tensor) and x.layout == torch.strided]


class Comparison:
    """Sums up one variant against the reference, batch by batch"""

    def __init__(self, name: str, policy: UpcastPolicy):
        self.result = Variant(name, sorted(policy.ops))
        self.policy = policy
        self._losses: Dict[str, List[Sequence[float]]] = {}
        self._grads: Dict[str, List[float]] = {}

    def add(self, reference: Outcome, outcome: Outcome):
        """:param reference: of the same batch as outcome"""
        for name, value in outcome.losses.items():
            self._add_loss(name, value, reference.losses[name], None)
            self.result.nonfinite += not math.isfinite(value) and math.isfinite(reference.losses[name])
        for name, out in outcome.outputs.items():
            want = reference.outputs[name].double()
            same = out.shape == want.shape  # a decision, e.g. in a search, may have become another one
            diff = float((out.double() - want).norm() / want.norm().clamp(min=1e-30)) if same else math.inf
            self._add_loss(name, float(out.double().norm()), float(want.norm()), diff)
        here = [0.0, 0.0]
        for name, want in reference.grads.items():
            diff, size, bad = gradient_difference(outcome.grads.get(name), want)
            for sums in (here, self._grads.setdefault(name, [0.0, 0.0])):
                sums[0] += diff
                sums[1] += size
            self.result.nonfinite += bad
        if here[1] > 0:
            self.result.batch_errors.append(math.sqrt(here[0] / here[1]))

    def _add_loss(self, name: str, value: float, want: float, diff: Optional[float]):
        if diff is None:
            diff = relative(value, want)
        self._losses.setdefault(name, []).append((value, want, diff))

    def finish(self) -> Variant:
        """:return: the sums as relative errors"""
        mean = lambda rows, i: sum(row[i] for row in rows) / len(rows)
        self.result.losses = [LossResult(n, mean(r, 0), mean(r, 1), mean(r, 2)) for n, r in self._losses.items()]
        total = sum(size for _, size in self._grads.values())
        if total > 0:
            self.result.gradient_error = math.sqrt(sum(diff for diff, _ in self._grads.values()) / total)
            errors = [
                ParamError(n, math.sqrt(diff / size), math.sqrt(size / total))
                for n, (diff, size) in self._grads.items()
                if size > 1e-14 * total  # what has no gradient but rounding errors is no finding
            ]
            self.result.median_param_error = sorted(e.error for e in errors)[len(errors) // 2]
            self.result.worst_params = sorted(errors, key=lambda e: -e.error)[:WORST_PARAMS]
        return self.result


def relative(value: float, want: float) -> float:
    """:return: |value - want| / |want|"""
    if value == want:
        return 0.0
    return abs(value - want) / max(abs(want), 1e-30) if math.isfinite(value) else math.inf


def gradient_difference(grad: Optional[torch.Tensor], want: Optional[torch.Tensor]):
    """:return: squared norm of the difference, that of want, and how many elements are not finite. None is zero"""
    if want is None and grad is None:
        return 0.0, 0.0, 0
    wide = lambda g, other: torch.zeros_like(other, dtype=torch.float64) if g is None else g.double()
    a, b = wide(grad, want), wide(want, grad)
    bad = int((~torch.isfinite(a)).sum())
    diff = float((a - b).square().sum())
    return math.inf if bad else diff, float(b.square().sum()), bad


def make_policies(setup: Setup, configured: UpcastPolicy, used: Set[str]) -> Dict[str, UpcastPolicy]:
    """
    :param configured: of the config: opt-in ops that are on there are on in every variant but "off"
    :param used: the ops that the model has in low precision
    :return: variant -> policy
    """
    on = UpcastPolicy(frozenset(OPS) | configured.ops)
    result = {"off": UpcastPolicy(), "on": on}
    alone = [op for op in ALL_OPS if op in used and op in on]
    if len(alone) > 1 and setup.train:
        result.update({f"on without {op}": UpcastPolicy(on.ops - {op}) for op in alone})
    return result


def compare(
    setup: Setup, policies: Dict[str, UpcastPolicy], reference_dtype: torch.dtype, progress: Progress
) -> List[Variant]:
    """
    :param policies: variant -> policy
    :param reference_dtype: float32 or float64
    :param progress: told what runs
    :return: one per policy. A variant that raises is reported with its exception, unless the reference raises
    """
    rows = {name: Comparison(name, policy) for name, policy in policies.items()}
    for i, batch in enumerate(setup.batches):
        where = f"batch {i + 1} of {len(setup.batches)}"
        progress(f"{where}: reference")
        try:
            reference = run(setup, batch, Mode(dtype=reference_dtype))
        except Exception as exc:
            if is_out_of_memory(exc):
                raise
            raise StepError("reference", exc) from exc
        for name, row in rows.items():
            if row.result.error is None:
                progress(f"{where}: {name}")
                _run_variant(setup, batch, row, reference, memory=i == 0)
    _time(setup, rows, progress)
    return [row.finish() for row in rows.values()]


def _run_variant(setup: Setup, batch: Batch, row: Comparison, reference: Outcome, *, memory: bool):
    try:
        outcome = run(setup, batch, Mode(row.policy), memory=memory)
    except Exception as exc:
        row.result.error = f"{type(exc).__name__}: {first_line(exc)}"
        row.result.traceback = user_traceback(exc)
        return
    row.add(reference, outcome)
    if memory:
        row.result.memory = outcome.memory


def _time(setup: Setup, rows: Dict[str, Comparison], progress: Progress):
    # Everything is compiled by now. In turns, so that a change of the machine's speed hits all.
    for i in range(TIMING_ROUNDS):
        progress(f"time, round {i + 1} of {TIMING_ROUNDS}")
        for name, row in rows.items():
            if row.result.error is None and (i == 0 or name in ("off", "on")):
                seconds = run(setup, setup.batches[0], Mode(row.policy)).seconds
                row.result.seconds = min(seconds, row.result.seconds or math.inf)


def noise(setup: Setup, policy: UpcastPolicy, progress: Progress) -> List[Noise]:
    """
    :param policy: of the variant that is compared with itself
    :return: of another dropout seed, where there is dropout, and of another reduction order
    """
    batch, result = setup.batches[0], []
    progress("noise: dropout")
    a, b = (run(setup, batch, Mode(policy, dropout=True, seed_offset=i)) for i in (1, 2))
    plain = run(setup, batch, Mode(policy, seed_offset=1))
    if a.losses != plain.losses:
        result.append(_noise("dropout", a, b))
    progress("noise: reduction order")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        other = run(setup, batch, Mode(policy, seed_offset=1))
    finally:
        torch.set_num_threads(threads)
    result.append(_noise("order", plain, other))
    return result


def _noise(kind: str, a: Outcome, b: Outcome) -> Noise:
    row = Comparison(kind, UpcastPolicy())
    row.add(a, b)
    found = row.finish()
    return Noise(kind, found.gradient_error, max((x.difference for x in found.losses), default=0.0))
