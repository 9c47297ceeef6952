/* safetensors: round trips, and headers that lie. */
#include <dirent.h>

#include "tests/train/files.h"
#include "train/safetensors.h"

/* A file from a header's text and some bytes of data; `length` is what the file says of the header,
 * or -1: the truth. */
static const char *put_tensors(const char *header, size_t data_bytes, int64_t length)
{
    static unsigned char file[65536];
    size_t n = strlen(header);
    uint64_t said = length < 0 ? n : (uint64_t)length;
    for (int i = 0; i < 8; i++) file[i] = (unsigned char)(said >> (8 * i));
    memcpy(file + 8, header, n);
    for (size_t i = 0; i < data_bytes; i++) file[8 + n + i] = (unsigned char)i;
    put_file(in_dir("t.safetensors"), file, 8 + n + data_bytes);
    return in_dir("t.safetensors");
}

static void test_reading(void **state)
{
    (void)state;
    mt_safetensors *set;
    const char *path =
        put_tensors("{\"__metadata__\":{\"format\":\"pt\"},"
                    "\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[4,28]},"
                    "\"empty\":{\"dtype\":\"F64\",\"shape\":[0,9],\"data_offsets\":[28,28]},"
                    "\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,4]},"
                    "\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[28,36]},"
                    "\"mask\":{\"dtype\":\"BOOL\",\"shape\":[1,1],\"data_offsets\":[36,37]},"
                    "\"f4\":{\"dtype\":\"F4\",\"shape\":[6],\"data_offsets\":[37,40]}}   ",
                    40, -1);
    assert_ok(mt_safetensors_open(&set, path));
    assert_int_equal(mt_safetensors_count(set), 6);
    assert_string_equal(mt_safetensors_get(set, 0)->name, "a");
    mt_st_tensor *t = mt_safetensors_find(set, "b");
    mt_dtype dtype;
    assert_non_null(t);
    assert_int_equal(t->bytes, 24);
    assert_int_equal(((const unsigned char *)t->data)[0], 4);
    assert_int_equal(t->shape[1], 3);
    assert_ok(mt_st_tensor_dtype(&dtype, t));
    assert_int_equal(dtype, MT_F32);
    assert_null(mt_safetensors_find(set, "c"));
    assert_fails(mt_st_tensor_dtype(&dtype, mt_safetensors_find(set, "mask")), MT_EUNSUPPORTED,
                 "BOOL");
    assert_fails(mt_st_tensor_dtype(&dtype, mt_safetensors_find(set, "f4")), MT_EUNSUPPORTED, "F4");
    mt_safetensors_close(&set);
    assert_null(set);
    assert_ok(mt_safetensors_open(&set, put_tensors("{}", 0, -1)));
    assert_int_equal(mt_safetensors_count(set), 0);
    assert_null(mt_safetensors_find(set, "c"));
    mt_safetensors_close(&set);
    mt_safetensors_close(&set);
}

#define T(name, shape, begin, end)                                                                 \
    "\"" name "\":{\"dtype\":\"F32\",\"shape\":" shape ",\"data_offsets\":[" begin "," end "]}"

