/* inspect and doctor: what they say about files and machines that are known. */
#include <hdf5.h>
#include <math.h>

#include "dist/comm.h"
#include "tests/train/verbs.h"
#include "train/corpus.h"
#include "train/h5.h"
#include "train/hf.h"

static char line[1024];

static const char *words(const char *what, const char *path, const char *more)
{
    snprintf(line, sizeof line, "%s %s%s", what, path, more);
    return line;
}

/* The numbers that follow `name` in the output: times, bytes, norm, largest. */
static void read_row(const char *name, const char *shape, double numbers[4])
{
    char found_shape[64];
    const char *at = strstr(verb_output, name);
    if (!at) fail_msg("no line of %s in:\n%s", name, verb_output);
    assert_int_equal(sscanf(at + strlen(name), " %63s %lf %lf %lf %lf", found_shape, &numbers[0],
                            &numbers[1], &numbers[2], &numbers[3]),
                     5);
    assert_string_equal(found_shape, shape);
}

static void a_checkpoint_is_described(void **state)
{
    (void)state;
    mt_model_config c = small_model(false);
    double row[4], one[4], sum = 0;
    make_checkpoint(in_dir("ckpt"), &c);
    assert_verb(words("inspect", in_dir("ckpt"), ""), 0, "verified against DONE");
    assert_non_null(strstr(verb_output, "\"hidden_size\""));
    read_row("model.norm.weight", "f32[12]", row); /* ones */
    assert_true(row[0] == 1 && row[1] == 48 && row[3] == 1);
    assert_true(row[2] > 3.4640 && row[2] < 3.4642); /* sqrt(12) */
    read_row("model.layers.2.mlp.experts.*.up_proj.weight", "f32[10,12]", row);
    assert_true(row[0] == 8 && row[1] == 8 * 480);
    assert_verb(words("inspect", in_dir("ckpt"), " --experts"), 0, "step 0");
    for (int e = 0; e < 8; e++) {
        char name[64];
        snprintf(name, sizeof name, "model.layers.2.mlp.experts.%d.up_proj.weight", e);
        read_row(name, "f32[10,12]", one);
        assert_true(one[0] == 1 && one[3] <= row[3] * (1 + 1e-5));
        sum += one[2] * one[2];
    }
    /* six printed digits of each norm */
    assert_true(sum > row[2] * row[2] * (1 - 4e-5) && sum < row[2] * row[2] * (1 + 4e-5));
}

static void damage_is_found(void **state)
{
    (void)state;
    mt_model_config c = small_model(false);
    size_t bytes;
    make_checkpoint(in_dir("broken"), &c);
    char *data = get_file(in_dir("broken/model.h5"), &bytes);
    data[bytes / 2] ^= 1;
    put_file(in_dir("broken/model.h5"), data, bytes);
    free(data);
    assert_verb(words("inspect", in_dir("broken"), ""), MT_EXIT_FILES, "model.h5");
    assert_int_equal(unlink(in_dir("broken/DONE")), 0);
    assert_verb(words("inspect", in_dir("broken"), ""), MT_EXIT_FILES, "DONE");
    assert_verb(words("inspect", in_dir("nothing"), ""), MT_EXIT_FILES, "nothing");
}

