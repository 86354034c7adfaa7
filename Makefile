# kvtier: the short way in. The real work is in CMakeLists.txt and scripts/.
PREFIX ?= /usr/local
JOBS ?= $(shell nproc)
DEMO_ARGS ?=
# Kernels for NVIDIA GPUs: auto (compiled where nvcc is), on, off. They take minutes, once, so the demo,
# which runs on the CPU, leaves them out of a build that it starts.
KVT_GPU ?= auto
export JOBS

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | column -t -s '|' 2>/dev/null || \
	  sed -n 's/^\([a-z-]*\):.*## /make \1  /p' Makefile

build: ## build/kvtier and build/libkvtier.so (installs missing packages on Debian and Ubuntu)
	@scripts/setup.sh build
	@KVT_GPU=$(KVT_GPU) scripts/build.sh release products

# a build that is there keeps its kernels, unless told otherwise
DEMO_GPU = $(if $(filter file,$(origin KVT_GPU)),$(if $(wildcard build/CMakeCache.txt),,off),$(KVT_GPU))
demo: ## a real model remembers a long document: builds llama.cpp, fetches a small model, runs
	@scripts/setup.sh demo
	@KVT_LLAMA_PREFIX=$$(scripts/build-llama.sh) && export KVT_LLAMA_PREFIX && \
	  scripts/fetch-model.sh >/dev/null && KVT_GPU=$(DEMO_GPU) scripts/build.sh release products
	@build/kvtier demo $(DEMO_ARGS)

test: ## every test: unit, model, cases, sanitizers, llama.cpp, install, lint
	@scripts/test.sh

test-engines: ## the Python package with transformers, llama-cpp-python, ...: needs pip and a network once
	@scripts/setup.sh engines
	@scripts/test-engines.sh

wheel: ## dist/kvtier-*-manylinux_*.whl: for other machines, needs pip and a network once
	@scripts/setup.sh build
	@scripts/wheel.sh

soak: ## MINUTES=n (30): the long forms of what tries to break the store, and one line of JSON
	@scripts/setup.sh test
	@scripts/soak.sh $(or $(MINUTES),30)

lint: ## format, includes, sizes, banned functions, headers, symbols, cppcheck, clang-tidy
	@scripts/setup.sh lint
	@scripts/build.sh release products
	@scripts/lint.sh

bench: build ## codec throughput against memcpy
	@build/kvtier bench codec

install: ## into PREFIX (default /usr/local), below DESTDIR when set; under sudo, what has been built
	@if [ -n "$$SUDO_USER" ] && [ -e build/kvtier ]; then \
	  echo "installing build/ as it is"; else $(MAKE) --no-print-directory build; fi
	@cmake --install build --prefix "$(PREFIX)"
	@rm -f build/install_manifest.txt # root's, in a directory that may be somebody else's

clean: ## remove build trees; downloads stay
	@rm -rf dist build-wheel build build-asan build-tsan build-dev build-fuzz build-planted build-coverage

.PHONY: help build demo test test-engines wheel soak lint bench install clean
