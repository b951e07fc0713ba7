"""Wikidata5M's files, a corpus, and the chains between: a world small enough to list by hand."""

import contextlib
import gzip
import io
import json
import re
import tarfile

import numpy as np
import pytest

from zest_jax import build_chains
from zest_jax.errors import UserError
from zest_jax.retrieval.corpora import Limits, open_corpus
from zest_jax.retrieval.passages import write_passages
from zest_jax.tasks import alignment, names, walks, wikidata
from zest_jax.tasks.chain_pool import ChainPool

LOOSE = Limits(count=100, share=1.0)

NAMES = {
    10: ["France", "République française", "Capital"],
    11: ["Paris", "City of Light", "PARIS", "Capital"],
    12: ["Seine"],
    13: ["Moscow", "Москва"],  # its article bears the second name
    14: ["Россия", "Russia"],
    15: ["東京", "Tokyo"],
    16: ["日本", "Japan"],
    17: ["1900", "year 1900"],
    18: ["Io"],
    20: ["Springfield"],
    21: ["springfield"],
    22: ["Atlantis"],
    23: ["Ulm"],
}  # Q19 has none
RELATIONS = {1: ["capital", "seat"], 2: ["river"], 4: ["near"], 5: ["friend"], 6: ["leads to"]}
TRIPLES = [
    (10, 1, 11), (11, 2, 12), (14, 1, 13), (16, 1, 15), (12, 6, 13),
    (15, 4, 16),  # only back to where 16 came from, and 15 does not mention it
    (10, 3, 12),  # P3 has no label
    (10, 2, 17), (10, 4, 18),  # a number; two letters
    (12, 4, 19), (11, 4, 20), (13, 4, 22), (13, 2, 23),  # no name, shared, no passage, two titles
    (12, 5, 10), (12, 5, 11),  # two tails
    (11, 6, 11), (10, 1, 11),  # to itself; once more
]  # fmt: skip
PASSAGES = [
    ("France", "It has six corners and Parisians."),
    ("France", "Its capital is PARIS, on a river."),
    ("Paris", "A town on the Seine."),
    ("Paris", "It has a tower."),
    ("Seine", "A river without end."),
    ("Москва", "Город на реке."),
    ("Россия", "Столица — Москва."),
    ("東京", "大きな都市。"),
    ("日本", "首都は東京である。"),
    ("1900", "A year."), ("Io", "A moon."), ("Springfield", "A town."),
    ("Ulm", "A town."), ("ULM", "A machine."), ("Nowhere", "Paris."),
]  # fmt: skip
ONE = {"Q10|P1|Q11", "Q11|P2|Q12", "Q14|P1|Q13", "Q16|P1|Q15"}
TWO = {"Q10|P1|Q11|P2|Q12", "Q11|P2|Q12|P6|Q13"}
THREE = {"Q10|P1|Q11|P2|Q12|P6|Q13"}


def rows(letter, names):
    return "".join(f"{letter}{id}\t" + "\t".join(row) + "\n" for id, row in names.items())


def pack(path, **members):
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            entry = tarfile.TarInfo(f"folder/{name}.txt")
            entry.size = len(text.encode())
            tar.addfile(entry, io.BytesIO(text.encode()))
    return path


