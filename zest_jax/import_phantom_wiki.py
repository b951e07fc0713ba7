"""A world of the package phantom-wiki as a corpus and a file of tasks: a foreign test set.

    pip install phantom-wiki      # Python 3.12 or newer; it needs SWI-Prolog (swi-prolog-nox)
    python -m phantom_wiki --num-family-trees 10 --question-depth 10 --easy-mode \\
        --num-questions-per-type 10 --seed 1 --output-dir phantom \\
        --article-format json --question-format json
    python -m zest_jax.import_phantom_wiki --source=phantom --out=demo/phantom

phantom-wiki (MIT) invents people, their families, friends and jobs, an article each, and questions
of several hops with all their answers. Questions that count ("How many …") are left out: no passage
spells their answer. What is written: corpus.jsonl, an article a line without headings, and
tasks.jsonl, where `hops` is the question's difficulty and any answer of the list is right.
"""

import json
import sys
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import cli
from zest_jax.errors import UserError
from zest_jax.tasks.types import Task, write_tasks
from zest_jax.workdir import write_jsonl


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if not (values.source and values.out):
        raise UserError("name the folder that phantom-wiki wrote and the one to write: --source, …")
    source, out = Path(values.source).expanduser(), Path(values.out).expanduser()
    articles, questions = (_read(source / f"{name}.json") for name in ("articles", "questions"))
    try:
        passages = [passage(article) for article in articles]
        tasks = [task for task in map(to_task, questions) if task is not None]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{source} does not hold what phantom-wiki 1.0 writes (at {error}); write it anew."
        ) from None
    if not (passages and tasks):
        raise UserError(f"{source} has no article, or no question that does not count; write more.")
    if (out / "corpus.jsonl").exists():
        raise UserError(f"{out} holds a corpus already; name another folder, or delete it.")
    out.mkdir(parents=True, exist_ok=True)
    write_jsonl(out / "corpus.jsonl", passages)
    write_tasks(out / "tasks.jsonl", tasks)
    left_out = len(questions) - len(tasks)
    print(f"{len(articles)} articles, {len(tasks)} questions ({left_out} that count are left out)")


def passage(article: dict[str, Any]) -> dict[str, str]:
    """A line of the corpus: the article's sentences without headings, one after the other."""
    lines = [line.strip() for line in article["article"].splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith("#"))
    return {"id": article["title"], "title": article["title"], "text": text}


def to_task(question: dict[str, Any]) -> Task | None:
    """A task; None of a question that counts, or that nobody answers."""
    answers = tuple(dict.fromkeys(str(answer) for answer in question["answer"]))
    if question["is_aggregation_question"] or not answers:
        return None
    return Task(question["id"], question["question"], answers, hops=int(question["difficulty"]))


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; write it with phantom_wiki --article-format json "
            "--question-format json."
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is no JSON ({error.msg}, line {error.lineno}).") from None


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("source", "", "folder that phantom-wiki wrote", flag_values=values)
    flags.DEFINE_string("out", "", "folder to write to", flag_values=values)


entry = cli.program(main, define=define, needs_config=False, needs_workdir=False)

if __name__ == "__main__":
    sys.exit(entry())
