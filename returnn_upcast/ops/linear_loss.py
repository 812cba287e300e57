"""
Final projections in float32: the logits as such, and projection and cross entropy in one, in blocks.

With V labels, the logits are by far the largest tensor of a model. Here they exist for a block of rows (forward) or
of labels (backward) at a time: forward keeps three numbers per row, backward computes the logits once more.
In blocks of labels, the gradient of the weight needs no accumulation, and that of x is small.
"""

from __future__ import annotations
from typing import List, Optional, Tuple
import functools
import math
import torch
import torch.nn.functional as F
from .fuse import autocast_off, differentiate, may_fuse
from .loss import IGNORE_INDEX, check_labels
from .loss_rows import label_log_prob, mean_log_prob, row_stats, softmax_times, wide_dtype
from .matmul import matmul_wide, product

# Logits of a block: large enough for efficient products, small enough for the caches of a CPU. In backward, a block
# has float32 gradients beside its logits.
_FORWARD_NUMEL, _BACKWARD_NUMEL, _GPU_FACTOR = 1 << 23, 1 << 22, 8
_MIN_ROWS, _MAX_ROWS, _MIN_LABELS = 128, 8192, 512


def linear_f32(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None) -> torch.Tensor:
    """
    :param x: [..., I], any float dtype
    :param weight: [I, O], any float dtype, also another than that of x
    :param bias: [O], any float dtype
    :return: [..., O], x @ weight + bias in at least float32: the operands as they are, nothing rounded.
        Gradients are accumulated in float32 and rounded once, to the dtypes of the operands, which are all that is kept.
    """
    _check("linear_f32", x, weight, bias)
    if may_fuse(x, weight, bias) and {x.dtype, weight.dtype} != {wide_dtype(x, weight)}:
        return _Linear.apply(x, weight, bias)
    return _plain_linear(x, weight, bias)


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    target: torch.Tensor,
    *,
    label_smoothing: float = 0.0,
    float32_logits: bool = False,
) -> torch.Tensor:
    """
    Cross entropy of ``x @ weight + bias``, in blocks, so that the logits never exist as a whole.

    :param x: [..., I], any float dtype
    :param weight: [I, O], any float dtype; as an operand of the product, it is rounded to that of x
    :param bias: [O], any float dtype
    :param target: [...], integer labels, -100 for loss and gradient 0
    :param label_smoothing: s in ``(1-s) * -log p(target) + s * mean(-log p)``, as in ``F.cross_entropy``
    :param float32_logits: nothing is rounded. Else product and logits are rounded to x.dtype, as ``rf.Linear`` does
    :return: [...], at least float32. Loss and gradients in float32 arithmetic; the gradients are rounded once, to the
        dtypes of x, weight and bias. For backward, x and three numbers per row are kept.
    :raise IndexError: for labels out of range (on the CPU)
    """
    name = "linear_cross_entropy"
    _check(name, x, weight, bias)
    if target.shape != x.shape[:-1]:
        raise ValueError(f"{name}: target has shape {tuple(target.shape)}, but must have {tuple(x.shape[:-1])}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{name}: label_smoothing must be between 0 and 1, got {label_smoothing}")
    target = target.long()
    if not may_fuse(x, weight, bias, target):
        return _plain(x, weight, bias, target, label_smoothing, float32_logits)
    check_labels(name, target, weight.shape[1])
    return _LinearCrossEntropy.apply(x, weight, bias, target, label_smoothing, float32_logits)


