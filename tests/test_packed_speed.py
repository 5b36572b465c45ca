# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights packed for the processor: the same products, never stale, gone with the model."""

import copy
import gc
import weakref

import pytest
import torch
from tiny_models import flipping_model, prompts
from torch import nn

from speed_hf.packed_speed import PackedWeights, multiply


class Layers(nn.Module):
    def __init__(self, dtype=torch.float32, bias=False):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(24, 40, bias=bias), nn.Linear(24, 8, bias=bias)
        self.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_packed_products_equal_plain_ones(dtype, num_rows):
    model = Layers(dtype)
    states = torch.randn(num_rows, 24, dtype=dtype)
    packed = PackedWeights.of(model)
    for layers in ((model.a, model.b), (model.b,)):
        for got, expected in zip(packed(states, *layers), multiply(states, *layers), strict=True):
            tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


CHANGES = {
    "in place": lambda layer: layer.weight.add_(1),
    "through data": lambda layer: layer.weight.data.mul_(-2),
    "one number through data": lambda layer: layer.weight.data[3].view(-1)[5:6].fill_(9),
    "new tensor": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(40, 24))),
    "loaded": lambda layer: layer.load_state_dict({"weight": torch.randn(40, 24)}),
    "other precision": lambda layer: layer.to(torch.bfloat16),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_packed_weights_follow_every_change(name):
    model = Layers()
    states = torch.randn(3, 24)
    before = PackedWeights.of(model)(states, model.a)[0].clone()
    CHANGES[name](model.a)
    states = states.to(model.a.weight.dtype)
    after = PackedWeights.of(model)(states, model.a)[0]
    torch.testing.assert_close(after, model.a(states), rtol=1e-2, atol=1e-2)
    assert not torch.allclose(after.float(), before, atol=1e-3) or name == "other precision"


def test_packing_happens_once():
    model = Layers()
    first = PackedWeights.of(model)
    first(torch.randn(3, 24), model.a)
    product = first._products[model.a]
    again = PackedWeights.of(model)
    assert again is first and again._products[model.a] is product


def test_layers_that_are_not_plain_are_called():
    model = Layers(bias=True)
    states, calls = torch.randn(3, 24), []
    torch.testing.assert_close(PackedWeights.of(model)(states, model.a)[0], model.a(states))
    hooked = Layers()
    hooked.a.register_forward_hook(lambda *args: calls.append(args))
    PackedWeights.of(hooked)(states, hooked.a)
    assert calls


def test_packed_weights_go_with_the_model_and_are_not_copied():
    model = Layers()
    PackedWeights.of(model)(torch.randn(3, 24), model.a)
    twin = copy.deepcopy(model)
    assert not PackedWeights.of(twin)._products
    gone = weakref.ref(PackedWeights.of(model))
    del model
    gc.collect()
    assert gone() is None


def test_a_trained_model_decodes_with_its_new_weights():
    model = flipping_model("often", dtype=torch.float32)
    inputs = prompts(1, 6)
    before = model.generate(**inputs, max_new_tokens=20, speed=True, do_sample=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(**inputs, labels=inputs["input_ids"]).loss.backward()
    optimizer.step()
    after = model.generate(**inputs, max_new_tokens=20, speed=True, do_sample=False)
    assert torch.equal(after, model.generate(**inputs, max_new_tokens=20, do_sample=False))
    assert not torch.equal(after, before)


class Quantized(torch.Tensor):
    """A weight that knows how to multiply, like those of quantization packages, and has no numbers to look at."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.view, torch.Tensor.data_ptr, torch.cat):
            raise NotImplementedError(f"no {function}")
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


def test_quantized_weights_multiply_by_themselves():
    model = flipping_model("often", torch.float32)
    expected = model.generate(**prompts(2, 5), max_new_tokens=9, do_sample=False)
    for layer in model.model.layers:
        weight = layer.mlp.wo.weight.detach().as_subclass(Quantized)
        layer.mlp.wo._parameters["weight"] = weight
    output = model.generate(**prompts(2, 5), max_new_tokens=9, do_sample=False, speed=True)
    assert torch.equal(output, expected)
