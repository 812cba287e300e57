"""
One step of the user's training, runnable in any precision and under any policy, and leaving nothing behind.
"""

from __future__ import annotations
from typing import Any, Callable, Iterator, List, Optional, Tuple, Union
import contextlib
import dataclasses
import torch
import returnn.frontend as rf
from returnn.frontend import run_ctx
from returnn.tensor import Tensor, TensorDict
from .. import dtypes
from ..policy import UpcastPolicy, scope

Model = Union[rf.Module, torch.nn.Module]
# Gets the float dtype of its input tensors, None for the one they have.
Batch = Callable[[Optional[torch.dtype]], Any]


@dataclasses.dataclass
class Setup:
    """
    :param model: its parameters in the dtype of the training
    :param step: ``step(model=..., extern_data=...)``, RETURNN's train or forward step
    :param batches: one callable each: the dims of a batch are set when it is made
    :param sizes: of each batch, in words
    :param device: e.g. "cpu"
    :param autocast: its dtype, None without autocast
    :param float_dtype: default float dtype of the training, None for float32
    :param torch_dtype: torch's default dtype in the training; RETURNN's engine sets it to float_dtype. None: as it is
    :param loss_scale: of the grad scaler
    :param train: whether step is a train step, with losses
    :param seed: before every step
    :param epoch: seen by the model
    :param global_step: the same
    :param halve: makes a batch of half the sequences out of the batch of that index, None if there is one sequence only
    """

    model: Model
    step: Callable[..., Any]
    batches: List[Batch]
    sizes: List[str]
    device: str = "cpu"
    autocast: Optional[torch.dtype] = None
    float_dtype: Optional[torch.dtype] = None
    torch_dtype: Optional[torch.dtype] = None
    loss_scale: float = 1.0
    train: bool = True
    seed: int = 42
    epoch: int = 1
    global_step: int = 0
    halve: Optional[Callable[[int], Optional[Tuple[Batch, str]]]] = None

    @property
    def device_type(self) -> str:
        """:return: without the index"""
        return self.device.split(":")[0]

    @property
    def low(self) -> Optional[torch.dtype]:
        """:return: the low-precision dtype that takes part by the settings, None if all is float32"""
        dtypes = [self.autocast, self.float_dtype, *(p.dtype for _, p in named_tensors(self.model))]
        return next((d for d in dtypes if d is not None and d.is_floating_point and d.itemsize < 4), None)


@dataclasses.dataclass(frozen=True)
class Mode:
    """
    :param policy: in effect during the step
    :param dtype: everything (parameters, inputs, default dtype) in this one without autocast; None: as the config says
    :param dropout: whether dropout is on. Its masks depend on dtype and implementation, so for comparisons it is off
    :param seed_offset: another random state
    """

    policy: UpcastPolicy = UpcastPolicy()
    dtype: Optional[torch.dtype] = None
    dropout: bool = False
    seed_offset: int = 0


def named_tensors(model: Model) -> List[Tuple[str, torch.Tensor]]:
    """:return: parameters and buffers, raw, by name; of an RF module with auxiliary ones"""
    if isinstance(model, rf.Module):
        return [(name, param.raw_tensor) for name, param in model.named_parameters()]
    return [*model.named_parameters(), *model.named_buffers()]


def dtype_name(dtype: torch.dtype) -> str:
    """:return: RETURNN's name"""
    return str(dtype).split(".")[1]


@contextlib.contextmanager
def parameters(model: Model, dtype: Optional[torch.dtype]) -> Iterator[None]:
    """
    Context with the parameters in dtype and without gradients. Afterwards data, dtype and gradient are as before:
    what the step does to buffers (running statistics) is undone.
    """
    own = {id(p.raw_tensor): p for _, p in model.named_parameters()} if isinstance(model, rf.Module) else {}
    saved = []
    for _, raw in named_tensors(model):
        param = own.get(id(raw))
        saved.append((raw, raw.data, raw.grad, raw.requires_grad, param, param.dtype if param is not None else None))
    try:
        for raw, data, _, requires_grad, param, _ in saved:
            raw.grad = None
            change = dtype is not None and data.is_floating_point()
            new = data.to(dtype) if change else data
            # what gets no gradient may be a buffer, which the step updates in place
            trained = requires_grad and not (param is not None and param.auxiliary)
            raw.data = new if trained or new is not data else data.clone()
            if param is not None:
                param.dtype = dtype_name(raw.dtype)
        yield
    finally:
        for raw, data, grad, _, param, name in saved:
            raw.grad, raw.data = None, data
            raw.grad = grad
            if param is not None:
                param.dtype = name
                param.raw_tensor = raw


