/* Whole files: mapping, all-or-nothing writing, hashing, removal. */
#include "train/fileio.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "train/kind.h"
#include "train/signals.h"

struct mt_file_writer {
    char path[MT_PATH_BYTES], temp[MT_PATH_BYTES];
    int fd;
    int error; /* errno of the first failed write */
};

mt_status mt_path_format(char path[MT_PATH_BYTES], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(path, MT_PATH_BYTES, format, args);
    va_end(args);
    MT_REQUIRE(n >= 0 && n < MT_PATH_BYTES, MT_EINVAL, "path '%.60s...' is longer than %d bytes",
               path, MT_PATH_BYTES - 1);
    return MT_OK;
}

/* ---- reading -----------------------------------------------------------------------------------
 */

mt_status mt_file_open(int *fd, size_t *bytes, const char *path)
{
    struct stat st;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    MT_REQUIRE(*fd >= 0, MT_EIO, "cannot open '%s': %s", path, strerror(errno));
    if (fstat(*fd, &st) == 0 && S_ISREG(st.st_mode)) {
        *bytes = (size_t)st.st_size;
        return MT_OK;
    }
    close(*fd);
    *fd = -1;
    return MT_FAIL(MT_EIO, "cannot read '%s': it is %s, not a regular file", path,
                   mt_path_kind_of(path));
}

mt_status mt_file_check_readable(const char *path)
{
    char first;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    MT_REQUIRE(fd >= 0, MT_EIO, "cannot open '%s': %s", path, strerror(errno));
    int error = read(fd, &first, 1) < 0 ? errno : 0;
    close(fd);
    MT_REQUIRE(!error, MT_EIO, "cannot read '%s': %s", path, strerror(error));
    return MT_OK;
}

mt_status mt_file_map_open(mt_file_map *map, const char *path)
{
    int fd;
    *map = (mt_file_map){ NULL, 0 };
    MT_TRY(mt_file_open(&fd, &map->bytes, path));
    void *p = map->bytes ? mmap(NULL, map->bytes, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    int error = errno;
    close(fd);
    if (p == MAP_FAILED) {
        size_t bytes = map->bytes;
        map->bytes = 0;
        return MT_FAIL(MT_EIO, "cannot map '%s' (%zu bytes): %s", path, bytes, strerror(error));
    }
    map->data = p;
    return MT_OK;
}

void mt_file_map_close(mt_file_map *map)
{
    if (map && map->data) munmap((void *)(uintptr_t)map->data, map->bytes);
    if (map) *map = (mt_file_map){ NULL, 0 };
}

int mt_read_at(int fd, void *to, size_t bytes, int64_t offset, size_t *got)
{
    *got = 0;
    while (*got < bytes) {
        ssize_t n = pread(fd, (char *)to + *got, bytes - *got, (off_t)(offset + (int64_t)*got));
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno;
        if (n == 0) break;
        *got += (size_t)n;
    }
    return 0;
}

static mt_status read_failed(const char *path, int error)
{
    return MT_FAIL(MT_EIO, "cannot read '%s': %s", path, strerror(error));
}

/* Not by a mapping: of what cannot be read it would end the process. */
mt_status mt_file_read_all(char **text, size_t *bytes, const char *path, size_t limit)
{
    int fd, error = 0;
    size_t size;
    *text = NULL;
    MT_TRY(mt_file_open(&fd, &size, path));
    mt_status status = MT_OK;
    if (size > limit)
        status = MT_FAIL(MT_EDAMAGED, "'%s' has %zu bytes, more than the %zu that it may have",
                         path, size, limit);
    else if (!(*text = malloc(size + 1)))
        status = MT_FAIL(MT_ENOMEM, "no memory for '%s' (%zu bytes)", path, size);
    else
        error = mt_read_at(fd, *text, size, 0, bytes);
    if (error) status = read_failed(path, error);
    close(fd);
    if (status == MT_OK) {
        (*text)[*bytes] = '\0';
        return MT_OK;
    }
    free(*text);
    *text = NULL;
    return status;
}

/* Reading takes longer than the checksum: all threads read. */
static mt_status hash_file(XXH3_state_t *state, int64_t *bytes, int fd, const char *path)
{
    enum { CHUNK = 1 << 18, MANY = 64 };
    char *chunks = malloc((size_t)MANY * CHUNK);
    size_t got[MANY];
    int error[MANY];
    bool more = true;
    MT_REQUIRE(chunks, MT_ENOMEM, "no memory to read '%s'", path);
    mt_status status = MT_OK;
    *bytes = 0;
    for (int n = 1; status == MT_OK && more; n = MANY) {
        const int64_t at = *bytes;
#pragma omp parallel for schedule(dynamic, 1) if (n > 1)
        for (int i = 0; i < n; i++)
            error[i] =
                mt_read_at(fd, chunks + (size_t)i * CHUNK, CHUNK, at + (int64_t)i * CHUNK, &got[i]);
        for (int i = 0; i < n && status == MT_OK && more; i++) {
            if (error[i])
                status = read_failed(path, error[i]);
            else
                XXH3_128bits_update(state, chunks + (size_t)i * CHUNK, got[i]);
            *bytes += (int64_t)got[i], more = got[i] == CHUNK;
        }
    }
    free(chunks);
    return status;
}

mt_status mt_file_xxh128(char hex[MT_HEX128_BYTES], int64_t *bytes, const char *path)
{
    int fd;
    size_t size;
    MT_TRY(mt_file_open(&fd, &size, path));
    mt_status status = mt_file_xxh128_of(hex, bytes, fd, path);
    close(fd);
    return status;
}

mt_status mt_file_xxh128_of(char hex[MT_HEX128_BYTES], int64_t *bytes, int fd, const char *path)
{
    XXH3_state_t *state = XXH3_createState();
    mt_status status =
        state ? MT_OK : MT_FAIL(MT_ENOMEM, "no memory for the checksum of '%s'", path);
    if (state) XXH3_128bits_reset(state);
    if (status == MT_OK) status = hash_file(state, bytes, fd, path);
    if (status == MT_OK) {
        XXH128_canonical_t canonical;
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(state));
        for (int i = 0; i < 16; i++) snprintf(hex + 2 * i, 3, "%02x", canonical.digest[i]);
    }
    XXH3_freeState(state);
    return status;
}

