/* What a path leads to: a directory by the files that such directories have, a file by its first
 * bytes. */
#include "train/kind.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "train/fileio.h"

enum { LOOKED_AT = 512 };

static const char *const names[MT_KIND_COUNT] = {
    [MT_KIND_NOTHING] = "nothing",
    [MT_KIND_UNREADABLE] = "a file that cannot be read",
    [MT_KIND_DEVICE] = "a device or a pipe",
    [MT_KIND_DIRECTORY] = "a directory",
    [MT_KIND_RUN] = "the directory of a run",
    [MT_KIND_CHECKPOINT] = "a checkpoint",
    [MT_KIND_HUGGING_FACE] = "a Hugging Face directory",
    [MT_KIND_EMPTY] = "an empty file",
    [MT_KIND_TEXT] = "a text",
    [MT_KIND_HDF5] = "an HDF5 file",
    [MT_KIND_SAFETENSORS] = "a safetensors file",
    [MT_KIND_NUMPY] = "a NumPy array",
    [MT_KIND_ZIP] = "a zip file",
    [MT_KIND_GGUF] = "a GGUF file",
    [MT_KIND_GZIP] = "a gzip file",
    [MT_KIND_OTHER] = "a file of another kind",
};

static bool holds(const char *dir, const char *name)
{
    char path[MT_PATH_BYTES];
    int n = snprintf(path, sizeof path, "%s/%s", dir, name);
    return n > 0 && n < MT_PATH_BYTES && mt_path_exists(path);
}

static mt_path_kind kind_of_directory(const char *path)
{
    if (holds(path, "config.resolved.yaml")) return MT_KIND_RUN;
    if (holds(path, "DONE")) return MT_KIND_CHECKPOINT;
    return holds(path, "config.json") ? MT_KIND_HUGGING_FACE : MT_KIND_DIRECTORY;
}

/* A length of 64 bits, little-endian, and JSON behind it. */
static bool is_safetensors(const unsigned char *p, size_t n)
{
    return n > 8 && p[8] == '{' && !p[4] && !p[5] && !p[6] && !p[7];
}

static bool is_text(const unsigned char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!p[i] || (p[i] < ' ' && !strchr("\b\t\n\v\f\r\033", p[i]))) return false;
    return true;
}

static mt_path_kind kind_of_bytes(const unsigned char *p, size_t n)
{
    static const struct {
        const char *begin;
        size_t bytes;
        mt_path_kind kind;
    } kinds[] = {
        { "\223NUMPY", 6, MT_KIND_NUMPY },
        { "PK\3\4", 4, MT_KIND_ZIP },
        { "GGUF", 4, MT_KIND_GGUF },
        { "\037\213", 2, MT_KIND_GZIP },
    };
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
        if (n >= kinds[i].bytes && !memcmp(p, kinds[i].begin, kinds[i].bytes)) return kinds[i].kind;
    if (n == 0) return MT_KIND_EMPTY;
    if (is_safetensors(p, n)) return MT_KIND_SAFETENSORS;
    return is_text(p, n) ? MT_KIND_TEXT : MT_KIND_OTHER;
}

/* HDF5 may begin at 512 bytes, 1024, 2048, ... too: what is before is for others. A file cut within
 * its first bytes was one. */
static bool is_hdf5(int fd)
{
    static const char begin[] = "\211HDF\r\n\032\n";
    char p[sizeof begin - 1];
    ssize_t n = (ssize_t)sizeof p;
    for (off_t at = 0; n == (ssize_t)sizeof p; at = at ? 2 * at : 512) {
        n = pread(fd, p, sizeof p, at);
        if (n > 0 && (n == (ssize_t)sizeof p || at == 0) && !memcmp(p, begin, (size_t)n))
            return true;
    }
    return false;
}

static mt_path_kind kind_of_file(const char *path)
{
    unsigned char p[LOOKED_AT];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t n = fd < 0 ? -1 : read(fd, p, sizeof p);
    bool hdf5 = n > 0 && is_hdf5(fd);
    if (fd >= 0) close(fd);
    if (n < 0) return MT_KIND_UNREADABLE;
    return hdf5 ? MT_KIND_HDF5 : kind_of_bytes(p, (size_t)n);
}

mt_path_kind mt_path_kind_find(const char *path)
{
    struct stat st;
    if (stat(path, &st) != 0)
        return errno == ENOENT || errno == ENOTDIR ? MT_KIND_NOTHING : MT_KIND_UNREADABLE;
    if (S_ISDIR(st.st_mode)) return kind_of_directory(path);
    return S_ISREG(st.st_mode) ? kind_of_file(path) : MT_KIND_DEVICE;
}

const char *mt_path_kind_name(mt_path_kind kind)
{
    return names[kind];
}

const char *mt_path_kind_of(const char *path)
{
    return names[mt_path_kind_find(path)];
}
