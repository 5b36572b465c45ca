# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import logging

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from speed_hf.data import (
    TokenizedPairs,
    assign_rows,
    evenly_spread,
    load_pairs,
    pack_pairs,
    stack_rows,
    tokenize_pairs,
)


COLUMNS = {"source": "en", "target": "de"}


class WordTokenizer:
    """One id per word, the number it spells."""

    pad_token_id, eos_token_id = 0, 1

    def __call__(self, texts, **kwargs):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


@pytest.fixture(autouse=True)
def cache_in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def tokenize(pairs, max_source_length=8, max_target_length=8, **kwargs):
    sources, targets = zip(*pairs, strict=True)
    pairs = Dataset.from_dict({"source": sources, "target": targets})
    return tokenize_pairs(pairs, WordTokenizer(), max_source_length, max_target_length, **kwargs)


def test_pair_has_the_arrays_of_seqio():
    row = pack_pairs(tokenize([("9 4 6", "3 9")]), row_length=8)[0]
    assert row["input_ids"][:-1].tolist() == [0, 9, 4, 6, 1, 3, 9]  # decoder inputs
    assert row["input_ids"][1:].tolist() == [9, 4, 6, 1, 3, 9, 1]  # decoder targets
    assert (row["labels"][1:] != -100).tolist() == [False] * 4 + [True] * 3  # loss weights
    assert (row["labels"] != -100).cumsum()[:-1].tolist() == [0, 0, 0, 0, 0, 1, 2]  # prefix mask: where this is 0


def test_tail_of_a_row_is_a_segment_without_loss():
    rows = pack_pairs(tokenize([("9 4 6", "3 9"), ("5", "7")]), row_length=16)
    assert len(rows) == 1 and rows.fill_rate == 13 / 16
    assert rows[0]["input_ids"].tolist() == [0, 9, 4, 6, 1, 3, 9, 1, 0, 5, 1, 7, 1, 0, 0, 0]
    assert rows[0]["labels"].tolist() == [-100] * 5 + [3, 9, 1] + [-100] * 3 + [7, 1] + [-100] * 3
    assert rows[0]["position_ids"].tolist() == [*range(8), *range(5), *range(3)]


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_rows_hold_every_pair_once_without_overlap(lengths):
    rows, starts = assign_rows(np.array(lengths), row_length=20)
    taken = [(row, start + i) for row, start, length in zip(rows, starts, lengths, strict=True) for i in range(length)]
    assert len(set(taken)) == len(taken) == sum(lengths)
    assert starts.min() >= 0 and max(position for _, position in taken) < 20
    assert rows.max() + 1 <= 2 * -(-sum(lengths) // 20)  # two rows that are at most half full never stay apart


def test_packing_is_deterministic_and_fills_rows():
    lengths = np.random.default_rng(0).integers(4, 60, 5000)
    pairs = TokenizedPairs(np.arange(lengths.sum(), dtype=np.int32), lengths, lengths // 2, 0)
    rows = pack_pairs(pairs, row_length=128)
    assert rows.fill_rate > 0.99
    again = pack_pairs(pairs, row_length=128)
    assert all(np.array_equal(rows.arrays[name], again.arrays[name]) for name in rows.arrays)


def test_batch_has_the_same_shape_for_any_rows():
    rows = pack_pairs(tokenize([("9 4 6", "3 9"), ("5", "7"), ("2 2 2", "8 8")]), row_length=9)
    batch = stack_rows([rows[0], rows[2]])
    assert all(tensor.shape == (2, 9) and tensor.dtype.is_floating_point is False for tensor in batch.values())


def test_long_texts_are_cut_and_counted():
    pairs = tokenize([("9 4 6", "3 9 5"), ("5", "7")], max_source_length=2, max_target_length=2)
    assert pairs.num_truncated == 1
    assert pairs.input_ids[: pairs.lengths[0]].tolist() == [0, 9, 4, 1, 3, 9, 1]


def test_long_pairs_are_left_out_on_request():
    texts = [("9 4 6", "3"), ("5", "7"), ("9", "3 9 5")]
    pairs = tokenize(texts, max_source_length=2, max_target_length=2, drop_long_pairs=True)
    assert pairs.input_ids.tolist() == [0, 5, 1, 7, 1] and (len(pairs), pairs.num_truncated) == (1, 0)
    with pytest.raises(ValueError, match="None of the 3 pairs fits into `max_source_length`=0"):
        tokenize(texts, max_source_length=0, max_target_length=2, drop_long_pairs=True)


def test_prefix_stands_before_every_source():
    assert tokenize([("9", "3")], source_prefix="6 ").input_ids.tolist() == [0, 6, 9, 1, 3, 1]


def test_pair_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="`row_length` must be at least the longest pair, 8 tokens, got 7"):
        pack_pairs(tokenize([("9 4 6", "3 9")]), row_length=7)


def test_files_of_several_kinds_follow_each_other(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", [{"en": "one", "de": "eins"}])
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        file.write(json.dumps({"de": "zwei", "en": "two"}) + "\n")
    (tmp_path / "c.csv").write_text("en,de\nthree,drei\n")
    Dataset.from_dict({"en": ["four"], "de": ["vier"]}).to_parquet(tmp_path / "d.parquet")
    files = [lines, *(str(tmp_path / name) for name in ("b.json.gz", "c.csv", "d.parquet"))]
    pairs = load_pairs(COLUMNS, files)
    assert pairs["source"][:] == ["one", "two", "three", "four"]
    assert pairs["target"][:] == ["eins", "zwei", "drei", "vier"]


def test_nested_columns_are_reached_with_a_dot(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"translation": {"en": "one", "de": "eins"}}])
    assert load_pairs({"source": "translation.en", "target": "translation.de"}, [path])["target"][:] == ["eins"]


def test_empty_rows_are_dropped_with_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("speed_hf"), "propagate", True)
    rows = [{"en": "one", "de": "eins"}, {"en": " ", "de": "zwei"}, {"en": "three", "de": ""}]
    assert len(load_pairs(COLUMNS, [write_lines(tmp_path / "a.jsonl", rows)])) == 1
    assert "dropped 2 of 3 rows with an empty text, first row 2" in caplog.text


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"en": "one", "fr": "un"}], r"a\.jsonl` has no column `de`; its columns are en, fr: set `target_column`"),
        ([{"en": "one", "de": ""}], "has no row with text in all of source, target"),
        ([{"en": "one", "de": "eins"}, {"en": "two"}], r"1 rows without a value for `de`, the first is row 2"),
        ([{"en": 1, "de": "eins"}], "`en` of .* must hold text"),
        ([], "is empty"),
    ],
    ids=["no column", "no target", "line without the column", "numbers", "no rows"],
)
def test_unusable_rows_are_refused(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        load_pairs(COLUMNS, [write_lines(tmp_path / "a.jsonl", rows)])


def test_damaged_missing_and_unknown_files_are_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"en": "one", "de"')
    with pytest.raises(ValueError, match=r"cannot be read .*repair the file"):
        load_pairs(COLUMNS, [str(tmp_path / "a.jsonl")])
    with pytest.raises(ValueError, match="does not exist"):
        load_pairs(COLUMNS, [str(tmp_path / "b.jsonl")])
    with pytest.raises(ValueError, match=r"must end in one of \.json"):
        load_pairs(COLUMNS, [str(tmp_path / "b.txt")])


def test_rows_are_evenly_spread():
    assert evenly_spread(10, 3) == [0, 3, 6]
    assert evenly_spread(3, 10) == [0, 1, 2]
