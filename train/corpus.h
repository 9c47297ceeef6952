/* A corpus: the tokens to train or evaluate on, packed into one HDF5 file.
 *
 * /tokens       u8, u16 or u32, contiguous: a window is one read
 * /tokens_xxh3  u64, XXH3-64 of every MiB of /tokens (the last one shorter)
 * /doc_offsets  i64 [documents + 1]: where documents begin; the first is 0, the last the token
 * count attributes of /: format_version, tokenizer, vocab_size, source_sha256, split */
#pragma once

#include "core/dtype.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_CORPUS_TEXT = 80, MT_CORPUS_VERSION = 1 };

typedef struct mt_corpus mt_corpus;

typedef struct mt_corpus_info {
    mt_dtype dtype; /* of the stored tokens */
    int64_t tokens, documents, vocab_size;
    int64_t largest; /* token */
    char tokenizer[MT_CORPUS_TEXT], split[MT_CORPUS_TEXT];
    char sha256[MT_CORPUS_TEXT]; /* of the source files, one after the other; hexadecimal */
} mt_corpus_info;

/* Opens and verifies all of it: structure, checksums, tokens below vocab_size. The file must not be
 * cut short meanwhile. Errors: MT_EIO; MT_EDAMAGED names what is wrong and where. */
mt_status mt_corpus_open(mt_corpus **corpus, const char *path);
/* NULL-safe; sets *corpus to NULL. */
void mt_corpus_close(mt_corpus **corpus);

const mt_corpus_info *mt_corpus_get_info(const mt_corpus *corpus);
/* The attributes alone, of a file that may be large: vocab_size, tokenizer, split, sha256. The
 * tokens are neither counted nor verified. Errors: as mt_corpus_open. */
mt_status mt_corpus_read_info(mt_corpus_info *info, const char *path);
/* Whether every token is a byte of text, by the tokenizer; small tokens of another one are not. */
bool mt_corpus_of_bytes(const mt_corpus_info *info);
/* What a loss of it is per: "byte", or "token" where nobody knows how many bytes one stands for. */
const char *mt_corpus_unit(const mt_corpus_info *info);
/* MT_ECONFIG, naming corpus and token, unless every token is below a model's vocabulary. */
mt_status mt_corpus_check_vocab(const mt_corpus *corpus, int64_t vocab_size);
/* Tokens [first, first + count) as int32. Errors, of it and of windows: MT_EIO; MT_EDAMAGED where
 * the file has changed since it was opened. */
mt_status mt_corpus_tokens(const mt_corpus *corpus, int64_t first, int64_t count, int32_t *tokens);

/* Training windows. The windows of an epoch are S + 1 tokens at stride S from a phase drawn for
 * that epoch, in an order drawn for that epoch; as many in every epoch. Sample i of the run is
 * window i mod W of epoch i / W: a pure function of seed and i. */
int64_t mt_corpus_windows_per_epoch(const mt_corpus *corpus, int64_t sequence);
/* Samples [first, first + batch). tokens, targets: int32 [batch, sequence]. Errors: MT_ECONFIG when
 * the corpus is shorter than a window. */
mt_status mt_corpus_batch(const mt_corpus *corpus, uint64_t seed, int64_t first, int64_t batch,
                          int64_t sequence, int32_t *tokens, int32_t *targets);

/* Validation windows: window i is tokens [i S, i S + S], a shorter tail left out. 0 when there are
 * none. */
int64_t mt_corpus_windows(const mt_corpus *corpus, int64_t sequence);
/* tokens, targets: int32 [sequence] of window i. */
mt_status mt_corpus_window(const mt_corpus *corpus, int64_t sequence, int64_t i, int32_t *tokens,
                           int32_t *targets);

/* What an input file holds. */
typedef enum mt_corpus_input {
    MT_INPUT_AUTO,  /* by name: .npy; .bin (u16 for a vocabulary up to 65536, else u32); else bytes,
                       refused with a vocabulary above 256: tokens may have any name */
    MT_INPUT_BYTES, /* text: every byte is a token, vocabulary 256 */
    MT_INPUT_U16,   /* little-endian tokens */
    MT_INPUT_U32,
    MT_INPUT_NPY, /* a NumPy array of one dimension, of unsigned or signed integers */
    MT_INPUT_COUNT
} mt_corpus_input;

/* "auto", "bytes", "u16", "u32", "npy". */
mt_status mt_corpus_input_parse(mt_corpus_input *input, const char *name);

typedef struct mt_corpus_pack_args {
    const char *const *inputs; /* each is a document, or several under a split rule */
    int64_t input_count;
    mt_corpus_input input;
    int64_t vocab_size;    /* required but for bytes */
    const char *tokenizer; /* recorded; NULL: "bytes" for bytes, else "unknown" */
    const char *output;
    const char *valid_output; /* where held-out tokens go; required exactly when there is a rule */
    const char *split;  /* NULL: everything to output; "documents:N": every N-th input is held out;
                           "tail:N": the last N-th of each input; "kjv": of a Bible, a verse a
                           line, every 20th chapter and the last book */
    const char *sha256; /* expected of the inputs together, in either case; NULL: not checked */
} mt_corpus_pack_args;

/* An argument that would mend what another has made an error. */
typedef enum mt_corpus_argument {
    MT_CORPUS_NO_ARGUMENT,
    MT_CORPUS_INPUT,       /* what the inputs hold */
    MT_CORPUS_INPUT_BYTES, /* that they hold bytes */
    MT_CORPUS_VOCAB_SIZE,
    MT_CORPUS_SPLIT,
    MT_CORPUS_VALID_OUTPUT,
    MT_CORPUS_ARGUMENT_COUNT
} mt_corpus_argument;

typedef struct mt_corpus_pack_result {
    mt_corpus_argument missing; /* after MT_ECONFIG: for callers whose names for them are others */
    int64_t tokens, valid_tokens;
    char sha256[MT_CORPUS_TEXT];
} mt_corpus_pack_result;

/* Packs files into a corpus, or into two. Errors: MT_ECONFIG for arguments; MT_EDAMAGED names file,
 * position and token of an input that breaks a rule; MT_EIO. A file appears only when it is whole.
 */
mt_status mt_corpus_pack(mt_corpus_pack_result *result, const mt_corpus_pack_args *args);

#ifdef __cplusplus
}
#endif
