/* SPDX-License-Identifier: Apache-2.0
 *
 * context.h: one GPU as the table sees it: stream, cuBLAS handle, staging memory; and how a
 * failure becomes a status.
 *
 * A context belongs to one device. Each entry of the table works on context(), that of the table it
 * belongs to. Everything is done on its stream, in order.
 *
 *   staging     what lies on the host (ids, offsets, labels) is copied through page-locked memory
 *               to the device without waiting; it stays until the entry's own work is done
 *   scratch     device memory for the length of one entry, kept and reused
 */
#ifndef RPC_CONTEXT_H
#define RPC_CONTEXT_H

#include "gpu.h"
#include "ops/ops.h"

namespace rpc {

/* Keeps a sentence for rp_last_error() and returns the status. */
rp_status fail(rp_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* RP_OK, or RP_ERROR_DEVICE with CUDA's text and the place. */
rp_status check(cudaError_t error, const char *what, const char *file, int line);
#define CUDA_TRY(call)                                                                             \
  do {                                                                                             \
    const rp_status rpc_status = rpc::check((call), #call, __FILE__, __LINE__);                    \
    if (rpc_status != RP_OK) return rpc_status;                                                    \
  } while (0)

/* Blocks of which each takes `each` of n. */
inline unsigned blocks_for(int64_t n, int64_t each) {
  return static_cast<unsigned>(rpi_divide_up(n, each));
}

struct Context {
  int device;
  cudaStream_t stream;
  void *cublas; /* cublasHandle_t, made at the first product */
  int multiprocessors;
  int64_t shared_bytes; /* the most of a block */
  int64_t cache_bytes;  /* of the second level */
};

Context &context();

/* Work on the caller's stream until the end of the scope; NULL: stay on the own one. status() says
 * whether work may go there: not while the stream is captured in a CUDA graph, because what the
 * host stages for a call would not be there again when the graph is replayed. */
class OnStream {
 public:
  explicit OnStream(void *stream);
  ~OnStream();
  rp_status status() const { return status_; }
  OnStream(const OnStream &) = delete;
  OnStream &operator=(const OnStream &) = delete;

 private:
  cudaStream_t before_;
  rp_status status_ = RP_OK;
};

/* *to = `bytes` of device memory with what `from` holds on the host now; NULL of NULL. The same
 * bytes under the same key are copied once, until the staging memory has gone round. */
rp_status stage_bytes(const void *key, const void *from, int64_t bytes, const void **to);

/* key: where they lie, unless the caller has put them together from what lies elsewhere. */
template <class T>
rp_status stage(const T *from, int64_t count, const T **to, const void *key = nullptr) {
  const void *bytes = nullptr;
  if (key == nullptr) key = from;
  RPI_TRY(stage_bytes(key, from, count * static_cast<int64_t>(sizeof(T)), &bytes));
  *to = static_cast<const T *>(bytes);
  return RP_OK;
}

/* Fails for a GPU that our code is not for. */
rp_status check_capability(int device);

/* Has everything before the event been done? wait_for waits only where it has not. */
bool has_passed(cudaEvent_t event);
rp_status wait_for(cudaEvent_t event);

/* Device memory that is free again when the entry returns: the next call of scratch in the same
 * entry is handed what lies behind. `begin` is called once, at the start of an entry that uses it.
 */
void scratch_begin();
rp_status scratch_bytes(int64_t bytes, void **memory);

template <class T>
rp_status scratch(int64_t count, T **memory) {
  void *bytes = nullptr;
  RPI_TRY(scratch_bytes(count * static_cast<int64_t>(sizeof(T)), &bytes));
  *memory = static_cast<T *>(bytes);
  return RP_OK;
}

/* ---- every entry of the table, one file for each operation ------------------ */

rp_status allocate(int64_t bytes, void **memory);
void release(void *memory);
rp_status write(void *to, const void *from, int64_t bytes);
rp_status read(void *to, const void *from, int64_t bytes);
rp_status copy(void *to, const void *from, int64_t bytes);
rp_status post(void **letter, const void *from, int64_t bytes);
rp_status collect(void *letter, void *to, int64_t bytes);
bool arrived(void *letter);
void discard(void *letter);
rp_status round_weights(const rpi_rounding *list, int64_t count);
rp_status gemm(const rpi_gemm_args *args);
rp_status linear_backward(const rpi_linear_backward_args *args);
rp_status attention_workspace(const rp_attention *shape, int workers, int64_t *forward_bytes,
                              int64_t *backward_bytes);
rp_status attention_forward(const rpi_attention_args *args);
rp_status attention_backward(const rpi_attention_backward_args *args);
rp_status attention_map(const rpi_attention_map_args *args, int64_t *bytes);
rp_status rotate(const rp_rotation *rotation, rp_rows x, rp_rows_out out);
rp_status attend_rows(const rpi_attend_rows_args *args);
rp_status choose(const rpi_choose_args *args);
rp_status mix(const rpi_mix_args *args);
rp_status scatter(const rpi_scatter_args *args);
rp_status embed(const rpi_embed_args *args);
rp_status embed_backward(const rpi_embed_backward_args *args);
rp_status norm(const rpi_norm_args *args);
rp_status norm_backward(const rpi_norm_backward_args *args, int64_t *bytes);
rp_status activation(const rpi_activation_args *args);
rp_status activation_backward(const rpi_activation_backward_args *args);
rp_status cross_entropy(const rpi_cross_entropy_args *args);
rp_status losses(const rpi_losses_args *args);
rp_status column_sums(const rpi_column_sums_args *args);
rp_status square_sum(const real *x, int64_t count, double *workspace, double *sum);
rp_status decide(const rpi_decide_args *args);
rp_status blame(const rpi_blame_args *args);
rp_status adam(const rpi_adam_args *args);
rp_status zero(real *x, int64_t count);

}  // namespace rpc

#endif
