# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""What other software does with a checkpoint: pipelines, streamers, assisted decoding, a server, an evaluation."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from importlib import import_module
from pathlib import Path

import openai
import pytest
import torch
import yaml
from tiny_models import flipping_model, prompts
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from speed_hf import SpeedT5ForCausalLM, cli


ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "model_cards" / "speed-t5-en-de-small"
TEXTS = ["Save your work before you close the window.", "The cat sleeps.", "My brother lives in a small house."]
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def shipped():
    # Plain and pipelined tokens are the same in exact arithmetic only.
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float64)


@pytest.fixture
def model(shipped):
    """The shipped model, with the generation config that it came with."""
    shipped.generation_config = GenerationConfig.from_pretrained(CHECKPOINT)
    return shipped


def plain_tokens(model, tokenizer, text, max_new_tokens=GREEDY["max_new_tokens"]):
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens, speed=False)
    return output[0, inputs["input_ids"].shape[1] :]


def plain_text(model, tokenizer, text):
    return tokenizer.decode(plain_tokens(model, tokenizer, text), skip_special_tokens=True)


@pytest.fixture
def count_passes(model, monkeypatch):
    """Calls a function and counts the group passes of pipelined decoding: equal tokens alone do not prove it."""

    def count(function):
        calls, run_repetition = [], SpeedT5ForCausalLM.run_repetition
        with monkeypatch.context() as patch:
            patch.setattr(model, "run_repetition", lambda *args: calls.append(1) or run_repetition(model, *args))
            result = function()
        return result, len(calls)

    return count


@pytest.mark.parametrize("place", ["call", "constructor", "generation config"])
def test_a_text_generation_pipeline_decodes_by_the_pipeline(place, model, tokenizer, count_passes):
    options = {"speed": True}
    model.generation_config.speed = place == "generation config"
    generator = pipeline(
        "text-generation", model=model, tokenizer=tokenizer, **(options if place == "constructor" else {})
    )
    options = options if place == "call" else {}

    def generate(texts, **others):
        outputs = generator(texts, return_tensors=True, **GREEDY, **options, **others)
        return [torch.tensor(output[0]["generated_token_ids"]) for output in outputs]

    expected = [plain_tokens(model, tokenizer, text) for text in TEXTS]
    outputs, num_passes = count_passes(lambda: generate(TEXTS))
    for text, output, new in zip(TEXTS, outputs, expected, strict=True):
        assert torch.equal(output, torch.cat([torch.tensor(tokenizer(text)["input_ids"]), new]))
    assert 0 < num_passes < model.config.num_repetitions * sum(map(len, expected))
    for output, new in zip(generate(TEXTS, batch_size=3), expected, strict=True):
        assert tokenizer.decode(output, skip_special_tokens=True).endswith(
            tokenizer.decode(new, skip_special_tokens=True)
        )


@pytest.mark.parametrize("saved", [False, True], ids=["given", "saved"])
def test_a_streamer_in_another_thread_gets_the_plain_text(saved, model, tokenizer, count_passes):
    expected = plain_text(model, tokenizer, TEXTS[0])
    model.generation_config.speed = saved
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60, skip_special_tokens=True)
    options = {**tokenizer(TEXTS[0], return_tensors="pt"), **GREEDY, "streamer": streamer}
    if not saved:
        options["speed"] = True

    def stream():
        thread = threading.Thread(target=model.generate, kwargs=options)
        thread.start()
        pieces = list(streamer)
        thread.join()
        return pieces

    pieces, num_passes = count_passes(stream)
    assert "".join(pieces) == expected
    assert len([piece for piece in pieces if piece]) > 1, "a text that comes in one piece is not streamed"
    assert 0 < num_passes < model.config.num_repetitions * len(plain_tokens(model, tokenizer, TEXTS[0]))


def test_a_text_streamer_prints_the_plain_text(model, tokenizer, capsys):
    expected = plain_text(model, tokenizer, TEXTS[0])
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**tokenizer(TEXTS[0], return_tensors="pt"), **GREEDY, streamer=streamer, speed=True)
    assert capsys.readouterr().out.strip() == expected


def drafter(kind, flips, prefix_lm):
    """Options that make transformers draft; `saved` drafts with a model whose generation config says `speed=True`."""
    if kind in ("same", "saved"):
        assistant = flipping_model(flips, prefix_lm=prefix_lm)
        assistant.generation_config.speed = kind == "saved"
    else:
        assistant = flipping_model(flips, seed=1, prefix_lm=prefix_lm, num_unique_layers=1, num_repetitions=2)
    return {"assistant_model": assistant}


ASSISTANTS = {
    "same model": lambda **model: drafter("same", **model),
    "same model with speed saved": lambda **model: drafter("saved", **model),
    "smaller model": lambda **model: drafter("smaller", **model),
    "prompt lookup": lambda **_: {"prompt_lookup_num_tokens": 3},
    "exit 1": lambda **_: {"assistant_early_exit": 2},
    "exit 2": lambda **_: {"assistant_early_exit": 4},
    "exit 3": lambda **_: {"assistant_early_exit": 6},
}