def _check(name: str, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]):
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[:1]:
        raise ValueError(
            f"{name}: weight must be [in, out] for x [..., in], got {tuple(weight.shape)}, {tuple(x.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[1:]:
        raise ValueError(f"{name}: bias must be [{weight.shape[1]}], got {tuple(bias.shape)}")


def _plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
    wide = wide_dtype(x, weight)
    out = product(x.to(wide), weight.to(wide))
    return out if bias is None else out + bias.to(wide)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight, bias)
        with autocast_off(x.device.type):
            out = matmul_wide(x.reshape(-1, x.shape[-1]), weight)
            out = out if bias is None else out.add_(bias)
            return out.reshape(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            return differentiate(_plain_linear, (x, weight, bias), grad)
        need_x, need_weight, need_bias = ctx.needs_input_grad
        rows, grad = x.reshape(-1, x.shape[-1]), grad.reshape(-1, weight.shape[1])
        with autocast_off(x.device.type):
            d_x = matmul_wide(grad, weight.T).to(x.dtype).reshape(x.shape) if need_x else None
            d_weight = matmul_wide(rows.T, grad).to(weight.dtype) if need_weight else None
            return d_x, d_weight, grad.sum(0).to(bias.dtype) if need_bias else None


def _rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """:return: x with the values that it has in dtype. Its gradient passes as it is: it is not what is to be rounded."""
    # NaN where both are -inf, and there is nothing to round
    return x + (x.to(dtype).to(x.dtype) - x).detach().nan_to_num(0.0, math.inf, -math.inf)


def _plain(x, weight, bias, target, smoothing: float, exact: bool) -> torch.Tensor:
    wide = wide_dtype(x, weight) if exact else wide_dtype(x)
    rounded = (lambda value: value) if exact else functools.partial(_rounded, dtype=x.dtype)
    logits = rounded(product(x.to(wide), rounded(weight.to(wide))))
    logits = logits if bias is None else rounded(logits + bias.to(wide))
    with autocast_off(x.device.type):
        rows = logits.reshape(-1, weight.shape[1]), target.reshape(-1)
        return F.cross_entropy(*rows, reduction="none", label_smoothing=smoothing).reshape(target.shape)


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor], exact: bool) -> torch.Tensor:
    """:return: x @ weight + bias, in the wide dtype if exact, else each of the two rounded to x.dtype"""
    if exact:
        logits = matmul_wide(x, weight)
    elif x.dtype == torch.float16 and x.device.type == "cpu":
        # the same numbers: torch's own product in f16 accumulates in float32, but is many times slower there
        logits = matmul_wide(x, weight).to(x.dtype)
    else:
        logits = x @ weight
    return logits if bias is None else logits.add_(bias)


