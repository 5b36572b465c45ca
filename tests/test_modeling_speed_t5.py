# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
import logging
import math
from collections import Counter

import numpy as np
import pytest
import reference
import torch
from safetensors.torch import load_file, save_file
from tiny_models import arrays, random_ids, sizes, tiny_config, tiny_model
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from speed_hf import SpeedT5Config, SpeedT5ForCausalLM, SpeedT5Model
from speed_hf.cache_speed import SpeedCache
from speed_hf.modeling_speed_t5 import SharedDropout, prefix_before_labels, relative_buckets


K, G = 2, 3  # of every tiny model
LEFT_PADDED = torch.tensor([[1] * 30, [0] * 9 + [1] * 21])
# Three sequences per row, of different lengths.
PACKED_POSITIONS = torch.tensor([[*range(12), *range(11), *range(7)], [*range(5), *range(24), 0]])


def close(actual, expected, tolerance=1e-10):
    expected = torch.as_tensor(expected)
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.to(expected.dtype), expected, rtol=0, atol=tolerance)


def all_exits(model, *args, **kwargs):
    """Logits of every exit, `(G, B, L, V)`."""
    with torch.no_grad():
        return torch.stack(model(*args, return_exit_logits=True, **kwargs).exit_logits)


def expected_exits(model, ids, **kwargs):
    return torch.from_numpy(np.stack(reference.exit_logits(arrays(model), sizes(model), ids.numpy(), **kwargs)))


def segments(position_ids):
    return (position_ids == 0).cumsum(-1).numpy()


# Sizes and initial values.


@pytest.mark.parametrize(
    "unique, repetitions, num_parameters", [(12, 1, 109_628_544), (2, 6, 38_834_304), (4, 3, 52_993_152)]
)
def test_base_size_has_the_parameters_of_t5x(unique, repetitions, num_parameters):
    with torch.device("meta"):
        model = SpeedT5ForCausalLM(SpeedT5Config(num_unique_layers=unique, num_repetitions=repetitions))
    assert sum(weight.numel() for weight in model.parameters()) == num_parameters
    assert model.num_parameters() == num_parameters


@pytest.fixture(scope="module")
def fresh():
    torch.manual_seed(0)
    return SpeedT5ForCausalLM(
        tiny_config(
            vocab_size=500, hidden_size=192, intermediate_size=320, num_attention_heads=16, head_dim=8,
            relative_attention_num_buckets=32, relative_attention_max_distance=128,
        )
    )  # fmt: skip


def test_initial_weights_follow_t5x(fresh):
    width, inner = 192, 16 * 8
    expected_std = {
        "q": (width * 8) ** -0.5,
        "k": width**-0.5,
        "v": width**-0.5,
        "o": inner**-0.5,
        "wi_0": width**-0.5,
        "wi_1": width**-0.5,
        "wo": 320**-0.5,
        "embed_tokens": 1.0,
        "relative_attention_bias": math.sqrt(2 / (32 + 16)),  # uniform in +- sqrt(3) of it
    }
    seen = Counter()
    for name, weight in fresh.named_parameters():
        kind = name.split(".")[-2]
        if "norm" in kind:
            assert (weight == 1).all()
            continue
        seen[kind] += 1
        std = expected_std[kind]
        bound = 5 / math.sqrt(weight.numel())
        assert weight.std().item() == pytest.approx(std, rel=bound), name
        assert abs(weight.mean().item()) < bound * std, name
        largest = weight.abs().max().item() / std
        if kind in ("wi_0", "wi_1", "wo"):
            # Cut at two standard deviations of the uncut normal.
            assert 1.9 / 0.8796 < largest <= 2 / 0.8796 + 1e-3, name
        elif kind == "relative_attention_bias":
            assert 1.6 < largest <= math.sqrt(3), name
        else:
            assert largest > 3, name
    assert seen == dict.fromkeys(("q", "k", "v", "o", "wi_0", "wi_1", "wo"), K) | {
        "embed_tokens": 1,
        "relative_attention_bias": 1,
    }


