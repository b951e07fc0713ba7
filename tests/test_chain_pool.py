"""A pool of chains on disk: what is written is read again, damage is told with file and line."""

import json

import numpy as np
import pytest

from zest_jax.errors import UserError
from zest_jax.tasks import chain_pool
from zest_jax.tasks.chain_pool import ChainPool, ChainRecord, EntityRecord, RelationRecord
from zest_jax.tasks.types import Passage

ABOUT = {"seed": 7, "settings": {"max_tails": 1}, "corpus": {"name": "wiki.jsonl"}}


def chain(*ids):
    """A chain of the entities `ids`, with a passage each; one of them is in another script."""
    entities = tuple(
        EntityRecord(i, f"東京 {i}", (f"alias of {i}",), Passage(f"p{i}", f"東京 {i}", f"“{i}”\nx"))
        for i in ids
    )
    relations = tuple(RelationRecord(f"P{n}", f"relation {n}") for n in range(len(ids) - 1))
    return ChainRecord(entities, relations)


CHAINS = [
    chain("Q1", "Q2"), chain("Q2", "Q3"), chain("Q3", "Q4"), chain("Q1", "Q5"),
    chain("Q1", "Q2", "Q3"), chain("Q3", "Q4", "Q1"), chain("Q1", "Q2", "Q3", "Q4"),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    chain_pool.write_pool(tmp_path / "pool", CHAINS, ABOUT)
    return tmp_path / "pool"


def spoil(folder, name, change):
    """Changes a file, and the manifest so that only a look at the content can find it."""
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    manifest = json.loads((folder / "pool.json").read_text())
    manifest["files"] = [
        entry._asdict()
        for entry in chain_pool.list_files(folder, [e["file"] for e in manifest["files"]])
    ]
    (folder / "pool.json").write_text(json.dumps(manifest))


def test_what_is_written_is_read_again(folder):
    pool = ChainPool.open(folder)
    assert len(pool) == 7 and [pool.count(h) for h in (1, 2, 3, 4)] == [4, 2, 1, 0]
    assert pool.hops == (1, 2, 3) and pool.corpus["name"] == "wiki.jsonl" and pool.name == "pool"
    assert [c for hops in (1, 2, 3) for c in pool.records(hops)] == CHAINS
    assert pool.record(2, 1).id == "Q3|P0|Q4|P1|Q1"
    with pytest.raises(IndexError):
        pool.record(2, 2)
    line = json.loads((folder / "chains.jsonl").read_text("utf-8").splitlines()[0])
    assert line["id"] == "Q1|P0|Q2" and line["hops"] == 1
    assert line["entities"][1]["passage"] == {"id": "pQ2", "title": "東京 Q2", "text": "“Q2”\nx"}
    manifest = json.loads((folder / "pool.json").read_text())
    assert manifest["counts"] == {"1": 4, "2": 2, "3": 1} and manifest["seed"] == 7


def test_draws_are_different_and_repeat_for_a_seed(folder):
    pool = ChainPool.open(folder)
    first = pool.sample(1, 3, np.random.default_rng(5))
    assert len({c.id for c in first}) == 3
    assert first == pool.sample(1, 3, np.random.default_rng(5))
    used = {c.id for c in first}
    (rest,) = pool.sample(1, 1, np.random.default_rng(5), exclude=used)
    assert rest.id not in used
    # A source entity leaves out all its chains.
    found = pool.sample(1, 2, np.random.default_rng(0), exclude={"Q1"})
    assert {c.source.id for c in found} == {"Q2", "Q3"}
    with pytest.raises(UserError, match=r"has 2 chains of 1 hop.*not counted.*3 were asked"):
        pool.sample(1, 3, np.random.default_rng(0), exclude={"Q1"})
    with pytest.raises(UserError, match="0 chains of 4 hop"):
        pool.sample(4, 1, np.random.default_rng(0))


def test_chains_come_by_hops_and_once(tmp_path):
    with pytest.raises(ValueError, match="after longer"):
        chain_pool.write_pool(tmp_path, [CHAINS[4], CHAINS[0]], ABOUT)
    with pytest.raises(ValueError, match="twice"):
        chain_pool.write_pool(tmp_path, [CHAINS[0], CHAINS[0]], ABOUT)
    # What was begun and not ended is no pool.
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="no complete chain pool"):
        ChainPool.open(tmp_path)


