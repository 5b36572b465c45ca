# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Plain against pipelined decoding of a checkpoint, by the clock: what the demo and the evaluation share."""

import platform
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


@dataclass
class Comparison:
    """
    One prompt, decoded plainly and with `speed=True` in turns.

    Args:
        plain_tokens, speed_tokens (`list[int]`): new tokens of either, the end-of-sequence token included.
        speed_stats (`dict`): of the pipelined runs, see [`SpeedGenerateOutput`].
        plain_seconds, speed_seconds (`list[float]`): wall time of each run, prompt included.
    """

    plain_tokens: list[int]
    speed_tokens: list[int]
    speed_stats: dict
    plain_seconds: list[float] = field(default_factory=list)
    speed_seconds: list[float] = field(default_factory=list)

    @property
    def tokens_equal(self) -> bool:
        """Whether both wrote the same tokens."""
        return self.plain_tokens == self.speed_tokens

    @property
    def plain_ms_per_token(self) -> float:
        """Median over the runs of plain decoding, milliseconds per new token."""
        return 1000 * median(self.plain_seconds) / len(self.plain_tokens)

    @property
    def speed_ms_per_token(self) -> float:
        """Median over the runs of pipelined decoding, milliseconds per new token."""
        return 1000 * median(self.speed_seconds) / len(self.speed_tokens)

    @property
    def speed_up(self) -> float:
        """How many times less time a token takes in the pipeline."""
        return self.plain_ms_per_token / self.speed_ms_per_token

    @property
    def passes_per_token(self) -> float:
        """Group passes per new token in the pipeline, prompt included."""
        return self.speed_stats["num_group_passes"] / len(self.speed_tokens)


def timed_generate(model, inputs, **options):
    """
    One greedy `generate` and its wall time.

    Args:
        model ([`SpeedT5ForCausalLM`]): in eval mode.
        inputs (`dict[str, torch.Tensor]`): tokenized prompts, on the model's device.
        options: further arguments of `generate`.

    Returns:
        `tuple`: the output with `return_dict_in_generate=True`, and seconds (`float`).
    """
    _wait_for_device(model.device)
    start = time.perf_counter()
    output = model.generate(**inputs, do_sample=False, return_dict_in_generate=True, **options)
    _wait_for_device(model.device)
    return output, time.perf_counter() - start


def _wait_for_device(device):
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def compare_decoding(model, inputs, num_runs: int, **options) -> Comparison:
    """
    Decode one prompt plainly and with `speed=True`, in turns, so that a busy machine slows both alike.

    Args:
        model ([`SpeedT5ForCausalLM`]): in eval mode and warm: the first call of a process is slow.
        inputs (`dict[str, torch.Tensor]`): one tokenized prompt, on the model's device.
        num_runs (`int`): runs of either; which of the two goes first changes every time.
        options: further arguments of `generate`, for example `max_new_tokens`.

    Returns:
        [`Comparison`]
    """
    outputs: dict[bool, Any] = {}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for run in range(num_runs):
        for speed in (run % 2 == 1, run % 2 == 0):
            outputs[speed], elapsed = timed_generate(model, inputs, speed=speed, **options)
            seconds[speed].append(elapsed)
    num_prompt_tokens = inputs["input_ids"].shape[1]
    plain, fast = (outputs[speed].sequences[0, num_prompt_tokens:].tolist() for speed in (False, True))
    return Comparison(plain, fast, outputs[True].speed_stats, seconds[False], seconds[True])


def describe_environment(device: torch.device) -> dict[str, str | int]:
    """What a time depends on besides the model: name -> value, in words fit for a report."""
    facts: dict[str, str | int] = {"CPU": cpu_name(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(device)
    return facts | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_checkpoint(folder: str | Path, dtype: torch.dtype = torch.float32):
    """
    The model, in eval mode, and the tokenizer of a checkpoint folder, through the Auto classes.

    Args:
        folder (`str` or `Path`): as `save_pretrained` writes it.
        dtype (`torch.dtype`): of the weights in memory.

    Returns:
        `tuple`: model and tokenizer, on the GPU where there is one.

    Raises:
        ValueError: for a folder that is missing or incomplete.
    """
    folder = Path(folder)
    cure = "run `git lfs pull`, clone the repository again, or pass the folder of another checkpoint"
    if not folder.is_dir():
        raise ValueError(f"`checkpoint` must be a folder, `{folder}` does not exist: {cure}.")
    weights = sorted(folder.glob("*.safetensors"))
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    missing += [] if weights else ["model.safetensors"]
    if missing:
        raise ValueError(f"`checkpoint` must hold a whole checkpoint, `{folder}` lacks {', '.join(missing)}: {cure}.")
    for path in weights:
        with path.open("rb") as file:
            if file.read(7) == b"version":  # a text of three lines, where safetensors starts with a length
                raise ValueError(f"`checkpoint` must hold the weights, `{path}` is only a pointer of Git LFS: {cure}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=dtype).eval()
    return model.to(torch.device(device)), AutoTokenizer.from_pretrained(folder)
