# The native CPU extension. Included by the Makefile.
.PHONY: native check-abi sanitize bench-cpu

help: help-native
.PHONY: help-native
help-native:
	@echo "make native     compile the CPU extension in place, for the source tree"
	@echo "make check-abi  whether the compiled variant in build/ loads on other systems"
	@echo "make sanitize   tests of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make bench-cpu  the kernels beside stock, with a verdict a row"

native: $(STAMP)
	$(PY) -m tools.native.compile

check-abi: build
	$(PY) -m tools.native.check_abi

sanitize: $(STAMP)
	$(PY) -m tools.native.sanitize

bench-cpu: $(STAMP)
	$(PY) -m tools.native.compile
	$(PY) -m benchmarks.bench_cpu $(BENCH_CPU_ARGS)
