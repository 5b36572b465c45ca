# Copyright 2026 The speed_hf authors. trf-ignore: TRF028 (the next line names the license, as in every file here)
# SPDX-License-Identifier: Apache-2.0
"""SpeedT5: a decoder-only T5 whose K layers are shared cyclically G times, with an exit after every repetition."""

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, slice_logits_to_keep
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, auto_docstring, can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .cache_speed import memory_dtype
from .configuration_speed_t5 import SpeedT5Config
from .generation_speed import SpeedGenerationMixin
from .kernels_speed import TorchOperations
from .loss_speed import multi_exit_loss
from .packed_speed import multiply
from .rows_speed import WholeSequences


if "cache" not in CausalLMOutputWithPast.__dataclass_fields__:
    raise ImportError(
        "SpeedT5 needs transformers>=5.24, where `forward` takes `cache`: run `pip install -U transformers`."
    )


@auto_docstring
@dataclass
class SpeedT5ModelOutput(BaseModelOutputWithPast):
    r"""
    exit_states (`tuple(torch.FloatTensor)` of G tensors of shape `(B, L, hidden_size)`, *optional*):
        What the head reads at each exit, after the final norm. Returned with `return_exit_states=True`.
    """

    exit_states: tuple[torch.Tensor, ...] | None = None


@auto_docstring
@dataclass
class SpeedT5CausalLMOutput(CausalLMOutputWithPast):
    r"""
    loss (`torch.FloatTensor` of shape `()`, *optional*):
        The weighted sum of the exits' losses. Returned when `labels` are given.
    logits (`torch.FloatTensor` of shape `(B, L, V)`, *optional*):
        Scores of the last exit. `None` in training with `labels`, where only labelled positions meet the head.
    exit_losses (`torch.FloatTensor` of shape `(G,)`, *optional*):
        Losses of the exits, detached, exit 1 first.
    exit_logits (`tuple(torch.FloatTensor)` of G tensors of shape `(B, L, V)`, *optional*):
        Scores of every exit. Returned with `return_exit_logits=True`.
    """

    exit_losses: torch.Tensor | None = None
    exit_logits: tuple[torch.Tensor, ...] | None = None


class SpeedT5RMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor, operations=TorchOperations) -> torch.Tensor:
        return operations.rms_norm(hidden_states, self.weight, self.eps)


