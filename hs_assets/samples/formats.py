"""One row of a source → what it holds, whatever of the known formats it is in.

The format is told by the row's columns, row by row, or set for the whole source. A column that is not read is either known
to change what the model sees, and drops the row (`unread_column`), or is named in `ParsedRow.unread`. A KTO ``label`` is
named, no more: good or bad, the answer is rendered all the same.

    messages, conversations   turns (`hs_assets.samples.messages`), with system and tools beside them
    nemo                      conversations with a ``mask`` column
    prompt_completion         two lists of turns; those of the prompt are not trained on
    turns                     what the user says, turn after turn, without answers
    prompt                    a text or a list of turns, without an answer
    question_answer           question, query or prompt; answer, response or completion
    alpaca                    instruction, input or context, output or response, history of pairs
    text                      no chat: all is supervised
    input_ids                 token ids, with a loss_mask, or all supervised
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from hs_assets.samples.conversations import Conversation, Dropped, Message, Text, Tokenized
from hs_assets.samples.messages import ROLES, read_turn
from hs_assets.samples.row_json import load_nested, load_row
from hs_assets.samples.tools import read_tools

Content = Conversation | Text | Tokenized | Dropped
Row = Mapping[str, Any]

_SYSTEM, _TOOLS = ("system", "system_prompt"), ("tools", "functions")
_QUESTIONS, _ANSWERS = ("question", "query", "prompt"), ("answer", "response", "completion")
_INPUTS, _OUTPUTS = ("input", "context"), ("output", "response")

_SEEN_BY_MODELS = (
    *("images", "image", "videos", "video", "audios", "audio", "documents", *_SYSTEM, *_TOOLS, "function_call", "tool_calls"),
    *("chat_template", "chat_template_kwargs", "enable_thinking", "thinking", "reasoning", "reasoning_content"),
    *("response_format", "labels", "weight", "loss_weight"),
)
"""Columns that would change the text that the model sees, or what is trained on, if they were read."""
_SEEN_BESIDE_TEXTS = (*_INPUTS, "history", "chosen", "rejected")
"""The same for a row that is no list of turns, which would hold all of it."""


@dataclass(frozen=True, slots=True)
class ParsedRow:
    """A row's content, the format it was read as (empty: none), and the columns with a value that were not read."""

    content: Content
    format: str = ""
    unread: tuple[str, ...] = ()


def parse_row(raw: bytes | Dropped, row_format: str = "") -> ParsedRow:
    """What a row holds.

    Arguments:
        raw: the row's JSON, or why it could not be read.
        row_format: one of `FORMATS`; told by the columns where it is empty.
    """
    row = raw if isinstance(raw, Dropped) else load_row(raw)
    if isinstance(row, Dropped):
        return ParsedRow(row)
    if not isinstance(row, dict):
        return ParsedRow(Dropped("unknown_format", f"a JSON {type(row).__name__}, not an object"))
    known = row_format or _detect(row)
    if isinstance(known, Dropped):
        return ParsedRow(known)
    read, columns, turns = _READERS[known]
    filled = {key for key, value in row.items() if value not in (None, "", [], {})}
    unread = tuple(sorted(filled - {*columns}))
    if harmful := sorted({*unread} & {*_SEEN_BY_MODELS, *(() if turns else _SEEN_BESIDE_TEXTS)}):
        detail = f"{', '.join(harmful)} beside the {known}, which is not read and changes what the model sees"
        return ParsedRow(Dropped("unread_column", detail), known, unread)
    try:
        content = read(row)
    except RecursionError:
        content = Dropped("invalid_json", "nested too deep to be written again")
    return ParsedRow(content, known, unread)


def _detect(row: Row) -> str | Dropped:
    """The format that a row's columns tell; a list of turns or of ids holds all that texts beside it could say."""
    there = {key for key, value in row.items() if value is not None}
    whole = [name for name in ("input_ids", "messages", "conversations") if name in there]
    if len(whole) > 1:
        return Dropped("ambiguous_format", f"{' and '.join(whole)} in one row; set the source's format")
    if whole:
        return "nemo" if whole == ["conversations"] and "mask" in there else whole[0]
    questions, answers = [q for q in _QUESTIONS if q in there], [a for a in _ANSWERS if a in there]
    if "turns" in there:
        return "turns"
    if "instruction" in there:
        return "alpaca"
    if isinstance(row.get("prompt"), list):  # an answer beside it is no turn: the solution, as for reinforcement learning
        return "prompt_completion" if isinstance(row.get("completion"), list) else "prompt"
    if questions and answers:
        return "question_answer"
    for name in ("prompt", "text"):
        if name in there:
            return name
    shown = ", ".join(sorted(repr(key)[:40] for key in row)[:8])
    return Dropped("unknown_format", f"none of the columns that tell a format among: {shown}")


def _tokenized(row: Row) -> Content:
    ids, mask = row.get("input_ids"), row.get("loss_mask")
    if mask is None and _whole_numbers(ids):
        mask = [1] * len(ids)
    if not _whole_numbers(ids) or not isinstance(mask, list) or len(ids) != len(mask):
        return Dropped("unknown_format", "input_ids needs whole numbers, and a loss_mask of as many 0s and 1s, or none")
    if not all(isinstance(flag, int) and flag in {0, 1} for flag in mask):
        return Dropped("unknown_format", "a loss_mask of other values than 0 and 1")
    seen = row.get("attention_mask")
    if seen is not None and (not isinstance(seen, list) or any(one != 1 for one in seen)):
        return Dropped("unread_column", "an attention_mask that is not 1 everywhere: take the padding off")
    return Tokenized(tuple(ids), tuple(bool(flag) for flag in mask))


