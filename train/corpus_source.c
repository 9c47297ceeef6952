/* Input files of a corpus: bytes, raw tokens, NumPy arrays. */
#include <stdio.h>
#include <string.h>

#include "train/corpus_priv.h"
#include "train/kind.h"

static const char *const input_names[MT_INPUT_COUNT] = {
    [MT_INPUT_AUTO] = "auto", [MT_INPUT_BYTES] = "bytes", [MT_INPUT_U16] = "u16",
    [MT_INPUT_U32] = "u32",   [MT_INPUT_NPY] = "npy",
};

mt_status mt_corpus_input_parse(mt_corpus_input *input, const char *name)
{
    for (int i = 0; i < MT_INPUT_COUNT; i++)
        if (!strcmp(input_names[i], name)) {
            *input = (mt_corpus_input)i;
            return MT_OK;
        }
    return MT_FAIL(MT_ECONFIG, "input format '%s' is not one of auto bytes u16 u32 npy", name);
}

static bool ends_with(const char *text, const char *end)
{
    size_t n = strlen(text), m = strlen(end);
    return n >= m && !strcmp(text + n - m, end);
}

static mt_corpus_input guess_input(const char *path, int64_t vocab_size)
{
    if (ends_with(path, ".npy")) return MT_INPUT_NPY;
    if (ends_with(path, ".bin")) return vocab_size <= 65536 ? MT_INPUT_U16 : MT_INPUT_U32;
    return MT_INPUT_BYTES;
}

/* The value after `'key':` in a NumPy header, or NULL. */
static const char *npy_value(const char *header, const char *key)
{
    const char *p = strstr(header, key);
    if (!p) return NULL;
    p += strlen(key);
    while (*p == ' ') p++;
    return p;
}

/* NumPy's format, versions 1 to 3: magic, version, header length, a Python dictionary, the
 * elements. */
static mt_status open_npy(mt_corpus_source *s)
{
    enum { MAX_HEADER = 4096 };
    char header[MAX_HEADER + 1], kind = 0, order = 0, after = 0;
    const unsigned char *p = s->map.data;
    MT_REQUIRE(s->map.bytes >= 12 && !memcmp(p, "\x93NUMPY", 6) && p[6] >= 1 && p[6] <= 3,
               MT_EDAMAGED, "'%s' is not a NumPy array file", s->path);
    size_t start = p[6] == 1 ? 10 : 12;
    size_t length = (size_t)p[8] | (size_t)p[9] << 8;
    if (p[6] > 1) length |= (size_t)p[10] << 16 | (size_t)p[11] << 24;
    MT_REQUIRE(length <= MAX_HEADER && length <= s->map.bytes - start, MT_EDAMAGED,
               "'%s': a NumPy header of %zu bytes, more than %d or than the file", s->path, length,
               MAX_HEADER);
    memcpy(header, p + start, length);
    header[length] = '\0';
    const char *type = npy_value(header, "'descr':"), *shape = npy_value(header, "'shape':");
    long long count = -1;
    int size = 0;
    bool typed = type && sscanf(type, "'%c%c%d'", &order, &kind, &size) == 3 &&
                 (kind == 'u' || kind == 'i') &&
                 (size == 1 || ((order == '<') && (size == 2 || size == 4 || size == 8)));
    MT_REQUIRE(typed, type ? MT_EUNSUPPORTED : MT_EDAMAGED,
               "'%s': elements %.*s are not little-endian integers", s->path,
               type ? (int)strcspn(type, ",}") : 0, type ? type : "");
    bool shaped = shape && sscanf(shape, "(%lld,%c", &count, &after) == 2 && after == ')';
    MT_REQUIRE(shaped && count >= 0, shape ? MT_EUNSUPPORTED : MT_EDAMAGED,
               "'%s': shape '%.*s' is not of one dimension", s->path,
               shape ? (int)strcspn(shape, ")") + 1 : 0, shape ? shape : "");
    size_t room = s->map.bytes - start - length;
    MT_REQUIRE((uint64_t)count <= room / (size_t)size, MT_EDAMAGED,
               "'%s': %lld elements of %d bytes, but only %zu bytes follow the header", s->path,
               count, size, room);
    s->data = p + start + length;
    s->count = count;
    s->bytes = size;
    s->is_signed = kind == 'i';
    return MT_OK;
}

static mt_status open_raw(mt_corpus_source *s, int bytes)
{
    MT_REQUIRE(s->map.bytes % (size_t)bytes == 0, MT_EDAMAGED,
               "'%s' has %zu bytes, not a multiple of the %d of a token", s->path, s->map.bytes,
               bytes);
    s->data = s->map.data;
    s->count = (int64_t)(s->map.bytes / (size_t)bytes);
    s->bytes = bytes;
    return MT_OK;
}

