"""Tokenizers made for the atlas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from zest_jax.tasks import templates
from zest_jax.tasks.atlas import Atlas

TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "question", "answer")
        for slash in ("", "/")]  # fmt: skip
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(folder: Path, atlas: Atlas, vocabulary: int, seed: int) -> None:
    """Byte-level BPE of Qwen's form, trained on what the smoke run reads and writes.

    Texts come from training entities and chains only: a name that is held out is cut into pieces
    that training has seen, as a new name would be.
    """
    rng = np.random.default_rng(seed)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TAGS) - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(atlas, rng), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    if tokenizer.get_vocab_size() != vocabulary:
        raise RuntimeError(f"The vocabulary has {tokenizer.get_vocab_size()} entries.")
    folder.mkdir(exist_ok=True)
    # One entry a line would be ten thousand lines; the library's own compact form is kept.
    (folder / "tokenizer.json").write_text(
        tokenizer.to_str(pretty=False) + "\n", encoding="utf-8", newline="\n"
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n"
    )


def _texts(atlas: Atlas, rng: np.random.Generator) -> Iterator[str]:
    for entity in np.flatnonzero(atlas.train).tolist():
        yield atlas.passage_of(entity).render()
    for hops in (1, 2, 3):
        for chain in atlas.sample_chains(hops, 600, rng):
            task = templates.chain_task(chain, atlas, rng, "")
            yield f"Q: {task.question}\n"
            labels = atlas.graph.labels
            words = [atlas.graph.relation_labels[relation] for relation in chain.relations]
            yield f" {labels[chain.entities[0]]}, {', '.join(words)}"
            yield "Write a question.\nChain: " + " | ".join(
                [labels[chain.entities[0]], *words, labels[chain.entities[-1]]]
            )
            for word, entity in zip(words, chain.entities, strict=False):
                yield f" {word}"
                yield f" {labels[entity]}"
            yield f" {labels[chain.entities[-1]]}"
            yield " done"
    for entity in np.flatnonzero(atlas.train).tolist():
        for _ in range(3):
            yield f" {atlas.graph.labels[entity]}"
