# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Models small enough for tests, with nothing in them that an error could hide behind."""

import numpy as np
import torch

from speed_hf import SpeedT5Config, SpeedT5ForCausalLM


# No two sizes are equal, heads times head_dim is not the width, and 30 tokens reach past the largest distance.
TINY_SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_attention_heads": 3,
    "head_dim": 10,
    "num_unique_layers": 2,
    "num_repetitions": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}


def tiny_config(**changes):
    return SpeedT5Config(**{**TINY_SIZES, **changes})


def tiny_model(dtype=torch.float64, seed=0, attention="sdpa", **changes):
    """A random model in evaluation mode, norms and position bias included (they start as ones and nearly nothing)."""
    torch.manual_seed(seed)
    model = SpeedT5ForCausalLM(tiny_config(**changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif "relative_attention_bias" in name:
                weight.normal_(std=1.0)
    model.set_attn_implementation(attention)
    return model.to(dtype).eval()


def arrays(model):
    """State dict of a model as float64 arrays, for the reference."""
    return {name: weight.detach().to(torch.float64).numpy() for name, weight in model.state_dict().items()}


def sizes(model):
    """Sizes of a model as a plain dict, for the reference."""
    config = model.config
    return {name: getattr(config, name) for name in TINY_SIZES} | {"rms_norm_eps": config.rms_norm_eps}


def random_ids(*shape, vocab_size=TINY_SIZES["vocab_size"], seed=0):
    """Ids without pad, start and end."""
    return torch.from_numpy(np.random.default_rng(seed).integers(2, vocab_size, shape))