def count_whole_forwards(model, function):
    """Result of a function, and how often it ran all repetitions: drafts of early exits run fewer."""
    calls, num_layers = [], model.config.num_hidden_layers

    def note(module, *_):
        if module.config.num_hidden_layers == num_layers:
            calls.append(1)

    handle = model.register_forward_hook(note)
    try:
        return function(), len(calls)
    finally:
        handle.remove()


@pytest.mark.parametrize("flips", ["never", "often"])
@pytest.mark.parametrize("prefix_lm", [False, True], ids=["causal", "prefix"])
@pytest.mark.parametrize("kind", ASSISTANTS)
def test_assisted_tokens_equal_greedy(kind, prefix_lm, flips):
    model = flipping_model(flips, prefix_lm=prefix_lm)
    inputs = prompts(1, 7)
    # The prompt repeats itself, so that there is something to look up.
    inputs = {name: torch.cat([value] * 3, dim=1) for name, value in inputs.items()}
    options = {"do_sample": False, "max_new_tokens": 24}
    expected = model.generate(**inputs, **options)
    assistant = ASSISTANTS[kind](flips=flips, prefix_lm=prefix_lm)
    tokens, num_forwards = count_whole_forwards(model, lambda: model.generate(**inputs, **options, **assistant))
    assert torch.equal(tokens, expected)
    assert model.config.num_hidden_layers == 8, "an early exit is set back"
    if kind != "smaller model":  # which knows nothing of the text
        assert num_forwards < 24, "right drafts save forwards"


def test_a_target_with_speed_saved_says_how_it_can_be_assisted():
    model, inputs = flipping_model(), prompts(1, 7)
    expected = model.generate(**inputs, **GREEDY)
    model.generation_config.speed = True
    with pytest.raises(ValueError, match="or set `speed=False`"):
        model.generate(**inputs, **GREEDY, assistant_model=flipping_model())
    assert torch.equal(model.generate(**inputs, **GREEDY, assistant_model=flipping_model(), speed=False), expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tokenizer):
    """Copies of the shipped checkpoint with a chat template: one as it is, one with `speed=True` saved."""
    template = "{{ bos_token + messages[-1]['content'] + eos_token }}"  # the prompt of this checkpoint: a text
    copies = {}
    for name in ("plain", "saved"):
        copies[name] = shutil.copytree(CHECKPOINT, tmp_path_factory.mktemp("served") / name)
        (copies[name] / "chat_template.jinja").write_text(template, encoding="utf-8")
    GenerationConfig.from_pretrained(CHECKPOINT, speed=True).save_pretrained(copies["saved"])
    return copies


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """OpenAI's client of a server that `speed-hf serve` runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float64"]
    log = tmp_path_factory.mktemp("server") / "log"
    with open(log, "w", encoding="utf-8") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "speed_hf.cli", *command], stdout=file, stderr=subprocess.STDOUT
        )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        for _ in range(600):
            try:
                direct.open(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                assert server.poll() is None, log.read_text()[-3000:]
                time.sleep(0.2)
        http_client = openai.DefaultHttpxClient(trust_env=False)
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", http_client=http_client)
    finally:
        server.terminate()
        server.wait(timeout=60)


def ask(client, folder, text, stream, **options):
    """The answer to a chat of one message, and the number of pieces that it came in."""
    answer = client.chat.completions.create(
        model=str(folder), messages=[{"role": "user", "content": text}], stream=stream, extra_body=options
    )
    if not stream:
        return answer.choices[0].message.content, 1
    pieces = [chunk.choices[0].delta.content for chunk in answer]
    return "".join(filter(None, pieces)), sum(map(bool, pieces))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("kind", ["plain", "saved", "asked"])
def test_a_served_model_writes_the_plain_text(kind, stream, client, folders, model, tokenizer):
    expected = plain_text(model, tokenizer, TEXTS[0])
    options = {"max_tokens": GREEDY["max_new_tokens"], "temperature": 0}
    if kind == "asked":
        options = {"generation_config": json.dumps({**GREEDY, "speed": True})}
    text, num_pieces = ask(client, folders["saved" if kind == "saved" else "plain"], TEXTS[0], stream, **options)
    assert text == expected
    assert num_pieces > 1 or not stream


@pytest.mark.parametrize("kind", ["saved", "asked"])
def test_a_served_model_decodes_by_the_pipeline(kind, client, folders):
    # The text cannot tell, but the pipeline refuses what it cannot give.
    options = {**GREEDY, "output_hidden_states": True}
    text, _ = ask(client, folders["plain"], TEXTS[0], True, generation_config=json.dumps(options))
    assert text
    if kind == "asked":
        options["speed"] = True
    folder = folders["saved" if kind == "saved" else "plain"]
    with pytest.raises(openai.APIError) as refusal:
        ask(client, folder, TEXTS[0], True, generation_config=json.dumps(options))
    assert "`output_hidden_states` must not be set with `speed=True`" in refusal.value.body


@pytest.mark.parametrize("speed", [False, True])
def test_the_option_speed_of_the_server_turns_the_pipeline_on(speed, monkeypatch):
    app, transformers = import_module("transformers.cli.transformers"), sys.modules["transformers"]
    seen = []

    def serve(args, prog_name):
        # As the server of transformers finds the class of a checkpoint.
        loaded = transformers.SpeedT5ForCausalLM.from_pretrained(CHECKPOINT)
        assert type(loaded) is SpeedT5ForCausalLM
        seen.append((args, getattr(loaded.generation_config, "speed", False)))

    monkeypatch.setattr(app, "app", serve)
    monkeypatch.setattr(transformers, "SpeedT5ForCausalLM", SpeedT5ForCausalLM)
    cli.main(["serve", "--port", "1", *(["--speed"] if speed else []), "folder", "--dtype", "float64"])
    assert seen == [(["serve", "--port", "1", "folder", "--dtype", "float64"], speed)]


def test_the_command_is_installed_under_its_name():
    with open(ROOT / "pyproject.toml", "rb") as file:
        module, function = tomllib.load(file)["project"]["scripts"]["speed-hf"].split(":")
    assert getattr(import_module(module), function) is cli.main


EVALUATION = """
import json
import sys
sys.modules["speed_hf"] = None  # as on a machine without the package
import lm_eval
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

