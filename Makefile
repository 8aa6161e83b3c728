# SPDX-License-Identifier: Apache-2.0
#
#   make                    libcore.so and libcore.a in build/release/
#   make test               build and run tests/c
#   make test-f64           the same with double, in build/f64
#   make asan               the same under ASan and UBSan, in build/sanitized, with RELPOS_TEST_SMALL
#                           set: the same code on fewer and smaller shapes
#   make tsan               the same under TSan, in build/tsan
#   make isas               the same with RELPOS_ISA set to each instruction set in turn
#   make neon               the same for AArch64 with CROSS=aarch64-linux-gnu- under QEMU
#   make sanitized          libcore.so and libcore_f64.so under ASan and UBSan, for
#                           tests/test_sanitizers.py
#   make f64                libcore_f64.so and .a: the same sources with double (tests only)
#   make gpu-check PART=build  then test, sanitize, bench: on a machine with a GPU (docs/cuda.md);
#                           `python3 .ci/gpu_check.py build` also says by its status, 3, that time
#                           is up
#   make examples           examples/c against the static library
#   make cuda               librelpos_cuda.so in build/cuda/, by nvcc (see cuda/nvcc.py)
#   make emulated           librelpos_cuda.so for a CPU, in build/emulated/: cuda/ compiled by CXX
#                           against tests/emulator; emulated-race and emulated-sanitized: with the
#                           race checker, under ASan and UBSan
#   make install            PREFIX (/usr/local), LIBDIR, INCLUDEDIR, DESTDIR
#   make uninstall          the same: removes what install put there
#   make clean              build/, and no folder that BUILD names
#
#   BLAS=auto               the default: at run time the wheel's OpenBLAS where it is found
#   BLAS=builtin            never anything but our own products
#   BLAS=openblas           or another package known to pkg-config, or a library's path:
#                           that library
#   VARIANT=debug           in build/debug/ without optimisation, in a tenth of the time
#   WERROR=1                warnings are errors
#   BUILD=folder            build there instead of in build/<variant>; the variants that targets
#                           above are about, f64 and so on, each in a folder below it
#   RUN=command             runs the test programs: an emulator, a debugger
#   CC, CFLAGS, CPPFLAGS, LDFLAGS as usual; the flags of csrc/core.mk come last

include csrc/core.mk
include cuda/cuda.mk

CC ?= cc
CXX ?= c++
AR ?= ar
PKG_CONFIG ?= pkg-config
VARIANT ?= release
CROSS ?= aarch64-linux-gnu-
QEMU ?= qemu-aarch64
BLAS ?= auto
PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include

# Each variant has a folder of its own, below BUILD where that is given. Another variant is
# another make: in one folder two of them, side by side, would mix their objects.
VARIANTS := $(if $(filter command%,$(origin BUILD)),$(BUILD),build)
BUILD := build/$(VARIANT)
variant = VARIANT=$(1) BUILD=$(VARIANTS)/$(1)
MACHINE := $(firstword $(subst -, ,$(shell $(CC) -dumpmachine)))
VERSION := $(shell sed -n 's/^\#define RP_VERSION "\(.*\)"/\1/p' csrc/include/relpos/relpos.h)
ABI := $(firstword $(subst ., ,$(VERSION)))

# ---- what a variant changes ----------------------------------------------

NAME := core
SANITIZE_COMMON := -O1 -g -fno-omit-frame-pointer -UNDEBUG
VARIANT_FLAGS_release :=
# Without optimisation intrinsics are macros, and gcc 12 takes their masks for a change of sign.
VARIANT_FLAGS_debug := -O0 -g -UNDEBUG -Wno-sign-conversion
VARIANT_FLAGS_tsan := $(SANITIZE_COMMON) -fsanitize=thread
VARIANT_FLAGS_f64 := -UNDEBUG -DRP_REAL_IS_DOUBLE
VARIANT_FLAGS_sanitized := $(SANITIZE_COMMON) -fsanitize=address,undefined -fno-sanitize-recover=all
VARIANT_FLAGS_sanitized_f64 := $(VARIANT_FLAGS_sanitized) -DRP_REAL_IS_DOUBLE
KNOWN_VARIANTS := release debug tsan f64 sanitized sanitized_f64 neon
ifeq ($(filter $(KNOWN_VARIANTS),$(VARIANT)),)
$(error VARIANT=$(VARIANT): expected one of $(KNOWN_VARIANTS))
endif
ifneq ($(filter %f64,$(VARIANT)),)
NAME := core_f64
endif
VARIANT_FLAGS := $(VARIANT_FLAGS_$(VARIANT))

