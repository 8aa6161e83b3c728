# SPDX-License-Identifier: Apache-2.0
#
# core.mk: the one list of what libcore is made of. The Makefile includes it and
# setup.py reads it, so it holds nothing but NAME = value lines (a backslash goes
# on to the next line): no functions, no conditions, no references.
#
# A file FLAGS_<machine>_<name> is compiled with: isa/avx2.c on x86_64 gets
# FLAGS_x86_64_avx2. Where the variable is missing the file gets nothing more; an
# isa file of a foreign machine compiles to nothing.

# Paths from csrc/.
CORE_SOURCES = \
  base/error.c \
  base/memory.c \
  base/file.c \
  base/rng.c \
  base/threads.c \
  base/cpu.c \
  base/folder.c \
  base/blas.c \
  base/scratch.c \
  isa/portable.c \
  isa/avx2.c \
  isa/avx512.c \
  isa/neon.c \
  isa/dispatch.c \
  isa/host.c \
  isa/devices.c \
  isa/device_list.c \
  model/config.c \
  model/config_check.c \
  model/presets.c \
  model/layout.c \
  model/waves.c \
  model/position_constants.c \
  model/positions.c \
  model/plan.c \
  model/sublayer.c \
  model/attention.c \
  model/layers.c \
  model/transformer.c \
  model/finite.c \
  model/maps.c \
  model/outcomes.c \
  model/profile.c \
  file/header_text.c \
  file/safetensors.c \
  file/config_metadata.c \
  file/model_file.c \
  train/schedule.c \
  train/step.c \
  decode/cache.c \
  decode/search.c \
  api.c \
  api_attention.c \
  api_overlap.c \
  api_relation.c \
  api_rotate.c \
  api_device.c \
  api_config.c \
  api_model.c \
  api_batch.c \
  api_maps.c \
  api_decode.c

CORE_PUBLIC_HEADERS = include/relpos/relpos.h include/relpos/device.h include/relpos/model.h \
  include/relpos/decode.h

CORE_INCLUDES = . include

# Part of the design, each of them measured: without -ffp-contract=fast, -std=c11
# turns fused multiply-adds off; without the two -fno- flags a maximum is no vector
# instruction. Never -ffast-math: it breaks infinities and NaN; -fno-fast-math before the
# others, which it would undo. These come after the user's flags, because an inherited -O2
# costs a factor of four; and Python's own -fwrapv, with which pip builds, a third where a mask is
# read at n = 4096, and from case to case less or nothing elsewhere.
CORE_CFLAGS = -std=c11 -O3 -fno-fast-math -fno-math-errno -fno-trapping-math -fno-wrapv \
  -ffp-contract=fast -fopenmp-simd -fvisibility=hidden -fPIC -pthread -DNDEBUG

# Sizes are enumerators here, and clang 19 does not like them beside floats.
CORE_WARNINGS = -Wall -Wextra -Wshadow -Wconversion -Wno-enum-float-conversion

CORE_LIBS = -lm -ldl -pthread

# nodelete: the threads of the pool sleep inside the library. The others after the user's -Ofast or
# -ffast-math, by which loading it would flush the whole program's denormals.
CORE_LDFLAGS = -O3 -fno-fast-math -Wl,-z,nodelete

# The promises of base/cpu.h: nothing here that is not checked there.
FLAGS_x86_64_avx2 = -mavx2 -mfma -mbmi -mbmi2 -mf16c
FLAGS_x86_64_avx512 = -mavx2 -mfma -mbmi -mbmi2 -mf16c -mavx512f -mavx512vl -mavx512bw \
  -mavx512dq -mavx512cd -mprefer-vector-width=512
