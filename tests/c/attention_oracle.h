/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_oracle.h: the one formula written down as loops over (query, key) pairs.
 *
 * The loops carry, beside each number, its size: what the error of that number is, in
 * units of roundoff u, if every operation behind it errs in the worst direction. For a
 * sum that is the sum of the absolute terms; the weight exp(s - lse) errs, relative to
 * itself, by what s and lse err by. n roundings of random sign amount to sqrt(n) u
 * size (Higham & Mary 2019); twice that is allowed. It is the coarse sieve: how close
 * to the plain formula the results are is measured by tests/test_attention.py.
 */
#ifndef ATTENTION_ORACLE_H
#define ATTENTION_ORACLE_H

#include "attention_case.h"

static wide size_of(wide a) { return a < 0 ? -a : a; }

typedef struct dotted {
  wide value, size;
} dotted;

static dotted dot(const real *x, const real *y, int64_t width) {
  dotted d = {0, 0};
  for (int64_t c = 0; c < width; c++) {
    d.value += (wide)x[c] * y[c];
    d.size += size_of((wide)x[c] * y[c]);
  }
  return d;
}

static void add(array *x, int64_t place, wide value, wide size) {
  x->expected[place] += value;
  x->size[place] += size;
}

/* A row of a table that a pair has; several of one term where edges are double. */
typedef struct relation {
  int term;
  const real *row;
} relation;

enum { MOST_RELATIONS = 6 * TERMS };

typedef struct pair_of {
  bool seen;
  wide score, size;       /* then: the weight, and its size relative to it */
  wide slope, slope_size; /* of the softcap */
  wide keep;
  int count;
  relation relations[MOST_RELATIONS];
} pair_of;

/* ---- which relations, which pairs ------------------------------------------------- */

static void add_relation(const attention_case *c, pair_of *p, int t, int64_t h, int64_t row) {
  const array *const table = &c->table[t];
  if (row < 0 || p->count == MOST_RELATIONS) return;
  p->relations[p->count++] = (relation){t, table->memory + at(table, 0, h, row)};
}

static int64_t band_row(const term *t, const map_data *m, int64_t distance) {
  const bool below = distance<-t->left, above = distance> t->right;
  if (t->beyond == NONE && (below || above)) return -1;
  const int64_t row = below ? 0 : above ? t->left + t->right : distance + t->left;
  return t->buckets ? m->buckets[row] : row;
}

static void find_relations(const attention_case *c, const sequence *seq, int64_t b, int64_t h,
                           int64_t i, int64_t j, pair_of *p) {
  p->count = 0;
  for (int t = 0; t < TERMS; t++) {
    const term *const own = term_of(&c->s, t);
    const map_data *const m = &c->map[t];
    if (own->table == ABSENT) continue;
    if (own->map == RP_MAP_LABEL) {
      const int64_t at_pair =
          pair_at(c, m->label_starts, m->label_batch, m->label_head, b, h, i, j);
      add_relation(c, p, t, h, label_get(own, m, at_pair));
    } else if (own->map == RP_MAP_EDGES) {
      const int64_t row = seq->number + i;
      for (int64_t e = m->edge_starts[row]; e < m->edge_starts[row + 1]; e++) {
        if (m->edge_keys[e] == j) add_relation(c, p, t, h, m->edge_labels[e]);
      }
    } else if (own->positions) {
      const bool packed = c->s.layout == PACKED;
      const int64_t query = packed ? seq->query_row : b * c->s.N;
      const int64_t key = packed ? seq->key_row : b * c->s.M;
      add_relation(c, p, t, h,
                   band_row(own, m, m->key_positions[key + j] - m->query_positions[query + i]));
    } else {
      add_relation(c, p, t, h, band_row(own, m, j - i - seq->start));
    }
  }
}

static bool is_seen(const attention_case *c, const sequence *seq, int64_t b, int64_t h, int64_t i,
                    int64_t j) {
  const shape *const s = &c->s;
  const int64_t distance = j - i - seq->start;
  if (s->causal && distance > 0) return false;
  if (s->window && s->window_left >= 0 && distance < -s->window_left) return false;
  if (s->window && s->window_right >= 0 && distance > s->window_right) return false;
  return !s->mask ||
         c->mask[pair_at(c, c->mask_starts, c->mask_batch, c->mask_head, b, h, i, j)] != 0;
}

static const uint32_t dropout_key[2] = {0x12345678u, 0x9abcdef0u};
enum { DROPOUT_SITE = 40, DROPOUT_FIRST = 1000 };

