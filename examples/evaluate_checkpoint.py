# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
Measure a translation checkpoint: the one command behind every figure of its card.

    python examples/evaluate_checkpoint.py model_cards/speed-t5-en-de-small \
        --test_file sentences.test.jsonl.gz paragraphs.test.jsonl.gz --source_column en --target_column de

Scores greedy translations of every pair, then decodes some prompts one at a time, plainly and with `speed=True` in
turns, and compares tokens and times. Writes `results.json` into the checkpoint folder and the section "Results" of its
README.md. With `--limit` it only prints, since a part of a file gives no figure for a card. The last line of output
names the folder and the scores.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from huggingface_hub import ModelCard
from sacrebleu.metrics import BLEU, CHRF
from transformers.utils import logging

from speed_hf.data import evenly_spread, load_file, load_pairs
from speed_hf.model_card import build_model_card, results_section, with_results
from speed_hf.text_metrics import TextScores, generate_texts
from speed_hf.timing import compare_decoding, describe_environment, load_checkpoint


def parse_arguments(argv: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="Folder of the checkpoint.")
    parser.add_argument("--test_file", nargs="+", required=True, help="JSON-lines, CSV or Parquet files; .gz is fine.")
    parser.add_argument("--source_column", default="source", help="Column of the input text.")
    parser.add_argument("--target_column", default="target", help="Column of the reference.")
    parser.add_argument("--group_column", default="source", help="Each of its values gets scores of its own.")
    parser.add_argument("--source_prefix", default="", help="Put before every input text.")
    parser.add_argument("--max_source_length", type=int, default=128, help="Tokens kept of the input.")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="Longest translation, in tokens.")
    parser.add_argument("--batch_size", type=int, default=32, help="Translations at once for the scores.")
    parser.add_argument("--num_prompts", type=int, default=50, help="Prompts of each file to time, evenly spread.")
    parser.add_argument("--num_runs", type=int, default=1, help="Timed runs of either decoding, for each prompt.")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="To time; scores use the first.")
    parser.add_argument("--speed_kernels", action="store_true", help="Time the pipeline with compiled operations too.")
    parser.add_argument("--limit", type=int, help="Pairs of each file, evenly spread; then nothing is written.")
    args = parser.parse_args(argv)
    for name in ("max_source_length", "max_new_tokens", "batch_size", "num_prompts", "num_runs", "limit"):
        if (value := getattr(args, name)) is not None and value < 1:
            parser.error(f"`{name}` must be at least 1, got {value}: set it to a positive number.")
    for name in args.dtypes:
        if name not in ("float32", "bfloat16", "float64"):
            parser.error(f"`dtypes` must be float32, bfloat16 or float64, got {name}: choose of these.")
    return parser, args


def load_test_pairs(args) -> dict[str, dict[str, list[str]]]:
    """File name -> columns `source`, `target` and, where the file has the group column, `group`."""
    pairs = {}
    for path in args.test_file:
        columns = {"source": args.source_column, "target": args.target_column}
        if args.group_column not in columns.values() and args.group_column in load_file(path).column_names:
            columns["group"] = args.group_column
        rows = load_pairs(columns, [path])
        rows = rows.select(evenly_spread(len(rows), args.limit or len(rows)))
        pairs[Path(path).name] = rows[:]
        pairs[Path(path).name]["source"] = [args.source_prefix + text for text in rows["source"]]
    return pairs


def score_texts(model, tokenizer, pairs: dict[str, list[str]], args, scores: TextScores) -> tuple[dict, list[str]]:
    """BLEU and chrF of one file, in all and by group, and the translations."""
    sources, references = pairs["source"], pairs["target"]
    lengths = [len(ids) for ids in tokenizer(sources, add_special_tokens=False, verbose=False)["input_ids"]]
    texts = generate_texts(
        model, tokenizer, sources, args.batch_size, args.max_source_length, args.max_new_tokens, speed=True
    )
    found = {"pairs": len(texts), "cut": sum(length > args.max_source_length for length in lengths)}
    groups = {}
    for group in sorted(set(pairs.get("group", []))):
        members = [place for place, name in enumerate(pairs["group"]) if name == group]
        own = [texts[place] for place in members], [references[place] for place in members]
        groups[group] = {"pairs": len(members), **scores(*own)}
    return {**found, **scores(texts, references), "groups": groups}, texts


def signatures(texts: list[str], references: list[str]) -> dict[str, str]:
    """How sacrebleu computed the scores."""
    found = {}
    for name, metric in (("BLEU", BLEU()), ("chrF", CHRF())):
        metric.corpus_score(texts, [references])  # the signature is complete only afterwards
        found[name] = str(metric.get_signature())
    return found