def _whole_numbers(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _text(row: Row) -> Content:
    text = row.get("text")
    if not isinstance(text, str):
        return Dropped("unknown_format", f"text is a {type(text).__name__}, not a string")
    return Text(text) if text.strip() else Dropped("empty_turn", "the text is empty")


def _messages(row: Row) -> Content:
    return _chat(row, row.get("messages"))


def _conversations(row: Row) -> Content:
    return _chat(row, row.get("conversations"))


def _nemo(row: Row) -> Content:
    masked = row.get("mask")
    if not isinstance(masked, str) or ROLES.get(masked.lower()) == "assistant":
        return Dropped("unread_column", f"mask = {masked!r}: all but the assistant's turns would be trained on")
    turns = row.get("conversations")
    if row.get("type") and isinstance(turns, list) and any(isinstance(turn, Mapping) and turn.get("label") for turn in turns):
        return Dropped("unread_column", "labels of the turns, which NeMo puts into the text")
    return _chat(row, turns)


def _turns(row: Row) -> Content:
    turns = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        return Dropped("unknown_format", "turns is not a list of strings")
    return _chat(row, [{"role": "user", "content": turn} for turn in turns])


def _prompt(row: Row) -> Content:
    prompt = row.get("prompt")
    return _chat(row, [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def _prompt_completion(row: Row) -> Content:
    prompt, completion = _chat(row, row.get("prompt")), _chat({}, row.get("completion"))
    if not isinstance(prompt, Conversation):
        return prompt
    if not isinstance(completion, Conversation):
        return completion
    read = tuple(replace(message, trained=False) for message in prompt.messages)
    return Conversation((*read, *completion.messages), prompt.tools)


def _question_answer(row: Row) -> Content:
    question, answer = _only(row, _QUESTIONS), _only(row, _ANSWERS)
    if isinstance(question, Dropped):
        return question
    if isinstance(answer, Dropped):
        return answer
    return _chat(row, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])


def _alpaca(row: Row) -> Content:
    instruction, more, answer = row.get("instruction"), _only(row, _INPUTS, ""), _only(row, _OUTPUTS, None)
    if isinstance(more, Dropped):
        return more
    if isinstance(answer, Dropped):
        return answer
    if not isinstance(instruction, str) or not isinstance(more, str):
        return Dropped("unknown_format", "instruction and input are strings")
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        return Dropped("unknown_format", "history is not a list of pairs")
    said = [text for pair in history for text in pair] + ["\n".join(text for text in (instruction, more) if text)]
    said += [] if answer is None else [answer]
    return _chat(row, [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)])


def _only(row: Row, names: tuple[str, ...], default: Any = Dropped("unknown_format", "no such column")) -> Any:  # noqa: B008
    """The one of several columns that has a value."""
    there = [name for name in names if row.get(name) is not None]
    if len(there) > 1:
        filled = [name for name in there if row[name] != ""]
        there = filled or there[:1]
    if len(there) > 1:
        return Dropped("ambiguous_format", f"{' and '.join(there)} in one row; remove one")
    return row[there[0]] if there else default


def _chat(row: Row, turns: Any) -> Content:
    """Turns with the system text and the tools that stand beside them."""
    turns = load_nested(turns) if isinstance(turns, str) else turns  # as in tables whose writer wanted no nested columns
    if not isinstance(turns, list):
        return Dropped("unknown_format", f"the turns are a {type(turns).__name__}, not a list")
    messages = []
    for number, turn in enumerate(turns):
        message = read_turn(turn, f"turn {number}")
        if isinstance(message, Dropped):
            return message
        messages.append(message)
    if not messages:
        return Dropped("no_assistant_turn", "no turns at all")
    system = _only(row, _SYSTEM, "")
    if not isinstance(system, str):
        return system if isinstance(system, Dropped) else Dropped("unknown_format", "the system text is not a string")
    if system and messages[0].role != "system":
        messages.insert(0, Message("system", system))
    elif system and messages[0].content != system:
        return Dropped("ambiguous_format", "a system text beside turns that begin with another one")
    offered = _only(row, _TOOLS, None)
    tools = offered if isinstance(offered, Dropped) else read_tools(offered)
    return tools if isinstance(tools, Dropped) else Conversation(tuple(messages), tools)


_BESIDE_TURNS = (*_SYSTEM, *_TOOLS)
_READERS: dict[str, tuple[Callable[[Row], Content], tuple[str, ...], bool]] = {
    "messages": (_messages, ("messages", *_BESIDE_TURNS), True),
    "conversations": (_conversations, ("conversations", *_BESIDE_TURNS), True),
    "nemo": (_nemo, ("conversations", "mask", "type", *_BESIDE_TURNS), True),
    "prompt_completion": (_prompt_completion, ("prompt", "completion", *_BESIDE_TURNS), True),
    "turns": (_turns, ("turns", *_BESIDE_TURNS), True),
    "prompt": (_prompt, ("prompt", *_BESIDE_TURNS), False),
    "question_answer": (_question_answer, (*_QUESTIONS, *_ANSWERS, *_BESIDE_TURNS), False),
    "alpaca": (_alpaca, ("instruction", "history", *_INPUTS, *_OUTPUTS, *_BESIDE_TURNS), False),
    "text": (_text, ("text",), False),
    "input_ids": (_tokenized, ("input_ids", "loss_mask", "attention_mask"), True),
}
"""Format → its reader, the columns that it reads, and whether they hold all of the row."""

FORMATS = tuple(_READERS)
