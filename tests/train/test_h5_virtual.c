/* Virtual datasets: what several files hold reads as one, by us and by other programs, wherever the
 * directory is; a file that is missing, damaged or of another set is refused, and so are parts that
 * lead elsewhere. */
#include <hdf5.h>
#include <sys/resource.h>

#include "tests/train/files.h"
#include "train/h5.h"

enum { ROWS = 7, COLUMNS = 5, COUNT = ROWS * COLUMNS, FILES = 3 };

/* Who has what: the file of each element range, which ends where the next one begins. Within rows
 * and at their ends; files with several ranges, and with none. */
typedef struct range {
    int file;
    int64_t end;
} range;
static const range layouts[][5] = {
    { { 0, 10 }, { 1, 25 }, { 2, COUNT } },
    { { 0, 3 }, { 1, 4 }, { 2, COUNT } },
    { { 2, 7 }, { 0, 33 }, { 1, COUNT } },
    { { 1, 12 }, { 2, COUNT } },
    { { 0, 1 }, { 1, 13 }, { 0, 14 }, { 2, 34 }, { 1, COUNT } },
};
enum { LAYOUTS = sizeof layouts / sizeof layouts[0] };

static const char *const names[FILES] = { "a_0.h5", "b-1.h5", "c.2" };

static float value(int64_t i)
{
    return (float)(i * i) / 8 - 3;
}

static mt_h5 *begin_file(const char *dir, const char *name, const char *set)
{
    char path[300];
    mt_h5 *file;
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_ok(mt_h5_create(&file, path));
    assert_ok(mt_h5_set_string(file, "/", "set", set));
    return file;
}

/* The elements that a layout gives to file `f`, which has its extents in their places then; returns
 * how many there are in all. */
static int64_t write_share(const char *dir, const range *layout, int f, const char *set,
                           mt_h5_extent *extents)
{
    float data[COUNT];
    int64_t held = 0, first = 0, n = 0;
    for (const range *r = layout; first < COUNT; first = r++->end, n++) {
        if (r->file != f) continue;
        for (int64_t i = first; i < r->end; i++) data[held + i - first] = value(i);
        extents[r - layout] = (mt_h5_extent){ names[f], first, r->end - first, held };
        held += r->end - first;
    }
    mt_h5 *file = begin_file(dir, names[f], set);
    if (held) assert_ok(mt_h5_write(file, "g/x", MT_F32, 1, &held, data));
    assert_ok(mt_h5_commit(&file));
    return n;
}

/* The files of a layout in `dir`, and whole.h5. */
static void write_set(const char *dir, const range *layout)
{
    const int64_t shape[2] = { ROWS, COLUMNS };
    mt_h5_extent extents[5];
    int64_t n = 0;
    assert_ok(mt_dir_remove(dir));
    assert_ok(mt_dir_create(dir));
    for (int f = 0; f < FILES; f++) n = write_share(dir, layout, f, "one", extents);
    mt_h5 *file = begin_file(dir, "whole.h5", "one");
    assert_ok(mt_h5_write_virtual(file, "g/x", MT_F32, 2, shape, extents, n));
    assert_ok(mt_h5_commit(&file));
}

static mt_h5 *open_whole(const char *dir)
{
    char path[300];
    mt_h5 *file;
    snprintf(path, sizeof path, "%s/whole.h5", dir);
    assert_ok(mt_h5_open(&file, path));
    return file;
}

/* Every box of the dataset. */
static void expect_boxes(mt_h5 *file)
{
    float got[COUNT];
    for (int64_t r = 0; r < ROWS; r++)
        for (int64_t c = 0; c < COLUMNS; c++)
            for (int64_t m = 0; m <= ROWS - r; m++)
                for (int64_t n = 0; n <= COLUMNS - c; n++) {
                    const int64_t start[2] = { r, c }, count[2] = { m, n };
                    memset(got, 0xff, sizeof got);
                    assert_ok(mt_h5_read_slab(file, "g/x", MT_F32, start, count, got));
                    for (int64_t i = 0; i < m * n; i++) {
                        float want = value((r + i / n) * COLUMNS + c + i % n);
                        assert_memory_equal(&got[i], &want, sizeof want);
                    }
                }
}

static void expect_whole(const char *dir)
{
    mt_h5_info info;
    float got[COUNT];
    const int64_t shape[2] = { ROWS, COLUMNS };
    mt_h5 *file = open_whole(dir);
    assert_ok(mt_h5_expect(file, "g/x", MT_F32, 2, shape, &info));
    assert_int_equal(info.offset, -1);
    assert_ok(mt_h5_read(file, "g/x", &info, got));
    for (int i = 0; i < COUNT; i++) assert_true(got[i] == value(i));
    expect_boxes(file);
    mt_h5_close(&file);
}

/* As any other program reads it. */
static void expect_foreign(const char *dir)
{
    char path[300];
    float got[COUNT];
    snprintf(path, sizeof path, "%s/whole.h5", dir);
    hid_t file = H5Fopen(path, H5F_ACC_RDONLY, H5P_DEFAULT);
    hid_t x = H5Dopen2(file, "g/x", H5P_DEFAULT);
    assert_true(x >= 0);
    assert_true(H5Dread(x, H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, got) >= 0);
    for (int i = 0; i < COUNT; i++) assert_true(got[i] == value(i));
    H5Dclose(x), H5Fclose(file);
}

static void test_reading(void **state)
{
    (void)state;
    for (int i = 0; i < LAYOUTS; i++) {
        char here[256], there[256];
        snprintf(here, sizeof here, "%s", in_dir("here"));
        snprintf(there, sizeof there, "%s", in_dir("there"));
        write_set(here, layouts[i]);
        expect_whole(here);
        expect_foreign(here);
        assert_ok(mt_dir_remove(there));
        assert_int_equal(rename(here, there), 0);
        expect_whole(there);
        expect_foreign(there);
    }
}

/* More files than can be open at a time; those before the last stay open, the others come again. */
static void test_many_files(void **state)
{
    (void)state;
    enum { MANY = 40 };
    static char many[MANY][16];
    const int64_t one = 1, all = MANY;
    const char *dir = in_dir("many");
    mt_h5_extent extents[MANY];
    struct rlimit before, few;
    float got[MANY];
    assert_ok(mt_dir_create(dir));
    for (int i = 0; i < MANY; i++) {
        const float x = value(i);
        snprintf(many[i], sizeof many[i], "%d.h5", i);
        extents[i] = (mt_h5_extent){ many[i], i, 1, 0 };
        mt_h5 *file = begin_file(dir, many[i], "one");
        assert_ok(mt_h5_write(file, "x", MT_F32, 1, &one, &x));
        assert_ok(mt_h5_commit(&file));
    }
    mt_h5 *whole = begin_file(dir, "whole.h5", "one");
    assert_ok(mt_h5_write_virtual(whole, "x", MT_F32, 1, &all, extents, MANY));
    assert_ok(mt_h5_commit(&whole));
    assert_int_equal(getrlimit(RLIMIT_NOFILE, &before), 0);
    few = before, few.rlim_cur = MANY * 3 / 4;
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
    whole = open_whole(dir);
    for (int again = 0; again < 2; again++) {
        const int64_t start = 0;
        memset(got, 0xff, sizeof got);
        assert_ok(mt_h5_read_slab(whole, "x", MT_F32, &start, &all, got));
        for (int i = 0; i < MANY; i++) assert_true(got[i] == value(i));
    }
    mt_h5_close(&whole);
    assert_int_equal(setrlimit(RLIMIT_NOFILE, &before), 0);
}

static void test_types(void **state)
{
    (void)state;
    static const int types[] = { MT_F64, MT_BF16, MT_U8, MT_I64 };
    unsigned char data[64], got[64];
    const int64_t three = 3, five = 5, eight = 8;
    for (int i = 0; i < 64; i++) data[i] = (unsigned char)(i * 37);
    for (int i = 0; i < 4; i++) {
        size_t size = mt_dtype_size((mt_dtype)types[i]);
        const mt_h5_extent extents[2] = { { names[0], 0, 3, 0 }, { names[1], 3, 5, 0 } };
        mt_h5 *a = begin_file(files_dir, names[0], ""), *b = begin_file(files_dir, names[1], "");
        mt_h5 *file = begin_file(files_dir, "whole.h5", "");
        mt_h5_info info;
        assert_ok(mt_h5_write(a, "x", types[i], 1, &three, data));
        assert_ok(mt_h5_write(b, "x", types[i], 1, &five, data + 3 * size));
        assert_ok(mt_h5_write_virtual(file, "x", types[i], 1, &eight, extents, 2));
        assert_ok(mt_h5_commit(&a));
        assert_ok(mt_h5_commit(&b));
        assert_ok(mt_h5_commit(&file));
        file = open_whole(files_dir);
        assert_ok(mt_h5_expect(file, "x", types[i], 1, &eight, &info));
        assert_ok(mt_h5_read(file, "x", &info, got));
        assert_memory_equal(got, data, 8 * size);
        mt_h5_close(&file);
    }
}