static void test_lies(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        int64_t length;
        const char *words;
    } bad[] = {
        { "", 0, -1, "begin with '{'" },
        { "[]", 0, -1, "begin with '{'" },
        { " {}", 0, -1, "begin with '{'" },
        { "{", 0, -1, "not JSON" },
        { "{}x", 0, -1, "not JSON" },
        { "{}", 0, 3, "more than the file's" },
        { "{}", 0, INT64_MAX, "more than the file's" },
        { "{}", 4, -1, "4 bytes of data, but the tensors end at 0" },
        { "{\"a\":1}", 0, -1, "no dtype" },
        { "{\"a\":{}}", 0, -1, "no dtype" },
        { "{\"a\":{\"dtype\":\"F33\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, -1, "'F33'" },
        { "{\"a\":{\"dtype\":32,\"shape\":[],\"data_offsets\":[0,4]}}", 4, -1, "no dtype" },
        { "{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, -1, "shape" },
        { "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, -1, "data_offsets" },
        { "{" T("a", "[-1]", "0", "4") "}", 4, -1, "extent 0" },
        { "{" T("a", "[1.0]", "0", "4") "}", 4, -1, "extent 0" },
        { "{" T("a", "[\"1\"]", "0", "4") "}", 4, -1, "extent 0" },
        { "{" T("a", "[1,1,1,1,1,1,1,1,1]", "0", "4") "}", 4, -1, "at most 8 extents" },
        { "{" T("a", "[4294967296,4294967296]", "0", "0") "}", 0, -1, "extent 1" },
        { "{" T("a", "[4611686018427387905]", "0", "4") "}", 4, -1, "4 bytes of data for 46" },
        { "{" T("a", "[2]", "0", "4") "}", 4, -1, "4 bytes of data for 2 elements" },
        { "{" T("a", "[1]", "0", "8") "}", 8, -1, "8 bytes of data for 1 elements" },
        { "{" T("a", "[1]", "4", "0") "}", 4, -1, "not within the 4 bytes" },
        { "{" T("a", "[1]", "-4", "0") "}", 4, -1, "not within the 4 bytes" },
        { "{" T("a", "[2]", "0", "8") "}", 4, -1, "not within the 4 bytes" },
        { "{" T("a", "[1]", "9223372036854775800", "9223372036854775804") "}", 4, -1,
          "not within" },
        { "{" T("a", "[1]", "0", "9223372036854775808") "}", 4, -1, "not JSON" },
        { "{" T("a", "[1]", "0", "4") "," T("b", "[1]", "0", "4") "}", 4, -1,
          "tensor 'b' begins at byte 0 of the data, before the end of 'a' at 4: tensors may not" },
        { "{" T("a", "[2]", "0", "8") "," T("b", "[2]", "4", "12") "}", 12, -1,
          "tensor 'b' begins at byte 4 of the data, before the end of 'a' at 8: tensors may not" },
        { "{" T("a", "[1]", "0", "4") "," T("b", "[1]", "8", "12") "}", 12, -1,
          "'b' begins at byte 8 of the data, and no tensor has the bytes before it from 4 on" },
        { "{" T("a", "[1]", "4", "8") "}", 8, -1,
          "'a' begins at byte 4 of the data, and no tensor has the bytes before it from 0 on" },
        { "{" T("a", "[1]", "0", "4") "}", 8, -1, "8 bytes of data, but the tensors end at 4" },
        { "{" T("a", "[1]", "0", "4") "," T("a", "[1]", "4", "8") "}", 8, -1, "not JSON" },
        { "{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, -1, "1 bytes" },
    };
    mt_safetensors *set;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const char *path = put_tensors(bad[i].header, bad[i].data, bad[i].length);
        assert_fails(mt_safetensors_open(&set, path), MT_EDAMAGED, bad[i].words);
        assert_null(set);
    }
    for (size_t n = 0; n < 8; n++) {
        put_file(in_dir("short"), "\2\0\0\0\0\0\0\0{}", n);
        assert_fails(mt_safetensors_open(&set, in_dir("short")), MT_EDAMAGED, "too few");
    }
    assert_fails(mt_safetensors_open(&set, in_dir("absent")), MT_EIO, "absent");
    assert_fails(mt_safetensors_open_dir(&set, in_dir("absent")), MT_EIO, "neither");
    char deep[20000]; /* nesting */
    memset(deep, '[', sizeof deep);
    memcpy(deep, "{\"a\":", 5);
    deep[sizeof deep - 1] = '\0';
    assert_fails(mt_safetensors_open(&set, put_tensors(deep, 0, -1)), MT_EDAMAGED, "not JSON");
}

/* ---- writing -----------------------------------------------------------------------------------
 */

enum { ENTRIES = 7 };
static const mt_st_entry entries[ENTRIES] = {
    { "z.bf16", MT_BF16, 2, { 3, 5 } },    { "b", MT_U8, 1, { 3 } },
    { "a.f64", MT_F64, 1, { 4 } },         { "name \"quoted\" \xc3\xa9", MT_F32, 2, { 2, 2 } },
    { "empty", MT_F32, 2, { 0, 4 } },      { "scalar", MT_I64, 0, { 0 } },
    { "a.bf16", MT_BF16, 3, { 2, 1, 2 } },
};

static mt_status fill_random(void *user, int64_t i, void *data, size_t bytes)
{
    (void)user;
    for (size_t b = 0; b < bytes; b++)
        ((unsigned char *)data)[b] = (unsigned char)mt_rng_u32(3, (uint32_t)i, b);
    return MT_OK;
}

static void check_written(const char *dir)
{
    mt_safetensors *set;
    assert_ok(mt_safetensors_open_dir(&set, dir));
    assert_int_equal(mt_safetensors_count(set), ENTRIES);
    for (int i = 0; i < ENTRIES; i++) {
        const mt_st_tensor *t = mt_safetensors_find(set, entries[i].name);
        unsigned char want[256];
        mt_dtype dtype;
        assert_non_null(t);
        assert_ok(mt_st_tensor_dtype(&dtype, t));
        assert_int_equal(dtype, entries[i].dtype);
        assert_int_equal(t->ndim, entries[i].ndim);
        for (int d = 0; d < t->ndim; d++) assert_int_equal(t->shape[d], entries[i].shape[d]);
        assert_int_equal((uintptr_t)t->data % mt_dtype_size(dtype), 0);
        fill_random(NULL, i, want, t->bytes);
        assert_memory_equal(t->data, want, t->bytes);
    }
    mt_safetensors_close(&set);
}

static int count_shards(const char *dir)
{
    int count = 0;
    DIR *files = opendir(dir);
    assert_non_null(files);
    for (const struct dirent *e; (e = readdir(files));) count += !strncmp(e->d_name, "model-", 6);
    closedir(files);
    return count;
}

static void test_writing(void **state)
{
    (void)state;
    char dir[300], file[400], index[400], other[400];
    snprintf(dir, sizeof dir, "%s/out", files_dir);
    snprintf(file, sizeof file, "%s/model.safetensors", dir);
    snprintf(index, sizeof index, "%s/model.safetensors.index.json", dir);
    assert_ok(mt_dir_create(dir));
    assert_ok(mt_safetensors_write_dir(dir, entries, ENTRIES, 0, fill_random, NULL));
    check_written(dir);
    size_t bytes;
    char *text = get_file(file, &bytes);
    assert_memory_equal(text + 8, "{\"__metadata__\":{\"format\":\"pt\"}", 31);
    assert_int_equal(text[0] % 8, 0);
    assert_int_equal(bytes, 8 + (unsigned char)text[0] + 256 * (unsigned char)text[1] + 30 + 3 +
                                32 + 16 + 8 + 8);
    free(text);
    /* smaller and smaller files, down to one for each tensor that has bytes; fewer again */
    static const int64_t limits[] = { 90, 40, 1, 40 };
    static const int shards[] = { 2, 3, 6, 3 };
    for (int i = 0; i < 4; i++) {
        assert_ok(mt_safetensors_write_dir(dir, entries, ENTRIES, limits[i], fill_random, NULL));
        assert_false(mt_path_exists(file));
        assert_true(mt_path_exists(index));
        assert_int_equal(count_shards(dir), shards[i]); /* none of the sets before */
        check_written(dir);
    }
    snprintf(other, sizeof other, "%s/model-2-of-4.safetensors", dir);
    put_text(other, "not a name of ours");
    assert_ok(mt_safetensors_write_dir(dir, entries, ENTRIES, 1000, fill_random, NULL));
    assert_false(mt_path_exists(index));
    assert_int_equal(count_shards(dir), 1);
    assert_true(mt_path_exists(other));
    check_written(dir);
    assert_ok(mt_safetensors_write_dir(dir, entries, 0, 0, fill_random, NULL));
}

static mt_status fill_failing(void *user, int64_t i, void *data, size_t bytes)
{
    if (i == 3) return MT_FAIL(MT_EDAMAGED, "tensor 3 cannot be read");
    return fill_random(user, i, data, bytes);
}

static int write_limited(void)
{
    mt_status status =
        mt_safetensors_write_dir(in_dir("full"), entries, ENTRIES, 0, fill_random, NULL);
    return status == MT_EIO && strstr(mt_error_message(), "File too large") ? 0 : 1;
}

static void test_failing_writes(void **state)
{
    (void)state;
    assert_ok(mt_dir_create(in_dir("full")));
    assert_ok(mt_safetensors_write_dir(in_dir("full"), entries, ENTRIES, 0, fill_random, NULL));
    assert_fails(mt_safetensors_write_dir(in_dir("full"), entries, ENTRIES, 0, fill_failing, NULL),
                 MT_EDAMAGED, "tensor 3");
    assert_int_equal(with_file_limit(100, write_limited), 0);
    check_written(in_dir("full"));
    assert_false(mt_path_exists(in_dir("full/model.safetensors.tmp")));
    /* of shards no mixture of new and old is left that an index names */
    assert_ok(mt_dir_create(in_dir("cut")));
    assert_ok(mt_safetensors_write_dir(in_dir("cut"), entries, ENTRIES, 40, fill_random, NULL));
    assert_fails(mt_safetensors_write_dir(in_dir("cut"), entries, ENTRIES, 40, fill_failing, NULL),
                 MT_EDAMAGED, "tensor 3");
    assert_false(mt_path_exists(in_dir("cut/model.safetensors.index.json")));
    assert_fails(
        mt_safetensors_write_dir(in_dir("nowhere"), entries, ENTRIES, 0, fill_random, NULL), MT_EIO,
        "nowhere");
}

/* ---- indexes and damage ------------------------------------------------------------------------
 */

static void test_bad_indexes(void **state)
{
    (void)state;
    static const struct {
        const char *text, *words;
    } bad[] = {
        { "", "not an index" },
        { "[]", "not an index" },
        { "{\"weight_map\":[]}", "not an index" },
        { "{\"weight_map\":{\"a\":1}}", "plain file name" },
        { "{\"weight_map\":{\"a\":\"../secret\"}}", "plain file name" },
        { "{\"weight_map\":{\"a\":\"..\"}}", "plain file name" },
        { "{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "plain file name" },
        { "{\"weight_map\":{\"a\":\"\"}}", "plain file name" },
        { "{\"weight_map\":{\"a\":\"one\",\"b\":\"two\"}}", "tensor 'a' is in two files" },
        { "{\"weight_map\":{\"a\":\"one\",\"c\":\"one\"}}", "'c' is in none" },
        { "{\"weight_map\":{\"a\":\"one\"},\"weight_map\":{}}", "not an index" },
    };
    char dir[300], path[400];
    mt_safetensors *set;
    snprintf(dir, sizeof dir, "%s/index", files_dir);
    assert_ok(mt_dir_create(dir));
    const char *source = put_tensors("{" T("a", "[1]", "0", "4") "}", 4, -1);
    size_t bytes;
    char *text = get_file(source, &bytes);
    put_file(in_dir("index/one"), text, bytes);
    put_file(in_dir("index/two"), text, bytes);
    free(text);
    snprintf(path, sizeof path, "%s/model.safetensors.index.json", dir);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_text(path, bad[i].text);
        assert_fails(mt_safetensors_open_dir(&set, dir), MT_EDAMAGED, bad[i].words);
        assert_null(set);
    }
    put_text(path, "{\"weight_map\":{\"a\":\"three\"}}");
    assert_fails(mt_safetensors_open_dir(&set, dir), MT_EIO, "three");
    put_text(path, "{\"weight_map\":{\"a\":\"one\"}}");
    assert_ok(mt_safetensors_open_dir(&set, dir));
    mt_safetensors_close(&set);
}

/* The format has no checksum: a flipped bit is refused, or moves names, types and values, but never
 * reads outside. */
static void test_damage(void **state)
{
    (void)state;
    char file[400];
    size_t bytes;
    mt_safetensors *set;
    unsigned sum = 0;
    snprintf(file, sizeof file, "%s/full/model.safetensors", files_dir);
    char *text = get_file(file, &bytes);
    for (size_t i = 0; i < 8 * bytes; i++) {
        text[i / 8] ^= (char)(1 << i % 8);
        put_file(in_dir("d.safetensors"), text, bytes);
        text[i / 8] ^= (char)(1 << i % 8);
        if (mt_safetensors_open(&set, in_dir("d.safetensors")) != MT_OK) continue;
        for (int64_t t = 0; t < mt_safetensors_count(set); t++)
            for (size_t b = 0; b < mt_safetensors_get(set, t)->bytes; b++)
                sum += ((const unsigned char *)mt_safetensors_get(set, t)->data)[b];
        mt_safetensors_close(&set);
    }
    assert_true(sum > 0);
    for (size_t n = 0; n < bytes; n++) {
        put_file(in_dir("d.safetensors"), text, n);
        assert_int_equal(mt_safetensors_open(&set, in_dir("d.safetensors")), MT_EDAMAGED);
    }
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_reading),     cmocka_unit_test(test_lies),
        cmocka_unit_test(test_writing),     cmocka_unit_test(test_failing_writes),
        cmocka_unit_test(test_bad_indexes), cmocka_unit_test(test_damage),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
