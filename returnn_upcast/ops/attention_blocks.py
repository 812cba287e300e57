"""
Attention in blocks that fit into the cache: energies, softmax and weighted sum in float32, nothing quadratic is kept.

Entries (batch and heads) are taken by chunks, in float32; a block is some of a chunk's entries and some of the queries,
with all keys. The products have float32 operands, but most of them are exact in bf16 (f16),
and there the fast modes of the hardware lose nothing, see :meth:`Blocks.products`.
"""

from __future__ import annotations
from typing import ContextManager, Iterator, NamedTuple, Optional, Tuple
import contextlib
import functools
import itertools
import math
import platform
import torch
from .attention_plain import Inputs, Options

# Elements of a block; its queries where fewer queries save work (causal, relative positions); entries of a chunk.
# On the CPU, two or three float32 buffers of a block are to stay in the L2 cache. Other devices want few large calls.
_SIZES = {"cpu": (400_000, 128, 8)}
_SIZES_ELSEWHERE = (1 << 26, 1024, 1 << 26)

# Operands of which dtype are exact in which mode of float32 products. All modes accumulate in float32.
_EXACT_MODES = {("cpu", torch.bfloat16): "bf16", ("cuda", torch.bfloat16): "tf32", ("cuda", torch.float16): "tf32"}
_LEGACY_MODES = {"bf16": "medium", "tf32": "high", "ieee": "highest"}  # before torch 2.9: one setting for all devices


@contextlib.contextmanager
def _products(device_type: str, mode: str) -> Iterator[None]:
    """
    :param mode: how float32 matrix products read their operands on that device: "ieee", "tf32", "bf16"
    """
    module = {"cpu": torch.backends.mkldnn, "cuda": torch.backends.cuda}.get(device_type)
    if module is None:
        yield
    elif hasattr(torch.backends.mkldnn, "matmul"):
        before = module.matmul.fp32_precision
        module.matmul.fp32_precision = mode
        try:
            yield
        finally:
            module.matmul.fp32_precision = before
    else:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(_LEGACY_MODES[mode])
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)


@functools.lru_cache()
def _onednn_rounds() -> bool:
    """
    :return: False if the mode "bf16" merely chooses oneDNN's float32 kernels, which are up to twice as fast as those
        of MKL. On x86, they read bf16 with AMX only.
    """
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    return platform.machine() not in ("x86_64", "AMD64") or amx()


class Chunk(NamedTuple):
    """N entries: their part of the inputs, in at least float32 where it is multiplied, contiguous"""

    index: Tuple[slice, ...]  # of the leading axes
    lead: Tuple[int, ...]  # their sizes, product N
    keys: int  # the keys from this on are masked, and left out
    q: torch.Tensor  # [N, Tq, K]
    k: torch.Tensor  # [N, keys, K]
    v: torch.Tensor  # [N, keys, V]
    pos: Optional[torch.Tensor]  # [N, R, K]
    bias_u: Optional[torch.Tensor]  # [N, 1, K]
    bias_v: Optional[torch.Tensor]  # [N, 1, K]
    k_bias: Optional[torch.Tensor]  # [N, 1, keys], scale * bias_u·k
    pos_bias: Optional[torch.Tensor]  # [N, 1, R], scale * bias_v·pos
    bias: Optional[torch.Tensor]  # [N, Tq or 1, keys or 1]
    mask: Optional[torch.Tensor]  # [N, Tq or 1, keys or 1], None if it is True everywhere
    keep: Optional[torch.Tensor]  # [N, Tq or 1, keys]


class Block(NamedTuple):
    """Part of a chunk"""

    entries: slice
    rows: slice  # queries
    keys: int  # the first ones; the others are masked for all these queries


