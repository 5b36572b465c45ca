# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate(speed=True)` against plain `generate` of the same model."""

import copy
import time

import numpy as np
import pytest
import torch
from reference import oracle_passes
from tiny_models import flipping_model, prompts, tiny_model
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    StaticCache,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from speed_hf import generation_speed, kernels_speed
from speed_hf.kernels_speed import TorchOperations
from speed_hf.window_speed import NO_TOKEN, Window


def both(model, inputs, **options):
    """Outputs of plain and pipelined decoding as dictionaries."""
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True, **options}
    return model.generate(**inputs, **options), model.generate(**inputs, speed=True, **options)


def reference_exits(model, sequences, prompt_length):
    """Prediction of every exit at every position of one sequence, by one plain forward: `(G, S)`."""
    prefix = torch.ones(1, prompt_length, dtype=torch.bool) if model.config.prefix_lm else None
    logits = model(sequences, prefix_mask=prefix, return_exit_logits=True).exit_logits
    return torch.stack([scores[0].float().argmax(-1) for scores in logits])


@pytest.mark.parametrize("flips", ["never", "seldom", "often"])
@pytest.mark.parametrize("prefix_lm", [False, True], ids=["causal", "prefix"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_pipelined_tokens_equal_greedy(flips, prefix_lm, batch_size):
    model = flipping_model(flips, prefix_lm=prefix_lm)
    for seed, length in enumerate([1, 9]):
        plain, speed = both(model, prompts(batch_size, length, seed=seed, padded=batch_size > 1))
        assert torch.equal(plain.sequences, speed.sequences)


@pytest.mark.parametrize(("layers", "repetitions"), [(1, 1), (3, 1), (1, 6), (3, 2)])
def test_pipelined_tokens_equal_greedy_for_every_shape(layers, repetitions):
    model = flipping_model(num_unique_layers=layers, num_repetitions=repetitions)
    plain, speed = both(model, prompts(2, 5, padded=True))
    assert torch.equal(plain.sequences, speed.sequences)


def test_pipelined_tokens_equal_greedy_over_a_long_horizon():
    model = flipping_model("often", num_unique_layers=1)
    plain, speed = both(model, prompts(1, 7), max_new_tokens=520)
    assert torch.equal(plain.sequences, speed.sequences)
    assert len(set(speed.sequences[0, 100:].tolist())) > 2, "a constant text would prove little"


def test_eager_attention_gives_the_same_tokens():
    model = flipping_model()
    model.set_attn_implementation("eager")
    plain, speed = both(model, prompts(2, 6, padded=True))
    assert torch.equal(plain.sequences, speed.sequences)


@pytest.mark.parametrize("flips", ["never", "seldom", "often"])
@pytest.mark.parametrize("prefix_lm", [False, True], ids=["causal", "prefix"])
def test_passes_equal_the_oracle(flips, prefix_lm):
    model = flipping_model(flips, prefix_lm=prefix_lm)
    for seed, num_new in enumerate([1, 2, 3, 30]):
        inputs = prompts(1, 6, seed=seed)
        output = model.generate(
            **inputs,
            max_new_tokens=num_new,
            do_sample=False,
            speed=True,
            speed_prompt_overlap=False,
            return_dict_in_generate=True,
        )
        exits = reference_exits(model, output.sequences, 6)[:, 5:-1]
        assert exits.shape[1] == num_new
        assert output.speed_stats["num_group_passes"] == oracle_passes(exits.T.numpy())


def test_statistics_describe_the_run():
    model = flipping_model("often")
    output = model.generate(
        **prompts(2, 6), max_new_tokens=25, speed=True, speed_trace=True, return_dict_in_generate=True, do_sample=False
    )
    stats = output.speed_stats
    assert stats["num_new_tokens"] == [25, 25]
    assert stats["num_group_passes"] == len(stats["trace"])
    assert stats["num_rows"] == sum(map(len, stats["trace"]))
    assert stats["rows_per_pass"] == pytest.approx(stats["num_rows"] / stats["num_group_passes"])
    predictions, flips = 0, dict.fromkeys(stats["flips"], 0)
    for sequence in output.sequences:
        exits = reference_exits(model, sequence[None], 6)[:, 5:-1]
        predictions += exits.shape[1]
        for exit_ in flips:
            flips[exit_] += int((exits[exit_ - 1] != exits[exit_ - 2]).sum())
    assert stats["flips"] == pytest.approx({exit_: count / predictions for exit_, count in flips.items()})
    assert max(stats["flips"].values()) > 0.1, "the model of this test must flip"


def test_right_drafts_commit_a_token_per_pass_and_compute_nothing_twice():
    model = flipping_model("never")
    output = model.generate(**prompts(1, 6), max_new_tokens=30, speed=True, return_dict_in_generate=True)
    num_repetitions = model.config.num_repetitions
    assert output.speed_stats["num_group_passes"] == num_repetitions + 29
    # Every position goes through every repetition once, and nothing is started after the last token.
    in_flight_at_the_end = sum(range(num_repetitions))
    assert output.speed_stats["num_rows"] <= num_repetitions * (6 + 29) + in_flight_at_the_end


def test_a_batch_computes_no_padding_rows():
    model = flipping_model("often")
    inputs = prompts(4, 12, padded=True)
    together = model.generate(**inputs, max_new_tokens=20, speed=True, return_dict_in_generate=True, do_sample=False)
    alone = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        output = model.generate(
            ids[mask.bool()][None], max_new_tokens=20, speed=True, return_dict_in_generate=True, do_sample=False
        )
        alone.append(output)
    for row, output in enumerate(alone):
        assert torch.equal(together.sequences[row, 12:], output.sequences[0, -20:])
    # Sequences that finish early stop computing, so together they need exactly what each needs alone.
    assert together.speed_stats["num_rows"] == sum(output.speed_stats["num_rows"] for output in alone)


@pytest.mark.parametrize("num_ids", [1, 3], ids=["one", "list"])
def test_nothing_follows_the_end_of_a_sequence(num_ids):
    model = flipping_model("often")
    inputs = prompts(3, 5, padded=True)
    free = model.generate(**inputs, max_new_tokens=40, do_sample=False)[:, 5:]
    eos = [int(free[row, 9 + 5 * row]) for row in range(num_ids)]
    plain, speed = both(model, inputs, eos_token_id=eos, max_new_tokens=40)
    assert torch.equal(plain.sequences, speed.sequences)
    lengths = speed.speed_stats["num_new_tokens"]
    assert lengths[0] <= 10, "the first sequence ends at the token that was taken from it"
    for row, length in zip(speed.sequences[:, 5:].tolist(), lengths, strict=True):
        assert not any(token in eos for token in row[: length - 1])
        assert row[length - 1] in eos or length == 40
        assert not any(row[length:]), "only padding (0) follows"


def test_pad_equal_to_eos_and_pads_inside_the_prompt_are_harmless():
    model = flipping_model("often")
    inputs = prompts(2, 8)
    inputs["input_ids"][:, 3] = 0
    plain, speed = both(model, inputs, pad_token_id=7, eos_token_id=7)
    assert torch.equal(plain.sequences, speed.sequences)
    # Without a mask: pads on the left are padding up to the start token, others are text.
    ids = torch.tensor([[0, 0, 9, 0, 4, 5]])
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    assert torch.equal(
        model.generate(ids, max_new_tokens=9, speed=True),
        model.generate(ids, attention_mask=mask, max_new_tokens=9),
    )


SAMPLERS = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8, "top_k": 0},
    "min_p": {"min_p": 0.1, "top_k": 0},
    "typical_p": {"typical_p": 0.7, "top_k": 0},
    "eta": {"eta_cutoff": 0.05, "top_k": 0},
    "epsilon": {"epsilon_cutoff": 0.03, "top_k": 0},
    "return_sequences": {"num_return_sequences": 3},
    "with a penalty": {"repetition_penalty": 1.4, "top_k": 9},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_sampled_text_equals_plain_sampling_under_one_seed(name, batch_size):
    model = flipping_model("often")
    options = {"max_new_tokens": 30, "do_sample": True, "eos_token_id": 7, **SAMPLERS[name]}
    texts = []
    for speed in (False, True):
        torch.manual_seed(5)
        texts.append(model.generate(**prompts(batch_size, 6, padded=True), speed=speed, **options))
        texts.append(torch.rand(2))  # the generator must stand where plain decoding leaves it
    assert torch.equal(texts[0], texts[2])
    assert torch.equal(texts[1], texts[3])


@torch.no_grad()
def test_sampled_tokens_follow_the_final_distribution():
    """Chi-square of 100,000 draws of three tokens against the joint distribution of the model."""
    vocab_size, num_draws = 5, 100_000
    model = flipping_model("often", vocab_size=vocab_size)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([[3, 4]])
    texts = torch.cartesian_prod(*[torch.arange(vocab_size)] * 3)
    log_probs = model(torch.cat([ids.expand(len(texts), -1), texts], dim=1)).logits[:, 1:-1].log_softmax(-1)
    expected = num_draws * log_probs.gather(2, texts[..., None]).sum((1, 2)).exp()
    torch.manual_seed(0)
    options = {"max_new_tokens": 3, "do_sample": True, "top_k": 0, "temperature": 1.0}
    drawn = torch.cat(
        [model.generate(ids, num_return_sequences=10_000, speed=True, **options)[:, 2:] for _ in range(10)]
    )
    counts = torch.bincount(drawn @ torch.tensor([vocab_size**2, vocab_size, 1]), minlength=len(texts))
    assert len(expected) == 125 and expected.sum() == pytest.approx(num_draws)
    often = expected >= 5  # where the approximation of chi-square holds; the rest counts as one
    observed = torch.cat([counts[often], counts[~often].sum()[None]]).double()
    wanted = torch.cat([expected[often], expected[~often].sum()[None]]).clamp(min=1e-9)
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    assert often.sum() > 30
    freedom = torch.tensor(len(observed) - 1.0)
    assert torch.special.gammaincc(freedom / 2, statistic.float() / 2) > 1e-3  # the chance of a larger statistic


class BansLastToken(LogitsProcessor):
    """Depends on the whole prefix and on the row of the batch."""

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        for row, ids in enumerate(input_ids):
            scores[row, ids[-1]] = -float("inf")
            scores[row, (ids.sum() + row) % scores.shape[1]] += 2
        return scores


PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.5},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "bad_words": {"bad_words_ids": [[4], [9, 10]]},
    "min_new_tokens": {"min_new_tokens": 12, "eos_token_id": 7},
    "forced_eos": {"forced_eos_token_id": 7, "eos_token_id": 7},
    "prefix_allowed": {"prefix_allowed_tokens_fn": lambda row, ids: [(int(ids[-1]) + row + k) % 61 for k in range(6)]},
    "custom": {"logits_processor": [BansLastToken()]},
    "sequence_bias": {"sequence_bias": [[[4], 3.0], [[9, 10], -9.0]]},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram": {"encoder_no_repeat_ngram_size": 2},
    "forced_bos": {"forced_bos_token_id": 11},
    "suppress": {"suppress_tokens": [3, 4, 5], "begin_suppress_tokens": [6]},
    "exponential_decay": {"exponential_decay_length_penalty": (5, 1.3), "eos_token_id": 7},
    "min_length": {"min_length": 18, "eos_token_id": 7},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash", context_width=2)},
    "remove_invalid": {"remove_invalid_values": True, "renormalize_logits": True},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_see_the_prefix_of_plain_decoding(name):
    model = flipping_model("often")
    plain, speed = both(model, prompts(3, 6, padded=True), **PROCESSORS[name])
    assert torch.equal(plain.sequences, speed.sequences)


