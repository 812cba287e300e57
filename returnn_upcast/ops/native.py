"""
C++ code for the CPU: compiled at the first use, by RETURNN's helper for that and into its cache, and called by ctypes.

It takes a C++ compiler, as ``torch.compile`` does. Without one, callers have the same in torch's ops.
"""

from __future__ import annotations
from typing import Any, Callable, Optional, Sequence
import ctypes
import hashlib
import io
import logging
import os
import threading
import time
import torch
from .fuse import compile_enabled

log = logging.getLogger("returnn.frontend.upcast")

_COMMON = "native.h"
# by what torch's own kernels use on this CPU
_ARCH_FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c"],
}


class Function:
    """One C function, with its sources: ``int name(const void* problem, ..., char* message, size_t size)``"""

    def __init__(self, name: str, *, sources: Sequence[str], argtypes: Sequence[Any], probe: Callable[[], None]):
        """
        :param name: of the function; in log messages as well
        :param sources: files in this folder, the last one is compiled, the others belong to it
        :param argtypes: ctypes of the arguments after the problem
        :param probe: calls it, once, after loading; an error means that it can't be used here
        """
        self.name = name
        self._sources, self._argtypes, self._probe = [_COMMON, *sources], argtypes, probe
        self._function: Any = None
        self._usable: Optional[bool] = None  # not known before the first use
        self._lock = threading.Lock()

    def is_available(self) -> bool:
        """:return: whether it may be called; compiles it if not done yet"""
        if not compile_enabled():
            return False
        if self._usable is None:
            with self._lock:
                if self._usable is None:
                    self._usable = self._try_to_load()
        return self._usable

    def __call__(self, problem: Sequence[int], *args: Any):
        """
        :param problem: the fields of the source's struct Problem, all of 64 bit: numbers and pointers
        :param args: the other arguments
        :raise RuntimeError: with the message of an exception of the C++ code; or it is not available
        """
        if self._function is None and not self.is_available():
            raise RuntimeError(f"rf_upcast: no native {self.name} here")
        message = ctypes.create_string_buffer(500)
        if self._function((ctypes.c_int64 * len(problem))(*problem), *args, message, len(message)):
            raise RuntimeError(f"rf_upcast: native {self.name} failed: {message.value.decode()}")

    def _try_to_load(self) -> bool:
        start = time.perf_counter()
        try:
            self._function = self._load()
            self._probe()
        except Exception as exc:
            reason = f"{type(exc).__name__}: " + str(exc).strip().split("\n")[0][:200]
            log.warning("rf_upcast: no native %s here (%s), using torch's ops", self.name, reason)
            self._function = None
            return False
        log.info("rf_upcast: compiled native %s in %.1f s", self.name, time.perf_counter() - start)
        return True

    def _load(self) -> Any:
        from returnn.torch.util.native_op_code_compiler import OpCodeCompiler

        capability = torch.backends.cpu.get_cpu_capability()
        if capability not in _ARCH_FLAGS:
            raise NotImplementedError(f"the CPU is {capability}, not one of {', '.join(_ARCH_FLAGS)}")
        flags = ["-O3", "-fopenmp", *_ARCH_FLAGS[capability]]

        class Compiler(OpCodeCompiler):
            """for the same instructions as torch's own kernels"""

            def _transform_compiler_opts(self, opts):
                return [*super()._transform_compiler_opts(opts), *flags]

        compiler = Compiler(
            f"returnn_upcast_{self.name}",
            code=self._code(flags),
            include_paths=[os.path.dirname(__file__)],
            use_cuda_if_available=False,
            c_macro_defines={"CPU_CAPABILITY": capability, f"CPU_CAPABILITY_{capability}": 1},
            log_stream=io.StringIO(),  # it prints the command; only if that fails, what the compiler says
        )
        function = getattr(compiler.load_lib_ctypes(), self.name)
        function.argtypes = [ctypes.c_void_p, *self._argtypes, ctypes.c_char_p, ctypes.c_size_t]
        return function

    def _code(self, flags: Sequence[str]) -> str:
        code = f"// {' '.join(flags)}\n"
        for name in self._sources:  # the cache goes by the code, so it has the flags and the sources' hashes in it
            with open(os.path.join(os.path.dirname(__file__), name), "rb") as source:
                code += f"// {name} {hashlib.sha256(source.read()).hexdigest()}\n"
        return f'{code}#include "{self._sources[-1]}"\n'


def is_readable(x: torch.Tensor) -> bool:
    """:return: whether C++ code may read x by its pointer"""
    return x.device.type == "cpu" and not x.is_neg() and not x._is_zerotensor()


def readable(x: torch.Tensor) -> torch.Tensor:
    """:return: x, on the CPU, or a copy for which :func:`is_readable`"""
    return x if is_readable(x) else x.clone()
