"""Moving conversations out and in: files, and tables of other packages.

`export_conversations` writes conversations as JSON Lines, exactly, or as OpenAI's chat messages. `import_conversations`
takes them from a source: `JsonLines` (what the export wrote), `OpenAIMessages`, `TableSource`. Both hold no more than a
page in memory. Owns the formats and what an import may do; statements are `store.transfer`'s.
"""

from __future__ import annotations

from pgmemory.transfer.exporting import ExportReport, export_conversations
from pgmemory.transfer.importing import Finding, ImportReport, import_conversations
from pgmemory.transfer.jsonlines import JsonLines
from pgmemory.transfer.openai import OpenAIMessages
from pgmemory.transfer.source import Source, SourceConversation
from pgmemory.transfer.tables import TableSource

__all__ = [
    "ExportReport",
    "Finding",
    "ImportReport",
    "JsonLines",
    "OpenAIMessages",
    "Source",
    "SourceConversation",
    "TableSource",
    "export_conversations",
    "import_conversations",
]
