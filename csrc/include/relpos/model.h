/* SPDX-License-Identifier: Apache-2.0
 *
 * model.h: the Transformer and its training step, to be read from top to bottom.
 *
 *   1. configuration: what the model is, presets by name
 *   2. a model: memory, life, parameters
 *   3. batches, and one training step
 *   4. the parts of a step, scores, attention maps
 *   5. files
 *   6. profile
 *
 * The shortest program that trains (examples/c/03_train_copy.c is the whole of it):
 *
 *   rp_config config;
 *   rp_config_preset("tiny", &config);
 *   rp_model *model = NULL;
 *   rp_model_create(&config, &limits, &model);
 *   for (...) rp_model_step(model, &batch, 1, &result);
 *   rp_model_save(model, "model.safetensors", RP_SAVE_WEIGHTS);
 *   rp_model_free(model);
 *
 * Thread safety: different models may be used from different threads. A second call
 * into a model that is at work fails with RP_ERROR_ORDER; it harms nothing.
 */
#ifndef RELPOS_MODEL_H
#define RELPOS_MODEL_H

#include "relpos/relpos.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ------------------------------------------------------------------------
 * 1. Configuration
 * ------------------------------------------------------------------------ */

/* How self-attention sees positions; rp_config_set knows them by these names. */
enum {
  RP_POSITION_NONE = 0,               /* none */
  RP_POSITION_SHAW = 1,               /* shaw */
  RP_POSITION_TRANSFORMER_XL = 2,     /* transformer-xl */
  RP_POSITION_MUSIC = 3,              /* music */
  RP_POSITION_T5 = 4,                 /* t5 */
  RP_POSITION_DEBERTA = 5,            /* deberta */
  RP_POSITION_RELATIVE_KEY = 6,       /* relative-key */
  RP_POSITION_RELATIVE_KEY_QUERY = 7, /* relative-key-query */
  RP_POSITION_ALIBI = 8,              /* alibi */
  RP_POSITION_ALIBI_LEARNED = 9,      /* alibi-learned */
  RP_POSITION_ROPE = 10               /* rope */
};

/* What is added to the embeddings. */
enum {
  RP_ABSOLUTE_NONE = 0,       /* none */
  RP_ABSOLUTE_SINUSOIDAL = 1, /* sinusoidal */
  RP_ABSOLUTE_LEARNED = 2     /* learned */
};

enum { RP_NORM_PRE = 0 /* pre */, RP_NORM_POST = 1 /* post */ };
enum { RP_RELU = 0 /* relu */, RP_GELU = 1 /* gelu */, RP_SWIGLU = 2 /* swiglu */ };
enum {
  RP_SMOOTH_ALL = 0,   /* all: eps / V on every class, as torch */
  RP_SMOOTH_OTHERS = 1 /* others: eps / (V - 1) on every wrong class, as Tensor2Tensor */
};
enum {
  RP_SCHEDULE_CONSTANT = 0,     /* constant */
  RP_SCHEDULE_NOAM = 1,         /* noam: factor * C^-0.5 * min(t^-0.5, t * warmup^-1.5) */
  RP_SCHEDULE_INVERSE_SQRT = 2, /* inverse-sqrt: factor * min(t / warmup, sqrt(warmup / t)) */
  RP_SCHEDULE_COSINE = 3,       /* cosine, from factor down to factor * final_rate at steps */
  RP_SCHEDULE_LINEAR = 4        /* linear, likewise */
};

enum { RP_ROPE_LINEAR = 0 /* linear */, RP_ROPE_NTK = 1 /* ntk */ };

/* How tables of values are shared, where keys have tables too. */
enum {
  RP_VALUES_AS_KEYS = 0, /* as-keys */
  RP_VALUES_SHARED = 1,  /* false */
  RP_VALUES_OWN = 2      /* true */
};

