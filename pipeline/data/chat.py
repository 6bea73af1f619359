"""Chat messages to token ids and loss mask, by the tokenizer's own template: the only place that renders text.

Only for text that no engine tokenised (ingest, the demo's clients); captured requests keep the engine's ids. The border
between prompt and answer is found by rendering the messages before the answer with the generation prompt, which is what
an engine does, and both sides are encoded apart, because an engine never merges tokens across it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from draftloop.pipeline.errors import InputError, RecordError

Message = Mapping[str, Any]

# Named policy for every role; any other is a reject, never a guess. A caller may pass a wider table.
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",  # the newer name of the same role
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",  # the older name of the same role
}
_FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"})


class ChatRejectError(RecordError):
    """This conversation cannot be rendered faithfully; `reason` is the ledger's word for why."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, mend="mend the row or leave it out; no other row is affected")
        self.reason = reason


class ChatTokenizer(Protocol):
    """What is used of a `transformers` tokenizer."""

    chat_template: Any
    eos_token_id: int | None
    all_special_tokens: list[str]

    def apply_chat_template(self, conversation: Any, /, **options: Any) -> Any: ...

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: list[int], /) -> str: ...


class Turn(NamedTuple):
    """One answer as an engine would have served it: everything before it is prompt, its end token is output."""

    prompt_ids: list[int]
    output_ids: list[int]


def render_prompt(tokenizer: ChatTokenizer, messages: Sequence[Message]) -> list[int]:
    """Token ids of a conversation up to where the answer begins. Raises ChatRejectError, InputError (no template)."""
    text = _template(tokenizer, normalise(messages, tokenizer), None, generate=True)
    return tokenizer.encode(text, add_special_tokens=False)


def render(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    tools: object = None,
    end_ids: frozenset[int] = frozenset(),
    roles: Mapping[str, str] = ROLES,
) -> tuple[list[int], list[bool]]:
    """Ids of a whole conversation and which of them an assistant produced, end tokens included.

    `end_ids` adds to the tokenizer's own end token. Raises ChatRejectError, also where the template rewrites earlier
    turns: then no single sequence holds every turn as it was served, and `turns` is the one to use.
    """
    plain, definitions = normalise(messages, tokenizer, roles), normalise_tools(tools)
    ends = _ends(tokenizer, end_ids)
    rendered = _Rendered(tokenizer)
    text = ""
    for index, message in enumerate(plain):
        if message["role"] == "assistant":
            before, after = _around(tokenizer, plain, definitions, index)
            rendered.append(_rest(before, text, index))
            rendered.append(_rest(after, before, index), ends)
            text = after
    whole = _template(tokenizer, plain, definitions, generate=False)
    rendered.append(_rest(whole, text, len(plain)))
    _require_same_text(tokenizer, rendered.ids, whole)
    return rendered.ids, rendered.mask


def turns(
    tokenizer: ChatTokenizer,
    messages: Sequence[Message],
    *,
    tools: object = None,
    end_ids: frozenset[int] = frozenset(),
    roles: Mapping[str, str] = ROLES,
) -> list[Turn]:
    """Each assistant turn with the prompt an engine would have seen, earlier turns as the template then shows them.

    Raises ChatRejectError.
    """
    plain, definitions = normalise(messages, tokenizer, roles), normalise_tools(tools)
    ends = _ends(tokenizer, end_ids)
    found = []
    for index, message in enumerate(plain):
        if message["role"] == "assistant":
            before, after = _around(tokenizer, plain, definitions, index)
            rendered = _Rendered(tokenizer)
            rendered.append(before)
            rendered.append(_rest(after, before, index), ends)
            _require_same_text(tokenizer, rendered.ids, after)
            num_prompt, num_output = rendered.mask.index(True), sum(rendered.mask)
            found.append(Turn(rendered.ids[:num_prompt], rendered.ids[num_prompt : num_prompt + num_output]))
    return found


