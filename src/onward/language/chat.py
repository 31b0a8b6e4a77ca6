"""Turns a conversation into a prompt with the tokenizer's chat template.

Templates are Jinja and come from the model's folder, so they run in a sandbox: they can format text, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from onward.errors import ModelError
from onward.reading import read_json, read_text

Message = Mapping[str, Any]


def is_chat(value: Any) -> bool:
    """Whether a value is one conversation: a list of `{"role", "content"}`."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )


# templates trim and wrap what they are given, so where the last message ends is seen by a text that none has
_MARK = "THE-MESSAGE-GOES-ON-HERE"


def read_template(folder: Path) -> ChatTemplate:
    """The chat template of a folder, from `chat_template.jinja` or `tokenizer_config.json`."""
    settings: dict[str, Any] = {}
    path = folder / "tokenizer_config.json"
    if path.is_file():
        try:
            settings = read_json(path)
        except (ValueError, OSError) as error:
            raise ModelError(f"'{path}': not valid JSON ({error})") from error
    source = settings.get("chat_template")
    # Command R has one for tools and one for documents beside the plain one
    if isinstance(source, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source = named.get("default")
    if (folder / "chat_template.jinja").is_file():
        try:
            source = read_text(folder / "chat_template.jinja")
        except (ValueError, OSError) as error:
            raise ModelError(f"'{folder}': its chat_template.jinja cannot be read ({error})") from error
    if not isinstance(source, str):
        raise ModelError(
            f"'{folder}': the tokenizer has no chat template (chat_template.jinja); give text, not messages, or save "
            "a tokenizer whose chat_template is set"
        )
    tokens = {
        name: value.get("content") if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name.endswith("_token") and isinstance(value, (str, Mapping))
    }
    return ChatTemplate(source, tokens, folder)


class ChatTemplate:
    """A template that is ready to render."""

    def __init__(self, source: str, tokens: Mapping[str, Any], folder: Path) -> None:
        try:
            import jinja2

            from onward.language.sandbox import Sandbox
        except ImportError as error:
            raise ModelError("chat templates need the jinja2 package: pip install 'onward[text]'") from error
        self._folder = folder
        self._tokens = dict(tokens)
        self._errors: type[Exception] = jinja2.TemplateError

        environment = Sandbox()
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = self._raise
        environment.globals["strftime_now"] = strftime_now
        try:
            # {% generation %} marks the assistant's words for training; rendering needs only what is inside.
            plain = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
            plain = plain.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
            plain = plain.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
            self._render = environment.compiled(plain)
        except (
            Exception
        ) as error:  # the parser recurses, and what it computes ahead may be an error of Python's
            raise ModelError(f"'{folder}': the chat template is not valid Jinja ({error})") from error

    def render(self, messages: Sequence[Message], *, prompt: bool = True, **more: Any) -> str:
        """The conversation as text; with `prompt` it ends where the assistant is to speak."""
        for message in messages:
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise ValueError(f'a message is {{"role": …, "content": …}}, got {message!r}')
        try:
            return self._render(
                messages=list(messages), add_generation_prompt=prompt, **{**self._tokens, **more}
            )
        except Exception as error:  # a template that expects other types than it finds raises Python's own
            raise ModelError(
                f"'{self._folder}': the chat template refuses these messages: {error}"
            ) from error

    def render_prompt(self, messages: Sequence[Message]) -> str:
        """The conversation up to where the assistant speaks on: after its last words, where it has the last message."""
        last = messages[-1]
        if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
            return self.render(messages)
        # What templates write after a message, its end token for one, must not follow: a mark shows where that begins.
        text = self.render([*messages[:-1], {**last, "content": f"{last['content']}{_MARK} "}], prompt=False)
        before, mark, after = text.rpartition(_MARK)
        if not mark:
            raise ModelError(
                f"'{self._folder}': the chat template changes the assistant's last message, so it cannot be continued"
            )
        return before if after.startswith(" ") else before.rstrip()

    def _raise(self, message: str) -> None:
        raise self._errors(message)


def strftime_now(form: str) -> str:
    """Today's date or time, which the templates of some models write."""
    return datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
