"""The tokenizer: text and chats to token ids and back, read from a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headstock.engine.detokenizer import Detokenizer, Pieces
from headstock.engine.sampling import SamplingParams
from headstock.engine.template import ChatTemplate
from headstock.errors import ModelError, RequestError
from headstock.files import read_text
from headstock.models.record import read_json

SAVE = "transformers.AutoTokenizer.from_pretrained(MODEL).save_pretrained(FOLDER)"


class Tokenizer:
    """A model's vocabulary and chat template: `encode`, `encode_chat`, `decode`, and `detokenizer` for streams.

    `eos_ids` are the ids after which the model itself ends a text; `special` holds the named special tokens
    ("bos_token": "<s>", …) as the chat template sees them.
    """

    def __init__(
        self,
        vocabulary: tokenizers.Tokenizer,
        *,
        special: Mapping[str, str] | None = None,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        add_bos: bool = False,
    ):
        self.special = dict(special or {})
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template
        self._vocabulary = vocabulary
        self._pieces = Pieces(vocabulary)
        # What a file may ask for when it was saved for training: a prompt is never cut or padded silently.
        vocabulary.no_truncation()
        vocabulary.no_padding()
        bos = vocabulary.token_to_id(self.special.get("bos_token", ""))
        self._start = bos if add_bos or vocabulary.encode("").ids[:1] == [bos] else None

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """Reads tokenizer.json and, where they exist, tokenizer_config.json, special_tokens_map.json,
        chat_template.jinja, generation_config.json and config.json.

        Raises ModelError for a missing or damaged file, naming it.
        """
        folder = Path(path)
        vocabulary = _vocabulary(folder / "tokenizer.json")
        config = _json(folder / "tokenizer_config.json")
        special = _special_tokens({**_json(folder / "special_tokens_map.json"), **config})
        for name in ("bos_token", "eos_token"):
            if name in special and vocabulary.token_to_id(special[name]) is None:
                raise ModelError(
                    f"{folder / 'tokenizer_config.json'}: {name} is not in tokenizer.json",
                    given=repr(special[name]),
                    works="both files of one model",
                    type=SAVE,
                )
        eos_ids = _eos_ids(folder)
        eos = vocabulary.token_to_id(special.get("eos_token", ""))
        if eos is not None:
            eos_ids.add(eos)
        return cls(
            vocabulary,
            special=special,
            eos_ids=eos_ids,
            chat_template=_chat_template(folder, config),
            add_bos=config.get("add_bos_token") is True,
        )

    @property
    def vocab_size(self) -> int:
        """The number of tokens, added ones included; a model's logits may be wider."""
        return self._vocabulary.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """The ids of a text; with `add_special`, after the start token where the model's files ask for one.

        They ask in tokenizer.json or by "add_bos_token": true. A text that already begins with the start token
        gets no second one. Raises RequestError for what is not valid Unicode text.
        """
        try:
            ids = self._vocabulary.encode(text, add_special_tokens=add_special).ids
        except (TypeError, UnicodeEncodeError):
            raise RequestError("a prompt is not text", given=ascii(text)[:80], works="valid Unicode") from None
        if add_special and self._start is not None:
            if ids[:2] == [self._start, self._start]:
                del ids[0]
            elif ids[:1] != [self._start]:
                ids.insert(0, self._start)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a chat, up to where the model answers. A message is {"role": …, "content": …}.

        The template sets every special token itself, the start token included: none is added to what it renders.
        Raises RequestError for a model without a chat template, and with the template's own words where it
        refuses the messages.
        """
        return self.encode(self.render_chat(messages), add_special=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a chat as the model's template writes it; see `encode_chat`."""
        if not messages or not all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages):
            raise RequestError(
                "a chat cannot be read", given=repr(messages)[:80], works='[{"role": "user", "content": "…"}, …]'
            )
        template = self._template
        try:
            return template.render(
                {
                    **self.special,
                    "messages": [dict(message) for message in messages],
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": True,
                }
            )
        except Exception as error:  # a template is a program of its author's
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise RequestError("the model's chat template refused the messages", given=reason) from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out; see `Pieces` for what invalid bytes become."""
        return self._pieces.text(ids)

    def detokenizer(self, stop: Sequence[str] = ()) -> Detokenizer:
        """A stream of text for one request, which ends before the first of the `stop` strings."""
        return Detokenizer(self._pieces, stop)

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """The ids that end a request: the model's own unless ignored, those asked for, and stop strings that are
        special tokens, which never show in the text."""
        special = {
            added.content: i for i, added in self._vocabulary.get_added_tokens_decoder().items() if added.special
        }
        asked = {*params.stop_token_ids, *(special[text] for text in params.stop if text in special)}
        return frozenset(asked) if params.ignore_eos else self.eos_ids | asked

    @cached_property
    def _template(self) -> ChatTemplate:
        if self.chat_template is None:
            raise RequestError("this model has no chat template", works="a raw prompt", type="--raw")
        return ChatTemplate(self.chat_template)


def _vocabulary(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError("the model folder has no tokenizer.json", given=path.parent, works="a saved one", type=SAVE)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"{path} is damaged", given=error, works="the file downloaded again", type=SAVE) from error


def _json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    return read_json(path) if path.exists() else {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens, which are written plainly or as {"content": …, "lstrip": …}."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    plain = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: value for name, value in plain.items() if isinstance(value, str)}


def _eos_ids(folder: Path) -> set[int]:
    """eos_token_id, one id or a list, of generation_config.json, else of config.json."""
    for name in ("generation_config.json", "config.json"):
        ids = _json(folder / name).get("eos_token_id")
        if ids is not None:
            listed = ids if isinstance(ids, list) else [ids]
            if not all(type(i) is int and i >= 0 for i in listed):
                raise ModelError(f"{folder / name}: eos_token_id", given=ids, works="a token id, or a list of them")
            return set(listed)
    return set()


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The default template: chat_template.jinja, else the one in tokenizer_config.json, plain or in a named list."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path, "the file downloaded again", ModelError)
    match config.get("chat_template"):
        case None | str() as template:
            return template
        case [*entries] if all(isinstance(e, dict) and isinstance(e.get("template"), str) for e in entries):
            return next((entry["template"] for entry in entries if entry.get("name") == "default"), None)
        case other:
            given = type(other).__name__
            raise ModelError(f"{folder / 'tokenizer_config.json'}: chat_template", given=given, works="a text")
