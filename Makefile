# mixtape. `make help` lists the targets; the configuration in force is printed by `make config`.
#
#   CONFIG=release|debug|asan|fuzz   objects go to build/<config>
#   CC=gcc|clang                     WERROR=1 turns warnings into errors

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
ifeq ($(WERROR),1)
WARN += -Werror
endif
OPT_release := -O3 -g
OPT_debug   := -O1 -g
OPT_asan    := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer
OPT_fuzz    := -O1 -g -fsanitize=fuzzer-no-link,address,undefined -fno-omit-frame-pointer
OPT := $(OPT_$(CONFIG))
ifeq ($(OPT),)
$(error CONFIG=$(CONFIG) is not one of release debug asan fuzz)
endif

CFLAGS   := -std=c11 -D_GNU_SOURCE $(WARN) $(OPT) -fopenmp -ffp-contract=off -fno-math-errno -fPIC $(EXTRA_CFLAGS)
CPPFLAGS := -I. $(PKG_CFLAGS)
LDLIBS   := $(PKG_LIBS) -lm -lpthread
LDFLAGS  := $(OPT) -fopenmp

# ---- sources -----------------------------------------------------------------------------------
CPU_ONCE    := kernels/cpu/device.c
CPU_VARIANT := $(filter-out $(CPU_ONCE) kernels/cpu/gemm_amx.c,$(wildcard kernels/cpu/*.c))
LIB_SRC     := $(wildcard core/*.c kernels/*.c layers/*.c optim/*.c dist/*.c) $(CPU_ONCE) \
               $(filter-out train/main.c,$(wildcard train/*.c))

DTYPES := f64 f32 bf16
ISAS   := portable
ifeq ($(ARCH),x86_64)
ISAS   += avx2 avx512
endif
FLAGS_portable :=
FLAGS_avx2     := -march=x86-64-v3
FLAGS_avx512   := -march=x86-64-v4 -mprefer-vector-width=512

LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/%.o) \
           $(foreach i,$(ISAS),$(foreach d,$(DTYPES),$(CPU_VARIANT:%.c=$(BUILD)/%.$(i).$(d).o)))
ifeq ($(ARCH),x86_64)
LIB_OBJ += $(patsubst %.c,$(BUILD)/%.o,$(wildcard kernels/cpu/gemm_amx.c))
endif
CPPFLAGS += $(foreach i,$(ISAS),-DMT_HAVE_$(i)=1)

LIB := $(BUILD)/libmixtape.a

.PHONY: all help config deps lib clean
all: config mixtape build/libmixtape.a

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/' | sort

config: ## print the configuration in force
	@echo "mixtape: CONFIG=$(CONFIG) CC=$(CC) ISAS='$(ISAS)' packages=$(if $(HAVE_PKGS),found,MISSING)"
	@test -n "$(HAVE_PKGS)" || { pkg-config --print-errors --exists $(PKGS); echo "missing libraries: run 'make deps'"; exit 1; }

$(LIB): $(LIB_OBJ)
	@rm -f $@
	ar rcs $@ $^
build/libmixtape.a: $(LIB)
	@ln -f $< $@
lib: $(LIB) ## the library of this configuration

$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS) $(CPPFLAGS) -MMD -MP -c $< -o $@

define variant_rule
$(BUILD)/%.$(1).$(2).o: %.c
	@mkdir -p $$(@D)
	$$(CC) $$(CFLAGS) $$(FLAGS_$(1)) $$(CPPFLAGS) -DMT_ISA=$(1) -DMT_ELEM=$(2) -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(foreach d,$(DTYPES),$(eval $(call variant_rule,$(i),$(d)))))

$(BUILD)/kernels/cpu/gemm_amx.o: CFLAGS += -march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16

mixtape: $(BUILD)/mixtape
	@ln -f $< $@
$(BUILD)/mixtape: $(BUILD)/train/main.o $(LIB)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS)

clean: ## remove everything built
	rm -rf build mixtape

-include $(shell find $(BUILD) -name '*.d' 2>/dev/null)

# ---- tests: every tests/<room>/test_*.c is a cmocka program --------------------------------------
TEST_SRC := $(wildcard tests/*/test_*.c)
TEST_BIN := $(TEST_SRC:%.c=$(BUILD)/%)
$(BUILD)/tests/%: $(BUILD)/tests/%.o $(BUILD)/tests/support/test.o $(LIB)
	$(CC) $(LDFLAGS) -o $@ $^ $(LDLIBS) -lcmocka
.PRECIOUS: $(BUILD)/%.o
tests: $(TEST_BIN) ## build the tests

# ---- the program: what it was built from, packages, the demo --------------------------------------
REVISION  := $(shell git describe --always --abbrev=12 --exclude='*' --dirty=+ 2>/dev/null || echo unknown)
LIBRARIES := $(shell for p in $(PKGS); do printf '%s%s %s' "$$s" $$p "$$(pkg-config --modversion $$p 2>/dev/null)"; s=', '; done)
$(BUILD)/revision: FORCE
	@mkdir -p $(@D); echo '$(REVISION) $(LIBRARIES)' | cmp -s - $@ || echo '$(REVISION) $(LIBRARIES)' > $@
$(BUILD)/train/build_info.o: $(BUILD)/revision
$(BUILD)/train/build_info.o: CPPFLAGS += -DMT_BUILD_REVISION='"$(REVISION)"' -DMT_BUILD_LIBRARIES='"$(LIBRARIES)"'
$(BUILD)/tests/train/test_cli $(BUILD)/tests/train/test_run: | $(BUILD)/mixtape

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
demo: ## train the demo model on the King James Bible: runs/demo
	@started=$$(date +%s) && $(MAKE) --no-print-directory deps && \
	    $(MAKE) --no-print-directory $(JOBS) all && sh train/demo.sh $$started
.PHONY: FORCE demo
