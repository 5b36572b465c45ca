# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
The command `speed-hf`: what transformers' own command cannot do, as it does not know classes from elsewhere.

    speed-hf serve model_cards/speed-t5-en-de-small --speed --port 8000
"""

import argparse
import sys

from .modeling_speed_t5 import SpeedT5ForCausalLM


class PipelinedSpeedT5:
    """Stands for [`SpeedT5ForCausalLM`] where models are loaded by name, and turns `speed=True` on in each of them."""

    @staticmethod
    def from_pretrained(*args, **kwargs) -> SpeedT5ForCausalLM:
        model = SpeedT5ForCausalLM.from_pretrained(*args, **kwargs)
        model.generation_config.speed = True
        return model


def main(arguments: list[str] | None = None) -> None:
    """
    Run `speed-hf COMMAND ...`; the only command is `serve`.

    Args:
        arguments (`list[str]`, *optional*): instead of those of the process. What is not ours goes on to
            `transformers serve`, which finds the model class on the package `transformers`, where importing `speed_hf`
            puts it.
    """
    parser = argparse.ArgumentParser(prog="speed-hf", allow_abbrev=False)
    serve = parser.add_subparsers(dest="command", required=True).add_parser(
        "serve",
        allow_abbrev=False,
        help="serve models over HTTP in the format of OpenAI",
        usage="speed-hf serve [--speed] [MODEL] [options of `transformers serve`, see `transformers serve --help`]",
    )
    serve.add_argument(
        "--speed",
        action="store_true",
        help="decode by the pipeline unless a request says otherwise; without it, `speed` in the checkpoint's "
        "generation_config.json decides",
    )
    options, others = parser.parse_known_args(arguments)
    # Imported late: it takes seconds that `--help` does not need.
    from transformers.cli.transformers import app

    if options.speed:
        setattr(sys.modules["transformers"], SpeedT5ForCausalLM.__name__, PipelinedSpeedT5)
    app(args=[options.command, *others], prog_name="speed-hf")


if __name__ == "__main__":
    main()
