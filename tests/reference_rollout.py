"""The search episode as a plain Python loop: text, regular expressions, no cache, one episode.

What the compiled rollout must reproduce id for id. Slow on purpose: every token runs the whole
sequence through the policy's training forward pass.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.models import bind


def reference_episode(
    engine, params, tokenizer, token_bytes, retrieve, prompt, key, episode, temperature
):
    """One episode. `retrieve(query ids) -> observation ids`; returns ids, mask, log-probs,
    finish."""
    spec, protocol = engine.spec, engine.protocol
    ids, mask, logps = list(prompt), [False] * len(prompt), [0.0] * len(prompt)
    searches, turn = 0, 0
    queries = []
    while True:
        action: list[int] = []
        while True:
            padded = np.zeros((1, spec.length), np.int32)
            padded[0, : len(ids)] = ids
            logits = _last_logits(engine.config, params, padded, len(ids) - 1)
            logits = np.asarray(logits, np.float64)
            scaled = logits / (temperature or 1.0)
            logp = scaled - np.log(np.sum(np.exp(scaled - scaled.max()))) - scaled.max()
            u = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, episode), len(ids)))
            cumulative = np.cumsum(np.exp(logp))
            token = int(np.sum(cumulative <= float(u) * cumulative[-1]))
            if temperature == 0:
                token = int(np.argmax(logits))
            ids.append(token)
            mask.append(True)
            logps.append(float(logp[token]))
            action.append(token)
            text = b"".join(token_bytes[t] or b"\0" for t in action)
            tags = "|".join(tag for tag, _ in protocol.actions)
            close = re.search(rf"</({tags})>".encode(), text)
            if close or token in engine.eos_ids or len(action) == spec.action_length:
                break
        effect, content = None, None
        if close:
            tag = close.group(1)
            opened = re.search(rb"<" + tag + rb">", text[: close.end()])
            if opened:
                effect = dict(protocol.actions)[tag.decode()]
                content = (opened.end(), close.start())
        if effect == "answer":
            return ids, mask, logps, 1, searches, queries
        if effect == "search" and turn < spec.searches:
            span, at = [], 0
            for t in action:
                size = len(token_bytes[t] or b"\0")
                # Every token with a byte inside the query belongs to it.
                if at < content[1] and at + size > content[0]:
                    span.append(t)
                at += size
            queries.append(span)
            more = retrieve(span[: spec.query_length])
            searches += 1
        elif effect == "search":
            return ids, mask, logps, 3, searches, queries
        elif engine.correction_ids and turn < spec.searches:
            more = list(engine.correction_ids)
        else:
            finish = 2 if close else 5 if token in engine.eos_ids else 4
            return ids, mask, logps, finish, searches, queries
        turn += 1
        ids += more
        mask += [False] * len(more)
        logps += [0.0] * len(more)


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(config, params, ids, at):
    policy = bind(config, params)
    position = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return policy.logits(policy(ids, position)[0, at])
