# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
import json
import shutil
import sys

import demo
import evaluate_checkpoint
import pytest
import torch
from tiny_models import HAS_COMPILER
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from speed_hf import SpeedT5Config, SpeedT5ForCausalLM
from speed_hf.timing import Comparison, compare_decoding, load_checkpoint


WORDS = [f"w{i}" for i in range(20)]
TEXT = "w3 w1 w4 w1 w5"


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "evaluate", None)  # its metrics come from the Hub
    monkeypatch.setattr(demo, "SECONDS_OF_RUNS", 0.3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A random checkpoint with a tokenizer of words."""
    folder = tmp_path_factory.mktemp("saved") / "tiny"
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A </s>", special_tokens=[("<pad>", 0), ("</s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    ).save_pretrained(folder)  # fmt: skip
    torch.manual_seed(0)
    config = SpeedT5Config(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=32, num_attention_heads=2, head_dim=16,
        num_unique_layers=1, num_repetitions=3, prefix_lm=True,
    )  # fmt: skip
    SpeedT5ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "tiny")


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.test.jsonl"
    rows = [
        {"en": " ".join(WORDS[i : i + 4]), "de": " ".join(WORDS[i + 1 :]), "source": "ab"[i % 2]} for i in range(6)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def evaluate(checkpoint, pairs_file, *options):
    columns = ["--source_column", "en", "--target_column", "de"]
    sizes = ["--num_prompts", "3", "--max_new_tokens", "8", "--batch_size", "4"]
    evaluate_checkpoint.main([str(checkpoint), "--test_file", str(pairs_file), *columns, *sizes, *options])


def test_demo_shows_text_translation_table_and_picture(checkpoint, tmp_path, capsys):
    picture = tmp_path / "pipeline.png"
    demo.main(["--checkpoint", str(checkpoint), "--text", TEXT, "--max_new_tokens", "9", "--output", str(picture)])
    output = capsys.readouterr().out
    model, tokenizer = load_checkpoint(checkpoint)
    inputs = tokenizer(TEXT, return_tensors="pt")
    plain = model.generate(**inputs, max_new_tokens=9, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    lines = output.splitlines()
    source, translation = lines.index(TEXT), lines.index(tokenizer.decode(plain, skip_special_tokens=True))
    assert source < translation < next(i for i, line in enumerate(lines) if "ms per token" in line)
    assert "float32" in output and "Predictions that changed" in output and "at exit 3" in output
    table = {line[:26].strip(): line[26:].split() for line in lines if line.startswith("  ")}
    assert table["tokens equal"] == ["yes"]
    assert table["new tokens"] == [str(len(plain))] * 2
    assert table["group passes per token"][0] == "3.00" and float(table["group passes per token"][1]) <= 3
    assert picture.read_bytes().startswith(b"\x89PNG") and lines[-1].endswith(str(picture))


@pytest.mark.parametrize("damage", ["no folder", "no weights", "pointer"])
def test_a_checkpoint_that_is_not_there_is_explained(damage, checkpoint, pairs_file, capsys):
    weights = checkpoint / "model.safetensors"
    if damage == "no folder":
        shutil.rmtree(checkpoint)
    elif damage == "no weights":
        weights.unlink()
    else:
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    problem = {"no folder": "does not exist", "no weights": "lacks model.safetensors", "pointer": "pointer of Git LFS"}
    for command in (lambda: demo.main(["--checkpoint", str(checkpoint)]), lambda: evaluate(checkpoint, pairs_file)):
        with pytest.raises(SystemExit):
            command()
        message = capsys.readouterr().err
        assert problem[damage] in message and "git lfs pull" in message and "another checkpoint" in message


def test_evaluation_writes_every_figure_of_the_card(checkpoint, pairs_file, capsys):
    compiled = ["--speed_kernels"] if HAS_COMPILER else []
    evaluate(checkpoint, pairs_file, "--dtypes", "float32", "bfloat16", *compiled)
    results = json.loads((checkpoint / "results.json").read_text())
    scores = results["texts"]["pairs.test.jsonl"]
    assert scores["pairs"] == 6 and {group: found["pairs"] for group, found in scores["groups"].items()} == {
        "a": 3,
        "b": 3,
    }
    assert "tok:13a" in results["signatures"]["BLEU"] and "nc:6" in results["signatures"]["chrF"]
    assert results["environment"].keys() >= {"command", "CPU", "threads", "torch", "transformers", "date"}
    found = results["decoding"]["pairs.test.jsonl"]
    kinds = [
        f"{dtype}{kernels}" for dtype in ("float32", "bfloat16") for kernels in ("", ", compiled")[: 1 + HAS_COMPILER]
    ]
    assert list(found) == kinds
    for by_dtype in found.values():
        assert by_dtype["prompts"] == 3 and 3 <= by_dtype["new_tokens"] <= 24
        assert 1 <= by_dtype["speed"]["passes_per_token"] <= by_dtype["plain"]["passes_per_token"] == 3
        assert by_dtype["flips"].keys() == {"2", "3"}
        assert 0 < by_dtype["plain"]["ms_per_token"] <= by_dtype["plain"]["ms_per_token_p90"]
    assert found["float32"]["tokens_equal"] == 3

    card = (checkpoint / "README.md").read_text()
    assert "# tiny" in card and f"| pairs.test.jsonl | 6 | 0 | {scores['bleu']:.4g} | {scores['chrf']:.4g} |" in card
    assert "| pairs.test.jsonl | float32 | 3 of 3 |" in card
    assert str(checkpoint.parent) not in card + json.dumps(results)
    last = capsys.readouterr().out.splitlines()[-1]
    assert json.loads(last.removeprefix(f"{checkpoint}: ")) == {
        "pairs.test.jsonl": {"bleu": scores["bleu"], "chrf": scores["chrf"]}
    }


def test_evaluation_replaces_the_results_and_keeps_the_rest_of_the_card(checkpoint, pairs_file):
    head = "---\nlanguage: [en, de]\nlicense: apache-2.0\n---\n\n# Name\n"
    readme = checkpoint / "README.md"
    readme.write_text(f"{head}\n## Results\n\nold numbers\n\n### Old\n\n## Training\n\nOn pairs.\n")
    for _ in range(2):
        evaluate(checkpoint, pairs_file, "--dtypes", "float32")
    card = readme.read_text()
    assert card.count("## Results") == 1 and "old" not in card.lower().split("## results")[0] and "### Old" not in card
    assert "license: apache-2.0" in card and "## Training\n\nOn pairs.\n" in card and "- bleu" in card


def test_a_limited_evaluation_prints_only(checkpoint, pairs_file, capsys):
    before = sorted(path.name for path in checkpoint.iterdir())
    evaluate(checkpoint, pairs_file, "--dtypes", "float32", "--limit", "2")
    assert sorted(path.name for path in checkpoint.iterdir()) == before
    assert "| pairs.test.jsonl | 2 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtypes", "float16"], "`dtypes` must be float32"),
        (["--limit", "0"], "`limit` must be at least 1"),
        (["--target_column", "fr"], "set `target_column` to one of them"),
    ],
)
def test_evaluation_refuses_what_it_cannot_do(options, message, checkpoint, pairs_file, capsys):
    with pytest.raises(SystemExit):
        evaluate(checkpoint, pairs_file, *options)
    assert message in capsys.readouterr().err


def test_both_decodings_take_turns(checkpoint, monkeypatch):
    model, tokenizer = load_checkpoint(checkpoint)
    generate, order = model.generate, []
    monkeypatch.setattr(model, "generate", lambda **options: order.append(options["speed"]) or generate(**options))
    comparison = compare_decoding(model, tokenizer(TEXT, return_tensors="pt"), 3, max_new_tokens=4)
    assert order == [False, True, True, False, False, True]
    assert len(comparison.plain_seconds) == len(comparison.speed_seconds) == 3
    assert comparison.tokens_equal and 1 <= len(comparison.speed_tokens) <= 4


def test_times_are_medians_per_new_token():
    stats = {"num_group_passes": 6}
    comparison = Comparison([5, 6, 1], [5, 6, 7, 1], stats, [0.3, 9.0, 0.6], [0.2, 0.1, 0.4])
    assert not comparison.tokens_equal
    assert comparison.plain_ms_per_token == pytest.approx(200)
    assert comparison.speed_ms_per_token == pytest.approx(50)
    assert comparison.speed_up == pytest.approx(4) and comparison.passes_per_token == 1.5
