"""Writes the atlas's reference questions: templates of training chains, without their answers.

PYTHONPATH=. python tools/make_references.py
"""

import json

import numpy as np

from zest_jax.tasks.atlas import load_atlas
from zest_jax.tasks.templates import nested_question

COUNT, SEED = 500, 20261202


def main() -> None:
    atlas, rng = load_atlas(), np.random.default_rng(SEED)
    chains = [c for hops in (1, 2, 3) for c in atlas.sample_chains(hops, COUNT // 2, rng)]
    questions = dict.fromkeys(nested_question(chain, atlas, rng) for chain in chains)
    chosen = [list(questions)[i] for i in rng.permutation(len(questions))[:COUNT]]
    with (atlas.folder / "references.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for number, question in enumerate(chosen):
            record = {"id": f"reference-{number:03}", "question": question}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
