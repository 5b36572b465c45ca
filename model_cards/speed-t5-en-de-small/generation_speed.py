# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""`generate(speed=True)`: pipelined speculative decoding for models whose layers are shared cyclically."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import DynamicCache, GenerationConfig, GenerationMixin
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationMode,
    MaxLengthCriteria,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .cache_speed import SpeedCache, memory_dtype
from .kernels_speed import operations_for
from .packed_speed import PackedWeights
from .rows_speed import RowsInFlight
from .window_speed import NO_TOKEN, Window


# Every option of pipelined decoding and its default. They live on the generation config, so they are saved with it.
SPEED_OPTIONS = {
    "speed": False,  # decode by the pipeline
    "speed_prompt_overlap": True,  # start new tokens while the prompt is still in flight
    "speed_kernels": False,  # on a CPU, compile the small operations of a pass and use them
    "speed_trace": False,  # keep what every pass computed, for pictures and tests
}

# Logits processors that remember what they were called with, and the options that set them up. A pipeline also calls
# them for tokens that it takes back later.
STATEFUL_PROCESSORS = {
    UnbatchedClassifierFreeGuidanceLogitsProcessor: "guidance_scale",
    SynthIDTextWatermarkLogitsProcessor: "watermarking_config",
}


@dataclass
class SpeedGenerateOutput(GenerateDecoderOnlyOutput):
    """
    Output of `generate(speed=True, return_dict_in_generate=True)`: as of plain decoding, and what the pipeline did.

    `scores` and `logits` of a sequence are 0 behind its end, where plain decoding has those of the padding.

    Args:
        speed_stats (`dict`):
            `num_group_passes` (`int`): uses of the K layers, prompt included; plain decoding needs G per token.
            `num_new_tokens` (`list[int]`): committed tokens of each sequence.
            `num_rows` (`int`): positions computed over all passes, prompt included.
            `rows_per_pass` (`float`): their mean.
            `flips` (`dict[int, float]`): share of the committed predictions that changed at exit 2 .. G.
            `trace` (`list[torch.LongTensor]` of shapes `(R, 4)`, only with `speed_trace=True`): the rows of each pass,
            as sequence (0-based), column (0-based, prompt included), exit reached (1 .. G) and the token at that
            position.
    """

    speed_stats: dict | None = None


