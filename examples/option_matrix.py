# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
What `generate(speed=True)` does with every option of `generate`, tried out:

    python examples/option_matrix.py --checkpoint model_cards/speed-t5-en-de-small

Each option is used with plain and with pipelined decoding, on one prompt, on four left-padded prompts, and with
sampling on those four. A cell says `equal` (the same tokens, and the same scores where they are returned), `refused`
(an error in one sentence, printed below the table), `plain refuses` (the option cannot be used like that at all) or
`DIFFERENT`. Runs in float64, where equal means equal. The last line of output counts the cells; the exit status is 1
if one is different.
"""

import argparse
import sys
from collections import Counter

import torch
from transformers import LogitsProcessor, StoppingCriteria, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from speed_hf.timing import load_checkpoint


TEXTS = (
    "Save the file.",
    "The window could not be opened, because the display is not available.",
    "Do you want to replace it?",
    "Prints the names of all packages that depend on the given one, one per line.",
)
COLUMNS = ("batch 1", "batch 4 padded", "sampling")


class FavoursLastToken(LogitsProcessor):
    """A processor of the user: its scores depend on the whole prefix and on the row."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        rows = torch.arange(len(scores), device=scores.device)
        scores[rows, (input_ids.sum(1) + rows) % scores.shape[1]] += 2.0
        scores[rows, input_ids[:, -1]] -= 1.0
        return scores


