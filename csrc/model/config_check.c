/* SPDX-License-Identifier: Apache-2.0
 *
 * config_check.c: what fields of rp_config together rule out.
 *
 * A field without effect may say anything in its range: a stack without layers is not looked at,
 * nor what a position has no use for. So choosing another position is one change.
 */
#include <stdbool.h>

#include "model/config.h"

static rp_status check_t5(const rp_stack *s, const char *side, bool causal) {
  const int64_t least = causal ? 2 : 4;
  RPI_CHECK(s->buckets >= least && (causal || s->buckets % 2 == 0), RP_ERROR_SHAPE,
            "config: %s.buckets=%lld, must be %s with position t5", side, (rpi_wide)s->buckets,
            causal ? "2 or more" : "even, 4 or more");
  const int64_t exact = s->buckets / least;
  RPI_CHECK(s->max_distance > exact, RP_ERROR_SHAPE,
            "config: %s.max_distance=%lld, must be above %lld: so many near distances have buckets "
            "of their own among %lld of position t5",
            side, (rpi_wide)s->max_distance, (rpi_wide)exact, (rpi_wide)s->buckets);
  return RP_OK;
}

static rp_status check_deberta(const rp_config *config, const rp_stack *s, const char *side) {
  RPI_CHECK(
      s->key == 0 || rpi_key_heads(config) == config->heads, RP_ERROR_ARGUMENT,
      "config: key_heads=%lld with %s.position=deberta and %s.key=true, must be 0 or heads=%lld: the "
      "projection of keys makes a table for every head",
      (rpi_wide)config->key_heads, side, side, (rpi_wide)config->heads);
  if (s->buckets == 0) return RP_OK;
  RPI_CHECK(s->buckets >= 2, RP_ERROR_SHAPE,
            "config: %s.buckets=%lld, must be 0 (none) or 2 or more with position deberta", side,
            (rpi_wide)s->buckets);
  RPI_CHECK(s->max_distance >= s->buckets / 2 + 2, RP_ERROR_SHAPE,
            "config: %s.max_distance=%lld, must be at least buckets / 2 + 2 = %lld with position "
            "deberta",
            side, (rpi_wide)s->max_distance, (rpi_wide)s->buckets / 2 + 2);
  return RP_OK;
}

static rp_status check_rope(const rp_config *config, const rp_stack *s, const char *side) {
  const int64_t D = rpi_head_width(config);
  RPI_CHECK(s->rope_width <= D, RP_ERROR_SHAPE,
            "config: %s.rope_width=%lld, must not exceed the head width %lld", side,
            (rpi_wide)s->rope_width, (rpi_wide)D);
  const int64_t columns = s->rope_width != 0 ? s->rope_width : D;
  RPI_CHECK(columns % 2 == 0, RP_ERROR_SHAPE,
            "config: %s.rope_width=%lld with a head width of %lld turns %lld columns, must be an "
            "even number of them",
            side, (rpi_wide)s->rope_width, (rpi_wide)D, (rpi_wide)columns);
  RPI_CHECK(s->rope_rule != RP_ROPE_NTK || columns >= 4, RP_ERROR_SHAPE,
            "config: %s.rope_rule=ntk turns %lld columns, must be 4 or more", side,
            (rpi_wide)columns);
  return RP_OK;
}

static rp_status check_position(const rp_config *config, const rp_stack *s, const char *side) {
  switch (s->position) {
    case RP_POSITION_SHAW:
    case RP_POSITION_MUSIC:
    case RP_POSITION_DEBERTA:
      RPI_CHECK(s->key != 0 || s->value != 0, RP_ERROR_ARGUMENT,
                "config: %s.key=false and %s.value=false, one of them must be true with position "
                "%s; position none has neither",
                side, side,
                s->position == RP_POSITION_SHAW    ? "shaw"
                : s->position == RP_POSITION_MUSIC ? "music"
                                                   : "deberta");
      RPI_CHECK(
          s->position == RP_POSITION_DEBERTA || s->tied == 0 || (s->key != 0 && s->value != 0),
          RP_ERROR_ARGUMENT,
          "config: %s.tied=true, must be false unless %s.key and %s.value are true", side, side,
          side);
      return s->position == RP_POSITION_DEBERTA ? check_deberta(config, s, side) : RP_OK;
    case RP_POSITION_TRANSFORMER_XL:
      RPI_CHECK(config->width % 2 == 0, RP_ERROR_SHAPE,
                "config: width=%lld, must be even with %s.position=transformer-xl, whose sinusoids "
                "have a sine and a cosine each",
                (rpi_wide)config->width, side);
      return RP_OK;
    case RP_POSITION_T5: return check_t5(s, side, s == &config->decoder);
    case RP_POSITION_ROPE: return check_rope(config, s, side);
    default: return RP_OK;
  }
}

/* One table for keys and values is shared as it is. */
static rp_status check_tied(const rp_stack *s, const char *side) {
  const int wanted[] = {s->value_per_layer, s->value_per_head};
  const bool keys[] = {s->per_layer != 0, s->per_head != 0};
  static const char *const names[] = {"per_layer", "per_head"};
  const bool has =
      s->position == RP_POSITION_SHAW || s->position == RP_POSITION_MUSIC || s->relations != 0;
  for (int i = 0; has && s->tied != 0 && i < 2; i++) {
    RPI_CHECK(
        rpi_values_own(wanted[i], keys[i]) == keys[i], RP_ERROR_ARGUMENT,
        "config: %s.value_%s=%s with %s.tied=true, must be as-keys or %s.%s's: keys and values "
        "have one table",
        side, names[i], keys[i] ? "false" : "true", side, side, names[i]);
  }
  return RP_OK;
}

