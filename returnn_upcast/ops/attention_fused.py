"""
Attention in blocks as an ``autograd.Function``: forward, and a backward that computes the weights once more.
"""

from __future__ import annotations
from typing import Iterator, NamedTuple, Optional, Sequence
import torch
from .attention_blocks import Block, Blocks, Chunk, block_part, select, shifted
from .attention_plain import Inputs, Options, differentiable_gradients
from .fuse import autocast_off


class BlockAttention(torch.autograd.Function):
    """``apply(options, *inputs)`` -> [..., Tq, V] in the dtype of q. Saves nothing but the inputs. No gradient of bias"""

    @staticmethod
    def forward(ctx, options: Options, *tensors: Optional[torch.Tensor]) -> torch.Tensor:
        inputs = Inputs(*tensors)
        ctx.save_for_backward(*inputs)
        ctx.options = options
        blocks, q = Blocks(inputs, options), inputs.q
        shape = (*blocks.lead, blocks.num_queries, inputs.v.shape[-1])
        # as q lies in memory, since the caller's next op mostly wants it like that
        out = empty_as(q.expand(*blocks.lead, -1, -1), shape, q.dtype)
        for chunk in blocks.chunks():
            wide = blocks.scratch("out", len(chunk.q), *shape[-2:])
            for block in blocks.blocks(chunk):
                _block_output(blocks, chunk, block, wide)
            out[chunk.index] = wide.unflatten(0, chunk.lead)
        return out

    @staticmethod
    def backward(ctx, grad):
        inputs, options = Inputs(*ctx.saved_tensors), ctx.options
        with autocast_off(grad.device.type):
            if torch.is_grad_enabled():
                grads = differentiable_gradients(inputs, options, grad)
            else:
                grads = _gradients(Blocks(inputs, options), grad, ctx.needs_input_grad[1:7])
            return None, *grads, None, None, None


def _block_output(blocks: Blocks, chunk: Chunk, block: Block, out: torch.Tensor):
    weights = blocks.weights(chunk, block)
    if chunk.keep is not None:
        weights *= block_part(chunk.keep, block)
    values, out = chunk.v[block.entries, : block.keys], out[block.entries, block.rows]
    with blocks.products(exact=True):
        torch.baddbmm(out, weights, values, beta=0.0, alpha=blocks.options.keep_scale, out=out)


class _Sums(NamedTuple):
    """Gradients of one chunk, in at least float32"""

    q: torch.Tensor  # [N, Tq, K]
    k: torch.Tensor  # [N, keys, K]
    v: torch.Tensor  # [N, keys, V]
    pos: Optional[torch.Tensor]  # [N, R, K]
    energies: Optional[torch.Tensor]  # [N, 1, keys], summed over the queries
    products: Optional[torch.Tensor]  # [N, 1, R], of q·pos, summed over the queries


def _gradients(blocks: Blocks, grad_out: torch.Tensor, needed: Sequence[bool]) -> Iterator[Optional[torch.Tensor]]:
    """:return: of q, k, v, pos, bias_u, bias_v, in their dtypes; None where not needed"""
    grads = [_Gradient(x, blocks) if n else None for x, n in zip(blocks.inputs, needed)]
    for chunk in blocks.chunks():
        wide = blocks.in_wide("grad_out", select(grad_out, chunk.index), chunk.lead)
        zeros = lambda name, x: None if x is None else blocks.scratch("grad_" + name, *x.shape).zero_()
        sums = _Sums(*(zeros(name, getattr(chunk, name)) for name in ("q", "k", "v", "pos", "k_bias", "pos_bias")))
        for block in blocks.blocks(chunk):
            _block_gradients(blocks, chunk, block, wide, sums)
        with blocks.products(exact=True):
            grad_u = _bias_gradient(chunk.bias_u, chunk.k, sums.k, sums.energies, blocks.options.scale)
            grad_v = _bias_gradient(chunk.bias_v, chunk.pos, sums.pos, sums.products, blocks.options.scale)
        for grad, value in zip(grads, (*sums[:4], grad_u, grad_v)):
            if grad is not None:
                grad.add(chunk, value)
    return (grad and grad.buffer.to(x.dtype) for grad, x in zip(grads, blocks.inputs))


