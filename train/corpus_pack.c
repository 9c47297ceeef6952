/* Packing files into corpora. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <xxhash.h>

#include "train/corpus_priv.h"
#include "train/h5.h"
#include "train/sha256.h"

enum { HASHED_BYTES = 1 << 20 };

/* One corpus being written: tokens pass through a buffer of the size that is hashed. */
typedef struct packer {
    mt_h5 *file;
    mt_dtype dtype;
    int64_t vocab_size, total, done; /* tokens */
    int64_t documents;
    unsigned char *buffer;
    int64_t used; /* tokens in the buffer */
    uint64_t *hashes;
    int64_t *offsets;
} packer;

static mt_status packer_flush(packer *p)
{
    int64_t size = (int64_t)mt_dtype_size(p->dtype);
    int64_t start = p->done - p->used, piece = start * size / HASHED_BYTES;
    if (!p->used) return MT_OK;
    p->hashes[piece] = XXH3_64bits(p->buffer, (size_t)(p->used * size));
    MT_TRY(mt_h5_write_slab(p->file, "/tokens", &start, &p->used, p->buffer));
    p->used = 0;
    return MT_OK;
}

static mt_status packer_add(packer *p, const mt_corpus_source *source, const mt_corpus_piece *piece)
{
    int64_t size = (int64_t)mt_dtype_size(p->dtype), room = HASHED_BYTES / size;
    p->offsets[p->documents++] = p->done;
    for (int64_t at = 0; at < piece->count;) {
        int64_t n = piece->count - at;
        if (n > room - p->used) n = room - p->used;
        MT_TRY(mt_corpus_source_copy(source, piece->first + at, n, p->vocab_size, p->dtype,
                                     p->buffer + p->used * size));
        at += n, p->used += n, p->done += n;
        if (p->used == room) MT_TRY(packer_flush(p));
    }
    return MT_OK;
}

static mt_status packer_begin(packer *p, const char *path, bool held_out,
                              const mt_corpus_pieces *pieces)
{
    int64_t documents = 0;
    for (int64_t i = 0; i < pieces->count; i++)
        if (pieces->items[i].held_out == held_out) documents++, p->total += pieces->items[i].count;
    MT_REQUIRE(p->total > 0, MT_ECONFIG,
               "corpus '%s' would hold no tokens: the inputs, or the split rule, leave none to it",
               path);
    int64_t bytes = p->total * (int64_t)mt_dtype_size(p->dtype);
    p->buffer = malloc(HASHED_BYTES);
    p->hashes = malloc((size_t)((bytes + HASHED_BYTES - 1) / HASHED_BYTES) * sizeof *p->hashes);
    p->offsets = malloc((size_t)(documents + 1) * sizeof *p->offsets);
    MT_REQUIRE(p->buffer && p->hashes && p->offsets, MT_ENOMEM, "no memory to pack '%s'", path);
    MT_TRY(mt_h5_create(&p->file, path));
    return mt_h5_dataset_create(p->file, "/tokens", p->dtype, 1, &p->total, MT_H5_CONTIGUOUS);
}

static mt_status packer_finish(packer *p, const mt_corpus_pack_args *args, const char *tokenizer,
                               const char *sha256, bool held_out)
{
    char split[MT_CORPUS_TEXT];
    int n = snprintf(split, sizeof split, "%s%s%s", args->split ? args->split : "all",
                     args->split ? " " : "",
                     !args->split ? ""
                     : held_out   ? "valid"
                                  : "train");
    MT_REQUIRE(n < MT_CORPUS_TEXT, MT_ECONFIG, "split '%s' is too long", args->split);
    int64_t bytes = p->total * (int64_t)mt_dtype_size(p->dtype);
    int64_t pieces = (bytes + HASHED_BYTES - 1) / HASHED_BYTES, offsets = p->documents + 1;
    MT_TRY(packer_flush(p));
    p->offsets[p->documents] = p->done;
    MT_TRY(mt_h5_write(p->file, "/tokens_xxh3", MT_H5_U64, 1, &pieces, p->hashes));
    MT_TRY(mt_h5_write(p->file, "/doc_offsets", MT_I64, 1, &offsets, p->offsets));
    MT_TRY(mt_h5_set_i64(p->file, "/", "format_version", MT_CORPUS_VERSION));
    MT_TRY(mt_h5_set_i64(p->file, "/", "vocab_size", p->vocab_size));
    MT_TRY(mt_h5_set_string(p->file, "/", "tokenizer", tokenizer));
    MT_TRY(mt_h5_set_string(p->file, "/", "source_sha256", sha256));
    return mt_h5_set_string(p->file, "/", "split", split);
}

