# All developer commands. A target first runs its prerequisites: `make test` is enough on a fresh machine.
#   ARGS="..." is passed to scripts/test, scripts/lint, scripts/bundle, scripts/wheel, scripts/bench_peers and
#   the programs of bench/.
PRESET ?= release
ARGS ?=
.DEFAULT_GOAL := help
.PHONY: help setup build test test-slow demo demo-real demo-moe bench bench-peers bundle wheel format lint ci asan \
  asan-torch tsan tsan-torch clean distclean
MAKEFLAGS += --no-print-directory

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## install system packages and .venv with pinned wheels
	@scripts/setup --no-build

build:  ## setup, then build PRESET (release: build/, debug|asan|asan-torch|tsan|tsan-torch|bundle: build-NAME/)
	@scripts/setup --preset $(PRESET)

test: build  ## run all tests; the last line counts them
	@scripts/test --preset $(PRESET) $(ARGS)

ci: build  ## run the checks of .ci/run: tests, also those of `asan` and of the newest torch, layout, lock annotations
	@scripts/build asan
	@newest=--newest-torch; \
	  free=$$(df -Pk . | awk 'NR == 2 {print int($$4 / 1048576)}'); now=$$(date +%s); \
	  minutes=$$(((now - $${BOUGH_CI_BEGAN:-$$now}) / 60)); \
	  if [ "$$free" -ge 3 ] && [ "$$minutes" -le 25 ]; \
	  then scripts/build newest-torch bough bough_python || exit; \
	  else newest=; echo "ci: left out: the tests of the newest torch: $$free GiB of disk space (needed: 3)," \
	    "$$minutes minutes so far (at most 25)" >&2; fi; \
	  scripts/test --gates --sanitized $$newest $(ARGS)

test-slow: build  ## run the slow suite: whole training runs, three seeds
	@scripts/test --preset $(PRESET) --slow $(ARGS)

demo:  ## warm up a small model, train it, show what the prefix tree saved
	@scripts/setup bough
	@scripts/demo $(ARGS)

demo-real:  ## train SmolLM2-135M-Instruct on arithmetic from reasoning-gym, in minutes
	@scripts/setup bough
	@scripts/demo_real $(ARGS)

demo-moe:  ## train a mixture of experts made of SmolLM2-135M, with and without routing replay
	@scripts/setup bough
	@scripts/demo_moe $(ARGS)

bench: build  ## run the programs of bench/
	@scripts/bench $(ARGS)

bench-peers: build  ## compare Bough with AReaL-DTA, transformers, vLLM and TRL (ARGS=--quick: smoke test)
	@scripts/bench_peers $(ARGS)

bundle:  ## put binaries and their libraries into .bundle/, to run with an installed torch
	@scripts/setup --preset bundle
	@scripts/bundle $(ARGS)

wheel:  ## build dist/bough-*.whl, which pip installs beside torch 2.11 or the newest torch, without a compiler
	@scripts/setup --no-build
	@scripts/wheel $(ARGS)

format:  ## format files in place
	@scripts/setup --no-build
	@scripts/lint --fix-format

lint: build  ## check layout, Python, bash, documents; clang-tidy on changed files (ARGS=--all: all files)
	@scripts/lint $(ARGS)

asan:  ## run unit tests of the torch-free modules under the address and undefined-behaviour sanitizers
	@scripts/setup --preset asan
	@scripts/test --preset asan --unit $(ARGS)

asan-torch:  ## run unit tests of all modules under the sanitizers of `asan`; a long build
	@scripts/setup --preset asan-torch
	@scripts/test --preset asan-torch --unit $(ARGS)

tsan:  ## run unit tests of the torch-free modules under the thread sanitizer
	@scripts/setup --preset tsan
	@scripts/test --preset tsan --unit $(ARGS)

tsan-torch:  ## run unit tests of the rollout engine (uses torch) under the thread sanitizer; a long build
	@scripts/setup --no-build
	@scripts/build tsan-torch rollout_test
	@scripts/test --preset tsan-torch --unit $(ARGS)

clean:  ## delete build outputs, keep .venv
	rm -rf build build-* .bundle

distclean: clean  ## delete build outputs, .venv and the other environments
	rm -rf .venv .venv-peers .venv-vllm .venv-verl .venv-tinker .venv-tau2 .venv-newest-torch .venv-real
