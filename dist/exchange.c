/* The exchange of rows between ranks that share experts. */
#include "dist/exchange.h"

#include <math.h>
#include <stdlib.h>

enum { LINE_MULTIPLE = 8 };       /* lines of a block: bytes are a multiple of 16 in every dtype */
static const double spare = 1.25; /* room beyond what was missing */

struct mt_exchange {
    mt_device *device;
    mt_comm *comm;
    mt_exchange_options options;
    mt_stream stream; /* of sending, beside the passes' */
    mt_event packed, arrived;
    void *most;     /* device int64 */
    int64_t tokens; /* of the passes since the last settlement, at most, */
    int64_t room;   /* and the rows that their blocks had room for */
    uint64_t epoch;
    int64_t bytes; /* of blocks for other ranks */
    bool any;      /* blocks have room for any routing, whatever the load */
    bool plain;    /* no rows are coded */
};

static mt_status build(mt_exchange *x)
{
    MT_TRY(mt_stream_create(&x->stream, x->device));
    MT_TRY(mt_event_create(&x->packed, x->device));
    MT_TRY(mt_event_create(&x->arrived, x->device));
    MT_TRY(mt_device_alloc(x->device, &x->most, sizeof(int64_t), MT_MEMORY_STATE));
    return mt_device_zero(x->device, x->most, sizeof(int64_t));
}

mt_status mt_exchange_create(mt_exchange **exchange, mt_device *device, mt_comm *comm,
                             const mt_exchange_options *options)
{
    *exchange = NULL;
    int ranks = mt_comm_size(comm);
    MT_REQUIRE(options->experts > 0 && options->experts % ranks == 0, MT_ECONFIG,
               "parallel.expert is %d, must divide the number of experts, %lld", ranks,
               (long long)options->experts);
    MT_REQUIRE(options->load >= 0, MT_ECONFIG,
               "parallel.expert_capacity is %g, must not be negative", options->load);
    mt_exchange *x = calloc(1, sizeof *x);
    MT_REQUIRE(x, MT_ENOMEM, "exchange: out of memory");
    x->device = device, x->comm = comm, x->options = *options;
    mt_status status = build(x);
    if (status != MT_OK) {
        mt_exchange_destroy(&x);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    *exchange = x;
    return MT_OK;
}

void mt_exchange_destroy(mt_exchange **exchange)
{
    mt_exchange *x = *exchange;
    if (!x) return;
    mt_stream_destroy(&x->stream);
    mt_event_destroy(&x->packed);
    mt_event_destroy(&x->arrived);
    mt_device_free(x->device, &x->most, sizeof(int64_t), MT_MEMORY_STATE);
    free(x);
    *exchange = NULL;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Rows for one rank: of each token, at most all its choices, or all that the rank has. */
static int64_t most_rows(const mt_exchange *x, int64_t tokens)
{
    return tokens * least(x->options.top_k, x->options.experts / mt_comm_size(x->comm));
}

static double mean_rows(const mt_exchange *x, int64_t tokens)
{
    return (double)(tokens * x->options.top_k) / mt_comm_size(x->comm);
}

static int64_t head_lines(mt_dtype dtype, int64_t experts, int64_t rows, size_t line_bytes)
{
    int64_t line = (int64_t)line_bytes;
    return (mt_exchange_head(dtype, experts, rows) + line - 1) / line;
}

struct mt_blocks mt_exchange_blocks(mt_exchange *x, mt_dtype dtype, int64_t tokens,
                                    size_t line_bytes, size_t plain_bytes)
{
    struct mt_blocks b = { .ranks = mt_comm_size(x->comm) };
    if (tokens < x->options.tokens) tokens = x->options.tokens;
    b.experts = x->options.experts / b.ranks;
    int64_t room = most_rows(x, tokens), with_reals = 0;
    double wanted = ceil(x->options.load * mean_rows(x, tokens));
    if (x->options.load > 0 && !x->any && wanted < (double)room) room = (int64_t)wanted;
    b.head_lines = head_lines(dtype, b.experts, 0, line_bytes);
    if (plain_bytes) with_reals = head_lines(dtype, b.experts, room + LINE_MULTIPLE, plain_bytes);
    if (b.head_lines < with_reals) b.head_lines = with_reals;
    b.lines = (b.head_lines + room + LINE_MULTIPLE - 1) / LINE_MULTIPLE * LINE_MULTIPLE;
    x->room = x->tokens ? least(x->room, b.lines - b.head_lines) : b.lines - b.head_lines;
    if (tokens > x->tokens) x->tokens = tokens;
    return b;
}

int64_t *mt_exchange_most(const mt_exchange *x)
{
    return x->most;
}

void mt_exchange_open(mt_exchange *x, bool any)
{
    x->any = any;
}

void mt_exchange_set_plain(mt_exchange *x, bool plain)
{
    x->epoch += x->plain != plain;
    x->plain = plain;
}

bool mt_exchange_plain(const mt_exchange *x)
{
    return x->plain;
}

int64_t mt_exchange_bytes(const mt_exchange *x)
{
    return x->bytes;
}

uint64_t mt_exchange_epoch(const mt_exchange *x)
{
    return 2 * x->epoch + x->any;
}

mt_status mt_exchange_send(mt_exchange *x, mt_stream *stream, void *to, const void *from,
                           const struct mt_blocks *blocks, size_t line_bytes, const char *what)
{
    x->bytes += (blocks->ranks - 1) * blocks->lines * (int64_t)line_bytes;
    MT_TRY(mt_event_record(&x->packed, stream));
    MT_TRY(mt_event_wait(&x->packed, &x->stream));
    MT_TRY(mt_comm_all_to_all(x->comm, &x->stream, to, from, (size_t)blocks->lines * line_bytes,
                              what));
    return mt_event_record(&x->arrived, &x->stream);
}

mt_status mt_exchange_wait(mt_exchange *x, mt_stream *stream)
{
    return mt_event_wait(&x->arrived, stream);
}

/* Room for blocks of so many rows, and some more. */
static void grow(mt_exchange *x, int64_t most)
{
    x->options.load = (double)most / mean_rows(x, x->tokens) * spare;
    x->epoch++;
}

mt_status mt_exchange_settle(mt_exchange *x, mt_comm *world, mt_stream *stream, bool *over)
{
    int64_t most = 0;
    *over = false;
    bool tells = x->device->computes && x->tokens;
    if (tells && x->room < most_rows(x, x->tokens)) {
        MT_TRY(mt_comm_all_reduce(world, stream, x->most, 1, MT_I64, MT_REDUCE_MAX,
                                  "rows for an expert's rank"));
        MT_TRY(mt_device_copy(x->device, &most, x->most, sizeof most));
        *over = most > x->room;
    }
    /* Also what was needed of room for any routing: the blocks to come may have less. */
    if (tells) MT_TRY(mt_device_zero_async(stream, x->most, sizeof most));
    if (*over) grow(x, most);
    x->tokens = 0;
    return MT_OK;
}