static wide keep_factor(const attention_case *c, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (c->s.dropout == 0) return 1;
  const int threshold = (int)(256 * c->s.dropout + 0.5);
  const rpi_philox_block counter = {
      {(uint32_t)(j / 16), (uint32_t)i, c->ordinals[b], DROPOUT_SITE + (uint32_t)h}};
  const rpi_philox_key key = {{dropout_key[0], dropout_key[1]}};
  const rpi_philox_block block = rpi_philox(counter, key, RPI_PHILOX_ROUNDS);
  const int drawn = (int)(block.word[j % 16 / 4] >> (8 * (j % 4)) & 255);
  return drawn >= threshold ? (wide)256 / (256 - threshold) : 0;
}

/* Row 0 of a clipped band, which kernels subtract from the others: it adds to the sizes. */
static wide first_row_size(const attention_case *c, int kind, int64_t h, const real *x,
                           int64_t width) {
  wide size = 0;
  for (int t = kind * RP_TERMS; t < (kind + 1) * RP_TERMS; t++) {
    const term *const own = term_of(&c->s, t);
    if (own->table == ABSENT || own->map != RP_MAP_BAND || own->beyond == NONE) continue;
    const int64_t row = own->buckets ? c->map[t].buckets[0] : 0;
    if (row >= 0) size += dot(x, c->table[t].memory + at(&c->table[t], 0, h, row), width).size;
  }
  return size;
}

/* ---- one query ----------------------------------------------------------------------- */

/* What one query has in hand. */
typedef struct query_of {
  const attention_case *c;
  sequence seq;
  int64_t b, h, i, row;
  const real *q, *dz, *bias; /* bias: of position, or NULL */
  wide scale;
} query_of;

static wide biased(const query_of *x, int64_t d) {
  return (wide)x->q[d] + (x->bias ? (wide)x->bias[d] : 0);
}
static wide biased_size(const query_of *x, int64_t d) {
  return size_of(x->q[d]) + (x->bias ? size_of(x->bias[d]) : 0);
}

static const real *key_of(const query_of *x, int64_t j) {
  return x->c->k.memory + at(&x->c->k, x->seq.b, x->h, x->seq.key_row + j);
}
static const real *value_of(const query_of *x, int64_t j) {
  return x->c->v.memory + at(&x->c->v, x->seq.b, x->h, x->seq.key_row + j);
}

/* The score of a pair: products, then what is not scaled, then the cap. */
static void expect_score(const query_of *x, int64_t j, pair_of *p) {
  const shape *const s = &x->c->s;
  const real *const k = key_of(x, j);
  const dotted plain = dot(x->q, k, s->D);
  wide product = plain.value, size = plain.size, bias = 0, bias_size = 0;
  for (int e = 0; e < p->count; e++) {
    const real *const w = p->relations[e].row;
    const int kind = p->relations[e].term / RP_TERMS;
    for (int64_t d = 0; kind == KEY && d < s->D; d++) {
      product += biased(x, d) * w[d];
      size += biased_size(x, d) * size_of(w[d]);
    }
    if (kind == QUERY) product += dot(k, w, s->D).value;
    if (kind == QUERY) size += dot(k, w, s->D).size;
    if (kind == BIAS) bias += w[0];
    if (kind == BIAS) bias_size += size_of(w[0]);
  }
  const real one = 1;
  size += first_row_size(x->c, KEY, x->h, x->q, s->D);
  if (x->bias) size += first_row_size(x->c, KEY, x->h, x->bias, s->D);
  size += first_row_size(x->c, QUERY, x->h, k, s->D);
  bias_size += first_row_size(x->c, BIAS, x->h, &one, 1);
  p->score = x->scale * product + bias;
  p->size = size_of(x->scale) * size + bias_size;
  p->slope = 1;
  p->slope_size = 0;
  if (s->softcap == 0) return;
  const wide cap = (wide)s->softcap, t = TANH(p->score / cap);
  p->slope = 1 - t * t;
  p->slope_size = 2 + 2 * size_of(t) * p->slope * (p->size / cap + size_of(p->score / cap));
  p->size = p->slope * (p->size + size_of(p->score)) + 2 * cap;
  p->score = cap * t;
}

