"""The chat templates of real models, each with a small tokenizer that has its special tokens, and conversations for them."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from hs_assets.samples.conversations import Conversation, Message, ToolCall
from hs_assets.samples.tokenizer import ChatTokenizer, from_transformers
from hs_assets_tests.small_tokenizer import trained

_BESIDE = Path(__file__).parents[2] / "shared" / "data"
_NAMED = Path(os.environ.get("HS_ASSETS_TEST_DATA", _BESIDE))
DATA = _NAMED if _NAMED.is_dir() else _BESIDE
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"neither {_NAMED} (HS_ASSETS_TEST_DATA) nor {_BESIDE} is there")

# What the vocabularies of these models hold as special tokens; their <think>, <tool_call> and such are ordinary tokens.
_SPECIAL = re.compile(
    r"<\|[\w/]+\|?>|<\w+\|>|<｜[^｜<>]+｜>|</?s>|<bos>|<eos>|<sop>|<sep>|<(?:start|end)_of_(?:turn|image)>|<end_of_utterance>|"
    r"<seed:(?:bos|eos|pad)>|\[gMASK\]|\[/?(?:INST|SYSTEM_PROMPT|TOOL_CALLS|AVAILABLE_TOOLS|TOOL_RESULTS|TOOL_CONTENT|ARGS|"
    r"CALL_ID|THINK|IMG)\]|<\|\w+"
)
_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<｜end▁of▁sentence｜>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<seed:eos>",
)


@functools.cache
def template_names() -> list[str]:
    """``family/name`` of each template."""
    folder = DATA / "templates"
    return sorted(f"{path.parent.name}/{path.stem}" for path in folder.glob("*/*.jinja"))


def template_source(name: str) -> str:
    return (DATA / "templates" / f"{name}.jinja").read_text()


def special_tokens_of(source: str) -> list[str]:
    found = {match for match in _SPECIAL.findall(source) if match.endswith((">", "]")) or match in ("<|turn", "<|tool")}
    return sorted(found | {"<s>", "</s>", "<|endoftext|>"}, key=lambda token: (-len(token), token))


@functools.cache
def hugging_face_tokenizer(name: str, bos: str = "<s>") -> PreTrainedTokenizerFast:
    """A small tokenizer with the template's special tokens; the end of a text is one of them that the model has as such."""
    source = template_source(name)
    special = special_tokens_of(template_source(name.removesuffix("_training")) if name.endswith("_training") else source)
    tokenizer = Tokenizer.from_str(trained(False))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    eos = next((token for token in _ENDS if token in special), "<|endoftext|>" if "<|im" in source else "</s>")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    fast.chat_template = source
    return fast


@functools.cache
def chat_tokenizer_of(name: str) -> ChatTokenizer:
    return from_transformers(hugging_face_tokenizer(name), sha256=name)


TOOL = {
    "type": "function",
    "function": {
        "name": "find_weather",
        "description": "Looks up the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "where"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Case:
    """A conversation of unique words; ``words`` are, for each assistant's turn, those that it wrote, in order."""

    conversation: Conversation
    words: dict[int, tuple[str, ...]]


def _case(*messages: Message, tools: tuple[dict, ...] = ()) -> Case:
    words = {}
    for turn, message in enumerate(messages):
        if message.role == "assistant":
            calls = tuple(str(value) for call in message.tool_calls for value in (*call.arguments.values(),))
            words[turn] = tuple(word for word in (message.reasoning, message.content, *calls) if word)
    return Case(Conversation(messages, tools), words)


def _call(city: str) -> tuple[ToolCall, ...]:
    return (ToolCall("find_weather", {"city": city}, "abcdef123"),)


_ASK, _ANSWER = Message("user", "kestrel marigold?"), Message("assistant", "Quartz lagoon.\n\nVelvet ember.")
_THREE = (
    _ASK,
    _ANSWER,
    Message("user", "ochre pylon"),
    Message("assistant", "Saffron dune"),
    Message("user", "tundra"),
    Message("assistant", "Mosaic: 1. fjord\n2. heron"),
)
_REASONED = tuple(
    Message(m.role, m.content, reasoning=f"Plover {'abc'[i // 2]} basalt\nnimbus" if m.role == "assistant" else None)
    for i, m in enumerate(_THREE)
)
_CALLS = (
    Message("assistant", "", tool_calls=_call("Lisbon")),
    Message("tool", '{"sky": "cobalt"}', name="find_weather", tool_call_id="abcdef123"),
)

CASES = {
    "one turn": _case(_ASK, _ANSWER),
    "three turns": _case(*_THREE),
    "system": _case(Message("system", "Juniper terse."), *_THREE[:4]),
    "reasoning": _case(_ASK, *_REASONED[1:2]),
    "reasoning in three turns": _case(*_REASONED),
    "tools": _case(_ASK, *_CALLS, Message("assistant", "Saffron dune"), tools=(TOOL,)),
    "reasoning and tools": _case(
        _ASK,
        Message("assistant", "", reasoning="Plover basalt", tool_calls=_call("Lisbon")),
        _CALLS[1],
        Message("assistant", "Saffron dune", reasoning="Nimbus gale"),
        tools=(TOOL,),
    ),
    "words and a call": _case(
        _ASK, Message("assistant", "Tundra ibis", tool_calls=_call("Oslo")), *_CALLS[1:], _ANSWER, tools=(TOOL,)
    ),
}
