"""Readers of the corpora that others publish."""

import builtins
import csv
import gzip
import json
import tracemalloc

import pytest

from zest_jax.errors import UserError
from zest_jax.retrieval import corpora
from zest_jax.retrieval.corpora import Limits, Position, open_corpus
from zest_jax.retrieval.interface import Passage

LOOSE = Limits(count=1000, share=1.0)
WANTED = [
    Passage("0", "Évariste Galois", "A mathematician.\nBorn in 1811."),
    Passage("x-7", 'He said "no"', "It is a\tfilm."),
    Passage("2", "", "No title here."),
]


def lines(path, *records):
    path.write_text("".join(r if isinstance(r, str) else json.dumps(r) + "\n" for r in records))
    return path


def wiki(path, number, start=0):
    return lines(
        path,
        *({"id": str(i), "contents": f'"Title {i}"\ntext {i} é'} for i in range(start, number)),
    )


def write_jsonl(path):
    records = [{"id": p.id, "title": p.title, "text": p.text} for p in WANTED]
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")


def write_contents(path):
    records = [
        {"id": 0, "contents": '"Évariste Galois"\nA mathematician.\nBorn in 1811.'},
        {"id": "x-7", "contents": '"He said "no""\nIt is a\tfilm.', "more": [1]},
        {"_id": "2", "contents": "No title here."},
    ]
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, records)), "utf-8")  # no line end, a BOM


