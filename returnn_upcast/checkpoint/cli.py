"""
Command line: cast, convert, inspect and compare checkpoints.
"""

from __future__ import annotations
from typing import Any, Callable, Dict, Optional
import argparse
import functools
import json
import sys
from ..params import dtype_report
from . import casting
from .common import CheckpointError
from .comparing import compare
from .files import FORMATS, format_of, read, write
from .flax import checkpoint_from_flax, checkpoint_to_flax


def add_commands(subparsers: Any):
    """
    :param subparsers: of :mod:`argparse`. Each command sets ``func``, which takes the parsed arguments
        and returns the exit code: 0, 1 (compare: too different), or 2 (bad input, with one line on stderr)
    """
    formats = f"formats by ending: {', '.join(FORMATS)}"
    modules = "JSON of the module map (returnn_upcast.checkpoint.module_map)"

    def add(name: str, func: Callable[[argparse.Namespace], int], help_: str, *files: str) -> argparse.ArgumentParser:
        parser = subparsers.add_parser(name, help=help_, description=f"{help_}; {formats}")
        for file in files:
            parser.add_argument(file)
        parser.set_defaults(func=func)
        return parser

    parser = add("cast", _cast, "change the dtype of a checkpoint's parameters", "input", "output")
    parser.add_argument("--dtype", required=True, help="bfloat16, float16, float32, float64; or original: undo casts")
    parser.add_argument(
        "--keep-float32", nargs="+", default=[], metavar="GLOB", help="names that are float32 instead, or: norms"
    )
    parser.add_argument("--modules", metavar="FILE", help=f"{modules}: to find the norms")
    parser.add_argument("--allow-overflow", action="store_true", help="finite values may become infinite")
    parser = add("convert", _convert, "convert a checkpoint to another format, bit by bit", "input", "output")
    parser.add_argument("--modules", metavar="FILE", help=f"{modules}: to or from Flax's names and layouts in .msgpack")
    parser = add("inspect", _inspect, "print a checkpoint's metadata, modules and dtypes", "file")
    parser = add("compare", _compare, "print how much two checkpoints differ", "a", "b")
    parser.add_argument("--tol", type=float, default=0.0, help="exit 1 if a parameter's relative difference is above")


def _command(func: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    @functools.wraps(func)
    def run(args: argparse.Namespace) -> int:
        try:
            return func(args)
        except (CheckpointError, ImportError, TypeError, ValueError) as exc:
            print(f"error: {exc}", file=sys.stderr)
            return 2

    return run


def _read_modules(path: Optional[str]) -> Optional[Dict[str, Optional[str]]]:
    if path is None:
        return None
    try:
        with open(path, encoding="utf8") as file:
            return json.load(file)
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"cannot read {path}: {exc}") from None


@_command
def _cast(args: argparse.Namespace) -> int:
    format_of(args.output)
    modules = _read_modules(args.modules)
    ckpt = read(args.input)
    if args.dtype != casting.ORIGINAL and args.keep_float32:
        names = casting.kept(ckpt, args.keep_float32, modules)
        print(f"float32: {', '.join(names)}")
    options = {"keep_float32": args.keep_float32, "modules": modules, "allow_overflow": args.allow_overflow}
    write(args.output, casting.cast(ckpt, args.dtype, **options), inputs=[args.input])
    return 0


@_command
def _convert(args: argparse.Namespace) -> int:
    fmt = format_of(args.output)
    modules = _read_modules(args.modules)
    ckpt = read(args.input)
    if modules is not None:
        flax = FORMATS[".msgpack"]
        if (format_of(args.input) is flax) == (fmt is flax):
            raise CheckpointError("--modules: converts between Flax .msgpack and another format, got neither or both")
        ckpt = (checkpoint_to_flax if fmt is flax else checkpoint_from_flax)(modules, ckpt)
    write(args.output, ckpt, inputs=[args.input])
    return 0


@_command
def _inspect(args: argparse.Namespace) -> int:
    ckpt = read(args.file)
    print(f"{args.file}: {format_of(args.file).name}, {len(ckpt.arrays)} arrays")
    for key, value in ckpt.meta.items():
        print(f"{key}: {str(value)[:200]}")
    if ckpt.original_dtypes:
        print(f"before the first cast: {', '.join(sorted(set(ckpt.original_dtypes.values())))}")
    print(dtype_report(ckpt.arrays))
    return 0


@_command
def _compare(args: argparse.Namespace) -> int:
    difference = compare(read(args.a), read(args.b))
    print(difference)
    return 1 if difference.worst() > args.tol else 0
