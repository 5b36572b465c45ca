# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerState

from speed_hf import SpeedT5Config, SpeedT5ForCausalLM
from speed_hf.data import PackedRows, stack_rows
from speed_hf.model_card import build_model_card
from speed_hf.text_metrics import TextScores, generate_texts
from speed_hf.training import SpeedTrainer, SpeedTrainingArguments, timed_rate


SCRIPT = Path(__file__).parent.parent / "examples" / "run_seq2seq.py"
SIZES = "hidden_size=32,intermediate_size=32,num_attention_heads=2,head_dim=16,num_unique_layers=1,num_repetitions=2"
WORDS = [f"w{i}" for i in range(20)]


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setitem(sys.modules, "evaluate", None)  # its metrics come from the Hub


@pytest.fixture(scope="session")
def script():
    spec = importlib.util.spec_from_file_location("run_seq2seq", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["run_seq2seq"] = module
    spec.loader.exec_module(module)
    return module


def word_tokenizer():
    vocab = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<pad> $A </s>", special_tokens=[("<pad>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


@pytest.fixture
def files(tmp_path):
    """A tokenizer and 40 pairs: the target is the source backwards."""
    word_tokenizer().save_pretrained(tmp_path / "tokenizer")
    texts = [[WORDS[(7 * row + 3 * i) % 20] for i in range(2 + row % 5)] for row in range(40)]
    lines = [json.dumps({"src": " ".join(text), "tgt": " ".join(text[::-1])}) for text in texts]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    return tmp_path


def command(files, *flags):
    (files / "recipe.yaml").write_text(
        f"tokenizer_name: {files}/tokenizer\n"
        f"train_file: [{files}/train.jsonl]\nvalidation_file: [{files}/train.jsonl]\n"
        f"source_column: src\ntarget_column: tgt\nmax_source_length: 8\nmax_target_length: 8\nrow_length: 32\n"
        f"config_overrides: {SIZES}\noutput_dir: {files}/out\nlearning_rate: 1e-3\nper_device_train_batch_size: 4\n"
        "max_steps: 4\nsave_steps: 2\nlogging_steps: 1\neval_strategy: steps\neval_steps: 2\nmax_generate_samples: 3\n"
        "use_cpu: true\nreport_to: none\ndisable_tqdm: true\n"
    )
    return [str(files / "recipe.yaml"), *flags]


def run_state(files):
    return TrainerState.load_from_json(str(files / "out" / "trainer_state.json"))


def tiny_model(**kwargs):
    torch.manual_seed(0)
    config = {
        "vocab_size": 23, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 8,
        "num_unique_layers": 1, "num_repetitions": 3, **kwargs,
    }  # fmt: skip
    return SpeedT5ForCausalLM(SpeedT5Config(**config))


def tiny_rows(num_rows=8, row_length=16):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 23, (num_rows, row_length), generator=generator).int().numpy()
    labels = ids.copy()
    for row in range(num_rows):
        labels[row, : 2 + row] = -100  # ragged: a mean of means would differ
    positions = torch.arange(row_length).int().expand(num_rows, -1).numpy()
    return PackedRows(ids, labels, positions, 1.0)


def tiny_trainer(tmp_path, model=None, rows=None, **kwargs):
    arguments = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no",
        "max_steps": 2, "per_device_train_batch_size": 4, **kwargs,
    }  # fmt: skip
    args = SpeedTrainingArguments(output_dir=str(tmp_path / "trainer"), **arguments)
    rows = rows or tiny_rows()
    return SpeedTrainer(model or tiny_model(), args, train_dataset=rows, eval_dataset=rows, data_collator=stack_rows)


