"""The seven question sets that the papers evaluate on, and what is published of them.

Search-R1 asks each set's test split if it has one, else its dev split, else its train split: 51,713
questions in all. It trains on the train splits of NQ and HotpotQA, 169,615 questions.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from zest_jax.errors import UserError

SPLITS = ("test", "dev", "train")  # in the order in which Search-R1 looks for one to evaluate on


@dataclass(frozen=True)
class Benchmark:
    """A question set.

    Attributes:
      name: its key, also the name of its folder among FlashRAG's data sets.
      title: as papers write it.
      evaluated: the split that Search-R1's rule leads to, given the files that FlashRAG offers.
      rows: published number of questions of a split; a split that is not here has none.
      aliases: other spellings that people use, in lower case.
      hops: hops of every question where the set was made so; 0 where rows differ or do not tell.
      dataset: its name for tensorflow-datasets, which must begin with a letter; "" is `name`.
    """

    name: str
    title: str
    evaluated: str
    rows: dict[str, int] = field(default_factory=dict, hash=False)
    aliases: tuple[str, ...] = ()
    hops: int = 0
    dataset: str = ""

    @property
    def folder(self) -> str:
        """Its folder among prepared sets."""
        return self.dataset or self.name


# Row counts as FlashRAG publishes them and Search-R1 uses them. The hops of Bamboogle are 2 because
# its questions were written so; those of the other three are in each row's metadata.
BENCHMARKS = {
    b.name: b
    for b in (
        Benchmark(
            "nq", "NQ", "test", {"train": 79_168, "dev": 8_757, "test": 3_610},
            ("natural_questions", "naturalquestions"), hops=1,
        ),
        Benchmark(
            "triviaqa", "TriviaQA", "test", {"train": 78_785, "dev": 8_837, "test": 11_313},
            ("trivia_qa", "tqa"), hops=1,
        ),
        Benchmark("popqa", "PopQA", "test", {"test": 14_267}, ("pop_qa",), hops=1),
        Benchmark(
            "hotpotqa", "HotpotQA", "dev", {"train": 90_447, "dev": 7_405},
            ("hotpot_qa", "hotpot"),
        ),
        Benchmark(
            "2wikimultihopqa", "2WikiMultihopQA", "dev", {"train": 15_000, "dev": 12_576},
            ("2wiki", "2wikimqa", "2wikimultihop", "2wiki_multihop_qa", "two_wiki_multihop_qa"),
            dataset="two_wiki_multihop_qa",
        ),
        Benchmark("musique", "MuSiQue", "dev", {"train": 19_938, "dev": 2_417}),
        Benchmark("bamboogle", "Bamboogle", "test", {"test": 125}, hops=2),
    )
}  # fmt: skip

TRAINED_ON = ("nq", "hotpotqa")  # Search-R1's training questions: their train splits


def evaluated_rows() -> int:
    """Number of questions of all evaluated splits, 51,713."""
    return sum(b.rows[b.evaluated] for b in BENCHMARKS.values())


def find(name: str) -> Benchmark | None:
    """The set of a name or an alias, whatever its case; None if it is none of the seven."""
    wanted = name.strip().lower().replace("-", "_")
    for benchmark in BENCHMARKS.values():
        if wanted in (benchmark.name, *benchmark.aliases):
            return benchmark
    return None


def rule(splits: Container[str]) -> str:
    """The split that Search-R1 evaluates on of those that there are; "" if there is none."""
    return next((split for split in SPLITS if split in splits), "")


def check_split(split: str) -> str:
    """The split itself.

    Raises:
      UserError: it is none of test, dev and train.
    """
    if split not in SPLITS:
        raise UserError(f"there is no split {split!r}; a set has {', '.join(SPLITS)}.")
    return split