# ---- which BLAS ------------------------------------------------------------
# Nothing is linked: base/blas.c, the one file compiled with BLAS_FLAGS, opens the
# library when it is first needed (see base/blas.h).

ifeq ($(BLAS),auto)
BLAS_FLAGS :=
else ifeq ($(BLAS),builtin)
BLAS_FLAGS := -DRPI_BLAS_BUILTIN
else
ifneq ($(findstring /,$(BLAS)),)
BLAS_LIBRARY := $(abspath $(wildcard $(BLAS)))
else
BLAS_LIBRARY := $(wildcard $(patsubst -l%,$(shell $(PKG_CONFIG) --variable=libdir \
  $(BLAS))/lib%.so,$(firstword $(shell $(PKG_CONFIG) --libs-only-l $(BLAS)))))
endif
ifeq ($(BLAS_LIBRARY),)
$(error BLAS=$(BLAS): expected auto, builtin, a library's path, or a package of pkg-config)
endif
BLAS_PREFIX := $(shell nm -D $(BLAS_LIBRARY) | sed -n 's/^.* T \(.*\)cblas_sgemm$$/\1/p')
BLAS_FLAGS := -DRPI_BLAS_LIBRARY='"$(BLAS_LIBRARY)"' -DRPI_BLAS_PREFIX='"$(BLAS_PREFIX)"'
endif

# ---- flags -----------------------------------------------------------------

ifeq ($(WERROR),1)
CORE_WARNINGS += -Werror
endif
INCLUDES := $(addprefix -Icsrc/,$(CORE_INCLUDES))
COMPILE_FLAGS = $(CPPFLAGS) $(CFLAGS) $(INCLUDES) $(CORE_CFLAGS) $(CORE_WARNINGS) $(VARIANT_FLAGS)
LINK_FLAGS = $(CFLAGS) $(LDFLAGS) $(CORE_LDFLAGS) $(VARIANT_FLAGS)
FILE_FLAGS = $(FLAGS_$(MACHINE)_$(basename $(notdir $<)))

OBJECTS := $(CORE_SOURCES:%.c=$(BUILD)/csrc/%.o)
STATIC := $(BUILD)/lib$(NAME).a
SONAME := lib$(NAME).so.$(ABI)
SHARED := $(BUILD)/lib$(NAME).so
TESTS := $(patsubst tests/c/%.c,$(BUILD)/tests/%,$(sort $(wildcard tests/c/test_*.c)))
# Tiles and bf16 are made for float. Tests of attention on their twin are not run under the checker of
# races: threads share nothing that they do not share on other tables, and it takes too long.
ifneq ($(filter %f64,$(VARIANT)),)
TESTS := $(filter-out %/test_tiles %/test_bf16,$(TESTS))
else ifneq ($(VARIANT),tsan)
TESTS += $(BUILD)/tests/test_attention_tiles $(BUILD)/tests/test_attention_terms_tiles
endif
EXAMPLES := $(patsubst examples/c/%.c,$(BUILD)/examples/%,$(sort $(wildcard examples/c/*.c)))

.PHONY: all programs names test test-f64 asan tsan sanitized isas neon f64 examples install \
  uninstall clean force
.DELETE_ON_ERROR:

all: $(STATIC) $(SHARED)

# ---- the library -----------------------------------------------------------

# Rewritten only when the command line changes, so that other flags rebuild. The new file has a name
# of its own: `make -j test isas` is two makes at it.
$(BUILD)/flags: force
	@mkdir -p $(@D)
	@new=$@.$$$$; echo $(CC) $(COMPILE_FLAGS) $(LINK_FLAGS) $(BLAS_FLAGS) > $$new; \
	cmp -s $$new $@ && rm $$new || mv $$new $@

$(BUILD)/csrc/base/blas.o: ONE_FLAGS = $(BLAS_FLAGS)
SHOWN_FLAGS = $(strip $(CFLAGS) $(CORE_CFLAGS) $(VARIANT_FLAGS))
# In a text of C, in quotes of the shell.
QUOTED_FLAGS = $(subst ','\'',$(subst ",\",$(subst \,\\,$(SHOWN_FLAGS))))
$(BUILD)/csrc/api.o: ONE_FLAGS = -DRPI_BUILD_FLAGS='"$(QUOTED_FLAGS)"'

$(BUILD)/csrc/%.o: csrc/%.c csrc/core.mk $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(COMPILE_FLAGS) $(FILE_FLAGS) $(ONE_FLAGS) -MMD -MP -c $< -o $@

$(STATIC): $(OBJECTS)
	rm -f $@
	$(AR) rcs $@ $^

$(BUILD)/$(SONAME): $(OBJECTS)
	$(CC) $(LINK_FLAGS) -shared -Wl,-soname,$(SONAME) -o $@ $^ $(CORE_LIBS)

$(SHARED): $(BUILD)/$(SONAME)
	ln -sf $(SONAME) $@

f64:
	$(MAKE) $(call variant,f64) all

# ---- tests and examples ----------------------------------------------------

# Tests link the static library: there the rpi_ names can be reached. Flags of the linker come first
# where one command does both: behind the compiler's, -fno-fast-math takes from clang what was
# said of -ffp-contract.
$(BUILD)/tests/%: tests/c/%.c $(STATIC) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(LINK_FLAGS) $(COMPILE_FLAGS) -UNDEBUG -MMD -MP $< -o $@ $(STATIC) $(CORE_LIBS)

TWIN := $(BUILD)/tests/twin_table.o
$(TWIN): tests/c/twin_table.c $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(COMPILE_FLAGS) -UNDEBUG -MMD -MP -c $< -o $@

$(BUILD)/tests/%_tiles: tests/c/%.c $(TWIN) $(STATIC) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(COMPILE_FLAGS) -UNDEBUG -DTEST_ONLY=twin_table -MMD -MP -MT $@ -MF $@.d -c $< -o $@.o
	$(CC) $@.o $(TWIN) -o $@ $(LINK_FLAGS) $(STATIC) $(CORE_LIBS)

$(BUILD)/examples/%: examples/c/%.c $(STATIC) $(BUILD)/flags
	@mkdir -p $(@D)
	$(CC) $(LINK_FLAGS) $(CPPFLAGS) $(CFLAGS) -Icsrc/include -std=c11 -O2 $(CORE_WARNINGS) \
	  $(VARIANT_FLAGS) -MMD -MP $< -o $@ $(STATIC) $(CORE_LIBS)

# With -j several run at once, the longest first; what one says comes when it ends. All run, whatever
# fails.
LONGEST := %/test_attention_terms %/test_attention_terms_tiles %/test_attention \
  %/test_attention_tiles %/test_tiles %/test_attention_maps %/test_gemm
RUNS := $(addsuffix .run,$(filter $(LONGEST),$(TESTS)) $(filter-out $(LONGEST),$(TESTS)))
.PHONY: $(RUNS)
$(RUNS): %.run: %
	@said=$$($(RUN) $< 2>&1); status=$$?; printf '%-28s %s\n' $(notdir $<) "$$said"; exit $$status

programs: $(TESTS)

# For tests/test_core.py: the tests of this variant, then those that isas runs.
names:
	@echo $(notdir $(TESTS))
	@echo $(notdir $(OF_THE_CHOSEN))

test: programs
	@$(MAKE) --no-print-directory --keep-going TESTS="$(TESTS)" $(RUNS)

# After f64: two makes at once in one folder would write the same objects.
test-f64: f64
	$(MAKE) $(call variant,f64) test

# TSan needs its memory at fixed places, which the randomised layout of newer kernels may
# take: setarch, where it is, turns that off.
SETARCH := $(shell command -v setarch >/dev/null && setarch -R true 2>/dev/null && echo setarch -R)
asan:
	RELPOS_TEST_SMALL=1 $(MAKE) $(call variant,sanitized) test
tsan:
	RELPOS_TEST_SMALL=tiny $(SETARCH) $(MAKE) $(call variant,$@) test

# For programs that load the library under LD_PRELOAD=libasan.
sanitized:
	$(MAKE) $(call variant,sanitized) all
	$(MAKE) $(call variant,sanitized_f64) all

# Every instruction set in turn, as RELPOS_ISA would choose it. One that this machine
# cannot run is named: the program says so with exit code 77. Without those that only call every
# table by themselves, whatever was chosen: `make test` runs them.
CALL_ALL := $(shell grep -l 'table_at\|attention_run.h\|gemm_tiles.c' tests/c/test_*.c)
BY_DISPATCH := %/test_attention_maps.c %/test_waves.c %/test_rotate.c # these do both
OF_THE_CHOSEN := $(filter-out $(filter-out $(BY_DISPATCH),$(CALL_ALL)),$(wildcard tests/c/test_*.c))
OF_THE_CHOSEN := $(patsubst tests/c/%.c,$(BUILD)/tests/%,$(sort $(OF_THE_CHOSEN)))
isas: $(OF_THE_CHOSEN)
	@for isa in portable avx2 avx512 amx neon; do \
	  RELPOS_ISA=$$isa $(RUN) $(BUILD)/tests/test_api_attention > $(BUILD)/isa.log; \
	  if [ $$? = 77 ]; then tail -1 $(BUILD)/isa.log; continue; fi; \
	  echo "RELPOS_ISA=$$isa"; \
	  RELPOS_ISA=$$isa $(MAKE) --no-print-directory TESTS="$(OF_THE_CHOSEN)" test || exit 1; \
	done

# AArch64 elsewhere: a cross compiler and an emulator of user programs.
neon:
	@for tool in $(CROSS)gcc $(CROSS)ar $(QEMU); do \
	  command -v $$tool >/dev/null || { echo "make neon: $$tool is missing; Debian has it in" \
	    "gcc-aarch64-linux-gnu and qemu-user; CROSS= and QEMU= name others"; exit 1; }; \
	done
	RELPOS_TEST_SMALL=1 $(MAKE) $(call variant,neon) CC=$(CROSS)gcc AR=$(CROSS)ar \
	  RUN="$(QEMU) -L /usr/$(CROSS:%-=%)" test isas

examples: $(EXAMPLES)

# ---- the library of GPUs, and the same on a CPU ----------------------------

PYTHON ?= python3

.PHONY: cuda gpu-check
cuda:
	$(PYTHON) cuda/nvcc.py --out $(VARIANTS)/cuda

gpu-check:
	@$(PYTHON) .ci/gpu_check.py $(PART)

EMULATED ?= emulated
EMULATED_BUILD := $(VARIANTS)/$(EMULATED)
EMULATED_FLAGS_emulated-sanitized := -O1 -fsanitize=address,undefined -fno-sanitize-recover=all
EMULATED_FLAGS = $(addprefix -I,$(CUDA_INCLUDES) tests/emulator) $(EMULATOR_FLAGS) \
  $(if $(filter 1,$(WERROR)),-Werror) $(EMULATED_FLAGS_$(EMULATED))
# The race checker gives this instrumentation its meaning: the library is linked without it.
EMULATED_KERNEL_FLAGS_emulated-race := -O1 -fsanitize=thread
EMULATED_SOURCES := $(EMULATOR_SOURCES) $(if $(filter emulated-race,$(EMULATED)),race.cpp)
EMULATED_OBJECTS := $(EMULATED_SOURCES:%.cpp=$(EMULATED_BUILD)/emulator/%.o) \
  $(patsubst cuda/%.cu,$(EMULATED_BUILD)/cuda/%.o,$(wildcard $(CUDA_SOURCES:%=cuda/%)))

.PHONY: emulated emulated-race emulated-sanitized planted
emulated emulated-race emulated-sanitized:
	$(MAKE) EMULATED=$@ $(VARIANTS)/$@/librelpos_cuda.so

$(EMULATED_BUILD)/emulator/%.o: tests/emulator/%.cpp cuda/cuda.mk Makefile
	@mkdir -p $(@D)
	$(CXX) $(EMULATED_FLAGS) -O3 $(ONE_FLAGS) -MMD -MP -c $< -o $@

$(EMULATED_BUILD)/cuda/%.o: cuda/%.cu cuda/cuda.mk Makefile
	@mkdir -p $(@D)
	$(CXX) $(EMULATED_FLAGS) $(EMULATED_KERNEL_FLAGS_$(EMULATED)) -MMD -MP -x c++ -c $< -o $@

# The emulator alone, with kernels that have faults: tests/test_cuda_emulator.py.
planted:
	$(MAKE) EMULATED=emulated $(VARIANTS)/emulated/planted $(VARIANTS)/emulated/vectors
	$(MAKE) EMULATED=emulated-race $(VARIANTS)/emulated-race/planted
	$(MAKE) EMULATED=emulated-sanitized $(VARIANTS)/emulated-sanitized/planted

EMULATED_PROGRAMS := $(EMULATED_BUILD)/planted $(EMULATED_BUILD)/vectors
$(EMULATED_PROGRAMS): $(EMULATED_BUILD)/%: $(EMULATED_BUILD)/emulator/%.o \
    $(EMULATED_SOURCES:%.cpp=$(EMULATED_BUILD)/emulator/%.o)
	$(CXX) $(EMULATED_FLAGS) -o $@ $^ -ldl -pthread

$(EMULATED_BUILD)/emulator/planted.o: ONE_FLAGS = $(EMULATED_KERNEL_FLAGS_$(EMULATED))

$(EMULATED_BUILD)/librelpos_cuda.so: $(EMULATED_OBJECTS)
	$(CXX) $(EMULATED_FLAGS) $(if $(EMULATED_FLAGS_$(EMULATED)),,-Wl,-z,defs) -shared -o $@ $^ \
	  -ldl -pthread

# ---- install ---------------------------------------------------------------

# relpos.pc names them: what is not from the root would be another folder for everyone. The rest
# means something to relpos.pc, to sed or to the shell.
define NEWLINE


endef
UNFIT := & | \ ' " ` $$ \#
UNFIT_IN = $(foreach one,$(UNFIT),$(findstring $(one),$(subst $(NEWLINE),|,$(1))))
CHECK_FOLDER = $(if $(filter /%,$(firstword $($(1)))),,$(error $(1)=$($(1)): must begin with /)) \
  $(if $(strip $(call UNFIT_IN,$($(1)))),$(error $(1)=$($(1)): must have no newline and none of \
  $(UNFIT)))
CHECK_FOLDERS = $(foreach one,PREFIX LIBDIR INCLUDEDIR,$(call CHECK_FOLDER,$(one)))

install: all
	$(CHECK_FOLDERS)
	install -d "$(DESTDIR)$(LIBDIR)/pkgconfig" "$(DESTDIR)$(INCLUDEDIR)/relpos"
	install -m 644 $(addprefix csrc/,$(CORE_PUBLIC_HEADERS)) "$(DESTDIR)$(INCLUDEDIR)/relpos"
	install -m 644 $(STATIC) "$(DESTDIR)$(LIBDIR)"
	install -m 755 $(BUILD)/$(SONAME) "$(DESTDIR)$(LIBDIR)"
	ln -sf $(SONAME) "$(DESTDIR)$(LIBDIR)/$(notdir $(SHARED))"
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' \
	  -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|' -e 's|@VERSION@|$(VERSION)|' \
	  -e 's|@PRIVATE@|$(filter -Wl%,$(CORE_LDFLAGS)) $(CORE_LIBS)|' csrc/relpos.pc.in \
	  > $(BUILD)/relpos.pc
	install -m 644 $(BUILD)/relpos.pc "$(DESTDIR)$(LIBDIR)/pkgconfig"

# The folder of the headers goes where nothing else is in it.
uninstall:
	$(CHECK_FOLDERS)
	rm -f $(foreach one,$(notdir $(CORE_PUBLIC_HEADERS)),"$(DESTDIR)$(INCLUDEDIR)/relpos/$(one)")
	rm -f $(foreach one,$(notdir $(STATIC) $(SHARED)) $(SONAME) pkgconfig/relpos.pc,\
	  "$(DESTDIR)$(LIBDIR)/$(one)")
	@rmdir "$(DESTDIR)$(INCLUDEDIR)/relpos" 2>/dev/null || true

# In a folder that was named may be more than what make put there.
clean:
	$(if $(filter command%,$(origin BUILD)),$(error BUILD=$(BUILD): make clean removes build/ alone))
	rm -rf build

-include $(OBJECTS:.o=.d) $(EMULATED_OBJECTS:.o=.d) $(TESTS:=.d) $(TWIN:.o=.d) $(EXAMPLES:=.d)