def test_script_trains_scores_and_writes_a_checkpoint_that_loads(script, files, capsys):
    script.main(command(files, "--learning_rate", "2e-3"))
    assert run_state(files).global_step == 4
    log = run_state(files).log_history
    assert {"loss_exit_1", "loss_exit_2"} <= log[0].keys()
    assert any({"eval_loss_exit_2", "eval_bleu", "eval_chrf"} <= entry.keys() for entry in log)
    assert torch.load(files / "out" / "training_args.bin", weights_only=False).learning_rate == 2e-3
    card = (files / "out" / "README.md").read_text()
    assert "pipeline_tag: translation" in card and "| validation | bleu |" in card
    model = AutoModelForCausalLM.from_pretrained(files / "out")
    assert model.config.use_cache and model.config.vocab_size == 23
    assert "bleu" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumed_run_equals_an_uninterrupted_one(script, files, optimizer):
    options = ["--max_generate_samples", "0", "--optimizer", optimizer]
    script.main(command(files, *options))
    whole = AutoModelForCausalLM.from_pretrained(files / "out").state_dict()
    for path in (files / "out").glob("checkpoint-4/*"):
        path.unlink()
    (files / "out" / "checkpoint-4").rmdir()
    script.main(command(files, *options, "--resume_from_checkpoint"))
    assert run_state(files).global_step == 4
    resumed = AutoModelForCausalLM.from_pretrained(files / "out").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_overrides_apply_on_top_of_a_checkpoint(script, files):
    tiny_model().save_pretrained(files / "model")
    arguments = script.ModelArguments(model_name_or_path=str(files / "model"), config_overrides="num_repetitions=5")
    model = script.load_model(arguments, word_tokenizer())
    assert (model.config.num_repetitions, model.config.num_hidden_layers) == (5, 5)
    assert torch.equal(model.model.embed_tokens.weight, tiny_model().model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--source_column", "en"], r"no column `en`; its columns are src, tgt: set `source_column`"),
        (["--row_length", "18"], "`row_length` must be at least .* = 19, got 18"),
        (["--config_overrides", "hiden_size=3"], "`config_overrides` must name values .* got 'hiden_size'"),
        (["--config_overrides", "num_hidden_layers=3"], "num_hidden_layers is derived"),
        (["--task", "poetry"], "`task` must be translation or summarization, got 'poetry'"),
        (["--optimizer", "sgd"], "`optimizer` must be one of adamw, muon, adafactor_t5x, got 'sgd'"),
        (["--label_smoothing_factor", "0.1"], "`label_smoothing_factor` must be 0, got 0.1"),
        (["--max_train_minutes", "1", "--warmup_steps", "10"], "`warmup_steps` must be a share of the time"),
        (
            ["--max_train_minutes", "1", "--lr_scheduler_type", "polynomial"],
            "`lr_scheduler_type` must be one of cosine",
        ),
        (["--max_train_minutes", "0"], "`max_train_minutes` must be above 0"),
    ],
)
def test_unusable_options_are_refused_before_anything_is_written(script, files, flags, message):
    with pytest.raises(ValueError, match=message):
        script.main(command(files, *flags))
    assert not (files / "out").exists()


def test_empty_targets_are_refused_before_anything_is_written(script, files):
    (files / "train.jsonl").write_text(json.dumps({"src": "w1", "tgt": ""}))
    with pytest.raises(ValueError, match="no row with text in all of source, target"):
        script.main(command(files))
    assert not (files / "out").exists()


def test_unknown_recipe_key_is_refused_with_the_likely_one(script, files):
    recipe = command(files)
    Path(recipe[0]).write_text("learning_rat: 1e-3\n")
    with pytest.raises(ValueError, match=r"`learning_rat` in .* did you mean `learning_rate`"):
        script.main(recipe)


def test_output_dir_with_files_is_refused(script, files):
    (files / "out").mkdir()
    (files / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"`output_dir` must be empty, .* --resume_from_checkpoint"):
        script.main(command(files))


def test_exit_losses_are_exact_under_gradient_accumulation(tmp_path):
    logs = []
    for batch_size, accumulation in ((8, 1), (2, 4)):
        trainer = tiny_trainer(
            tmp_path, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation, max_steps=1
        )
        trainer.train()
        logs.append(trainer.state.log_history[0])
    for name in ("loss", "loss_exit_1", "loss_exit_2", "loss_exit_3"):
        assert logs[0][name] == pytest.approx(logs[1][name], abs=1e-5)
    weighted = sum(
        weight * logs[0][f"loss_exit_{exit_}"] for exit_, weight in enumerate((1 / 6, 2 / 6, 3 / 6), start=1)
    )
    assert logs[0]["loss"] == pytest.approx(weighted, abs=1e-5)


def test_evaluation_losses_are_means_over_all_tokens(tmp_path):
    rows = tiny_rows()
    model = tiny_model().eval()
    with torch.no_grad():
        output = model(**stack_rows([rows[i] for i in range(8)]))
    metrics = tiny_trainer(tmp_path, model, rows, per_device_eval_batch_size=3).evaluate()
    assert metrics["eval_loss"] == pytest.approx(output.loss.item(), abs=1e-5)
    for exit_, loss in enumerate(output.exit_losses.tolist(), start=1):
        assert metrics[f"eval_loss_exit_{exit_}"] == pytest.approx(loss, abs=1e-5)


def test_plain_training_arguments_are_refused(tmp_path):
    from transformers import TrainingArguments

    with pytest.raises(TypeError, match="`args` must be SpeedTrainingArguments"):
        SpeedTrainer(tiny_model(), TrainingArguments(output_dir=str(tmp_path)))


