/* SPDX-License-Identifier: Apache-2.0
 *
 * safetensors.c: writing and reading safetensors files.
 *
 * A file may come from anywhere. The reader takes the one form that a header has and nothing else,
 * so that nothing nests deeper than it may; it trusts no length: what is allocated is the header,
 * which is bounded, and what the caller's tensors take.
 */
#include "file/safetensors.h"

#include <assert.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "base/memory.h"
#include "file/header_text.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "numbers in a safetensors file are little-endian: this machine would have to turn them"
#endif

#ifdef RP_REAL_IS_DOUBLE
#define TYPE "F64"
#else
#define TYPE "F32"
#endif

#define METADATA "__metadata__"

enum {
  PREFIX = 8,
  MOST_DIMENSIONS = 8,
  MOST_HEADER = 100000000 /* as the format's authors have */
};

/* "[2, 3]", cut where it is too long. */
static const char *shape_text(int dimensions, const int64_t *shape, char *text, size_t size) {
  size_t length = (size_t)snprintf(text, size, "[");
  for (int i = 0; i < dimensions && length < size; i++) {
    length += (size_t)snprintf(text + length, size - length, "%s%lld", i == 0 ? "" : ", ",
                               (rpi_wide)shape[i]);
  }
  if (length < size) snprintf(text + length, size - length, "]");
  return text;
}

static bool bytes_of(const rpi_tensor *tensor, int64_t *bytes) {
  assert(tensor->dimensions >= 0 && tensor->dimensions <= 3);
  *bytes = (int64_t)sizeof(rp_real);
  for (int i = 0; i < tensor->dimensions; i++) {
    if (!rpi_multiply(*bytes, tensor->shape[i], bytes)) return false;
  }
  return true;
}

static uint64_t hash_of(const char *begin, const char *end) {
  uint64_t at = 0;
  for (; begin < end; begin++) at = (at ^ (unsigned char)*begin) * UINT64_C(0x100000001B3);
  return at ^ at >> 32;
}

/* ---- tensors by name ------------------------------------------------------- */

/* A table of hashes, half of it empty: the names of a deep model are tens of thousands, and a file
 * may have them in any order. */
typedef struct name_table {
  const rpi_tensor *tensors;
  int64_t *slots; /* each a tensor, or -1 */
  int64_t count;  /* of slots, a power of two */
} name_table;

static rp_status names_make(const rpi_tensor *tensors, int64_t count, const char *path,
                            name_table *to) {
  int64_t slots = 16;
  while (slots < 2 * count) slots *= 2;
  *to = (name_table){.tensors = tensors, .slots = rpi_allocate((size_t)slots * sizeof *to->slots)};
  RPI_CHECK(to->slots != NULL, RP_ERROR_MEMORY, "no memory for the names in '%s'", path);
  to->count = slots;
  for (int64_t i = 0; i < slots; i++) to->slots[i] = -1;
  return RP_OK;
}

/* The slot of the tensor with this name, or the empty one where it would be. */
static int64_t *slot_of(const name_table *x, const char *name) {
  for (uint64_t at = hash_of(name, name + strlen(name));; at++) {
    int64_t *const slot = &x->slots[at & (uint64_t)(x->count - 1)];
    if (*slot < 0 || strcmp(x->tensors[*slot].name, name) == 0) return slot;
  }
}

/* ---- writing ------------------------------------------------------------- */

/* Text that grows; where at is NULL it is only counted. */
typedef struct writer {
  char *at;
  int64_t used;
} writer;

static void put_bytes(writer *w, const char *bytes, int64_t count) {
  if (w->at != NULL) memcpy(w->at + w->used, bytes, (size_t)count);
  w->used += count;
}

static void put(writer *w, const char *text) { put_bytes(w, text, (int64_t)strlen(text)); }

static void put_number(writer *w, int64_t number) {
  char text[24];
  snprintf(text, sizeof text, "%lld", (rpi_wide)number);
  put(w, text);
}

static void put_string(writer *w, const char *text) {
  put(w, "\"");
  for (; *text != '\0'; text++) {
    const unsigned char letter = (unsigned char)*text;
    char escape[8];
    if (letter == '"' || letter == '\\') snprintf(escape, sizeof escape, "\\%c", letter);
    else if (letter < 0x20) snprintf(escape, sizeof escape, "\\u%04x", letter);
    else snprintf(escape, sizeof escape, "%c", letter);
    put(w, escape);
  }
  put(w, "\"");
}

/* Of tensors that were checked: offsets do not overflow. */
static void put_header(writer *w, const rpi_text_pair *metadata, int64_t pairs,
                       const rpi_tensor *tensors, int64_t count) {
  const char *between = "";
  put(w, "{");
  if (pairs > 0) {
    put(w, "\"" METADATA "\":{");
    for (int64_t i = 0; i < pairs; i++) {
      put(w, i == 0 ? "" : ",");
      put_string(w, metadata[i].key);
      put(w, ":");
      put_string(w, metadata[i].value);
    }
    put(w, "}");
    between = ",";
  }
  int64_t offset = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t bytes = 0;
    bytes_of(&tensors[i], &bytes);
    put(w, between);
    put_string(w, tensors[i].name);
    put(w, ":{\"dtype\":\"" TYPE "\",\"shape\":[");
    for (int d = 0; d < tensors[i].dimensions; d++) {
      put(w, d == 0 ? "" : ",");
      put_number(w, tensors[i].shape[d]);
    }
    put(w, "],\"data_offsets\":[");
    put_number(w, offset);
    put(w, ",");
    put_number(w, offset += bytes);
    put(w, "]}");
    between = ",";
  }
  put(w, "}");
  while ((PREFIX + w->used) % RPI_ALIGN != 0) put(w, " ");
}

static rp_status check_texts(const char *path, const rpi_text_pair *metadata, int64_t pairs) {
  char quoted[RPI_QUOTE];
  for (int64_t i = 0; i < pairs; i++) {
    RPI_CHECK(rpi_is_utf8(metadata[i].key) && rpi_is_utf8(metadata[i].value), RP_ERROR_ARGUMENT,
              "cannot write '%s': metadata %s is not UTF-8", path,
              rpi_quote(metadata[i].key, quoted));
    for (int64_t j = 0; j < i; j++) {
      RPI_CHECK(strcmp(metadata[i].key, metadata[j].key) != 0, RP_ERROR_ARGUMENT,
                "cannot write '%s': metadata %s is given twice", path,
                rpi_quote(metadata[i].key, quoted));
    }
  }
  return RP_OK;
}

/* `names` is empty, and has them after. */
static rp_status check_tensors(const char *path, const rpi_tensor *tensors, int64_t count,
                               const name_table *names) {
  char quoted[RPI_QUOTE];
  int64_t all = 0;
  for (int64_t i = 0; i < count; i++) {
    const char *const name = tensors[i].name;
    RPI_CHECK(rpi_is_utf8(name) && strcmp(name, METADATA) != 0, RP_ERROR_ARGUMENT,
              "cannot write '%s': a tensor cannot be called %s", path, rpi_quote(name, quoted));
    int64_t *const slot = slot_of(names, name);
    RPI_CHECK(*slot < 0, RP_ERROR_ARGUMENT, "cannot write '%s': tensor %s is given twice", path,
              rpi_quote(name, quoted));
    *slot = i;
    int64_t bytes = 0;
    RPI_CHECK(bytes_of(&tensors[i], &bytes) && rpi_add(all, bytes, &all), RP_ERROR_SHAPE,
              "cannot write '%s': the size of tensor %s is negative or overflows", path,
              rpi_quote(name, quoted));
  }
  return RP_OK;
}

rp_status rpi_safetensors_write(const char *path, const rpi_text_pair *metadata, int64_t pairs,
                                const rpi_tensor *tensors, int64_t count) {
  assert(pairs >= 0 && pairs <= RPI_MOST_PAIRS && count >= 0);
  RPI_TRY(check_texts(path, metadata, pairs));
  name_table names;
  RPI_TRY(names_make(tensors, count, path, &names));
  const rp_status sound = check_tensors(path, tensors, count, &names);
  rpi_release(names.slots);
  RPI_TRY(sound);
  writer size = {.at = NULL, .used = 0};
  put_header(&size, metadata, pairs, tensors, count);
  RPI_CHECK(size.used <= MOST_HEADER, RP_ERROR_ARGUMENT,
            "cannot write '%s': its header of %lld bytes must not exceed %d", path,
            (rpi_wide)size.used, MOST_HEADER);

  /* the parts, then the header, in one block */
  const int64_t parts_bytes = (count + 1) * (int64_t)sizeof(rpi_file_part);
  rpi_file_part *const parts = rpi_allocate((size_t)(parts_bytes + PREFIX + size.used));
  RPI_CHECK(parts != NULL, RP_ERROR_MEMORY, "no memory to write '%s'", path);
  char *const prefix = (char *)(parts + count + 1);
  for (int i = 0; i < PREFIX; i++) prefix[i] = (char)(size.used >> 8 * i & 0xFF);
  writer text = {.at = prefix + PREFIX, .used = 0};
  put_header(&text, metadata, pairs, tensors, count);
  parts[0] = (rpi_file_part){prefix, PREFIX + text.used};
  for (int64_t i = 0; i < count; i++) {
    parts[i + 1].content = tensors[i].data;
    bytes_of(&tensors[i], &parts[i + 1].bytes);
  }
  const rp_status status = rpi_file_replace(path, parts, count + 1);
  rpi_release(parts);
  return status;
}

/* ---- what a header says -------------------------------------------------- */

typedef struct entry {
  const char *name, *type;
  int dimensions;
  int64_t shape[MOST_DIMENSIONS];
  int64_t offsets[2];
} entry;

static rp_status read_entry(rpi_header *r, entry *e) {
  enum { TYPE_SEEN = 1, SHAPE_SEEN = 2, OFFSETS_SEEN = 4, ALL_SEEN = 7 };
  int seen = 0, count = 0;
  RPI_TRY(rpi_header_expect(r, '{', "'{'"));
  do {
    const char *key = NULL;
    RPI_TRY(rpi_header_text(r, &key));
    RPI_TRY(rpi_header_expect(r, ':', "':'"));
    const int one = strcmp(key, "dtype") == 0          ? TYPE_SEEN
                    : strcmp(key, "shape") == 0        ? SHAPE_SEEN
                    : strcmp(key, "data_offsets") == 0 ? OFFSETS_SEEN
                                                       : 0;
    if (one == 0 || (seen & one) != 0) {
      return rpi_header_fail(r, "dtype, shape and data_offsets once each, and nothing else,");
    }
    seen |= one;
    if (one == TYPE_SEEN) RPI_TRY(rpi_header_text(r, &e->type));
    if (one == SHAPE_SEEN) RPI_TRY(rpi_header_counts(r, e->shape, MOST_DIMENSIONS, &e->dimensions));
    if (one == OFFSETS_SEEN) {
      RPI_TRY(rpi_header_counts(r, e->offsets, 2, &count));
      if (count != 2 || e->offsets[0] > e->offsets[1]) {
        return rpi_header_fail(r, "two offsets that do not fall");
      }
    }
  } while (rpi_header_passes(r, ','));
  RPI_TRY(rpi_header_expect(r, '}', "',' or '}'"));
  if (seen != ALL_SEEN) return rpi_header_fail(r, "dtype, shape and data_offsets of a tensor");
  return RP_OK;
}

typedef struct metadata {
  rpi_text_pair pairs[RPI_MOST_PAIRS];
  int count;
} metadata;

static rp_status read_metadata(rpi_header *r, metadata *m) {
  RPI_TRY(rpi_header_expect(r, '{', "'{'"));
  if (rpi_header_passes(r, '}')) return RP_OK;
  do {
    if (m->count == RPI_MOST_PAIRS)
      return rpi_header_fail(r, "no more than 1024 texts of metadata");
    rpi_text_pair *const pair = &m->pairs[m->count++];
    RPI_TRY(rpi_header_text(r, &pair->key));
    RPI_TRY(rpi_header_expect(r, ':', "':'"));
    RPI_TRY(rpi_header_text(r, &pair->value));
    for (int i = 0; i < m->count - 1; i++) {
      if (strcmp(m->pairs[i].key, pair->key) == 0) return rpi_header_fail(r, "every key once");
    }
  } while (rpi_header_passes(r, ','));
  return rpi_header_expect(r, '}', "',' or '}'");
}

typedef rp_status (*entry_fn)(void *context, const char *path, const entry *e);

/* Metadata and, one by one, the entries. */
static rp_status read_header(rpi_header *r, metadata *m, entry_fn each, void *context) {
  bool metadata_seen = false;
  m->count = 0;
  if (r->at == r->end || *r->at != '{') return rpi_header_fail(r, "'{'"); /* no space before it */
  r->at++;
  if (!rpi_header_passes(r, '}')) {
    do {
      entry e;
      memset(&e, 0, sizeof e);
      RPI_TRY(rpi_header_text(r, &e.name));
      RPI_TRY(rpi_header_expect(r, ':', "':'"));
      if (strcmp(e.name, METADATA) == 0) {
        if (metadata_seen) return rpi_header_fail(r, METADATA " once");
        metadata_seen = true;
        RPI_TRY(read_metadata(r, m));
      } else {
        RPI_TRY(read_entry(r, &e));
        if (each != NULL) RPI_TRY(each(context, r->path, &e));
      }
    } while (rpi_header_passes(r, ','));
    RPI_TRY(rpi_header_expect(r, '}', "',' or '}'"));
  }
  rpi_header_skip_space(r);
  return r->at == r->end ? RP_OK : rpi_header_fail(r, "its end");
}

/* Is it the header that was met before, where one was? */
static rp_status recognise(const rpi_header *r, rpi_header_mark *mark) {
  if (!mark) return RP_OK;
  const uint64_t bytes = (uint64_t)(r->end - r->begin), hash = hash_of(r->begin, r->end);
  mark->changed = mark->bytes != 0 && (mark->bytes != bytes || mark->hash != hash);
  RPI_CHECK(!mark->changed, RP_ERROR_FILE,
            "cannot read '%s': another file took its place meanwhile", r->path);
  mark->bytes = bytes;
  mark->hash = hash;
  return RP_OK;
}

/* The text of the header, which the caller releases; the file then stands where the data begin. */
static rp_status take_header(rpi_file *file, rpi_header_mark *mark, rpi_header *r) {
  unsigned char prefix[PREFIX];
  RPI_TRY(rpi_file_take(file, prefix, PREFIX));
  uint64_t length = 0;
  for (int i = 0; i < PREFIX; i++) length |= (uint64_t)prefix[i] << 8 * i;
  RPI_CHECK(length <= MOST_HEADER, RP_ERROR_FILE,
            "'%s' is no safetensors file: a header of %llu bytes, must not exceed %d", file->path,
            (unsigned long long)length, MOST_HEADER);
  char *const text = rpi_allocate((size_t)length);
  RPI_CHECK(text != NULL, RP_ERROR_MEMORY, "no memory for the header of '%s', %llu bytes",
            file->path, (unsigned long long)length);
  *r = (rpi_header){.path = file->path, .begin = text, .at = text, .end = text + length};
  rp_status status = rpi_file_take(file, text, (int64_t)length);
  if (status == RP_OK) status = recognise(r, mark);
  if (status != RP_OK) rpi_release(text);
  return status;
}

rp_status rpi_safetensors_metadata(const char *path,
                                   rp_status (*each)(void *context, const char *key,
                                                     const char *value),
                                   void *context, rpi_header_mark *mark) {
  rpi_file file;
  rpi_header r;
  metadata m;
  RPI_TRY(rpi_file_open(path, &file));
  rp_status status = take_header(&file, mark, &r);
  rpi_file_close(&file);
  if (status != RP_OK) return status;
  status = read_header(&r, &m, NULL, NULL);
  for (int i = 0; i < m.count && status == RP_OK; i++) {
    status = each(context, m.pairs[i].key, m.pairs[i].value);
  }
  rpi_release(r.begin);
  return status;
}

/* ---- reading tensors ----------------------------------------------------- */

/* Where a tensor's bytes lie in the data. */
typedef struct span {
  int64_t begin, end; /* end -1: not found yet */
  int64_t tensor;
} span;

typedef struct wanted {
  const rpi_tensor *tensors;
  span *spans;
  int64_t count;
  name_table names;
  rpi_header_mark *mark;
} wanted;

static rp_status match(void *context, const char *path, const entry *e) {
  wanted *const w = context;
  char quoted[RPI_QUOTE], came[96], expected[96];
  const int64_t i = *slot_of(&w->names, e->name);
  RPI_CHECK(i >= 0, RP_ERROR_FILE, "cannot read '%s': its tensor %s is unknown here", path,
            rpi_quote(e->name, quoted));
  rpi_quote(e->name, quoted);
  const rpi_tensor *const t = &w->tensors[i];
  RPI_CHECK(w->spans[i].end < 0, RP_ERROR_FILE, "cannot read '%s': tensor %s is there twice", path,
            quoted);
  char type[RPI_QUOTE];
  RPI_CHECK(strcmp(e->type, TYPE) == 0, RP_ERROR_FILE,
            "cannot read '%s': tensor %s is of type %s, must be '%s'", path, quoted,
            rpi_quote(e->type, type), TYPE);
  RPI_CHECK(e->dimensions == t->dimensions &&
                memcmp(e->shape, t->shape, (size_t)t->dimensions * sizeof t->shape[0]) == 0,
            RP_ERROR_FILE, "cannot read '%s': tensor %s has the shape %s, must be %s", path, quoted,
            shape_text(e->dimensions, e->shape, came, sizeof came),
            shape_text(t->dimensions, t->shape, expected, sizeof expected));
  int64_t bytes = 0;
  RPI_CHECK(bytes_of(t, &bytes) && e->offsets[1] - e->offsets[0] == bytes, RP_ERROR_FILE,
            "cannot read '%s': tensor %s has the offsets %lld and %lld, must be %lld bytes", path,
            quoted, (rpi_wide)e->offsets[0], (rpi_wide)e->offsets[1], (rpi_wide)bytes);
  w->spans[i] = (span){.begin = e->offsets[0], .end = e->offsets[1], .tensor = i};
  return RP_OK;
}

/* By place, and empty ones before what begins there. Few swaps: files are mostly in order. */
static void sort_spans(span *spans, int64_t count) {
  for (int64_t i = 1; i < count; i++) {
    const span moved = spans[i];
    int64_t j = i;
    for (; j > 0; j--) {
      const span *const before = &spans[j - 1];
      if (before->begin < moved.begin ||
          (before->begin == moved.begin && before->end <= moved.end)) {
        break;
      }
      spans[j] = *before;
    }
    spans[j] = moved;
  }
}

/* All found, and end to end: no hole, no overlap. Sorts them. */
static rp_status check_spans(const wanted *w, const char *path, int64_t *bytes) {
  char quoted[RPI_QUOTE];
  for (int64_t i = 0; i < w->count; i++) {
    RPI_CHECK(w->spans[i].end >= 0, RP_ERROR_FILE, "cannot read '%s': tensor %s is missing", path,
              rpi_quote(w->tensors[i].name, quoted));
  }
  sort_spans(w->spans, w->count);
  *bytes = 0;
  for (int64_t i = 0; i < w->count; i++) {
    RPI_CHECK(w->spans[i].begin == *bytes, RP_ERROR_FILE,
              "cannot read '%s': tensor %s begins at byte %lld of the data, must be %lld, where "
              "that before it ends",
              path, rpi_quote(w->tensors[w->spans[i].tensor].name, quoted),
              (rpi_wide)w->spans[i].begin, (rpi_wide)*bytes);
    *bytes = w->spans[i].end;
  }
  return RP_OK;
}

static rp_status find_spans(rpi_file *file, wanted *w, int64_t *bytes) {
  rpi_header r;
  metadata m;
  RPI_TRY(take_header(file, w->mark, &r));
  rp_status status = read_header(&r, &m, match, w);
  if (status == RP_OK) status = check_spans(w, file->path, bytes);
  rpi_release(r.begin);
  return status;
}

/* The data, and that nothing follows them; then, when nothing can fail any more, into place. */
static rp_status take_data(rpi_file *file, const wanted *w, int64_t bytes) {
  char *const data = rpi_allocate((size_t)bytes);
  RPI_CHECK(data != NULL, RP_ERROR_MEMORY, "no memory for the data of '%s', %lld bytes", file->path,
            (rpi_wide)bytes);
  rp_status status = rpi_file_take(file, data, bytes);
  if (status == RP_OK) status = rpi_file_expect_end(file);
  for (int64_t i = 0; i < w->count && status == RP_OK; i++) {
    const span *const s = &w->spans[i];
    if (s->end > s->begin) {
      memcpy(w->tensors[s->tensor].data, data + s->begin, (size_t)(s->end - s->begin));
    }
  }
  rpi_release(data);
  return status;
}

/* The same without that memory: the data go to their places as they come. */
static rp_status take_data_in_place(rpi_file *file, const wanted *w) {
  for (int64_t i = 0; i < w->count; i++) {
    const span *const s = &w->spans[i];
    RPI_TRY(rpi_file_take(file, w->tensors[s->tensor].data, s->end - s->begin));
  }
  return rpi_file_expect_end(file);
}

/* Opens the file and finds the tensors, whose data come next. The spans and the file are the
 * caller's to release and close; after a failure there is nothing to be. */
static rp_status find(const char *path, const rpi_tensor *tensors, int64_t count,
                      rpi_header_mark *mark, rpi_file *file, wanted *w, int64_t *bytes) {
  assert(count >= 0 && count <= INT64_MAX / (int64_t)sizeof(span));
  *w = (wanted){.tensors = tensors, .count = count, .mark = mark};
  w->spans = rpi_allocate((size_t)count * sizeof(span));
  RPI_CHECK(w->spans != NULL, RP_ERROR_MEMORY, "no memory to read '%s'", path);
  rp_status status = names_make(tensors, count, path, &w->names);
  for (int64_t i = 0; i < count && status == RP_OK; i++) {
    w->spans[i] = (span){.begin = 0, .end = -1, .tensor = i};
    *slot_of(&w->names, tensors[i].name) = i;
  }
  if (status == RP_OK) status = rpi_file_open(path, file);
  if (status == RP_OK) {
    status = find_spans(file, w, bytes);
    if (status != RP_OK) rpi_file_close(file);
  }
  rpi_release(w->names.slots);
  if (status != RP_OK) rpi_release(w->spans);
  return status;
}

rp_status rpi_safetensors_read(const char *path, const rpi_tensor *tensors, int64_t count,
                               bool in_place, rpi_header_mark *mark) {
  rpi_file file;
  wanted w;
  int64_t bytes = 0;
  RPI_TRY(find(path, tensors, count, mark, &file, &w, &bytes));
  const rp_status status = in_place ? take_data_in_place(&file, &w) : take_data(&file, &w, bytes);
  rpi_file_close(&file);
  rpi_release(w.spans);
  return status;
}

/* ---- mapping tensors ----------------------------------------------------- */

/* The whole file, whose data of so many bytes come next, and whether it ends where they do. No
 * mapping where it cannot be mapped. */
static rp_status map_all(const rpi_file *file, int64_t bytes, rpi_mapping *mapping) {
  *mapping = (rpi_mapping){.memory = NULL};
  if (rpi_file_map(file, mapping) != RP_OK) return RP_OK;
  const int64_t there = mapping->bytes, expected = file->position + bytes;
  if (there == expected) return RP_OK;
  rpi_file_unmap(mapping);
  return rpi_fail(RP_ERROR_FILE, "cannot read '%s': it has %lld bytes, where %lld were expected",
                  file->path, (rpi_wide)there, (rpi_wide)expected);
}

rp_status rpi_safetensors_check(const char *path, const rpi_tensor *tensors, int64_t count,
                                rpi_header_mark *mark) {
  rpi_file file;
  rpi_mapping mapping;
  wanted w;
  int64_t bytes = 0;
  RPI_TRY(find(path, tensors, count, mark, &file, &w, &bytes));
  const rp_status status = map_all(&file, bytes, &mapping);
  rpi_file_unmap(&mapping);
  rpi_file_close(&file);
  rpi_release(w.spans);
  return status;
}

static bool lie_as_wanted(const wanted *w) {
  for (int64_t i = 0; i < w->count; i++) {
    const span *const s = &w->spans[i];
    if (s->begin != w->tensors[s->tensor].place * (int64_t)sizeof(rp_real)) return false;
  }
  return true;
}

/* Of a file whose tensors were found, from file->position on. */
static rp_status map_data(const rpi_file *file, const wanted *w, int64_t bytes,
                          rpi_mapping *mapping, rp_real **data) {
  if (file->position % RPI_ALIGN != 0 || !lie_as_wanted(w)) return RP_OK;
  RPI_TRY(map_all(file, bytes, mapping));
  if (mapping->memory) *data = (rp_real *)((char *)mapping->memory + file->position);
  return RP_OK;
}

rp_status rpi_safetensors_map(const char *path, const rpi_tensor *tensors, int64_t count,
                              rpi_header_mark *mark, rpi_mapping *mapping, rp_real **data) {
  rpi_file file;
  wanted w;
  int64_t bytes = 0;
  *mapping = (rpi_mapping){.memory = NULL};
  *data = NULL;
  RPI_TRY(find(path, tensors, count, mark, &file, &w, &bytes));
  const rp_status status = map_data(&file, &w, bytes, mapping, data);
  rpi_file_close(&file);
  rpi_release(w.spans);
  return status;
}
