/* Experts of a layer over ranks: how rows travel to them and back (kernels/exchange.h has the form
 * of what is sent).
 *
 * Blocks have room for a fixed number of rows: what the mean block needs, times a load. A block
 * that needs more leaves rows out, which `most` on the device tells. What was computed since is
 * void then: mt_exchange_settle finds that on all ranks, makes room for what was missing, and the
 * caller runs the same again.
 *
 * Rows travel in the activations' dtype, or, where that changes no bit of what is made of them, as
 * the codes that they are read as (layers/linear_formats.c has the rule).
 *
 * On a device with streams, blocks are sent in a stream of their own: what the passes' stream is
 * given between mt_exchange_send and mt_exchange_wait is done beside it. */
#pragma once

#include "dist/comm.h"
#include "kernels/exchange.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_exchange mt_exchange;

typedef struct mt_exchange_options {
    int64_t experts, top_k; /* of a layer, over all ranks; choices of a token */
    int64_t tokens;         /* of a pass; one of fewer, on some rank, has blocks of the same size */
    double load; /* rows that a block has room for, in those of a mean block; 0: for any routing */
} mt_exchange_options;

/* Ownership: `device` and `comm`, the ranks that share the experts, are borrowed. MT_ECONFIG: the
 * ranks do not divide the experts. Collective. */
mt_status mt_exchange_create(mt_exchange **exchange, mt_device *device, mt_comm *comm,
                             const mt_exchange_options *options);
void mt_exchange_destroy(mt_exchange **exchange);

/* The blocks of a pass of `tokens`, whose lines are of so many bytes or more; of those of
 * plain_bytes heads have room for reals, or, plain_bytes 0, none have. */
struct mt_blocks mt_exchange_blocks(mt_exchange *exchange, mt_dtype dtype, int64_t tokens,
                                    size_t line_bytes, size_t plain_bytes);
/* Device int64 [1]: rows for one block, at most, since the last mt_exchange_settle. */
int64_t *mt_exchange_most(const mt_exchange *exchange);
/* From now on blocks have room for any routing, or again for what the load says: while somebody
 * looks on, who shall not see the same twice. */
void mt_exchange_open(mt_exchange *exchange, bool any);
/* Tells sizes of blocks apart: part of the key of a tape's pass. */
uint64_t mt_exchange_epoch(const mt_exchange *exchange);

/* From now on rows travel as they are, or again as codes where they may: for comparisons. */
void mt_exchange_set_plain(mt_exchange *exchange, bool plain);
bool mt_exchange_plain(const mt_exchange *exchange);
/* Bytes of blocks that this rank has made for others so far; ranks that know on the host how much
 * of a block is in use send less. */
int64_t mt_exchange_bytes(const mt_exchange *exchange);

/* Sends the blocks in `from`, of `stream`'s work, and receives others in `to`: both stay as they
 * are until mt_exchange_wait, from which on the stream finds them. Collective. */
mt_status mt_exchange_send(mt_exchange *exchange, mt_stream *stream, void *to, const void *from,
                           const struct mt_blocks *blocks, size_t line_bytes, const char *what);
mt_status mt_exchange_wait(mt_exchange *exchange, mt_stream *stream);

/* Whether rows were left out on any rank of `world` since the last call; then blocks have grown.
 * Waits for the stream, unless blocks have room for any routing. Collective over `world`. */
mt_status mt_exchange_settle(mt_exchange *exchange, mt_comm *world, mt_stream *stream, bool *over);

#ifdef __cplusplus
}
#endif
