"""Finding tags in the bytes of sampled tokens, on device, one table look-up a token.

A tag's last character may share a token with what follows it, and a tag may be one token, several,
or split anywhere. So tags are matched on bytes: an Aho-Corasick automaton over all watched tags is
run over every token's bytes beforehand, from every state, on the host. While sampling, a slot
carries its automaton state, and one gather per token says where the automaton goes and which tag
was completed.

Shape letters: X automaton states, V vocabulary, W bytes of the longest token.
"""

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from zest_jax.errors import UserError

NONE = 0  # no tag was completed in this token; tag kinds count from 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StopTable:
    """What each token does to the automaton, from each of its states.

    Attributes:
      next_XV: state after the token; a special token (without bytes) goes back to state 0.
      opened_XV: kind of the last opening tag completed in the token before any closing tag, or
        NONE.
      open_tail_XV: bytes of the token after that opening tag.
      closed_XV: kind of the first closing tag completed in the token, or NONE.
      close_span_XV: bytes from the start of that closing tag to the end of the token: whatever lies
        fully within them, counted back from the token's end, is not content.
      bytes_V: length of each token in bytes.
      text_VW: the bytes themselves, zeros behind; None where no call is read (`read_calls`).
    """

    next_XV: jax.Array | np.ndarray
    opened_XV: jax.Array | np.ndarray
    open_tail_XV: jax.Array | np.ndarray
    closed_XV: jax.Array | np.ndarray
    close_span_XV: jax.Array | np.ndarray
    bytes_V: jax.Array | np.ndarray
    text_VW: jax.Array | np.ndarray | None = None


def token_bytes(tokenizer) -> list[bytes | None]:
    """Bytes of every id of a byte-level BPE tokenizer; None for special tokens and unused ids.

    Args:
      tokenizer: a transformers tokenizer of GPT-2's byte-level kind (all Qwen and Llama 3 ones
        are).

    Raises:
      UserError: a vocabulary entry has a character outside GPT-2's byte alphabet.
    """
    alphabet = _byte_alphabet()
    added = tokenizer.added_tokens_decoder
    vocab = tokenizer.get_vocab()
    # Not `len(tokenizer)`: a vocabulary may leave ids out.
    out: list[bytes | None] = [None] * (max(vocab.values(), default=-1) + 1)
    for token, index in vocab.items():
        if index in added:
            out[index] = None if added[index].special else added[index].content.encode()
            continue
        try:
            out[index] = bytes(alphabet[c] for c in token)
        except KeyError:
            raise UserError(
                f"token {index} ({token!r}) is not byte-level, so tags cannot be found in this "
                "tokenizer's bytes; take a policy with a byte-level BPE (Qwen, Llama 3, SmolLM2)."
            ) from None
    return out


def token_text(tokens: list[bytes | None], vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of every token [V, W], zeros behind, and how many [V]."""
    length_V = np.array([len(t or b"") for t in tokens] + [0] * (vocab - len(tokens)), np.int32)
    byte_VW = np.zeros((vocab, int(length_V.max(initial=1))), np.uint8)
    for i, t in enumerate(tokens):
        if t:
            byte_VW[i, : len(t)] = np.frombuffer(t, np.uint8)
    return byte_VW, length_V


def read_text(tokens: list[bytes | None], ids: Sequence[int]) -> str:
    """What a policy wrote, as `Protocol.queries` takes it: a special token as "\\0", and bytes that
    are no text as U+FFFD."""
    return b"".join(tokens[i] or b"\0" for i in ids).decode("utf-8", "replace")


def build_stop_table(
    tokens: list[bytes | None],
    opening: list[bytes],
    closing: list[bytes],
    vocab_size: int = 0,
    with_text: bool = False,
) -> StopTable:
    """Runs the automaton of all tags over all tokens from all states.

    Args:
      tokens: bytes of each id, None for ids that have none.
      opening: opening tags; opening[i] has kind i + 1.
      closing: closing tags; closing[i] has kind i + 1.
      vocab_size: rows of the policy's head where it is padded beyond the tokenizer (Qwen's is).
      with_text: whether to keep the tokens' bytes, for protocols with calls.

    Returns:
      A StopTable of numpy arrays.
    """
    vocab = max(vocab_size, len(tokens))
    step_X256, open_kind_X, close_kind_X = _aho_corasick(opening, closing)
    states = len(step_X256)
    byte_VW, length_V = token_text(tokens, vocab)
    longest = byte_VW.shape[1]
    close_length = np.array([0] + [len(t) for t in closing], np.int32)

    state = np.repeat(np.arange(states, dtype=np.int32)[:, None], vocab, axis=1)
    opened, open_at = np.zeros_like(state), np.zeros_like(state)
    closed, close_at = np.zeros_like(state), np.zeros_like(state)
    for w in range(longest):
        live = np.nonzero(length_V > w)[0]  # columns still inside their token
        s = step_X256[state[:, live], byte_VW[live, w]]
        state[:, live] = s
        before_close = closed[:, live] == NONE
        hit = (open_kind_X[s] != NONE) & before_close
        opened[:, live] = np.where(hit, open_kind_X[s], opened[:, live])
        open_at[:, live] = np.where(hit, w + 1, open_at[:, live])
        hit = (close_kind_X[s] != NONE) & before_close
        closed[:, live] = np.where(hit, close_kind_X[s], closed[:, live])
        close_at[:, live] = np.where(hit, w + 1, close_at[:, live])
    state[:, length_V == 0] = 0
    return StopTable(
        next_XV=state.astype(np.int16),
        opened_XV=opened.astype(np.int8),
        open_tail_XV=np.where(opened != NONE, length_V - open_at, 0).astype(np.int16),
        closed_XV=closed.astype(np.int8),
        close_span_XV=np.where(
            closed != NONE, length_V - close_at + close_length[closed], 0
        ).astype(np.int16),
        bytes_V=length_V,
        text_VW=byte_VW if with_text else None,
    )


def _aho_corasick(
    opening: list[bytes], closing: list[bytes]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Transition table [X, 256] and the kind of opening and closing tag that ends in each state."""
    children: list[dict[int, int]] = [{}]
    open_kind, close_kind = [NONE], [NONE]
    for tags, kinds in ((opening, open_kind), (closing, close_kind)):
        for i, tag in enumerate(tags):
            node = 0
            for byte in tag:
                if byte not in children[node]:
                    children[node][byte] = len(children)
                    children.append({})
                    open_kind.append(NONE)
                    close_kind.append(NONE)
                node = children[node][byte]
            kinds[node] = i + 1
    step = np.zeros((len(children), 256), np.int32)
    fail = [0] * len(children)
    queue = collections.deque(children[0].values())
    for byte, child in children[0].items():
        step[0, byte] = child
    while queue:
        node = queue.popleft()
        # A tag that ends inside a longer one (none of ours does) is still reported.
        open_kind[node] = open_kind[node] or open_kind[fail[node]]
        close_kind[node] = close_kind[node] or close_kind[fail[node]]
        step[node] = step[fail[node]]
        for byte, child in children[node].items():
            fail[child] = int(step[fail[node], byte])
            step[node, byte] = child
            queue.append(child)
    return step, np.array(open_kind, np.int32), np.array(close_kind, np.int32)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, inverted."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(b): b for b in printable}
    spare = 256
    for b in range(256):
        if b not in printable:
            table[chr(spare)] = b
            spare += 1
    return table
