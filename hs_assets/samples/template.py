"""A chat template: a conversation → the text that the model sees.

Templates disagree on how they want to be told the same: tool arguments as a mapping or as JSON, the content of a turn
that only calls tools as "" or None, content as a string or as parts. A `Form` is one way; `ChatTemplate.forms` lists
those worth trying, always in the same order.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from hs_assets.errors import PromptError
from hs_assets.samples.conversations import Conversation, Message, ToolCall

RENDER_DATE = datetime(2025, 1, 1)
"""What `strftime_now` says, always: the same rows give the same text on any day. Part of a template's hash that asks."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning", "thought")


class TemplateRefusalError(Exception):
    """The template does not render a conversation; the message has its own words."""


@dataclass(frozen=True, slots=True)
class Form:
    """How messages are handed to a template: tool arguments as JSON, no content as None, content as a list of parts.

    ``thinking`` switches thinking on where a template has it off; it is how an answer with reasoning was generated.
    """

    json_arguments: bool = False
    null_content: bool = False
    parts: bool = False
    thinking: bool = False


_PLAIN = (Form(), Form(parts=True))
_CALLS = (Form(), Form(null_content=True), Form(json_arguments=True), Form(json_arguments=True, null_content=True), _PLAIN[1])


def template_sha256(source: str) -> str:
    """The hash of a template's source, and of `RENDER_DATE` where it asks for the date."""
    date = f"\0{RENDER_DATE.isoformat()}" if "strftime_now" in source else ""
    return hashlib.sha256((source + date).encode()).hexdigest()


@dataclass(frozen=True)
class ChatTemplate:
    """A template's source, and what it is told beside the messages (``bos_token``, …).

    Raises:
        PromptError: the source is no template.
    """

    source: str
    variables: Mapping[str, Any]
    _compiled: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        try:
            compiled = _compile_jinja_template(self.source)
        except TemplateSyntaxError as error:
            raise PromptError("the chat template cannot be read", where=f"line {error.lineno}", got=error.message) from error
        object.__setattr__(self, "_compiled", compiled)

    @property
    def sha256(self) -> str:
        """See `template_sha256`."""
        return template_sha256(self.source)

    @property
    def marks_generation(self) -> bool:
        """Whether the template itself marks what the assistant generates."""
        return _GENERATION.search(self.source) is not None

    def forms(self, conversation: Conversation) -> tuple[Form, ...]:
        """The ways to hand over this conversation, in the order to try them."""
        forms = _CALLS if any(message.tool_calls for message in conversation.messages) else _PLAIN
        if not any(message.reasoning for message in conversation.messages):
            return forms
        return (*forms, *(replace(form, thinking=True) for form in forms))

    def render(self, conversation: Conversation, form: Form, *, prompt: bool = False) -> str:
        """The text of a conversation, with the opening of an assistant's turn at its end if `prompt`.

        Raises:
            TemplateRefusalError: the template raised.
        """
        variables = self._variables(conversation, form, prompt)
        try:
            return str(self._compiled.render(variables))
        except Exception as error:  # a template raises what it likes on messages that it refuses
            raise TemplateRefusalError(f"{type(error).__name__}: {error}") from error

    def render_marked(self, conversation: Conversation, form: Form) -> tuple[str, list[tuple[int, int]]]:
        """The text, and the spans [start, end) of its characters that ``{% generation %}`` marks.

        Raises:
            TemplateRefusalError: the template raised.
        """
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        variables = self._variables(conversation, form, prompt=False)
        try:
            with self._compiled.environment.activate_tracker(blocks, spans):
                blocks.extend(self._compiled.generate(variables))
        except Exception as error:  # as above
            raise TemplateRefusalError(f"{type(error).__name__}: {error}") from error
        return "".join(blocks), spans

    def _variables(self, conversation: Conversation, form: Form, prompt: bool) -> dict[str, Any]:
        return {
            **self.variables,
            "messages": [self._message(message, form) for message in conversation.messages],
            "tools": [dict(tool) for tool in conversation.tools] or None,
            "documents": None,
            "add_generation_prompt": prompt,
            "strftime_now": RENDER_DATE.strftime,
            **({"thinking": True, "enable_thinking": True} if form.thinking else {}),
        }

    def _message(self, message: Message, form: Form) -> dict[str, Any]:
        content: object = message.content
        if form.parts:
            thoughts = [{"type": "thinking", "thinking": message.reasoning}] if message.reasoning else []
            content = [*thoughts, *([{"type": "text", "text": message.content}] if message.content else [])]
        elif form.null_content and message.tool_calls and not message.content:
            content = None
        turn = {"role": message.role, "content": content, "name": message.name, "tool_call_id": message.tool_call_id}
        turn = {key: value for key, value in turn.items() if value is not None or key == "content"}
        if message.reasoning is not None:
            turn[_reasoning_key(self.source)] = message.reasoning
        if message.tool_calls:
            turn["tool_calls"] = [_call(call, form) for call in message.tool_calls]
        return turn


def _call(call: ToolCall, form: Form) -> dict[str, Any]:
    arguments = json_arguments(call) if form.json_arguments else dict(call.arguments)
    made = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return made if call.id is None else {**made, "id": call.id}


def json_arguments(call: ToolCall) -> str:
    """A call's arguments as a JSON string."""
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def _reasoning_key(source: str) -> str:
    """The key of a message under which the template looks for its reasoning."""
    reads = (key for key in _REASONING_KEYS if re.search(rf"""\.{key}\b|['"]{key}['"]""", source))
    return next(reads, _REASONING_KEYS[0])