class SpeedGenerationMixin(GenerationMixin):
    """
    Generation with the option `speed=True`.

    A model that mixes it in gives `embed`, `run_repetition` and `exit_logits` (see [`SpeedT5ForCausalLM`]) and a
    config with `num_unique_layers` and `num_repetitions`. Everything around the decoding loop stays with transformers.

    Source: Hooper et al. 2023, Algorithm 1, generalised to a window of positions.
    """

    def exit_tokens(self, hidden_states, rows):
        """
        The first of the largest scores that `exit_logits` gives; a model may have a faster way to it.

        Args:
            hidden_states (`torch.Tensor` of shape `(R, hidden_size)`): what `run_repetition` gave.
            rows (`RowsInFlight`): what it was given.

        Returns:
            `torch.LongTensor` of shape `(R,)` on the CPU.
        """
        return rows.operations.argmax(self.exit_logits(hidden_states, rows))

    def _prepare_generation_config(self, generation_config: GenerationConfig | None, **kwargs):
        given = {name: kwargs.pop(name) for name in list(kwargs) if name == "speed" or name.startswith("speed_")}
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        saved = {name: value for name, value in vars(generation_config).items() if name.startswith("speed")}
        for name, value in {**SPEED_OPTIONS, **saved, **given}.items():
            if name not in SPEED_OPTIONS:
                raise ValueError(f"`{name}` is no option of speed decoding: use one of {', '.join(SPEED_OPTIONS)}.")
            if not isinstance(value, bool):
                raise TypeError(f"`{name}` must be True or False, got {value!r}: set it to one of them.")
            if name == "speed" and generation_config.is_assistant:
                value = False  # we draft for another model, which counts our forwards
            setattr(generation_config, name, value)
        return generation_config, model_kwargs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        if not generation_config.speed:
            return
        if generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"`speed=True` decodes greedily or by sampling, got {generation_mode.value}: leave out `num_beams`, "
                "`assistant_model` and the like, or set `speed=False`."
            )
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(generation_config, name):
                raise ValueError(
                    f"`{name}` must not be set with `speed=True`, where a pass mixes several repetitions: "
                    "set `speed=False`, or call `forward` on the finished sequences."
                )
        if generation_config.use_cache is False:
            raise ValueError("`use_cache` must not be False with `speed=True`: leave it out, or set `speed=False`.")
        if generation_mode_kwargs.get("synced_gpus"):
            raise ValueError(
                "`synced_gpus` must not be set with `speed=True`, as ranks need different numbers of passes."
            )

    def _prepare_model_inputs(self, inputs, bos_token_id, model_kwargs):
        inputs, name, model_kwargs = super()._prepare_model_inputs(inputs, bos_token_id, model_kwargs)
        length, longest = inputs.shape[1], self.config.max_position_embeddings
        if length == 0:
            raise ValueError(
                f"`{name}` must hold at least one token per sequence, got none: pass tokenizer(text) as it is."
            )
        if length > longest:
            raise ValueError(
                f"`{name}` must hold at most `max_position_embeddings`={longest} tokens, got {length}: cut the prompt "
                "(for example tokenizer(text, truncation=True)), or raise that value in the config."
            )
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not mask.any(1).all():
            row = int((~mask.bool().any(1)).nonzero()[0])
            raise ValueError(
                f"`attention_mask` must mark at least one token per sequence, sequence {row} has none: drop it."
            )
        return inputs, name, model_kwargs

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
    ):
        if not generation_config.speed:
            return super()._prepare_cache_for_generation(
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        if generation_config.cache_implementation is not None:
            raise ValueError(
                "`cache_implementation` must not be set with `speed=True`, which has its own cache: leave it out."
            )
        num_layers, is_compiled = self.config.num_unique_layers, generation_config.speed_kernels
        if model_kwargs.get("cache") is None:
            model_kwargs["cache"] = SpeedCache(num_layers, self.config.num_repetitions, is_compiled)
        elif type(model_kwargs["cache"]) is DynamicCache:
            model_kwargs["cache"] = SpeedCache.from_dynamic(model_kwargs["cache"], num_layers, is_compiled)
        elif not isinstance(model_kwargs["cache"], SpeedCache):
            raise TypeError(
                f"`cache` must come from `generate` or be a DynamicCache, got {type(model_kwargs['cache']).__name__}: "
                "leave it out, or set `speed=False`."
            )

    def _sample(
        self,
        input_ids,
        logits_processor,
        stopping_criteria,
        generation_config,
        synced_gpus=False,
        streamer=None,
        **model_kwargs,
    ):
        if not generation_config.speed:
            return super()._sample(
                input_ids,
                logits_processor,
                stopping_criteria,
                generation_config,
                synced_gpus,
                streamer,
                **model_kwargs,
            )
        for processor in logits_processor:
            if type(processor) in STATEFUL_PROCESSORS:
                raise ValueError(
                    f"`{STATEFUL_PROCESSORS[type(processor)]}` must not be set with `speed=True`, since its processor "
                    "remembers tokens that the pipeline may take back: set `speed=False`."
                )
        run = _SpeedRun(
            self, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
        )
        return run.decode()

    def init_continuous_batching(self, *args, **kwargs):
        raise NotImplementedError(_NO_CONTINUOUS_BATCHING)

    def generate_batch(self, *args, **kwargs):
        raise NotImplementedError(_NO_CONTINUOUS_BATCHING)


# There, transformers would lose the position bias and, without a word, return no tokens.
_NO_CONTINUOUS_BATCHING = (
    "Continuous batching must not be used with this model, whose attention has a position bias: call "
    "`generate(speed=True)` with a left-padded batch, where sequences leave as they finish."
)


class _SpeedRun:
    """One call of `generate(speed=True)`: the loop over group passes and what it carries along."""

    def __init__(
        self, model, input_ids, logits_processor, stopping_criteria, generation_config, streamer, model_kwargs
    ):
        self.model = model
        self.generation_config = generation_config
        self.device = input_ids.device
        self.cache = model_kwargs["cache"]
        self.prompt_embeds = model_kwargs.get("inputs_embeds")
        self.num_passes = self.num_rows = 0
        operations = operations_for(self.device, model.dtype, generation_config.speed_kernels)
        seen, prefix = model_kwargs.get("attention_mask"), model_kwargs.get("prefix_mask")
        # transformers drops a mask without zeros and keeps its length.
        mask_length = getattr(generation_config, "_mask_length", None) if seen is None else seen.shape[1]
        self.num_hidden_columns = hidden = self._num_hidden_columns(input_ids, mask_length)
        prompt = torch.nn.functional.pad(input_ids, (hidden, 0))
        num_cached = self.cache.get_seq_length()
        if generation_config.prefill_chunk_size is not None:
            num_cached = self._run_chunks(prompt, generation_config.prefill_chunk_size, seen, prefix)
        max_length = hidden + (stopping_criteria.max_length or generation_config.max_length)
        # Without overlap, the schedule is that of the formula: every exit is asked, and every answer guessed on.
        overlap = generation_config.speed_prompt_overlap
        exits, break_even = _plan(model, len(input_ids), operations) if overlap else (None, None)
        seen = None if seen is None or bool(seen.all()) else seen.bool()
        self.window = Window(
            prompt.cpu().numpy(),
            max_length,
            model.config.num_repetitions,
            None if generation_config._eos_token_tensor is None else generation_config._eos_token_tensor.cpu().numpy(),
            seen=None if seen is None else seen.cpu().numpy(),
            num_cached=num_cached,
            overlap_prompt=overlap,
            exits=exits,
            break_even=break_even,
        )
        self.rows = RowsInFlight(
            self.cache,
            len(input_ids),
            max_length,
            self.device,
            memory_dtype(model.dtype, self.device),
            seen=None if seen is None else _pad_columns(seen, max_length, True),
            prefix=None if prefix is None else _pad_columns(prefix.bool(), max_length, False),
            weights=PackedWeights.of(model, operations),
            operations=operations,
        )
        self.choose = _TokenChoice(
            model, self.rows, self.window, logits_processor, generation_config, self.device, hidden
        )
        self.stop = _StopCheck(
            self.window, stopping_criteria, self.device, hidden, generation_config._pad_token_tensor
        )
        self.streamer = None
        if streamer is not None:
            self.streamer = _Streaming(self.window, streamer, self.stop, generation_config._pad_token_tensor)
        self.states = None  # (R, hidden_size) of the last pass
        self.state_index = np.zeros_like(self.window.tokens)  # row of the last pass that holds a position's state
        self.trace = [] if generation_config.speed_trace else None

    def _num_hidden_columns(self, input_ids, mask_length):
        """Positions of the prompt before `input_ids`, whose tokens nobody is shown: they are embedded or cached."""
        given, num_cached = input_ids.shape[1], self.cache.get_seq_length()
        if self.prompt_embeds is not None:
            hidden = self.prompt_embeds.shape[1] - given
        else:
            # As in plain decoding, only the new tokens may be given if the mask covers those in the cache too.
            hidden = 0 if mask_length in (None, given) else num_cached
        if mask_length not in (None, hidden + given):
            raise ValueError(
                f"`attention_mask` must have a column for each of the {hidden + given} positions of the prompt, got "
                f"{mask_length}: pass that of the tokenizer, after columns for what the cache holds."
            )
        if num_cached >= hidden + given:
            raise ValueError(
                f"`input_ids` must hold the whole text with more tokens than the cache's {num_cached}, got {given}: "
                "pass the returned sequences with the new tokens after them."
            )
        return hidden

    @torch.no_grad()
    def _run_chunks(self, prompt, size, seen, prefix):
        """Fill the cache with all but the last chunk of the prompt, chunk by chunk; returns the columns it holds."""
        if self.prompt_embeds is not None:
            raise ValueError("`prefill_chunk_size` must not be set with `inputs_embeds`: leave one of them out.")
        start = self.cache.get_seq_length()
        while prompt.shape[1] - start > size:
            stop = start + size
            masks = {"attention_mask": seen, "prefix_mask": prefix}
            masks = {name: mask[:, :stop] for name, mask in masks.items() if mask is not None}
            self.model(prompt[:, start:stop], cache=self.cache, use_cache=True, logits_to_keep=1, **masks)
            self.num_passes += self.cache.num_repetitions
            self.num_rows += self.cache.num_repetitions * prompt[:, start:stop].numel()
            start = stop
        return start

    @torch.no_grad()
    def decode(self):
        while self.stop.in_flight.any():
            self._group_pass()
            if self.streamer is not None:
                self.streamer.put_committed()
        if self.streamer is not None:
            self.streamer.end()
        self.choose.rewind_generator(self.stop.length - self.window.prompt_length)
        return self._output()

    def _group_pass(self):
        window = self.window
        sequences, columns, repetitions = window.rows()
        # Rows behind the prompt see all that is before them, prefix or not.
        meets_prefix = self.rows.prefix is not None and window.first < window.prompt_length
        self.rows.place(sequences, columns, repetitions, meets_prefix)
        self.states = self.model.run_repetition(self._states(sequences, columns, repetitions), self.rows)
        self.state_index[sequences, columns] = np.arange(len(columns))
        predicting = window.advance(sequences, columns)
        self.num_passes += 1
        self.num_rows += len(columns)
        if self.trace is not None:
            tokens = window.tokens[sequences, columns]
            self.trace.append(torch.from_numpy(np.stack([sequences, columns, repetitions + 1, tokens], axis=1)))
        if not len(predicting):
            return

        states = self.states
        if len(predicting) < len(columns):
            sequences, columns, states = sequences[predicting], columns[predicting], self._rows(states, predicting)
        window.verify(sequences, columns, self.choose(sequences, columns, states))
        num_new = window.commit(self.stop.in_flight)
        if num_new.any():
            self.choose.keep_scores(sequences, columns, num_new)
            self.stop.check(num_new)
        window.leave(self.stop.in_flight)

    def _states(self, sequences, columns, repetitions):
        """Hidden states `(R, hidden_size)`: embeddings of positions that start, then what the last pass left."""
        num_starting = int(repetitions.searchsorted(1))
        sequences, columns, carried = (
            sequences[:num_starting],
            columns[:num_starting],
            self.state_index[sequences[num_starting:], columns[num_starting:]],
        )
        parts = []
        if num_starting and self.prompt_embeds is not None and self.states is None:  # the prompt starts first, alone
            parts.append(self.prompt_embeds[self._tensor(sequences), self._tensor(columns)])
        elif num_starting:
            parts.append(self.model.embed(self._tensor(self.window.tokens[sequences, columns])))
        if len(carried):
            parts.append(self._rows(self.states, carried))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rows(self, states, index):
        """Rows of states, as a view where that is possible; `index` is ascending."""
        first, num_rows = index.item(0), len(index)
        if index.item(-1) - first + 1 == num_rows:
            return states[first : first + num_rows]
        return states.index_select(0, self._tensor(index))

    def _tensor(self, array):
        return torch.from_numpy(array).to(self.device)

    def _output(self):
        window, length = self.window, self.stop.length
        shown = slice(self.num_hidden_columns, length)
        sequences = self._tensor(window.tokens[:, shown].copy())
        if self.stop.pads_finished:
            after_end = self._tensor(window.columns[shown] >= self.stop.lengths[:, None])
            sequences = sequences.masked_fill(after_end, self.generation_config._pad_token_tensor)
        self.cache.set_length(length - 1)  # as in plain decoding, the last token has no keys
        if not self.generation_config.return_dict_in_generate:
            return sequences
        scores, logits = self.choose.kept_scores(length)
        stats = {
            "num_group_passes": self.num_passes,
            "num_new_tokens": (self.stop.lengths - window.prompt_length).tolist(),
            "num_rows": self.num_rows,
            "rows_per_pass": self.num_rows / self.num_passes,
            "flips": window.flip_rates(),
        }
        if self.trace is not None:
            stats["trace"] = self.trace
        return SpeedGenerateOutput(
            sequences=sequences, scores=scores, logits=logits, cache=self.cache, speed_stats=stats
        )


def _pad_columns(mask, num_columns, value):
    return torch.nn.functional.pad(mask, (0, num_columns - mask.shape[1]), value=value)


SMALL_OPERATIONS = 15e6  # weights that could be read while a pass does all that is no product
USUAL_CHANGES = 0.15, 0.02  # shares of predictions that change at exits 2 and 3, then half as many at each
LEAST_GAIN = 1.1  # for which exits are left out, since predictions of some models change more often than usual
TOLERANCE = 1.3  # to begin and end guessing again and again costs more than a little bad guessing


def _plan(model, num_sequences, operations):
    """
    Which exits to ask, and when to stop guessing, by the work they cost: counted, not timed, so that the same call
    does the same thing every time.

    Plain decoding runs the layers in G passes and the head in one of them; the pipeline runs both in every pass, with
    the rows of all repetitions. A product takes as long as its weights take to be read, and longer for many rows.

    Returns:
        `tuple(list[int], float)`: the exits, and the passes per token from which on guessing does not pay; 0 where it
        cannot be expected to.
    """
    num_repetitions = model.config.num_repetitions
    head = model.get_output_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    layers = model.num_parameters() - head * (1 if tied else 2)

    def run_layers(rows_per_sequence):
        num_rows = rows_per_sequence * num_sequences
        return layers * operations.num_reads(model.device, model.dtype, num_rows) + SMALL_OPERATIONS

    def run_head(rows_per_sequence):
        num_rows = rows_per_sequence * num_sequences
        return head * operations.num_reads_of_argmax(model.get_output_embeddings().weight, num_rows)

    plans = []
    for last in range(num_repetitions, 0, -1):  # where rows cost, later exits are left out, but for the last
        exits = sorted({*range(1, last + 1), num_repetitions})
        one_pass = run_layers(num_repetitions) + run_head(len(exits))
        plans.append((_usual_passes(exits), one_pass, exits))
    num_passes, one_pass, exits = min(plans, key=lambda plan: plan[0] * plan[1])
    if num_passes * one_pass * LEAST_GAIN > plans[0][0] * plans[0][1]:  # all exits
        num_passes, one_pass, exits = plans[0]
    plain = num_repetitions * run_layers(1) + run_head(1)
    if plain / one_pass < num_passes:
        return exits, 0.0
    return exits, min(plain / one_pass * TOLERANCE, num_repetitions - 0.25)


def _usual_passes(exits):
    """Passes per token of usual models if these exits are asked: a change is noticed at the next that is."""
    num_passes, share = 1.0, USUAL_CHANGES[0]
    for exit_ in range(2, exits[-1] + 1):
        num_passes += share * (next(asked for asked in exits if asked >= exit_) - 1)
        share = USUAL_CHANGES[1] if exit_ == 2 else share / 2
    return num_passes


class _TokenChoice:
    """
    Predictions of a pass: processed scores, then argmax or sampling, exactly as plain decoding does it.

    Sampling uses common random numbers: the noise of a position is drawn once, in plain decoding's order, and every
    exit of that position meets the same noise. So early and final predictions agree where their distributions do, the
    text is the one that plain decoding samples under the same seed, and verifying needs no rejection.
    """

    def __init__(self, model, rows, window, logits_processor, generation_config, device, num_hidden_columns):
        self.model, self.rows = model, rows
        self.window = window
        self.device = device
        self.num_hidden_columns = num_hidden_columns
        self.logits_processor = logits_processor
        self.do_sample = generation_config.do_sample
        self.noise = {}  # number of a new token from 0 -> (B, V) float32; only those that may still be asked for
        self.generator_states = []  # of torch's default generator after each draw
        returns_dict = generation_config.return_dict_in_generate
        self.output_scores = returns_dict and generation_config.output_scores
        self.output_logits = returns_dict and generation_config.output_logits
        self.kept = {}  # column -> (scores, logits), each (B, V), of committed tokens
        self.is_plain = not (len(logits_processor) or self.do_sample or self.output_scores or self.output_logits)
        self.last = None

    def __call__(self, sequences, columns, states):
        """Tokens `(R,)` after positions whose hidden states are `(R, hidden_size)`."""
        if self.is_plain:
            return self.model.exit_tokens(states, self.rows).numpy()
        logits = self.model.exit_logits(states, self.rows).float()
        scores = self._process(sequences, columns, logits)
        if self.output_scores or self.output_logits:
            self.last = scores, logits
        if self.do_sample:
            probs = torch.nn.functional.softmax(scores, dim=-1)
            scores = probs / self._noise(sequences, columns, probs)
        return self.rows.operations.argmax(scores).numpy()

    def _process(self, sequences, columns, logits):
        """Scores `(R, V)`. The processors see each row at its place in a batch, with the prefix that it really has."""
        if not len(self.logits_processor):
            return logits
        scores = torch.empty_like(logits)
        for column in np.unique(columns).tolist():
            at = (columns == column).nonzero()[0]
            rows, places = torch.from_numpy(at).to(self.device), torch.from_numpy(sequences[at]).to(self.device)
            batch = logits.new_zeros(len(self.window.tokens), logits.shape[1])
            batch[places] = logits[rows]
            # Sequences that are not there yet hold NO_TOKEN.
            shown = self.window.tokens[:, self.num_hidden_columns : column + 1]
            prefix = torch.from_numpy(shown.clip(min=0)).to(self.device)
            scores[rows] = self.logits_processor(prefix, batch)[places]
        return scores

    def _noise(self, sequences, columns, probs):
        steps = columns - (self.window.prompt_length - 1)
        for step in range(len(self.generator_states), int(steps.max()) + 1):
            # What torch.multinomial draws for one sample per row.
            self.noise[step] = probs.new_empty(len(self.window.tokens), probs.shape[1]).exponential_(1)
            self.generator_states.append(_generator_state(probs.device))
        oldest = self.window.first - (self.window.prompt_length - 1)
        for step in [step for step in self.noise if step < oldest]:
            del self.noise[step]
        return torch.stack([self.noise[step][row] for step, row in zip(steps.tolist(), sequences.tolist())])

    def rewind_generator(self, num_tokens):
        """Leave the random generator where plain decoding does: after one draw per token of the longest sequence."""
        if self.do_sample and 0 < num_tokens < len(self.generator_states):
            _set_generator_state(self.device, self.generator_states[num_tokens - 1])

    def keep_scores(self, sequences, columns, num_new):
        """Remember the scores of the tokens that this pass committed."""
        if self.last is None:
            return
        final = (columns < self.window.num_committed[sequences] - 1) & (
            columns >= (self.window.num_committed - num_new)[sequences] - 1
        )
        for row in final.nonzero()[0].tolist():
            column = int(columns[row])
            if column not in self.kept:
                self.kept[column] = tuple(kind.new_zeros(len(num_new), kind.shape[1]) for kind in self.last)
            for kept, kind in zip(self.kept[column], self.last):
                kept[sequences[row]] = kind[row]

    def kept_scores(self, length):
        """Tuples of `(B, V)` float32 per new token: processed scores and raw logits, `None` where not asked for."""
        steps = range(self.window.prompt_length - 1, length - 1)
        scores = tuple(self.kept[column][0] for column in steps) if self.output_scores else None
        logits = tuple(self.kept[column][1] for column in steps) if self.output_logits else None
        return scores, logits


def _generator_state(device):
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_generator_state(device, state):
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


class _StopCheck:
    """
    Stop criteria after every committed token, on exactly the prefix that plain decoding would show them.

    Attributes:
        finished (`np.ndarray` of shape `(B,)`): bool, sequences whose end is found.
        lengths (`np.ndarray` of shape `(B,)`): columns of each sequence, up to its end where that is found.
        pads_finished (`bool`): whether finished sequences are filled up with padding.
    """

    def __init__(self, window, stopping_criteria, device, num_hidden_columns, pad_token_id):
        self.window = window
        self.pad_token_id = pad_token_id
        self.device = device
        self.num_hidden_columns = num_hidden_columns
        self.max_length = window.last_column + 1
        # Length and end-of-sequence are looked at here; others may do anything, so they are called.
        self.eos_token_ids = {
            token
            for criterion in stopping_criteria
            if type(criterion) is EosTokenCriteria
            for token in criterion.eos_token_id.tolist()
        }
        self.other = [
            criterion
            for criterion in stopping_criteria
            if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)
        ]
        self.pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.finished = np.zeros_like(window.num_committed, dtype=bool)
        self.num_asked = window.prompt_length  # columns that the other criteria have seen
        self.lengths = window.num_committed.copy()
        self.in_flight = ~self.finished

    @property
    def length(self):
        """Columns of the longest sequence."""
        return int(self.lengths.max())

    def check(self, num_new):
        """Look at the `num_new` youngest committed tokens `(B,)` one after the other; says who is still in flight."""
        committed = self.window.num_committed
        for sequence in (num_new * ~self.finished).nonzero()[0].tolist():
            stop = committed.item(sequence)
            for length in range(stop - num_new.item(sequence) + 1, stop + 1):
                self.lengths[sequence] = length
                token = self.window.tokens.item(sequence, length - 1)
                if length >= self.max_length or token in self.eos_token_ids:
                    self.finished[sequence] = True
                    break
        self._ask_others()
        if self.pads_finished:
            self.in_flight = ~self.finished
        elif bool(self.finished.all()):
            # Without an end-of-sequence token plain decoding lets every sequence go on until the last one stops.
            self.in_flight = committed < self.length
            if not self.in_flight.any():
                self.lengths = np.full_like(self.lengths, self.length)

    def _ask_others(self):
        """Call the other criteria once per step that all sequences have reached: they may know the batch by heart."""
        while self.other:
            ends = self.finished & self.pads_finished
            reached = int(np.where(ends, self.length, self.window.num_committed).min())
            if self.num_asked >= min(reached, self.length):
                return
            self.num_asked += 1
            shown = slice(self.num_hidden_columns, self.num_asked)
            tokens = self.window.tokens[:, shown].copy()
            if self.pads_finished:
                tokens[ends[:, None] & (self.window.columns[shown] >= self.lengths[:, None])] = int(self.pad_token_id)
            tokens, stops = torch.from_numpy(tokens).to(self.device), False
            for criterion in self.other:  # every one, since a criterion may count its calls
                stops = stops | torch.as_tensor(criterion(tokens, None)).cpu().numpy()
            # Sequences may be ahead of this step; what they have committed behind it is dropped.
            cut = stops & (self.lengths >= self.num_asked)
            self.lengths = np.where(cut, self.num_asked, self.lengths)
            self.finished = self.finished | cut


