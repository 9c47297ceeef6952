/* Who owns what: the cut of units into shards. */
#include <stdlib.h>

#include "core/param_priv.h"

void mt_param_store_next_unit(mt_param_store *store)
{
    store->units++;
}

void mt_param_reserve_atom(mt_param *param, int64_t rows)
{
    if (rows > param->atom) param->atom = rows;
}

void mt_param_store_shard(mt_param_store *store, int rank, int world)
{
    store->rank = rank, store->world = world;
}

void mt_param_store_shard_members(mt_param_store *store, int rank, int ranks)
{
    store->member_rank = rank, store->member_ranks = ranks;
}

/* Who a unit is cut among: asked of its first param. */
static void find_ranks(const mt_param_store *s, mt_unit *u)
{
    const mt_param *p = s->params[u->first];
    u->some_members = p->all_members > p->group.members;
    u->rank = u->some_members ? s->member_rank : s->rank;
    u->ranks = u->some_members ? s->member_ranks : s->world;
}

/* The last place in a param, at or before element `at`, where a shard may end. */
static int64_t legal_cut(const mt_param *p, int64_t at)
{
    int64_t m = p->group.m, k = p->group.k, count = mt_param_count(p);
    if (at >= count || count == 0) return count;
    int64_t row = at / k;
    while (row > 0) {
        int64_t inner = row % m / p->atom * p->atom;
        row = row / m * m + inner;
        if (row * k % MT_SHARD_ALIGN == 0) return row * k;
        row--;
    }
    return 0;
}

/* Where rank r's shard of a unit begins, among the elements of its params back to back. */
static int64_t cut_of(const mt_param_store *s, const mt_unit *u, int64_t total, int r)
{
    if (r == u->ranks) return total;
    int64_t target = (int64_t)((double)total * r / u->ranks), begin = 0;
    for (int64_t i = u->first; i < u->first + u->count; i++) {
        int64_t count = mt_param_count(s->params[i]);
        if (target < begin + count) return begin + legal_cut(s->params[i], target - begin);
        begin += count;
    }
    return total;
}

static int64_t overlap(int64_t *first, int64_t begin, int64_t end, int64_t from, int64_t to)
{
    int64_t low = begin > from ? begin : from, high = end < to ? end : to;
    *first = low - begin;
    return high > low ? high - low : 0;
}

/* Elements of unit u in the flat buffers of rank r; of the params before `until`. */
static int64_t segment(const mt_param_store *s, int64_t u, int r, int64_t until, mt_piece *last)
{
    const int64_t *cut = s->cuts + u * (s->world + 1) + r;
    int64_t begin = 0, at = 0, first;
    for (int64_t i = s->unit[u].first; i < s->unit[u].first + s->unit[u].count; i++) {
        int64_t count = mt_param_count(s->params[i]);
        int64_t owned = overlap(&first, begin, begin + count, cut[0], cut[1]);
        if (i == until) {
            *last = (mt_piece){ owned ? first : 0, owned, s->unit[u].offset + at };
            return at;
        }
        begin += count;
        at += mt_round_up(owned, MT_SHARD_ALIGN);
    }
    return at;
}

mt_status mt_param_store_cut(mt_param_store *s)
{
    s->unit = calloc((size_t)s->units, sizeof *s->unit);
    s->cuts = calloc((size_t)s->units * (size_t)(s->world + 1), sizeof *s->cuts);
    MT_REQUIRE(s->unit && s->cuts, MT_ENOMEM, "param store: out of memory");
    for (int64_t i = 0; i < s->count; i++) {
        mt_unit *u = &s->unit[s->params[i]->unit];
        if (!u->count++) u->first = i;
    }
    for (int64_t i = 0; i < s->units; i++) {
        mt_unit *u = &s->unit[i];
        int64_t total = 0;
        if (u->count) find_ranks(s, u);
        for (int64_t j = u->first; j < u->first + u->count; j++)
            total += mt_param_count(s->params[j]);
        for (int r = 0; r <= u->ranks; r++)
            s->cuts[i * (s->world + 1) + r] = cut_of(s, u, total, r);
        u->offset = s->elements;
        for (int r = 0; r < u->ranks; r++) {
            int64_t own = segment(s, i, r, -1, NULL);
            if (own > u->elements) u->elements = own;
        }
        s->elements += u->elements;
    }
    return MT_OK;
}

mt_piece mt_param_piece(const mt_param_store *store, const mt_param *param, int rank)
{
    mt_piece piece = { 0 };
    int64_t u = param->unit, i = store->unit[u].first;
    while (store->params[i] != param) i++;
    segment(store, u, rank, i, &piece);
    return piece;
}

int64_t mt_param_store_units(const mt_param_store *store)
{
    return store->units;
}

mt_unit mt_param_store_unit(const mt_param_store *store, int64_t unit)
{
    return store->unit[unit];
}

int mt_param_store_world(const mt_param_store *store)
{
    return store->world;
}
