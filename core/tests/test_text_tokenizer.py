"""The tokenizer of a Hugging Face folder against `transformers.AutoTokenizer` on the same folder."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from headstock.engine.sampling import SamplingParams
from headstock.engine.tokenizer import Tokenizer
from headstock.errors import ModelError, RequestError

SPECIAL = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|header|>"]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}\n{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """\
{{- bos_token }}
{%- if tools is not none %}
    {{- raise_exception("no tools here") }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'stop' %}{%- break %}{%- endif %}
    {{- '<|header|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant\\n\\n' }}
{%- endif %}
"""
FEATURES = """\
{% set ns = namespace(count=0) %}
  {% for message in messages %}
    {% set ns.count = ns.count + 1 %}
    {{ ns.count }} {{ message | tojson }} {{ message | tojson(indent=2) }} {{ strftime_now('%Y') }}
    {% generation %}{{ message.content }}{% endgeneration %}
    {{ message.missing }}
  {% endfor %}
{{ eos_token }}{{ pad_token }}
"""
CHAT = [
    {"role": "system", "content": "You are <terse> & polite."},
    {"role": "user", "content": "  Wie spät ist es? 🙂 <|begin|>"},
    {"role": "assistant", "content": "Noon."},
    {"role": "stop", "content": "…"},
]


def vocabulary(adds_bos: bool = False) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["system user assistant the quick brown fox"] * 3, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
        )
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    """Makes a model folder: `folder(adds_bos=…, jinja=…, generation=…, **tokenizer_config)`."""

    def make(adds_bos=False, jinja=None, generation=None, **config):
        vocabulary(adds_bos).save(str(tmp_path / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": {"content": "<|end|>", "lstrip": False, "__type": "AddedToken"},
            "pad_token": "<|end|>",
            **config,
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return tmp_path

    return make


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("template", [CHATML, LLAMA, FEATURES], ids=["chatml", "llama", "features"])
def test_a_chat_is_what_transformers_makes_of_it(folder, adds_bos, template):
    path = folder(adds_bos, jinja=template)
    theirs = AutoTokenizer.from_pretrained(path)
    ours = Tokenizer.from_folder(path)
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(CHAT) == expected


@pytest.mark.parametrize("adds_bos", [False, True])
def test_the_start_token_comes_once_after_a_template_that_writes_it(folder, adds_bos):
    tokenizer = Tokenizer.from_folder(folder(adds_bos, jinja=LLAMA))
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert (ids[0], ids.count(0)) == (0, 1)
    assert tokenizer.encode("hi").count(0) == adds_bos
    assert tokenizer.encode("<|begin|>hi").count(0) == 1  # already there
    assert tokenizer.encode("hi", add_special=False).count(0) == 0


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("flags", [{}, {"add_bos_token": False}, {"add_eos_token": True}])
def test_a_raw_prompt_is_what_transformers_makes_of_it(folder, adds_bos, flags):
    path = folder(adds_bos, **flags)
    theirs, ours = AutoTokenizer.from_pretrained(path), Tokenizer.from_folder(path)
    for text in ("the quick fox", "", " über <tool> <|im_end|>\n\n"):
        assert ours.encode(text) == theirs(text).input_ids
        assert ours.encode(text, add_special=False) == theirs(text, add_special_tokens=False).input_ids
    assert ours.vocab_size == len(theirs)


def test_a_start_token_that_only_the_configuration_asks_for_is_set(folder):
    """As DeepSeek's files ask, whose tokenizer.json sets none."""
    tokenizer = Tokenizer.from_folder(folder(add_bos_token=True, jinja=LLAMA))
    assert tokenizer.encode("the fox") == [0, *tokenizer.encode("the fox", add_special=False)]
    assert tokenizer.encode("<|begin|>the fox") == tokenizer.encode("the fox")
    assert tokenizer.encode_chat(CHAT).count(0) == 2  # the template's, and the one that a message spells out


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_decode_gives_the_text_back_without_special_tokens(text):
    tokenizer = Tokenizer(vocabulary())
    ids = tokenizer.encode(text)
    kept = [i for i in ids if i >= len(SPECIAL)]
    assert tokenizer.decode(ids) == tokenizer.decode(kept) == vocabulary().decode(ids)
    if len(kept) == len(ids):
        assert tokenizer.decode(ids) == text


def test_the_template_file_comes_before_the_one_in_the_configuration(folder):
    message = [{"role": "user", "content": "hi"}]
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "named"}]
    assert Tokenizer.from_folder(folder(chat_template="config")).render_chat(message) == "config"
    assert Tokenizer.from_folder(folder(chat_template=named)).render_chat(message) == "named"
    assert Tokenizer.from_folder(folder(chat_template="config", jinja="file")).render_chat(message) == "file"


