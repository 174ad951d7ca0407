"""Text to token ids and back: byte-level BPE as in Qwen2.5, where text becomes a control token only on request.

A token of a byte-level vocabulary stands for bytes, which need not end where a character ends. So ids become bytes by
table look-up, and bytes become text by an incremental UTF-8 decoder that waits for the rest of a character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tokenizers

from rtlib.errors import CheckpointError, PromptError, TokenizerError
from rtlib.folder import ModelFolder

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
_LARGEST_ID = 2**22  # ten times the largest vocabulary known; it bounds the table that a damaged file can ask for


def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each letter of a byte-level vocabulary stands for.

    GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes in rising order for U+0100, U+0101, ...
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()


class Tokenizer:
    """A byte-level BPE tokenizer.

    `control` maps the text of each added token (`<|im_end|>`, `<|fim_prefix|>`, ...) to its id, `settings` is
    tokenizer_config.json's object, `where` names the file in errors.
    """

    def __init__(self, raw: dict[str, Any], settings: dict[str, Any] | None = None, where: object = TOKENIZER_FILE):
        """Build from tokenizer.json's and tokenizer_config.json's objects; raises TokenizerError for a damaged one."""
        self.where = where
        self.settings = settings or {}
        self._encoder = _build_encoder(raw, where)
        self.control = {token.content: i for i, token in self._encoder.get_added_tokens_decoder().items()}
        self._control_ids = frozenset(self.control.values())
        self._texts = _text_of_ids(self._encoder.get_vocab(with_added_tokens=False), self.control, where)
        by_length = sorted(self.control, key=len, reverse=True)  # the longest wins where two begin alike
        self._control_pattern = re.compile("(" + "|".join(map(re.escape, by_length)) + ")") if by_length else None

    @classmethod
    def open(cls, folder: ModelFolder | str | Path) -> Tokenizer:
        """Read a folder's tokenizer.json and, where there is one, tokenizer_config.json.

        Raises TokenizerError when a file is missing, damaged, or not a byte-level BPE.
        """
        folder = folder if isinstance(folder, ModelFolder) else ModelFolder(Path(folder).resolve())
        try:
            raw, settings = folder.json(TOKENIZER_FILE), folder.optional_json(SETTINGS_FILE)
        except CheckpointError as error:
            raise TokenizerError(str(error)) from None
        return cls(raw, settings, folder.path / TOKENIZER_FILE)

    @property
    def size(self) -> int:
        """Return the number of ids, counted from 0 to the largest that the tokenizer knows."""
        return len(self._texts)

    @property
    def eos_id(self) -> int | None:
        """Return the id of tokenizer_config.json's eos_token, None when it names none."""
        return self.control.get(self.setting_text("eos_token"))

    def setting_text(self, key: str) -> str:
        """Return a special token's text from tokenizer_config.json, which writes it as a string or as an object."""
        value = self.settings.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        return value if isinstance(value, str) else ""

    def control_id(self, text: str) -> int:
        """Return the id of a control token; raises TokenizerError when the tokenizer has none of that text."""
        if text not in self.control:
            raise TokenizerError(f"{self.where}: has no token {text}; use a model that was trained with it")
        return self.control[text]

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Return the ids of `text`; control tokens in it are plain text unless `special` is true.

        Raises PromptError for what is not Unicode text.
        """
        _check_text(text)
        if not special:
            return self._encode_plain(text)
        return [i for piece, is_control in self.split_control(text) for i in self._encode_piece(piece, is_control)]

    def split_control(self, text: str) -> list[tuple[str, bool]]:
        """Return the pieces of `text` in order, each with whether it is a control token."""
        pieces = self._control_pattern.split(text) if self._control_pattern else [text]
        return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]

    def decode(self, ids: Iterable[int], skip_control: bool = False) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD, ids above the tokenizer's nothing.

        With `skip_control` added tokens are left out. Raises TokenizerError for a negative id.
        """
        return b"".join(self.token_bytes(i, skip_control) for i in ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int, skip_control: bool = False) -> bytes:
        """Return the bytes that an id stands for, none for an id that the tokenizer does not know."""
        if token_id < 0:
            raise TokenizerError(f"{self.where}: the token id {token_id} is negative, expected 0 to {self.size - 1}")
        if token_id >= self.size:
            return b""  # the model's head is padded beyond the vocabulary
        text = self._texts[token_id]
        if token_id in self._control_ids:
            return b"" if skip_control else text.encode()
        return _bytes_of_text(text)

    def _encode_piece(self, piece: str, is_control: bool) -> list[int]:
        return [self.control[piece]] if is_control else self._encode_plain(piece)

    def _encode_plain(self, text: str) -> list[int]:
        return self._encoder.encode(text, add_special_tokens=False).ids


