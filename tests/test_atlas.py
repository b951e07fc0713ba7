"""The shipped world: facts, splits, question sets, tokenizer, and the files themselves."""

import hashlib
import re
from collections import Counter

import numpy as np
import pytest
from transformers import AutoTokenizer

from zest_jax.errors import UserError
from zest_jax.tasks import chains, templates
from zest_jax.tasks.atlas import load_atlas

TAGS = [f"<{slash}{name}>" for name in ("think", "search", "information", "question", "answer")
        for slash in ("", "/")]  # fmt: skip


@pytest.fixture(scope="module")
def atlas():
    return load_atlas()


@pytest.fixture(scope="module")
def tokenizer(atlas):
    return AutoTokenizer.from_pretrained(str(atlas.tokenizer_folder))


FACTS = [
    ("France", "capital", "Paris"),
    ("Paris", "country", "France"),
    ("France", "currency", "Euro"),
    ("Brazil", "language", "Portuguese"),
    ("Japan", "currency", "Japanese Yen"),
    ("Canada", "neighbour", "United States"),
    ("Portugal", "neighbour", "Spain"),
    ("Australia", "largest city", "Sydney"),
    ("Kazakhstan", "capital", "Astana"),
    ("Russian", "script", "Cyrillic script"),
    ("Carbon", "next", "Nitrogen"),
    ("Chlorine", "family", "Halogens"),
    ("Uranium", "discoverer", "Martin Klaproth"),
    ("Gallium", "found in", "France"),
    ("Humphry Davy", "work country", "United Kingdom"),
    ("Swiss Franc", "largest user", "Switzerland"),
    ("South America", "largest country", "Brazil"),
    ("Noble gases", "lightest member", "Helium"),
]


@pytest.mark.parametrize(("head", "relation", "tail"), FACTS)
def test_facts(atlas, head, relation, tail):
    graph = atlas.graph
    row = list(graph.labels).index(head)
    number = list(graph.relation_labels).index(relation)
    assert [graph.labels[t] for t in graph.tails_of(row, number)] == [tail]


def test_size(atlas):
    assert atlas.graph.entity_count == 1495
    assert atlas.graph.triple_count == 4522
    assert len(atlas.passages) == 1495
    assert len(atlas.phrases) == 28
    total = sum(p.stat().st_size for p in atlas.folder.rglob("*") if p.is_file())
    assert total < 1_000_000


def test_names_are_plain_short_and_one_thing_each(atlas):
    labels = atlas.graph.labels
    assert all(re.fullmatch(r"[A-Z][A-Za-z' -]*[A-Za-z]", label) for label in labels)
    assert max(map(len, labels)) <= 25
    owner = {}
    for row in range(atlas.graph.entity_count):
        for name in {chains.plain(name) for name in atlas.graph.names(row)}:
            assert owner.setdefault(name, row) == row, name


def test_every_triple_is_told_in_its_passage(atlas):
    _, mentioned = chains.supported(atlas.graph, atlas.passages)
    assert mentioned.all()
    for entity, pieces in enumerate(atlas.pieces):
        named = [part for part in pieces if not isinstance(part, str)]
        assert named[0] == entity
        assert {tail for _, tail in atlas.graph.facts(entity)} <= set(named)
        text = "".join(p if isinstance(p, str) else atlas.graph.labels[p] for p in pieces)
        assert text == atlas.passage_of(entity).render()
        # A name always has a space before it, so that it has the same tokens everywhere.
        for before, part in zip(pieces, pieces[1:], strict=False):
            assert isinstance(part, str) or before.endswith(" ")


def test_passages_name_only_their_own_tails(atlas):
    # Otherwise renaming would leave a real name standing in an episode.
    longest = sorted(atlas.graph.labels, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest))})(?!\w)")
    strangers = Counter(
        name
        for pieces in atlas.pieces
        for part in pieces
        if isinstance(part, str)
        for name in pattern.findall(part)
    )
    assert not strangers


def test_passages_are_short(atlas, tokenizer):
    lengths = [len(tokenizer.encode(p.render())) for p in atlas.passages]
    assert 30 <= np.mean(lengths) <= 40
    assert max(lengths) <= 60


def test_splits_are_disjoint_and_cover_all(atlas):
    total = atlas.train.astype(int) + atlas.validation + atlas.heldout
    assert (total == 1).all()
    shares = [mask.mean() for mask in (atlas.train, atlas.validation, atlas.heldout)]
    np.testing.assert_allclose(shares, [0.70, 0.08, 0.22], atol=0.005)
    with pytest.raises(ValueError, match="No split"):
        atlas.split_mask("test")


