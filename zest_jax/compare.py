"""How a solver's behaviour differs between two evaluations of the same questions.

    python -m zest_jax.compare runs/search_r1 runs/eviback --out=behaviour.json
    python -m zest_jax.compare before.jsonl after.jsonl

BEFORE and AFTER are each a run's folder (its latest evaluation), a file of its evaluation/, or a
file of `zest_jax.evaluate --out`. Valid answers, searches, repeated queries, forced stops, exact
match and F1 of both, each difference with a paired 95 % bootstrap interval over the questions, and
the questions that became right (rescued) or wrong (regressed). --out gets it all as JSON, --html a
page. Where files hold several answers to a question, a measure is their mean.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from zest_jax import behaviour, cli
from zest_jax.columns import in_columns
from zest_jax.errors import UserError
from zest_jax.files import check_writable
from zest_jax.workdir import write_atomically

_MODES = ("greedy", "sampled")


def main(config: Any, workdir: str | None, values: flags.FlagValues) -> None:
    if config is not None or workdir is not None:
        raise UserError("two evaluations are compared: write BEFORE AFTER, each a file or a run.")
    if not (values.before and values.after):
        raise UserError("two evaluations are compared; name both: BEFORE AFTER.")
    if values.mode not in _MODES:
        raise UserError(f"--mode is {' or '.join(_MODES)}, not {values.mode!r}.")
    if values.draws < 1 or values.shown < 0:
        raise UserError("--draws is 1 or more and --shown 0 or more.")
    for name in (values.out, values.html):
        if name:
            check_writable(Path(name))
    before, after = (
        behaviour.read_answers(path, values.mode) for path in (values.before, values.after)
    )
    told = behaviour.compare(before, after, values.draws)
    told = {"from": {"before": values.before, "after": values.after}, "mode": values.mode} | told
    if values.out:
        text = json.dumps(told, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
        write_atomically(Path(values.out), text)
    if values.html:
        from zest_jax.evaluation_page import render  # which imports this file's table

        page = render({"comparison": {"before": f"{values.before} → {values.after}"} | told})
        write_atomically(Path(values.html), page)
    print(table(told))
    for name in ("rescued", "regressed"):
        print(f"\n{name}: {told[name]['count']:,}")
        for line in questions(told[name]["questions"], values.shown):
            print(f"  {line}")


def table(told: Mapping[str, Any]) -> str:
    """The figures of `behaviour.compare` in columns."""
    return in_columns(rows(told), "lr")


def rows(told: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The figures of `behaviour.compare` as a table, its head first."""
    out: list[tuple[str, ...]] = [
        (f"{told['count']:,} questions", "before", "after", "difference", "95 % interval")
    ]
    for figure in told["figures"].values():
        interval = figure["ci95"]
        out.append(
            (
                figure["title"],
                _number(figure["before"]),
                _number(figure["after"]),
                _number(figure["difference"], sign=True),
                f"{interval[0]:+.3f} to {interval[1]:+.3f}" if interval else "–",
            )
        )
    return out


def questions(changed: Sequence[Mapping[str, Any]], most: int) -> list[str]:
    """A line for each of the first `most` questions, and one for the rest."""
    lines = [
        f"{each['question']}  {each['before']!r} -> {each['after']!r}, "
        f"right: {' / '.join(each['golden_answers'])}"
        for each in changed[:most]
    ]
    return lines + ([f"… and {len(changed) - most:,} more"] if len(changed) > most else [])


def _number(value: float | None, sign: bool = False) -> str:
    return "–" if value is None else f"{value:{'+' if sign else ''}.3f}"


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("before", "", "a file of answers or a run; may stand first, bare", values)
    flags.DEFINE_string("after", "", "the other; may stand second, bare", values)
    flags.DEFINE_string("mode", "greedy", f"answers of a run: {' or '.join(_MODES)}", values)
    flags.DEFINE_integer("draws", 10_000, "of the bootstrap", flag_values=values)
    flags.DEFINE_integer("shown", 10, "changed questions told of each kind", flag_values=values)
    flags.DEFINE_string("out", "", "a JSON file that gets everything", values)
    flags.DEFINE_string("html", "", "a page of the same", values)


entry = cli.program(
    main,
    define=define,
    needs_config=False,
    needs_workdir=False,
    arguments=("before", "after"),
)

if __name__ == "__main__":
    sys.exit(entry())
