/* HDF5 files: what is written comes back, what is hostile or damaged is refused, a full disk is an
 * error. */
#include <hdf5.h>
#include <omp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/train/files.h"
#include "train/h5.h"

/* ---- round trips -------------------------------------------------------------------------------
 */

static void test_every_type(void **state)
{
    (void)state;
    mt_h5 *file;
    unsigned char data[MT_H5_TYPE_COUNT][6 * 8], back[6 * 8];
    const int64_t shape[2] = { 2, 3 };
    char name[32];
    for (int t = 0; t < MT_H5_TYPE_COUNT; t++)
        for (size_t i = 0; i < sizeof back; i++)
            data[t][i] = (unsigned char)mt_rng_u32(5, (uint32_t)t, i);
    assert_ok(mt_h5_create(&file, in_dir("types.h5")));
    for (int t = 0; t < MT_H5_TYPE_COUNT; t++) {
        snprintf(name, sizeof name, "/a/b/%d", t);
        assert_ok(mt_h5_write(file, name, t, 2, shape, data[t]));
    }
    assert_ok(mt_h5_commit(&file));
    assert_ok(mt_h5_open(&file, in_dir("types.h5")));
    for (int t = 0; t < MT_H5_TYPE_COUNT; t++) {
        mt_h5_info info;
        snprintf(name, sizeof name, "a/b/%d", t);
        assert_ok(mt_h5_dataset_info(file, name, &info));
        assert_int_equal(info.type, t);
        assert_int_equal(info.count, 6);
        assert_ok(mt_h5_expect(file, name, t, 2, shape, &info));
        assert_ok(mt_h5_read(file, name, &info, back));
        assert_memory_equal(back, data[t], (size_t)info.bytes);
    }
    char **names;
    int64_t count;
    assert_ok(mt_h5_list(file, "/a/b", &names, &count));
    assert_int_equal(count, MT_H5_TYPE_COUNT);
    assert_string_equal(names[0], "0");
    mt_h5_names_free(&names, count);
    mt_h5_close(&file);
}

/* Shapes around the chunk size, scalars and empty ones; slabs. */
static void test_shapes(void **state)
{
    (void)state;
    static const int64_t shapes[][4] = { { 0, 7, 0, 0 },      { 1, 1, 0, 0 },
                                         { 33, 7, 0, 0 },     { 262144, 1, 0, 0 },
                                         { 262145, 1, 0, 0 }, { 3, 262145, 0, 0 },
                                         { 5, 1, 300, 700 } };
    enum { SHAPES = sizeof shapes / sizeof *shapes };
    float *data = malloc(5 * 300 * 700 * sizeof *data),
          *back = malloc(5 * 300 * 700 * sizeof *back);
    char name[32];
    mt_h5 *file;
    for (int64_t i = 0; i < 5 * 300 * 700; i++) data[i] = (float)i;
    assert_ok(mt_h5_create(&file, in_dir("shapes.h5")));
    for (int s = 0; s < SHAPES; s++) {
        snprintf(name, sizeof name, "%d", s);
        assert_ok(mt_h5_write(file, name, MT_F32, shapes[s][2] ? 4 : 2, shapes[s], data));
    }
    assert_ok(mt_h5_write(file, "scalar", MT_F32, 0, NULL, data + 5));
    assert_ok(mt_h5_commit(&file));
    assert_ok(mt_h5_open(&file, in_dir("shapes.h5")));
    mt_h5_info info;
    for (int s = 0; s < SHAPES; s++) {
        snprintf(name, sizeof name, "%d", s);
        assert_ok(mt_h5_expect(file, name, MT_F32, shapes[s][2] ? 4 : 2, shapes[s], &info));
        memset(back, 0xff, (size_t)info.bytes);
        assert_ok(mt_h5_read(file, name, &info, back));
        assert_memory_equal(back, data, (size_t)info.bytes);
    }
    assert_ok(mt_h5_dataset_info(file, "scalar", &info));
    assert_int_equal(info.ndim, 0);
    assert_ok(mt_h5_read(file, "scalar", &info, back));
    assert_true(back[0] == 5);
    const int64_t start[2] = { 30, 5 }, count[2] = { 2, 2 }, none[2] = { 33, 0 },
                  empty[2] = { 0, 7 };
    assert_ok(mt_h5_read_slab(file, "2", MT_F32, start, count, back));
    assert_true(back[0] == 215 && back[1] == 216 && back[2] == 222 && back[3] == 223);
    assert_ok(mt_h5_read_slab(file, "2", MT_F32, none, empty, back));
    const int64_t beyond[2] = { 32, 6 };
    assert_fails(mt_h5_read_slab(file, "2", MT_F32, beyond, count, back), MT_EINVAL, "extent 33");
    assert_fails(mt_h5_read_slab(file, "2", MT_F64, start, count, back), MT_EDAMAGED, "f32[33,7]");
    mt_h5_close(&file);
    free(data);
    free(back);
}

