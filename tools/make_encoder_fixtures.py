"""Builds tests/fixtures/encoders: tiny random text encoders, and the vectors torch makes with them.

Needs torch, transformers and sentence-transformers (none a dependency of this project), so the
results are kept in git:

    python tools/make_encoder_fixtures.py tests/fixtures/encoders

Each encoder is a folder with its tokenizer, and `expected.npz` beside the weights: vectors of token
ids in a padded batch by transformers, and of texts by sentence-transformers.

Shape letters: B batch, L length, N texts, D width.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_parity_fixtures import randomise
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

WIDTH, HEADS, MLP, LONGEST = 32, 4, 40, 40
END = "<|endoftext|>"
TASK = "Given a web search query, retrieve relevant passages that answer the query"
CUT = 12
TEXTS = [
    "who wrote the play about a prince of Denmark?",
    "Hamlet is a tragedy written by William Shakespeare.",
    "a",
    "",
    "  Naïve café, 東京 — ok!  ",
    "query: passage: the the the",
    "the river and the town and the bridge " * 12,
    "Hamlet",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    e5(folder / "e5", seed=1)
    minilm(folder / "minilm", seed=2)
    qwen3_embedding(folder / "qwen3_embedding", seed=3)


def e5(folder: Path, seed: int) -> None:
    """A BertModel as sentence-transformers writes it today, with E5's prompts."""
    network = bert("BertModel", seed, layers=3)
    prompts = {"query": "query: ", "document": "passage: "}
    pipeline(folder, network, word_pieces(), "mean", prompts)
    finish(folder, network, lambda hidden, mask: mean(hidden, mask))


def minilm(folder: Path, seed: int) -> None:
    """A BERT with heads, so with prefixed names, bfloat16, and the settings files of 2021."""
    network = bert("BertForMaskedLM", seed, layers=2, hidden_act="gelu", type_vocab_size=3)
    for p in network.parameters():
        p.data = p.data.to(torch.bfloat16).float()
    pipeline(folder, network.bert, word_pieces(), "mean", {})
    network.to(torch.bfloat16)
    state = {k: v.contiguous() for k, v in network.state_dict().items() if "decoder" not in k}
    state["bert.embeddings.position_ids"] = torch.arange(LONGEST)[None]
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors", {"format": "pt"})
    network.float()
    write(
        folder / "modules.json",
        [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(
                [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
            )
        ],
    )
    write(
        folder / "1_Pooling" / "config.json",
        {
            "word_embedding_dimension": WIDTH,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    write(folder / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": False})
    write(folder / "config_sentence_transformers.json", {"__version__": {"pytorch": "1.8.1"}})
    finish(folder, network.bert, lambda hidden, mask: mean(hidden, mask))


def qwen3_embedding(folder: Path, seed: int) -> None:
    """A Qwen3Model: names without "model.", an end token by the tokenizer, an instruction."""
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=MLP,
        max_position_embeddings=256,
        tie_word_embeddings=False,  # there is no head at all
        bos_token_id=None,
        eos_token_id=0,
    )
    torch.manual_seed(seed)
    network = transformers.Qwen3Model(config).eval()
    randomise(network)
    prompts = {"query": f"Instruct: {TASK}\nQuery:", "document": ""}
    pipeline(folder, network, byte_pieces(), "lasttoken", prompts)
    finish(folder, network, lambda hidden, mask: hidden[torch.arange(len(mask)), mask.sum(1) - 1])


def bert(kind: str, seed: int, *, layers: int, **fields: Any) -> Any:
    config = transformers.BertConfig(
        vocab_size=len(word_pieces()),
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=MLP,
        max_position_embeddings=LONGEST,
        **fields,
    )
    torch.manual_seed(seed)
    network = getattr(transformers, kind)(config).eval()
    randomise(network)
    return network


def mean(hidden_BLD: torch.Tensor, mask_BL: torch.Tensor) -> torch.Tensor:
    return (hidden_BLD * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdim=True)


def pipeline(
    folder: Path, network: Any, tokenizer: Any, pooling: str, prompts: dict[str, str]
) -> None:
    """Writes the folder: the network, its tokenizer, and the settings of sentence-transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.rglob("*"):
        if old.is_file():
            old.unlink()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    whole = SentenceTransformer(
        modules=[Transformer(str(folder)), Pooling(WIDTH, pooling), Normalize()],
        prompts=prompts,
    )
    whole.save(str(folder), create_model_card=False)


def finish(folder: Path, network: Any, pool: Any) -> None:
    """Writes what torch computes: of ids in a padded batch, and of texts."""
    rng = np.random.default_rng(5)
    length_B = np.array([24, 9, 1, 17])
    ids_BL = rng.integers(0, network.config.vocab_size, (4, 24))
    mask_BL = torch.tensor(np.arange(24)[None] < length_B[:, None]).long()
    with torch.no_grad():
        hidden = network(torch.tensor(ids_BL), attention_mask=mask_BL).last_hidden_state
        vector_BD = torch.nn.functional.normalize(pool(hidden, mask_BL), dim=1).numpy()
    whole = SentenceTransformer(str(folder), device="cpu")
    cut = whole.encode_document(TEXTS, truncate_dim=CUT, normalize_embeddings=True)
    np.savez_compressed(
        folder / "expected.npz",
        ids=ids_BL.astype(np.int16),
        length=length_B.astype(np.int16),
        vectors=vector_BD,
        texts=np.array(json.dumps(TEXTS)),
        query=whole.encode_query(TEXTS),
        passage=whole.encode_document(TEXTS),
        cut=cut,
    )
    (folder / "model.safetensors").chmod(0o644)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    near = np.sort((vector_BD @ vector_BD.T)[np.triu_indices(4, 1)])
    print(f"{folder.name}: {size / 1e3:.0f} kB, cosines {near[0]:.2f} to {near[-1]:.2f}")


def word_pieces() -> Any:
    """A lower-casing WordPiece with [CLS] and [SEP], as BERT's."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    words.normalizer = normalizers.BertNormalizer(lowercase=True)
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=150, special_tokens=special, show_progress=False, min_frequency=1
    )
    words.train_from_iterator([*TEXTS, "abcdefghijklmnopqrstuvwxyz query passage"], trainer)
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(t, words.token_to_id(t)) for t in ("[CLS]", "[SEP]")],
    )
    words.decoder = decoders.WordPiece()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=LONGEST,
    )


def byte_pieces() -> Any:
    """A byte-level BPE that ends every text with the end token, as Qwen3-Embedding's."""
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    pieces.train_from_iterator([*TEXTS, TASK], trainer)
    pieces.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, pieces.token_to_id(END))]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=pieces, eos_token=END, pad_token=END, model_max_length=96
    )


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    main()