static void any_hdf5_file_is_listed(void **state)
{
    (void)state;
    const float x[6] = { 3, -4, 0, 0, 0, 0 };
    const float bad[3] = { 1, INFINITY, NAN };
    const uint8_t bytes[5] = { 0, 1, 2, 254, 0 };
    const double scalar = -2.5;
    double row[4];
    mt_h5 *file;
    assert_ok(mt_h5_create(&file, in_dir("any.h5")));
    assert_ok(mt_h5_write(file, "a/b/x", MT_F32, 2, (int64_t[]){ 2, 3 }, x));
    assert_ok(mt_h5_write(file, "bad", MT_F32, 1, (int64_t[]){ 3 }, bad));
    assert_ok(mt_h5_write(file, "bytes", MT_U8, 1, (int64_t[]){ 5 }, bytes));
    assert_ok(mt_h5_write(file, "empty", MT_F32, 2, (int64_t[]){ 0, 4 }, NULL));
    assert_ok(mt_h5_write(file, "scalar", MT_F64, 0, NULL, &scalar));
    assert_ok(mt_h5_commit(&file));
    assert_verb(words("inspect", in_dir("any.h5"), ""), 0, "2 NOT FINITE");
    read_row("/a/b/x", "f32[2,3]", row);
    assert_true(row[0] == 1 && row[1] == 24 && row[2] == 5 && row[3] == 4);
    read_row("/bytes", "u8[5]", row);
    assert_true(row[1] == 5 && row[3] == 254);
    read_row("/scalar", "f64[]", row);
    assert_true(row[2] == 2.5 && row[3] == 2.5);
    assert_non_null(strstr(verb_output, "f32[0,4]"));
    assert_non_null(strstr(verb_output, "5 tensors, 49 bytes"));
}

/* What other programs write: the datasets that can be read are listed, nothing is called damaged.
 */
