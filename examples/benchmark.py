# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
Decoding speed of a cyclically shared model against its alternatives, in one run and in turns:

    python examples/benchmark.py --output_dir benchmark                      # T5-Base sizes, random weights, bfloat16
    python examples/benchmark.py --checkpoint model_cards/speed-t5-en-de-small --output_dir benchmark
    python examples/benchmark.py --profile 0 1 1 1 1 --batch_sizes 1 8 --dtypes float32 --output_dir benchmark

Without a checkpoint the weights are random, and how often early exits are right is scripted: all exits are computed,
then the token of each is replaced by that of a script, in which the prediction changes at exits 2 .. G in the
shares `--profile` (default: those of the SPEED paper). Every way of decoding the shared model follows the same
script. `stock` is `generate` as it is; `stripped` is a bare greedy loop over packed weights: this package's engine on
the unshared models, which have one exit and so nothing to guess. `compiled` adds `speed_kernels=True`, which needs a
C++ compiler; without one, `--leave_out compiled`.

Writes benchmark.json, benchmark.md and benchmark.png; prints the table, and where `speed=True` loses.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers.utils import logging

from speed_hf import SpeedT5Config, SpeedT5ForCausalLM, generation_speed
from speed_hf.cache_speed import memory_dtype
from speed_hf.kernels_speed import operations_for
from speed_hf.packed_speed import PackedWeights
from speed_hf.rows_speed import RowsInFlight
from speed_hf.timing import describe_environment, load_checkpoint


PAPER_PROFILE = [0.15, 0.02, 0.01, 0.005, 0.005]  # share of predictions that change at exits 2 .. 6
BASE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "head_dim": 64,
    "vocab_size": 32128,
    "max_position_embeddings": 4096,
}
CERTAIN = 1e4  # a logit that decides


class Script:
    """
    The token that each exit predicts after each column of each sequence: a table `(G, B, columns)`.

    Args:
        profile (`list[float]`): shares of the predictions that change at exits 2 .. G.
        num_columns (`int`): longest text.
        vocab_size (`int`): tokens are drawn from 2 on, so that none is padding or ends a text.
        num_sequences (`int`): B; predictions change at different times in different sequences.
    """

    def __init__(self, profile: list[float], num_columns: int, vocab_size: int, num_sequences: int = 1):
        draw = np.random.default_rng(0)
        tokens = draw.integers(2, vocab_size, (len(profile) + 1, num_sequences, num_columns))
        columns = np.arange(num_columns + 1)
        for exit_ in range(len(profile) - 1, -1, -1):  # the last exit is right; going back, some predictions differ
            # Spread evenly from a random start, so that short texts have their share too.
            changes = np.diff(np.floor(profile[exit_] * columns + draw.random((num_sequences, 1)))) > 0
            tokens[exit_] = np.where(changes, tokens[exit_], tokens[exit_ + 1])
        self.tokens = tokens
        self.predictions = tokens.tolist()  # which is faster for a few at a time

    def num_passes(self, prompt_length: int, num_new: int) -> int:
        """Group passes of the pipeline without overlap of the prompt: an exact count, see docs/performance.md."""
        asked = self.tokens[..., prompt_length : prompt_length + num_new - 2]  # what the prompt predicts is waited for
        changes = asked[1:] != asked[:-1]
        num_repetitions = len(self.tokens)
        last = np.where(changes.any(0), num_repetitions - changes[::-1].argmax(0), 1)
        return num_repetitions + int(last.sum(-1).max()) + (num_repetitions if num_new > 1 else 0)


class ScriptedModel(SpeedT5ForCausalLM):
    """A model whose exits are computed and then overruled."""

    script: Script | None = None

    def forward(self, *args, cache=None, **kwargs):
        output = super().forward(*args, cache=cache, **kwargs)
        if self.script is not None:
            num_asked = output.logits.shape[1]
            exit_ = self.config.num_hidden_layers // self.config.num_unique_layers
            columns = np.arange(output.cache.get_seq_length() - num_asked, output.cache.get_seq_length())
            columns = columns.clip(max=self.script.tokens.shape[-1] - 1)  # drafts go beyond the longest text
            tokens = torch.from_numpy(self.script.tokens[exit_ - 1][:, columns])
            output.logits.scatter_(2, tokens[..., None], CERTAIN)
        return output


class ScriptedChoice(generation_speed._TokenChoice):
    """The same for the pipeline, whose passes mix exits. Notes when each pass is done."""

    script: Script | None = None
    clock: list[float] = []

    def __call__(self, sequences, columns, states):
        tokens = super().__call__(sequences, columns, states)
        self.clock.append(time.perf_counter())
        if self.script is None:
            return tokens
        rows = zip(sequences.tolist(), columns.tolist())
        predicted = [self.script.predictions[self.window.done.item(*row) - 1][row[0]][row[1]] for row in rows]
        return np.array(predicted)


