# Copyright 2026 The speed_hf authors. trf-ignore: TRF028 (the next line names the license, as in every file here)
# SPDX-License-Identifier: Apache-2.0
"""Configuration of SpeedT5: every architecture value, the numbers derived from them, and all their checks."""

import math

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig


# Written into every config.json: all Auto classes find the code that travels with a checkpoint.
AUTO_MAP = {
    "AutoConfig": "configuration_speed_t5.SpeedT5Config",
    "AutoModel": "modeling_speed_t5.SpeedT5ForCausalLM",
    "AutoModelForCausalLM": "modeling_speed_t5.SpeedT5ForCausalLM",
}
EXIT_LOSS_SCHEMES = ("linear", "uniform", "final")


# trf-ignore: TRF057 (@auto_docstring knows no name and no arguments of a model outside of transformers)
@strict
class SpeedT5Config(PreTrainedConfig):
    r"""
    Configuration of a decoder-only T5 whose layers are shared cyclically. The defaults are the 2x6 model of T5-Base
    size.

    Args:
        vocab_size (`int`, defaults to 32128):
            Number of token ids, the width of the logits.
        hidden_size (`int`, defaults to 768):
            Width of the residual stream. T5's name `d_model` works too.
        intermediate_size (`int`, defaults to 2048):
            Width of the gated feed-forward product (`d_ff`).
        num_attention_heads (`int`, defaults to 12):
            Heads of each attention (`num_heads`); every head has its own keys and values.
        head_dim (`int`, defaults to 64):
            Width of one head (`d_kv`). Their product with `num_attention_heads` need not be `hidden_size`.
        num_unique_layers (`int`, defaults to 2):
            K, the layers that are stored.
        num_repetitions (`int`, defaults to 6):
            G, how often the K layers are run. There is one exit after each repetition.
        num_hidden_layers (`int`, *optional*):
            Depth of the model, always K * G. Left out, it is derived; given, it must agree.
        relative_attention_num_buckets (`int`, defaults to 32):
            Rows of the one relative position table that all layers share.
        relative_attention_max_distance (`int`, defaults to 128):
            Distance in tokens from which on all keys fall into the last bucket.
        dropout_rate (`float`, defaults to 0.0):
            Probability in [0, 1) of dropping a unit in training.
        rms_norm_eps (`float`, defaults to 1e-6):
            Added to the mean square in every RMSNorm.
        prefix_lm (`bool`, defaults to `False`):
            Whether the positions of a prompt attend to each other in both directions.
        exit_loss_weights (`str` or `list[float]`, defaults to `"linear"`):
            Weights w_1 .. w_G of the loss sum_i w_i L_i: `"linear"` (i / sum(i)), `"uniform"` (1 / G), `"final"` (only
            exit G), or G non-negative numbers, which are used as they are.
        z_loss (`float`, defaults to 0.0):
            Factor of the penalty log(Z)^2 that keeps the logits' normaliser Z near 1 (T5X trains with 1e-4).
        max_position_embeddings (`int`, defaults to 1024):
            Longest prompt in tokens that `generate` takes. The relative positions themselves have no end.

    Raises:
        ValueError: For sizes that are not positive or disagree, and for loss weights that do not fit the number of
        exits.

    Source: Raffel et al. 2020 (T5) as built by T5X's decoder-only example; Hooper et al. 2023 (SPEED) for the sharing.
    """

    model_type = "speed_t5"
    attribute_map = {
        "d_model": "hidden_size",
        "d_ff": "intermediate_size",
        "num_heads": "num_attention_heads",
        "num_key_value_heads": "num_attention_heads",
        "d_kv": "head_dim",
        "num_layers": "num_hidden_layers",
    }
    # Without this, evaluation would collect the cache and every exit's numbers as if they were predictions.
    keys_to_ignore_at_inference = ["cache", "exit_losses", "exit_logits"]
    base_model_fsdp_plan = {"layers.*": "keep_full_weight"}  # each layer is used G times in one forward

    vocab_size: int = 32128
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_attention_heads: int = 12
    head_dim: int = 64
    num_unique_layers: int = 2
    num_repetitions: int = 6
    num_hidden_layers: int | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    dropout_rate: float | int = 0.0
    rms_norm_eps: float = 1e-6
    prefix_lm: bool = False
    exit_loss_weights: str | list[float | int] = "linear"
    z_loss: float | int = 0.0
    max_position_embeddings: int = 1024
    pad_token_id: int | None = 0
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    tie_word_embeddings: bool = True
    use_cache: bool = True

    def __post_init__(self, **kwargs):
        if self.num_hidden_layers is None:
            self.num_hidden_layers = self.num_unique_layers * self.num_repetitions
        super().__post_init__(**kwargs)
        self.auto_map = dict(AUTO_MAP)
        # `@strict` checks again, but wraps what it finds; from here it is a plain ValueError.
        self.validate_architecture()

    def validate_architecture(self):
        """Called by `@strict` when a configuration is made and when it is saved."""
        self._check_sizes()
        self._check_training_values()
        if not self.tie_word_embeddings:
            raise ValueError("`tie_word_embeddings` must be True: every exit shares the embedding table as its head.")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            ids = getattr(self, name)
            ids = ids if isinstance(ids, list) else [ids]
            if any(token_id is not None and not 0 <= token_id < self.vocab_size for token_id in ids):
                raise ValueError(
                    f"`{name}` must lie in [0, `vocab_size`={self.vocab_size}), got {getattr(self, name)}: take "
                    "the id from the tokenizer, or raise `vocab_size`."
                )

    def _check_sizes(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "head_dim",
            "num_unique_layers",
            "num_repetitions",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"`{name}` must be at least 1, got {getattr(self, name)}: set it to a positive number."
                )
        if self.num_hidden_layers != self.num_unique_layers * self.num_repetitions:
            raise ValueError(
                f"`num_hidden_layers` must be `num_unique_layers` * `num_repetitions` = {self.num_unique_layers} * "
                f"{self.num_repetitions}, got {self.num_hidden_layers}: leave it out and it is derived."
            )
        if self.relative_attention_num_buckets < 2 or self.relative_attention_num_buckets % 2:
            raise ValueError(
                "`relative_attention_num_buckets` must be an even number of at least 2, got "
                f"{self.relative_attention_num_buckets}: T5 uses 32."
            )
        if self.relative_attention_max_distance <= self.relative_attention_num_buckets // 2:
            raise ValueError(
                "`relative_attention_max_distance` must be larger than half of `relative_attention_num_buckets`="
                f"{self.relative_attention_num_buckets}, got {self.relative_attention_max_distance}: T5 has 128."
            )

    def _check_training_values(self):
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"`dropout_rate` must lie in [0, 1), got {self.dropout_rate}: 0.1 is T5's value.")
        if not (self.rms_norm_eps > 0 and math.isfinite(self.rms_norm_eps)):
            raise ValueError(f"`rms_norm_eps` must be a positive number, got {self.rms_norm_eps}: T5 uses 1e-6.")
        if not (self.z_loss >= 0 and math.isfinite(self.z_loss)):
            raise ValueError(f"`z_loss` must be at least 0, got {self.z_loss}: 1e-4 is T5X's value, 0 turns it off.")
        self.exit_weights()

    def exit_weights(self) -> list[float]:
        """
        The weights of the exits' losses.

        Returns:
            `list[float]`: w_1 .. w_G, one per exit.

        Raises:
            ValueError: If `exit_loss_weights` names no known scheme or does not hold G usable numbers.
        """
        num_exits, scheme = self.num_repetitions, self.exit_loss_weights
        if scheme == "linear":
            return [exit_ / (num_exits * (num_exits + 1) / 2) for exit_ in range(1, num_exits + 1)]
        if scheme == "uniform":
            return [1 / num_exits] * num_exits
        if scheme == "final":
            return [0.0] * (num_exits - 1) + [1.0]
        if isinstance(scheme, str):
            raise ValueError(
                f"`exit_loss_weights` must be one of {', '.join(EXIT_LOSS_SCHEMES)} or a list of numbers, got "
                f"{scheme!r}: choose one of these."
            )
        usable = all(math.isfinite(weight) and weight >= 0 for weight in scheme) and sum(scheme) > 0
        if len(scheme) != num_exits or not usable:
            raise ValueError(
                f"`exit_loss_weights` must hold `num_repetitions`={num_exits} non-negative numbers, not all 0, got "
                f"{scheme}: give one weight per exit."
            )
        return [float(weight) for weight in scheme]


__all__ = ["SpeedT5Config"]
