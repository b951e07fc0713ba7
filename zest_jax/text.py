"""Comparing answers, and reading tagged text. Plain strings in, plain values out.

Sources: the answer rules are SQuAD's (Rajpurkar et al., 2016) as Search-R1 uses them.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence

_DROP_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@functools.lru_cache(maxsize=16_384)  # the same passages and aliases are compared again and again
def normalize_answer(text: str) -> str:
    """Lower case -> drop ASCII punctuation -> drop a/an/the -> collapse spaces, in this order.

    Punctuation is deleted, not replaced by a space: ``"U.S.A."`` becomes ``"usa"``.
    """
    text = text.lower().translate(_DROP_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str | None, golds: Sequence[str]) -> bool:
    """EM: the normalised prediction equals any normalised gold.

    No prediction, or one with nothing in it, is wrong. A gold that normalises to nothing (a film
    called "A") is compared without normalisation, so that an empty answer can never score.
    """
    if prediction is None or not prediction.strip():
        return False
    return any(_same(prediction, gold) for gold in golds)


def _same(prediction: str, gold: str) -> bool:
    gold_key = normalize_answer(gold)
    if gold_key:
        return normalize_answer(prediction) == gold_key
    return bool(gold.strip()) and prediction.strip().lower() == gold.strip().lower()


def token_f1(prediction: str | None, golds: Sequence[str]) -> float:
    """Largest F1 between the bags of normalised words of the prediction and of a gold, in [0, 1].

    ``F1 = 2PR / (P + R)``, P = shared / |prediction|, R = shared / |gold|, shared counted with
    multiplicity. 0 where either side has no words.
    """
    words = Counter(normalize_answer(prediction or "").split())
    best = 0.0
    for gold in golds:
        gold_words = Counter(normalize_answer(gold).split())
        shared = (words & gold_words).total()
        if shared:
            best = max(best, 2.0 * shared / (words.total() + gold_words.total()))
    return best


def contains_answer(text: str, answer: str) -> bool:
    """The normalised answer stands in the normalised text as whole words ("in" is not in "Paris").

    An answer that normalises to nothing is contained in nothing.
    """
    key = normalize_answer(answer)
    return bool(key) and f" {key} " in f" {normalize_answer(text)} "


def contains_any(text: str, answers: Sequence[str]) -> bool:
    """``contains_answer`` for any of several names of the answer."""
    return any(contains_answer(text, answer) for answer in answers)


def cover_exact_match(
    prediction: str | None, golds: Sequence[str], *, word_boundary: bool = True
) -> bool:
    """Cover-EM: some gold stands inside the prediction.

    Args:
        prediction: the answer given, or None.
        golds: accepted names.
        word_boundary: whole words only. False is the plain substring test of published scorers,
            by which the gold "in" is covered by "Berlin".
    """
    if prediction is None:
        return False
    if word_boundary:
        return contains_any(prediction, golds)
    keys = [normalize_answer(gold) for gold in golds]
    return any(key and key in normalize_answer(prediction) for key in keys)


def majority(answers: Sequence[str | None]) -> str | None:
    r"""The answer that most samples give, two being the same if they are once normalised.

    .. math::
        \arg\max_a \sum_i 1[\mathrm{norm}(a_i) = \mathrm{norm}(a)]

    A sample without an answer has no vote. Of a tie the answer that was given first wins, in the
    words in which it was given first. None where nobody votes.

    Source: Wang et al. 2022 (arXiv 2203.11171), self-consistency.
    """
    first: dict[str, str] = {}
    votes: Counter[str] = Counter()
    for answer in answers:
        if answer is None or not answer.strip():
            continue
        key = normalize_answer(answer) or answer.strip().lower()
        first.setdefault(key, answer)
        votes[key] += 1
    # Among equals `most_common` keeps the order of arrival.
    return first[votes.most_common(1)[0][0]] if votes else None


@functools.cache
def _tag_pattern(name: str) -> re.Pattern[str]:
    name = re.escape(name)
    return re.compile(f"<{name}>(.*?)</{name}>", re.DOTALL)


def tags(text: str, name: str) -> list[str]:
    """Bodies of all complete ``<name>…</name>`` pairs in order, outer white space stripped.

    From an opening tag to the next closing tag of the name: a repeated opening tag stays in the
    body, which spoils the body as an answer rather than hiding the slip.
    """
    return [body.strip() for body in _tag_pattern(name).findall(text)]


def last_tag(text: str, name: str) -> str | None:
    """Body of the last complete pair (it may be empty), or None where there is none."""
    bodies = tags(text, name)
    return bodies[-1] if bodies else None
