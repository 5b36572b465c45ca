# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
Train or fine-tune a SpeedT5 on translation or summarization. A recipe sets defaults, flags override it:

    python examples/run_seq2seq.py examples/recipes/en_de_small.yaml --tokenizer_name tokenizer \
        --train_file sentences.train.jsonl.gz paragraphs.train.jsonl.gz --validation_file sentences.valid.jsonl.gz \
        --output_dir en-de-small --learning_rate 1e-3 --max_train_minutes 60

On several processes: `torchrun --nproc_per_node 2 examples/run_seq2seq.py ...`. After an interruption, the same
command with `--resume_from_checkpoint` continues from the last checkpoint in `output_dir`. Every evaluation logs the
loss of each exit and scores texts written by `generate(speed=True)`. The last line of output names the folder and the
scores.
"""

import difflib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from transformers import AutoTokenizer, HfArgumentParser, set_seed
from transformers.trainer_utils import SchedulerType, get_last_checkpoint
from transformers.utils import logging

from speed_hf import SpeedT5Config, SpeedT5ForCausalLM
from speed_hf.data import (
    NUM_SPECIAL_TOKENS,
    PackedRows,
    evenly_spread,
    load_pairs,
    pack_pairs,
    stack_rows,
    tokenize_pairs,
)
from speed_hf.model_card import build_model_card
from speed_hf.text_metrics import TextScores, generate_texts
from speed_hf.training import SpeedTrainer, SpeedTrainingArguments


logger = logging.get_logger("run_seq2seq")


@dataclass
class ModelArguments:
    tokenizer_name: str | None = field(default=None, metadata={"help": "Default: that of `model_name_or_path`."})
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint to continue from; left out, the model starts from scratch."}
    )
    save_dtype: str | None = field(
        default=None, metadata={"help": "Type of the weights saved at the end: float32 or bfloat16."}
    )
    config_overrides: str | None = field(
        default=None, metadata={"help": "Configuration values, for example hidden_size=256,num_repetitions=4."}
    )


@dataclass
class DataArguments:
    task: str = field(default="translation", metadata={"help": "translation or summarization."})
    dataset_name: str | None = field(default=None, metadata={"help": "Data set on the Hub."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration."})
    train_file: list[str] | None = field(default=None, metadata={"help": "JSON-lines, CSV or Parquet files."})
    validation_file: list[str] | None = field(default=None, metadata={"help": "As train_file."})
    test_file: list[str] | None = field(default=None, metadata={"help": "As train_file; scored after training."})
    source_column: str = field(default="source", metadata={"help": "Column of the input text."})
    target_column: str = field(default="target", metadata={"help": "Column of the text to write."})
    source_prefix: str = field(default="", metadata={"help": "Put before every input text."})
    max_source_length: int = field(default=128, metadata={"help": "Tokens kept of the input, without special ones."})
    max_target_length: int = field(default=128, metadata={"help": "Tokens kept of the output, without special ones."})
    drop_long_pairs: bool = field(default=False, metadata={"help": "Leave longer pairs out instead of cutting them."})
    row_length: int = field(default=512, metadata={"help": "Tokens of a packed row; a batch holds whole rows."})
    max_generate_samples: int = field(default=100, metadata={"help": "Texts written in an evaluation; 0 for none."})
    generate_batch_size: int = field(default=16, metadata={"help": "Prompts at once, per process."})
    speed: bool = field(default=True, metadata={"help": "Write them with the pipelined decoder; false: plainly."})
    language: list[str] | None = field(default=None, metadata={"help": "Language codes for the model card."})
    license: str | None = field(default=None, metadata={"help": "Licence for the model card."})


@dataclass
class RunArguments(SpeedTrainingArguments):
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "A checkpoint; without a value: the last in output_dir.", "nargs": "?", "const": "last"},
    )
    overwrite_output_dir: bool = field(default=False, metadata={"help": "Train into a folder that is not empty."})


def parse_arguments(argv: list[str]) -> tuple[ModelArguments, DataArguments, RunArguments]:
    """Flags, over the values of the recipe if the first word is a YAML file."""
    parser = HfArgumentParser((ModelArguments, DataArguments, RunArguments))  # type: ignore[arg-type]
    if argv and argv[0].endswith((".yaml", ".yml")):
        recipe = yaml.safe_load(Path(argv[0]).read_text(encoding="utf-8")) or {}
        known = {action.dest for action in parser._actions}
        for key in recipe:
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean `{close[0]}`?" if close else "see --help for the options."
                raise ValueError(f"`{key}` in `{argv[0]}` must be an option of this script: {hint}")
        # argparse converts string defaults only, and YAML reads 1e-3 as a string: both meet here.
        parser.set_defaults(**recipe)
        argv = argv[1:]
    model_args, data_args, args = parser.parse_args_into_dataclasses(argv, look_for_args_file=False)
    check_arguments(model_args, data_args, args)
    return model_args, data_args, args


def check_arguments(model_args: ModelArguments, data_args: DataArguments, args: RunArguments):
    """Everything that can be wrong before any file is read."""
    if model_args.save_dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"`save_dtype` must be float32 or bfloat16, got {model_args.save_dtype!r}: choose one.")
    if not (model_args.tokenizer_name or model_args.model_name_or_path):
        raise ValueError("`tokenizer_name` must be given without `model_name_or_path`: train_tokenizer.py makes one.")
    if not (data_args.train_file or data_args.dataset_name):
        raise ValueError("`train_file` or `dataset_name` must be given: there is nothing to train on.")
    needed = data_args.max_source_length + data_args.max_target_length + NUM_SPECIAL_TOKENS
    if data_args.row_length < needed:
        raise ValueError(
            f"`row_length` must be at least `max_source_length` + `max_target_length` + {NUM_SPECIAL_TOKENS} = "
            f"{needed}, got {data_args.row_length}: raise it or lower the others."
        )
    if args.eval_strategy != "no" and not (data_args.validation_file or data_args.dataset_name):
        raise ValueError("`validation_file` must be given for `eval_strategy`: name one or set `eval_strategy` to no.")
    output_dir = Path(str(args.output_dir))
    if (
        output_dir.is_dir()
        and any(output_dir.iterdir())
        and not (args.resume_from_checkpoint or args.overwrite_output_dir)
    ):
        raise ValueError(
            f"`output_dir` must be empty, got `{output_dir}` with files in it: pass --resume_from_checkpoint to go on,"
            " --overwrite_output_dir to start over, or another folder."
        )


def find_checkpoint(args: RunArguments) -> str | None:
    """The checkpoint to resume from, or `None` to start."""
    if not args.resume_from_checkpoint:
        return None
    if str(args.resume_from_checkpoint).lower() not in ("last", "true"):
        return args.resume_from_checkpoint
    last = get_last_checkpoint(args.output_dir) if Path(str(args.output_dir)).is_dir() else None
    if last is None:
        logger.warning(f"No checkpoint in `{args.output_dir}` yet: training starts from the beginning.")
    return last


def build_config(config: SpeedT5Config, overrides: str | None) -> SpeedT5Config:
    """A configuration with `name=value,...` applied and the derived numbers computed again."""
    values = config.to_dict()
    for item in filter(None, (overrides or "").split(",")):
        name, _, value = item.strip().partition("=")
        if name not in values or name == "num_hidden_layers":
            raise ValueError(
                f"`config_overrides` must name values of the configuration, got {name!r}: see SpeedT5Config "
                "(num_hidden_layers is derived)."
            )
        values[name] = yaml.safe_load(value)
        if isinstance(getattr(config, name), float):
            values[name] = float(value)
    return SpeedT5Config.from_dict({**values, "num_hidden_layers": None})


def load_model(model_args: ModelArguments, tokenizer) -> SpeedT5ForCausalLM:
    """The checkpoint, or a new model whose vocabulary is the tokenizer's."""
    if model_args.model_name_or_path:
        config = SpeedT5Config.from_pretrained(model_args.model_name_or_path)
        config = build_config(config, model_args.config_overrides)
        return SpeedT5ForCausalLM.from_pretrained(model_args.model_name_or_path, config=config)
    config = SpeedT5Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return SpeedT5ForCausalLM(build_config(config, model_args.config_overrides))


