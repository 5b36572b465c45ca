# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The window alone, driven by a scripted predictor instead of a model, against a plain-Python reference."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speed_hf.window_speed import NO_TOKEN, RETRY, Window


EOS = 1


class Script:
    """Predictions as a function of prefix and exit: the last exit decides, earlier ones differ now and then."""

    def __init__(self, seed, num_repetitions, vocab_size, flip_rate):
        self.seed, self.num_repetitions, self.vocab_size = seed, num_repetitions, vocab_size
        self.flip_rate = flip_rate

    def _number(self, *key):
        return int.from_bytes(hashlib.blake2b(repr((self.seed, *key)).encode(), digest_size=6).digest(), "big")

    def predict(self, prefix, exit_):
        """Token that exit `exit_` (1 .. G) predicts after the tokens `prefix`."""
        settled = 1
        while (
            settled < self.num_repetitions and self._number("settle", prefix, settled) % 1000 < 1000 * self.flip_rate
        ):
            settled += 1
        key = ("token", prefix) if exit_ >= settled else ("guess", prefix, exit_)
        return self._number(*key) % self.vocab_size

    def last_change(self, prefix):
        """j: the last exit at which the prediction after `prefix` changed, 1 if it never did."""
        exits = [self.predict(prefix, exit_) for exit_ in range(1, self.num_repetitions + 1)]
        return max([1] + [i + 1 for i in range(1, len(exits)) if exits[i] != exits[i - 1]])

    def decode(self, prompt, max_length, eos=EOS):
        """Plain decoding: one token after the other by the last exit."""
        tokens = list(prompt)
        while len(tokens) < max_length:
            tokens.append(self.predict(tuple(tokens), self.num_repetitions))
            if tokens[-1] == eos:
                break
        return tokens


def run(script, prompts, max_length, seen=None, eos=EOS, window_class=Window, **options):
    """Decode `prompts`, checking the invariants after every pass. Returns tokens, passes and the window."""
    eos_ids = None if eos is None else np.array([eos])
    window = window_class(np.array(prompts), max_length, script.num_repetitions, eos_ids, seen=seen, **options)
    running = np.ones(len(prompts), dtype=bool)
    written = {}  # (sequence, column, repetition) -> the prefix that its keys and values were computed from
    num_passes = 0
    while running.any():
        sequences, columns, repetitions = window.rows()
        assert len(columns), "a pass without rows never ends"
        rows = list(zip(sequences.tolist(), columns.tolist(), repetitions.tolist(), strict=True))
        for b, c, g in rows:
            written[b, c, g] = tuple(window.tokens[b, : c + 1].tolist())
        for b, c, g in rows:
            for column in range(c + 1):
                if seen is None or column >= len(prompts[b]) or seen[b, column]:
                    expected = tuple(window.tokens[b, : column + 1].tolist())
                    assert written.get((b, column, g)) == expected, "a row met keys of a token that is gone"
        predicting = window.advance(sequences, columns)
        sequences, columns = sequences[predicting], columns[predicting]
        exits = window.done[sequences, columns]
        predictions = [
            script.predict(tuple(window.tokens[b, : c + 1].tolist()), e)
            for b, c, e in zip(sequences.tolist(), columns.tolist(), exits.tolist(), strict=True)
        ]
        window.verify(sequences, columns, np.array(predictions, dtype=np.int64))
        window.commit(running)
        last = window.tokens[np.arange(len(prompts)), window.num_committed - 1]
        grown = window.num_committed > window.prompt_length
        running = running & ~(grown & ((last == eos) | (window.num_committed == max_length)))
        window.leave(running)
        num_passes += 1
        check_invariants(window, running)
    lengths = window.num_committed.tolist()
    return [window.tokens[b, :n].tolist() for b, n in enumerate(lengths)], num_passes, window


def check_invariants(window, running):
    for b in running.nonzero()[0].tolist():
        done = window.done[b, : int(window.end[b])]
        computed = done[window.prompt_length - 1 :]
        assert (np.diff(computed) <= 0).all(), "`done` must not increase along a sequence"
        assert (window.tokens[b, : int(window.num_committed[b])] != NO_TOKEN).all()


def oracle(script, tokens, prompt_length):
    """Group passes without prompt overlap: G for the prompt, then the last change of every token, then G."""
    new = len(tokens) - prompt_length
    changes = [script.last_change(tuple(tokens[: prompt_length + t + 1])) for t in range(new - 2)]
    return script.num_repetitions * (2 if new > 1 else 1) + sum(changes)


