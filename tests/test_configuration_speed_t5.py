# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest
from huggingface_hub.errors import StrictDataclassError
from tiny_models import TINY_SIZES, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from speed_hf import SpeedT5Config


SIZE_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "head_dim",
    "num_unique_layers",
    "num_repetitions",
    "max_position_embeddings",
)


def test_defaults_are_2x6_at_t5_base_size():
    config = SpeedT5Config()
    assert (config.num_unique_layers, config.num_repetitions, config.num_hidden_layers) == (2, 6, 12)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32128, 768, 2048)
    assert (config.num_attention_heads, config.head_dim) == (12, 64)
    assert (config.relative_attention_num_buckets, config.relative_attention_max_distance) == (32, 128)
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 0, 1)
    assert config.rms_norm_eps == 1e-6 and config.tie_word_embeddings and not config.prefix_lm


@pytest.mark.parametrize("unique, repetitions", [(1, 1), (12, 1), (1, 12), (4, 3)])
def test_depth_is_derived_from_layers_and_repetitions(unique, repetitions):
    config = SpeedT5Config(num_unique_layers=unique, num_repetitions=repetitions)
    assert config.num_hidden_layers == unique * repetitions
    assert SpeedT5Config(num_unique_layers=4, num_repetitions=3, num_hidden_layers=12).num_hidden_layers == 12


@pytest.mark.parametrize("name", SIZE_NAMES)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_that_are_not_positive_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got {value}"):
        tiny_config(**{name: value})


@pytest.mark.parametrize("name", SIZE_NAMES)
@pytest.mark.parametrize("value", [1.5, "8", True])
def test_sizes_that_are_no_integers_are_refused(name, value):
    with pytest.raises(StrictDataclassError, match=f"'{name}' expected int, got {type(value).__name__}"):
        tiny_config(**{name: value})


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_hidden_layers": 5}, r"`num_hidden_layers` must be .* = 2 \* 3, got 5: leave it out"),
        ({"num_layers": 7}, r"`num_hidden_layers` must be .* = 2 \* 3, got 7: leave it out"),
        ({"relative_attention_num_buckets": 0}, "`relative_attention_num_buckets` must be an even .* got 0"),
        ({"relative_attention_num_buckets": 7}, "`relative_attention_num_buckets` must be an even .* got 7"),
        ({"relative_attention_max_distance": 4}, "`relative_attention_max_distance` must be larger .* got 4: T5"),
        ({"dropout_rate": -0.1}, r"`dropout_rate` must lie in \[0, 1\), got -0.1"),
        ({"dropout_rate": 1.0}, r"`dropout_rate` must lie in \[0, 1\), got 1.0"),
        ({"dropout_rate": math.nan}, r"`dropout_rate` must lie in \[0, 1\), got nan"),
        ({"rms_norm_eps": 0.0}, "`rms_norm_eps` must be a positive number, got 0.0: T5 uses 1e-6"),
        ({"rms_norm_eps": math.inf}, "`rms_norm_eps` must be a positive number, got inf"),
        ({"z_loss": -1e-4}, "`z_loss` must be at least 0, got -0.0001"),
        ({"z_loss": math.inf}, "`z_loss` must be at least 0, got inf"),
        ({"tie_word_embeddings": False}, "`tie_word_embeddings` must be True"),
        ({"pad_token_id": 37}, r"`pad_token_id` must lie in \[0, `vocab_size`=37\), got 37: take the id"),
        ({"bos_token_id": -1}, r"`bos_token_id` must lie in \[0, `vocab_size`=37\), got -1"),
        ({"eos_token_id": 40}, r"`eos_token_id` must lie in \[0, `vocab_size`=37\), got 40"),
        ({"eos_token_id": [1, 37]}, r"`eos_token_id` must lie in \[0, `vocab_size`=37\), got \[1, 37\]"),
        ({"exit_loss_weights": "quadratic"}, "must be one of linear, uniform, final or a list .* got 'quadratic'"),
        ({"exit_loss_weights": [1, 2]}, r"`exit_loss_weights` must hold `num_repetitions`=3 .* got \[1, 2\]"),
        ({"exit_loss_weights": [1, 2, -1]}, r"`exit_loss_weights` must hold .* non-negative .* got \[1, 2, -1\]"),
        ({"exit_loss_weights": [0.0, 0, 0]}, "`exit_loss_weights` must hold .* not all 0"),
        ({"exit_loss_weights": [1, 1, math.nan]}, "`exit_loss_weights` must hold .* nan"),
        ({"exit_loss_weights": [1, 1, math.inf]}, "`exit_loss_weights` must hold .* inf"),
        ({"exit_loss_weights": [1, 1, "1"]}, "'exit_loss_weights'"),
        ({"prefix_lm": "yes"}, "'prefix_lm' expected bool, got str"),
    ],
)
def test_values_that_make_no_model_are_refused(changes, message):
    with pytest.raises((ValueError, StrictDataclassError), match=message):
        tiny_config(**changes)