folder, tasks, output = sys.argv[1:]
manager = TaskManager(include_path=tasks, include_defaults=False)
results = {}
for name, task, options in (
    ("choice", "choice", None),
    ("plain", "translation", "speed=False"),
    ("speed", "translation", "speed=True"),
    ("saved", "translation", None),
):
    lm = HFLM(pretrained=folder, trust_remote_code=True, dtype="float64", device="cpu", batch_size=2)
    calls, run_repetition = [], lm.model.run_repetition
    lm.model.run_repetition = lambda *args: calls.append(1) or run_repetition(*args)
    lm.model.generation_config.speed = name == "saved"
    run = lm_eval.simple_evaluate(
        model=lm, tasks=[task], task_manager=manager, gen_kwargs=options, log_samples=True, bootstrap_iters=0
    )
    results[name] = {
        "answers": [sample["resps"] for sample in run["samples"][task]],
        "scores": run["results"][task],
        "num_passes": len(calls),
    }
with open(output, "w", encoding="utf-8") as file:
    json.dump(results, file)
"""


@pytest.mark.slow  # the harness is large, so it is not among what the other tests install
def test_lm_evaluation_harness_scores_a_checkpoint(tmp_path, model, tokenizer):
    pytest.importorskip("lm_eval", reason="needs the extra lm-eval: pip install -e '.[lm-eval]'")
    choices = ["Speichern Sie Ihre Arbeit.", "Die Katze schläft."]
    rows = [{"source": text, "choices": choices, "label": label} for label, text in enumerate(TEXTS[:2])]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tasks / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "<pad>{{source}}</s>",  # the start token makes the harness add none
        "target_delimiter": "",
    }
    choice = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}],
    }
    translation = {
        "task": "translation",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[label]}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": GREEDY["max_new_tokens"]},
        "metric_list": [{"metric": "bleu"}],
    }
    for task in (choice, translation):
        (tasks / f"{task['task']}.yaml").write_text(yaml.safe_dump({**shared, **task}), encoding="utf-8")

    process = subprocess.run(
        [sys.executable, "-c", EVALUATION, CHECKPOINT, tasks, tmp_path / "results.json"],
        env={
            **os.environ,
            "HF_MODULES_CACHE": str(tmp_path / "modules"),
            "HF_DATASETS_CACHE": str(tmp_path / "datasets"),
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))

    texts = [plain_text(model, tokenizer, row["source"]) for row in rows]
    for kind in ("plain", "speed", "saved"):
        assert [answer[0][0] for answer in results[kind]["answers"]] == texts
        assert results[kind]["scores"] == results["plain"]["scores"]
    # Only pipelined decoding calls the method that is counted.
    assert results["speed"]["num_passes"] == results["saved"]["num_passes"] > results["plain"]["num_passes"] == 0

    guesses = []
    for row, answers in zip(rows, results["choice"]["answers"], strict=True):
        prompt = tokenizer(row["source"])["input_ids"]
        scores = []
        for text, answer in zip(choices, answers, strict=True):
            new = tokenizer(f"<pad>{row['source']}</s>{text}", add_special_tokens=False)["input_ids"][len(prompt) :]
            logits = model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1]
            scores.append(logits.detach().log_softmax(-1)[range(len(new)), new].sum().item())
            assert float(answer[0][0]) == pytest.approx(scores[-1])
        guesses.append(scores.index(max(scores)))
    accuracy = sum(guess == row["label"] for guess, row in zip(guesses, rows, strict=True)) / len(rows)
    assert results["choice"]["scores"]["acc,none"] == accuracy