scripts = st.builds(
    Script,
    seed=st.integers(0, 10**6),
    num_repetitions=st.integers(1, 6),
    vocab_size=st.integers(2, 40),
    flip_rate=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


@settings(max_examples=120, deadline=None)
@given(scripts, st.integers(1, 3), st.integers(1, 5), st.integers(1, 25), st.booleans(), st.booleans())
def test_window_decodes_what_plain_decoding_decodes(script, batch_size, prompt_length, num_new, overlap, has_eos):
    prompts = [[2 + (7 * b + c) % 11 for c in range(prompt_length)] for b in range(batch_size)]
    eos = EOS if has_eos else None
    tokens, num_passes, _ = run(script, prompts, prompt_length + num_new, eos=eos, overlap_prompt=overlap)
    assert tokens == [script.decode(prompt, prompt_length + num_new, eos) for prompt in prompts]
    if not overlap:
        assert num_passes == max(oracle(script, row, prompt_length) for row in tokens)


@settings(max_examples=60, deadline=None)
@given(scripts, st.sets(st.integers(2, 5)), st.floats(1, 6), st.integers(1, 25))
def test_exits_that_are_not_asked_and_guesses_that_are_not_made_change_no_token(script, some, break_even, num_new):
    last = script.num_repetitions
    exits = sorted({1, last} | {exit_ for exit_ in some if exit_ < last})
    tokens, _, _ = run(script, [[4, 5], [6, 7]], 2 + num_new, exits=exits, break_even=break_even)
    assert tokens == [script.decode(prompt, 2 + num_new) for prompt in ([4, 5], [6, 7])]


def test_a_change_at_an_exit_that_is_not_asked_is_found_at_the_next_that_is():
    script = Script(5, 4, 30, 0.4)
    every, passes, window = run(script, [[3, 4]], 42, eos=None)
    some, more_passes, other = run(script, [[3, 4]], 42, eos=None, exits=[1, 2, 4])
    assert some == every and more_passes > passes
    assert window.flip_rates()[3] > 0 and other.flip_rates()[3] == 0
    assert other.flip_rates()[4] >= window.flip_rates()[4]


@settings(max_examples=60, deadline=None)
@given(scripts, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(1, 20))
def test_padding_on_the_left_is_never_computed(script, paddings, num_new):
    prompts = [[0] * padding + [5] * (4 - padding) for padding in paddings]
    seen = np.array([[column >= padding for column in range(4)] for padding in paddings])
    tokens, _, _ = run(script, prompts, 4 + num_new, seen=seen)
    assert tokens == [script.decode(prompt, 4 + num_new) for prompt in prompts]


def test_prompt_overlap_saves_passes_and_changes_no_token():
    script = Script(0, 4, 30, 0.2)
    with_overlap, passes, _ = run(script, [[5, 6, 7]], 40)
    without, more_passes, _ = run(script, [[5, 6, 7]], 40, overlap_prompt=False)
    assert with_overlap == without
    assert passes < more_passes


def test_right_drafts_commit_a_token_every_pass():
    num_new, num_repetitions = 20, 5
    script = Script(3, num_repetitions, 50, flip_rate=0.0)
    tokens, num_passes, _ = run(script, [[4]], 1 + num_new, eos=None)
    assert num_passes == num_repetitions + num_new - 1
    assert len(tokens[0]) == 1 + num_new


def test_wrong_drafts_cost_no_more_than_plain_decoding():
    num_new, num_repetitions = 20, 5
    script = Script(3, num_repetitions, 10**6, flip_rate=1.0)
    _, num_passes, _ = run(script, [[4]], 1 + num_new, eos=None)
    assert num_passes <= num_repetitions * num_new


class SettlesLate(Script):
    """Predictions change at the last exit, except in some stretches of the text and for every `good`-th token."""

    def __init__(self, *args, settled=(), good=10**6):
        super().__init__(*args, flip_rate=1.0)
        self.settled, self.good = settled, good

    def predict(self, prefix, exit_):
        settled = len(prefix) in self.settled or len(prefix) % self.good == 0
        return self._number("token", prefix, settled or exit_ == self.num_repetitions) % self.vocab_size


class Counts(Window):
    """Counts the rows of every column."""

    def __init__(self, prompt, max_length, *args, **kwargs):
        super().__init__(prompt, max_length, *args, **kwargs)
        self.num_rows = np.zeros(max_length, dtype=int)

    def rows(self):
        rows = super().rows()
        np.add.at(self.num_rows, rows[1], 1)
        return rows


def test_guessing_in_vain_ends_and_begins_again():
    num_repetitions, last = 4, RETRY[1]
    num_new = 8 * last
    script = SettlesLate(1, num_repetitions, 10**6, settled=range(4 * last, 6 * last))
    tokens, num_passes, window = run(
        script, [[4]], 1 + num_new, eos=None, window_class=Counts, break_even=num_repetitions - 1
    )
    assert tokens == [script.decode([4], 1 + num_new, None)]
    held = window.num_rows[2 * last : 4 * last]
    # An attempt now and then computes the next few positions in vain.
    assert (held > num_repetitions).sum() <= 2 * (num_repetitions - 1), "no wrong guess is computed"
    assert num_passes < num_repetitions * (num_new - last), "where guesses are right again, they are made again"


def test_nothing_is_guessed_below_a_break_even_of_one():
    script = Script(3, 4, 50, flip_rate=0.0)
    tokens, num_passes, window = run(script, [[4]], 21, eos=None, break_even=0.9, window_class=Counts)
    assert tokens == [script.decode([4], 21, None)]
    assert num_passes == 4 * 20 and (window.num_rows[:20] == 4).all()


@pytest.mark.parametrize(("break_even", "holds_back"), [(2.5, True), (3.7, False), (None, False)])
def test_guessing_ends_where_it_costs_more_than_it_brings_although_it_is_right_now_and_then(break_even, holds_back):
    script = SettlesLate(1, 4, 10**6, good=3)  # 4, 4 and 1 passes: 3 per token
    tokens, _, window = run(script, [[4]], 257, eos=None, window_class=Counts, break_even=break_even)
    assert tokens == [script.decode([4], 257, None)]
    assert (window.num_rows.sum() < 1.1 * 4 * 256) == holds_back


def test_flip_rates_count_committed_predictions_only():
    script = Script(5, 4, 30, 0.4)
    tokens, _, window = run(script, [[3, 4], [6, 7]], 42, eos=None)
    rates = window.flip_rates()
    for exit_ in (2, 3, 4):
        flips = [
            script.predict(tuple(row[:n]), exit_) != script.predict(tuple(row[:n]), exit_ - 1)
            for row in tokens
            for n in range(2, len(row))
        ]
        assert rates[exit_] == pytest.approx(sum(flips) / len(flips))


class KeepsInvalidated(Window):
    """Mutant: a flip replaces the token and leaves the younger positions as they are."""

    def verify(self, sequences, columns, predictions):
        done, tokens = self.done.copy(), self.tokens.copy()
        super().verify(sequences, columns, predictions)
        self.done[:] = np.where((tokens != NO_TOKEN) & (done > 0), done, self.done)


class RestartsOneTooLate(Window):
    """Mutant: after a flip the replaced token's position keeps its progress, only those behind it restart."""

    def verify(self, sequences, columns, predictions):
        done = self.done.copy()
        super().verify(sequences, columns, predictions)
        restarted = (self.done == 0) & (done > 0)
        first = restarted.argmax(1)
        rows = restarted.any(1).nonzero()[0]
        self.done[rows, first[rows]] = done[rows, first[rows]]


class CommitsOneTooMany(Window):
    """Mutant: the token after the newest committed one counts as final as well."""

    def commit(self, running):
        num_new = super().commit(running)
        more = running & (self.num_committed > self.prompt_length) & (self.num_committed <= self.last_column)
        self.num_committed = self.num_committed + more
        return num_new + more


@pytest.mark.parametrize("mutant", [KeepsInvalidated, RestartsOneTooLate, CommitsOneTooMany])
def test_mutants_of_the_window_are_caught(mutant):
    script = Script(11, 4, 30, 0.5)
    prompt, max_length = [5, 6, 7], 60
    assert run(script, [prompt], max_length, eos=None)[0] == [script.decode(prompt, max_length, None)]
    with pytest.raises(AssertionError):
        tokens, _, _ = run(script, [prompt], max_length, eos=None, window_class=mutant)
        assert tokens == [script.decode(prompt, max_length, None)]
