"""
From a RETURNN config to a :class:`~returnn_upcast.audit.setup.Setup`, with RETURNN's own code for config, data and model.

Nothing of the user's experiment is written: no log file, no checkpoint, no learning rate file, no TensorBoard.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple
import contextlib
import io
import logging
import os
import torch
from returnn import __main__ as returnn_main
from returnn.log import log
from returnn.torch.data.extern_data import raw_dict_can_split_batch, raw_dict_split_batch, raw_dict_to_extern_data
from returnn.util.basic import get_fwd_compat_kwargs
from .setup import Batch, Setup
from .variants import Progress, first_line, user_traceback

# Options with which RETURNN would write files, start processes, or run the step otherwise than plainly.
_OFF: Dict[str, Any] = {
    "use_tensorboard": False,
    "wandb_opts": None,
    "torch_profile": None,
    "torch_watch_stall": None,
    "torch_cuda_graph": None,
    "torch_distributed": None,
    "torch_log_memory_usage": False,
    "watch_memory": False,
    "rf_upcast_audit": None,
}
# Of the options of the data loader, those that need worker processes.
_WORKER_OPTIONS = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout")


class ConfigError(Exception):
    """The config cannot be audited; the message says why, ``trace`` is the user's traceback if it was their code."""

    def __init__(self, message: str, trace: str = ""):
        self.trace = trace
        super().__init__(message)


@contextlib.contextmanager
def _explained(what: str):
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as exc:
        raise ConfigError(f"{what}: {type(exc).__name__}: {first_line(exc)}", user_traceback(exc)) from exc


def load(
    config_file: str, options: Sequence[str], *, steps: int, checkpoint: Optional[str], progress: Progress
) -> Setup:
    """
    :param config_file: RETURNN config
    :param options: as on RETURNN's command line
    :param steps: number of batches
    :param checkpoint: file to load the model from; None for what RETURNN would load when it starts
    :param progress: told what is done
    :return: the step with model and batches
    :raise ConfigError: there is nothing to audit, or it fails
    """
    progress("config")
    config = _config(config_file, options)
    train = config.typed_value("train_step") is not None
    if not train and config.typed_value("forward_step") is None:
        raise ConfigError(f"{config_file}: no train_step and no forward_step in the config")
    with _explained(f"{config_file}: the data"):
        dataset = _dataset(config, train)
    if dataset is None:
        raise ConfigError(f"{config_file}: no data, the config has none of {', '.join(_data_keys(train))}")
    progress("model")
    with _explained(f"{config_file}: the model"):
        engine = _engine(config, checkpoint)
    if checkpoint:
        _load_checkpoint(engine, checkpoint)
    progress("batches")
    with _explained(f"{config_file}: the data"):
        raw = _batches(engine, dataset, train, steps)
    if not raw:
        raise ConfigError(f"{config_file}: no data, the dataset {dataset} has no batch")
    return _setup(engine, raw, train)


def _config(config_file: str, options: Sequence[str]) -> Any:
    if not os.path.isfile(config_file):
        raise ConfigError(f"{config_file}: no such file")
    with _explained(config_file):
        returnn_main.init_config(config_filename=config_file, command_line_options=options)
    config = returnn_main.config
    backend = config.value("backend", None)
    if backend != "torch":
        raise ConfigError(f"{config_file}: backend = {backend!r}, only the torch backend can be audited")
    for key, value in _OFF.items():
        if key in config.typed_dict or key in config.dict:
            config.dict.pop(key, None)
            config.typed_dict[key] = value
    opts = config.typed_value("torch_dataloader_opts") or {}
    opts = {key: value for key, value in opts.items() if key not in _WORKER_OPTIONS}
    config.typed_dict["torch_dataloader_opts"] = {**opts, "num_workers": 0}
    # what RETURNN says is kept, but not in the log file of the experiment
    log.initialize(logs=[logging.StreamHandler(io.StringIO())], verbosity=[3], propagate=True)
    with _explained(config_file):
        returnn_main.init_backend_engine()
        if config.typed_value("startup_callback"):
            config.typed_value("startup_callback")(config=config)
    return config


def _data_keys(train: bool) -> Tuple[str, ...]:
    return ("train", "dev") if train else ("forward_data", "eval", "dev", "train")


def _dataset(config: Any, train: bool) -> Any:
    from returnn.datasets.basic import Dataset

    if config.bool("use_dummy_datasets", False):
        returnn_main.setup_dummy_datasets()
    for key in _data_keys(train):
        defaults = Dataset.get_default_kwargs_train if key == "train" else Dataset.get_default_kwargs_eval
        dataset, _ = returnn_main.load_data(config, 0, key, **defaults(config=config))
        if dataset is not None:
            return dataset
    return None