def test_scores_and_logits_equal_plain_decoding():
    model = flipping_model("often")
    plain, speed = both(
        model, prompts(2, 6, padded=True), output_scores=True, output_logits=True, repetition_penalty=1.3
    )
    assert len(plain.scores) == len(speed.scores) == 30
    for kind in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(speed[kind]), torch.stack(plain[kind]), rtol=1e-5, atol=1e-5)


class StopsAt(StoppingCriteria):
    """Stops a sequence as soon as its tokens fulfil a condition, and remembers every prefix it saw."""

    def __init__(self, condition):
        self.condition, self.seen = condition, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen += [tuple(ids.tolist()) for ids in input_ids]
        return torch.tensor([self.condition(ids) for ids in input_ids])


@pytest.mark.parametrize("eos", [None, 7], ids=["no_eos", "eos"])
def test_custom_criteria_act_at_the_exact_token(eos):
    model = flipping_model("often")
    outputs = []
    for speed in (False, True):
        criterion = StopsAt(lambda ids: bool(ids[-1] % 5 == 0) and len(ids) > 9)
        options = {"max_new_tokens": 50, "eos_token_id": eos, "stopping_criteria": [criterion], "pad_token_id": 0}
        outputs.append(model.generate(**prompts(3, 6, padded=True), speed=speed, do_sample=False, **options))
        assert all(NO_TOKEN not in prefix for prefix in criterion.seen)
    assert torch.equal(*outputs)
    assert outputs[0].shape[1] < 56


