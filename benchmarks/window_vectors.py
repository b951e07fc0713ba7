"""Real embeddings for `benchmarks.retrieval`: windows of words of a corpus, encoded on the device.

    python -m zest_jax.fetch_demo --only=encoder,corpus --out=demo
    python -m benchmarks.window_vectors --corpus=demo/corpus.jsonl --encoder=demo/minilm \\
        --count=1001024 --out=windows.npy
    python -m benchmarks.retrieval --file=windows.npy --vectors=1000000

A small corpus gives many vectors this way: one for each place and each number of words, in a
random order. Neighbouring windows share words, so that a vector has near neighbours, as a passage
has in a large corpus whose articles repeat one another.

Words are tokenised once; windows are put together on the device. That is exact for tokenisers that
split at spaces first, as BERT's does.

Shape letters: B windows of a batch, L tokens of a window, T tokens of the corpus.
"""

import argparse
import functools
import json
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

_BATCH = 4096
_SIZES = "4,5,6,7,8,9,10,11,12,13,14,16,18,20,24"


def unpadded(tokenizer: Any) -> Any:
    """A copy that neither pads nor cuts."""
    import tokenizers

    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    copy.no_padding()
    copy.no_truncation()
    return copy


def tokenised(path: str, tokenizer: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [T] of a jsonl corpus, first token of each word (and the end), words of each text."""
    token_T: list[int] = []
    first: list[int] = []
    words: list[int] = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            fields = json.loads(line)
            text = f"{fields['title']} {fields['text']}".split()
            words.append(len(text))
            encoded = tokenizer.encode_batch(text, add_special_tokens=False)
            for word in encoded:
                first.append(len(token_T))
                token_T += word.ids
    return np.asarray(token_T, np.int32), np.asarray([*first, len(token_T)]), np.asarray(words)


def windows(
    first_W: np.ndarray, words_D: np.ndarray, sizes: list[int], count: int, seed: int = 0
) -> np.ndarray:
    """`count` of all windows, in random order: first token and tokens [count, 2].

    Raises:
      ValueError: the corpus has fewer windows of these sizes.
    """
    end_D = np.cumsum(words_D)
    left_W = np.concatenate([np.arange(n, 0, -1) for n in words_D])  # words up to the text's end
    assert len(left_W) == end_D[-1] == len(first_W) - 1
    parts = []
    for size in sizes:
        word_B = np.flatnonzero(left_W >= size)
        begin_B = first_W[word_B]
        parts.append(np.stack([begin_B, first_W[word_B + size] - begin_B], 1))
    every_B2 = np.concatenate(parts)
    if len(every_B2) < count:
        raise ValueError(f"the corpus has {len(every_B2)} windows of {sizes} words; add sizes")
    return np.random.default_rng(seed).permutation(every_B2)[:count]


def encoded(
    encoder: Any, tokenizer: Any, token_T: np.ndarray, window_N2: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows and unit vectors [B, E] of all windows; those of like lengths go together."""
    import jax
    import jax.numpy as jnp

    opening, closing = tokenizer.encode("").ids
    corpus_T = jnp.asarray(token_T)

    @functools.partial(jax.jit, static_argnames="L")
    def run(params: Any, corpus_T: Any, begin_B: Any, count_B: Any, L: int) -> Any:
        count_B = jnp.minimum(count_B, L - 2)
        place_L = jnp.arange(L) - 1
        at_BL = jnp.clip(begin_B[:, None] + place_L, 0, len(corpus_T) - 1)
        id_BL = jnp.where(place_L < count_B[:, None], corpus_T[at_BL], 0)
        id_BL = jnp.where(place_L == count_B[:, None], closing, id_BL).at[:, 0].set(opening)
        vector_BE = encoder.recipe.encode(params, id_BL, count_B + 2).astype(jnp.float32)
        return vector_BE / jnp.linalg.norm(vector_BE, axis=1, keepdims=True)

    order_N = np.argsort(window_N2[:, 1], kind="stable")
    waiting: list[tuple[np.ndarray, Any]] = []
    for at in range(0, len(order_N), _BATCH):
        row_B = order_N[at : at + _BATCH]
        begin_B, count_B = np.pad(window_N2[row_B], ((0, _BATCH - len(row_B)), (0, 0))).T
        L = min(64, -(-int(count_B.max() + 2) // 8) * 8)
        given = (jnp.asarray(begin_B, jnp.int32), jnp.asarray(count_B, jnp.int32))
        waiting.append((row_B, run(encoder.params, corpus_T, *given, L=L)))
        if len(waiting) > 2:
            row_B, vector_BE = waiting.pop(0)
            yield row_B, np.asarray(vector_BE)[: len(row_B)]
    for row_B, vector_BE in waiting:
        yield row_B, np.asarray(vector_BE)[: len(row_B)]


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--corpus", required=True, help="jsonl with title and text")
    p.add_argument("--encoder", required=True, help="folder or hub id of a BERT-like encoder")
    p.add_argument("--count", type=int, required=True, help="vectors")
    p.add_argument("--sizes", default=_SIZES, help="words of a window")
    p.add_argument("--dtype", default="bfloat16", help="the encoder computes in")
    p.add_argument("--out", required=True, help=".npy file to write, float16")
    a = p.parse_args()
    from zest_jax.models import load_encoder

    encoder = load_encoder(a.encoder, dtype=a.dtype)
    start = time.perf_counter()
    tokenizer = unpadded(encoder.tokenizer.backend_tokenizer)
    token_T, first_W, words_D = tokenised(a.corpus, tokenizer)
    try:
        window_N2 = windows(first_W, words_D, [int(s) for s in a.sizes.split(",")], a.count)
    except ValueError as error:
        p.error(str(error))
    print(f"{len(words_D)} texts of {len(token_T)} tokens read", flush=True)
    shape = (a.count, encoder.size)
    vector_NE = np.lib.format.open_memmap(a.out, "w+", np.float16, shape)
    for row_B, vector_BE in encoded(encoder, tokenizer, token_T, window_N2):
        vector_NE[row_B] = vector_BE
    vector_NE.flush()
    print(f"{a.count} vectors in {time.perf_counter() - start:.1f} s, written to {a.out}")


if __name__ == "__main__":
    main()
