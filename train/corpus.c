/* Opening a corpus, and its windows. */
#include "train/corpus.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include "core/rng.h"
#include "train/fileio.h"
#include "train/h5.h"
#include "train/kind.h"

enum {
    HASHED_BYTES = 1 << 20,
    STREAM_PHASE = 0x70686173, /* streams of mt_rng: "phas", "shuf" */
    STREAM_SHUFFLE = 0x73687566,
    FEISTEL_ROUNDS = 8,
    READ_TOKENS = 2048 /* at once */
};

struct mt_corpus {
    mt_corpus_info info;
    char path[MT_PATH_BYTES];
    int fd;         /* -1: none */
    int64_t offset; /* of the tokens in it */
    void *map;      /* while it is verified: whole pages around the tokens */
    size_t map_bytes;
    const unsigned char *tokens; /* in the map; not necessarily aligned */
};

/* ---- reading tokens ----------------------------------------------------------------------------
 */

static inline uint32_t token_at(const unsigned char *p, mt_dtype dtype, int64_t i)
{
    if (dtype == MT_U8) return p[i];
    if (dtype == MT_U16) return (uint32_t)p[2 * i] | (uint32_t)p[2 * i + 1] << 8;
    p += 4 * i;
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Read, not taken from a map: a file that is cut short, or a disk that fails, while a run goes on
 * is an error then, and no signal that ends the process without a word. */
static mt_status read_bytes(const mt_corpus *c, unsigned char *to, int64_t at, int64_t bytes)
{
    while (bytes) {
        ssize_t n = pread(c->fd, to, (size_t)bytes, (off_t)(c->offset + at));
        if (n < 0 && errno == EINTR) continue;
        MT_REQUIRE(n >= 0, MT_EIO, "corpus '%s': %s", c->path, strerror(errno));
        MT_REQUIRE(n > 0, MT_EDAMAGED,
                   "corpus '%s': no byte %lld of its tokens: the file was cut short while it was "
                   "open",
                   c->path, (long long)at);
        to += n, at += n, bytes -= n;
    }
    return MT_OK;
}

/* The range was checked by the caller; tokens are checked again, since the file may have changed
 * since it was opened. */
static mt_status copy_tokens(const mt_corpus *c, int64_t first, int64_t count, int32_t *to)
{
    unsigned char bytes[READ_TOKENS * sizeof(uint32_t)];
    int64_t size = (int64_t)mt_dtype_size(c->info.dtype);
    uint32_t largest = 0;
    for (int64_t at = 0; at < count; at += READ_TOKENS) {
        int64_t n = count - at < READ_TOKENS ? count - at : READ_TOKENS;
        MT_TRY(read_bytes(c, bytes, (first + at) * size, n * size));
        for (int64_t i = 0; i < n; i++) {
            uint32_t token = token_at(bytes, c->info.dtype, i);
            largest = token > largest ? token : largest;
            to[at + i] = (int32_t)token;
        }
    }
    MT_REQUIRE(largest <= (uint64_t)c->info.largest, MT_EDAMAGED,
               "corpus '%s': token %u near position %lld, where %lld was the largest: the file "
               "changed while it was open",
               c->path, largest, (long long)first, (long long)c->info.largest);
    return MT_OK;
}

mt_status mt_corpus_tokens(const mt_corpus *corpus, int64_t first, int64_t count, int32_t *tokens)
{
    MT_REQUIRE(first >= 0 && count >= 0 && first <= corpus->info.tokens - count, MT_EINVAL,
               "corpus '%s': tokens [%lld, +%lld) are not within its %lld", corpus->path,
               (long long)first, (long long)count, (long long)corpus->info.tokens);
    return copy_tokens(corpus, first, count, tokens);
}

/* ---- opening -----------------------------------------------------------------------------------
 */

static mt_status map_tokens(mt_corpus *c, mt_h5 *file)
{
    mt_h5_info info;
    MT_TRY(mt_h5_dataset_info(file, "/tokens", &info));
    bool known = info.type == MT_U8 || info.type == MT_U16 || info.type == MT_U32;
    MT_REQUIRE(known && info.ndim == 1 && info.little_endian && info.offset >= 0, MT_EDAMAGED,
               "corpus '%s': /tokens must be one-dimensional, contiguous, little-endian u8, u16 or "
               "u32, and not empty",
               c->path);
    c->info.dtype = (mt_dtype)info.type;
    c->info.tokens = info.count;
    int64_t before = info.offset % sysconf(_SC_PAGESIZE);
    c->map_bytes = (size_t)(before + info.bytes);
    c->map = mmap(NULL, c->map_bytes, PROT_READ, MAP_PRIVATE, mt_h5_descriptor(file),
                  (off_t)(info.offset - before));
    if (c->map == MAP_FAILED) {
        c->map = NULL;
        return MT_FAIL(MT_EIO, "cannot map the tokens of corpus '%s' (%lld bytes): %s", c->path,
                       (long long)info.bytes, strerror(errno));
    }
    c->tokens = (const unsigned char *)c->map + before;
    c->offset = info.offset;
    c->fd = fcntl(mt_h5_descriptor(file), F_DUPFD_CLOEXEC, 0);
    MT_REQUIRE(c->fd >= 0, MT_EIO, "corpus '%s': %s", c->path, strerror(errno));
    return MT_OK;
}

static void unmap_tokens(mt_corpus *c)
{
    if (c->map) munmap(c->map, c->map_bytes);
    c->map = NULL, c->tokens = NULL;
}

static mt_status check_hashes(const mt_corpus *c, mt_h5 *file)
{
    mt_status status = MT_OK;
    mt_h5_info info;
    int64_t bytes = c->info.tokens * (int64_t)mt_dtype_size(c->info.dtype);
    int64_t pieces = (bytes + HASHED_BYTES - 1) / HASHED_BYTES;
    MT_TRY(mt_h5_expect(file, "/tokens_xxh3", MT_H5_U64, 1, &pieces, &info));
    uint64_t *want = malloc((size_t)info.bytes);
    MT_REQUIRE(want, MT_ENOMEM, "no memory for %lld checksums", (long long)pieces);
    MT_TRY_CLEANUP(mt_h5_read(file, "/tokens_xxh3", &info, want));
    for (int64_t i = 0; i < pieces; i++) {
        int64_t at = i * HASHED_BYTES, n = bytes - at < HASHED_BYTES ? bytes - at : HASHED_BYTES;
        if (XXH3_64bits(c->tokens + at, (size_t)n) == want[i]) continue;
        status = MT_FAIL(MT_EDAMAGED,
                         "corpus '%s': bytes %lld to %lld of /tokens do not match their checksum",
                         c->path, (long long)at, (long long)(at + n));
        break;
    }
cleanup:
    free(want);
    return status;
}

/* Where documents begin, ascending from 0 to the end of the tokens. */
static mt_status check_offsets(const mt_corpus *c, const int64_t *at)
{
    const int64_t n = c->info.documents;
    MT_REQUIRE(at[0] == 0 && at[n] == c->info.tokens, MT_EDAMAGED,
               "corpus '%s': /doc_offsets runs from %lld to %lld, must be 0 to %lld", c->path,
               (long long)at[0], (long long)at[n], (long long)c->info.tokens);
    for (int64_t i = 0; i < n; i++)
        MT_REQUIRE(at[i] < at[i + 1], MT_EDAMAGED,
                   "corpus '%s': /doc_offsets[%lld] = %lld is not below the next, %lld", c->path,
                   (long long)i, (long long)at[i], (long long)at[i + 1]);
    return MT_OK;
}

static mt_status check_documents(mt_corpus *c, mt_h5 *file)
{
    mt_h5_info info;
    int64_t any = -1;
    MT_TRY(mt_h5_expect(file, "/doc_offsets", MT_I64, 1, &any, &info));
    MT_REQUIRE(info.count >= 2 && info.count <= c->info.tokens + 1, MT_EDAMAGED,
               "corpus '%s': /doc_offsets has %lld entries for %lld tokens", c->path,
               (long long)info.count, (long long)c->info.tokens);
    c->info.documents = info.count - 1;
    int64_t *offsets = malloc((size_t)info.bytes);
    MT_REQUIRE(offsets, MT_ENOMEM, "no memory for %lld document offsets", (long long)info.count);
    mt_status status = mt_h5_read(file, "/doc_offsets", &info, offsets);
    if (status == MT_OK) status = check_offsets(c, offsets);
    free(offsets);
    return status;
}

static mt_status check_tokens(mt_corpus *c)
{
    uint32_t vocab = (uint32_t)c->info.vocab_size, largest = 0;
    for (int64_t i = 0; i < c->info.tokens; i++) {
        uint32_t token = token_at(c->tokens, c->info.dtype, i);
        MT_REQUIRE(token < vocab, MT_EDAMAGED,
                   "corpus '%s': token %u at position %lld is not below vocab_size %u", c->path,
                   token, (long long)i, vocab);
        largest = token > largest ? token : largest;
    }
    c->info.largest = largest;
    return MT_OK;
}

static mt_status read_text(char to[MT_CORPUS_TEXT], mt_h5 *file, const char *name)
{
    char *text;
    MT_TRY(mt_h5_get_string(file, "/", name, &text));
    size_t n = strlen(text);
    mt_status status = MT_OK;
    if (n < MT_CORPUS_TEXT)
        memcpy(to, text, n + 1);
    else
        status = MT_FAIL(MT_EDAMAGED, "corpus '%s': attribute '%s' has %zu bytes, at most %d",
                         mt_h5_path(file), name, n, MT_CORPUS_TEXT - 1);
    free(text);
    return status;
}

static mt_status read_attributes(mt_corpus *c, mt_h5 *file)
{
    int64_t version;
    MT_TRY(mt_h5_get_i64(file, "/", "format_version", &version));
    MT_REQUIRE(version == MT_CORPUS_VERSION, MT_EDAMAGED,
               "corpus '%s': format_version %lld, this program reads %d", c->path,
               (long long)version, MT_CORPUS_VERSION);
    MT_TRY(mt_h5_get_i64(file, "/", "vocab_size", &c->info.vocab_size));
    MT_REQUIRE(c->info.vocab_size >= 1 && c->info.vocab_size <= INT32_MAX, MT_EDAMAGED,
               "corpus '%s': vocab_size %lld is not in [1, 2^31)", c->path,
               (long long)c->info.vocab_size);
    MT_TRY(read_text(c->info.tokenizer, file, "tokenizer"));
    MT_TRY(read_text(c->info.split, file, "split"));
    return read_text(c->info.sha256, file, "source_sha256");
}

/* Something else, most likely a text, is not a damaged corpus. */
static mt_status open_file(mt_h5 **file, const char *path)
{
    static const char what[] = "a corpus: `mixtape data pack` makes one of text or tokens";
    bool tokens = false;
    MT_TRY(mt_h5_open_given(file, path, what));
    mt_status status = mt_h5_exists(*file, "tokens", &tokens);
    if (status == MT_OK && !tokens)
        status = MT_FAIL(MT_EIO, "'%s' is %s, not %s", path, mt_path_kind_of(path), what);
    if (status != MT_OK) mt_h5_close(file);
    return status;
}

mt_status mt_corpus_open(mt_corpus **corpus, const char *path)
{
    mt_status status;
    mt_h5 *file = NULL;
    mt_corpus *c = calloc(1, sizeof *c);
    *corpus = NULL;
    MT_REQUIRE(c, MT_ENOMEM, "no memory to open corpus '%s'", path);
    c->fd = -1;
    MT_TRY_CLEANUP(mt_path_format(c->path, "%s", path));
    MT_TRY_CLEANUP(open_file(&file, path));
    MT_TRY_CLEANUP(read_attributes(c, file));
    MT_TRY_CLEANUP(map_tokens(c, file));
    MT_TRY_CLEANUP(check_hashes(c, file));
    MT_TRY_CLEANUP(check_documents(c, file));
    MT_TRY_CLEANUP(check_tokens(c));
cleanup:
    unmap_tokens(c);
    mt_h5_close(&file);
    *corpus = c;
    if (status != MT_OK) mt_corpus_close(corpus);
    return status;
}

mt_status mt_corpus_read_info(mt_corpus_info *info, const char *path)
{
    mt_corpus c = { .map = NULL };
    mt_h5 *file;
    MT_TRY(mt_path_format(c.path, "%s", path));
    MT_TRY(open_file(&file, path));
    mt_status status = read_attributes(&c, file);
    mt_h5_close(&file);
    *info = c.info;
    return status;
}

bool mt_corpus_of_bytes(const mt_corpus_info *info)
{
    return !strcmp(info->tokenizer, "bytes");
}

const char *mt_corpus_unit(const mt_corpus_info *info)
{
    return mt_corpus_of_bytes(info) ? "byte" : "token";
}

void mt_corpus_close(mt_corpus **corpus)
{
    if (!*corpus) return;
    if ((*corpus)->fd >= 0) close((*corpus)->fd);
    free(*corpus);
    *corpus = NULL;
}

const mt_corpus_info *mt_corpus_get_info(const mt_corpus *corpus)
{
    return &corpus->info;
}

mt_status mt_corpus_check_vocab(const mt_corpus *corpus, int64_t vocab_size)
{
    MT_REQUIRE(
        corpus->info.largest < vocab_size, MT_ECONFIG,
        "corpus '%.500s' holds token %lld, the model's vocab_size is %lld: it must be above every "
        "token there, %lld or more (the corpus's own vocabulary is %lld)",
        corpus->path, (long long)corpus->info.largest, (long long)vocab_size,
        (long long)corpus->info.largest + 1, (long long)corpus->info.vocab_size);
    return MT_OK;
}

/* ---- windows -----------------------------------------------------------------------------------
 */

static mt_status check_window(const mt_corpus *c, int64_t sequence)
{
    MT_REQUIRE(sequence >= 1, MT_EINVAL, "sequence length %lld is not positive",
               (long long)sequence);
    MT_REQUIRE(c->info.tokens - 1 >= sequence, MT_ECONFIG,
               "corpus '%s' has %lld tokens, fewer than one window of sequence_length + 1 = %lld",
               c->path, (long long)c->info.tokens, (long long)sequence + 1);
    return MT_OK;
}

static mt_status copy_window(const mt_corpus *c, int64_t first, int64_t sequence, int32_t *tokens,
                             int32_t *targets)
{
    MT_TRY(copy_tokens(c, first, sequence, tokens));
    return copy_tokens(c, first + 1, sequence, targets);
}

int64_t mt_corpus_windows(const mt_corpus *corpus, int64_t sequence)
{
    return sequence < 1 ? 0 : (corpus->info.tokens - 1) / sequence;
}

mt_status mt_corpus_window(const mt_corpus *corpus, int64_t sequence, int64_t i, int32_t *tokens,
                           int32_t *targets)
{
    MT_TRY(check_window(corpus, sequence));
    int64_t windows = mt_corpus_windows(corpus, sequence);
    MT_REQUIRE(i >= 0 && i < windows, MT_EINVAL, "corpus '%s' has %lld windows, not window %lld",
               corpus->path, (long long)windows, (long long)i);
    return copy_window(corpus, i * sequence, sequence, tokens, targets);
}

/* One window fewer than fit where there are two or more, so that every epoch has as many for any
 * phase. */
int64_t mt_corpus_windows_per_epoch(const mt_corpus *corpus, int64_t sequence)
{
    int64_t fit = mt_corpus_windows(corpus, sequence);
    return fit > 1 ? fit - 1 : fit;
}

/* Keyed bijection of [0, count): a Feistel network on the next even number of bits, walked until it
 * lands inside. */
static uint64_t shuffled(uint64_t seed, uint64_t epoch, uint64_t i, uint64_t count)
{
    int half = 1;
    while (half < 32 && (uint64_t)1 << (2 * half) < count) half++;
    const uint64_t mask = ((uint64_t)1 << half) - 1;
    const uint32_t key[2] = { (uint32_t)seed, (uint32_t)(seed >> 32) };
    do {
        uint64_t left = i >> half, right = i & mask;
        for (uint32_t round = 0; round < FEISTEL_ROUNDS; round++) {
            const uint32_t counter[4] = { (uint32_t)right, (uint32_t)epoch, STREAM_SHUFFLE ^ round,
                                          (uint32_t)(epoch >> 32) };
            uint32_t out[4];
            mt_philox(out, counter, key);
            uint64_t next = (left ^ out[0]) & mask;
            left = right, right = next;
        }
        i = left << half | right;
    } while (i >= count);
    return i;
}

mt_status mt_corpus_batch(const mt_corpus *corpus, uint64_t seed, int64_t first, int64_t batch,
                          int64_t sequence, int32_t *tokens, int32_t *targets)
{
    MT_TRY(check_window(corpus, sequence));
    MT_REQUIRE(first >= 0 && batch >= 0 && first <= INT64_MAX - batch, MT_EINVAL,
               "%lld samples from sample %lld on cannot be counted", (long long)batch,
               (long long)first);
    int64_t windows = mt_corpus_windows_per_epoch(corpus, sequence);
    uint64_t phases = (uint64_t)(corpus->info.tokens - windows * sequence); /* 0 to n - 1 - W S */
    for (int64_t b = 0; b < batch; b++) {
        int64_t sample = first + b, epoch = sample / windows;
        uint64_t phase = mt_rng_below(seed, STREAM_PHASE, (uint64_t)epoch, phases);
        uint64_t window =
            shuffled(seed, (uint64_t)epoch, (uint64_t)(sample % windows), (uint64_t)windows);
        MT_TRY(copy_window(corpus, (int64_t)phase + (int64_t)window * sequence, sequence,
                           tokens + b * sequence, targets + b * sequence));
    }
    return MT_OK;
}