/* What is in no file, or in two, is not written. */
static void test_cover(void **state)
{
    (void)state;
    const int64_t shape[2] = { 2, 4 }, cube[3] = { 2, 2, 2 };
    static const struct {
        mt_h5_extent extents[2];
        const char *words;
    } rows[] = {
        { { { "a", 0, 3, 0 }, { "b", 4, 4, 0 } }, "from 3 on" },
        { { { "a", 0, 5, 0 }, { "b", 4, 4, 0 } }, "in two" },
        { { { "a", 1, 3, 0 }, { "b", 4, 4, 0 } }, "from 0 on" },
        { { { "a", 0, 3, 0 }, { "b", 3, 4, 0 } }, "7 elements of 8" },
        { { { "a", 0, 3, 0 }, { "b", 3, 6, 0 } }, "9 elements of 8" },
    };
    mt_h5 *file = begin_file(files_dir, "whole.h5", "");
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        assert_fails(mt_h5_write_virtual(file, "x", MT_F32, 2, shape, rows[i].extents, 2),
                     MT_EINTERNAL, rows[i].words);
    assert_fails(mt_h5_write_virtual(file, "x", MT_F32, 3, cube, rows[0].extents, 2), MT_EINVAL,
                 "3 dimensions");
    mt_h5_close(&file);
}

static void expect_refused(const char *dataset, mt_status code, const char *words)
{
    mt_h5_info info;
    mt_h5 *file = open_whole(files_dir);
    assert_fails(mt_h5_dataset_info(file, dataset, &info), code, words);
    mt_h5_close(&file);
}

static void test_files(void **state)
{
    (void)state;
    mt_h5_extent extents[5];
    write_set(files_dir, layouts[0]);
    write_share(files_dir, layouts[0], 1, "two", extents);
    expect_refused("g/x", MT_EDAMAGED, "is of another save: of 'two', not of 'one'");
    write_share(files_dir, layouts[1], 1, "one", extents);
    expect_refused("g/x", MT_EDAMAGED, "b-1.h5', g/x: is not what");
    mt_h5 *file = begin_file(files_dir, names[1], "one");
    const int64_t fifteen = 15;
    const double data[15] = { 0 };
    assert_ok(mt_h5_write(file, "g/x", MT_F64, 1, &fifteen, data));
    assert_ok(mt_h5_commit(&file));
    expect_refused("g/x", MT_EDAMAGED, "b-1.h5', g/x: is not what");
    file = begin_file(files_dir, names[1], "one");
    assert_ok(mt_h5_commit(&file));
    expect_refused("g/x", MT_EDAMAGED, "b-1.h5', g/x: there is no such object");
    put_text(in_dir(names[1]), "not HDF5");
    expect_refused("g/x", MT_EDAMAGED, "b-1.h5'");
    assert_int_equal(unlink(in_dir(names[1])), 0);
    expect_refused("g/x", MT_EIO, "b-1.h5': No such file");
}

/* A damaged byte of a share is found when it is read. */
static void test_bit_flip(void **state)
{
    (void)state;
    size_t bytes, found = 0;
    float got[COUNT], mark = value(12);
    mt_h5_info info;
    write_set(files_dir, layouts[0]);
    char *text = get_file(in_dir(names[1]), &bytes);
    for (size_t i = 0; i + sizeof mark <= bytes && !found; i++)
        if (!memcmp(text + i, &mark, sizeof mark)) found = i;
    assert_true(found);
    text[found] ^= 4;
    put_file(in_dir(names[1]), text, bytes);
    free(text);
    mt_h5 *file = open_whole(files_dir);
    assert_ok(mt_h5_dataset_info(file, "g/x", &info));
    assert_fails(mt_h5_read(file, "g/x", &info, got), MT_EDAMAGED, "b-1.h5', g/x: cannot read");
    const int64_t start[2] = { 0, 0 }, count[2] = { 2, COLUMNS };
    assert_ok(mt_h5_read_slab(file, "g/x", MT_F32, start, count, got)); /* of another file */
    mt_h5_close(&file);
}

