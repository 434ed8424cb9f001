# Which versions run our layers. Included by the Makefile.
.PHONY: version-matrix

help: help-version-matrix
.PHONY: help-version-matrix
help-version-matrix:
	@echo "make version-matrix  each combination of versions in an environment of its own; writes docs/versions.md, ten minutes"

version-matrix: $(STAMP)
	$(PY) -m tools.version_matrix
