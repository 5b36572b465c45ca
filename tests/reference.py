# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
The plain truth: SpeedT5 and its greedy decoding in NumPy float64, slow and written without the package.

`weights` are the arrays of a state dict, `sizes` a dict with the names of the configuration. Shape letters: B batch,
L length, V vocabulary; G exits. Nothing here is cached or shared between positions.
"""

import numpy as np


def bucket(distance, num_buckets, max_distance):
    """Bucket of a distance in tokens, in whole numbers only, so that no logarithm can round."""
    exact = num_buckets // 2
    if distance < exact:
        return max(distance, 0)
    # exact + k, for the largest k with log(distance / exact) / log(max_distance / exact) >= k / growing, as powers.
    growing = num_buckets - exact
    k = 0
    while k + 1 < growing and max_distance ** (k + 1) * exact ** (growing - k - 1) <= distance**growing:
        k += 1
    return exact + k


def visible_keys(shape, prefix=None, attention_mask=None, segments=None):
    """
    Which keys a query sees: `(B, L, L)` bool, (causal or both in the prefix) and not padding and in the same segment.

    Args:
        shape (`tuple`): B and L.
        prefix, attention_mask, segments (arrays of shape `(B, L)`, *optional*).
    """
    batch_size, length = shape
    visible = np.zeros((batch_size, length, length), dtype=bool)
    for row in range(batch_size):
        for query in range(length):
            for key in range(length):
                sees = key <= query or (prefix is not None and bool(prefix[row][query]) and bool(prefix[row][key]))
                if attention_mask is not None and not attention_mask[row][key]:
                    sees = False
                if segments is not None and segments[row][query] != segments[row][key]:
                    sees = False
                visible[row, query, key] = sees
    return visible


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def gelu_new(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attention(weights, name, sizes, x, visible, drop):
    batch_size, length, _ = x.shape
    num_heads, head_dim = sizes["num_attention_heads"], sizes["head_dim"]
    query, key, value = (
        (x @ weights[f"{name}.{part}.weight"].T).reshape(batch_size, length, num_heads, head_dim) for part in "qkv"
    )
    scores = np.einsum("bqhd,bkhd->bhqk", query, key)
    table = weights["model.relative_attention_bias.weight"]
    for q in range(length):
        for k in range(length):
            row = bucket(q - k, sizes["relative_attention_num_buckets"], sizes["relative_attention_max_distance"])
            scores[:, :, q, k] += table[row]
    scores = np.where(visible[:, None], scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    probabilities = np.exp(scores - np.where(np.isfinite(top), top, 0))  # all 0 in a row of padding
    total = probabilities.sum(-1, keepdims=True)
    probabilities = drop(probabilities / np.where(total > 0, total, 1))
    mixed = np.einsum("bhqk,bkhd->bqhd", probabilities, value).reshape(batch_size, length, num_heads * head_dim)
    return mixed @ weights[f"{name}.o.weight"].T


def exit_states(weights, sizes, input_ids, visible, drop=lambda x: x):
    """
    What the head reads at exit 1 .. G: a list of G arrays `(B, L, hidden_size)`.

    Args:
        drop (`callable`): array -> array, called at every place of dropout in T5X's order.
    """
    weights = {name: np.asarray(weight, dtype=np.float64) for name, weight in weights.items()}
    eps = sizes.get("rms_norm_eps", 1e-6)
    x = drop(weights["model.embed_tokens.weight"][np.asarray(input_ids)])
    exits = []
    for _ in range(sizes["num_repetitions"]):
        for index in range(sizes["num_unique_layers"]):
            layer = f"model.layers.{index}"
            normed = rms_norm(x, weights[f"{layer}.input_layernorm.weight"], eps)
            x = x + drop(attention(weights, f"{layer}.self_attn", sizes, normed, visible, drop))
            normed = rms_norm(x, weights[f"{layer}.post_attention_layernorm.weight"], eps)
            gate = gelu_new(normed @ weights[f"{layer}.mlp.wi_0.weight"].T)
            product = drop(gate * (normed @ weights[f"{layer}.mlp.wi_1.weight"].T))
            x = x + drop(product @ weights[f"{layer}.mlp.wo.weight"].T)
        exits.append(drop(rms_norm(x, weights["model.norm.weight"], eps)))
    return exits


def exit_logits(weights, sizes, input_ids, prefix=None, attention_mask=None, segments=None, drop=lambda x: x):
    """Logits of exit 1 .. G: a list of G arrays `(B, L, V)`. Those of padding mean nothing."""
    visible = visible_keys(np.shape(input_ids), prefix, attention_mask, segments)
    table = np.asarray(weights["model.embed_tokens.weight"], dtype=np.float64)
    states = exit_states(weights, sizes, input_ids, visible, drop)
    return [state @ table.T / np.sqrt(sizes["hidden_size"]) for state in states]


def cross_entropy(logits, labels, z_loss=0.0):
    """Summed next-token loss of logits `(B, L, V)`, and of how many labels (aligned with the inputs, without -100)."""
    total, count = 0.0, 0
    for row in range(len(labels)):
        for position in range(len(labels[row]) - 1):
            label = labels[row][position + 1]
            if label == -100:
                continue
            scores = logits[row, position]
            log_z = scores.max() + np.log(np.exp(scores - scores.max()).sum())
            total += log_z - scores[label] + z_loss * log_z**2
            count += 1
    return total, count


def multi_exit_loss(logits, labels, exit_weights, z_loss=0.0):
    """Weighted sum over exits of the mean next-token loss."""
    means = []
    for scores in logits:
        total, count = cross_entropy(scores, labels, z_loss)
        means.append(total / max(count, 1))
    return sum(weight * mean for weight, mean in zip(exit_weights, means))


def greedy(weights, sizes, prompt, num_new_tokens, eos_token_id=None, prefix_lm=False):
    """
    Plain greedy decoding of one prompt (a list of ids without padding).

    Returns:
        `tuple(list, array)`: the new tokens (up to the end-of-sequence token, included), and what exits 1 .. G predict
        for each of them when everything before it is final, `(N, G)`. The last column is the tokens themselves.
    """
    ids, predictions = list(prompt), []
    while len(predictions) < num_new_tokens:
        prefix = [[prefix_lm and column < len(prompt) for column in range(len(ids))]]
        logits = exit_logits(weights, sizes, [ids], prefix=prefix)
        predictions.append([int(scores[0, -1].astype(np.float32).argmax()) for scores in logits])
        ids.append(predictions[-1][-1])
        if ids[-1] == eos_token_id:
            break
    return ids[len(prompt) :], np.array(predictions)


def oracle_passes(exit_predictions):
    """
    Group passes of pipelined decoding of one sequence, without drafts and without overlap with the prompt.

    Every position is started as soon as the prediction before it has changed for the last time, and takes G passes.

    Args:
        exit_predictions (array of shape `(N, G)`): what exits 1 .. G predict for each new token, as `greedy` gives it.
    """
    num_tokens, num_exits = np.shape(exit_predictions)
    if num_tokens == 1:
        return num_exits  # the prompt predicts it

    def last_change(row):
        return max([exit_ for exit_ in range(2, num_exits + 1) if row[exit_ - 1] != row[exit_ - 2]], default=1)

    prompt, last = num_exits, num_exits
    return prompt + sum(last_change(row) for row in exit_predictions[1:-1]) + last