def normalise(messages: object, tokenizer: ChatTokenizer, roles: Mapping[str, str] = ROLES) -> list[dict[str, Any]]:
    """Messages with known roles, text content and parsed tool arguments. Raises ChatRejectError with its reason."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise ChatRejectError("not_a_conversation", f"messages are {type(messages).__name__}, not a list of messages")
    plain = [_message(message, index, roles) for index, message in enumerate(messages)]
    if plain[0]["role"] == "assistant":
        raise ChatRejectError("assistant_first", "the conversation opens with an assistant turn: nothing asked for it")
    for index, message in enumerate(plain):
        for text in (message["content"], message.get("reasoning_content") or ""):
            if any(token in text for token in tokenizer.all_special_tokens):
                raise ChatRejectError("special_token", f"message {index} spells out a special token")
    return plain


def normalise_tools(tools: object) -> list[dict[str, Any]] | None:
    """Tool definitions as a list, from a list, a JSON text of one, or null. Raises ChatRejectError."""
    if isinstance(tools, str):
        tools = _parse(tools, "broken_tools", "tools")
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ChatRejectError("broken_tools", f"tools are {type(tools).__name__}, not a list of objects")
    return tools


class _Rendered:
    """Ids and mask grow here and nowhere else, so they cannot differ in length."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids: list[int] = []
        self.mask: list[bool] = []

    def append(self, text: str, ends: frozenset[int] | None = None) -> None:
        """Add a text; an answer, told by its `ends`, is supervised up to its end token: the rest is the template's."""
        ids = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        num_supervised = 0
        if ends is not None:
            num_supervised = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
            if not num_supervised:
                raise ChatRejectError("empty_answer", "an assistant turn renders to no tokens")
        self.ids += ids
        self.mask += [place < num_supervised for place in range(len(ids))]


def _ends(tokenizer: ChatTokenizer, more: frozenset[int]) -> frozenset[int]:
    return more | ({tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else frozenset())


def _around(
    tokenizer: ChatTokenizer, plain: list[dict[str, Any]], tools: list[dict[str, Any]] | None, index: int
) -> tuple[str, str]:
    """The text up to where answer `index` begins, and up to where it has ended."""
    before = _template(tokenizer, plain[:index], tools, generate=True)
    return before, _template(tokenizer, plain[: index + 1], tools, generate=False)


def _rest(text: str, known: str, index: int) -> str:
    if not text.startswith(known):
        raise ChatRejectError(
            "template_rewrites",
            f"at message {index} the template renders earlier text in another way",
        )
    return text[len(known) :]


def _require_same_text(tokenizer: ChatTokenizer, ids: list[int], text: str) -> None:
    # A tokenizer that puts a space before every piece would write it between header and answer, unseen.
    if tokenizer.decode(ids) != tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)):
        raise ChatRejectError("border_changes_text", "prompt and answer encoded apart give another text")


def _template(
    tokenizer: ChatTokenizer, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, generate: bool
) -> str:
    import jinja2

    if not tokenizer.chat_template:
        raise InputError("the tokenizer has no chat template", mend="use a chat model as target, or give token ids")
    try:
        # Text, not ids: what comes back for ids has changed between library versions, the text has not.
        text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=generate, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
        # The kind of error only: a template may quote the conversation, and error texts go to ordinary logs.
        raise ChatRejectError("template_refuses", f"the chat template raised {type(error).__name__}") from error
    assert isinstance(text, str)
    return text


def _message(message: object, index: int, roles: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatRejectError("not_a_conversation", f"message {index} is {type(message).__name__}, not an object")
    given = {name: value for name, value in message.items() if value is not None}
    if unknown := sorted(given.keys() - _FIELDS):
        raise ChatRejectError("unknown_field", f"message {index} has field {unknown[0]!r}, which no template shows")
    role = given.get("role")
    if not isinstance(role, str) or role not in roles:
        raise ChatRejectError("unknown_role", f"message {index} has role {role!r}; known: {', '.join(roles)}")
    plain = {**given, "role": roles[role]}
    if "reasoning_content" in given and not isinstance(given["reasoning_content"], str):
        raise ChatRejectError("bad_content", f"message {index} has reasoning that is not text")
    if calls := given.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(calls, index)
    plain["content"] = _content(given.get("content"), index, has_calls=bool(calls))
    return plain


def _content(content: object, index: int, *, has_calls: bool) -> str:
    if content is None and has_calls:
        return ""
    if content is None:
        raise ChatRejectError("no_content", f"message {index} has neither content nor tool calls")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatRejectError("bad_content", f"message {index} has content of type {type(content).__name__}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatRejectError("not_text", f"message {index} has a content part of type {kind!r}")
        texts.append(part["text"])
    return "\n".join(texts)  # as engines join the parts of a text-only template


def _tool_calls(calls: object, index: int) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise ChatRejectError("broken_tool_calls", f"message {index} has tool calls of type {type(calls).__name__}")
    plain = []
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ChatRejectError("broken_tool_calls", f"message {index} has a tool call without a function name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _parse(arguments, "broken_tool_calls", f"message {index}: tool arguments")
        if not isinstance(arguments, Mapping):
            raise ChatRejectError("broken_tool_calls", f"message {index} has tool arguments that are no object")
        plain.append({**call, "function": {**function, "arguments": dict(arguments)}})
    return plain


def _parse(text: str, reason: str, what: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise ChatRejectError(reason, f"{what} are text that is not JSON: {error}") from error
    return value
