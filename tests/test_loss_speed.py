# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
import weakref

import pytest
import reference
import torch
from tiny_models import random_ids, tiny_model
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from speed_hf import loss_speed
from speed_hf.loss_speed import multi_exit_loss


V, D, G = 23, 8, 3
WEIGHTS = [0.5, 0.0, 2.0]


@pytest.fixture
def inputs():
    """States of G exits, a head, and labels of which some are left out."""
    torch.manual_seed(0)
    states = [torch.randn(2, 9, D, dtype=torch.float64, requires_grad=True) for _ in range(G)]
    head = torch.randn(V, D, dtype=torch.float64, requires_grad=True)
    labels = random_ids(2, 9, vocab_size=V)
    labels[0, :4] = labels[1, 2] = labels[1, 7:] = -100
    return states, head, labels


def plain_loss(states, head, labels, exit_weights, z_loss=0.0, num_items_in_batch=None, logit_scale=1.0):
    """The same loss from whole logits, left to autograd."""
    targets = labels[:, 1:].flatten()
    num_items = num_items_in_batch or (targets != -100).sum()
    losses = []
    for exit_states in states:
        logits = (exit_states[:, :-1] @ head.T * logit_scale).flatten(0, 1)
        log_z = logits.logsumexp(-1)[targets != -100]
        losses.append((cross_entropy(logits, targets, reduction="sum") + z_loss * (log_z**2).sum()) / num_items)
    return sum(weight * loss for weight, loss in zip(exit_weights, losses)), torch.stack(losses).detach()


@pytest.mark.parametrize("rows_per_chunk", [256, 1, 3, 9, 10, 11])  # 10 rows have a label
@pytest.mark.parametrize("z_loss", [0.0, 0.3])
@pytest.mark.parametrize("num_items", [None, 5, torch.tensor(31)])
def test_loss_and_gradients_equal_plain_cross_entropy(inputs, monkeypatch, rows_per_chunk, z_loss, num_items):
    monkeypatch.setattr(loss_speed, "ROWS_PER_CHUNK", rows_per_chunk)
    states, head, labels = inputs
    assert (labels[:, 1:] != -100).sum() == 10
    arguments = (states, head, labels, WEIGHTS, z_loss, num_items, 0.7)
    (actual, actual_exits), (expected, expected_exits) = multi_exit_loss(*arguments), plain_loss(*arguments)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(actual_exits, expected_exits, rtol=1e-12, atol=0)
    assert not actual_exits.requires_grad
    # Through a factor, as in a loss with further terms.
    actual_grads = torch.autograd.grad(actual * 3, (head, *states))
    for got, wanted in zip(actual_grads, torch.autograd.grad(expected * 3, (head, *states), materialize_grads=True)):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-14)
    assert not actual_grads[2].any()  # exit 2 has weight 0
    assert not actual_grads[1][0, :3].any() and not actual_grads[1][:, -1].any()  # no label comes after these


def test_gradients_pass_gradcheck(inputs):
    states, head, labels = inputs

    def loss(head, *states):
        return multi_exit_loss(states, head, labels, WEIGHTS, z_loss=0.3, logit_scale=0.7)[0]

    assert torch.autograd.gradcheck(loss, (head, *states))


def test_loss_equals_numpy(inputs):
    states, head, labels = inputs
    logits = [(exit_states @ head.T).detach().numpy() for exit_states in states]
    expected = reference.multi_exit_loss(logits, labels.tolist(), WEIGHTS, z_loss=0.3)
    assert multi_exit_loss(states, head, labels, WEIGHTS, z_loss=0.3)[0].item() == pytest.approx(expected, rel=1e-12)