def test_initial_logits_are_of_the_order_of_one(fresh):
    with torch.no_grad():
        logits = fresh.eval()(random_ids(2, 20, vocab_size=500)).logits
    own = logits.std().item()
    assert 0.5 < own < 3  # without the scale it would be sqrt(192) times as much


def test_initial_values_depend_on_the_seed_only():
    first, second, other = (tiny_model(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["model.layers.0.mlp.wo.weight"], other["model.layers.0.mlp.wo.weight"])
    assert not torch.equal(first["model.layers.0.mlp.wo.weight"], first["model.layers.1.mlp.wo.weight"])


# Logits against NumPy.


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
class TestLogitsEqualReference:
    def test_causal(self, attention):
        model, ids = tiny_model(attention=attention), random_ids(2, 30)
        close(all_exits(model, ids), expected_exits(model, ids))

    def test_other_sizes(self, attention):
        model = tiny_model(
            attention=attention, num_unique_layers=3, num_repetitions=2, num_attention_heads=4, head_dim=4,
            relative_attention_num_buckets=12, relative_attention_max_distance=16, rms_norm_eps=0.1,
        )  # fmt: skip
        config = model.config
        ids = random_ids(1, 20)
        assert len(all_exits(model, ids)) == config.num_repetitions
        close(all_exits(model, ids), expected_exits(model, ids))

    def test_prefix_mask(self, attention):
        model, ids = tiny_model(attention=attention), random_ids(2, 14)
        prefix = torch.zeros(2, 14, dtype=torch.bool)
        prefix[0, :9] = prefix[1, :4] = True
        prefix[1, 1] = False  # sees and is seen causally
        expected = expected_exits(model, ids, prefix=prefix.numpy())
        for mask in (prefix, prefix.long(), prefix[:, :9]):  # columns left out are causal
            close(all_exits(model, ids, prefix_mask=mask), expected)

    def test_prefix_from_labels(self, attention):
        model, ids = tiny_model(attention=attention, prefix_lm=True), random_ids(2, 14)
        labels = ids.clone()
        labels[0, :9] = labels[1, :4] = -100
        labels[1, 6] = labels[:, 12:] = -100  # later gaps belong to the target
        prefix = [[column < 9 for column in range(14)], [column < 4 for column in range(14)]]
        close(all_exits(model, ids, labels=labels), expected_exits(model, ids, prefix=prefix))
        # An explicit mask wins, and without labels there is no prefix.
        close(all_exits(model, ids, labels=labels, prefix_mask=torch.zeros(2, 1)), expected_exits(model, ids))
        close(all_exits(model, ids), expected_exits(model, ids))
        model.config.prefix_lm = False
        close(all_exits(model, ids, labels=labels), expected_exits(model, ids))

    def test_left_padding(self, attention):
        model, ids = tiny_model(attention=attention), random_ids(2, 30)
        seen = LEFT_PADDED.bool()
        expected = expected_exits(model, ids, attention_mask=seen.numpy())
        for mask in (LEFT_PADDED, seen):
            actual = all_exits(model, ids, attention_mask=mask)
            assert actual.isfinite().all()
            close(actual[:, seen], expected[:, seen])
        close(actual[:, 1, 9:], all_exits(model, ids[1:, 9:])[:, 0])

    def test_left_padding_with_prefix(self, attention):
        model, ids = tiny_model(attention=attention, prefix_lm=True), random_ids(2, 30)
        seen, labels = LEFT_PADDED.bool(), ids.clone()
        labels[0, :5] = labels[1, :20] = -100
        prefix = (labels == -100).numpy()
        expected = expected_exits(model, ids, prefix=prefix, attention_mask=seen.numpy())
        # What `generate` passes along must not be taken for packing.
        positions = (LEFT_PADDED.cumsum(-1) - 1).clamp(min=0)
        actual = all_exits(model, ids, labels=labels, attention_mask=LEFT_PADDED, position_ids=positions)
        close(actual[:, seen], expected[:, seen])

    def test_right_padding(self, attention):
        model, ids = tiny_model(attention=attention), random_ids(2, 30)
        mask = LEFT_PADDED.flip(1)
        expected = expected_exits(model, ids, attention_mask=mask.numpy())
        close(all_exits(model, ids, attention_mask=mask)[:, mask.bool()], expected[:, mask.bool()])

    def test_gap_in_the_attention_mask_starts_no_new_sequence(self, attention):
        model, ids = tiny_model(attention=attention), random_ids(1, 14)
        mask = torch.ones(1, 14, dtype=torch.long)
        mask[0, 5:7] = 0
        expected = expected_exits(model, ids, attention_mask=mask.numpy())
        actual = all_exits(model, ids, attention_mask=mask, position_ids=mask.cumsum(-1) - 1)
        close(actual[:, mask.bool()], expected[:, mask.bool()])

    def test_packed(self, attention):
        model, ids = tiny_model(attention=attention), random_ids(2, 30)
        actual = all_exits(model, ids, position_ids=PACKED_POSITIONS)
        close(actual, expected_exits(model, ids, segments=segments(PACKED_POSITIONS)))
        close(actual[:, :1, 12:23], all_exits(model, ids[:1, 12:23]))
        plain = torch.arange(30).expand(2, -1)
        close(all_exits(model, ids, position_ids=plain), all_exits(model, ids))

    def test_packed_with_prefix_from_labels(self, attention):
        model, ids = tiny_model(attention=attention, prefix_lm=True), random_ids(2, 30)
        labels = ids.clone()
        prefix = torch.zeros(2, 30, dtype=torch.bool)
        for row, start, length in [(0, 0, 8), (0, 12, 3), (0, 23, 7), (1, 0, 1), (1, 5, 19), (1, 29, 1)]:
            prefix[row, start : start + length] = True
        labels[prefix] = -100
        labels[0, 10] = -100
        actual = all_exits(model, ids, labels=labels, position_ids=PACKED_POSITIONS)
        close(actual, expected_exits(model, ids, prefix=prefix.numpy(), segments=segments(PACKED_POSITIONS)))

    def test_four_dimensional_mask(self, attention):
        model, ids = tiny_model(attention=attention), random_ids(2, 14)
        prefix = np.arange(14)[None] < np.array([[5], [9]])
        visible = torch.from_numpy(reference.visible_keys((2, 14), prefix=prefix))[:, None]
        expected = expected_exits(model, ids, prefix=prefix)
        close(all_exits(model, ids, attention_mask=visible), expected)
        additive = torch.zeros(2, 1, 14, 14, dtype=torch.float64).masked_fill(~visible, -math.inf)
        for lowest in (-math.inf, torch.finfo(torch.float64).min):
            close(all_exits(model, ids, attention_mask=additive.clamp(min=lowest)), expected)


def test_t5x_prefix_example():
    ids = torch.tensor([[0, 9, 4, 6, 1, 3, 9]])
    labels = torch.tensor([[-100, -100, -100, -100, -100, 3, 9]])
    assert prefix_before_labels(labels).long().tolist() == [[1, 1, 1, 1, 1, 0, 0]]
    model = tiny_model(prefix_lm=True)
    close(all_exits(model, ids, labels=labels), expected_exits(model, ids, prefix=[[1, 1, 1, 1, 1, 0, 0]]))


def test_prefix_of_rows_without_labels_is_everything():
    labels = torch.full((1, 6), -100)
    assert prefix_before_labels(labels).all()
    packed = torch.tensor([[0, 1, 2, 0, 1, 2]])
    labels[0, 1] = 5
    assert prefix_before_labels(labels, packed).tolist() == [[True, False, False, True, True, True]]


# In the last three a bucket begins at a distance where the logarithm comes out a last digit too small.
@pytest.mark.parametrize(
    "buckets, distance", [(32, 128), (8, 20), (2, 2), (12, 96), (64, 256), (8, 64), (16, 128), (32, 256)]
)
def test_buckets_of_distances_to_1000(buckets, distance):
    expected = [reference.bucket(d, buckets, distance) for d in range(1001)]
    assert relative_buckets(buckets, distance, 1001).tolist() == expected
    assert relative_buckets(buckets, distance, 7).tolist() == expected[:7]
    assert expected[0] == 0 and expected[distance:] == [buckets - 1] * (1001 - distance)
    # T5X's own line, in float32.
    exact = buckets // 2
    far = np.arange(exact, 1001).astype(np.float32) / exact + np.finfo(np.float32).eps
    far = exact + (np.log(far) / np.log(distance / exact) * (buckets - exact)).astype(np.int32)
    assert expected[exact:] == np.minimum(far, buckets - 1).tolist()


def test_buckets_grow_past_the_kept_length():
    assert relative_buckets(32, 5000, 3000).tolist() == [reference.bucket(d, 32, 5000) for d in range(3000)]


def test_lower_precisions_stay_near_float64():
    ids = random_ids(2, 30)
    expected = all_exits(tiny_model(), ids, attention_mask=LEFT_PADDED)[:, LEFT_PADDED.bool()]
    for attention in ("sdpa", "eager"):
        single = all_exits(tiny_model(torch.float32, attention=attention), ids, attention_mask=LEFT_PADDED)
        close(single[:, LEFT_PADDED.bool()].double(), expected, 1e-4)
        half = all_exits(tiny_model(torch.bfloat16, attention=attention), ids, attention_mask=LEFT_PADDED)
        assert half.dtype == torch.bfloat16 and half.isfinite().all()
        assert (half[:, LEFT_PADDED.bool()].double() - expected).square().mean().sqrt() < 0.1 * expected.std()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_training_is_finite_with_left_padding(attention, autocast):
    model = tiny_model(torch.float32 if autocast else torch.bfloat16, attention=attention, dropout_rate=0.1).train()
    ids = random_ids(2, 30)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = model(ids, attention_mask=LEFT_PADDED, labels=ids.masked_fill(LEFT_PADDED == 0, -100))
    outputs.loss.backward()
    assert outputs.loss.isfinite() and outputs.loss.dtype == torch.float32
    for name, weight in model.named_parameters():
        assert weight.grad.isfinite().all() and weight.grad.any(), name


def test_float16_is_refused():
    ids = random_ids(1, 4)
    message = "`dtype` must not be float16, .*: use bfloat16 or float32"
    with pytest.raises(ValueError, match=message):
        tiny_model(torch.float16)(ids)
    model = tiny_model(torch.float32)
    with pytest.raises(ValueError, match=message), torch.autocast("cpu", torch.float16):
        model(ids)
    with pytest.raises(ValueError, match=message), torch.autocast("cpu", torch.float16):
        model.train()(ids, labels=ids)
    with pytest.raises(ValueError, match=message):
        tiny_model(torch.float16).generate(ids, max_new_tokens=2, speed=True)


# Caches.


def make_cache(kind, model):
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=41)
    return SpeedCache(model.config.num_unique_layers, model.config.num_repetitions)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["dynamic", "static", "speed"])
