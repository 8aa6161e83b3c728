# SPDX-License-Identifier: Apache-2.0
#
# cuda.mk: the one list of what librelpos_cuda.so is made of. The Makefile includes it and nvcc.py
# reads it: NAME = value lines alone, as in csrc/core.mk.

# Paths from cuda/.
CUDA_SOURCES = \
  current.cu \
  context.cu \
  memory.cu \
  linear.cu \
  pairs.cu \
  attention_forward.cu \
  attention_backward.cu \
  attention_backward_band.cu \
  attention_backward_single.cu \
  attention_maps.cu \
  table_gradients.cu \
  shared_keys.cu \
  rotate.cu \
  attend_rows.cu \
  choose.cu \
  embed.cu \
  residual.cu \
  norm.cu \
  activation.cu \
  cross_entropy.cu \
  sums.cu \
  adam.cu \
  table.cu

# Compute capabilities; those that the nvcc found does not know are left out. PTX of the first and
# the last serves others.
CUDA_ARCHITECTURES = 80 90 100 120

CUDA_INCLUDES = cuda csrc csrc/include

# -O3 is the host compiler's too. Division and square root are exact and subnormals stay: no
# --use_fast_math.
CUDA_FLAGS = -std=c++17 -O3

CUDA_WARNINGS = -Wall -Wextra -Wshadow

# The same sources for a CPU, by tests/emulator.
EMULATOR_SOURCES = fibers.cpp twins.cpp memory.cpp cublas.cpp counters.cpp
EMULATOR_FLAGS = -std=c++17 -O2 -g -fPIC -fvisibility=hidden -fno-threadsafe-statics \
  -Wno-unknown-pragmas -Wall -Wextra -Wshadow