class Blocks:
    """One attention, cut into blocks"""

    def __init__(self, inputs: Inputs, options: Options):
        self.inputs, self.options = inputs, options
        q, k = inputs.q, inputs.k
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.device = q.device.type
        self.lead = inputs.lead
        self.num_queries, self.num_keys = q.shape[-2], k.shape[-2]
        self.size, rows, self.entries = _SIZES.get(self.device, _SIZES_ELSEWHERE)
        rows = rows if options.causal or inputs.pos is not None else self.num_queries
        self.rows = _even(self.num_queries, min(rows, self.size // max(1, self.num_keys)))
        self._scratch = {}

    def products(self, exact: bool = False) -> ContextManager:
        """
        :param exact: float32 operands as they are. Otherwise at least those with the inputs' bits are exact
        :return: context for matrix products
        """
        if self.inputs.q.dtype.itemsize >= 4:
            return contextlib.nullcontext()
        mode = "ieee" if exact else _EXACT_MODES.get((self.device, self.inputs.q.dtype), "ieee")
        return _products(self.device, "bf16" if self.device == "cpu" and not _onednn_rounds() else mode)

    def scratch(self, name: str, *shape: int) -> torch.Tensor:
        """:return: uninitialised, contiguous, in the memory of the last call with this name: new memory costs faults"""
        numel = math.prod(shape)
        if name not in self._scratch or self._scratch[name].numel() < numel:
            self._scratch[name] = self.inputs.q.new_empty(numel, dtype=self.wide)
        return self._scratch[name][:numel].view(shape)

    def chunks(self) -> Iterator[Chunk]:
        """:return: all entries"""
        steps, inner, count = [], math.prod(self.lead), max(self.entries, self.size // self._block_numel(self.num_keys))
        for size in self.lead:
            inner //= max(1, size)
            steps.append(max(1, min(size, count // max(1, inner))))
        slices = ([slice(i, min(i + n, size)) for i in range(0, size, n)] for size, n in zip(self.lead, steps))
        return map(self._chunk, itertools.product(*slices))

    def blocks(self, chunk: Chunk) -> Iterator[Block]:
        """:return: all blocks of the chunk"""
        count = math.prod(chunk.lead)
        step = _even(count, self.size // self._block_numel(chunk.keys))
        for entry in range(0, count, step):
            for row in range(0, self.num_queries, self.rows):
                rows = slice(row, min(row + self.rows, self.num_queries))
                keys = min(chunk.keys, rows.stop) if self.options.causal else chunk.keys
                yield Block(slice(entry, min(entry + step, count)), rows, keys)

    def _block_numel(self, keys: int) -> int:
        return max(1, self.rows * keys)

    def _chunk(self, index: Tuple[slice, ...]) -> Chunk:
        lead = tuple(s.stop - s.start for s in index)
        q, k, v, pos, bias_u, bias_v, bias, mask, keep = (x if x is None else select(x, index) for x in self.inputs)
        keys = self.num_keys
        if mask is not None and mask.shape[-1] == keys and self.device == "cpu":
            # elsewhere, looking into the mask would wait for the device
            used = mask.reshape(-1, keys).any(0).nonzero()
            keys = int(used[-1]) + 1 if len(used) else 0
            mask = None if mask[..., :keys].all() else mask
        wide = lambda name, x: x if x is None else self.in_wide(name, x, lead)
        flat = lambda x: x if x is None else x[..., :keys].expand(*lead, -1, -1).flatten(0, -3)
        k, v, pos = wide("k", k[..., :keys, :]), wide("v", v[..., :keys, :]), wide("pos", pos)
        bias_u, bias_v, scale = wide("bias_u", bias_u), wide("bias_v", bias_v), self.options.scale
        with self.products(exact=True):
            k_bias = torch.bmm(bias_u * scale, k.mT) if bias_u is not None else None
            pos_bias = torch.bmm(bias_v * scale, pos.mT) if bias_v is not None else None
        extra = flat(bias), flat(mask), flat(keep)
        return Chunk(index, lead, keys, wide("q", q), k, v, pos, bias_u, bias_v, k_bias, pos_bias, *extra)

    def in_wide(self, name: str, x: torch.Tensor, lead: Tuple[int, ...]) -> torch.Tensor:
        """:return: [N, rows, features] of x [*lead or 1, rows, features]"""
        result = self.scratch("wide_" + name, math.prod(lead), *x.shape[-2:])
        result.unflatten(0, lead).copy_(x)
        return result

    def weights(self, chunk: Chunk, block: Block) -> torch.Tensor:
        """:return: [N, rows, keys] of the block, before dropout. In scratch "weights"; "energies" is overwritten."""
        q, k = chunk.q[block.entries, block.rows], chunk.k[block.entries, : block.keys]
        shape = (*q.shape[:2], block.keys)
        energies, weights = self.scratch("energies", *shape), self.scratch("weights", *shape)
        with self.products():
            torch.baddbmm(energies, q, k.mT, beta=0.0, alpha=self.options.scale, out=energies)
            if chunk.pos is not None:
                energies += self._relative(chunk, block, q)
        if chunk.k_bias is not None:
            energies += chunk.k_bias[block.entries, :, : block.keys]
        if chunk.bias is not None:
            energies += block_part(chunk.bias, block)
        mask = None if chunk.mask is None else block_part(chunk.mask, block)
        if self.options.causal:
            mask = self._causal(energies, mask, block)
        if mask is not None:
            energies.masked_fill_(~mask, -math.inf)
        torch.softmax(energies, -1, out=weights)
        self.mask_nan(chunk, block, weights)
        return weights

    def mask_nan(self, chunk: Chunk, block: Block, x: torch.Tensor):
        """
        Softmax and its derivative are NaN in a row with NaN, and in one without any key: for the masked keys as well.

        :param x: weights, or gradient of the energies, [N, rows, keys], set to 0 where the energies are masked
        """
        if not (self.options.causal or chunk.mask is not None):
            return
        if self.device == "cpu" and not x[..., :1].isnan().any():  # all of such a row is NaN
            return
        if chunk.mask is not None:
            x.masked_fill_(~block_part(chunk.mask, block), 0.0)
        if self.options.causal:
            past = torch.ones(x.shape[1:], dtype=torch.bool, device=x.device).tril_(block.rows.start)
            x.masked_fill_(~past, 0.0)

    def _causal(self, energies: torch.Tensor, mask: Optional[torch.Tensor], block: Block) -> Optional[torch.Tensor]:
        """:return: mask that is yet to be applied"""
        if mask is not None:
            past = torch.ones(energies.shape[1:], dtype=torch.bool, device=energies.device)
            return mask & past.tril_(block.rows.start)
        part = energies[..., block.rows.start :]  # the keys before are in the past of all the queries
        # masked_fill_ takes five times as long. Zeros first: NaN + -inf would stay NaN.
        part.tril_().add_(self.future[: part.shape[1], : part.shape[2]])
        return None

    @functools.cached_property
    def future(self) -> torch.Tensor:
        """:return: [rows, rows], -inf above the diagonal, 0 elsewhere"""
        return self.inputs.q.new_full((self.rows, self.rows), -math.inf, dtype=self.wide).triu_(1)

    def _relative(self, chunk: Chunk, block: Block, q: torch.Tensor) -> torch.Tensor:
        """:return: [N, rows, keys], the positions' part of the energies, a view of scratch "pos" """
        positions = self.positions(block)
        pos = chunk.pos[block.entries, positions]
        product = self.scratch("pos", *q.shape[:2], pos.shape[1])
        torch.baddbmm(product, q, pos.mT, beta=0.0, alpha=self.options.scale, out=product)
        if chunk.pos_bias is not None:
            product += chunk.pos_bias[block.entries, :, positions]
        return shifted(product, block.keys)

    def positions(self, block: Block) -> slice:
        """:return: the relative positions j - i + Tq - 1 of the block's queries i and keys j"""
        return slice(self.num_queries - block.rows.stop, self.num_queries - 1 - block.rows.start + block.keys)


def _even(size: int, step: int) -> int:
    """:return: at most step, such that size is cut into nearly equal parts: a small rest costs as many calls"""
    return math.ceil(size / math.ceil(size / max(1, step))) if size else 1


def shifted(x: torch.Tensor, keys: int) -> torch.Tensor:
    """
    :param x: [N, rows, rows - 1 + keys], contiguous
    :return: [N, rows, keys], a view: the element (i, j) is x[:, i, j - i + rows - 1]
    """
    n, rows, width = x.shape
    offset = x.storage_offset() + rows - 1
    return x.as_strided((n, rows, keys), (rows * width, max(width - 1, 0), 1), offset)


def select(x: torch.Tensor, index: Tuple[slice, ...]) -> torch.Tensor:
    """:return: part of x by index of the leading axes, where it is not broadcast"""
    return x[tuple(s if size != 1 else slice(None) for s, size in zip(index, x.shape))]


def block_part(x: torch.Tensor, block: Block) -> torch.Tensor:
    """:return: of x [N, Tq or 1, keys or 1], what broadcasts to the block"""
    return x[block.entries, block.rows if x.shape[1] != 1 else slice(None), : block.keys]
