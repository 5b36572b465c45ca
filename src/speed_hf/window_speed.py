# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""The window of positions in flight: which a pass advances, and what its predictions verify, invalidate and commit."""

import numpy as np


MEMORY = 16  # tokens over which the passes of a token are averaged, at most
TRUST = 2  # tokens of one pass each that a sequence begins with, so to speak
RETRY = 4, 32  # tokens from one attempt to the next while guessing does not pay: at first, and at most
NO_TOKEN = -1  # what stands after the youngest token of a sequence; no prediction equals it


class Window:
    """
    Tokens and progress of every sequence, as arrays over (sequence, column). It knows nothing of the model.

    Position c holds a token, predicts the token of column c + 1, and has `done[c]` repetitions behind it. Two things
    always hold between passes: the token of column c + 1 is the newest prediction of position c, or a guess that no
    exit has judged yet; and `done` never increases along a sequence. So a position only meets keys that its
    predecessors wrote for their present tokens: here, invalidating a position means `done = 0` and nothing else.

    The arrays are NumPy's and live beside the processor, because a pass must be decided before it can be computed: a
    dozen numbers, for which an operation of NumPy takes a fifth of the time of one of torch. Even that is slow after a
    pass has swept the caches, so what concerns one row of a sequence is done in plain Python.

    Args:
        prompt (`np.ndarray` of shape `(B, L)`): token ids, padding included.
        max_length (`int`): columns of the longest possible sequence, prompt included.
        num_repetitions (`int`): G.
        eos_token_ids (`np.ndarray` of shape `(E,)`, *optional*): ids that end a sequence.
        seen (`np.ndarray` of shape `(B, L)`, *optional*): bool, False at padding, which is never computed.
        num_cached (`int`, defaults to 0): columns whose keys and values exist in all repetitions.
        overlap_prompt (`bool`, defaults to `True`): start new positions while the prompt is still in flight.
        exits (`list[int]`, *optional*): exits whose predictions are asked for, 1 and G among them. `None`: all.
        break_even (`float`, *optional*): passes per token from which on guessing costs more than it brings. `None`: it
            never does. Below 1: nothing is guessed.

    Attributes:
        tokens (`np.ndarray` of shape `(B, max_length)`, int64): given, committed and guessed tokens, then `NO_TOKEN`.
        done (`np.ndarray` of shape `(B, max_length)`, int64): repetitions behind each position, 0 .. G.
        num_committed (`np.ndarray` of shape `(B,)`, int64): leading columns whose token is final, prompt included.
        history (`np.ndarray` of shape `(B, max_length)`, int64): what became of each prediction that was asked for
            from exit 1 on. Bit 1 is set, and bit i if the prediction changed at exit i. 0 for the others.
        passes_per_token (`list[float]`): of each sequence of late, where guesses were made. A token whose
            prediction changes last at exit i takes i passes.
        first_exit (`int`): exit from which on predictions are asked for. 1, or G where guessing does not pay: then the
            next position waits, and a token costs what it costs plainly. One for all sequences, since they share the
            passes.
    """

    def __init__(
        self,
        prompt,
        max_length,
        num_repetitions,
        eos_token_ids=None,
        seen=None,
        num_cached=0,
        overlap_prompt=True,
        exits=None,
        break_even=None,
    ):
        batch_size, self.prompt_length = prompt.shape
        self.num_repetitions = num_repetitions
        self.eos_token_ids = set() if eos_token_ids is None else set(eos_token_ids.tolist())
        self.overlap_prompt = overlap_prompt
        self.asks = np.isin(np.arange(num_repetitions + 1), range(1, num_repetitions + 1) if exits is None else exits)
        self.last_column = max_length - 1  # its token may be predicted, but nothing follows it, so it is never started
        self.tokens = np.full((batch_size, max_length), NO_TOKEN, dtype=np.int64)
        self.tokens[:, : self.prompt_length] = prompt
        self.done = np.zeros_like(self.tokens)
        self.done[:, :num_cached] = num_repetitions
        if seen is not None:
            # The last prompt position predicts the first new token, so it is computed even where it counts as padding.
            self.done[:, : self.prompt_length - 1][~seen[:, :-1]] = num_repetitions
        self.history = np.zeros_like(self.tokens)
        self.break_even = num_repetitions if break_even is None else break_even
        self.passes_per_token = [1.0] * batch_size
        self.num_tried = [0] * batch_size  # tokens that were guessed
        self.num_untried = 0  # tokens since the last attempt to guess
        self.retry_after = RETRY[0]
        self.first_exit = num_repetitions if self.break_even < 1 else 1
        self.num_committed = np.full(batch_size, self.prompt_length)
        # Columns below this one may be in flight: not the youngest token where it ends the sequence, nor finished
        # sequences.
        self.end = self.num_committed.copy()
        self.columns = np.arange(max_length)
        self.first, self.stop = num_cached, self.prompt_length  # everything in flight lies between these columns

    def rows(self):
        """
        The rows of the next pass.

        Returns:
            `tuple(np.ndarray, np.ndarray, np.ndarray)` of shape `(R,)` each: sequence, column and the repetitions
            behind each position, ordered by repetitions, sequence and column.
        """
        span = slice(self.first, self.stop)
        end = self.end
        if not self.overlap_prompt:
            end = np.where(self.num_committed > self.prompt_length, end, np.minimum(end, self.prompt_length))
        done = self.done[:, span]
        sequences, places = ((done < self.num_repetitions) & (self.columns[span] < end[:, None])).nonzero()
        repetitions = done[sequences, places]
        order = repetitions.argsort(kind="stable")
        return sequences[order], places[order] + self.first, repetitions[order]

    def advance(self, sequences, columns):
        """
        Count one more repetition for the rows of a pass.

        Returns:
            `np.ndarray`: indices of the rows whose predictions are wanted.
        """
        exits = self.done[sequences, columns] + 1
        self.done[sequences, columns] = exits
        asked = self.asks[exits] & (exits >= self.first_exit)
        return (asked & (columns >= self.prompt_length - 1)).nonzero()[0]

    def verify(self, sequences, columns, predictions):
        """
        Compare each prediction with the token it was guessed to be, keep what agrees and restart after what does not.

        In each sequence the first prediction that differs from the token after it replaces that token: a flip, which
        invalidates all younger positions, or simply the next token where there was none yet.

        Args:
            sequences, columns (`np.ndarray` of shape `(R,)`): the rows of the pass that predict new tokens.
            predictions (`np.ndarray` of shape `(R,)`): the token each of them predicts for the column after it.
        """
        first: dict[int, tuple[int, int]] = {}  # sequence -> column and token of its first difference
        for sequence, column, token in zip(sequences.tolist(), columns.tolist(), predictions.tolist()):
            guess, exit_ = self.tokens.item(sequence, column + 1), self.done.item(sequence, column)
            history = self.history.item(sequence, column) if guess != NO_TOKEN else 0
            if exit_ == 1:
                history = 2
            elif history and token != guess:
                history |= 1 << exit_
            self.history[sequence, column] = history
            if token != guess and (sequence not in first or column < first[sequence][0]):
                first[sequence] = column, token
        for sequence, (column, token) in first.items():
            self._restart(sequence, column + 1, token)
        self.stop = max(int(self.end.max()), self.first + 1)

    def _restart(self, sequence, column, token):
        """A new token, and nothing known of what follows."""
        self.tokens[sequence, column] = token
        self.tokens[sequence, column + 1 : self.stop + 1] = NO_TOKEN
        self.done[sequence, column : self.stop + 1] = 0
        self.end[sequence] = column + (column < self.last_column and token not in self.eos_token_ids)

    def commit(self, running):
        """
        Make the tokens final that positions with all repetitions behind them predict.

        Args:
            running (`np.ndarray` of shape `(B,)`): bool, sequences that are not finished.

        Returns:
            `np.ndarray` of shape `(B,)`: newly committed tokens per sequence.
        """
        num_new = np.zeros_like(self.num_committed)
        grown = []
        for sequence in running.nonzero()[0].tolist():
            # Position c commits column c + 1; prompt positions before the last one commit nothing new.
            start = column = self.num_committed.item(sequence) - 1
            while column < self.stop and self.done.item(sequence, column) == self.num_repetitions:
                column += 1
            if column > start:
                num_new[sequence] = column - start
                grown.append(sequence)
        self.num_committed = self.num_committed + num_new
        if grown and self.break_even >= 1:
            self._hold_back(grown, running)
        return num_new

    def _hold_back(self, grown, running):
        """Stop guessing where it costs more than it brings, and try again now and then."""
        tried = False
        for sequence in grown:
            history = int(self.history[sequence, self.num_committed[sequence] - 2])  # behind the newest token
            if history:
                tried = True
                self.num_tried[sequence] += 1
                memory = min(self.num_tried[sequence] + TRUST, MEMORY)
                num_passes = history.bit_length() - 1  # the last exit at which it changed, 1 if it never did
                self.passes_per_token[sequence] += (num_passes - self.passes_per_token[sequence]) / memory
        passes = [self.passes_per_token[sequence] for sequence in running.nonzero()[0].tolist()]
        costly = sum(passes) > self.break_even * len(passes)
        if tried:
            self.retry_after = min(2 * self.retry_after, RETRY[1]) if costly else RETRY[0]
        self.num_untried = 0 if tried else self.num_untried + 1
        self.first_exit = self.num_repetitions if costly and self.num_untried < self.retry_after else 1

    def leave(self, running):
        """Take sequences that are not `running` out of flight, and move the window on to what is left."""
        self.end = np.where(running, self.end, 0)
        oldest = int(np.where(running, self.num_committed - 1, self.last_column).min())
        if oldest >= self.prompt_length:  # before that, the whole prompt is in flight
            self.first = oldest
        self.stop = max(int(self.end.max()), self.first + 1)

    def flip_rates(self):
        """
        Share of the committed predictions, of those made from exit 1 on, that changed at exits 2 .. G: `dict`.

        A change at an exit that was not asked for counts at the next that was.
        """
        predicting = (self.columns >= self.prompt_length - 1) & (self.columns < self.num_committed[:, None] - 1)
        history = self.history[predicting]
        history = history[history > 0]
        return {
            exit_: int((history >> exit_ & 1).sum()) / max(len(history), 1)
            for exit_ in range(2, self.num_repetitions + 1)
        }


__all__ = ["NO_TOKEN", "Window"]