def _engine(config: Any, checkpoint: Optional[str]) -> Any:
    from returnn.torch.engine import Engine

    if checkpoint:
        # it is loaded afterwards; not what RETURNN would continue from
        for key in ("model", "load", "load_epoch"):
            config.typed_dict.pop(key, None)
            config.dict.pop(key, None)
    engine = Engine(config=config)
    engine._start_epoch = engine.get_train_start_epoch(config)
    engine.init_network_from_config(config)
    engine.set_epoch(engine._start_epoch)
    return engine


def _load_checkpoint(engine: Any, checkpoint: str):
    name = next((n for n in (checkpoint, f"{checkpoint}.pt") if os.path.isfile(n)), None)
    if name is None:
        raise ConfigError(f"--checkpoint {checkpoint}: no such file")
    with _explained(f"--checkpoint {checkpoint}"):
        state = torch.load(name, map_location=engine._device, weights_only=False)
    state = state.get("model", state)
    model = engine.get_pt_model()
    own = model.state_dict()
    missing = sorted(set(own) - set(state))
    shapes = [
        f"{key} is {tuple(state[key].shape)}, the model has {tuple(own[key].shape)}"
        for key in sorted(set(own) & set(state))
        if state[key].shape != own[key].shape
    ]
    if missing or shapes:
        lacks = [f"it lacks {len(missing)} parameters: {', '.join(missing[:5])}"] if missing else []
        raise ConfigError(f"--checkpoint {checkpoint} does not fit the model: {'; '.join(lacks + shapes[:5])}")
    model.load_state_dict({key: state[key] for key in own})


def _batches(engine: Any, dataset: Any, train: bool, steps: int) -> List[Dict[str, Any]]:
    import returnn.frontend as rf

    rf.set_random_seed(engine.config.int("random_seed", 42))
    loader = engine._create_data_loader(dataset, train=train)
    result: List[Dict[str, Any]] = []
    for raw in loader:
        result.append(raw)
        if len(result) == steps:
            break
    return result


def setup_of(engine: Any, step: Callable, batches: List[Batch], sizes: List[str], *, train: bool = True) -> Setup:
    """
    :param engine: RETURNN's torch engine, with a model
    :param step: train_step or forward_step of the config
    :param batches: see :class:`Setup`
    :param sizes: see :class:`Setup`
    :param train: whether step is a train step
    """
    scaler = engine._grad_scaler
    return Setup(
        model=engine._orig_model,
        step=lambda **kwargs: step(**kwargs, **get_fwd_compat_kwargs()),
        batches=batches,
        sizes=sizes,
        device=engine._device,
        autocast=_autocast_dtype(engine),
        float_dtype=engine._default_float_dtype,
        torch_dtype=engine._default_float_dtype,
        loss_scale=float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0,
        train=train,
        seed=engine.config.int("random_seed", 42),
        epoch=engine.epoch,
        global_step=engine.global_train_step,
    )


def _setup(engine: Any, raw: List[Dict[str, Any]], train: bool) -> Setup:
    step = engine.config.typed_value("train_step" if train else "forward_step")
    setup = setup_of(engine, step, [_batch(engine, x) for x in raw], [_size(x) for x in raw], train=train)
    engine.get_pt_model().train(train)
    current = list(raw)

    def halve(i: int) -> Optional[Tuple[Batch, str]]:
        smaller = _half(current[i])
        if smaller is None:
            return None
        current[i] = smaller
        return _batch(engine, smaller), _size(smaller)

    setup.halve = halve
    return setup


def _half(raw: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    if not raw_dict_can_split_batch(raw):
        return None
    data = {key: value for key, value in raw.items() if hasattr(value, "shape")}
    return {**raw, **raw_dict_split_batch(data, splits=2)[0]}


def _autocast_dtype(engine: Any) -> Optional[torch.dtype]:
    if not engine._use_autocast:
        return None
    return engine._autocast_dtype or torch.get_autocast_dtype(engine._device.split(":")[0])


def _batch(engine: Any, raw: Dict[str, Any]) -> Batch:
    # also sets the dims of the batch
    return lambda dtype: raw_dict_to_extern_data(
        raw,
        extern_data_template=engine.extern_data,
        device=engine._device,
        float_dtype=dtype,
        with_eval_targets=True,
    )


def _size(raw: Dict[str, Any]) -> str:
    lens = {key[: -len(":seq_len")]: value for key, value in raw.items() if key.endswith(":seq_len")}
    if not lens:
        first = next(value for value in raw.values() if getattr(value, "ndim", 0))
        return f"{first.shape[0]} sequences"
    key, sizes = next(iter(lens.items()))
    return f"{len(sizes)} sequences, {int(sizes.sum()):,} frames of {key!r}, longest {int(sizes.max()):,}"
