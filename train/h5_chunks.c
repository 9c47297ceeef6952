/* Checked datasets a chunk at a time: HDF5 makes and compares checksums by one thread, here all
 * take part. What is not as mt_h5_write leaves it is HDF5's own to move. */
#define H5_USE_110_API 1
#include <hdf5.h>
#include <stdlib.h>
#include <string.h>

#include "train/h5_priv.h"

enum {
    MANY = 32, /* chunks that are in memory */
    SUM = 4,   /* bytes of a checksum, behind its chunk */
    MOST = 1 << 22
};

/* Chunks that are runs of a dataset's elements: of some dimension so many indices, of those before
 * it one, of those behind it all. */
typedef struct chunks {
    int cut;
    int64_t shape[MT_MAX_DIMS];
    int64_t along;  /* indices of the dimension `cut` in a chunk */
    int64_t inner;  /* elements of one of them */
    int64_t across; /* chunks beside each other in that dimension */
    int64_t count;  /* of all */
    size_t size;    /* bytes of an element */
    size_t bytes;   /* of a chunk; the last of a dimension ends in zeros */
} chunks;

static bool is_checked_alone(hid_t list)
{
    unsigned flags, config;
    size_t values = 0;
    return H5Pget_layout(list) == H5D_CHUNKED && H5Pget_nfilters(list) == 1 &&
           H5Pget_filter2(list, 0, &flags, &values, NULL, 0, NULL, &config) ==
               H5Z_FILTER_FLETCHER32;
}

static bool divide(chunks *c, const mt_h5_info *info, const hsize_t *chunk)
{
    int cut = 0;
    int64_t outer = 1;
    while (cut < info->ndim - 1 && chunk[cut] == 1) outer *= info->shape[cut++];
    *c = (chunks){ .cut = cut, .along = (int64_t)chunk[cut], .inner = 1 };
    memcpy(c->shape, info->shape, sizeof c->shape);
    for (int i = cut + 1; i < info->ndim; i++) {
        if (chunk[i] != (hsize_t)info->shape[i]) return false;
        c->inner *= info->shape[i];
    }
    if (c->along < 1 || c->inner < 1 || c->along > info->shape[cut]) return false;
    c->across = (info->shape[cut] + c->along - 1) / c->along;
    c->count = outer * c->across;
    c->size = (size_t)(info->bytes / info->count);
    c->bytes = (size_t)(c->along * c->inner) * c->size;
    return c->bytes <= MOST;
}

/* False: HDF5 moves it. */
static bool find_chunks(chunks *c, hid_t dataset, const mt_h5_info *info)
{
    hsize_t chunk[H5S_MAX_RANK];
    const hid_t list = H5Dget_create_plist(dataset);
    if (list < 0) return false;
    bool known = info->little_endian && mt_h5_host_is_little_endian() && info->ndim > 0 &&
                 info->count > 0 && is_checked_alone(list) &&
                 H5Pget_chunk(list, H5S_MAX_RANK, chunk) == info->ndim && divide(c, info, chunk);
    H5Pclose(list);
    return known;
}

/* Elements [*first, *end) of chunk i; where it lies. */
static void place(hsize_t offset[MT_MAX_DIMS], int64_t *first, int64_t *end, const chunks *c,
                  int64_t i)
{
    int64_t outer = i / c->across, at = i % c->across * c->along, left = c->shape[c->cut] - at;
    *first = (outer * c->shape[c->cut] + at) * c->inner;
    *end = *first + (left < c->along ? left : c->along) * c->inner;
    memset(offset, 0, MT_MAX_DIMS * sizeof *offset);
    offset[c->cut] = (hsize_t)at;
    for (int d = c->cut - 1; d >= 0; d--)
        offset[d] = (hsize_t)(outer % c->shape[d]), outer /= c->shape[d];
}

/* The chunk that an element is in. */
static int64_t chunk_of(const chunks *c, int64_t element)
{
    const int64_t index = element / c->inner;
    return index / c->shape[c->cut] * c->across + index % c->shape[c->cut] / c->along;
}

/* What is left of a sum of words by 65535, as ends around carries leave it: 0 only of zeros. */
static uint32_t folded(uint64_t sum)
{
    const uint32_t rest = (uint32_t)(sum % 65535);
    return sum && !rest ? 65535 : rest;
}

/* HDF5's checksum, of words whose first byte is the higher one: sums of swapped words are the
 * swapped sums. Of at most MOST bytes the sums of 64 bits do not overflow. */
static uint32_t fletcher32(const unsigned char *p, size_t bytes)
{
    uint64_t one = 0, two = 0;
    uint16_t word;
    for (; bytes > 1; bytes -= 2, p += 2) memcpy(&word, p, 2), one += word, two += one;
    if (bytes) one += *p, two += one;
    const uint32_t low = folded(one), high = folded(two);
    return ((high << 8 | high >> 8) & 0xffff) << 16 | ((low << 8 | low >> 8) & 0xffff);
}

