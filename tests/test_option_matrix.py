# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The command that tries every option: no cell is blank or different, and a difference would show."""

from pathlib import Path

import option_matrix
import pytest
import torch
from tiny_models import flipping_model
from transformers import AutoTokenizer


ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model_and_tokenizer():
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model_cards" / "speed-t5-en-de-small")
    model = flipping_model("often", vocab_size=len(tokenizer), prefix_lm=True)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 1, 0
    return model, tokenizer


def test_every_option_is_equal_or_refused(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    cells = {}
    for name, row, reason in option_matrix.matrix(model, tokenizer, max_new_tokens=12):
        assert set(row) <= {"equal", "refused", "plain refuses"}, f"{name}: {row}"
        assert ("refused" in row) == bool(reason)
        cells[name] = row
    assert len(cells) == len(option_matrix.options(model, tokenizer))
    assert sum(row == ["equal"] * 3 for row in cells.values()) >= 38


def test_a_difference_shows(model_and_tokenizer, monkeypatch):
    model, tokenizer = model_and_tokenizer
    exact = option_matrix.decode

    def spoilt(*args, speed):
        output, streamer = exact(*args, speed=speed)
        if speed:
            output.sequences = torch.where(output.sequences == output.sequences[0, -1], 2, output.sequences)
        return output, streamer

    monkeypatch.setattr(option_matrix, "decode", spoilt)
    (_, row, _), *_ = option_matrix.matrix(model, tokenizer, max_new_tokens=8, names=["(none)"])
    assert row == ["DIFFERENT"] * 3
