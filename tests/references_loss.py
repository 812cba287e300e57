"""
Plain float64 references of the losses. Nothing here is shared with what it checks.
"""

from __future__ import annotations
from typing import Sequence
import torch


def log_softmax(x: torch.Tensor, axis: int) -> torch.Tensor:
    """:return: of the shape of x, any"""
    shifted = x - x.amax(axis, keepdim=True)
    return shifted - torch.log(torch.exp(shifted).sum(axis, keepdim=True))


def nll(log_probs: torch.Tensor, target: torch.Tensor, axis: int) -> torch.Tensor:
    """
    :param log_probs: label axis anywhere
    :param target: probabilities of the same shape, or labels, without the axis; -100 counts as 0
    """
    if target.is_floating_point():
        return -(log_probs * target).sum(axis)
    labels = torch.arange(log_probs.shape[axis]).reshape([-1] + [1] * (log_probs.ndim - 1)).movedim(0, axis)
    return -torch.where(labels == target.unsqueeze(axis), log_probs, 0.0).sum(axis)


def cross_entropy(logits: torch.Tensor, target: torch.Tensor, axis: int) -> torch.Tensor:
    """As :func:`nll`, from logits"""
    return nll(log_softmax(logits, axis), target, axis)


def smoothed_cross_entropy(logits: torch.Tensor, target: torch.Tensor, smoothing: float) -> torch.Tensor:
    """
    :param logits: [..., V]
    :param target: [...], labels; -100 counts as 0
    """
    log_probs = log_softmax(logits, -1)
    loss = (1 - smoothing) * nll(log_probs, target, -1) - smoothing * log_probs.mean(-1)
    return torch.where(target == -100, 0.0, loss)


def rounded_to(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """:return: the values, with the gradient of x: arithmetic that rounds, but whose derivative does not see that"""
    return x + (values.double() - x).detach()


def ctc(log_probs: torch.Tensor, target: Sequence[int], blank: int) -> torch.Tensor:
    """
    :param log_probs: [T, V] of one sequence, T at least 1
    :return: -log of the probability of all paths that collapse to the target: forward recursion over
        the target with blanks between, Graves et al. 2006
    """
    states = [blank]
    for label in target:
        states += [label, blank]
    minus_inf = torch.full((), -torch.inf, dtype=log_probs.dtype)
    alpha = [log_probs[0, label] if i < 2 else minus_inf for i, label in enumerate(states)]
    for frame in log_probs[1:]:
        new = []
        for i, label in enumerate(states):
            before = alpha[max(i - 1, 0) : i + 1]
            if i >= 2 and label != blank and label != states[i - 2]:
                before = alpha[i - 2 : i + 1]
            before = [score for score in before if score > -torch.inf]
            new.append(torch.logsumexp(torch.stack(before), 0) + frame[label] if before else minus_inf)
        alpha = new
    return -torch.logsumexp(torch.stack(alpha[-2:]), 0)