def test_a_pool_is_replaced_whole(folder):
    chain_pool.write_pool(folder, CHAINS[:2], ABOUT)
    assert len(ChainPool.open(folder)) == 2
    assert sorted(p.name for p in folder.iterdir()) == [
        "chains.jsonl",
        "offsets_1.npy",
        "pool.json",
    ]


def test_a_pool_may_be_empty(tmp_path):
    chain_pool.write_pool(tmp_path, [], ABOUT)
    pool = ChainPool.open(tmp_path)
    assert len(pool) == 0 and pool.hops == () and pool.sample(1, 0, np.random.default_rng(0)) == []


@pytest.mark.parametrize(
    "name, change, told",
    [
        ("chains.jsonl", lambda b: b[:-9], "chains.jsonl has .* cut short"),
        ("chains.jsonl", lambda b: b.replace(b"Q5", b"Q6"), "chains.jsonl is damaged: its sha256"),
        ("offsets_2.npy", lambda b: b[:-1] + b"\1", "offsets_2.npy is damaged: its sha256"),
        ("pool.json", lambda b: b[:40], "pool.json is damaged"),
        ("pool.json", lambda b: b.replace(b'"version": 1', b'"version": 2'), "of version 2"),
        ("pool.json", lambda b: b.replace(b'"1": 4', b'"1": "x"'), "'counts' are no numbers"),
        ("pool.json", lambda b: b.replace(b"offsets_3.npy", b"offsets_4.npy"), "its 'files'"),
    ],
)  # fmt: skip
def test_damaged_files_are_told(folder, name, change, told):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(UserError, match=told):
        ChainPool.open(folder)


def test_missing_files_are_told(folder):
    (folder / "offsets_2.npy").unlink()
    with pytest.raises(UserError, match="offsets_2.npy is missing"):
        ChainPool.open(folder)


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda b: b"\xff" + b[1:], "line 5: .*not UTF-8"),
        (lambda b: b"[" + b[1:], "line 5: .*not JSON"),
        (lambda b: b.replace(b'"label"', b'"lapel"'), "line 5: .*'label' is missing"),
        (lambda b: b.replace(b'["alias of Q2"]', b'"lias of Q2   "'), "line 5: .*a list was"),
        (lambda b: b.replace(b'"pQ1"', b"17   "), "line 5: .*a text was expected"),
        (lambda b: b.replace(b'"hops": 2', b'"hops": 3'), "line 5: .*not those of Q1.P0.Q2"),
        (lambda b: b"{}" + b" " * (len(b) - 3) + b"\n", "line 5: .*'entities' is missing"),
        (lambda b: b"0" + b" " * (len(b) - 2) + b"\n", "line 5: no chain of a pool"),
    ],
)
def test_a_broken_line_is_told_with_its_number(folder, change, told):
    def fifth(data):
        lines = data.splitlines(keepends=True)
        lines[4] = change(lines[4])
        return b"".join(lines)

    spoil(folder, "chains.jsonl", fifth)
    pool = ChainPool.open(folder)
    assert pool.record(1, 3).id == "Q1|P0|Q5"
    with pytest.raises(UserError, match=told):
        pool.record(2, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b[:20],
        lambda b: b[:-16] + b[-8:] + b[-16:-8],
        lambda b: b[:-8] + b"\xff" * 7 + b"\x0f",
    ],
)
def test_offsets_that_do_not_fit_are_told(folder, change):
    spoil(folder, "offsets_2.npy", change)
    with pytest.raises(UserError, match="offsets_2.npy (is damaged|does not fit)"):
        ChainPool.open(folder)


def test_a_file_that_goes_on_is_told(folder):
    spoil(folder, "chains.jsonl", lambda data: data + b"{}\n")
    with pytest.raises(UserError, match="goes on after its last chain"):
        ChainPool.open(folder)
