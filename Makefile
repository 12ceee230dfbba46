# A fresh machine needs Python 3.11.2 or newer and make: uv comes into .tools, everything else into .venv by uv.lock.

UV_VERSION := 0.13.8
UV := $(or $(shell command -v uv 2>/dev/null),.tools/uv)
PYTHON ?= python3
# The Python of .venv: Debian's own, which is the oldest that is promised. Where it is too old or missing, uv chooses.
ifndef UV_PYTHON
UV_PYTHON := $(shell python=$$(command -pv python3) && \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11, 2))' && echo $$python)
endif
export UV_PYTHON

# The object store of `make demo`: local (a temporary directory) or s3 (an S3 server that the demo starts).
STORE ?= local
# The seeds of `make simulate`, the first of them, and in how many processes they run.
SEEDS ?= 1000
FIRST ?= 0
JOBS ?= 2
# The objects that `make fuzz` forges
RUNS ?= 100000
ATHERIS_VERSION := 3.0.0
# Processes that share the tests: two more than there are cores, since three of them begin with tests that wait for most of
# their time.
TESTS_AT_ONCE ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2)
# Else each process compiles all that it imports, and rewrites the asserts of all tests, anew.
unexport PYTHONDONTWRITEBYTECODE
# The versions stand in the file.
KAFKA_JARS := .tools/kafka
FETCH_KAFKA := test -e $(KAFKA_JARS)/.whole || { mvn -q -B -f tests/brokers/kafka.pom.xml dependency:copy-dependencies \
	-DoutputDirectory=$(CURDIR)/$(KAFKA_JARS) && touch $(KAFKA_JARS)/.whole; }
# What `make test-long` has beside `make test`.
LONG := -m "long or not long" --timeout=3600
LONG_PARTS := simulation brokers relay spark processes mutants rest
# The newest Python that docs/INSTALL.md names.
NEWEST_PYTHON := 3.13
# Where `make dist` puts what it makes.
DIST ?= dist
# More arguments for test, run, bench, demo and spark-env: make test ARGS='-k journal'
ARGS ?=

# Another Python makes .venv anew.
VENV := .venv
ifneq ($(VENV),.venv)
export UV_PROJECT_ENVIRONMENT := $(VENV)
endif
MADE_WITH := $(subst /,-,$(UV_PYTHON))
SYNCED := $(VENV)/.synced$(MADE_WITH)
# Enough to serve and for the demo: a tenth of everything, unless that is there.
RUNNABLE := $(if $(wildcard $(SYNCED)),$(SYNCED),.venv/.runnable-$(STORE)$(MADE_WITH))
RUN := $(UV) run --no-sync
PYTEST := $(RUN) pytest --numprocesses=$(TESTS_AT_ONCE) --dist=worksteal
# Of what the distributions need, with every extra; nothing of ours.
CONSTRAINTS := --all-packages --all-extras --no-default-groups --no-emit-workspace --no-hashes --no-annotate --no-header

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## say what there is
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '%-18s %s\n' "$$name" "$$text"; done

.PHONY: everything
everything: $(SYNCED) ## install what any command needs: 1.4 GB, Spark among it

.PHONY: demo
demo: $(RUNNABLE) ## real flights through a daemon that is killed twice; STORE=local|s3
	$(RUN) python -m examples.flights --store $(STORE) $(ARGS)

.PHONY: test
test: $(SYNCED) ## every test; ARGS goes to pytest
	$(PYTEST) $(ARGS)

# PART=name runs one part (tests/_support/long_parts.py); without it all run, and `make test` with the newest Python.
.PHONY: fuzz
fuzz: $(SYNCED) ## stored objects forged under atheris, RUNS=100000 of them; ARGS goes to libFuzzer
	test -d .tools/atheris || $(UV) pip install --quiet --target .tools/atheris atheris==$(ATHERIS_VERSION)
	PYTHONPATH=.tools/atheris $(RUN) python -m tests.storage_backends.formats._support.fuzz_forged \
		-runs=$(RUNS) -max_len=8192 -len_control=0 -rss_limit_mb=1024 $(ARGS)

.PHONY: test-long
ifdef PART
test-long: long-$(PART)
else
test-long: $(SYNCED) ## all tests, with bigger budgets, and mutants of daemon/core; PART=name: one of simulation brokers relay spark processes mutants rest
	@failed=; \
	for part in $(LONG_PARTS) newest; do $(MAKE) --no-print-directory long-$$part || failed="$$failed $$part"; done; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }
endif

.PHONY: fetch-kafka
fetch-kafka:
	@$(FETCH_KAFKA) || echo "Kafka: not run, since its jars cannot be fetched with Maven; the other brokers are"

long-brokers long-relay: fetch-kafka
long-%: $(SYNCED)
	$(PYTEST) $(LONG) --long-part=$* --part=all --hypothesis-profile=search $(ARGS)

.PHONY: long-mutants
long-mutants: $(SYNCED)
	$(RUN) python -m tests.planted.mutants $(if $(PART),$(ARGS))

