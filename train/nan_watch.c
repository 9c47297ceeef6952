/* The counts of the last look beside those of now. */
#include "train/nan_watch.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_NOTES = 8, MOST_MEMBERS = 8, TEXT = 512 };

struct mt_nan_watch {
    mt_precision *precision;
    bool forward;      /* passes that do not train are counted */
    int64_t count;     /* of all members of all weights */
    int64_t *now, *at; /* of this look, of the last; one block */
};

static mt_status read_counts(mt_nan_watch *w)
{
    if (!w->count) return MT_OK;
    return mt_precision_sum_nans(w->precision, w->now);
}

mt_status mt_nan_watch_create(mt_nan_watch **watch, mt_model *model)
{
    *watch = NULL;
    mt_nan_watch *w = calloc(1, sizeof *w);
    MT_REQUIRE(w, MT_ENOMEM, "counts of NaN: out of memory");
    w->precision = mt_model_precision(model);
    w->count = mt_precision_nan_count(w->precision);
    size_t bytes = (size_t)w->count * sizeof *w->now;
    w->now = malloc(2 * bytes + 1);
    w->at = w->now ? w->now + w->count : NULL;
    mt_status status = w->now ? read_counts(w) : MT_FAIL(MT_ENOMEM, "counts of NaN: out of memory");
    if (status == MT_OK) memcpy(w->at, w->now, bytes);
    if (status != MT_OK) mt_nan_watch_destroy(&w);
    *watch = w;
    return status;
}

mt_status mt_nan_watch_create_forward(mt_nan_watch **watch, mt_model *model)
{
    MT_TRY(mt_nan_watch_create(watch, model));
    (*watch)->forward = true;
    mt_precision_count_all((*watch)->precision, true);
    return MT_OK;
}

void mt_nan_watch_destroy(mt_nan_watch **watch)
{
    if (!*watch) return;
    if ((*watch)->forward) mt_precision_count_all((*watch)->precision, false);
    free((*watch)->now);
    free(*watch);
    *watch = NULL;
}

/* NaNs since the last look in the n counts from `first` on. */
static int64_t since(const mt_nan_watch *w, int64_t first, int64_t n)
{
    int64_t sum = 0;
    for (int64_t i = first; i < first + n; i++) sum += w->now[i] - w->at[i];
    return sum;
}

static void tell(const mt_nan_watch *w, int64_t step, int64_t first, int64_t n, const char *layer,
                 const char *operand, void (*note)(void *, const char *), void *context)
{
    char text[TEXT];
    int told = 0,
        used = snprintf(text, sizeof text,
                        "step %" PRId64 ": %" PRId64 " NaN met in quantizing %s of %.200s", step,
                        since(w, first, n), operand, layer);
    for (int64_t i = 0; n > 1 && i < n; i++) {
        if (!since(w, first + i, 1) || told++ >= MOST_MEMBERS) continue;
        used += snprintf(text + used, sizeof text - (size_t)used, "%s%" PRId64,
                         told == 1 ? ", members " : " ", i);
    }
    if (told > MOST_MEMBERS) snprintf(text + used, sizeof text - (size_t)used, " ...");
    note(context, text);
}

mt_status mt_nan_watch_look(mt_nan_watch *w, int64_t step, int64_t *total,
                            void (*note)(void *context, const char *text), void *context)
{
    const mt_precision *p = w->precision;
    int64_t count = w->count, n, others = 0;
    const char *layer, *operand;
    MT_TRY(read_counts(w));
    *total = 0;
    for (int64_t i = 0; i < count; i++) *total += w->now[i];
    for (int64_t at = 0, notes = 0; at < count; at += n) {
        layer = mt_precision_nans_of(p, at, &operand, &n);
        if (!since(w, at, n)) continue;
        if (notes++ < MOST_NOTES)
            tell(w, step, at, n, layer, operand, note, context);
        else
            others++;
    }
    if (others) {
        char text[TEXT];
        snprintf(text, sizeof text, "step %" PRId64 ": NaN in %" PRId64 " further operands", step,
                 others);
        note(context, text);
    }
    memcpy(w->at, w->now, (size_t)count * sizeof *w->at);
    return MT_OK;
}

mt_status mt_nan_watch_check(mt_nan_watch *w)
{
    int64_t n;
    MT_TRY(read_counts(w));
    if (!since(w, 0, w->count)) return MT_OK;
    MT_TRY(mt_precision_set_nans(w->precision, w->at));
    for (int64_t at = 0; at < w->count; at += n) {
        const char *operand, *layer = mt_precision_nans_of(w->precision, at, &operand, &n);
        if (since(w, at, n))
            return MT_FAIL(MT_ENUMERIC,
                           "%" PRId64 " NaN met in quantizing %s of %.200s: what is computed "
                           "from them means nothing",
                           since(w, at, n), operand, layer);
    }
    return MT_FAIL(MT_EINTERNAL, "NaN of no layer");
}
