# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The weighted loss over all exits, with one exit's logits in memory at a time."""

from collections.abc import Sequence

import torch


# Rows of logits computed at once. Large enough for full matrix products, small enough that [rows, V] stays in cache.
ROWS_PER_CHUNK = 256


def multi_exit_loss(
    exit_states: Sequence[torch.Tensor],
    head_weight: torch.Tensor,
    labels: torch.Tensor,
    exit_weights: Sequence[float],
    z_loss: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    logit_scale: float = 1.0,
    shift_labels: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Weighted next-token loss sum_i w_i L_i over the exits, with the head applied to labelled positions only.

    Args:
        exit_states (sequence of G `torch.Tensor` of shape `(B, L, hidden_size)`):
            What the head of each exit reads (after the final norm), exit 1 first.
        head_weight (`torch.Tensor` of shape `(V, hidden_size)`):
            The head that all exits share.
        labels (`torch.LongTensor` of shape `(B, L)`):
            Token ids aligned with the inputs; they are shifted here. -100 marks positions without loss.
        exit_weights (sequence of G `float`):
            w_1 .. w_G.
        z_loss (`float`, defaults to 0.0):
            Factor of log(Z)^2, added to each exit's loss.
        num_items_in_batch (`int` or `torch.Tensor` of shape `()`, *optional*):
            What each sum is divided by, so that accumulated micro-batches add up to the loss of the whole batch.
            Default: the labelled positions of this batch.
        logit_scale (`float`, defaults to 1.0):
            Factor between the head's product and the logits.
        shift_labels (`torch.LongTensor` of shape `(B, L)`, *optional*):
            Token ids aligned with the scores that predict them, instead of `labels`: what a shard of a longer sequence
            is to predict, its last position included.

    Returns:
        `tuple(torch.Tensor, torch.Tensor)`: the loss of shape `()`, and the detached losses of the exits of shape
        `(G,)`, both float32 (float64 for float64 states).

    Source: Hooper et al. 2023, equation of the intermediate losses; the z-loss of T5X.
    """
    targets = labels[:, 1:] if shift_labels is None else shift_labels
    length = targets.shape[1]
    targets = targets.reshape(-1)
    labelled = (targets != -100).nonzero().squeeze(-1)
    targets = targets[labelled]
    rows = [states[:, :length].reshape(-1, states.shape[-1])[labelled] for states in exit_states]
    exit_sums = _HeadCrossEntropy.apply(head_weight, targets, tuple(exit_weights), z_loss, logit_scale, *rows)
    # A batch without any label has loss 0, not 0 / 0.
    num_items = max(targets.numel(), 1) if num_items_in_batch is None else num_items_in_batch
    if torch.is_tensor(num_items):
        num_items = num_items.to(exit_sums.device)
    weighted_sum, exit_sums = exit_sums[0], exit_sums[1:].detach()
    return weighted_sum / num_items, exit_sums / num_items


class _HeadCrossEntropy(torch.autograd.Function):
    """
    Head and cross-entropy of all exits in one function that computes its gradients in the forward pass.

    The logits of a chunk of rows live only until their gradient is known, so memory does not grow with the number of
    exits and no product is done twice. The price: no second derivative.
    """

    @staticmethod
    def forward(ctx, weight, targets, exit_weights, z_loss, logit_scale, *exit_rows):
        device = weight.device.type
        compute_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        needs_grad = any(ctx.needs_input_grad)
        with torch.autocast(device, enabled=False):
            head = weight.to(compute_dtype)
            grad_head = torch.zeros_like(weight, dtype=sum_dtype) if needs_grad else None
            sums = torch.zeros(1 + len(exit_rows), dtype=sum_dtype, device=weight.device)
            grads = []
            for exit_, (rows, exit_weight) in enumerate(zip(exit_rows, exit_weights), start=1):
                grad_rows = torch.zeros_like(rows) if needs_grad else None
                for start in range(0, len(rows), ROWS_PER_CHUNK):
                    chunk = slice(start, start + ROWS_PER_CHUNK)
                    # Factors go on the narrow side of each product: [rows, hidden_size], never [rows, V].
                    states = rows[chunk].to(compute_dtype) * logit_scale
                    loss, grad_logits = _cross_entropy(
                        (states @ head.T).to(sum_dtype), targets[chunk], z_loss, needs_grad and exit_weight > 0
                    )
                    sums[exit_] += loss
                    if grad_logits is not None:
                        grad_logits = grad_logits.to(compute_dtype)
                        grad_rows[chunk] = (grad_logits @ head) * (exit_weight * logit_scale)
                        _add_product(grad_head, grad_logits.T, states * exit_weight)
                grads.append(grad_rows)
            sums[0] = sums[1:] @ torch.tensor(exit_weights, dtype=sum_dtype, device=weight.device)
        if needs_grad:
            ctx.save_for_backward(grad_head.to(weight.dtype), *grads)
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_sums):
        grad_head, *grad_rows = ctx.saved_tensors
        # Only the weighted sum is differentiable; the sums of the single exits are for logging.
        scale = grad_sums[0]
        return (grad_head * scale, None, None, None, None, *(grad * scale.to(grad.dtype) for grad in grad_rows))


def _cross_entropy(logits, targets, z_loss, needs_grad):
    """Summed loss `()` of logits `(R, V)`, and its gradient `(R, V)` or `None`."""
    log_probs = logits.log_softmax(dim=-1)
    log_prob = log_probs.gather(1, targets[:, None])
    log_z = logits.gather(1, targets[:, None]) - log_prob
    loss = (z_loss * log_z.square() - log_prob).sum()
    if not needs_grad:
        return loss, None
    grad = log_probs.exp_()
    if z_loss:
        grad *= 1 + 2 * z_loss * log_z
    grad[torch.arange(len(targets), device=targets.device), targets] -= 1
    return loss, grad


def _add_product(total, left, right):
    """total += left @ right, in the precision of `total`."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


__all__ = ["multi_exit_loss"]
