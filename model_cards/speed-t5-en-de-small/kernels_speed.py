# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
The operations of a pass as C++, for CPUs: `speed_kernels=True`.

At batch 1 a pass spends a third of its time between the products, in a few dozen operations of torch over a few rows.
Here one call each does the same, and in attention every row meets just the keys that it may see. The products
themselves are here where that is faster: in float32, and in bfloat16 on processors with AMX. All are compiled when
first asked for, which takes some 20 seconds, and kept in torch's folder for extensions.
"""

import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch
from torch import nn


DTYPES = (torch.float32, torch.bfloat16)
ROWS_TO_PACK_FOR = 8  # a hint for oneDNN's layout; products with other numbers of rows are right and nearly as fast


class TorchOperations:
    """The same operations as torch has them; on every device and in every precision."""

    attend = None  # attention is the model's

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
    def packed_product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """A weight `(out_features, in_features)` on the CPU -> its product with states `(R, in_features)`."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_TO_PACK_FOR)
        product = torch.ops.mkldnn._linear_pointwise.default  # which needs not be chosen by its arguments
        return lambda states: product(states, packed, None, "none", [], "")


class CompiledOperations(TorchOperations):
    """
    The operations of the library that [`load_kernels`] compiled.

    Args:
        library: `torch.ops.<name>`.
    """

    def __init__(self, library):
        self.gated_gelu = library.gated_gelu.default
        self.argmax = library.argmax.default
        self.attend = library.attend.default
        self._rms_norm = library.rms_norm.default
        self.can_pack, self._pack = library.can_pack.default, library.pack.default
        self._multiply = library.multiply.default

    def rms_norm(self, states, weight, eps):  # type: ignore[override]
        if states.dtype != weight.dtype:
            return TorchOperations.rms_norm(states, weight, eps)
        return self._rms_norm(states, weight, eps)

    def packed_product(self, weight):  # type: ignore[override]
        if not self.can_pack(weight):
            return TorchOperations.packed_product(weight)
        packed = self._pack(weight)
        return lambda states: self._multiply(states, packed)


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
#include <immintrin.h>
#endif
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace {

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

// The dot product of a query with a key. Sums of their own for 16 places let compilers work without an order to keep.
template <typename Memory>
inline float dot(const float* query, const Memory* key, int64_t size) {
  constexpr int64_t kPlaces = 16;
  float sums[kPlaces] = {};
  int64_t start = 0;
  for (; start + kPlaces <= size; start += kPlaces)
#pragma omp simd
    for (int64_t i = 0; i < kPlaces; ++i) sums[i] += query[start + i] * load(key + start + i);
  for (int64_t i = 0; start + i < size; ++i) sums[i] += query[start + i] * load(key + start + i);
  for (int64_t width = kPlaces / 2; width > 0; width /= 2)
    for (int64_t i = 0; i < width; ++i) sums[i] += sums[i + width];
  return sums[0];
}

template <typename Memory, int64_t kSize>
void attend_one(const float* query, const Memory* keys, const Memory* values, const float* bias, const bool* seen,
                int64_t num_keys, int64_t size, float* scores, float* output) {
  const int64_t n = kSize ? kSize : size;
  float largest = std::numeric_limits<float>::lowest();
  for (int64_t key = 0; key < num_keys; ++key) {
    if (seen && !seen[key]) {
      scores[key] = std::numeric_limits<float>::lowest();
      continue;
    }
    scores[key] = dot(query, keys + key * n, n) + bias[key];
    largest = std::max(largest, scores[key]);
  }
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t key = 0; key < num_keys; ++key) {
    scores[key] = scores[key] < largest - kCut ? 0.0f : exponential(scores[key] - largest);
    sum += scores[key];
  }
  constexpr int64_t kPart = kSize ? kSize : 16;
  for (int64_t start = 0; start < n; start += kPart) {
    float sums[kPart] = {};
    const int64_t width = kSize ? kSize : std::min(kPart, n - start);
    for (int64_t key = 0; key < num_keys; ++key) {
      const Memory* line = values + key * n + start;
      const float probability = scores[key];
#pragma omp simd
      for (int64_t i = 0; i < width; ++i) sums[i] += probability * load(line + i);
    }
    for (int64_t i = 0; i < width; ++i) output[start + i] = sums[i] / sum;
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
  at::parallel_for(0, rows * heads, 1, [&](int64_t begin, int64_t end) {
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
                                scores, wide_output);
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

at::Tensor argmax(const at::Tensor& scores) {
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

// Products of packed weights. Every sum is taken over the inputs in order, so it does not depend on how many rows are
// multiplied together. Weights are read from memory once, block of outputs by block of outputs, and ahead of time.

constexpr int64_t kOutputs = 32;  // numbers of outputs must be multiples of it
constexpr int64_t kInputs = 32;   // and numbers of inputs in bfloat16
constexpr int64_t kAhead = 4096;  // bytes; farther than the processor fetches by itself

inline void fetch_ahead(const void* from) { __builtin_prefetch(static_cast<const char*>(from) + kAhead); }

// Rows in groups of equally many; the last group begins earlier instead of being smaller.
struct Groups {
  int64_t num_rows, count, size;
  Groups(int64_t num_rows, int64_t at_most)
      : num_rows(num_rows), count((num_rows + at_most - 1) / at_most), size((num_rows + count - 1) / count) {}
  int64_t start(int64_t group) const { return std::min(group * size, num_rows - size); }
};

// As many sums at once as there are vector registers for.
#ifdef __AVX512F__
constexpr int64_t kBlock = 32, kMostRows = 12;
#else
constexpr int64_t kBlock = 16, kMostRows = 6;
#endif

// `kRows` rows times a block of outputs, whose weights lie side by side for each input.
template <int64_t kRows>
void multiply_block(const float* states, const float* weight, int64_t inputs, bool fetch, float* output,
                    int64_t outputs) {
  float sums[kRows][kBlock] = {};
  for (int64_t input = 0; input < inputs; ++input, weight += kBlock) {
    if (fetch)
      for (int64_t i = 0; i < kBlock; i += 16) fetch_ahead(weight + i);
    for (int64_t row = 0; row < kRows; ++row) {
      const float state = states[row * inputs + input];
#pragma omp simd
      for (int64_t i = 0; i < kBlock; ++i) sums[row][i] += state * weight[i];
    }
  }
  for (int64_t row = 0; row < kRows; ++row) std::copy_n(sums[row], kBlock, output + row * outputs);
}

template <int64_t... kRows>
auto multiply_block_of(int64_t rows, std::integer_sequence<int64_t, kRows...>) {
  constexpr decltype(&multiply_block<1>) all[] = {multiply_block<kRows + 1>...};
  return all[rows - 1];
}

void multiply_all(const float* states, const float* weight, float* output, int64_t num_rows, int64_t inputs,
                  int64_t outputs) {
  const Groups groups(num_rows, kMostRows);
  const auto multiply = multiply_block_of(groups.size, std::make_integer_sequence<int64_t, kMostRows>());
  at::parallel_for(0, outputs / kBlock, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      for (int64_t group = 0; group < groups.count; ++group) {
        const int64_t row = groups.start(group);
        multiply(states + row * inputs, weight + block * kBlock * inputs, inputs, group == 0,
                 output + row * outputs + block * kBlock, outputs);
      }
  });
}

#ifdef __AMX_BF16__

// A tile is 16 lines of 64 bytes: 16 rows of states by 32 inputs, or 16 pairs of inputs by 16 outputs of a weight.
constexpr int64_t kTile = 16;

struct alignas(64) TileSizes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t lines[16] = {};
  explicit TileSizes(int64_t rows) {
    for (int tile = 0; tile < 8; ++tile) lines[tile] = tile < 6 ? rows : kTile;
  }
};

// One or two tiles of rows times 32 outputs, into `sums`: 16 x 16 numbers for each tile and half of the outputs.
template <bool kTwo, bool kFetch>
void multiply_tiles(const at::BFloat16* first, const at::BFloat16* second, const at::BFloat16* weight,
                    int64_t inputs, float* sums) {
  _tile_zero(0);
  _tile_zero(1);
  if (kTwo) _tile_zero(2);
  if (kTwo) _tile_zero(3);
  const int64_t line = inputs * sizeof(at::BFloat16);
  for (int64_t input = 0; input < inputs; input += kInputs, weight += kInputs * kOutputs) {
    if (kFetch)
      for (int64_t i = 0; i < kInputs * kOutputs; i += 32) fetch_ahead(weight + i);
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

void multiply_all(const at::BFloat16* states, const at::BFloat16* weight, at::BFloat16* output, int64_t num_rows,
                  int64_t inputs, int64_t outputs) {
  const Groups tiles(num_rows, kTile);
  at::parallel_for(0, outputs / kOutputs, 1, [&](int64_t begin, int64_t end) {
    const TileSizes sizes(tiles.size);
    _tile_loadconfig(&sizes);
    alignas(64) float sums[4 * kTile * kTile];
    for (int64_t block = begin; block < end; ++block)
      for (int64_t tile = 0; tile < tiles.count; tile += 2) {
        const bool two = tile + 1 < tiles.count;
        const int64_t starts[2] = {tiles.start(tile), tiles.start(tile + 1)};
        const auto multiply = tile ? (two ? multiply_tiles<true, false> : multiply_tiles<false, false>)
                                   : (two ? multiply_tiles<true, true> : multiply_tiles<false, true>);
        multiply(states + starts[0] * inputs, states + starts[1] * inputs, weight + block * inputs * kOutputs, inputs,
                 sums);
        for (int64_t part = 0; part < (two ? 4 : 2); ++part)
          for (int64_t row = 0; row < tiles.size; ++row) {
            const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_load_ps(sums + (part * kTile + row) * kTile));
            std::memcpy(output + (starts[part / 2] + row) * outputs + block * kOutputs + part % 2 * kTile, &rounded,
                        sizeof(rounded));
          }
      }
    _tile_release();
  });
}

// The operating system must let a process use tiles.
bool has_tiles() { return at::cpu::init_amx(); }

#else

bool has_tiles() { return false; }
void multiply_all(const at::BFloat16*, const at::BFloat16*, at::BFloat16*, int64_t, int64_t, int64_t) {
  TORCH_CHECK(false, "this processor has no tiles");
}

#endif

bool can_pack(const at::Tensor& weight) {
  if (weight.size(0) % kOutputs != 0) return false;
  return weight.scalar_type() == at::kFloat ||
         (weight.scalar_type() == at::kBFloat16 && weight.size(1) % kInputs == 0 && has_tiles());
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
  const at::Tensor ordered =
      weight.scalar_type() == at::kFloat
          ? weight.reshape({outputs / kBlock, kBlock, inputs}).transpose(1, 2)
          // Tiles of 16 pairs of inputs by 16 outputs, two of them side by side.
          : weight.reshape({outputs / 32, 2, 16, inputs / 32, 16, 2}).permute({0, 3, 1, 4, 2, 5});
  at::Tensor packed = at::empty(ordered.sizes(), weight.options());
  ask_for_large_pages(packed);
  return packed.copy_(ordered);
}

at::Tensor multiply(const at::Tensor& states, const at::Tensor& packed) {
  const at::Tensor input = states.contiguous();
  const int64_t num_rows = input.size(0), inputs = input.size(1), outputs = packed.numel() / inputs;
  TORCH_CHECK(packed.is_contiguous() && outputs * inputs == packed.numel() && outputs % kOutputs == 0);
  at::Tensor output = at::empty({num_rows, outputs}, input.options());
  if (num_rows == 0) return output;
  with_type(packed, [&](auto type) {
    using T = decltype(type);
    multiply_all(input.const_data_ptr<T>(), packed.const_data_ptr<T>(), output.mutable_data_ptr<T>(), num_rows, inputs,
                 outputs);
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

TORCH_LIBRARY(LIBRARY_NAME, library) {
  library.def("rms_norm(Tensor states, Tensor weight, float eps) -> Tensor", &rms_norm);
  library.def("argmax(Tensor scores) -> Tensor", &argmax);
  library.def("can_pack(Tensor weight) -> bool", &can_pack);
  library.def("pack(Tensor weight) -> Tensor", &pack);
  library.def("multiply(Tensor states, Tensor packed) -> Tensor", &multiply);
  library.def("gated_gelu(Tensor gate, Tensor states) -> Tensor", &gated_gelu);
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) memory, Tensor repetitions, Tensor sequences, "
      "Tensor columns, Tensor bias_line, Tensor? seen) -> Tensor",
      &attend);
}

}  // namespace
"""

__all__ = ["CompiledOperations", "TorchOperations", "load_kernels", "operations_for"]