/* One stack of layers: the encoder or the decoder. */
typedef struct rp_stack {
  int64_t layers; /* 0: the stack is left out */

  /* Added to the embeddings. */
  int absolute;             /* RP_ABSOLUTE_... */
  int sinusoid_interleaved; /* 0: sines in one half, cosines in the other */
  int sinusoid_rule;        /* RP_FREQUENCIES_OPEN: open; RP_FREQUENCIES_CLOSED: closed */
  int64_t sinusoid_first;   /* the position of the first token */

  /* Self-attention. */
  int position;    /* RP_POSITION_... */
  int64_t k;       /* shaw: clip distance */
  int64_t k_right; /* shaw: to the right; -1: as k */
  int beyond;      /* shaw: RP_BEYOND_CLIP: clip; RP_BEYOND_NONE: none */
  int key, value;  /* shaw, music: keys, values have relations; deberta: c2p, p2c */
  int tied;        /* shaw, music, and relations below: one table for keys and values */
  int per_layer;   /* every layer has tables of its own; 0: one set for all layers of the stack, as
                      deberta always has */
  int per_head;    /* every head has a table of its own; 0: shared. Without effect on t5, alibi,
                      transformer-xl, deberta */
  int value_per_layer; /* shaw, music, and relations below: the same of the tables of values, */
  int value_per_head;  /* RP_VALUES_...; as-keys: as per_layer and per_head */

  int64_t relations;                /* kinds of labels in the batch's graphs; 0: no graphs */
  int relation_key, relation_value; /* which terms the labels have */

  int64_t buckets;      /* t5; deberta (0: none, one row for each distance) */
  int64_t max_distance; /* t5, deberta: where the last bucket begins */
  int64_t clamp;        /* transformer-xl: distances farther than this count as this; 0: none */

  double rope_base;
  int rope_interleaved;
  int64_t rope_width;  /* columns of a head that turn; 0: all */
  int rope_rule;       /* RP_ROPE_LINEAR or RP_ROPE_NTK */
  double rope_scaling; /* 1: none */

  int64_t window; /* keys farther than this from the query are hidden; -1: none are */
  double softcap; /* of the scores; 0: none */
} rp_stack;

/* The whole of a model and of its training. Obtain it from rp_config_default() or a preset, then
 * set what differs, by assignment or with rp_config_set(). docs/presets.md has every number. */
typedef struct rp_config {
  size_t struct_size;

  int64_t width;        /* C */
  int64_t heads;        /* H */
  int64_t head_width;   /* D; 0: C / H */
  int64_t key_heads;    /* of keys and values, each shared by H / key_heads of queries; 0: H */
  int64_t feed_forward; /* F */
  /* 0 will do for a stack that is left out */
  int64_t source_vocabulary, target_vocabulary;
  int share_embeddings; /* one table for source and target */
  int share_output;     /* the output projection is the embedding of the target */
  int scale_embeddings; /* times sqrt(C) */
  int64_t max_length;   /* tokens of the longest sentence, on either side */
  int norm;             /* RP_NORM_PRE or RP_NORM_POST */
  double norm_epsilon;
  int bias;       /* linear layers have biases (the output projection has none), norms shifts */
  int activation; /* RP_RELU, ... */
  rp_stack encoder, decoder;

  /* Rates, taken to the nearest 1/256; at most 255/256. */
  double dropout; /* of embeddings and of what a layer adds to the stream */
  double attention_dropout, activation_dropout;

  double label_smoothing;
  int smoothing;        /* RP_SMOOTH_... */
  int schedule;         /* RP_SCHEDULE_... */
  double learning_rate; /* the schedule's factor */
  int64_t warmup;       /* steps; 0: none */
  int64_t steps;        /* of the whole training: cosine, linear */
  double final_rate;    /* cosine, linear: the share of the rate left at the end */
  double beta1, beta2, adam_epsilon;
  double weight_decay; /* decoupled, of matrices and tables of vectors; not of norms and biases */
  double clip_norm;    /* of the whole gradient; 0: none */
  double ema;          /* decay of an average of the weights; 0: none is kept */
  uint64_t seed;       /* of the initial weights and of dropout */
} rp_config;

/* The defaults: the preset "tiny". */
RP_API rp_config rp_config_default(void);