class StopsAtMultiple(StoppingCriteria):
    """A criterion of the user: stops a sequence at a token that 7 divides."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 7 == 0


class Collects(BaseStreamer):
    def __init__(self):
        self.steps = []

    def put(self, value):
        self.steps.append(value)

    def end(self):
        self.steps.append(None)


def options(model, tokenizer) -> dict[str, dict]:
    """Name -> arguments of `generate`. A function among the values is called for each use."""
    eos = model.generation_config.eos_token_id
    return {
        "(none)": {},
        "temperature": {"temperature": 0.7},
        "top_k": {"top_k": 5},
        "top_p": {"top_p": 0.8},
        "top_h": {"top_h": 0.4},
        "min_p": {"min_p": 0.1},
        "typical_p": {"typical_p": 0.7},
        "epsilon_cutoff": {"epsilon_cutoff": 0.01},
        "eta_cutoff": {"eta_cutoff": 0.01},
        "num_return_sequences": {"num_return_sequences": 3},
        "repetition_penalty": {"repetition_penalty": 1.4},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.4},
        "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
        "bad_words_ids": {"bad_words_ids": [[5], [9, 10]]},
        "sequence_bias": {"sequence_bias": [[[5], 4.0], [[9, 10], -9.0]]},
        "suppress_tokens": {"suppress_tokens": [3, 4, 5, 6]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [3, 4, 5, 6]},
        "forced_bos_token_id": {"forced_bos_token_id": 11},
        "forced_eos_token_id": {"forced_eos_token_id": eos},
        "min_length": {"min_length": 30},
        "min_new_tokens": {"min_new_tokens": 9},
        "max_length": {"max_length": 32, "max_new_tokens": None},
        "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.2)},
        "prefix_allowed_tokens_fn": {
            "prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) * 7 + row + k) % 50 + 1 for k in range(9)]
        },
        "renormalize_logits": {"renormalize_logits": True},
        "remove_invalid_values": {"remove_invalid_values": True},
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
        "watermarking_config (SynthID)": {
            "watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7])
        },
        "guidance_scale": {"guidance_scale": 1.5},
        "logits_processor": {"logits_processor": lambda: [FavoursLastToken()]},
        "stopping_criteria": {"stopping_criteria": lambda: [StopsAtMultiple()]},
        "stop_strings": {"stop_strings": ["e", " der"], "tokenizer": tokenizer},
        "max_time": {"max_time": 600.0},
        "eos_token_id (list)": {"eos_token_id": [eos, 5, 7]},
        "eos_token_id (none)": {"eos_token_id": None},
        "pad_token_id (eos)": {"pad_token_id": eos},
        "output_scores": {"output_scores": True},
        "output_logits": {"output_logits": True},
        "output_hidden_states": {"output_hidden_states": True},
        "output_attentions": {"output_attentions": True},
        "inputs_embeds": {"inputs_embeds": None},
        "prefill_chunk_size": {"prefill_chunk_size": 3},
        "cache (of speed=True)": {"cache": True},
        "cache (of speed=False)": {"cache": False},
        "streamer": {"streamer": Collects},
        "use_cache (false)": {"use_cache": False},
        "cache_implementation": {"cache_implementation": "static"},
        "num_beams": {"num_beams": 2},
        "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
        "assistant_model": {"assistant_model": model},
        "assistant_early_exit": {"assistant_early_exit": model.config.num_unique_layers},
    }


def decode(model, inputs: dict, given: dict, speed: bool):
    """
    One `generate` call under a fixed seed.

    Returns:
        `tuple`: the output and the streamer, `None` without one.
    """
    given = {name: value() if callable(value) and _is_maker(name) else value for name, value in given.items()}
    if "inputs_embeds" in given:
        embeds = model.get_input_embeddings()(inputs["input_ids"])
        inputs, given = {"attention_mask": inputs["attention_mask"]}, {**given, "inputs_embeds": embeds}
    if "cache" in given:
        first = model.generate(
            **inputs, max_new_tokens=4, eos_token_id=None, speed=given["cache"], return_dict_in_generate=True
        )
        more = torch.full((len(first.sequences), 2), 9, device=first.sequences.device)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 6), value=1)
        inputs = {"input_ids": torch.cat([first.sequences, more], dim=1), "attention_mask": mask}
        # Plain decoding starts anew: the text must not depend on the cache.
        given = {**given, "cache": first.cache} if speed else {k: v for k, v in given.items() if k != "cache"}
        if model.config.prefix_lm:
            given["prefix_mask"] = torch.ones_like(mask[:, :-6], dtype=torch.bool)
    torch.manual_seed(0)
    return model.generate(**inputs, speed=speed, return_dict_in_generate=True, **given), given.get("streamer")


def _is_maker(name):
    return name in ("logits_processor", "stopping_criteria", "streamer")


def compare(model, inputs: dict, given: dict) -> tuple[str, str]:
    """What a cell says, and the error behind a refusal (empty for none)."""
    try:
        plain, plain_streamer = decode(model, inputs, given, speed=False)
    except (ValueError, TypeError, NotImplementedError) as error:
        return "plain refuses", str(error)
    try:
        fast, fast_streamer = decode(model, inputs, given, speed=True)
    except (ValueError, TypeError, NotImplementedError) as error:
        return "refused", str(error)
    same = torch.equal(plain.sequences, fast.sequences)
    for name in ("scores", "logits"):
        if same and plain.get(name) is not None:
            # Behind the end of a sequence plain decoding scores its padding, and the pipeline computes nothing.
            lengths = torch.tensor(fast.speed_stats["num_new_tokens"])
            for step, (a, b) in enumerate(zip(plain[name], fast[name], strict=True)):
                live = lengths > step
                same &= torch.allclose(a[live], b[live], rtol=1e-4, atol=1e-4)
    if same and plain_streamer is not None:
        steps = zip(plain_streamer.steps[:-1], fast_streamer.steps[:-1], strict=True)
        same = all(torch.equal(a, b) for a, b in steps)
    return "equal" if same else "DIFFERENT", ""


def matrix(model, tokenizer, max_new_tokens: int, names: list[str] | None = None):
    """
    Try the options.

    Args:
        model ([`SpeedT5ForCausalLM`]): in eval mode, in float64.
        tokenizer (`PreTrainedTokenizerBase`): padding on the left.
        max_new_tokens (`int`): tokens of each text.
        names (`list[str]`, *optional*): only these options.

    Yields:
        `tuple[str, list[str], str]`: option, what its cells say, and why speed decoding refused it (empty if not).
    """
    one = tokenizer(TEXTS[1], return_tensors="pt").to(model.device)
    four = tokenizer(list(TEXTS), padding=True, return_tensors="pt").to(model.device)
    for name, given in options(model, tokenizer).items():
        if names is None or name in names:
            given = {"max_new_tokens": max_new_tokens, **given}
            results = [
                compare(model, one, {"do_sample": False, **given}),
                compare(model, four, {"do_sample": False, **given}),
                compare(model, four, {"do_sample": True, **given}),
            ]
            reason = next((message for cell, message in results if cell == "refused"), "")
            yield name, [cell for cell, _ in results], reason


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="model_cards/speed-t5-en-de-small", help="Folder of a checkpoint.")
    parser.add_argument("--max_new_tokens", type=int, default=24, help="Tokens of each text.")
    args = parser.parse_args(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, tokenizer = load_checkpoint(args.checkpoint, torch.float64)
    print(f"{'option':<34}" + "".join(f"{column:<16}" for column in COLUMNS))
    counts: Counter[str] = Counter()
    reasons: list[str] = []
    for name, cells, reason in matrix(model, tokenizer, args.max_new_tokens):
        print(f"{name:<34}" + "".join(f"{cell:<16}" for cell in cells), flush=True)
        counts.update(cells)
        reasons += [f"{name}: {reason}"] if reason else []
    print("\nRefused:\n" + "\n".join(reasons) + "\n")
    print(", ".join(f"{count} {cell}" for cell, count in counts.most_common()))
    return int("DIFFERENT" in counts)


if __name__ == "__main__":
    sys.exit(main())
