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
    compiled operations (one copy for each that is used). Those are the only further copies of weights in the project;
    they live as long as the model and are not saved, copied or trained.

    Layers of another kind than plain `nn.Linear` (adapters, quantized weights, hooks), and all where oneDNN has no
    product of their precision, are called as they are.
    """

    _of_models: "weakref.WeakKeyDictionary[nn.Module, dict[Any, PackedWeights]]" = weakref.WeakKeyDictionary()

    def __init__(self, operations):
        self._operations = operations
        self._products = {}  # first layer -> product
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
        fingerprint = [_fingerprint(module.weight) for module in model.modules() if _is_plain(module)]
        if fingerprint != packed._fingerprint:
            packed._products, packed._fingerprint = {}, fingerprint
        return packed

    def __call__(self, states: torch.Tensor, *linears: nn.Module) -> tuple[torch.Tensor, ...]:
        """
        Args:
            states (`torch.Tensor` of shape `(R, in_features)`).
            linears (`nn.Module`): layers that read them; always in the same groups.

        Returns:
            `tuple(torch.Tensor)`: the output `(R, out_features)` of each layer.
        """
        product = self._products.get(linears[0])
        if product is None:
            product = _PackedProduct(linears, self._operations) if _can_pack(linears) else multiply
            self._products[linears[0]] = product
        return product(states, *linears)


def multiply(states: torch.Tensor, *linears: nn.Module) -> tuple[torch.Tensor, ...]:
    """The outputs of layers that read the same states, one call each."""
    return tuple(linear(states) for linear in linears)


class _PackedProduct:
    def __init__(self, linears, operations):
        weights = [linear.weight.detach() for linear in linears]
        self.sizes = [len(weight) for weight in weights]
        self.product = operations.packed_product(torch.cat(weights) if len(weights) > 1 else weights[0])

    def __call__(self, states, *linears):
        output = self.product(states)
        return output.split_with_sizes(self.sizes, dim=-1) if len(self.sizes) > 1 else (output,)


def _can_pack(linears):
    weights = [getattr(linear, "weight", None) for linear in linears]
    return (
        all(_is_plain(linear) for linear in linears)
        and len({weight.dtype for weight in weights}) == 1
        and all(weight.device.type == "cpu" for weight in weights)
        and _onednn_multiplies(weights[0].dtype)
    )


def _is_plain(module):
    if type(module) is not nn.Linear or type(module.weight) is not nn.Parameter:
        return False  # quantized weights are tensors of a class of their own
    return module.bias is None and not (
        module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    )


def _onednn_multiplies(dtype):
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float32


def _fingerprint(weight):
    """Changes with the weight, also where `weight.data` was written to, which no version counter sees."""
    place = (weight.data_ptr(), weight.dtype, weight.device, weight.shape)
    if weight.device.type != "cpu" or weight.dtype not in _INTEGERS:
        return place  # not packed
    whole_words = weight.is_contiguous() and weight.shape[-1] * weight.element_size() % 8 == 0
    bits = weight.detach().view(torch.int64 if whole_words else _INTEGERS[weight.dtype])
    return (*place, bits.sum().item())


__all__ = ["PackedWeights", "multiply"]
