/* A ring of events, one for each collective under way. */
#include "dist/inflight.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "core/clock.h"

enum { ROOM = 512, TEXT = 64, NAP_NS = 50000 };

typedef struct entry {
    mt_event over;
    uint64_t sequence, bytes, group;
    char op[TEXT], what[TEXT];
    double began; /* when it became the oldest, or was added, whichever was later */
} entry;

struct mt_inflight {
    pthread_mutex_t lock; /* of what follows; events are recorded by the adding thread alone */
    uint64_t first, end;  /* under way: [first, end), entry i at i % ROOM */
    entry ring[ROOM];
    char op[TEXT], what[TEXT]; /* of what mt_inflight_oldest returned */
};

mt_status mt_inflight_create(mt_inflight **inflight, mt_device *device)
{
    mt_inflight *f = *inflight = calloc(1, sizeof *f);
    MT_REQUIRE(f, MT_ENOMEM, "comm: out of memory");
    pthread_mutex_init(&f->lock, NULL);
    for (int i = 0; i < ROOM; i++) {
        mt_status status = mt_event_create(&f->ring[i].over, device);
        if (status == MT_OK) continue;
        mt_inflight_destroy(inflight);
        return mt_error_pass(status, __FILE__, __LINE__);
    }
    return MT_OK;
}

void mt_inflight_destroy(mt_inflight **inflight)
{
    mt_inflight *f = *inflight;
    if (!f) return;
    for (int i = 0; i < ROOM; i++) mt_event_destroy(&f->ring[i].over);
    pthread_mutex_destroy(&f->lock);
    free(f);
    *inflight = NULL;
}

/* Drops what is over; with the lock held. */
static mt_status drop(mt_inflight *f)
{
    while (f->first < f->end) {
        bool done;
        MT_TRY(mt_event_done(&f->ring[f->first % ROOM].over, &done));
        if (!done) return MT_OK;
        if (++f->first < f->end) f->ring[f->first % ROOM].began = mt_now();
    }
    return MT_OK;
}

mt_status mt_inflight_follow(mt_inflight *f, mt_stream *stream)
{
    return f->end ? mt_event_wait(&f->ring[(f->end - 1) % ROOM].over, stream) : MT_OK;
}

/* Until there is room for one more. */
static mt_status make_room(mt_inflight *f)
{
    for (;;) {
        pthread_mutex_lock(&f->lock);
        bool full = f->end - f->first == ROOM;
        mt_status status = full ? drop(f) : MT_OK;
        full = f->end - f->first == ROOM;
        pthread_mutex_unlock(&f->lock);
        if (status != MT_OK || !full) return status;
        nanosleep(&(struct timespec){ .tv_nsec = NAP_NS }, NULL);
    }
}

mt_status mt_inflight_add(mt_inflight *f, mt_stream *stream, const mt_watch_pending *call)
{
    MT_TRY(make_room(f));
    entry *e = &f->ring[f->end % ROOM];
    MT_TRY(mt_event_record(&e->over, stream));
    e->sequence = call->sequence, e->bytes = call->bytes, e->group = call->group;
    snprintf(e->op, TEXT, "%s", call->op);
    snprintf(e->what, TEXT, "%s", call->what);
    pthread_mutex_lock(&f->lock);
    e->began = mt_now();
    f->end++;
    pthread_mutex_unlock(&f->lock);
    return MT_OK;
}

mt_status mt_inflight_oldest(mt_inflight *f, mt_watch_pending *oldest, bool *any)
{
    pthread_mutex_lock(&f->lock);
    mt_status status = drop(f);
    *any = status == MT_OK && f->first < f->end;
    if (*any) {
        const entry *e = &f->ring[f->first % ROOM];
        snprintf(f->op, TEXT, "%s", e->op);
        snprintf(f->what, TEXT, "%s", e->what);
        *oldest = (mt_watch_pending){ .sequence = e->sequence,
                                      .bytes = e->bytes,
                                      .group = e->group,
                                      .waited = mt_now() - e->began,
                                      .op = f->op,
                                      .what = f->what };
    }
    pthread_mutex_unlock(&f->lock);
    return status;
}