class CountsRows(StoppingCriteria):
    """Knows its batch: stops each sequence after a number of calls of its own, and all its calls are remembered."""

    def __init__(self, num_calls):
        self.num_calls, self.calls = num_calls, []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append(input_ids.clone())
        return torch.tensor([len(self.calls) >= number for number in self.num_calls])


@pytest.mark.parametrize("eos", [None, 7], ids=["no_eos", "eos"])
@pytest.mark.parametrize("flips", ["never", "often"])
def test_criteria_are_called_as_in_plain_decoding(flips, eos):
    model = flipping_model(flips)
    outputs, calls = [], []
    for speed in (False, True):
        criterion = CountsRows([25, 8, 14])
        options = {"max_new_tokens": 30, "eos_token_id": eos, "stopping_criteria": [criterion], "pad_token_id": 0}
        outputs.append(model.generate(**prompts(3, 6, padded=True), speed=speed, do_sample=False, **options))
        calls.append(criterion.calls)
    assert torch.equal(*outputs)
    assert len(calls[0]) == len(calls[1]) and all(map(torch.equal, *calls))


def test_max_time_stops_between_tokens():
    model = flipping_model("often")
    start = time.monotonic()
    output = model.generate(**prompts(1, 6), max_new_tokens=10**5, max_time=0.3, speed=True)
    assert time.monotonic() - start < 20
    assert 6 < output.shape[1] < 10**5 + 6