@pytest.mark.parametrize("case", ["causal", "prefix", "padding"])
def test_cached_equals_uncached_at_every_position(attention, kind, case):
    model, ids = tiny_model(attention=attention), random_ids(2, 30)
    seen, kwargs = torch.ones(2, 30, dtype=torch.bool), {}
    if case == "prefix":
        kwargs["prefix_mask"] = torch.arange(30)[None] < torch.tensor([[5], [11]])
    if case == "padding":
        seen = LEFT_PADDED.bool()
        kwargs["attention_mask"] = LEFT_PADDED
    expected = all_exits(model, ids, **kwargs)
    for chunks in ([12] + [1] * 18, [11, 7, 1, 2, 9]):  # a prefix is seen whole, or not in both directions
        cache, start, parts = make_cache(kind, model), 0, []
        for length in chunks:
            stop = start + length
            past = {name: mask[:, :stop] for name, mask in kwargs.items()}
            parts.append(all_exits(model, ids[:, start:stop], cache=cache, use_cache=True, **past))
            start = stop
            assert int(cache.get_seq_length()) == stop
        close(torch.cat(parts, dim=2)[:, seen], expected[:, seen])


def test_positions_fed_one_by_one_equal_uncached():
    model, ids = tiny_model(), random_ids(1, 30)
    expected = all_exits(model, ids)
    for kind in ("dynamic", "static", "speed"):
        cache = make_cache(kind, model)
        parts = [all_exits(model, ids[:, i : i + 1], cache=cache, use_cache=True) for i in range(30)]
        close(torch.cat(parts, dim=2), expected)