def test_second_derivative_is_refused(inputs):
    states, head, labels = inputs
    loss, _ = multi_exit_loss(states, head, labels, WEIGHTS)
    (grad,) = torch.autograd.grad(loss.square(), head, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_frozen_head_and_frozen_states(inputs):
    states, head, labels = inputs
    expected = torch.autograd.grad(multi_exit_loss(states, head, labels, WEIGHTS)[0], (head, *states))
    frozen_head, _ = multi_exit_loss(states, head.detach(), labels, WEIGHTS)
    for got, wanted in zip(torch.autograd.grad(frozen_head, states), expected[1:]):
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    frozen_states, _ = multi_exit_loss([state.detach() for state in states], head, labels, WEIGHTS)
    torch.testing.assert_close(torch.autograd.grad(frozen_states, head)[0], expected[0], rtol=0, atol=0)
    with torch.no_grad():
        assert not multi_exit_loss(states, head, labels, WEIGHTS)[0].requires_grad


def test_shifted_labels_replace_labels(inputs):
    states, head, labels = inputs
    expected = multi_exit_loss(states, head, labels, WEIGHTS)[0]
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    assert torch.equal(multi_exit_loss(states, head, labels.flip(1), WEIGHTS, shift_labels=shifted)[0], expected)
    shifted[0, -1] = 3  # the next shard's first token, which this one's last position predicts
    longer = [torch.cat([state, state[:, :1]], dim=1) for state in states]
    labels = torch.cat([labels[:, :1], shifted], dim=1)
    expected = multi_exit_loss(longer, head, labels, WEIGHTS)[0]
    assert torch.equal(multi_exit_loss(states, head, labels, WEIGHTS, shift_labels=shifted)[0], expected)


@pytest.mark.parametrize("z_loss", [0.0, 1e-4])
@pytest.mark.parametrize("num_items", [None, 7])
def test_no_label_at_all_gives_zero(z_loss, num_items):
    model = tiny_model(torch.float32, z_loss=z_loss, prefix_lm=True).train()
    ids = random_ids(2, 8)
    first_column_only = torch.where(torch.arange(8) == 0, ids, -100)  # nothing precedes it
    for labels in (torch.full_like(ids, -100), first_column_only):
        model.zero_grad()
        outputs = model(ids, labels=labels, num_items_in_batch=num_items)
        outputs.loss.backward()
        assert outputs.loss == 0 and not outputs.exit_losses.any()
        assert all(not weight.grad.any() for weight in model.parameters())


def test_huge_logits_stay_finite():
    states = [torch.full((1, 3, 2), 1e4, requires_grad=True)]
    head = torch.tensor([[1.0, 1], [-1, -1]], requires_grad=True)
    loss, _ = multi_exit_loss(states, head, torch.tensor([[0, 1, 0]]), [1.0], z_loss=1e-4)
    loss.backward()
    assert loss.isfinite() and states[0].grad.isfinite().all() and head.grad.isfinite().all()


# In the model.


@pytest.mark.parametrize(
    "scheme, weights",
    [
        ("linear", [1 / 6, 2 / 6, 3 / 6]),
        ("uniform", [1 / 3] * 3),
        ("final", [0, 0, 1]),
        ([0, 5, 0.5], [0, 5, 0.5]),
    ],
)
def test_model_loss_is_the_weighted_sum_of_its_exits(scheme, weights):
    model, ids = tiny_model(exit_loss_weights=scheme, z_loss=0.01), random_ids(2, 12)
    labels = ids.clone()
    labels[0, :5] = labels[1, 8:] = -100
    outputs = model(ids, labels=labels, return_exit_logits=True)
    for exit_loss, logits in zip(outputs.exit_losses, outputs.exit_logits):
        total, count = reference.cross_entropy(logits.detach().numpy(), labels.tolist(), z_loss=0.01)
        assert count == 7 + 7 and exit_loss.item() == pytest.approx(total / count, rel=1e-12)
    assert outputs.loss.item() == pytest.approx(sum(w * e for w, e in zip(weights, outputs.exit_losses.tolist())))


@pytest.mark.parametrize("as_tensor", [True, False])
def test_accumulated_batches_equal_one_batch(as_tensor):
    model, ids = tiny_model(z_loss=1e-3, prefix_lm=True), random_ids(8, 12)
    first_label = torch.tensor([3, 11, 1, 12, 6, 9, 2, 4])[:, None]  # ragged; row 3 has none
    labels = ids.masked_fill(torch.arange(12) < first_label, -100)
    num_items = (labels[:, 1:] != -100).sum()
    num_items = num_items if as_tensor else int(num_items)

    def accumulate(size):
        model.zero_grad()
        losses, exit_losses = [], []
        for rows, row_labels in zip(ids.split(size), labels.split(size)):
            outputs = model(rows, labels=row_labels, num_items_in_batch=num_items)
            outputs.loss.backward()
            losses.append(outputs.loss.detach())
            exit_losses.append(outputs.exit_losses)
        return sum(losses), sum(exit_losses), [weight.grad.clone() for weight in model.parameters()]

    whole = accumulate(8)
    torch.testing.assert_close(whole[0], model(ids, labels=labels).loss.detach(), rtol=1e-12, atol=0)
    for size in (1, 2, 4):
        torch.testing.assert_close(accumulate(size), whole, rtol=1e-9, atol=1e-13)


def test_autocast_loss_is_near_float32():
    model, ids = tiny_model(torch.float32, z_loss=1e-4).train(), random_ids(4, 30)
    results = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            outputs = model(ids, labels=ids)
        outputs.loss.backward()
        assert outputs.loss.dtype == outputs.exit_losses.dtype == torch.float32
        results.append((outputs.loss.item(), torch.cat([weight.grad.flatten() for weight in model.parameters()])))
    (loss, grad), (half_loss, half_grad) = results
    assert half_loss == pytest.approx(loss, rel=0.01) and half_loss != loss
    assert (half_grad - grad).norm() < 0.05 * grad.norm()


def test_bfloat16_weights_sum_in_float32():
    torch.manual_seed(0)
    states, head = torch.randn(1, 2001, 16, dtype=torch.bfloat16), torch.randn(50, 16, dtype=torch.bfloat16)
    labels = random_ids(1, 2001, vocab_size=50)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        inputs = [states.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()]
        loss, _ = multi_exit_loss(inputs[:1], inputs[1], labels, [1.0], z_loss=1e-3)
        results.append((loss, torch.autograd.grad(loss, inputs)))
    (loss, grads), (expected, expected_grads) = results
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for got, wanted in zip(grads, expected_grads):
        assert got.dtype == torch.bfloat16 and (got - wanted).norm() < 0.02 * wanted.norm()


# Memory.


class PeakMemory(TorchDispatchMode):
    """Bytes of the tensors that live at once while it is entered; those made before count nothing."""

    def __init__(self):
        super().__init__()
        self.sizes, self.live, self.peak = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in given and key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._free, key)
        self.peak = max(self.peak, self.live)
        return result

    def _free(self, key):
        self.live -= self.sizes.pop(key)


