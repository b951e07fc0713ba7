"""What takes the place of refused proposals."""

import numpy as np
import pytest
from written import CONFIG

from zest_jax.errors import UserError
from zest_jax.tasks.refill import REFILLS, Pool, Shelf
from zest_jax.tasks.types import Task


def task(n):
    return Task(f"t{n}", f"Question {n}?", (f"answer {n}",))


def shelf(pool=None, more=lambda count, attempt: [], labelled=(), **options):
    chosen = CONFIG.refill.copy_and_resolve_references()
    chosen.update(options)
    return Shelf(chosen, more, pool or Pool(), labelled, np.random.default_rng(0))


def test_none_and_dummy_leave_slots_empty():
    assert REFILLS.find("none")(3, shelf()) == [] == REFILLS.find("dummy")(3, shelf())
    with pytest.raises(UserError, match="no refill rule 'nothing'"):
        REFILLS.find("nothing")


def test_resampling_tries_so_many_times():
    asked = []

    def more(count, attempt):
        asked.append((count, attempt))
        return [task(len(asked))]

    assert [t.id for t in REFILLS.find("resample")(2, shelf(more=more))] == ["t1", "t2"]
    assert asked == [(2, 0), (1, 1)]
    asked.clear()
    assert len(REFILLS.find("resample")(9, shelf(more=more, rounds=2))) == 2
    assert REFILLS.find("resample")(0, shelf(more=more)) == [] and len(asked) == 2


def test_replay_takes_hard_questions_once_each():
    pool = Pool()
    for n, success in enumerate([0.0, 0.4, 1.0, 0.2]):
        pool.add(task(n), success)
    pool.add(task(1), 0.6)  # asked again: no second copy, and the newer rate
    assert len(pool.tasks) == 4
    drawn = REFILLS.find("replay")(9, shelf(pool, most_success=0.5))
    assert sorted(t.id for t in drawn) == ["t0", "t3"]
    assert len(REFILLS.find("replay")(3, shelf(pool))) == 3
    assert REFILLS.find("replay")(3, shelf()) == []


def test_a_pool_survives_a_checkpoint():
    pool = Pool()
    pool.add(task(1), 0.25)
    again = Pool.from_json(pool.to_json())
    assert again.tasks == pool.tasks


def test_labelled_questions_fill_up():
    labelled = [task(n) for n in range(5)]
    drawn = REFILLS.find("seed")(3, shelf(labelled=labelled))
    assert len({t.id for t in drawn}) == 3 and set(drawn) <= set(labelled)
