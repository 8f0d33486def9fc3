# Every target sets up what it needs: a virtual environment of its own, and a PostgreSQL that comes with pip.
PYTHON ?= python3
# Test processes that run at once; 0 runs the tests in one process (for a debugger).
WORKERS ?= 3

# What a campaign of faults begins from, how long it lasts, and where its table goes.
SEED ?= 1
CHAOS ?= --seconds 120 --report docs/reliability.md
# What `make bench` does beside measuring.
BENCH ?= --output docs
# The conversations on which recall is measured: a folder of the form in which LoCoMo is published.
DIR ?= benchmarks/recall_sample

EXTRAS_demo := embedded,offline,langchain1
EXTRAS_langchain1 := langchain1,test
EXTRAS_langchain03 := langchain03,test
# For agents of LangChain 1.x, to which LangGraph's threads are handed on.
REQUIREMENTS_langchain1 := 'langchain>=1,<2'
EXTRAS_bench := langchain1,embedded,offline,vector
REQUIREMENTS_bench := --requirement benchmarks/requirements.txt
EXTRAS_peers-langchain1 := langchain1,embedded,offline
EXTRAS_peers-langchain03 := langchain03,embedded,offline
REQUIREMENTS_peers-langchain1 := --requirement tests/peers/requirements.txt 'langgraph>=1,<2'
# LangGraph 1 asks for a newer LangChain.
REQUIREMENTS_peers-langchain03 := --requirement tests/peers/requirements.txt 'langgraph>=0.6,<1'
LINE_langchain1 := LangChain 1.x
LINE_langchain03 := LangChain 0.3
# What lies below LangChain is the same beside both: it is tested beside one.
TESTS_langchain03 := -m "not install and not large and not below_langchain"

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-langchain1 test-langchain03 test-large test-install chaos bench peer-tests peer-tests-langchain1 peer-tests-langchain03 recall-bench check lint schema clean

help:
	@echo "make demo          a support bot that remembers, on a local PostgreSQL: no server, no API key needed"
	@echo "make test          all tests beside LangChain 1.x, then beside LangChain 0.3"
	@echo "make check         what to run before a commit: lint, then the tests beside LangChain 1.x"
	@echo "make lint          ruff, mypy, and whether schema.sql is up to date"
	@echo "make schema        write schema.sql from pgmemory/migrations"
	@echo "make test-large    what takes a while for the amount of its data"
	@echo "make test-install  install from the package registry beside either LangChain, in either order"
	@echo "make chaos         two minutes of random faults, audited; its table goes into docs/reliability.md (SEED=1)"
	@echo "make peer-tests    LangChain's own memory tests against our classes; writes docs/compatibility.md"
	@echo "make bench         measured beside LangChain's own memories; writes docs/benchmarks.md (BENCH=--quick only prints)"
	@echo "make recall-bench  evidence recall on conversations of LoCoMo's form (DIR=folder)"
	@echo "make clean         remove the virtual environments and what builds and tests left in this folder"
	@echo "One line alone: make test-langchain1, make test-langchain03. PYTEST_ADDOPTS is passed to pytest."

demo: .venv-demo/installed
	@.venv-demo/bin/python examples/support_bot.py </dev/null

test: test-langchain1 test-langchain03
	@echo "All tests passed beside both LangChain lines."

test-langchain1 test-langchain03: test-%: .venv-%/installed
	@echo "Testing beside $(LINE_$*)"
	@.venv-$*/bin/python -m pytest -q -n $(WORKERS) $(TESTS_$*)

test-large: .venv-langchain1/installed
	@echo "Testing with large amounts of data"
	@.venv-langchain1/bin/python -m pytest -q -m large

test-install: .venv-langchain1/installed
	@echo "Installing into fresh environments (some minutes)"
	@.venv-langchain1/bin/python -m pytest -q -n $(WORKERS) -m install

chaos: .venv-langchain1/installed
	@.venv-langchain1/bin/python tests/chaos --seed $(SEED) $(CHAOS)

peer-tests: peer-tests-langchain1 peer-tests-langchain03
	@echo "LangChain's own tests passed beside both lines, apart from those that are excused."

peer-tests-langchain1 peer-tests-langchain03: peer-tests-%: .venv-peers-%/installed
	@.venv-peers-$*/bin/python tests/peers --report docs/compatibility.md

bench: .venv-bench/installed
	@.venv-bench/bin/python -m benchmarks $(BENCH)

recall-bench: .venv-bench/installed
	@.venv-bench/bin/python -m benchmarks.recall $(DIR)

check: lint test-langchain1

lint: .venv-langchain1/installed
	@.venv-langchain1/bin/ruff check
	@.venv-langchain1/bin/mypy
	@.venv-langchain1/bin/python -m pgmemory.cli schema | diff -u schema.sql - \
		|| { echo "schema.sql is out of date: run make schema"; exit 1; }

schema: .venv-langchain1/installed
	@.venv-langchain1/bin/python -m pgmemory.cli schema >schema.sql.new
	@mv schema.sql.new schema.sql
	@echo "Wrote schema.sql"

clean:
	@rm -rf .venv-demo .venv-langchain1 .venv-langchain03 .venv-peers-langchain1 .venv-peers-langchain03 .venv-bench build dist *.egg-info schema.sql.new
	@rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	@find pgmemory tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +

.venv-peers-langchain1/installed .venv-peers-langchain03/installed: tests/peers/requirements.txt
.venv-bench/installed: benchmarks/requirements.txt

# An environment whose making broke off has no pip yet, so it is made anew.
.venv-%/installed: setup.cfg pyproject.toml
	@echo "Installing into .venv-$* (about a minute, once)"
	@test -x .venv-$*/bin/pip || $(PYTHON) -m venv --clear .venv-$*
	@.venv-$*/bin/python -m pip install -qq $(REQUIREMENTS_$*) --editable '.[$(EXTRAS_$*)]'
	@touch $@
