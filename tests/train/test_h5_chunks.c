/* Checked datasets, which move chunk by chunk beside HDF5. */
#include "tests/support/test.h"

#include <hdf5.h>

#include "core/rng.h"
#include "tests/train/files.h"
#include "train/fileio.h"
#include "train/h5.h"

/* What goes chunk by chunk is what HDF5 reads, checksums and all, and what it says of damage is
 * ours to say; of a file that is large enough to be on its way to the disk before it is whole. */
static void chunks_are_as_hdf5_has_them(void **state)
{
    (void)state;
    static const struct {
        int type, ndim;
        int64_t shape[4];
    } sets[] = { { MT_U8, 1, { (5 << 20) + 3 } },      { MT_BF16, 2, { 700, 1001 } },
                 { MT_F64, 3, { 3, 5, 70001 } },       { MT_I32, 4, { 2, 3, 1, 300000 } },
                 { MT_F32, 2, { 3, 400000 } },         { MT_U8, 1, { 1 } },
                 { MT_F32, 2, { 24 << 10, 1 << 10 } }, { MT_U16, 2, { 65536, 9 } } };
    enum { SETS = sizeof sets / sizeof *sets, BYTES = 100 << 20 };
    unsigned char *data = malloc(BYTES), *back = malloc(BYTES);
    char name[16], hex[MT_HEX128_BYTES], again[MT_HEX128_BYTES];
    int64_t bytes, length;
    mt_h5 *file;
    for (int64_t i = 0; i < BYTES; i += 4) /* zeros, words whose sums are no more than carries */
        memcpy(data + i,
               &(uint32_t){ i < BYTES / 4       ? mt_rng_u32(3, 1, (uint64_t)i)
                            : i < BYTES / 2     ? 0
                            : i < BYTES / 4 * 3 ? 0xffffffffu
                                                : (uint32_t)i },
               4);
    assert_ok(mt_h5_create(&file, in_dir("chunks.h5")));
    for (int i = 0; i < SETS; i++) {
        snprintf(name, sizeof name, "%d", i);
        assert_ok(mt_h5_write(file, name, sets[i].type, sets[i].ndim, sets[i].shape,
                              data + (i % 4 << 20)));
    }
    assert_ok(mt_h5_commit_sealed(&file, hex, &bytes));
    assert_ok(mt_file_xxh128(again, &length, in_dir("chunks.h5")));
    assert_string_equal(hex, again);
    assert_true(bytes == length && bytes > 100 << 20);
    hid_t plain = H5Fopen(in_dir("chunks.h5"), H5F_ACC_RDONLY, H5P_DEFAULT);
    assert_true(plain >= 0);
    assert_ok(mt_h5_open(&file, in_dir("chunks.h5")));
    for (int i = 0; i < SETS; i++) {
        const unsigned char *want = data + (i % 4 << 20);
        mt_h5_info info;
        snprintf(name, sizeof name, "%d", i);
        const hid_t set = H5Dopen2(plain, name, H5P_DEFAULT), type = H5Dget_type(set);
        assert_ok(mt_h5_dataset_info(file, name, &info));
        memset(back, 0xa5, (size_t)info.bytes);
        assert_true(H5Dread(set, type, H5S_ALL, H5S_ALL, H5P_DEFAULT, back) >= 0);
        assert_memory_equal(back, want, (size_t)info.bytes);
        memset(back, 0xa5, (size_t)info.bytes);
        assert_ok(mt_h5_read(file, name, &info, back));
        assert_memory_equal(back, want, (size_t)info.bytes);
        H5Tclose(type), H5Dclose(set);
        /* rows, from the middle on */
        int64_t start[4] = { info.shape[0] / 3 }, count[4] = { 0 }, row = info.bytes;
        memcpy(count, info.shape, sizeof count);
        count[0] -= start[0], row /= info.shape[0];
        memset(back, 0xa5, (size_t)info.bytes);
        assert_ok(mt_h5_read_slab(file, name, info.type, start, count, back));
        assert_memory_equal(back, want + start[0] * row, (size_t)(count[0] * row));
        assert_true(start[0] == 0 || back[count[0] * row] == 0xa5);
    }
    mt_h5_close(&file);
    H5Fclose(plain);
    /* a bit of the first set's middle */
    size_t size;
    char *text = get_file(in_dir("chunks.h5"), &size);
    char *at = memmem(text, size, data + (2 << 20), 64);
    assert_non_null(at);
    at[5] ^= 1;
    put_file(in_dir("chunks.h5"), text, size);
    mt_h5_info info;
    assert_ok(mt_h5_open(&file, in_dir("chunks.h5")));
    assert_ok(mt_h5_dataset_info(file, "0", &info));
    assert_fails(mt_h5_read(file, "0", &info, back), MT_EDAMAGED, "cannot read the data");
    mt_h5_close(&file);
    free(text), free(data), free(back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chunks_are_as_hdf5_has_them),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
