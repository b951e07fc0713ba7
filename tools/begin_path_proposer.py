"""Writes where `path_proposer` began: a Qwen2-shaped policy of random weights, with a tokenizer of
its own.

    python tools/begin_path_proposer.py FOLDER

The tokenizer is made like the atlas's, from the same texts, with fewer entries, so that the same
word has other ids.
"""

import sys
import tempfile
from pathlib import Path

import jax
from atlas_tokenizer import write_tokenizer

from zest_jax.models import PolicyConfig, init_params
from zest_jax.models.hf import read_tokenizer, save_pretrained
from zest_jax.tasks.atlas import load_atlas

VOCABULARY = 768


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        write_tokenizer(Path(temporary), load_atlas(), VOCABULARY, seed=1)
        tokenizer = read_tokenizer(temporary)
        policy = PolicyConfig(
            vocab_size=len(tokenizer),
            width=96,
            layers=4,
            heads=3,
            kv_heads=1,
            head_dim=32,
            mlp_width=256,
            qkv_bias=True,
            qk_norm=False,
        )
        params = jax.device_get(init_params(policy, jax.random.key(0)))
        save_pretrained(policy, params, folder, tokenizer)


if __name__ == "__main__":
    main(sys.argv[1])
