"""pgmemory measured beside LangChain's own memories, on one server and with the same work: ``python -m benchmarks``."""
