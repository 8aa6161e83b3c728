/* SPDX-License-Identifier: Apache-2.0
 *
 * params.h: every parameter of the model, declared once.
 *
 * A group lists X(field, name, start, decays, present, leading, rows, columns): the field of its
 * struct, the name in files below the group's own, how it begins, whether weight decay is for it,
 * whether this configuration has it, and its shape. A leading or rows of 0 is a dimension that
 * is not there. The expressions are evaluated where layout.c declares the group, with
 *
 *   config, stack   what the model is; stack: the one the group belongs to
 *   C, HD, KD, F    width, heads (of queries; of keys) times head width, feed-forward width
 *   own, own_value  tables: is this the place for them (the layer, or the stack that shares them)?
 *                   and for those of values?
 *
 * Linear weights are [out, in]. Parameters lie in one flat buffer in the order of this file;
 * gradients, moments and average have the same layout. A field holds the parameter's place in it,
 * in numbers, or RPI_ABSENT.
 */
#ifndef RPI_PARAMS_H
#define RPI_PARAMS_H

#include "base/memory.h"
#include "model/config.h"

#define RPI_ABSENT (-1)
#define RPI_PARAMETER_NAME 64

/* How a parameter begins: GLOROT is uniform within sqrt(6 / (rows + columns)), and so is LINEAR,
 * the weight of a linear layer, whose bias follows it; EMBEDDING normal with deviation C^-0.5,
 * SLOPES those of ALiBi. */
enum rpi_start { RPI_ZEROS, RPI_ONES, RPI_GLOROT, RPI_LINEAR, RPI_EMBEDDING, RPI_SLOPES };

#define RPI_NORM_PARAMETERS(X)                                                                     \
  X(gain, "gain", RPI_ONES, false, true, 0, 0, C)                                                  \
  X(shift, "shift", RPI_ZEROS, false, config->bias, 0, 0, C)

#define RPI_SELF_PARAMETERS(X)                                                                     \
  X(qkv, "qkv.weight", RPI_LINEAR, true, true, 0, HD + 2 * KD, C)                                  \
  X(qkv_bias, "qkv.bias", RPI_ZEROS, false, config->bias, 0, 0, HD + 2 * KD)                       \
  X(out, "out.weight", RPI_LINEAR, true, true, 0, C, HD)                                           \
  X(out_bias, "out.bias", RPI_ZEROS, false, config->bias, 0, 0, C)

#define RPI_CROSS_PARAMETERS(X)                                                                    \
  X(q, "q.weight", RPI_LINEAR, true, true, 0, HD, C)                                               \
  X(q_bias, "q.bias", RPI_ZEROS, false, config->bias, 0, 0, HD)                                    \
  X(kv, "kv.weight", RPI_LINEAR, true, true, 0, 2 * KD, C)                                         \
  X(kv_bias, "kv.bias", RPI_ZEROS, false, config->bias, 0, 0, 2 * KD)                              \
  X(out, "out.weight", RPI_LINEAR, true, true, 0, C, HD)                                           \
  X(out_bias, "out.bias", RPI_ZEROS, false, config->bias, 0, 0, C)

#define RPI_FEED_FORWARD_PARAMETERS(X)                                                             \
  X(in, "in.weight", RPI_LINEAR, true, true, 0, rpi_hidden(config), C)                             \
  X(in_bias, "in.bias", RPI_ZEROS, false, config->bias, 0, 0, rpi_hidden(config))                  \
  X(out, "out.weight", RPI_LINEAR, true, true, 0, C, F)                                            \
  X(out_bias, "out.bias", RPI_ZEROS, false, config->bias, 0, 0, C)

/* Tables of a layer's positions, or of all layers of a stack. Rows, heads (of values apart) and the
 * questions are answered by positions.h. */
