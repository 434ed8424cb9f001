# Whether the tests notice planted faults. Included by the Makefile.
.PHONY: mutation

help: help-mutation
.PHONY: help-mutation
help-mutation:
	@echo "make mutation  which planted faults the tests notice; MUTATION_ARGS=words takes some; an hour"

mutation: $(STAMP)
	$(PY) -m tools.mutation $(MUTATION_ARGS)