def test_use_cache_makes_a_cache_of_all_repetitions():
    model, ids = tiny_model(), random_ids(1, 6)
    assert len(model(ids, use_cache=True).cache.layers) == K * G
    assert model(ids, use_cache=False).cache is None


class CountingCache(DynamicCache):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.writes = Counter()

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.writes[layer_idx] += key_states.shape[-2]
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def test_each_slot_holds_the_keys_of_its_repetition_and_layer():
    model, ids = tiny_model(), random_ids(2, 12)
    cache = CountingCache(config=model.config)
    with torch.no_grad():
        outputs = model(ids[:, :9], cache=cache, output_hidden_states=True)
        for column in range(9, 12):
            model(ids[:, column : column + 1], cache=cache)
        assert cache.writes == dict.fromkeys(range(K * G), 12)  # every position once
        for slot in range(K * G):
            layer = model.model.layers[slot % K]  # repetition * K + layer
            normed = layer.input_layernorm(outputs.hidden_states[slot])
            for memory, part in ((cache.layers[slot].keys, "k"), (cache.layers[slot].values, "v")):
                states = getattr(layer.self_attn, part)(normed).view(2, 9, 3, 10).transpose(1, 2)
                close(memory[:, :, :9], states)


def test_speed_cache_behaves_as_a_dynamic_cache():
    model, ids = tiny_model(), random_ids(2, 12)
    caches = [make_cache(kind, model) for kind in ("dynamic", "speed")]
    for cache in caches:
        all_exits(model, ids[:, :9], cache=cache, use_cache=True)
        cache.crop(-2)
        assert cache.get_seq_length() == 7
    changes = [
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: cache.batch_select_indices(torch.tensor([0, 3])),
    ]
    for change in changes:
        for cache in caches:
            change(cache)
        for dynamic, speed in zip(*(cache.layers for cache in caches)):
            close(speed.keys, dynamic.keys, 0)
            close(speed.values, dynamic.values, 0)
    actual = [all_exits(model, ids[:, 9:], cache=cache, use_cache=True) for cache in caches]
    close(actual[1], actual[0])
    for cache in caches:
        cache.reset()
    assert caches[1].get_seq_length() == 0
    close(all_exits(model, ids, cache=caches[1], use_cache=True), all_exits(model, ids))


