# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows a pass computes, and how their queries meet the keys: the one interface between model and scheduler."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from transformers import Cache

from .kernels_speed import TorchOperations
from .packed_speed import multiply


LONG_PROMPT = 400  # rows per sequence


@dataclass
class QueryBlock:
    """
    Queries that meet their keys in one attention call.

    Args:
        positions (`torch.LongTensor` of shape `(N, W)` or `(1, W)`): 0-based cache columns of the queries.
        visible (`torch.Tensor` of shape `(N or 1, 1, W, S)`, *optional*): bool, True where a query may see a key.
            `None`: a query sees the keys up to its own column.
        rows (`slice`, *optional*): the hidden states that the queries belong to; this and the rest in pipelines only.
        repetitions (`slice`, *optional*): whose keys they meet.
        spread (`torch.LongTensor`, *optional*): place among the `N * W` queries of each row. `None`: in order.
        source (`torch.LongTensor` of shape `(N * W,)`, *optional*): row at each place; goes with `spread`.
    """

    positions: torch.Tensor
    visible: torch.Tensor | None = None
    rows: slice | None = None
    repetitions: slice | None = None
    spread: torch.Tensor | None = None
    source: torch.Tensor | None = None


class WholeSequences:
    """
    Every position of a batch, all in the same repetition: training, scoring and plain decoding.

    Hidden states have the shape `(B, L, hidden_size)`; the queries of all positions are one block.

    Args:
        query_positions (`torch.LongTensor` of shape `(L,)`): 0-based cache columns of the queries.
        num_keys (`int`): S, columns of the keys.
        visible (`torch.Tensor` of shape `(B or 1, 1, L, S)`): bool, True where a query may see a key.
        cache (`Cache`, *optional*): written and read with one slot per (repetition, layer).
        attention_dtype (`torch.dtype`, *optional*): of attention. Default: that of the hidden states.
    """

    multiply = staticmethod(multiply)
    operations = TorchOperations

    def __init__(self, query_positions, num_keys, visible, cache: Cache | None = None, attention_dtype=None):
        self.blocks = [QueryBlock(query_positions[None], visible)]
        self.num_keys = self.num_columns = num_keys
        self.cache = cache
        self.attention_dtype = attention_dtype
        self.bias_lines: dict[bool, torch.Tensor] = {}  # made by the model
        self.attends_by_itself = False
        self.first_slot = 0  # slot of the repetition's first layer; moved on by the model after each repetition
        self.attention_masks = None  # one float tensor per block, made by the model once per pass

    def enter(self, query, key, value, layer_idx):
        """Queries, keys, values `(B, L, H, D)` of one layer -> the attention inputs `(B, H, L or S, D)` per block."""
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.cache is not None:
            key, value = self.cache.update(key, value, self.first_slot + layer_idx)
        dtype = self.attention_dtype or query.dtype
        return [(query.to(dtype), key.to(dtype), value.to(dtype))]

    def run_layer(self, layer, layer_idx, states, eps):
        """See [`RowsInFlight`]: layers are called part by part here."""
        return None

    def leave(self, outputs):
        """Attention outputs `(B, L, H, D)` per block -> the outputs in the order of the hidden states."""
        return outputs[0]


