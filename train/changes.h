/* changes.jsonl of a run: what it was gone on with otherwise than before, an object a line. What
 * config.resolved.yaml and env.json say is what they said last. */
#pragma once

#include <stdint.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct mt_change {
    int64_t step;          /* the last one that was made with `from` */
    char *key, *from, *to; /* a key of the configuration, or of env.json */
} mt_change;

/* In the order in which they were made: steps never fall. */
typedef struct mt_changes {
    mt_change *items;
    int64_t count, room;
} mt_changes;

/* Reads the file: no changes where it is not there. Errors: MT_EIO; MT_EDAMAGED names the line. */
mt_status mt_changes_read(mt_changes *changes, const char *path);
/* Of two changes of a key after one step one is left, or none where the key is what it was. After
 * no step nothing has changed. */
mt_status mt_changes_add(mt_changes *changes, int64_t step, const char *key, const char *from,
                         const char *to);
/* The run goes on from `step`: what was changed later has changed then. */
mt_status mt_changes_rewind(mt_changes *changes, int64_t step);
/* Writes the file, whole or not at all; where nothing has changed there is none. */
mt_status mt_changes_write(const mt_changes *changes, const char *path);
void mt_changes_free(mt_changes *changes);

#ifdef __cplusplus
}
#endif
