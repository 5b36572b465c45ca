# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The plain truth against values worked out by hand."""

import numpy as np
import pytest
import reference


def test_buckets_of_t5_base():
    expected = {-3: 0, 0: 0, 15: 15, 16: 16, 18: 16, 19: 17, 32: 21, 64: 26, 112: 30, 113: 31, 128: 31, 5000: 31}
    assert {distance: reference.bucket(distance, 32, 128) for distance in expected} == expected


def test_gelu_new_is_the_tanh_approximation():
    # The exact GELU of 1 is 0.841345.
    assert reference.gelu_new(np.array([-1.0, 0, 1])) == pytest.approx([-0.158808, 0, 0.841192], abs=1e-6)


def test_visible_keys_of_a_packed_padded_prefix():
    visible = reference.visible_keys(
        (1, 5), prefix=[[1, 1, 0, 1, 1]], attention_mask=[[0, 1, 1, 1, 1]], segments=[[0, 0, 0, 1, 1]]
    )
    assert visible[0].astype(int).tolist() == [
        [0, 1, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [0, 1, 1, 0, 0],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(
    "predictions, passes",
    [
        ([[5, 5, 5]], 3),  # the prompt alone
        ([[5, 6, 7], [5, 5, 5]], 6),  # one token after it, nothing to overlap with
        ([[5, 5, 5]] * 6, 3 + 4 * 1 + 3),  # every draft right: one pass per token
        ([[5, 6, 7]] * 6, 3 + 4 * 3 + 3),  # the last exit always changes: plain decoding
        ([[1, 1, 1], [5, 6, 6], [5, 6, 5], [5, 5, 5], [1, 2, 3]], 3 + 2 + 3 + 1 + 3),
    ],
)
def test_oracle_passes(predictions, passes):
    assert reference.oracle_passes(predictions) == passes