static rp_status check_relations(const rp_stack *s, const char *side) {
  if (s->relations == 0) return RP_OK;
  RPI_CHECK(s->relation_key != 0 || s->relation_value != 0, RP_ERROR_ARGUMENT,
            "config: %s.relation_key=false and %s.relation_value=false, one of them must be true "
            "with %s.relations=%lld",
            side, side, side, (rpi_wide)s->relations);
  RPI_CHECK(s->tied == 0 || (s->relation_key != 0 && s->relation_value != 0), RP_ERROR_ARGUMENT,
            "config: %s.tied=true with %s.relations=%lld, must be false unless %s.relation_key and "
            "%s.relation_value are true",
            side, side, (rpi_wide)s->relations, side, side);
  RPI_CHECK(s->relation_key == 0 || s->position != RP_POSITION_ROPE, RP_ERROR_ARGUMENT,
            "config: %s.relation_key=true with %s.position=rope, must be false: the queries that "
            "meet the labels are turned, and the labels' table is not",
            side, side);
  RPI_CHECK(s->relation_key == 0 || s->position != RP_POSITION_TRANSFORMER_XL, RP_ERROR_ARGUMENT,
            "config: %s.relation_key=true with %s.position=transformer-xl, must be false: what is "
            "added to the queries for its distances would meet the labels too",
            side, side);
  return RP_OK;
}

static rp_status check_stack(const rp_config *config, const rp_stack *s, const char *side,
                             const char *vocabulary, int64_t size) {
  if (s->layers == 0) return RP_OK;
  RPI_CHECK(size >= 1, RP_ERROR_SHAPE, "config: %s=0, must be 1 or more with %s.layers=%lld",
            vocabulary, side, (rpi_wide)s->layers);
  RPI_CHECK(s->softcap == 0 || s->softcap >= 1e-30, RP_ERROR_ARGUMENT,
            "config: %s.softcap=%g, must be 0 (none) or from 1e-30 to 1e30", side, s->softcap);
  RPI_TRY(check_position(config, s, side));
  RPI_TRY(check_tied(s, side));
  return check_relations(s, side);
}

static rp_status check_training(const rp_config *config) {
  const int64_t classes =
      config->decoder.layers > 0 ? config->target_vocabulary : config->source_vocabulary;
  RPI_CHECK(config->label_smoothing == 0 || config->smoothing != RP_SMOOTH_OTHERS || classes >= 2,
            RP_ERROR_SHAPE,
            "config: smoothing=others spreads over the other classes, but %s=1, must be 2 or more",
            config->decoder.layers > 0 ? "target_vocabulary" : "source_vocabulary");
  RPI_CHECK(config->schedule != RP_SCHEDULE_INVERSE_SQRT || config->warmup >= 1, RP_ERROR_ARGUMENT,
            "config: warmup=0, must be 1 or more with schedule=inverse-sqrt");
  if (config->schedule != RP_SCHEDULE_COSINE && config->schedule != RP_SCHEDULE_LINEAR)
    return RP_OK;
  const char *const name = config->schedule == RP_SCHEDULE_COSINE ? "cosine" : "linear";
  RPI_CHECK(config->steps >= 1, RP_ERROR_ARGUMENT,
            "config: steps=0, must be 1 or more with schedule=%s", name);
  RPI_CHECK(config->warmup <= config->steps, RP_ERROR_ARGUMENT,
            "config: warmup=%lld, must not exceed steps=%lld with schedule=%s",
            (rpi_wide)config->warmup, (rpi_wide)config->steps, name);
  return RP_OK;
}

rp_status rpi_config_check(const rp_config *config) {
  RPI_TRY(rpi_config_check_fields(config));
  const bool encoder = config->encoder.layers > 0, decoder = config->decoder.layers > 0;
  RPI_CHECK(encoder || decoder, RP_ERROR_SHAPE,
            "config: encoder.layers=0 and decoder.layers=0, one of them must be above 0");
  RPI_CHECK(config->head_width != 0 || config->width % config->heads == 0, RP_ERROR_SHAPE,
            "config: width=%lld, must be a multiple of heads=%lld, or head_width be given",
            (rpi_wide)config->width, (rpi_wide)config->heads);
  RPI_CHECK(config->heads % rpi_key_heads(config) == 0, RP_ERROR_SHAPE,
            "config: key_heads=%lld, must be 0 or divide heads=%lld", (rpi_wide)config->key_heads,
            (rpi_wide)config->heads);
  RPI_TRY(check_stack(config, &config->encoder, "encoder", "source_vocabulary",
                      config->source_vocabulary));
  RPI_TRY(check_stack(config, &config->decoder, "decoder", "target_vocabulary",
                      config->target_vocabulary));
  RPI_CHECK(config->share_embeddings == 0 || !encoder || !decoder ||
                config->source_vocabulary == config->target_vocabulary,
            RP_ERROR_SHAPE,
            "config: share_embeddings=true with source_vocabulary=%lld and target_vocabulary=%lld, "
            "must be equal",
            (rpi_wide)config->source_vocabulary, (rpi_wide)config->target_vocabulary);
  return check_training(config);
}
