# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The README of a checkpoint, made from facts."""

import json
import re

from huggingface_hub import ModelCard, ModelCardData


CARD = """---
{metadata}
---

# {name}

A {layers} decoder of {parameters:.1f}M parameters: {unique} unique layers run {repetitions} times, with an exit after
each repetition. `generate(speed=True)` decodes speculatively through the exits (SPEED, [arXiv 2310.12072](https://arxiv.org/abs/2310.12072))
and returns the tokens that plain decoding returns, sooner.

## Usage

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer({example}, return_tensors="pt")
output = model.generate(**inputs, speed=True, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```
"""


def table(header: tuple[str, ...], rows: list[tuple]) -> str:
    """A Markdown table; numbers are written with up to 4 significant digits."""
    lines = [header, ("---",) * len(header), *rows]
    cells = [[f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def build_model_card(
    model,
    name: str,
    task: str,
    example: str,
    training_data: list[str],
    recipe: dict[str, object],
    results: dict[str, dict[str, float]] | None = None,
    language: list[str] | None = None,
    license: str | None = None,
    base_model: str | None = None,
) -> ModelCard:
    """
    The model card of a checkpoint.

    Args:
        model ([`SpeedT5ForCausalLM`]): sizes are read from it.
        name (`str`): repository or folder that `from_pretrained` is to be given.
        task (`str`): the pipeline tag: `"translation"`, `"summarization"` or `"text-generation"`.
        example (`str`): the prompt in the usage snippet.
        training_data (`list[str]`): names of the data sets or files.
        recipe (`dict[str, object]`): training setting -> value.
        results (`dict[str, dict[str, float]]`, *optional*): data -> metric -> score.
        language (`list[str]`, *optional*): language codes.
        license (`str`, *optional*): a licence id of the Hub, for example `"apache-2.0"`.
        base_model (`str`, *optional*): the checkpoint that training continued from.

    Returns:
        `huggingface_hub.ModelCard`
    """
    results = results or {}
    metrics = sorted({metric for scores in results.values() for metric in scores if "loss" not in metric})
    metadata = ModelCardData(
        language=language,
        license=license,
        library_name="transformers",
        pipeline_tag=task,
        tags=["custom_code", "speed", "early-exit", "speculative-decoding"],
        metrics=metrics or None,
        base_model=base_model,
    )
    config = model.config
    text = CARD.format(
        metadata=metadata.to_yaml(),
        name=name,
        layers=f"{config.num_unique_layers}x{config.num_repetitions}",
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        unique=config.num_unique_layers,
        repetitions=config.num_repetitions,
        example=json.dumps(example, ensure_ascii=False),
    )
    text += (
        "\n## Training\n\nData: "
        + ", ".join(training_data)
        + ".\n\n"
        + table(("setting", "value"), list(recipe.items()))
    )
    if results:
        rows = [(data, metric, score) for data, scores in results.items() for metric, score in scores.items()]
        text += "\n\n## Results\n\n" + table(("data", "metric", "score"), rows)
    return ModelCard(text + "\n")


def results_section(results: dict) -> str:
    """
    The section `## Results` of a card.

    Args:
        results (`dict`): what `examples/evaluate_checkpoint.py` writes to `results.json`.

    Returns:
        `str`: Markdown.
    """
    environment, texts, decoding = results["environment"], results["texts"], results["decoding"]
    kinds = {kind for by_dtype in decoding.values() for kind in by_dtype}
    lines = [
        "## Results",
        f"Every number below comes from one run of\n\n```\n{environment['command']}\n```",
        ", ".join(f"{name} {value}" for name, value in environment.items() if name != "command") + ".",
        f"Greedy translations by `generate(speed=True)`, {results['texts_dtype']}, compared with the whole file:",
        table(
            ("data", "pairs", "sources cut", "BLEU", "chrF"),
            [(name, file["pairs"], file["cut"], file["bleu"], file["chrf"]) for name, file in texts.items()],
        ),
    ]
    groups = [
        (name, group, scores["pairs"], scores["bleu"], scores["chrf"])
        for name, file in texts.items()
        for group, scores in file["groups"].items()
    ]
    if groups:
        lines += ["By origin of the pairs:", table(("data", "origin", "pairs", "BLEU", "chrF"), groups)]
    lines += [
        "Signatures: " + ", ".join(f"{metric} `{value}`" for metric, value in results["signatures"].items()) + ".",
        "Plain and pipelined decoding of one text at a time, in turns. Time is the whole call divided by the new "
        "tokens, median over the prompts and 90th percentile; passes are uses of the unique layers, prompt included"
        + ("; compiled: with `speed_kernels=True`:" if any("compiled" in kind for kind in kinds) else ":"),
        _decoding_table(decoding),
    ]
    return "\n\n".join(lines) + "\n"


def _decoding_table(decoding):
    rows = []
    for name, by_dtype in decoding.items():
        for dtype, found in by_dtype.items():
            plain, speed = found["plain"], found["speed"]
            rows.append(
                (
                    name,
                    dtype,
                    f"{found['tokens_equal']} of {found['prompts']}",
                    f"{plain['ms_per_token']:.2f} ({plain['ms_per_token_p90']:.2f})",
                    f"{speed['ms_per_token']:.2f} ({speed['ms_per_token_p90']:.2f})",
                    f"{found['speed_up']:.2f}",
                    found["slower"],
                    f"{plain['passes_per_token']:.2f} / {speed['passes_per_token']:.2f}",
                    " / ".join(f"{share:.1%}" for share in found["flips"].values()) or "-",
                )
            )
    header = ("data", "dtype", "same tokens", "plain ms per token (p90)", "speed ms per token (p90)", "speed-up")
    return table((*header, "slower prompts", "passes per token, plain / speed", "flips at exits 2, 3, ..."), rows)


def with_results(card: ModelCard, results: dict) -> ModelCard:
    """
    A card with its section `## Results` replaced, or added at the end.

    Args:
        card (`ModelCard`): changed in place.
        results (`dict`): see [`results_section`].

    Returns:
        `ModelCard`: the same.
    """
    rest = re.sub(r"^## Results\n.*?(?=^## |\Z)", "", card.text, flags=re.DOTALL | re.MULTILINE)
    card.text = f"{rest.rstrip()}\n\n{results_section(results)}"
    card.data["metrics"] = ["bleu", "chrf"]
    return card