bool mt_path_exists(const char *path)
{
    struct stat st;
    return lstat(path, &st) == 0;
}

mt_status mt_path_look(bool *exists, const char *path)
{
    struct stat st;
    *exists = lstat(path, &st) == 0;
    MT_REQUIRE(*exists || errno == ENOENT || errno == ENOTDIR, MT_EIO, "cannot look at '%s': %s",
               path, strerror(errno));
    return MT_OK;
}

/* ---- locks -------------------------------------------------------------------------------------
 */

/* Whether the open file is this process's alone until it is closed. Who had it may have renamed or
 * removed it since it was opened: then `path` is another. File systems without locks take
 * everybody. */
static bool lock_open(int fd, const char *path)
{
    struct stat own, named;
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) return errno != EWOULDBLOCK;
    return fstat(fd, &own) == 0 && stat(path, &named) == 0 && own.st_dev == named.st_dev &&
           own.st_ino == named.st_ino;
}

mt_status mt_dir_lock(int *fd, const char *dir)
{
    *fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    MT_REQUIRE(*fd >= 0, MT_EIO, "%.300s: %s", dir, strerror(errno));
    if (lock_open(*fd, dir)) return MT_OK;
    close(*fd);
    *fd = -1;
    return MT_FAIL(MT_ECONFIG, "%.300s is in use by another process", dir);
}

/* ---- writing -----------------------------------------------------------------------------------
 */

int mt_write_fully(int fd, const void *data, size_t bytes, int64_t offset)
{
    const unsigned char *p = data;
    while (bytes) {
        size_t ask = bytes < (size_t)1 << 30 ? bytes : (size_t)1 << 30;
        ssize_t n = offset < 0 ? write(fd, p, ask) : pwrite(fd, p, ask, (off_t)offset);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ENOSPC;
        if (n <= 0) return -1;
        p += n, bytes -= (size_t)n;
        if (offset >= 0) offset += n;
    }
    return 0;
}

mt_status mt_file_check_name(const char *path)
{
    struct stat st;
    MT_REQUIRE(*path, MT_EIO, "cannot write '': a file needs a name");
    MT_REQUIRE(lstat(path, &st) != 0 || S_ISREG(st.st_mode), MT_EIO,
               "cannot write '%s': it is there and not a regular file, so it is not replaced",
               path);
    return MT_OK;
}