# Dropout.


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_shared_dropout_keeps_its_rate_and_mean(rate):
    torch.manual_seed(0)
    dropped = SharedDropout(rate).train()(torch.ones(50, 4, 800))
    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - rate)])
    assert (dropped == dropped[:, :1]).all()  # one mask for all positions
    share = (dropped[:, 0] == 0).double().mean().item()
    assert share == pytest.approx(rate, abs=5 * math.sqrt(rate * (1 - rate) / 40_000))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_dropout_equals_the_reference_with_the_same_masks(attention):
    """Places, order, sharing and scaling of all dropout: the masks that were drawn are put into the plain model."""
    model, ids = tiny_model(attention=attention, dropout_rate=0.3).train(), random_ids(2, 12)
    masks = []

    def keep_mask(module, inputs, output):
        mask = output / inputs[0]
        masks.append(mask[..., :1].transpose(-1, -2) if module.shared_dim == -1 else mask[..., :1, :])

    for module in model.modules():
        if isinstance(module, SharedDropout):
            module.register_forward_hook(keep_mask)
    actual = all_exits(model, ids)
    # After the embedding; four times in each layer; at each exit.
    assert len(masks) == 1 + 4 * K * G + G
    shapes = Counter(tuple(mask.shape) for mask in masks)
    # Residual stream, gated product, and probabilities of all queries.
    assert shapes == {(2, 1, 24): 1 + 2 * K * G + G, (2, 1, 40): K * G, (2, 3, 1, 12): K * G}
    assert len({mask.numpy().tobytes() for mask in masks}) == len(masks)  # drawn anew in every repetition
    drawn = iter(mask.numpy() for mask in masks)
    expected = reference.exit_logits(arrays(model), sizes(model), ids.numpy(), drop=lambda x: x * next(drawn))
    close(actual, np.stack(expected))
    dropped = np.mean([(mask == 0).double().mean().item() for mask in masks])
    assert dropped == pytest.approx(0.3, abs=0.05)