def load_split(data_args: DataArguments, split: str):
    """The pairs of a split with the prefix applied, or `None` if no file is named for it."""
    files = getattr(data_args, f"{split}_file")
    if not files and (data_args.train_file or not data_args.dataset_name):
        return None
    columns = {"source": data_args.source_column, "target": data_args.target_column}
    return load_pairs(columns, files, data_args.dataset_name, data_args.dataset_config_name, split)


def pack_split(pairs, tokenizer, data_args: DataArguments, name: str) -> PackedRows:
    """Packed rows of a split; says how full they are and how many pairs were cut."""
    tokenized = tokenize_pairs(
        pairs,
        tokenizer,
        data_args.max_source_length,
        data_args.max_target_length,
        data_args.source_prefix,
        data_args.drop_long_pairs,
    )
    rows = pack_pairs(tokenized, data_args.row_length, tokenizer.pad_token_id)
    logger.warning(
        f"{name}: {len(tokenized)} pairs ({tokenized.num_truncated} cut), {len(tokenized.input_ids)} tokens in "
        f"{len(rows)} rows, {rows.fill_rate:.1%} full."
    )
    return rows


def make_text_metrics(pairs, tokenizer, data_args: DataArguments, scores: TextScores):
    """A function from a model to the scores of its texts for evenly spread pairs."""
    pairs = pairs.select(evenly_spread(len(pairs), data_args.max_generate_samples))
    sources = [data_args.source_prefix + text for text in pairs["source"]]
    references = pairs["target"][:]

    def text_metrics(model) -> dict[str, float]:
        texts = generate_texts(
            model,
            tokenizer,
            sources,
            data_args.generate_batch_size,
            data_args.max_source_length,
            data_args.max_target_length + 1,  # eos
            **({"speed": True} if data_args.speed else {}),
        )
        return scores(texts, references)

    return text_metrics


