# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""Generated texts of a model and their scores."""

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from transformers.utils import logging


logger = logging.get_logger(__name__)


def generate_texts(
    model, tokenizer, sources: list[str], batch_size: int, max_source_length: int, max_new_tokens: int, **options
) -> list[str]:
    """
    The text that the model writes for each source, sources of similar length together, shared among processes.

    Args:
        model ([`SpeedT5ForCausalLM`]): put into eval mode and back.
        tokenizer (`PreTrainedTokenizerBase`): with `padding_side="left"`.
        sources (`list[str]`): prompts, prefix included.
        batch_size (`int`): prompts at once, per process.
        max_source_length (`int`): tokens kept of each source, special tokens not counted.
        max_new_tokens (`int`): tokens written at most.
        options: further arguments of `generate`, for example `speed=True`.

    Returns:
        `list[str]`, in the order of `sources`, on every process.
    """
    state = PartialState()
    order = sorted(range(len(sources)), key=lambda index: -len(sources[index]))[
        state.process_index :: state.num_processes
    ]
    was_training = model.training
    model.eval()
    texts: list[tuple[int, str]] = []
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        # + 2: bos and eos are around every source.
        inputs = tokenizer(
            [sources[index] for index in indices],
            truncation=True,
            max_length=max_source_length + 2,
            padding=True,
            return_tensors="pt",
        ).to(model.device)
        with torch.no_grad():
            output = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False, **options)
        new_tokens = output[:, inputs["input_ids"].shape[1] :]
        texts += zip(indices, tokenizer.batch_decode(new_tokens, skip_special_tokens=True), strict=True)
    model.train(was_training)
    return [text for _, text in sorted(gather_object(texts))]


class TextScores:
    """
    Scores of generated texts, 0 to 100: `bleu` and `chrf` of translations, `rouge1`, `rouge2`, `rougeL` of summaries.

    Uses the metrics of `evaluate` where they load, and the libraries behind them where they do not (offline);
    `backend` says which.

    Args:
        task (`str`): `"translation"` or `"summarization"`.
    """

    def __init__(self, task: str):
        if task not in ("translation", "summarization"):
            raise ValueError(f"`task` must be translation or summarization, got {task!r}: choose one.")
        self.task = task
        names = ("sacrebleu", "chrf") if task == "translation" else ("rouge",)
        try:
            import evaluate

            self.metrics = {name: evaluate.load(name) for name in names}
            self.backend = "evaluate"
        except Exception as error:  # no network, no Hub, no `evaluate`: all end in the same scores
            self.metrics = {}
            self.backend = "sacrebleu" if task == "translation" else "rouge_score"
            logger.info(f"`evaluate` did not load ({type(error).__name__}); scores come from {self.backend} directly.")

    def __call__(self, predictions: list[str], references: list[str]) -> dict[str, float]:
        scores = self._translation if self.task == "translation" else self._summarization
        return {name: round(score, 3) for name, score in scores(predictions, references).items()}

    def _translation(self, predictions, references):
        if self.metrics:
            wrapped = [[reference] for reference in references]
            return {
                "bleu": self.metrics["sacrebleu"].compute(predictions=predictions, references=wrapped)["score"],
                "chrf": self.metrics["chrf"].compute(predictions=predictions, references=wrapped)["score"],
            }
        import sacrebleu

        return {
            "bleu": sacrebleu.corpus_bleu(predictions, [references]).score,
            "chrf": sacrebleu.corpus_chrf(predictions, [references]).score,
        }

    def _summarization(self, predictions, references):
        kinds = ["rouge1", "rouge2", "rougeL"]
        if self.metrics:
            scores = self.metrics["rouge"].compute(predictions=predictions, references=references, rouge_types=kinds)
            return {kind: 100 * scores[kind] for kind in kinds}
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(kinds)
        scores = [scorer.score(reference, text) for text, reference in zip(predictions, references, strict=True)]
        return {kind: 100 * sum(score[kind].fmeasure for score in scores) / len(scores) for kind in kinds}
