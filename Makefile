PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
JOBS ?= 2
EXTRAS ?= dev,lab,tb
STAMP := .venv/.installed-$(EXTRAS)
PEERS := .venv-peers/.installed
TOGETHER := -n $(JOBS) --dist worksteal
NIGHTLY_EXTRAS := dev,lab,tb,grpc,ray,tensorflow,seam
NIGHTLY_NEEDS := tensorflow,grpc,ray,accelerate,transformers,lightning
QUICK := not slow and not nightly
SLOW := slow and not nightly
WITHIN := $(BIN)/python tests/time_limit.py
TEST_S ?= 600
TEST_FULL_S ?= 2700

# Hundreds of processes import the same files; without bytecode each compiles them, and pytest rewrites all tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help installed demo test test-slow rest test-full nightly fuzz check lint pictures peers clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

installed: $(STAMP)

demo: $(STAMP) ## train MNIST on 1 ps + 2 workers
	$(BIN)/paceline demo

test: $(STAMP) ## the quick tests, under four minutes on two cores; ended after TEST_S=600
	$(WITHIN) $(TEST_S) $(BIN)/pytest -q -m '$(QUICK)' $(TOGETHER)

test-slow: $(STAMP) ## a case of each fault, host, scheduler; each part ended after TEST_FULL_S=2700
	$(WITHIN) $(TEST_FULL_S) $(BIN)/pytest -q -m '$(SLOW) and not alone' --durations 15 $(TOGETHER)
	$(WITHIN) $(TEST_FULL_S) $(BIN)/pytest -q -m '$(SLOW) and alone' --durations 5

nightly: ## the rest: whole matrices, all seeds, soak, fuzz, other libraries' loops, mutations
	PACELINE_TEST_NEEDS=$(NIGHTLY_NEEDS) $(MAKE) rest fuzz EXTRAS=$(NIGHTLY_EXTRAS)

test-full: nightly ## the older name of nightly

rest: $(STAMP)
	$(WITHIN) $(TEST_FULL_S) $(BIN)/pytest -q -m 'nightly and not alone' --durations 15 $(TOGETHER)
	$(WITHIN) $(TEST_FULL_S) $(BIN)/pytest -q -m 'nightly and alone' --durations 15
	$(WITHIN) $(TEST_FULL_S) $(BIN)/python tests/mutations.py

fuzz: $(STAMP) ## thousands of broken frames, messages and files, a few minutes
	PACELINE_FUZZ=$${PACELINE_FUZZ:-4000} $(WITHIN) $(TEST_FULL_S) $(BIN)/pytest -q --timeout 290 tests/fuzz

lint: $(STAMP) ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint ## what to run before a commit: lint and the import-direction test
	$(WITHIN) $(TEST_S) $(BIN)/pytest -q tests/test_architecture.py tests/test_no_code.py

pictures: $(STAMP) ## draws docs/pictures again, from the deciding code itself
	$(BIN)/python docs/pictures/draw.py

$(PEERS): bench/peers/requirements.txt
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	@# One at a time: what does not install takes none of the others with it. Every peer needs the first, numpy.
	@# A stamp older than the requirements has the lab take what is there, and the next `make peers` try the rest again.
	@made=""; failed=""; for each in $$(grep -v '^#' $<); do \
		if .venv-peers/bin/python -m pip install --quiet --disable-pip-version-check -c $< $$each; then made=$$each; \
		elif test -n "$$made"; then failed="$$failed $$each"; else exit 1; fi; done; \
	if test -z "$$failed"; then touch $@; else touch -t 197001020000 $@; \
		echo "Not installed:$$failed. \`paceline lab run peers\` names those that need it as missing, and measures the others."; fi

peers: $(PEERS) ## the systems that `paceline lab run peers` measures beside ours, into .venv-peers

clean: ## removes the environment, caches and build outputs; run folders stay
	rm -rf .venv .venv-peers build dist src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
