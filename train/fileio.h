/* Files as the program needs them: mapped for reading, written whole or not at all, hashed,
 * removed. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/status.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { MT_PATH_BYTES = 4096, MT_HEX128_BYTES = 33 };

/* A path, printf-like, into `path`; MT_EINVAL when it does not fit. */
mt_status mt_path_format(char path[MT_PATH_BYTES], const char *format, ...) MT_PRINTF(2, 3);

/* A whole file mapped read-only. Unmapped pages of a file cut short afterwards end the process, as
 * with every mapping: a mapped file must not be truncated in place. */
typedef struct mt_file_map {
    const unsigned char *data; /* NULL when empty */
    size_t bytes;
} mt_file_map;

/* Errors: MT_EIO names the path and the system's reason; directories and devices are refused. */
mt_status mt_file_map_open(mt_file_map *map, const char *path);
/* NULL-safe; leaves an empty map. */
void mt_file_map_close(mt_file_map *map);

/* Opens a regular file for reading: *fd is the caller's to close, -1 on failure. Errors: MT_EIO. */
mt_status mt_file_open(int *fd, size_t *bytes, const char *path);
/* Whether what is there can be opened and read: MT_EIO with the system's reason. */
mt_status mt_file_check_readable(const char *path);

/* Whether a new file may take the name `path`: it is free, or that of a regular file. A device, a
 * pipe, a directory or a link is not replaced: MT_EIO. */
mt_status mt_file_check_name(const char *path);
/* MT_ECONFIG where it would lie in a complete checkpoint, which it would change, and go with. */
mt_status mt_file_check_place(const char *path);
/* Both, for what is made of the file `source`, which must not be lost: MT_ECONFIG where the new
 * file, or what becomes it, would be that one. */
mt_status mt_file_check_result(const char *path, const char *source);

/* Begins the file that will be called `path`: opens `temp`, which becomes `<path>.tmp`, empty and
 * for one writer. MT_ECONFIG, with nothing changed, if another has it; a writer that died has
 * nothing. The writer renames or unlinks it before it closes *fd, -1 on failure. */
mt_status mt_file_begin(int *fd, char temp[MT_PATH_BYTES], const char *path);

/* A file that appears under its name only when complete: written to `<path>.tmp`, fsynced, renamed.
 * One writer at a time: MT_ECONFIG for a second. */
typedef struct mt_file_writer mt_file_writer;

mt_status mt_file_writer_open(mt_file_writer **writer, const char *path);
/* Buffered by the caller; a failed write is remembered, so that only commit needs a check in loops.
 */
mt_status mt_file_writer_put(mt_file_writer *writer, const void *data, size_t bytes);
/* Ends the file under its name; on failure (a full disk) the old file is untouched and the
 * temporary one is gone. Sets *writer to NULL in both cases. */
mt_status mt_file_writer_commit(mt_file_writer **writer);
/* Drops an unfinished file. NULL-safe. */
void mt_file_writer_abandon(mt_file_writer **writer);

/* The three above at once; a file that holds these bytes already is left as it is. */
mt_status mt_file_write_all(const char *path, const void *data, size_t bytes);
/* A whole small file as text, NUL-terminated, freed by the caller; MT_EDAMAGED above `limit` bytes.
 */
mt_status mt_file_read_all(char **text, size_t *bytes, const char *path, size_t limit);

/* Makes renames inside `dir` last through a power failure. */
mt_status mt_dir_sync(const char *dir);
/* The same for the directory that holds `path`. */
mt_status mt_parent_sync(const char *path);
/* Creates a directory with its missing parents; one that exists is fine. */
mt_status mt_dir_create(const char *dir);
/* A directory for one process: until *fd, -1 on failure, is closed. MT_ECONFIG if another has it.
 */
mt_status mt_dir_lock(int *fd, const char *dir);
/* Removes the files in a directory, subdirectories too. Symbolic links are removed, never followed.
 */
mt_status mt_dir_empty(const char *dir);
/* The same, and the directory; one that is absent is fine. */
mt_status mt_dir_remove(const char *dir);
bool mt_path_exists(const char *path);
/* The same, where a path that cannot be looked at is no absent one: MT_EIO. */
mt_status mt_path_look(bool *exists, const char *path);
/* Whether two names are of one file or directory that is there. */
bool mt_path_same(const char *a, const char *b);

/* Size and XXH3-128 (canonical order, as xxhsum -H2 prints it) of a file. MT_EIO, not a signal,
 * where some of it cannot be read. */
mt_status mt_file_xxh128(char hex[MT_HEX128_BYTES], int64_t *bytes, const char *path);
/* Of an open file; `path` is what errors call it. */
mt_status mt_file_xxh128_of(char hex[MT_HEX128_BYTES], int64_t *bytes, int fd, const char *path);

/* Reads `bytes` at `offset`, or what there is up to the file's end: *got; an errno, or 0. */
int mt_read_at(int fd, void *to, size_t bytes, int64_t offset, size_t *got);
/* Writes all of `bytes` at `offset`, or all of them at the end when offset < 0; -1 with errno set
 * on failure. */
int mt_write_fully(int fd, const void *data, size_t bytes, int64_t offset);

#ifdef __cplusplus
}
#endif