class StreamDecoder:
    """Turns ids into text one at a time; every piece is valid UTF-8, all pieces together are `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, skip_control: bool = False):
        self._tokenizer, self._skip_control = tokenizer, skip_control
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the characters that `token_id` completes, often none for a part of one."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id, self._skip_control))

    def flush(self) -> str:
        """Return U+FFFD for a character left unfinished, else nothing; the decoder can then be used afresh."""
        return self._utf8.decode(b"", final=True)


def _check_text(text: Any) -> None:
    if not isinstance(text, str):
        raise PromptError(f"the prompt is {type(text).__name__}, expected str")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt has half a surrogate pair, U+{ord(text[error.start]):04X}, at character {error.start}: "
            "it is not Unicode text; decode the source as UTF-8"
        ) from None


def _build_encoder(raw: dict[str, Any], where: object) -> tokenizers.Tokenizer:
    """Return the encoder for plain text: added tokens are all marked special, and special tokens encoded as text.

    The mark is needed because FIM and tool tokens are added but not special, so they would still turn into ids.
    """
    added = raw.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise TokenizerError(f"{where}: added_tokens is not a list of objects; fetch the file again")
    marked = raw | {"added_tokens": [token | {"special": True} for token in added]}
    try:
        encoder = tokenizers.Tokenizer.from_str(json.dumps(marked))
    except Exception as error:  # the package raises bare Exception
        raise TokenizerError(f"{where}: no valid tokenizer ({' '.join(str(error).split())}); fetch it again") from None
    if not isinstance(encoder.model, tokenizers.models.BPE) or "ByteLevel" not in str(encoder.decoder):
        raise TokenizerError(
            f"{where}: a {type(encoder.model).__name__} model with decoder {type(encoder.decoder).__name__}, "
            "expected byte-level BPE"
        )
    encoder.encode_special_tokens = True
    encoder.no_truncation()  # a file may ask for either, and both would change a prompt unseen
    encoder.no_padding()
    return encoder


def _text_of_ids(vocabulary: dict[str, int], control: dict[str, int], where: object) -> list[str]:
    """Return each id's text, in the byte alphabet save for control tokens.

    Raises TokenizerError when some byte has no token of its own, or an id is out of all proportion.
    """
    if missing := [byte for letter, byte in _BYTE_OF.items() if letter not in vocabulary]:
        raise TokenizerError(
            f"{where}: {len(missing)} of 256 bytes have no token (0x{missing[0]:02X} first), so some text would be lost"
        )
    largest = max([*vocabulary.values(), *control.values()])
    if largest > _LARGEST_ID:
        raise TokenizerError(f"{where}: the token id {largest} is not plausible, expected {_LARGEST_ID} at most")
    texts = [""] * (largest + 1)
    for text, token_id in (vocabulary | control).items():
        texts[token_id] = text
    return texts


def _bytes_of_text(text: str) -> bytes:
    """Return the bytes of a vocabulary entry; one with a letter outside the alphabet stands for itself."""
    return bytes(map(_BYTE_OF.__getitem__, text)) if _BYTE_OF.keys() >= set(text) else text.encode()