def write_corpus(path, passages=PASSAGES):
    with path.open("w", encoding="utf-8") as file:
        for i, (title, text) in enumerate(passages):
            file.write(json.dumps({"id": str(i), "contents": f'"{title}"\n{text}'}) + "\n")
    return path


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The files as they are distributed, but for the descriptions."""
    folder = tmp_path_factory.mktemp("wikidata5m")
    lines = [f"Q{h}\tP{r}\tQ{t}\n" for h, r, t in TRIPLES]
    pack(
        folder / "wikidata5m_transductive.tar.gz",
        wikidata5m_transductive_train="".join(lines[:9]),
        wikidata5m_transductive_test="".join(lines[9:]),
    )
    pack(
        folder / "wikidata5m_alias.tar.gz",
        wikidata5m_entity=rows("Q", NAMES),
        wikidata5m_relation=rows("P", RELATIONS),
    )
    write_corpus(folder / "wiki-18.jsonl")
    return folder


@pytest.fixture(scope="module")
def index(world):
    """An index of the corpus, as far as its passages go."""
    return write_passages(open_corpus(world / "wiki-18.jsonl"), world / "index" / "passages")


def build(world, pool, *arguments, corpus="wiki-18.jsonl"):
    return build_chains.entry(
        ["build_chains", f"--wikidata={world}", f"--corpus={world / corpus}", f"--pool={pool}",
         "--chains=12", *arguments]
    )  # fmt: skip


def ids(pool, hops):
    return {chain.id for chain in pool.records(hops)}


@pytest.fixture(scope="module")
def built(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pools") / "pool"
    assert build(world, folder, "--allow_fewer") == 0
    return folder


# --------------------------------------------------------------------------------- the program


def test_the_chains_of_the_small_world(built):
    pool = ChainPool.open(built)
    assert (ids(pool, 1), ids(pool, 2), ids(pool, 3)) == (ONE, TWO, THREE)
    by_id = {c.id: c for hops in pool.hops for c in pool.records(hops)}
    chain = by_id["Q10|P1|Q11|P2|Q12"]
    # The source's passage is the first that mentions the next; the others' is their first.
    assert [p.id for p in chain.passages] == ["1", "2", "4"]
    assert [r.label for r in chain.relations] == ["capital", "river"]
    # "Capital" is the name of two; PARIS is the same name again.
    assert chain.source.names == ("France", "République française")
    assert chain.entities[1].names == ("Paris", "City of Light")
    # The label is the name that the article bears.
    assert by_id["Q14|P1|Q13"].answer.names == ("Москва", "Moscow")
    assert by_id["Q16|P1|Q15"].answer.names == ("東京", "Tokyo")


def test_the_funnel_tells_every_filter(built):
    funnel = json.loads((built / "funnel.json").read_text())
    of = {row["of"] for row in funnel["filters"]}
    assert of == {"triples", "names", "passages", "entities"} | {
        f"walks of {h} hop(s)" for h in "123"
    }
    triples = [(r["dropped"], r["kept"]) for r in funnel["filters"] if r["of"] == "triples"]
    # lines, repeated, to itself, no label, two tails, no passage or name, number or short
    assert triples == [(0, 17), (1, 16), (1, 15), (1, 14), (2, 12), (4, 8), (2, 6)]
    entities = [r["kept"] for r in funnel["filters"] if r["of"] == "entities"]
    # Q19 has no name, Q20's is shared (Q21 is in no triple), Q22 has no passage and Q23 two titles.
    assert entities == [13, 12, 11, 9]
    passages = [r["kept"] for r in funnel["filters"] if r["of"] == "passages"]
    assert passages == [15, 13, 11]
    for hops in "123":
        rows = [r for r in funnel["filters"] if r["of"] == f"walks of {hops} hop(s)"]
        for before, after in zip(rows[:-1], rows[1:], strict=True):
            assert before["kept"] - after["dropped"] == after["kept"]
        assert rows[-1]["kept"] == {"1": 4, "2": 2, "3": 1}[hops]
    assert any("1 titles are written in several ways" in note for note in funnel["notes"])


def test_too_few_chains_are_told(world, tmp_path, capsys):
    assert build(world, tmp_path / "pool") == 2
    told = capsys.readouterr().err
    assert "only 2 chains of 2 hop(s) pass the filters, but 4 are wanted" in told
    assert (tmp_path / "pool" / "funnel.json").exists()
    assert not (tmp_path / "pool" / "pool.json").exists()


@pytest.mark.parametrize("corpus", ["wiki-18.jsonl", "index"])
def test_a_build_goes_on_after_the_titles(world, built, index, tmp_path, capsys, corpus):
    pool = tmp_path / "pool"
    assert build(world, pool, corpus=corpus) == 2  # too many are asked for
    capsys.readouterr()
    assert build(world, pool, "--allow_fewer", corpus=corpus) == 0
    assert "the titles were read before" in capsys.readouterr().err
    names = {path.name for path in pool.iterdir()}
    assert names == {path.name for path in built.iterdir()}
    assert (pool / "chains.jsonl").read_bytes() == (built / "chains.jsonl").read_bytes()
    assert (pool / "funnel.json").read_bytes() == (built / "funnel.json").read_bytes()
    one, other = ChainPool.open(pool).corpus, ChainPool.open(built).corpus
    assert one["fingerprint"] == other["fingerprint"]


@pytest.mark.parametrize("spoil", ["other rules", "damage"])
def test_titles_of_something_else_are_read_anew(world, built, tmp_path, capsys, spoil):
    pool = tmp_path / "pool"
    assert build(world, pool, *(["--shortest_name=2"] if spoil == "other rules" else [])) == 2
    if spoil == "damage":
        kept = pool / "alignment.npz"
        kept.write_bytes(kept.read_bytes()[:-30])
    capsys.readouterr()
    assert build(world, pool, "--allow_fewer") == 0
    assert "reading titles" in capsys.readouterr().err
    assert (pool / "chains.jsonl").read_bytes() == (built / "chains.jsonl").read_bytes()


def test_a_corpus_without_chains_is_told(world, tmp_path, capsys):
    write_corpus(world / "bare.jsonl", [("France", "Nothing."), ("Paris", "Nothing.")])
    assert build(world, tmp_path / "pool", "--allow_fewer", corpus="bare.jsonl") == 2
    assert "no chain passes the filters" in capsys.readouterr().err


def test_a_seed_gives_a_pool_and_a_complete_one_is_left(world, built, tmp_path, capsys):
    assert build(world, tmp_path / "again", "--allow_fewer") == 0
    for name in ("chains.jsonl", "pool.json", "funnel.json"):
        assert (tmp_path / "again" / name).read_bytes() == (built / name).read_bytes()
    capsys.readouterr()
    assert build(world, built, "--allow_fewer") == 0
    assert "is complete already" in capsys.readouterr().err
    assert build(world, built, "--allow_fewer", "--seed=1") == 2
    assert "holds a pool whose seed is 0, not 1" in capsys.readouterr().err
    assert build(world, tmp_path / "other", "--seed=1", "--chains=3") == 0
    assert [ChainPool.open(tmp_path / "other").count(h) for h in (1, 2, 3)] == [1, 1, 1]


def test_an_index_gives_the_same_pool(world, built, index, tmp_path):
    assert build(world, tmp_path / "pool", "--allow_fewer", corpus="index") == 0
    pool, other = ChainPool.open(tmp_path / "pool"), ChainPool.open(built)
    assert (pool.folder / "chains.jsonl").read_bytes() == (built / "chains.jsonl").read_bytes()
    assert pool.corpus["fingerprint"] == other.corpus["fingerprint"] != ""
    assert pool.corpus["name"] == "index" and other.corpus["name"] == "wiki-18.jsonl"


def test_settings_let_more_pass(world, tmp_path):
    arguments = ("--allow_fewer", "--numbers", "--shortest_name=2", "--max_tails=2", "--hops=1")
    write_corpus(world / "rich.jsonl", [*PASSAGES, ("France", "1900, Io"), ("Seine", "Paris")])
    assert build(world, tmp_path / "pool", *arguments, corpus="rich.jsonl") == 0
    new = {"Q10|P2|Q17", "Q10|P4|Q18", "Q12|P5|Q11"}
    assert ids(ChainPool.open(tmp_path / "pool"), 1) == ONE | new


def test_a_wrong_description_takes_an_entity_out(world, tmp_path):
    texts = {11: ["It is a town on the Seine."], 12: ["Seine net fishing with weights and floats."]}
    with gzip.open(tmp_path / "text.txt.gz", "wt") as file:
        file.write(rows("Q", texts))
    arguments = (f"--descriptions={tmp_path / 'text.txt.gz'}", "--allow_fewer")
    assert build(world, tmp_path / "pool", *arguments) == 0
    pool = ChainPool.open(tmp_path / "pool")
    assert ids(pool, 1) == ONE - {"Q11|P2|Q12"} and pool.hops == (1,)


def test_held_out_entities_are_in_no_training_chain(world, tmp_path):
    numbers = np.array(sorted({e for h, _, t in TRIPLES for e in (h, t)}), np.int32)
    share = 0.3
    out = {f"Q{n}" for n in numbers[walks.held_out(numbers, share)].tolist()}
    assert 0 < len(out) < len(numbers)
    assert build(world, tmp_path / "pool", "--allow_fewer", f"--heldout_share={share}") == 0
    training = ChainPool.open(tmp_path / "pool")
    heldout = ChainPool.open(tmp_path / "pool" / "heldout")
    split = {False: set(), True: set()}
    for chain_id in (*ONE, *TWO, *THREE):
        split[chain_id.split("|")[0] in out].add(chain_id)
    assert {i for h in heldout.hops for i in ids(heldout, h)} == split[True]
    assert {i for h in training.hops for i in ids(training, h)} == {
        i for i in split[False] if not out & set(i.split("|"))
    }


@pytest.mark.parametrize(
    "arguments, told",
    [
        (["--pool=p"], "no corpus is given"),
        (["--corpus=c"], "no pool is given"),
        (["--corpus=c", "--pool={tmp}/p"], "no triples are given"),
        (["--corpus=c", "--pool={tmp}/p", "--wikidata={tmp}/none"], "is no folder"),
        (["--corpus=c", "--pool={tmp}/p", "--wikidata={world}"], "does not exist"),
        (["--corpus=c", "--pool={tmp}/p", "--hops=0"], "--hops must be at least 1"),
        (["--corpus=c", "--pool={tmp}/p", "--relation_power=2"], "between 0 and 1"),
    ],
)
def test_mistakes_are_told(world, tmp_path, capsys, arguments, told):
    arguments = [a.format(tmp=tmp_path, world=world) for a in arguments]
    assert build_chains.entry(["build_chains", *arguments]) == 2
    assert told in capsys.readouterr().err


# ----------------------------------------------------------------------------------- the files


def test_triples_are_read_alike_in_every_packing(tmp_path):
    text = "Q1\tP2\tQ3\nQ10\tP22\tQ333333333\nQ7\tP1\tQ1\n"
    wanted = [[1, 10, 7], [2, 22, 1], [3, 333333333, 1]]
    (tmp_path / "a.txt").write_text(text.rstrip())  # the last line without an end
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(text.encode()))
    for path in (*tmp_path.iterdir(), pack(tmp_path / "d.tar.gz", x=text)):
        triples, tally = wikidata.read_triples([path])
        assert triples.tolist() == wanted and tally.lines == 3 and not tally.malformed
    both, _ = wikidata.read_triples([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert both.tolist() == [row * 2 for row in wanted]


BROKEN = [
    "Q1\tP2", "Q1\tP2\tQ3\tQ4", "Q1 P2 Q3", "1\tP2\tQ3", "Q1\tQ2\tQ3", "Q01\tP2\tQ3", "Q1\tP2\tQ",
    "Q1\tP2\tQ1234567890", "xQ1\tP2\tQ3", "Q1\tP2\tQ3 ", "Q\t1P2\tQ3", "Q1\tP2Q3\t",
]  # fmt: skip


@pytest.mark.parametrize("line", BROKEN)
def test_a_broken_triple_is_left_out_and_named(tmp_path, line):
    path = tmp_path / "triples.txt"
    path.write_text(f"Q5\tP6\tQ7\n\n{line}\nQ8\tP6\tQ9\n")
    triples, tally = wikidata.read_triples([path], LOOSE)
    assert triples.tolist() == [[5, 8], [6, 6], [7, 9]]
    assert tally.malformed == 1 and str(tally.named[0]).startswith("triples.txt, line 3: not 'Q")
    with pytest.raises(UserError, match=r"1 of 3 lines .* not a triple.* line 3"):
        wikidata.read_triples([path])


def test_spoiled_files_are_read_as_line_by_line(tmp_path):
    """One byte of a file is changed; what is read is what a plain loop over its lines reads."""
    rng = np.random.default_rng(1)
    alphabet = b"0123456789QP\t\n x\xc3"
    for _ in range(300):
        ids = rng.integers(1, 3000, (4, 3)).tolist()
        data = bytearray("".join(f"Q{h}\tP{r}\tQ{t}\n" for h, r, t in ids).encode())
        data[rng.integers(len(data))] = alphabet[rng.integers(len(alphabet))]
        lines = bytes(data).split(b"\n")
        pattern = re.compile(rb"Q([1-9][0-9]{0,8})\tP([1-9][0-9]{0,8})\tQ([1-9][0-9]{0,8})")
        wanted = [[int(x) for x in m.groups()] for m in map(pattern.fullmatch, lines) if m]
        (tmp_path / "t").write_bytes(data)
        triples, tally = wikidata.read_triples([tmp_path / "t"], LOOSE)
        assert triples.T.tolist() == wanted
        assert tally.lines + tally.malformed == sum(bool(line.strip()) for line in lines)

        named = re.compile(rb"Q([1-9][0-9]{0,8})\t(.+)")
        wanted_names = {}
        for match in filter(None, map(named.fullmatch, lines)):
            with contextlib.suppress(UnicodeDecodeError):
                wanted_names.setdefault(int(match[1]), match[2].decode())
        table, _ = wikidata.read_names(tmp_path / "t", "Q", LOOSE)
        found = {n: table.raw(row).decode() for row, n in enumerate(table.numbers.tolist())}
        assert found == wanted_names


def test_blocks_join_to_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(wikidata, "BLOCK", 64)
    given = np.random.default_rng(0).integers(1, 10**9, (3, 200), np.int32)
    lines = [f"Q{h}\tP{r}\tQ{t}\n" for h, r, t in given.T.tolist()]
    lines.insert(150, "broken\n")
    (tmp_path / "t.txt").write_text("".join(lines))
    told = []
    triples, tally = wikidata.read_triples([tmp_path / "t.txt"], LOOSE, told.append)
    assert np.array_equal(triples, given) and triples.dtype == np.int32
    assert tally.named[0].line == 151
    assert told[-1] == (tmp_path / "t.txt").stat().st_size
    given = {i: [f"名 {i}", "x" * (i % 90 + 1)] for i in range(1, 80)}
    (tmp_path / "n.txt").write_text(rows("Q", given), "utf-8")
    table, _ = wikidata.read_names(tmp_path / "n.txt", "Q")
    assert [table.names(row) for row in range(79)] == [tuple(n) for n in given.values()]


def test_unreadable_files_are_told(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        wikidata.read_triples([tmp_path / "none"])
    with pytest.raises(UserError, match="is a folder"):
        wikidata.read_triples([tmp_path])
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(UserError, match="holds no line that is a triple"):
        wikidata.read_triples([tmp_path / "empty.txt"])
    whole = gzip.compress(b"Q1\tP2\tQ3\n" * 1000)
    (tmp_path / "cut.txt.gz").write_bytes(whole[:-20])
    with pytest.raises(UserError, match="cut short or damaged"):
        wikidata.read_triples([tmp_path / "cut.txt.gz"])
    whole = pack(tmp_path / "x.tar.gz", readme="nothing").read_bytes()
    (tmp_path / "cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cut short or damaged"):
        wikidata.read_triples([tmp_path / "cut.tar.gz"])
    with pytest.raises(UserError, match="has no file of a name with 'entity' in it"):
        wikidata.read_names(tmp_path / "x.tar.gz", "Q")


def test_names_are_read_by_id_and_broken_rows_are_named(tmp_path):
    path = tmp_path / "entity.txt"
    good = "Q7\tb\t c \t\td\nQ3\tдва\nQ7\tagain\n".encode()
    bad = b"Q8\nQ9\t\nX1\ta\nQ1x\ta\nQ05\ta\n\ta\nQ4\t\xff\nQ\ta\n"
    path.write_bytes(good + bad)
    table, tally = wikidata.read_names(path, "Q", LOOSE)
    assert table.numbers.tolist() == [3, 7] and table.repeated == 1
    assert table.names(0) == ("два",) and table.names(1) == ("b", "c", "d")
    assert table.rows_of(np.array([7, 8, 3])).tolist() == [1, -1, 0]
    assert tally.malformed == 8 and [entry.line for entry in tally.named] == list(range(4, 12))
    assert "not UTF-8" in tally.named[6].why and "no id and name" in tally.named[0].why


def test_descriptions_are_streamed(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Q5\tFive.\nQ6\tSix\twith a tab\nQ9\tДевять \n", "utf-8")
    found = list(wikidata.read_descriptions(path, np.array([1, 6, 9], np.int32)))
    assert found == [(6, "Six\twith a tab"), (9, "Девять")]


# ----------------------------------------------------------------------------------- alignment


@pytest.mark.parametrize(
    "name, key",
    [
        ("Jay-Z", "jay z"), ("  The  Köln Café ", "the koln cafe"), ("ＡＢＣ", "abc"), ("C++", "c"),
        ("Straße", "strasse"), ("МОСКВА", "москва"), ("東京", "東京"), ("!?", ""), ("a_b", "a b"),
    ],
)  # fmt: skip
def test_names_are_compared_without_case_accents_and_punctuation(name, key):
    assert names.name_key(name) == key
    assert names.row_keys(f"{name}\tx".encode()) == [key.encode(), b"x"]


def test_vowel_signs_are_letters_and_ascii_is_read_alike():
    assert names.name_key("दिल्ली") != names.name_key("दल ल") and names.name_key("दिल्ली")
    rng = np.random.default_rng(0)
    for codes in rng.integers(32, 127, (500, 12)).tolist():
        name = "".join(map(chr, codes))
        assert names.row_keys(name.encode()) == [names.name_key(name).encode()]


@pytest.mark.parametrize(
    "name, allowed",
    [
        ("1984", 0), ("3.14", 0), ("12 May 1990", 0), ("1990s", 0), ("21st century", 0),
        ("1990年5月", 0), ("٢٠٠٥", 0), ("Io", 0), ("東", 0), ("U.S.", 0),
        ("May", 1), ("Boeing 747", 1), ("Ulm", 1), ("東京", 1),
    ],
)  # fmt: skip
def test_dates_numbers_and_short_names_are_no_answers(name, allowed):
    assert names.SurfaceRules().allow(name) == bool(allowed)


def test_mentions_are_whole_words_where_words_have_spaces():
    assert names.mentions("On the Seine, in Paris.", ["X", "paris"])
    assert not names.mentions("Parisians", ["Paris"])
    assert not names.mentions("Москвабад", ["Москва"])
    assert names.mentions("Столица — Москва.", ["Москва"])
    assert names.mentions("首都は東京である", ["東京"])
    assert names.mentions("กรุงเทพมหานครเป็นเมืองหลวง", ["กรุงเทพ"])
    assert not names.mentions("anything", ["", "!"])


def table_of(tmp_path, given):
    (tmp_path / "names.txt").write_text(rows("Q", given), "utf-8")
    return wikidata.read_names(tmp_path / "names.txt", "Q")[0]


def aligned(tmp_path, given, entities, titles):
    table = table_of(tmp_path, given)
    index = names.index_names(table, np.array(entities, np.int32))
    corpus = open_corpus(write_corpus(tmp_path / "c.jsonl", [(title, "x") for title in titles]))
    source = alignment.CorpusFile(corpus)
    rules = names.SurfaceRules()
    return table, index, alignment.align(source, index, len(entities), rules, lambda _: None)


def test_a_name_of_two_entities_is_dropped(tmp_path):
    given = {1: ["Rome", "Eternal City"], 2: ["ROME", "Rome, Georgia"], 5: ["Oslo"], 9: ["Rome"]}
    table, index, found = aligned(
        tmp_path, given, [1, 2, 5], ["Rome", "Rome, Georgia", "Oslo", "Eternal City", "Oslo"]
    )
    assert index.names == 4 and index.shared == 1
    assert [index.own(table, row) for row in range(4)] == [
        ["Eternal City"], ["Rome, Georgia"], ["Oslo"], []
    ]  # fmt: skip
    assert [found.passages_of(e).tolist() for e in range(3)] == [[3], [1], [2, 4]]


def test_owners_outside_the_graph_count_but_get_no_passage(tmp_path):
    _, index, found = aligned(tmp_path, {1: ["A b"], 2: ["C d"]}, [1, 3], ["C d", "A b"])
    assert [found.passages_of(e).tolist() for e in range(2)] == [[1], []]
    assert index.unnamed.tolist() == [False, True] and index.alone.tolist() == [True, False]


def test_the_first_name_counts_and_titles_in_two_spellings_do_not(tmp_path):
    given = {1: ["None", "Second", "Third"], 2: ["Aids"], 3: ["Émile"], 4: ["100"]}
    titles = ["Third", "Second", "AIDS", "Aids", "Emile", "100", "Second"]
    _, _, found = aligned(tmp_path, given, [1, 2, 3, 4], titles)
    assert [found.passages_of(e).tolist() for e in range(4)] == [[1, 6], [], [4], [5]]
    assert found.poor.tolist() == [False, False, False, True]
    assert found.counts["titles_written_differently"] == 1
    assert found.counts["titles_of_a_later_name"] == 1


# --------------------------------------------------------------------------------------- walks


def graph_of(triples):
    return walks.build_graph(np.array(triples, np.int32).T)


def test_the_graph_is_grouped_and_repeated_triples_count_once():
    graph = graph_of([(9, 4, 2), (2, 3, 9), (9, 1, 5), (2, 3, 9), (9, 1, 2)])
    assert graph.entities.tolist() == [2, 5, 9] and graph.relations.tolist() == [1, 3, 4]
    assert graph.repeated == 1 and graph.triples == 4
    assert graph.heads().tolist() == [0, 2, 2, 2]
    assert graph.relation.tolist() == [1, 0, 0, 2] and graph.tail.tolist() == [2, 0, 1, 0]
    assert walks.few_tails(graph, 1).tolist() == [True, False, False, True]
    assert walks.few_tails(graph, 2).all()


def test_equal_relations_of_neighbouring_heads_are_not_one_run():
    graph = graph_of([(1, 7, 3), (2, 7, 3), (3, 7, 1)])
    assert walks.few_tails(graph, 1).all()


def ways(graph, power=1.0):
    every = np.ones(graph.triples, bool)
    return walks.Ways(graph, every, np.ones(len(graph.entities), bool), power)


def walker(graph, hops, power=1.0, caps=None, seed=0):
    rng = np.random.default_rng(seed)
    return walks.Walker(ways(graph, power), hops, rng, caps or walks.Caps())


@pytest.mark.parametrize("power, share", [(1.0, 0.99), (0.5, 100 / 110), (0.0, 0.5)])
def test_relations_are_drawn_by_their_power(power, share):
    # 9,900 triples of P1 and 99 of P2: n ** 0.5 is 10 to 1, near enough.
    graph = graph_of([(i, 1, 20_000 + i % 7) for i in range(1, 10_001)]
                     + [(i, 2, 20_000) for i in range(1, 101)])  # fmt: skip
    drawn = ways(graph, power).walk(1, 20_000, np.random.default_rng(0))
    assert np.mean(drawn.relations == 0) == pytest.approx(share, abs=0.01)


def test_a_head_with_many_triples_does_not_lead():
    # One head has 50 relations with 2 triples each in the graph, of which it owns one.
    triples = [(1, r, 1000 + r) for r in range(1, 51)]
    triples += [(r + 1, r, 2000 + r) for r in range(1, 51)]
    drawn = ways(graph_of(triples), 0.5).walk(1, 10_000, np.random.default_rng(0))
    assert np.mean(drawn.entities[:, 0] == 0) == pytest.approx(0.5, abs=0.03)
    # With a cap it comes so often and no more.
    capped = walker(graph_of(triples), 1, 0.5, walks.Caps(source=3))
    drawn = capped.draw(1000)
    assert np.sum(drawn.entities[:, 0] == 0) == 3 and capped.exhausted
    assert len(drawn.entities) == 53 and capped.counts["capped"] > 0


def test_answers_are_capped():
    graph = graph_of([(i, 1, 99) for i in range(1, 20)])
    assert len(walker(graph, 1, caps=walks.Caps(answer=5)).draw(100).entities) == 5


def test_walks_are_all_the_acyclic_ones_each_once_and_repeat_for_a_seed():
    # A square with a diagonal: 1-2-3-4-1 and 1-3.
    graph = graph_of([(1, 1, 2), (2, 1, 3), (3, 1, 4), (4, 1, 1), (1, 2, 3)])
    one = walker(graph, 3)
    drawn = one.draw(100)
    found = [tuple(row) for row in drawn.entities.tolist()]
    assert sorted(found) == [(0, 1, 2, 3), (1, 2, 3, 0), (2, 3, 0, 1), (3, 0, 1, 2)]
    assert one.exhausted and not len(one.draw(1).entities)
    again = walker(graph, 3).draw(100)
    assert np.array_equal(again.entities, drawn.entities)
    counts = dict(one.counts)
    total = counts.pop("walks")
    assert total == sum(counts.values()) and counts["cycle"] > 0


def test_walks_go_on_where_they_stopped():
    graph = graph_of([(i, 1, i + 1000) for i in range(1, 200)])
    one = walker(graph, 1)
    first, second = one.draw(50), one.draw(60)
    heads = [*first.entities[:, 0].tolist(), *second.entities[:, 0].tolist()]
    assert len(set(heads)) == len(heads) == 110


def test_nothing_usable_gives_no_walk():
    graph = graph_of([(1, 1, 2)])
    nowhere = walks.Ways(graph, np.zeros(1, bool), np.ones(2, bool), 0.5)
    one = walks.Walker(nowhere, 2, np.random.default_rng(0), walks.Caps())
    assert one.exhausted and one.draw(5).relations.shape == (0, 2)


def test_held_out_entities_are_a_share_and_the_same_in_every_graph():
    numbers = np.arange(1, 20_001, dtype=np.int32)
    out = walks.held_out(numbers, 0.1)
    assert out.mean() == pytest.approx(0.1, abs=0.01)
    assert np.array_equal(walks.held_out(numbers[::7], 0.1), out[::7])
    assert not walks.held_out(numbers, 0.0).any()
    # Steele et al.'s splitmix64 of state 0 first gives 0xe220a8397b1dcdaf = 0.8833… of 2^64.
    assert walks.held_out(np.zeros(1, np.int32), 0.8834).all()
    assert not walks.held_out(np.zeros(1, np.int32), 0.8833).any()
