# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
Watch a checkpoint translate, and compare plain with pipelined decoding of the same text:

    python examples/demo.py
    python examples/demo.py --checkpoint model_cards/speed-t5-en-de-small --text "Please close the window." \
        --max_new_tokens 100 --output demo_pipeline.png

The translation appears as `generate(speed=True)` commits its tokens. Then both ways of decoding run in turns, and a
table says whether they wrote the same tokens and how long each took. The picture shows what every pass worked on. The
last line of output names the picture.
"""

import argparse
import sys
import time

import torch
from transformers import TextStreamer
from transformers.utils import logging

from speed_hf.figures import pipeline_figure
from speed_hf.timing import Comparison, compare_decoding, cpu_name, load_checkpoint, timed_generate


TEXT = (
    "The program keeps a copy of every file that you change. "
    "If something goes wrong, you can restore an older version from the menu. "
    "Please save your work before you close the window."
)
SECONDS_OF_RUNS = 8  # at most about this long are plain and pipelined decoding compared
MOST_RUNS = 15  # of either


def parse_arguments(argv: list[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="model_cards/speed-t5-en-de-small", help="Folder of a checkpoint.")
    parser.add_argument("--text", default=TEXT, help="What to translate.")
    parser.add_argument("--max_new_tokens", type=int, default=128, help="Longest translation, in tokens.")
    parser.add_argument("--speed_kernels", action="store_true", help="Compile the small operations; 15 s at first.")
    parser.add_argument("--output", default="demo_pipeline.png", help="The picture to write.")
    return parser, parser.parse_args(argv)


def write_live(model, tokenizer, inputs, max_new_tokens: int):
    """Print the translation token by token, as the pipeline commits it."""
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, speed=True, streamer=streamer)


def compare(model, inputs, max_new_tokens: int) -> tuple[Comparison, int]:
    """Plain and pipelined decoding in turns, and how often: as often as fits into `SECONDS_OF_RUNS`."""
    start = time.perf_counter()
    compare_decoding(model, inputs, 1, max_new_tokens=max_new_tokens)  # warm-up
    num_runs = max(1, min(MOST_RUNS, int(SECONDS_OF_RUNS / (time.perf_counter() - start))))
    return compare_decoding(model, inputs, num_runs, max_new_tokens=max_new_tokens), num_runs


def table(comparison: Comparison, num_repetitions: int) -> str:
    """What the comparison found, one line per fact."""
    rows = [
        ("", "plain", "speed"),
        ("new tokens", len(comparison.plain_tokens), len(comparison.speed_tokens)),
        ("group passes per token", f"{num_repetitions:.2f}", f"{comparison.passes_per_token:.2f}"),
        ("ms per token", f"{comparison.plain_ms_per_token:.2f}", f"{comparison.speed_ms_per_token:.2f}"),
        ("speed-up", "1.00", f"{comparison.speed_up:.2f}"),
        ("tokens equal", "", "yes" if comparison.tokens_equal else "no"),
    ]
    return "\n".join(f"  {name:<24}{plain:>9}{fast:>9}" for name, plain, fast in rows)


def main(argv: list[str] | None = None):
    parser, args = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, tokenizer = load_checkpoint(args.checkpoint)
    except ValueError as error:
        parser.error(str(error))
    model.generation_config.speed_kernels = args.speed_kernels
    inputs = tokenizer(args.text, return_tensors="pt").to(model.device)
    config = model.config
    name = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else cpu_name()
    print(f"{args.checkpoint}: {config.num_unique_layers} unique layers, run {config.num_repetitions} times")
    print(f"{name}, {torch.get_num_threads()} threads, {str(model.dtype).removeprefix('torch.')}\n\n{args.text}\n")

    write_live(model, tokenizer, inputs, args.max_new_tokens)

    comparison, num_runs = compare(model, inputs, args.max_new_tokens)
    print(f"\nMedian of {num_runs} runs each, in turns:\n\n{table(comparison, config.num_repetitions)}\n")
    flips = [f"{share:.1%} at exit {exit_}" for exit_, share in comparison.speed_stats["flips"].items()]
    print(f"Predictions that changed: {', '.join(flips) or 'none, there is one exit'}\n")

    output, _ = timed_generate(model, inputs, max_new_tokens=args.max_new_tokens, speed=True, speed_trace=True)
    texts = tokenizer.convert_ids_to_tokens(comparison.speed_tokens)
    pipeline_figure(
        output.speed_stats["trace"], inputs["input_ids"].shape[1], config.num_repetitions, texts, args.output
    )
    print(f"The pipeline, pass by pass: {args.output}")


if __name__ == "__main__":
    main()