bool mt_path_same(const char *a, const char *b)
{
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* The directory that holds `path`: "." where it names none. */
static mt_status parent_of(char dir[MT_PATH_BYTES], const char *path)
{
    MT_TRY(mt_path_format(dir, "%s", path));
    size_t n = strlen(dir);
    while (n > 1 && dir[n - 1] == '/') n--;
    while (n && dir[n - 1] != '/') n--;
    while (n > 1 && dir[n - 1] == '/') n--;
    dir[n] = '\0';
    return n ? MT_OK : mt_path_format(dir, ".");
}

mt_status mt_file_check_place(const char *path)
{
    char dir[MT_PATH_BYTES], done[MT_PATH_BYTES], model[MT_PATH_BYTES];
    MT_TRY(parent_of(dir, path));
    MT_TRY(mt_path_format(done, "%s/DONE", dir));
    MT_TRY(mt_path_format(model, "%s/model.h5", dir));
    MT_REQUIRE(!mt_path_exists(done) || !mt_path_exists(model), MT_ECONFIG,
               "'%s' is a complete checkpoint and would be changed by '%s': the result needs "
               "another place",
               dir, path);
    return MT_OK;
}

mt_status mt_file_check_result(const char *path, const char *source)
{
    char temp[MT_PATH_BYTES];
    MT_TRY(mt_path_format(temp, "%s.tmp", path));
    MT_REQUIRE(!mt_path_same(path, source) && !mt_path_same(temp, source), MT_ECONFIG,
               "'%s' is read and would be written over by '%s': the result needs another name",
               source, path);
    MT_TRY(mt_file_check_place(path));
    return mt_file_check_name(path);
}

static mt_status create_failed(const char *path, const char *temp, int error)
{
    char dir[MT_PATH_BYTES];
    MT_TRY(parent_of(dir, path));
    MT_REQUIRE(error != ENOENT || mt_path_exists(dir), MT_EIO,
               "cannot create '%s': there is no directory '%s'", path, dir);
    return MT_FAIL(MT_EIO, "cannot create '%s': %s", temp, strerror(error));
}

mt_status mt_file_begin(int *fd, char temp[MT_PATH_BYTES], const char *path)
{
    *fd = -1;
    MT_TRY(mt_path_format(temp, "%s.tmp", path));
    MT_TRY(mt_file_check_name(path));
    *fd = open(temp, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    if (*fd < 0) return create_failed(path, temp, errno);
    mt_status status = MT_OK;
    if (!lock_open(*fd, temp))
        status = MT_FAIL(MT_ECONFIG, "cannot write '%s': another process is writing it", path);
    else if (ftruncate(*fd, 0))
        status = MT_FAIL(MT_EIO, "cannot write '%s': %s", temp, strerror(errno));
    if (status == MT_OK) mt_signals_begun(temp);
    if (status == MT_OK) return MT_OK;
    close(*fd);
    *fd = -1;
    return status;
}

mt_status mt_file_writer_open(mt_file_writer **writer, const char *path)
{
    mt_file_writer *w = calloc(1, sizeof *w);
    *writer = NULL;
    MT_REQUIRE(w, MT_ENOMEM, "no memory to write '%s'", path);
    mt_status status = mt_path_format(w->path, "%s", path);
    if (status == MT_OK) status = mt_file_begin(&w->fd, w->temp, path);
    if (status == MT_OK)
        *writer = w;
    else
        free(w);
    return status;
}

static mt_status write_failed(const mt_file_writer *w, int error)
{
    return MT_FAIL(MT_EIO, "cannot write '%s': %s", w->path, strerror(error));
}

mt_status mt_file_writer_put(mt_file_writer *writer, const void *data, size_t bytes)
{
    if (!writer->error && mt_write_fully(writer->fd, data, bytes, -1)) writer->error = errno;
    return writer->error ? write_failed(writer, writer->error) : MT_OK;
}

mt_status mt_file_writer_commit(mt_file_writer **writer)
{
    mt_file_writer *w = *writer;
    int error = w->error;
    if (!error && (fsync(w->fd) || rename(w->temp, w->path))) error = errno;
    mt_status status = error ? write_failed(w, error) : mt_parent_sync(w->path);
    if (error) unlink(w->temp);
    close(w->fd);
    free(w);
    *writer = NULL;
    return status;
}

void mt_file_writer_abandon(mt_file_writer **writer)
{
    if (!*writer) return;
    unlink((*writer)->temp);
    close((*writer)->fd);
    free(*writer);
    *writer = NULL;
}

static bool holds(const char *path, const void *data, size_t bytes)
{
    mt_file_map map;
    bool same = mt_file_map_open(&map, path) == MT_OK;
    if (!same) mt_error_clear();
    same = same && map.bytes == bytes && (!bytes || !memcmp(map.data, data, bytes));
    mt_file_map_close(&map);
    return same;
}

mt_status mt_file_write_all(const char *path, const void *data, size_t bytes)
{
    mt_file_writer *writer;
    if (holds(path, data, bytes)) return MT_OK;
    MT_TRY(mt_file_writer_open(&writer, path));
    mt_file_writer_put(writer, data, bytes); /* a failure comes back from commit */
    return mt_file_writer_commit(&writer);
}

/* ---- directories -------------------------------------------------------------------------------
 */

mt_status mt_dir_sync(const char *dir)
{
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    MT_REQUIRE(fd >= 0, MT_EIO, "cannot open directory '%s': %s", dir, strerror(errno));
    int error = fsync(fd) ? errno : 0;
    close(fd);
    /* EINVAL: a file system without directory fsync */
    MT_REQUIRE(!error || error == EINVAL, MT_EIO, "cannot sync directory '%s': %s", dir,
               strerror(error));
    return MT_OK;
}

mt_status mt_parent_sync(const char *path)
{
    char dir[MT_PATH_BYTES];
    MT_TRY(parent_of(dir, path));
    return mt_dir_sync(dir);
}

mt_status mt_dir_create(const char *dir)
{
    char path[MT_PATH_BYTES];
    int error = 0; /* of the first component that is not there and cannot be made */
    MT_TRY(mt_path_format(path, "%s", dir));
    for (char *p = path + 1; *p; p++) {
        if (*p != '/') continue;
        *p = '\0';
        int failed = mkdir(path, 0777) ? errno : 0;
        if (failed && !error && !mt_path_exists(path)) error = failed;
        *p = '/';
    }
    struct stat st;
    if (mkdir(path, 0777) && errno != EEXIST)
        return MT_FAIL(MT_EIO, "cannot create directory '%s': %s", dir,
                       strerror(error ? error : errno));
    MT_REQUIRE(stat(path, &st) == 0 && S_ISDIR(st.st_mode), MT_EIO, "'%s' is not a directory", dir);
    return MT_OK;
}

static int remove_entries(int fd, int depth);

/* Removes one name of a directory; 0, or -1 with errno. */
static int remove_entry(int fd, const char *name, int depth)
{
    if (unlinkat(fd, name, 0) == 0) return 0;
    if (errno != EISDIR && errno != EPERM) return -1;
    int sub = openat(fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
    if (sub < 0) return -1;
    if (remove_entries(sub, depth + 1)) return -1;
    return unlinkat(fd, name, AT_REMOVEDIR);
}

/* Empties a directory; closes fd. */
static int remove_entries(int fd, int depth)
{
    enum { MAX_DEPTH = 16 };
    DIR *d = depth < MAX_DEPTH ? fdopendir(fd) : NULL;
    if (!d) {
        close(fd);
        return -1;
    }
    int result = 0;
    for (struct dirent *e; !result && (e = readdir(d));)
        if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
            result = remove_entry(dirfd(d), e->d_name, depth);
    int error = errno;
    closedir(d);
    errno = error;
    return result;
}

static int open_to_empty(const char *dir)
{
    return open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NOFOLLOW);
}

mt_status mt_dir_empty(const char *dir)
{
    int fd = open_to_empty(dir);
    MT_REQUIRE(fd >= 0 && remove_entries(fd, 0) == 0, MT_EIO, "cannot empty directory '%s': %s",
               dir, strerror(errno));
    return MT_OK;
}

mt_status mt_dir_remove(const char *dir)
{
    int fd = open_to_empty(dir);
    if (fd < 0 && errno == ENOENT) return MT_OK;
    if (fd < 0 || remove_entries(fd, 0) || rmdir(dir))
        return MT_FAIL(MT_EIO, "cannot remove directory '%s': %s", dir, strerror(errno));
    return MT_OK;
}
