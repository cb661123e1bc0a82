# `make` alone lists the targets. Everything is installed into .venv and run from there.

PYTHON ?= python3
PORT ?= 8000
ARGS ?=
BIN := .venv/bin
MODEL_NAME := smollm2-135m-instruct

# --enforce-eager, because a first try should start fast. Stock vLLM on two shared cores was ready
# after 26 s and 37 s with it, and after 73 s without it from a warm compilation cache (longer from
# a cold one: 139 s, on a busier machine). Compiled, a prompt of 900 tokens and 64 more took 2.4 s
# instead of 2.9 s: to measure throughput, pass ARGS=--no-enforce-eager.
# 512 MiB hold about 23,000 tokens of this model: few enough that freed blocks matter.
SERVE_FLAGS := \
	--served-model-name $(MODEL_NAME) \
	--kv-eviction-budget 512 \
	--kv-eviction-prompt-interval 512 \
	--enable-prompt-tokens-details \
	--max-model-len 8192 \
	--kv-cache-memory-bytes 512M \
	--enforce-eager \
	--host 127.0.0.1

.DEFAULT_GOAL := help
.PHONY: help install develop serve fast test test-next load lint docs tables figures demo evaluate wheel clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: ## make .venv with what serving needs; returns at once when up to date (PYTHON=python3)
	@$(PYTHON) packaging/install.py --for serve

develop: ## the same with what tests need on top
	@$(PYTHON) packaging/install.py --for test

# Folder and type are asked for first: inside vllm's arguments a failure would go unnoticed.
# A processor without instructions for bfloat16 is 40 times faster in float32.
serve: install ## serve the small model on 127.0.0.1 with eviction (PORT=8000, ARGS=more flags)
	@model="$$($(BIN)/vllm-kvselect tiny-model)" \
		&& dtype="$$($(BIN)/vllm-kvselect fast-dtype)" \
		&& echo 'serve: vLLM starts; in about a minute it answers on http://127.0.0.1:$(PORT)' \
		&& exec $(BIN)/vllm serve "$$model" --dtype "$$dtype" $(SERVE_FLAGS) --port $(PORT) $(ARGS)

fast: develop ## the tests that neither start an engine nor are slow: under a minute
	$(BIN)/pytest -n 2 --dist loadgroup -m 'not engine and not slow and not load' $(ARGS)

test: lint docs ## lint, build the documentation, then run all tests (ARGS=pytest's options)
	$(BIN)/pytest -n 2 --dist loadgroup $(ARGS)

test-next: develop ## the tests that need no compiled code, on a newer vLLM (ARGS=pytest's options)
	$(BIN)/python -m tests.next -n 2 --dist loadgroup $(ARGS)

load: develop ## a crowded server, crowded engines, and tests that take too long for `make test`
	$(BIN)/pytest -n 2 --dist loadgroup -m load
	$(BIN)/pytest tests/engine/test_machine.py -k ten_thousand --machine-steps 200000 \
		--timeout 0 -o faulthandler_timeout=0
	$(BIN)/python -m tests.load.soak --minutes 5
	$(BIN)/python -m tests.load.equivalence --num-requests 500 --num-distinct 100

lint: develop ## ruff, its formatter, mypy, and the contracts on imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

# Not --quiet: what is not said is no error.
docs: develop ## build the documentation site into site/; broken links and anchors are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

tables: develop ## make the tables of the documentation from the code
	$(BIN)/python -m tests.tables

figures: develop ## draw the pictures of the documentation from docs/data
	$(BIN)/python benchmarks/figures.py

demo: install ## run the demo
	$(BIN)/python benchmarks/demo.py

# A part of the README's table of quality, in two to three minutes on two cores.
evaluate: develop ## measure what the small model still answers after eviction (ARGS=more options)
	$(BIN)/vllm-kvselect evaluate ruler --tasks niah_single_1,niah_single_2 \
		--lengths 2048 --max-tokens 14 --num-examples 8 --scenarios regular,context-only \
		--methods random,streaming-llm,snapkv-perturb,adakv-perturb,thetakv,layer-defensivekv,layer-probe \
		--out evaluation $(ARGS)

# What is left in build/ of an earlier one would be in the wheel, too.
wheel: ## build a wheel into dist/ (PYTHON=python3)
	rm -rf build dist
	$(PYTHON) -m pip wheel . --no-deps --wheel-dir dist

clean: ## remove .venv, caches and build output
	rm -rf .venv .next .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