def write_parquet(path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pa.table(
        {
            "other": [1, 2, 3],
            "text": [p.text for p in WANTED],
            "title": [p.title or None for p in WANTED],
            "id": [p.id for p in WANTED],
        }
    )
    parquet.write_table(table, path, row_group_size=2)


@pytest.mark.parametrize(
    "name, write",
    [("a.jsonl", write_jsonl), ("odd.txt", write_contents), ("a.parquet", write_parquet)],
)
@pytest.mark.parametrize("packed", [False, True])
def test_formats_give_the_same_passages(tmp_path, name, write, packed):
    path = tmp_path / name
    write(path)
    if packed:
        if name.endswith("parquet"):
            path = path.rename(tmp_path / "no_name")  # told by its content
        else:
            (tmp_path / f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path = tmp_path / f"{name}.gz"
    corpus = open_corpus(path)
    assert list(corpus) == WANTED
    assert corpus.malformed_total == 0


def test_tsv_reads_what_the_csv_module_writes(tmp_path):
    """DPR's file: csv with tabs, a header, quotes doubled; here with every odd field."""
    rows = [
        ("1", 'Aaron ( "Ahärôn") is a prophet, "high priest"', "Aaron"),
        ("2", "plain text", 'The "A" Team'),
        ("3", "a\ttab within", "Tab"),
        ("4", '"', "One quote"),
    ]
    path = tmp_path / "psgs_w100.tsv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\r\n")
        writer.writerow(["id", "text", "title"])
        writer.writerows(rows)
    assert list(open_corpus(path)) == [Passage(id, title, text) for id, text, title in rows]
    # Quotes that nobody doubled are text.
    raw = tmp_path / "raw.tsv"
    raw.write_text('7\t"One" and "two"\tBoth\n8\tonly text\t\n')
    assert list(open_corpus(raw)) == [
        *(Passage("7", "Both", '"One" and "two"'), Passage("8", "", "only text")),
    ]
    pairs = tmp_path / "collection.tsv"
    pairs.write_text("0\tfirst\n1\tsecond\n")
    assert [p.text for p in open_corpus(pairs)] == ["first", "second"]
    pairs.write_text("0\tfirst\tx\ty\n")
    with pytest.raises(UserError, match="4 columns and no header"):
        list(open_corpus(pairs))


def test_a_folder_of_texts_and_a_folder_of_shards(tmp_path):
    texts = tmp_path / "texts"
    (texts / "b").mkdir(parents=True)
    (texts / "Ada Lovelace.txt").write_text("Wrote a program.")
    (texts / "b" / "v1.2 notes.md").write_text("Second.")
    (texts / ".hidden.txt").write_text("no")
    (texts / "picture.png").write_bytes(b"\x89PNG")
    assert list(open_corpus(texts)) == [
        Passage("Ada Lovelace.txt", "Ada Lovelace", "Wrote a program."),
        Passage("b/v1.2 notes.md", "v1.2 notes", "Second."),
    ]
    (texts / "empty.txt").write_text(" \n")
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    corpus = open_corpus(texts, limits=LOOSE)
    assert len(list(corpus)) == 2
    assert [str(m) for m in corpus.malformed] == [
        *("empty.txt, line 1: empty", "latin.txt, line 1: not UTF-8"),
    ]
    shards = tmp_path / "shards"
    shards.mkdir()
    wiki(shards / "part-1.jsonl", 5, start=3)
    wiki(shards / "part-0.jsonl", 3)
    assert [p.id for p in open_corpus(shards)] == list("01234")
    (shards / "README.md").write_text("about")
    with pytest.raises(UserError, match="2 of jsonl, 1 of texts.*--format"):
        open_corpus(shards)
    assert len(list(open_corpus(shards, "jsonl"))) == 5


BAD = [
    ("{not json}\n", "not JSON"),
    ("[1, 2]\n", "not a JSON object"),
    ({"id": "1", "title": "t"}, "no 'text' or 'contents'"),
    ({"id": "1", "contents": 5}, "'contents' is no text"),
    ({"id": "1", "title": ["t"], "text": "x"}, "'title' or 'text' is no text"),
    ({"id": 1.5, "text": "x"}, "neither text nor a whole number"),
    ({"id": True, "text": "x"}, "neither text nor a whole number"),
    ({"id": "1", "title": "", "text": "  "}, "neither title nor text"),
    ('{"id": "1", "text": "\\ud83d"}\n', "surrogate"),
    ("[" * 100_000 + "\n", "not JSON"),
    ('{"text": "' + "1" * 50 + "\n", "not JSON"),
]


def test_malformed_lines_are_named_and_left_out(tmp_path):
    good = {"title": "t", "text": "x"}
    path = lines(tmp_path / "c.jsonl", good, *(bad for bad, _ in BAD), "\n", good)
    with open(path, "ab") as file:
        file.write(b'{"text": "caf\xe9"}\n{"text": "torn')
    corpus = open_corpus(path, limits=LOOSE)
    # The ids of both are made of file and line, the blank one counted.
    assert [p.id for p in corpus] == ["c.jsonl:1", f"c.jsonl:{len(BAD) + 3}"]
    assert corpus.malformed_total == len(BAD) + 2
    for at, (malformed, (_, why)) in enumerate(zip(corpus.malformed, BAD, strict=False)):
        assert (malformed.file, malformed.line) == ("c.jsonl", at + 2)
        assert why in malformed.why, malformed
    assert corpus.malformed[-2].why == "not UTF-8"
    whole = lines(tmp_path / "emoji.jsonl", '{"text": "\\ud83d\\ude00"}\n')  # a whole pair
    assert list(open_corpus(whole))[0].text == "😀"


def test_too_many_malformed_lines_end_the_reading(tmp_path):
    good = {"text": "x"}
    path = lines(tmp_path / "c.jsonl", *[good] * 97, *["nonsense\n"] * 3)
    assert len(list(open_corpus(path, limits=Limits(3, 0.03)))) == 97
    with pytest.raises(UserError, match=r"3 of 100 lines .*c.jsonl, line 98.*--max_malformed"):
        list(open_corpus(path, limits=Limits(2, 1.0)))
    with pytest.raises(UserError, match=r"3.00%"):
        list(open_corpus(path, limits=Limits(100, 0.029)))
    # Long before the end of a file that is no corpus at all.
    path = lines(tmp_path / "log.jsonl", *["nonsense\n"] * 600_000)
    with pytest.raises(UserError, match="hold no passage"):
        list(open_corpus(path))


@pytest.mark.parametrize("kind", ["jsonl", "gz", "tsv", "parquet", "texts", "shards"])
def test_reading_goes_on_from_every_position(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(corpora, "_BLOCK", 64)
    monkeypatch.setattr(corpora, "_ROWS", 3)
    path = tmp_path / f"c.{kind}"
    if kind == "jsonl":
        wiki(path, 20)
        path.write_text(path.read_text() + "bad\n\n" + path.read_text())
    elif kind == "gz":
        wiki(path, 20)
        path.write_bytes(gzip.compress(path.read_bytes()))
    elif kind == "tsv":
        path.write_text("text\ttitle\n" + "".join(f"text {i}\tt\n" for i in range(30)))
    elif kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        texts = [None if i == 4 else f"text {i}" for i in range(20)]
        parquet.write_table(pa.table({"text": texts}), path, row_group_size=5)
    else:
        path.mkdir()
        for i in range(10):
            if kind == "texts":
                (path / f"{i}.txt").write_text(f"text {i}" if i != 4 else "")
            else:
                wiki(path / f"{i}.jsonl", i + 3, start=i)
    corpus = open_corpus(path, limits=LOOSE)
    batches = list(corpus.batches())
    whole = [p for b in batches for p in b.passages]
    bad, total = corpus.malformed_total, corpus.total_bytes
    assert len(batches) > 3 and len(whole) >= 9
    assert len({p.id for p in whole}) == len(whole) or kind in ("shards", "jsonl")
    assert [b.bytes_done for b in batches] == sorted(b.bytes_done for b in batches)
    assert batches[-1].bytes_done == total
    seen = 0
    for batch in batches:
        seen += len(batch.passages)
        assert batch.end.passages == seen
        again = open_corpus(path, limits=LOOSE)
        rest = [p for b in again.batches(batch.end) for p in b.passages]
        assert rest == whole[seen:]
        assert again.malformed_total == bad
    assert batches[-1].end.malformed == bad


def test_mistakes_are_told(tmp_path, monkeypatch):
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(wiki(tmp_path / "w.jsonl", 2000).read_bytes())[:-300])
    with pytest.raises(UserError, match="cut.jsonl.gz is cut short or damaged"):
        list(open_corpus(cut))
    array = tmp_path / "array.json"
    array.write_text('[{"text": "x"}]')
    with pytest.raises(UserError, match="one JSON array"):
        open_corpus(array)
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text("\n")
    with pytest.raises(UserError, match="holds no passage"):
        list(open_corpus(nothing))
    with pytest.raises(UserError, match="does not exist"):
        open_corpus(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="not 'csv'"):
        open_corpus(nothing, "csv")
    with pytest.raises(UserError, match="one text file"):
        open_corpus(lines(tmp_path / "prose.txt", "Once upon a time.\n"))
    with pytest.raises(UserError, match="no parquet file"):
        open_corpus(nothing, "parquet")
    fake = tmp_path / "fake.parquet"
    fake.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        list(open_corpus(fake))
    monkeypatch.setattr(corpora, "_LONGEST", 1000)
    monkeypatch.setattr(corpora, "_BLOCK", 100)
    with pytest.raises(UserError, match="no line end"):
        list(open_corpus(lines(tmp_path / "long.jsonl", '{"text": "' + "x" * 5000 + '"}\n')))

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match="pip install pyarrow"):
        open_corpus(fake)


def test_memory_does_not_grow_with_the_corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_BLOCK", 1 << 14)
    peaks = []
    for number in (2_000, 20_000):
        corpus = open_corpus(wiki(tmp_path / f"{number}.jsonl", number))
        tracemalloc.start()
        assert sum(len(b.passages) for b in corpus.batches()) == number
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0], peaks


def test_a_changed_corpus_has_another_identity(tmp_path):
    before = open_corpus(wiki(tmp_path / "c.jsonl", 5)).identity()
    assert open_corpus(tmp_path / "c.jsonl").identity() == before == json.loads(json.dumps(before))
    assert open_corpus(wiki(tmp_path / "c.jsonl", 6)).identity() != before
    assert Position() == Position(0, 0, 0, 0, 0)
