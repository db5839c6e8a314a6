"""Train models/tiny-gpt2 from scratch: a 1.45M-parameter GPT-2 on public-domain children's books.

    python scripts/train_tiny_gpt2.py --output models/tiny-gpt2 --corpus-dir data/corpus

Missing books are downloaded into ``--corpus-dir``; every file is checked against a pinned SHA-256. A GPU is
wanted for the full number of steps; ``--steps 20 --batch-size 2`` shows on any machine that everything works.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from rich.console import Console

from tiny_gpt2 import corpus as corpora
from tiny_gpt2 import export, tokenizer, training

COMMON_WORDS = 2000


def parse_arguments() -> argparse.Namespace:
    """Return the command line; the defaults are those of the committed model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the model files")
    parser.add_argument("--corpus-dir", type=Path, default=Path("data/corpus"), help="folder of the books")
    parser.add_argument("--common-words", type=Path, help=f"also write the {COMMON_WORDS} commonest words")
    parser.add_argument("--steps", type=int, default=13_000, help="optimiser steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, help="windows of 1,024 tokens a step")
    parser.add_argument("--learning-rate", type=float, default=5e-3, help="peak of the schedule")
    parser.add_argument("--dropout", type=float, default=0.0, help="dropout of embeddings and residuals")
    parser.add_argument("--vocab-size", type=int, default=2560, help="tokens, <|endoftext|> included")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    return parser.parse_args()


def pick_device(name: str) -> torch.device:
    """Resolve ``auto`` to CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def main() -> None:
    """Obtain the texts, train the tokenizer and the model, write everything into the output folder."""
    arguments = parse_arguments()
    console = Console()
    device = pick_device(arguments.device)
    settings = training.TrainingSettings(
        steps=arguments.steps,
        batch_size=arguments.batch_size,
        learning_rate=arguments.learning_rate,
        dropout=arguments.dropout,
    )
    torch.manual_seed(settings.seed)
    arguments.output.mkdir(parents=True, exist_ok=True)

    books = corpora.read_manifest()
    with console.status("reading the books"):
        corpus = corpora.build(books, arguments.corpus_dir)
    with console.status("training the tokenizer"):
        bpe = tokenizer.train_tokenizer(corpus.train, arguments.vocab_size)
        train_ids = tokenizer.encode_documents(bpe, corpus.train)
        validation_ids = tokenizer.encode_documents(bpe, corpus.validation)
    console.print(f"{len(books)} books, {len(train_ids):,} + {len(validation_ids):,} tokens")
    if arguments.common_words is not None:
        words = tokenizer.common_words(corpus.train, COMMON_WORDS)
        arguments.common_words.parent.mkdir(parents=True, exist_ok=True)
        arguments.common_words.write_text("\n".join(words) + "\n", encoding="utf-8")

    end_of_text = tokenizer.end_of_text_id(bpe)
    model = training.build_model(arguments.vocab_size, end_of_text, settings.dropout)
    console.print(f"{model.num_parameters():,} parameters on {device.type}")
    result = training.train(model, train_ids, validation_ids, settings, device, console)

    result.model.half().float()
    stream = torch.tensor(validation_ids, device=device)
    float16_validation = training.validation_loss(result.model, stream, settings.batch_size, settings.window)
    export.save_model(result.model, arguments.output)
    tokenizer.save_tokenizer(bpe, arguments.output, result.model.config.n_positions)
    export.write_log(
        arguments.output,
        books=books,
        corpus=corpus,
        token_counts={"train": len(train_ids), "validation": len(validation_ids)},
        settings=settings,
        result=result,
        float16_validation=float16_validation,
    )
    console.print(f"best validation loss {result.best.validation:.4f}, in float16 {float16_validation:.4f}")
    for prompt, continuation in export.greedy_samples(arguments.output).items():
        console.print(f"> {prompt}", style="bold", markup=False)
        console.print(continuation, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
