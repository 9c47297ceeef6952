# mixtape. `make help` lists the targets; the configuration in force is printed by `make config`.
#
#   CONFIG=release|debug|asan|fuzz   objects go to build/<config>
#   CC=gcc|clang                     WERROR=1 turns warnings into errors; V=1 prints whole commands
#   CUDA=auto|0|1                    the cuda backend; auto: where nvcc 13 or later is found (NVCC=, CUDA_HOME=)
#   MPI=auto|0|1                     training over CPU processes; auto: where Open MPI is found
#   NCCL=auto|0|1                    training over GPUs, in builds with CUDA; auto: where nccl.h is found (the library itself at run time)

VERSION := 0.1

CONFIG ?= release
CC     ?= cc
BUILD  := build/$(CONFIG)
ARCH   := $(shell uname -m)

PKGS := hdf5 openblas jansson libxxhash yaml-0.1
ifneq ($(MAKECMDGOALS),deps)
HAVE_PKGS := $(shell pkg-config --exists $(PKGS) 2>/dev/null && echo yes)
endif
PKG_CFLAGS := $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
PKG_LIBS   := $(shell pkg-config --libs $(PKGS) 2>/dev/null)

WARN := -Wall -Wextra -Wpedantic -Wshadow -Wundef -Wvla -Wstrict-prototypes -Wmissing-prototypes \
        -Wdouble-promotion
# clang warns of `omp simd` loops that it leaves as they are; that loses time on it, nothing else.
WARN += $(if $(findstring clang,$(CC)),-Wno-pass-failed)
ifeq ($(WERROR),1)
WARN += -Werror
endif
say = $(if $(V),,@printf '  %-3s %s\n' $(1) $@;)
OPT_release := -O3 -g
OPT_debug   := -O1 -g
OPT_asan    := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
OPT_fuzz    := -O1 -g1 -fsanitize=fuzzer-no-link,address,undefined -fno-omit-frame-pointer
OPT := $(OPT_$(CONFIG))
ifeq ($(OPT),)
$(error CONFIG=$(CONFIG) is not one of release debug asan fuzz)
endif

CFLAGS   := -std=c11 -D_GNU_SOURCE $(WARN) $(OPT) -fopenmp -ffp-contract=off -fno-math-errno -fPIC $(EXTRA_CFLAGS)
CPPFLAGS = -I. $(PKG_CFLAGS)
LDLIBS   = $(PKG_LIBS) $(CUDA_LIBS) $(MPI_LIBS) -lm -lpthread
LDFLAGS  := $(OPT) -fopenmp