/* Fills config from a preset. An unknown name fails with RP_ERROR_ARGUMENT and suggests the
 * nearest. rp_preset_name(i) counts them, NULL after the last. */
RP_API rp_status rp_config_preset(const char *name, rp_config *config);
RP_API const char *rp_preset_name(int index);

/* Sets a field by name and text, as ("encoder.k", "16"), ("activation", "gelu"), ("bias", "true").
 * An unknown name suggests the nearest; a wrong value says what is allowed. */
RP_API rp_status rp_config_set(rp_config *config, const char *name, const char *value);

/* The text of a field, as rp_config_set takes it, cut to size - 1 characters; every double reads
 * back as itself. rp_config_field(i) counts the names, NULL after the last. */
RP_API rp_status rp_config_get(const rp_config *config, const char *name, char *text, size_t size);
RP_API const char *rp_config_field(int index);

/* Can this be a model? If not, RP_ERROR_ARGUMENT or RP_ERROR_SHAPE; the message names the field. */
RP_API rp_status rp_config_check(const rp_config *config);

/* ------------------------------------------------------------------------
 * 2. A model
 * ------------------------------------------------------------------------ */

/* How large a batch may be. All memory is planned from this and the number of threads, and no step
 * takes more, with two exceptions that may need more scratch for attention: a rare mixture of
 * lengths, and more than 65,536 tokens or 8,192 sentences. Start from rp_limits_default(). */
typedef struct rp_limits {
  size_t struct_size;
  int64_t tokens;     /* the most of a batch, on each side */
  int64_t sentences;  /* the most of a batch */
  int training;       /* 0: no gradients and no moments; forward, scores, maps, decoding */
  int recompute;      /* activations are computed again in backward, layer by layer, not stored */
  const char *device; /* where the model lies and is computed (device.h); NULL: "cpu" */
  int precision;      /* of products: RP_F32, or RP_BF16 (device.h): rounded operands, f32 sums */
} rp_limits;

static inline rp_limits rp_limits_default(void) {
  rp_limits limits;
  memset(&limits, 0, sizeof limits);
  limits.struct_size = sizeof limits;
  limits.tokens = 4096;
  limits.sentences = 512;
  limits.training = 1;
  return limits;
}

/* Bytes that a model will take, told before anything is allocated. */
typedef struct rp_memory {
  size_t struct_size; /* to be set by the caller */
  int64_t parameters, gradients, moments, average, constants, activations, workspace;
  int64_t total;
} rp_memory;

RP_API rp_status rp_model_memory(const rp_config *config, const rp_limits *limits,
                                 rp_memory *memory);

typedef struct rp_model rp_model;

/* A new model with initial weights from config.seed. *model is NULL where it fails. */
RP_API rp_status rp_model_create(const rp_config *config, const rp_limits *limits,
                                 rp_model **model);
RP_API void rp_model_free(rp_model *model); /* takes NULL */

RP_API const rp_config *rp_model_config(const rp_model *model);
RP_API const rp_limits *rp_model_limits(const rp_model *model);

/* One parameter. The arrays live in the model; weights may be written between calls. */
typedef struct rp_parameter {
  size_t struct_size; /* to be set by the caller */
  const char *name;   /* as in files: "encoder.0.attention.out.weight" */
  int dimensions;     /* 1 to 3 */
  int64_t shape[3];
  int64_t count;
  rp_real *data;              /* this and what follows: NULL where the model lies on a GPU */
  rp_real *gradient;          /* of the sum of the tokens' losses; NULL without training */
  rp_real *moment1, *moment2; /* NULL without training */
  rp_real *average;           /* NULL where ema is 0 */
} rp_parameter;

RP_API int64_t rp_model_parameter_count(const rp_model *model); /* of arrays, not of numbers */
RP_API rp_status rp_model_parameter(rp_model *model, int64_t index, rp_parameter *parameter);

