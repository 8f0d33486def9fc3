"""Transcripts: everything a person should read is there, and nothing that was said is obeyed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, timezone
from html.parser import HTMLParser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pgmemory.models import ConversationRecord, StoredMessage, StoredSummary
from pgmemory.transcript import Detail, Entry, ToolCall, as_html, as_text, entries, visible

GOLDEN = json.loads((Path(__file__).parent / "golden_rows.json").read_text())
NOON = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)
CONTROLS = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\U000e0000-\U000e007f]")


def a_record(text: str = "x", **changes: Any) -> ConversationRecord:
    fields: dict[str, Any] = {
        "session_id": text,
        "user_id": text,
        "tenant_id": text,
        "metadata": {text: [text]},
        "created_at": NOON,
        "updated_at": NOON,
        "message_count": 3,
        "next_message_index": 3,
        "summarized_through": -1,
        "time_to_live": timedelta(days=30),
        "held_at": NOON,
        "hold_reason": text,
        "is_encrypted": True,
    }
    return ConversationRecord(**{**fields, **changes})


def said(*contents: str) -> list[StoredMessage]:
    """Messages of alternating roles."""
    roles = ("human", "ai")
    return [
        StoredMessage(roles[index % 2], content, message_index=index, created_at=NOON)
        for index, content in enumerate(contents)
    ]


def everywhere(text: str) -> list[StoredMessage]:
    """Messages that hold a text in each field that a page shows."""
    call = {"name": text, "args": {text: text}, "id": text, "error": text}
    result = {"content": text, "name": text, "tool_call_id": text, "status": text}
    rows: list[tuple[str, dict[str, Any] | str, dict[str, Any] | str]] = [
        ("human", {"content": text, "name": text}, {}),
        ("human", {"content": [{"type": "text", "text": text}, {"type": f"a {text}", text: text}]}, {}),
        ("ai", {"content": text, "tool_calls": [call], "invalid_tool_calls": [{**call, "args": text}]}, {}),
        ("ai", {"content": "", "tool_calls": text}, {"function_call": {"name": text, "arguments": text}}),
        ("ai", {"content": ""}, {"refusal": text, "audio": {text: text}}),
        ("tool", result, {}),
        ("function", {"content": text, "name": text}, {}),
        ("chat", {"content": text, "role": text}, {}),
        (f"a {text}", {"content": text}, {}),
        ("ai", f"broken {text}", f"broken {text}"),
    ]
    return [
        StoredMessage(
            role,
            "said",
            kwargs if isinstance(kwargs, str) else json.dumps(kwargs),
            extra if isinstance(extra, str) else json.dumps(extra),
            tags=(text,),
            token_count=1,
            message_index=index,
            created_at=NOON,
        )
        for index, (role, extra, kwargs) in enumerate(rows)
    ]


def a_summary(text: str = "so far", covers_through: int = 2) -> StoredSummary:
    return StoredSummary(text, covers_through, NOON)


def page(messages: Sequence[StoredMessage], summary: StoredSummary | None = None, text: str = "x") -> str:
    return "".join(as_html(a_record(text), messages, summary))


def plain(messages: Sequence[StoredMessage], summary: StoredSummary | None = None, text: str = "x") -> str:
    return "\n".join(as_text(a_record(text), messages, summary))


class Parsed(HTMLParser):
    """What a page consists of: its tags with their attributes, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if ("class", "hidden") not in attrs:
            self.tags.append((tag, tuple(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.tags.append((f"!--{data}", ()))


def golden(role: str, number: int = 0) -> Entry:
    rows = [row for row in GOLDEN if row["role"] == role]
    return next(entries([StoredMessage(**rows[number])]))


# What there is to read


def test_a_plain_message_is_read() -> None:
    message = StoredMessage(
        "human", "Hello", tags=("a", "b"), token_count=7, message_index=3, created_at=NOON.astimezone(None)
    )
    (entry,) = entries([message])
    assert entry == Entry(3, "human", "Human", NOON, "Hello", tags=("a", "b"), token_count=7)
    assert entry.time is not None and entry.time.utcoffset() == timedelta(0)


def test_every_kind_of_message_has_a_label() -> None:
    assert [golden(role).label for role in ("human", "ai", "system", "tool", "function", "chat", "remove")] == [
        "Human", "AI", "System", "Tool", "Function", "critic", "Removal",
    ]  # fmt: skip
    assert next(entries([StoredMessage("developer", "x")])).label == "developer"


def test_what_the_content_column_cannot_hold_is_read_from_beside_it() -> None:
    entry = golden("human", 1)
    assert (entry.text, entry.name) == ("Grüße \ud83d \x00 😀", "Ann")


def test_a_content_block_is_named_in_the_text_and_shown_beside_it() -> None:
    entry = golden("human", 2)
    assert entry.text == "What is this?\n[image_url]"
    assert [detail.title for detail in entry.details] == ["image_url"]
    assert "https://x/y" in entry.details[0].text


def test_a_large_block_is_cut() -> None:
    extra = json.dumps({"content": [{"type": "image", "data": "A" * 100_000}]})
    (detail,) = next(entries([StoredMessage("human", "[image]", extra=extra)])).details
    assert len(detail.text) < 1100 and detail.text.endswith("characters in all)")


def test_tool_calls_are_read_in_every_form() -> None:
    assert golden("ai", 1).tool_calls == (ToolCall("f", '{\n  "x": 1\n}'),)
    assert golden("ai", 3).tool_calls == (ToolCall("f", "{", None, "no JSON"),)
    assert golden("ai", 4).tool_calls == (ToolCall("f", "{}", "c"),)
    provider = json.dumps({"tool_calls": [{"id": "c", "function": {"name": "g", "arguments": '{"y": "ü"}'}}]})
    (entry,) = entries([StoredMessage("ai", "", provider)])
    assert entry.tool_calls == (ToolCall("g", '{\n  "y": "ü"\n}', "c"),)


def test_a_block_that_repeats_a_tool_call_is_left_out() -> None:
    blocks = [{"type": "text", "text": "I look."}, {"type": "tool_use", "id": "c", "name": "f", "input": {}}]
    calls = [{"name": "f", "args": {}, "id": "c"}]
    (entry,) = entries([StoredMessage("ai", "", extra=json.dumps({"content": blocks, "tool_calls": calls}))])
    assert (entry.text, entry.details) == ("I look.", ())
    (entry,) = entries([StoredMessage("ai", "", extra=json.dumps({"content": blocks}))])
    assert entry.text == "I look.\n[tool_use]"


def test_a_result_says_whose_it_is_and_how_it_ended() -> None:
    entry = golden("tool")
    assert (entry.name, entry.tool_call_id, entry.status) == ("f", "c1", "error")


def test_a_refusal_is_read() -> None:
    (entry,) = entries([StoredMessage("ai", "", json.dumps({"refusal": "I won't."}))])
    assert entry.details == (Detail("refusal", "I won't."),)


@pytest.mark.parametrize(
    ("stored", "seen"),
    [
        ("{", "{"),
        ("[1, 2]", "[1, 2]"),
        ("null", "null"),
        ("9" * 5000, "9" * 5000),
        ("[" * 100_000, "[" * 100_000),
        ('{"tool_calls": "none"}', "none"),
        ('{"tool_calls": {"a": 5}}', '"a": 5'),
        ('{"tool_calls": [17, null, "call", {}, {"name": ["n"], "args": 3, "id": 4}]}', "17"),
        ('{"name": {"first": "Ann"}}', "Ann"),
        ('{"content": 5}', "said"),
        ('{"content": [null, 1.5, {"type": 6}, {"type": "text", "text": null}]}', "1.5"),
        ('{"tool_calls": [{"name": "f", "args": ' + '{"a":' * 3000 + "1" + "}" * 3000 + "}]}", "f"),
    ],
)
def test_no_row_breaks_a_transcript(stored: str, seen: str) -> None:
    for role in ("ai", "tool", "chat", ""):
        messages = [StoredMessage(role, "said", stored, stored), *said("afterwards")]
        for shown in (Parsed(page(messages)).text, plain(messages)):
            assert seen in shown and "afterwards" in shown
            assert "said" in shown or '"content": [' in stored


# Where the summary ends


@pytest.mark.parametrize(
    ("covers_through", "before", "after"),
    [(-1, "", "abc"), (0, "a", "bc"), (1, "ab", "c"), (2, "abc", ""), (9, "abc", "")],
)
def test_the_summary_stands_after_the_last_message_that_it_covers(covers_through: int, before: str, after: str) -> None:
    messages, summary = said("[a]", "[b]", "[c]"), a_summary("<summed up>", covers_through)
    for shown in (Parsed(page(messages, summary)).text, plain(messages, summary)):
        first, _, second = shown.partition("The summary covers the messages up to here")
        assert "<summed up>" in second
        assert ("".join(re.findall(r"\[(\w)]", first)), "".join(re.findall(r"\[(\w)]", second))) == (before, after)


def test_without_a_summary_none_is_mentioned() -> None:
    assert "summary covers" not in page(said("a")) + plain(said("a"))


# Text for a terminal


def test_the_text_shows_all_there_is() -> None:
    messages = [
        StoredMessage("human", "Look\nthere", token_count=1200, tags=("a",), message_index=0, created_at=NOON),
        StoredMessage(
            "ai",
            "",
            extra=json.dumps({"tool_calls": [{"name": "find", "args": {"q": "é"}, "id": "c1"}]}),
            message_index=1,
        ),
        StoredMessage(
            "tool",
            "none",
            extra=json.dumps({"name": "find", "tool_call_id": "c1", "status": "error"}),
            message_index=2,
        ),
    ]
    record = a_record("ticket", metadata={}, tenant_id="", held_at=None, hold_reason=None, is_encrypted=False)
    assert list(as_text(record, messages, a_summary(covers_through=0))) == [
        "Conversation ticket",
        "User: ticket",
        "Started: 2026-03-01 12:00:00 UTC",
        "Last turn: 2026-03-01 12:00:00 UTC",
        "Messages: 3",
        "Kept after its last turn for: 30 days, 0:00:00",
        "",
        "#0 Human · 2026-03-01 12:00:00 UTC · 1,200 tokens · tags: a",
        "    Look",
        "    there",
        "",
        "== The summary covers the messages up to here (#0) ==",
        "Summary of 2026-03-01 12:00:00 UTC:",
        "    so far",
        "",
        "#1 AI",
        "    calls find (c1)",
        "        {",
        '          "q": "é"',
        "        }",
        "",
        "#2 Tool find · error · result of c1",
        "    none",
    ]


DECEIVING = (
    "\x1b[2J\x1b]0;t\x07 \x9b31m \r over\x08 \x00 \v\f\x7f "
    "\u202egpj\u202c \u2066i\u2069 \u2028 \ud83d \U000e0041\n#9 AI"
)


def test_nothing_that_a_terminal_obeys_reaches_it() -> None:
    lines = list(as_text(a_record(DECEIVING), everywhere(DECEIVING), a_summary(DECEIVING)))
    assert [line for line in lines if CONTROLS.search(line)] == []
    assert sum("<U+001B>[2J" in line for line in lines) > 20
    "\n".join(lines).encode()


def test_what_was_said_does_not_pass_for_another_message() -> None:
    def own(text: str) -> list[str]:
        lines = as_text(a_record(text), everywhere(text), a_summary(text))
        return [re.split(r"\W", line)[1] for line in lines if line.startswith("#")]

    assert own(DECEIVING) == own("x") == [str(index) for index in range(10)]


@pytest.mark.parametrize("text", ["tab\there", "שלום\u200f", "نمی\u200cخواهم", "👩\u200d🚀", "Grüße, 漢字", "a\u00adb"])
def test_ordinary_text_of_any_script_stays_as_it_is(text: str) -> None:
    assert visible(text) == text
    assert text in Parsed(page(said(text))).text


def test_line_ends_of_other_systems_are_line_ends() -> None:
    assert visible("a\r\nb\rc") == "a\nb<U+000D>c"


# The page


def payloads(address: str) -> list[str]:
    """Content that would make a request, each its own, or write a marker, if it were obeyed."""
    ran = f"fetch('{address}/ran')"
    return [
        f"<script>document.title = 'ran'; {ran}</script>",
        f"<script src='{address}/script'></script>",
        f"<img src='{address}/img' onerror=\"fetch('{address}/onerror')\">",
        f"<svg onload=\"fetch('{address}/svg')\"><image href='{address}/svg-image'/></svg>",
        f"<iframe src='{address}/iframe'></iframe>",
        f"<iframe srcdoc=\"<script>fetch('{address}/srcdoc')</script>\"></iframe>",
        f"<object data='{address}/object'></object><embed src='{address}/embed'>",
        f"<style>@import '{address}/import'; body {{ background: url({address}/css) }}</style>",
        f"<p style=\"background: url('{address}/style-attribute')\">styled</p>",
        f"<link rel=stylesheet href='{address}/link'><video src='{address}/video' autoplay></video>",
        f"<details open ontoggle=\"fetch('{address}/toggle')\">d</details>",
        f"<input autofocus onfocus=\"fetch('{address}/focus')\">",
        f'" onmouseover="{ran}" x="',
        f"' autofocus onfocus='{ran}",
        f"</title></style></pre></textarea></details></article><script>{ran}</script>",
        f"--><!--><![CDATA[<script>{ran}</script>]]>",
        f"&lt;script&gt;{ran}&lt;/script&gt; &#60;b&#62; &amp;lt;",
        "<scr\x00ipt>\x00<\x00b>",
        f"[a](javascript:{ran}) ![b]({address}/markdown) <a href=\"javascript:{ran}\">c</a>",
        "{{7*7}} ${7*7} <%= 7*7 %> {0} {record} %s %(x)s",
    ]  # fmt: skip


NAVIGATION = "<base href='{0}/base/'><meta http-equiv=refresh content=\"0;url={0}/refresh\"><form action='{0}/form'>"
HOSTILE = "\n".join([*payloads("http://127.0.0.1:9"), NAVIGATION.format("http://127.0.0.1:9")])


@pytest.mark.parametrize("text", [*payloads("http://127.0.0.1:9"), HOSTILE, DECEIVING])
def test_content_changes_no_tag_of_the_page(text: str) -> None:
    with_text = Parsed(page(everywhere(text), a_summary(text), text))
    with_x = Parsed(page(everywhere("x"), a_summary("x"), "x"))
    assert with_text.tags == with_x.tags
    readable = CONTROLS.sub(lambda match: match[0] if match[0] == "\n" else f"U+{ord(match[0]):04X}", text)
    assert with_text.text.count(readable) > 30


def test_the_page_refers_to_itself_alone() -> None:
    html = page(everywhere("x"), a_summary())
    attributes = [(name, value) for _, found in Parsed(html).tags for name, value in found]
    assert {name for name, _ in attributes} <= {
        "lang", "dir", "charset", "name", "content", "http-equiv", "class", "id", "href", "datetime", "open",
        "aria-label", "aria-labelledby", "tabindex",
    }  # fmt: skip
    assert all(str(value).startswith("#") for name, value in attributes if name == "href")
    assert "default-src 'none'" in html and "unsafe" not in html and "url(" not in html and "@import" not in html


def test_the_page_has_landmarks_headings_and_times() -> None:
    messages = [*said("a", "b"), StoredMessage("human", "c", message_index=2, created_at=NOON + timedelta(days=1))]
    parsed = Parsed(page(messages, a_summary()))
    names = [tag for tag, _ in parsed.tags]
    assert [names.count(name) for name in ("h1", "main", "article", "footer", "h2")] == [1, 1, 3, 1, 2]
    assert ("html", (("lang", "en"),)) in parsed.tags and ("meta", (("charset", "utf-8"),)) in parsed.tags
    assert ("time", (("datetime", "2026-03-02T12:00:00+00:00"),)) in parsed.tags
    assert "1 March 2026" in parsed.text and "2 March 2026" in parsed.text
    said_blocks = [dict(attributes) for tag, attributes in parsed.tags if ("class", "said") in attributes]
    assert len(said_blocks) == 4 and all(block["dir"] == "auto" for block in said_blocks)


@pytest.mark.parametrize("write", [as_html, as_text])
def test_a_transcript_is_written_while_its_messages_are_read(write: Any) -> None:
    read = 0

    def messages() -> Iterator[StoredMessage]:
        nonlocal read
        for message in said(*map("said {}".format, range(100))):
            read += 1
            yield message

    for part in write(a_record(), messages(), None):
        if "said 41" in part:
            assert read == 42
            return
    raise AssertionError("message 41 is not there")


# In a browser


class Server(NamedTuple):
    """A web server on the loopback interface, and the paths that it was asked for."""

    address: str
    asked: set[str]


@pytest.fixture(scope="module")
def web_server() -> Iterator[Server]:
    asked: set[str] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.add(self.path)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield Server(f"http://127.0.0.1:{server.server_port}", asked)
    server.shutdown()
    server.server_close()


class Opened(NamedTuple):
    """What a browser made of pages: their documents after all scripts, what they asked for, and a print."""

    documents: dict[str, str]
    asked: dict[str, set[str]]
    pdf: bytes


@pytest.fixture(scope="module")
def opened(web_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """Pages of the same content: written without care, with the page's policy alone, and as they should be."""
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("needs Chromium (Debian's package chromium)")
    folder = tmp_path_factory.mktemp("browser")

    def content(name: str) -> str:
        return "\n".join(payloads(f"{web_server.address}/{name}"))

    transcript = content("transcript") + NAVIGATION.format(f"{web_server.address}/transcript")
    head, main, rest = page(said("a")).partition('<main id="messages">')
    long_call = {"tool_calls": [{"name": "f", "args": {"lines": list(range(300))}}]}
    pages = {
        "careless": f"<!DOCTYPE html><title>t</title><body>{content('careless')}",
        "navigating": f"<!DOCTYPE html><title>t</title><body>{NAVIGATION.format(web_server.address + '/navigating')}",
        "policy": head + main + content("policy") + rest,
        "transcript": page(everywhere(transcript), a_summary(transcript), transcript),
        "printed": page([StoredMessage("ai", "x", extra=json.dumps(long_call), message_index=0)]),
    }
    running = {}
    for name, html in pages.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
        command = [
            browser, "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
            "--disable-background-networking", "--disable-component-update", "--no-pdf-header-footer",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=2000",
            f"--user-data-dir={folder / name}",
            f"--print-to-pdf={folder / 'printed.pdf'}" if name == "printed" else "--dump-dom",
            (folder / f"{name}.html").as_uri(),
        ]  # fmt: skip
        if os.geteuid() == 0:
            command.insert(1, "--no-sandbox")
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    documents = {}
    try:
        for name, process in running.items():
            documents[name] = process.communicate(timeout=60)[0].decode()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    asked = {
        name: {path.split("/", 2)[2] for path in web_server.asked if path.startswith(f"/{name}/")} for name in pages
    }
    return Opened(documents, asked, (folder / "printed.pdf").read_bytes())


def test_hostile_content_runs_and_asks_in_a_careless_page(opened: Opened) -> None:
    assert opened.asked["careless"] >= {
        "ran", "script", "img", "onerror", "svg", "svg-image", "iframe", "srcdoc", "object", "embed", "import", "css",
        "style-attribute", "link", "toggle",
    }  # fmt: skip
    assert "<title>ran</title>" in opened.documents["careless"]
    assert "refresh" in opened.asked["navigating"]


def test_a_message_whose_key_was_erased_says_so() -> None:
    (entry,) = entries([StoredMessage("human", "", message_index=0, is_erased=True)])
    assert entry.text == "(its key was erased)"


def test_hostile_content_neither_runs_nor_asks_in_a_transcript(opened: Opened) -> None:
    assert opened.asked["transcript"] == set()
    document = Parsed(opened.documents["transcript"])
    assert [tag for tag, _ in document.tags].count("article") == 10
    assert not {"script", "svg", "iframe", "base", "form", "img"} & {tag for tag, _ in document.tags}
    assert "document.title = 'ran'" in document.text and "<title>ran</title>" not in opened.documents["transcript"]


def test_the_policy_alone_lets_nothing_run_nor_ask(opened: Opened) -> None:
    assert opened.asked["policy"] == set()
    assert "<script>document.title" in opened.documents["policy"]
    assert "<title>ran</title>" not in opened.documents["policy"]


def test_a_page_prints_on_a4_with_all_that_is_folded(opened: Opened) -> None:
    assert opened.pdf.startswith(b"%PDF-")
    assert re.search(rb"/MediaBox \[0 0 59[45]\S* 84[12]", opened.pdf)
    # Three hundred lines do not fit on one page; folded, they would.
    assert len(re.findall(rb"/Type /Page\b", opened.pdf)) > 2
