# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
How often `generate(speed=True)` writes exactly what plain decoding writes, in each precision:

    python examples/numerics.py --checkpoint model_cards/speed-t5-en-de-small \
        --test_file sentences.test.jsonl.gz --source_column en --num_prompts 500 --max_new_tokens 256

Both decode greedily. Where a text differs, the margin is the distance of the two best logits of plain decoding at the
first different token: rounding can only decide where it is small. Prints a Markdown table, as in docs/numerics.md.
"""

import argparse
import sys
from statistics import median

import torch
from transformers.utils import logging

from speed_hf.data import evenly_spread, load_pairs
from speed_hf.timing import describe_environment, load_checkpoint


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="model_cards/speed-t5-en-de-small", help="Folder of a checkpoint.")
    parser.add_argument("--test_file", nargs="+", required=True, help="JSON-lines, CSV or Parquet files; .gz is fine.")
    parser.add_argument("--source_column", default="source", help="Column of the prompts.")
    parser.add_argument("--num_prompts", type=int, default=500, help="Prompts, evenly spread over the files.")
    parser.add_argument("--max_new_tokens", type=int, default=256, help="Longest text.")
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--speed_kernels", action="store_true", help="Decode with compiled operations.")
    return parser.parse_args(argv)


def first_difference(plain, speed, row: int, prompt_length: int) -> tuple[int, float] | None:
    """
    Args:
        plain, speed (`GenerateDecoderOnlyOutput`): with the logits of plain decoding.
        row (`int`): of the batch.
        prompt_length (`int`): columns before the first new token.

    Returns:
        `tuple[int, float]`: number of the first new token that differs and the margin there, or `None`.
    """
    length = min(plain.sequences.shape[1], speed.sequences.shape[1])
    different = (plain.sequences[row, :length] != speed.sequences[row, :length]).nonzero()
    if not len(different):
        return None  # a longer text of the two goes on with padding only
    step = int(different[0]) - prompt_length
    best = plain.logits[step][row].topk(2).values
    return step, float(best[0] - best[1])


@torch.no_grad()
def compare(model, tokenizer, prompts: list[str], batch_size: int, max_new_tokens: int) -> dict:
    """Decode all prompts both ways: number of texts and tokens, and the margins where texts differ."""
    margins, num_tokens = [], 0
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    for start in range(0, len(prompts), batch_size):
        inputs = tokenizer(prompts[start : start + batch_size], padding=True, return_tensors="pt").to(model.device)
        plain = model.generate(**inputs, output_logits=True, **options)
        speed = model.generate(**inputs, speed=True, **options)
        num_tokens += sum(speed.speed_stats["num_new_tokens"])
        for row in range(len(plain.sequences)):
            found = first_difference(plain, speed, row, inputs["input_ids"].shape[1])
            margins += [] if found is None else [found[1]]
    return {"texts": len(prompts), "tokens": num_tokens, "margins": margins}


def main(argv: list[str] | None = None):
    args = parse_arguments(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prompts = load_pairs({"source": args.source_column}, args.test_file)["source"][:]
    prompts = [prompts[index] for index in evenly_spread(len(prompts), args.num_prompts)]
    print("| dtype | batch | texts | tokens | identical | largest margin | median margin |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for dtype in args.dtypes:
        model, tokenizer = load_checkpoint(args.checkpoint, getattr(torch, dtype))
        model.generation_config.speed_kernels = args.speed_kernels
        for batch_size in args.batch_sizes:
            found = compare(model, tokenizer, prompts, batch_size, args.max_new_tokens)
            margins, texts = found["margins"], found["texts"]
            cells = [dtype, batch_size, texts, found["tokens"], f"{100 * (1 - len(margins) / texts):.1f} %"]
            cells += [f"{max(margins):.1e}", f"{median(margins):.1e}"] if margins else ["-", "-"]
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    facts = describe_environment(model.device)
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))


if __name__ == "__main__":
    sys.exit(main())