def write_card(
    trainer: SpeedTrainer,
    model: SpeedT5ForCausalLM,
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RunArguments,
    results: dict,
    example: str,
):
    """README.md in `output_dir`."""
    recipe = {
        "optimizer": args.optimizer,
        "learning rate": args.learning_rate,
        "schedule": SchedulerType(args.lr_scheduler_type).value,
        "steps": trainer.state.global_step,
        "tokens per step": data_args.row_length
        * args.train_batch_size
        * args.gradient_accumulation_steps
        * args.world_size,
        "exit loss weights": model.config.exit_loss_weights,
    }
    files = [Path(path).name for path in data_args.train_file or []] or [str(data_args.dataset_name)]
    trainer.model_card = build_model_card(
        model,
        name=args.hub_model_id or Path(str(args.output_dir)).name,
        task=data_args.task,
        example=example,
        training_data=files,
        recipe=recipe,
        results=results,
        language=data_args.language,
        license=data_args.license,
        base_model=model_args.model_name_or_path,
    )
    trainer.create_model_card()


def main(argv: list[str] | None = None):
    model_args, data_args, args = parse_arguments(sys.argv[1:] if argv is None else argv)
    set_seed(args.seed)
    scores = TextScores(data_args.task)
    tokenizer = AutoTokenizer.from_pretrained(model_args.tokenizer_name or model_args.model_name_or_path)
    pairs = {split: load_split(data_args, split) for split in ("train", "validation", "test")}
    pairs = {split: rows for split, rows in pairs.items() if rows is not None}
    rows = {split: pack_split(pairs[split], tokenizer, data_args, split) for split in pairs}
    text_metrics = {
        split: make_text_metrics(pairs[split], tokenizer, data_args, scores)
        for split in pairs
        if split != "train" and data_args.max_generate_samples
    }
    model = load_model(model_args, tokenizer)

    trainer = SpeedTrainer(
        model,
        args,
        text_metrics=text_metrics.get("validation"),
        train_dataset=rows["train"],
        eval_dataset=rows.get("validation"),
        data_collator=stack_rows,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=find_checkpoint(args))

    results = {}
    for split in ("validation", "test"):
        if split in rows:
            trainer.text_metrics = text_metrics.get(split)
            metrics = trainer.evaluate(rows[split], metric_key_prefix=split)
            results[split] = {
                name.removeprefix(f"{split}_"): value
                for name, value in metrics.items()
                if not name.endswith(("_runtime", "_per_second", "epoch"))
            }
    model.config.use_cache = True  # the Trainer turned it off for training
    if model_args.save_dtype:
        model.to(getattr(torch, model_args.save_dtype))
    trainer.save_model()
    trainer.save_state()
    write_card(
        trainer, model, model_args, data_args, args, results, data_args.source_prefix + pairs["train"][0]["source"]
    )
    if args.push_to_hub:
        trainer.push_to_hub()
    if trainer.is_world_process_zero():
        print(f"{args.output_dir}: {json.dumps(results)}")


if __name__ == "__main__":
    main()
