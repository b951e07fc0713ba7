"""The tensorflow-datasets builder of question sets; works without TensorFlow.

Imported only where a set is prepared: tensorflow-datasets takes half a second to import.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from absl import logging

from zest_jax.datasets.prepared import VERSION
from zest_jax.tasks.types import Task

_OWN_FIELDS = ("source_id", "evidence", "iteration", "chain_id")


class QuestionSet(  # type: ignore[call-arg]
    tfds.core.GeneratorBasedBuilder, skip_registration=True
):
    """One split of a question set, as array_record.

    The set is the dataset and the split its config, `nq/test:1.0.0`, so that splits are prepared,
    checked and replaced one by one. It is read back by tensorflow-datasets alone, without this
    class: `tfds.data_source("nq/test", split="test", data_dir=…)`.

    Args:
      dataset: name of the set; letters, digits and underscores.
      split: test, dev or train.
      tasks: its questions, in order.
      data_dir: folder of prepared sets.

    Attributes:
      failure: what `tasks` raised, if anything.

    `info.metadata` may be filled until the last task is taken, and is stored beside the questions.
    """

    VERSION = tfds.core.Version(VERSION)

    def __init__(self, dataset: str, split: str, tasks: Iterable[Task], data_dir: Path):
        self.name = dataset
        self._split, self._tasks = split, tasks
        self.failure: Exception | None = None
        super().__init__(
            config=tfds.core.BuilderConfig(name=split, version=VERSION),
            data_dir=data_dir,
            file_format="array_record",
        )

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text
        return tfds.core.DatasetInfo(
            builder=self,
            description=f"Questions of {self.name}, read from FlashRAG's JSON lines.",
            disable_shuffling=True,
            metadata=tfds.core.MetadataDict(),
            features=tfds.features.FeaturesDict(
                {
                    "id": text(),
                    "question": text(),
                    "golden_answers": tfds.features.Sequence(text()),
                    "hops": tfds.features.Scalar(np.int32),
                    "benchmark": text(),
                    "metadata": text(doc="JSON, as in the file; empty without any"),
                    "other": text(doc="JSON object: the other fields of the line"),
                }
            ),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
        del dl_manager  # nothing is downloaded
        return {self._split: self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            for row, task in enumerate(self._tasks):
                yield row, to_example(task)
        except Exception as error:  # tensorflow-datasets makes another one of it
            self.failure = error
            raise


def make(dataset: str, split: str, tasks: Iterable[Task], data_dir: Path) -> QuestionSet:
    """A builder, without absl's warning that its config is none of a fixed list."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        return QuestionSet(dataset, split, tasks, data_dir)
    finally:
        logging.set_verbosity(before)


def write(builder: QuestionSet, downloads: Path) -> None:
    """Writes a set, without what tensorflow-datasets prints.

    Raises:
      Exception: what the iterator of questions raised, as it was raised.
    """
    config = tfds.download.DownloadConfig(try_download_gcs=False, num_shards=1)
    tfds.disable_progress_bar()
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            builder.download_and_prepare(download_dir=downloads, download_config=config)
        except Exception:
            if builder.failure is not None:
                raise builder.failure from None
            raise


def open_split(folder: Path, split: str) -> Any:
    """The rows of a prepared split, a sequence for `to_task`."""
    return tfds.builder_from_directory(folder).as_data_source(split=split)


def to_example(task: Task) -> dict[str, Any]:
    """A task as it is stored; `to_task` is the way back."""
    meta = dict(task.meta)
    benchmark, metadata = meta.pop("benchmark", ""), meta.pop("metadata", "")
    plain = Task(id="", question="", answers=())
    own = {name: getattr(task, name) for name in _OWN_FIELDS}
    other = {name: value for name, value in own.items() if value != getattr(plain, name)} | meta
    return {
        "id": task.id,
        "question": task.question,
        "golden_answers": list(task.answers),
        "hops": task.hops,
        "benchmark": benchmark,
        "metadata": metadata,
        "other": json.dumps(other, ensure_ascii=False) if other else "",
    }


def to_task(example: dict[str, Any]) -> Task:
    """A stored row, whose texts are bytes, as the task that it was made of."""
    meta = {"benchmark": example["benchmark"].decode()}
    if example["metadata"]:
        meta["metadata"] = example["metadata"].decode()
    other = json.loads(example["other"]) if example["other"] else {}
    own = {name: other.pop(name) for name in _OWN_FIELDS if name in other}
    if "evidence" in own:
        own["evidence"] = tuple(own["evidence"])
    return Task(
        id=example["id"].decode(),
        question=example["question"].decode(),
        answers=tuple(answer.decode() for answer in example["golden_answers"]),
        hops=int(example["hops"]),
        meta=other | meta,
        **own,
    )
