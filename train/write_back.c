/* Write-back by a thread. */
#include "train/write_back.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

struct mt_write_back {
    int fd;
    pthread_t thread;
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t changed;
    bool asked, sync, quit;
    int error;
};

static void *run(void *self)
{
    mt_write_back *w = self;
    pthread_mutex_lock(&w->lock);
    while (!w->quit && !w->sync) {
        if (!w->asked) {
            pthread_cond_wait(&w->changed, &w->lock);
            continue;
        }
        w->asked = false;
        pthread_mutex_unlock(&w->lock);
        sync_file_range(w->fd, 0, 0, SYNC_FILE_RANGE_WRITE); /* fsync says what fails */
        pthread_mutex_lock(&w->lock);
    }
    const bool sync = w->sync;
    pthread_mutex_unlock(&w->lock);
    if (sync && fsync(w->fd)) w->error = errno;
    return NULL;
}

mt_write_back *mt_write_back_begin(int fd)
{
    sigset_t all, old;
    mt_write_back *w = calloc(1, sizeof *w);
    if (!w) return NULL;
    w->fd = fd;
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->changed, NULL);
    sigfillset(&all); /* signals are for the threads that were there */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    const int error = pthread_create(&w->thread, NULL, run, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (!error) return w;
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
    return NULL;
}

static void set(mt_write_back *w, bool *what)
{
    pthread_mutex_lock(&w->lock);
    *what = true;
    pthread_cond_signal(&w->changed);
    pthread_mutex_unlock(&w->lock);
}

void mt_write_back_ask(mt_write_back *w)
{
    set(w, &w->asked);
}

void mt_write_back_sync(mt_write_back *w)
{
    set(w, &w->sync);
}

int mt_write_back_end(mt_write_back **back)
{
    mt_write_back *w = *back;
    *back = NULL;
    if (!w) return 0;
    set(w, &w->quit);
    pthread_join(w->thread, NULL);
    const int error = w->error;
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->lock);
    free(w);
    return error;
}
