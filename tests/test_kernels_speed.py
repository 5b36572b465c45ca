# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The compiled operations of a pass: the same numbers as torch's, and the same text."""

import copy

import pytest
import torch
from tiny_models import COMPILED_SIZES, HAS_COMPILER, flipping_model, prompts
from torch.utils import cpp_extension

from speed_hf import kernels_speed, rows_speed
from speed_hf.kernels_speed import TorchOperations, load_kernels
from speed_hf.packed_speed import PackedWeights


TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture
def compiled():
    if not HAS_COMPILER:
        pytest.skip("the operations need a C++ compiler and ninja, and this machine has not got both")
    return load_kernels()


def assert_close(got, expected):
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got, expected.to(got.dtype), rtol=tolerance, atol=tolerance)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 24), (5, 100), (2, 3, 64)], ids=str)
def test_compiled_norm_equals_torchs(compiled, dtype, shape):
    states = torch.randn(*shape, dtype=dtype) * 100
    states[0] = 0
    weight = torch.randn(shape[-1], dtype=dtype)
    assert_close(compiled.rms_norm(states, weight, 1e-6), TorchOperations.rms_norm(states, weight, 1e-6))
    columns = torch.randn(shape[-1], 7, dtype=dtype).T
    assert_close(compiled.rms_norm(columns, weight, 1e-6), TorchOperations.rms_norm(columns, weight, 1e-6))


def test_a_norm_of_another_precision_is_torchs(compiled):
    states, weight = torch.randn(3, 24, dtype=torch.bfloat16), torch.randn(24)
    expected = TorchOperations.rms_norm(states, weight, 1e-6)
    assert torch.equal(compiled.rms_norm(states, weight, 1e-6), expected)


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 6, 50])
def test_compiled_gelu_equals_torchs(compiled, dtype, num_rows):
    # Halves of one product, as the model has them, from 0 to where the tanh is 1 in any precision.
    gate, states = (torch.randn(num_rows, 2 * 33, dtype=dtype) * 4).split(33, dim=-1)
    gate[0, :4] = torch.tensor([0.0, 300.0, -300.0, -11.0])
    assert_close(compiled.gated_gelu(gate, states), TorchOperations.gated_gelu(gate, states))


@DTYPES
def test_what_is_not_a_number_stays_so(compiled, dtype):
    states, weight = torch.randn(3, 64, dtype=dtype), torch.ones(64, dtype=dtype)
    states[1, 5] = torch.nan
    for got in (compiled.rms_norm(states, weight, 1e-6), compiled.gated_gelu(states, states)):
        assert got[1].isnan().any() and not got[[0, 2]].isnan().any()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 1), (1, 37), (7, 1000)], ids=str)
def test_compiled_argmax_is_the_first_of_the_largest(compiled, dtype, shape):
    scores = (torch.randn(*shape) * 3).round().to(dtype)  # with many equal ones
    assert torch.equal(compiled.argmax(scores), scores.argmax(-1))
    scores.fill_(-torch.inf)
    assert torch.equal(compiled.argmax(scores), torch.zeros(shape[0], dtype=torch.long))
    scores[0, -1] = torch.nan
    assert torch.equal(compiled.argmax(scores), scores.argmax(-1))