/* Copies of one parameter's arrays, [count], from and to any device. */
enum {
  RP_ARRAY_WEIGHTS = 0,
  RP_ARRAY_GRADIENT = 1,
  RP_ARRAY_MOMENT1 = 2,
  RP_ARRAY_MOMENT2 = 3,
  RP_ARRAY_AVERAGE = 4
};
RP_API rp_status rp_model_read(rp_model *model, int64_t index, int array, rp_real *to);
RP_API rp_status rp_model_write(rp_model *model, int64_t index, int array, const rp_real *from);

/* The address of such an array itself, [count], valid until the model is freed; of a model on a GPU
 * it is GPU memory, and calls of the model are in order with work on the default stream. Weights
 * and gradients may be written between calls. */
RP_API rp_status rp_model_place(rp_model *model, int64_t index, int array, rp_real **place);

/* ------------------------------------------------------------------------
 * 3. Batches, and one training step
 * ------------------------------------------------------------------------ */

/* Labelled graphs, a matrix n x n for every sentence, -1: no relation. */
typedef struct rp_graphs {
  const void *labels;    /* NULL: none */
  int label_bytes;       /* 1, 2 or 4; labels are aligned to it */
  const int64_t *starts; /* [sentences], counted in labels */
} rp_graphs;

/* Sentences end to end. Source tokens go to the encoder, target tokens to the decoder; a model
 * without one of them takes NULL there. Labels, one for each token of the decoder, or of the
 * encoder in a model without decoder, are what is to be predicted at its place. Start from
 * rp_batch_default(). */
typedef struct rp_batch {
  size_t struct_size;
  int64_t sentences;
  const int32_t *source, *target;                 /* from 0 to below the vocabulary */
  const int64_t *source_offsets, *target_offsets; /* [sentences + 1], from 0, never falling */
  const int32_t *labels;                          /* -1: not counted */
  rp_graphs source_graphs, target_graphs;
  const uint32_t *ordinals; /* [sentences]: numbers in all that is accumulated; NULL: in order */
} rp_batch;

static inline rp_batch rp_batch_default(void) {
  rp_batch batch;
  memset(&batch, 0, sizeof batch);
  batch.struct_size = sizeof batch;
  return batch;
}

typedef struct rp_result {
  size_t struct_size;    /* to be set by the caller */
  int64_t tokens;        /* labels that counted */
  double loss;           /* mean over them, as trained */
  double nll;            /* mean of -log p(label), without smoothing */
  double accuracy;       /* share whose label had the highest score */
  double gradient_norm;  /* of the mean loss, before clipping; updates alone */
  double learning_rate;  /* of this update */
  int64_t step, attempt; /* after the call: updates made, updates tried */
  int finite;            /* 0: loss or gradient is not, and nothing was updated. 1 without labels */
  char first_bad[64];    /* if finite is 0: where the first number that is not finite arose */
} rp_result;

/* One update from `count` batches: forward and backward of each, then clip and Adam. The loss is
 * the mean over the labels of all of them, so that the cut into batches does not matter. Batches
 * are checked before anything is computed; a failure other than RP_ERROR_DEVICE leaves weights,
 * moments and counters as they were. Fails with RP_ERROR_ORDER while gradients are accumulated.
 *
 * result NULL: on a GPU the call returns when the step has been begun, and does not wait for it;
 * rp_model_result tells of it later. Batches may be changed as soon as the call returns. */
RP_API rp_status rp_model_step(rp_model *model, const rp_batch *batches, int64_t count,
                               rp_result *result);

/* The result of the oldest step or update that was called with result NULL and has not been asked
 * for. Waits for that step, not for later ones: begin step t + 1 before you ask for step t, and a
 * GPU never waits. The last eight are kept; older ones that nobody asked for are lost.
 * RP_ERROR_ORDER where there is none. */
RP_API rp_status rp_model_result(rp_model *model, rp_result *result);

/* How many results rp_model_result has to give, and how many of them, from the oldest on, without
 * waiting: on the CPU all. Either may be NULL. */
RP_API rp_status rp_model_results(rp_model *model, int64_t *begun, int64_t *done);

/* ------------------------------------------------------------------------
 * 4. The parts of a step, scores, attention maps
 * ------------------------------------------------------------------------ */

