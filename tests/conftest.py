# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests run offline, and one thread each: their products are tiny, and several processes may share the cores."""

import os


os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"

import torch


torch.set_num_threads(1)