static mt_status make_room(mt_h5 *file, const char *name, size_t bytes)
{
    if (bytes <= file->room_bytes) return MT_OK;
    free(file->room);
    file->room = malloc(bytes);
    file->room_bytes = file->room ? bytes : 0;
    MT_REQUIRE(file->room, MT_ENOMEM, "'%s', %s: no memory for %zu bytes", file->path, name, bytes);
    return MT_OK;
}

/* From a chunk's place in memory to the next one's. */
static size_t step_of(const chunks *c)
{
    return (c->bytes + SUM + 63) / 64 * 64;
}

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

mt_status mt_h5_write_chunks(bool *done, mt_h5 *file, const char *name, int64_t dataset,
                             const mt_h5_info *info, const void *from)
{
    chunks c;
    *done = false;
    if (!find_chunks(&c, dataset, info)) return MT_OK;
    const size_t step = step_of(&c);
    MT_TRY(make_room(file, name, (size_t)least(MANY, c.count) * step));
    for (int64_t begin = 0; begin < c.count; begin += MANY) {
        const int64_t n = least(MANY, c.count - begin);
#pragma omp parallel for schedule(static) if (n > 1)
        for (int64_t i = 0; i < n; i++) {
            unsigned char *to = file->room + (size_t)i * step;
            hsize_t offset[MT_MAX_DIMS];
            int64_t first, end;
            place(offset, &first, &end, &c, begin + i);
            const size_t bytes = (size_t)(end - first) * c.size;
            memcpy(to, (const char *)from + (size_t)first * c.size, bytes);
            memset(to + bytes, 0, c.bytes - bytes);
            const uint32_t sum = fletcher32(to, c.bytes);
            for (int b = 0; b < SUM; b++) to[c.bytes + (size_t)b] = (unsigned char)(sum >> 8 * b);
        }
        for (int64_t i = 0; i < n; i++) {
            hsize_t offset[MT_MAX_DIMS];
            int64_t first, end;
            place(offset, &first, &end, &c, begin + i);
            MT_TRY(mt_h5_check(file, name, "write the data",
                               H5Dwrite_chunk(dataset, H5P_DEFAULT, 0, offset, c.bytes + SUM,
                                              file->room + (size_t)i * step)));
        }
    }
    *done = true;
    return MT_OK;
}

/* Chunk i as it is stored; false where it is not there, or not as expected. */
static bool read_stored(mt_h5 *file, hid_t dataset, const chunks *c, int64_t i, void *to)
{
    hsize_t offset[MT_MAX_DIMS], bytes = 0;
    int64_t first, end;
    uint32_t left_out = 0;
    place(offset, &first, &end, c, i);
    return H5Dget_chunk_storage_size(dataset, offset, &bytes) >= 0 && bytes == c->bytes + SUM &&
           H5Dread_chunk(dataset, H5P_DEFAULT, offset, &left_out, to) >= 0 && !left_out &&
           !file->state.error;
}

mt_status mt_h5_read_chunks(bool *done, mt_h5 *file, const char *name, int64_t dataset,
                            const mt_h5_info *info, int64_t first, int64_t count, void *to)
{
    chunks c;
    *done = false;
    if (!find_chunks(&c, dataset, info)) return MT_OK;
    const size_t step = step_of(&c);
    const int64_t past = chunk_of(&c, first + count - 1) + 1;
    MT_TRY(make_room(file, name, (size_t)least(MANY, c.count) * step));
    for (int64_t begin = chunk_of(&c, first); begin < past; begin += MANY) {
        const int64_t n = least(MANY, past - begin);
        bool right = true;
        for (int64_t i = 0; i < n; i++)
            if (!read_stored(file, dataset, &c, begin + i, file->room + (size_t)i * step))
                return MT_OK; /* HDF5 says what is wrong */
#pragma omp parallel for schedule(static) reduction(&& : right) if (n > 1)
        for (int64_t i = 0; i < n; i++) {
            const unsigned char *p = file->room + (size_t)i * step;
            hsize_t offset[MT_MAX_DIMS];
            int64_t from, end;
            uint32_t sum = 0;
            place(offset, &from, &end, &c, begin + i);
            for (int b = 0; b < SUM; b++) sum |= (uint32_t)p[c.bytes + (size_t)b] << 8 * b;
            right = right && fletcher32(p, c.bytes) == sum;
            const int64_t a = from > first ? from : first, z = least(end, first + count);
            memcpy((char *)to + (size_t)(a - first) * c.size, p + (size_t)(a - from) * c.size,
                   (size_t)(z - a) * c.size);
        }
        if (!right) return MT_OK;
    }
    *done = true;
    return MT_OK;
}
