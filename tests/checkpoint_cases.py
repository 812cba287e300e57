"""
What the tests of checkpoint files share: a checkpoint as RETURNN saves it, the command line, and comparing all bits.
"""

from __future__ import annotations
import argparse
import os
import pathlib
import pytest
import torch
from returnn_upcast import checkpoint as C
from returnn_upcast.checkpoint import cli
from param_models import decoder, same_bits, state_dict

F32, BF16 = torch.float32, torch.bfloat16
META = {"epoch": 7, "step": 1234, "effective_learning_rate": 1e-3 / 3, "returnn_version": "1.20261022"}
NEEDS = {".safetensors": ["safetensors"], ".msgpack": ["msgpack"], ".orbax": ["orbax.checkpoint"], ".pt": []}


def need(*endings):
    """skips the test where the libraries of these formats are not installed"""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for ending in endings:
        for module in NEEDS[ending]:
            pytest.importorskip(module)


def save(path, model=None, meta=None):
    """as RETURNN's engine does"""
    torch.save({"model": model or state_dict(decoder()), **(META if meta is None else meta)}, path)
    return str(path)


def run(*args) -> int:
    """the command line, its exit status"""
    parser = argparse.ArgumentParser()
    cli.add_commands(parser.add_subparsers())
    args = parser.parse_args(list(map(str, args)))
    return args.func(args)


def env():
    """so that a subprocess finds the package"""
    return {**os.environ, "PYTHONPATH": str(pathlib.Path(C.__file__).parents[2])}


def same(a, b) -> bool:
    """the same names, and every bit the same"""
    return set(a) == set(b) and all(same_bits(a[name], b[name]) for name in a)
