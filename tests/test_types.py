"""Task and passage files: what is written is read back, and what is wrong is told precisely."""

import json

import pytest

from zest_jax.errors import UserError
from zest_jax.tasks.types import (
    Chain,
    Passage,
    Task,
    read_passages,
    read_tasks,
    task_to_line,
    write_tasks,
)


def test_tasks_survive_the_file(tmp_path):
    tasks = [
        Task("a", "Who?", ("Zoë", "Zoe"), 2, "q1", ("p1", "p2"), 3, "c", {"score": 0.5}),
        Task("b", "What?", ("x",)),
    ]
    path = tmp_path / "tasks.jsonl"
    assert write_tasks(path, tasks) == 2
    assert list(read_tasks(path)) == tasks
    first = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    assert first["golden_answers"] == ["Zoë", "Zoe"]
    assert first["score"] == 0.5


def test_a_line_of_another_data_set_is_read(tmp_path):
    path = tmp_path / "nq.jsonl"
    path.write_text('{"id": "t0", "question": "q?", "golden_answers": ["a"]}\n\n', "utf-8")
    (task,) = read_tasks(path)
    assert (task.hops, task.source_id, task.evidence, task.iteration) == (1, "", (), -1)


def test_meta_may_not_override_fields():
    with pytest.raises(ValueError, match="overrides"):
        task_to_line(Task("a", "q", ("x",), meta={"hops": 3}))


GOOD = '{"id": "a", "question": "q", "golden_answers": ["x"]}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n \n", "the file is empty"),
        (GOOD + "{oops\n", r"line 2: expected one JSON object a line"),
        ("[1]\n", r"line 1: expected a JSON object, found a list"),
        (GOOD + '{"id": "b"}\n', r"line 2: the field 'question' \(a text\) is missing"),
        ('{"id": 7, "question": "q"}\n', r"line 1: .*'id'|line 1: the field"),
        (GOOD.replace('["x"]', "[]"), "one or more texts"),
        (GOOD.replace('["x"]', '"x"'), "must be a list, found a text"),
        (GOOD.replace("}", ', "hops": 0}'), "1 or more, not 0"),
        (GOOD.replace("}", ', "hops": true}'), "a whole number, found true or false"),
        (GOOD.replace("}", ', "evidence": [1]}'), "passage ids"),
        (GOOD + GOOD, r"line 2: the id 'a' was used"),
    ],
)
def test_wrong_task_files_are_named_with_their_line(tmp_path, text, message):
    path = tmp_path / "tasks.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(UserError, match=message) as error:
        list(read_tasks(path))
    assert str(path) in str(error.value)


def test_missing_files_and_foreign_bytes(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        list(read_passages(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="is a folder"):
        list(read_passages(tmp_path))
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"id": "\xe9"}\n')
    with pytest.raises(UserError, match="expected UTF-8"):
        list(read_passages(path))


def test_passages_are_rendered_with_a_leading_space(tmp_path):
    path = tmp_path / "passages.jsonl"
    path.write_text('{"id": "1", "title": "France", "text": "A land."}\n', "utf-8")
    assert list(read_passages(path)) == [Passage("1", "France", "A land.")]
    assert Passage("1", "France", "A land.").render() == " France: A land."


def test_a_chain_has_one_entity_more_than_relations():
    assert Chain("c", (0, 1, 2), (5, 6)).hops == 2
    with pytest.raises(ValueError):
        Chain("c", (0, 1), (5, 6))
    with pytest.raises(ValueError):
        Chain("c", (0,), ())
