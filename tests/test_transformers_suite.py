# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
Transformers' own tests of a model, run on SpeedT5: saving, loading, resizing, checkpointing, attention backends, ...

They are the files of the installed transformers release. Its source distribution is downloaded once, by pip, and two
files of it are kept in `.cache/`; where that is not possible, everything here is skipped.
"""

import importlib
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from filelock import FileLock
from tiny_models import TINY_SIZES, random_ids
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from speed_hf import SpeedT5Config, SpeedT5ForCausalLM, SpeedT5Model
from speed_hf.modeling_speed_t5 import SpeedT5PreTrainedModel


CACHE = Path(__file__).parents[1] / ".cache" / f"transformers-{transformers.__version__}"
PACKAGE = "transformers_suite"
TAKEN = ("test_configuration_common.py", "test_modeling_common.py")
# What these two import from files that are not in the source distribution.
STUBS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}\n",
}
DOWNLOAD_SECONDS = 240
# Parts of names of tests that SpeedT5 is not to pass, and why. What else is skipped the suite skips itself, for want
# of an accelerator or of a part that the model does not have (experts, rotary positions, images).
NOT_ASKED = {
    "_fp16_": "float16 is refused: T5's feed-forward overflows there",
    "test_load_save_without_tied_weights": "untied weights are refused: every exit shares the embedding table",
    "test_generation_tester_mixin_inheritance": "the suite of `generate` is not in the source distribution",
}


def fetch_suite():
    """Make `CACHE` hold the suite as a package; an `OSError` says why it cannot."""
    package, failed = CACHE / PACKAGE, CACHE / "failed"
    CACHE.mkdir(parents=True, exist_ok=True)
    # pytest-xdist wants the same tests from all of its processes: one asks, the others take its answer.
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    with FileLock(CACHE / "lock"):
        if package.is_dir():
            return
        if failed.is_file() and failed.read_text().startswith(run):
            raise OSError(failed.read_text().removeprefix(run))
        try:
            download_suite(package)
        except (OSError, subprocess.SubprocessError) as error:
            failed.write_text(f"{run}{error}")
            raise OSError(str(error)) from error


def download_suite(package):
    requirement = f"transformers=={transformers.__version__}"
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        # pip asks the source distribution for its metadata, which takes longer than the download.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--no-binary", ":all:", "--retries", "1", "--dest", folder, requirement]
        pip = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        if pip.returncode:
            raise OSError(" ".join(pip.stderr.splitlines()[-1:]))
        unpacked = Path(folder) / PACKAGE
        for name, text in STUBS.items():
            (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
            (unpacked / name).write_text(text)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            for name in TAKEN:
                member = f"transformers-{transformers.__version__}/tests/{name}"
                (unpacked / name).write_bytes(archive.extractfile(member).read())
        unpacked.rename(package)  # complete, or not there at all


try:
    fetch_suite()
except OSError as error:
    pytest.skip(
        f"the source distribution of transformers {transformers.__version__} cannot be had: {error}",
        allow_module_level=True,
    )
sys.path.append(str(CACHE))
configuration_common = importlib.import_module(f"{PACKAGE}.test_configuration_common")
modeling_common = importlib.import_module(f"{PACKAGE}.test_modeling_common")


class SpeedT5ModelTester:
    """The model and inputs that the suite asks for, and what it expects of their sizes."""

    # The suite allows two layers: one that is stored and run twice has all that is special about this model.
    sizes = {**TINY_SIZES, "num_unique_layers": 1, "num_repetitions": 2}
    num_hidden_layers = 2
    hidden_size = TINY_SIZES["hidden_size"]
    num_attention_heads = TINY_SIZES["num_attention_heads"]
    batch_size = 3
    seq_length = 7
    is_training = True
    base_model_class = SpeedT5Model
    causal_lm_class = SpeedT5ForCausalLM

    def get_config(self):
        return SpeedT5Config(**self.sizes)

    def prepare_config_and_inputs_for_common(self):
        input_ids = random_ids(self.batch_size, self.seq_length)
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}


def loading_as_of_transformers():
    """While it lasts, what a checkpoint lacks is initialized, where SpeedT5 otherwise refuses the checkpoint."""
    plain = classmethod(PreTrainedModel.from_pretrained.__func__)
    return mock.patch.object(SpeedT5PreTrainedModel, "from_pretrained", plain)


class TestSpeedT5(modeling_common.ModelTesterMixin, unittest.TestCase):
    all_model_classes = (SpeedT5Model, SpeedT5ForCausalLM)

    def setUp(self):
        for name, reason in NOT_ASKED.items():
            if name in self.id():
                self.skipTest(reason)
        self.model_tester = SpeedT5ModelTester()
        # By this table the suite knows that the base model takes no labels.
        self.enterContext(mock.patch.dict(MODEL_MAPPING_NAMES, {SpeedT5Config.model_type: SpeedT5Model.__name__}))

    def test_config(self):
        configuration_common.ConfigTester(self, config_class=SpeedT5Config, **TINY_SIZES).run_common_tests()

    @pytest.mark.filterwarnings("always::FutureWarning")  # this test looks for one, and ours are silenced elsewhere
    def test_bc_cache_name_forward(self):
        super().test_bc_cache_name_forward()

    def test_can_init_all_missing_weights(self):
        with loading_as_of_transformers():  # it loads from nothing, to compare with a model made from scratch
            super().test_can_init_all_missing_weights()

    def test_model_weights_reload_no_missing_tied_weights(self):
        with loading_as_of_transformers():  # it loads a file without weights, to see that all but the tied are missed
            super().test_model_weights_reload_no_missing_tied_weights()
