# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
import importlib
import sys
from collections import Counter

import pytest
import torch
from tiny_models import random_ids, tiny_model

from speed_hf import figures
from speed_hf.figures import pipeline_cells, pipeline_figure


matplotlib_image = pytest.importorskip("matplotlib.image")
PROMPT_LENGTH = 5


def trace_of(*passes):
    """Passes of sequence 0, each a dict column -> exit; the token plays no part."""
    return [torch.tensor([[0, column, exit_, 7] for column, exit_ in rows.items()]).view(-1, 4) for rows in passes]


def drawn(cells):
    """Column -> its passes as text: the exit, `-` after it where invalidated, `!` where it found a flip."""
    rows = {}
    for cell in cells:
        text = f"{cell.exit}{'-' if cell.invalidated else ''}{'!' if cell.flipped else ''}"
        rows.setdefault(cell.column, {})[cell.group_pass] = text
    return rows


def flipping_model(**changes):
    """A random model whose exits often disagree."""
    model = tiny_model(eos_token_id=None, **changes)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o.weight.mul_(3)
            layer.mlp.wo.weight.mul_(3)
    return model


def run(model, prompt, max_new_tokens=20, **options):
    return model.generate(
        prompt, speed=True, speed_trace=True, max_new_tokens=max_new_tokens, do_sample=False,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


def test_an_agreeing_pipeline_has_neither_flips_nor_invalidated_work():
    cells = pipeline_cells(trace_of({0: 1, 1: 1}, {0: 2, 1: 2, 2: 1}, {2: 2, 3: 1}, {3: 2}), 2, 2)
    assert drawn(cells) == {1: {1: "1", 2: "2"}, 2: {2: "1", 3: "2"}, 3: {3: "1", 4: "2"}}


def test_work_behind_a_flip_is_invalidated_and_restarts():
    cells = pipeline_cells(trace_of({0: 1}, {0: 2, 1: 1}, {0: 3, 1: 2, 2: 1}, {1: 1}, {1: 2, 2: 1}), 1, 3)
    flip = next(cell for cell in cells if cell.flipped)
    assert drawn(cells)[0] == {1: "1", 2: "2", 3: "3!"}
    assert drawn(cells)[1] == {2: "1-", 3: "2-", 4: "1-", 5: "2-"}  # the last run never reached exit 3 either
    assert (flip.group_pass, flip.column, flip.stops) == (3, 0, 2)


def test_a_position_of_a_block_that_restarts_after_its_last_exit_is_invalidated():
    cells = pipeline_cells(trace_of({0: 1, 1: 1}, {0: 2, 1: 2}, {1: 1}, {1: 2}), 1, 2)
    assert drawn(cells) == {0: {1: "1", 2: "2!"}, 1: {1: "1-", 2: "2-", 3: "1", 4: "2"}}


def test_a_position_that_vanishes_is_invalidated():
    cells = pipeline_cells(trace_of({0: 1}, {0: 2, 1: 1}), 1, 2)
    assert drawn(cells) == {0: {1: "1", 2: "2!"}, 1: {2: "1-"}}


def test_a_guessed_end_of_text_that_flips_is_found_by_the_late_start():
    cells = pipeline_cells(trace_of({0: 1}, {0: 2}, {0: 3, 1: 1}, {1: 2}, {1: 3}), 1, 3)
    assert drawn(cells) == {0: {1: "1", 2: "2!", 3: "3"}, 1: {3: "1", 4: "2", 5: "3"}}


def test_waiting_for_the_prompt_is_no_flip():
    output = run(tiny_model(eos_token_id=None), random_ids(1, PROMPT_LENGTH), 1 + 1, speed_prompt_overlap=False)
    cells = pipeline_cells(output.speed_stats["trace"], PROMPT_LENGTH, 3)
    assert not any(cell.flipped or cell.invalidated for cell in cells)


@pytest.mark.parametrize("num_repetitions", [2, 4])
def test_cells_agree_with_the_statistics_of_the_run(num_repetitions):
    num_new_tokens = 20
    model = flipping_model(num_repetitions=num_repetitions)
    stats = run(model, random_ids(1, PROMPT_LENGTH), num_new_tokens).speed_stats
    cells = pipeline_cells(stats["trace"], PROMPT_LENGTH, num_repetitions)
    assert len(cells) == stats["num_rows"] - num_repetitions * (PROMPT_LENGTH - 1)
    assert any(cell.invalidated for cell in cells)
    for column in range(PROMPT_LENGTH - 1, PROMPT_LENGTH + num_new_tokens - 1):
        kept = [cell for cell in cells if cell.column == column and not cell.invalidated]
        assert [cell.exit for cell in kept] == list(range(1, num_repetitions + 1))
        assert [cell.group_pass - kept[0].group_pass for cell in kept] == list(range(num_repetitions))
    flips = Counter(cell.exit for cell in cells if cell.flipped and not cell.invalidated)
    # Nothing follows the last token, so no picture shows that its prediction changed.
    counted = {exit_: round(share * num_new_tokens) for exit_, share in stats["flips"].items()}
    assert all(counted[exit_] - flips[exit_] in (0, 1) for exit_ in counted)
    assert 0 < sum(flips.values()) <= sum(counted.values())


def test_a_sequence_of_a_batch_is_drawn_like_itself_alone():
    model, prompts = flipping_model(), random_ids(3, PROMPT_LENGTH)
    together = run(model, prompts).speed_stats["trace"]
    for sequence, prompt in enumerate(prompts):
        alone = run(model, prompt[None]).speed_stats["trace"]
        assert pipeline_cells(together, PROMPT_LENGTH, 3, sequence) == pipeline_cells(alone, PROMPT_LENGTH, 3)


def test_a_sequence_without_rows_is_refused():
    with pytest.raises(ValueError, match="`trace` must hold rows of sequence 1"):
        pipeline_cells(trace_of({0: 1}, {0: 2}), 1, 2, sequence=1)


@pytest.mark.parametrize(("num_new_tokens", "labelled"), [(1, 45), (12, 45), (12, 11)])
def test_the_picture_holds_every_exit_colour(num_new_tokens, labelled, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "LABELLED_POSITIONS", labelled)
    path = tmp_path / "pipeline.png"
    stats = run(flipping_model(), random_ids(1, PROMPT_LENGTH), num_new_tokens).speed_stats
    texts = ["$x_{1$", "Größe", "</s>"] * 20  # a dollar must not start a formula
    pipeline_figure(stats["trace"], PROMPT_LENGTH, 3, texts[:num_new_tokens], path)
    picture = matplotlib_image.imread(path)
    seen = {tuple(pixel) for pixel in (picture[::2, ::2, :3] * 255).round().astype(int).reshape(-1, 3).tolist()}
    assert {tuple(round(255 * part) for part in colour) for colour in figures._exit_colours(3)} <= seen
    assert picture.shape[0] < 3200 and picture.shape[1] < 3800


def test_without_matplotlib_the_cure_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "speed_hf.figures")
    with pytest.raises(ImportError, match=r"pip install speed-hf\[demo\]"):
        importlib.import_module("speed_hf.figures")