.PHONY: long-newest
long-newest: $(UV)
	@if $(UV) python find $(NEWEST_PYTHON) > /dev/null 2>&1 || $(UV) python install --quiet $(NEWEST_PYTHON); \
	then $(MAKE) --no-print-directory test UV_PYTHON=$(NEWEST_PYTHON) VENV=.tools/newest; \
	else echo "Python $(NEWEST_PYTHON): not run, since it is not installed and uv cannot bring it"; fi

.PHONY: test-brokers
test-brokers: $(SYNCED) fetch-kafka ## the tests with real brokers in their long forms, Kafka too, whose jars Maven brings; ARGS goes to pytest
	$(PYTEST) $(LONG) tests/brokers tests/relay $(ARGS)

.PHONY: simulate
simulate: $(SYNCED) ## whole daemons under simulation; SEEDS=1000, FIRST=0; ARGS goes to python -m tests.simulation
	$(RUN) python -m tests.simulation --seeds $(SEEDS) --first $(FIRST) --jobs $(JOBS) $(ARGS)

.PHONY: run
run: $(RUNNABLE) ## serve: gRPC on 127.0.0.1:7461, metrics on 127.0.0.1:7462; ARGS goes to tarryd
	$(RUN) tarryd $(ARGS)

.PHONY: bench
bench: $(SYNCED) ## measure; ARGS goes to the benchmarks
	$(RUN) python -m benchmarks $(ARGS)

.PHONY: dist
dist: $(UV) ## wheels and source archives of the distributions into dist/, with the versions of the lock
	rm -f $(foreach name,tarry tarry_relay tarry_storage tarryd,$(DIST)/$(name)-[0-9]*.whl $(DIST)/$(name)-[0-9]*.tar.gz)
	$(UV) build --quiet --all-packages --out-dir $(DIST)
	$(UV) export --quiet --locked $(CONSTRAINTS) --output-file $(DIST)/constraints.txt
	@ls -l $(DIST)/*.whl $(DIST)/*.tar.gz $(DIST)/constraints.txt

.PHONY: spark-env
spark-env: $(SYNCED) ## pack what executors of Spark need into dist/: the code, and its libraries; ARGS='--python 3.12'
	$(RUN) python scripts/build_spark_env.py $(ARGS)

.PHONY: sbom
sbom: $(SYNCED) ## write what tarryd is made of into dist/: versions, hashes, licences
	$(RUN) python scripts/build_sbom.py $(ARGS)

.PHONY: check
check: lock lint types imports protos generated test ## the gate: everything that must hold before a change lands

.PHONY: lock
lock: $(UV) ## the locks say what pyproject.toml and the scripts say
	$(UV) lock --check
	$(UV) lock --check --script scripts/gen_proto.py

.PHONY: lint
lint: $(SYNCED) ## ruff: rules and format
	$(RUN) ruff check
	$(RUN) ruff format --check

.PHONY: types
types: $(SYNCED) ## mypy, strict
	$(RUN) mypy

.PHONY: imports
imports: $(SYNCED) ## the direction of imports between the layers
	$(RUN) lint-imports --no-logo

.PHONY: house
house: $(SYNCED) ## report how the code is divided; no figure fails. ARGS='--list' names what is counted
	$(RUN) python scripts/house_counts.py $(ARGS)
	$(RUN) python scripts/trace_rooms.py

.PHONY: protos
protos: $(SYNCED) ## buf: the rules for proto/
	$(RUN) buf lint

# AGAINST: a git reference, such as the tag of the last release.
.PHONY: breaking
breaking: $(SYNCED) ## buf: what proto/ breaks compared with AGAINST=<git reference>
	$(RUN) buf breaking --against '.git#ref=$(AGAINST)'

.PHONY: generated
generated: $(SYNCED) ## the generated code is what proto/ and the client of an event loop say
	$(UV) run --locked --script scripts/gen_proto.py --check
	$(RUN) python scripts/gen_threads.py --check

.PHONY: gen
gen: $(SYNCED) ## generate the code of proto/, and the client of threads
	$(UV) run --locked --script scripts/gen_proto.py
	$(RUN) python scripts/gen_threads.py

.PHONY: fmt
fmt: $(SYNCED) ## format, and mend what ruff can mend
	$(RUN) ruff check --fix-only
	$(RUN) ruff format

.PHONY: clean
clean: ## remove what make brought or made
	rm -rf .venv .tools dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SYNCED): pyproject.toml client/pyproject.toml relay/pyproject.toml storage_backends/pyproject.toml uv.lock | $(UV)
	$(UV) sync --locked --all-extras
	@touch $@

# Nothing is taken away. Of pandas, which the flights bring along, nothing is used.
.venv/.runnable-%: pyproject.toml client/pyproject.toml storage_backends/pyproject.toml uv.lock | $(UV)
	$(UV) sync --locked --inexact --no-default-groups --group demo $(if $(filter s3%,$*),--group s3-server) --no-install-package pandas
	@touch $@

.tools/uv:
	$(PYTHON) -m venv .tools/venv
	.tools/venv/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	ln -sf venv/bin/uv $@