/* A negative element, extended to 64 bits, is a number above every vocabulary. */
static uint64_t element(const mt_corpus_source *s, int64_t i)
{
    const unsigned char *p = s->data + i * s->bytes;
    uint64_t x = 0;
    for (int b = 0; b < s->bytes; b++) x |= (uint64_t)p[b] << (8 * b);
    if (s->is_signed && s->bytes < 8 && p[s->bytes - 1] & 0x80) x |= UINT64_MAX << (8 * s->bytes);
    return x;
}

/* Where a file of u32, all of them below 2^16, is read as u16, every second one is 0. */
static mt_status check_width(mt_corpus_argument *missing, const mt_corpus_source *s,
                             int64_t vocab_size)
{
    int64_t i = 1;
    while (i < s->count && element(s, i) == 0) i += 2;
    if (i < s->count || s->count % 2 || !s->count) return MT_OK;
    *missing = MT_CORPUS_INPUT;
    return MT_FAIL(MT_ECONFIG,
                   "'%s' would be read as u16, as vocab_size is %lld, but every second of its %lld "
                   "tokens is 0, as if they were u32: what it holds has to be said",
                   s->path, (long long)vocab_size, (long long)s->count);
}

/* Whether the input is what it is said to be, or what its name says. */
static mt_status check_input(mt_corpus_argument *missing, const char *path, mt_corpus_input input,
                             bool guessed, int64_t vocab_size)
{
    bool text = input == MT_INPUT_BYTES;
    mt_path_kind kind = mt_path_kind_find(path);
    bool binary = kind >= MT_KIND_HDF5 && kind != MT_KIND_OTHER;
    if (guessed && text && vocab_size > 256) {
        *missing = MT_CORPUS_INPUT;
        return MT_FAIL(MT_ECONFIG,
                       "'%s' would be read as bytes by its name, but vocab_size is %lld and bytes "
                       "have 256: what it holds has to be said",
                       path, (long long)vocab_size);
    }
    if (!text && vocab_size <= 0) {
        *missing = MT_CORPUS_VOCAB_SIZE;
        return MT_FAIL(MT_ECONFIG,
                       "'%s' holds tokens: how many there are, vocab_size, has to be said", path);
    }
    if (guessed && text && binary) {
        *missing = MT_CORPUS_INPUT_BYTES;
        return MT_FAIL(MT_ECONFIG,
                       "'%s' is %s: its bytes are no text, and are packed only where that is asked "
                       "for",
                       path, mt_path_kind_name(kind));
    }
    return MT_OK;
}

mt_status mt_corpus_source_open(mt_corpus_source *source, mt_corpus_argument *missing,
                                const char *path, mt_corpus_input input, int64_t vocab_size)
{
    static const int element_bytes[MT_INPUT_COUNT] = {
        [MT_INPUT_BYTES] = 1, [MT_INPUT_U16] = 2, [MT_INPUT_U32] = 4
    };
    *source = (mt_corpus_source){ .path = path };
    bool guessed = input == MT_INPUT_AUTO;
    if (guessed) input = guess_input(path, vocab_size);
    source->is_text = input == MT_INPUT_BYTES;
    MT_TRY(check_input(missing, path, input, guessed, vocab_size));
    MT_TRY(mt_file_map_open(&source->map, path));
    mt_status status =
        input == MT_INPUT_NPY ? open_npy(source) : open_raw(source, element_bytes[input]);
    if (status == MT_OK && guessed && input == MT_INPUT_U16)
        status = check_width(missing, source, vocab_size);
    if (status != MT_OK) mt_corpus_source_close(source);
    return status;
}

void mt_corpus_source_close(mt_corpus_source *source)
{
    mt_file_map_close(&source->map);
}

mt_status mt_corpus_source_copy(const mt_corpus_source *source, int64_t first, int64_t count,
                                int64_t vocab_size, mt_dtype dtype, void *to)
{
    unsigned char *out = to;
    int size = (int)mt_dtype_size(dtype);
    for (int64_t i = 0; i < count; i++) {
        uint64_t token = element(source, first + i);
        bool negative = source->is_signed && token >> 63;
        MT_REQUIRE(token < (uint64_t)vocab_size, MT_EDAMAGED,
                   "'%s': token %s%llu at position %lld is not in [0, vocab_size %lld)",
                   source->path, negative ? "-" : "",
                   (unsigned long long)(negative ? -token : token), (long long)(first + i),
                   (long long)vocab_size);
        for (int b = 0; b < size; b++) *out++ = (unsigned char)(token >> (8 * b));
    }
    return MT_OK;
}