@contextlib.contextmanager
def _torch_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _torch_dropout_off(model: Model) -> Iterator[None]:
    found = [m for m in model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.training]
    for module in found:
        module.training = False
    try:
        yield
    finally:
        for module in found:
            module.training = True


@contextlib.contextmanager
def environment(setup: Setup, mode: Mode) -> Iterator[None]:
    """
    Context for a step in the given mode and its backward: policy, parameters, random state. Undone afterwards.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, run_ctx, "_run_ctx", run_ctx._run_ctx)
        stack.enter_context(parameters(setup.model, mode.dtype))
        stack.enter_context(torch.random.fork_rng(devices=range(torch.cuda.device_count())))
        stack.enter_context(scope(mode.policy))
        if mode.dtype is not None:
            # a reference runs once per batch, which compiling would not be worth
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # RETURNN reduces the losses and goes backward outside of autocast
        stack.enter_context(torch.autocast(setup.device_type, enabled=False))
        yield


@contextlib.contextmanager
def _step_context(setup: Setup, mode: Mode) -> Iterator[None]:
    # what RETURNN's engine puts around the train step, and nothing else
    dtype = mode.dtype or setup.float_dtype or torch.float32
    amp = mode.dtype is None and setup.autocast is not None
    with contextlib.ExitStack() as stack:
        if amp:
            stack.enter_context(torch.autocast(setup.device_type, dtype=setup.autocast))
        stack.enter_context(rf.set_default_device_ctx(setup.device))
        stack.enter_context(rf.set_default_float_dtype_ctx(dtype_name(dtype)))
        stack.enter_context(_torch_default_dtype(mode.dtype or setup.torch_dtype or torch.get_default_dtype()))
        if not mode.dropout:
            stack.enter_context(rf.get_run_ctx().train_flag_ctx(False, func=rf.dropout))
            stack.enter_context(_torch_dropout_off(setup.model))
        yield


def run_step(setup: Setup, batch: Batch, mode: Mode) -> Any:
    """
    :return: RETURNN's run context with the losses or outputs; a tensor that the step returns is a loss "loss".
        Within :func:`environment`.
    """
    if setup.train:
        rf.init_train_step_run_ctx(train_flag=True, step=setup.global_step, epoch=setup.epoch)
    else:
        rf.init_forward_step_run_ctx(step=setup.global_step, epoch=setup.epoch)
    rf.set_random_seed(setup.seed + mode.seed_offset)
    data = batch(mode.dtype or setup.float_dtype)
    with _step_context(setup, mode):
        result = setup.step(model=setup.model, extern_data=data)
    ctx = rf.get_run_ctx()
    if setup.train and not ctx.losses:
        if isinstance(result, torch.Tensor):
            result = rf.convert_to_tensor(result, dims=[]) if result.ndim == 0 else None
        if not isinstance(result, Tensor):
            raise NoLossError("the train step marks no loss (mark_as_loss), and returns none")
        result.mark_as_loss("loss")
    return ctx


class NoLossError(Exception):
    """the train step has no loss"""


def fixed_batch(data: Any) -> Batch:
    """
    :param data: tensors, raw or RETURNN's, in dicts, lists or a TensorDict
    :return: the batch, which casts their floats. The data keeps its own precision
    """
    return lambda dtype: data if dtype is None else _cast(data, dtype)


def _cast(data: Any, dtype: torch.dtype) -> Any:
    if isinstance(data, TensorDict):
        return TensorDict({key: _cast(x, dtype) for key, x in data.data.items()})
    if isinstance(data, Tensor):
        cast = data.raw_tensor is not None and dtypes.is_float(data.dtype)
        return rf.cast(data, dtype_name(dtype)) if cast else data
    if isinstance(data, torch.Tensor):
        return data.to(dtype) if data.is_floating_point() else data
    if isinstance(data, dict):
        return {key: _cast(x, dtype) for key, x in data.items()}
    if isinstance(data, (list, tuple)):
        return type(data)(_cast(x, dtype) for x in data)
    return data
