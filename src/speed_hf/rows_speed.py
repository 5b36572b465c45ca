# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which rows a pass computes, and how their queries meet the keys: the one interface between model and scheduler."""

import torch
from transformers import Cache


class WholeSequences:
    """
    Every position of a batch, all in the same repetition: training, scoring and plain decoding.

    Hidden states have the shape `(B, L, hidden_size)`; the queries of all positions are one block.

    Args:
        query_positions (`torch.LongTensor` of shape `(L,)`): 0-based cache columns of the queries.
        key_positions (`torch.LongTensor` of shape `(S,)`): 0-based cache columns of the keys.
        visible (`torch.Tensor` of shape `(B or 1, 1, L, S)`): bool, True where a query may see a key.
        cache (`Cache`, *optional*): written and read with one slot per (repetition, layer).
    """

    def __init__(self, query_positions, key_positions, visible, cache: Cache | None = None):
        self.blocks = [(query_positions[None], key_positions, visible)]
        self.cache = cache
        self.first_slot = 0  # slot of the repetition's first layer; moved on by the model after each repetition
        self.attention_masks = None  # one float tensor per block, made by the model once per pass

    def enter(self, query, key, value, layer_idx):
        """Queries, keys, values `(B, L, H, D)` of one layer -> the attention inputs `(B, H, L or S, D)` per block."""
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if self.cache is not None:
            key, value = self.cache.update(key, value, self.first_slot + layer_idx)
        return [(query, key, value)]

    def leave(self, outputs):
        """Attention outputs `(B, L, H, D)` per block -> the outputs in the order of the hidden states."""
        return outputs[0]


class RowsInFlight:
    """
    Single positions of several sequences, each in its own repetition: one group pass of the pipeline.

    Hidden states are compact, `(R, hidden_size)`: one row per position that is really in flight, without padding. Only
    the queries are spread out, because attention wants them beside the keys of their sequence and repetition.

    Args:
        sequences (`torch.LongTensor` of shape `(R,)`): row of the batch, 0-based.
        columns (`torch.LongTensor` of shape `(R,)`): cache column of the position, 0-based.
        repetitions (`torch.LongTensor` of shape `(R,)`): repetition that the row enters now, 0-based.
        cache ([`SpeedCache`]): has room for every column.
        num_sequences (`int`): B.
        seen (`torch.Tensor` of shape `(B, S)`, *optional*): bool, False at columns of padding.
        prefix (`torch.Tensor` of shape `(B, S)`, *optional*): bool, columns that see each other in both directions.
    """

    def __init__(self, sequences, columns, repetitions, cache, num_sequences, seen=None, prefix=None):
        self.sequences, self.columns, self.repetitions = sequences, columns, repetitions
        self.cache = cache
        self.num_sequences = num_sequences
        self.attention_masks = None
        self.num_keys = int(columns.max()) + 1
        self.key_positions = torch.arange(self.num_keys, device=columns.device)
        self._spread_queries()
        self.blocks = [self._block(*member, seen, prefix) for member in self._members]

    def _spread_queries(self):
        """Give every row a place in its (repetition, sequence), where the rows lie in neighbouring columns."""
        num_repetitions, num_cells = self.cache.num_repetitions, self.cache.num_repetitions * self.num_sequences
        cell = self.repetitions * self.num_sequences + self.sequences
        first_column = self.columns.new_full((num_cells,), self.num_keys)
        first_column.scatter_reduce_(0, cell, self.columns, "amin")
        place = self.columns - first_column[cell]
        widths = place.new_zeros(num_repetitions).scatter_reduce_(0, self.repetitions, place + 1, "amax").tolist()

        # The prompt is a block of many columns in one repetition; everything else is a column or a few per repetition.
        # One attention call over both would give every repetition room for a whole prompt, so the prompt gets its own.
        widest = max(range(num_repetitions), key=widths.__getitem__)
        rest = max((width for repetition, width in enumerate(widths) if repetition != widest), default=0)
        if widths[widest] > 4 * max(rest, 1):
            apart = self.repetitions == widest
            self._members = [self._member(apart.nonzero().squeeze(1), widest, widest + 1, widths[widest], cell, place)]
            if rest:
                self._members.append(
                    self._member((~apart).nonzero().squeeze(1), 0, num_repetitions, rest, cell, place)
                )
        else:
            self._members = [self._member(slice(None), 0, num_repetitions, widths[widest], cell, place)]

    def _member(self, rows, start, stop, width, cell, place):
        spread = (cell[rows] - start * self.num_sequences) * width + place[rows]
        return rows, slice(start, stop), width, spread

    def _block(self, rows, repetitions, width, spread, seen, prefix):
        repeats = repetitions.stop - repetitions.start
        positions = self.columns.new_zeros(repeats * self.num_sequences * width)
        positions[spread] = self.columns[rows]
        positions = positions.view(-1, width)
        visible = self.key_positions <= positions[..., None]
        if prefix is not None:
            prefix = prefix[:, : self.num_keys].repeat(repeats, 1)
            visible |= prefix.gather(1, positions)[..., None] & prefix[:, None]
        if seen is not None:
            visible &= seen[:, : self.num_keys].repeat(repeats, 1)[:, None]
        return positions, self.key_positions, visible[:, None]

    def enter(self, query, key, value, layer_idx):
        """Queries, keys, values `(R, H, D)` of one layer, stored -> attention inputs `(N, H, W or S, D)` per block."""
        keys, values = self.cache.write(
            layer_idx, self.repetitions, self.sequences, self.columns, key, value, self.num_sequences
        )
        inputs = []
        for rows, repetitions, width, spread in self._members:
            num_blocks = (repetitions.stop - repetitions.start) * self.num_sequences
            spread_query = query.new_zeros(num_blocks * width, *query.shape[1:])
            spread_query[spread] = query[rows]
            inputs.append(
                (
                    spread_query.view(num_blocks, width, *query.shape[1:]).transpose(1, 2),
                    keys[repetitions, :, :, : self.num_keys].flatten(0, 1),
                    values[repetitions, :, :, : self.num_keys].flatten(0, 1),
                )
            )
        return inputs

    def leave(self, outputs):
        """Attention outputs `(N, W, H, D)` per block -> `(R, H, D)`."""
        if len(outputs) == 1:
            return outputs[0].flatten(0, 1)[self._members[0][3]]
        states = outputs[0].new_empty(len(self.columns), *outputs[0].shape[2:])
        for (rows, _, _, spread), output in zip(self._members, outputs):
            states[rows] = output.flatten(0, 1)[spread]
        return states


__all__ = ["RowsInFlight", "WholeSequences"]
