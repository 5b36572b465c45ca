# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""SPEED for Hugging Face Transformers: cyclically shared decoders with early exits, decoded by a pipeline."""

import sys

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ._version import __version__
from .configuration_speed_t5 import SpeedT5Config
from .generation_speed import SpeedGenerationMixin
from .modeling_speed_t5 import SpeedT5ForCausalLM, SpeedT5Model


# Importing the package is enough for the Auto classes, and the classes take their code along when they are saved.
AutoConfig.register(SpeedT5Config.model_type, SpeedT5Config, exist_ok=True)
AutoModel.register(SpeedT5Config, SpeedT5ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(SpeedT5Config, SpeedT5ForCausalLM, exist_ok=True)
SpeedT5Config.register_for_auto_class()
SpeedT5ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
# The Trainer looks class names up here to know that labels are shifted inside, `transformers serve` on the package
# itself, which it replaces in sys.modules while it is imported.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SpeedT5Config.model_type] = SpeedT5ForCausalLM.__name__
setattr(sys.modules["transformers"], SpeedT5ForCausalLM.__name__, SpeedT5ForCausalLM)

__all__ = ["SpeedGenerationMixin", "SpeedT5Config", "SpeedT5ForCausalLM", "SpeedT5Model", "__version__"]