static void packer_end(packer *p)
{
    mt_h5_close(&p->file);
    free(p->buffer);
    free(p->hashes);
    free(p->offsets);
}

/* A split rule and a file for what it holds out come together. */
static mt_status check_split(mt_corpus_argument *missing, const mt_corpus_pack_args *args)
{
    if (args->split && !args->valid_output) {
        *missing = MT_CORPUS_VALID_OUTPUT;
        return MT_FAIL(MT_ECONFIG, "split '%s' needs a file for the held-out tokens", args->split);
    }
    if (!args->split && args->valid_output) {
        *missing = MT_CORPUS_SPLIT;
        return MT_FAIL(MT_ECONFIG, "'%s' for held-out tokens needs a split rule",
                       args->valid_output);
    }
    return MT_OK;
}

static mt_status check_args(mt_corpus_argument *missing, const mt_corpus_pack_args *args)
{
    MT_REQUIRE(args->output, MT_ECONFIG, "no output file was given");
    MT_TRY(check_split(missing, args));
    MT_REQUIRE(!args->valid_output || strcmp(args->output, args->valid_output), MT_ECONFIG,
               "training and held-out tokens cannot both go to '%s'", args->output);
    MT_REQUIRE(args->vocab_size >= 0 && args->vocab_size <= INT32_MAX, MT_ECONFIG,
               "vocab_size %lld is not in [1, 2^31)", (long long)args->vocab_size);
    MT_REQUIRE(!args->tokenizer || strlen(args->tokenizer) < MT_CORPUS_TEXT, MT_ECONFIG,
               "tokenizer '%s' has more than %d bytes", args->tokenizer, MT_CORPUS_TEXT - 1);
    MT_REQUIRE(!args->sha256 || (strlen(args->sha256) == 64 &&
                                 strspn(args->sha256, "0123456789abcdefABCDEF") == 64),
               MT_ECONFIG, "sha256 '%s' is not 64 hexadecimal digits", args->sha256);
    for (int64_t i = 0; i < args->input_count; i++) {
        MT_TRY(mt_file_check_result(args->output, args->inputs[i]));
        if (args->valid_output) MT_TRY(mt_file_check_result(args->valid_output, args->inputs[i]));
    }
    return MT_OK;
}

static mt_status hash_sources(char hex[MT_CORPUS_TEXT], const mt_corpus_source *sources,
                              const mt_corpus_pack_args *args)
{
    mt_sha256 sha;
    mt_sha256_begin(&sha);
    for (int64_t i = 0; i < args->input_count; i++)
        mt_sha256_add(&sha, sources[i].map.data, sources[i].map.bytes);
    mt_sha256_end(&sha, hex);
    MT_REQUIRE(!args->sha256 || !strcasecmp(args->sha256, hex), MT_EDAMAGED,
               "'%s'%s has sha256 %s, must be %s", args->inputs[0],
               args->input_count > 1 ? " and the other files together" : "", hex, args->sha256);
    return MT_OK;
}

