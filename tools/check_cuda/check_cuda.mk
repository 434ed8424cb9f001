# The Triton kernels without a GPU. Included by the Makefile. TRITON=<venv> takes another Triton.
.PHONY: check-cuda help-check-cuda

help: help-check-cuda
help-check-cuda:
	@echo "make check-cuda what the Triton kernels cost, compiled for sm_80, sm_90, sm_100; TRITON=<venv> for another Triton"

check-cuda: $(STAMP)
	PYTHONPATH=torch-ext $(PY) -m tools.check_cuda $(if $(TRITON),--triton $(TRITON))