/* Forward alone: loss and accuracy of a batch. dropout != 0: as in training. */
RP_API rp_status rp_model_forward(rp_model *model, const rp_batch *batch, int dropout,
                                  rp_result *result);

/* Forward without dropout, with the average of the weights in their place; RP_ERROR_ORDER where the
 * model keeps none. */
RP_API rp_status rp_model_forward_average(rp_model *model, const rp_batch *batch,
                                          rp_result *result);

/* Forward with dropout and backward: adds to the gradients. The first after an update (or after
 * rp_model_zero_gradients) begins a new accumulation. result: of this batch alone. A batch that is
 * refused leaves the accumulation as it is; a failure later than that drops it. */
RP_API rp_status rp_model_backward(rp_model *model, const rp_batch *batch, rp_result *result);

/* Clips, updates and zeroes the gradients of all that was accumulated. Fails with RP_ERROR_ORDER
 * where nothing was. result: of the whole accumulation; NULL as in rp_model_step. */
RP_API rp_status rp_model_update(rp_model *model, rp_result *result);
RP_API rp_status rp_model_zero_gradients(rp_model *model);

/* Updates made, and tried: they decide the learning rate and dropout's masks. Asking for step waits
 * for all updates that were begun. 0 <= step <= attempt <= 2^40; at that limit an update fails with
 * RP_ERROR_ORDER, and so does setting the counters while gradients wait for rp_model_update. */
RP_API rp_status rp_model_counters(rp_model *model, int64_t *step, int64_t *attempt);
RP_API rp_status rp_model_set_counters(rp_model *model, int64_t step, int64_t attempt);

/* The schedule's learning rate at step t >= 1. NaN where t is less, or rp_config_check would fail,
 * with the reason in rp_last_error(). */
RP_API double rp_learning_rate(const rp_config *config, int64_t t);

/* log p(label) of every place, without dropout: scores[places], 0 where the label is -1. hits:
 * NULL, or [places], 1 where the label has the highest score, else 0. A sentence all of whose
 * places are hits is what greedy decoding says. */
RP_API rp_status rp_model_score(rp_model *model, const rp_batch *batch, rp_real *scores,
                                int8_t *hits);

/* What the last norm gives, the input of the output projection: [places][C]. */
RP_API rp_status rp_model_hidden(rp_model *model, const rp_batch *batch, rp_real *hidden);

/* Which attention a map is of. */
enum { RP_ATTENTION_ENCODER = 0, RP_ATTENTION_DECODER = 1, RP_ATTENTION_CROSS = 2 };

/* One map that is wanted, of one head in one sentence. Start from rp_model_map_default(). */
typedef struct rp_model_map {
  size_t struct_size;
  int kind; /* RP_ATTENTION_... */
  int64_t layer, head, sentence;
  int show;          /* RP_SHOW_..., as rp_attention_map shows it */
  int64_t row, rows; /* the queries that are wanted; rows -1: all from `row` on */
  rp_real *to;       /* [rows][keys of the sentence], dense, on the host */
} rp_model_map;

static inline rp_model_map rp_model_map_default(void) {
  rp_model_map map;
  memset(&map, 0, sizeof map);
  map.struct_size = sizeof map;
  map.rows = -1;
  return map;
}

/* Any number of maps from one pass, which ends behind the last layer that is asked for; nothing of
 * the size of a map is made but the maps themselves. dropout != 0: with the dropout that the next
 * rp_model_backward of this batch would draw; probabilities are those before attention's own
 * dropout in any case. Weights, gradients, counters and what is accumulated stay as they are. Where
 * it fails, the maps are unspecified. */
RP_API rp_status rp_model_attention_maps(rp_model *model, const rp_batch *batch, int dropout,
                                         const rp_model_map *maps, int64_t count);

/* One map, of all queries, without dropout. */
RP_API rp_status rp_model_attention_map(rp_model *model, const rp_batch *batch, int kind,
                                        int64_t layer, int64_t head, int64_t sentence, int show,
                                        rp_real *to);

