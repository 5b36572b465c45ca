# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Key-value memory under random flips, against a model-free reference: every row meets the keys of its own prefix."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_window_speed import EOS, Script, scripts
from tiny_models import flipping_model, prompts

from speed_hf.cache_speed import SpeedCache, _Store, memory_dtype
from speed_hf.rows_speed import RowsInFlight
from speed_hf.window_speed import Window


LARGE = 1e30  # finite, as fresh memory must be; anything that reads it is far off


@pytest.fixture
def garbage_in_fresh_memory(monkeypatch):
    """Fresh memory holds large numbers instead of zeros, also where it grows."""
    reserve, allocate = _Store.reserve, _Store.allocate

    def allocate_garbage(self, *args):
        allocate(self, *args)
        self.memory[0] = LARGE
        self.memory[1] = -LARGE

    def reserve_garbage(self, *args):
        before = self.num_columns
        reserve(self, *args)
        if self.memory is not None and self.num_columns > before:
            self.memory[0, ..., before:, :] = LARGE
            self.memory[1, ..., before:, :] = -LARGE

    monkeypatch.setattr(_Store, "allocate", allocate_garbage)
    monkeypatch.setattr(_Store, "reserve", reserve_garbage)


def code(prefix, repetition, layer):
    """Stands for the keys that a model would write: a number that depends on everything they depend on."""
    return float(hash((prefix, repetition, layer)) % 2**40)


class Run:
    """Decodes prompts with window, rows and cache of the package and a script instead of a model."""

    num_layers = 2

    def __init__(self, script, prompts, max_length, seen=None):
        self.script, self.batch_size = script, len(prompts)
        eos = np.array([EOS])
        self.window = Window(np.array(prompts), max_length, script.num_repetitions, eos, seen=seen)
        self.cache = SpeedCache(self.num_layers, script.num_repetitions)
        seen = None if seen is None else torch.nn.functional.pad(torch.tensor(seen), (0, max_length), value=True)
        self.rows = RowsInFlight(
            self.cache, self.batch_size, max_length, torch.device("cpu"), torch.float64, seen=seen
        )
        self.seen = seen
        self.writes = Counter()

    def decode(self):
        window, running = self.window, np.ones(self.batch_size, dtype=bool)
        while running.any():
            sequences, columns, repetitions = window.rows()
            self._meet_keys(sequences, columns, repetitions)
            predicting = window.advance(sequences, columns)
            sequences, columns = sequences[predicting], columns[predicting]
            exits = window.done[sequences, columns]
            predictions = [
                self.script.predict(self._prefix(b, c), e)
                for b, c, e in zip(sequences.tolist(), columns.tolist(), exits.tolist(), strict=True)
            ]
            window.verify(sequences, columns, np.array(predictions, dtype=np.int64))
            window.commit(running)
            last = window.tokens[np.arange(self.batch_size), window.num_committed - 1]
            grown = window.num_committed > window.prompt_length
            full = window.num_committed == window.last_column + 1
            running = running & ~(grown & ((last == EOS) | full))
            window.leave(running)

    def _prefix(self, sequence, column):
        return tuple(self.window.tokens[sequence, : column + 1].tolist())

    def _meet_keys(self, sequences, columns, repetitions):
        """Write the rows' keys and look at what attention would show each of them."""
        self.rows.place(sequences, columns, repetitions)
        rows = list(zip(sequences.tolist(), columns.tolist(), repetitions.tolist(), strict=True))
        self.writes.update(rows)
        for layer in range(self.num_layers):
            keys = torch.tensor([code(self._prefix(b, c), g, layer) for b, c, g in rows], dtype=torch.float64)
            keys = keys.view(-1, 1, 1)
            inputs = self.rows.enter(keys, keys, -keys, layer)
            met = self.rows.leave([self._visible(block, *entry) for block, entry in zip(self.rows.blocks, inputs)])
            for (b, c, g), shown in zip(rows, met[:, 0].tolist(), strict=True):
                before = [k for k in range(c + 1) if self.seen is None or self.seen[b, k]]
                expected = [code(self._prefix(b, k), g, layer) for k in before]
                assert [shown[k] for k in before] == expected

    def _visible(self, block, query, key, value):
        assert torch.equal(key, -value)
        # What attention may read: every key for every query, `(N, W, H, S)`. Masks are the model's.
        return key[:, :, None, :, 0].expand(-1, -1, query.shape[2], -1).transpose(1, 2)


