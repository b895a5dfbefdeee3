# tinyloop: `make help` lists what there is.
.DEFAULT_GOAL := help
.PHONY: help build model run check test test-debug test-release test-client test-templates test-llama-server test-avx512 bench bench-peer bench-kernels bench-embed load exit-table roofline bench-depth load-depth demo-pool kernels check-kernels gpu-check clean

DEMO  := target/models/SmolLM2-135M-Instruct.Q4_1.gguf
MODEL ?= $(DEMO)
PORT  ?= 8080
TEXT  ?= tests/data/held_out_excerpt.txt
EXITS ?= latent:0.2,latent:0.1,latent:0.05,latent:0.02,kl:0.1,kl:0.01
BIN   := target/release/tinyloop

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-14s %s\n", $$1, $$2 }'

build: ## the release binary, target/release/tinyloop
	cargo build --release --bin tinyloop

model: ## fetch the demo model once (SmolLM2-135M-Instruct Q4_1, 98 MB)
	@tests/scripts/fetch_demo_model.sh $(DEMO)

ifeq ($(MODEL),$(DEMO))
NEEDS_MODEL := model
endif

run: build $(NEEDS_MODEL) ## serve the demo model, or MODEL=/path/x.gguf, and the built-in looped one on 127.0.0.1:8080 (PORT=..)
	@exec $(BIN) serve --model $(MODEL) --model builtin --port $(PORT) $(ARGS)

check: ## format, lints and docs, warnings as errors
	cargo fmt --check
	cargo fmt --check --manifest-path benches/Cargo.toml
	cargo clippy --all-targets --quiet -- -D warnings
	cargo clippy --all-targets --quiet --manifest-path benches/Cargo.toml --target-dir target -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --document-private-items --quiet

test: check check-kernels model test-debug test-release test-client test-llama-server ## everything that must pass before a commit lands

kernels: ## kernels/kernels.ptx of the CUDA sources (NVRTC from PyPI), with registers and spills
	python3 kernels/build.py

check-kernels: ## the committed kernels.ptx is what the sources give, and no kernel spills
	@python3 kernels/build.py --check

gpu-check: ## what only a GPU can show: kernels on the real driver, their rates, a table (LIBCUDA=/path)
	tests/scripts/gpu_check.sh $(LIBCUDA)

test-debug: model ## all tests with assertions and overflow checks on
	cargo test --quiet

test-release: model ## the heavy tests, optimized: the real model, a million operations
	cargo test --release --quiet --test demo_model --test scheduler

test-client: build model ## official clients, LangChain, LiteLLM and schemathesis against running servers
	tests/scripts/openai_client.sh $(BIN) $(DEMO)
	tests/scripts/retries.sh $(BIN)
	tests/scripts/schemathesis.sh $(BIN)
	tests/scripts/anthropic_client.sh $(BIN) $(DEMO)
	tests/scripts/other_clients.sh $(BIN) $(DEMO)

test-templates: ## what is committed of chat templates against Jinja2 in Python
	tests/scripts/template_goldens.sh

test-llama-server: build model ## the runtimes' suite against a real llama-server, and its answers beside ours (LLAMA_SERVER=/path for yours)
	tests/scripts/llama_server.sh $(BIN) $(DEMO)

test-avx512: ## the AVX-512 kernels on an emulated processor (Bochs, Debian's packages)
	tests/scripts/avx512_emulated.sh

bench: build model ## speed of this build, then ratios against llama-server in the same run
	tests/scripts/bench.sh $(BIN) $(MODEL)

bench-peer: build model ## the engine against llama.cpp's bench tools, in turns, with ratios (LLAMA_BENCH=/path/to/llama-bench, ARGS=..)
	@test -n "$(LLAMA_BENCH)" || { echo "say where llama-bench is: make bench-peer LLAMA_BENCH=/path/to/llama-bench" >&2; exit 2; }
	python3 tests/scripts/bench_peer.py $(BIN) $(LLAMA_BENCH) $(MODEL) $(ARGS)

load: build model ## wrk and streaming clients against a running server
	tests/scripts/load.sh $(BIN) $(MODEL)

roofline: build model ## what this machine can do at best, and how near a MODEL comes
	$(BIN) roofline --model $(MODEL)

exit-table: build ## early exit of the built-in or a looped MODEL: speed and perplexity on TEXT against EXITS=..
	python3 tests/scripts/exit_table.py $(BIN) $(if $(filter $(DEMO),$(MODEL)),builtin,$(MODEL)) $(TEXT) $(EXITS)

bench-kernels: ## GB/s and operations/s of every CPU kernel, by criterion (ARGS=avx2/product names what)
	cargo bench --quiet --manifest-path benches/Cargo.toml --target-dir target --bench kernels -- $(ARGS)

bench-embed: build model ## embeddings per second of MODEL, with the ratio where LLAMA_SERVER=/path/to/llama-server is given
	python3 tests/scripts/bench_embed.py $(BIN) $(or $(LLAMA_SERVER),none) $(MODEL)

bench-depth: build ## batching over requests of different depth, on the built-in and on a larger random model (ARGS=..)
	$(BIN) bench-depth --model builtin $(ARGS)
	$(BIN) bench-depth $(or $(ARGS),--requests 48 --seeds 1)

load-depth: build ## overload with an objective: fewer loops against refusals, as a table and target/load-depth.png (ARGS=..)
	tests/scripts/load_depth.sh $(BIN) builtin $(ARGS)

demo-pool: build model ## a pool of three models under traffic, with a killed child and an unload under load (ARGS=..)
	tests/scripts/demo_pool.sh $(BIN) $(DEMO) $(ARGS)

clean: ## remove everything that was built or fetched
	cargo clean
