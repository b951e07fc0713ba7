"""How often the questions of a task file are answered without all of their evidence.

    python -m zest_jax.audit --tasks=tasks.jsonl --model=Qwen/Qwen2.5-7B-Instruct \\
        --passages=wiki-18.jsonl --index=indexes/wiki18 --hops=2,3 --per_hop=50
    python -m zest_jax.audit --tasks=tasks.jsonl --model=http://127.0.0.1:8000/v1 \\
        --model_name=zai-org/GLM-4.7-Flash --index=indexes/wiki18
    python -m zest_jax.audit --model=smoke_policy --tasks=zest_jax/assets/atlas/heldout.jsonl \\
        --passages=zest_jax/assets/atlas/passages.jsonl

Each question is put to a judge without any passage, with the source's passage, with what one search
finds, with each passage of its evidence alone, and with all of them. `evidence` of a task lists
passage ids in hop order; they are looked up in --passages (a corpus in any format that build_index
reads) or in the folder of --index. A task may also carry its own texts, as "passages". Without
--index the search is BM25 over --passages.

The judge is an endpoint of OpenAI's kind (its key in an environment variable, see --key_variable)
or a policy of this machine. It never sees an accepted answer. Answers are kept batch by batch, so
that the same command goes on where it was stopped and asks again what stayed unanswered.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import assembly, cli
from zest_jax import workdir as workdir_lib
from zest_jax.auditing import (
    SCORES,
    Asking,
    Form,
    JudgeForm,
    SolverForm,
    askings,
    scored,
    summary,
    table,
)
from zest_jax.errors import UserError
from zest_jax.files import check_writable, writing
from zest_jax.players import policy_folder
from zest_jax.progress import Progress
from zest_jax.retrieval.corpora import open_corpus, to_passage
from zest_jax.retrieval.interface import Passage, PassageRetriever
from zest_jax.tasks.types import Task, read_tasks
from zest_jax.teachers.endpoint import KEY_VARIABLE, EndpointSettings, EndpointTeacher
from zest_jax.teachers.interface import Teacher, digest

_NAMED = 5  # ids that a line of the log names
_SEARCHED = 256  # questions of one search
_CHAT_TOKENS = 512  # of an answer with its thoughts
_SOLVER_TOKENS = 48  # of an answer that is opened already


@dataclasses.dataclass(frozen=True)
class Texts:
    """The passages that an audit shows.

    Attributes:
      evidence: by task id, for the tasks whose evidence is known whole.
      missing: ids of passages that were nowhere found, by task id.
      bare: ids of tasks that name no evidence.
      corpus: all passages, where they were asked for.
    """

    evidence: dict[str, list[Passage]]
    missing: dict[str, list[str]]
    bare: list[str]
    corpus: list[Passage]


# ------------------------------------------------------------------------------ tasks and passages


def choose(tasks: Sequence[Task], hops: str, per_hop: int, seed: int) -> list[Task]:
    """The tasks that are audited, in the order of the file.

    Args:
      tasks: of the file.
      hops: numbers with commas between; "" for all.
      per_hop: most tasks of a hop count, drawn by a hash of their ids; 0 for all. So audits of two
        files have the same mix.
      seed: another draw.

    Raises:
      UserError: not numbers, or no task is left.
    """
    try:
        wanted = {int(part) for part in hops.split(",")} if hops else set()
    except ValueError:
        raise UserError(f"--hops takes numbers with commas between, not {hops!r}.") from None
    if per_hop < 0:
        raise UserError("--per_hop is 0 (all) or more.")
    left = [task for task in tasks if not wanted or task.hops in wanted]
    if not left:
        there = ", ".join(map(str, sorted({task.hops for task in tasks})))
        raise UserError(f"no task has --hops={hops}; there are tasks of {there} hops.")
    if not per_hop:
        return left
    drawn = sorted(left, key=lambda task: digest([seed, task.id]))
    seen: Counter[int] = Counter()
    kept = set()
    for task in drawn:
        seen[task.hops] += 1
        if seen[task.hops] <= per_hop:
            kept.add(task.id)
    return [task for task in left if task.id in kept]


def find_texts(tasks: Sequence[Task], passages: str, index: str, whole: bool) -> Texts:
    """Looks the evidence of the tasks up.

    Args:
      tasks: to be audited.
      passages: file or folder of a corpus; "" for none.
      index: folder of an index, where there is no corpus; an address holds no texts.
      whole: keep the whole corpus.

    Raises:
      UserError: a corpus or index that cannot be read.
    """
    own = {task.id: _own_texts(task) for task in tasks}
    wanted = {id for task in tasks for id in task.evidence}
    known: dict[str, Passage] = {}
    corpus: list[Passage] = []
    if passages:
        for batch in open_corpus(passages).batches():
            for passage in batch.passages:
                if passage.id in wanted:
                    known.setdefault(passage.id, passage)
            if whole:
                corpus += batch.passages
    elif index and not _is_address(index):
        from zest_jax.retrieval.index_files import IndexFolder

        texts = IndexFolder(index).passages()
        ids = sorted(wanted)
        for id, row in zip(ids, texts.rows_of(ids).tolist(), strict=True):
            if row >= 0:
                known[id] = texts[row]
    evidence: dict[str, list[Passage]] = {}
    missing: dict[str, list[str]] = {}
    bare = []
    for task in tasks:
        mine = known | {p.id: p for p in own[task.id]}
        lacking = [id for id in task.evidence if id not in mine]
        if lacking:
            missing[task.id] = lacking
        elif task.evidence:
            evidence[task.id] = [mine[id] for id in task.evidence]
        elif own[task.id]:
            evidence[task.id] = own[task.id]
        else:
            bare.append(task.id)
    return Texts(evidence, missing, bare, corpus)


def _own_texts(task: Task) -> list[Passage]:
    """The passages that a task carries itself, in their order."""
    told = task.meta.get("passages", [])
    if not isinstance(told, list) or not all(isinstance(record, dict) for record in told):
        raise UserError(
            f"task {task.id}: 'passages' must be a list of objects with title and text."
        )
    try:
        return [to_passage(record, f"{task.id}#{n}") for n, record in enumerate(told)]
    except Exception as error:  # of the reader's own kind
        raise UserError(f"task {task.id}: a passage of 'passages' has {error}.") from None


def say_missing(texts: Texts, tasks: Sequence[Task], progress: Progress) -> None:
    """Tells what evidence lacks; of those tasks only the contexts without it are audited."""
    if texts.missing:
        ids = [id for lacking in texts.missing.values() for id in lacking]
        progress.say(
            f"{len(texts.missing):,} of {len(tasks):,} tasks name passages that were not found "
            f"({_some(ids)}); they are asked without evidence only."
        )
    if texts.bare:
        progress.say(
            f"{len(texts.bare):,} of {len(tasks):,} tasks have no evidence ({_some(texts.bare)}); "
            "they are asked without evidence only."
        )


def search(
    tasks: Sequence[Task], index: str, encoder: str, corpus: Sequence[Passage], top_k: int
) -> list[list[Passage]] | None:
    """What one retrieval finds for each question; None where there is nothing to search."""
    if index:
        from zest_jax.retrieval.open_index import open_retriever

        return _found(
            open_retriever(index, **({"encoder": encoder} if encoder else {})), tasks, top_k
        )
    if not corpus:
        return None
    from zest_jax.retrieval import bm25

    with tempfile.TemporaryDirectory() as folder:
        words = Path(folder) / "words"
        bm25.build((f"{p.title}\n{p.text}" for p in corpus), words)
        return _found(bm25.open_bm25(words, corpus), tasks, top_k)


def _found(retriever: PassageRetriever, tasks: Sequence[Task], top_k: int) -> list[list[Passage]]:
    found = []
    for at in range(0, len(tasks), _SEARCHED):
        questions = [task.question for task in tasks[at : at + _SEARCHED]]
        for answer in retriever.search_passages(questions, top_k):
            found.append([passage for passage, _ in answer])
    return found


# ------------------------------------------------------------------------------ the judge


def open_judge(values: flags.FlagValues) -> tuple[Teacher, Form]:
    """Who is asked, and in which words."""
    if _is_address(values.model):
        if values.protocol or values.chat is not None:
            raise UserError("an endpoint is asked as a chat; leave --protocol and --chat out.")
        settings = EndpointSettings(
            max_tokens=values.max_tokens or _CHAT_TOKENS,
            answer_s=values.answer_s,
            connections=values.connections,
            most_requests=values.most_requests,
            most_tokens=values.most_tokens,
            key_variable=values.key_variable,
        )
        if not values.model_name:
            raise UserError("say which model the endpoint shall ask: --model_name=NAME.")
        return EndpointTeacher(values.model, values.model_name, settings), JudgeForm()
    from zest_jax.rollout.protocols import in_chat_template
    from zest_jax.teachers.local import load_local

    folder = policy_folder(values.model)
    name = values.protocol or ("plain_search" if folder != values.model else "")
    spoken = assembly.protocol(name) if name else None
    if spoken and set(spoken.placeholders) != {"question"}:
        raise UserError(f"protocol {name} is not one in which a question is answered.")
    options = {"name": values.model, "slots": values.slots}
    chat = values.chat if spoken is None else False
    judge = load_local(folder, chat=chat, max_tokens=values.max_tokens or _CHAT_TOKENS, **options)
    if judge.chat:
        return judge, JudgeForm()
    judge.max_tokens = values.max_tokens or _SOLVER_TOKENS
    spoken = spoken or assembly.protocol("search_r1")
    if values.chat or spoken.special:
        spoken = in_chat_template(spoken, judge.tokenizer)
    return judge, SolverForm(spoken)


def _is_address(where: str) -> bool:
    return where.startswith(("http://", "https://"))


# ------------------------------------------------------------------------------ the program


def ask_all(
    judge: Teacher, form: Form, asked: Sequence[Asking], kept: Path, batch: int, progress: Progress
) -> tuple[dict[str, dict[str, Any]], Counter[str]]:
    """Asks what is not yet answered, and keeps the answers of a batch at once.

    Returns:
      Records by key, and the failures of this time by kind.
    """
    keys = {each.key for each in asked}
    answers = {r["key"]: r for r in workdir_lib.read_jsonl(kept) if r.get("key") in keys}
    todo = [each for each in asked if each.key not in answers]
    failures: Counter[str] = Counter()
    if len(todo) < len(asked):
        progress.say(f"{len(asked) - len(todo):,} of {len(asked):,} answers are in {kept} already.")
    with progress.phase("asking", len(asked), len(asked) - len(todo)) as bar:
        for at in range(0, len(todo), batch):
            part = todo[at : at + batch]
            records = []
            for each, reply in zip(part, judge.ask([a.conversation for a in part]), strict=True):
                if reply.text is None:
                    failures[str(reply.failure)] += 1
                else:
                    records.append(scored(each, reply.text, form))
            workdir_lib.append_jsonl(kept, records)
            answers |= {record["key"]: record for record in records}
            bar.advance(len(part), unanswered=failures.total())
    return answers, failures


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None or workdir:
        raise UserError("this program has no config and no workdir; say --tasks and --model.")
    check(values)
    out = Path(values.out) if values.out else None
    kept = (
        Path(values.answers)
        if values.answers
        else (out or Path("audit.json")).with_suffix(".answers.jsonl")
    )
    with Progress() as progress:
        tasks = choose(list(read_tasks(values.tasks)), values.hops, values.per_hop, values.seed)
        texts = find_texts(tasks, values.passages, values.index, whole=not values.index)
        say_missing(texts, tasks, progress)
        found = search(tasks, values.index, values.encoder, texts.corpus, values.top_k)
        if found is None:
            progress.say("there is nothing to search (--index, --passages); no one-shot retrieval.")
        judge, form = open_judge(values)
        with judge:
            asked = askings(tasks, texts.evidence, found, form, judge.card)
            answers, failures = ask_all(judge, form, asked, kept, values.batch_size, progress)
            card, told = judge.card, judge.counts.sentence()
        if not answers:
            raise UserError(f"the judge answered nothing. {told} See that it runs.")
        if failures:
            progress.say(f"{told} The same command asks these again.")
    rows = summary(asked, answers, values.score)
    print(table(rows))
    none = sum(record["answer"] is None for record in answers.values())
    if none:
        print(
            f"{none:,} of {len(answers):,} replies hold no answer that can be read; they count 0."
        )
    if out:
        record = {
            "tasks": Path(values.tasks).name,
            "judge": card,
            "form": form.card[:2],
            "score": values.score,
            "retrieval": values.index or ("bm25" if found is not None else ""),
            "top_k": values.top_k,
            "asked": len(asked),
            "unanswered": dict(sorted(failures.items())),
            "without_answer": none,
            "tasks_without_evidence": texts.bare,
            "passages_not_found": texts.missing,
            "rows": rows,
        }
        with writing(out) as file:
            file.write((json.dumps(record, ensure_ascii=False, indent=1) + "\n").encode())


def check(values: flags.FlagValues) -> None:
    """Refuses flags that do not go together, before anything is loaded.

    Raises:
      UserError: which.
    """
    for name in ("tasks", "model"):
        if not values[name].value:
            raise UserError(f"no --{name} is given; say --tasks=FILE --model=FOLDER_OR_ADDRESS.")
    if values.score not in SCORES:
        raise UserError(f"--score is one of {', '.join(SCORES)}, not {values.score!r}.")
    for name in ("top_k", "batch_size", "slots", "connections", "max_tokens"):
        value: int | None = values[name].value
        if value is not None and value < 1:
            raise UserError(f"--{name} is 1 or more.")
    if values.out:
        check_writable(Path(values.out))


def _some(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NAMED]) + (", …" if len(ids) > _NAMED else "")


def define(values: flags.FlagValues) -> None:
    def text(name: str, default: str, help: str) -> None:
        flags.DEFINE_string(name, default, help, values)

    def number(name: str, default: int | None, help: str) -> None:
        flags.DEFINE_integer(name, default, help, flag_values=values)

    text("tasks", "", "JSON lines with question, golden_answers and evidence (passage ids)")
    text("model", "", "the judge: a policy's folder or hub id, or the address of an API (http://…)")
    text("model_name", "", "of an API: the model's name there")
    text("passages", "", "corpus that holds the evidence")
    text("index", "", "folder of an index, or the address of a retrieval server")
    text("encoder", "", "folder or hub id of the index's encoder, where it has moved")
    number("top_k", 3, "passages of the one retrieval")
    text("hops", "", "only tasks of these hop counts: 2,3")
    number("per_hop", 0, "tasks of each hop count, drawn by a hash; 0 for all")
    number("seed", 0, "of that draw")
    text("score", "em", f"what counts as answered: {', '.join(SCORES)}")
    text("protocol", "", "ask a policy in the words of this protocol, as a solver is asked")
    flags.DEFINE_boolean("chat", None, "put the words in the policy's chat template", values)
    number(
        "max_tokens",
        None,
        f"of an answer; {_CHAT_TOKENS} of a chat, {_SOLVER_TOKENS} where it is opened",
    )
    number("slots", 16, "questions a policy answers at once")
    number("batch_size", 128, "questions between two writes of the answers")
    number("connections", 8, "of an API: requests at the same time")
    flags.DEFINE_float("answer_s", 180.0, "of an API: seconds for an answer", flag_values=values)
    number("most_requests", 0, "of an API: the limit on requests; 0 for none")
    number("most_tokens", 0, "of an API: the limit on tokens; 0 for none")
    text("key_variable", KEY_VARIABLE, "of an API: environment variable that holds its key")
    text("answers", "", "JSON lines that get every answer; OUT.answers.jsonl if not given")
    text("out", "", "JSON file to write")


entry = cli.program(
    main,
    define=define,
    needs_config=False,
    needs_workdir=False,
    memory_hint="use fewer --slots, or a smaller policy",
)

if __name__ == "__main__":
    sys.exit(entry())