@DTYPES
@pytest.mark.parametrize("memory_dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("head_dim", [10, 32, 64])
@pytest.mark.parametrize("padded", [False, True])
def test_compiled_attention_stores_and_meets_exactly_its_keys(compiled, dtype, memory_dtype, head_dim, padded):
    torch.manual_seed(0)
    num_heads, num_columns = 3, 40
    # Two rows are neighbours of one sequence in one repetition: the second meets the key that the first just stored.
    repetitions, sequences = torch.tensor([0, 0, 0, 1, 2]), torch.tensor([0, 1, 1, 1, 0])
    columns = torch.tensor([39, 7, 8, 5, 2])
    query, key, value = torch.randn(5, 3 * num_heads * head_dim).to(dtype).view(5, 3, num_heads, head_dim).unbind(1)
    memory = torch.randn(2, 3, 2, num_heads, num_columns, head_dim).to(memory_dtype)
    for row in range(5):
        memory[:, repetitions[row], sequences[row], :, columns[row] :] = float("nan")  # nobody may look there
    expected_memory = memory.clone()
    line = torch.randn(num_heads, 2 * num_columns - 1)
    seen = torch.ones(2, num_columns, dtype=torch.bool)
    if padded:
        seen[1, :3] = seen[0, 1] = False

    got = compiled.attend(query, key, value, memory, repetitions, sequences, columns, line, seen if padded else None)
    for row in range(5):
        place = (repetitions[row], sequences[row], slice(None), columns[row])
        expected_memory[0][place], expected_memory[1][place] = key[row], value[row]
    assert torch.equal(memory.nan_to_num(), expected_memory.nan_to_num())
    for row in range(5):
        num_keys = int(columns[row]) + 1
        keys, values = expected_memory[:, repetitions[row], sequences[row], :, :num_keys].double()
        scores = (keys * query[row].double()[:, None]).sum(-1) + line[:, num_columns - num_keys : num_columns]
        scores = scores.masked_fill(~seen[sequences[row], :num_keys], -torch.inf)
        assert_close(got[row], (scores.softmax(-1)[..., None] * values).sum(1))


@DTYPES
@pytest.mark.parametrize("num_outputs, num_inputs", [(32, 32), (96, 160), (64, 48), (64, 40), (33, 64)])
def test_compiled_products_equal_exact_ones(compiled, dtype, num_outputs, num_inputs):
    torch.manual_seed(0)
    layer = torch.nn.Linear(num_inputs, num_outputs, bias=False).to(dtype)
    states = torch.randn(num_inputs, 100).to(dtype).T  # not contiguous
    product = PackedWeights.of(layer, compiled)
    exact = states.double() @ layer.weight.double().T
    for num_rows in (0, 1, 6, 12, 13, 16, 17, 33, 50, 100):  # around whole groups of 12 and 16, and pairs of them
        (got,) = product(states[:num_rows], layer)
        assert got.dtype == dtype
        torch.testing.assert_close(got, exact[:num_rows].to(dtype), rtol=TOLERANCES[dtype], atol=1e-4)


@DTYPES
def test_a_row_of_a_compiled_product_does_not_depend_on_its_neighbours(compiled, dtype):
    weight = torch.randn(64, 96, dtype=dtype)
    if not compiled.can_pack(weight):
        pytest.skip(f"products in {dtype} are oneDNN's on this processor")
    product = compiled.packed_product(weight)
    states = torch.randn(40, 96, dtype=dtype)
    states[20] = torch.nan
    together = product(states)
    assert together[20].isnan().all()
    for row in range(40):
        assert row == 20 or torch.equal(product(states[row : row + 1])[0], together[row])


def _scores_of_some_kind(kind):
    weight, states = torch.randn(1024, 64), torch.randn(7, 64)
    if kind == "ties":
        weight, states = weight.round(), states.round()
        weight[512:] = weight[:512].clone()
    elif kind == "all equal":
        weight[:] = weight[0]
    elif kind == "lengths":
        weight *= torch.randn(1024, 1).exp() * 3
        states[0] = 0
    elif kind == "large and small":
        weight[100] *= 1e30
        states[1] *= 1e20
        states[2] *= 1e-30
    elif kind == "not numbers":
        weight[[3, 700], 5] = torch.nan
        weight[900, 1] = -torch.inf
        states[4, 2] = torch.inf
    return weight, states


@DTYPES
@pytest.mark.parametrize("kind", ["random", "ties", "all equal", "lengths", "large and small", "not numbers"])
def test_the_argmax_of_a_product_is_that_of_all_its_outputs(compiled, dtype, kind):
    torch.manual_seed(0)
    for num_inputs in (64, 48):
        weight, states = (numbers[:, :num_inputs].to(dtype) for numbers in _scores_of_some_kind(kind))
        # Not the product itself, which may leave the search out on processors with tiles.
        library = compiled.library
        if not library.can_pack.default(weight):
            assert dtype == torch.bfloat16
            pytest.skip(f"products of {num_inputs} inputs in {dtype} are oneDNN's on this processor")
        packed = library.pack.default(weight)
        rough = library.pack_rough.default(weight)
        expected = compiled.argmax(library.multiply.default(states, packed))
        assert torch.equal(library.argmax_of_product.default(states, packed, *rough), expected)
        product = compiled.packed_product(weight)
        assert torch.equal(product.argmax(states, weight), expected)
        assert product.argmax(states[:0], weight).shape == (0,)


def test_a_search_for_the_argmax_multiplies_little(compiled):
    torch.manual_seed(0)
    weight, states = torch.randn(4096, 64), torch.randn(5, 64)
    packed, rough = compiled.library.pack.default(weight), compiled.library.pack_rough.default(weight)
    scores = states @ weight.T
    num_blocks, size = packed.shape[1], packed.shape[-1]
    near = {output // size for output in (scores > scores.amax(1, keepdim=True) - 4).nonzero()[:, 1].tolist()}
    assert len(near) < num_blocks / 4
    for block in set(range(num_blocks)) - near:
        packed[:, block] = torch.nan  # which would be the largest, if anybody looked
    assert torch.equal(compiled.library.argmax_of_product.default(states, packed, *rough), scores.argmax(-1))


def test_a_search_counts_its_own_rows(compiled):
    weight = torch.nn.Parameter(torch.randn(32128, 768))
    rows = [compiled.num_reads_of_argmax(weight, num_rows) for num_rows in (1, 4, 6, 60)]
    assert 0 < rows[0] == rows[1] < rows[2] < rows[3] / 4
    assert rows[0] < TorchOperations.num_reads_of_argmax(weight, 1)
    other = torch.nn.Parameter(torch.randn(33, 768))  # not packed by the compiled operations, so not searched
    assert compiled.num_reads_of_argmax(other, 6) == TorchOperations.num_reads_of_argmax(other, 6)


@pytest.fixture
def calls(compiled, monkeypatch):
    """How often whole layers were run by the compiled operation."""
    counts, layer = [], compiled.layer
    monkeypatch.setattr(compiled, "layer", lambda *args: counts.append(len(args[0])) or layer(*args))
    return counts


OPTIONS = {"max_new_tokens": 30, "do_sample": False}


@pytest.mark.parametrize("flips", ["seldom", "often"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_whole_layers_write_plain_text(calls, flips, batch_size):
    model = flipping_model(flips, torch.float32, **COMPILED_SIZES)
    inputs = prompts(batch_size, 9, padded=True)
    output = model.generate(**inputs, **OPTIONS, speed=True, speed_kernels=True)
    assert torch.equal(output, model.generate(**inputs, **OPTIONS))
    assert len(calls) > 30


@DTYPES
def test_whole_layers_equal_their_parts_to_the_bit(compiled, dtype, calls, monkeypatch):
    model = flipping_model("often", dtype, **COMPILED_SIZES)
    options = {**OPTIONS, "speed": True, "speed_kernels": True, "return_dict_in_generate": True}
    whole = model.generate(**prompts(2, 9), **options)
    if not compiled.library.can_pack.default(model.lm_head.weight):
        pytest.skip(f"products in {dtype} are oneDNN's on this processor")
    assert calls
    monkeypatch.setattr(PackedWeights, "of_layer", lambda self, layer: None)
    parts = model.generate(**prompts(2, 9), **options)
    assert torch.equal(whole.sequences, parts.sequences)
    for one, other in zip(whole.cache.layers, parts.cache.layers, strict=True):
        assert torch.equal(one.keys, other.keys) and torch.equal(one.values, other.values)


class Doubled(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return 2 * self.inner(*args, **kwargs)


def _replace_a_norms_weight(model):
    norm = model.model.layers[0].post_attention_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * torch.linspace(-2, 2, len(norm.weight)))


LAYER_CHANGES = {
    "hook on a norm": lambda model: model.model.layers[0].input_layernorm.register_forward_hook(
        lambda *args: args[2] * torch.linspace(-2, 2, args[2].shape[-1])
    ),
    "hook on attention": lambda model: model.model.layers[0].self_attn.register_forward_hook(
        lambda *args: (args[2][0] * 3, None)
    ),
    "another feed-forward": lambda model: setattr(model.model.layers[0], "mlp", Doubled(model.model.layers[0].mlp)),
    "another linear": lambda model: setattr(
        model.model.layers[0].self_attn, "o", Doubled(model.model.layers[0].self_attn.o)
    ),
    "weight of a norm": _replace_a_norms_weight,
    "weight of a norm in place": lambda model: model.model.layers[1].input_layernorm.weight.data.mul_(-3),
}


@pytest.mark.parametrize("name", LAYER_CHANGES)
@pytest.mark.usefixtures("compiled")
def test_whole_layers_follow_every_change(name):
    model = flipping_model("often", torch.float32, **COMPILED_SIZES)
    inputs, options = prompts(1, 9), {**OPTIONS, "speed": True, "speed_kernels": True}
    before = model.generate(**inputs, **options)
    LAYER_CHANGES[name](model)
    after = model.generate(**inputs, **options)
    assert torch.equal(after, model.generate(**inputs, **OPTIONS))
    assert not torch.equal(after, before)


@pytest.mark.usefixtures("compiled")
def test_bfloat16_keys_are_kept_as_they_are_and_can_be_continued_by_torch():
    model = flipping_model("often", torch.bfloat16)
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(**prompts(2, 5), **options, speed=True, speed_kernels=True)
    assert first.cache.layers[0].keys.dtype == torch.bfloat16
    longer = {"input_ids": first.sequences, "attention_mask": torch.ones_like(first.sequences)}
    plain = model.generate(**longer, **options, cache=copy.deepcopy(first.cache))
    assert torch.equal(model.generate(**longer, **options, cache=first.cache, speed=True).sequences, plain.sequences)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("flips", ["never", "seldom", "often"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_compiled_text_equals_torchs(flips, batch_size):
    model = flipping_model(flips, torch.float32)
    inputs = prompts(batch_size, 9, padded=batch_size > 1)
    options = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    plain = model.generate(**inputs, **options)
    output = model.generate(**inputs, **options, speed=True, speed_kernels=True)
    assert torch.equal(output.sequences, plain.sequences)
    # What is left in the cache can be continued without them.
    longer = {"input_ids": output.sequences, "attention_mask": torch.ones_like(output.sequences)}
    longer["attention_mask"][:, :9] = inputs["attention_mask"]
    continued = model.generate(**longer, **options, cache=output.cache, speed=True)
    assert torch.equal(continued.sequences, model.generate(**longer, **options).sequences)


@pytest.mark.usefixtures("compiled")
def test_a_prefix_is_read_in_both_directions_with_compiled_operations():
    model = flipping_model("often", torch.float32, prefix_lm=True)
    inputs = prompts(2, 9, padded=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False, speed=True, speed_kernels=True)
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=20, do_sample=False))


def test_long_prompts_meet_torchs_attention(compiled, monkeypatch):
    monkeypatch.setattr(rows_speed, "LONG_PROMPT", 4)
    num_rows, attend = [], compiled.attend
    monkeypatch.setattr(compiled, "attend", lambda query, *args: num_rows.append(len(query)) or attend(query, *args))
    model = flipping_model("often", torch.float32)
    inputs = prompts(2, 9, padded=True)
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False, speed=True, speed_kernels=True)
    assert torch.equal(output, model.generate(**inputs, max_new_tokens=20, do_sample=False))
    assert num_rows and max(num_rows) <= 2 * 4


def test_a_machine_without_a_compiler_is_told_what_to_do(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no c++ here")

    monkeypatch.setattr(cpp_extension, "load_inline", fail)
    with pytest.raises(RuntimeError, match=r"could not compile.*no c\+\+ here.*or leave `speed_kernels` out"):
        kernels_speed._compile("speed_hf_none")
