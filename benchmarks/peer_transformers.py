"""The peer: the same training step and the same scoring in transformers on torch.

As a careful user would run it: bfloat16 autocast over float32 master weights, scaled-dot-product
attention (cuDNN or flash kernels), gradient checkpointing where asked, fused AdamW, and logits of
the whole sequence as the library computes them.

Shape letters: B batch, L length.
"""

import time
from typing import Any

import torch
import transformers

from benchmarks.harness import seconds
from benchmarks.shapes import POLICIES


def _model(name: str, dtype: Any) -> Any:
    hf = POLICIES[name].to_hf()
    hf.pop("architectures")
    config = transformers.AutoConfig.for_model(**hf)
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def train(case: dict[str, Any]) -> dict[str, Any]:
    """A full fine-tuning step, cross entropy over all tokens."""
    torch.manual_seed(0)
    # Autocast needs float32 weights to keep float32 masters; without checkpointing activations of
    # the whole model are kept.
    model = _model(case["policy"], torch.float32).train()
    model.config.use_cache = False
    if case["remat"] != "none":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.98), fused=True)
    shape = (case["rows"], case["length"])
    ids_BL = torch.randint(0, model.config.vocab_size, shape, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids_BL, labels=ids_BL).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    start = time.perf_counter()
    step()
    first = time.perf_counter() - start
    timed = seconds(step, case["steps"])
    return timed | {"first_s": first, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def score(case: dict[str, Any]) -> dict[str, Any]:
    """Mean log-probability of each context's answer, through full logits."""
    torch.manual_seed(0)
    model = _model(case["policy"], torch.bfloat16).eval()
    B, L = case["batch"], case["context"] + case["answer"]
    ids = torch.randint(0, model.config.vocab_size, (case["contexts"], L), device="cuda")

    @torch.no_grad()
    def step() -> None:
        for at in range(0, len(ids), B):
            ids_BL = ids[at : at + B]
            logits_BLV = model(input_ids=ids_BL, use_cache=False).logits
            logp = torch.log_softmax(logits_BLV[:, :-1].float(), -1)
            chosen = logp.gather(-1, ids_BL[:, 1:, None])[..., 0]
            chosen[:, -case["answer"] :].mean(1)
        torch.cuda.synchronize()

    timed = seconds(step, case["steps"])
    return timed | {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}


def rollout(case: dict[str, Any]) -> dict[str, Any]:
    """Sampling with `generate`; a turn of the search case reads everything again.

    Of a search case one batch of episodes is sampled, and only a step is run to warm up.
    """
    torch.manual_seed(0)
    model = _model(case["policy"], torch.bfloat16).eval()
    B, searching = case["slots"], case["case"] == "search"
    V = model.config.vocab_size
    if searching:
        shape = (case["passages"], case["dimension"])
        index_NE = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        passage_NP = torch.randint(0, V, (len(index_NE), case["observation"] // 3), device="cuda")
    new, episodes = case["new"], B if searching else case["episodes"]
    options = {"do_sample": True, "top_k": 0, "pad_token_id": 0}

    @torch.no_grad()
    def step(new: int = new) -> None:
        for _ in range(0, episodes, B):
            ids_BL = torch.randint(0, V, (B, case["prompt"]), device="cuda")
            for _ in range(case["turns"] + 1 if searching else 1):
                ids_BL = model.generate(ids_BL, min_new_tokens=new, max_new_tokens=new, **options)
                if searching:
                    query_BE = torch.randn(B, case["dimension"], device="cuda").bfloat16()
                    found_BR = (query_BE @ index_NE.T).topk(3).indices
                    ids_BL = torch.cat([ids_BL, passage_NP[found_BR].flatten(1)], 1)
        torch.cuda.synchronize()

    step(1)
    timed = seconds(step, 1, warm_up=0)
    turns = case["turns"] + 1 if searching else 1
    written = episodes * turns * new
    return timed | {
        "tokens_per_s": written / timed["median_s"],
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }
