/* SPDX-License-Identifier: Apache-2.0
 *
 * search.c: beam search, of which greedy search is the one with a beam of 1, and sampling.
 *
 * A sentence has up to `beam` live hypotheses, each a row of the caches. In every round
 *
 *   1. each row names its `beam` likeliest next tokens;
 *   2. the likeliest `beam` of all these continuations of a sentence are taken: those that say the
 *      end, or are as long as they may be, are closed and kept if they are among the n_best
 *      closed ones by score; the others are the new live ones;
 *   3. live ones that cannot win any more are dropped, and all others make a step.
 *
 * So a beam of 1 takes the likeliest token until that is the end, and a beam that is never full
 * tries everything. What is closed leaves the batch, and so does a sentence without live ones.
 *
 * Why dropping loses nothing. A log-probability only falls as a target grows, a coverage penalty is
 * never positive, and the divisor of a log-probability, 1 at least and never falling with the
 * length, is largest at the most tokens a target may have. So no score of what a live hypothesis
 * will become is above its log-probability divided by the divisor there; where that is not above
 * the worst of n_best kept scores, none of it will be kept. Live hypotheses of a sentence are of
 * one length, so those to drop are those below one threshold of log-probability: continuations of
 * them come after all continuations that are above it, and have never kept one of these from being
 * among the `beam` taken. A search that drops finds exactly what one to the bitter end would.
 *
 * Targets are kept as nodes (token, node before), so that those which share a beginning share it.
 *
 * Sampling: n_best rows a sentence, each of which draws its next token by one random number, keyed
 * by the seed and counted by (tokens so far, draw, ordinal of the sentence): in falling order of
 * probability the classes lie on a line as long as the probability of all that may be drawn, and
 * the number says where.
 */
#include "decode/search.h"

#include <math.h>
#include <string.h>

#include "base/integers.h"
#include "base/rng.h"
#include "model/sublayer.h"

#define FIRST_LISTED ((int64_t)128) /* likeliest classes a draw looks at first, before all */
#define LITTLE_LEFT 0x1p-60         /* a share below which floats lose some of what it is made of */
#define DRAW_SITE 0x64726177u       /* the last word of a draw's counter */

/* ---- memory ---------------------------------------------------------------- */

static void release_results(rpi_results *r) {
  rpi_release(r->counts.memory);
  rpi_release(r->found.memory);
  rpi_release(r->tokens.memory);
}

void rpi_decoder_free(rp_decoder *d) {
  if (!d) return;
  for (int64_t k = 0; d->caches && k < d->count; k++) rpi_cache_free(d->caches[k]);
  rpi_release(d->models);
  rpi_release(d->caches);
  rpi_release(d->runs);
  release_results(&d->results);
  release_results(&d->next);
  rpi_release(d->work.memory);
  rpi_release(d->nodes.memory);
  rpi_release(d->parents.memory);
  rpi_release(d);
}

static rp_status make(rp_decoder *d, rp_model *const *models, int64_t count) {
  const size_t many = (size_t)count;
  d->models = rpi_allocate(many * sizeof *d->models);
  d->runs = rpi_allocate(many * sizeof *d->runs);
  d->caches = rpi_allocate(many * sizeof *d->caches);
  if (d->caches) memset(d->caches, 0, many * sizeof *d->caches);
  RPI_CHECK(d->models && d->runs && d->caches, RP_ERROR_MEMORY, "decoder: no memory for it");
  d->count = count;
  d->rows = -1;
  d->vocabulary = models[0]->classes;
  d->max_length = d->most_rows = d->block_rows = INT64_MAX;
  for (int64_t k = 0; k < count; k++) {
    const rp_model *const m = d->models[k] = models[k];
    d->max_length = rpi_min(d->max_length, m->config.max_length);
    d->most_rows = rpi_min(d->most_rows, m->limits.tokens);
    d->block_rows = rpi_min(d->block_rows, m->loss_rows);
    RPI_TRY(rpi_cache_create(models[k], &d->caches[k]));
  }
  return RP_OK;
}

rp_status rpi_decoder_create(rp_model *const *models, int64_t count, rp_decoder **decoder) {
  rp_decoder *const d = rpi_allocate(sizeof *d);
  RPI_CHECK(d, RP_ERROR_MEMORY, "decoder: no memory for it");
  memset(d, 0, sizeof *d);
  const rp_status status = make(d, models, count);
  if (status == RP_OK) *decoder = d;
  else rpi_decoder_free(d);
  return status;
}

/* ---- logits ---------------------------------------------------------------- */

static rp_status add_model(rp_decoder *d, int64_t k, int64_t first, int64_t count, real *to) {
  rp_model *const m = d->models[k];
  real *const own = k == 0 ? to : m->scratch.logits;
  RPI_TRY(rpi_cache_logits(d->caches[k], first, count, own));
  const rpi_mix_args args = {.rows = count,
                             .classes = d->vocabulary,
                             .logits = own,
                             .stride = d->vocabulary,
                             .mean = to,
                             .mean_stride = d->vocabulary,
                             .share = 1 / (double)d->count,
                             .first = k == 0};
  return m->ops->mix(&args);
}

rp_status rpi_decoder_logits(rp_decoder *d, int64_t first, int64_t count, real *logits) {
  if (d->count == 1) return rpi_cache_logits(d->caches[0], first, count, logits);
  for (int64_t done = 0; done < count; done += d->block_rows) {
    const int64_t rows = rpi_min(count - done, d->block_rows);
    for (int64_t k = 0; k < d->count; k++) {
      RPI_TRY(add_model(d, k, first + done, rows, logits + done * d->vocabulary));
    }
  }
  return RP_OK;
}

/* ---- what a search holds --------------------------------------------------- */

typedef struct node {
  int64_t before; /* -1: the target begins here, after what was forced */
  int32_t token;
} node;

/* A row. */
typedef struct live {
  int32_t sentence, parent,
      token;    /* parent: the row of the step before; token: what is read next */
  int32_t draw; /* -1: all draws, or a beam */
  int64_t node;
  double log_probability;
} live;

typedef struct closed {
  double score, log_probability;
  int64_t node, count; /* count: tokens, with what was forced */
  int finished;
} closed;

typedef struct sentence {
  int64_t forced, most; /* tokens that are forced, and that it may have, these among them */
  int64_t count;        /* tokens that all its live hypotheses have */
  int64_t first, rows;  /* its rows */
  int64_t kept;
} sentence;

typedef struct search {
  rp_decoder *d;
  const rp_search *q;
  int64_t sentences, width; /* width: rows that a sentence may have */
  int64_t listed;           /* likeliest classes that a row names */
  int64_t longest_source, longest;
  rpi_philox_key key;
  const rpi_side *source; /* NULL: there is no encoder */
  const rpi_side *forced; /* what targets begin with; offsets NULL: nothing */
  bool one_by_one;        /* what is forced is read token by token: its attention counts */

  sentence *at;    /* [sentences] */
  closed *kept;    /* [sentences][n_best], in falling order */
  live *rows, *to; /* of this round, and of the next: [sentences][width] */
  int64_t count, next;
  node *nodes; /* d->nodes */
  int64_t node_count;
  int32_t *tokens;           /* [rows][listed] */
  double *log_probabilities; /* the same */
  int64_t *taken;            /* [rows]: of the listed, how many */
  double *left;              /* of a block of rows */
  int64_t *banned_offsets;   /* [block + 1] */
  int32_t *banned;
  int32_t *history;         /* [longest] */
  double *cover, *cover_to; /* [rows][longest source]: attention summed over target places */
  int32_t *parents, *words; /* [rows]: a step's arguments */
  int64_t *offsets;         /* [sentences + 1], and ids: what the caches begin with */
  int32_t *ids;
  int32_t *all_tokens; /* [vocabulary]: sampling, where the first list does not tell */
  double *all_log_probabilities;
  int32_t *drawn; /* [sentences][width]: what each draw says, -1: nothing */
  double *drawn_log;
} search;

static int64_t forced_of(const search *s, int64_t b) {
  return s->forced->offsets ? s->forced->offsets[b + 1] - s->forced->offsets[b] : 0;
}
static int64_t source_of(const search *s, int64_t b) {
  return s->source ? s->source->offsets[b + 1] - s->source->offsets[b] : 0;
}

/* Tokens that a target may have: never more than places for what predicts them. */
static int64_t most_of(const search *s, int64_t b) {
  const rp_search *const q = s->q;
  int64_t wanted = q->max_length;
  if (wanted == 0) {
    wanted = (s->source ? source_of(s, b) : forced_of(s, b)) + q->max_more;
    wanted = rpi_max(wanted, q->min_length);
  }
  return rpi_max(rpi_min(wanted, s->d->max_length), forced_of(s, b));
}

static void carve(search *s, rpi_arena *arena) {
  const rp_search *const q = s->q;
  const int64_t S = s->sentences, rows = S * s->width, block = rpi_min(s->d->block_rows, rows);
  const int64_t forced = s->forced->offsets ? s->forced->offsets[S] : 0;
  const int64_t cover = q->coverage > 0 ? s->longest_source : 0;
  const int64_t banned = q->suppressed_count + 1 + (q->no_repeat > 0 ? s->longest : 0);
  s->at = rpi_arena_take(arena, S, sizeof *s->at);
  int64_t kept = 0, names = 0, sums = 0, bans = 0;
  if (!rpi_multiply(S, q->n_best, &kept) || !rpi_multiply(rows, s->listed, &names) ||
      !rpi_multiply(rows, cover, &sums) || !rpi_multiply(block, banned, &bans)) {
    arena->failed = true;
  }
  s->kept = rpi_arena_take(arena, kept, sizeof *s->kept);
  s->rows = rpi_arena_take(arena, rows, sizeof *s->rows);
  s->to = rpi_arena_take(arena, rows, sizeof *s->to);
  s->tokens = rpi_arena_take(arena, names, sizeof *s->tokens);
  s->log_probabilities = rpi_arena_take(arena, names, sizeof *s->log_probabilities);
  s->taken = rpi_arena_take(arena, rows, sizeof *s->taken);
  s->left = rpi_arena_take(arena, block, sizeof *s->left);
  s->banned_offsets = rpi_arena_take(arena, block + 1, sizeof *s->banned_offsets);
  s->banned = rpi_arena_take(arena, bans, sizeof *s->banned);
  s->history = rpi_arena_take(arena, s->longest, sizeof *s->history);
  s->cover = rpi_arena_take(arena, sums, sizeof *s->cover);
  s->cover_to = rpi_arena_take(arena, sums, sizeof *s->cover_to);
  s->parents = rpi_arena_take(arena, rows, sizeof *s->parents);
  s->words = rpi_arena_take(arena, rows, sizeof *s->words);
  s->offsets = rpi_arena_take(arena, S + 1, sizeof *s->offsets);
  s->ids = rpi_arena_take(arena, forced + S, sizeof *s->ids);
  const int64_t all = q->sample ? s->d->vocabulary : 0;
  s->all_tokens = rpi_arena_take(arena, all, sizeof *s->all_tokens);
  s->all_log_probabilities = rpi_arena_take(arena, all, sizeof *s->all_log_probabilities);
  s->drawn = rpi_arena_take(arena, q->sample ? rows : 0, sizeof *s->drawn);
  s->drawn_log = rpi_arena_take(arena, q->sample ? rows : 0, sizeof *s->drawn_log);
}

/* Room for as many nodes as a round can add. */
static rp_status need_nodes(search *s) {
  rpi_room *const room = &s->d->nodes;
  const int64_t wanted = s->node_count + s->sentences * s->width;
  if (wanted <= room->bytes / (int64_t)sizeof(node)) return RP_OK;
  rpi_room larger = {NULL, 0};
  RPI_TRY(rpi_room_need(&larger, 2 * wanted, sizeof(node)));
  if (s->node_count != 0) memcpy(larger.memory, s->nodes, (size_t)s->node_count * sizeof(node));
  rpi_release(room->memory);
  *room = larger;
  s->nodes = room->memory;
  return RP_OK;
}

/* ---- scores ---------------------------------------------------------------- */

static double divisor(const rp_search *q, int64_t length) {
  const double L = (double)rpi_max(length, 1);
  if (q->penalty == RP_PENALTY_WU) return pow((5 + L) / 6, q->alpha);
  return q->penalty == RP_PENALTY_POWER ? pow(L, q->alpha) : 1;
}

/* What coverage adds for a target that ends after row r. Attention that is nothing at all counts
 * as the least that a float can be. */
static double coverage(const search *s, int64_t r) {
  if (!(s->q->coverage > 0)) return 0;
  const double *const sums = s->cover + r * s->longest_source;
  double sum = 0;
  for (int64_t i = 0; i < source_of(s, s->rows[r].sentence); i++) {
    sum += log(fmin(fmax(sums[i], 0x1p-126), 1));
  }
  return s->q->coverage * sum;
}

/* Keeps it if it is among the n_best; of equals the first stays before. */
static void keep(search *s, int64_t r, closed c) {
  sentence *const at = &s->at[s->rows[r].sentence];
  closed *const kept = s->kept + s->rows[r].sentence * s->q->n_best;
  c.score = c.log_probability / divisor(s->q, c.count + c.finished) + coverage(s, r);
  int64_t place = at->kept;
  while (place > 0 && c.score > kept[place - 1].score) place--;
  if (place == s->q->n_best) return;
  if (at->kept < s->q->n_best) at->kept++;
  memmove(kept + place + 1, kept + place, (size_t)(at->kept - place - 1) * sizeof *kept);
  kept[place] = c;
}

/* ---- what may come next ---------------------------------------------------- */

/* The target of row r, [count of its sentence]. */
static void write_target(const search *s, int64_t b, int64_t count, int64_t from, int32_t *to) {
  int64_t i = count;
  for (int64_t n = from; n >= 0; n = s->nodes[n].before) to[--i] = s->nodes[n].token;
  if (i > 0) memcpy(to, s->forced->ids + s->forced->offsets[b], (size_t)i * sizeof *to);
}

/* Tokens after which the last no_repeat tokens would have come before. The end is none of a
 * target's tokens, and may come even where what is forced has it. */
static int64_t ban_repetitions(const search *s, int64_t r, int32_t *to) {
  const int64_t n = s->q->no_repeat, b = s->rows[r].sentence, count = s->at[b].count;
  if (n == 0 || count < n) return 0;
  write_target(s, b, count, s->rows[r].node, s->history);
  const int32_t *const last = s->history + count - (n - 1);
  int64_t banned = 0;
  for (int64_t i = 0; i + n <= count; i++) {
    if (memcmp(s->history + i, last, (size_t)(n - 1) * sizeof *last) != 0) continue;
    if (s->history[i + n - 1] != s->q->end) to[banned++] = s->history[i + n - 1];
  }
  return banned;
}

static void ban(const search *s, int64_t first, int64_t count) {
  const rp_search *const q = s->q;
  int64_t used = 0;
  s->banned_offsets[0] = 0;
  for (int64_t r = 0; r < count; r++) {
    if (q->suppressed_count != 0) {
      memcpy(s->banned + used, q->suppressed, (size_t)q->suppressed_count * sizeof *s->banned);
      used += q->suppressed_count;
    }
    if (s->at[s->rows[first + r].sentence].count < q->min_length) s->banned[used++] = q->end;
    used += ban_repetitions(s, first + r, s->banned + used);
    s->banned_offsets[r + 1] = used;
  }
}

/* ---- draws ----------------------------------------------------------------- */

/* In [0, 1). */
static double uniform(const search *s, int64_t b, int64_t draw) {
  const rpi_philox_block counter = {
      {(uint32_t)s->at[b].count, (uint32_t)draw, s->d->runs[0].ordinals[b], DRAW_SITE}};
  const rpi_philox_block bits = rpi_philox(counter, s->key, RPI_PHILOX_ROUNDS);
  return ((double)(bits.word[0] >> 5) * 0x1p26 + (double)(bits.word[1] >> 6)) * 0x1p-53;
}

/* A list of likeliest classes. */
typedef struct list {
  const int32_t *tokens;
  const double *log_probabilities;
  int64_t count; /* asked for; -1 where there are no more */
  bool whole;    /* there are no more than these */
  double left;   /* the probability of all that may be drawn */
} list;

enum { DRAW_NOTHING = -1, DRAW_BEYOND = -2 };

/* The place of the class where `u` falls: DRAW_BEYOND, where that cannot be said from this list;
 * DRAW_NOTHING, where it is empty. */
static int64_t place_of(const rp_search *q, const list *l, double u) {
  const int64_t end = q->top_k > 0 ? rpi_min(q->top_k, l->count) : l->count;
  double sum = 0;
  int64_t n = 0;
  bool whole = l->whole;
  /* the likeliest in any case, though its share may be so little that it counts as 0 */
  while (n < end && l->tokens[n] >= 0 && (n == 0 || !(sum >= q->top_p * l->left))) {
    sum += exp(l->log_probabilities[n++]);
  }
  if (n < end || n == q->top_k) whole = true;
  if (n == 0) return DRAW_NOTHING;
  if (!whole && q->top_p < 1) return DRAW_BEYOND;
  const double where = u * (whole ? sum : l->left);
  sum = 0;
  for (int64_t i = 0; i < n; i++) {
    sum += exp(l->log_probabilities[i]);
    if (where < sum) return i;
  }
  return whole ? n - 1 : DRAW_BEYOND;
}

/* Every class of a row whose first list was too short, of one that `choose` has seen: there what is
 * banned has no probability any more. */
static rp_status list_all(const search *s, real *logits, list *all) {
  const int64_t V = s->d->vocabulary;
  *all = (list){s->all_tokens, s->all_log_probabilities, V, true, 1};
  const rpi_choose_args args = {.rows = 1,
                                .classes = V,
                                .logits = logits,
                                .stride = V,
                                .temperature = s->q->temperature,
                                .most = V,
                                .tokens = s->all_tokens,
                                .log_probabilities = s->all_log_probabilities};
  return s->d->models[0]->ops->choose(&args);
}

/* The draws of row r, whose logits these are. */
static rp_status draw_row(search *s, int64_t r, double left, real *logits) {
  const int64_t b = s->rows[r].sentence, own = s->rows[r].draw;
  const int64_t first = own < 0 ? 0 : own, end = own < 0 ? s->width : own + 1;
  const int32_t *const tokens = s->tokens + r * s->listed;
  const list some = {tokens, s->log_probabilities + r * s->listed, s->listed,
                     s->listed == s->d->vocabulary, left};
  /* Beside what is banned all the rest may be next to nothing, or nothing that a float can be: then
   * only a list of the rest alone tells its classes apart. */
  const bool little = !(left >= LITTLE_LEFT);
  list all = {.count = 0};
  for (int64_t i = first; i < end; i++) {
    const double u = uniform(s, b, i);
    int64_t place = little ? DRAW_BEYOND : place_of(s->q, &some, u);
    const bool beyond = place == DRAW_BEYOND;
    if (beyond) {
      if (all.count == 0) RPI_TRY(list_all(s, logits, &all));
      place = place_of(s->q, &all, u);
    }
    const list *const from = beyond ? &all : &some;
    /* the likeliest is the first of both */
    const double more = beyond ? some.log_probabilities[0] - all.log_probabilities[0] : 0;
    s->drawn[b * s->width + i] = place < 0 ? -1 : from->tokens[place];
    s->drawn_log[b * s->width + i] = place < 0 ? 0 : from->log_probabilities[place] + more;
  }
  return RP_OK;
}

/* ---- a round --------------------------------------------------------------- */

/* Every row's likeliest classes. */
static rp_status look(search *s) {
  rp_model *const m = s->d->models[0];
  const int64_t V = s->d->vocabulary;
  real *const logits = m->scratch.logits;
  for (int64_t first = 0; first < s->count; first += s->d->block_rows) {
    const int64_t count = rpi_min(s->count - first, s->d->block_rows);
    RPI_TRY(rpi_decoder_logits(s->d, first, count, logits));
    const double began = rpi_profile_now(&m->profile);
    ban(s, first, count);
    const rpi_choose_args args = {.rows = count,
                                  .classes = V,
                                  .logits = logits,
                                  .stride = V,
                                  .temperature = s->q->sample ? s->q->temperature : 1,
                                  .banned_offsets = s->banned_offsets,
                                  .banned = s->banned,
                                  .most = s->listed,
                                  .tokens = s->tokens + first * s->listed,
                                  .log_probabilities = s->log_probabilities + first * s->listed,
                                  .left = s->q->sample ? s->left : NULL};
    RPI_TRY(m->ops->choose(&args));
    for (int64_t r = 0; s->q->sample && r < count; r++) {
      RPI_TRY(draw_row(s, first + r, s->left[r], logits + r * V));
    }
    rpi_profile_add(&m->profile, -1, -1, "choose", false, began, 2 * (double)(count * V),
                    (double)(count * V) * (double)sizeof(real));
  }
  return RP_OK;
}

/* Row r says `token`: its target is closed, or goes on. */
static void take(search *s, int64_t r, int32_t token, double log_probability, int32_t draw) {
  const live *const from = &s->rows[r];
  const sentence *const at = &s->at[from->sentence];
  closed c = {.log_probability = log_probability, .node = from->node, .count = at->count};
  const bool forced = at->count < at->forced;
  if (token == s->q->end && !forced) {
    c.finished = 1;
    keep(s, r, c);
    return;
  }
  if (!forced) {
    s->nodes[s->node_count] = (node){from->node, token};
    c.node = s->node_count++;
  }
  c.count++;
  if (c.count >= at->most) {
    keep(s, r, c);
    return;
  }
  s->to[s->next++] = (live){.sentence = from->sentence,
                            .parent = (int32_t)r,
                            .token = token,
                            .draw = draw,
                            .node = c.node,
                            .log_probability = log_probability};
}

/* The likeliest continuations of a sentence, `beam` of them. */
static void extend(search *s, const sentence *at) {
  for (int64_t r = at->first; r < at->first + at->rows; r++) s->taken[r] = 0;
  for (int64_t i = 0; i < s->q->beam; i++) {
    int64_t best = -1;
    double most_likely = -INFINITY;
    for (int64_t r = at->first; r < at->first + at->rows; r++) {
      const int64_t place = s->taken[r] < s->listed ? r * s->listed + s->taken[r] : -1;
      if (place < 0 || s->tokens[place] < 0) continue;
      const double own = s->rows[r].log_probability + s->log_probabilities[place];
      if (!(own > most_likely)) continue;
      most_likely = own;
      best = r;
    }
    if (best < 0) return;
    const int32_t token = s->tokens[best * s->listed + s->taken[best]++];
    take(s, best, token, most_likely, -1);
  }
}

static void sample(search *s, const sentence *at) {
  for (int64_t r = at->first; r < at->first + at->rows; r++) {
    const int32_t own = s->rows[r].draw;
    const int32_t first = own < 0 ? 0 : own, end = own < 0 ? (int32_t)s->width : own + 1;
    for (int32_t i = first; i < end; i++) {
      const int64_t slot = s->rows[r].sentence * s->width + i;
      if (s->drawn[slot] < 0) continue;
      take(s, r, s->drawn[slot], s->rows[r].log_probability + s->drawn_log[slot], i);
    }
  }
}

/* Live hypotheses of the next round, from `first` on, that can win yet: the likeliest come first.
 */
static void drop(search *s, const sentence *at, int64_t first) {
  const rp_search *const q = s->q;
  if (q->sample || at->kept < q->n_best) return;
  const double worst = s->kept[(at - s->at) * q->n_best + q->n_best - 1].score;
  const double largest = divisor(q, at->most);
  while (s->next > first && !(s->to[s->next - 1].log_probability / largest > worst)) s->next--;
}

static bool is_finite(const search *s, const sentence *at) {
  for (int64_t r = at->first; r < at->first + at->rows; r++) {
    if (isnan(s->log_probabilities[r * s->listed])) return false;
  }
  return true;
}

/* From this round's rows of a sentence to the next one's. */
static void go_on(search *s, sentence *at) {
  const int64_t b = at - s->at, first = s->next;
  if (at->rows == 0) return;
  if (!is_finite(s, at)) {
    at->kept = 0;
  } else if (at->count < at->forced) {
    /* the last that there is room for ends every draw */
    const int64_t times = s->q->sample && at->count + 1 >= at->most ? s->width : 1;
    for (int64_t i = 0; i < times; i++) {
      take(s, at->first, s->forced->ids[s->forced->offsets[b] + at->count], 0, -1);
    }
  } else if (s->q->sample) {
    sample(s, at);
  } else {
    extend(s, at);
  }
  at->count++;
  drop(s, at, first);
  at->first = first;
  at->rows = s->next - first;
}

/* Attention of the step before, added up. */
static void add_attention(search *s) {
  const double share = 1 / (double)s->d->count;
  for (int64_t r = 0; r < s->count; r++) {
    double *const to = s->cover + r * s->longest_source;
    for (int64_t k = 0; k < s->d->count; k++) {
      const real *const attention = rpi_cache_attention(s->d->caches[k], r);
      for (int64_t i = 0; i < source_of(s, s->rows[r].sentence); i++) {
        to[i] += share * (double)attention[i];
      }
    }
  }
}

static void inherit_cover(search *s) {
  const size_t bytes = (size_t)s->longest_source * sizeof *s->cover;
  for (int64_t r = 0; r < s->next; r++) {
    memcpy(s->cover_to + r * s->longest_source, s->cover + s->to[r].parent * s->longest_source,
           bytes);
  }
  double *const before = s->cover;
  s->cover = s->cover_to;
  s->cover_to = before;
}

/* Every row of the next round reads its token. */
static rp_status step(search *s) {
  for (int64_t r = 0; r < s->next; r++) {
    s->parents[r] = s->to[r].parent;
    s->words[r] = s->to[r].token;
  }
  for (int64_t k = 0; k < s->d->count; k++) {
    RPI_TRY(rpi_cache_step(s->d->caches[k], s->next, s->parents, s->words));
  }
  const bool covers = s->q->coverage > 0 && s->longest_source != 0;
  if (covers) inherit_cover(s);
  live *const before = s->rows;
  s->rows = s->to;
  s->to = before;
  s->count = s->next;
  if (covers) add_attention(s);
  return RP_OK;
}

static rp_status rounds(search *s) {
  while (s->count != 0) {
    RPI_TRY(need_nodes(s));
    RPI_TRY(look(s));
    s->next = 0;
    for (int64_t b = 0; b < s->sentences; b++) go_on(s, &s->at[b]);
    if (s->next == 0) return RP_OK;
    RPI_TRY(step(s));
  }
  return RP_OK;
}

/* ---- the beginning and the end --------------------------------------------- */

/* What the caches read at first: search->begin, and what is forced. */
static void write_beginnings(search *s) {
  int64_t used = 0;
  for (int64_t b = 0; b < s->sentences; b++) {
    const int64_t forced = s->one_by_one ? 0 : forced_of(s, b);
    s->offsets[b] = used;
    s->ids[used++] = s->q->begin;
    if (forced == 0) continue;
    memcpy(s->ids + used, s->forced->ids + s->forced->offsets[b], (size_t)forced * sizeof *s->ids);
    used += forced;
  }
  s->offsets[s->sentences] = used;
}

static void open_sentences(search *s) {
  s->count = 0;
  for (int64_t b = 0; b < s->sentences; b++) {
    const int64_t forced = forced_of(s, b);
    s->at[b] = (sentence){.forced = forced,
                          .most = most_of(s, b),
                          .count = s->one_by_one ? 0 : forced,
                          .first = b,
                          .rows = 1};
    s->rows[s->count++] = (live){.sentence = (int32_t)b, .draw = -1, .node = -1};
  }
}

/* Targets that are as long as they may be before anything is said. */
static void close_at_once(search *s) {
  for (int64_t b = 0; b < s->sentences; b++) {
    sentence *const at = &s->at[b];
    if (at->count < at->most) continue;
    for (int64_t i = 0; i < (s->q->sample ? s->width : 1); i++) {
      keep(s, at->first, (closed){.node = -1, .count = at->count});
    }
    at->rows = 0;
  }
}

/* Who has them rounded for fewer words waits longer: one pass is what two words read. */
#define ROUNDED_WORDS 3

static rp_status round_weights(const search *s) {
  for (int64_t k = 0; k < s->d->count && s->longest >= ROUNDED_WORDS; k++) {
    rp_model *const m = s->d->runs[k].model;
    if (m->ops->host && m->limits.precision == RP_BF16) RPI_TRY(rpi_round_weights(m));
  }
  return RP_OK;
}

