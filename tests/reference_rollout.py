"""The search episode as a plain Python loop: text, regular expressions, no cache, one episode.

What the compiled rollout must reproduce id for id. Slow on purpose: every token runs the whole
sequence through the policy's training forward pass. Text is one character a byte (latin-1), so that
places in it are places in the bytes.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np

from zest_jax.models import bind

# As in `Finish` and `Role`, written out so that a change there is seen.
ANSWERED, INVALID, OUT_OF_TURNS, TOO_LONG, NO_ANSWER = range(1, 6)
PROMPT, POLICY, TOOL, INJECTED = range(1, 5)


@dataclasses.dataclass
class Reference:
    """An episode: ids with their mask, log-probabilities and roles; the queries of each search;
    how it ended."""

    ids: list
    mask: list
    logps: list
    roles: list
    queries: list = dataclasses.field(default_factory=list)
    corrections: int = 0
    finish: int = 0

    def add(self, ids, role, logps=None):
        self.ids += ids
        self.mask += [role == POLICY] * len(ids)
        self.logps += logps or [0.0] * len(ids)
        self.roles += [role] * len(ids)

    @property
    def duplicates(self):
        every = [tuple(query) for asked in self.queries for query in asked]
        return len(every) - len(set(every))


def reference_episode(
    engine, params, tokenizer, token_bytes, retrieve, prompt, key, episode, temperature
):
    """One episode. `retrieve(ids of each query) -> observation ids`."""
    spec, protocol = engine.spec, engine.protocol
    out = Reference([], [], [], [])
    out.add(list(prompt), PROMPT)
    limit = spec.response_length or spec.length
    turn = 0
    while True:
        action: list[int] = []
        while True:
            token, logp = draw(engine, params, out.ids, key, episode, temperature)
            out.add([token], POLICY, [logp])
            action.append(token)
            text = b"".join(token_bytes[t] or b"\0" for t in action).decode("latin-1")
            tags = "|".join(tag for tag, _ in protocol.actions)
            close = re.search(rf"</({tags})>", text)
            stop = token in engine.eos_ids
            full = len(action) == spec.action_length or len(out.ids) - len(prompt) >= limit
            if close or stop or full:
                break
        effect, spans = None, None
        if close:
            opened = re.search(rf"<{close[1]}>", text[: close.end()])
            if opened:
                effect = dict(protocol.actions)[close[1]]
                spans = [(opened.end(), close.start())]
        if effect == "answer":
            out.finish = ANSWERED
            return out
        may_follow = turn < spec.searches
        if effect == "search" and not may_follow:
            out.finish = OUT_OF_TURNS
            return out
        if effect == "search" and protocol.call:
            spans = json_spans(text, protocol.call, *spans[0])
            effect = "search" if spans else None
        if effect == "search":
            asked = [cut(action, token_bytes, *span) for span in spans[: spec.queries]]
            out.queries.append([query[: spec.query_length] for query in asked])
            more, role = retrieve(out.queries[-1]), TOOL
        elif protocol.correction is not None and may_follow:
            more, role = list(engine.correction_ids), INJECTED
            out.corrections += 1
            if more and more[0] == action[-1] and more[0] in engine.eos_ids:
                more = more[1:]
        else:
            out.finish = INVALID if close else NO_ANSWER if stop else TOO_LONG
            return out
        if len(out.ids) + len(more) - len(prompt) >= limit:
            out.finish = TOO_LONG
            return out
        turn += 1
        out.add(more, role)


def draw(engine, params, ids, key, episode, temperature):
    """The next token and its log-probability."""
    padded = np.zeros((1, engine.spec.length), np.int32)
    padded[0, : len(ids)] = ids
    logits = np.asarray(_last_logits(engine.config, params, padded, len(ids) - 1), np.float64)
    scaled = logits / (temperature or 1.0)
    logp = scaled - np.log(np.sum(np.exp(scaled - scaled.max()))) - scaled.max()
    u = jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, episode), len(ids)))
    cumulative = np.cumsum(np.exp(logp))
    token = int(np.sum(cumulative <= float(u) * cumulative[-1]))
    if temperature == 0:
        token = int(np.argmax(logits))
    return token, float(logp[token])


def cut(action, token_bytes, begin, end):
    """Every token with a byte inside belongs to it."""
    span, at = [], 0
    for t in action:
        size = len(token_bytes[t] or b"\0")
        if at < end and at + size > begin:
            span.append(t)
        at += size
    return span if end > begin else []


def json_spans(text, call, begin, end):
    """Where the queries stand in a call; None if it is none."""
    content = text[begin:end]
    try:
        whole = json.loads(content)
    except ValueError:
        return None
    inner = whole.get(call.argument) if isinstance(whole, dict) else None
    if not isinstance(inner, dict) or whole.get("name") != call.tool:
        return None
    keys = [key for key in call.keys if key in inner]
    if len(keys) != 1:
        return None
    wanted = [inner[keys[0]]] if isinstance(inner[keys[0]], str) else inner[keys[0]]
    if not isinstance(wanted, list) or not all(isinstance(each, str) for each in wanted):
        return None
    places = [m.span(1) for m in re.finditer(r'"((?:[^"\\]|\\.)*)"', content)]
    first = 1 + [content[a:b] for a, b in places].index(keys[0])
    return [(begin + a, begin + b) for a, b in places[first : first + len(wanted)]]


@functools.partial(jax.jit, static_argnums=0)
def _last_logits(config, params, ids, at):
    policy = bind(config, params)
    position = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    return policy.logits(policy(ids, position)[0, at])
