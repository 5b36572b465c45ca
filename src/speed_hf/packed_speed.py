# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights in the order in which the processor multiplies few rows with them, packed once and used by every pass."""

import weakref
from typing import Any

import torch
from torch import nn

from .kernels_speed import TorchOperations


_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # of the same size


class PackedWeights:
    """
    Products with the weights of one model, for passes of few rows on a CPU.

    `torch.nn.functional.linear` reorders a weight at every call, which for few rows costs more than the product. Here
    the weights of layers that read the same states are laid side by side and reordered once, for oneDNN or for the
    compiled operations (one copy for each that is used; for the argmax of the compiled ones another in 8 bits). Those
    are the only further copies of weights in the project; they live as long as the model and are not saved, copied or
    trained.

    Layers of another kind than plain `nn.Linear` (adapters, quantized weights, hooks), and all where there is no
    packed product of their precision, are called as they are.
    """

    _of_models: "weakref.WeakKeyDictionary[nn.Module, dict[Any, PackedWeights]]" = weakref.WeakKeyDictionary()

    def __init__(self, operations):
        self._operations = operations
        self._products = {}  # first linear -> product, `None` where there is none; and the sizes of its outputs
        self._layers = {}  # whole layer of the model -> its weights, `None` where it must be called part by part
        self._fingerprint = None

    @classmethod
    def of(cls, model: nn.Module, operations=TorchOperations) -> "PackedWeights":
        """
        The packed weights of a model, up to date with its present weights.

        Args:
            model (`nn.Module`): any model; its weights are packed where they are first used.
            operations ([`TorchOperations`] or [`CompiledOperations`]): whose products they are packed for.

        Returns:
            [`PackedWeights`]
        """
        packed = cls._of_models.setdefault(model, {}).setdefault(operations, cls(operations))
        fingerprint = [_fingerprint(module) for module in model.modules()]
        if fingerprint != packed._fingerprint:
            packed._products, packed._layers, packed._fingerprint = {}, {}, fingerprint
        return packed

    def __call__(self, states: torch.Tensor, *linears: nn.Module) -> tuple[torch.Tensor, ...]:
        """
        Args:
            states (`torch.Tensor` of shape `(R, in_features)`).
            linears (`nn.Module`): layers that read them; always in the same groups.

        Returns:
            `tuple(torch.Tensor)`: the output `(R, out_features)` of each layer.
        """
        product, sizes = self._product(linears)
        if not _is_for(product, states):
            return multiply(states, *linears)
        return product(states).split_with_sizes(sizes, dim=-1) if len(sizes) > 1 else (product(states),)

    def argmax(self, states: torch.Tensor, linear: nn.Module) -> torch.Tensor:
        """
        Args:
            states (`torch.Tensor` of shape `(R, in_features)`).
            linear (`nn.Module`): a layer that reads them.

        Returns:
            `torch.Tensor` of shape `(R,)`: the first of the largest outputs of each row, int64, on the CPU.
        """
        product, _ = self._product((linear,))
        if not _is_for(product, states):
            return self._operations.argmax(linear(states))
        return product.argmax(states, linear.weight)

    def of_layer(self, layer: nn.Module) -> list[torch.Tensor] | None:
        """
        The weights of a whole layer of the model, as `operations.layer` takes them.

        Args:
            layer (`nn.Module`): one with `parts()`, see [`SpeedT5DecoderLayer`].

        Returns:
            `list[torch.Tensor]`, or `None` where the layer must be called part by part.
        """
        if layer not in self._layers:
            self._layers[layer] = self._pack_layer(layer)
        return self._layers[layer]

    def _pack_layer(self, layer):
        parts = layer.parts()
        if self._operations.layer is None or parts is None or any(_is_hooked(module) for module in layer.modules()):
            return None
        weights = [part.weight if isinstance(part, nn.Module) else self._packed(part) for part in parts]
        if any(weight is None or weight.dtype != weights[0].dtype for weight in weights):
            return None
        return weights

    def _packed(self, linears):
        return getattr(self._product(linears)[0], "packed", None)

    def _product(self, linears):
        if linears[0] not in self._products:
            self._products[linears[0]] = self._pack(linears)
        return self._products[linears[0]]

    def _pack(self, linears):
        """The product of layers with the same states, `None` where it is not packed; and their outputs' sizes."""
        if not all(_is_plain(linear) for linear in linears):
            return None, None
        weights = [linear.weight.detach() for linear in linears]
        if len({weight.dtype for weight in weights}) > 1 or any(weight.device.type != "cpu" for weight in weights):
            return None, None
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        if not self._operations.can_pack(weight):
            return None, None
        return self._operations.packed_product(weight), [len(weight) for weight in weights]


def multiply(states: torch.Tensor, *linears: nn.Module) -> tuple[torch.Tensor, ...]:
    """The outputs of layers that read the same states, one call each."""
    return tuple(linear(states) for linear in linears)


def _is_for(product, states):
    """Whether states are multiplied with a packed weight, not with the weight as it is."""
    return product is not None and not (product.leaves_one_row and len(states) == 1)


def _is_plain(module):
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
        return False  # quantized weights are tensors of a class of their own
    return module.bias is None and not _is_hooked(module)


def _is_hooked(module):
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _fingerprint(module):
    """Changes with what a module computes, as far as it is computed here."""
    if _is_plain(module):
        return _weight_fingerprint(module.weight)
    parameters = [(id(weight), weight.dtype) for weight in module._parameters.values() if weight is not None]
    return type(module), _is_hooked(module), parameters


def _weight_fingerprint(weight):
    """Changes with the weight, also where `weight.data` was written to, which no version counter sees."""
    place = (weight.data_ptr(), weight.dtype, weight.device, weight.shape)
    if weight.device.type != "cpu" or weight.dtype not in _INTEGERS:
        return place  # not packed
    whole_words = weight.is_contiguous() and weight.shape[-1] * weight.element_size() % 8 == 0
    bits = weight.detach().view(torch.int64 if whole_words else _INTEGERS[weight.dtype])
    return (*place, bits.sum().item())


__all__ = ["PackedWeights", "multiply"]
