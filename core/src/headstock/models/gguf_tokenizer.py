"""The tokenizer a GGUF file describes, rebuilt with the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from headstock.errors import ModelError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # of `tokenizer.ggml.token_type`

# How text is cut before byte pairs are merged, by `tokenizer.ggml.pre`, as the tokenizer.json of each model has it.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
PATTERNS = {"llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2}
WHOLE_TOKENS_FIRST = {"llama-bpe", "llama3", "llama-v3"}  # a word that is a token is not merged anew; BOS by default
BYTE_LEVEL = {"gpt-2", "default", "smollm"}
COMPLETE = "a complete GGUF file, or the model's Hugging Face folder"


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """The BPE tokenizer of a GGUF file's metadata, byte-level or SentencePiece's; raises ModelError for other kinds."""
    kind, pre = metadata.get("tokenizer.ggml.model"), str(metadata.get("tokenizer.ggml.pre", "default"))
    if kind not in ("gpt2", "llama"):
        works = "a GGUF file with a BPE tokenizer (gpt2, llama), or the model's Hugging Face folder"
        raise ModelError("this GGUF tokenizer is not supported", given=f"tokenizer.ggml.model={kind!r}", works=works)
    tokenizer = _sentence_piece(metadata) if kind == "llama" else _byte_level(metadata, pre)
    tokens = _listed(metadata, "tokens", str)
    _add_tokens(tokenizer, tokens, _listed(metadata, "token_type", int, []))
    _add_bos_and_eos(tokenizer, metadata, tokens, bos_by_default=kind == "llama" or pre in WHOLE_TOKENS_FIRST)
    return tokenizer


def tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    """What belongs into `tokenizer_config.json` beside the tokenizer: the special tokens and the chat template."""
    tokens = _listed(metadata, "tokens", str)
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: _token_id(metadata, key, tokens) for role, key in roles.items()}
    config: dict[str, Any] = {role: tokens[index] for role, index in ids.items() if index is not None}
    if template := metadata.get("tokenizer.chat_template"):
        if not isinstance(template, str):
            raise ModelError("tokenizer.chat_template of this GGUF file is no text", given=f"{template!r:.80}")
        config["chat_template"] = template
    return {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}


def _byte_level(metadata: dict[str, Any], pre: str) -> Tokenizer:
    """Pairs of byte-level tokens merge in the order of the file's list, within words cut as `pre` says."""
    if pre not in PATTERNS and pre not in BYTE_LEVEL:
        works = ", ".join([*PATTERNS, *sorted(BYTE_LEVEL)])
        raise ModelError("this GGUF pre-tokenizer is not supported", given=f"tokenizer.ggml.pre={pre!r}", works=works)
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in _listed(metadata, "merges", str))]
    tokenizer = Tokenizer(_byte_pairs(metadata, merges, ignore_merges=pre in WHOLE_TOKENS_FIRST))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if PATTERNS.get(pre) == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentence_piece(metadata: dict[str, Any]) -> Tokenizer:
    """Neighbours that together are a token merge, those of the highest score first; what is no token goes by bytes."""
    tokens, scores = _listed(metadata, "tokens", str), _listed(metadata, "scores", int | float)
    types = _listed(metadata, "token_type", int, []) or [NORMAL] * len(tokens)
    scored = zip(tokens, scores, types, strict=False)
    normal = {token: score for token, score, kind in scored if kind == NORMAL}
    halves = [(token[:at], token[at:]) for token in normal for at in range(1, len(token))]
    merges = [(left, right) for left, right in halves if left in normal and right in normal]
    merges.sort(key=lambda pair: -normal[pair[0] + pair[1]])
    unknown = tokens[_token_id(metadata, "unknown", tokens) or 0]
    tokenizer = Tokenizer(_byte_pairs(metadata, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Prepend("▁")] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", "▁")])
    stripped = [decoders.Strip(" ", 1, 0)] if prefixed else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _listed(metadata: dict[str, Any], name: str, kind: Any, default: list[Any] | None = None) -> list[Any]:
    """A list of values of one kind, which may be empty or left out only where there is a default."""
    found = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(found, list) or not (found or found == default) or not all(isinstance(v, kind) for v in found):
        raise ModelError(f"this GGUF tokenizer cannot be rebuilt: it has no {name}", works=COMPLETE)
    return found


def _token_id(metadata: dict[str, Any], role: str, tokens: Sequence[str]) -> int | None:
    """The token that has a role, None where none has."""
    index = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if index is None or (type(index) is int and 0 <= index < len(tokens)):
        return index
    what = f"this GGUF tokenizer cannot be rebuilt: its {role}_token_id is no token"
    raise ModelError(what, given=f"{index!r:.80}", works=f"0…{len(tokens) - 1}")


def _byte_pairs(metadata: dict[str, Any], merges: Sequence[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        vocab = {token: index for index, token in enumerate(_listed(metadata, "tokens", str))}
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises plain Exception for merges that do not fit the vocabulary
        raise ModelError(f"this GGUF tokenizer cannot be rebuilt: {error}", works=COMPLETE) from None


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
        index = _token_id(metadata, end, tokens)
        if index is not None and metadata.get(f"tokenizer.ggml.add_{end}_token", default):
            template.insert(0 if end == "bos" else len(template), tokens[index])
            special.append((tokens[index], index))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