def test_dropout_acts_in_training_only():
    ids = random_ids(2, 12)
    plain, model = tiny_model(), tiny_model(dropout_rate=0.3)
    close(all_exits(model, ids), all_exits(plain, ids), 0)
    model.train()
    assert (all_exits(model, ids) != all_exits(model, ids)).any()
    close(all_exits(plain.train(), ids), all_exits(model.eval(), ids), 0)


# Gradients.


def gradients(model, *args, seed=0, **kwargs):
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(*args, **kwargs).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: weight.grad.clone() for name, weight in model.named_parameters()}


def assert_equal_gradients(actual, expected, tolerance=1e-12):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-9, atol=tolerance, msg=name)


def test_gradients_equal_slopes_of_the_reference_loss():
    model = tiny_model(prefix_lm=True, exit_loss_weights=[0.3, 1.0, 0.7], z_loss=0.01)
    ids = random_ids(2, 12)
    labels = ids.clone()
    labels[0, :5] = labels[1, :8] = -100
    grads = gradients(model, ids, labels=labels)
    weights = arrays(model)
    weights.pop("lm_head.weight")
    rng = np.random.default_rng(0)

    def loss_at(weights):
        logits = reference.exit_logits(weights, sizes(model), ids.numpy(), prefix=(labels == -100).numpy())
        return reference.multi_exit_loss(logits, labels.tolist(), [0.3, 1.0, 0.7], z_loss=0.01)

    assert grads["loss"].item() == pytest.approx(loss_at(weights), rel=1e-12)
    for name in weights:
        direction, step = rng.normal(size=weights[name].shape), 1e-5
        ahead, behind = (loss_at({**weights, name: weights[name] + sign * step * direction}) for sign in (1, -1))
        slope = (grads[name].numpy() * direction).sum()
        assert slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-5, abs=1e-8), name


def test_gradient_of_a_shared_layer_is_the_sum_over_its_uses():
    shared = tiny_model(exit_loss_weights="final")
    unshared = tiny_model(exit_loss_weights="final", num_unique_layers=K * G, num_repetitions=1)
    source = shared.state_dict()
    copies = {}
    for name in unshared.state_dict():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(int(parts[2]) % K)
        copies[name] = source[".".join(parts)]
    unshared.load_state_dict(copies)
    ids = random_ids(2, 20)
    expected, grads = gradients(shared, ids, labels=ids), gradients(unshared, ids, labels=ids)
    summed = {}
    for name, grad in grads.items():
        parts = name.split(".")
        if len(parts) > 1 and parts[1] == "layers":
            parts[2] = str(int(parts[2]) % K)
        summed[".".join(parts)] = summed.get(".".join(parts), 0) + grad
    assert_equal_gradients(summed, expected)
    assert not torch.equal(grads["model.layers.0.mlp.wo.weight"], grads["model.layers.2.mlp.wo.weight"])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dropout_rate", [0.0, 0.3])
