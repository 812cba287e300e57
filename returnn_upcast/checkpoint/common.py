"""
What a checkpoint is, apart from its file format.
"""

from __future__ import annotations
from typing import Any, Dict, Iterator, List, Optional
import dataclasses
import importlib
import sys
import torch
from ..params import cast_tensor, dtype_name

PROGRESS_BYTES = 100_000_000  # smaller files are done before anyone could read it
_CHUNK = 1 << 16  # elements that are cast and written at once: bounds the memory, and stays in the cache


class CheckpointError(Exception):
    """
    A file that cannot be read, written or converted. The message is one line for the user.
    """


@dataclasses.dataclass
class Checkpoint:
    """
    :param arrays: name -> CPU tensor. Files are mapped into memory where the format permits, values are read when used
    :param meta: what else the file says: epoch, step, effective_learning_rate, returnn_version, ...
    :param original_dtypes: name -> dtype before the first cast, such as "float32"
    :param casts: name -> dtype to write it in. Casting happens while writing, piece by piece
    :param allow_overflow: whether finite values may become infinite in such a cast
    :param wrapped: for .pt: {"model": arrays, **meta} as RETURNN writes it, otherwise the bare state dict
    :param module_versions: for .pt: ``_metadata`` of the state dict
    """

    arrays: Dict[str, torch.Tensor]
    meta: Dict[str, Any] = dataclasses.field(default_factory=dict)
    original_dtypes: Dict[str, str] = dataclasses.field(default_factory=dict)
    casts: Dict[str, torch.dtype] = dataclasses.field(default_factory=dict)
    allow_overflow: bool = False
    wrapped: bool = True
    module_versions: Optional[Dict[str, Any]] = None

    def dtype(self, name: str) -> torch.dtype:
        """:return: what it is written in"""
        return self.casts.get(name, self.arrays[name].dtype)

    def nbytes(self, name: str) -> int:
        """:return: size of the array as written"""
        return self.arrays[name].numel() * self.dtype(name).itemsize


class Writing:
    """
    The arrays of a checkpoint on their way into a file: casts, overflows, progress.
    """

    def __init__(self, ckpt: Checkpoint, label: str):
        self.ckpt = ckpt
        self.overflows: List[str] = []
        self._label = label
        self._total = sum(map(ckpt.nbytes, ckpt.arrays))
        self._done = 0
        size = sum(x.numel() * x.element_size() for x in ckpt.arrays.values())
        self._show = max(size, self._total) >= PROGRESS_BYTES

    def chunks(self, name: str) -> Iterator[memoryview]:
        """:return: the bytes of an array, in C order, little endian as all of these formats"""
        # one buffer for all: pages that are new each time cost more than the cast itself
        buffer = torch.empty(_CHUNK, dtype=self.ckpt.dtype(name))
        for chunk in self.ckpt.arrays[name].reshape(-1).split(_CHUNK):
            out = self._cast(name, chunk, buffer)
            data = memoryview(out.contiguous().view(torch.uint8).numpy())
            self._progress(len(data))
            yield data

    def array(self, name: str) -> torch.Tensor:
        """:return: the whole array as it is to be written, for formats that cannot be written in pieces"""
        out = self._cast(name, self.ckpt.arrays[name])
        self._progress(out.numel() * out.element_size())
        return out

    def _cast(self, name: str, x: torch.Tensor, buffer: Optional[torch.Tensor] = None) -> torch.Tensor:
        if self.ckpt.dtype(name) == x.dtype:
            return x
        out, overflow = cast_tensor(x, self.ckpt.dtype(name), buffer)
        if overflow and not self.ckpt.allow_overflow and name not in self.overflows:
            self.overflows.append(name)
        return out

    def _progress(self, nbytes: int):
        before, self._done = self._done, self._done + nbytes
        if self._show and self._done * 10 // self._total > before * 10 // self._total:
            print(f"{self._label}: {self._done * 100 // self._total} %", file=sys.stderr, flush=True)

    def check(self):
        """CheckpointError if finite values became infinite"""
        if self.overflows:
            dtypes = sorted({dtype_name(self.ckpt.dtype(name)) for name in self.overflows})
            raise CheckpointError(
                f"values become infinite in {', '.join(dtypes)} (see allow_overflow): {', '.join(self.overflows)}"
            )


def extra(module: str, name: str) -> Any:
    """
    :param module: to import
    :param name: the extra of this package that it comes with
    """
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise CheckpointError(f"needs {module} ({exc}): pip install 'returnn_upcast[{name}]'") from None