class RowsInFlight:
    """
    Single positions of several sequences, each in its own repetition: the group passes of one pipeline.

    Hidden states are compact, `(R, hidden_size)`: one row per position that is really in flight, without padding. Only
    the queries are spread out, because attention wants them beside the keys of their sequence and repetition; where
    every (repetition, sequence) has equally many rows, even that is a view.

    Args:
        cache ([`SpeedCache`]): where keys and values are kept.
        num_sequences (`int`): B.
        max_columns (`int`): columns that will ever be placed.
        device (`torch.device`): of the model.
        attention_dtype (`torch.dtype`): of torch's attention and its masks.
        seen (`torch.Tensor` of shape `(B, S)`, *optional*): bool, False at columns of padding.
        prefix (`torch.Tensor` of shape `(B, S)`, *optional*): bool, columns that see each other in both directions.
        weights ([`PackedWeights`], *optional*): products of states with layers, where any are computed.
        operations ([`TorchOperations`] or [`CompiledOperations`]): what is no product.
    """

    def __init__(
        self,
        cache,
        num_sequences,
        max_columns,
        device,
        attention_dtype,
        seen=None,
        prefix=None,
        weights=None,
        operations=TorchOperations,
    ):
        self.cache = cache
        self.num_sequences = num_sequences
        self.max_columns = max_columns
        self.device = device
        self.seen, self.prefix = seen, prefix
        self.multiply = weights
        self.argmax = None if weights is None else weights.argmax
        self.operations = operations
        self.attention_dtype = attention_dtype
        self.num_columns = 0
        self.bias_lines = {}  # made by the model, for `num_columns` keys

    def place(self, sequences, columns, repetitions, meets_prefix=False):
        """
        Take up the rows of the next pass.

        Args:
            sequences (`np.ndarray` of shape `(R,)`): row of the batch, 0-based.
            columns (`np.ndarray` of shape `(R,)`): cache column of the position, 0-based. Those of one sequence in one
                repetition are neighbours.
            repetitions (`np.ndarray` of shape `(R,)`): repetition that the row enters now, 0-based. The rows are
                ordered by repetition, sequence and column.
            meets_prefix (`bool`): whether rows of the prefix are among them; all others see what is before them only.
        """
        self.attention_masks = None
        self.num_keys = int(columns.max()) + 1
        self.cache.reserve(self.num_keys, self.max_columns)
        if self.num_columns != self.cache.num_columns:
            self.num_columns, self.bias_lines = self.cache.num_columns, {}
        self.index = tuple(self._tensor(index) for index in (repetitions, sequences, columns))
        # A compiled operation finds the keys of each row by itself. It knows of no prefix, and the many rows of a long
        # prompt better share what they read.
        is_long = len(columns) > LONG_PROMPT * self.num_sequences
        self.attends_by_itself = self.operations.attend is not None and not meets_prefix and not is_long
        self.blocks = [] if self.attends_by_itself else self._blocks(sequences, columns, repetitions, meets_prefix)

    def _blocks(self, sequences, columns, repetitions, meets_prefix):
        cells = repetitions * self.num_sequences + sequences
        counts = np.bincount(cells, minlength=self.cache.num_repetitions * self.num_sequences)
        places = np.arange(len(cells)) - (counts.cumsum() - counts)[cells]
        widths = counts.reshape(-1, self.num_sequences).max(1).tolist()
        # The prompt is a block of many columns in one repetition; everything else is a column or a few per repetition.
        # One attention call over both would give every repetition room for a whole prompt, so the prompt gets its own.
        widest = widths.index(max(widths))
        rest = max(widths[:widest] + widths[widest + 1 :], default=0)
        bounds = [0, widest, widest + 1, len(widths)] if widths[widest] > 4 * rest > 0 else [0, len(widths)]
        blocks = []
        for start, stop in pairwise(bounds):
            used = [repetition for repetition in range(start, stop) if widths[repetition]]
            if used:
                start, stop = used[0], used[-1] + 1
                width, first_cell = max(widths[start:stop]), start * self.num_sequences
                rows = slice(*cells.searchsorted([first_cell, stop * self.num_sequences]).tolist())
                spread = (cells[rows] - first_cell) * width + places[rows]
                blocks.append(self._block(columns[rows], rows, slice(start, stop), width, spread, meets_prefix))
        return blocks

    def _block(self, positions, rows, repetitions, width, spread, meets_prefix):
        repeats = repetitions.stop - repetitions.start
        source = None
        if len(positions) < repeats * self.num_sequences * width:
            source = np.zeros(repeats * self.num_sequences * width, dtype=np.int64)  # nobody reads an unused place
            source[spread] = np.arange(len(positions))
            positions = positions[source]
            spread, source = self._tensor(spread), self._tensor(source)
        positions = self._tensor(positions).view(-1, width)
        visible = None
        if meets_prefix or self.seen is not None:
            key_positions = torch.arange(self.num_keys, device=self.device)
            visible = key_positions <= positions[..., None]
            if meets_prefix:
                prefix = self.prefix[:, : self.num_keys].repeat(repeats, 1)
                visible |= prefix.gather(1, positions)[..., None] & prefix[:, None]
            if self.seen is not None:
                visible &= self.seen[:, : self.num_keys].repeat(repeats, 1)[:, None]
            visible = visible[:, None]
        return QueryBlock(positions, visible, rows, repetitions, None if source is None else spread, source)

    def _tensor(self, array):
        return torch.from_numpy(array).to(self.device)

    def enter(self, query, key, value, layer_idx):
        """Queries, keys, values `(R, H, D)` of one layer, stored -> attention inputs `(N, H, W or S, D)` per block."""
        memory = self.cache.write(layer_idx, *self.index, key, value, self.num_sequences)
        query = query.to(self.attention_dtype)
        inputs = []
        for block in self.blocks:
            queries = query[block.rows]
            if block.source is not None:
                queries = queries.index_select(0, block.source)
            queries = queries.view(*block.positions.shape, *query.shape[1:]).transpose(1, 2)
            memories = memory[:, block.repetitions, :, :, : self.num_keys].flatten(1, 2)
            keys, values = memories.to(self.attention_dtype).unbind()
            inputs.append((queries, keys, values))
        return inputs

    def attend(self, query, key, value, layer_idx):
        """Queries, keys, values `(R, H, D)` of one layer -> attention outputs `(R, H, D)`; stores keys and values."""
        memory = self.cache.memory(layer_idx, key, self.num_sequences)
        return self.operations.attend(query, key, value, memory, *self.index, self.bias_lines[True], self.seen)

    def run_layer(self, layer, layer_idx, states, eps):
        """Hidden states `(R, hidden_size)` after a whole layer, `None` where it must be called part by part."""
        weights = self.multiply.of_layer(layer) if self.attends_by_itself else None
        memory = self.cache.stores[layer_idx].memory
        if weights is None or memory is None:
            return None
        return self.operations.layer(states, weights, memory, *self.index, self.bias_lines[True], self.seen, eps)

    def leave(self, outputs):
        """Attention outputs `(N, W, H, D)` per block -> `(R, H, D)`."""
        parts = [
            output.flatten(0, 1) if block.spread is None else output.flatten(0, 1).index_select(0, block.spread)
            for block, output in zip(self.blocks, outputs)
        ]
        # A prompt in the middle of the repetitions is a block between the others.
        return parts[0] if len(parts) == 1 else torch.cat(parts)


__all__ = ["QueryBlock", "RowsInFlight", "WholeSequences"]
