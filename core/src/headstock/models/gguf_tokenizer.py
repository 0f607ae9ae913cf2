"""The tokenizer a GGUF file describes, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headstock.errors import ModelError

CONTROL, USER_DEFINED = 3, 4  # of `tokenizer.ggml.token_type`

# How text is cut before byte pairs are merged, by `tokenizer.ggml.pre`, as the tokenizer.json of each model has it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PATTERNS = {"llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2}
WHOLE_TOKENS_FIRST = {"llama-bpe", "llama3", "llama-v3"}  # a word that is a token is not merged anew; BOS by default
BYTE_LEVEL = {"gpt-2", "default", "smollm"}


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """A byte-level BPE tokenizer from a GGUF file's metadata; raises ModelError for other kinds of tokenizer."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        works = "a GGUF file with a byte-level BPE tokenizer (gpt2), or the model's Hugging Face folder"
        raise ModelError("this GGUF tokenizer is not supported", given=f"tokenizer.ggml.model={kind!r}", works=works)
    if pre not in PATTERNS and pre not in BYTE_LEVEL:
        works = ", ".join([*PATTERNS, *sorted(BYTE_LEVEL)])
        raise ModelError("this GGUF pre-tokenizer is not supported", given=f"tokenizer.ggml.pre={pre!r}", works=works)
    tokenizer = Tokenizer(_byte_pairs(metadata, ignore_merges=pre in WHOLE_TOKENS_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if PATTERNS.get(pre) == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokens = metadata["tokenizer.ggml.tokens"]
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    _add_bos_and_eos(tokenizer, metadata, tokens, bos_by_default=pre in WHOLE_TOKENS_FIRST)
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """What belongs into `tokenizer_config.json` beside the tokenizer: the special tokens and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: metadata.get(f"tokenizer.ggml.{key}_token_id") for role, key in roles.items()}
    config: dict[str, Any] = {role: tokens[index] for role, index in ids.items() if index is not None}
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}


def _byte_pairs(metadata: dict[str, Any], ignore_merges: bool) -> models.BPE:
    try:
        vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
        merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises plain Exception for merges that do not fit the vocabulary
        works = "a complete GGUF file, or the model's Hugging Face folder"
        raise ModelError(f"this GGUF tokenizer cannot be rebuilt: {error}", works=works) from None


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in PATTERNS:
        split = pre_tokenizers.Split(Regex(PATTERNS[pre]), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":  # every digit on its own, the space before it too
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Mark the tokens that text is searched for before it is split: control tokens, and those a user defined."""
    pairs = list(zip(tokens, types, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(t, normalized=False, special=True) for t, kind in pairs if kind == CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, kind in pairs if kind == USER_DEFINED])


def _add_bos_and_eos(tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], bos_by_default: bool) -> None:
    """Put the tokens around every text that the file asks for."""
    template, special = ["$A"], []
    for end, default in (("bos", bos_by_default), ("eos", False)):
        index = metadata.get(f"tokenizer.ggml.{end}_token_id")
        if index is not None and metadata.get(f"tokenizer.ggml.add_{end}_token", default):
            template.insert(0 if end == "bos" else len(template), tokens[index])
            special.append((tokens[index], index))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