#define RPI_TABLE_PARAMETERS(X)                                                                    \
  X(key, "key_table", RPI_GLOROT, true, own && has->key, heads, rows, D)                           \
  X(value, "value_table", RPI_GLOROT, true, own_value && has->value, value_heads, rows, D)         \
  X(distance, "distance_table", RPI_GLOROT, true, own && has->distance, heads, rows, D)            \
  X(bias, "bias_table", RPI_ZEROS, false, own && has->bias, 0, config->heads, rows)                \
  X(slopes, "slopes", RPI_SLOPES, false, own && has->slopes, 0, 0, config->heads)                  \
  X(position, "position.weight", RPI_GLOROT, true, own && has->waves, 0, HD, C)                    \
  X(content_bias, "content_bias", RPI_ZEROS, false, own && has->waves, 0, config->heads, D)        \
  X(position_bias, "position_bias", RPI_ZEROS, false, own && has->waves, 0, config->heads, D)      \
  X(relation_key, "relation_key_table", RPI_GLOROT, true, own && has->relation_key, heads,         \
    stack->relations, D)                                                                           \
  X(relation_value, "relation_value_table", RPI_GLOROT, true, own_value && has->relation_value,    \
    value_heads, stack->relations, D)

#define RPI_FIELD(field, ...) int64_t field;
typedef struct rpi_norm_params {
  RPI_NORM_PARAMETERS(RPI_FIELD)
} rpi_norm_params;
typedef struct rpi_self_params {
  RPI_SELF_PARAMETERS(RPI_FIELD)
} rpi_self_params;
typedef struct rpi_cross_params {
  RPI_CROSS_PARAMETERS(RPI_FIELD)
} rpi_cross_params;
typedef struct rpi_feed_forward_params {
  RPI_FEED_FORWARD_PARAMETERS(RPI_FIELD)
} rpi_feed_forward_params;
typedef struct rpi_table_params {
  RPI_TABLE_PARAMETERS(RPI_FIELD)
} rpi_table_params;
#undef RPI_FIELD

/* Layers consist of sublayers, each with a norm. */
enum rpi_part { RPI_SELF, RPI_CROSS, RPI_FEED_FORWARD, RPI_PARTS };

typedef struct rpi_layer_params {
  rpi_norm_params norm[RPI_PARTS];
  rpi_self_params self;
  rpi_table_params tables; /* those that the stack shares: the stack's */
  rpi_cross_params cross;
  rpi_feed_forward_params feed_forward;
} rpi_layer_params;

enum { RPI_ENCODER = 0, RPI_DECODER = 1, RPI_STACKS = 2 };

typedef struct rpi_stack_params {
  int64_t positions;          /* learned absolute ones [max_length, C] */
  int64_t relative_embedding; /* DeBERTa's [T, C] */
  rpi_norm_params norm;       /* the last one, with RP_NORM_PRE */
  rpi_layer_params *layers;
} rpi_stack_params;

typedef struct rpi_parameter {
  char name[RPI_PARAMETER_NAME];
  int dimensions;
  int64_t shape[3];
  int64_t count, at; /* in the flat buffer */
  enum rpi_start start;
  bool decays;
} rpi_parameter;

/* The layout of the flat buffer. */
typedef struct rpi_layout {
  int64_t source_embedding, target_embedding, output; /* shared ones are the same place */
  rpi_stack_params stack[RPI_STACKS];
  int64_t numbers; /* of the whole buffer */
  int64_t count;   /* of parameters */
  rpi_parameter *parameters;
} rpi_layout;

/* The stack of a model by number. */
static inline const rp_stack *rpi_stack_of(const rp_config *config, int stack) {
  return stack == RPI_ENCODER ? &config->encoder : &config->decoder;
}

/* Columns of the feed-forward layer before its activation. */
static inline int64_t rpi_hidden(const rp_config *config) {
  return config->activation == RP_SWIGLU ? 2 * config->feed_forward : config->feed_forward;
}

/* Lays the parameters of a checked configuration out; the arrays come from the arena (counting: no
 * more than numbers and count are meant). */
void rpi_layout_make(const rp_config *config, rpi_arena *arena, rpi_layout *layout);

/* Initial weights, a function of the seed and of each parameter's name alone. */
void rpi_layout_start(const rp_config *config, const rpi_layout *layout, rp_real *weights);

#endif
