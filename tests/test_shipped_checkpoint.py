# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that the project ships, and a random model of its size, on real prompts: pipelined equals plain."""

import json
from pathlib import Path

import pytest
import torch
from numerics import first_difference
from reference import oracle_passes
from transformers import AutoTokenizer

from speed_hf import SpeedT5ForCausalLM


ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "model_cards" / "speed-t5-en-de-small"
NEAR_TIE = 1e-4  # difference of the two best logits below which float32 may pick either


def sources(number):
    with open(ROOT / "tests" / "data" / "auf_deutsch.jsonl", encoding="utf-8") as file:
        return [json.loads(line)["en"] for line in file][:number]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def load(weights, dtype):
    model = SpeedT5ForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype)
    if weights == "random":
        torch.manual_seed(0)
        model = type(model)(model.config).to(dtype)
        with torch.no_grad():
            # As trained weights do, these change the residual stream enough for predictions to vary and to flip.
            model.model.norm.weight.normal_()
            for layer in model.model.layers:
                layer.mlp.wo.weight.mul_(3)
        model.generation_config.eos_token_id = None
    return model.eval()


def compare(weights, dtype, tokenizer, batch_size, number, max_new_tokens):
    """Decode both ways; returns the number of texts that differ, all at near-ties."""
    model, ties = load(weights, dtype), []
    texts = sources(number)
    for start in range(0, len(texts), batch_size):
        inputs = tokenizer(texts[start : start + batch_size], padding=True, return_tensors="pt")
        options = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
        plain = model.generate(**inputs, output_logits=dtype == torch.float32, **options)
        speed = model.generate(**inputs, speed=True, **options)
        if dtype == torch.float64:
            assert torch.equal(plain.sequences, speed.sequences)
            continue
        if plain.sequences.shape != speed.sequences.shape:
            longest = max(plain.sequences.shape[1], speed.sequences.shape[1])
            for output in (plain, speed):
                missing = longest - output.sequences.shape[1]
                output.sequences = torch.nn.functional.pad(output.sequences, (0, missing))
        for row in range(len(plain.sequences)):
            found = first_difference(plain, speed, row, inputs["input_ids"].shape[1])
            if found is not None:
                ties.append(found)
                print(f"text {start + row} differs at new token {found[0]}, margin {found[1]:.2e}")
                assert found[1] < NEAR_TIE
    return len(ties)


DTYPES = [torch.float64, torch.float32]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("weights", ["trained", "random"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
def test_pipelined_equals_plain_on_real_text(weights, dtype, tokenizer, batch_size):
    assert compare(weights, dtype, tokenizer, batch_size, number=4, max_new_tokens=40) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 8])
@pytest.mark.parametrize("weights", ["trained", "random"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["float64", "float32"])
def test_pipelined_equals_plain_on_200_texts(weights, dtype, tokenizer, batch_size):
    assert compare(weights, dtype, tokenizer, batch_size, number=200, max_new_tokens=128) <= 4


@pytest.mark.parametrize("weights", ["trained", "random"])
def test_passes_equal_the_oracle_on_real_text(weights, tokenizer):
    model = load(weights, torch.float64)
    for text in sources(3):
        inputs = tokenizer(text, return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        output = model.generate(
            **inputs,
            max_new_tokens=30,
            do_sample=False,
            speed=True,
            speed_prompt_overlap=False,
            return_dict_in_generate=True,
        )
        prefix = torch.ones(1, length, dtype=torch.bool) if model.config.prefix_lm else None
        logits = model(output.sequences, prefix_mask=prefix, return_exit_logits=True).exit_logits
        predictions = torch.stack([scores[0, length - 1 : -1].float().argmax(-1) for scores in logits], dim=1)
        assert output.speed_stats["num_group_passes"] == oracle_passes(predictions.numpy())


def test_16_prompts_of_very_different_lengths_equal_each_alone(tokenizer):
    """Left padding changes no row, and no row of padding is computed."""
    model = load("trained", torch.float64)
    texts = sources(46)
    texts = texts[:12] + [" ".join(texts[start : start + 8]) for start in (12, 20, 28, 36)]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    lengths = inputs["attention_mask"].sum(1)
    assert len(lengths) == 16 and lengths.max() > 8 * lengths.min()
    options = {"max_new_tokens": 24, "do_sample": False, "speed": True, "return_dict_in_generate": True}
    together = model.generate(**inputs, **options)
    num_rows = 0
    for ids, mask, row in zip(inputs["input_ids"], inputs["attention_mask"], together.sequences, strict=True):
        alone = model.generate(ids[mask.bool()][None], **options)
        new = alone.sequences[0, mask.sum() :]
        assert torch.equal(row[len(ids) :][: len(new)], new)
        num_rows += alone.speed_stats["num_rows"]
    assert together.speed_stats["num_rows"] == num_rows


@pytest.mark.parametrize("weights", ["trained", "random"])
def test_pipelined_equals_plain_over_520_tokens(weights, tokenizer):
    model = load(weights, torch.float64)
    model.generation_config.eos_token_id = None
    inputs = tokenizer(sources(1), return_tensors="pt")
    # Or a small model says one thing only, a trained one that the text is over.
    options = {"max_new_tokens": 520, "do_sample": False, "repetition_penalty": 2.5}
    options["suppress_tokens"] = [tokenizer.eos_token_id]
    speed = model.generate(**inputs, speed=True, **options)
    assert torch.equal(speed, model.generate(**inputs, **options))
    assert len(set(speed[0, -100:].tolist())) > 5, "a constant text would prove little"


def test_the_shipped_folder_is_a_whole_repository():
    names = {path.name for path in CHECKPOINT.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 16 * 2**20
    for path in CHECKPOINT.glob("*.py"):
        source = (ROOT / "src" / "speed_hf" / path.name).read_text(encoding="utf-8")
        assert path.read_text(encoding="utf-8") == source, f"{path.name} is not what the package has now"