class SharedDropout(nn.Module):
    """Dropout whose mask is the same along one dimension: T5X shares it over positions, to save random numbers."""

    def __init__(self, rate: float, shared_dim: int = -2):
        super().__init__()
        self.rate = rate
        self.shared_dim = shared_dim

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.rate:
            return states
        shape = list(states.shape)
        shape[self.shared_dim] = 1
        return states * nn.functional.dropout(states.new_ones(shape), self.rate)


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float = 1.0,
    **kwargs: Unpack[TransformersKwargs],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention in plain products, for those who need its probabilities `(N, H, W, S)`."""
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    dtype = torch.promote_types(scores.dtype, torch.float32)
    probabilities = nn.functional.softmax(scores, dim=-1, dtype=dtype).to(query.dtype)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


class SpeedT5Attention(nn.Module):
    def __init__(self, config: SpeedT5Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.is_causal = True
        inner_dim = config.num_attention_heads * config.head_dim
        self.q = nn.Linear(config.hidden_size, inner_dim, bias=False)
        self.k = nn.Linear(config.hidden_size, inner_dim, bias=False)
        self.v = nn.Linear(config.hidden_size, inner_dim, bias=False)
        self.o = nn.Linear(inner_dim, config.hidden_size, bias=False)
        self.q.init_std = (config.hidden_size * config.head_dim) ** -0.5
        # T5X drops attention probabilities with one mask for all queries. That is the same as dropping values.
        self.dropout = SharedDropout(config.dropout_rate, shared_dim=-1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows,
        *attention_masks: torch.Tensor,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        input_shape = hidden_states.shape[:-1]
        head_shape = (*input_shape, -1, self.head_dim)
        products = rows.multiply(hidden_states, self.q, self.k, self.v)
        query, key, value = (product.view(head_shape) for product in products)
        if rows.attends_by_itself:
            attended = rows.attend(query, key, value, self.layer_idx).view(*input_shape, -1)
            return rows.multiply(attended, self.o)[0], None

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        outputs = []
        for (queries, keys, values), mask in zip(rows.enter(query, key, value, self.layer_idx), attention_masks):
            # No 1 / sqrt(head_dim): T5 has it in the initial queries.
            output, probabilities = attention(self, queries, keys, self.dropout(values), mask, scaling=1.0, **kwargs)
            outputs.append(output)
        attended = rows.leave(outputs).reshape(*input_shape, -1).to(hidden_states.dtype)
        return rows.multiply(attended, self.o)[0], probabilities


class SpeedT5MLP(nn.Module):
    def __init__(self, config: SpeedT5Config):
        super().__init__()
        self.wi_0 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.wi_1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        for linear in (self.wi_0, self.wi_1, self.wo):
            linear.init_truncated = True  # type: ignore[assignment]
        self.dropout = SharedDropout(config.dropout_rate)

    def forward(self, hidden_states: torch.Tensor, rows) -> torch.Tensor:
        gate, states = rows.multiply(hidden_states, self.wi_0, self.wi_1)
        states = rows.operations.gated_gelu(gate, states)
        return rows.multiply(self.dropout(states), self.wo)[0]


class SpeedT5DecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: SpeedT5Config, layer_idx: int):
        super().__init__()
        self.input_layernorm = SpeedT5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SpeedT5Attention(config, layer_idx)
        self.post_attention_layernorm = SpeedT5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SpeedT5MLP(config)
        self.dropout = SharedDropout(config.dropout_rate)

    def parts(self):
        """Norms and groups of linears that read the same states, in order; `None` if some are of other kinds."""
        attention, mlp, norms = self.self_attn, self.mlp, (self.input_layernorm, self.post_attention_layernorm)
        kinds = [type(part) for part in (attention, mlp, *norms)]
        if kinds != [SpeedT5Attention, SpeedT5MLP, SpeedT5RMSNorm, SpeedT5RMSNorm]:
            return None
        before = norms[0], (attention.q, attention.k, attention.v), (attention.o,)
        return *before, norms[1], (mlp.wi_0, mlp.wi_1), (mlp.wo,)

    def forward(
        self, hidden_states: torch.Tensor, rows, *attention_masks: torch.Tensor, **kwargs: Unpack[TransformersKwargs]
    ) -> torch.Tensor:
        if not self.training:
            output = rows.run_layer(self, self.self_attn.layer_idx, hidden_states, self.input_layernorm.eps)
            if output is not None:
                return output
        # The masks hold the learned bias. They come by position, since reentrant checkpointing differentiates only
        # those.
        states = self.input_layernorm(hidden_states, rows.operations)
        attended, _ = self.self_attn(states, rows, *attention_masks, **kwargs)
        hidden_states = hidden_states + self.dropout(attended)
        states = self.post_attention_layernorm(hidden_states, rows.operations)
        return hidden_states + self.dropout(self.mlp(states, rows))


@auto_docstring
class SpeedT5PreTrainedModel(PreTrainedModel):
    config: SpeedT5Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["SpeedT5DecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = False  # no additive bias there
    _supports_flex_attn = False
    # Serving engines that bring their own attention would drop the position bias and the repetition's cache slot.
    _supports_attention_backend = False
    _can_record_outputs = {"hidden_states": SpeedT5DecoderLayer, "attentions": SpeedT5Attention}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, output_loading_info=False, **kwargs):
        """As of transformers, but a damaged or incomplete checkpoint is an error, not a warning."""
        cure = "download or save the checkpoint again"
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs
            )
        except Exception as error:
            if type(error).__name__ != "SafetensorError":
                raise
            raise ValueError(
                f"`{pretrained_model_name_or_path}` has a damaged weights file ({error}): {cure}."
            ) from error
        surplus = [key for key in info["unexpected_keys"] if "layers." in key]
        for kind, keys in (("lacks", info["missing_keys"]), ("has more layers than its config:", surplus)):
            if keys:
                raise ValueError(
                    f"`{pretrained_model_name_or_path}` {kind} {', '.join(sorted(keys)[:3])}"
                    f"{', ...' if len(keys) > 3 else ''}: {cure}, or load it with the config it was saved with."
                )
        return (model, info) if output_loading_info else model

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        # For code outside of transformers this is called only with modules that hold parameters themselves.
        if isinstance(module, nn.Linear):
            std = getattr(module, "init_std", module.in_features**-0.5)
            if getattr(module, "init_truncated", False):
                # Cut at two standard deviations, a normal keeps 0.8796 of its own; flax corrects for it.
                std /= 0.87962566103423978
                init.trunc_normal_(module.weight, std=std, a=-2 * std, b=2 * std)
            else:
                init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Embedding):
            bound = getattr(module, "init_bound", None)
            if bound is None:
                init.normal_(module.weight, std=1.0)
            else:
                init.uniform_(module.weight, -bound, bound)


@auto_docstring
class SpeedT5Model(SpeedT5PreTrainedModel):
    def __init__(self, config: SpeedT5Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)
        fans = config.relative_attention_num_buckets + config.num_attention_heads
        self.relative_attention_bias.init_bound = math.sqrt(6 / fans)  # type: ignore[assignment]
        self.layers = nn.ModuleList(SpeedT5DecoderLayer(config, idx) for idx in range(config.num_unique_layers))
        self.norm = SpeedT5RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.dropout = SharedDropout(config.dropout_rate)
        self.gradient_checkpointing = False
        self.post_init()

    def embed(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """Token ids of any shape -> hidden states `(*shape, hidden_size)` before repetition 1."""
        return self.dropout(self.embed_tokens(input_ids))

    def run_repetition(self, hidden_states: torch.Tensor, rows, **kwargs: Unpack[TransformersKwargs]) -> torch.Tensor:
        """
        One use of the K layers. Training, plain and pipelined decoding all come through here.

        Args:
            hidden_states (`torch.Tensor` of shape `(B, L, hidden_size)` or `(R, hidden_size)`): the rows of the pass.
            rows (`WholeSequences` or `RowsInFlight`): positions and repetitions of these rows, and the keys they meet.

        Returns:
            `torch.Tensor` of the same shape: the rows one repetition further.
        """
        if rows.attention_masks is None:
            if not rows.bias_lines:  # that is, now and then
                refuse_float16(hidden_states)
            if rows.attends_by_itself:
                self._add_bias_line(rows, True, hidden_states.dtype)
            rows.attention_masks = [self._attention_mask(rows, block, hidden_states.dtype) for block in rows.blocks]
        for layer in self.layers:
            hidden_states = layer(hidden_states, rows, *rows.attention_masks, **kwargs)
        return hidden_states

    def exit_states(self, hidden_states: torch.Tensor, operations=TorchOperations) -> torch.Tensor:
        """Hidden states after a repetition -> what the head reads at that exit, of the same shape."""
        return self.dropout(self.norm(hidden_states, operations))

    def _attention_mask(self, rows, block, dtype):
        """Relative bias where a key is visible, the lowest number elsewhere: `(N, H, W, S)`, added to the scores."""
        causal = block.visible is None
        self._add_bias_line(rows, causal, dtype)
        # The biases of a query to all keys lie side by side in the line; it only matters where they begin.
        windows = rows.bias_lines[causal].unfold(1, rows.num_keys, 1).transpose(0, 1)
        bias = windows[rows.num_columns - 1 - block.positions].transpose(1, 2)
        return bias if causal else torch.where(block.visible, bias, torch.finfo(bias.dtype).min)

    def _add_bias_line(self, rows, causal, dtype):
        """Biases of distances from `num_columns` - 1 down to 1 - `num_columns`, query minus key: one line per head."""
        if causal in rows.bias_lines:
            return
        config, num_columns, dtype = self.config, rows.num_columns, rows.attention_dtype or dtype
        buckets = relative_buckets(
            config.relative_attention_num_buckets, config.relative_attention_max_distance, num_columns
        )
        table = self.relative_attention_bias.weight.to(dtype)
        before = table[buckets.flip(0).to(table.device)].T
        after = before[:, -1:].expand(-1, num_columns - 1)  # keys to the right share bucket 0
        after = torch.full_like(after, torch.finfo(dtype).min) if causal else after
        rows.bias_lines[causal] = torch.cat([before, after], dim=1)

    @merge_with_config_defaults
    @capture_outputs
    @auto_docstring
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        prefix_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        return_exit_states: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SpeedT5ModelOutput:
        r"""
        prefix_mask (`torch.Tensor` of shape `(B, P)`, *optional*):
            True (or 1) at cache columns that attend to each other in both directions (prefix-LM); columns from P on
            are causal. Default: none, purely causal.
        return_exit_states (`bool`, *optional*, defaults to `False`):
            Whether to return what the head reads at every exit.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        hidden_states = self.dropout(inputs_embeds) if input_ids is None else self.embed(input_ids)
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            cache, use_cache = None, False  # a layer that is run again would write its keys twice
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)

        rows = self._whole_sequences(hidden_states, attention_mask, position_ids, prefix_mask, cache)
        exit_states: tuple[torch.Tensor, ...] = ()
        for repetition in range(self._num_repetitions_to_run()):
            # Cache slot of (repetition, layer): repetition * K + layer, `config.num_hidden_layers` in all.
            rows.first_slot = repetition * len(self.layers)
            hidden_states = self.run_repetition(hidden_states, rows, **kwargs)
            if return_exit_states:
                exit_states += (self.exit_states(hidden_states),)
        last_hidden_state = exit_states[-1] if return_exit_states else self.exit_states(hidden_states)
        return SpeedT5ModelOutput(
            last_hidden_state=last_hidden_state, cache=cache, exit_states=exit_states if return_exit_states else None
        )

    def _num_repetitions_to_run(self):
        # Read at every call: `assistant_early_exit` of transformers lowers it for a draft and sets it back.
        repetitions, rest = divmod(self.config.num_hidden_layers, len(self.layers))
        if rest:
            raise ValueError(
                f"`num_hidden_layers` (set by `assistant_early_exit`) must be a multiple of `num_unique_layers`="
                f"{len(self.layers)}, got {self.config.num_hidden_layers}: exits lie after whole repetitions only."
            )
        return repetitions

    def _whole_sequences(self, hidden_states, attention_mask, position_ids, prefix_mask, cache):
        num_queries, device = hidden_states.shape[1], hidden_states.device
        # As the pipeline does it, so that both write the same text; and faster than in bfloat16 on a CPU.
        attention_dtype = None if torch.is_grad_enabled() else memory_dtype(hidden_states.dtype, device)
        num_past = cache.get_seq_length() if cache is not None else 0
        # A static cache is longer than what it holds, and gives its length as a tensor that will change.
        num_keys = cache.get_mask_sizes(num_queries, 0)[0] if cache is not None else num_queries
        query_positions = torch.arange(num_queries, device=device) + num_past
        if attention_mask is not None and attention_mask.dim() == 4:
            if attention_mask.dtype != torch.bool and not attention_mask.is_floating_point():
                raise ValueError(
                    "`attention_mask` with 4 dimensions must be bool (True: visible) or float (0: visible), got "
                    f"{attention_mask.dtype}: convert it."
                )
            visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
            return WholeSequences(query_positions, num_keys, visible, cache, attention_dtype)

        visible = (torch.arange(num_keys, device=device) <= query_positions[:, None])[None]
        if prefix_mask is not None:
            prefix = nn.functional.pad(prefix_mask.bool(), (0, max(num_keys - prefix_mask.shape[1], 0)))
            visible = visible | (prefix[:, query_positions, None] & prefix[:, None, :num_keys])
        if attention_mask is not None:
            seen = nn.functional.pad(attention_mask.bool(), (0, max(num_keys - attention_mask.shape[1], 0)))
            visible = visible & seen[:, None, :num_keys]
        elif position_ids is not None and num_keys == num_queries:
            segments = packed_segments(position_ids)
            visible = visible & (segments[:, :, None] == segments[:, None])
        return WholeSequences(query_positions, num_keys, visible[:, None], cache, attention_dtype)


