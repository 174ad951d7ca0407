"""Prompts as the model expects them: chat through the model's own template, fill-in-the-middle, and where to stop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtlib.errors import CheckpointError, ConfigError, PromptError, TokenizerError, join_problems
from rtlib.fields import Fields
from rtlib.folder import ModelFolder
from rtlib.template import Template
from rtlib.tokenizer import SETTINGS_FILE, Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
ROLES = ("system", "user", "assistant", "tool")
FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
_ENDS_OF_MIDDLE = (FIM_PREFIX, FIM_SUFFIX, FIM_MIDDLE, "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
_ENDS_OF_TEXT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_NONCHARACTER = "\ufdd0"  # never assigned, so text has no use for it
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

Message = dict[str, Any]


class ChatTemplate:
    """A model's chat template: messages in, ids out, in which only the template's own control tokens become ids."""

    def __init__(self, source: str, tokenizer: Tokenizer, where: object = TEMPLATE_FILE):
        """Compile `source`; raises TokenizerError when it is no template, or one that asks for too much."""
        self._template = Template(source, where)
        self._tokenizer = tokenizer
        self._special = {key: tokenizer.setting_text(key) for key in _SPECIAL}

    @classmethod
    def open(cls, folder: ModelFolder | str | Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read a folder's chat_template.jinja, else tokenizer_config.json's chat_template.

        Raises TokenizerError when there is neither, or a damaged one.
        """
        folder = folder if isinstance(folder, ModelFolder) else ModelFolder(Path(folder).resolve())
        try:
            if folder.has(TEMPLATE_FILE):
                path = folder.file(TEMPLATE_FILE)
                return cls(path.read_text(encoding="utf-8"), tokenizer, path)
        except (CheckpointError, UnicodeDecodeError) as error:
            raise TokenizerError(f"{folder.path / TEMPLATE_FILE}: cannot be read ({error})") from None
        source = tokenizer.settings.get("chat_template")
        if isinstance(source, list):  # several, by name
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            raise TokenizerError(f"{folder.path}: has no chat template; use a chat model, or complete a prompt instead")
        return cls(source, tokenizer, folder.path / SETTINGS_FILE)

    def render(self, messages: list[Message], add_generation_prompt: bool = True, tools: list | None = None) -> str:
        """Return the text of a conversation, for reading: control tokens typed by a user look like real ones in it.

        Raises PromptError for messages that are malformed or that the template refuses.
        """
        _check_messages(messages)
        return self._render(messages, add_generation_prompt, tools)

    def encode(
        self, messages: list[Message], add_generation_prompt: bool = True, tools: list | None = None
    ) -> list[int]:
        """Return the ids of a conversation: the same as encoding its text, but what users wrote stays text.

        A message is a dict with "role" (system, user, assistant or tool) and "content" (str).
        Raises PromptError for messages that are malformed or that the template refuses.
        """
        _check_messages(messages)
        mark = _unused_mark([messages, tools])
        shield = _Shield(self._tokenizer.control, mark)
        text = self._render(_map_text(shield, messages), add_generation_prompt, _map_text(shield, tools))
        # pieces between control tokens are encoded whole, since BPE merges across the edges of a message
        return [
            token_id
            for piece, is_control in self._tokenizer.split_control(text)
            for token_id in self._tokenizer.encode(piece if is_control else piece.replace(mark, ""), special=is_control)
        ]

    def _render(self, messages: Any, add_generation_prompt: bool, tools: Any) -> str:
        return self._template.render(
            messages=messages, add_generation_prompt=add_generation_prompt, tools=tools, **self._special
        )


class _Shield:
    """Breaks every control token in a text with a mark, which `encode` takes out again once the ids are safe."""

    def __init__(self, control: dict[str, int], mark: str):
        self._mark = mark
        self._start = re.compile("(?=" + "|".join(map(re.escape, control)) + ").", re.DOTALL) if control else None
        self._beginnings = {token[:n] for token in control for n in range(1, len(token))}
        self._longest = max(map(len, control), default=0)

    def __call__(self, text: str) -> str:
        """Mark after the first letter of each control token, and after a beginning that the template could complete."""
        if self._start is None:
            return text
        text = self._start.sub(lambda match: match.group() + self._mark, text)
        unfinished = any(text[-n:] in self._beginnings for n in range(1, min(self._longest, len(text) + 1)))
        return text + self._mark if unfinished else text


def _map_text(function: Callable[[str], str], value: Any) -> Any:
    """Return a copy of JSON-like data with every string, keys apart, passed through `function`."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_text(function, item) for key, item in value.items()}
    return [_map_text(function, item) for item in value] if isinstance(value, (list, tuple)) else value


def _unused_mark(data: Any) -> str:
    """Return a string that occurs in none of the data's strings: a longer run of one letter than any of them has."""
    try:
        text = json.dumps(data, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"the messages hold more than text, numbers, lists and dicts ({error})") from None
    runs = re.findall(f"{_NONCHARACTER}+", text)
    return _NONCHARACTER * (1 + max(map(len, runs), default=0))


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise PromptError("the conversation is empty, or no list of messages; expected at least one message")
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, dict) else type(message).__name__
            raise PromptError(f"message {number} has the role {role!r}, expected one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise PromptError(f"message {number} has {type(content).__name__} as its content, expected str")


def encode_fim(tokenizer: Tokenizer, prefix: str, suffix: str) -> list[int]:
    """Return the prompt for what belongs between `prefix` and `suffix`, in Qwen's order: prefix, suffix, middle.

    Raises TokenizerError when the tokenizer has no FIM tokens, PromptError for what is not Unicode text.
    """
    return [
        tokenizer.control_id(FIM_PREFIX),
        *tokenizer.encode(prefix),
        tokenizer.control_id(FIM_SUFFIX),
        *tokenizer.encode(suffix),
        tokenizer.control_id(FIM_MIDDLE),
    ]


def fim_stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the control tokens that end a middle: those of FIM and of files, and the ends of text and turn."""
    return frozenset(tokenizer.control[t] for t in (*_ENDS_OF_MIDDLE, *_ENDS_OF_TEXT) if t in tokenizer.control)


def stop_ids(
    tokenizer: Tokenizer, config_ids: tuple[int, ...] = (), generation: dict[str, Any] | None = None
) -> frozenset[int]:
    """Return the ids that end a text: the union of config.json's, generation_config.json's and the tokenizer's.

    The files of one model disagree, and each of them is right about its own ids. Raises ConfigError for a
    generation_config.json whose eos_token_id holds no ids.
    """
    fields = Fields(generation or {})
    found = {*config_ids, *fields.ids("eos_token_id")}
    if fields.problems:
        raise ConfigError(join_problems("generation_config.json", fields.problems))
    return frozenset(found if tokenizer.eos_id is None else found | {tokenizer.eos_id})