static void what_is_not_read_is_said(void **state)
{
    (void)state;
    const float x[2] = { 3, 4 };
    double row[4];
    mt_h5 *ours;
    assert_ok(mt_h5_create(&ours, in_dir("mixed.h5")));
    assert_ok(mt_h5_write(ours, "x", MT_F32, 1, (int64_t[]){ 2 }, x));
    assert_ok(mt_h5_commit(&ours));
    hid_t file = H5Fopen(in_dir("mixed.h5"), H5F_ACC_RDWR, H5P_DEFAULT);
    hid_t space = H5Screate(H5S_SCALAR), text = H5Tcopy(H5T_C_S1);
    hid_t dataset = H5Dcreate2(file, "a_text", text, space, H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    assert_true(file >= 0 && dataset >= 0);
    assert_true(H5Lcreate_soft("/nowhere", file, "link", H5P_DEFAULT, H5P_DEFAULT) >= 0);
    H5Dclose(dataset);
    H5Tclose(text);
    H5Sclose(space);
    H5Fclose(file);
    assert_verb(words("inspect", in_dir("mixed.h5"), ""), MT_EXIT_FILES,
                "input/output: 2 datasets are not read here; the first: '");
    assert_non_null(strstr(verb_output, "/a_text: its type is not one of"));
    read_row("/x", "f32[2]", row);
    assert_true(row[1] == 8 && row[2] == 5 && row[3] == 4);
}

/* A group that contains itself by a hard link. */
static void a_cycle_ends(void **state)
{
    (void)state;
    hid_t file = H5Fcreate(in_dir("cycle.h5"), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT);
    hid_t group = H5Gcreate2(file, "g", H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT);
    assert_true(file >= 0 && group >= 0);
    assert_true(H5Lcreate_hard(file, "g", group, "a", H5P_DEFAULT, H5P_DEFAULT) >= 0);
    assert_true(H5Lcreate_hard(file, "g", group, "b", H5P_DEFAULT, H5P_DEFAULT) >= 0);
    H5Gclose(group);
    H5Fclose(file);
    assert_verb(words("inspect", in_dir("cycle.h5"), ""), MT_EXIT_FILES, "groups deeper than 8");
}

static void a_corpus_and_a_model_directory_are_described(void **state)
{
    (void)state;
    mt_model_config c = small_model(true);
    double row[4];
    put_text(in_dir("text"), "In the beginning");
    char input[256];
    snprintf(input, sizeof input, "%s", in_dir("text"));
    const char *inputs[] = { input };
    mt_corpus_pack_result packed;
    assert_ok(mt_corpus_pack(&packed, &(mt_corpus_pack_args){ .inputs = inputs,
                                                              .input_count = 1,
                                                              .output = in_dir("corpus.h5") }));
    assert_verb(words("inspect", in_dir("corpus.h5"), ""), 0,
                "16 tokens of u8 in 1 document, vocabulary 256, largest token 116");
    make_checkpoint(in_dir("tied"), &c);
    assert_ok(mt_hf_export(in_dir("hf"), in_dir("tied"), 0, NULL));
    assert_verb(words("inspect", in_dir("hf"), ""), 0, "a Hugging Face directory");
    read_row("model.layers.0.mlp.experts.*.down_proj.weight", "f32[12,10]", row);
    assert_true(row[0] == 8);
    assert_null(strstr(verb_output, "lm_head"));
}

/* Types that are not read are listed all the same; FP8 is measured. */
static void types_of_others_are_listed(void **state)
{
    (void)state;
    static const char header[] =
        "{\"a\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,3],\"data_offsets\":[0,6]},"
        "\"b\":{\"dtype\":\"F8_E5M2\",\"shape\":[3],\"data_offsets\":[6,9]},"
        "\"c\":{\"dtype\":\"BOOL\",\"shape\":[3],\"data_offsets\":[9,12]},"
        "\"x\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[12,16]}}";
    const uint8_t codes[16] = { 0x40, 0xc4, 0x7f, 0x44, 0x44, 0x40, /* 2, -3, NaN, 3, 3, 2 */
                                0x42, 0x7c, 0xc4,                   /* 3, Inf, -4 */
                                1,    0,    1,    0,    0,    0,    0x40 };
    uint8_t file[8 + sizeof header - 1 + sizeof codes] = { (sizeof header - 1) & 255,
                                                           (sizeof header - 1) >> 8 };
    double row[4];
    memcpy(file + 8, header, sizeof header - 1);
    memcpy(file + 8 + sizeof header - 1, codes, sizeof codes);
    put_file(in_dir("others.safetensors"), file, sizeof file);
    assert_verb(words("inspect", in_dir("others.safetensors"), ""), 0, "4 tensors, 16 bytes");
    read_row("\na ", "F8_E4M3[2,3]", row);
    assert_true(row[1] == 6 && row[3] == 3 && row[2] > 5.9160 && row[2] < 5.9161); /* sqrt(35) */
    read_row("\nb ", "F8_E5M2[3]", row);
    assert_true(row[1] == 3 && row[2] == 5 && row[3] == 4);
    read_row("\nx ", "f32[1]", row);
    assert_true(row[2] == 2);
    assert_non_null(strstr(verb_output, "BOOL[3]"));
    assert_non_null(strstr(verb_output, "1 NOT FINITE"));
}

static void doctor_computes(void **state)
{
    (void)state;
    assert_verb("doctor", 0, "equals the published vectors");
    static const char *const said[] = { "processor",
                                        "kernels portable",
                                        "in use",
                                        "GEMM bf16",
                                        "of its limit",
                                        "subnormals",
                                        "hdf5 1.",
                                        "NCCL",
                                        "writes and reads back" };
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        if (!strstr(verb_output, said[i])) fail_msg("no '%s' in:\n%s", said[i], verb_output);
    assert_verb("doctor now", MT_EXIT_USAGE, "usage");
    setenv("MIXTAPE_KERNELS", "portable", 1);
    assert_verb("doctor", 0, "kernels portable   available, in use");
    setenv("MIXTAPE_KERNELS", "abacus", 1);
    assert_verb("doctor", MT_EXIT_USAGE, "abacus");
    unsetenv("MIXTAPE_KERNELS");
    assert_verb("doctor", 0, mt_comm_has("mpi") ? "mpirun -n N" : "MPI                not in");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_checkpoint_is_described),
        cmocka_unit_test(damage_is_found),
        cmocka_unit_test(any_hdf5_file_is_listed),
        cmocka_unit_test(what_is_not_read_is_said),
        cmocka_unit_test(a_cycle_ends),
        cmocka_unit_test(a_corpus_and_a_model_directory_are_described),
        cmocka_unit_test(types_of_others_are_listed),
        cmocka_unit_test(doctor_computes),
    };
    return cmocka_run_group_tests(tests, files_setup, files_teardown);
}