class PaddedRows(RowsInFlight):
    """The same engine with as many rows for every sequence of a repetition as for its longest one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.compact, self.multiply, self.argmax = self.multiply, self.multiply_padded, self.argmax_padded

    def place(self, sequences, columns, repetitions, meets_prefix=False):
        super().place(sequences, columns, repetitions, meets_prefix)
        num_cells = self.cache.num_repetitions * self.num_sequences
        counts = np.bincount(repetitions * self.num_sequences + sequences, minlength=num_cells)
        self.num_padded = int(counts.reshape(-1, self.num_sequences).max(1).sum()) * self.num_sequences

    def run_layer(self, layer, layer_idx, states, eps):
        return None  # part by part, with padded products

    def multiply_padded(self, states, *linears):
        return tuple(output[: len(states)] for output in self.compact(self._pad(states), *linears))

    def argmax_padded(self, states, linear):
        return self.compact.argmax(self._pad(states), linear)[: len(states)]

    def _pad(self, states):
        return torch.nn.functional.pad(states, (0, 0, 0, max(self.num_padded - len(states), 0)))


def build_model(num_unique_layers: int, num_repetitions: int, dtype: torch.dtype) -> ScriptedModel:
    """Random weights of T5-Base sizes."""
    torch.manual_seed(0)
    config = SpeedT5Config(num_unique_layers=num_unique_layers, num_repetitions=num_repetitions, **BASE)
    model: Any = ScriptedModel(config)
    model = model.to(dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def candidates(args, dtype: torch.dtype) -> dict:
    """Name -> (model, options of `generate`)."""
    found: dict[str, tuple[Any, dict[str, Any]]] = {}
    if args.checkpoint:
        model, _ = load_checkpoint(args.checkpoint, dtype)
        model.generation_config.eos_token_id = None
        name = f"{model.config.num_unique_layers}x{model.config.num_repetitions}"
    else:
        model, name = build_model(args.num_unique_layers, args.num_repetitions, dtype), args.shape
        deep = build_model(args.num_unique_layers * args.num_repetitions, 1, dtype)
        shallow = build_model(args.num_unique_layers, 1, dtype)
        for unshared in (deep, shallow):
            layers = unshared.config.num_unique_layers
            found[f"{layers} layers, stock"] = unshared, {}
            found[f"{layers} layers, stripped"] = unshared, {"speed": True}
            found[f"{layers} layers, stripped compiled"] = unshared, {"speed": True, "speed_kernels": True}
    found[f"{name}, stock"] = model, {}
    found[f"{name}, speed"] = model, {"speed": True}
    found[f"{name}, speed compiled"] = model, {"speed": True, "speed_kernels": True}
    found[f"{name}, speed padded"] = model, {"speed": True}
    found[f"{name}, speed padded compiled"] = model, {"speed": True, "speed_kernels": True}
    found[f"{name}, early exit"] = model, {"assistant_early_exit": model.config.num_unique_layers}
    found[f"{name}, prompt lookup"] = model, {"prompt_lookup_num_tokens": 4}
    return {name: found[name] for name in found if not name.endswith(tuple(args.leave_out))}


def decode(model, prompt: torch.Tensor, options: dict, num_new: int, script: Script | None, rows_class=RowsInFlight):
    """One timed run: seconds, and the statistics of the pipeline if it was one."""
    generation_speed.RowsInFlight = rows_class
    scripted = script if model.config.num_repetitions > 1 else None
    if isinstance(model, ScriptedModel):
        model.script = scripted
    ScriptedChoice.script, ScriptedChoice.clock = scripted, []
    start = time.perf_counter()
    output = model.generate(prompt, max_new_tokens=num_new, do_sample=False, return_dict_in_generate=True, **options)
    seconds = time.perf_counter() - start
    assert output.sequences.shape[1] == prompt.shape[1] + num_new
    return seconds, output.get("speed_stats")


def bandwidth() -> float:
    """Bytes per second at which this process reads memory."""
    memory = torch.ones(64 * 2**20)
    return memory.nbytes / min(time_calls(memory.sum, 5))


def parts_of_a_pass(model, batch_size: int, num_keys: int, operations) -> Callable[[], None]:
    """The matrix products and attention calls of one full pass, alone, to be timed."""
    config, dtype, multiply = model.config, model.dtype, PackedWeights.of(model, operations)
    num_rows, num_heads, head_dim = config.num_repetitions * batch_size, config.num_attention_heads, config.head_dim
    num_asked = len(generation_speed._plan(model, batch_size, operations)[0]) * batch_size
    states = torch.randn(num_rows, config.hidden_size, dtype=dtype)
    wide = torch.randn(num_rows, config.intermediate_size, dtype=dtype)
    index = [torch.arange(config.num_repetitions).repeat_interleave(batch_size)]
    index += [torch.arange(batch_size).repeat(config.num_repetitions), torch.full((num_rows,), num_keys - 1)]
    attention_dtype = memory_dtype(dtype, model.device)
    kept_dtype = attention_dtype if operations.attend is None else dtype
    memories = [  # every layer meets keys and values of its own
        torch.randn(*(2, config.num_repetitions, batch_size, num_heads, num_keys, head_dim), dtype=kept_dtype)
        for _ in model.model.layers
    ]
    line = torch.zeros(num_heads, 2 * num_keys - 1)
    mask = torch.zeros(num_rows, num_heads, 1, num_keys, dtype=attention_dtype)

    def attend(query, key, value, memory):
        if operations.attend is not None:
            return operations.attend(query, key, value, memory, *index, line, None)
        keys, values = memory.flatten(1, 2).unbind()
        query = query[:, :, None].to(attention_dtype)
        return torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, scale=1.0).to(dtype)

    @torch.no_grad()
    def one_pass():
        for layer, memory in zip(model.model.layers, memories):
            attention = layer.self_attn
            rows = multiply(states, attention.q, attention.k, attention.v)
            attended = attend(*(row.view(num_rows, num_heads, head_dim) for row in rows), memory)
            multiply(attended.view(num_rows, -1), attention.o)
            multiply(states, layer.mlp.wi_0, layer.mlp.wi_1)
            multiply(wide, layer.mlp.wo)
        multiply.argmax(states[:num_asked], model.lm_head)

    return one_pass


def time_calls(function: Callable[[], Any], num_calls: int = 20) -> list[float]:
    """Seconds of each call after a first one."""
    function()
    times = []
    for _ in range(num_calls):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return times


def measure(args, dtype: torch.dtype, batch_size: int, models: dict) -> dict:
    """All candidates in turns on the same prompt."""
    shared = models[next(name for name in models if name.endswith("speed"))][0]
    vocab_size = shared.config.vocab_size
    num_columns = args.prompt_tokens + args.new_tokens
    script = None if args.checkpoint else Script(args.profile, num_columns, vocab_size, batch_size)
    prompt = torch.from_numpy(np.random.default_rng(1).integers(2, vocab_size, (batch_size, args.prompt_tokens)))
    not_here = ("early exit", "lookup") if batch_size > 1 else ("padded", "padded compiled")
    runs: dict[str, list[float]] = {name: [] for name in models if not name.endswith(not_here)}
    engines = [name for name in runs if name.endswith(("speed", "speed compiled"))]
    pass_times: dict[str, list[float]] = {name: [] for name in engines}
    parts_times: dict[str, list[float]] = {name: [] for name in engines}
    parts = {}
    for name in engines:
        operations = operations_for(shared.device, dtype, name.endswith("compiled"))
        parts[name] = parts_of_a_pass(shared, batch_size, args.prompt_tokens + args.new_tokens // 2, operations)
    stats = {}
    for repeat in range(args.num_runs + 1):  # the first warms up
        for name in runs:
            model, options = models[name]
            rows_class = PaddedRows if "padded" in name else RowsInFlight
            seconds, stats[name] = decode(model, prompt, options, args.new_tokens, script, rows_class)
            runs[name] += [seconds] if repeat else []
            if name in engines and repeat:
                pass_times[name] += np.diff(ScriptedChoice.clock).tolist()
                parts_times[name] += time_calls(parts[name])  # at once, since neighbours make memory slow and fast
    if script is not None:
        _check_passes(shared, prompt, args.new_tokens, script)
    speed = stats[engines[0]]
    num_tokens = batch_size * args.new_tokens
    found = {
        name: {
            "ms_per_token": 1e3 * median(times) / num_tokens,
            "ms_per_token_p90": 1e3 * float(np.percentile(times, 90)) / num_tokens,
        }
        for name, times in runs.items()
    }
    passes = {
        name: {"ms": 1e3 * median(pass_times[name]), "products_and_attention_ms": 1e3 * median(parts_times[name])}
        for name in engines
    }
    num_bytes = sum(p.nbytes for p in (*shared.model.layers.parameters(), shared.lm_head.weight))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "decoding": found,
        "passes_per_token": speed["num_group_passes"] / args.new_tokens,
        "rows_per_pass": speed["rows_per_pass"],
        "flips": speed["flips"],
        "passes": passes,
        "weights_bound_ms": 1e3 * num_bytes / bandwidth(),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def _check_passes(model, prompt, num_new, script):
    """The scripted pipeline needs exactly the passes that its script implies."""
    _, stats = decode(model, prompt, {"speed": True, "speed_prompt_overlap": False}, num_new, script)
    expected = script.num_passes(prompt.shape[1], num_new)
    if stats["num_group_passes"] != expected:
        raise RuntimeError(f"the pipeline took {stats['num_group_passes']} passes, its script implies {expected}")


def table(results: list[dict]) -> str:
    """Markdown: one block per precision and batch size, times against those of the pipeline."""
    lines = []
    for result in results:
        decoding, engines = result["decoding"], list(result["passes"])
        short = [name.rpartition(", ")[2] for name in engines]
        lines += [
            f"\n{result['dtype']}, batch {result['batch_size']}\n",
            f"| decoding | ms per token | p90 | {' | '.join(f'/ {name}' for name in short)} |",
            "| --- " * (3 + len(engines)) + "|",
        ]
        for name, entry in decoding.items():
            ratios = [f"{entry['ms_per_token'] / decoding[engine]['ms_per_token']:.2f}" for engine in engines]
            times = f"{entry['ms_per_token']:.2f} | {entry['ms_per_token_p90']:.2f}"
            lines.append(f"| {name} | {times} | {' | '.join(ratios)} |")
        flips = " / ".join(f"{100 * share:.1f}" for share in result["flips"].values())
        lines.append(
            f"\n{result['passes_per_token']:.2f} passes per token, {result['rows_per_pass']:.1f} rows per pass, flips "
            f"{flips} %; reading the weights takes {result['weights_bound_ms']:.2f} ms; peak memory "
            f"{result['peak_memory_mb']:.0f} MB"
        )
        for name, engine in zip(short, engines):
            taken, alone = result["passes"][engine].values()
            losing = [
                other for other in decoding if decoding[other]["ms_per_token"] < decoding[engine]["ms_per_token"]
            ]
            lines.append(
                f"\n{name}: a pass takes {taken:.2f} ms (median), its products and attention alone {alone:.2f} ms; "
                f"faster than it: {', '.join(losing) or 'none of these'}."
            )
    return "\n".join(lines)


def picture(results: list[dict], path: Path):
    """Bars of ms per token, one panel per precision and batch size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 0.6 + 2.4 * len(results)), layout="constrained")
    for axis, result in zip(np.atleast_1d(figure.subplots(len(results), 1)), results, strict=True):
        names = list(result["decoding"])[::-1]
        axis.barh(names, [result["decoding"][name]["ms_per_token"] for name in names], color="#4878a8")
        axis.set_title(f"{result['dtype']}, batch {result['batch_size']}", fontsize=9)
        axis.set_xlabel("ms per token", fontsize=8)
        axis.tick_params(labelsize=8)
    figure.savefig(path, dpi=150)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="Folder of a checkpoint; left out: random weights and a script.")
    parser.add_argument("--shape", default="2x6", help="Unique layers x repetitions of the random model.")
    parser.add_argument("--profile", type=float, nargs="+", default=PAPER_PROFILE, help="Flips at exits 2 .. G.")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[1])
    parser.add_argument("--prompt_tokens", type=int, default=60)
    parser.add_argument("--new_tokens", type=int, default=256)
    parser.add_argument("--num_runs", type=int, default=3)
    parser.add_argument("--leave_out", nargs="+", default=[], help="Ends of names, for example: early exit.")
    parser.add_argument("--output_dir", required=True, help="Folder for json, table and picture.")
    args = parser.parse_args(argv)
    args.num_unique_layers, args.num_repetitions = map(int, args.shape.split("x"))
    if not args.checkpoint and len(args.profile) != args.num_repetitions - 1:
        parser.error(
            f"`profile` must have {args.num_repetitions - 1} numbers for {args.shape}, one per exit from 2 on."
        )
    return args


def main(argv: list[str] | None = None):
    args = parse_arguments(argv)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generation_speed._TokenChoice = ScriptedChoice
    folder = Path(args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for dtype in args.dtypes:
        models = candidates(args, getattr(torch, dtype))
        results += [measure(args, getattr(torch, dtype), size, models) for size in args.batch_sizes]
    facts = describe_environment(torch.device("cpu"))
    options = {name: value for name, value in vars(args).items() if name != "output_dir"}
    text = table(results) + "\n\n" + ", ".join(f"{name} {value}" for name, value in facts.items()) + "\n"
    (folder / "benchmark.json").write_text(json.dumps({"options": options, "environment": facts, "results": results}))
    (folder / "benchmark.md").write_text(text, encoding="utf-8")
    picture(results, folder / "benchmark.png")
    print(text)


if __name__ == "__main__":
    sys.exit(main())
