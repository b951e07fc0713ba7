"""The program that builds an index."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import virtual_devices
from test_corpora import lines
from test_index_files import FAISS

from zest_jax import build_index, cli
from zest_jax.models import load_encoder
from zest_jax.retrieval import bm25
from zest_jax.retrieval.index_files import IndexFolder
from zest_jax.retrieval.interface import Passage

ENCODERS = Path(__file__).parent / "fixtures" / "encoders"
E5 = ENCODERS / "e5"


def run(*arguments):
    return build_index.entry(["build_index", *map(str, arguments)])


def stored(folder):
    """Everything in an index but its lock, by path."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock")
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def words(number):
    """Words that the fixtures' small vocabularies tell apart."""
    return " ".join("etaoinshrd"[int(digit)] * 2 for digit in f"{number:03d}")


def wiki(path, number):
    """Passages whose vectors differ."""
    contents = (f'"Title {i}"\n{words(i)} text {i} é' for i in range(number))
    return lines(path, *({"id": str(i), "contents": c} for i, c in enumerate(contents)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return wiki(tmp_path_factory.mktemp("corpus") / "wiki-18.jsonl", 60)


@pytest.fixture(scope="module")
def built(corpus):
    folder = corpus.parent / "built"
    assert run(f"--corpus={corpus}", f"--encoder={E5}", f"--index={folder}", "--shard_rows=25",
               "--batch_size=8", "--dtype=float32") == 0  # fmt: skip
    return folder


def test_vectors_are_those_of_the_contents(corpus, built):
    encoder = load_encoder(E5)
    index = IndexFolder(built, encoder=encoder, encoder_name=E5, check=True)
    manifest = index.manifest
    assert (manifest.kind, manifest.passages, manifest.dimension) == ("exact", 60, 32)
    assert [s.rows for s in manifest.shards] == [25, 25, 10]
    assert manifest.corpus["name"] == "wiki-18.jsonl"
    # As Search-R1 encodes its corpus: the contents as they stand in the file.
    contents = [json.loads(line)["contents"] for line in corpus.read_text().splitlines()]
    want = encoder.encode_texts(contents, "passage")
    assert len(np.unique(want.round(3), axis=0)) == 60
    got = np.concatenate([block for _, block in index.vectors().blocks()])
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert index.passages()[59] == Passage("59", "Title 59", f"{words(59)} text 59 é")


def test_building_again_does_nothing_and_another_encoder_is_refused(corpus, built, capsys):
    before = stored(built)
    stamps = {p: p.stat().st_mtime_ns for p in built.rglob("*.npy")}
    base = [f"--corpus={corpus}", f"--index={built}"]
    assert run(*base, f"--encoder={E5}") == 0
    assert "complete already: 60 passages" in capsys.readouterr().err
    for encoder, words in [
        (ENCODERS / "minilm", "e5, not with"),
        ("bm25", "not with bm25"),
    ]:
        assert run(*base, f"--encoder={encoder}") == cli.EXIT_USER
        assert words in capsys.readouterr().err
    assert run(*base, f"--encoder={E5}", "--dimension=16") == cli.EXIT_USER
    assert "makes 16" in capsys.readouterr().err
    assert stored(built) == before
    assert stamps == {p: p.stat().st_mtime_ns for p in built.rglob("*.npy")}


@pytest.mark.slow
def test_a_killed_build_repeats_no_finished_shard(tmp_path):
    corpus = wiki(tmp_path / "c.jsonl", 400)
    arguments = [f"--corpus={corpus}", f"--encoder={E5}", "--shard_rows=40", "--batch_size=4"]
    assert run(*arguments, f"--index={tmp_path}/whole") == 0
    # Slowed down, so that the kill lands between two shards; nothing else is changed.
    program = """
        import sys, time
        from zest_jax import build_index
        from zest_jax.models import Encoder
        plain = Encoder.encode_texts

        def slow(*args, **kwargs):
            time.sleep(0.4)
            return plain(*args, **kwargs)

        Encoder.encode_texts = slow
        sys.exit(build_index.entry(["build_index", *sys.argv[1:]]))
    """
    folder = tmp_path / "killed"
    shard = "vectors/shard-{:05d}.npy".format
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments, f"--index={folder}"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            end = time.monotonic() + 120
            while not (folder / shard(2)).exists():
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
    recorded = json.loads((folder / "building.json").read_text())["shards"]
    assert 2 <= len(recorded) < 10 and not (folder / "index.json").exists()
    finished = [folder / entry["file"] for entry in recorded]
    stamps = [(p.stat().st_ino, p.stat().st_mtime_ns) for p in finished]
    (folder / "vectors" / ".shard-00005.npy.torn").write_bytes(b"half")  # as a kill may leave it
    texts = (folder / "passages" / "texts.bin").stat()
    # Other flags are refused, the same ones go on.
    assert run(*arguments, f"--index={folder}", "--dtype=float16") == cli.EXIT_USER
    assert run(*arguments, f"--index={folder}") == 0
    assert stamps == [(p.stat().st_ino, p.stat().st_mtime_ns) for p in finished]
    again = (folder / "passages" / "texts.bin").stat()
    assert (texts.st_ino, texts.st_mtime_ns) == (again.st_ino, again.st_mtime_ns)
    assert stored(folder) == stored(tmp_path / "whole")
    IndexFolder(folder, check=True)


def test_mixing_two_builds_tells_both(corpus, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "i"
    arguments = [f"--corpus={corpus}", f"--index={folder}"]

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build_index, "encode_rows", lambda *_: stop)
    assert run(*arguments, f"--encoder={E5}") == cli.EXIT_INTERRUPTED
    assert "run the same command to resume" in capsys.readouterr().err
    assert run(*arguments, f"--encoder={ENCODERS / 'minilm'}") == cli.EXIT_USER
    told = capsys.readouterr().err
    assert f"encoder name is '{E5}', not '{ENCODERS / 'minilm'}'" in told
    assert run(*arguments, f"--encoder={E5}", "--shard_rows=7") == cli.EXIT_USER
    assert "its shard_rows is 100000, not 7" in capsys.readouterr().err
    assert run(*arguments, "--encoder=bm25") == cli.EXIT_USER
    assert "its kind is 'exact', not 'bm25'" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(*arguments, f"--encoder={E5}") == 0


def test_bm25(corpus, tmp_path, capsys):
    folder = tmp_path / "i"
    (folder / ".bm25.left").mkdir(parents=True)  # by a killed process
    (folder / "bm25").mkdir()
    assert run(f"--corpus={corpus}", "--encoder=bm25", f"--index={folder}") == 0
    index = IndexFolder(folder, check=True)
    assert index.manifest.kind == "bm25" and not (folder / ".bm25.left").exists()
    moved = shutil.move(folder, tmp_path / "moved")
    index = IndexFolder(moved)
    passages = index.passages()
    found = bm25.open_bm25(Path(moved) / "bm25", passages).search(["title 37"], 1)
    assert passages[int(found.rows[0, 0])].title == "Title 37"
    with pytest.raises(Exception, match="kind bm25: no vectors"):
        index.vectors()
    assert run(f"--corpus={corpus}", "--encoder=bm25", f"--index={moved}", "--vectors=x") == 2
    assert run(f"--corpus={corpus}", "--encoder=bm25", f"--index={moved}") == 0
    assert "complete already" in capsys.readouterr().err


def flat_index(path, vector_NE, kind=b"IxFI", metric=0):
    """A file of faiss's layout, its head taken from one that faiss wrote."""
    head = bytearray(FAISS["inner product"][:33])
    head[:4] = kind
    N, E = vector_NE.shape
    head[4:8], head[8:16] = np.int32(E).tobytes(), np.int64(N).tobytes()
    tail = np.int32(metric).tobytes() + np.uint64(N * E).tobytes()
    path.write_bytes(bytes(head) + tail + vector_NE.astype("<f4").tobytes())
    return path


def test_vectors_made_elsewhere(corpus, built, tmp_path, capsys):
    given = np.concatenate([b for _, b in IndexFolder(built).vectors().blocks()])
    base = [f"--corpus={corpus}", f"--encoder={E5}", "--shard_rows=25", "--dtype=float32"]
    flat = flat_index(tmp_path / "e5_Flat.index", given)
    np.save(tmp_path / "half.npy", given.astype(np.float16))
    for path, atol in ((flat, 0), (tmp_path / "half.npy", 1e-3)):
        folder = tmp_path / path.stem
        assert run(*base, f"--index={folder}", f"--vectors={path}") == 0
        index = IndexFolder(folder, check=True)
        got = np.concatenate([b for _, b in index.vectors().blocks()])
        np.testing.assert_allclose(got, given, atol=atol)
        assert index.manifest.encoder == IndexFolder(built).manifest.encoder
        assert index.manifest.settings == {"vectors": path.name}
    rng = np.random.default_rng(0)
    np.save(tmp_path / "shuffled.npy", rng.permutation(given))
    np.save(tmp_path / "short.npy", given[:-1])
    np.save(tmp_path / "narrow.npy", given[:, :16])
    long_NE = given * rng.uniform(1, 2, (len(given), 1))
    far = flat_index(tmp_path / "l2.index", long_NE, b"IxF2", 1)
    for path, words in [
        (tmp_path / "shuffled.npy", "are like their vector"),
        (tmp_path / "short.npy", "has 59 vectors, the corpus has 60 passages"),
        (tmp_path / "narrow.npy", "vectors of 16 components, the encoder makes 32"),
        (far, "searched by L2 distance"),
        (tmp_path / "nothing.npy", "does not exist"),
    ]:
        folder = tmp_path / f"refused-{path.stem}"
        assert run(*base, f"--index={folder}", f"--vectors={path}") == cli.EXIT_USER
        assert words in capsys.readouterr().err
        assert not (folder / "index.json").exists()
    folder = tmp_path / "believed"
    arguments = [*base, f"--index={folder}", f"--vectors={tmp_path}/shuffled.npy"]
    assert run(*arguments, "--nocheck_vectors") == 0
    bad = given.copy()
    bad[30, 3] = np.nan
    np.save(tmp_path / "nan.npy", bad)
    arguments = [*base, f"--index={tmp_path}/nan", f"--vectors={tmp_path}/nan.npy"]
    assert run(*arguments, "--nocheck_vectors") == cli.EXIT_USER
    assert "row 5 of shard 1 is not finite" in capsys.readouterr().err


def test_tokens_for_a_policy_now_or_later(corpus, built, tmp_path, capsys):
    folder = tmp_path / "i"
    shutil.copytree(built, folder)
    policy = ENCODERS / "qwen3_embedding"
    tokenizer = load_encoder(policy).tokenizer
    assert run(f"--index={folder}", f"--tokenizer={policy}") == 0
    tokens = IndexFolder(folder).tokens(tokenizer)
    # Search-R1's protocol counts before the title: "Doc 1(Title: " stands before every passage.
    text = f"Title 7) {words(7)} text 7 é\n"
    assert tokens[7].tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    more = [f"--index={folder}", f"--tokenizer={policy}"]
    assert run(*more, "--protocol=plain_search", "--passage_tokens=9") == 0
    plain = IndexFolder(folder).tokens(tokenizer, " {title}: {text}")
    assert plain.longest == 9
    assert run(f"--index={tmp_path}/none", f"--tokenizer={policy}") == cli.EXIT_USER
    assert "no complete index yet" in capsys.readouterr().err


def test_mistakes(corpus, built, tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    bad = lines(tmp_path / "bad.jsonl", {"text": "x"}, "nonsense\n")
    index, encoder = f"--index={tmp_path}/i", f"--encoder={E5}"
    for arguments, words in [
        ([], "no index is given"),
        ([index], "no encoder is given"),
        ([index, encoder], "no corpus is given"),
        ([index, "--encoder=nowhere", f"--corpus={corpus}"], "nowhere"),
        ([f"--index={file}", encoder, f"--corpus={corpus}"], "is a file"),
        ([index, encoder, "--corpus=nowhere.jsonl"], "nowhere.jsonl does not exist"),
        ([index, encoder, f"--corpus={bad}"], "bad.jsonl, line 2: not JSON"),
        ([index, encoder, f"--corpus={corpus}", "--shard_rows=0"], "--shard_rows must be"),
        ([index, encoder, f"--corpus={corpus}", "--dtype=int8"], "dtype"),
        ([index, encoder, f"--corpus={corpus}", "--workdir=x"], "no config and no workdir"),
    ]:
        assert run(*arguments) == cli.EXIT_USER, arguments
        assert words in capsys.readouterr().err
    more = [f"--index={tmp_path}/loose", encoder, f"--corpus={bad}"]
    assert run(*more, "--max_malformed_share=0.5") == 0
    assert "1 malformed lines were left out: bad.jsonl, line 2" in capsys.readouterr().err


@pytest.mark.slow
def test_all_devices_give_the_vectors_of_one(corpus, built, tmp_path):
    environment = os.environ | {"XLA_FLAGS": virtual_devices.flags(4)}
    command = [sys.executable, "-m", "zest_jax.build_index", f"--corpus={corpus}",
               f"--encoder={E5}", f"--index={tmp_path}/i",
               "--dtype=float32", "--batch_size=8"]  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "60 passages, 32 components" in done.stderr
    ((_, got),) = IndexFolder(tmp_path / "i").vectors().blocks()
    want = np.concatenate([b for _, b in IndexFolder(built).vectors().blocks()])
    np.testing.assert_allclose(got, want, atol=2e-6)
