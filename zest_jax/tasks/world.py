"""Where a run happens: a corpus, the questions that measure a solver, and, for small worlds, the
facts behind the corpus."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from zest_jax.tasks.atlas import Atlas
from zest_jax.tasks.names import name_key
from zest_jax.tasks.types import Passage, Task


@dataclass(frozen=True)
class World:
    """A corpus and its questions.

    Attributes:
      name: for people.
      passages: the corpus in row order; () where only a server has it.
      heldout_tasks: questions that a solver is measured by.
      validation_tasks: questions that a warm start is stopped by.
      atlas: the world's facts, where it has them.
    """

    name: str
    passages: Sequence[Passage]
    heldout_tasks: tuple[Task, ...]
    validation_tasks: tuple[Task, ...] = ()
    atlas: Atlas | None = None

    @classmethod
    def of_atlas(cls, atlas: Atlas) -> "World":
        """The world that a folder of entities, triples and passages describes."""
        return cls(
            atlas.folder.name,
            atlas.passages,
            atlas.heldout_tasks,
            atlas.validation_tasks,
            atlas,
        )

    @cached_property
    def evaluated_sources(self) -> frozenset[str]:
        """Source ids of all questions that measure a solver: nothing is trained on them."""
        tasks = (*self.heldout_tasks, *self.validation_tasks)
        return frozenset(task.source_id for task in tasks if task.source_id)

    @cached_property
    def _evaluated_questions(self) -> frozenset[str]:
        tasks = (*self.heldout_tasks, *self.validation_tasks)
        return frozenset(name_key(task.question) for task in tasks)

    def evaluates(self, question: str) -> bool:
        """Whether a solver is measured by a question: without regard to case, accents and
        punctuation."""
        return name_key(question) in self._evaluated_questions
