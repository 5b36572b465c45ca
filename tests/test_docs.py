# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What the documents say about tests and options exists."""

import re
from pathlib import Path

from speed_hf.generation_speed import SPEED_OPTIONS


ROOT = Path(__file__).parent.parent


def test_every_test_that_the_requirements_name_exists():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")))
    defined = set()
    for path in (ROOT / "tests").glob("test_*.py"):
        defined |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert len(named) > 30
    assert named <= defined, named - defined


def test_the_readme_names_every_speed_option():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in readme or f"{name}=" in readme for name in SPEED_OPTIONS)