def test_gradient_checkpointing_gives_equal_gradients(reentrant, attention, dropout_rate):
    model = tiny_model(attention=attention, dropout_rate=dropout_rate, prefix_lm=True).train()
    ids = random_ids(2, 20)
    inputs = {"labels": ids.clone(), "attention_mask": LEFT_PADDED[:, :20]}
    inputs["labels"][0, :5] = inputs["labels"][1, :12] = -100
    expected = gradients(model, ids, **inputs)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    runs = Counter()
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: runs.update(["mlp"]))
    assert_equal_gradients(gradients(model, ids, **inputs), expected)
    assert runs["mlp"] == 2 * K * G  # once more in the backward pass
    assert expected["model.relative_attention_bias.weight"].any()
    for cache in (None, DynamicCache(config=model.config)):  # a layer that is run again would write its keys twice
        assert_equal_gradients(gradients(model, ids, cache=cache, use_cache=True, **inputs), expected)
        assert model(ids, cache=cache, use_cache=True, **inputs).cache is None


@pytest.mark.parametrize("speed", [True, False])
def test_gradient_checkpointing_does_not_disturb_generation(speed):
    model, prompt = tiny_model(), random_ids(1, 5)
    expected = model.generate(prompt, max_new_tokens=12)
    model.train().gradient_checkpointing_enable()
    assert torch.equal(model.generate(prompt, max_new_tokens=12, speed=speed), expected)


# Inputs and outputs of `forward`.


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_are_given_per_layer_use(attention):
    model, ids = tiny_model(attention=attention), random_ids(2, 12)
    with torch.no_grad():
        outputs = model(ids, output_hidden_states=True)
        assert len(outputs.hidden_states) == K * G + 1
        close(outputs.hidden_states[0], model.embed(ids), 0)
        exits = all_exits(model, ids)
        for exit_ in range(1, G):
            close(model.exit_logits(outputs.hidden_states[K * exit_]), exits[exit_ - 1])
        close(outputs.logits, exits[-1], 0)


def test_eager_attention_gives_probabilities_per_layer_use():
    model, ids = tiny_model(attention="eager"), random_ids(2, 30)
    with torch.no_grad():
        outputs = model(ids, attention_mask=LEFT_PADDED, output_attentions=True)
    assert len(outputs.attentions) == K * G
    for probabilities in outputs.attentions:
        assert probabilities.shape == (2, 3, 30, 30)
        seen = probabilities.transpose(1, 2)[LEFT_PADDED.bool()]
        close(seen.sum(-1), torch.ones(len(seen), 3, dtype=torch.float64))
        assert not probabilities[0].triu(1).any() and not probabilities[1, :, 9:, :9].any()


def test_inputs_embeds_equal_ids():
    model, ids = tiny_model(), random_ids(2, 12)
    embeds = model.get_input_embeddings()(ids)
    close(all_exits(model, inputs_embeds=embeds, labels=ids), all_exits(model, ids))
    model = tiny_model(dropout_rate=0.3).train()
    torch.manual_seed(1)
    expected = all_exits(model, ids)
    torch.manual_seed(1)
    close(all_exits(model, inputs_embeds=embeds), expected)


def test_ids_or_embeds_are_needed():
    model, ids = tiny_model(), random_ids(1, 4)
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": model.embed(ids)}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**inputs)


def test_logits_to_keep_cuts_logits_of_all_exits():
    model, ids = tiny_model(), random_ids(2, 12)
    expected = all_exits(model, ids)
    close(all_exits(model, ids, logits_to_keep=3), expected[:, :, -3:])
    close(all_exits(model, ids, logits_to_keep=torch.tensor([1, 5])), expected[:, :, [1, 5]])
    close(model(ids, logits_to_keep=1).logits.detach(), expected[-1, :, -1:])


def test_outputs_depend_on_mode_and_labels():
    model, ids = tiny_model(), random_ids(2, 12)
    outputs = model(ids)
    assert outputs.loss is None and outputs.exit_losses is None and outputs.exit_logits is None
    outputs = model(ids, labels=ids)
    assert outputs.loss.requires_grad and outputs.exit_losses.shape == (G,) and not outputs.exit_losses.requires_grad
    close(outputs.logits.detach(), all_exits(model, ids)[-1])
    assert model.train()(ids, labels=ids).logits is None
    assert isinstance(model(ids, labels=ids, return_dict=False), tuple)