def time_prompts(model, tokenizer, sources: list[str], args, speed_kernels: bool) -> dict:
    """Plain against pipelined decoding of evenly spread prompts, one at a time."""
    prompts = [sources[place] for place in evenly_spread(len(sources), args.num_prompts)]
    comparisons = []
    for prompt in [prompts[0], *prompts]:  # the first one warms up
        inputs = tokenizer(prompt, truncation=True, max_length=args.max_source_length + 2, return_tensors="pt")
        options = {"max_new_tokens": args.max_new_tokens, "speed_kernels": speed_kernels}
        comparisons.append(compare_decoding(model, inputs.to(model.device), args.num_runs, **options))
    comparisons = comparisons[1:]
    lengths = np.array([len(comparison.speed_tokens) for comparison in comparisons])
    plain = np.array([comparison.plain_ms_per_token for comparison in comparisons])
    speed = np.array([comparison.speed_ms_per_token for comparison in comparisons])
    passes = sum(comparison.speed_stats["num_group_passes"] for comparison in comparisons) / lengths.sum()
    flips = [list(comparison.speed_stats["flips"].values()) for comparison in comparisons]  # one prediction per token
    shares = np.average(np.array(flips), axis=0, weights=lengths).tolist()
    return {
        "prompts": len(prompts),
        "new_tokens": int(lengths.sum()),
        "tokens_equal": sum(comparison.tokens_equal for comparison in comparisons),
        "plain": {**_time(plain), "passes_per_token": float(model.config.num_repetitions)},
        "speed": {**_time(speed), "passes_per_token": round(float(passes), 4)},
        "speed_up": round(float(np.median(plain) / np.median(speed)), 3),
        "slower": int((speed > plain).sum()),
        "flips": {str(exit_): round(share, 4) for exit_, share in enumerate(shares, start=2)},
    }


def _time(ms_per_token):
    return {
        "ms_per_token": round(float(np.median(ms_per_token)), 3),
        "ms_per_token_p90": round(float(np.percentile(ms_per_token, 90)), 3),
    }


def evaluate(args, pairs: dict[str, dict[str, list[str]]], command: str) -> tuple[dict, torch.nn.Module]:
    """Everything that `results.json` holds, and the model in the first dtype."""
    scores = TextScores("translation")
    model, tokenizer = load_checkpoint(args.checkpoint, getattr(torch, args.dtypes[0]))
    results: dict = {"environment": {"command": command, **describe_environment(model.device)}}
    results |= {"texts_dtype": args.dtypes[0], "texts": {}}
    for name, columns in pairs.items():
        results["texts"][name], texts = score_texts(model, tokenizer, columns, args, scores)
        results["signatures"] = signatures(texts, columns["target"])
        print(f"{name}: {json.dumps(results['texts'][name])}", flush=True)
    results["decoding"] = {name: {} for name in pairs}
    for dtype in args.dtypes:
        timed, _ = load_checkpoint(args.checkpoint, getattr(torch, dtype))
        for speed_kernels in (False, True)[: 1 + args.speed_kernels]:
            kind = f"{dtype}, compiled" if speed_kernels else dtype
            for name, columns in pairs.items():
                found = time_prompts(timed, tokenizer, columns["source"], args, speed_kernels)
                results["decoding"][name][kind] = found
                print(f"{name}, {kind}: {json.dumps(found)}", flush=True)
    return results, model


def write_results(args, results: dict, model, example: str):
    """`results.json`, and the section "Results" of README.md; a folder without a README.md gets one."""
    folder = Path(args.checkpoint)
    (folder / "results.json").write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    readme = folder / "README.md"
    if readme.is_file():
        card = ModelCard.load(readme)
    else:
        recipe = {"exit loss weights": model.config.exit_loss_weights, "prefix-LM": model.config.prefix_lm}
        card = build_model_card(model, folder.name, "translation", example, ["not recorded"], recipe)
    with_results(card, results).save(readme)


def as_command(args, argv: list[str]) -> str:
    """The command line without folders of this machine."""
    words = [Path(word).name if word in args.test_file or Path(word).is_absolute() else word for word in argv]
    return shlex.join(["python", "examples/evaluate_checkpoint.py", *words])


def main(argv: list[str] | None = None):
    argv = sys.argv[1:] if argv is None else argv
    parser, args = parse_arguments(argv)
    logging.disable_progress_bar()
    try:
        pairs = load_test_pairs(args)
        results, model = evaluate(args, pairs, as_command(args, argv))
    except ValueError as error:
        parser.error(str(error))
    if args.limit is None:
        write_results(args, results, model, example=next(iter(pairs.values()))["source"][0])
    else:
        print(results_section(results))
    scores = {name: {"bleu": file["bleu"], "chrf": file["chrf"]} for name, file in results["texts"].items()}
    print(f"{args.checkpoint}: {json.dumps(scores)}")


if __name__ == "__main__":
    main()