@settings(max_examples=80, deadline=None)
@given(scripts, st.integers(1, 4), st.integers(1, 6), st.integers(1, 20))
def test_rows_meet_the_keys_of_their_prefix(script, batch_size, prompt_length, num_new):
    prompts = [[2 + (7 * b + c) % 11 for c in range(prompt_length)] for b in range(batch_size)]
    run = Run(script, prompts, prompt_length + num_new)
    run.decode()
    for b, prompt in enumerate(prompts):
        text = script.decode(prompt, prompt_length + num_new)
        assert run.window.tokens[b, : len(text)].tolist() == text
        for c in range(len(text) - 1):  # R13: afterwards, live positions hold what a fresh run would write
            for layer, store in enumerate(run.cache.stores):
                for g in range(script.num_repetitions):
                    assert store.memory[0, g, b, 0, c, 0].item() == code(tuple(text[: c + 1]), g, layer)


@settings(max_examples=40, deadline=None)
@given(scripts, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 15))
def test_rows_meet_the_keys_of_their_prefix_behind_padding(script, paddings, num_new):
    prompts = [[0] * padding + [5] * (4 - padding) for padding in paddings]
    seen = np.array([[column >= padding for column in range(4)] for padding in paddings])
    run = Run(script, prompts, 4 + num_new, seen=seen)
    run.decode()
    for b, prompt in enumerate(prompts):
        text = script.decode(prompt, 4 + num_new)
        assert run.window.tokens[b, : len(text)].tolist() == text
    padded = {(b, c) for b, padding in enumerate(paddings) for c in range(min(padding, 3))}
    assert not padded & {(b, c) for b, c, _ in run.writes}


def test_without_flips_every_slot_is_written_once_per_position():
    script = Script(3, 4, 10**6, flip_rate=0.0)
    run = Run(script, [[4, 5, 6]], 30)
    run.decode()
    assert set(run.writes.values()) == {1}
    assert {(0, c, g) for c in range(29) for g in range(4)} <= set(run.writes)


@pytest.mark.usefixtures("garbage_in_fresh_memory")
@pytest.mark.parametrize("batch_size", [1, 3])
def test_large_garbage_in_fresh_memory_changes_nothing(batch_size):
    model = flipping_model("often")
    inputs = prompts(batch_size, 9, padded=batch_size > 1)
    options = {"max_new_tokens": 150, "do_sample": False}
    assert torch.equal(model.generate(**inputs, speed=True, **options), model.generate(**inputs, **options))


def test_memory_grows_in_steps_up_to_what_is_needed():
    cache = SpeedCache(1, 2)
    sizes = []
    for num_columns in range(1, 701):
        cache.reserve(num_columns, at_most=700)
        sizes.append(cache.num_columns)
    assert sizes[0] == 128 and sizes[-1] == 700
    assert all(size >= columns for columns, size in enumerate(sizes, start=1))
    assert len(set(sizes)) <= 4


def test_there_is_one_memory_of_the_size_that_it_needs():
    """R20: G * B * H * S * D keys and as many values per unique layer, and nothing else."""
    model = flipping_model("often", dtype=torch.float32)
    output = model.generate(**prompts(2, 6), max_new_tokens=20, speed=True, return_dict_in_generate=True)
    config, cache = model.config, output.cache
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    }
    assert len(memory) == config.num_unique_layers
    per_layer = 2 * config.num_repetitions * 2 * config.num_attention_heads * 26 * config.head_dim * 4
    assert set(memory.values()) == {per_layer}


def test_bfloat16_is_kept_in_float32_on_a_cpu():
    assert memory_dtype(torch.bfloat16, torch.device("cpu")) == torch.float32
    assert memory_dtype(torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    assert memory_dtype(torch.float64, torch.device("cpu")) == torch.float64
    model = flipping_model("seldom", dtype=torch.bfloat16)
    options = {"max_new_tokens": 5, "do_sample": False}
    first = model.generate(**prompts(1, 6), speed=True, return_dict_in_generate=True, **options)
    assert first.cache.layers[0].keys.dtype == torch.float32
    more = torch.cat([first.sequences, torch.tensor([[5, 9]])], dim=1)
    assert model.generate(more, cache=first.cache, **options).shape == (1, 18)  # plain decoding goes on with it
