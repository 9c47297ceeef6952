/* The rules that hold text out for validation. */
#include <stdlib.h>
#include <string.h>

#include "core/array.h"
#include "train/corpus_priv.h"

static mt_status add_piece(mt_corpus_pieces *pieces, int64_t source, int64_t first, int64_t count,
                           bool held_out)
{
    if (!count) return MT_OK;
    MT_TRY(mt_array_reserve(&pieces->items, &pieces->room, pieces->count + 1, sizeof *pieces->items,
                            "documents"));
    pieces->items[pieces->count++] = (mt_corpus_piece){ source, first, count, held_out };
    return MT_OK;
}

/* Every n-th input, counted from 1. */
static mt_status split_documents(mt_corpus_pieces *pieces, const mt_corpus_source *sources,
                                 int64_t count, int64_t n)
{
    for (int64_t i = 0; i < count; i++)
        MT_TRY(add_piece(pieces, i, 0, sources[i].count, n && (i + 1) % n == 0));
    return MT_OK;
}

/* The last 1/n of each input, rounded down. */
static mt_status split_tail(mt_corpus_pieces *pieces, const mt_corpus_source *sources,
                            int64_t count, int64_t n)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t held = sources[i].count / n;
        MT_TRY(add_piece(pieces, i, 0, sources[i].count - held, false));
        MT_TRY(add_piece(pieces, i, sources[i].count - held, held, true));
    }
    return MT_OK;
}

static bool is_digit(unsigned char c)
{
    return c >= '0' && c <= '9';
}

static bool is_letter(unsigned char c)
{
    return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

typedef struct verse {
    const unsigned char *book;
    int64_t book_bytes;
    int64_t chapter;
} verse;

/* "1Cor13:4 Charity ...": an optional digit and letters, the chapter, a colon, the verse, a blank.
 */
static bool parse_verse(verse *v, const unsigned char *p, const unsigned char *end)
{
    v->book = p;
    if (p < end && is_digit(*p)) p++;
    const unsigned char *letters = p;
    while (p < end && is_letter(*p)) p++;
    v->book_bytes = p - v->book;
    if (p == letters) return false;
    const unsigned char *number = p;
    v->chapter = 0;
    for (; p < end && is_digit(*p) && p - number < 9; p++)
        v->chapter = 10 * v->chapter + (*p - '0');
    if (p == number || p == end || *p++ != ':') return false;
    number = p;
    while (p < end && is_digit(*p)) p++;
    return p > number && p < end && *p == ' ';
}

/* The Bible, a verse a line: chapters counted over the whole text in order; every n-th is held out,
 * and the last book. */
static mt_status split_kjv(mt_corpus_pieces *pieces, const mt_corpus_source *sources, int64_t count,
                           int64_t n)
{
    MT_REQUIRE(count == 1 && sources[0].bytes == 1, MT_ECONFIG,
               "split 'kjv' takes one text file, got %lld files", (long long)count);
    const unsigned char *text = sources[0].data, *end = text + sources[0].count, *line = text;
    const unsigned char *start = text; /* of the piece */
    verse v, last = { NULL, 0, 0 };
    int64_t chapter = 0, number = 0;
    bool held = false;
    for (; line < end; number++) {
        const unsigned char *next = memchr(line, '\n', (size_t)(end - line));
        next = next ? next + 1 : end;
        MT_REQUIRE(parse_verse(&v, line, next), MT_EDAMAGED,
                   "'%s', line %lld is not a verse ('Gen1:1 In the beginning ...')",
                   sources[0].path, (long long)number + 1);
        bool same_book = last.book && v.book_bytes == last.book_bytes &&
                         !memcmp(v.book, last.book, (size_t)v.book_bytes);
        chapter += !(same_book && v.chapter == last.chapter);
        bool now = chapter % n == 0 || (v.book_bytes == 3 && !memcmp(v.book, "Rev", 3));
        if (now != held) {
            MT_TRY(add_piece(pieces, 0, start - text, line - start, held));
            start = line;
            held = now;
        }
        last = v;
        line = next;
    }
    return add_piece(pieces, 0, start - text, end - start, held);
}

static const struct {
    const char *name;
    int64_t n; /* when the rule names none; 0: it must */
    mt_status (*split)(mt_corpus_pieces *, const mt_corpus_source *, int64_t, int64_t);
} rules[] = {
    { "documents", 0, split_documents },
    { "tail", 0, split_tail },
    { "kjv", 20, split_kjv },
};

mt_status mt_corpus_split(mt_corpus_pieces *pieces, const char *rule,
                          const mt_corpus_source *sources, int64_t count)
{
    if (!rule) return split_documents(pieces, sources, count, 0);
    size_t length = strcspn(rule, ":");
    for (size_t i = 0; i < sizeof rules / sizeof *rules; i++) {
        if (strlen(rules[i].name) != length || strncmp(rules[i].name, rule, length)) continue;
        char *end = NULL;
        int64_t n = rule[length] ? strtoll(rule + length + 1, &end, 10) : rules[i].n;
        MT_REQUIRE(n >= 2 && (!end || !*end), MT_ECONFIG,
                   "split '%s': '%s:N' takes an N of 2 or more", rule, rules[i].name);
        return rules[i].split(pieces, sources, count, n);
    }
    return MT_FAIL(MT_ECONFIG, "split '%s' is not one of documents:N tail:N kjv", rule);
}
