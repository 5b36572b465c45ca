# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The README of a checkpoint, made from facts."""

from huggingface_hub import ModelCard, ModelCardData

CARD = """---
{metadata}
---

# {name}

A {layers} decoder of {parameters:.1f}M parameters: {unique} unique layers run {repetitions} times, with an exit after every
repetition. `generate(speed=True)` decodes speculatively through the exits (SPEED, [arXiv 2310.12072](https://arxiv.org/abs/2310.12072))
and returns the tokens that plain decoding returns, sooner.

## Usage

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{name}")
inputs = tokenizer({example!r}, return_tensors="pt")
output = model.generate(**inputs, speed=True, max_new_tokens=128)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
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
        example=example,
    )
    text += "\n## Training\n\nData: " + ", ".join(training_data) + ".\n\n" + table(("setting", "value"), list(recipe.items()))
    if results:
        rows = [(data, metric, score) for data, scores in results.items() for metric, score in scores.items()]
        text += "\n\n## Results\n\n" + table(("data", "metric", "score"), rows)
    return ModelCard(text + "\n")