/* What the logits of a kind of attention consist of: the name of part `index`, and in *show (or
 * NULL) its RP_SHOW_...; "content" is the first, NULL follows the last. Relation terms are named
 * after the parameter that is their table ("key_table", "bias_table", "slopes"). Every layer of a
 * stack has the same. */
RP_API const char *rp_model_attention_part(const rp_model *model, int kind, int index, int *show);

/* Sums over a map of probabilities. p: [rows][keys], those of the queries from `row` on, of
 * `queries` in all; the offset of query i and key j is j - i. The results, NULL where not wanted:
 *   mass      [queries - 1 + keys], to which place queries - 1 + j - i gets p / queries added;
 *   entropy   [rows], set to -sum_j p ln p, in nats;
 *   distance  one number, which gets the sum of p |j - i| / queries added.
 * So a long map can be given some rows at a time, from zeros on, with the bits of one call. */
RP_API rp_status rp_map_sums(const rp_real *p, int64_t queries, int64_t keys, int64_t row,
                             int64_t rows, double *mass, double *entropy, double *distance);

/* ------------------------------------------------------------------------
 * 5. Files
 * ------------------------------------------------------------------------ */

enum {
  RP_SAVE_WEIGHTS = 0,  /* the parameters, with the configuration */
  RP_SAVE_AVERAGE = 1,  /* their average, under the same names */
  RP_SAVE_OPTIMIZER = 2 /* moments, average, and the counters */
};

/* Writes a safetensors file, whole or not at all: a new one, with the mode that the umask leaves,
 * replaces what path names, even a link (not what that points to). A folder, a device or a FIFO is
 * not replaced: RP_ERROR_FILE. */
RP_API rp_status rp_model_save(rp_model *model, const char *path, int what);

/* Reads weights or optimizer state into a model of the same shapes; a failure leaves the model as
 * it was. A tensor that is missing, unknown or of another shape is named. Reading weights sets the
 * average to them as well, so read the optimizer state, which has its own average, after them.
 * RP_ERROR_ORDER while gradients wait for rp_model_update. */
RP_API rp_status rp_model_load(rp_model *model, const char *path, int what);

/* A model from a file of weights, which has its configuration; limits.training must be 0. *model is
 * NULL where it fails. Weights that lie in the file as they do in memory are mapped, others are
 * read. Those that rp_model_save has written are mapped, unless a parameter other than the last has
 * a size that is no multiple of 64 bytes. Mapped weights share memory with whatever else reads the
 * file, and the model takes none for them (rp_memory.parameters is 0) but for pages that are
 * written to; such writes do not reach the file. While the model lives the file may be removed, or
 * replaced as rp_model_save does it, but not be written into or cut short. Constants grow with the
 * max_length in the file: for one from elsewhere call rp_config_load and rp_model_memory first. */
RP_API rp_status rp_model_open(const char *path, const rp_limits *limits, rp_model **model);

/* The configuration that a file of weights carries. RP_ERROR_FILE also where the file's tensors are
 * not those of that configuration: its sizes are checked, not believed. */
RP_API rp_status rp_config_load(const char *path, rp_config *config);

/* ------------------------------------------------------------------------
 * 6. Profile
 * ------------------------------------------------------------------------ */

/* What one operation of one layer took, forward and backward apart. */
typedef struct rp_profile_line {
  size_t struct_size; /* to be set by the caller */
  const char *name;   /* "encoder.0.attention.qkv", ... */
  int backward;
  int64_t calls;
  /* Summed. Operations are floating-point, as counted by shapes: attention's are of all pairs
   * without relations and windows. The sum of the losses and the norm of the gradient have no
   * lines. */
  double seconds, operations, bytes;
} rp_profile_line;

/* Off at first. Switching it on begins anew; lines, and the names in them, stay until then. */
RP_API rp_status rp_model_profile(rp_model *model, int on);
RP_API rp_status rp_model_profile_count(rp_model *model, int64_t *count);
RP_API rp_status rp_model_profile_line(rp_model *model, int64_t index, rp_profile_line *line);

#ifdef __cplusplus
}
#endif

#endif /* RELPOS_MODEL_H */