class Collects(BaseStreamer):
    def __init__(self):
        self.steps, self.ended = [], 0

    def put(self, value):
        self.steps.append(value)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("batch_size", [1, 3])
def test_streamers_get_committed_tokens_in_order_and_once(batch_size):
    model = flipping_model("often")
    streamed = []
    for speed in (False, True):
        streamer = Collects()
        output = model.generate(
            **prompts(batch_size, 6, padded=True),
            max_new_tokens=40,
            eos_token_id=[7, 8, 9],
            streamer=streamer,
            speed=speed,
            do_sample=False,
        )
        assert streamer.ended == 1
        assert torch.equal(torch.stack(streamer.steps[1:], dim=1), output[:, 6:])
        streamed.append(streamer.steps)
    assert all(map(torch.equal, *streamed))


def test_cache_equals_that_of_a_fresh_run():
    model = flipping_model("often")
    inputs = prompts(2, 6)
    output = model.generate(**inputs, max_new_tokens=40, speed=True, return_dict_in_generate=True, do_sample=False)
    cache = output.cache
    assert cache.get_seq_length() == output.sequences.shape[1] - 1
    fresh = model(output.sequences[:, :-1], use_cache=True).cache
    assert len(cache.layers) == len(fresh.layers) == model.config.num_hidden_layers
    for layer, expected in zip(cache.layers, fresh.layers, strict=True):
        torch.testing.assert_close(layer.keys, expected.keys, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(layer.values, expected.values, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("speed", [False, True], ids=["plain", "pipelined"])
def test_a_returned_cache_can_be_continued(speed):
    model = flipping_model("often", prefix_lm=True)
    first = model.generate(**prompts(1, 6), max_new_tokens=10, speed=True, return_dict_in_generate=True)
    text = torch.cat([first.sequences, torch.tensor([[5, 9, 4]])], dim=1)
    prefix = torch.ones(1, 6, dtype=torch.bool)
    expected = model.generate(text, prefix_mask=prefix, max_new_tokens=15, do_sample=False)
    assert torch.equal(model.generate(text, cache=first.cache, max_new_tokens=15, speed=speed), expected)


def test_calling_twice_and_interleaving_changes_nothing():
    model = flipping_model("often")
    a, b = prompts(2, 6, seed=1), prompts(1, 9, seed=2)
    first = model.generate(**a, max_new_tokens=20, speed=True)
    other = model.generate(**b, max_new_tokens=20, speed=True)
    assert torch.equal(model.generate(**a, max_new_tokens=20, speed=True), first)
    assert torch.equal(model.generate(**b, max_new_tokens=20, speed=True), other)


def test_options_are_saved_with_the_generation_config(tmp_path):
    model = flipping_model("seldom")
    model.generation_config.speed = True
    model.generation_config.max_new_tokens = 12
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    output = loaded.generate(**prompts(1, 5), return_dict_in_generate=True)
    assert output.speed_stats["num_new_tokens"] == [12]
    plain = loaded.generate(**prompts(1, 5), return_dict_in_generate=True, speed=False)
    assert "speed_stats" not in plain
    assert torch.equal(plain.sequences, output.sequences)


def test_a_foreign_generation_config_turns_speed_on():
    config = GenerationConfig(speed=True, max_new_tokens=6, return_dict_in_generate=True, do_sample=False)
    before = copy.deepcopy(config.to_dict())
    output = flipping_model("seldom").generate(**prompts(1, 5), generation_config=config)
    assert output.speed_stats["num_new_tokens"] == [6]
    assert config.to_dict() == before


REFUSALS = {
    "unknown option": ({"speed_drafts": 3}, "no option of speed decoding.*speed_prompt_overlap"),
    "not a truth value": ({"speed_prompt_overlap": "yes"}, "must be True or False"),
    "kernels in float64": ({"speed_kernels": True}, "in float32 or bfloat16, got cpu and torch.float64"),
    "beam search": ({"num_beams": 2}, "greedily or by sampling, got beam_search"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "greedily or by sampling, got assisted_generation"),
    "guidance": ({"guidance_scale": 2.0}, "guidance_scale.*remembers tokens"),
    "stateful watermark": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 7])},
        "watermarking_config.*remembers tokens",
    ),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states.*must not be set"),
    "cache kind": ({"cache_implementation": "static"}, "cache_implementation.*own cache"),
    "no cache": ({"use_cache": False}, "use_cache.*must not be False"),
    "static cache": (
        {"cache": StaticCache(config=flipping_model("seldom").config, max_cache_len=9)},
        "or be a DynamicCache, got StaticCache",
    ),
    "mask of another length": ({"attention_mask": torch.ones(1, 3)}, "a column for each of the 5 positions"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused(name):
    options, message = REFUSALS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        flipping_model("seldom").generate(**{**prompts(1, 5), **options}, speed=True, max_new_tokens=4)


def test_an_unknown_option_in_a_foreign_config_is_refused():
    with pytest.raises(ValueError, match=r"speed_magic.*no option"):
        flipping_model("seldom").generate(**prompts(1, 5), generation_config=GenerationConfig(speed_magic=1))


@pytest.mark.parametrize("speed", [False, True], ids=["plain", "pipelined"])
def test_bad_prompts_are_refused(speed):
    model = flipping_model("seldom", max_position_embeddings=16)
    with pytest.raises(ValueError, match="at least one token per sequence, got none"):
        model.generate(torch.empty(1, 0, dtype=torch.long), speed=speed)
    with pytest.raises(ValueError, match="at most `max_position_embeddings`=16 tokens, got 17"):
        model.generate(**prompts(1, 17), speed=speed)
    inputs = prompts(2, 4)
    inputs["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="sequence 1 has none"):
        model.generate(**inputs, speed=speed)


def test_float32_differs_at_near_ties_only():
    model = flipping_model("often", dtype=torch.float32)
    plain, speed = both(model, prompts(4, 8, padded=True), max_new_tokens=120, output_logits=True)
    for row in range(4):
        different = (plain.sequences[row] != speed.sequences[row]).nonzero()
        if len(different):
            first = int(different[0]) - 8
            top = plain.logits[first][row].topk(2).values
            assert top[0] - top[1] < 1e-4, f"row {row} differs at token {first} with a margin of {top[0] - top[1]}"


class DoesNotInvalidate(Window):
    def verify(self, sequences, columns, predictions):
        done = self.done.copy()
        super().verify(sequences, columns, predictions)
        self.done[:] = done


def test_a_window_that_does_not_invalidate_is_caught(monkeypatch):
    monkeypatch.setattr("speed_hf.generation_speed.Window", DoesNotInvalidate)
    model = flipping_model("often")
    try:
        plain, speed = both(model, prompts(1, 6))
    except (RuntimeError, IndexError):
        return
    assert not torch.equal(plain.sequences, speed.sequences)


def test_a_cache_with_one_entry_too_many_is_caught(monkeypatch):
    from speed_hf.cache_speed import SpeedCache

    exact = SpeedCache.set_length
    monkeypatch.setattr(SpeedCache, "set_length", lambda self, num_columns: exact(self, num_columns + 1))
    with pytest.raises(AssertionError):
        test_cache_equals_that_of_a_fresh_run()


def test_a_restart_at_the_wrong_position_is_caught(monkeypatch):
    class RestartsOneOff(Window):
        def verify(self, sequences, columns, predictions):
            done = self.done.copy()
            super().verify(sequences, columns, predictions)
            restarted = np.argwhere((self.done == 0) & (done > 0))
            if len(restarted):
                row, column = restarted[0].tolist()
                self.done[row, column] = done[row, column]

    monkeypatch.setattr("speed_hf.generation_speed.Window", RestartsOneOff)
    plain, speed = both(flipping_model("often"), prompts(1, 6))
    assert not torch.equal(plain.sequences, speed.sequences)


def test_embedded_prompts_give_the_same_tokens():
    model = flipping_model("often", prefix_lm=True)
    inputs = prompts(3, 6, padded=True)
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    mask = inputs["attention_mask"]
    plain, speed = both(model, {"inputs_embeds": embeds, "attention_mask": mask})
    assert speed.sequences.shape == (3, 30), "only new tokens are returned"
    assert torch.equal(plain.sequences, speed.sequences)
    plain, speed = both(model, {"inputs_embeds": embeds, **inputs})
    assert torch.equal(plain.sequences, speed.sequences)


@pytest.mark.parametrize("prefix_lm", [False, True], ids=["causal", "prefix"])
@pytest.mark.parametrize("size", [1, 4, 100])
def test_a_prompt_in_chunks_gives_the_same_tokens(size, prefix_lm):
    model = flipping_model("often", prefix_lm=prefix_lm)
    plain, speed = both(model, prompts(3, 9, padded=True), prefill_chunk_size=size)
    assert torch.equal(plain.sequences, speed.sequences)
    assert speed.cache.get_seq_length() == 38


def test_a_cache_of_plain_decoding_can_be_continued_and_stays_as_it_is():
    model = flipping_model("often")
    first = model.generate(**prompts(2, 6), max_new_tokens=10, return_dict_in_generate=True, do_sample=False)
    text = torch.cat([first.sequences, torch.tensor([[5, 9, 4], [8, 8, 2]])], dim=1)
    length = first.cache.get_seq_length()
    continued = model.generate(text, cache=first.cache, max_new_tokens=15, speed=True, do_sample=False)
    assert torch.equal(continued, model.generate(text, max_new_tokens=15, do_sample=False))
    assert first.cache.get_seq_length() == length


def test_a_cache_can_be_continued_with_the_new_tokens_only():
    model = flipping_model("often")
    outputs = []
    for speed in (False, True):
        options = {"max_new_tokens": 10, "return_dict_in_generate": True, "do_sample": False, "speed": speed}
        first = model.generate(**prompts(2, 6), **options)
        new = torch.cat([first.sequences[:, -1:], torch.tensor([[5, 9, 4], [8, 8, 2]])], dim=1)
        mask = torch.ones(2, first.cache.get_seq_length() + 4, dtype=torch.long)
        outputs.append(
            model.generate(new, attention_mask=mask, cache=first.cache, no_repeat_ngram_size=3, **options).sequences
        )
    assert torch.equal(*outputs)


class ShowsDrafts(Collects):
    def __init__(self):
        super().__init__()
        self.drafts = []

    def put_draft(self, value):
        self.drafts.append((len(self.steps), value))


def test_streamers_that_show_drafts_get_them():
    model = flipping_model("seldom")
    streamer = ShowsDrafts()
    output = model.generate(**prompts(1, 6), max_new_tokens=40, streamer=streamer, speed=True, do_sample=False)
    assert torch.equal(torch.stack(streamer.steps[1:], dim=1), output[:, 6:])
    text, right = output[0, 6:].tolist(), 0
    for num_steps, draft in streamer.drafts:
        assert draft.shape[0] == 1 and 0 < draft.shape[1] <= model.config.num_repetitions
        right += draft[0, 0].item() == text[num_steps - 1]  # the first step is the prompt
    assert right > len(streamer.drafts) / 2


def test_continuous_batching_is_refused():
    with pytest.raises(NotImplementedError, match=r"left-padded batch"):
        flipping_model("seldom").generate_batch([[5, 6]])


@pytest.mark.parametrize(
    ("sizes", "batch_size", "exits", "guesses"),
    [
        ({}, 8, [1, 2, 3, 4, 5, 6], True),  # a small head: asking costs nothing
        ({"hidden_size": 768, "vocab_size": 32128}, 1, [1, 2, 3, 4, 5, 6], True),  # few rows cost nothing
        ({"hidden_size": 768, "vocab_size": 32128}, 4, [1, 2, 6], True),
        ({"hidden_size": 768, "vocab_size": 32128}, 1000, [1, 6], False),  # right guesses would cost more, too
    ],
)
def test_exits_are_skipped_where_their_rows_cost(sizes, batch_size, exits, guesses):
    model = tiny_model(num_repetitions=6, **sizes)
    asked, break_even = generation_speed._plan(model, batch_size, TorchOperations)
    assert asked == exits
    assert (1.25 < break_even < 6) if guesses else break_even == 0


def test_bfloat16_rows_cost_more_where_the_processor_has_no_products_for_them(monkeypatch):
    model = tiny_model(torch.bfloat16, num_repetitions=6, hidden_size=768, vocab_size=32128)
    found = []
    for has_products in (True, False):
        monkeypatch.setattr(kernels_speed, "_multiplies_bfloat16", lambda has_products=has_products: has_products)
        found.append(generation_speed._plan(model, 1, TorchOperations)[1])
    assert 1.25 < found[1] < found[0]