class _Streaming:
    """
    Hands a streamer the committed tokens of all sequences, one step at a time, in order and once.

    A streamer that has `put_draft` (see `TextDiffusionStreamer`) also gets the guesses behind them, for one sequence.
    """

    def __init__(self, window, streamer, stop, pad_token_id):
        self.window, self.streamer, self.stop, self.pad_token_id = window, streamer, stop, pad_token_id
        self.num_streamed = window.prompt_length

    def put_committed(self):
        """Stream the steps that every sequence has reached or needs no more."""
        stop = self.stop
        reached = np.where(stop.in_flight, self.window.num_committed, stop.length).min()
        for column in range(self.num_streamed, min(int(reached), stop.length)):
            tokens = self.window.tokens[:, column].copy()
            if stop.pads_finished:
                tokens[column >= stop.lengths] = int(self.pad_token_id)
            self.streamer.put(torch.from_numpy(tokens))
            self.num_streamed += 1
        if len(self.window.tokens) == 1 and hasattr(self.streamer, "put_draft") and stop.in_flight[0]:
            draft = self.window.tokens[:, self.num_streamed : self.window.stop + 1]
            draft = draft[draft != NO_TOKEN]
            if len(draft):
                self.streamer.put_draft(torch.from_numpy(draft)[None])

    def end(self):
        self.streamer.end()


__all__ = ["SPEED_OPTIONS", "SpeedGenerateOutput", "SpeedGenerationMixin"]