/* Scores become weights. False: the query sees nothing. */
static bool expect_weights(attention_case *c, const query_of *x, pair_of *pairs, wide *sum_size) {
  wide most = (wide)-INFINITY, sum = 0;
  for (int64_t j = 0; j < x->seq.keys; j++) {
    pair_of *const p = &pairs[j];
    p->seen = is_seen(c, &x->seq, x->b, x->h, x->i, j);
    if (!p->seen) continue;
    find_relations(c, &x->seq, x->b, x->h, x->i, j, p);
    expect_score(x, j, p);
    p->keep = keep_factor(c, x->b, x->h, x->i, j);
    most = p->score > most ? p->score : most;
  }
  const int64_t lse = at(&c->lse, x->seq.b, x->h, x->row);
  c->lse.expected[lse] = (wide)-INFINITY;
  if (most == (wide)-INFINITY) return false;
  for (int64_t j = 0; j < x->seq.keys; j++) sum += pairs[j].seen ? EXP(pairs[j].score - most) : 0;
  *sum_size = 0;
  for (int64_t j = 0; j < x->seq.keys; j++) {
    if (!pairs[j].seen) continue;
    pairs[j].score = EXP(pairs[j].score - most) / sum;
    *sum_size += pairs[j].score * pairs[j].size;
  }
  c->lse.expected[lse] = most + LOG(sum);
  c->lse.size[lse] = 1 + size_of(c->lse.expected[lse]) + *sum_size;
  for (int64_t j = 0; j < x->seq.keys; j++) pairs[j].size += 1 + *sum_size;
  return true;
}

/* Sums of the rows of one kind that a pair has, and of their sizes. */
static dotted row_sum(const pair_of *p, int kind, int64_t d) {
  dotted sum = {0, 0};
  for (int e = 0; e < p->count; e++) {
    if (p->relations[e].term / RP_TERMS != kind) continue;
    sum.value += p->relations[e].row[d];
    sum.size += size_of(p->relations[e].row[d]);
  }
  return sum;
}

/* Of the first rows of a kind, a number each. */
static wide first_element(const query_of *x, int kind, int64_t d) {
  wide size = 0;
  for (int t = kind * RP_TERMS; t < (kind + 1) * RP_TERMS; t++) {
    const term *const own = term_of(&x->c->s, t);
    if (own->table == ABSENT || own->map != RP_MAP_BAND || own->beyond == NONE) continue;
    const int64_t row = own->buckets ? x->c->map[t].buckets[0] : 0;
    if (row >= 0) size += size_of(x->c->table[t].memory[at(&x->c->table[t], 0, x->h, row) + d]);
  }
  return size;
}

static void expect_out(attention_case *c, const query_of *x, const pair_of *pairs) {
  const int64_t out = at(&c->out, x->seq.b, x->h, x->row);
  for (int64_t j = 0; j < x->seq.keys; j++) {
    const pair_of *const p = &pairs[j];
    if (!p->seen) continue;
    const real *const v = value_of(x, j);
    const wide weight = p->score * p->keep;
    for (int64_t d = 0; d < c->s.Dv; d++) {
      const dotted w = row_sum(p, VALUE, d);
      add(&c->out, out + d, weight * (v[d] + w.value),
          weight * p->size * (size_of(v[d]) + w.size + first_element(x, VALUE, d)));
    }
  }
}

/* What one pair gives to the gradients; ds is that of its score before the cap. */
static void expect_pair(attention_case *c, const query_of *x, int64_t j, const pair_of *p, wide ds,
                        wide ds_size) {
  const shape *const s = &c->s;
  const real *const k = key_of(x, j);
  const int64_t dq = at(&c->dq, x->seq.b, x->h, x->row);
  const int64_t dk = at(&c->dk, x->seq.b, x->h, x->seq.key_row + j);
  const int64_t dv = at(&c->dv, x->seq.b, x->h, x->seq.key_row + j);
  const wide scaled = x->scale * ds, scaled_size = size_of(x->scale) * ds_size;
  const wide weight = p->score * p->keep, weight_size = weight * p->size;
  for (int64_t d = 0; d < s->D; d++) {
    const dotted wk = row_sum(p, KEY, d), wq = row_sum(p, QUERY, d);
    const wide first = first_element(x, KEY, d);
    add(&c->dq, dq + d, scaled * (k[d] + wk.value),
        scaled_size * (size_of(k[d]) + wk.size + first));
    add(&c->dk, dk + d, scaled * (x->q[d] + wq.value),
        scaled_size * (size_of(x->q[d]) + wq.size + first_element(x, QUERY, d)));
    if (x->bias) {
      add(&c->dposition_bias, BEFORE + x->h * c->dposition_bias.head + d, scaled * wk.value,
          scaled_size * (wk.size + first));
    }
  }
  for (int64_t d = 0; d < s->Dv; d++)
    add(&c->dv, dv + d, weight * x->dz[d], weight_size * size_of(x->dz[d]));
  for (int e = 0; e < p->count; e++) {
    const int t = p->relations[e].term, kind = t / RP_TERMS;
    array *const to = s->tied && kind == VALUE ? &c->dtable[0] : &c->dtable[t];
    const int64_t place = p->relations[e].row - c->table[t].memory;
    for (int64_t d = 0; d < width_of(s, t); d++) {
      if (kind == KEY) add(to, place + d, scaled * biased(x, d), scaled_size * biased_size(x, d));
      if (kind == QUERY) add(to, place + d, scaled * k[d], scaled_size * size_of(k[d]));
      if (kind == BIAS) add(to, place + d, ds, ds_size);
      if (kind == VALUE) add(to, place + d, weight * x->dz[d], weight_size * size_of(x->dz[d]));
    }
  }
}

