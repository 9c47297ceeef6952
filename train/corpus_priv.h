/* Input files of a corpus and the rules that split them. Private to corpus_*.c. */
#pragma once

#include "train/corpus.h"
#include "train/fileio.h"

/* An input file as an array of tokens. */
typedef struct mt_corpus_source {
    const char *path;
    mt_file_map map;
    const unsigned char *data;
    int64_t count;
    int bytes; /* of an element: 1, 2, 4, 8 */
    bool is_signed;
    bool is_text; /* whose bytes are the tokens */
} mt_corpus_source;

/* Maps a file and finds its elements. On failure nothing is held; an argument that would have
 * avoided it is *missing, which stays as it is otherwise. */
mt_status mt_corpus_source_open(mt_corpus_source *source, mt_corpus_argument *missing,
                                const char *path, mt_corpus_input input, int64_t vocab_size);
void mt_corpus_source_close(mt_corpus_source *source);
/* Elements [first, first + count) as little-endian tokens of dtype, each checked against the
 * vocabulary. */
mt_status mt_corpus_source_copy(const mt_corpus_source *source, int64_t first, int64_t count,
                                int64_t vocab_size, mt_dtype dtype, void *to);

/* A piece of one input: a document of one of the two corpora. */
typedef struct mt_corpus_piece {
    int64_t source, first, count;
    bool held_out;
} mt_corpus_piece;

typedef struct mt_corpus_pieces {
    mt_corpus_piece *items;
    int64_t count, room;
} mt_corpus_pieces;

/* Cuts the inputs by a rule ("tail:20"; NULL: none held out). Errors: MT_ECONFIG for the rule. The
 * caller frees pieces->items, also on failure. */
mt_status mt_corpus_split(mt_corpus_pieces *pieces, const char *rule,
                          const mt_corpus_source *sources, int64_t count);
