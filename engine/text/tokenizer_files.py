"""What a model folder says about its text, as plain facts.

Reads tokenizer.json, tokenizer_config.json, config.json, generation_config.json and the chat
template. Nothing is tokenised here, and no file but these is opened: code that lies in the
folder, or is named in `auto_map`, is never looked at.
"""

import json
from dataclasses import dataclass
from pathlib import Path

JsonObject = dict[str, object]

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


class TokenizerNotSupported(ValueError):
    """The folder's tokenizer is of a kind that is not served; the message names the part."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token matched in text as a whole string, outside the merges: the control tokens.

    `special` tokens are left out of decoded text. `eats_left` and `eats_right` say that the
    token swallows the white space beside it.
    """

    token_id: int
    text: str
    special: bool
    eats_left: bool = False
    eats_right: bool = False


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The facts of one folder.

    `definition` is tokenizer.json as parsed. `special_texts` maps names such as "bos_token" to
    token strings. `model_vocab_size` is the number of rows of the embedding, if stated.
    `adds_bos` and `adds_eos` are None when tokenizer.json's own post-processor decides.
    """

    definition: JsonObject
    added_tokens: tuple[AddedToken, ...]
    special_texts: dict[str, str]
    eos_token_ids: frozenset[int]
    model_vocab_size: int | None
    chat_template: str | None
    adds_bos: bool | None
    adds_eos: bool | None

    @classmethod
    def read(cls, folder: Path) -> "TokenizerFiles":
        """Read the folder. Raises TokenizerNotSupported if a file is missing or malformed."""
        definition = _read_object(folder / "tokenizer.json")
        config = _read_object(folder / "tokenizer_config.json", required=False)
        model = _read_object(folder / "config.json", required=False)
        generation = _read_object(folder / "generation_config.json", required=False)
        added_tokens = _added_tokens(definition, config)
        special_texts = _special_texts(config)
        adds = _bos_rule(config, definition)
        return cls(
            definition=definition,
            added_tokens=added_tokens,
            special_texts=special_texts,
            eos_token_ids=_eos_token_ids(generation, model, added_tokens, special_texts),
            model_vocab_size=_optional_int(model.get("vocab_size")),
            chat_template=_chat_template(folder, config),
            adds_bos=adds[0],
            adds_eos=adds[1],
        )


def as_object(value: object, where: str) -> JsonObject:
    """The value as a JSON object, or TokenizerNotSupported naming the place."""
    if not isinstance(value, dict):
        raise TokenizerNotSupported(f"{where} must be a JSON object.")
    return value


def _read_object(path: Path, *, required: bool = True) -> JsonObject:
    if not required and not path.exists():
        return {}
    try:
        return as_object(json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError) as error:
        raise TokenizerNotSupported(f"{path} cannot be read: {error}") from error


def _added_tokens(definition: JsonObject, config: JsonObject) -> tuple[AddedToken, ...]:
    """Union of both files, by id; tokenizer.json wins."""
    found: dict[int, AddedToken] = {}
    decoder = as_object(config.get("added_tokens_decoder") or {}, "added_tokens_decoder")
    for key, value in decoder.items():
        entry = as_object(value, f"added_tokens_decoder[{key}]")
        token = _added_token(int(key), entry)
        found[token.token_id] = token
    listed = definition.get("added_tokens") or []
    if not isinstance(listed, list):
        raise TokenizerNotSupported("added_tokens in tokenizer.json must be a list.")
    for value in listed:
        entry = as_object(value, "an entry of added_tokens")
        token_id = _optional_int(entry.get("id"))
        if token_id is None:
            raise TokenizerNotSupported("An entry of added_tokens in tokenizer.json has no id.")
        found[token_id] = _added_token(token_id, entry)
    return tuple(found[token_id] for token_id in sorted(found))


def _added_token(token_id: int, entry: JsonObject) -> AddedToken:
    text = entry.get("content")
    # One character cannot be broken up inside user text, so such a token could not be kept out.
    if not isinstance(text, str) or len(text) < 2:
        raise TokenizerNotSupported(f"Added token {text!r} must be two characters or longer.")
    if entry.get("single_word"):
        raise TokenizerNotSupported(f"Added token {text!r} is single_word, which is not served.")
    return AddedToken(
        token_id=token_id,
        text=text,
        special=bool(entry.get("special")),
        eats_left=bool(entry.get("lstrip")),
        eats_right=bool(entry.get("rstrip")),
    )


def _special_texts(config: JsonObject) -> dict[str, str]:
    texts = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _bos_rule(config: JsonObject, definition: JsonObject) -> tuple[bool | None, bool | None]:
    """Flags in tokenizer_config.json overrule the post-processor, as in transformers."""
    is_stated = "add_bos_token" in config or "add_eos_token" in config
    if not is_stated and definition.get("post_processor") is not None:
        return None, None
    return bool(config.get("add_bos_token")), bool(config.get("add_eos_token"))


def _eos_token_ids(
    generation: JsonObject,
    model: JsonObject,
    added_tokens: tuple[AddedToken, ...],
    special_texts: dict[str, str],
) -> frozenset[int]:
    """Every id that ends a sequence: generation_config (or config), and the tokenizer's own."""
    stated = generation.get("eos_token_id", model.get("eos_token_id"))
    values = stated if isinstance(stated, list) else [stated]
    ids = {token_id for token_id in map(_optional_int, values) if token_id is not None}
    ids.update(t.token_id for t in added_tokens if t.text == special_texts.get("eos_token"))
    return frozenset(ids)


def _chat_template(folder: Path, config: JsonObject) -> str | None:
    """chat_template.jinja, else tokenizer_config's; of a list of templates, the default one."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _optional_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
