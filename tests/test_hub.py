# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints take their code along: a process without the package loads them, generates, and saves an equal copy."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tiny_models import flipping_model, prompts
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import speed_hf


# `None` in sys.modules makes every import of the package fail, as on a machine where it is not installed.
WITHOUT_THE_PACKAGE = """
import sys
sys.modules["speed_hf"] = None
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

source, target = sys.argv[1:]
config = AutoConfig.from_pretrained(source, trust_remote_code=True)
assert config.num_hidden_layers == 8, config
base = AutoModel.from_pretrained(source, trust_remote_code=True, dtype=torch.float64)
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, dtype=torch.float64)
assert type(base).__name__ == type(model).__name__ == "SpeedT5ForCausalLM"
assert not any(name.startswith("speed_hf") for name, module in sys.modules.items() if module)
ids = torch.tensor([[5, 9, 12, 3]])
output = model.generate(ids, max_new_tokens=20, speed=True, return_dict_in_generate=True, do_sample=False)
assert torch.equal(output.sequences, base.generate(ids, max_new_tokens=20, do_sample=False))
assert output.speed_stats["num_group_passes"] > 0
model.save_pretrained(target)
print(output.sequences.tolist())
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub") / "speed-t5"
    flipping_model("often", dtype=torch.float32).save_pretrained(folder)
    return folder


def files(folder):
    """Names and contents of a checkpoint, weights aside."""
    return {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(folder.iterdir())
        if path.suffix in (".py", ".json")
    }


def test_a_checkpoint_holds_its_code(checkpoint):
    names = {path.name for path in checkpoint.iterdir()}
    code = {path.name for path in (checkpoint.parent / "speed-t5").glob("*.py")}
    travelling = (
        "configuration_speed_t5",
        "modeling_speed_t5",
        "loss_speed",
        "packed_speed",
        "kernels_speed",
        "cache_speed",
        "rows_speed",
        "window_speed",
    )
    assert {f"{name}.py" for name in (*travelling, "generation_speed")} == code
    assert {"config.json", "generation_config.json", "model.safetensors"} <= names
    auto_map = json.loads((checkpoint / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_speed_t5.SpeedT5Config",
        "AutoModel": "modeling_speed_t5.SpeedT5ForCausalLM",
        "AutoModelForCausalLM": "modeling_speed_t5.SpeedT5ForCausalLM",
    }


def test_a_process_without_the_package_loads_generates_and_copies(checkpoint, tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}

    def run(source, target):
        process = subprocess.run(
            [sys.executable, "-c", WITHOUT_THE_PACKAGE, str(source), str(target)],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert process.returncode == 0, process.stderr[-3000:]
        return process.stdout

    copy, copy_of_copy = tmp_path / "copy", tmp_path / "copy_of_copy"
    text = run(checkpoint, copy)
    assert run(copy, copy_of_copy) == text
    assert files(copy) == files(copy_of_copy)
    here = AutoModelForCausalLM.from_pretrained(copy_of_copy, dtype=torch.float64)
    ids = torch.tensor([[5, 9, 12, 3]])
    assert text.strip() == str(here.generate(ids, max_new_tokens=20, speed=True, do_sample=False).tolist())


def test_both_routes_save_the_same_files(checkpoint, tmp_path):
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True)
    assert type(loaded) is speed_hf.SpeedT5ForCausalLM, "the installed package wins over the copy in the folder"
    loaded.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(checkpoint)


def test_importing_the_package_is_enough_for_the_auto_classes(checkpoint):
    assert type(AutoConfig.from_pretrained(checkpoint)) is speed_hf.SpeedT5Config
    assert type(AutoModel.from_pretrained(checkpoint)) is speed_hf.SpeedT5ForCausalLM
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    assert model.generate(**prompts(1, 4), max_new_tokens=3, speed=True).shape == (1, 7)
