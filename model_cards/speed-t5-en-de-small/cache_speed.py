# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a cyclically shared decoder, one slot per (repetition, layer), for pipeline and `forward`."""

from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin


COLUMNS_PER_STEP = 128  # granularity of the memory, so that it grows rarely


class SpeedCache(Cache):
    """
    Key-value memory of all repetitions.

    Each unique layer has one tensor `(2, G, B, H, S, D)`, keys before values. The pipeline writes single positions of
    any repetition and attends to `(G * B, H, S, D)` without gathering. For everybody else it is an
    ordinary `Cache` whose layer `repetition * K + layer` is a view of that memory, so a returned cache can be
    continued by plain decoding too.

    On a CPU, bfloat16 keys and values are kept as the same numbers in float32, twice the memory: torch's attention
    takes 5 to 8 times longer over bfloat16 there. The compiled one does not, and has half as much to read.

    Args:
        num_unique_layers (`int`): K.
        num_repetitions (`int`): G.
        is_compiled (`bool`, defaults to `False`): whether compiled operations will read it.
    """

    def __init__(self, num_unique_layers: int, num_repetitions: int, is_compiled: bool = False):
        self.num_repetitions = num_repetitions
        self.stores = [_Store(num_repetitions, is_compiled) for _ in range(num_unique_layers)]
        self.slots: list = [
            SpeedCacheLayer(store, repetition) for repetition in range(num_repetitions) for store in self.stores
        ]
        super().__init__(layers=self.slots)

    @classmethod
    def from_dynamic(cls, cache: DynamicCache, num_unique_layers: int, is_compiled: bool = False) -> "SpeedCache":
        """
        A copy of what plain decoding left, to be continued by the pipeline.

        Args:
            cache (`DynamicCache`): with one layer per (repetition, layer).
            num_unique_layers (`int`): K.
            is_compiled (`bool`, defaults to `False`): whether compiled operations will read it.

        Returns:
            [`SpeedCache`]
        """
        copy = cls(num_unique_layers, len(cache.layers) // num_unique_layers, is_compiled)
        if cache.get_seq_length():
            layers: Any = cache.layers
            for slot, layer in enumerate(layers):
                copy.update(layer.keys, layer.values, slot)
        return copy

    def write(self, layer_idx, repetitions, sequences, columns, key, value, num_sequences):
        """
        Store the rows of one pass in place.

        Args:
            layer_idx (`int`): unique layer, 0-based.
            repetitions, sequences, columns (`torch.LongTensor` of shape `(R,)`): where each row belongs, 0-based.
            key, value (`torch.Tensor` of shape `(R, H, D)`): what to store.
            num_sequences (`int`): B.

        Returns:
            `torch.Tensor`: the whole memory of the layer, `(2, G, B, H, S, D)`.
        """
        memory = self.memory(layer_idx, key, num_sequences)
        memory[:, repetitions, sequences, :, columns] = torch.stack((key, value), 1).to(memory.dtype)
        return memory

    def memory(self, layer_idx, key, num_sequences):
        """The memory `(2, G, B, H, S, D)` of one layer, for keys like `key` `(R, H, D)`."""
        store = self.stores[layer_idx]
        if store.memory is None:
            store.allocate(num_sequences, key)
        return store.memory

    @property
    def num_columns(self) -> int:
        """Columns that there is room for."""
        return self.stores[0].num_columns

    def reserve(self, num_columns: int, at_most: int | None = None):
        """Make room for columns 0 .. num_columns - 1 of every sequence; `at_most` columns will ever be asked for."""
        for store in self.stores:
            store.reserve(num_columns, at_most)

    def set_length(self, num_columns: int):
        """Declare columns 0 .. num_columns - 1 valid in every slot, and everything after them absent."""
        for slot in self.slots:
            slot.length = num_columns


def memory_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which precision torch's attention of a model meets keys and values, and in which they are kept for it."""
    return torch.float32 if device.type == "cpu" and dtype == torch.bfloat16 else dtype


class _Store:
    """Keys and values `(2, G, B, H, S, D)` of one unique layer."""

    def __init__(self, num_repetitions, is_compiled):
        self.num_repetitions = num_repetitions
        self.is_compiled = is_compiled
        self.num_columns = 0
        self.memory = None

    def allocate(self, num_sequences, key):
        # Zeros, not empty memory: masked entries still enter the attention as 0 * value, and NaN would survive that.
        self.memory = key.new_zeros(
            *(2, self.num_repetitions, num_sequences, key.shape[-2], self.num_columns, key.shape[-1]),
            dtype=key.dtype if self.is_compiled else memory_dtype(key.dtype, key.device),
        )

    def reserve(self, num_columns, at_most=None):
        if num_columns <= self.num_columns:
            return
        num_columns = -(-max(num_columns, 2 * self.num_columns) // COLUMNS_PER_STEP) * COLUMNS_PER_STEP
        num_columns = num_columns if at_most is None else min(num_columns, at_most)
        more, self.num_columns = num_columns - self.num_columns, num_columns
        if self.memory is not None:
            self.memory = torch.nn.functional.pad(self.memory, (0, 0, 0, more))

    def change_batch(self, change):
        if self.memory is not None:
            self.memory = change(self.memory)


class SpeedCacheLayer(CacheLayerMixin):
    """One slot of a [`SpeedCache`] as transformers sees it: keys and values `(B, H, length, D)`."""

    is_croppable = True
    is_sliding = False

    def __init__(self, store: _Store, repetition: int):
        self.store = store
        self.repetition = repetition
        self.length = 0  # valid columns

    @property
    def keys(self):
        return None if self.store.memory is None else self.store.memory[0, self.repetition, :, :, : self.length]

    @property
    def values(self):
        return None if self.store.memory is None else self.store.memory[1, self.repetition, :, :, : self.length]

    @property
    def is_initialized(self):
        return self.store.memory is not None

    def lazy_initialization(self, key_states, value_states):
        self.store.reserve(key_states.shape[-2])
        self.store.allocate(len(key_states), key_states.transpose(1, 2))

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[-2]
        self.store.reserve(self.length)
        self.keys[:, :, start:] = key_states
        self.values[:, :, start:] = value_states
        return self.keys.to(key_states.dtype), self.values.to(value_states.dtype)

    def get_mask_sizes(self, query_length):
        return self.length + query_length, 0

    def get_seq_length(self):
        return self.length

    def get_max_length(self):
        return -1

    def crop(self, tokens_to_remove):
        if tokens_to_remove > 0:
            raise ValueError(
                f"`tokens_to_remove` must be 0 or negative, got {tokens_to_remove}: -n removes the last n."
            )
        self.length = max(self.length + tokens_to_remove, 0)

    def reset(self):
        self.length = 0

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats):
        self._once_per_store(lambda memory: memory.repeat_interleave(repeats, dim=2))

    def batch_select_indices(self, indices):
        self._once_per_store(lambda memory: memory[:, :, indices.to(memory.device)])

    def _once_per_store(self, change):
        # `Cache` calls this on every layer, and the repetitions of a layer share their memory.
        if self.repetition == 0:
            self.store.change_batch(change)


__all__ = ["SpeedCache", "SpeedCacheLayer", "memory_dtype"]