def _block_gradients(blocks: Blocks, chunk: Chunk, block: Block, grad_out: torch.Tensor, sums: _Sums):
    entries, rows, keys = block
    _, scale, keep_scale = blocks.options
    q, k, v, grad_out = (
        chunk.q[entries, rows],
        chunk.k[entries, :keys],
        chunk.v[entries, :keys],
        grad_out[entries, rows],
    )
    keep = None if chunk.keep is None else block_part(chunk.keep, block)
    weights = blocks.weights(chunk, block)
    grad = blocks.scratch("energies", *weights.shape)
    with blocks.products():
        torch.baddbmm(grad, grad_out, v.mT, beta=0.0, alpha=keep_scale, out=grad)
    if keep is not None:
        grad *= keep
    # Through the softmax. Flash kernels take this sum as that of output times its gradient, which is cheaper, but as
    # coarse as the rounded output: it hurts where one weight dominates.
    through = blocks.scratch("through", *weights.shape)
    grad = torch.ops.aten._softmax_backward_data.out(grad, weights, -1, blocks.wide, grad_input=through)
    blocks.mask_nan(chunk, block, grad)
    if keep is not None:
        weights *= keep
    if sums.energies is not None:
        sums.energies[entries, :, :keys] += grad.sum(1, keepdim=True)
    grad_q = sums.q[entries, rows]
    with blocks.products():
        sums.v[entries, :keys].baddbmm_(weights.mT, grad_out, alpha=keep_scale)
        sums.k[entries, :keys].baddbmm_(grad.mT, q, alpha=scale)
        grad_q.baddbmm_(grad, k, alpha=scale)
        if chunk.pos is not None:
            at = blocks.positions(block)
            grad = _unshifted(blocks, grad)
            grad_q.baddbmm_(grad, chunk.pos[entries, at], alpha=scale)
            sums.pos[entries, at].baddbmm_(grad.mT, q, alpha=scale)
            if sums.products is not None:
                sums.products[entries, :, at] += grad.sum(1, keepdim=True)


def _unshifted(blocks: Blocks, grad: torch.Tensor) -> torch.Tensor:
    """
    :param grad: [N, rows, keys]
    :return: [N, rows, rows - 1 + keys], which :func:`shifted` maps to grad, 0 elsewhere. In scratch "pos"
    """
    n, rows, keys = grad.shape
    result = blocks.scratch("pos", n, rows, rows - 1 + keys).zero_()
    shifted(result, keys).copy_(grad)
    return result


def _bias_gradient(bias, k, grad_k, grad_energies, scale: float) -> Optional[torch.Tensor]:
    """
    Of a bias of the queries [N, 1, K], where scale * bias·k is part of the energies.

    :param k: [N, keys, K]
    :param grad_k: the part through the bias is added to this
    :param grad_energies: [N, 1, keys], summed over the queries
    :return: [N, 1, K]
    """
    if bias is None:
        return None
    grad_k.baddbmm_(grad_energies.mT, bias, alpha=scale)
    return torch.bmm(grad_energies, k) * scale


class _Gradient:
    """Gradient of one input, put together from chunks: in at least float32 if several of them add to an element"""

    def __init__(self, x: torch.Tensor, blocks: Blocks):
        self.x = x
        self.shared = any(size != n for size, n in zip(x.shape, blocks.lead))
        self.buffer = empty_as(x, x.shape, blocks.wide if self.shared else x.dtype).zero_()

    def add(self, chunk: Chunk, value: torch.Tensor):
        """:param value: [N, rows, features]; rows that lack are 0"""
        part = select(self.buffer, chunk.index)[..., : value.shape[1], :]
        value = value.unflatten(0, chunk.lead)
        if self.shared:
            part += value.sum_to_size(part.shape)
        else:
            part.copy_(value)


def empty_as(x: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """:return: of the given shape, dense, with its axes in memory in the order that they have in x"""
    order = sorted(range(x.ndim), key=lambda i: -x.stride(i))
    return x.new_empty([shape[i] for i in order], dtype=dtype).permute([order.index(i) for i in range(x.ndim)])