def test_there_are_plenty_of_training_chains(atlas):
    assert [atlas.count_chains(hops) for hops in (1, 2, 3)] == pytest.approx(
        [2100, 4200, 7500], rel=0.15
    )


@pytest.mark.parametrize(("name", "per_hop"), [("heldout", 160), ("validation", 80)])
def test_question_sets(atlas, name, per_hop):
    tasks = atlas.heldout_tasks if name == "heldout" else atlas.validation_tasks
    graph, mask = atlas.graph, atlas.split_mask(name)
    assert Counter(task.hops for task in tasks) == {1: per_hop, 2: per_hop, 3: per_hop}
    assert len({task.question for task in tasks}) == len(tasks)
    usable, first = atlas.triple_masks
    for task in tasks:
        ids = task.chain_id.split("|")
        entities = [graph.row_of[key] for key in ids[::2]]
        relations = [list(graph.relation_ids).index(key) for key in ids[1::2]]
        assert len(relations) == task.hops and len(set(entities)) == task.hops + 1
        assert task.source_id == ids[0] and mask[entities[0]]
        assert task.evidence == tuple(ids[::2])
        assert task.answers == graph.names(entities[-1])
        assert graph.labels[entities[0]] in task.question
        assert not templates.reveals_answer(task)
        for step, (head, relation, tail) in enumerate(
            zip(entities, relations, entities[1:], strict=False)
        ):
            # The answer is the only one for the question as worded.
            assert graph.tails_of(head, relation) == [tail]
            at = int(np.flatnonzero((graph.heads == head) & (graph.relations == relation))[0])
            assert usable[at] and (step or first[at])


def test_phrases_tell_relations_apart(atlas):
    # The same words for two relations of one kind of thing would make a question ambiguous.
    words: dict[str, int] = {}
    for relation, phrases in enumerate(atlas.phrases):
        assert len(phrases) == 2
        for phrase in phrases:
            assert words.setdefault(phrase, relation) == relation


def test_tokenizer_has_the_contract_s_tokens(tokenizer):
    assert len(tokenizer) == 1024
    for tag in TAGS:
        assert len(tokenizer.encode(tag)) == 1
        assert tag not in tokenizer.all_special_tokens
    assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
    for special in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        assert len(tokenizer.encode(special)) == 1
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "text",
    [
        "Paris is nice.",
        " naïve Ænima",
        "你好，世界",
        "👩‍🚀\t\r\n  x\u0000",
        "<think> a</think>",
        "  1234.5 ",
    ],
)
def test_tokenizer_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tokenizer_round_trip_of_random_unicode(tokenizer):
    import unicodedata

    rng = np.random.default_rng(0)
    for _ in range(200):
        points = rng.integers(1, 0xD800, size=20)
        text = unicodedata.normalize("NFC", "".join(map(chr, points)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_names_have_the_same_tokens_wherever_they_stand(atlas, tokenizer):
    for label in atlas.graph.labels[::7]:
        alone = tokenizer.encode(f" {label}")
        for before, after in [
            ("<search>", "</search>"), ("Chain:", " | capital"), ("the capital of", "?\n"),
            ("Its capital is", ". Its"), ("<information>", ": The"), (".\n", ":"),
        ]:  # fmt: skip
            whole = tokenizer.encode(f"{before} {label}{after}")
            start = len(tokenizer.encode(before))
            assert whole[start : start + len(alone)] == alone, (before, label)


# `PYTHONPATH=. python tools/build_atlas.py` with the versions named at its head writes these bytes.
CHECKSUMS = {
    "entities.jsonl": "4695e872a6eb9dbf",
    "heldout.jsonl": "8e35a3e937f461e1",
    "passages.jsonl": "66d5777260df74b2",
    "relations.jsonl": "84f609dd892e48e8",
    "tokenizer/tokenizer.json": "b85b6b8526d13471",
    "triples.tsv": "90b9dfc8a23cab8d",
    "validation.jsonl": "b1dc4bf9de2353d2",
}


@pytest.mark.parametrize("name", CHECKSUMS)
def test_files_are_those_of_the_build(atlas, name):
    data = (atlas.folder / name).read_bytes()
    assert hashlib.sha256(data).hexdigest()[:16] == CHECKSUMS[name]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_atlas(tmp_path / "none")
