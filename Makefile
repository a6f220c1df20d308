# Everything a developer types. A target does what it needs first: `make test` on a fresh machine is enough.
#   ARGS="..." is passed on to scripts/test, scripts/lint, scripts/bundle, scripts/wheel, scripts/bench_peers and the programs of bench/.
PRESET ?= release
ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help setup build test test-slow demo demo-real bench bench-peers bundle wheel format lint ci asan \
  asan-torch tsan tsan-torch clean distclean
MAKEFLAGS += --no-print-directory

help:  ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## system packages and .venv with pinned wheels
	@scripts/setup --no-build

build:  ## setup, then build PRESET (release: build/, debug|asan|asan-torch|tsan|tsan-torch|bundle: build-NAME/)
	@scripts/setup --preset $(PRESET)

test: build  ## all tests; the last line counts them
	@scripts/test --preset $(PRESET) $(ARGS)

ci: build  ## what .ci/run runs: all tests, layout, lock annotations, modules without torch under sanitizers
	@scripts/build asan
	@scripts/test --gates $(ARGS)

test-slow: build  ## the slow suite: whole runs, three seeds
	@scripts/test --preset $(PRESET) --slow $(ARGS)

demo:  ## warm up a small model, train it, show what the tree saved
	@scripts/setup bough
	@scripts/demo $(ARGS)

demo-real:  ## SmolLM2-135M-Instruct learns arithmetic from reasoning-gym, in minutes
	@scripts/setup bough
	@scripts/demo_real $(ARGS)

bench: build  ## the programs of bench/
	@scripts/bench $(ARGS)

bench-peers: build  ## Bough beside AReaL-DTA, transformers, vLLM and TRL (ARGS=--quick: does everything run?)
	@scripts/bench_peers $(ARGS)

bundle:  ## binaries and their libraries in .bundle/, to run beside any torch 2.11
	@scripts/setup --preset bundle
	@scripts/bundle $(ARGS)

wheel:  ## dist/bough-*.whl: `pip install` of it beside torch 2.11 gives the command, without a compiler
	@scripts/setup --no-build
	@scripts/wheel $(ARGS)

format:  ## clang-format, in place
	@scripts/setup --no-build
	@scripts/lint --fix-format

lint: build  ## clang-format, clang-tidy on what changed (ARGS=--all: on everything), Python, documents
	@scripts/lint $(ARGS)

asan:  ## unit tests of the modules without torch under the address and undefined-behaviour sanitizers
	@scripts/setup --preset asan
	@scripts/test --preset asan --unit $(ARGS)

asan-torch:  ## unit tests of all modules under these sanitizers; a long build
	@scripts/setup --preset asan-torch
	@scripts/test --preset asan-torch --unit $(ARGS)

tsan:  ## unit tests of the modules without torch under the thread sanitizer
	@scripts/setup --preset tsan
	@scripts/test --preset tsan --unit $(ARGS)

tsan-torch:  ## unit tests of the engine, which uses torch, under the thread sanitizer; a long build
	@scripts/setup --no-build
	@scripts/build tsan-torch rollout_test
	@scripts/test --preset tsan-torch --unit $(ARGS)

clean:  ## what was built; .venv stays
	rm -rf build build-debug build-asan build-asan-torch build-tsan build-tsan-torch build-bundle .bundle

distclean: clean  ## also .venv and the other environments
	rm -rf .venv .venv-peers .venv-vllm .venv-real