static void test_attributes(void **state)
{
    (void)state;
    mt_h5 *file;
    size_t many = 300000;
    char *text = malloc(many + 1), *back;
    memset(text, 'x', many);
    text[many] = '\0';
    assert_ok(mt_h5_create(&file, in_dir("attributes.h5")));
    assert_ok(mt_h5_group(file, "/meta"));
    assert_ok(mt_h5_set_string(file, "/meta", "long", text));
    assert_ok(mt_h5_set_string(file, "/meta", "empty", ""));
    assert_ok(mt_h5_set_u64(file, "/", "u", UINT64_MAX));
    assert_ok(mt_h5_set_i64(file, "/", "i", INT64_MIN));
    assert_ok(mt_h5_set_f64(file, "/", "f", 0x1.123456789abcdp-1030));
    assert_ok(mt_h5_commit(&file));
    assert_ok(mt_h5_open(&file, in_dir("attributes.h5")));
    assert_ok(mt_h5_get_string(file, "/meta", "long", &back));
    assert_string_equal(back, text);
    free(back);
    assert_ok(mt_h5_get_string(file, "/meta", "empty", &back));
    assert_string_equal(back, "");
    free(back);
    uint64_t u;
    int64_t i;
    double f;
    assert_ok(mt_h5_get_u64(file, "/", "u", &u));
    assert_true(u == UINT64_MAX);
    assert_ok(mt_h5_get_i64(file, "/", "i", &i));
    assert_true(i == INT64_MIN);
    assert_ok(mt_h5_get_f64(file, "/", "f", &f));
    assert_true(f == 0x1.123456789abcdp-1030);
    assert_fails(mt_h5_get_i64(file, "/", "u", &i), MT_EDAMAGED, "too large");
    assert_fails(mt_h5_get_u64(file, "/", "i", &u), MT_EDAMAGED, "negative");
    assert_fails(mt_h5_get_i64(file, "/", "f", &i), MT_EDAMAGED, "not an integer");
    assert_fails(mt_h5_get_f64(file, "/", "i", &f), MT_EDAMAGED, "not a float");
    assert_fails(mt_h5_get_string(file, "/", "i", &back), MT_EDAMAGED, "not a string");
    assert_fails(mt_h5_get_string(file, "/", "absent", &back), MT_EDAMAGED,
                 "no attribute 'absent'");
    mt_h5_close(&file);
    free(text);
}

/* The same contents are the same bytes: no times, no addresses. */
static void test_reproducible(void **state)
{
    (void)state;
    size_t bytes[2];
    char *text[2];
    for (int k = 0; k < 2; k++) {
        mt_h5 *file;
        const int64_t n = 1000;
        double x[1000] = { 1, 2, 3 };
        assert_ok(mt_h5_create(&file, in_dir("same.h5")));
        assert_ok(mt_h5_write(file, "/g/x", MT_F64, 1, &n, x));
        assert_ok(mt_h5_set_string(file, "/g", "text", "abc"));
        assert_ok(mt_h5_commit(&file));
        text[k] = get_file(in_dir("same.h5"), &bytes[k]);
        if (k == 0) sleep(1);
    }
    assert_int_equal(bytes[0], bytes[1]);
    assert_memory_equal(text[0], text[1], bytes[0]);
    free(text[0]);
    free(text[1]);
}

/* ---- damage ------------------------------------------------------------------------------------
 */

static void make_sample(const char *path, float *data, int64_t n)
{
    mt_h5 *file;
    for (int64_t i = 0; i < n; i++) data[i] = (float)mt_rng_uniform(1, 2, (uint64_t)i);
    assert_ok(mt_h5_create(&file, path));
    assert_ok(mt_h5_write(file, "/model/x", MT_F32, 1, &n, data));
    assert_ok(mt_h5_set_i64(file, "/model", "step", 77));
    assert_ok(mt_h5_commit(&file));
}

