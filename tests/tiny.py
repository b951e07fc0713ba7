"""Small things that several tests need: a tokenizer, random policies, a world to search in."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
import transformers

from zest_jax.models import PolicyConfig, bind, param_shapes
from zest_jax.retrieval import Retriever
from zest_jax.rollout.engine import Engine
from zest_jax.rollout.sampling import Draws

_TAG_NAMES = ("think", "search", "information", "question", "answer")
TAGS = [f"<{slash}{tag}>" for tag in _TAG_NAMES for slash in ("", "/")]


@functools.cache
def tokenizer(
    tags_as_tokens: bool = True, more: tuple[str, ...] = (), special: tuple[str, ...] = ()
) -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE with few merges; with the tags as single tokens, or split into several;
    with more tokens, and special ones."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = tokenizers.normalizers.NFC()
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    text = "the search answer information question think >x </s </search><answer> a> </answer>."
    model.train_from_iterator([text] * 9, trainer)
    if tags_as_tokens:
        model.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in TAGS])
    model.add_tokens([tokenizers.AddedToken(t, normalized=False) for t in more])
    model.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )


def encode(texts):
    """Token ids of texts."""
    return tokenizer()(list(texts), add_special_tokens=False)["input_ids"] if texts else []


def shape(vocab_size, **fields):
    """The shape of a policy of two small layers."""
    sizes = {"width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 8, "mlp_width": 48}
    return PolicyConfig(**({"vocab_size": vocab_size, "tied": False} | sizes | fields))


def policy(vocab_size, seed=0, **fields):
    """A random policy in which every token looks hard at those before it: config and parameters.

    At the usual scale of initialisation a block hardly changes what passes through it, and a test
    would not see which tokens it looked at. (And numpy draws without compiling anything.)
    """
    config = shape(vocab_size, **fields)
    return config, random_params(config, seed, block_scale=0.15)


def random_params(config, seed, block_scale=0.02):
    """Normal weights from numpy: embedding and head of scale 0.2, norms 1, biases 0."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        name = path[-1].key
        scale = block_scale if len(path) > 1 else 0.2
        if "norm" in name or "bias" in name:
            return jnp.full(leaf.shape, float("norm" in name), jnp.float32)
        return jnp.asarray(scale * rng.normal(size=leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, param_shapes(config))


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, ids_1L):
    model = bind(config, params)
    position_1L = jnp.arange(ids_1L.shape[1])[None]
    return model.logits(model(ids_1L, position_1L))[0]


def log_probs(config, params, ids, length):
    """Log-softmax [L, V] of one sequence's plain forward pass; row t is about token t + 1.

    The sequence is padded to `length`, so that sequences of all lengths share one program.
    """
    padded_1L = np.zeros((1, length), np.int32)
    padded_1L[0, : len(ids)] = ids
    logits = np.asarray(_logits(config, params, padded_1L), np.float64)[: len(ids)]
    highest = logits.max(axis=1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))


def target_log_probs(config, params, item, length):
    """Log-probability of each target of an item, from a forward pass of the item alone."""
    rows = log_probs(config, params, item.ids, length)
    return np.array([rows[t - 1, item.ids[t]] for t in item.targets])


TAG_LIKES = {"<search>": 1.3, "</search>": 1.0, "<answer>": 1.1, "</answer>": 1.0}


def search_world(likes=TAG_LIKES, more=(), special=()):
    """A random policy that likes tags, and a handful of passages:
    (tokenizer, config, params, titles, texts)."""
    words = tokenizer(more=tuple(more), special=tuple(special))
    config = shape(len(words))
    params = random_params(config, seed=3)
    # A random policy almost never writes a tag: give every state a constant part (feature 0) and
    # the head a preference of the tags for it.
    tags = words.convert_tokens_to_ids(list(likes))
    embed, head = np.array(params["embed_VD"]), np.array(params["head_DV"])
    embed[:, 0] = 1.0
    head[0, tags] = list(likes.values())
    params |= {"embed_VD": jnp.asarray(embed), "head_DV": jnp.asarray(head)}
    titles = ["ab", "cd", "ef", "gh", "ij"]
    texts = ["x y z", "one two", "a longer text about cd and ef", "q", "see ab"]
    return words, config, params, titles, texts


@functools.cache
def _rollout(engine):
    return jax.jit(engine.rollout)


def roll_out(world, protocol, spec, prompts, temperature, top_k=2, seed=7):
    """Compiled episodes in a `search_world`: (engine, retriever, draws, trajectories, counters)."""
    words, config, params, titles, texts = world
    engine = Engine.build(config, spec, protocol, words)
    retriever = Retriever.build(
        words,
        titles,
        texts,
        layout=protocol.layout,
        retrieved=top_k,
        observation_length=spec.observation_length,
        queries=spec.queries,
    )
    padded = np.zeros((len(prompts), spec.prompt_length), np.int32)
    for row, ids in zip(padded, prompts, strict=True):
        row[: len(ids)] = ids
    length = np.array([len(p) for p in prompts], np.int32)
    draws = Draws(jax.random.key(seed), jnp.float32(temperature))
    table = engine.stop_table(words)
    got, counters = _rollout(engine)(params, table, retriever, padded, length, draws)
    return engine, retriever, draws, got.to_host(), counters
