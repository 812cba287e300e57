"""
Read and write checkpoint files: the table of formats, and writing so that a file is there whole or not at all.
"""

from __future__ import annotations
from typing import Callable, Iterator, Sequence
import contextlib
import dataclasses
import os
import shutil
import stat
import tempfile
import torch
from . import msgpack_file, orbax_file, safetensors_file, torch_file
from .common import Checkpoint, CheckpointError, Writing


@dataclasses.dataclass(frozen=True)
class Format:
    """
    :param name: for people
    :param read: path -> checkpoint. Any exception means that the file is not of this format, or damaged
    :param write: writes to a path that does not exist yet
    """

    name: str
    read: Callable[[str], Checkpoint]
    write: Callable[[str, Writing], None]


_TORCH = Format("PyTorch", torch_file.read, torch_file.write)
FORMATS = {
    ".pt": _TORCH,
    ".pth": _TORCH,
    ".bin": _TORCH,
    ".safetensors": Format("safetensors", safetensors_file.read, safetensors_file.write),
    ".msgpack": Format("Flax msgpack", msgpack_file.read, msgpack_file.write),
    ".orbax": Format("RETURNN JAX (Orbax)", orbax_file.read, orbax_file.write),
}


def format_of(path: str) -> Format:
    """:return: by the ending. CheckpointError for an unknown one"""
    ending = os.path.splitext(path.rstrip("/"))[1]
    if ending not in FORMATS:
        raise CheckpointError(f"{path}: unknown ending {ending!r}, known: {', '.join(FORMATS)}")
    return FORMATS[ending]


def read(path: str) -> Checkpoint:
    """
    :param path: format by its ending, see :data:`FORMATS`. Reading cannot run code from the file
    :return: flat name -> tensor, with dtypes kept; metadata. CheckpointError if the file is damaged or of another kind
    """
    path = os.fspath(path)
    fmt = format_of(path)
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: does not exist")
    try:
        if os.path.isfile(path):
            open(path, "rb").close()
    except OSError as exc:
        raise CheckpointError(f"cannot read {path}: {exc}") from exc
    try:
        return fmt.read(path)
    except CheckpointError as exc:
        raise CheckpointError(str(exc) if path in str(exc) else f"{path}: {exc}") from None
    except Exception as exc:  # damaged and foreign files raise anything, deep inside of the libraries
        reason = str(exc).strip().splitlines()[0][:200] if str(exc).strip() else ""
        raise CheckpointError(
            f"{path}: truncated, or no {fmt.name} checkpoint ({type(exc).__name__}: {reason})"
        ) from exc


def write(path: str, ckpt: Checkpoint, *, inputs: Sequence[str] = ()):
    """
    :param path: format by its ending. What is there already stays as it is until all is written, then it is replaced
    :param ckpt: with pending casts, which are done on the way
    :param inputs: files that must not be overwritten
    """
    path = os.fspath(path).rstrip("/")
    fmt = format_of(path)
    for name in inputs:
        if _overlap(os.fspath(name), path):
            raise CheckpointError(f"{path}: is the input {name}, write to another file")
    writing = Writing(ckpt, f"writing {path}")
    with _replacing(path) as tmp, _one_thread():
        fmt.write(tmp, writing)
        writing.check()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    # casting piece by piece is bound by memory; threads that wait for each other at every piece only slow it down
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _overlap(a: str, b: str) -> bool:
    """:return: whether they are the same, by links too, or one is inside of the other, as .orbax is a directory"""
    if os.path.exists(a) and os.path.exists(b) and os.path.samefile(a, b):
        return True
    a, b = (os.path.realpath(path) + os.sep for path in (a, b))
    return a.startswith(b) or b.startswith(a)


@contextlib.contextmanager
def _replacing(path: str) -> Iterator[str]:
    """:return: temporary path in the same directory. It takes the place of path if all went well, else it is removed"""
    # an existing file without any write permission is meant to stay, also for root
    if os.path.exists(path) and not os.stat(path).st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise CheckpointError(f"cannot write {path}: it is read-only")
    path = os.path.realpath(path)  # through a link: its target is replaced, the link stays
    folder, name = os.path.split(path)
    tmp_folder = None
    try:
        # a folder, as Orbax writes more than one entry; in the same place, as renaming must not copy
        tmp_folder = tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
        tmp = os.path.join(tmp_folder, name)
        yield tmp
        _sync(tmp)
        _exchange(tmp, path)
        _sync(folder)
    except (OSError, MemoryError) as exc:
        raise CheckpointError(f"cannot write {path}: {exc}") from exc
    finally:
        if tmp_folder:
            shutil.rmtree(tmp_folder, ignore_errors=True)


def _exchange(tmp: str, path: str):
    if not (os.path.isdir(tmp) and os.path.exists(path)):
        os.replace(tmp, path)
        return
    # directories cannot be replaced in one step: the old one goes aside, and comes back if that fails
    aside = f"{tmp}.old"
    os.rename(path, aside)
    try:
        os.rename(tmp, path)
    except BaseException:
        os.rename(aside, path)
        raise


def _sync(path: str):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