/* Whatever bit is flipped: an error, or everything as it was. */
static void test_bit_flips(void **state)
{
    (void)state;
    enum { N = 2000, FLIPS = 3000 };
    float data[N], back[N];
    size_t bytes;
    make_sample(in_dir("flip.h5"), data, N);
    char *text = get_file(in_dir("flip.h5"), &bytes);
    int refused = 0;
    for (uint64_t i = 0; i < FLIPS; i++) {
        size_t at = i < 800 ? i % bytes : mt_rng_below(9, 9, i, bytes);
        char bit = (char)(1 << mt_rng_below(9, 10, i, 8));
        text[at] ^= bit;
        put_file(in_dir("flipped.h5"), text, bytes);
        text[at] ^= bit;
        mt_h5 *file;
        mt_h5_info info;
        const int64_t n = N;
        int64_t step = 0;
        memset(back, 0, sizeof back);
        mt_status status = mt_h5_open(&file, in_dir("flipped.h5"));
        if (status == MT_OK) status = mt_h5_expect(file, "/model/x", MT_F32, 1, &n, &info);
        if (status == MT_OK) status = mt_h5_read(file, "/model/x", &info, back);
        if (status == MT_OK) status = mt_h5_get_i64(file, "/model", "step", &step);
        mt_h5_close(&file);
        refused += status != MT_OK;
        if (status != MT_OK)
            assert_true(strstr(mt_error_message(), "flipped.h5"));
        else if (step != 77 || memcmp(back, data, sizeof data))
            fail_msg("bit %d of byte %zu went unnoticed", bit, at);
    }
    assert_true(refused > FLIPS / 2);
    free(text);
}

/* A group of so many links that they are kept apart from it: damaged ones are no crash. */
static void test_flips_of_many_links(void **state)
{
    (void)state;
    enum { LINKS = 40 };
    const int64_t n = 1;
    const float x = 1;
    char path[64], **names;
    size_t bytes;
    mt_h5 *file;
    int64_t count;
    assert_ok(mt_h5_create(&file, in_dir("links.h5")));
    for (int i = LINKS; i--;) {
        snprintf(path, sizeof path, "/model/model.layers.%d.mlp.experts.gate_up_proj", i);
        assert_ok(mt_h5_write(file, path, MT_F32, 1, &n, &x));
    }
    assert_ok(mt_h5_commit(&file));
    char *text = get_file(in_dir("links.h5"), &bytes);
    for (size_t at = 0; at < bytes; at++) {
        const char was = text[at];
        if (!was && at % 8) continue; /* most of what is not in use */
        text[at] ^= 0x55;
        put_file(in_dir("flipped.h5"), text, bytes);
        text[at] = was;
        mt_status status = mt_h5_open(&file, in_dir("flipped.h5"));
        if (status == MT_OK) status = mt_h5_list(file, "/model", &names, &count);
        if (status == MT_OK) {
            for (int64_t i = 1; i < count; i++) assert_true(strcmp(names[i - 1], names[i]) < 0);
            mt_h5_names_free(&names, count);
        }
        mt_h5_close(&file);
    }
    free(text);
}

static void test_truncation(void **state)
{
    (void)state;
    enum { N = 2000 };
    float data[N];
    size_t bytes;
    mt_h5 *file;
    make_sample(in_dir("cut.h5"), data, N);
    char *text = get_file(in_dir("cut.h5"), &bytes);
    for (size_t n = 0; n < bytes; n += n < 100 ? 1 : 97) {
        put_file(in_dir("cut.h5"), text, n);
        assert_int_equal(mt_h5_open(&file, in_dir("cut.h5")), MT_EDAMAGED);
        assert_null(file);
    }
    free(text);
    assert_fails(mt_h5_open(&file, in_dir("absent.h5")), MT_EIO, "No such file");
    assert_fails(mt_h5_open(&file, files_dir), MT_EIO, "not a regular file");
}

/* ---- hostile files, written with the HDF5 library itself
 * ----------------------------------------- */

