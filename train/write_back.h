/* A file's bytes go to the disk while more of them are written: a thread asks the system to begin,
 * which can take as long as the disk. */
#pragma once

typedef struct mt_write_back mt_write_back;

/* Begins the thread. NULL where there can be none: nothing below is needed then. */
mt_write_back *mt_write_back_begin(int fd);
/* What has been written so far is begun; does not wait. */
void mt_write_back_ask(mt_write_back *w);
/* All has been written: begins an fsync. */
void mt_write_back_sync(mt_write_back *w);
/* Waits for the thread, whose end it is; the errno of the fsync, 0 without one or an error.
 * NULL-safe; sets *w to NULL. */
int mt_write_back_end(mt_write_back **w);
