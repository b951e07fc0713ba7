"""Small things that several tests need."""

import functools

import tokenizers
import transformers

TAGS = [
    f"<{slash}{tag}>" for tag in ("think", "search", "information", "question", "answer") for slash in ("", "/")
]


@functools.cache
def tokenizer(tags_as_tokens: bool = True) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE with few merges; with the tags as single tokens, or split into several."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = tokenizers.normalizers.NFC()
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    text = ["the search answer information question think >x </s </search><answer> a> </answer>."] * 9
    model.train_from_iterator(text, trainer)
    if tags_as_tokens:
        model.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in TAGS])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
