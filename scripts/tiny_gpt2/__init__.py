"""How models/tiny-gpt2 is made: the texts, the tokenizer, the training loop and the files that come out."""
