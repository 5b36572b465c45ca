# Copyright 2026 The speed_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""
Train a sentencepiece unigram vocabulary on text files and save it as a Hugging Face tokenizer.

    python examples/train_tokenizer.py --files train.jsonl.gz more.parquet --columns en de --vocab_size 8000 \
        --output_dir tokenizer

Pieces 0, 1, 2 are pad (also bos), eos and unk, as in T5. Text that the pieces do not cover is spelled in bytes, so any
text survives encoding and decoding. The last line of output names the folder, the vocabulary size and tokens per word.
"""

import io
from dataclasses import dataclass, field
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import HfArgumentParser, PreTrainedTokenizerFast

from speed_hf.data import load_file, select_text_columns


PAD, EOS, UNK, SPACE = "<pad>", "</s>", "<unk>", "▁"


@dataclass
class Arguments:
    files: list[str] = field(metadata={"help": "JSON-lines, CSV or Parquet files; .gz is fine."})
    columns: list[str] = field(metadata={"help": "Text columns, read from every file."})
    output_dir: str = field(metadata={"help": "Folder of the new tokenizer."})
    vocab_size: int = field(default=8000, metadata={"help": "Pieces, the 3 special ones and 256 bytes included."})
    max_sentences: int = field(default=300_000, metadata={"help": "Texts drawn at random for training."})
    model_max_length: int = field(default=512, metadata={"help": "Saved with the tokenizer, in tokens."})
    num_threads: int = field(default=2, metadata={"help": "Threads of the trainer."})


def read_texts(files: list[str], columns: list[str]) -> list[str]:
    """All texts of the columns, file by file."""
    texts = []
    for path in files:
        rows = select_text_columns(load_file(path), path, {column: column for column in columns})
        texts += [text for column in columns for text in rows[column]]
    return texts


def train_pieces(texts: list[str], args: Arguments) -> list[tuple[str, float]]:
    """(piece, log probability) in the order of their ids."""
    model = io.BytesIO()
    sentencepiece.set_random_generator_seed(0)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type="unigram",
        vocab_size=args.vocab_size,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        pad_piece=PAD,
        eos_piece=EOS,
        unk_piece=UNK,
        byte_fallback=True,
        character_coverage=0.9999,  # the remaining characters are spelled in bytes
        split_digits=True,  # numbers are copied digit by digit, whatever their length
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        input_sentence_size=args.max_sentences,
        shuffle_input_sentence=True,
        num_threads=args.num_threads,
        minloglevel=1,
    )
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return [(pieces.id_to_piece(i), pieces.get_score(i)) for i in range(pieces.get_piece_size())]


def build_tokenizer(pieces: list[tuple[str, float]], model_max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer that writes `bos source eos`, and `bos source eos target eos` for a pair."""
    tokenizer = Tokenizer(Unigram(pieces, unk_id=2, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{PAD} $A {EOS}", pair=f"{PAD} $A {EOS} $B {EOS}", special_tokens=[(PAD, 0), (EOS, 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=PAD,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        model_max_length=model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def main():
    (args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
    texts = read_texts(args.files, args.columns)
    tokenizer = build_tokenizer(train_pieces(texts, args), args.model_max_length)
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.output_dir)
    sample = texts[:: max(1, len(texts) // 10_000)]
    num_tokens = sum(map(len, tokenizer(sample, add_special_tokens=False)["input_ids"]))
    num_words = sum(len(text.split()) for text in sample)
    print(f"{args.output_dir}: {len(tokenizer)} pieces, {num_tokens / num_words:.3f} tokens per word")


if __name__ == "__main__":
    main()