def test_smallest_and_unset_values_are_accepted():
    tiny_config(relative_attention_num_buckets=2, relative_attention_max_distance=2)
    tiny_config(dropout_rate=0, z_loss=0, exit_loss_weights=[0, 0, 1])
    config = tiny_config(pad_token_id=None, bos_token_id=None, eos_token_id=[1, 36])
    assert config.pad_token_id is None and config.eos_token_id == [1, 36]


def test_exit_weights_follow_their_scheme():
    assert tiny_config().exit_weights() == pytest.approx([1 / 6, 2 / 6, 3 / 6])
    assert tiny_config(exit_loss_weights="uniform").exit_weights() == pytest.approx([1 / 3] * 3)
    assert tiny_config(exit_loss_weights="final").exit_weights() == [0, 0, 1]
    assert tiny_config(exit_loss_weights=[0, 5, 0.5]).exit_weights() == [0.0, 5.0, 0.5]
    for scheme in ("linear", "uniform", "final"):
        for repetitions in (1, 6):
            weights = tiny_config(num_repetitions=repetitions, exit_loss_weights=scheme).exit_weights()
            assert len(weights) == repetitions and sum(weights) == pytest.approx(1)


def test_exit_weights_follow_a_scheme_set_later():
    config = tiny_config()
    config.exit_loss_weights = "final"
    assert config.exit_weights() == [0, 0, 1]
    config.exit_loss_weights = [1.0]
    with pytest.raises(ValueError, match="`exit_loss_weights` must hold `num_repetitions`=3"):
        config.exit_weights()


@pytest.mark.parametrize(
    "alias, name",
    [
        ("d_model", "hidden_size"),
        ("d_ff", "intermediate_size"),
        ("num_heads", "num_attention_heads"),
        ("num_key_value_heads", "num_attention_heads"),
        ("d_kv", "head_dim"),
        ("num_layers", "num_hidden_layers"),
    ],
)
def test_names_of_t5_work_too(alias, name):
    config = tiny_config()
    assert getattr(config, alias) == getattr(config, name)
    if name != "num_hidden_layers":
        sizes = {key: value for key, value in TINY_SIZES.items() if key != name}
        assert getattr(SpeedT5Config(**sizes, **{alias: 16}), name) == 16
        setattr(config, alias, 18)
        assert getattr(config, name) == 18


def changed_everywhere():
    return tiny_config(
        dropout_rate=0.1,
        rms_norm_eps=1e-5,
        prefix_lm=True,
        exit_loss_weights=[1, 0.5, 2],
        z_loss=1e-4,
        max_position_embeddings=77,
        pad_token_id=3,
        bos_token_id=4,
        eos_token_id=[1, 5],
        use_cache=False,
    )


def test_saved_config_loads_equal(tmp_path):
    config = changed_everywhere()
    config.save_pretrained(tmp_path)
    for loaded in (SpeedT5Config.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        assert type(loaded) is SpeedT5Config
        ignored = {"architectures", "auto_map", "transformers_version", "_name_or_path"}
        before, after = ({k: v for k, v in c.to_dict().items() if k not in ignored} for c in (config, loaded))
        assert after == before
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "speed_t5" and saved["num_hidden_layers"] == 6


def test_json_and_dict_give_the_config_back():
    config = changed_everywhere()
    for values in (config.to_dict(), json.loads(config.to_json_string()), config.to_diff_dict()):
        assert SpeedT5Config.from_dict(values).to_dict() == config.to_dict()


def test_spoilt_config_is_not_saved(tmp_path):
    config = tiny_config()
    config.num_repetitions = 4
    with pytest.raises((ValueError, StrictDataclassError), match=r"`num_hidden_layers` must be .* = 2 \* 4, got 6"):
        config.save_pretrained(tmp_path)


@pytest.mark.parametrize(
    "damage, message",
    [
        ({"num_hidden_layers": 13}, r"`num_hidden_layers` must be .* got 13"),
        ({"num_repetitions": 2}, r"`num_hidden_layers` must be .* = 2 \* 2, got 6"),
        ({"hidden_size": "24"}, "'hidden_size' expected int, got str"),
        ({"vocab_size": 0}, "`vocab_size` must be at least 1"),
        ({"tie_word_embeddings": False}, "`tie_word_embeddings` must be True"),
    ],
)
def test_damaged_config_file_is_refused(tmp_path, damage, message):
    tiny_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    for load in (SpeedT5Config.from_pretrained, AutoConfig.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises((ValueError, StrictDataclassError), match=message):
            load(tmp_path)


def test_config_file_that_is_no_json_is_refused(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text()[:-40])
    with pytest.raises(OSError, match=r"config\.json"):
        SpeedT5Config.from_pretrained(tmp_path)
