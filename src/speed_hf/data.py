# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Text pairs for training: loading with clear errors, tokenizing, and packing into rows of one constant length."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers.utils import logging


logger = logging.get_logger(__name__)

IGNORE_INDEX = -100  # label of positions that carry no loss, as everywhere in transformers
LOADERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
NUM_SPECIAL_TOKENS = 3  # bos source eos target eos


def load_file(path: str | Path) -> Dataset:
    """
    The rows of one local file, nested columns flattened to `outer.inner`.

    Args:
        path (`str` or `Path`): a `.json`, `.jsonl`, `.csv` or `.parquet` file; the first three may be gzipped (`.gz`).

    Returns:
        `datasets.Dataset`

    Raises:
        ValueError: for a file that is missing, empty, damaged, or of another kind.
    """
    path = Path(path)
    suffix = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if suffix not in LOADERS:
        raise ValueError(f"`{path}` must end in one of {', '.join(LOADERS)} (or .gz after it): rename or convert it.")
    if not path.is_file():
        raise ValueError(f"`{path}` does not exist: check the path of the data file.")
    if path.stat().st_size == 0:
        raise ValueError(f"`{path}` is empty: a data file must hold at least one row.")
    try:
        return load_dataset(LOADERS[suffix], data_files=str(path), split="train").flatten()
    except DatasetGenerationError as error:
        raise ValueError(f"`{path}` cannot be read ({error.__cause__}): repair the file.") from error


def select_text_columns(dataset: Dataset, name: str, columns: dict[str, str]) -> Dataset:
    """
    The text columns asked for, under new names, with no missing value.

    Args:
        dataset (`datasets.Dataset`): any rows.
        name (`str`): what to call the rows in an error: the file or the split.
        columns (`dict[str, str]`): new column name -> present column name; the option that sets it is `<new>_column`.

    Returns:
        `datasets.Dataset` with exactly the new names as columns, all of type string.

    Raises:
        ValueError: for a column that is absent or holds no text, and for a row without a value.
    """
    for new, present in columns.items():
        if present not in dataset.column_names:
            raise ValueError(
                f"`{name}` has no column `{present}`; its columns are {', '.join(dataset.column_names)}: "
                f"set `{new}_column` to one of them."
            )
        if dataset.features[present] not in (Value("string"), Value("large_string"), Value("null")):
            raise ValueError(
                f"`{present}` of `{name}` must hold text, got {dataset.features[present]}: "
                f"set `{new}_column` to a text column."
            )
        missing = np.flatnonzero(dataset.with_format("arrow")[:][present].is_null().to_numpy())
        if missing.size:
            raise ValueError(
                f"`{name}` has {missing.size} rows without a value for `{present}`, the first is row "
                f"{missing[0] + 1} (counted from 1): add the value or delete the rows."
            )
    # Through new rows: one present column may serve under two names, and rename_columns cannot do that.
    return Dataset.from_dict({new: dataset[present][:] for new, present in columns.items()})


def drop_empty_rows(pairs: Dataset, name: str) -> Dataset:
    """
    The rows whose texts are all more than whitespace; a warning says how many were dropped and which came first.

    Args:
        pairs (`datasets.Dataset`): text columns, as from [`select_text_columns`].
        name (`str`): what to call the rows in a message: the file or the split.

    Returns:
        `datasets.Dataset`

    Raises:
        ValueError: when no row is left.
    """
    texts = [pairs[column][:] for column in pairs.column_names]
    keep = np.array([all(text.strip() for text in row) for row in zip(*texts, strict=True)], dtype=bool)
    dropped = np.flatnonzero(~keep)
    if dropped.size == len(pairs):
        raise ValueError(
            f"`{name}` has no row with text in all of {', '.join(pairs.column_names)} ({len(pairs)} rows): "
            "check the column options and the file."
        )
    if dropped.size:
        logger.warning(
            f"`{name}`: dropped {dropped.size} of {len(pairs)} rows with an empty text, first row {dropped[0] + 1}."
        )
        pairs = pairs.select(np.flatnonzero(keep))
    return pairs