# ---- CUDA: native code for Hopper, PTX of 8.0 for every later card -------------------------------
CUDA_GIVEN := $(filter command environment,$(origin CUDA))
CUDA      ?= auto
CUDA_HOME ?= $(firstword $(wildcard /usr/local/cuda /usr/local/cuda-13.0 /opt/cuda))
NVCC      ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard $(CUDA_HOME)/bin/nvcc))
ifneq ($(filter asan fuzz,$(CONFIG)),)
override CUDA := 0
endif
ifneq ($(CUDA),0)
HAVE_NVCC := $(if $(NVCC),$(shell $(NVCC) --version 2>/dev/null | grep -oE 'release (1[3-9]|[2-9][0-9])\.'))
ifeq ($(CUDA)$(HAVE_NVCC),1)
$(error CUDA=1, but $(if $(NVCC),$(NVCC) is not of CUDA 13 or later,no nvcc was found: set NVCC or CUDA_HOME))
endif
override CUDA := $(if $(HAVE_NVCC),1,0)
endif
ifeq ($(CUDA),1)
CUDA_ROOT := $(patsubst %/bin/,%,$(dir $(realpath $(NVCC))))
CUDA_INC  := -isystem $(CUDA_ROOT)/include
# libstdc++: what nvcc writes around launches has guarded statics.
CUDA_LIBS := -L$(CUDA_ROOT)/lib64 -lcudart_static -ldl -lrt -lstdc++
CUDA_SRC  := $(wildcard kernels/cuda/*.cu)
GENCODE   := -gencode=arch=compute_90a,code=sm_90a
GENERIC   := -gencode=arch=compute_80,code=compute_80
# Device code is compressed: with the lines of its source it is ten times as large, and every test is linked with all of it.
NVCCFLAGS := -std=c++17 -O3 -lineinfo --compress-mode=size -fmad=false --expt-relaxed-constexpr -Xcompiler -fPIC,-Wall,-Wextra,-fno-exceptions,-fno-rtti \
             -Xcompiler -Wno-unused-function -Xptxas -v $(if $(filter 1,$(WERROR)),-Werror all-warnings)
endif

# ---- MPI: not under the sanitizers, whose reports its own memory would fill -----------------------
MPI ?= auto
ifneq ($(filter asan fuzz,$(CONFIG)),)
MPI := 0
endif
ifneq ($(MPI),0)
HAVE_MPI := $(shell pkg-config --exists ompi-c 2>/dev/null && echo 1)
ifeq ($(MPI)$(HAVE_MPI),1)
$(error MPI=1, but there is no Open MPI (libopenmpi-dev): run 'make deps')
endif
endif
MPI_LIBS := $(if $(HAVE_MPI),$(shell pkg-config --libs ompi-c))

NCCL ?= auto
ifneq ($(NCCL),0)
HAVE_NCCL := $(if $(filter 1,$(CUDA)),$(firstword $(wildcard $(CUDA_ROOT)/include/nccl.h /usr/include/nccl.h /usr/local/include/nccl.h)))
ifeq ($(NCCL)$(HAVE_NCCL),1)
$(error NCCL=1, but $(if $(filter 1,$(CUDA)),no nccl.h was found (libnccl-dev),it needs CUDA=1))
endif
endif

# ---- sources -----------------------------------------------------------------------------------
CPU_ONCE    := kernels/cpu/device.c
CPU_ISA     := $(wildcard kernels/cpu/*quantize*.c) kernels/cpu/measure.c
CPU_PAIRS   := $(wildcard kernels/cpu/*_pairs.c)
CPU_VARIANT := $(filter-out $(CPU_ONCE) $(CPU_ISA) $(CPU_PAIRS),$(wildcard kernels/cpu/*.c))
NCCL_SRC    := $(wildcard dist/comm_nccl*.c dist/direct.c)
LIB_SRC     := $(wildcard core/*.c kernels/*.c layers/*.c optim/*.c) $(CPU_ONCE) \
               $(filter-out $(if $(HAVE_MPI),,dist/comm_mpi.c) $(if $(HAVE_NCCL),,$(NCCL_SRC)),$(wildcard dist/*.c)) \
               $(filter-out train/main.c,$(wildcard train/*.c))

DTYPES := f64 f32 bf16
ISAS   := portable
ISAS_release := avx2 avx512
ISAS_debug   := avx2 avx512
ISAS_asan    := avx2
ifeq ($(ARCH),x86_64)
ISAS   += $(ISAS_$(CONFIG))
endif
FLAGS_portable :=
FLAGS_avx2     := -march=x86-64-v3
FLAGS_avx512   := -march=x86-64-v4 -mprefer-vector-width=512
PAIRS          := amx dots
FLAGS_amx      := -march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16
FLAGS_dots     := -march=x86-64-v4 -mavx512bf16 -mprefer-vector-width=512

LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/%.o) \
           $(foreach i,$(ISAS),$(CPU_ISA:%.c=$(BUILD)/%.$(i).o) \
               $(foreach d,$(DTYPES),$(CPU_VARIANT:%.c=$(BUILD)/%.$(i).$(d).o)))
ifneq ($(filter avx512,$(ISAS)),)
LIB_OBJ += $(foreach p,$(PAIRS),$(CPU_PAIRS:%.c=$(BUILD)/%.$(p).o))
endif
ifeq ($(CUDA),1)
LIB_OBJ  += $(CUDA_SRC:%.cu=$(BUILD)/%.cu.o) $(patsubst %.c,$(BUILD)/%.o,$(wildcard kernels/cuda/*.c))
CPPFLAGS += -DMT_HAVE_cuda=1
$(patsubst %.c,$(BUILD)/%.o,$(wildcard kernels/cuda/*.c)) $(BUILD)/tests/support/pinned.o $(BUILD)/tests/bench/bench_gemm_cuda.o $(BUILD)/tests/bench/bench_gemm_codes_cuda.o $(BUILD)/tests/bench/bench_moe_gemm_cuda.o: CPPFLAGS += $(CUDA_INC)
endif
CPPFLAGS += $(foreach i,$(ISAS),-DMT_HAVE_$(i)=1) $(if $(HAVE_MPI),-DMT_HAVE_mpi=1) $(if $(HAVE_NCCL),-DMT_HAVE_nccl=1)
$(NCCL_SRC:%.c=$(BUILD)/%.o): CPPFLAGS += $(CUDA_INC) -isystem $(dir $(HAVE_NCCL))
$(BUILD)/dist/comm_mpi.o: CPPFLAGS += $(patsubst -I%,-isystem %,$(shell pkg-config --cflags ompi-c 2>/dev/null))

LIB := $(BUILD)/libmixtape.a

.PHONY: all help config deps lib clean
all: config mixtape build/libmixtape.a

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/' | sort

config: ## print the configuration in force
	@echo "mixtape: CONFIG=$(CONFIG) CC=$(CC) ISAS='$(ISAS)' CUDA=$(if $(filter 1,$(CUDA)),$(CUDA_ROOT),0) MPI=$(or $(HAVE_MPI),0) NCCL=$(if $(HAVE_NCCL),1,0) packages=$(if $(HAVE_PKGS),found,MISSING)"
	@test -n "$(HAVE_PKGS)" || { pkg-config --print-errors --exists $(PKGS); echo "missing libraries: run 'make deps'"; exit 1; }

$(LIB): $(LIB_OBJ)
	@rm -f $@
	$(call say,AR)ar rcs $@ $^
build/libmixtape.a: $(LIB)
	@ln -f $< $@
lib: $(LIB) ## the library of this configuration

# What depends on whether there is MPI, and NCCL.
WITH := mpi=$(HAVE_MPI) nccl=$(HAVE_NCCL)
$(BUILD)/with: FORCE
	@mkdir -p $(@D); echo '$(WITH)' | cmp -s - $@ || echo '$(WITH)' > $@
$(patsubst %.c,$(BUILD)/%.o,$(wildcard dist/*.c tests/dist/*.c)): $(BUILD)/with

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC)$(CC) $(CFLAGS) $(CPPFLAGS) -MMD -MP -c $< -o $@

# The compiler's report of registers and spills stays beside each object: NAME.cu.ptxas.
$(BUILD)/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(call say,NVC)$(NVCC) $(NVCCFLAGS) $(GENCODE) $(if $(filter %_sm90.cu,$<),,$(GENERIC)) -I. -MMD -MP -MF $(@:.o=.d) -c $< -o $@ >$(@:.o=.ptxas) 2>&1 \
	    || { grep -vE '^ptxas info' $(@:.o=.ptxas); exit 1; }
	@grep -E 'warning' $(@:.o=.ptxas) || true

# What depends on the list of backends is made anew when CUDA= changes.
$(BUILD)/cuda: FORCE
	@mkdir -p $(@D); echo '$(CUDA)' | cmp -s - $@ || echo '$(CUDA)' > $@
$(BUILD)/kernels/device.o $(BUILD)/kernels/plan.o $(BUILD)/train/ranks.o $(patsubst %,$(BUILD)/tests/%.o,support/pinned support/guard core/test_device kernels/test_cublaslt kernels/test_gemm_paths kernels/test_moe_gemm train/test_plan train/test_run_faults): $(BUILD)/cuda

define variant_rule
$(BUILD)/%.$(1).$(2).o: %.c
	@mkdir -p $$(@D)
	$$(call say,CC)$$(CC) $$(CFLAGS) $$(FLAGS_$(1)) $$(CPPFLAGS) -DMT_ISA=$(1) -DMT_ELEM=$(2) -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(foreach d,$(DTYPES),$(eval $(call variant_rule,$(i),$(d)))))

# Nothing reads floating-point exception flags, so conditional operations may be made unconditional.
define isa_rule
$(BUILD)/%.$(1).o: %.c
	@mkdir -p $$(@D)
	$$(call say,CC)$$(CC) $$(CFLAGS) $$(FLAGS_$(1)) $$(CPPFLAGS) -fno-trapping-math -DMT_ISA=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$(i))))

# The codecs of moments, as those of quantize.
$(foreach i,$(ISAS),$(DTYPES:%=$(BUILD)/kernels/cpu/optimizer.$(i).%.o)): CFLAGS += -fno-trapping-math

define pairs_rule
$(BUILD)/%.$(1).o: %.c
	@mkdir -p $$(@D)
	$$(call say,CC)$$(CC) $$(CFLAGS) $$(FLAGS_$(1)) $$(CPPFLAGS) -DMT_PAIRS=$(1) -MMD -MP -c $$< -o $$@
endef
$(foreach p,$(PAIRS),$(eval $(call pairs_rule,$(p))))

mixtape: $(BUILD)/mixtape
	@ln -f $< $@
$(BUILD)/mixtape: $(BUILD)/train/main.o $(LIB)
	$(call say,LD)$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

clean: ## remove everything built
	rm -rf build mixtape

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---- tests: every tests/<room>/test_*.c is a cmocka program --------------------------------------
# All are linked with tests/support, which counts and fails the allocations of our own objects.
TEST_SRC := $(wildcard tests/*/test_*.c)
TEST_BIN := $(TEST_SRC:%.c=$(BUILD)/%)
SUPPORT  := $(patsubst %.c,$(BUILD)/%.o,$(wildcard tests/support/*.c))
comma    := ,
WRAP     := $(foreach f,malloc calloc realloc free aligned_alloc strdup strndup asprintf open_memstream,-Wl$(comma)--wrap=$(f))
$(BUILD)/tests/%: $(BUILD)/tests/%.o $(SUPPORT) $(LIB)
	$(call say,LD)$(CC) $(LDFLAGS) $(WRAP) -o $@ $^ $(LDLIBS) -lcmocka
# The program on a device whose memory the host cannot touch (tests/support/guard.h).
$(BUILD)/tests/guarded/mixtape: $(BUILD)/train/main.o $(BUILD)/tests/guarded/open.o $(BUILD)/tests/support/guard.o $(LIB)
	$(call say,LD)$(CC) $(LDFLAGS) -Wl,--wrap=mt_device_open -o $@ $^ $(LDLIBS)
# The program on a GPU on which things go wrong (tests/cuda/faults.sh).
$(BUILD)/tests/cuda/open.o: CPPFLAGS += $(CUDA_INC)
$(BUILD)/tests/cuda/mixtape: $(BUILD)/train/main.o $(BUILD)/tests/cuda/open.o $(BUILD)/tests/cuda/bad.cu.o $(LIB)
	$(call say,LD)$(CC) $(LDFLAGS) -Wl,--wrap=mt_device_open -o $@ $^ $(LDLIBS)
.PRECIOUS: $(BUILD)/%.o
tests: $(TEST_BIN) $(if $(filter release,$(CONFIG)),$(BUILD)/tests/guarded/mixtape) ## build the tests of this configuration

# Parsers under libFuzzer (clang): tests/fuzz/fuzz_*.c. They call no kernel: those are built in the least time.
ifeq ($(CONFIG),fuzz)
$(filter $(BUILD)/kernels/cpu/%,$(LIB_OBJ)): CFLAGS := $(filter-out $(OPT),$(CFLAGS))
endif
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
FUZZ_BIN := $(FUZZ_SRC:%.c=$(BUILD)/%)
$(BUILD)/tests/fuzz/%: $(BUILD)/tests/fuzz/%.o $(LIB)
	$(call say,LD)$(CC) $(subst fuzzer-no-link,fuzzer,$(LDFLAGS)) -o $@ $^ $(LDLIBS)
fuzzers: $(FUZZ_BIN)

# What `make test` runs: everything as released; what is not slow under ASan and UBSan; each fuzzer for a few seconds.
# A program that does not build counts as failed, so the builds go on past errors.
TEST_PACKAGES := libopenmpi-dev openmpi-bin clang libclang-rt-dev libomp-dev clang-format valgrind
TEST_SLOW := $(addprefix tests/,train/test_gradcheck.c train/test_trainer.c kernels/test_gemm.c train/test_run.c train/test_run_faults.c train/test_resume.c train/test_bench.c \
             train/test_recipes.c kernels/test_attention.c kernels/test_router.c train/test_loss_chunk.c)
TEST_FAST := $(filter-out $(TEST_SLOW),$(TEST_SRC))
SUB          = $(MAKE) --no-print-directory
KEEP_ON      = $(SUB) $(JOBS) -k
FUZZ_SECONDS = 4
programs     = $(patsubst %.c,build/$(1)/%,$(2))

test: ## install what is missing, build, run every test that needs no GPU
	@$(SUB) deps PACKAGES="$(PACKAGES) $(TEST_PACKAGES)"
	@$(SUB) test-installed
test-installed: test-builds
	@FUZZ_SECONDS=$(FUZZ_SECONDS) sh tests/run.sh -- $(call programs,release,$(TEST_SRC)) \
	    tests/install/test_install.sh tests/guarded/test_guarded.sh tests/guarded/test_faults.sh tests/cuda/spills.sh $(call programs,asan,$(TEST_FAST)) $(call programs,fuzz,$(FUZZ_SRC))
test-builds:
	-@$(KEEP_ON) CONFIG=release all tests
	-@$(KEEP_ON) CONFIG=asan build/asan/mixtape $(call programs,asan,$(TEST_FAST))
	-@$(KEEP_ON) CONFIG=fuzz CC=clang fuzzers

# By hand: what takes longer. Both compilers without a warning, every kernel set that runs here, everything under the
# sanitizers, valgrind, minutes of fuzzing.
KERNEL_SETS  = $(shell for k in portable avx2 avx512 avx512_bf16 amx; do MIXTAPE_KERNELS=$$k build/release/mixtape gradcheck --op residual_add >/dev/null 2>&1 && echo $$k; done)
KERNEL_TESTS := $(filter tests/kernels/% tests/layers/% tests/train/test_trainer.c tests/train/test_gradcheck.c,$(TEST_SRC))
VALGRIND := valgrind -q --error-exitcode=9 --leak-check=full --errors-for-leak-kinds=definite
VALGRIND_TESTS := $(filter tests/core/% tests/optim/% tests/layers/%,$(TEST_SRC))
test-all: ## make test, and what takes longer: every kernel set, clang, valgrind, long fuzzing
	@$(SUB) deps PACKAGES="$(PACKAGES) $(TEST_PACKAGES)"
	@$(SUB) test-all-installed
test-all-installed: test-builds
	-@$(KEEP_ON) CONFIG=release BUILD=build/clang CC=clang WERROR=1 build/clang/mixtape tests
	-@$(KEEP_ON) CONFIG=release BUILD=build/gcc-werror CC=gcc WERROR=1 build/gcc-werror/mixtape tests
	-@$(KEEP_ON) CONFIG=asan tests
	@run() { echo "== $$1"; shift; sh tests/run.sh "$$@" | tee build/run.log | sed '$$d'; tail -n 1 build/run.log >>build/totals.log; }; \
	rm -f build/totals.log; \
	run "as released" -- $(call programs,release,$(TEST_SRC)) tests/install/test_install.sh; \
	for k in $(KERNEL_SETS); do run "kernel set $$k" env MIXTAPE_KERNELS=$$k -- $(call programs,release,$(KERNEL_TESTS)); done; \
	run "clang" -- $(call programs,clang,$(TEST_SRC)); \
	run "ASan and UBSan" -- $(call programs,asan,$(TEST_SRC)); \
	run "valgrind" env MIXTAPE_KERNELS=portable OMP_NUM_THREADS=1 $(VALGRIND) -- $(call programs,release,$(VALGRIND_TESTS)); \
	FUZZ_SECONDS=120; export FUZZ_SECONDS; run "fuzzing" -- $(call programs,fuzz,$(FUZZ_SRC)); \
	awk '{ p += $$1; f += $$3 } END { print p " passed, " f " failed"; exit f > 0 }' build/totals.log

lint: lib ## the house rules that a machine can check
	@sh tests/lint.sh $(LIB)

# Development checks against transformers, PyTorch and numpy; nothing else here needs Python.
oracle: $(BUILD)/mixtape ## compare models with Hugging Face transformers, formats with numpy (Python: torch transformers h5py safetensors ml_dtypes)
	@python3 -c 'import torch, transformers, h5py, safetensors, ml_dtypes' || { echo "oracle: these Python packages are missing"; exit 1; }
	@for check in hf_parity adamw_parity export_parity quantize_parity; do \
	    echo "== $$check"; MIXTAPE=$(abspath $(BUILD)/mixtape) python3 tests/oracle/$$check.py || bad=1; done; test -z "$$bad"

# ---- install ------------------------------------------------------------------------------------
PREFIX  ?= /usr/local
HEADERS := $(filter-out %_priv.h kernels/cpu/% kernels/cuda/%,$(wildcard core/*.h kernels/*.h dist/*.h layers/*.h optim/*.h train/*.h))
install: all ## program, library, headers and mixtape.pc under PREFIX (/usr/local)
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/pkgconfig
	install -m 755 mixtape $(DESTDIR)$(PREFIX)/bin/
	install -m 644 build/libmixtape.a $(DESTDIR)$(PREFIX)/lib/
	for h in $(HEADERS); do install -D -m 644 $$h $(DESTDIR)$(PREFIX)/include/mixtape/$$h || exit 1; done
	printf '%s\n' 'prefix=$(PREFIX)' 'libdir=$${prefix}/lib' 'includedir=$${prefix}/include' '' \
	    'Name: mixtape' 'Description: Mixture-of-Experts training with its own tape autograd' 'Version: $(VERSION)' \
	    'Requires: $(PKGS)$(if $(HAVE_MPI), ompi-c)' 'Cflags: -I$${includedir}/mixtape' 'Libs: -L$${libdir} -lmixtape $(CUDA_LIBS) -fopenmp -lpthread -lm' \
	    >$(DESTDIR)$(PREFIX)/lib/pkgconfig/mixtape.pc
.PHONY: oracle test test-installed test-builds test-all test-all-installed tests fuzzers lint install

# ---- the program: what it was built from, packages, the demo --------------------------------------
REVISION  := $(shell git describe --always --abbrev=12 --exclude='*' --dirty=+ 2>/dev/null || echo unknown)
LIBRARIES := $(shell for p in $(PKGS); do printf '%s%s %s' "$$s" $$p "$$(pkg-config --modversion $$p 2>/dev/null)"; s=', '; done)
$(BUILD)/revision: FORCE
	@mkdir -p $(@D); echo '$(VERSION) $(REVISION) $(LIBRARIES)' | cmp -s - $@ || echo '$(VERSION) $(REVISION) $(LIBRARIES)' > $@
$(BUILD)/train/build_info.o: $(BUILD)/revision
$(BUILD)/train/build_info.o: CPPFLAGS += -DMT_BUILD_VERSION='"$(VERSION)"' -DMT_BUILD_REVISION='"$(REVISION)"' -DMT_BUILD_LIBRARIES='"$(LIBRARIES)"'
$(BUILD)/tests/train/test_cli $(BUILD)/tests/train/test_run $(BUILD)/tests/train/test_run_faults $(BUILD)/tests/train/test_resume $(BUILD)/tests/train/test_init_from $(BUILD)/tests/dist/test_run $(BUILD)/tests/dist/test_run_faults $(BUILD)/tests/dist/test_fabric: | $(BUILD)/mixtape

PACKAGES := build-essential pkg-config libopenblas-dev libhdf5-dev libjansson-dev libyaml-dev \
            libxxhash-dev libcmocka-dev gnuplot-nox bible-kjv bible-kjv-text
deps: ## install the packages that are missing (Debian; sudo unless root)
	@missing=; for p in $(PACKAGES); do \
	    dpkg-query -W -f='$${db:Status-Status}' $$p 2>/dev/null | grep -qx installed || missing="$$missing $$p"; \
	done; test -z "$$missing" || { \
	    echo "installing$$missing"; sudo=; test "$$(id -u)" = 0 || sudo=sudo; \
	    $$sudo apt-get -q update && \
	    $$sudo env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends install $$missing; }

# The sub-makes see the packages that deps has just installed, and build on every core.
JOBS := $(if $(findstring -j,$(MAKEFLAGS)),,-j$(shell nproc 2>/dev/null || echo 1))
# It trains on the CPU: unless CUDA is asked for, the minutes that its kernels take to compile are left out.
demo: ## train the demo model on the King James Bible: runs/demo
	@started=$$(date +%s) && $(MAKE) --no-print-directory deps && \
	    $(MAKE) --no-print-directory $(JOBS) $(if $(CUDA_GIVEN),,CUDA=0) all && sh train/demo.sh $$started
.PHONY: FORCE demo

BENCH := GOMP_SPINCOUNT=4000 OMP_PROC_BIND=true OPENBLAS_THREAD_TIMEOUT=10
bench: bench-gemm bench-quantize $(BUILD)/tests/bench/bench_step ## the benchmarks of tests/bench: GEMM and quantize rates, training steps by op
	for size in tiny larger; do for dtype in f32 bf16; do $(BENCH) $(BUILD)/tests/bench/bench_step $$size $$dtype || exit 1; done; done
bench-gemm: $(BUILD)/tests/bench/bench_gemm ## GFLOP/s of the grouped GEMM (DTYPE=f64|f32|bf16)
	$(BENCH) $< $(or $(DTYPE),f32)
bench-gemm-cuda: $(BUILD)/tests/bench/bench_gemm_cuda $(BUILD)/tests/bench/bench_gemm_codes_cuda ## TFLOP/s of the grouped GEMM on a GPU, after checking its paths (CUDA=1)
	for bench in $^; do $$bench check && $$bench time || exit 1; done
bench-moe-gemm-cuda: $(BUILD)/tests/bench/bench_moe_gemm_cuda ## expert GEMMs as one kernel against their parts on a GPU (CUDA=1)
	$<
bench-quantize: $(BUILD)/tests/bench/bench_quantize ## GB/s of quantize and dequantize against memcpy
	$(BENCH) $<
.PHONY: bench bench-gemm bench-gemm-cuda bench-moe-gemm-cuda bench-quantize
