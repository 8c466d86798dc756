# `make demo` and `make test` need Python 3.10+ and make; everything else is installed into .venv.
PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?= -n 2 --dist loadgroup
DEMO_ARGS ?=

BIN := .venv/bin
STAMP := .venv/.installed
DEMO_STAMP := .venv/.installed-demo

# The oldest transformers that pyproject.toml admits, with an environment of its own.
OLDEST := 5.15.1
OLDEST_BIN := .venv-oldest/bin
OLDEST_STAMP := .venv-oldest/.installed

.DEFAULT_GOAL := help
.PHONY: help .venv demo check test test-slow test-oldest lint format clean

help:
	@echo "make demo         a tour in four minutes: train, load, generate, remember, surprise, lm-eval (DEMO_ARGS=...)"
	@echo "make check        lint and a minute of tests, one or two of each promise: before every commit"
	@echo "make test         the test suite, about seven minutes on two cores (PYTEST_ARGS=...)"
	@echo "make test-slow    the rest of every cross product, more random examples, inductor"
	@echo "make test-oldest  the test suite on transformers $(OLDEST)"
	@echo "make lint         ruff and the import contracts"
	@echo "make format       let ruff rewrite the files"
	@echo "make clean        remove caches and build products (.venv and runs/ stay)"

.venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[dev]"
	touch $@

# The demo needs less than the tests: it is ready sooner.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_ARGS) -c constraints.txt -e ".[eval,viz]"
	touch $@

demo: $(DEMO_STAMP)
	$(BIN)/python scripts/demo.py $(DEMO_ARGS)

$(OLDEST_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	sed -E '/^(transformers|huggingface_hub|tokenizers)==/d' constraints.txt > .venv-oldest/constraints.txt
	echo "transformers==$(OLDEST)" >> .venv-oldest/constraints.txt
	$(OLDEST_BIN)/python -m pip install $(PIP_ARGS) -c .venv-oldest/constraints.txt -e ".[dev]"
	touch $@

# One thread per worker: two workers with two threads each would fight over the cores of a small machine.
check test test-slow test-oldest: export OMP_NUM_THREADS = 1

# What `make check` runs, promise by promise. Files are named, so that the others need not be imported.
CHECKED := \
	memory_ops.py::test_chunk_form_equals_token_loop \
	memory_chunks.py::test_outputs_states_and_gradients_equal_autograds \
	memory_step.py::test_steps_equal_the_token_loop \
	kernels.py::test_any_length_from_any_state_equals_the_torch_backend \
	invariants.py::test_a_token_changes_no_logit_before_it \
	invariants.py::test_forward_in_pieces_equals_one_forward \
	invariants.py::test_a_padded_row_among_others_equals_the_row_alone \
	invariants.py::test_crop_then_continue_equals_never_having_gone_on \
	invariants.py::test_gradients_equal_those_of_the_token_loop \
	fast_paths.py::test_the_plain_path_gives_the_same_logits_and_gradients \
	packing.py::test_packed_documents_equal_the_documents_one_by_one \
	model.py::test_bad_input_is_refused_by_name_before_anything_is_read \
	snapshots.py::test_a_loaded_cache_goes_on_as_the_saved_one \
	snapshots.py::test_flipped_and_zeroed_payload_bytes_are_refused \
	generate.py::test_greedy_generation_with_and_without_cache_and_padding_agree \
	generate.py::test_beam_search_takes_each_beam_with_its_memory \
	loading.py::test_the_auto_classes_know_titans \
	loading.py::test_a_sharded_checkpoint_loads_back_to_the_same_logits \
	loading.py::test_two_checkpoints_with_code_of_their_own_share_a_process \
	series.py::test_going_on_from_a_cache_equals_reading_all_at_once \
	series.py::test_what_stands_in_missing_places_does_not_matter \
	config.py::test_a_bad_field_is_refused_by_name \
	config.py::test_a_preset_has_the_parameters_of_its_name \
	cli.py::test_asking_later_is_asking_at_once \
	readme.py::test_every_relative_link_leads_somewhere \
	readme.py::test_every_path_in_backticks_exists

check: lint
	$(BIN)/python -m pytest -q $(PYTEST_ARGS) $(addprefix tests/test_,$(CHECKED))

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The slow tests, and the random tests of the suite with more examples.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=thorough $(PYTEST_ARGS)

test-oldest: $(OLDEST_STAMP)
	$(OLDEST_BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