def load_pairs(
    columns: dict[str, str],
    files: list[str] | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    split: str = "train",
) -> Dataset:
    """
    Text columns of local files, or of one split of a dataset on the Hub, checked row by row.

    Args:
        columns (`dict[str, str]`): new column name -> present column name, such as `{"source": "en", "target": "de"}`.
        files (`list[str]`, *optional*): local files, see [`load_file`]; their rows follow each other.
        dataset_name, dataset_config_name (`str`, *optional*): the dataset on the Hub, used when there are no `files`.
        split (`str`): the split of the Hub dataset.

    Returns:
        `datasets.Dataset` with the new names as columns.

    Raises:
        ValueError: see [`load_file`], [`select_text_columns`] and [`drop_empty_rows`].
    """
    if files:
        named = [(str(path), load_file(path)) for path in files]
    else:
        loaded = load_dataset(dataset_name, dataset_config_name, split=split).flatten()
        named = [(f"{dataset_name}/{split}", loaded)]
    return concatenate_datasets(
        [drop_empty_rows(select_text_columns(rows, name, columns), name) for name, rows in named]
    )


def evenly_spread(number: int, wanted: int) -> list[int]:
    """At most `wanted` of the indices 0 .. `number` - 1, spread over all of them."""
    return [place * number // wanted for place in range(wanted)] if wanted < number else list(range(number))


@dataclass
class TokenizedPairs:
    """
    Sequences `bos source eos target eos`, laid end to end.

    Args:
        input_ids (`np.ndarray` of shape `(num_tokens,)`, int32): all sequences, one after the other.
        lengths (`np.ndarray` of shape `(num_pairs,)`, int64): tokens of each sequence.
        prompt_lengths (`np.ndarray` of shape `(num_pairs,)`, int64): tokens of each `bos source eos`, without loss.
        num_truncated (`int`): pairs whose source or target was cut.
    """

    input_ids: np.ndarray
    lengths: np.ndarray
    prompt_lengths: np.ndarray
    num_truncated: int

    def __len__(self) -> int:
        return len(self.lengths)


def tokenize_pairs(
    pairs: Dataset,
    tokenizer,
    max_source_length: int,
    max_target_length: int,
    source_prefix: str = "",
    drop_long_pairs: bool = False,
):
    """
    Token ids of (source, target) pairs in the layout the model is trained on.

    Args:
        pairs (`datasets.Dataset`): columns `source` and `target`.
        tokenizer (`PreTrainedTokenizerBase`): its pad token serves as bos, its eos token ends source and target.
        max_source_length, max_target_length (`int`): tokens kept of each text, special tokens not counted.
        source_prefix (`str`): put before every source text.
        drop_long_pairs (`bool`): leave out pairs that are longer, instead of cutting them.

    Returns:
        [`TokenizedPairs`]
    """
    bos, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    chunks, lengths, prompt_lengths, num_truncated = [], [], [], 0
    for batch in pairs.iter(batch_size=10_000):
        sources = tokenizer([source_prefix + text for text in batch["source"]], **options)["input_ids"]
        targets = tokenizer(batch["target"], **options)["input_ids"]
        flat: list[int] = []
        for source, target in zip(sources, targets, strict=True):
            if len(source) > max_source_length or len(target) > max_target_length:
                if drop_long_pairs:
                    continue
                num_truncated += 1
            source, target = source[:max_source_length], target[:max_target_length]
            flat += [bos, *source, eos, *target, eos]
            prompt_lengths.append(len(source) + 2)
            lengths.append(len(source) + len(target) + NUM_SPECIAL_TOKENS)
        chunks.append(np.array(flat, dtype=np.int32))
    if not lengths:
        raise ValueError(
            f"None of the {len(pairs)} pairs fits into `max_source_length`={max_source_length} and "
            f"`max_target_length`={max_target_length}: raise them, or set `drop_long_pairs` to False."
        )
    return TokenizedPairs(np.concatenate(chunks), np.array(lengths), np.array(prompt_lengths), num_truncated)


class PackedRows(torch.utils.data.Dataset):
    """
    Rows of one constant length, as [`pack_pairs`] builds them.

    Args:
        input_ids, labels, position_ids (`np.ndarray` of shape `(num_rows, row_length)`, int32).
        fill_rate (`float`): share of the positions that hold a token of a pair, 0 to 1.
    """

    def __init__(self, input_ids: np.ndarray, labels: np.ndarray, position_ids: np.ndarray, fill_rate: float):
        self.arrays = {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}
        self.fill_rate = fill_rate

    def __len__(self) -> int:
        return len(self.arrays["input_ids"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self.arrays.items()}


def assign_rows(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Best fit, longest first: each sequence goes to the fullest row that still has room for it.

    Args:
        lengths (`np.ndarray` of shape `(num_pairs,)`): all between 1 and `row_length`.
        row_length (`int`): tokens of a row.

    Returns:
        `tuple` of two `np.ndarray` of shape `(num_pairs,)`, int64: the row of each sequence and where in it it starts.
    """
    rows, starts = np.empty(len(lengths), dtype=np.int64), np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(row_length + 1)]  # by free space
    occupied = 0  # bit n is set when open_rows[n] is not empty: the smallest sufficient n is one bit scan away
    num_rows = 0
    order = np.argsort(-lengths, kind="stable")
    for index, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = occupied >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            row = open_rows[free].pop()
            if not open_rows[free]:
                occupied &= ~(1 << free)
        else:
            free, row = row_length, num_rows
            num_rows += 1
        rows[index], starts[index] = row, row_length - free
        if free > length:
            open_rows[free - length].append(row)
            occupied |= 1 << (free - length)
    return rows, starts


def pack_pairs(pairs: TokenizedPairs, row_length: int, pad_token_id: int = 0) -> PackedRows:
    """
    Rows of exactly `row_length` tokens, each holding as many whole pairs as fit; the same input gives the same rows.

    Position ids restart at 0 at every pair, which keeps pairs apart in the model. The unused tail of a row is a
    segment of its own: padding, no loss.

    Args:
        pairs ([`TokenizedPairs`]): none longer than `row_length`.
        row_length (`int`): tokens of a row.
        pad_token_id (`int`): fills the tail of a row.

    Returns:
        [`PackedRows`]

    Raises:
        ValueError: for a pair that is longer than a row.
    """
    if pairs.lengths.max() > row_length:
        raise ValueError(
            f"`row_length` must be at least the longest pair, {pairs.lengths.max()} tokens, got {row_length}: "
            "raise it, or lower `max_source_length` or `max_target_length`."
        )
    rows, starts = assign_rows(pairs.lengths, row_length)
    num_rows = int(rows.max()) + 1
    within = np.arange(len(pairs.input_ids)) - np.repeat(np.cumsum(pairs.lengths) - pairs.lengths, pairs.lengths)
    where = np.repeat(rows * row_length + starts, pairs.lengths) + within
    has_loss = within >= np.repeat(pairs.prompt_lengths, pairs.lengths)

    input_ids = np.full(num_rows * row_length, pad_token_id, dtype=np.int32)
    labels = np.full(num_rows * row_length, IGNORE_INDEX, dtype=np.int32)
    input_ids[where] = pairs.input_ids
    labels[where[has_loss]] = pairs.input_ids[has_loss]

    used = np.bincount(rows, weights=pairs.lengths, minlength=num_rows).astype(np.int64)
    position_ids = np.arange(row_length)[None] - used[:, None]  # right for the tails; the pairs are filled in next
    position_ids.reshape(-1)[where] = within

    shape = (num_rows, row_length)
    return PackedRows(
        input_ids.reshape(shape), labels.reshape(shape), position_ids.astype(np.int32), len(where) / input_ids.size
    )


def stack_rows(rows: list[dict[str, np.ndarray]]) -> dict[str, torch.Tensor]:
    """A batch of packed rows: each entry is stacked to a tensor of shape `(B, row_length)`, int64."""
    return {name: torch.from_numpy(np.stack([row[name] for row in rows])).long() for name in rows[0]}