static hid_t raw_create(const char *name)
{
    hid_t id = H5Fcreate(in_dir(name), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    assert_true(id >= 0);
    return id;
}

static void raw_dataset(hid_t file, const char *name, hid_t type, int rank, const hsize_t *dims,
                        hid_t list)
{
    hid_t space = H5Screate_simple(rank, dims, NULL);
    hid_t id = H5Dcreate2(file, name, type, space, H5P_DEFAULT, list, H5P_DEFAULT);
    assert_true(id >= 0);
    H5Dclose(id);
    H5Sclose(space);
}

static void expect_refused(const char *file_name, const char *dataset, const char *words)
{
    mt_h5 *file;
    mt_h5_info info;
    assert_ok(mt_h5_open(&file, in_dir(file_name)));
    assert_fails(mt_h5_dataset_info(file, dataset, &info), MT_EDAMAGED, words);
    mt_h5_close(&file);
}

static void test_hostile_shapes(void **state)
{
    (void)state;
    const hsize_t huge[2] = { (hsize_t)1 << 40, (hsize_t)1 << 40 }, big[1] = { (hsize_t)1 << 40 };
    const hsize_t five[5] = { 1, 1, 1, 1, 1 }, chunk[1] = { 1 << 28 }, four[1] = { 4 };
    hid_t file = raw_create("shape.h5");
    hid_t chunked = H5Pcreate(H5P_DATASET_CREATE), wide = H5Pcreate(H5P_DATASET_CREATE);
    hid_t deflated = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(chunked, 2, (const hsize_t[]){ 64, 64 });
    H5Pset_chunk(wide, 1, chunk);
    H5Pset_chunk(deflated, 1, (const hsize_t[]){ 1 << 20 });
    H5Pset_deflate(deflated, 1);
    raw_dataset(file, "overflow", H5T_IEEE_F64LE, 2, huge, chunked);
    raw_dataset(file, "big", H5T_IEEE_F32LE, 1, big, wide);
    raw_dataset(file, "bomb", H5T_IEEE_F32LE, 1, big, deflated);
    raw_dataset(file, "rank", H5T_IEEE_F32LE, 5, five, H5P_DEFAULT);
    raw_dataset(file, "unwritten", H5T_IEEE_F32LE, 1, four, H5P_DEFAULT);
    hid_t null = H5Screate(H5S_NULL);
    H5Dclose(H5Dcreate2(file, "null", H5T_IEEE_F32LE, null, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Sclose(null);
    H5Gclose(H5Gcreate2(file, "group", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT));
    H5Pclose(chunked), H5Pclose(wide), H5Pclose(deflated);
    H5Fclose(file);
    expect_refused("shape.h5", "overflow", "overflow");
    expect_refused("shape.h5", "big", "chunks are larger");
    expect_refused("shape.h5", "bomb", "more than a file");
    expect_refused("shape.h5", "rank", "5 dimensions");
    expect_refused("shape.h5", "unwritten", "never written");
    expect_refused("shape.h5", "null", "no shape");
    expect_refused("shape.h5", "group", "not a dataset");
    expect_refused("shape.h5", "absent", "no such object");
}

static void test_hostile_types(void **state)
{
    (void)state;
    const hsize_t one[1] = { 1 };
    hid_t file = raw_create("type.h5"), string = H5Tcopy(H5T_C_S1), odd = H5Tcopy(H5T_STD_I32LE);
    H5Tset_size(string, H5T_VARIABLE);
    H5Tset_precision(odd, 17);
    raw_dataset(file, "string", string, 1, one, H5P_DEFAULT);
    raw_dataset(file, "odd", odd, 1, one, H5P_DEFAULT);
    raw_dataset(file, "reference", H5T_STD_REF_OBJ, 1, one, H5P_DEFAULT);
    raw_dataset(file, "i16", H5T_STD_I16LE, 1, one, H5P_DEFAULT);
    raw_dataset(file, "bf", H5T_STD_U16LE, 1, one, H5P_DEFAULT);
    hid_t bf = H5Dopen2(file, "bf", H5P_DEFAULT), space = H5Screate(H5S_SCALAR);
    hid_t text = H5Tcopy(H5T_C_S1);
    H5Tset_size(text, 8);
    hid_t attribute = H5Acreate2(bf, "dtype", text, space, H5P_DEFAULT, H5P_DEFAULT);
    H5Awrite(attribute, text, "fp8\0\0\0\0\0");
    H5Aclose(attribute), H5Tclose(text), H5Sclose(space), H5Dclose(bf);
    H5Tclose(string), H5Tclose(odd);
    H5Fclose(file);
    static const char *const names[] = { "string", "odd", "reference", "i16" };
    for (int i = 0; i < 4; i++) expect_refused("type.h5", names[i], "its type is not one of");
    expect_refused("type.h5", "bf", "'fp8'");
}

static void test_hostile_storage(void **state)
{
    (void)state;
    const hsize_t four[1] = { 4 };
    hid_t file = raw_create("storage.h5"), external = H5Pcreate(H5P_DATASET_CREATE);
    hid_t virtual = H5Pcreate(H5P_DATASET_CREATE), nbit = H5Pcreate(H5P_DATASET_CREATE);
    hid_t space = H5Screate_simple(1, four, NULL);
    put_text(in_dir("secret"), "0123456789abcdef");
    H5Pset_external(external, in_dir("secret"), 0, 16);
    H5Pset_virtual(virtual, space, in_dir("type.h5"), "i16", space);
    H5Pset_chunk(nbit, 1, four);
    H5Pset_nbit(nbit);
    raw_dataset(file, "external", H5T_IEEE_F32LE, 1, four, external);
    raw_dataset(file, "virtual", H5T_IEEE_F32LE, 1, four, virtual);
    raw_dataset(file, "nbit", H5T_IEEE_F32LE, 1, four, nbit);
    H5Lcreate_external(in_dir("type.h5"), "/", file, "elsewhere", H5P_DEFAULT, H5P_DEFAULT);
    H5Lcreate_soft("/nbit", file, "soft", H5P_DEFAULT, H5P_DEFAULT);
    H5Sclose(space), H5Pclose(external), H5Pclose(virtual), H5Pclose(nbit);
    H5Fclose(file);
    expect_refused("storage.h5", "external", "another file");
    expect_refused("storage.h5", "virtual", "not a file beside it");
    expect_refused("storage.h5", "nbit", "filter 5");
    expect_refused("storage.h5", "elsewhere/i16", "link");
    expect_refused("storage.h5", "soft", "link");
}

/* What h5py users write: big-endian, deflate and shuffle, variable-length strings. */
static void test_foreign_files(void **state)
{
    (void)state;
    const hsize_t dims[1] = { 1000 };
    double data[1000], back[1000];
    for (int i = 0; i < 1000; i++) data[i] = i / 7.0;
    hid_t file = raw_create("foreign.h5"), list = H5Pcreate(H5P_DATASET_CREATE);
    H5Pset_chunk(list, 1, (const hsize_t[]){ 100 });
    H5Pset_shuffle(list);
    H5Pset_deflate(list, 6);
    H5Pset_fletcher32(list);
    hid_t space = H5Screate_simple(1, dims, NULL);
    hid_t id = H5Dcreate2(file, "x", H5T_IEEE_F64BE, space, H5P_DEFAULT, list, H5P_DEFAULT);
    assert_true(H5Dwrite(id, H5T_NATIVE_DOUBLE, H5S_ALL, H5S_ALL, H5P_DEFAULT, data) >= 0);
    hid_t scalar = H5Screate(H5S_SCALAR), string = H5Tcopy(H5T_C_S1);
    H5Tset_size(string, H5T_VARIABLE);
    hid_t attribute = H5Acreate2(id, "name", string, scalar, H5P_DEFAULT, H5P_DEFAULT);
    const char *text = "variable";
    H5Awrite(attribute, string, &text);
    H5Aclose(attribute), H5Tclose(string), H5Sclose(scalar);
    H5Dclose(id), H5Sclose(space), H5Pclose(list), H5Fclose(file);
    mt_h5 *in;
    mt_h5_info info;
    char *name;
    assert_ok(mt_h5_open(&in, in_dir("foreign.h5")));
    assert_ok(mt_h5_dataset_info(in, "x", &info));
    assert_false(info.little_endian);
    assert_ok(mt_h5_read(in, "x", &info, back));
    assert_memory_equal(back, data, sizeof data);
    assert_ok(mt_h5_get_string(in, "x", "name", &name));
    assert_string_equal(name, "variable");
    free(name);
    mt_h5_close(&in);
}

/* ---- full disks --------------------------------------------------------------------------------
 */

static char no_space[1024]; /* the sentence of the failed commit */

/* Writes 4 MB over an old file; 0 when that fails with MT_EIO and leaves the old file and nothing
 * else. */
static int save_large(void)
{
    mt_h5 *file;
    const int64_t n = 1 << 20;
    float *data = calloc((size_t)n, sizeof *data), old[8] = { 0 }, back[8];
    mt_h5_info info;
    const int64_t eight = 8;
    if (mt_h5_create(&file, in_dir("full.h5"))) return 1;
    if (mt_h5_write(file, "a", MT_F32, 1, &eight, old) != MT_OK) return 2;
    mt_status status = mt_h5_write(file, "x", MT_F32, 1, &n, data);
    if (status != MT_OK && (status != MT_EIO || !strstr(mt_error_message(), "full.h5"))) return 3;
    status = mt_h5_commit(&file);
    if (status != MT_EIO || file) return 4;
    snprintf(no_space, sizeof no_space, "%s", mt_error_message());
    if (!strstr(mt_error_message(), "cannot write") || strstr(mt_error_message(), "Success"))
        return 5;
    char temp[300];
    snprintf(temp, sizeof temp, "%s.tmp", in_dir("full.h5"));
    if (mt_path_exists(temp)) return 6;
    if (mt_h5_open(&file, in_dir("full.h5")) || mt_h5_expect(file, "x", MT_F32, 1, &eight, &info) ||
        mt_h5_read(file, "x", &info, back))
        return 7;
    mt_h5_close(&file);
    /* and the library still works */
    if (mt_h5_create(&file, in_dir("small.h5")) ||
        mt_h5_write(file, "x", MT_F32, 1, &eight, back) || mt_h5_commit(&file))
        return 8;
    free(data);
    return 0;
}

static mt_status write_old(void)
{
    mt_h5 *file;
    const int64_t eight = 8;
    const float x[8] = { 1, 2, 3, 4, 5, 6, 7, 8 };
    MT_TRY(mt_h5_create(&file, in_dir("full.h5")));
    mt_status status = mt_h5_write(file, "x", MT_F32, 1, &eight, x);
    return status == MT_OK ? mt_h5_commit(&file) : status;
}

static void test_file_limit(void **state)
{
    (void)state;
    static const size_t limits[] = { 4096, 65536, 1 << 20, 4 << 20 };
    assert_ok(write_old());
    for (int i = 0; i < 4; i++) assert_int_equal(with_file_limit(limits[i], save_large), 0);
}

/* A file system of 1 MB in a mount namespace of this process' own; false where that is not allowed.
 */
static bool mount_small(const char *where)
{
    char map[64];
    unsigned uid = getuid();
    if (unshare(CLONE_NEWNS)) {
        if (unshare(CLONE_NEWUSER | CLONE_NEWNS)) return false;
        snprintf(map, sizeof map, "0 %u 1", uid);
        FILE *f = fopen("/proc/self/uid_map", "w");
        if (!f || fputs(map, f) < 0 || fclose(f)) return false;
    }
    return !mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) &&
           !mount("none", where, "tmpfs", 0, "size=1m");
}

/* A disk that is really full. */
static void test_full_disk(void **state)
{
    (void)state;
    pid_t child = fork();
    if (child == 0) {
        omp_set_num_threads(1); /* OpenMP's threads are the parent's */
        if (!mount_small(files_dir)) _exit(77);
        if (write_old() != MT_OK) _exit(98);
        int result = save_large();
        _exit(result ? result : strstr(no_space, "No space left on device") ? 0 : 97);
    }
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77) skip();
    assert_int_equal(WEXITSTATUS(status), 0);
}

static void test_abandon(void **state)
{
    (void)state;
    mt_h5 *file;
    assert_ok(write_old());
    assert_ok(mt_h5_create(&file, in_dir("full.h5")));
    mt_h5_close(&file);
    assert_null(file);
    mt_h5_close(&file);
    assert_true(mt_path_exists(in_dir("full.h5")));
    assert_false(mt_path_exists(in_dir("full.h5.tmp")));
    assert_fails(mt_h5_create(&file, in_dir("no/such/place.h5")), MT_EIO,
                 "place.h5': there is no directory '");
    assert_non_null(strstr(mt_error_message(), "/no/such'"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_type),    cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_attributes),    cmocka_unit_test(test_reproducible),
        cmocka_unit_test(test_bit_flips),     cmocka_unit_test(test_flips_of_many_links),
        cmocka_unit_test(test_truncation),    cmocka_unit_test(test_hostile_shapes),
        cmocka_unit_test(test_hostile_types), cmocka_unit_test(test_hostile_storage),
        cmocka_unit_test(test_foreign_files), cmocka_unit_test(test_file_limit),
        cmocka_unit_test(test_full_disk),     cmocka_unit_test(test_abandon),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
