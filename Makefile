# kvtier: the short way in. The real work is in CMakeLists.txt and scripts/.
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
DEMO_ARGS ?=
export JOBS

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || \
	  sed -n 's/^\([a-z]*\):.*## /make \1  /p' Makefile

build: ## build/kvtier and build/libkvtier.so (installs missing packages on Debian and Ubuntu)
	@scripts/setup.sh build
	@scripts/build.sh release products

demo: ## a real model remembers a long document: builds llama.cpp, fetches a small model, runs
	@scripts/setup.sh demo
	@KVT_LLAMA_PREFIX=$$(scripts/build-llama.sh) && export KVT_LLAMA_PREFIX && \
	  scripts/fetch-model.sh >/dev/null && scripts/build.sh release products
	@build/kvtier demo $(DEMO_ARGS)

test: ## every test: unit, model, cases, sanitizers, llama.cpp, install, lint
	@scripts/test.sh

lint: ## format, includes, sizes, banned functions, headers, symbols, cppcheck, clang-tidy
	@scripts/setup.sh lint
	@scripts/build.sh release products
	@scripts/lint.sh

bench: build ## codec throughput against memcpy
	@build/kvtier bench codec

install: build ## into PREFIX (default /usr/local), below DESTDIR when set
	@cmake --install build --prefix "$(PREFIX)"

clean: ## remove build trees; downloads stay
	@rm -rf build build-asan build-tsan build-dev

.PHONY: help build demo test lint bench install clean
