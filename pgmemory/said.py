"""What a chain or an agent says: which of a chain's inputs and outputs it is, and that as messages."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from langchain_core.agents import AgentAction
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.messages.utils import message_chunk_to_message

from pgmemory.errors import ConfigurationError, MessageNotStorableError
from pgmemory.serialization import to_json_text

# What tells a list of content blocks from a list that is a chain's result.
_BLOCK_TYPES = {
    "text", "text-plain", "input_text", "output_text", "image_url", "image", "input_image", "input_audio", "audio",
    "video", "file", "input_file", "document", "media", "tool_use", "tool_call", "tool_result", "thinking",
    "reasoning", "refusal", "non_standard",
}  # fmt: skip

STEPS = "intermediate_steps"
"""The output in which AgentExecutor returns an agent's steps."""

# LangChain's own words, which applications may look for.
_KEYS_EXPECTED = {"input_key": "One input key expected got", "output_key": "Got multiple output keys:"}

_NOT_IN_A_NAME = re.compile("[^a-zA-Z0-9_-]")

# LangChain's own name for the one argument of a tool that takes a text.
_SINGLE_ARGUMENT = "__arg1"


def said_key(
    memory: str, field: str, key: str | None, values: dict[str, Any], *, without: set[str], fallback: str | None = None
) -> str:
    """Return the key of what was said among a chain's inputs or outputs.

    Args:
        memory: The class of the memory that stores it, for errors.
        field: The memory's field that names the key: ``input_key`` or ``output_key``.
        key: What that is set to; None to take the only one there is.
        values: The chain's inputs or outputs.
        without: Keys of what nobody said.
        fallback: The key to take if there are several.

    Raises:
        ConfigurationError: It cannot be told; the text names the keys that there are.
    """
    candidates = [name for name in values if name not in without]
    if key is None and len(candidates) == 1:
        key = candidates[0]
    elif key is None and fallback in candidates:
        key = fallback
    if key is None or key not in values:
        problem = f"{field} is {key!r}, which is not there" if key is not None else f"{field} is not set"
        raise ConfigurationError(
            f"{_KEYS_EXPECTED[field]} {sorted(candidates)}: {memory} cannot tell which to store, for "
            f"{problem}. Set {field} to what was said, not to what another memory fills in"
        )
    return key


def to_messages(said: Any, message_class: type[HumanMessage] | type[AIMessage], path: str) -> list[BaseMessage]:
    """Return what was said as messages: text, a message, content blocks, or messages as they are; else its JSON text.

    Args:
        said: By a human or a model.
        message_class: Whose words they are, where it is no message.
        path: Where it sits, for errors.

    Raises:
        MessageNotStorableError: It has no JSON form.
    """
    if isinstance(said, BaseMessage):
        return [said]
    if isinstance(said, list) and said and all(isinstance(item, BaseMessage) for item in said):
        return said
    return [message_class(content="" if said is None else _content(said, path))]


def steps_to_messages(steps: Any, path: str) -> list[BaseMessage]:
    """Return an agent's steps as AI messages with tool calls, each followed by its results, in the order of the calls.

    A tool-calling agent's message is kept as it is, once for all of its calls. Of other agents a call is made from the
    action: the message is the model's own, or has the action's log as its text; the call gets an id of its own; a tool
    input that is text is the argument ``__arg1``, as LangChain names it, and characters that providers refuse in the
    name of a tool become ``_``.

    Args:
        steps: Pairs of an AgentAction and what the tool returned, as AgentExecutor returns them.
        path: Where they sit, for errors.

    Raises:
        ConfigurationError: They are no such pairs.
    """
    messages: list[BaseMessage] = []
    last_log: Sequence[BaseMessage] | None = None
    answered: set[str] = set()  # of the calls of the last log
    for action, observation in _pairs(steps, path):
        log = getattr(action, "message_log", None)
        call_id = getattr(action, "tool_call_id", None)
        if log and call_id is not None:
            # A model may say the same again: a call that has its result is another message's.
            if last_log is None or list(log) != list(last_log) or call_id in answered:
                messages += [_whole(message) for message in log]
                answered = set()
            answered.add(call_id)
            last_log, name = log, action.tool
        else:
            name = _call_name(action.tool)
            call_id, last_log = f"call_{uuid.uuid4().hex}", None
            messages += _with_call(action, log, call_id)
        messages.append(_result(name, call_id, observation))
    return messages


def _pairs(steps: Any, path: str) -> list[tuple[AgentAction, Any]]:
    try:
        pairs = [(action, observation) for action, observation in steps]
    except (TypeError, ValueError):
        pairs = [(None, None)]
    if any(not isinstance(action, AgentAction) for action, _ in pairs):
        raise ConfigurationError(f"{path} must be pairs of an AgentAction and what its tool returned")
    return pairs


def _with_call(action: AgentAction, log: Sequence[BaseMessage] | None, call_id: str) -> list[BaseMessage]:
    """Return the messages behind an action, the last of them with the action's call."""
    arguments = action.tool_input if isinstance(action.tool_input, dict) else {_SINGLE_ARGUMENT: action.tool_input}
    call = {"name": _call_name(action.tool), "args": arguments, "id": call_id, "type": "tool_call"}
    *before, message = [_whole(message) for message in log or [AIMessage(action.log)]]
    if not isinstance(message, AIMessage):
        return [*before, message, AIMessage(action.log, tool_calls=[call])]
    # The call stands for the older form, in which a model could make one call without an id.
    others = {key: value for key, value in message.additional_kwargs.items() if key != "function_call"}
    return [*before, message.model_copy(update={"tool_calls": [call], "additional_kwargs": others})]


def _call_name(tool: str) -> str:
    """Return a tool's name as model providers accept it; text agents may have others."""
    return _NOT_IN_A_NAME.sub("_", tool)[:64] or "_"


def _result(tool: str, call_id: str, observation: Any) -> ToolMessage:
    if isinstance(observation, ToolMessage):
        return observation.model_copy(update={"tool_call_id": call_id, "name": observation.name or tool})
    try:
        content = "" if observation is None else _content(observation, "result")
    except MessageNotStorableError:
        content = str(observation)  # which is what the agent's model was shown
    return ToolMessage(content, tool_call_id=call_id, name=tool)


def _whole(message: BaseMessage) -> BaseMessage:
    return message_chunk_to_message(message)  # others are returned as they are


def _content(said: Any, path: str) -> Any:
    if isinstance(said, str) or _is_content(said):
        return said
    return json.dumps(json.loads(to_json_text(said, path=path)), ensure_ascii=False)


def _is_content(said: Any) -> bool:
    """Tell content blocks, perhaps with texts between them, from a list that is a chain's result."""
    if not isinstance(said, list):
        return False
    blocks = [item for item in said if not isinstance(item, str)]
    types = [block.get("type") if isinstance(block, dict) else None for block in blocks]
    # One type that is known tells that the others are types of its provider.
    return all(isinstance(kind, str) for kind in types) and not _BLOCK_TYPES.isdisjoint(types)