def test_fewer_layers_for_a_draft_end_at_an_earlier_exit():
    model, ids = tiny_model(), random_ids(1, 12)
    exits = all_exits(model, ids)
    model.config.num_hidden_layers = 2 * K
    close(model(ids).logits.detach(), exits[1])
    model.config.num_hidden_layers = 3
    with pytest.raises(ValueError, match=r"`num_hidden_layers` .* must be a multiple of `num_unique_layers`=2, got 3"):
        model(ids)


def test_plain_generate_equals_reference():
    for prefix_lm in (False, True):
        model, prompt = tiny_model(prefix_lm=prefix_lm), random_ids(1, 5)
        expected, _ = reference.greedy(arrays(model), sizes(model), prompt[0].tolist(), 10, 1, prefix_lm)
        assert model.generate(prompt, max_new_tokens=10)[0, 5:].tolist() == expected


# Checkpoints.


@pytest.fixture
def checkpoint(tmp_path):
    model = tiny_model(torch.float32)
    model.save_pretrained(tmp_path)
    return model, tmp_path / "model.safetensors"


@pytest.fixture
def transformers_log(monkeypatch, caplog):
    # Other tests of this process may have silenced the library, as the demo does.
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    caplog.set_level(logging.WARNING, logger="transformers")
    return caplog


def test_checkpoint_stores_each_layer_once(checkpoint):
    model, file = checkpoint
    stored = load_file(file)
    assert stored.keys() == model.state_dict().keys() - {"lm_head.weight"}
    assert sum(weight.numel() for weight in stored.values()) == model.num_parameters()
    per_layer = Counter(name.split(".")[2] for name in stored if ".layers." in name)
    assert per_layer == {str(layer): 9 for layer in range(K)}


@pytest.mark.parametrize("load", [SpeedT5ForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_loaded_model_equals_the_saved_one(checkpoint, load):
    model, file = checkpoint
    loaded = load(file.parent)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    ids = random_ids(2, 12)
    assert torch.equal(all_exits(loaded, ids), all_exits(model, ids)) and not loaded.training
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(SpeedT5Model.from_pretrained(file.parent).norm.weight, model.model.norm.weight)


def test_head_stays_tied_when_the_vocabulary_grows():
    model = tiny_model()
    model.resize_token_embeddings(45)
    assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.vocab_size == 45
    ids = random_ids(1, 8)
    close(all_exits(model, ids), expected_exits(model, ids))


@pytest.mark.parametrize("kept", [0.9, 0.001, 0])
def test_truncated_checkpoint_is_refused(checkpoint, kept):
    _, file = checkpoint
    content = file.read_bytes()
    file.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=r"damaged weights file .*: download or save the checkpoint again"):
        SpeedT5ForCausalLM.from_pretrained(file.parent)


def test_absent_checkpoint_is_refused(checkpoint):
    _, file = checkpoint
    file.unlink()
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        SpeedT5ForCausalLM.from_pretrained(file.parent)


def test_weight_of_a_wrong_shape_is_refused(checkpoint, transformers_log):
    _, file = checkpoint
    name = "model.layers.1.mlp.wo.weight"
    stored = load_file(file)
    stored[name] = stored[name][:, :5].contiguous()
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        SpeedT5ForCausalLM.from_pretrained(file.parent)
    assert name in transformers_log.text and "MISMATCH" in transformers_log.text


def test_missing_weight_is_refused(checkpoint):
    _, file = checkpoint
    stored = load_file(file)
    del stored["model.layers.1.mlp.wo.weight"]
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.wo\.weight: download or save"):
        SpeedT5ForCausalLM.from_pretrained(file.parent)


def test_layers_that_the_config_does_not_name_are_refused(checkpoint):
    _, file = checkpoint
    stored = load_file(file)
    stored["model.layers.2.mlp.wo.weight"] = stored["model.layers.1.mlp.wo.weight"].clone()
    save_file(stored, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="more layers than its config"):
        SpeedT5ForCausalLM.from_pretrained(file.parent)
