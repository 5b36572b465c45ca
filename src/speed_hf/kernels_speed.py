# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
The operations of a pass as C++, for CPUs: `speed_kernels=True`.

At batch 1 a pass spends a third of its time between the products, in a few dozen operations of torch over a few rows.
Here one call does a whole layer, and in attention every row meets just the keys that it may see. The products
themselves are here where that is faster: in float32, and in bfloat16 on processors with AMX or without AVX-512. The
argmax of the head's product is found without most of it. All is compiled when first asked for, which takes some 20
seconds, and kept in torch's folder for extensions.
"""

import hashlib
import inspect
import os
import platform
import sys
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn


DTYPES = (torch.float32, torch.bfloat16)
ROWS_PER_READ = 12  # that are multiplied with a weight in the time of reading it, on a CPU
ROWS_PER_READ_ELSEWHERE = 150
ROWS_PER_SEARCH = 4  # the same for the copy in 8 bits that the argmax is searched in
ROWS_TO_PACK_FOR = 8  # a hint for oneDNN's layout; products with other numbers of rows are right and nearly as fast


class TorchOperations:
    """The same operations as torch has them; on every device and in every precision."""

    attend = layer = None  # attention and layers are the model's

    @staticmethod
    def rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """States `(*, size)` over the root of their mean square, times `weight`; torch takes float32 for it."""
        return nn.functional.rms_norm(states, weight.shape, weight, eps)

    @staticmethod
    def gated_gelu(gate: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """gelu(gate) * states, with the approximation by tanh."""
        return nn.functional.gelu(gate, approximate="tanh") * states

    @staticmethod
    def argmax(scores: torch.Tensor) -> torch.Tensor:
        """First of the largest scores, in float32, of each row `(R, V)`: `(R,)`, int64 on the CPU."""
        scores = scores.float()  # as plain decoding does, whatever the model's precision
        if scores.device.type != "cpu":
            return scores.argmax(-1).cpu()
        return torch.from_numpy(scores.numpy().argmax(-1))  # a sixth of torch's time

    @staticmethod
    def num_reads(device: torch.device, dtype: torch.dtype, num_rows: int) -> float:
        """How many times longer a product of some rows takes than reading its weight once, about."""
        if device.type != "cpu":
            return max(1, num_rows / ROWS_PER_READ_ELSEWHERE)
        num_reads = max(1, num_rows / ROWS_PER_READ)
        is_widened = dtype == torch.bfloat16 and num_rows > 1 and not _multiplies_bfloat16()  # see PackedProduct
        return 2 * num_reads if is_widened else num_reads

    @classmethod
    def num_reads_of_argmax(cls, weight: torch.Tensor, num_rows: int) -> float:
        """The same for the argmax of a product."""
        return cls.num_reads(weight.device, weight.dtype, num_rows)

    @staticmethod
    def can_pack(weight: torch.Tensor) -> bool:
        """Whether there is a packed product with a weight `(out_features, in_features)` on the CPU."""
        return _has_onednn() and weight.dtype in DTYPES

    @classmethod
    def packed_product(cls, weight: torch.Tensor) -> "PackedProduct":
        """The weight, packed for products with few rows."""
        return PackedProduct(weight, cls)


def _has_onednn():
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def _multiplies_bfloat16():
    return _has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class PackedProduct:
    """
    Products with one packed weight.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`): one that `operations.can_pack`.
        operations ([`TorchOperations`]).

    Attributes:
        leaves_one_row (`bool`): whether one row is better multiplied with the weight as it is.
    """

    def __init__(self, weight, operations):
        self.operations = operations
        # On a processor without instructions for bfloat16 torch multiplies each row by itself. From two rows on the
        # same numbers in float32 are faster, though they are twice as long.
        is_supported = weight.dtype == torch.float32 or _multiplies_bfloat16()
        self.leaves_one_row = not is_supported
        self._dtype = weight.dtype if is_supported else torch.float32
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._dtype), ROWS_TO_PACK_FOR)
        self._product = torch.ops.mkldnn._linear_pointwise.default  # which needs not be chosen by its arguments

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """States `(R, in_features)` -> `(R, out_features)`."""
        return self._product(states.to(self._dtype), self._packed, None, "none", [], "").to(states.dtype)

    def argmax(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """States `(R, in_features)`, and the weight as it was packed -> `operations.argmax` of the product, `(R,)`."""
        return self.operations.argmax(self(states))


class CompiledProduct(PackedProduct):
    """
    The same with the compiled operations, whose argmax reads a copy of the weight in 8 bits and little of the weight.

    Args:
        weight (`torch.Tensor` of shape `(out_features, in_features)`).
        operations ([`CompiledOperations`]).
    """

    def __init__(self, weight, operations):
        self.operations = operations
        self.leaves_one_row = False
        library = operations.library
        self.packed = library.pack.default(weight)
        self._product, self._argmax = library.multiply.default, library.argmax_of_product.default
        self._screens = library.screens.default
        self._rough = None  # made when it is first needed

    def __call__(self, states):
        return self._product(states, self.packed)

    def argmax(self, states, weight):
        if not self._screens(weight, len(states)):
            return super().argmax(states, weight)
        if self._rough is None:
            self._rough = self.operations.library.pack_rough.default(weight.detach())
        return self._argmax(states, self.packed, *self._rough)


class CompiledOperations(TorchOperations):
    """
    The operations of the library that [`load_kernels`] compiled.

    Args:
        library: `torch.ops.<name>`.
    """

    def __init__(self, library):
        self.library = library
        self.gated_gelu = library.gated_gelu.default
        self.argmax = library.argmax.default
        self.attend = library.attend.default
        self.layer = library.layer.default
        self._rms_norm = library.rms_norm.default
        self._has_product = library.can_pack.default

    @staticmethod
    def num_reads(device, dtype, num_rows):
        return TorchOperations.num_reads(device, torch.float32, num_rows)

    def num_reads_of_argmax(self, weight, num_rows):  # type: ignore[override]
        is_packed = type(weight) is nn.Parameter and self._has_product(weight)
        if is_packed and self.library.screens.default(weight, num_rows):
            return max(1, num_rows / ROWS_PER_SEARCH) / weight.element_size()
        return self.num_reads(weight.device, weight.dtype, num_rows)

    def rms_norm(self, states, weight, eps):  # type: ignore[override]
        if states.dtype != weight.dtype:
            return TorchOperations.rms_norm(states, weight, eps)
        return self._rms_norm(states, weight, eps)

    def can_pack(self, weight):  # type: ignore[override]
        return self._has_product(weight) or TorchOperations.can_pack(weight)

    def packed_product(self, weight):  # type: ignore[override]
        if self._has_product(weight):
            return CompiledProduct(weight, self)
        return PackedProduct(weight, self)


def operations_for(device: torch.device, dtype: torch.dtype, speed_kernels: bool):
    """
    Args:
        device, dtype: of the model.
        speed_kernels (`bool`): whether the compiled operations are wanted.

    Returns:
        [`TorchOperations`] or [`CompiledOperations`]

    Raises:
        ValueError: for compiled operations where there are none.
        RuntimeError: where they cannot be compiled.
    """
    if not speed_kernels:
        return TorchOperations
    if device.type != "cpu" or dtype not in DTYPES:
        raise ValueError(
            f"`speed_kernels=True` is for models on a CPU in float32 or bfloat16, got {device.type} and {dtype}: "
            "leave it out."
        )
    return load_kernels()


@lru_cache(maxsize=1)
def load_kernels() -> CompiledOperations:
    """
    The compiled operations, compiled now if this machine does not have them yet.

    Returns:
        [`CompiledOperations`]

    Raises:
        RuntimeError: where they cannot be compiled.
    """
    digest = hashlib.sha256(f"{SOURCE} {_processor()} {torch.__version__}".encode()).hexdigest()[:12]
    name = f"speed_hf_{digest}"
    library = getattr(torch.ops, name)
    if not hasattr(library, "attend"):  # another copy of this file may have loaded them
        _compile(name)
    return CompiledOperations(library)


def _processor():
    """What the processor can do: a folder may be shared with others, on which this one's code would crash."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    return next((line for line in lines if line.startswith("flags")), torch.backends.cpu.get_cpu_capability())


def _compile(name):
    flags = ["-O3", "-std=c++20", "-fopenmp", "-fno-math-errno", "-fno-trapping-math"]
    if platform.machine() in ("x86_64", "AMD64"):
        flags.append("-march=native")
    path = os.environ.get("PATH", "")
    try:
        from torch.utils import cpp_extension  # needs setuptools

        # Without the headers that are not needed, where this torch has a choice.
        has_choice = "no_implicit_headers" in inspect.signature(cpp_extension.load_inline).parameters
        options = {"no_implicit_headers": True} if has_choice else {}
        # pip puts ninja beside Python, where a process that was started without its environment does not look.
        os.environ["PATH"] = os.pathsep.join([path, str(Path(sys.executable).parent)])
        cpp_extension.load_inline(
            name,
            SOURCE.replace("LIBRARY_NAME", name),
            extra_cflags=flags,
            extra_ldflags=["-fopenmp"],
            is_python_module=False,
            **options,
        )
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        raise RuntimeError(
            f"`speed_kernels=True` could not compile its operations ({reason}): install a C++ compiler and ninja "
            "(`pip install ninja`), or leave `speed_kernels` out."
        ) from error
    finally:
        os.environ["PATH"] = path


SOURCE = r"""
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>
#ifdef __AMX_BF16__
#include <ATen/cpu/Utils.h>
#endif
#ifdef __AVX2__
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace {

// Runs 0 .. `count` in parts, by threads that take the next part when they are done with one: where processors are
// shared with others, they are not equally fast.
template <typename Run>
void share_out(int64_t count, const Run& run) {
  const int64_t threads = at::get_num_threads(), step = std::max<int64_t>(1, count / (8 * threads));
  std::atomic<int64_t> next = 0;
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t begin; (begin = next.fetch_add(step)) < count;) run(begin, std::min(begin + step, count));
  });
}

// Everything is computed in float, and rounded where it is stored.
inline float load(const float* from) { return *from; }
inline float load(const at::BFloat16* from) {
  return std::bit_cast<float>(static_cast<uint32_t>(from->x) << 16);
}
inline void store(float* to, float value) { *to = value; }
inline void store(at::BFloat16* to, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // ties to even
  to->x = static_cast<uint16_t>(std::isnan(value) ? 0x7fc0 : nearest);
}
template <typename T>
inline float rounded(float value) {
  T stored;
  store(&stored, value);
  return load(&stored);
}

// e^x within 2 units in the last place, in operations that compilers turn into vector instructions. Cut where nothing
// is lost in a sum with 1, and nobody meets numbers so small that processors take a hundred times longer over them.
constexpr float kCut = 60.0f;
inline float exponential(float x) {
  x = std::min(std::max(x, -kCut), kCut);
  const float shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
  const float whole = shifted - 12582912.0f;
  const float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two parts
  float series = 1.9875691500e-4f;
  series = series * rest + 1.3981999507e-3f;
  series = series * rest + 8.3334519073e-3f;
  series = series * rest + 4.1665795894e-2f;
  series = series * rest + 1.6666665459e-1f;
  series = series * rest + 5.0000001201e-1f;
  series = series * rest * rest + rest + 1.0f;
  return series * std::bit_cast<float>((static_cast<int32_t>(whole) + 127) << 23);
}

template <typename T>
void rms_norm_all(const T* states, const T* weight, T* output, int64_t rows, int64_t size, float eps) {
  for (int64_t row = 0; row < rows; ++row, states += size, output += size) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += load(states + i) * load(states + i);
    const float scale = 1.0f / std::sqrt(sum / size + eps);
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) store(output + i, load(states + i) * scale * load(weight + i));
  }
}

template <typename T>
void gated_gelu_row(const T* gate, const T* states, T* output, int64_t size) {
#pragma omp simd
  for (int64_t i = 0; i < size; ++i) {
    const float x = load(gate + i);
    const float inner = 1.5957691216f * (x + 0.044715f * x * x * x);  // 2 sqrt(2 / pi) (...)
    const float gelu = rounded<T>(x - x / (exponential(inner) + 1.0f));  // x (1 + tanh(inner / 2)) / 2
    store(output + i, gelu * load(states + i));
  }
}

// Numbers of a vector register, in a form that leaves compilers no choice. Without AVX they are taken apart.
#ifdef __AVX512F__
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
constexpr int64_t kPair = 2 * kLanes;
constexpr int64_t kLine = 64;     // bytes that are fetched together
constexpr int64_t kAhead = 4096;  // bytes; farther than the processor fetches by itself

template <typename T>
using Lanes [[gnu::vector_size(kLanes * sizeof(T))]] = T;
template <typename T>
inline Lanes<T> lanes(const void* from) {
  Lanes<T> numbers;
  std::memcpy(&numbers, from, sizeof(numbers));
  return numbers;
}

// Neighbours in memory, in float: the first and the second half of them, or in bfloat16 every other one, which takes
// two instructions.
struct Pair {
  Lanes<float> first, second;
  explicit Pair(const float* from) : first(lanes<float>(from)), second(lanes<float>(from + kLanes)) {}
  explicit Pair(const at::BFloat16* from) {
    const Lanes<uint32_t> both = lanes<uint32_t>(from);
    first = std::bit_cast<Lanes<float>>(both << 16);
    second = std::bit_cast<Lanes<float>>(both & 0xffff0000u);
  }
};

// Has a value in a register, now.
template <typename T>
inline void keep(T& value) {
#ifdef __AVX2__
  asm("" : "+v"(value));
#endif
}

template <int64_t kBytes>
inline void fetch(const void* from) {
  for (int64_t byte = 0; byte < kBytes; byte += kLine) __builtin_prefetch(static_cast<const char*>(from) + byte);
}

// Where numbers of memory are found when they are read as pairs: place among the `kPair` numbers of two registers.
template <typename Memory>
constexpr int64_t place_in_pair(int64_t i) {
  return std::is_same_v<Memory, float> ? i : i % 2 * kLanes + i / 2;
}

// The sum of each of 8 registers.
inline void add_up(const Lanes<float>* sums, float* totals) {
#ifdef __AVX2__
  __m256 narrow[8];
  for (int64_t i = 0; i < 8; ++i) {
#ifdef __AVX512F__
    const auto halves = std::bit_cast<std::array<__m256, 2>>(sums[i]);
    narrow[i] = halves[0] + halves[1];
#else
    narrow[i] = sums[i];
#endif
  }
  const __m256 left = _mm256_hadd_ps(_mm256_hadd_ps(narrow[0], narrow[1]), _mm256_hadd_ps(narrow[2], narrow[3]));
  const __m256 right = _mm256_hadd_ps(_mm256_hadd_ps(narrow[4], narrow[5]), _mm256_hadd_ps(narrow[6], narrow[7]));
  _mm256_storeu_ps(totals, _mm256_permute2f128_ps(left, right, 0x20) + _mm256_permute2f128_ps(left, right, 0x31));
#else
  for (int64_t i = 0; i < 8; ++i) {
    totals[i] = 0;
    for (int64_t lane = 0; lane < kLanes; ++lane) totals[i] += sums[i][lane];
  }
#endif
}

// One query of `kParts` pairs of registers: its dot products with all keys. `ahead`: what to fetch meanwhile.
template <typename Memory, int64_t kParts>
void score_keys(const float* query, const Memory* keys, const Memory* ahead, int64_t num_keys, float* scores) {
  constexpr int64_t n = kParts * kPair;
  Lanes<float> parts[2 * kParts];
  std::memcpy(parts, query, sizeof(parts));
  for (int64_t start = 0; start < num_keys; start += 8) {
    Lanes<float> sums[8] = {};
    for (int64_t i = 0; i < 8; ++i) {
      const int64_t key = std::min(start + i, num_keys - 1);
      fetch<n * sizeof(Memory)>(ahead + key * n);
      for (int64_t part = 0; part < kParts; ++part) {
        const Pair pair(keys + key * n + part * kPair);
        sums[i] += parts[2 * part] * pair.first;
        sums[i] += parts[2 * part + 1] * pair.second;
      }
    }
    float totals[8];
    add_up(sums, totals);
    std::copy_n(totals, std::min<int64_t>(8, num_keys - start), scores + start);
  }
}

// The sum of all values, each times its probability, in the places of pairs.
template <typename Memory, int64_t kParts>
void mix_values(const float* probabilities, const Memory* values, const Memory* ahead, int64_t num_keys,
                float* output) {
  constexpr int64_t n = kParts * kPair;
  Lanes<float> sums[2 * kParts] = {};
  for (int64_t key = 0; key < num_keys; ++key) {
    fetch<n * sizeof(Memory)>(ahead + key * n);
    for (int64_t part = 0; part < kParts; ++part) {
      const Pair pair(values + key * n + part * kPair);
      sums[2 * part] += probabilities[key] * pair.first;
      sums[2 * part + 1] += probabilities[key] * pair.second;
    }
  }
  std::memcpy(output, sums, sizeof(sums));
}

// The same for any size.
template <typename Memory>
void score_keys(const float* query, const Memory* keys, int64_t num_keys, int64_t size, float* scores) {
  for (int64_t key = 0; key < num_keys; ++key) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += query[i] * load(keys + key * size + i);
    scores[key] = sum;
  }
}
template <typename Memory>
void mix_values(const float* probabilities, const Memory* values, int64_t num_keys, int64_t size, float* output) {
  std::fill_n(output, size, 0.0f);
  for (int64_t key = 0; key < num_keys; ++key)
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) output[i] += probabilities[key] * load(values + key * size + i);
}

// Scores to what softmax makes of them, but for the division by their sum, which is returned.
inline float exponentials(const float* bias, const bool* seen, int64_t num_keys, float* scores) {
  constexpr float kLowest = std::numeric_limits<float>::lowest();
  float largest = kLowest, sum = 0;
#pragma omp simd reduction(max : largest)
  for (int64_t key = 0; key < num_keys; ++key) {
    scores[key] = !seen || seen[key] ? scores[key] + bias[key] : kLowest;
    largest = std::max(largest, scores[key]);
  }
#pragma omp simd reduction(+ : sum)
  for (int64_t key = 0; key < num_keys; ++key) {
    scores[key] = scores[key] < largest - kCut ? 0.0f : exponential(scores[key] - largest);
    sum += scores[key];
  }
  return sum;
}

constexpr int64_t kFewKeys = 512;  // whose values the second cache holds until they are needed

// One query and head. `next`: how far from its keys and values those of the next head are.
template <typename Memory, int64_t kSize>
void attend_one(const float* query, const Memory* keys, const Memory* values, const float* bias, const bool* seen,
                int64_t num_keys, int64_t size, int64_t next, float* scores, float* output) {
  if constexpr (kSize % kPair == 0 && kSize > 0) {
    float parts[kSize];
    for (int64_t i = 0; i < kSize; ++i) parts[i / kPair * kPair + place_in_pair<Memory>(i % kPair)] = query[i];
    // While keys are read, their values are fetched, and then the keys of the next head.
    const bool few = num_keys <= kFewKeys;
    score_keys<Memory, kSize / kPair>(parts, keys, few ? values : keys + kAhead / sizeof(Memory), num_keys, scores);
    const float sum = exponentials(bias, seen, num_keys, scores);
    mix_values<Memory, kSize / kPair>(scores, values, few ? keys + next : values + kAhead / sizeof(Memory), num_keys,
                                      parts);
    for (int64_t i = 0; i < kSize; ++i) output[i] = parts[i / kPair * kPair + place_in_pair<Memory>(i % kPair)] / sum;
  } else {
    score_keys(query, keys, num_keys, size, scores);
    const float sum = exponentials(bias, seen, num_keys, scores);
    mix_values(scores, values, num_keys, size, output);
    for (int64_t i = 0; i < size; ++i) output[i] /= sum;
  }
}

template <typename T, typename Memory, int64_t kSize>
void attend_all(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor& memory,
                const int64_t* repetitions, const int64_t* sequences, const int64_t* columns,
                const at::Tensor& bias_line, const std::optional<at::Tensor>& seen, at::Tensor& output) {
  const int64_t rows = query.size(0), heads = query.size(1), size = query.size(2);
  const int64_t per_cell = memory.stride(2), per_head = memory.stride(3);
  const T* query_data = query.const_data_ptr<T>();
  const T* new_data[2] = {key.const_data_ptr<T>(), value.const_data_ptr<T>()};
  const int64_t new_strides[2] = {key.stride(0), value.stride(0)};
  Memory* memory_data = memory.mutable_data_ptr<Memory>();
  const float* line_data = bias_line.const_data_ptr<float>();
  const int64_t line_size = bias_line.size(1), middle = (line_size - 1) / 2;
  T* output_data = output.mutable_data_ptr<T>();
  const auto cell = [&](int64_t row) { return (repetitions[row] * memory.size(2) + sequences[row]) * per_cell; };

  at::parallel_for(0, rows, 8, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t kind = 0; kind < 2; ++kind) {
        const T* from = new_data[kind] + row * new_strides[kind];
        Memory* to = memory_data + kind * memory.stride(0) + cell(row) + columns[row] * size;
        for (int64_t head = 0; head < heads; ++head)
          for (int64_t i = 0; i < size; ++i) store(to + head * per_head + i, load(from + head * size + i));
      }
  });
  share_out(rows * heads, [&](int64_t begin, int64_t end) {
    std::vector<float> scratch(memory.size(4) + 2 * size);
    float *scores = scratch.data(), *wide_query = scores + memory.size(4), *wide_output = wide_query + size;
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / heads, head = task % heads;
      const T* from = query_data + row * query.stride(0) + head * size;
      for (int64_t i = 0; i < size; ++i) wide_query[i] = load(from + i);
      const Memory* keys = memory_data + cell(row) + head * per_head;
      const float* bias = line_data + head * line_size + middle - columns[row];
      const bool* row_seen = seen ? seen->const_data_ptr<bool>() + sequences[row] * seen->stride(0) : nullptr;
      attend_one<Memory, kSize>(wide_query, keys, keys + memory.stride(0), bias, row_seen, columns[row] + 1, size,
                                per_head, scores, wide_output);
      for (int64_t i = 0; i < size; ++i) store(output_data + task * size + i, wide_output[i]);
    }
  });
}

// Calls `run` with a number of the tensor's type.
template <typename Run>
void with_type(const at::Tensor& tensor, const Run& run) {
  if (tensor.scalar_type() == at::kFloat) {
    run(float());
  } else {
    TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "expected float32 or bfloat16, got ", tensor.scalar_type());
    run(at::BFloat16());
  }
}

at::Tensor rms_norm(const at::Tensor& states, const at::Tensor& weight, double eps) {
  const at::Tensor input = states.contiguous();
  at::Tensor output = at::empty_like(input);
  const int64_t size = weight.numel();
  with_type(states, [&](auto type) {
    using T = decltype(type);
    rms_norm_all(input.const_data_ptr<T>(), weight.const_data_ptr<T>(), output.mutable_data_ptr<T>(),
                 input.numel() / size, size, static_cast<float>(eps));
  });
  return output;
}

at::Tensor gated_gelu(const at::Tensor& gate, const at::Tensor& states) {
  TORCH_CHECK(gate.dim() == 2 && gate.stride(1) == 1 && states.stride(1) == 1 && gate.sizes() == states.sizes());
  at::Tensor output = at::empty(gate.sizes(), gate.options());
  const int64_t rows = gate.size(0), size = gate.size(1);
  with_type(gate, [&](auto type) {
    using T = decltype(type);
    const T *gate_data = gate.const_data_ptr<T>(), *states_data = states.const_data_ptr<T>();
    T* output_data = output.mutable_data_ptr<T>();
    at::parallel_for(0, rows, 2, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        gated_gelu_row(gate_data + row * gate.stride(0), states_data + row * states.stride(0),
                       output_data + row * size, size);
    });
  });
  return output;
}

// Numbers in their order as integers, of which compilers find the largest in vector instructions. NaN is above all.
inline int32_t rank(float value) {
  const int32_t bits = std::bit_cast<int32_t>(value + 0.0f);  // -0 becomes 0
  return value != value ? std::numeric_limits<int32_t>::max() : bits ^ ((bits >> 31) & 0x7fffffff);
}

at::Tensor first_largest(const at::Tensor& scores) {
  constexpr int64_t kPart = 256;
  TORCH_CHECK(scores.dim() == 2 && scores.stride(1) == 1);
  const int64_t rows = scores.size(0), size = scores.size(1);
  at::Tensor output = at::empty({rows}, at::kLong);
  int64_t* output_data = output.mutable_data_ptr<int64_t>();
  with_type(scores, [&](auto type) {
    using T = decltype(type);
    const T* data = scores.const_data_ptr<T>();
    at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* line = data + row * scores.stride(0);
        int32_t largest = std::numeric_limits<int32_t>::min();
        int64_t start = 0;  // of the block that has it
        for (int64_t block = 0; block < size; block += kPart) {
          int32_t here = std::numeric_limits<int32_t>::min();
          const int64_t end = std::min(block + kPart, size);
#pragma omp simd reduction(max : here)
          for (int64_t i = block; i < end; ++i) here = std::max(here, rank(load(line + i)));
          if (here > largest) start = block;
          largest = std::max(largest, here);
        }
        int64_t place = start;
        while (rank(load(line + place)) != largest) ++place;
        output_data[row] = place;
      }
    });
  });
  return output;
}

// Products of packed weights. Every sum takes the inputs in the same order, so it does not depend on how many rows are
// multiplied together. Weights are read from memory once, block of outputs by block of outputs, and ahead of time.
//
// Memory is read faster from several places in turns, since processors fetch ahead from each of them by themselves.
// So a weight lies in parts, each with a share of the inputs of all outputs, and sums take two inputs of each in turn.

constexpr int64_t kBlock = kPair;   // outputs that are multiplied together, and rows: as many as registers hold
constexpr int64_t kMostRows = kLanes == 16 ? 12 : 6;
constexpr int64_t kOutputs = 32;    // numbers of outputs must be multiples of it
constexpr int64_t kStreams = 4;     // parts of a weight
constexpr int64_t kTurn = 2;        // inputs, or pairs of them, that are taken from a part in its turn
constexpr int64_t kInputs = 2 * kTurn * kStreams;  // numbers of inputs must be multiples of it

// What to fetch of a part while this is read.
template <typename T>
inline const T* ahead_of(const T* from) { return from + 512 / sizeof(T); }

// Rows in groups of equally many; the last group begins earlier instead of being smaller.
struct Groups {
  int64_t num_rows, count, size;
  Groups(int64_t num_rows, int64_t at_most)
      : num_rows(num_rows), count((num_rows + at_most - 1) / at_most), size((num_rows + count - 1) / count) {}
  int64_t start(int64_t group) const { return std::min(group * size, num_rows - size); };
};

// `kRows` rows times a block of outputs, whose weights lie side by side for each input, in `kParts` parts `stride`
// apart. States are in the order of the sums.
template <typename Weight, int64_t kParts, int64_t kRows>
void multiply_block(const float* states, const Weight* weight, int64_t stride, int64_t inputs, bool fetches,
                    float* output) {
  Lanes<float> sums[kRows][2] = {};
  for (int64_t input = 0; input < inputs; input += kParts * kTurn, weight += kTurn * kBlock)
#pragma GCC unroll 1  // else compilers keep some sums in memory
    for (int64_t part = 0; part < kParts; ++part) {
      const Weight* from = weight + part * stride;
      if (fetches) fetch<kTurn * kBlock * sizeof(Weight)>(ahead_of(from));
#pragma GCC unroll 2
      for (int64_t i = 0; i < kTurn; ++i) {
        Pair pair(from + i * kBlock);
        keep(pair.first), keep(pair.second);  // else compilers read them again for each row
        for (int64_t row = 0; row < kRows; ++row) {
          const float state = states[row * inputs + input + part * kTurn + i];
          sums[row][0] += state * pair.first;
          sums[row][1] += state * pair.second;
        }
      }
    }
  std::memcpy(output, sums, sizeof(sums));
}

template <typename Weight, int64_t kParts, int64_t... kRows>
auto multiply_block_of(int64_t rows, std::integer_sequence<int64_t, kRows...>) {
  constexpr decltype(&multiply_block<Weight, kParts, 1>) all[] = {multiply_block<Weight, kParts, kRows + 1>...};
  return all[rows - 1];
}

// Calls `finish` with row, block and its `kBlock` sums, for some of `num_blocks` blocks and all rows.
template <typename Weight, typename Finish>
void multiply_blocks(const float* states, const Weight* weight, int64_t num_rows, int64_t inputs, int64_t num_blocks,
                     int64_t begin, int64_t end, const Finish& finish) {
  const Groups groups(num_rows, kMostRows);
  constexpr std::make_integer_sequence<int64_t, kMostRows> all;
  const auto multiply = multiply_block_of<Weight, kStreams>(groups.size, all);
  const auto multiply_wide = multiply_block_of<float, 1>(groups.size, all);
  const int64_t part_size = kBlock * inputs / kStreams, stride = num_blocks * part_size;
  const bool widens = !std::is_same_v<Weight, float> && groups.count > 2;  // once, instead of for every group
  std::vector<float> wide(widens ? kBlock * inputs : 0);
  alignas(kLine) float sums[kMostRows * kBlock];
  for (int64_t block = begin; block < end; ++block) {
    const Weight* from = weight + block * part_size;
    float* to = wide.data();
    for (int64_t i = 0; widens && i < inputs / kStreams; i += kTurn)
      for (int64_t part = 0; part < kStreams; ++part)
        for (int64_t j = 0; j < kTurn; ++j, to += kBlock) {
          const Weight* line = from + part * stride + (i + j) * kBlock;
          fetch<kBlock * sizeof(Weight)>(ahead_of(line));
          const Pair pair(line);
          std::memcpy(to, &pair, sizeof(pair));
        }
    for (int64_t group = 0; group < groups.count; ++group) {
      const int64_t start = groups.start(group);
      if (widens)
        multiply_wide(states + start * inputs, wide.data(), 0, inputs, false, sums);
      else
        multiply(states + start * inputs, from, stride, inputs, group == 0, sums);
      for (int64_t row = 0; row < groups.size; ++row) finish(start + row, block, sums + row * kBlock);
    }
  }
}

#ifdef __AMX_BF16__

// A tile is 16 lines of 64 bytes: 16 rows of states by 32 inputs, or 16 pairs of inputs by 16 outputs of a weight.
constexpr int64_t kTile = 16, kTileInputs = 32;

struct alignas(64) TileSizes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {};
  explicit TileSizes(int64_t rows) {
    for (int tile = 0; tile < 8; ++tile) lines[tile] = tile < 6 ? rows : kTile;
  }
};

// One or two tiles of rows times a block of outputs, into `sums`: 16 x 16 numbers for each tile and half of the block.
template <bool kTwo, bool kFetch>
void multiply_tiles(const at::BFloat16* first, const at::BFloat16* second, const at::BFloat16* weight,
                    int64_t inputs, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) _tile_zero(2);
  if (kTwo) _tile_zero(3);
  const int64_t line = inputs * sizeof(at::BFloat16);
  for (int64_t input = 0; input < inputs; input += kTileInputs, weight += kTileInputs * kBlock) {
    if (kFetch)
      fetch<kTileInputs * kBlock * sizeof(at::BFloat16)>(weight + kAhead / sizeof(at::BFloat16));
    _tile_loadd(6, weight, 64);
    _tile_loadd(7, weight + 512, 64);
    _tile_loadd(4, first + input, line);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (kTwo) {
      _tile_loadd(5, second + input, line);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + 256, 64);
  if (kTwo) _tile_stored(2, sums + 512, 64);
  if (kTwo) _tile_stored(3, sums + 768, 64);
}

template <typename Finish>
void multiply_blocks(const at::BFloat16* states, const at::BFloat16* weight, int64_t num_rows, int64_t inputs,
                     int64_t /* num_blocks */, int64_t begin, int64_t end, const Finish& finish) {
  const Groups tiles(num_rows, kTile);
  const TileSizes sizes(tiles.size);
  _tile_loadconfig(&sizes);
  alignas(64) float sums[4 * kTile * kTile], line[kBlock];
  for (int64_t block = begin; block < end; ++block)
    for (int64_t tile = 0; tile < tiles.count; tile += 2) {
      const bool two = tile + 1 < tiles.count;
      const int64_t starts[2] = {tiles.start(tile), tiles.start(tile + 1)};
      const auto multiply = tile ? (two ? multiply_tiles<true, false> : multiply_tiles<false, false>)
                                 : (two ? multiply_tiles<true, true> : multiply_tiles<false, true>);
      multiply(states + starts[0] * inputs, states + starts[1] * inputs, weight + block * inputs * kBlock, inputs,
               sums);
      for (int64_t part = 0; part < (two ? 2 : 1); ++part)
        for (int64_t row = 0; row < tiles.size; ++row) {
          const float* halves = sums + (2 * part * kTile + row) * kTile;
          std::memcpy(line, halves, kTile * sizeof(float));
          std::memcpy(line + kTile, halves + kTile * kTile, kTile * sizeof(float));
          finish(starts[part] + row, block, line);
        }
    }
  _tile_release();
}

constexpr bool kHasTiles = true;
// The operating system must let a process use tiles.
bool has_tiles() { return at::cpu::init_amx(); }

#else

constexpr bool kHasTiles = false;
constexpr int64_t kTileInputs = 32;
bool has_tiles() { return false; }

#endif

// What states are multiplied as. Without tiles, bfloat16 is computed in float.
template <typename T>
using Multiplied = std::conditional_t<kHasTiles && std::is_same_v<T, at::BFloat16>, at::BFloat16, float>;

// Place of an input in the order of the sums.
inline int64_t turn(int64_t input, int64_t inputs) {
  const int64_t share = inputs / kStreams, place = input % share;
  return place / kTurn * kTurn * kStreams + input / share * kTurn + place % kTurn;
}

template <typename T>
at::Tensor multiplied(const at::Tensor& states) {
  if constexpr (!std::is_same_v<Multiplied<T>, float>) return states.to(at::kBFloat16).contiguous();
  const at::Tensor input = states.contiguous();
  at::Tensor output = at::empty(states.sizes(), states.options().dtype(at::kFloat));
  const int64_t rows = states.size(0), inputs = states.size(1), share = inputs / kStreams;
  with_type(input, [&](auto type) {
    const auto* from = input.const_data_ptr<decltype(type)>();
    float* to = output.mutable_data_ptr<float>();
    at::parallel_for(0, rows, 16, [&](int64_t begin, int64_t end) {
      for (int64_t start = begin * inputs; start < end * inputs; start += inputs)
        for (int64_t i = 0; i < share; i += kTurn)
          for (int64_t part = 0; part < kStreams; ++part)
            for (int64_t j = 0; j < kTurn; ++j)
              to[start + i * kStreams + part * kTurn + j] = load(from + start + part * share + i + j);
    });
  });
  return output;
}

bool can_pack(const at::Tensor& weight) {
  if (weight.size(0) % kOutputs != 0 || weight.size(1) % kInputs != 0) return false;
  if (weight.scalar_type() == at::kFloat) return true;
  if (weight.scalar_type() != at::kBFloat16) return false;
  if (kHasTiles) return weight.size(1) % kTileInputs == 0 && has_tiles();
#ifdef __AVX512F__
  return false;  // oneDNN has instructions for it
#else
  return true;
#endif
}

// A hint that memory, not yet written, is better laid out in pages of 2 MB: reading it is 2 to 3 % faster.
void ask_for_large_pages(const at::Tensor& tensor) {
#ifdef __linux__
  constexpr uintptr_t kPage = 2 * 1024 * 1024;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage, end = (address + tensor.nbytes()) / kPage * kPage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

at::Tensor pack(const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && can_pack(weight));
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const int64_t share = inputs / kStreams;
  const at::Tensor ordered =
      weight.scalar_type() == at::kFloat
          ? weight.reshape({outputs / kBlock, kBlock, kStreams, share}).permute({2, 0, 3, 1})
      : !kHasTiles ? weight.reshape({outputs / kBlock, 2, kLanes, kStreams, share}).permute({3, 0, 4, 2, 1})
                   // Tiles of 16 pairs of inputs by 16 outputs, two of them side by side.
                   : weight.reshape({outputs / 32, 2, 16, inputs / 32, 16, 2}).permute({0, 3, 1, 4, 2, 5});
  at::Tensor packed = at::empty(ordered.sizes(), weight.options());
  ask_for_large_pages(packed);
  return packed.copy_(ordered);
}

at::Tensor multiply_packed(const at::Tensor& states, const at::Tensor& packed) {
  const int64_t num_rows = states.size(0), inputs = states.size(1), outputs = packed.numel() / inputs;
  TORCH_CHECK(packed.is_contiguous() && outputs * inputs == packed.numel() && outputs % kOutputs == 0);
  at::Tensor output = at::empty({num_rows, outputs}, states.options());
  if (num_rows == 0) return output;
  with_type(packed, [&](auto type) {
    using T = decltype(type);
    const at::Tensor input = multiplied<T>(states);
    const auto* input_data = input.const_data_ptr<Multiplied<T>>();
    const T* weight_data = packed.const_data_ptr<T>();
    T* output_data = output.mutable_data_ptr<T>();
    share_out(outputs / kBlock, [&](int64_t begin, int64_t end) {
      multiply_blocks(input_data, weight_data, num_rows, inputs, outputs / kBlock, begin, end,
                      [&](int64_t row, int64_t block, const float* sums) {
                        T* line = output_data + row * outputs + block * kBlock;
#pragma omp simd
                        for (int64_t i = 0; i < kBlock; ++i) store(line + i, sums[i]);
                      });
    });
  });
  return output;
}

// The argmax of a product without most of the product: a rough copy of the weight, in 8 bits and with bounds on its
// errors, tells which blocks of outputs may have the largest one. Those alone are multiplied. It is the same argmax to
// the bit, since the bounds hold for the numbers as they are computed, rounding included.

constexpr int64_t kRoughBlock = 16, kRoughRows = 6;  // of which sums fill the registers that all processors have
constexpr int32_t kLargestWeight = 127;
constexpr float kTiny = 1e-30f;  // scores below are not told apart, since processors may round what is near to 0

// 16 numbers of 16 bits, and 8 sums of 32: two neighbours each.
#ifdef __AVX2__
using Sums = __m256i;
inline __m256i widened(const int8_t* from) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline Sums add_pairs(Sums sums, __m256i weights, int32_t states) {
  sums = _mm256_add_epi32(sums, _mm256_madd_epi16(weights, _mm256_set1_epi32(states)));
  keep(sums);  // else compilers add products first, for which there are no registers
  return sums;
}
#else
struct Sums {
  int32_t of[8];
};
inline const int8_t* widened(const int8_t* from) { return from; }
inline Sums add_pairs(Sums sums, const int8_t* weights, int32_t states) {
  const int32_t first = static_cast<int16_t>(states), second = states >> 16;
  for (int64_t i = 0; i < 8; ++i) sums.of[i] += weights[2 * i] * first + weights[2 * i + 1] * second;
  return sums;
}
#endif

// `kRows` rows times a block of outputs. Two inputs of an output lie side by side, and so do two states of 16 bits.
// Weights are in parts `stride` apart, states in the order of the sums.
template <int64_t kRows>
void multiply_roughly(const int32_t* states, const int8_t* weight, int64_t stride, int64_t pairs, bool fetches,
                      int32_t* output) {
  Sums sums[2 * kRows] = {};
  for (int64_t pair = 0; pair < pairs; pair += kStreams * kTurn, weight += kTurn * 2 * kRoughBlock)
#pragma GCC unroll 1
    for (int64_t part = 0; part < kStreams; ++part) {
      const int8_t* from = weight + part * stride;
      if (fetches) fetch<kTurn * 2 * kRoughBlock>(ahead_of(from));
#pragma GCC unroll 2
      for (int64_t i = 0; i < kTurn; ++i, from += 2 * kRoughBlock) {
        const auto first = widened(from), second = widened(from + kRoughBlock);
#pragma GCC unroll 6
        for (int64_t row = 0; row < kRows; ++row) {  // in this form compilers keep the sums in registers
          const int32_t state = states[row * pairs + pair + part * kTurn + i];
          sums[2 * row] = add_pairs(sums[2 * row], first, state);
          sums[2 * row + 1] = add_pairs(sums[2 * row + 1], second, state);
        }
      }
    }
#pragma GCC unroll 12
  for (int64_t i = 0; i < 2 * kRows; ++i) std::memcpy(output + 8 * i, &sums[i], sizeof(Sums));
}

template <int64_t... kRows>
auto multiply_roughly_of(int64_t rows, std::integer_sequence<int64_t, kRows...>) {
  constexpr decltype(&multiply_roughly<1>) all[] = {multiply_roughly<kRows + 1>...};
  return all[rows - 1];
}

// Whether the rough copy is worth it. Without tiles it always is, since fewer bytes are read and not more multiplied.
bool screens(const at::Tensor& weight, int64_t num_rows) {
  if (!kHasTiles || weight.scalar_type() != at::kBFloat16) return true;
  return num_rows <= 2 * kRoughRows && weight.nbytes() > 16 * 1024 * 1024;  // tiles multiply faster than this
}

// A weight in 8 bits, and for each output a scale, the length of its weights and that of what the 8 bits leave out.
std::tuple<at::Tensor, at::Tensor> pack_rough(const at::Tensor& weight) {
  const at::Tensor wide = weight.to(at::kFloat).contiguous();
  const int64_t outputs = wide.size(0), inputs = wide.size(1), share = inputs / (2 * kStreams);
  TORCH_CHECK(outputs % kRoughBlock == 0 && inputs % kInputs == 0);
  at::Tensor packed =
      at::empty({kStreams, outputs / kRoughBlock, share, kRoughBlock, 2}, wide.options().dtype(at::kChar));
  at::Tensor scales = at::empty({3, outputs}, wide.options());
  ask_for_large_pages(packed);
  const float* from = wide.const_data_ptr<float>();
  int8_t* to = packed.mutable_data_ptr<int8_t>();
  float* scale_data = scales.mutable_data_ptr<float>();
  at::parallel_for(0, outputs, kRoughBlock, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin; output < end; ++output) {
      const float* line = from + output * inputs;
      float largest = 0;
      for (int64_t i = 0; i < inputs; ++i) largest = std::max(largest, std::abs(line[i]));
      const float scale = largest / kLargestWeight;
      double length = 0, left_out = 0;  // squared; not a number where a weight is none
      for (int64_t i = 0; i < inputs; ++i) {
        const float number = scale > 0 ? std::nearbyint(line[i] / scale) : 0.0f;
        const int8_t stored = std::abs(number) <= kLargestWeight ? static_cast<int8_t>(number) : 0;
        const int64_t part = i / 2 / share, place = part * (outputs / kRoughBlock) + output / kRoughBlock;
        to[((place * share + i / 2 % share) * kRoughBlock + output % kRoughBlock) * 2 + i % 2] = stored;
        const double real = line[i], difference = real - static_cast<double>(scale) * stored;
        length += real * real;
        left_out += difference * difference;
      }
      scale_data[output] = scale;
      scale_data[outputs + output] = std::sqrt(length);
      scale_data[2 * outputs + output] = std::sqrt(left_out);
    }
  });
  return {packed, scales};
}

// States in 16 bits, two in a number and in the order of the sums, so that no sum of a product is too large for 32.
struct RoughStates {
  std::vector<int32_t> numbers;
  std::vector<float> scales, lengths, left_out;  // of each row: as those of a weight
  RoughStates(const float* states, int64_t num_rows, int64_t inputs)
      : numbers(num_rows * inputs / 2), scales(num_rows), lengths(num_rows), left_out(num_rows) {
    const int64_t pairs = inputs / 2;
    const float most = std::min<int64_t>(32767, std::numeric_limits<int32_t>::max() / (kLargestWeight * inputs));
    for (int64_t row = 0; row < num_rows; ++row, states += inputs) {
      float largest = 0;
      for (int64_t i = 0; i < inputs; ++i) largest = std::max(largest, std::abs(states[i]));
      const float scale = largest / most;
      double length = 0, difference = 0;
      for (int64_t i = 0; i < inputs; ++i) {
        const float number = scale > 0 ? std::nearbyint(states[i] / scale) : 0.0f;
        const auto stored = static_cast<int16_t>(std::abs(number) <= most ? number : 0.0f);
        const double rest = states[i] - static_cast<double>(scale) * stored;
        length += static_cast<double>(states[i]) * states[i];
        difference += rest * rest;
        const auto bits = static_cast<uint32_t>(static_cast<uint16_t>(stored));
        numbers[row * pairs + turn(i / 2, pairs)] |= bits << (i % 2 * 16);
      }
      scales[row] = scale;
      lengths[row] = std::sqrt(length);
      left_out[row] = std::sqrt(difference);
    }
  }
};

// Rows and blocks which may have the row's largest output, ordered by row and block.
std::vector<std::pair<int64_t, int64_t>> candidates(const at::Tensor& states, const at::Tensor& rough,
                                                    const at::Tensor& scales, float rounding) {
  const int64_t num_rows = states.size(0), inputs = states.size(1), num_blocks = rough.size(1), pairs = inputs / 2;
  const int64_t part_size = rough.size(2) * 2 * kRoughBlock;
  const RoughStates rows(states.const_data_ptr<float>(), num_rows, inputs);
  const float *scale_data = scales.const_data_ptr<float>(), *length_data = scale_data + num_blocks * kRoughBlock,
              *left_out_data = length_data + num_blocks * kRoughBlock;
  // A sum of n products in float is off by n * 2^-24 times the lengths of both sides, at most; some roundings follow.
  const float slack = (inputs + 64) * std::exp2(-24.0f), margin = 1 + 1e-5f;
  std::vector<float> lower(num_rows * num_blocks), upper(num_rows * num_blocks);
  const Groups groups(num_rows, kRoughRows);
  const auto multiply = multiply_roughly_of(groups.size, std::make_integer_sequence<int64_t, kRoughRows>());
  share_out(num_blocks, [&](int64_t begin, int64_t end) {
    int32_t sums[kRoughRows * kRoughBlock];
    for (int64_t block = begin; block < end; ++block)
      for (int64_t group = 0; group < groups.count; ++group) {
        const int64_t start = groups.start(group);
        multiply(rows.numbers.data() + start * pairs, rough.const_data_ptr<int8_t>() + block * part_size,
                 num_blocks * part_size, pairs, group == 0, sums);
        for (int64_t row = start; row < start + groups.size; ++row) {
          const int32_t* row_sums = sums + (row - start) * kRoughBlock;
          const int64_t first = block * kRoughBlock;
          constexpr float kInfinity = std::numeric_limits<float>::infinity();
          float least = -kInfinity, most = -kInfinity;
          int unknown = 0;  // where something is not a number, or beyond all
#pragma omp simd reduction(max : least, most) reduction(| : unknown)
          for (int64_t i = 0; i < kRoughBlock; ++i) {
            const float score = row_sums[i] * rows.scales[row] * scale_data[first + i];
            const float length = length_data[first + i], left_out = left_out_data[first + i];
            // By Cauchy and Schwarz: the states times what the weight leaves out, the rough weight times what the
            // states leave out, and what rounding does to the real sum and the rest of this.
            const float error = margin * (rows.lengths[row] * (left_out + 2 * slack * length) +
                                          rows.left_out[row] * (length + left_out));
            least = std::max(least, score - error);
            most = std::max(most, score + error);
            unknown |= !(std::abs(score) + error < kInfinity);
          }
          lower[row * num_blocks + block] = unknown ? -kInfinity : least;
          upper[row * num_blocks + block] = unknown ? kInfinity : most;
        }
      }
  });
  std::vector<std::pair<int64_t, int64_t>> found;
  for (int64_t row = 0; row < num_rows; ++row) {
    const float *row_lower = lower.data() + row * num_blocks, *row_upper = upper.data() + row * num_blocks;
    const float least = *std::max_element(row_lower, row_lower + num_blocks);
    const float limit = least - std::abs(least) * rounding - kTiny;
    for (int64_t block = 0; block < num_blocks; ++block)
      if (!(row_upper[block] < limit)) found.emplace_back(row, block * kRoughBlock / kBlock);
  }
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

at::Tensor argmax_of_product(const at::Tensor& states, const at::Tensor& packed, const at::Tensor& rough,
                             const at::Tensor& scales) {
  const int64_t num_rows = states.size(0), inputs = states.size(1), outputs = packed.numel() / inputs;
  TORCH_CHECK(rough.size(1) * kRoughBlock == outputs && rough.size(2) * 2 * kStreams == inputs);
  if (num_rows == 0) return at::empty({0}, at::kLong);
  // Scores that differ by less may be equal once they are stored.
  const float rounding = packed.scalar_type() == at::kFloat ? 0.0f : 1.0f / 128;
  const auto found = candidates(states.to(at::kFloat).contiguous(), rough, scales, rounding);
  const auto num_found = static_cast<int64_t>(found.size());
  if (num_found > outputs / kBlock / 4) return first_largest(multiply_packed(states, packed));  // scores hardly differ
  at::Tensor output = at::zeros({num_rows}, at::kLong);
  with_type(packed, [&](auto type) {
    using T = decltype(type);
    const at::Tensor input = multiplied<T>(states);
    const auto* input_data = input.const_data_ptr<Multiplied<T>>();
    std::vector<std::pair<int32_t, int64_t>> best(num_found);  // rank and place of the largest output
    share_out(num_found, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        multiply_blocks(input_data + found[i].first * inputs, packed.const_data_ptr<T>(), 1, inputs, outputs / kBlock,
                        found[i].second, found[i].second + 1, [&](int64_t, int64_t block, const float* sums) {
                          int32_t ranks[kBlock];
                          for (int64_t j = 0; j < kBlock; ++j) ranks[j] = rank(rounded<T>(sums[j]));
                          const auto* largest = std::max_element(ranks, ranks + kBlock);
                          best[i] = {*largest, block * kBlock + (largest - ranks)};
                        });
    });
    std::vector<int32_t> largest(num_rows, std::numeric_limits<int32_t>::min());
    for (int64_t i = 0; i < num_found; ++i)
      if (best[i].first > largest[found[i].first]) {
        largest[found[i].first] = best[i].first;
        output.mutable_data_ptr<int64_t>()[found[i].first] = best[i].second;
      }
  });
  return output;
}

at::Tensor attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, at::Tensor memory,
                  const at::Tensor& repetitions, const at::Tensor& sequences, const at::Tensor& columns,
                  const at::Tensor& bias_line, const std::optional<at::Tensor>& seen) {
  for (const at::Tensor& rows : {query, key, value})
    TORCH_CHECK(rows.dim() == 3 && rows.stride(2) == 1 && rows.stride(1) == rows.size(2));
  TORCH_CHECK(memory.dim() == 6 && memory.is_contiguous() && bias_line.is_contiguous());
  at::Tensor output = at::empty(query.sizes(), query.options());
  with_type(query, [&](auto type) {
    with_type(memory, [&](auto memory_type) {
      using T = decltype(type);
      using Memory = decltype(memory_type);
      const int64_t size = query.size(2);
      const auto all = size == 64   ? attend_all<T, Memory, 64>
                       : size == 32 ? attend_all<T, Memory, 32>
                                    : attend_all<T, Memory, 0>;
      all(query, key, value, memory, repetitions.const_data_ptr<int64_t>(), sequences.const_data_ptr<int64_t>(),
          columns.const_data_ptr<int64_t>(), bias_line, seen, output);
    });
  });
  return output;
}

// A whole layer of the model, from its hidden states to the next ones. Weights: those of the first norm; of queries,
// keys and values; of attention's output; of the second norm; of both halves of the feed-forward; and of its output.
at::Tensor layer(const at::Tensor& states, at::TensorList weights, at::Tensor memory, const at::Tensor& repetitions,
                 const at::Tensor& sequences, const at::Tensor& columns, const at::Tensor& bias_line,
                 const std::optional<at::Tensor>& seen, double eps) {
  TORCH_CHECK(weights.size() == 6);
  const int64_t heads = memory.size(3), size = memory.size(5);
  const at::Tensor products = multiply_packed(rms_norm(states, weights[0], eps), weights[1]);
  const auto rows = products.view({states.size(0), 3, heads, size}).unbind(1);
  const at::Tensor attended =
      attend(rows[0], rows[1], rows[2], memory, repetitions, sequences, columns, bias_line, seen);
  const at::Tensor middle = states + multiply_packed(attended.flatten(1), weights[2]);
  const auto halves = multiply_packed(rms_norm(middle, weights[3], eps), weights[4]).chunk(2, 1);
  return middle + multiply_packed(gated_gelu(halves[0], halves[1]), weights[5]);
}

TORCH_LIBRARY(LIBRARY_NAME, library) {
  library.def("rms_norm(Tensor states, Tensor weight, float eps) -> Tensor", &rms_norm);
  library.def("argmax(Tensor scores) -> Tensor", &first_largest);
  library.def("can_pack(Tensor weight) -> bool", &can_pack);
  library.def("pack(Tensor weight) -> Tensor", &pack);
  library.def("multiply(Tensor states, Tensor packed) -> Tensor", &multiply_packed);
  library.def("screens(Tensor weight, int num_rows) -> bool", &screens);
  library.def("pack_rough(Tensor weight) -> (Tensor, Tensor)", &pack_rough);
  library.def("argmax_of_product(Tensor states, Tensor packed, Tensor rough, Tensor scales) -> Tensor",
              &argmax_of_product);
  library.def("gated_gelu(Tensor gate, Tensor states) -> Tensor", &gated_gelu);
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) memory, Tensor repetitions, Tensor sequences, "
      "Tensor columns, Tensor bias_line, Tensor? seen) -> Tensor",
      &attend);
  library.def(
      "layer(Tensor states, Tensor[] weights, Tensor(a!) memory, Tensor repetitions, Tensor sequences, "
      "Tensor columns, Tensor bias_line, Tensor? seen, float eps) -> Tensor",
      &layer);
}

}  // namespace
"""

__all__ = ["CompiledOperations", "TorchOperations", "load_kernels", "operations_for"]