def test_time_budget_stops_saves_and_ends_at_rate_zero(tmp_path, monkeypatch):
    clock = iter(range(0, 10**6, 5))  # every look at the clock is 5 s after the last
    monkeypatch.setattr("speed_hf.training.time.monotonic", lambda: next(clock))
    options = {
        "max_train_minutes": 1,
        "max_steps": -1,
        "save_strategy": "steps",
        "save_steps": 4,
        "lr_scheduler_type": "linear",
    }
    trainer = tiny_trainer(tmp_path, **options)
    trainer.train()
    assert trainer.state.global_step == 12
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == sorted(rates, reverse=True) and trainer.lr_scheduler.get_last_lr()[0] == 0
    assert (tmp_path / "trainer" / "checkpoint-12").is_dir()

    resumed = tiny_trainer(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-4"))
    assert resumed.state.global_step == 12  # 20 of the 60 s were over
    assert resumed.time_budget.seconds == 60


@pytest.mark.parametrize(("share", "cosine", "linear"), [(0.05, 0.5, 0.5), (0.1, 1, 1), (0.55, 0.5, 0.5), (1, 0, 0)])
def test_timed_rate_warms_up_and_decays(share, cosine, linear):
    assert timed_rate(share, 0.1, "cosine") == pytest.approx(cosine)
    assert timed_rate(share, 0.1, "linear") == pytest.approx(linear)
    assert timed_rate(share, 0.1, "constant_with_warmup") == min(1, share / 0.1)


def test_adamw_gives_the_embedding_table_its_own_rate_and_spares_norms_from_decay(tmp_path):
    trainer = tiny_trainer(tmp_path, learning_rate=1e-3, embedding_learning_rate=1e-2, weight_decay=0.1)
    groups = trainer.create_optimizer().param_groups
    rates = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(rates) == sum(1 for _ in trainer.model.parameters())
    assert rates[id(trainer.model.model.embed_tokens.weight)] == (1e-2, 0.1)
    assert rates[id(trainer.model.model.norm.weight)] == (1e-3, 0.0)
    assert rates[id(trainer.model.model.layers[0].mlp.wo.weight)] == (1e-3, 0.1)


def test_muon_moves_the_matrices_of_layers_and_adamw_the_rest_at_scheduled_rates(tmp_path):
    trainer = tiny_trainer(tmp_path, optimizer="muon", learning_rate=1e-3, embedding_learning_rate=1e-2, max_steps=2)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    muon, adamw = trainer.optimizer.optimizer.optimizers
    by_muon = {id(p) for group in muon.param_groups for p in group["params"]}
    matrices = {name for name, p in trainer.model.named_parameters() if id(p) in by_muon}
    assert matrices == {name for name, p in before.items() if ".layers." in name and p.ndim == 2}
    by_adamw = sum(len(group["params"]) for group in adamw.param_groups)
    assert len(matrices) + by_adamw == len(before)
    assert all(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())
    assert {group["lr"] for group in (*muon.param_groups, *adamw.param_groups)} == {0.0}  # the linear schedule's end


def test_adafactor_follows_the_schedule_of_t5x(tmp_path):
    trainer = tiny_trainer(
        tmp_path,
        optimizer="adafactor_t5x",
        learning_rate=1.0,
        lr_scheduler_type="inverse_sqrt",
        warmup_steps=4,
        max_steps=9,
    )
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([1 / math.sqrt(max(step, 4)) for step in range(1, 10)])
    group = trainer.optimizer.param_groups[0]
    assert group["scale_parameter"] and not group["relative_step"] and group["beta1"] is None


def test_texts_come_back_in_the_order_of_their_sources():
    model, tokenizer = tiny_model(), word_tokenizer()
    sources = ["w1", "w2 w3 w4 w5", "w6 w7", "w8 w9 w10"]
    together = generate_texts(model, tokenizer, sources, 3, 8, 5)
    assert together == [generate_texts(model, tokenizer, [source], 1, 8, 5)[0] for source in sources]
    assert model.training


def test_scores_of_perfect_texts_are_100():
    texts = ["the cat sat on the mat", "a dog barked at the old man"]
    assert TextScores("translation")(texts, texts) == {"bleu": 100, "chrf": 100}
    assert TextScores("summarization")(texts, texts) == {"rouge1": 100, "rouge2": 100, "rougeL": 100}


def test_model_card_is_this_text():
    card = build_model_card(
        tiny_model(), "me/model", "translation", "Good morning.", ["pairs"], {"steps": 10, "learning rate": 1e-3},
        results={"test": {"loss": 2.0, "bleu": 20.81234}}, language=["en", "de"], license="apache-2.0",
    )  # fmt: skip
    assert card.data.to_dict() == {
        "language": ["en", "de"], "license": "apache-2.0", "library_name": "transformers", "metrics": ["bleu"],
        "pipeline_tag": "translation", "tags": ["custom_code", "speed", "early-exit", "speculative-decoding"],
    }  # fmt: skip
    for line in (
        "# me/model",
        'model = AutoModelForCausalLM.from_pretrained("me/model", trust_remote_code=True)',
        'inputs = tokenizer("Good morning.", return_tensors="pt")',
        "Data: pairs.",
        "| learning rate | 0.001 |",
        "| test | bleu | 20.81 |",
    ):
        assert line in card.text.splitlines()