@pytest.mark.parametrize(
    ("generation", "ids"),
    [(None, {1}), ({"eos_token_id": 3}, {1, 3}), ({"eos_token_id": [3, 4]}, {1, 3, 4}), ({}, {1})],
)
def test_the_ids_that_end_a_text_come_from_both_files(folder, generation, ids):
    assert Tokenizer.from_folder(folder(generation=generation)).eos_ids == ids


def test_the_model_config_names_the_ids_where_no_generation_config_does(folder):
    path = folder()
    (path / "config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    assert Tokenizer.from_folder(path).eos_ids == {1, 2, 3}


def test_stop_ids_add_what_a_request_asks_for(folder):
    tokenizer = Tokenizer.from_folder(folder(generation={"eos_token_id": 3}))
    assert tokenizer.stop_ids(SamplingParams()) == {1, 3}
    assert tokenizer.stop_ids(SamplingParams(ignore_eos=True)) == frozenset()
    asked = SamplingParams(stop_token_ids=(9,), stop=("<|header|>", "END", "<tool>"), ignore_eos=True)
    assert tokenizer.stop_ids(asked) == {9, 4}  # <tool> shows in the text, where the stop string is found


def test_a_truncation_or_padding_saved_for_training_changes_no_prompt(tmp_path):
    saved = vocabulary()
    saved.enable_truncation(4)
    saved.enable_padding(length=64)
    saved.save(str(tmp_path / "tokenizer.json"))
    text = "the quick brown fox " * 5
    assert Tokenizer.from_folder(tmp_path).encode(text) == vocabulary().encode(text).ids


def test_a_chat_without_a_template_is_refused_with_the_way_out(folder):
    with pytest.raises(RequestError, match=r"no chat template.*--raw"):
        Tokenizer.from_folder(folder()).encode_chat(CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must\nalternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
    ],
    ids=["raises", "type error", "escapes the sandbox", "changes its input"],
)
def test_a_template_that_refuses_is_one_line_and_its_own_words(folder, template):
    with pytest.raises(RequestError, match="template refused") as refusal:
        Tokenizer.from_folder(folder(jinja=template)).render_chat(CHAT)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("messages", [[], ["hi"], [{"content": "no role"}], [{"role": 1}], "hi"])
def test_messages_that_are_none_are_refused(folder, messages):
    with pytest.raises(RequestError, match="chat cannot be read"):
        Tokenizer.from_folder(folder(jinja=CHATML)).encode_chat(messages)


def test_a_broken_template_leaves_raw_prompts_alone(folder):
    tokenizer = Tokenizer.from_folder(folder(jinja="{% for %}"))
    assert tokenizer.encode("hi")
    with pytest.raises(ModelError, match="not Jinja"):
        tokenizer.encode_chat(CHAT)


@pytest.mark.parametrize("text", ["\ud800", None, 3])
def test_a_prompt_that_is_not_text_is_refused(text):
    with pytest.raises(RequestError, match="not text"):
        Tokenizer(vocabulary()).encode(text)


def test_a_folder_without_a_tokenizer_is_refused_with_the_cure(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ModelError, match=r"no tokenizer\.json.*save_pretrained"):
            Tokenizer.from_folder(path)


@pytest.mark.parametrize("kept", [0, 1, 10, 500, 0.5, 0.99])
def test_a_truncated_tokenizer_is_refused_wherever_it_ends(folder, kept):
    path = folder() / "tokenizer.json"
    data = path.read_bytes()
    path.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged") as refusal:
        Tokenizer.from_folder(path.parent)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("tokenizer_config.json", b'{"bos_token": '),
        ("tokenizer_config.json", b"[]"),
        ("tokenizer_config.json", b"\xff\xfe"),
        ("tokenizer_config.json", b'{"chat_template": 5}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default", "template": 5}]}'),
        ("tokenizer_config.json", b'{"chat_template": [{"name": "default"}]}'),
        ("tokenizer_config.json", b"[" * 100_000),
        ("special_tokens_map.json", b"[" * 100_000),
        ("tokenizer_config.json", b'{"eos_token": "<absent>"}'),
        ("generation_config.json", b"{"),
        ("generation_config.json", b'{"eos_token_id": "2"}'),
        ("generation_config.json", b'{"eos_token_id": [-1]}'),
        ("chat_template.jinja", b"\xff"),
    ],
)
def test_a_damaged_file_is_refused_by_name(folder, name, data):
    path = folder()
    (path / name).write_bytes(data)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")) as refusal:
        Tokenizer.from_folder(path)
    assert "\n" not in str(refusal.value)