/* Begins one or two files; two may be one, in two spellings of its name. */
static mt_status begin(packer out[2], const char *const paths[2], const mt_corpus_pieces *pieces)
{
    char first[MT_PATH_BYTES], second[MT_PATH_BYTES];
    MT_TRY(packer_begin(&out[0], paths[0], false, pieces));
    if (!paths[1]) return MT_OK;
    MT_TRY(mt_path_format(first, "%s.tmp", paths[0]));
    MT_TRY(mt_path_format(second, "%s.tmp", paths[1]));
    MT_REQUIRE(!mt_path_same(first, second), MT_ECONFIG,
               "training and held-out tokens cannot both go to '%s', which is '%s'", paths[0],
               paths[1]);
    return packer_begin(&out[1], paths[1], true, pieces);
}

/* Writes one or two corpora from opened inputs. */
static mt_status pack(mt_corpus_pack_result *result, const mt_corpus_pack_args *args,
                      const mt_corpus_source *sources, const mt_corpus_pieces *pieces)
{
    bool bytes = true;
    for (int64_t i = 0; i < args->input_count; i++) bytes &= sources[i].is_text;
    int64_t vocab = args->vocab_size ? args->vocab_size : 256;
    mt_dtype dtype = vocab <= 256 ? MT_U8 : vocab <= 65536 ? MT_U16 : MT_U32;
    packer out[2] = { { .dtype = dtype, .vocab_size = vocab },
                      { .dtype = dtype, .vocab_size = vocab } };
    const char *paths[2] = { args->output, args->valid_output };
    const char *tokenizer = args->tokenizer ? args->tokenizer : bytes ? "bytes" : "unknown";
    mt_status status;
    MT_REQUIRE(bytes || strcmp(tokenizer, "bytes") != 0 || vocab <= 256, MT_ECONFIG,
               "tokenizer 'bytes' has 256 tokens, vocab_size is %lld", (long long)vocab);
    MT_REQUIRE(!bytes || strcmp(tokenizer, "bytes") == 0, MT_ECONFIG,
               "text becomes bytes, its tokenizer is 'bytes', not '%s'", tokenizer);
    MT_TRY_CLEANUP(hash_sources(result->sha256, sources, args));
    MT_TRY_CLEANUP(begin(out, paths, pieces));
    for (int64_t i = 0; i < pieces->count; i++)
        MT_TRY_CLEANUP(packer_add(&out[pieces->items[i].held_out],
                                  &sources[pieces->items[i].source], &pieces->items[i]));
    for (int k = 0; k < 2 && paths[k]; k++)
        MT_TRY_CLEANUP(packer_finish(&out[k], args, tokenizer, result->sha256, k == 1));
    for (int k = 0; k < 2 && paths[k]; k++) MT_TRY_CLEANUP(mt_h5_commit(&out[k].file));
    result->tokens = out[0].total;
    result->valid_tokens = out[1].total;
cleanup:
    for (int k = 0; k < 2; k++) packer_end(&out[k]);
    return status;
}

mt_status mt_corpus_pack(mt_corpus_pack_result *result, const mt_corpus_pack_args *args)
{
    const int64_t count = args->input_count;
    *result = (mt_corpus_pack_result){ .missing = MT_CORPUS_NO_ARGUMENT };
    MT_REQUIRE(count > 0, MT_ECONFIG, "no files to pack");
    MT_TRY(check_args(&result->missing, args));
    mt_status status = MT_OK;
    mt_corpus_pieces pieces = { NULL, 0, 0 };
    int64_t opened = 0;
    mt_corpus_source *sources = calloc((size_t)count, sizeof *sources);
    MT_REQUIRE(sources, MT_ENOMEM, "no memory for %lld files", (long long)count);
    for (; opened < count; opened++)
        MT_TRY_CLEANUP(mt_corpus_source_open(&sources[opened], &result->missing,
                                             args->inputs[opened], args->input, args->vocab_size));
    MT_TRY_CLEANUP(mt_corpus_split(&pieces, args->split, sources, count));
    MT_TRY_CLEANUP(pack(result, args, sources, &pieces));
cleanup:
    while (opened) mt_corpus_source_close(&sources[--opened]);
    free(sources);
    free(pieces.items);
    return status;
}