def _blocks(size: int, block: int) -> List[slice]:
    """:return: slices that cover range(size), of about equal length, block at most"""
    count = max(1, math.ceil(size / block))
    return [slice(size * i // count, size * (i + 1) // count) for i in range(count)]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, target, smoothing, exact):
        rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1)
        ignored = labels == IGNORE_INDEX
        labels = labels.masked_fill(ignored, 0)
        operand = weight if exact else weight.to(x.dtype)
        limit = max(_MIN_ROWS, _block_numel(_FORWARD_NUMEL, x) // weight.shape[1])
        with autocast_off(x.device.type):
            stats = [
                _row_block(_logits(rows[block], operand, bias, exact), labels[block], smoothing)
                for block in _blocks(rows.shape[0], limit)
            ]
        loss, log_prob, peak, log_sum = (torch.cat(stat) for stat in zip(*stats))
        ctx.save_for_backward(x, weight, bias, target, log_prob, peak, log_sum)
        ctx.smoothing, ctx.exact = smoothing, exact
        return loss.masked_fill_(ignored, 0).reshape(target.shape)

    @staticmethod
    def backward(ctx, grad):
        x, weight, bias, target, *stats = ctx.saved_tensors
        if torch.is_grad_enabled():
            plain = functools.partial(_plain, smoothing=ctx.smoothing, exact=ctx.exact)
            return (*differentiate(plain, (x, weight, bias, target), grad), None, None)
        labels = target.reshape(-1)
        grad = grad.reshape(-1).masked_fill(labels == IGNORE_INDEX, 0)
        with autocast_off(x.device.type):
            gradients = _Gradients(ctx, x, weight, bias)
            for block in _blocks(labels.shape[0], _MAX_ROWS):
                gradients.add_rows(block, labels[block], grad[block], *(stat[block] for stat in stats))
            return (*gradients.result(), None, None, None)


def _row_block(logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> Tuple[torch.Tensor, ...]:
    """:return: loss, log-prob of the label, peak and log_sum per row"""
    peak, log_sum = row_stats(logits)
    log_prob = label_log_prob(logits, labels, peak, log_sum)
    loss = -log_prob
    if smoothing:
        loss = (1 - smoothing) * loss - smoothing * mean_log_prob(logits, peak, log_sum)
    return loss, log_prob, peak, log_sum


class _Gradients:
    """Those of x, weight and bias, where needed, filled block by block."""

    def __init__(self, ctx, x, weight, bias):
        self.ctx, self.x, self.weight, self.bias = ctx, x, weight, bias
        self.rows = x.reshape(-1, x.shape[-1])
        self.operand = weight if ctx.exact else weight.to(x.dtype)
        self.wide = wide_dtype(x, weight) if ctx.exact else wide_dtype(x)
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        # Blocks of labels: the gradient of x is a sum over them. Those of the parameters are sums over blocks of rows,
        # of which there are many only for more rows than a step usually has.
        single = self.rows.shape[0] <= _MAX_ROWS
        self.d_x = torch.zeros_like(self.rows, dtype=self.wide) if need_x else None
        self.d_weight = torch.zeros_like(weight, dtype=weight.dtype if single else self.wide) if need_weight else None
        self.d_bias = torch.zeros_like(bias, dtype=bias.dtype if single else self.wide) if need_bias else None

    def add_rows(self, block: slice, labels, grad, log_prob, peak, log_sum):
        """Adds what the rows of the block contribute."""
        num_labels = self.weight.shape[1]
        rows, rows_t = self.rows[block], self.rows[block].T.contiguous()
        uniform = self.ctx.smoothing / num_labels
        # p - (1 - smoothing) - uniform; expm1, as p - 1 has few digits for a confident row
        at_label = (log_prob.expm1() + (self.ctx.smoothing - uniform)) * grad
        limit = max(_MIN_LABELS, _block_numel(_BACKWARD_NUMEL, rows) // max(1, rows.shape[0]))
        for cols in _blocks(num_labels, limit):
            weight = self.operand[:, cols]
            logits = _logits(rows, weight, None if self.bias is None else self.bias[cols], self.ctx.exact)
            d_logits = softmax_times(logits, peak, log_sum, grad, self.wide)
            if uniform:
                d_logits -= (uniform * grad).unsqueeze(1)
            _set_labels(d_logits, labels - cols.start, at_label)
            if self.d_x is not None:
                self.d_x[block] += matmul_wide(d_logits, weight.T)
            if self.d_weight is not None:
                self.d_weight[:, cols] += matmul_wide(rows_t, d_logits)
            if self.d_bias is not None:
                self.d_bias[cols] += d_logits.sum(0)

    def result(self) -> Tuple[Optional[torch.Tensor], ...]:
        """:return: the gradients, rounded once"""
        d_x = None if self.d_x is None else self.d_x.to(self.x.dtype).reshape(self.x.shape)
        d_weight = None if self.d_weight is None else self.d_weight.to(self.weight.dtype)
        return d_x, d_weight, None if self.d_bias is None else self.d_bias.to(self.bias.dtype)


def _set_labels(d_logits: torch.Tensor, labels: torch.Tensor, values: torch.Tensor):
    """Sets d_logits[row, labels[row]] = values[row], where that label is in this block."""
    inside = (labels >= 0) & (labels < d_logits.shape[1])
    index = labels.masked_fill(~inside, 0).unsqueeze(1)
    d_logits.scatter_(1, index, torch.where(inside.unsqueeze(1), values.unsqueeze(1), d_logits.gather(1, index)))


def _block_numel(numel: int, x: torch.Tensor) -> int:
    return numel * (_GPU_FACTOR if x.is_cuda else 1)