@lru_cache(maxsize=32)
def _bucket_array(num_buckets: int, max_distance: int, num_distances: int) -> array:
    exact = num_buckets // 2
    growth = (num_buckets - exact) / math.log(max_distance / exact)
    # Where a bucket begins at a whole distance, its logarithm may come out a last digit too small.
    far = (min(exact + int(math.log(d / exact) * growth + 1e-9), num_buckets - 1) for d in range(exact, num_distances))
    return array("q", (*range(exact), *far))


def relative_buckets(num_buckets: int, max_distance: int, num_distances: int) -> torch.Tensor:
    """
    Bucket of every distance between a query and an earlier key.

    Half of the buckets hold one distance each, the others grow logarithmically up to `max_distance`.

    Args:
        num_buckets (`int`): rows of the relative position table.
        max_distance (`int`): distance in tokens from which on all keys share the last bucket.
        num_distances (`int`): distances wanted, 0 .. num_distances - 1.

    Returns:
        `torch.LongTensor` of shape `(num_distances,)` on the CPU.

    Source: Raffel et al. 2020, with T5X's `bidirectional=False`.
    """
    # Decoding asks for one more distance at every step, so the numbers are kept in a few lengths.
    rounded = -(-num_distances // 1024) * 1024
    return torch.frombuffer(_bucket_array(num_buckets, max_distance, rounded), dtype=torch.long)[:num_distances]


def refuse_float16(hidden_states: torch.Tensor):
    """Raise where a forward would run in float16, by its weights or by autocast."""
    device = hidden_states.device.type
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16
    if autocast or hidden_states.dtype == torch.float16:
        raise ValueError("`dtype` must not be float16, where T5's feed-forward overflows: use bfloat16 or float32.")


def packed_segments(position_ids: torch.Tensor) -> torch.Tensor:
    """Positions `(B, L)` that restart at every packed sequence -> the 0-based number of each position's sequence."""
    restarts = position_ids.diff(dim=-1) != 1
    return nn.functional.pad(restarts, (1, 0)).long().cumsum(-1)


def prefix_before_labels(labels: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
    """
    The prefix that a batch of labels implies.

    Args:
        labels (`torch.LongTensor` of shape `(B, L)`): -100 where there is no loss.
        position_ids (`torch.LongTensor` of shape `(B, L)`, *optional*): restart at every packed sequence.

    Returns:
        `torch.Tensor` of shape `(B, L)`: bool, True at the positions of each sequence before its first label.
    """
    num_labels = (labels != -100).long().cumsum(-1)
    if position_ids is not None:
        # Count from the start of each packed sequence: what came before it is the running maximum of the counts there.
        segments = packed_segments(position_ids)
        starts = nn.functional.pad(segments.diff(dim=-1) != 0, (1, 0), value=True)
        before = nn.functional.pad(num_labels, (1, 0))[:, :-1]
        num_labels = num_labels - torch.where(starts, before, 0).cummax(-1).values
    return num_labels == 0


@auto_docstring
class SpeedT5ForCausalLM(SpeedT5PreTrainedModel, SpeedGenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: SpeedT5Config):
        super().__init__(config)
        self.model = SpeedT5Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.logit_scale = config.hidden_size**-0.5
        self.post_init()
        # A generation config marked as made from the model config forgets its `speed` options when it is loaded again.
        self.generation_config._from_model_config = False

    # The functions through which decoding knows the model.

    def embed(self, input_ids: torch.LongTensor) -> torch.Tensor:
        """See [`SpeedT5Model.embed`]."""
        return self.model.embed(input_ids)

    def run_repetition(self, hidden_states: torch.Tensor, rows) -> torch.Tensor:
        """See [`SpeedT5Model.run_repetition`]."""
        return self.model.run_repetition(hidden_states, rows)

    def exit_logits(self, hidden_states: torch.Tensor, rows=None) -> torch.Tensor:
        """
        Scores of the exit after any repetition.

        Args:
            hidden_states (`torch.Tensor` of shape `(*shape, hidden_size)`): what `run_repetition` gave.
            rows (`WholeSequences` or `RowsInFlight`, *optional*): what it was given.

        Returns:
            `torch.Tensor` of shape `(*shape, V)`.
        """
        if rows is None:
            return self._head(self.model.exit_states(hidden_states))
        return self._head(self.model.exit_states(hidden_states, rows.operations), rows.multiply)

    def exit_tokens(self, hidden_states: torch.Tensor, rows) -> torch.LongTensor:
        """See [`SpeedGenerationMixin.exit_tokens`]; packed weights may find them without most of the scores."""
        exit_states = self.model.exit_states(hidden_states, rows.operations)
        return rows.argmax(exit_states * self.logit_scale, self.lm_head)

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        inputs, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        # CODEPATH: the prompt of a prefix-LM (T5X's are) is its prefix; speed-t5-en-de-small is causal and has none.
        if self.config.prefix_lm and model_kwargs.get("prefix_mask") is None and model_kwargs.get("cache") is None:
            model_kwargs["prefix_mask"] = torch.ones(inputs.shape[:2], dtype=torch.bool, device=inputs.device)
        return inputs, name, model_kwargs

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        if inputs_tensor.dim() == 2 and self.config.bos_token_id == self.config.pad_token_id:
            # Pads on the left are padding, but the last of them is the start token; pads after it belong to the text.
            start = (mask == 0).long().cumprod(1).sum(1, keepdim=True) - 1
            mask = (torch.arange(mask.shape[1], device=mask.device) >= start).to(mask.dtype)
        return mask

    def _head(self, exit_states, multiply=multiply):
        # Tied to embeddings of standard deviation 1, so the product needs scaling; its smaller side is cheaper.
        return multiply(exit_states * self.logit_scale, self.lm_head)[0]

    @can_return_tuple
    @auto_docstring
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        prefix_mask: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        return_exit_logits: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> SpeedT5CausalLMOutput:
        r"""
        labels (`torch.LongTensor` of shape `(B, L)`, *optional*):
            Target ids aligned with `input_ids` (they are shifted inside); -100 where there is no loss.
        prefix_mask (`torch.Tensor` of shape `(B, P)`, *optional*):
            True (or 1) at cache columns that attend to each other in both directions; columns from P on are causal.
            With `config.prefix_lm` it defaults, given `labels`, to the positions of each (packed) sequence before its
            first label, and in `generate` to the prompt.
        return_exit_logits (`bool`, *optional*, defaults to `False`):
            Whether to return the scores of every exit.
        num_items_in_batch (`int` or `torch.Tensor`, *optional*):
            What the summed loss is divided by; the Trainer passes the labels of a whole accumulated batch.
        """
        # Target ids aligned with the scores that predict them, in place of `labels`. No named argument: the Trainer
        # takes every name with "label" in it for something that a batch must have.
        shift_labels = kwargs.pop("shift_labels", None)
        # CODEPATH: speed-t5-en-de-small is causal; a prefix-LM (T5X's are) reads its prompt in both directions.
        if labels is not None and prefix_mask is None and self.config.prefix_lm:
            prefix_mask = prefix_before_labels(labels, position_ids if attention_mask is None else None)
        outputs: SpeedT5ModelOutput = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            prefix_mask=prefix_mask,
            use_cache=use_cache,
            return_exit_states=labels is not None or return_exit_logits,
            **kwargs,
        )
        loss = exit_losses = logits = exit_logits = None
        exit_states = outputs.exit_states or ()
        if labels is not None:
            loss, exit_losses = multi_exit_loss(
                exit_states,
                self.lm_head.weight,
                labels,
                self.config.exit_weights(),
                z_loss=self.config.z_loss,
                num_items_in_batch=num_items_in_batch,
                logit_scale=self.logit_scale,
                shift_labels=shift_labels,
            )
        if return_exit_logits:
            exit_logits = tuple(self._head(slice_logits_to_keep(states, logits_to_keep)) for states in exit_states)
            logits = exit_logits[-1]
        elif labels is None or not self.training:
            logits = self._head(slice_logits_to_keep(outputs[0], logits_to_keep))
        return SpeedT5CausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            exit_losses=exit_losses,
            exit_logits=exit_logits,
        )


__all__ = ["SpeedT5ForCausalLM", "SpeedT5Model", "SpeedT5PreTrainedModel"]