static void expect_query(attention_case *c, const query_of *x, pair_of *pairs) {
  const shape *const s = &c->s;
  const int64_t out = at(&c->out, x->seq.b, x->h, x->row);
  const int64_t dq = at(&c->dq, x->seq.b, x->h, x->row);
  for (int64_t d = 0; d < s->Dv; d++) c->out.expected[out + d] = 0;
  for (int64_t d = 0; d < s->D; d++) c->dq.expected[dq + d] = 0;
  wide sum_size = 0, delta = 0, delta_size = 0;
  if (!expect_weights(c, x, pairs, &sum_size)) return;
  expect_out(c, x, pairs);
  for (int64_t d = 0; d < s->Dv; d++) {
    delta += x->dz[d] * c->out.expected[out + d];
    delta_size += size_of(x->dz[d]) * c->out.size[out + d];
  }
  const wide first = first_row_size(c, VALUE, x->h, x->dz, s->Dv);
  for (int64_t j = 0; j < x->seq.keys; j++) {
    const pair_of *const p = &pairs[j];
    if (!p->seen) continue;
    dotted dp = dot(x->dz, value_of(x, j), s->Dv);
    for (int e = 0; e < p->count; e++) {
      if (p->relations[e].term / RP_TERMS != VALUE) continue;
      const dotted w = dot(x->dz, p->relations[e].row, s->Dv);
      dp.value += w.value;
      dp.size += w.size;
    }
    const wide away = p->keep * dp.value - delta;
    const wide ds = p->score * away;
    const wide ds_size =
        p->score * (p->size * size_of(away) + p->keep * (dp.size + first) + delta_size);
    expect_pair(c, x, j, p, ds * p->slope, ds_size * p->slope + size_of(ds) * p->slope_size);
  }
}

static void expect_all(attention_case *c) {
  const shape *const s = &c->s;
  pair_of *const pairs = memory_of(s->M, sizeof *pairs);
  expect_padding(c, &c->out, false, s->Dv, 0);
  expect_padding(c, &c->lse, false, 1, (wide)-INFINITY);
  expect_padding(c, &c->dq, false, s->D, 0);
  expect_padding(c, &c->dk, true, s->D, 0);
  expect_padding(c, &c->dv, true, s->Dv, 0);
  query_of x = {.c = c, .scale = s->scale != 0 ? (wide)s->scale : 1 / (wide)sqrt((double)s->D)};
  for (x.b = 0; x.b < s->B; x.b++) {
    x.seq = sequence_at(c, x.b);
    for (x.h = 0; x.h < s->H; x.h++) {
      x.bias = s->position_bias ? c->position_bias.data + x.h * c->position_bias.head : NULL;
      for (int64_t j = 0; j < x.seq.keys; j++) {
        const int64_t row = x.seq.key_row + j;
        for (int64_t d = 0; d < s->D; d++) c->dk.expected[at(&c->dk, x.seq.b, x.h, row) + d] = 0;
        for (int64_t d = 0; d < s->Dv; d++) c->dv.expected[at(&c->dv, x.seq.b, x.h, row) + d] = 0;
      }
      for (x.i = 0; x.i < x.seq.queries; x.i++) {
        x.row = x.seq.query_row + x.i;
        x.q = c->q.memory + at(&c->q, x.seq.b, x.h, x.row);
        x.dz = c->dout.memory + at(&c->dout, x.seq.b, x.h, x.row);
        expect_query(c, &x, pairs);
      }
    }
  }
  free(pairs);
}

#endif
