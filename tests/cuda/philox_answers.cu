/* SPDX-License-Identifier: Apache-2.0
 *
 * philox_answers.cu: cuda/philox.h against the published answers of Philox4x32-10, against
 * base/rng.h word by word, and against the bytes and factors that ops/keep.h says. Prints what is
 * wrong, and fails.
 */
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "base/rng.h"
#include "philox.h"

using rpc::Dropout;

struct Question {
  uint4 counter;
  uint2 key;
};

template <int rounds>
__global__ void answer(const Question *questions, uint4 *answers) {
  const Question q = questions[threadIdx.x];
  answers[threadIdx.x] = rpc::philox<rounds>(q.counter, q.key.x, q.key.y);
}

/* The factors of one row: by single columns, and by the words of quads. */
__global__ void factors(Dropout d, uint32_t ordinal, uint32_t row, float *single, float *quads) {
  const uint32_t column = threadIdx.x;
  single[column] = rpc::keep_factor(d, ordinal, row, column);
  const uint4 block = rpc::keep_block(d, ordinal, row, column / 16);
  const uint32_t word = rpc::keep_word(block, column / 4);
  quads[column] = rpc::is_kept(d, word, static_cast<int>(column % 4)) ? d.scale : 0.0f;
}

static void must(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(1);
}

template <class T>
static std::vector<T> fetched(const T *from, size_t count) {
  std::vector<T> all(count);
  must(cudaMemcpy(all.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
  return all;
}

template <class T>
static T *room(size_t count) {
  T *memory = nullptr;
  must(cudaMalloc(&memory, count * sizeof(T)));
  return memory;
}

static int wrong = 0, compared = 0;

static void compare(const char *what, size_t at, uint32_t got, uint32_t expected) {
  compared++;
  if (got == expected) return;
  std::printf("%s %zu is %08x, expected %08x\n", what, at, got, expected);
  wrong++;
}

template <int rounds>
static void ask(const std::vector<Question> &questions, const std::vector<uint4> *published) {
  const size_t count = questions.size();
  Question *const there = room<Question>(count);
  uint4 *const to = room<uint4>(count);
  must(cudaMemcpy(there, questions.data(), count * sizeof(Question), cudaMemcpyHostToDevice));
  must(rpc::launch(answer<rounds>, {dim3(1), dim3(static_cast<unsigned>(count))}, there, to));
  const std::vector<uint4> answers = fetched(to, count);
  for (size_t i = 0; i < count; i++) {
    const uint4 c = questions[i].counter;
    const rpi_philox_key key = {{questions[i].key.x, questions[i].key.y}};
    const rpi_philox_block expected = rpi_philox({{c.x, c.y, c.z, c.w}}, key, rounds);
    const uint4 got = answers[i];
    const uint32_t words[4] = {got.x, got.y, got.z, got.w};
    for (int w = 0; w < 4; w++) compare("word", i, words[w], expected.word[w]);
    if (published == nullptr) continue;
    const uint4 known = (*published)[i];
    const uint32_t answer_words[4] = {known.x, known.y, known.z, known.w};
    for (int w = 0; w < 4; w++) compare("published word", i, words[w], answer_words[w]);
  }
  must(cudaFree(there));
  must(cudaFree(to));
}

static void keep(double rate, uint32_t ordinal, uint32_t row) {
  constexpr unsigned columns = 100;
  const uint32_t key[2] = {0x12345678u, 0x9abcdef0u};
  const Dropout d = rpc::dropout_of(rate, key, 77);
  float *const single = room<float>(columns), *const quads = room<float>(columns);
  must(rpc::launch(factors, {dim3(1), dim3(columns)}, d, ordinal, row, single, quads));
  const std::vector<float> one = fetched(single, columns), other = fetched(quads, columns);
  const int rounded = static_cast<int>(256 * rate + 0.5);
  const int threshold = rounded < 255 ? rounded : 255;
  for (uint32_t c = 0; c < columns; c++) {
    const rpi_philox_block block =
        rpi_philox({{c / 16, row, ordinal, 77}}, {{key[0], key[1]}}, RPI_PHILOX_ROUNDS);
    const int byte = static_cast<int>(block.word[c % 16 / 4] >> (8 * (c % 4)) & 255u);
    const float factor = byte >= threshold ? 256.0f / static_cast<float>(256 - threshold) : 0.0f;
    compare("single column", c, one[c] == factor, 1);
    compare("column of a quad", c, other[c] == factor, 1);
  }
  must(cudaFree(single));
  must(cudaFree(quads));
}

int main() {
  /* Random123's kat_vectors for philox4x32 10. */
  const std::vector<Question> known = {
      {{0, 0, 0, 0}, {0, 0}},
      {{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}, {0xffffffffu, 0xffffffffu}},
      {{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}, {0xa4093822u, 0x299f31d0u}}};
  const std::vector<uint4> published = {{0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u},
                                        {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu},
                                        {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u}};
  ask<10>(known, &published);
  std::vector<Question> drawn;
  uint32_t state = 1;
  const auto draw = [&] { return state = state * 1664525u + 1013904223u; };
  for (int i = 0; i < 100; i++) {
    drawn.push_back({{draw(), draw(), draw(), draw()}, {draw(), draw()}});
  }
  ask<RPI_PHILOX_ROUNDS>(drawn, nullptr);
  const double rates[] = {0, 0.001, 0.1, 0.3, 0.5, 0.9, 0.9999};
  for (double rate : rates) keep(rate, draw(), draw());
  std::printf("%d compared, %d wrong\n", compared, wrong);
  return wrong != 0;
}
