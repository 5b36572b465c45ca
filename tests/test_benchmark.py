# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmark on tiny sizes: it measures what it says, and its script is followed by every way of decoding."""

import json

import benchmark
import numpy as np
import pytest
import torch
from tiny_models import HAS_COMPILER

from speed_hf import generation_speed


@pytest.fixture(autouse=True)
def tiny_sizes(monkeypatch):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8, "vocab_size": 50}
    monkeypatch.setattr(benchmark, "BASE", sizes)
    monkeypatch.setattr(generation_speed, "_TokenChoice", benchmark.ScriptedChoice)


@pytest.mark.parametrize("profile", [[0.0, 0.0], [0.3, 0.1], [1.0, 1.0]], ids=str)
def test_every_decoding_follows_the_script(profile):
    model = benchmark.build_model(1, 3, torch.float32)
    script = benchmark.Script(profile, 120, 50)
    prompt = torch.arange(2, 9)[None]
    texts = []
    for options in ({}, {"speed": True}, {"assistant_early_exit": 1}, {"prompt_lookup_num_tokens": 3}):
        model.script = benchmark.ScriptedChoice.script = script
        texts.append(model.generate(prompt, max_new_tokens=40, do_sample=False, **options)[0, 7:].tolist())
    assert texts[0] == script.tokens[-1, 0, 6:46].tolist()
    assert all(text == texts[0] for text in texts)
    changes = (script.tokens[1:, 0] != script.tokens[:-1, 0]).mean(1)
    assert np.allclose(changes, profile, atol=0.12)


def test_the_benchmark_writes_json_table_and_picture(tmp_path, capsys):
    leave_out = [] if HAS_COMPILER else ["--leave_out", "compiled"]
    benchmark.main(
        ["--shape", "1x3", "--profile", "0.2", "0.1", "--dtypes", "float32", "--batch_sizes", "1", "2", "--num_runs"]
        + ["1", "--prompt_tokens", "5", "--new_tokens", "9", "--output_dir", str(tmp_path), *leave_out]
    )
    report = json.loads((tmp_path / "benchmark.json").read_text())
    assert [result["batch_size"] for result in report["results"]] == [1, 2]
    one = report["results"][0]
    names = {"3 layers, stock", "3 layers, stripped", "1 layers, stock", "1 layers, stripped"}
    names |= {f"1x3, {kind}" for kind in ("stock", "speed", "early exit", "prompt lookup")}
    if HAS_COMPILER:
        names |= {f"{kind} compiled" for kind in ("3 layers, stripped", "1 layers, stripped", "1x3, speed")}
    assert set(one["decoding"]) == names
    assert "1x3, speed padded" in report["results"][1]["decoding"]
    assert all(entry["ms_per_token"] > 0 for entry in one["decoding"].values())
    assert 1 <= one["passes_per_token"] <= 3
    assert "faster than it:" in capsys.readouterr().out
    assert (tmp_path / "benchmark.png").stat().st_size > 5000
    assert (tmp_path / "benchmark.md").read_text().count("| 1x3, speed |") == 2
