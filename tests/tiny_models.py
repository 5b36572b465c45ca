# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Models small enough for tests, with nothing in them that an error could hide behind."""

import shutil
from importlib.util import find_spec

import numpy as np
import torch

from speed_hf import SpeedT5Config, SpeedT5ForCausalLM


# What `speed_kernels=True` needs.
HAS_COMPILER = shutil.which("c++") is not None and bool(shutil.which("ninja") or find_spec("ninja"))

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


# Sizes for which the compiled operations multiply by themselves, run whole layers and search the head.
COMPILED_SIZES = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 3,
    "head_dim": 32,
}


# How much a repetition changes the residual stream, and with it the predictions of the exits.
GAINS = {"never": 0.0, "seldom": 0.2, "often": 2.0}


def flipping_model(flips="often", dtype=torch.float64, seed=0, **changes):
    """A random model whose exits agree always (repetitions are the identity), mostly or seldom; its texts vary."""
    model = tiny_model(torch.float64, seed, **{"vocab_size": 61, "num_repetitions": 4, **changes})
    with torch.no_grad():
        # With signs of its own, the tied head does not simply repeat the token that it reads.
        model.model.norm.weight.normal_()
        for layer in model.model.layers:
            layer.self_attn.o.weight.mul_(GAINS[flips])
            layer.mlp.wo.weight.mul_(GAINS[flips])
    # End-of-sequence comes where a test asks for it, not by chance.
    model.generation_config.eos_token_id = None
    return model.to(dtype)


def prompts(batch_size, length, vocab_size=61, seed=0, padded=False):
    """Random prompts `(B, L)` and their attention mask; `padded`: row b starts with b % L pads."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, vocab_size, (batch_size, length), generator=generator)
    mask = torch.ones_like(ids)
    if padded:
        for row in range(batch_size):
            mask[row, : (3 * row) % length] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}