def test_peak_memory_counts_what_lives_at_once():
    with PeakMemory() as memory:
        first = torch.zeros(1000)
        second = (first + 1).view(10, 100)
        del first
        second.add_(1)
        third = second * 2
        del second, third
    assert memory.peak == 2 * 4000 and memory.live == 0


def peak_of_a_step(loss, num_exits, dtype=torch.float32):
    torch.manual_seed(0)
    states = [torch.randn(2, 300, 16, dtype=dtype, requires_grad=True) for _ in range(num_exits)]
    head = torch.randn(8192, 16, dtype=dtype, requires_grad=True)
    labels = random_ids(2, 300, vocab_size=8192)
    with PeakMemory() as memory:
        value, _ = loss(states, head, labels, [1 / num_exits] * num_exits, z_loss=1e-4)
        value.backward()
    return memory.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_six_exits_need_little_more_memory_than_one(dtype):
    single = peak_of_a_step(multi_exit_loss, 1, dtype)
    assert peak_of_a_step(multi_exit_loss, 6, dtype) <= 1.3 * single


def test_loss_needs_less_memory_than_whole_logits():
    plain = [peak_of_a_step(plain_loss, num_exits) for num_exits in (1, 6)]
    assert peak_of_a_step(multi_exit_loss, 1) < 0.5 * plain[0]
    assert plain[1] > 3 * plain[0]  # the measure does see what the exits of the plain loss add


def test_training_step_with_six_exits_needs_little_more_memory_than_one():
    peaks = {}
    for scheme in ("final", "linear"):
        model = tiny_model(torch.float32, vocab_size=8192, num_repetitions=6, exit_loss_weights=scheme).train()
        ids = random_ids(2, 200, vocab_size=8192)
        with PeakMemory() as memory:
            model(ids, labels=ids).loss.backward()
        peaks[scheme] = memory.peak
    assert peaks["linear"] <= 1.3 * peaks["final"]