static rp_status begin(search *s) {
  write_beginnings(s);
  RPI_TRY(round_weights(s));
  const rpi_cache_start start = {.most_rows = s->sentences * s->width,
                                 .most_length = rpi_min(s->longest + 1, s->d->max_length),
                                 .attention = s->q->coverage > 0};
  for (int64_t k = 0; k < s->d->count; k++) {
    rpi_run run = s->d->runs[k];
    run.side[RPI_DECODER] =
        (rpi_side){.rows = s->offsets[s->sentences], .ids = s->ids, .offsets = s->offsets};
    RPI_TRY(rpi_cache_begin(s->d->caches[k], &run, &start));
  }
  open_sentences(s);
  if (s->q->coverage > 0 && s->longest_source != 0) {
    memset(s->cover, 0, (size_t)(s->sentences * s->longest_source) * sizeof *s->cover);
    add_attention(s);
  }
  close_at_once(s);
  return RP_OK;
}

/* What was kept, as the caller will see it. */
static rp_status write_results(const search *s, rpi_results *to) {
  const int64_t n_best = s->q->n_best;
  int64_t tokens = 0;
  RPI_TRY(rpi_room_need(&to->counts, s->sentences, sizeof(int64_t)));
  RPI_TRY(rpi_room_need(&to->found, s->sentences * n_best, sizeof(rp_hypothesis)));
  for (int64_t b = 0; b < s->sentences; b++) {
    for (int64_t i = 0; i < s->at[b].kept; i++) tokens += s->kept[b * n_best + i].count;
  }
  RPI_TRY(rpi_room_need(&to->tokens, tokens, sizeof(int32_t)));
  int32_t *token = to->tokens.memory;
  for (int64_t b = 0; b < s->sentences; b++) {
    ((int64_t *)to->counts.memory)[b] = s->at[b].kept;
    for (int64_t i = 0; i < s->at[b].kept; i++) {
      const closed *const c = &s->kept[b * n_best + i];
      write_target(s, b, c->count, c->node, token);
      ((rp_hypothesis *)to->found.memory)[b * n_best + i] =
          (rp_hypothesis){.struct_size = sizeof(rp_hypothesis),
                          .count = c->count,
                          .tokens = token,
                          .log_probability = c->log_probability,
                          .score = c->score,
                          .finished = c->finished};
      token += c->count;
    }
  }
  to->sentences = s->sentences;
  to->n_best = n_best;
  return RP_OK;
}

static rp_status run(search *s) {
  rp_decoder *const d = s->d;
  for (int64_t b = 0; b < s->sentences; b++) {
    s->longest = rpi_max(s->longest, most_of(s, b));
    s->longest_source = rpi_max(s->longest_source, source_of(s, b));
  }
  rpi_arena counting = rpi_arena_counting();
  carve(s, &counting);
  RPI_CHECK(!counting.failed, RP_ERROR_SHAPE, "decoder: the memory of a search overflows");
  RPI_TRY(rpi_room_need(&d->work, counting.used, 1));
  rpi_arena arena = rpi_arena_over(d->work.memory, d->work.bytes);
  carve(s, &arena);
  RPI_TRY(begin(s));
  RPI_TRY(rounds(s));
  return write_results(s, &d->next);
}

rp_status rpi_search(rp_decoder *d, const rp_search *q) {
  const rpi_run *const first = &d->runs[0];
  search s = {
      .d = d,
      .q = q,
      .sentences = first->sentences,
      .width = q->sample ? q->n_best : q->beam,
      .listed = q->beam,
      .source = d->models[0]->stack[RPI_ENCODER].parts != 0 ? &first->side[RPI_ENCODER] : NULL,
      .forced = &first->side[RPI_DECODER],
      .one_by_one = q->coverage > 0,
      .nodes = d->nodes.memory,
      .key = rpi_philox_step_key(q->seed, 0)};
  if (q->sample) s.listed = rpi_min(q->top_k > 0 ? q->top_k : FIRST_LISTED, d->vocabulary);
  RPI_TRY(run(&s));
  const rpi_results before = d->results;
  d->results = d->next;
  d->next = before;
  return RP_OK;
}