/* ---- hostile files -----------------------------------------------------------------------------
 */

/* A dataset of 8 elements whose elements [first, first + count) are in `source`, "x". */
static void raw_part(hid_t list, const char *source, hsize_t first, hsize_t count, hsize_t from)
{
    const hsize_t eight = 8;
    hid_t space = H5Screate_simple(1, &eight, NULL), theirs = H5Scopy(space);
    H5Sselect_hyperslab(space, H5S_SELECT_SET, &first, NULL, &count, NULL);
    H5Sselect_hyperslab(theirs, H5S_SELECT_SET, &from, NULL, &count, NULL);
    assert_true(H5Pset_virtual(list, space, source, "x", theirs) >= 0);
    H5Sclose(space), H5Sclose(theirs);
}

static void raw_dataset(hid_t file, const char *name, hid_t list)
{
    const hsize_t eight = 8;
    hid_t space = H5Screate_simple(1, &eight, NULL);
    hid_t id = H5Dcreate2(file, name, H5T_IEEE_F32LE, space, H5P_DEFAULT, list, H5P_DEFAULT);
    assert_true(id >= 0);
    H5Dclose(id), H5Sclose(space), H5Pclose(list);
}

static void test_hostile(void **state)
{
    (void)state;
    static const struct {
        const char *source;
        int64_t parts[2][3]; /* first, count, from */
        const char *words;
    } rows[] = {
        { "/etc/passwd", { { 0, 4, 0 }, { 4, 4, 4 } }, "not a file beside it" },
        { "../plain.h5", { { 0, 4, 0 }, { 4, 4, 4 } }, "not a file beside it" },
        { ".", { { 0, 4, 0 }, { 4, 4, 4 } }, "not a file beside it" },
        { "plain.h5", { { 0, 4, 0 }, { 5, 3, 4 } }, "elements from 4 on" },
        { "plain.h5", { { 0, 4, 0 }, { 3, 5, 0 } }, "elements from 4 on" },
        { "plain.h5", { { 4, 4, 0 }, { 0, 4, 0 } }, "elements from 0 on" },
        { "plain.h5", { { 0, 4, 0 }, { 4, 3, 0 } }, "7 elements of 8" },
        { "whole.h5", { { 0, 4, 0 }, { 4, 4, 4 } }, "refused" },
    };
    enum { ROWS_COUNT = sizeof rows / sizeof rows[0] };
    const float data[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    const int64_t eight = 8;
    mt_h5 *plain;
    assert_ok(mt_h5_create(&plain, in_dir("plain.h5")));
    assert_ok(mt_h5_write(plain, "x", MT_F32, 1, &eight, data));
    assert_ok(mt_h5_commit(&plain));
    hid_t file = H5Fcreate(in_dir("whole.h5"), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    for (int i = 0; i < ROWS_COUNT; i++) {
        hid_t list = H5Pcreate(H5P_DATASET_CREATE);
        for (int j = 0; j < 2; j++) {
            const int64_t *p = rows[i].parts[j];
            raw_part(list, rows[i].source, (hsize_t)p[0], (hsize_t)p[1], (hsize_t)p[2]);
        }
        raw_dataset(file, rows[i].source[0] == 'w' ? "x" : (char[]){ (char)('a' + i), '\0' }, list);
    }
    H5Fclose(file);
    for (int i = 0; i < ROWS_COUNT; i++)
        expect_refused(rows[i].source[0] == 'w' ? "x" : (char[]){ (char)('a' + i), '\0' },
                       MT_EDAMAGED, rows[i].words);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reading),    cmocka_unit_test(test_types),
        cmocka_unit_test(test_cover),      cmocka_unit_test(test_files),
        cmocka_unit_test(test_bit_flip),   cmocka_unit_test(test_hostile),
        cmocka_unit_test(test_many_files),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
